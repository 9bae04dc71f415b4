"""Handoffs lifted out of PTX: the protocol of the code, not of a drawing of it."""

from __future__ import annotations

import pytest
from k3_audit.artifact import Contract, Store
from k3_audit.audit.findings import Verdict
from k3_audit.audit.memory_model import check
from k3_audit.audit.memory_model.lift import Kernel, Lifted
from k3_audit.audit.memory_model.program import ModelError
from k3_audit.audit.memory_model.walk import Code, Pointer, Where, walk
from k3_audit.audit.ptx.inline import inline
from k3_audit.audit.ptx.parser import parse

pytestmark = pytest.mark.unit

EXCHANGE = """\
.version 8.8
.target sm_90a
.address_size 64
.visible .entry exchange(.param .u64 exchange_param_0, .param .u32 exchange_param_1)
.reqntid 32, 1, 1
{
    .reg .pred %p<4>;
    .reg .b32 %r<20>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<4>;
    .shared .align 8 .b8 flag[8];
    .shared .align 16 .b8 slots[128];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r3, flag;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r3], 128;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.relaxed.aligned;
    griddepcontrol.wait;
    ld.param.u64 %rd1, [exchange_param_0];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f1, [%rd3];
    barrier.cluster.wait.acquire.aligned;
    xor.b32 %r4, %r2, 1;
    shl.b32 %r5, %r1, 2;
    mov.u32 %r6, slots;
    add.u32 %r7, %r6, %r5;
    mapa.shared::cluster.u32 %r8, %r7, %r4;
    mapa.shared::cluster.u32 %r9, %r3, %r4;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%r8], %f1, [%r9];
AGAIN:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra AGAIN;
    ld.shared.f32 %f2, [%r7];
    setp.lt.f32 %p3, %f2, 0f00000000;
    @%p3 bra END;
    st.global.f32 [%rd3], %f2;
END:
    ret;
}
"""

CONTRACT = Contract.from_dict(
    {
        "kernel": "exchange",
        "params": [
            {"name": "x", "dtype": "f32", "role": "upstream", "access": "rw"},
            {"name": "n", "dtype": "i32"},
        ],
        "launch": {"block": [32, 1, 1], "cluster": [2, 1, 1], "grid": ["2", "1", "1"], "pdl": True},
        "handoffs": [
            {
                "name": "values",
                "data": "one value per lane",
                "producer": "peer",
                "consumer": "all",
                "via": "mbarrier",
                "scope": "cluster",
            },
            {
                "name": "input",
                "data": "x",
                "producer": "previous grid",
                "consumer": "all",
                "via": "grid_dependency",
                "scope": "gpu",
            },
            {
                "name": "other",
                "data": "x",
                "producer": "a",
                "consumer": "b",
                "via": "flag",
                "scope": "gpu",
            },
        ],
    }
)


def lift(ptx: str, name: str) -> Lifted:
    module = parse(ptx)
    return Kernel(inline(module, module.entries[0]), CONTRACT, {}).lift(name)


def verdicts(ptx: str, name: str) -> set[Verdict]:
    return {check.check(p).verdict for p in lift(ptx, name).programs}


@pytest.mark.parametrize("name", ["values", "input"])
def test_a_right_kernel_is_proved(name: str) -> None:
    lifted = lift(EXCHANGE, name)
    for program in lifted.programs:
        result = check.check(program)
        assert result.expected is False and not result.allowed and result.completes
        assert result.verdict == Verdict.CLEAN
    assert "all 64 walked" in lifted.bounds[0]


DEFECTS = [
    ("values", "try_wait.parity.acquire.cluster", "try_wait.parity.acquire.cta", Verdict.FINDING),
    ("values", "try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cluster", Verdict.FINDING),
    ("values", "    fence.mbarrier_init.release.cluster;\n", "", Verdict.FINDING),
    ("values", "    barrier.cluster.wait.acquire.aligned;\n", "", Verdict.FINDING),
    ("values", "_, [%r3], 128", "_, [%r3], 124", Verdict.FINDING),  # one store too few is waited for
    ("values", "_, [%r3], 128", "_, [%r3], 132", Verdict.INCONCLUSIVE),  # it waits for ever
    ("values", "[%r3], 0;", "[%r3], 1;", Verdict.FINDING),  # wrong parity
    (
        "values",
        "mapa.shared::cluster.u32 %r9, %r3, %r4",
        "mapa.shared::cluster.u32 %r9, %r3, %r2",
        Verdict.FINDING,
    ),
    ("input", "    griddepcontrol.wait;\n", "", Verdict.FINDING),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d[1].strip()} -> {d[2].strip()}")
def test_a_defect_in_the_ptx_is_seen(defect: tuple[str, str, str, Verdict]) -> None:
    name, old, new, verdict = defect
    assert EXCHANGE.count(old) == 1
    assert verdict in verdicts(EXCHANGE.replace(old, new), name)


def test_a_read_before_the_dependency_wait_is_seen() -> None:
    late = EXCHANGE.replace("    griddepcontrol.wait;\n", "").replace(
        "    barrier.cluster.wait", "    griddepcontrol.wait;\n    barrier.cluster.wait"
    )
    assert verdicts(late, "input") == {Verdict.FINDING}


def test_one_thread_waits_for_the_grid_and_a_barrier_carries_it() -> None:
    one = EXCHANGE.replace("    griddepcontrol.wait;\n", "").replace(
        "READY:", "    griddepcontrol.wait;\nREADY:\n    bar.sync 0;"
    )
    assert verdicts(one, "input") == {Verdict.CLEAN}
    assert verdicts(one.replace("    bar.sync 0;", ""), "input") >= {Verdict.FINDING}


def test_events_name_their_ptx_line() -> None:
    program = lift(EXCHANGE, "values").programs[0]
    lines = EXCHANGE.splitlines()
    for thread in program.threads:
        assert len(thread.lines) == len(thread.body)
        for line in thread.lines:
            assert any(
                w in lines[line - 1] for w in ("mbarrier", "barrier", "st.async", "ld.", "fence", "griddep")
            )


def test_what_cannot_be_lifted_is_said() -> None:
    with pytest.raises(ModelError, match="no handoff 'nosuch'; known: values, input, other"):
        lift(EXCHANGE, "nosuch")
    with pytest.raises(ModelError, match="via flag are not lifted yet"):
        lift(EXCHANGE, "other")
    with pytest.raises(ModelError, match="does not simply lead to another try"):
        lift(EXCHANGE.replace("@!%p2 bra AGAIN", "@!%p2 bra END"), "values")
    with pytest.raises(ModelError, match="consumes"):
        lift(EXCHANGE.replace("ld.shared.f32 %f2, [%r7]", "mov.f32 %f2, %f1"), "values")


# Walks.


def steps(ptx: str, tid: int, rank: int) -> list[tuple[str, tuple[Pointer | None, ...]]]:
    module = parse(ptx)
    where = Where((tid, 0, 0), (32, 1, 1), (rank, 0, 0), (2, 1, 1), (2, 1, 1))
    first, *_ = walk(Code(module.entries[0]), where, {})
    return [(s.instruction.name, s.addresses) for s in first.steps]


def test_addresses_are_those_of_the_thread() -> None:
    found = dict(steps(EXCHANGE, 5, 1))
    push = found["st.async.shared::cluster.mbarrier::complete_tx::bytes.f32"]
    assert push[0] == Pointer("shared", "slots", 20, 0) and push[2] == Pointer("shared", "flag", 0, 0)
    assert found["ld.shared.f32"][1] == Pointer("shared", "slots", 20, 1)
    assert found["ld.global.f32"][1] == Pointer("param", "exchange_param_0", 20)
    assert "mbarrier.init.shared::cta.b64" not in found


def test_a_branch_on_data_has_two_ways() -> None:
    module = parse(EXCHANGE)
    where = Where((0, 0, 0), (32, 1, 1), (0, 0, 0), (2, 1, 1), (2, 1, 1))
    ways = walk(Code(module.entries[0]), where, {})
    assert [w.taken for w in ways] == [(False,), (True,)]
    assert [
        any(s.instruction.opcode == "st" for s in w.steps if s.instruction.has("global")) for w in ways
    ] == [
        True,
        False,
    ]


ARITHMETIC = [
    ("add.u32 %r2, %r1, 7", 12),
    ("sub.s32 %r2, %r1, 7", 0xFFFFFFFE),
    ("mul.lo.u32 %r2, %r1, %r1", 25),
    ("mad.lo.u32 %r2, %r1, 3, %r1", 20),
    ("shl.b32 %r2, %r1, 31", 0x80000000),
    ("shr.u32 %r2, %r1, 1", 2),
    ("and.b32 %r2, %r1, -2", 4),
    ("or.b32 %r2, %r1, 8", 13),
    ("xor.b32 %r2, %r1, 1", 4),
    ("not.b32 %r2, %r1", 0xFFFFFFFA),
    ("min.s32 %r2, %r1, -1", 0xFFFFFFFF),
    ("max.u32 %r2, %r1, -1", 0xFFFFFFFF),
    ("div.u32 %r2, %r1, 2", 2),
    ("rem.u32 %r2, %r1, 3", 2),
    ("bfe.u32 %r2, %r1, 1, 2", 2),
    ("cvt.u16.u32 %r2, %r1", 5),
]


@pytest.mark.parametrize(("text", "value"), ARITHMETIC)
def test_integers_are_followed(text: str, value: int) -> None:
    ptx = (
        ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k()\n{\n.reg .b32 %r<4>;\n"
        f".shared .b8 s[8];\nmov.u32 %r1, %tid.x;\n{text};\nmov.u32 %r3, s;\nadd.u32 %r3, %r3, %r2;\n"
        "ld.shared.b32 %r1, [%r3];\nret;\n}\n"
    )
    (load,) = steps(ptx, 5, 0)
    signed = value - (1 << 32) if value >> 31 else value
    assert load[1][1] == Pointer("shared", "s", signed, 0)


# The kernel that ships.


@pytest.mark.skipif(not Store().built("attn_res", "sm_90a"), reason="attn_res is not built here")
def test_the_shipped_handoffs_are_proved_and_their_defects_seen() -> None:
    artifact = Store().get("attn_res", "sm_90a")
    module = parse(artifact.ptx)
    kernel = Kernel(inline(module, module.entries[0]), artifact.contract, {})
    for handoff in artifact.contract.handoffs:
        results = [check.check(p) for p in kernel.lift(handoff.name).programs]
        assert {r.verdict for r in results} == {Verdict.CLEAN}
        assert sum(r.seconds for r in results) < 60
