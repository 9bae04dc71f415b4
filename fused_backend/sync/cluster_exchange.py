"""All-to-all of a few fp32 partial sums between the CTAs of a cluster, through distributed shared memory.

Every warp of every CTA pushes one 16-byte vector into a slot of its own in every CTA of the cluster; the push
itself signals the receiver's mbarrier by transaction bytes, so data and flag cannot be reordered. Each round has
an mbarrier and a buffer of its own and is used once per launch: no phase is ever reused.

Soundness note, edge by edge
    1. init -> remote push.   Thread 0 initialises its CTA's mbarriers, arms each with the bytes of one round, and
       executes `fence.mbarrier_init.release.cluster`. All threads then `barrier.cluster.arrive` and, before their
       first push or wait, `barrier.cluster.wait`: no CTA touches a peer's mbarrier before its owner armed it.
    2. push -> read.          `st.async` is a weak store whose completion is a `complete_tx` with release semantics at
       cluster scope on the receiver's mbarrier. The phase completes when the owner's one arrival and all bytes are
       in. `try_wait.acquire.cluster` that returns true therefore sees every pushed vector. `.cta` would be too
       narrow: the completing party runs in another CTA.
    3. read -> exit.          A CTA leaves only after it has observed all rounds that are sent to it, so no peer
       can still be writing to its shared memory when it exits. The rounds that a launch runs are the same in every
       CTA of a cluster, because the decision depends only on sums that all of them hold bit for bit.
    4. Order of summation.    Slots are summed in slot order, not in order of arrival: all CTAs, and all runs, get the
       same bits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .ptx import ordering

_VECTOR_BYTES = 16


class ClusterExchange:
    """`rounds` one-shot exchanges between `ctas` CTAs of `warps` warps each.

    `vectors[r]` is how many 16-byte vectors a warp sends in round r. Construct at trace time inside the kernel,
    call :meth:`setup` in all threads, then :meth:`ready` before the first :meth:`push`.
    """

    def __init__(self, ctas: int, warps: int, vectors: tuple[int, ...]):
        if ctas * warps > 32:
            raise ValueError(f"{ctas} CTAs of {warps} warps: a round holds at most 32 slots, one per lane of the reader")
        self.ctas, self.warps, self.vectors = ctas, warps, vectors
        self.slots = ctas * warps
        self.buffers = [cute.arch.alloc_smem(Float32, self.slots * 4 * v, 16) for v in vectors]
        self.barriers = cute.arch.alloc_smem(Int64, len(vectors), 8)

    def setup(self, tid: Int32) -> None:
        """Thread 0 initialises and arms the mbarriers; all threads announce it to the cluster."""
        _setup(self.barriers, tuple(self.slots * v * _VECTOR_BYTES for v in self.vectors), tid)

    def ready(self) -> None:
        """Return when every CTA of the cluster has armed its mbarriers."""
        ordering("barrier.cluster.wait.acquire.aligned;")

    def push(self, r: int, rank: Int32, warp: Int32, lane: Int32, values: list[Float32]) -> None:
        """Lane p < ctas sends this warp's `values` (4 per vector, the same in all lanes) to CTA p of the cluster."""
        _push(self.buffers[r], self.barriers + r, self.ctas, self.warps, self.vectors[r], rank, warp, lane, values)

    def wait(self, r: int) -> None:
        """Return when all vectors of round `r` have arrived in this CTA and are visible to this thread."""
        ordering(
            "{\n.reg .pred done;\nWAIT:\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0;\n"
            "@!done bra WAIT;\n}",
            "r",
            ((self.barriers + r).toint(),),
        )

    def totals(self, r: int, lane: Int32, count: int) -> list[Float32]:
        """Sums over all slots of the first `count` values of round `r`: the same bits in every lane of the cluster."""
        return _totals(self.buffers[r], self.slots, self.vectors[r], lane, count)


@cute.jit
def _setup(barriers: cute.Pointer, transaction_bytes: cutlass.Constexpr, tid: Int32):
    if tid == 0:
        for r in cutlass.range_constexpr(len(transaction_bytes)):
            ordering("mbarrier.init.shared::cta.b64 [$0], 1;", "r", ((barriers + r).toint(),))
            ordering(
                "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;",
                "r,r",
                ((barriers + r).toint(), Int32(transaction_bytes[r])),
            )
        ordering("fence.mbarrier_init.release.cluster;")
    # relaxed: the fence above already released the only writes that peers must see
    ordering("barrier.cluster.arrive.relaxed.aligned;")


@cute.jit
def _push(
    buffer: cute.Pointer,
    barrier: cute.Pointer,
    ctas: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    vectors: cutlass.Constexpr,
    rank: Int32,
    warp: Int32,
    lane: Int32,
    values: list,
):
    if lane < ctas:
        slot = (rank * warps + warp) * vectors * 4
        for v in cutlass.range_constexpr(vectors):
            ordering(
                "{\n.reg .b32 data, flag;\n"
                "mapa.shared::cluster.u32 data, $0, $2;\nmapa.shared::cluster.u32 flag, $1, $2;\n"
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [data], {$3, $4, $5, $6}, [flag];\n}",
                "r,r,r,f,f,f,f",
                ((buffer + slot + 4 * v).toint(), barrier.toint(), lane, *values[4 * v : 4 * v + 4]),
            )


@cute.jit
def _totals(
    buffer: cute.Pointer,
    slots: cutlass.Constexpr,
    vectors: cutlass.Constexpr,
    lane: Int32,
    count: cutlass.Constexpr,
):
    words = cute.make_rmem_tensor(4 * vectors, Float32)
    words.fill(0.0)
    if lane < slots:
        row = cute.make_tensor(buffer + lane * (4 * vectors), cute.make_layout(4 * vectors))
        for i in cutlass.range_constexpr(4 * vectors):
            words[i] = row[i]
    return warp_sum([words[i] for i in range(count)])


def warp_sum(values: list[Float32]) -> list[Float32]:
    """Sum of each value over the 32 lanes, by butterfly: every lane holds the same bits."""
    for shift in (16, 8, 4, 2, 1):
        values = [v + cute.arch.shuffle_sync_bfly(v, shift) for v in values]
    return values
