"""Warps, barriers, mbarriers, clusters, overlapping launches, schedules, weak memory, deadlocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from emulator_support import assemble_all, entry
from k3_audit.audit import emulator
from k3_audit.audit.emulator import Deadlock, EmulationError, Launch, Memory

pytestmark = pytest.mark.unit

PROLOGUE = """.reg .b32 t, c; .reg .b64 q, o; ld.param.u64 q, [y]; mov.u32 t, %tid.x; mov.u32 c, %ctaid.x;
    .reg .b32 nt, i; mov.u32 nt, %ntid.x; mad.lo.u32 i, c, nt, t; mul.wide.u32 o, i, 4; add.u64 q, q, o;
"""


def run(body: str, out: np.ndarray, grid: int = 1, block: int = 32, cluster: int = 1, **kwargs):
    text = entry(PROLOGUE + body, ".param .u64 y")
    return emulator.run(text, [out], (grid, 1, 1), (block, 1, 1), (cluster, 1, 1), **kwargs)


# -- warps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("segment", [0, 16, 24])
@pytest.mark.parametrize("n", [0, 1, 3, 17])
def test_shuffles(mode: str, segment: int, n: int) -> None:
    clamp = (0 if mode == "up" else 31) | segment << 8
    out = np.zeros((2, 32), np.uint32)
    run(
        f""".reg .pred p; .reg .b32 r, s, k; add.u32 k, t, 100;
        shfl.sync.{mode}.b32 r|p, k, {n}, {clamp}, 0xffffffff; st.global.u32 [q], r;
        selp.u32 s, 1, 0, p; st.global.u32 [q+128], s;""",
        out,
    )
    for lane in range(32):
        low = lane & segment
        high = low | (31 & ~segment)
        source = {"up": lane - n, "down": lane + n, "bfly": lane ^ n, "idx": low | (n & ~segment & 31)}[mode]
        valid = source >= low if mode == "up" else source <= high
        assert out[1, lane] == valid
        assert out[0, lane] == 100 + (source if valid else lane)


def test_votes_matches_and_reductions() -> None:
    out = np.zeros((10, 64), np.uint32)
    run(
        """.reg .pred p, a, b, u, m; .reg .b32 r, k, z; and.b32 k, t, 3; setp.eq.u32 p, k, 1; mov.u32 z, 0;
        vote.sync.ballot.b32 r, p, 0xffffffff; st.global.u32 [q], r;
        vote.sync.any.pred a, p, 0xffffffff; vote.sync.all.pred b, p, 0xffffffff;
        vote.sync.uni.pred u, p, 0xffffffff;
        selp.u32 r, 1, 0, a; @b add.u32 r, r, 2; @u add.u32 r, r, 4; st.global.u32 [q+256], r;
        match.any.sync.b32 r, k, 0xffffffff; st.global.u32 [q+512], r;
        match.all.sync.b32 r|m, z, 0xffffffff; @!m mov.u32 r, 77; st.global.u32 [q+768], r;
        redux.sync.add.u32 r, t, 0xffffffff; st.global.u32 [q+1024], r;
        redux.sync.max.s32 r, t, 0xffffffff; st.global.u32 [q+1280], r;
        redux.sync.xor.b32 r, t, 0xffffffff; st.global.u32 [q+1536], r;
        elect.sync r|m, 0xffffffff; selp.u32 k, 100, 0, m; add.u32 r, r, k; st.global.u32 [q+1792], r;
        activemask.b32 r; st.global.u32 [q+2048], r;
        mov.u32 r, %lanemask_le; st.global.u32 [q+2304], r; ret;""",
        out,
        block=64,
    )
    t = np.arange(64)
    assert set(out[0].tolist()) == {0x22222222}
    assert set(out[1].tolist()) == {1}
    np.testing.assert_array_equal(out[2], 0x11111111 << (t % 4))
    assert set(out[3].tolist()) == {0xFFFFFFFF}
    np.testing.assert_array_equal(out[4], np.where(t < 32, sum(range(32)), sum(range(32, 64))))
    np.testing.assert_array_equal(out[5], np.where(t < 32, 31, 63))
    np.testing.assert_array_equal(out[6], 0)
    np.testing.assert_array_equal(out[7], np.where(t % 32 == 0, 100, 0))
    assert set(out[8].tolist()) == {0xFFFFFFFF}
    np.testing.assert_array_equal(out[9], (2 << (t % 32)) - 1)


def test_warp_synchronous_instructions_wait_for_diverged_lanes() -> None:
    """Half of the warp takes a detour before the shuffle; a quarter has exited."""
    out = np.zeros(32, np.uint32)
    run(
        """.reg .pred p, e; .reg .b32 r, k; setp.ge.u32 e, t, 24; @e ret; mov.u32 k, t; setp.lt.u32 p, t, 8;
        @p bra LONG; bra MEET;
        LONG: add.u32 k, k, 100; add.u32 k, k, 100; activemask.b32 r; st.global.u32 [q], r;
        MEET: shfl.sync.bfly.b32 r, k, 8, 31, 0xffffffff; st.global.u32 [q], r; ret;""",
        out,
    )
    t = np.arange(24)
    source = t ^ 8
    taken = np.where(source < 8, source + 200, source)
    np.testing.assert_array_equal(out[:16], taken[:16])
    # Lanes 16..23 ask lanes 24..31, which are gone: an undefined value, and never their own.
    assert (out[16:24] != t[16:24]).all()


def test_executing_outside_the_membermask_is_reported() -> None:
    with pytest.raises(EmulationError, match=r"membermask.*thread \(16, 0, 0\)"):
        run(
            ".reg .b32 r; shfl.sync.idx.b32 r, t, 0, 31, 0xffff; st.global.u32 [q], r; ret;",
            np.zeros(32, np.uint32),
        )


def test_lanes_that_never_meet_are_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="16 threads wait for the rest of their membermask") as caught:
        run(
            """.reg .pred p; .reg .b32 r; setp.lt.u32 p, t, 16; @p bra A;
            bar.sync 1, 64; ret;
            A: shfl.sync.idx.b32 r, t, 0, 31, 0xffffffff; st.global.u32 [q], r; ret;""",
            np.zeros(32, np.uint32),
        )
    assert any("barrier 1 (16 of 64" in w for w in caught.value.waits)


# -- CTA barriers --------------------------------------------------------------------------------------------

NEIGHBOUR = """.shared .align 4 .b8 s[512]; .reg .b32 a, b, r, k;
    mov.u32 a, s; shl.b32 k, t, 2; add.u32 a, a, k; st.shared.u32 [a], t;
    @BARRIER@
    xor.b32 k, t, 96; shl.b32 k, k, 2; mov.u32 b, s; add.u32 b, b, k; ld.shared.u32 r, [b];
    st.global.u32 [q], r; ret;"""


def test_a_missing_barrier_shows_under_random_schedules_only() -> None:
    good, bad = (NEIGHBOUR.replace("@BARRIER@", b) for b in ("bar.sync 0;", ""))
    out = np.zeros(128, np.uint32)
    run(bad, out, block=128)  # lockstep hides it
    caught = 0
    for seed in range(12):
        run(good, out, block=128, schedule="random", seed=seed)
        np.testing.assert_array_equal(out, np.arange(128) ^ 96)
        try:
            run(bad, out, block=128, schedule="random", seed=seed)
        except EmulationError as e:
            caught += e.kind == "uninitialized"
    assert caught >= 3


def test_barrier_reductions() -> None:
    out = np.zeros((3, 64), np.uint32)
    run(
        """.reg .pred p, a, b; .reg .b32 r; setp.lt.u32 p, t, 20;
        barrier.cta.red.popc.aligned.u32 r, 0, p; st.global.u32 [q], r;
        bar.red.and.pred a, 0, p; bar.red.or.pred b, 3, 64, p; selp.u32 r, 1, 0, a; st.global.u32 [q+256], r;
        selp.u32 r, 1, 0, b; st.global.u32 [q+512], r; ret;""",
        out,
        block=64,
        schedule="random",
        seed=5,
    )
    assert set(out[0].tolist()) == {20} and set(out[1].tolist()) == {0} and set(out[2].tolist()) == {1}


def test_producers_arrive_and_consumers_sync() -> None:
    out = np.zeros(64, np.uint32)
    body = """.shared .align 4 .b8 s[128]; .reg .pred p; .reg .b32 a, k, r; and.b32 k, t, 31; shl.b32 k, k, 2;
    mov.u32 a, s; add.u32 a, a, k; setp.ge.u32 p, t, 32; @p bra CONSUMER;
    add.u32 r, t, 500; st.shared.u32 [a], r; bar.arrive 2, 64; ret;
    CONSUMER: bar.sync 2, 64; ld.shared.u32 r, [a]; st.global.u32 [q], r; ret;"""
    for seed in range(4):
        out[:] = 0
        run(body, out, block=64, schedule="random", seed=seed)
        np.testing.assert_array_equal(out[32:], np.arange(32) + 500)


def test_exited_threads_do_not_hold_a_barrier() -> None:
    out = np.zeros(64, np.uint32)
    run(".reg .pred p; setp.lt.u32 p, t, 32; @p ret; bar.sync 0; st.global.u32 [q], t; ret;", out, block=64)
    np.testing.assert_array_equal(out[32:], np.arange(32, 64))


def test_a_count_is_in_whole_warps_and_phases_follow_each_other() -> None:
    """48 threads fill a barrier of 64; 128 threads at a barrier of 64 are two phases of two warps."""
    out = np.zeros(128, np.uint32)
    run("bar.sync 1, 64; st.global.u32 [q], t; ret;", out, block=48)
    np.testing.assert_array_equal(out[:48], np.arange(48))
    run("bar.sync 1, 64; add.u32 t, t, 5; st.global.u32 [q], t; ret;", out, block=128)
    np.testing.assert_array_equal(out, np.arange(128) + 5)
    split = """.reg .pred p; setp.lt.u32 p, t, 16; @p bra A; setp.lt.u32 p, t, 32; @p bra B; bar.sync 1, 32;
    A: bar.sync 1, 32; B: ret;"""
    with pytest.raises(EmulationError, match="more threads at barrier 1"):
        run(split, out, block=64)
    with pytest.raises(EmulationError, match="no multiple of the warp size"):
        run("mov.u32 i, 40; bar.sync 1, i; ret;", out, block=64)


def test_barrier_deadlock_names_who_waits() -> None:
    with pytest.raises(Deadlock, match=r"32 threads wait at barrier 3 \(32 of 96 have arrived\)"):
        run(
            ".reg .pred p; setp.ge.u32 p, t, 32; @p ret; bar.sync 3, 96; ret;",
            np.zeros(64, np.uint32),
            block=64,
        )


# -- clusters and mbarriers ----------------------------------------------------------------------------------

EXCHANGE = """.shared .align 8 .b64 bar; .shared .align 16 .b8 s[512];
    .reg .b32 b, a, r, k, peer, rank, n, v; .reg .b64 st; .reg .pred first, done, p;
    mov.u32 b, bar; mov.u32 a, s; mov.u32 rank, %cluster_ctarank; mov.u32 n, %cluster_nctarank;
    setp.eq.u32 first, t, 0; mov.u32 k, 128;
    @!first bra READY;
    mbarrier.init.shared::cta.b64 [b], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 st, [b], k;
    fence.mbarrier_init.release.cluster;
    READY: barrier.cluster.arrive.relaxed; @CLUSTER_WAIT@
    add.u32 peer, rank, 1; setp.eq.u32 p, peer, n; @p mov.u32 peer, 0;
    shl.b32 r, t, 2; add.u32 r, r, a; mapa.shared::cluster.u32 r, r, peer; mapa.shared::cluster.u32 k, b, peer;
    mad.lo.u32 v, rank, 1000, t;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [r], v, [k];
    @WAIT@
    shl.b32 r, t, 2; add.u32 r, r, a; ld.shared.u32 v, [r]; st.global.u32 [q], v;
    @END@ ret;"""
TRY = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [b], 0; @!done bra W;"
TEST = "W: mbarrier.test_wait.parity.shared::cta.b64 done, [b], 0; @!done bra W;"


def exchange(cluster_wait: str = "barrier.cluster.wait;", wait: str = TRY, end: str = "") -> str:
    return EXCHANGE.replace("@CLUSTER_WAIT@", cluster_wait).replace("@WAIT@", wait).replace("@END@", end)


@pytest.mark.parametrize("wait", [TRY, TEST])
@pytest.mark.parametrize("schedule", ["lockstep", "random"])
def test_neighbours_in_a_cluster_exchange_through_st_async(wait: str, schedule: str) -> None:
    out = np.zeros((8, 32), np.uint32)
    for seed in range(3):
        out[:] = 0
        run(exchange(wait=wait), out, grid=8, cluster=4, schedule=schedule, seed=seed)
        rank = (np.arange(8) - 1) % 4
        np.testing.assert_array_equal(out, rank[:, None] * 1000 + np.arange(32))


def test_missing_wait_for_st_async_reads_nothing() -> None:
    with pytest.raises(EmulationError, match="nobody has written"):
        run(exchange(wait=""), np.zeros((4, 32), np.uint32), grid=4, cluster=4)


def test_sending_before_the_peer_has_initialised() -> None:
    """Without the cluster barrier a fast CTA meets an mbarrier that is not there yet."""
    kinds = []
    for seed in range(16):
        try:
            body = exchange(cluster_wait="")
            run(body, np.zeros((4, 32), np.uint32), grid=4, cluster=4, schedule="random", seed=seed)
        except EmulationError as e:
            kinds.append(e.kind)
    assert "mbarrier" in kinds


def test_remote_access_to_a_cta_that_has_exited() -> None:
    body = """.shared .align 4 .b8 s[4]; .reg .b32 a, r; .reg .pred p; mov.u32 a, s; st.shared.u32 [a], t;
    setp.eq.u32 p, c, 1; barrier.cluster.arrive; barrier.cluster.wait; @p ret; nanosleep.u32 100;
    mapa.shared::cluster.u32 a, a, 1; ld.shared::cluster.u32 r, [a]; st.global.u32 [q], r; ret;"""
    with pytest.raises(EmulationError, match="has exited"):
        run(body, np.zeros(2, np.uint32), grid=2, cluster=2, block=1)
    fixed = body.replace("@p ret; nanosleep.u32 100;", "").replace(
        "st.global.u32 [q], r;", "st.global.u32 [q], r; barrier.cluster.arrive; barrier.cluster.wait;"
    )
    out = np.ones(2, np.uint32)
    run(fixed, out, grid=2, cluster=2, block=1)
    assert out.tolist() == [0, 0]


def test_mbarrier_phases_tokens_and_counts() -> None:
    out = np.zeros(8, np.uint32)
    body = """.shared .align 8 .b64 bar; .reg .b32 b, r; .reg .b64 s0, s1; .reg .pred p; mov.u32 b, bar;
    mbarrier.init.shared::cta.b64 [b], 2;
    mbarrier.test_wait.parity.shared::cta.b64 p, [b], 1; selp.u32 r, 1, 0, p; st.global.u32 [q], r;
    mbarrier.arrive.shared::cta.b64 s0, [b];
    mbarrier.test_wait.shared::cta.b64 p, [b], s0; selp.u32 r, 1, 0, p; st.global.u32 [q+4], r;
    mbarrier.pending_count.b64 r, s0; st.global.u32 [q+8], r;
    mbarrier.arrive.release.cta.shared::cta.b64 s1, [b], 1;
    mbarrier.test_wait.shared::cta.b64 p, [b], s0; selp.u32 r, 1, 0, p; st.global.u32 [q+12], r;
    mbarrier.test_wait.parity.shared::cta.b64 p, [b], 0; selp.u32 r, 1, 0, p; st.global.u32 [q+16], r;
    mbarrier.test_wait.parity.shared::cta.b64 p, [b], 1; selp.u32 r, 1, 0, p; st.global.u32 [q+20], r;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [b], 16; mbarrier.arrive.shared::cta.b64 s1, [b], 2;
    mbarrier.test_wait.shared::cta.b64 p, [b], s1; selp.u32 r, 1, 0, p; st.global.u32 [q+24], r;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [b], 16;
    mbarrier.test_wait.shared::cta.b64 p, [b], s1; selp.u32 r, 1, 0, p; st.global.u32 [q+28], r;
    mbarrier.inval.shared::cta.b64 [b]; mbarrier.init.shared::cta.b64 [b], 1; ret;"""
    run(body, out, block=1)
    assert out.tolist() == [1, 0, 2, 1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ("mbarrier.arrive.shared::cta.b64 s, [b];", "no mbarrier has been initialised"),
        ("mbarrier.init.shared::cta.b64 [b], r;", "count 0"),
        ("mbarrier.init.shared::cta.b64 [b], 1; mbarrier.init.shared::cta.b64 [b], 1;", "inval it first"),
        ("mbarrier.init.shared::cta.b64 [b], 1; mbarrier.arrive.shared::cta.b64 s, [b], 2;", "more arrivals"),
        ("mbarrier.init.shared::cta.b64 [b], 1; st.shared.u32 [b], t;", "plain store over a live mbarrier"),
        ("mbarrier.init.shared::cta.b64 [b], 1; ld.shared.u32 r, [b];", "plain load of an mbarrier"),
        (
            "mbarrier.init.shared::cta.b64 [b], 1; mbarrier.arrive.shared::cta.b64 s, [b]; "
            "mbarrier.arrive.shared::cta.b64 u, [b]; mbarrier.test_wait.shared::cta.b64 p, [b], s;",
            "before the preceding one",
        ),
        (
            "mbarrier.init.shared::cta.b64 [b], 1; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [b], 1048576;",
            "tx-count",
        ),
        ("barrier.cluster.wait;", "without an arrive"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", "twice"),
        ("bar.sync 1, 32; bar.sync 2, 64;", "deadlock"),
    ],
)
def test_misuse_of_barriers(lines: str, match: str) -> None:
    body = f""".shared .align 8 .b64 bar; .reg .b32 b, r; .reg .b64 s, u; .reg .pred p; mov.u32 b, bar; mov.u32 r, 0;
    {lines} st.global.u32 [q], r; ret;"""
    text = entry(PROLOGUE + body, ".param .u64 y", remember="[b], 0;" not in lines)
    with pytest.raises(EmulationError, match=match):
        emulator.run(text, [np.zeros(32, np.uint32)], (1, 1, 1), (1 if "bar.sync" not in lines else 32, 1, 1))


# -- polling and livelock --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["lockstep", "eager", "random"])
def test_polls_end_when_the_flag_comes(schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    body = """.reg .pred p; .reg .b32 r; .reg .b64 f; ld.param.u64 f, [y]; setp.eq.u32 p, c, 0; @p bra SET;
    POLL: ld.acquire.gpu.global.u32 r, [f+128]; setp.eq.u32 p, r, 0; @p bra POLL; st.global.u32 [f], r; ret;
    SET: mov.u32 r, 0; SPIN: add.u32 r, r, 1; setp.lt.u32 p, r, 200; @p bra SPIN;
    st.release.gpu.global.u32 [f+128], r; ret;"""
    run(body, out, grid=2, block=1, schedule=schedule, seed=2)
    assert out[0] == 200


def test_a_poll_that_cannot_end_is_found_and_named() -> None:
    memory = Memory()
    out = np.zeros(32, np.uint32)
    memory.add(out, "flags")
    body = """.reg .pred p; .reg .b32 r;
    POLL: ld.acquire.gpu.global.u32 r, [q]; setp.eq.u32 p, r, 0; @p bra POLL; ret;"""
    with pytest.raises(Deadlock, match=r"32 threads poll without end .* flags\+0"):
        run(body, out, memory=memory)


def test_a_loop_that_only_computes_is_no_deadlock() -> None:
    out = np.zeros(1, np.uint32)
    body = """.reg .pred p; .reg .b32 r; mov.u32 r, 0; L: add.u32 r, r, 1; setp.lt.u32 p, r, 3000; @p bra L;
    st.global.u32 [q], r; ret;"""
    run(body, out, block=1)
    assert out[0] == 3000
    with pytest.raises(EmulationError, match="more than 500 steps"):
        run(body, out, block=1, max_steps=500)


# -- overlapping launches --------------------------------------------------------------------------------------

PRODUCER = """.reg .b64 p, o; .reg .b32 t, r, k; .reg .pred q; ld.param.u64 p, [x]; mov.u32 t, %tid.x;
    mul.wide.u32 o, t, 4; add.u64 p, p, o; griddepcontrol.launch_dependents; mov.u32 k, 0;
    L: add.u32 k, k, 1; setp.lt.u32 q, k, 50; @q bra L;
    mov.u32 r, 7; st.global.u32 [p], r; ret;"""
CONSUMER = """.reg .b64 p, s, o; .reg .b32 t, r; ld.param.u64 p, [x]; ld.param.u64 s, [y]; mov.u32 t, %tid.x;
    mul.wide.u32 o, t, 4; add.u64 p, p, o; add.u64 s, s, o;
    @BEFORE@ griddepcontrol.wait; @AFTER@ st.global.u32 [s], r; griddepcontrol.launch_dependents; ret;"""
LOAD = "ld.global.u32 r, [p];"


def stream(before: str, after: str, **kwargs):
    x, y = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    producer = entry(PRODUCER, ".param .u64 x")
    consumer = entry(
        CONSUMER.replace("@BEFORE@", before).replace("@AFTER@", after), ".param .u64 x, .param .u64 y"
    )
    launches = [
        Launch(producer, [x], (1, 1, 1), (32, 1, 1)),
        Launch(consumer, [x, y], (1, 1, 1), (32, 1, 1)),
    ]
    return emulator.run_stream(launches, **kwargs), y


def test_a_load_above_the_dependency_wait_reads_stale_data() -> None:
    for schedule in ("lockstep", "eager", "random"):
        result, y = stream("", LOAD, pdl=True, schedule=schedule)
        assert result.overlapped == [False, True] and set(y.tolist()) == {7}
    _, y = stream(LOAD, "", pdl=True, schedule="eager")
    assert set(y.tolist()) == {0}
    seen = {int(stream(LOAD, "", pdl=True, schedule="random", seed=s)[1][0]) for s in range(12)}
    assert seen == {0, 7}
    result, y = stream(LOAD, "", pdl=False, schedule="eager")
    assert result.overlapped == [False, False] and set(y.tolist()) == {7}


def test_the_wait_reaches_only_the_launch_before() -> None:
    """The third launch reads what the first one writes before its own wait: the second, which does not wait,
    ends early, so nothing keeps the third from overtaking the first."""
    x, y = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    first = entry(PRODUCER, ".param .u64 x")
    idle = entry("griddepcontrol.launch_dependents; ret;")
    polite = entry("griddepcontrol.launch_dependents; griddepcontrol.wait; ret;")
    reader = CONSUMER.replace("@BEFORE@", "").replace("@AFTER@", LOAD)
    third = entry(reader, ".param .u64 x, .param .u64 y")
    for middle, expected in ((idle, 0), (polite, 7)):
        x[:], y[:] = 0, 0
        launches = [Launch(first, [x], (1, 1, 1), (32, 1, 1)), Launch(middle, [], (1, 1, 1), (32, 1, 1))]
        launches.append(Launch(third, [x, y], (1, 1, 1), (32, 1, 1)))
        emulator.run_stream(launches, pdl=True, schedule="eager")
        assert set(y.tolist()) == {expected}


def test_dependents_start_only_when_every_cta_has_triggered() -> None:
    """One CTA of the producer triggers late: the consumer cannot be early, whatever the schedule."""
    x, y = np.zeros(64, np.uint32), np.zeros(32, np.uint32)
    producer = entry(
        """.reg .b64 p; .reg .b32 c, r; .reg .pred q; ld.param.u64 p, [x]; mov.u32 c, %ctaid.x; setp.eq.u32 q, c, 0;
        @q griddepcontrol.launch_dependents; mov.u32 r, 9; @!q st.global.u32 [p], r; ret;""",
        ".param .u64 x",
    )
    consumer = entry(
        CONSUMER.replace("@BEFORE@", LOAD).replace("@AFTER@", ""), ".param .u64 x, .param .u64 y"
    )
    for seed in range(8):
        x[:], y[:] = 0, 0
        launches = [
            Launch(producer, [x], (2, 1, 1), (1, 1, 1)),
            Launch(consumer, [x, y], (1, 1, 1), (32, 1, 1)),
        ]
        emulator.run_stream(launches, pdl=True, schedule="random", seed=seed)
        assert y[0] == 9


# -- weak memory -----------------------------------------------------------------------------------------------

# Message passing between two CTAs: x[0] is the data, x[32] the flag.
MESSAGE = """.reg .b64 p; .reg .b32 c, r, d; .reg .pred q; ld.param.u64 p, [x]; mov.u32 c, %ctaid.x;
    setp.ne.u32 q, c, 0; @q bra READ; mov.u32 r, 1;
    st.global.u32 [p], r; @RELEASE@ @STORE@ ret;
    READ: @LOAD@ setp.eq.u32 q, r, 0; @q bra READ; @ACQUIRE@ ld.global.u32 d, [p]; st.global.u32 [p+64], d; ret;"""
RELAXED = ("st.relaxed.gpu.global.u32 [p+128], r;", "ld.relaxed.gpu.global.u32 r, [p+128];")


def stale(release: str, store: str, load: str, acquire: str, cluster: int = 1, seeds: int = 25) -> int:
    """How many of `seeds` runs read the old data after having seen the flag."""
    text = MESSAGE.replace("@RELEASE@", release).replace("@STORE@", store)
    text = entry(text.replace("@LOAD@", load).replace("@ACQUIRE@", acquire), ".param .u64 x")
    count = 0
    for seed in range(seeds):
        x = np.zeros(64, np.uint32)
        emulator.run(
            text, [x], (2, 1, 1), (1, 1, 1), (cluster, 1, 1), schedule="random", seed=seed, weak=True
        )
        count += x[16] == 0
    return count


@pytest.mark.parametrize(
    ("release", "store", "load", "acquire"),
    [
        ("fence.acq_rel.gpu;", *RELAXED, "fence.acq_rel.gpu;"),
        ("fence.sc.sys;", *RELAXED, "membar.gl;"),
        ("", "st.release.gpu.global.u32 [p+128], r;", "ld.acquire.gpu.global.u32 r, [p+128];", ""),
        (
            "",
            "red.release.gpu.global.add.u32 [p+128], r;",
            "atom.acquire.gpu.global.add.u32 r, [p+128], 0;",
            "",
        ),
    ],
)
def test_message_passing_holds(release: str, store: str, load: str, acquire: str) -> None:
    assert stale(release, store, load, acquire) == 0


@pytest.mark.parametrize(
    ("release", "store", "load", "acquire"),
    [
        ("", *RELAXED, "fence.acq_rel.gpu;"),  # no release
        ("fence.acq_rel.gpu;", *RELAXED, ""),  # no acquire
        ("fence.acq_rel.cta;", *RELAXED, "fence.acq_rel.gpu;"),  # release too narrow
        ("fence.acq_rel.gpu;", *RELAXED, "fence.acq_rel.cta;"),  # acquire too narrow
        ("fence.acq_rel.cluster;", *RELAXED, "fence.acq_rel.cluster;"),  # not one cluster
        ("", "st.volatile.global.u32 [p+128], r;", "ld.volatile.global.u32 r, [p+128];", ""),
        ("", "st.release.cta.global.u32 [p+128], r;", "ld.acquire.gpu.global.u32 r, [p+128];", ""),
    ],
)
def test_message_passing_breaks_visibly(release: str, store: str, load: str, acquire: str) -> None:
    assert stale(release, store, load, acquire) >= 3


def test_cluster_scope_is_enough_inside_a_cluster() -> None:
    assert stale("fence.acq_rel.cluster;", *RELAXED, "fence.acq_rel.cluster;", cluster=2) == 0
    assert stale("fence.acq_rel.cta;", *RELAXED, "fence.acq_rel.cta;", cluster=2) >= 3


CUMULATIVE = """.reg .b64 p, o; .reg .b32 c, t, r, d; .reg .pred q, z; ld.param.u64 p, [x]; mov.u32 c, %ctaid.x;
    mov.u32 t, %tid.x; setp.ne.u32 q, c, 0; setp.eq.u32 z, t, 0; mul.wide.u32 o, t, 4; mov.u32 r, 1; @q bra READ;
    add.u64 o, o, p; st.global.u32 [o], r; @BARRIER@
    @z fence.acq_rel.gpu; @z st.relaxed.gpu.global.u32 [p+512], r; ret;
    READ: @!z bra DONE; POLL: ld.relaxed.gpu.global.u32 r, [p+512]; setp.eq.u32 q, r, 0; @q bra POLL;
    fence.acq_rel.gpu; DONE: bar.sync 0; add.u64 o, o, p; ld.global.u32 d, [o]; st.global.u32 [o+1024], d; ret;"""


def test_a_fence_publishes_what_the_barrier_collected_and_nothing_else() -> None:
    """One thread releases for its CTA: right after a CTA barrier, wrong without it."""
    counts = {}
    for name, barrier in (("with", "bar.sync 0;"), ("without", "")):
        text = entry(CUMULATIVE.replace("@BARRIER@", barrier), ".param .u64 x")
        counts[name] = 0
        for seed in range(30):
            x = np.zeros(512, np.uint32)
            emulator.run(text, [x], (2, 1, 1), (64, 1, 1), schedule="random", seed=seed, weak=True)
            counts[name] += bool((x[256:320] == 0).any())
    assert counts["with"] == 0 and counts["without"] >= 3


def test_store_buffering_is_forbidden_by_fence_sc() -> None:
    body = """.reg .b64 p, a, b; .reg .b32 c, r, d; .reg .pred q; ld.param.u64 p, [x]; mov.u32 c, %ctaid.x;
    setp.eq.u32 q, c, 0; add.u64 a, p, 128; add.u64 b, p, 256; @!q add.u64 a, p, 256; @!q add.u64 b, p, 128;
    mov.u32 r, 1; st.relaxed.gpu.global.u32 [a], r; @FENCE@ ld.relaxed.gpu.global.u32 d, [b];
    mul.wide.u32 a, c, 4; add.u64 p, p, a; st.global.u32 [p], d; ret;"""
    both = {}
    for fence in ("fence.sc.gpu;", ""):
        text = entry(body.replace("@FENCE@", fence), ".param .u64 x")
        both[fence] = 0
        for seed in range(40):
            x = np.zeros(128, np.uint32)
            emulator.run(text, [x], (2, 1, 1), (1, 1, 1), schedule="random", seed=seed, weak=True)
            both[fence] += x[0] == 0 and x[1] == 0
    assert both["fence.sc.gpu;"] == 0 and both[""] >= 3


def test_default_scope_of_a_remote_arrive_is_too_narrow() -> None:
    """Data through distributed shared memory, signalled by a remote mbarrier arrive: `.cta`, the default scope,
    orders nothing between two CTAs although the count works."""
    body = """.shared .align 8 .b64 bar; .shared .align 4 .b8 s[4]; .reg .b32 b, a, r; .reg .pred first, done;
    mov.u32 b, bar; mov.u32 a, s; setp.eq.u32 first, c, 0; st.shared.u32 [a], 0;
    mbarrier.init.shared::cta.b64 [b], 1; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait; @!first bra GET;
    mapa.shared::cluster.u32 a, a, 1; mapa.shared::cluster.u32 b, b, 1; mov.u32 r, 5;
    st.shared::cluster.u32 [a], r; mbarrier.arrive.release.@SCOPE@.shared::cluster.b64 _, [b]; bra END;
    GET: mbarrier.try_wait.parity.acquire.@SCOPE@.shared::cta.b64 done, [b], 0; @!done bra GET;
    ld.shared.u32 r, [a]; st.global.u32 [q], r;
    END: barrier.cluster.arrive; barrier.cluster.wait; ret;"""
    wrong = {}
    for scope in ("cta", "cluster"):
        text = entry(PROLOGUE + body.replace("@SCOPE@", scope).replace("[a], 0;", "[a], t;"), ".param .u64 y")
        wrong[scope] = 0
        for seed in range(30):
            out = np.zeros(2, np.uint32)
            emulator.run(
                text, [out], (2, 1, 1), (1, 1, 1), (2, 1, 1), schedule="random", seed=seed, weak=True
            )
            wrong[scope] += out[1] != 5
    assert wrong["cluster"] == 0 and wrong["cta"] >= 3


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("", "", ""),
        ("acquire.cluster", "acquire.cta", "uninitialized"),  # the data comes from another CTA
        ("fence.mbarrier_init.release.cluster;", "", "mbarrier"),
        ("fence.mbarrier_init.release.cluster;", "fence.acq_rel.cta;", "mbarrier"),
        ("fence.mbarrier_init.release.cluster;", "fence.acq_rel.cluster;", ""),
    ],
)
def test_scope_of_the_exchange_between_ctas(old: str, new: str, kind: str) -> None:
    body = exchange(end="barrier.cluster.arrive; barrier.cluster.wait;")
    assert old in body
    kinds = []
    for seed in range(10):
        try:
            out = np.zeros((4, 32), np.uint32)
            run(body.replace(old, new), out, grid=4, cluster=4, schedule="random", seed=seed, weak=True)
            np.testing.assert_array_equal(out[:, 0], (np.arange(4) - 1) % 4 * 1000)
        except EmulationError as e:
            kinds.append(e.kind)
    assert set(kinds) == ({kind} if kind else set()) and (not kind or len(kinds) >= 3)


PROXY = """.shared .align 16 .b8 s[256]; .reg .b32 a, k; .reg .b64 g; .reg .pred first; ld.param.u64 g, [y];
    mov.u32 a, s; shl.b32 k, t, 2; add.u32 k, k, a; mov.u32 i, 7; st.shared.u32 [k], i; bar.sync 0;
    add.u32 i, t, 100; st.shared.u32 [k], i; @WRITER@ bar.sync 0; setp.eq.u32 first, t, 0; @!first ret; @ISSUER@
    cp.async.bulk.global.shared::cta.bulk_group [g], [a], 256; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0; ret;"""


@pytest.mark.parametrize(
    ("writer", "issuer", "right"),
    [
        ("fence.proxy.async.shared::cta;", "", True),
        ("fence.proxy.async;", "", True),
        ("", "fence.proxy.async.shared::cta;", True),
        ("", "", False),
        ("fence.acq_rel.gpu;", "fence.acq_rel.gpu;", False),
        ("fence.proxy.async.global;", "", False),
    ],
)
def test_bulk_copies_need_a_proxy_fence(writer: str, issuer: str, right: bool) -> None:
    body = PROXY.replace("@WRITER@", writer).replace("@ISSUER@", issuer)
    wrong = 0
    for seed in range(12):
        out = np.zeros(64, np.uint32)
        try:
            run(body, out, block=64, schedule="random", seed=seed, weak=True)
            wrong += not np.array_equal(out, np.arange(64) + 100)
        except EmulationError as e:
            assert "no proxy fence" in str(e)
            wrong += 1
    assert wrong == 0 if right else wrong >= 3


@pytest.mark.parametrize(("fence", "stale_allowed"), [("fence.acq_rel.gpu;", False), ("", True)])
def test_a_fence_before_launch_dependents_reaches_the_dependents_start(
    fence: str, stale_allowed: bool
) -> None:
    """PTX ISA 9.x, griddepcontrol: a release fence before launch_dependents synchronizes with the start of the
    dependent grid; launch_dependents alone publishes nothing."""
    producer = entry(
        f""".reg .b64 p; .reg .b32 r; ld.param.u64 p, [x]; mov.u32 r, 7; st.global.u32 [p], r; {fence}
        griddepcontrol.launch_dependents; ret;""",
        ".param .u64 x",
    )
    consumer = entry(
        CONSUMER.replace("@BEFORE@", LOAD).replace("@AFTER@", ""), ".param .u64 x, .param .u64 y"
    )
    seen = set()
    for seed in range(30):
        x, y = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
        launches = [
            Launch(producer, [x], (1, 1, 1), (1, 1, 1)),
            Launch(consumer, [x, y], (1, 1, 1), (32, 1, 1)),
        ]
        emulator.run_stream(launches, pdl=True, schedule="random", seed=seed, weak=True)
        seen.add(int(y[0]))
    assert seen == ({0, 7} if stale_allowed else {7})


def test_weak_mode_replays_from_its_seed() -> None:
    text = entry(
        MESSAGE.replace("@RELEASE@", "")
        .replace("@STORE@", RELAXED[0])
        .replace("@LOAD@", RELAXED[1])
        .replace("@ACQUIRE@", ""),
        ".param .u64 x",
    )

    def once(seed: int) -> tuple[int, int]:
        x = np.zeros(64, np.uint32)
        result = emulator.run(text, [x], (2, 1, 1), (1, 1, 1), schedule="random", seed=seed, weak=True)
        return result.steps, int(x[16])

    assert [once(s) for s in range(6)] == [once(s) for s in range(6)]


def test_the_assembler_accepts_these_kernels(tmp_path: Path) -> None:
    assert assemble_all(tmp_path) == []
