"""Recipes for the specialised Kimi K3 decode that the vllm 0.33.0 wheel ships as CuTe DSL source.

A recipe is a name, a function of the package that compiles kernels, and its arguments. The arguments are what
the package's own `prepared.py` and `*_runtime.py` modules pass for this model at tensor parallelism 8 and 16,
for batches 1 to 8, a few padded graph batches, and verify steps of up to 8 tokens a request; the row and slot
counts follow from the released configuration (hidden 7168, 96 heads, 896 experts, latent 3584).

Two packages beside it are built too because the decode runs on them or replaces them: the RecoverSSM
verify kernels of the same wheel, and the split-K GEMM in flashinfer that the wheel's `gemm/splitk.py`
derives from and says it corrects.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .cutedsl import Code, empty_packages, recording, stub
from .wheels import Wheel, unpack

WHEEL = Wheel("vllm", "0.33.0", "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa", 336)
# the release that vllm 0.33.0 requires; its split-K GEMM is both imported and built
FLASHINFER = Wheel(
    "flashinfer-python",
    "0.7.2.post1",
    "bfdc18b9e1e4d8d0730fe4343dc0e284cd0c160086de80f99888bc4867922d49",
    62,
)
WHEELS = (WHEEL, FLASHINFER)
ARCHITECTURES = ("sm_90a", "sm_100a")
PRELOAD = ("torch", "cutlass.cute")

MODEL = "vllm.models.kimi_k3.nvidia"
DECODE = f"{MODEL}.specialized_decode.cutedsl"
_SPLITK = "flashinfer.gemm.kernels"


@dataclass(frozen=True)
class Recipe:
    """`call` is "module:function"; arguments are plain values, with `layout`, `dtype` and ARCH to be filled in."""

    name: str
    call: str
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()


ARCH = "{arch}"  # an argument that stands for the architecture
_SMS = 152  # of a GB300, on which the package's schedules were tuned; its grids follow from it
_PAGE = 64  # rows of a page of the MLA cache
_EXPERTS = 896


def layout(dtype: str, *shape: int, stride: tuple[int, ...] | None = None) -> dict[str, Any]:
    """A tensor argument: the (shape, stride, dtype) triple that the package caches compilations by."""
    rows = [1]
    for extent in reversed(shape[1:]):
        rows.insert(0, rows[0] * extent)
    return {"layout": [list(shape), list(stride or rows), dtype]}


def dtype(name: str) -> dict[str, str]:
    return {"dtype": name}


# -- the table


def recipes() -> list[Recipe]:
    """All recipes, by name."""
    found = [*_shared_by_ranks(), *_flashinfer(), *_recoverssm()]
    for tp in (8, 16):
        found += [*_attention(tp), *_output(tp), *_mixture(tp), *_small_batch(tp)]
    return sorted(found, key=lambda r: r.name)


def _shared_by_ranks() -> Iterator[Recipe]:
    consumer = "attn_res.prepared:compile_consumer"
    # (saved rows, has delta, row to write, final norm, mailbox slots, capacity, architecture, aux stream)
    for bank in (1, 4, 8):
        yield Recipe(f"attn_res.rows{bank}", consumer, (bank, True, -1, False, 0, 0, ARCH))
        yield Recipe(f"attn_res.rows{bank}.mailbox", consumer, (bank, True, -1, False, 1, 64, ARCH))
    yield Recipe("attn_res.first", consumer, (0, False, 0, False, 0, 0, ARCH))
    yield Recipe("attn_res.rows4.write", consumer, (4, True, 4, False, 1, 64, ARCH))
    yield Recipe("attn_res.final", consumer, (8, True, -1, True, 1, 64, ARCH))
    yield Recipe("attn_res.rows4.aux", consumer, (4, True, -1, False, 1, 64, ARCH, True))
    for ids in ("int32", "int64"):
        yield Recipe(f"embedding.{ids}", "common.embedding:compile_gather", (dtype(ids), 163840 // 8, ARCH))
    # (ranges, grid, shared memory carve-out, device)
    yield Recipe("prefetch.urgent", "common.prefetch:compile_kernel", (3, 32, 100, 0))
    yield Recipe("prefetch.next", "common.prefetch:compile_kernel", (7, 32, None, 0))
    # (tile M, tile N, split K, stages): input projections, dense MLP, shared expert
    for tactic in (
        *((128, 8, 2, 6), (128, 16, 2, 6), (64, 64, 1, 6), (64, 8, 4, 8), (64, 16, 2, 10), (64, 64, 2, 5)),
        *((128, 8, 1, 6), (128, 32, 1, 5), (64, 64, 1, 5), (128, 8, 1, 3)),
    ):
        name = "x".join(map(str, tactic))
        yield Recipe(f"gemm.{name}", "gemm.projection:compile_projection", (tactic, dtype("bfloat16"), ARCH))
    for tactic in ((128, 8, 4, 6), (64, 8, 4, 8), (64, 32, 4, 8)):
        name = "x".join(map(str, tactic))
        yield Recipe(
            f"gemm.{name}.f32", "gemm.projection:compile_projection", (tactic, dtype("float32"), ARCH)
        )
    for hidden, padded in ((4224, 4224), (2112, 2176)):
        yield Recipe(f"moe.dense.{hidden}", "moe.dense:_compile_activation", (hidden, padded, ARCH))
    yield Recipe("moe.plan.b16", "moe.experts_runtime:compile_plan", (16, 0))


def _attention(tp: int) -> Iterator[Recipe]:
    heads = 96 // tp
    for batch in (1, 2, 4, 8, 16, 64):
        mode = 0 if tp == 16 else 1 if batch == 1 else 2 if batch <= 8 else 0
        yield _kda(tp, batch, 1, mode)
    for requests, q in ((1, 4), (1, 8), (2, 4), (8, 8)):
        yield _kda(tp, requests, q, int(tp == 8))
    # the projection row: 2112 query and KV columns, then the output gate
    pitch = 2112 + heads * 128
    rows = (
        layout("bfloat16", 1536),
        layout("bfloat16", 512),
        layout("bfloat16", heads * 192, 1536),
        layout("bfloat16", heads, 128, 512, stride=(256 * 512, 512, 1)),  # both views of kv_b_proj,
        layout("bfloat16", heads, 512, 128, stride=(256 * 512, 1, 512)),  # ... latent axis contiguous
        layout("float32", 1),
        layout("float32", 1),
        layout("uint8", 1024, _PAGE, 576),
    )
    core = "mla.prepared:compile_core"
    # (rows, heads, pitch, layouts, device, context parallel size, SMs, tokens a request)
    for batch in (1, 2, 4, 8, 16, 64):
        yield Recipe(f"mla.tp{tp}.b{batch}", core, (batch, heads, pitch, rows, 0, 0, _SMS, 1))
    for requests, q in ((1, 4), (1, 8), (8, 8)):
        arguments = (requests * q, heads, pitch, rows, 0, 0, _SMS, q)
        yield Recipe(f"mla.tp{tp}.b{requests}.q{q}", core, arguments)
    for batch, q in ((1, 1), (8, 1), (64, 1), (8, 4)):
        arguments = (batch, heads, pitch, rows, 0, tp, _SMS, q)
        yield Recipe(f"mla.dcp{tp}.b{batch // q}.q{q}", core, arguments)


def _kda(tp: int, requests: int, q: int, mode: int) -> Recipe:
    heads, batch = 96 // tp, requests * q
    d = heads * 128
    pitch = {8: 6288, 16: 3216}[tp]  # q|k|v, output gate, F_A, beta, padded to 16

    def columns(width: int) -> dict[str, Any]:
        return layout("bfloat16", batch, width, stride=(pitch, 1))

    window, slots = 4 + q - 1 - 1, 64  # rows of the convolution state; state slots
    operands = [
        columns(3 * d),
        layout("bfloat16", 3, 4, d),
        layout("float32", d),
        layout("bfloat16", slots, 3 * d, window, stride=(window * 3 * d, 1, 3 * d)),
        *(columns(128), columns(heads)),
        *(layout("float32", heads), layout("float32", d)),
        layout("int32", requests, q) if q > 1 else layout("int32", batch),
        layout("float32", slots, heads, 128, 128),
        layout("bfloat16", batch, d),
        columns(d),
        layout("float32", 128),
        layout("bfloat16", d, 128),
    ]
    if q > 1:
        operands.append(layout("int32", requests))
    name = f"kda.tp{tp}.b{requests}" + (f".q{q}" if q > 1 else "")
    # (layouts, heads, gate mode, convolution bias, device, tokens a request)
    return Recipe(name, "kda.prepared:executable", (tuple(operands), heads, mode, False, 0, q))


def _output(tp: int) -> Iterator[Recipe]:
    call, k = "oproj.prepared:compile_oproj", 12288 // tp
    # (kind, K, batch, ranks, saved rows, has delta, MLA layer, publishes to the MoE front, capacity, two-shot)
    for mla in (False, True):
        for batch in (1, 2, 4, 8, 16, 64):
            if mla and batch == 2:
                continue
            fused = tp == 16 and (not mla or batch >= 5) and batch <= 8
            twoshot = batch > (32 if tp == 8 else 16)
            front = batch <= (1 if tp == 8 else 2)
            for kind in ("fused",) if fused else ("producer", "consumer"):
                publishes = front and kind != "producer"
                name = f"oproj.{kind}.tp{tp}.b{batch}" + (".mla" if mla else "")
                arguments = (kind, k, batch, tp, 4, True, mla, publishes, 64, twoshot)
                yield Recipe(name, call, arguments)
    yield Recipe(
        f"oproj.producer_umma.tp{tp}.b16",
        call,
        ("producer_umma", k, 16, tp, 4, True, False, False, 64, False),
    )


def _mixture(tp: int) -> Iterator[Recipe]:
    hidden, shard = 6144 // tp, 3584 // tp
    valid = 896 // tp  # router rows of a rank, padded to 16 in the packed front matrix
    split = -(-valid // 16) * 16
    n = split + shard
    for batch in (1, 4, 8, 16, 64):
        planned = batch > 8
        ks = 4 if batch <= 4 else 16
        # (batch, shared width, renormalise, roles, device, polled, writes the plan)
        route = (batch, hidden, True, (True, True, False), 0, True, planned)
        yield Recipe(f"moe.route.tp{tp}.b{batch}", "moe.front:compile_route", route)
        yield Recipe(
            f"moe.front.tp{tp}.b{batch}", "moe.front:compile_publish", (n, split, valid, batch, 0, ks)
        )
        yield _experts(tp, batch)
    situ = (4, hidden, True, (False, False, True), 0)
    yield Recipe(f"moe.situ.tp{tp}.b4", "moe.front:compile_route", situ)
    for batch in (16, 32):
        early = tp == 8 and batch == 16
        grid = min(_SMS, _SMS - 4) if tp == 8 else _SMS
        arguments = (tp, _EXPERTS, batch, grid, 0, early)
        yield Recipe(f"moe.group.tp{tp}.b{batch}", "moe.experts_runtime:compile_group", arguments)
    # (ranks, batch, device, gate half only, front geometry)
    yield Recipe(f"moe.shared.tp{tp}.b16", "moe.shared:compile_shared", (tp, 16, 0, True))
    yield Recipe(f"moe.shared.fused.tp{tp}.b16", "moe.shared:compile_shared", (tp, 16, 0))
    merged = (tp, 64, 0, True, (n, split, valid, 3584 + 2 * 896))
    yield Recipe(f"moe.shared.merged.tp{tp}.b64", "moe.shared:compile_shared", merged)
    for batch, sms in ((16, 4), (64, 2)):
        yield Recipe(f"moe.down.tp{tp}.b{batch}", "moe.shared:compile_down", (tp, batch, 0, sms))
    # (ranks, batch, device, mode, trigger, early, tcgen05)
    for batch in (1, 4, 8, 16, 64):
        published = batch > (4 if tp == 8 else 8)
        mode = "front"
        if published:
            mode = "twoshot" if tp == 16 and batch > 32 else "publish"
        umma = batch > (8 if tp == 8 else 32)
        tail = (tp, batch, 0, mode, 2, batch > 8, umma and published)
        yield Recipe(f"moe.tail.{mode}.tp{tp}.b{batch}", "moe.tail_runtime:compile_tail", tail)
        if published:
            yield Recipe(f"moe.tail.push.tp{tp}.b{batch}", "moe.tail_runtime:compile_push", (batch, 0, tp))


def _experts(tp: int, batch: int) -> Recipe:
    grid = 152 if tp == 16 else {1: 136, 4: 148, 8: 136}.get(batch, 152)
    if batch > 8:  # SMs left to the shared expert's down rows
        grid = min(grid, _SMS - (4 if batch == 16 else 2))
    published = batch > (4 if tp == 8 else 8)
    publish: bool | str = "twoshot" if tp == 16 and batch > 32 else published
    # (ranks, experts, batch, grid, device, publish, streamed, pregrouped, stealing)
    arguments = (tp, _EXPERTS, batch, grid, 0, publish, 4 <= batch <= 8, 8 < batch <= 32, batch > 8)
    return Recipe(f"moe.experts.tp{tp}.b{batch}", "moe.experts_runtime:compile_experts", arguments)


def _small_batch(tp: int) -> Iterator[Recipe]:
    call, device = "moe.small_batch.chain:_compile", 0
    head = (
        layout("bfloat16", 896, 7168),
        layout("float32", 896),
        layout("bfloat16", 2, 1, 4, 7168),
        layout("uint32", 256),
    )
    w, s, h2 = layout("bfloat16", 3, 8, 16), layout("bfloat16", 3, 8, 7168), layout("bfloat16", 2, 8, 3584)
    w13, w2 = (layout("uint8", _EXPERTS * n) for n in _scale_bytes(tp))
    if tp == 8:
        xmoe, hg = head[2], layout("uint32", 6144)
        front: tuple[Any, ...] = (
            *head,
            *(layout("uint32", 7168), layout("int32", 16), w, layout("bfloat16", 448, 7168), h2),
            *(layout("bfloat16", 3584), layout("bfloat16", 1536, 7168), hg),
        )
        grid = (("grid", _SMS - 8), ("renorm", True))
        yield Recipe("moe.small_batch.front.tp8.b1", call, ("front", front, device), grid)
        shared = (xmoe, layout("bfloat16", 7168, 768), layout("float32", 131072), hg, s)
        yield Recipe(
            "moe.small_batch.shared.tp8.b1", call, ("shared", shared, device), (("grid", _SMS - 96),)
        )
        routed: tuple[Any, ...] = (
            layout("bfloat16", 3584),
            layout("int32", 16),
            layout("uint8", 3, 128),
            w13,
            w2,
        )
        routed += (layout("bfloat16", 16, 3584), layout("int32", 1))
        yield Recipe("moe.small_batch.experts.tp8.b1", call, ("experts_tp8", routed, device))
        yield Recipe("moe.small_batch.tables.tp8", call, ("tables", (layout("float32", 131072),), device))
        yield Recipe(
            "moe.tail.front_poll.tp8.b1", "moe.tail_runtime:compile_tail", (8, 1, 0, "front_poll", 3)
        )
        return
    for b in (1, 2):
        front = (
            *head,
            *(layout("uint32", 2 * b * 896 * 2), layout("int32", b * 16), w),
            *(layout("bfloat16", 224, 7168), h2, layout("bfloat16", 768, 7168)),
            *(layout("uint32", 2 * b * 768), layout("bfloat16", 7168, 384), s, layout("int32", _SMS + 16)),
        )
        grid = (("grid", _SMS - 7 * b), ("renorm", True))
        yield Recipe(f"moe.small_batch.front.tp16.b{b}", call, ("front16", front, device, b), grid)
        routed = (layout("bfloat16", b * 3584), layout("int32", b * 16), layout("uint8", 2, 128), w13, w2)
        routed += (layout("bfloat16", b * 16, 3584),)
        yield Recipe(f"moe.small_batch.experts.tp16.b{b}", call, ("experts_tp16", routed, device, b))
        yield Recipe(
            f"moe.tail.front_poll.tp16.b{b}", "moe.tail_runtime:compile_tail", (16, b, 0, "front_poll", 2)
        )
    yield Recipe(
        "moe.small_batch.probe.cluster2", "moe.small_batch.front_tp16:_compile_probe", (0, 2, 2 * _SMS)
    )


def _scale_bytes(tp: int) -> tuple[int, int]:
    """Scale bytes of one expert's w13 and w2 shards, rows and columns padded as the package stores them."""
    return {8: (768 * 112, 3584 * 12), 16: (512 * 112, 3584 * 8)}[tp]


def _recoverssm() -> Iterator[Recipe]:
    verify, commit = (
        f"{MODEL}.recoverssm.kernels:_compile_verify",
        f"{MODEL}.recoverssm.kernels:_compile_commit",
    )
    for tp in (8, 16):
        heads = 96 // tp
        for window in (4, 8):
            # (heads, tokens, architecture, CTAs, warp specialised, convolution state dim first, its dtype)
            for specialised, per_sm in ((False, 5), (True, 3)):
                kind = "ws" if specialised else "plain"
                arguments = (
                    *(heads, window, ARCH, per_sm * _SMS, specialised, specialised),
                    dtype("bfloat16"),
                )
                yield Recipe(f"recoverssm.verify.{kind}.tp{tp}.q{window}", verify, arguments)
        yield Recipe(f"recoverssm.commit.tp{tp}.q8", commit, (heads, 8, ARCH, dtype("float32"), True))


def _flashinfer() -> Iterator[Recipe]:
    for tactic in ((128, 8, 2, 6), (64, 8, 4, 8), (128, 8, 1, 6)):
        name = "x".join(map(str, tactic))
        yield Recipe(f"flashinfer.splitk.{name}", f"{__name__}:_compile_flashinfer", (tactic,))


# -- how to run one


def prepare() -> None:
    """Fetch what the builds need, once. Raises CaptureError as `unpack`."""
    unpack(WHEEL, ["vllm/models/kimi_k3/"])
    unpack(FLASHINFER, ["flashinfer/gemm/kernels/dense_bf16_gemm_sm100_splitk"])


def build(name: str, arch: str) -> list[Code]:
    """Compile one recipe for one architecture; some functions of the package compile two kernels.

    Raises KeyError for an unknown name, CaptureError when a wheel cannot be had, and whatever the compiler
    raises.
    """
    recipe = {r.name: r for r in recipes()}[name]
    root = _install()
    module, function = recipe.call.split(":")
    if not module.startswith(("vllm.", __name__)):
        module = f"{DECODE}.{module}"
    call = getattr(importlib.import_module(module), function)
    arguments = [_resolve(a, arch) for a in recipe.arguments]
    for line_info in (True, False):
        with tempfile.TemporaryDirectory() as scratch:
            try:
                with recording(arch, scratch, root, line_info=line_info) as built:
                    call(*arguments, **dict(recipe.keywords))
                break
            except Exception as e:
                # Where an inline assembly leaves its last statement open, the line directive after it is an error.
                if not line_info or "'.loc'" not in str(e):
                    raise
    return built


def prepared(module: str) -> ModuleType:
    """A module of the decode package, e.g. "attn_res.prepared". Raises CaptureError as `unpack`."""
    _install()
    return importlib.import_module(f"{DECODE}.{module}")


def _install() -> Path:
    """Make the package importable: empty parents, stubs for the few names of the rest. Returns its root."""
    root = unpack(WHEEL, ["vllm/models/kimi_k3/"])
    empty_packages(root, DECODE, f"{MODEL}.ops.cute_dsl.latent_moe_tail", f"{MODEL}.recoverssm")
    other = unpack(FLASHINFER, ["flashinfer/gemm/kernels/dense_bf16_gemm_sm100_splitk"])
    empty_packages(other, _SPLITK)
    stub("vllm.distributed", get_tp_group=None)
    stub("vllm.platforms", current_platform=None)
    stub("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0)
    # Sets an attribute of the loaded kernel: needs a device, changes no code.
    host = importlib.import_module(f"{DECODE}.common.host")
    vars(host)["prepare_shared_carveout"] = lambda code, *_: code
    return root


def _resolve(value: Any, arch: str) -> Any:
    import torch

    if value == ARCH:
        return arch
    if isinstance(value, dict) and "dtype" in value:
        return getattr(torch, value["dtype"])
    if isinstance(value, dict):
        shape, stride, kind = value["layout"]
        return tuple(shape), tuple(stride), getattr(torch, kind)
    if isinstance(value, tuple):
        return tuple(_resolve(v, arch) for v in value)
    return value


def _compile_flashinfer(tactic: tuple[int, ...]) -> None:
    """flashinfer's kernel over the tensors that vllm's derivative takes: [N, K] weights, [M, K] input."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    source = importlib.import_module(f"{_SPLITK}.dense_bf16_gemm_sm100_splitk")

    def matrix(leading: int) -> Any:
        shape = tuple(cute.sym_int() for _ in range(3))
        stride = (1, cute.sym_int(64), 0) if leading == 0 else (cute.sym_int(64), 1, 0)
        return make_fake_tensor(cutlass.BFloat16, shape, stride, assumed_align=16)

    y = matrix(0)
    kernel = source.SplitKDenseGemmKernel(tactic=source.SplitKTactic(*tactic), use_pdl=True, has_bias=False)
    cute.experimental.compile(kernel, matrix(1), matrix(1), y, y, make_fake_stream())
