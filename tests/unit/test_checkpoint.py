"""The checkpoint on disk: bitwise round trips, and every class of defect named in one error."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.reference import Config, Layer, Model, expected_tensors, load_config, synthesise
from k3_audit.reference.checkpoint import (
    INDEX_FILE,
    Checkpoint,
    CheckpointError,
    Problem,
    write_checkpoint,
)
from k3_audit.reference.inspect import inspect
from k3_audit.reference.tensors import layer_tensors, padded_heads
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = pytest.mark.unit
torch.set_num_threads(1)

P = "language_model."
L0, L1 = f"{P}model.layers.0.", f"{P}model.layers.1."
PACKED = f"{L1}block_sparse_moe.experts.0.w1.weight_packed"
SCALE = f"{L1}block_sparse_moe.experts.0.w1.weight_scale"


def small(layers: int = 3, **changes: Any) -> Config:
    """The tiny configuration cut to a few layers, MLA last."""
    tiny = load_config("tiny")
    linear = dataclasses.replace(
        tiny.linear_attn_config, kda_layers=tuple(range(1, layers)), full_attn_layers=(layers,)
    )
    return dataclasses.replace(
        tiny, **{"num_hidden_layers": layers, "linear_attn_config": linear, "num_experts": 2, **changes}
    )


CONFIG = small()
TENSORS = synthesise(CONFIG)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "k3"
    write_checkpoint(path, CONFIG, TENSORS, shard_bytes=100_000)
    return path


@pytest.fixture
def copy(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "k3"))


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def edit(path: Path, change: Callable[[dict[str, Tensor]], None], holding: str) -> str:
    """Change the tensors of the shard that holds a tensor, and keep the index in step; returns the file."""
    index = json.loads((path / INDEX_FILE).read_text())
    file = index["weight_map"][holding]
    tensors = {n: t.clone() for n, t in load_file(path / file).items()}
    change(tensors)
    save_file(tensors, path / file)
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != file} | dict.fromkeys(
        tensors, file
    )
    (path / INDEX_FILE).write_text(json.dumps(index))
    return file


def problems(path: Path, **options: Any) -> list[Problem]:
    with pytest.raises(CheckpointError) as error:
        Checkpoint(path, **options)
    return list(error.value.problems)


# -- round trips


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Reduced configurations of any structure that the tensor table knows."""
    layers = draw(st.integers(1, 3))
    mla = tuple(l for l in range(1, layers + 1) if draw(st.booleans()))
    heads = draw(st.sampled_from([1, 2, 130]))
    tiny = load_config("tiny")
    linear = dataclasses.replace(
        tiny.linear_attn_config,
        num_heads=heads,
        head_dim=draw(st.integers(1, 3)),
        full_attn_layers=mla,
        kda_layers=tuple(l for l in range(1, layers + 1) if l not in mla),
    )
    few = st.integers(1, 2)
    return dataclasses.replace(
        tiny,
        num_hidden_layers=layers,
        linear_attn_config=linear,
        hidden_size=draw(st.integers(1, 5)),
        first_k_dense_replace=draw(st.integers(0, layers)),
        num_experts=2,
        routed_expert_hidden_size=32 * draw(few),
        moe_intermediate_size=32 * draw(few),
        intermediate_size=draw(few),
        num_attention_heads=(n := draw(few)),
        num_key_value_heads=n,
        q_lora_rank=draw(few),
        kv_lora_rank=draw(few),
        qk_nope_head_dim=draw(few),
        qk_rope_head_dim=draw(few),
        v_head_dim=draw(few),
    )


@settings(max_examples=25, deadline=None)
@given(configs(), st.sampled_from([1_500, 7_000, 30_000, 10**9]))
def test_what_was_written_is_read_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, config: Config, shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("round") / "k3"
    tensors = synthesise(config)
    write_checkpoint(folder, config, tensors, shard_bytes)
    read = Checkpoint(folder, values=True)
    assert read.config == config
    assert read.keys() == tensors.keys() == expected_tensors(config).keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and bits(read[name]) == bits(tensor), name
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= shard_bytes
    shutil.rmtree(folder)


def test_the_released_layout(pristine: Path) -> None:
    index = json.loads((pristine / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    assert json.loads((pristine / "config.json").read_text())["text_config"]["num_experts"] == 2


def test_the_model_computes_the_same_from_disk(pristine: Path) -> None:
    tokens = [256, *b"from disk"]
    logits = []
    for tensors in (TENSORS, Checkpoint(pristine)):
        model = Model(CONFIG, tensors)
        logits.append(model.prefill(tokens, model.empty_cache()))
    assert torch.equal(*logits)


def test_a_layer_is_enough_for_a_layer(pristine: Path) -> None:
    checkpoint = Checkpoint(pristine)
    layer = checkpoint.read_layer(1)
    assert layer.keys() == dict(layer_tensors(CONFIG, 1)).keys()
    Layer(CONFIG, 1, layer)
    assert len(checkpoint.read_shell()) == 5
    assert checkpoint.keys() - layer.keys() - checkpoint.read_shell().keys()


def test_only_the_shards_in_scope_have_to_be_there(copy: Path) -> None:
    index = json.loads((copy / INDEX_FILE).read_text())["weight_map"]
    needed = {f for n, f in index.items() if n.startswith(L1)}
    assert needed < set(index.values())
    for file in set(index.values()) - needed:
        (copy / file).unlink()
    assert bits(Checkpoint(copy, layers=[1]).read_layer(1)[PACKED]) == bits(TENSORS[PACKED])
    assert {p.kind for p in problems(copy)} == {"file"}
    with pytest.raises(ValueError, match="layer 0 is not among those opened"):
        Checkpoint(copy, layers=[1]).read_layer(0)
    with pytest.raises(ValueError, match=r"no layer 3: the layers are 0\.\.2"):
        Checkpoint(copy, layers=[3])


def test_reading_is_lazy(copy: Path) -> None:
    """Opening reads no weight: a byte that changes in the file afterwards shows in the tensor."""
    checkpoint = Checkpoint(copy)
    file = copy / json.loads((copy / INDEX_FILE).read_text())["weight_map"][PACKED]
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    at = 8 + length + json.loads(data[8 : 8 + length])[PACKED]["data_offsets"][0]
    assert data[at] == bits(TENSORS[PACKED])[0]
    with open(file, "r+b") as f:
        f.seek(at)
        f.write(bytes([data[at] ^ 1]))
    assert bits(checkpoint[PACKED])[0] == data[at] ^ 1


def test_a_shard_size_below_any_tensor_gives_one_tensor_a_shard(tmp_path: Path) -> None:
    config = small(1, num_experts=2)
    write_checkpoint(tmp_path / "k3", config, tensors := synthesise(config), shard_bytes=1)
    assert len(list((tmp_path / "k3").glob("*.safetensors"))) == len(tensors)
    assert Checkpoint(tmp_path / "k3").keys() == tensors.keys()


# -- dtypes


def test_small_tensors_are_widened_and_never_narrowed(copy: Path) -> None:
    stored = {
        f"{L0}self_attn.o_norm.weight": torch.bfloat16,
        f"{L0}self_attn.A_log": torch.float16,
        f"{L0}input_layernorm.weight": torch.float32,
        f"{L0}mlp_res_proj.weight": torch.float32,
    }
    for name, dtype in stored.items():
        edit(copy, lambda t, n=name, d=dtype: t.update({n: t[n].to(d)}), name)
    checkpoint = Checkpoint(copy)
    for name, dtype in stored.items():
        assert checkpoint[name].dtype == torch.float32, name
        assert torch.equal(checkpoint[name], TENSORS[name].to(dtype).float())


@pytest.mark.parametrize(
    ("name", "dtype", "spelt"),
    [
        (f"{L0}self_attn.A_log", torch.float64, "F64, expected F32"),
        (f"{L0}self_attn.q_proj.weight", torch.float32, "F32, expected BF16"),
        (f"{L0}self_attn.q_proj.weight", torch.float8_e4m3fn, "F8_E4M3, expected BF16"),
        (PACKED, torch.int8, "I8, expected U8"),
        (f"{P}model.norm.weight", torch.float16, "F16, expected BF16"),
    ],
)
def test_wrong_dtypes_are_named(copy: Path, name: str, dtype: torch.dtype, spelt: str) -> None:
    edit(copy, lambda t: t.update({name: t[name].to(dtype)}), name)
    assert problems(copy) == [Problem("dtype", name, spelt)]


# -- defects, each alone


def test_missing_extra_misshapen(copy: Path) -> None:
    gone, bent = f"{L0}self_attn.dt_bias", f"{L0}self_attn.o_norm.weight"
    extra, layer9 = f"{L0}self_attn.rotary.inv_freq", f"{P}model.layers.9.input_layernorm.weight"
    edit(copy, lambda t: t.pop(gone), gone)
    edit(copy, lambda t: t.update({bent: torch.ones(1, 16)}), bent)
    edit(
        copy,
        lambda t: t.update({extra: torch.ones(2), layer9: torch.ones(2), "loose.weight": torch.ones(1)}),
        bent,
    )
    found = problems(copy)
    assert {(p.kind, p.name) for p in found} == {
        ("extra", layer9),
        ("extra", "loose.weight"),
        ("extra", extra),
        ("missing", gone),
        ("shape", bent),
    }
    assert len(found) == 5
    assert next(p for p in found if p.kind == "shape").detail == "[1, 16], expected [16]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [f"{L0}self_attn.q_proj.weight", f"{L0}self_attn.dt_bias"])
def test_values_that_are_not_finite_are_named(copy: Path, name: str, value: float) -> None:
    edit(copy, lambda t: t[name].view(-1)[5:7].fill_(value), name)
    checkpoint = Checkpoint(copy)
    with pytest.raises(CheckpointError) as error:
        checkpoint.read_layer(0)
    kind = "NaN" if value != value else "Inf"
    at = [5] if name.endswith("dt_bias") else [0, 5]
    assert list(error.value.problems) == [Problem("value", name, f"2 {kind}, the first at {at}")]
    assert problems(copy, values=True) == list(error.value.problems)
    assert name in checkpoint.read_layer(0, values=False), "a person may want to look at it"
    checkpoint.read_layer(1)


def test_a_scale_of_255_is_nan(copy: Path) -> None:
    edit(copy, lambda t: t[SCALE][2, 1].fill_(255), SCALE)
    assert problems(copy, values=True) == [Problem("value", SCALE, "1 NaN, the first at [2, 1]")]


def test_padding_of_a_log(copy: Path) -> None:
    name = f"{L0}self_attn.A_log"
    assert TENSORS[name].shape == (padded_heads(4),) == (128,)
    edit(copy, lambda t: t[name][127:].fill_(0.5), name)
    assert problems(copy, values=True) == [Problem("value", name, "the padding after 4 heads is not zero")]


def test_unpacked_experts_are_named_as_such(copy: Path) -> None:
    plain = PACKED.removesuffix("_packed")

    def unpack(tensors: dict[str, Tensor]) -> None:
        tensors[plain] = torch.zeros(96, 64, dtype=torch.bfloat16)
        del tensors[PACKED], tensors[SCALE]

    edit(copy, unpack, PACKED)
    found = problems(copy)
    assert Problem("missing", PACKED, "stored unpacked") in found
    assert {(p.kind, p.name) for p in found} == {("missing", PACKED), ("missing", SCALE), ("extra", plain)}


def test_swapped_nibbles_change_known_values(copy: Path) -> None:
    """Statistics cannot show a swap, so a known row decides: the low nibble is the even column."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(4)[:64]
    row = codes[0::2] | codes[1::2] << 4

    def known(tensors: dict[str, Tensor]) -> None:
        tensors[PACKED][0], tensors[SCALE][0] = row, torch.tensor([127, 128], dtype=torch.uint8)

    edit(copy, known, PACKED)
    weights = Layer(CONFIG, 1, Checkpoint(copy).read_layer(1)).weights
    decoded = weights["block_sparse_moe.experts.0.w1.weight"][0]
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    truth = torch.tensor(e2m1 * 2 + [2 * v for v in e2m1 * 2], dtype=torch.float64)
    assert torch.equal(decoded, truth)
    swap = row >> 4 | row << 4
    edit(copy, lambda t: t[PACKED][0].copy_(swap), PACKED)
    weights = Layer(CONFIG, 1, Checkpoint(copy).read_layer(1)).weights
    assert not torch.equal(weights["block_sparse_moe.experts.0.w1.weight"][0], truth)


# -- damaged files


def test_a_shard_that_is_not_there(copy: Path) -> None:
    file = json.loads((copy / INDEX_FILE).read_text())["weight_map"][PACKED]
    (copy / file).unlink()
    (problem,) = problems(copy)
    assert (problem.kind, problem.name) == ("file", file)
    assert problem.detail.startswith("not there; ") and problem.detail.endswith("tensors are in it")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[: len(data) // 2],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"\xff" + data[9:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: data.replace(b'"BF16"', b'"BF61"', 1),
        lambda data: data.replace(b'"shape":[', b'"shape":[9', 1),
    ],
    ids=["cut", "longer", "half", "stub", "empty", "length", "bytes", "list", "dtype", "shape"],
)
def test_damaged_shards(copy: Path, damage: Callable[[bytes], bytes]) -> None:
    file = json.loads((copy / INDEX_FILE).read_text())["weight_map"][f"{P}model.norm.weight"]
    data = (copy / file).read_bytes()
    assert damage(data) != data
    (copy / file).write_bytes(damage(data))
    (problem,) = problems(copy)
    assert (problem.kind, problem.name) == ("file", file)
    assert "damaged or cut short" in problem.detail


def test_the_index_names_tensors_that_its_shard_lacks(copy: Path) -> None:
    index = json.loads((copy / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = f"{P}lm_head.weight"
    wrong = next(f for f in files if f != index["weight_map"][name])
    index["weight_map"][name] = wrong
    (copy / INDEX_FILE).write_text(json.dumps(index))
    assert problems(copy) == [Problem("missing", name, f"the index says that it is in {wrong}")]


def test_a_tensor_that_the_index_lacks(copy: Path) -> None:
    index = json.loads((copy / INDEX_FILE).read_text())
    name = f"{L0}self_attn.dt_bias"
    file = index["weight_map"].pop(name)
    (copy / INDEX_FILE).write_text(json.dumps(index))
    assert problems(copy) == [
        Problem("extra", name, f"in {file} but not in the index"),
        Problem("missing", name),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../b"}}',
        "\udcff",
    ],
)
def test_a_bad_index(copy: Path, text: str) -> None:
    (copy / INDEX_FILE).write_bytes(text.encode(errors="surrogateescape"))
    (problem,) = problems(copy)
    assert (problem.kind, problem.name) == ("file", INDEX_FILE)


def test_no_index_no_config_no_folder(copy: Path) -> None:
    (copy / INDEX_FILE).unlink()
    assert [p.name for p in problems(copy)] == [INDEX_FILE]
    (copy / "config.json").write_text("{}")
    assert "text_config is missing" in str(problems(copy)[0])
    (copy / "config.json").unlink()
    assert "No such file" in str(problems(copy)[0])
    assert "No such file" in str(problems(copy / "nowhere")[0])


def test_another_configuration_is_not_accepted(pristine: Path) -> None:
    found = problems(pristine, config=small(num_experts=4, intermediate_size=97))
    assert {p.kind for p in found} == {"missing", "shape"}


def test_all_defects_are_in_one_error(copy: Path) -> None:
    norm, scale = f"{P}model.norm.weight", SCALE
    edit(copy, lambda t: t[scale][0, 0].fill_(255), scale)
    edit(copy, lambda t: t.update({norm: torch.full((129,), float("nan"), dtype=torch.float64)}), norm)
    file = json.loads((copy / INDEX_FILE).read_text())["weight_map"][
        f"{P}model.layers.2.block_sparse_moe.experts.1.w2.weight_scale"
    ]
    (copy / file).write_bytes(b"damaged")
    edit(copy, lambda t: t.pop(f"{L0}self_attn.A_log"), f"{L0}self_attn.A_log")
    with pytest.raises(CheckpointError) as error:
        Checkpoint(copy, values=True)
    message = str(error.value)
    assert {p.kind for p in error.value.problems} == {"file", "missing", "shape", "dtype", "value"}
    for expected in (file, "A_log", "[129], expected [128]", "F64, expected BF16", "129 NaN", "1 NaN"):
        assert expected in message


def test_long_lists_are_capped_with_their_count(copy: Path) -> None:
    names = list(dict(layer_tensors(CONFIG, 0)))
    for name in names:
        index = json.loads((copy / INDEX_FILE).read_text())
        index["weight_map"].pop(name)
        (copy / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        Checkpoint(copy)
    assert sum(p.kind == "missing" for p in error.value.problems) == len(names) > 8
    assert f"missing tensors [{len(names)}]: " in str(error.value)
    assert f"and {len(names) - 8} more" in str(error.value)
    assert len(str(error.value).splitlines()) <= 7


# -- vision


def test_vision_tensors_are_counted_and_ignored(tmp_path: Path) -> None:
    vision = {"vision_tower.a.weight": torch.ones(3), "mm_projector.b": torch.full((2,), float("nan"))}
    write_checkpoint(tmp_path / "k3", CONFIG, {**TENSORS, **vision}, shard_bytes=500_000)
    checkpoint = Checkpoint(tmp_path / "k3", values=True)
    assert checkpoint.vision_tensors == 2
    assert checkpoint.keys() == TENSORS.keys()


# -- writing


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    name = f"{L0}self_attn.dt_bias"
    for bad in (
        {n: t for n, t in TENSORS.items() if n != name},
        {**TENSORS, name: TENSORS[name][1:]},
        {**TENSORS, name: TENSORS[name].double()},
        {**TENSORS, name: TENSORS[name] / 0},
        {**TENSORS, f"{P}more": TENSORS[name]},
    ):
        with pytest.raises(CheckpointError) as error:
            write_checkpoint(tmp_path / "k3", CONFIG, bad)
        assert len(error.value.problems) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(copy: Path) -> None:
    before = sorted((p.name, p.stat().st_mtime_ns) for p in copy.iterdir())
    with pytest.raises(CheckpointError, match="it exists already"):
        write_checkpoint(copy, CONFIG, TENSORS)
    assert sorted((p.name, p.stat().st_mtime_ns) for p in copy.iterdir()) == before
    assert [p.name for p in copy.parent.iterdir()] == ["k3"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """A limit on the size of a file stands for a full disk: the largest shard finds no room."""
    largest = max(t.nbytes for t in TENSORS.values())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written: .*File too large"):
            write_checkpoint(tmp_path / "k3", CONFIG, TENSORS, shard_bytes=largest)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_shards_must_have_room(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard_bytes"):
        write_checkpoint(tmp_path / "k3", CONFIG, TENSORS, shard_bytes=0)


# -- inspect


def test_inspect_totals_and_layers(pristine: Path) -> None:
    data = inspect(pristine)
    json.dumps(data, allow_nan=False)
    assert data["totals"]["tensors"] == data["totals"]["expected_tensors"] == len(TENSORS)
    assert data["totals"]["bytes"] == sum(t.nbytes for t in TENSORS.values())
    assert data["totals"]["packed_matrices"] == 2 * 2 * 3
    assert data["problems"] == [] and "tensors" not in data
    assert [(l["attention"], l["ffn"]) for l in data["layers"]] == [
        ("KDA", "dense"),
        ("KDA", "latent MoE"),
        ("MLA", "latent MoE"),
    ]
    assert sum(l["bytes"] for l in data["layers"]) + data["totals"]["shell_bytes"] == data["totals"]["bytes"]


def test_inspect_a_layer(pristine: Path) -> None:
    data = inspect(pristine, layer=1)
    rows = {row["name"]: row for row in data["tensors"]}
    name = "self_attn.q_proj.weight"
    q = TENSORS[L1 + name].double()
    assert (rows[name]["shape"], rows[name]["dtype"], rows[name]["packed"]) == (list(q.shape), "BF16", False)
    assert rows[name]["min"] == float(q.min()) and rows[name]["max"] == float(q.max())
    assert rows[name]["rms"] == pytest.approx(float(q.square().mean().sqrt()), rel=1e-12)
    experts = rows["block_sparse_moe.experts.*.w1.weight"]
    values = torch.stack(
        [Layer(CONFIG, 1, TENSORS).weights[f"block_sparse_moe.experts.{i}.w1.weight"] for i in range(2)]
    )
    assert (experts["count"], experts["shape"], experts["dtype"]) == (2, [96, 64], "MXFP4")
    assert experts["packed"] and experts["bytes"] == 2 * (96 * 32 + 96 * 2)
    assert experts["max"] == float(values.max())
    assert experts["rms"] == pytest.approx(float(values.square().mean().sqrt()), rel=1e-12)
    assert sum(row["bytes"] for row in data["tensors"]) == data["layers"][1]["bytes"]
    assert "rms" not in inspect(pristine, layer=1, values=False)["tensors"][0]


def test_inspect_goes_on_where_a_checkpoint_is_damaged(copy: Path) -> None:
    name = f"{L0}self_attn.dt_bias"
    edit(copy, lambda t: t[name][3:5].copy_(torch.tensor([float("nan"), float("inf")])), name)
    edit(copy, lambda t: t.update({SCALE: torch.tensor(3, dtype=torch.uint8)}), SCALE)
    data = inspect(copy, layer=0)
    json.dumps(data, allow_nan=False)
    row = next(r for r in data["tensors"] if r["name"] == "self_attn.dt_bias")
    finite = torch.cat([TENSORS[name][:3], TENSORS[name][5:]])
    assert (row["not_finite"], row["min"], row["max"]) == (2, float(finite.min()), float(finite.max()))
    assert [p["kind"] for p in data["problems"]] == ["shape"]
    json.dumps(inspect(copy, layer=1), allow_nan=False)
    with pytest.raises(ValueError, match="no layer 7"):
        inspect(copy, layer=7)
