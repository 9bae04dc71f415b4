"""AttnRes + RMSNorm: prefix add, optional bank write, mixture over up to 9 rows, and the norm that follows.

One launch does, for each of T <= 8 tokens (K3 technical report, block attention residuals):

    p      = bf16(p + delta)          or delta, where the block has just begun
    bank_w = p                        when the layer starts a block
    s_j    = (row_j . c) / sqrt(mean(row_j^2) + eps),   row = bank_0 .. bank_{m-1}, p,   c = res_norm * res_proj
    h      = sum_j softmax(s)_j row_j
    out    = bf16(h / sqrt(mean(h^2) + eps) * norm)

A cluster of 7 CTAs owns one token, each thread 8 of the 7168 columns. Everything that does not depend on the previous
grid is done before the dependency wait: the bank rows are read, their logits and the bank's part of the
mixture are formed. After the wait there is one exchange of four sums. The mean square of the mixture comes from these sums
(the square of a*m + e*p is a^2 m.m + 2ae m.p + e^2 p.p); where that sum cancels, the mixture is summed directly instead.

Rows are BF16 in memory, everything else is fp32 in registers; `out` is rounded once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from k3_audit.artifact.contract import Contract, Handoff, Launch, Param, Role

from ..sync import dependent_launch
from ..sync.cluster_exchange import ClusterExchange, warp_sum

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
        Param("prefix", "bf16", Role.STATE, "rw", ("T", "7168"), "running sum of the block, updated in place"),
        Param("bank", "bf16", Role.STABLE, "rw", ("T", "8", "7168"), "rows < bank_rows are read, row bank_write is written"),
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
            data="delta, prefix",
            producer="previous grid",
            consumer="all threads",
            via="grid_dependency",
            scope="gpu",
            note="griddepcontrol.wait stands before the first read of delta or prefix",
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


def _row(base: cute.Pointer, offset: Int64):
    """View of the 8 BF16 elements of `base` at `offset`, which is a multiple of 8."""
    return cute.make_tensor(base + cute.assume(offset, divby=VECTOR), cute.make_layout(VECTOR))


def _read(base: cute.Pointer, offset: Int64) -> list[Float32]:
    fragment = cute.make_rmem_tensor(VECTOR, BFloat16)
    cute.autovec_copy(_row(base, offset), fragment)
    return [Float32(fragment[i]) for i in range(VECTOR)]


def _write(base: cute.Pointer, offset: Int64, values: list[BFloat16]) -> None:
    fragment = cute.make_rmem_tensor(VECTOR, BFloat16)
    for i in range(VECTOR):
        fragment[i] = values[i]
    cute.autovec_copy(fragment, _row(base, offset))


def _dot(a: list[Float32], b: list[Float32]) -> Float32:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + x * y
    return total


def _rms(sum_sq: Float32) -> Float32:
    return cute.math.rsqrt(sum_sq * Float32(1.0 / HIDDEN) + Float32(EPS), fastmath=True)


def _exp(x: Float32) -> Float32:
    return cute.math.exp2(x * Float32(LOG2_E), fastmath=True)


def _cluster_dot(exchange: ClusterExchange, r: int, rank: Int32, warp: Int32, lane: Int32, h: list[Float32]) -> Float32:
    """h.h over the whole cluster, by round `r` of the exchange."""
    zero = Float32(0.0)
    exchange.push(r, rank, warp, lane, [warp_sum([_dot(h, h)])[0], zero, zero, zero])
    exchange.wait(r)
    return exchange.totals(r, lane, 1)[0]


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

    exchange = ClusterExchange(CTAS, THREADS // 32, (BANK_ROWS * 2 // 4, 1, 1))
    exchange.setup(tid)
    dependent_launch.trigger()

    # --- before the wait: weights, and bank rows that no running grid writes ---
    gamma, proj, weight = _read(res_norm, column), _read(res_proj, column), _read(norm, column)
    c = [x * y for x, y in zip(gamma, proj, strict=True)]
    rows = cute.make_rmem_tensor((BANK_ROWS, VECTOR), Float32)
    rows.fill(0.0)
    for j in cutlass.range_constexpr(BANK_ROWS):
        if j < bank_rows:
            values = _read(bank, bank_row + j * HIDDEN)
            for i in cutlass.range_constexpr(VECTOR):
                rows[j, i] = values[i]
    sums = []
    for j in cutlass.range_constexpr(BANK_ROWS):
        r = [rows[j, i] for i in range(VECTOR)]
        sums = sums + [_dot(r, r), _dot(r, c)]
    sums = warp_sum(sums)
    exchange.ready()
    exchange.push(0, rank, warp, lane, sums)
    exchange.wait(0)
    sums = exchange.totals(0, lane, 2 * BANK_ROWS)

    # Softmax over the bank alone; the prefix joins after the wait. Absent rows weigh exp(-inf) = 0.
    logits = cute.make_rmem_tensor(BANK_ROWS, Float32)
    top = -Float32.inf
    for j in cutlass.range_constexpr(BANK_ROWS):
        logits[j] = -Float32.inf
        if j < bank_rows:
            logits[j] = sums[2 * j + 1] * _rms(sums[2 * j])
        top = cute.arch.fmax(top, logits[j])
    mixture = cute.make_rmem_tensor(VECTOR, Float32)
    mixture.fill(0.0)
    mass = Float32(0.0)
    for j in cutlass.range_constexpr(BANK_ROWS):
        e = Float32(0.0)
        if j < bank_rows:
            e = _exp(logits[j] - top)
        mass = mass + e
        for i in cutlass.range_constexpr(VECTOR):
            mixture[i] = mixture[i] + e * rows[j, i]
    m = [mixture[i] for i in range(VECTOR)]
    mm = _dot(m, m)

    # --- after the wait ---
    dependent_launch.wait()
    d = _read(delta, row)
    old = cute.make_rmem_tensor(VECTOR, Float32)
    old.fill(0.0)
    if has_prefix != 0:
        values = _read(prefix, row)
        for i in cutlass.range_constexpr(VECTOR):
            old[i] = values[i]
    rounded = [BFloat16(old[i] + d[i]) for i in range(VECTOR)]
    p = [Float32(x) for x in rounded]
    exchange.push(1, rank, warp, lane, warp_sum([_dot(p, p), _dot(p, c), _dot(m, p), mm]))
    _write(prefix, row, rounded)
    if bank_write >= 0:
        _write(bank, bank_row + Int64(bank_write) * HIDDEN, rounded)
    exchange.wait(1)
    pp, pc, mp, mm = exchange.totals(1, lane, 4)

    logit = pc * _rms(pp)
    both = cute.arch.fmax(top, logit)
    a, e = _exp(top - both), _exp(logit - both)
    mass = a * mass + e
    # Normalising the unnormalised mixture: eps scales with the square of the softmax denominator.
    h = [a * x + e * y for x, y in zip(m, p, strict=True)]
    positive = a * a * mm + e * e * pp
    square = positive + Float32(2.0) * a * e * mp
    if square < Float32(CANCELLED) * positive:
        square = _cluster_dot(exchange, 2, rank, warp, lane, h)
    scale = cute.math.rsqrt(square * Float32(1.0 / HIDDEN) + Float32(EPS) * mass * mass, fastmath=True)
    _write(out, row, [BFloat16(x * scale * w) for x, w in zip(h, weight, strict=True)])


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
