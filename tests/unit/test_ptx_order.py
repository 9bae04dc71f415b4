"""The order graph: paths as one thread can take them, edges between threads, ranges of loop variables."""

from __future__ import annotations

import pytest
from k3_audit.audit.ptx.parser import parse
from k3_audit.audit.subject import Subject

pytestmark = pytest.mark.unit

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.shared .align 128 .b8 smem[4096];
.shared .align 8 .b64 full;
.shared .align 8 .b64 empty;
"""
REGISTERS = ".reg .pred %p<16>; .reg .b32 %r<30>; .reg .b64 %rd<30>;"


def subject(code: str) -> Subject:
    entry = ".entry k(.param .u64 .ptr .global x, .param .u32 n) .reqntid 128, 1, 1"
    text = f"{HEAD}{entry} {{ {REGISTERS}\n{code}\nret; }}"
    module = parse(text)
    assert module.unknown == []
    return Subject(module, module.functions["k"])


def at(s: Subject, text: str, nth: int = 0) -> int:
    return [i.index for i in s.body if i.text.startswith(text)][nth]


ROLES = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, full;
    mov.u32 %r3, empty;
    mov.u32 %r4, smem;
    setp.gt.u32 %p1, %r1, 31;
    @%p1 bra CONSUMER;
    st.shared.b32 [%r4], %r1;
    mbarrier.arrive.shared::cta.b64 _, [%r2];
    bra END;
CONSUMER:
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
    ld.shared.b32 %r5, [%r4];
    bar.sync 1, 96;
END:
"""


def test_mbarrier_leads_from_one_role_to_the_other():
    s = subject(ROLES)
    store, load = at(s, "st.shared"), at(s, "ld.shared")
    came = s.order.search([store])
    assert load in came
    assert load not in s.order.search([store], sync=False)
    route = s.order.trace(came, load, [store])
    assert s.order.certain(route)
    assert [s.effects[i].op for i in route if s.order.instruction(i) is not None][1:3] == [
        "arrive",
        "try_wait",
    ]


def test_another_mbarrier_does_not():
    s = subject(ROLES.replace("_, [%r2]", "_, [%r3]"))
    assert at(s, "ld.shared") not in s.order.search([at(s, "st.shared")])


def test_named_barrier_between_roles():
    code = ROLES.replace("mbarrier.arrive.shared::cta.b64 _, [%r2]", "bar.arrive 1, 128").replace(
        "WAIT:\n    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;\n    @!%p2 bra WAIT;\n",
        "    bar.sync 1, 128;\n",
    )
    s = subject(code)
    assert at(s, "ld.shared") in s.order.search([at(s, "st.shared")])
    other = subject(code.replace("bar.arrive 1", "bar.arrive 2"))
    assert at(other, "ld.shared") not in other.order.search([at(other, "st.shared")])


GUARDS = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    ld.param.u32 %r3, [n];
    shr.u32 %r4, %r1, 6;
    setp.eq.s32 %p1, %r3, 7;
    setp.lt.u32 %p2, %r1, 64;
    and.pred %p3, %p1, %p2;
    not.pred %p4, %p3;
    @%p4 bra SKIP;
    bar.sync 1, 64;
SKIP:
    @!%p1 bra DONE;
    setp.ne.s32 %p5, %r4, 0;
    @%p5 bra DONE;
    ld.shared.b32 %r5, [%r2];
DONE:
"""


def test_branches_that_a_reader_cannot_take_are_not_followed():
    """Whoever loads has n == 7 and is in the first two warps, so it passed the barrier."""
    s = subject(GUARDS)
    barrier, load = at(s, "bar.sync"), at(s, "ld.shared")
    everyone = s.order.search([s.order.head(0)], stop=[barrier].__contains__, sync=False)
    reader = s.order.search(
        [s.order.head(0)], stop=[barrier].__contains__, sync=False, enter=s.order.as_thread_of(load)
    )
    assert load in everyone
    assert load not in reader


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("setp.lt.u32 %p2, %r1, 64;", "setp.lt.u32 %p2, %r1, 32;"),
        ("@!%p1 bra DONE;", "@%p1 bra DONE;"),
        ("and.pred", "xor.pred"),
    ],
)
def test_and_those_that_it_can_take_are(old, new):
    s = subject(GUARDS.replace(old, new))
    barrier, load = at(s, "bar.sync"), at(s, "ld.shared")
    reader = s.order.search(
        [s.order.head(0)], stop=[barrier].__contains__, sync=False, enter=s.order.as_thread_of(load)
    )
    assert load in reader


LOOPS = {
    "up to a limit": (
        "mov.b32 %r5, 0;",
        "add.s32 %r5, %r5, 16; setp.lt.s32 %p1, %r5, 128;",
        "@%p1",
        "[0, 112]",
    ),
    "until equal": (
        "mov.b32 %r5, 64;",
        "add.s32 %r5, %r5, 16; setp.ne.s32 %p1, %r5, 256;",
        "@%p1",
        "[64, 240]",
    ),
    "downwards": ("mov.b32 %r5, 96;", "add.s32 %r5, %r5, -32; setp.ge.s32 %p1, %r5, 0;", "@%p1", "[0, 96]"),
    "negated": ("mov.b32 %r5, 0;", "add.s32 %r5, %r5, 4; setp.eq.s32 %p1, %r5, 32;", "@!%p1", "[0, 28]"),
    "counted by another": (
        "mov.b32 %r5, 0; mov.b32 %r6, 0;",
        "add.s32 %r5, %r5, 512; add.s32 %r6, %r6, 1; setp.lt.s32 %p1, %r6, 4;",
        "@%p1",
        "[0, 1536]",
    ),
    "without a limit": (
        "mov.b32 %r5, 0;",
        "add.s32 %r5, %r5, 16; setp.lt.s32 %p1, %r5, %r9;",
        "@%p1",
        "[...]",
    ),
}


@pytest.mark.parametrize(("start", "step", "guard", "expected"), LOOPS.values(), ids=LOOPS)
def test_range_of_a_loop_variable(start, step, guard, expected):
    code = (
        f"mov.u32 %r2, smem; ld.param.u32 %r9, [n]; {start} L: add.s32 %r7, %r2, %r5; st.shared.b32 [%r7], %r9; {step} "
        f"{guard} bra L;"
    )
    s = subject(code)
    i = at(s, "st.shared")
    assert s.address(i, s.effects[i].accesses[0]).describe() == f"shared smem+{expected}"


def test_overlap_is_sure_only_of_bytes_surely_touched():
    s = subject(
        "mov.u32 %r2, smem; mov.u32 %r1, %tid.x; mul.lo.s32 %r3, %r1, 4; add.s32 %r4, %r2, %r3;"
        " st.shared.b32 [%r4], %r1;"
        "st.shared.b32 [%r2+64], %r1; st.shared.b32 [%r2+1024], %r1; mov.u32 %r6, %ctaid.x; mul.lo.s32 %r7, %r6, 4;"
        "add.s32 %r8, %r2, %r7; st.shared.b32 [%r8], %r1;"
    )
    all_, one, far, unknown = (at(s, "st.shared", n) for n in range(4))

    def sure(i: int, j: int) -> bool:
        return s.order.surely_overlap(i, s.effects[i].accesses[0], j, s.effects[j].accesses[0])

    assert sure(all_, one) and not sure(one, far)
    assert not sure(unknown, one)
    assert s.order.overlap(unknown, s.effects[unknown].accesses[0], one, s.effects[one].accesses[0])
