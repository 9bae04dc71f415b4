"""The configuration and the table of tensors: released layout, layer kinds, inventory, errors."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.reference import Config, config_names, expected_tensors, load_config
from k3_audit.reference.tensors import padded_heads, parameter_count

pytestmark = pytest.mark.unit

REAL = load_config("kimi-k3")
SPECS = expected_tensors(REAL)
ALL = [load_config(name) for name in config_names()]


def tiny_json() -> dict:
    return load_config("tiny").to_json()


@pytest.mark.parametrize("name", config_names())
def test_json_round_trip(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_json()))
    assert Config.from_json(path) == config


def test_unknown_fields_are_ignored_and_optional_ones_have_defaults() -> None:
    document = tiny_json()
    document["text_config"]["rope_theta"] = 10000.0
    document["vision_config"] = {}
    del document["text_config"]["quantization_config"]
    del document["text_config"]["initializer_range"]
    assert Config.from_json(document) == load_config("tiny")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"nope.*kimi-k3.*tiny"):
        load_config("nope")


# Layer kinds of the released model.


def test_attention_kind_of_each_layer() -> None:
    mla = [l for l in range(93) if not REAL.is_kda(l)]
    assert mla == [*range(3, 88, 4), 91, 92]
    assert 93 - len(mla) == 69


def test_dense_and_moe_layers() -> None:
    assert [l for l in range(93) if not REAL.is_moe(l)] == [0]


def test_released_block_starts_are_kda_layers() -> None:
    starts = [l for l in range(93) if REAL.is_block_start(l)]
    assert starts == [0, 12, 24, 36, 48, 60, 72, 84]
    assert all(REAL.is_kda(l) for l in starts)


@pytest.mark.parametrize("config", ALL, ids=config_names())
@pytest.mark.parametrize("block", [1, 2, 3, 5, 12, 200])
def test_bank_rows_match_the_bookkeeping_of_a_forward_pass(config: Config, block: int) -> None:
    config = replace(config, attn_res_block_size=block)
    rows = 0
    for l in range(config.num_hidden_layers):
        assert config.bank_rows_before_attention(l) == rows
        rows += config.is_block_start(l)
        assert config.bank_rows_before_ffn(l) == rows
    assert config.bank_rows_at_output == rows


def test_released_output_mix_reads_nine_rows() -> None:
    assert REAL.bank_rows_at_output + 1 == 9


@pytest.mark.parametrize("config", ALL, ids=config_names())
def test_reduced_configs_keep_the_structure(config: Config) -> None:
    last = config.num_hidden_layers - 1
    assert config.num_hidden_layers % 4 == 1
    assert not config.is_kda(last) and not config.is_kda(last - 1)
    assert config.is_kda(0) and not config.is_moe(0) and all(config.is_moe(l) for l in range(1, last + 1))
    assert config.num_hidden_layers % config.attn_res_block_size != 0
    assert config.routed_expert_hidden_size < config.hidden_size
    assert config.shared_intermediate_size == 2 * config.moe_intermediate_size
    assert config.qk_head_dim != config.v_head_dim
    assert config.vocab_size >= 256


def test_rank_config_is_one_eighth_of_the_released_model() -> None:
    rank = load_config("rank")
    assert rank.bank_rows_at_output == 7
    for field in ("num_attention_heads", "moe_intermediate_size", "intermediate_size"):
        assert getattr(rank, field) * 8 == getattr(REAL, field)
    assert rank.linear_attn_config.num_heads * 8 == REAL.linear_attn_config.num_heads
    for field in ("hidden_size", "q_lora_rank", "latent_cache_size", "routed_expert_hidden_size"):
        assert getattr(rank, field) == getattr(REAL, field)


# Tensors.


def test_released_inventory() -> None:
    assert len(SPECS) == 497_052
    routed = {name: spec for name, spec in SPECS.items() if ".experts." in name}
    assert len(routed) == 92 * 896 * 6
    assert round(parameter_count(SPECS) / 1e12, 4) == 2.7795
    assert round(parameter_count(routed) / 1e9, 2) == 2722.74
    one = {name: spec for name, spec in routed.items() if ".layers.1." in name and ".experts.5." in name}
    assert sum(torch.Size(spec.shape).numel() for spec in one.values()) == 17_547_264


def test_released_shapes_and_dtypes() -> None:
    layer = "language_model.model.layers."
    for name, shape, dtype in [
        ("language_model.lm_head.weight", (163840, 7168), torch.bfloat16),
        (f"{layer}0.self_attn.A_log", (128,), torch.float32),
        (f"{layer}0.self_attn.f_b_proj.weight", (12288, 128), torch.bfloat16),
        (f"{layer}0.self_attn.v_conv1d.weight", (12288, 1, 4), torch.float32),
        (f"{layer}0.mlp.down_proj.weight", (7168, 33792), torch.bfloat16),
        (f"{layer}3.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), torch.bfloat16),
        (f"{layer}3.self_attn.kv_b_proj.weight", (24576, 512), torch.bfloat16),
        (f"{layer}3.self_attn.q_b_proj.weight", (18432, 1536), torch.bfloat16),
        (f"{layer}92.block_sparse_moe.gate.e_score_correction_bias", (896,), torch.float32),
        (f"{layer}92.block_sparse_moe.experts.895.w2.weight_packed", (3584, 1536), torch.uint8),
        (f"{layer}92.block_sparse_moe.experts.895.w2.weight_scale", (3584, 96), torch.uint8),
        (f"{layer}92.block_sparse_moe.experts.895.w1.weight_packed", (3072, 1792), torch.uint8),
        (f"{layer}92.block_sparse_moe.experts.895.w3.weight_scale", (3072, 112), torch.uint8),
        (f"{layer}92.mlp_res_proj.weight", (1, 7168), torch.bfloat16),
    ]:
        assert SPECS[name] == (shape, dtype), name
    assert f"{layer}0.block_sparse_moe.gate.weight" not in SPECS
    assert f"{layer}3.self_attn.A_log" not in SPECS


def test_a_log_is_padded_to_a_multiple_of_128() -> None:
    assert [padded_heads(n) for n in (1, 12, 96, 128, 129)] == [128, 128, 128, 128, 256]


# Errors name the field.


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("hidden_size",), None, r"text_config\.hidden_size is missing"),
        (("hidden_size",), "7168", r"text_config\.hidden_size must be int"),
        (("hidden_size",), 0, r"text_config\.hidden_size must be positive"),
        (("moe_renormalize",), 1, r"text_config\.moe_renormalize must be bool"),
        (("rms_norm_eps",), True, r"text_config\.rms_norm_eps must be float"),
        (("rms_norm_eps",), -1.0, r"text_config\.rms_norm_eps must be positive"),
        (("hidden_act",), "silu", r"text_config\.hidden_act must be 'situ'"),
        (("tie_word_embeddings",), True, r"text_config\.tie_word_embeddings must be False"),
        (("num_experts_per_token",), 9, r"text_config\.num_experts_per_token must not exceed"),
        (("moe_intermediate_size",), 40, r"text_config\.moe_intermediate_size must be a multiple"),
        (("num_key_value_heads",), 2, r"text_config\.num_key_value_heads must equal"),
        (("eos_token_id",), 259, r"text_config\.eos_token_id must lie in the vocabulary"),
        (("linear_attn_config",), None, r"text_config\.linear_attn_config is missing"),
        (("linear_attn_config", "kda_layers"), [0, 1, 2], r"linear_attn_config\.kda_layers and full"),
        (("linear_attn_config", "kda_layers"), "1,2", r"linear_attn_config\.kda_layers must be a list"),
        (("linear_attn_config", "gate_lower_bound"), 5.0, r"gate_lower_bound must be negative"),
        (("linear_attn_config", "use_full_rank_gate"), False, r"use_full_rank_gate must be true"),
        (("quantization_config", "format"), "nvfp4", r"quantization_config\.format"),
        (
            ("quantization_config", "config_groups"),
            {"g": {"weights": {"num_bits": 4}}},
            r"groups\.g\.weights",
        ),
    ],
)
def test_bad_fields_are_named(path: tuple[str, ...], value: object, message: str) -> None:
    document = copy.deepcopy(tiny_json())
    place = document["text_config"]
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        Config.from_json(document)


def test_zero_based_layer_lists_are_refused() -> None:
    document = tiny_json()
    linear = document["text_config"]["linear_attn_config"]
    for name in ("kda_layers", "full_attn_layers"):
        linear[name] = [index - 1 for index in linear[name]]
    with pytest.raises(ValueError, match="1-based"):
        Config.from_json(document)


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff{")
    with pytest.raises(ValueError, match="not a JSON file"):
        Config.from_json(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_damaged_documents_raise_value_error_or_read(data: st.DataObject) -> None:
    document = tiny_json()
    place = document
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        config = Config.from_json(document)
    except ValueError:
        return
    assert isinstance(config, Config)
