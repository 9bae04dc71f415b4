"""The checkpoint's tensors: every released name with its shape and dtype, for any configuration.

`W x` in this package means `x @ W.T` with `W` stored `[out, in]`; no linear layer has a bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from .config import MXFP4_GROUP, Config

PREFIX = "language_model."
"""All text tensors of the multimodal checkpoint start with this."""


class TensorSpec(NamedTuple):
    """Shape and on-disk dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def expected_tensors(config: Config) -> dict[str, TensorSpec]:
    """Name to spec of every text tensor of such a checkpoint: 497,052 for the released configuration."""
    specs = dict(shell_tensors(config))
    for l in range(config.num_hidden_layers):
        specs.update(layer_tensors(config, l))
    return specs


def shell_tensors(config: Config) -> Iterator[tuple[str, TensorSpec]]:
    """The tensors outside the layers: embedding, output mix, last norm, head."""
    yield f"{PREFIX}model.embed_tokens.weight", _bf16(config.vocab_size, config.hidden_size)
    yield f"{PREFIX}model.norm.weight", _bf16(config.hidden_size)
    yield f"{PREFIX}model.output_attn_res_norm.weight", _bf16(config.hidden_size)
    yield f"{PREFIX}model.output_attn_res_proj.weight", _bf16(1, config.hidden_size)
    yield f"{PREFIX}lm_head.weight", _bf16(config.vocab_size, config.hidden_size)


def layer_prefix(l: int) -> str:
    """Prefix of the names of layer `l` (zero-based)."""
    return f"{PREFIX}model.layers.{l}."


def layer_tensors(config: Config, l: int) -> Iterator[tuple[str, TensorSpec]]:
    """The tensors of layer `l` (zero-based), with full names."""
    layer = layer_prefix(l)
    for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        yield f"{layer}{name}.weight", _bf16(config.hidden_size)
    for name in ("self_attention_res_proj", "mlp_res_proj"):
        yield f"{layer}{name}.weight", _bf16(1, config.hidden_size)
    attention = _kda(config) if config.is_kda(l) else _mla(config)
    for name, spec in attention:
        yield f"{layer}self_attn.{name}", spec
    ffn, module = (_moe(config), "block_sparse_moe") if config.is_moe(l) else (_dense(config), "mlp")
    for name, spec in ffn:
        yield f"{layer}{module}.{name}", spec


def padded_heads(heads: int) -> int:
    """Stored length of `A_log`: the head count padded with zeros to a multiple of 128."""
    return -(-heads // 128) * 128


def parameter_count(specs: Mapping[str, TensorSpec]) -> int:
    """Model parameters in these tensors: a packed byte holds two, a scale or a padding entry is none.

    `A_log`'s padding is counted, as an upper bound that is off by 32 per released KDA layer.
    """
    count = 0
    for name, spec in specs.items():
        if not name.endswith(".weight_scale"):
            count += math.prod(spec.shape) * (2 if name.endswith(".weight_packed") else 1)
    return count


def _kda(c: Config) -> Iterator[tuple[str, TensorSpec]]:
    linear, hidden = c.linear_attn_config, c.hidden_size
    heads, dim, width = linear.num_heads, linear.head_dim, linear.projection_size
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        yield f"{name}.weight", _bf16(width, hidden)
    yield "o_proj.weight", _bf16(hidden, width)
    yield "f_a_proj.weight", _bf16(dim, hidden)
    yield "f_b_proj.weight", _bf16(width, dim)
    yield "b_proj.weight", _bf16(heads, hidden)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield f"{name}.weight", _f32(width, 1, linear.short_conv_kernel_size)
    yield "A_log", _f32(padded_heads(heads))
    yield "dt_bias", _f32(width)
    yield "o_norm.weight", _f32(dim)


def _mla(c: Config) -> Iterator[tuple[str, TensorSpec]]:
    heads, hidden = c.num_attention_heads, c.hidden_size
    yield "q_a_proj.weight", _bf16(c.q_lora_rank, hidden)
    yield "q_a_layernorm.weight", _bf16(c.q_lora_rank)
    yield "q_b_proj.weight", _bf16(heads * c.qk_head_dim, c.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", _bf16(c.latent_cache_size, hidden)
    yield "kv_a_layernorm.weight", _bf16(c.kv_lora_rank)
    yield "kv_b_proj.weight", _bf16(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    yield "g_proj.weight", _bf16(heads * c.v_head_dim, hidden)
    yield "o_proj.weight", _bf16(hidden, heads * c.v_head_dim)


def _mlp(hidden: int, inner: int) -> Iterator[tuple[str, TensorSpec]]:
    yield "gate_proj.weight", _bf16(inner, hidden)
    yield "up_proj.weight", _bf16(inner, hidden)
    yield "down_proj.weight", _bf16(hidden, inner)


def _dense(c: Config) -> Iterator[tuple[str, TensorSpec]]:
    return _mlp(c.hidden_size, c.intermediate_size)


def _moe(c: Config) -> Iterator[tuple[str, TensorSpec]]:
    hidden, latent, inner = c.hidden_size, c.routed_expert_hidden_size, c.moe_intermediate_size
    yield "gate.weight", _bf16(c.num_experts, hidden)
    yield "gate.e_score_correction_bias", _f32(c.num_experts)
    yield "routed_expert_down_proj.weight", _bf16(latent, hidden)
    yield "routed_expert_norm.weight", _bf16(latent)
    yield "routed_expert_up_proj.weight", _bf16(hidden, latent)
    for name, spec in _mlp(hidden, c.shared_intermediate_size):
        yield f"shared_experts.{name}", spec
    into, out_of = _mxfp4(inner, latent), _mxfp4(latent, inner)
    for i in range(c.num_experts):
        for matrix, (packed, scale) in (("w1", into), ("w3", into), ("w2", out_of)):
            yield f"experts.{i}.{matrix}.weight_packed", packed
            yield f"experts.{i}.{matrix}.weight_scale", scale


def _mxfp4(out: int, columns: int) -> tuple[TensorSpec, TensorSpec]:
    """Two E2M1 codes per byte, and one E8M0 scale per group of columns."""
    return TensorSpec((out, columns // 2), torch.uint8), TensorSpec(
        (out, columns // MXFP4_GROUP), torch.uint8
    )


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.bfloat16)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.float32)
