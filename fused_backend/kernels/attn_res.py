"""AttnRes + RMSNorm: prefix add, optional bank write, mixture over up to 9 rows, and the norm that follows.

One launch does, for each of T <= 8 tokens (K3 technical report, block attention residuals):

    p      = bf16(p + delta)          or delta, where the block has just begun
    bank_w = p                        when the layer starts a block
    s_j    = (row_j . c) / sqrt(mean(row_j^2) + eps),   row = bank_0 .. bank_{m-1}, p,   c = res_norm * res_proj
    h      = sum_j softmax(s)_j row_j
    out    = bf16(h / sqrt(mean(h^2) + eps) * norm)

A cluster of 7 CTAs owns one token, each thread 8 of the 7168 columns. Everything that does not depend on the previous
grid is done before the dependency wait: prefix and bank rows are read, the bank's logits and its part of the mixture
are formed. After the wait there is one exchange of four sums. The mean square of the mixture comes from these sums (the
square of a*m + e*p is a^2 m.m + 2ae m.p + e^2 p.p); where they cancel, the mixture is summed directly instead.

Rows are BF16 in memory, everything else is fp32 in registers; `out` is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from k3_audit.artifact.contract import Contract, Handoff, Launch, Param, Role

from ..bf16 import narrow, widen
from ..sync import dependent_launch
from ..sync.cluster_exchange import ClusterExchange, broadcast, warp_sums

HIDDEN = 7168  # hidden_size of the released config
BANK_ROWS = 8  # num_hidden_layers / attn_res_block_size, rounded up
EPS = 1e-5  # rms_norm_eps of the released config
VECTOR = 8  # BF16 elements of one 16-byte access
CTAS = 7
THREADS = HIDDEN // VECTOR // CTAS
LOG2_E = 1.4426950408889634

# The expanded square loses about log2(1 / CANCELLED) of fp32's 24 bits before the direct sum takes over: 16 remain,
# and the reciprocal square root halves the relative error of what is left.
CANCELLED = 2.0**-8

CONTRACT = Contract(
    kernel="attn_res",
    params=(
        Param("delta", "bf16", Role.UPSTREAM, "r", ("T", "7168"), "output of the previous sublayer"),
        Param(
            "prefix", "bf16", Role.STABLE, "rw", ("T", "7168"), "running sum of the block, updated in place"
        ),
        Param(
            "bank",
            "bf16",
            Role.STABLE,
            "rw",
            ("T", "8", "7168"),
            "rows < bank_rows are read, row bank_write is written",
        ),
        Param("res_norm", "bf16", Role.WEIGHT, "r", ("7168",)),
        Param("res_proj", "bf16", Role.WEIGHT, "r", ("7168",)),
        Param("norm", "bf16", Role.WEIGHT, "r", ("7168",)),
        Param("out", "bf16", Role.OUTPUT, "w", ("T", "7168")),
        Param("bank_rows", "i32", note="0..8"),
        Param("bank_write", "i32", note="row to store the updated prefix in, or -1"),
        Param("has_prefix", "i32", note="0 where the block has just begun and the prefix is empty"),
    ),
    launch=Launch(
        block=(THREADS, 1, 1),
        cluster=(CTAS, 1, 1),
        grid=(str(CTAS), "T", "1"),
        pdl=True,
        coresident_ctas=CTAS,
        stable_distance=2,
    ),
    handoffs=(
        Handoff(
            "upstream",
            data="delta",
            producer="previous grid",
            consumer="all threads",
            via="grid_dependency",
            scope="gpu",
            note="griddepcontrol.wait stands before the first read of delta",
        ),
        Handoff(
            "partial_sums",
            data="row dot products",
            producer="one lane per peer in every warp",
            consumer="all warps of the cluster",
            via="mbarrier",
            scope="cluster",
            note="st.async complete_tx to try_wait.acquire.cluster; one mbarrier and one buffer per round",
        ),
    ),
)


def _words(base: cute.Pointer, offset: Int64):
    """View of the 8 BF16 elements of `base` at `offset`, which is a multiple of 8, as four 32-bit words."""
    words = cute.recast_ptr(base + cute.assume(offset, divby=VECTOR), dtype=Int32)
    return cute.make_tensor(words, cute.make_layout(VECTOR // 2))


@cute.jit
def _read(base: cute.Pointer, offset: Int64, wanted=True):
    """The 8 elements at `offset` as fp32; zeros, and no access, where not `wanted`."""
    fragment = cute.make_rmem_tensor(VECTOR // 2, Int32)
    fragment.fill(0)
    if wanted:
        cute.autovec_copy(_words(base, offset), fragment)
    return widen([fragment[i] for i in range(VECTOR // 2)])


def _write(base: cute.Pointer, offset: Int64, words: list[Int32]) -> None:
    fragment = cute.make_rmem_tensor(VECTOR // 2, Int32)
    for i in range(VECTOR // 2):
        fragment[i] = words[i]
    cute.autovec_copy(fragment, _words(base, offset))


def _dot(a: list[Float32], b: list[Float32]) -> Float32:
    """Two chains, then their sum: half the latency of one."""
    even, odd = a[0] * b[0], a[1] * b[1]
    for i in range(2, len(a), 2):
        even, odd = even + a[i] * b[i], odd + a[i + 1] * b[i + 1]
    return even + odd


def _rms(sum_sq: Float32) -> Float32:
    return cute.math.rsqrt(sum_sq * Float32(1.0 / HIDDEN) + Float32(EPS), fastmath=True)


def _exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def _over_rows(value: Float32, combine: Callable[[Float32, Float32], Float32]) -> Float32:
    """`value` of all bank rows combined, where lane l holds row l % BANK_ROWS, in every lane."""
    shift = BANK_ROWS
    while shift > 1:
        shift //= 2
        value = combine(value, cute.arch.shuffle_sync_bfly(value, shift))
    return value


def _cluster_dot(
    exchange: ClusterExchange, r: int, rank: Int32, warp: Int32, lane: Int32, h: list[Float32]
) -> Float32:
    """h.h over the whole cluster, by round `r` of the exchange."""
    exchange.push(exchange.targets(r, rank, warp, lane), warp_sums([_dot(h, h)] * exchange.counts[r], lane))
    exchange.wait(r)
    return broadcast(exchange.total(r, lane), 0)


@cute.kernel
def kernel(
    delta: cute.Pointer,
    prefix: cute.Pointer,
    bank: cute.Pointer,
    res_norm: cute.Pointer,
    res_proj: cute.Pointer,
    norm: cute.Pointer,
    out: cute.Pointer,
    bank_rows: Int32,
    bank_write: Int32,
    has_prefix: Int32,
):
    tid, _, _ = cute.arch.thread_idx()
    rank, token, _ = cute.arch.block_idx()
    lane, warp = tid % 32, tid // 32
    column = Int64((rank * THREADS + tid) * VECTOR)
    row = Int64(token) * HIDDEN + column
    bank_row = Int64(token) * (BANK_ROWS * HIDDEN) + column

    exchange = ClusterExchange(CTAS, THREADS // 32, (2 * BANK_ROWS, 4, 4))
    exchange.setup(tid)
    dependent_launch.trigger()

    # --- before the wait: weights, and what no running grid writes ---
    gamma, proj, weight = _read(res_norm, column), _read(res_proj, column), _read(norm, column)
    c = [x * y for x, y in zip(gamma, proj, strict=True)]
    old = _read(prefix, row, has_prefix != 0)
    rows = [_read(bank, bank_row + j * HIDDEN, j < bank_rows) for j in range(BANK_ROWS)]
    sums = warp_sums([_dot(r, r) for r in rows] + [_dot(r, c) for r in rows], lane)
    exchange.ready()
    exchange.push(exchange.targets(0, rank, warp, lane), sums)
    exchange.wait(0)
    total = exchange.total(0, lane)

    # Softmax over the bank alone, row l % 8 in lane l, logits in base 2; the prefix joins after the wait.
    # Absent rows weigh nothing.
    j = lane % BANK_ROWS
    logit = broadcast(total, j + BANK_ROWS) * Float32(LOG2_E) * _rms(broadcast(total, j))
    if j >= bank_rows:
        logit = -Float32.inf
    top = _over_rows(logit, cute.arch.fmax)
    e = Float32(0.0)
    if j < bank_rows:
        e = _exp2(logit - top)
    mass = _over_rows(e, lambda x, y: x + y)
    m = [Float32(0.0)] * VECTOR
    for lane_of_row, values in enumerate(rows):
        e_j = broadcast(e, lane_of_row)
        m = [x + e_j * y for x, y in zip(m, values, strict=True)]
    mm = _dot(m, m)
    targets = exchange.targets(1, rank, warp, lane)

    # --- after the wait ---
    dependent_launch.wait(after=mm)
    d = _read(delta, row)
    rounded = narrow([x + y for x, y in zip(old, d, strict=True)])
    p = widen(rounded)
    exchange.push(targets, warp_sums([_dot(p, p), _dot(p, c), _dot(m, p), mm], lane))
    _write(prefix, row, rounded)
    if bank_write >= 0:
        _write(bank, bank_row + Int64(bank_write) * HIDDEN, rounded)
    exchange.wait(1)
    total = exchange.total(1, lane)
    pp, pc, mp, mm = [broadcast(total, i) for i in range(4)]

    logit = pc * Float32(LOG2_E) * _rms(pp)
    both = cute.arch.fmax(top, logit)
    a, e = _exp2(top - both), _exp2(logit - both)
    mass = a * mass + e
    # Normalising the unnormalised mixture: eps scales with the square of the softmax denominator.
    h = [a * x + e * y for x, y in zip(m, p, strict=True)]
    positive = a * a * mm + e * e * pp
    square = positive + Float32(2.0) * a * e * mp
    if square < Float32(CANCELLED) * positive:
        square = _cluster_dot(exchange, 2, rank, warp, lane, h)
    scale = cute.math.rsqrt(square * Float32(1.0 / HIDDEN) + Float32(EPS) * mass * mass, fastmath=True)
    _write(out, row, narrow([x * scale * w for x, w in zip(h, weight, strict=True)]))


@cute.jit
def launch(
    delta: cute.Pointer,
    prefix: cute.Pointer,
    bank: cute.Pointer,
    res_norm: cute.Pointer,
    res_proj: cute.Pointer,
    norm: cute.Pointer,
    out: cute.Pointer,
    bank_rows: Int32,
    bank_write: Int32,
    has_prefix: Int32,
    tokens: Int32,
    stream,
):
    """Host function for the tracer: only its kernel is kept, launches go through the artifact."""
    kernel(delta, prefix, bank, res_norm, res_proj, norm, out, bank_rows, bank_write, has_prefix).launch(
        grid=(CTAS, tokens, 1), block=(THREADS, 1, 1), cluster=(CTAS, 1, 1), stream=stream, use_pdl=True
    )
