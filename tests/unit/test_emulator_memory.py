"""Address spaces, bounds, uninitialised data, atomics, asynchronous copies, matrices, calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from emulator_support import assemble_all, entry
from k3_audit.audit import emulator
from k3_audit.audit.emulator import EmulationError, Memory, Tensor, values

pytestmark = pytest.mark.unit

TID = ".reg .b32 t; .reg .b64 o; mov.u32 t, %tid.x; mul.wide.u32 o, t, 4;"


def run(body: str, args: list, params: str, block: int = 32, grid: int = 1, **kwargs):
    outside = kwargs.pop("outside", "")
    text = entry(body, params, outside=outside)
    return emulator.run(text, args, (grid, 1, 1), (block, 1, 1), **kwargs)


# -- loads and stores --------------------------------------------------------------------------------------


def test_widths_signs_and_vectors() -> None:
    source = np.arange(250, 250 + 64, dtype=np.uint8)
    out = np.zeros(12, np.uint32)
    run(
        """.reg .b64 p, q; .reg .b32 r<8>; .reg .b16 h<4>; .reg .b64 w<2>;
        ld.param.u64 p, [a]; ld.param.u64 q, [b];
        ld.global.s8 r0, [p+1]; st.global.u32 [q], r0;
        ld.global.u8 r0, [p+1]; st.global.u32 [q+4], r0;
        ld.global.s16 r0, [p+2]; st.global.u32 [q+8], r0;
        ld.global.nc.v4.u32 {r0, r1, r2, r3}, [p+16]; st.global.v2.u32 [q+16], {r3, r2};
        ld.global.v4.u16 {h0, h1, h2, h3}, [p+8]; st.global.v2.b16 [q+24], {h3, h0};
        ld.global.v2.u64 {w0, w1}, [p+32]; st.global.b64 [q+32], w1;
        st.global.u8 [q+40], r0; ld.volatile.global.u8 r4, [p+3]; st.release.gpu.global.u16 [q+42], r4;
        ret;""",
        [source, out],
        ".param .u64 a, .param .u64 b",
        block=1,
    )
    b = source.tobytes()
    assert out[0] == np.uint32(np.int8(source[1].astype(np.int8)).astype(np.int32).view(np.uint32))
    assert out[1] == source[1]
    assert out[2] == int.from_bytes(b[2:4], "little", signed=True) & 0xFFFFFFFF
    assert out[4:6].tobytes() == b[28:32] + b[24:28]
    assert out[6:7].tobytes() == b[14:16] + b[8:10]
    assert out[8:10].tobytes() == b[40:48]
    assert out.view(np.uint8)[40] == b[16] and out.view(np.uint16)[21] == b[3]


def test_generic_addresses_reach_every_space() -> None:
    x, out = np.arange(32, dtype=np.uint32), np.zeros((4, 32), np.uint32)
    run(
        TID
        + """.shared .align 4 .b8 s[128]; .local .align 8 .b8 l[16];
        .reg .b64 p, q, g, c; .reg .b32 r, a; .reg .pred is<4>;
        ld.param.u64 p, [x]; ld.param.u64 q, [y]; add.u64 p, p, o; add.u64 q, q, o;
        ld.u32 r, [p];
        mov.u64 g, s; cvta.shared.u64 g, g; add.u64 g, g, o; st.u32 [g], r;
        mov.u32 a, s; add.u32 a, a, %tid.x; ld.u32 r, [g]; st.u32 [q], r;
        cvta.to.shared.u64 c, g; ld.shared.u32 r, [c]; add.u32 r, r, 100; st.u32 [q+128], r;
        mov.u64 g, l; cvta.local.u64 g, g; st.u32 [g+8], r; ld.local.u32 r, [l+8]; st.u32 [q+256], r;
        isspacep.shared is0, g; isspacep.local is1, g; isspacep.global is2, q; isspacep.global is3, g;
        selp.u32 r, 1, 0, is0; selp.u32 a, 2, 0, is1; add.u32 r, r, a; selp.u32 a, 4, 0, is2; add.u32 r, r, a;
        selp.u32 a, 8, 0, is3; add.u32 r, r, a; st.u32 [q+384], r;
        ret;""".replace("add.u32 a, a, %tid.x;", ""),
        [x, out],
        ".param .u64 x, .param .u64 y",
    )
    np.testing.assert_array_equal(out[0], x)
    np.testing.assert_array_equal(out[1], x + 100)
    np.testing.assert_array_equal(out[2], x + 100)
    assert set(out[3].tolist()) == {6}


def test_local_memory_is_private() -> None:
    out = np.zeros(64, np.uint32)
    run(
        TID
        + """.local .align 4 .b8 l[8]; .reg .b64 q; .reg .b32 r;
        ld.param.u64 q, [y]; add.u64 q, q, o;
        st.local.u32 [l+4], t; bar.sync 0; ld.local.u32 r, [l+4]; st.global.u32 [q], r; ret;""",
        [out],
        ".param .u64 y",
        block=64,
    )
    np.testing.assert_array_equal(out, np.arange(64))


def test_module_variables_keep_their_value_between_launches() -> None:
    outside = """.global .align 4 .u32 counter = 7;
.const .align 4 .b32 table[4] = {10, 20, 0x1E, 40};"""
    text = entry(
        """.reg .b64 q; .reg .b32 r, c; ld.param.u64 q, [y];
        ld.global.u32 r, [counter]; add.u32 r, r, 1; st.global.u32 [counter], r;
        ld.const.u32 c, [table+8]; add.u32 r, r, c; st.global.u32 [q], r; ret;""",
        ".param .u64 y",
        outside=outside,
    )
    out, memory = np.zeros(1, np.uint32), Memory()
    for expected in (38, 39, 40):
        emulator.run(text, [out], (1, 1, 1), (1, 1, 1), memory=memory)
        assert out[0] == expected
    emulator.run(text, [out], (1, 1, 1), (1, 1, 1))
    assert out[0] == 38


def test_struct_and_scalar_parameters() -> None:
    x = np.arange(12, dtype=np.uint16).reshape(3, 4)
    out = np.zeros(6, np.uint32)
    text = entry(
        """.reg .b64 p, q, s; .reg .b32 a, b, i, m; .reg .f32 f; .reg .b16 h;
        ld.param.u64 q, [y]; ld.param.u64 p, [t]; ld.param.v2.u32 {a, b}, [t+8]; ld.param.u64 s, [t+16];
        st.global.v2.u32 [q], {a, b}; st.global.u64 [q+8], s;
        ld.param.f32 f, [e]; st.global.f32 [q+16], f; ld.param.s32 i, [n]; ld.param.u8 h, [c];
        cvt.u32.u16 m, h; add.s32 i, i, m; st.global.u32 [q+20], i; ret;""",
        ".param .u64 y, .param .align 8 .b8 t[24], .param .f32 e, .param .s32 n, .param .u8 c",
    )
    emulator.run(text, [out, Tensor(x), 1e-5, -3, np.uint8(9)], (1, 1, 1), (1, 1, 1))
    assert out[:2].tolist() == [3, 4] and out[2:4].view(np.uint64)[0] == 4
    assert out[4:5].view(np.float32)[0] == np.float32(1e-5) and out[5] == 6
    for bad, match in (
        ([out, x, 1e-5, -3, 9], "Tensor"),
        ([out, Tensor(x), 1e-5, -3], "5 parameters, 4 arguments"),
        ([out, Tensor(x), "no", -3, 9], "argument 2"),
        ([out[::2], Tensor(x), 0.0, -3, 9], "C-contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            emulator.run(text, bad, (1, 1, 1), (1, 1, 1))


def test_launch_must_fit_the_entry() -> None:
    text = entry("ret;", directives=".reqntid 64, 1, 1")
    with pytest.raises(ValueError, match="requires blocks"):
        emulator.run(text, [], (1, 1, 1), (32, 1, 1))
    with pytest.raises(ValueError, match="multiple of the cluster"):
        emulator.run(text, [], (3, 1, 1), (64, 1, 1), (2, 1, 1))
    with pytest.raises(ValueError, match="schedule"):
        emulator.run(text, [], (1, 1, 1), (64, 1, 1), schedule="fair")


# -- faults ------------------------------------------------------------------------------------------------

COPY = (
    ".reg .b64 p, q; .reg .b32 r; ld.param.u64 p, [x]; ld.param.u64 q, [y]; add.u64 p, p, o; add.u64 q, q, o;"
)


@pytest.mark.parametrize(
    ("line", "kind", "match"),
    [
        ("ld.global.u32 r, [p+16];", "out-of-bounds", r"past the end of x .*thread \(28, 0, 0\)"),
        ("ld.global.u32 r, [p+-8];", "out-of-bounds", r"starts 8 bytes before x .*thread \(0, 0, 0\)"),
        ("st.global.u32 [q+65536], r;", "out-of-bounds", r"reaches 65412 bytes past the end of y"),
        ("ld.global.v2.u32 {r, r}, [p];", "misaligned", r"8-byte access .*thread \(1, 0, 0\)"),
        ("cvta.to.shared.u64 p, p; ld.shared.u32 r, [p];", "out-of-bounds", "another CTA"),
        (
            "ld.shared.u32 r, [s+128];",
            "out-of-bounds",
            r"shared offset 128 of 128 bytes \(0 bytes past s\[128\]\)",
        ),
        ("ld.shared.u32 r, [s];", "uninitialized", "nobody has written"),
        ("ld.local.u32 r, [l+8];", "out-of-bounds", "local memory"),
        ("@odd trap;", "trap", r"thread \(1, 0, 0\)"),
    ],
)
def test_faults_name_line_thread_and_neighbour(line: str, kind: str, match: str) -> None:
    x, y = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    memory = Memory()
    memory.add(x, "x")
    memory.add(y, "y")
    body = (
        TID
        + COPY
        + f""".shared .align 4 .b8 s[128]; .local .align 4 .b8 l[8]; .reg .pred odd; .reg .b32 b;
        and.b32 b, t, 1; setp.ne.u32 odd, b, 0; mov.u32 r, 0;
        .loc 1 42 0
        {line}
        ret;"""
    )
    text = entry(body, ".param .u64 x, .param .u64 y", outside='.file 1 "kernel.py"', remember=kind == "trap")
    with pytest.raises(EmulationError, match=match) as caught:
        emulator.run(text, [x, y], (1, 1, 1), (32, 1, 1), memory=memory)
    error = caught.value
    assert error.kind == kind
    assert error.where is not None and error.where.source == "kernel.py:42"
    assert text.splitlines()[error.where.line - 1].strip().startswith(line.split(";")[0].split()[0])


def test_poisoned_buffers() -> None:
    x, y = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    memory = Memory()
    memory.poison(y)
    half = (
        TID
        + COPY
        + ".reg .pred lo; setp.lt.u32 lo, t, 20; @lo ld.global.u32 r, [p]; @lo st.global.u32 [q], r; ret;"
    )
    run(half, [x, y], ".param .u64 x, .param .u64 y", memory=memory)
    assert memory.unwritten(y).tolist() == [False] * 20 + [True] * 12
    whole = TID + COPY + "ld.global.u32 r, [q]; st.global.u32 [p], r; ret;"
    with pytest.raises(EmulationError, match=r"nobody has written.*thread \(20, 0, 0\)"):
        run(whole, [x, y], ".param .u64 x, .param .u64 y", memory=memory)
    result = run(whole, [x, y], ".param .u64 x, .param .u64 y", memory=memory, uninitialized="record")
    assert [e.kind for e in result.diagnostics] == ["uninitialized"]
    with pytest.raises(ValueError, match="poison"):
        memory.unwritten(x)


def test_coverage_names_the_lines_that_no_thread_reached() -> None:
    x, y = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    body = (
        TID
        + COPY
        + ".reg .pred never; setp.gt.u32 never, t, 99;\n@!never bra END;\nst.global.u32 [q], t;\nEND: ret;"
    )
    text = entry(body, ".param .u64 x, .param .u64 y")
    result = emulator.run(text, [x, y], (1, 1, 1), (32, 1, 1))
    (missed,) = result.missed
    assert {text.splitlines()[k - 1] for k in missed} == {"st.global.u32 [q], t;"}


# -- atomics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "type_", "f"),
    [
        ("add", "u32", lambda old, b: old + b),
        ("min", "s32", lambda old, b: min(old - (old >> 31 << 32), b - (b >> 31 << 32))),
        ("max", "u32", max),
        ("and", "b32", lambda old, b: old & b),
        ("or", "b32", lambda old, b: old | b),
        ("xor", "b32", lambda old, b: old ^ b),
        ("exch", "b32", lambda old, b: b),
        ("inc", "u32", lambda old, b: 0 if old >= b else old + 1),
        ("dec", "u32", lambda old, b: b if old == 0 or old > b else old - 1),
    ],
)
def test_atomics_happen_one_after_the_other(name: str, type_: str, f) -> None:
    rng = np.random.default_rng(60)
    cells = rng.integers(0, 2**32, 4, dtype=np.uint64).astype(np.uint32)
    operand = rng.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    cell = rng.integers(0, 4, 64).astype(np.uint32)
    old = np.zeros(64, np.uint32)
    want, seen = [int(v) for v in cells], []
    run(
        TID
        + f""".reg .b64 p<4>, c; .reg .b32 r, b, k;
        ld.param.u64 p0, [w]; ld.param.u64 p1, [x]; ld.param.u64 p2, [y]; ld.param.u64 p3, [z];
        add.u64 p1, p1, o; add.u64 p2, p2, o; add.u64 p3, p3, o;
        ld.global.u32 b, [p1]; ld.global.u32 k, [p2]; mul.wide.u32 c, k, 4; add.u64 c, c, p0;
        atom.global.{name}.{type_} r, [c], b; st.global.u32 [p3], r; ret;""",
        [cells, operand, cell, old],
        ".param .u64 w, .param .u64 x, .param .u64 y, .param .u64 z",
        block=64,
    )
    for b, k in zip(operand.tolist(), cell.tolist(), strict=True):
        seen.append(want[k])
        want[k] = int(f(want[k], b)) & 0xFFFFFFFF
    assert old.tolist() == seen and cells.tolist() == want


def test_float_and_vector_atomics() -> None:
    out = np.zeros(8, np.float32)
    run(
        TID
        + """.reg .b64 q, a; .reg .f32 f, g; .reg .b32 w; ld.param.u64 q, [y];
        cvt.rn.f32.u32 f, t; red.global.add.f32 [q], f; mul.f32 g, f, 0f40000000;
        red.global.v2.f32.add [q+8], {f, g};
        cvt.rn.bf16x2.f32 w, g, f; red.global.add.noftz.bf16x2 [q+16], w;
        red.async.relaxed.cluster.global.add.u32 [q], t; ret;""".replace(
            "red.async.relaxed.cluster.global.add.u32 [q], t;", ""
        ),
        [out],
        ".param .u64 y",
    )
    total = np.arange(32).sum()
    assert out[0] == total and out[2] == total and out[3] == 2 * total
    low, high = values.from_bf16(out[4:5].view(np.uint16))
    assert abs(low - total) <= 8 and abs(high - 2 * total) <= 16 and high > low


def test_a_lock_built_on_cas_excludes() -> None:
    """Threads of different CTAs increment a plain counter under a lock; spinning must not starve the holder."""
    state = np.zeros(2, np.uint32)
    body = """.reg .b64 p; .reg .b32 r, c; .reg .pred q;
    ld.param.u64 p, [x];
    AGAIN: atom.acquire.gpu.global.cas.b32 r, [p], 0, 1; setp.ne.u32 q, r, 0; @q bra AGAIN;
    ld.global.u32 c, [p+4]; add.u32 c, c, 1; st.global.u32 [p+4], c;
    atom.release.gpu.global.exch.b32 r, [p], 0; ret;"""
    for schedule in ("lockstep", "random"):
        state[:] = 0
        run(body, [state], ".param .u64 x", block=1, grid=9, schedule=schedule)
        assert state.tolist() == [0, 9]


# -- asynchronous copies -----------------------------------------------------------------------------------

CP_ASYNC = (
    TID
    + """.shared .align 16 .b8 s[1024]; .reg .b64 p, q, w; .reg .b32 a, r, n; .reg .v4 .b32 unused;
    ld.param.u64 p, [x]; ld.param.u64 q, [y]; mul.wide.u32 w, t, 16; add.u64 p, p, w; add.u64 q, q, w;
    mov.u32 a, s; shl.b32 r, t, 4; add.u32 a, a, r; and.b32 n, t, 15;
    cp.async.cg.shared.global [a], [p], 16, n; cp.async.commit_group;
    cp.async.ca.shared.global [a+512], [p], 16; cp.async.commit_group;
    @WAIT@
    .reg .b32 v<4>; ld.shared.v4.u32 {v0, v1, v2, v3}, [a]; st.global.v4.u32 [q], {v0, v1, v2, v3}; ret;"""
).replace(".reg .v4 .b32 unused;", "")


@pytest.mark.parametrize("wait", ["cp.async.wait_group 1;", "cp.async.wait_all;"])
def test_cp_async_and_its_groups(wait: str) -> None:
    x, out = np.arange(512, dtype=np.uint8), np.ones(512, np.uint8)
    run(CP_ASYNC.replace("@WAIT@", wait), [x, out], ".param .u64 x, .param .u64 y")
    want = x.reshape(32, 16).copy()
    for t in range(32):
        want[t, t % 16 :] = 0
    np.testing.assert_array_equal(out, want.ravel())


@pytest.mark.parametrize("wait", ["", "cp.async.wait_group 2;"])
def test_cp_async_without_enough_waiting_reads_nothing(wait: str) -> None:
    x, out = np.arange(512, dtype=np.uint8), np.ones(512, np.uint8)
    with pytest.raises(EmulationError, match="nobody has written"):
        run(CP_ASYNC.replace("@WAIT@", wait), [x, out], ".param .u64 x, .param .u64 y")


BULK = """.shared .align 128 .b8 s[2048]; .shared .align 8 .b64 bar;
    .reg .b64 p, q, o, st; .reg .b32 t, a, b, r, k; .reg .pred first, done;
    mov.u32 t, %tid.x; mov.u32 a, s; mov.u32 b, bar; ld.param.u64 p, [x]; ld.param.u64 q, [y];
    setp.eq.u32 first, t, 0;
    @first mbarrier.init.shared::cta.b64 [b], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 st, [b], 2048;
    @first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [a], [p], 2048, [b];
    @WAIT@
    shl.b32 k, t, 4; add.u32 k, k, a; ld.shared.u32 r, [k]; add.u32 r, r, 1; st.shared.u32 [k], r;
    fence.proxy.async.shared::cta; bar.sync 0;
    @first cp.async.bulk.global.shared::cta.bulk_group [q], [a], 2048;
    @first cp.async.bulk.commit_group;
    @END@
    ret;"""
WAIT_PHASE = """W: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [b], 0; @!done bra W;"""
REUSE = "bar.sync 0; st.shared.u32 [k], t;"
END = f"@first cp.async.bulk.wait_group.read 0; {REUSE}"


def test_bulk_copies_with_an_mbarrier_and_a_bulk_group() -> None:
    x, out = np.arange(512, dtype=np.uint32), np.zeros(512, np.uint32)
    text = BULK.replace("@WAIT@", WAIT_PHASE).replace("@END@", END)
    for schedule in ("lockstep", "random"):
        out[:] = 0
        run(text, [x, out], ".param .u64 x, .param .u64 y", block=128, schedule=schedule, seed=3)
        want = x.copy()
        want[::4] += 1
        np.testing.assert_array_equal(out, want)


def test_bulk_copy_not_waited_for() -> None:
    x, out = np.arange(512, dtype=np.uint32), np.zeros(512, np.uint32)
    with pytest.raises(EmulationError, match="nobody has written"):
        run(
            BULK.replace("@WAIT@", "").replace("@END@", END),
            [x, out],
            ".param .u64 x, .param .u64 y",
            block=128,
        )


def test_bulk_source_reused_too_early() -> None:
    """Without wait_group the source is overwritten before the copy reads it, and the output shows it."""
    x, out = np.arange(512, dtype=np.uint32), np.zeros(512, np.uint32)
    late = REUSE + "@first cp.async.bulk.wait_group.read 0;"
    run(
        BULK.replace("@WAIT@", WAIT_PHASE).replace("@END@", late),
        [x, out],
        ".param .u64 x, .param .u64 y",
        block=128,
    )
    np.testing.assert_array_equal(out[::4], np.arange(128))


def test_a_cta_must_outlive_its_bulk_copies() -> None:
    x, out = np.arange(512, dtype=np.uint32), np.zeros(512, np.uint32)
    text = BULK.replace("@WAIT@", WAIT_PHASE).replace("@END@", "")
    with pytest.raises(EmulationError, match="which has exited"):
        run(text, [x, out], ".param .u64 x, .param .u64 y", block=128)


def test_expected_bytes_that_never_come_are_a_deadlock() -> None:
    x, out = np.arange(512, dtype=np.uint32), np.zeros(512, np.uint32)
    text = BULK.replace("@WAIT@", WAIT_PHASE).replace("@END@", "").replace("[b], 2048;", "[b], 2064;")
    with pytest.raises(emulator.Deadlock, match=r"128 threads wait for phase 0 .*bar\+0.*tx-count 16"):
        run(text, [x, out], ".param .u64 x, .param .u64 y", block=128)


def test_bulk_reduction_and_alignment() -> None:
    x, out = np.arange(64, dtype=np.float32), np.ones(64, np.float32)
    body = """.shared .align 16 .b8 s[256]; .reg .b64 p, q; .reg .b32 a, t, k; .reg .f32 f; .reg .pred first;
    .reg .b64 o; mov.u32 t, %tid.x; mov.u32 a, s; ld.param.u64 p, [x]; ld.param.u64 q, [y];
    mul.wide.u32 o, t, 4; add.u64 p, p, o; shl.b32 k, t, 2; add.u32 k, k, a; ld.global.f32 f, [p];
    st.shared.f32 [k], f; fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 first, t, 0; @!first ret;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [q], [a], @SIZE@;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret;"""
    run(body.replace("@SIZE@", "256"), [x, out], ".param .u64 x, .param .u64 y", block=64)
    np.testing.assert_array_equal(out, x + 1)
    with pytest.raises(EmulationError, match="multiples of 16"):
        text = entry(body.replace("@SIZE@", "24"), ".param .u64 x, .param .u64 y", remember=False)
        emulator.run(text, [x, out], (1, 1, 1), (64, 1, 1))


# -- matrices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", ["bf16", "f16"])
def test_ldmatrix_and_mma(type_: str) -> None:
    """D = A B + C for two warps; A through ldmatrix, B through ldmatrix.trans, as compilers load them."""
    f = values.FORMATS[type_]
    rng = np.random.default_rng(61)
    a = values.encode(rng.standard_normal((16, 16)), f).astype(np.uint16)
    b = values.encode(rng.standard_normal((16, 8)), f).astype(np.uint16)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    d = np.zeros((2, 16, 8), np.float32)
    body = """.shared .align 16 .b8 sa[512]; .shared .align 16 .b8 sb[256];
    .reg .b64 pa, pb, pc, pd, o; .reg .b32 t, l, w, x, y, g, i, r<4>, u<2>; .reg .f32 c<4>, d<4>; .reg .pred q;
    .reg .b16 h; ld.param.u64 pa, [a]; ld.param.u64 pb, [b]; ld.param.u64 pc, [c]; ld.param.u64 pd, [d];
    mov.u32 t, %tid.x; and.b32 l, t, 31; shr.u32 w, t, 5;
    mul.wide.u32 o, t, 8; add.u64 pa, pa, o; ld.global.v2.u32 {r0, r1}, [pa]; mov.u32 x, sa; shl.b32 y, t, 3;
    add.u32 x, x, y; st.shared.v2.u32 [x], {r0, r1};
    mul.wide.u32 o, t, 4; add.u64 pb, pb, o; ld.global.u32 r0, [pb]; mov.u32 x, sb; shl.b32 y, t, 2;
    add.u32 x, x, y; st.shared.u32 [x], r0; bar.sync 0;
    and.b32 x, l, 15; shl.b32 x, x, 5; shr.u32 y, l, 4; shl.b32 y, y, 4; add.u32 x, x, y; mov.u32 y, sa;
    add.u32 x, x, y; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r0, r1, r2, r3}, [x];
    and.b32 x, l, 15; shl.b32 x, x, 4; mov.u32 y, sb; add.u32 x, x, y;
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {u0, u1}, [x];
    shr.u32 g, l, 2; and.b32 i, l, 3; shl.b32 x, g, 5; shl.b32 y, i, 3; add.u32 x, x, y; cvt.u64.u32 o, x;
    add.u64 pc, pc, o; add.u64 pd, pd, o; mul.wide.u32 o, w, 512; add.u64 pd, pd, o;
    ld.global.v2.f32 {c0, c1}, [pc]; ld.global.v2.f32 {c2, c3}, [pc+256];
    mma.sync.aligned.m16n8k16.row.col.f32.@T@.@T@.f32 {d0, d1, d2, d3}, {r0, r1, r2, r3}, {u0, u1}, {c0, c1, c2, c3};
    st.global.v2.f32 [pd], {d0, d1}; st.global.v2.f32 [pd+256], {d2, d3}; ret;""".replace("@T@", type_)
    run(body, [a, b, c, d], ".param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d", block=64)
    want = values.decode(a, f).astype(np.float64) @ values.decode(b, f).astype(np.float64) + c
    np.testing.assert_allclose(d[0], want, rtol=2e-7, atol=1e-7)
    np.testing.assert_array_equal(d[0], d[1])


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_inverts_ldmatrix(trans: str) -> None:
    x, out = np.arange(256, dtype=np.uint16), np.zeros(256, np.uint16)
    body = f""".shared .align 16 .b8 s[512]; .shared .align 16 .b8 z[512]; .reg .b64 p, q, o; .reg .b32 t, k, a, r<4>;
    mov.u32 t, %tid.x; ld.param.u64 p, [x]; ld.param.u64 q, [y]; mul.wide.u32 o, t, 16; add.u64 p, p, o;
    add.u64 q, q, o; shl.b32 k, t, 4; mov.u32 a, s; add.u32 a, a, k; ld.global.v4.u32 {{r0, r1, r2, r3}}, [p];
    st.shared.v4.u32 [a], {{r0, r1, r2, r3}}; bar.warp.sync 0xffffffff;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{r0, r1, r2, r3}}, [a];
    mov.u32 a, z; add.u32 a, a, k; stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [a], {{r0, r1, r2, r3}};
    bar.warp.sync 0xffffffff; ld.shared.v4.u32 {{r0, r1, r2, r3}}, [a]; st.global.v4.u32 [q], {{r0, r1, r2, r3}};
    ret;"""
    run(body, [x, out], ".param .u64 x, .param .u64 y")
    np.testing.assert_array_equal(out, x)


# -- control flow --------------------------------------------------------------------------------------------


def test_calls_keep_parameters_apart_per_thread() -> None:
    outside = """.func (.param .b32 out) twice(.param .b32 in)
{ .reg .b32 r; ld.param.b32 r, [in]; add.u32 r, r, r; st.param.b32 [out], r; ret; }
.func (.param .b32 out) odd_even(.param .b32 in)
{ .reg .b32 r, s; .reg .pred p; ld.param.b32 r, [in]; and.b32 s, r, 1; setp.eq.u32 p, s, 0; @p bra EVEN;
  add.u32 r, r, 1000; st.param.b32 [out], r; ret;
EVEN: { .param .b32 a; .param .b32 b; st.param.b32 [a], r; call (b), twice, (a); ld.param.b32 r, [b]; }
  st.param.b32 [out], r; ret; }"""
    out = np.zeros(32, np.uint32)
    run(
        TID
        + """.reg .b64 q; .reg .b32 r, s; ld.param.u64 q, [y]; add.u64 q, q, o;
        { .param .b32 a; .param .b32 b; st.param.b32 [a], t; call.uni (b), odd_even, (a); ld.param.b32 r, [b]; }
        { .param .b32 a; .param .b32 b; st.param.b32 [a], t; call (b), twice, (a); ld.param.b32 s, [b]; }
        add.u32 r, r, s; st.global.u32 [q], r; ret;""",
        [out],
        ".param .u64 y",
        outside=outside,
    )
    t = np.arange(32)
    np.testing.assert_array_equal(out, np.where(t % 2, t + 1000, 2 * t) + 2 * t)


def test_indexed_branches_and_loops_of_different_length() -> None:
    out = np.zeros(64, np.uint32)
    run(
        TID
        + """.reg .b64 q; .reg .b32 r, k, n; .reg .pred p; ld.param.u64 q, [y]; add.u64 q, q, o;
        mov.u32 r, 0; mov.u32 n, t;
        LOOP: setp.eq.u32 p, n, 0; @p bra OUT; add.u32 r, r, n; sub.u32 n, n, 1; bra LOOP;
        OUT: and.b32 k, t, 3;
        TS: .branchtargets A, B, C, A;
        brx.idx k, TS;
        A: add.u32 r, r, 10000; bra END;
        B: add.u32 r, r, 20000; bra END;
        C: add.u32 r, r, 30000;
        END: st.global.u32 [q], r; ret;""",
        [out],
        ".param .u64 y",
        block=64,
    )
    t = np.arange(64)
    np.testing.assert_array_equal(out, t * (t + 1) // 2 + np.array([10000, 20000, 30000, 10000])[t % 4])


def test_more_ctas_than_fit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3_audit.audit.emulator import machine

    monkeypatch.setattr(machine, "RESIDENT_BYTES", 3000)
    out = np.zeros(40, np.uint32)
    body = """.shared .align 4 .b8 s[4]; .reg .b64 q, o; .reg .b32 r, c; ld.param.u64 q, [y]; mov.u32 c, %ctaid.x;
    mul.wide.u32 o, c, 4; add.u64 q, q, o; st.shared.u32 [s], c; bar.sync 0; ld.shared.u32 r, [s];
    add.u32 r, r, %nctaid.x; st.global.u32 [q], r; ret;"""
    body = body.replace("add.u32 r, r, %nctaid.x;", ".reg .b32 n; mov.u32 n, %nctaid.x; add.u32 r, r, n;")
    run(body, [out], ".param .u64 y", block=32, grid=40)
    np.testing.assert_array_equal(out, np.arange(40) + 40)


def test_the_assembler_accepts_these_kernels(tmp_path: Path) -> None:
    assert assemble_all(tmp_path) == []
