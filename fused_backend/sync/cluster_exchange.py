"""All-to-all of a few fp32 partial sums between the CTAs of a cluster, through distributed shared memory.

A round carries n sums (n a power of two, at most 32). A warp holds them one per lane: lane l holds sum l % n. Every
warp pushes its n sums into a slot of its own in every CTA of the cluster, and the push itself signals the receiver's
mbarrier by transaction bytes, so data and flag cannot be reordered. Each round has an mbarrier and a buffer of its own
and is used once per launch: no phase is ever reused.

Soundness note, edge by edge
    1. init -> remote push.   Thread 0 initialises its CTA's mbarriers, arms each with the bytes of one round, and
       executes `fence.mbarrier_init.release.cluster`. All threads then `barrier.cluster.arrive` and, before their
       first push or wait, `barrier.cluster.wait`: no CTA touches a peer's mbarrier before its owner armed it.
    2. push -> read.          `st.async` is a weak store whose completion is a `complete_tx` with release semantics at
       cluster scope on the receiver's mbarrier. The phase completes when the owner's one arrival and all bytes are
       in. `try_wait.acquire.cluster` that returns true therefore sees every pushed sum. `.cta` would be too
       narrow: the completing party runs in another CTA.
    3. read -> exit.          A CTA leaves only after it has observed all rounds that are sent to it, so no peer
       can still be writing to its shared memory when it exits. The rounds that a launch runs are the same in every
       CTA of a cluster, because the decision depends only on sums that all of them hold bit for bit.
    4. Order of summation.    Slots are summed in a fixed order, not in order of arrival: all CTAs, and all runs, get
       the same bits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .ptx import ordering, pure

LANES = 32


class ClusterExchange:
    """One-shot exchanges between `ctas` CTAs of `warps` warps each; round r carries `counts[r]` sums.

    Construct at trace time inside the kernel, call :meth:`setup` in all threads, then :meth:`ready` before the first
    push or wait.
    """

    def __init__(self, ctas: int, warps: int, counts: tuple[int, ...]):
        if any(n & (n - 1) or not 0 < n <= LANES for n in counts):
            raise ValueError(f"counts {counts}: each must be a power of two, at most {LANES}")
        self.ctas, self.warps, self.counts = ctas, warps, counts
        self.slots = ctas * warps
        self.buffers = [cute.arch.alloc_smem(Float32, self.slots * n, 16) for n in counts]
        self.barriers = cute.arch.alloc_smem(Int64, len(counts), 8)

    def setup(self, tid: Int32) -> None:
        """Thread 0 initialises and arms the mbarriers; all threads announce it to the cluster."""
        _setup(self.barriers, tuple(self.slots * n * 4 for n in self.counts), tid)

    def ready(self) -> None:
        """Return when every CTA of the cluster has armed its mbarriers."""
        ordering("barrier.cluster.wait.acquire.aligned;")

    def targets(self, r: int, rank: Int32, warp: Int32, lane: Int32) -> list[tuple[Int32, Int32, Int32]]:
        """Where this lane's sum of round `r` goes: (peer, slot address, mbarrier address) per group of peers."""
        n = self.counts[r]
        slot = (self.buffers[r] + (rank * self.warps + warp) * n + lane % n).toint()
        flag = (self.barriers + r).toint()
        peers = [lane // n + first for first in range(0, self.ctas, LANES // n)]
        return [(peer, _mapa(slot, peer), _mapa(flag, peer)) for peer in peers]

    def push(self, targets: list[tuple[Int32, Int32, Int32]], value: Float32) -> None:
        """Send this warp's sums (lane l holds sum l % n) to every CTA of the cluster."""
        for target in targets:
            _push(*target, self.ctas, value)

    def wait(self, r: int) -> None:
        """Return when all sums of round `r` have arrived in this CTA and are visible to this thread."""
        ordering(
            "{\n.reg .pred done;\nWAIT:\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0;\n"
            "@!done bra WAIT;\n}",
            "r",
            ((self.barriers + r).toint(),),
        )

    def total(self, r: int, lane: Int32) -> Float32:
        """Sum l % n over all slots, in lane l: the same bits in every CTA."""
        return _total(self.buffers[r], self.slots, self.counts[r], lane)


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


def _mapa(address: Int32, peer: Int32) -> Int32:
    return pure("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", (address, peer), Int32)


@cute.jit
def _push(peer: Int32, slot: Int32, flag: Int32, ctas: cutlass.Constexpr, value: Float32):
    if peer < ctas:
        ordering(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $1, [$2];",
            "r,f,r",
            (slot, value, flag),
        )


@cute.jit
def _total(buffer: cute.Pointer, slots: cutlass.Constexpr, n: cutlass.Constexpr, lane: Int32):
    groups = LANES // n
    values = cute.make_tensor(buffer, cute.make_layout(slots * n))
    total = Float32(0.0)
    for first in cutlass.range_constexpr(0, slots - slots % groups, groups):
        total = total + values[first * n + lane]
    if cutlass.const_expr(slots % groups):  # noqa: SIM102  (decided while tracing; the inner one on the GPU)
        if lane // n < slots % groups:
            total = total + values[(slots - slots % groups) * n + lane]
    return _over_lanes(total, n)


def _over_lanes(value: Float32, n: int) -> Float32:
    """Sum over the lanes that agree modulo n, by butterfly: all of them hold the same bits."""
    shift = n
    while shift < LANES:
        value = value + cute.arch.shuffle_sync_bfly(value, shift)
        shift *= 2
    return value


def warp_sums(values: list[Float32], lane: Int32) -> Float32:
    """Sums of n values over the warp, sum l % n in lane l. A transposing reduction: n - 1 + log2(32/n) shuffles."""
    n = len(values)
    half = n // 2
    while half:
        upper = (lane & half) != 0
        values = [
            cutlass.select_(upper, b, a) + cute.arch.shuffle_sync_bfly(cutlass.select_(upper, a, b), half)
            for a, b in zip(values[:half], values[half:], strict=True)
        ]
        half //= 2
    return _over_lanes(values[0], n)


def broadcast(value: Float32, lane: int | Int32) -> Float32:
    """`value` of lane `lane`."""
    return cute.arch.shuffle_sync(value, lane)
