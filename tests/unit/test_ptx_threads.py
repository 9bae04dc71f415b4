"""Who executes: the conditions that compilers write, and what they mean for threads, warps and CTAs."""

from __future__ import annotations

import pytest
from k3_audit.audit.ptx.cfg import CFG
from k3_audit.audit.ptx.inline import inline
from k3_audit.audit.ptx.parser import parse
from k3_audit.audit.ptx.provenance import Provenance
from k3_audit.audit.ptx.ssa import SSA
from k3_audit.audit.ptx.threads import Executors, Threads, Uniform

pytestmark = pytest.mark.unit

REGISTERS = ".reg .pred %p<9>; .reg .b32 %r<30>; .reg .b64 %rd<30>; .shared .b8 sm[4096];"
TID = "mov.u32 %r1, %tid.x;"


class Kernel:
    def __init__(self, code: str, directives: str = ".reqntid 256, 1, 1") -> None:
        head = ".version 8.8\n.target sm_90a\n.address_size 64\n"
        module = parse(
            f"{head}.entry k(.param .u64 a, .param .u32 n) {directives} {{ {REGISTERS}\n{code}\nret; }}"
        )
        assert module.unknown == []
        self.flat = inline(module, module.functions["k"])
        self.cfg = CFG(self.flat)
        self.ssa = SSA(self.cfg)
        self.provenance = Provenance(module, self.flat, self.cfg, self.ssa)
        self.threads = Threads(self.cfg, self.ssa, self.provenance)

    def at(self, opcode: str) -> int:
        return next(i.index for i in self.flat.body if i.opcode == opcode)

    def who(self, opcode: str = "membar") -> str:
        return str(self.threads.executors(self.at(opcode)))


CASES = {
    "everyone": ("membar.cta;", "all threads"),
    "one thread by branch": (f"{TID} setp.ne.s32 %p1, %r1, 0; @%p1 bra D; membar.cta; D:", "thread 0"),
    "one thread by predicate": (f"{TID} setp.eq.s32 %p1, %r1, 64; @%p1 membar.cta;", "thread 64"),
    "after the join": (
        f"{TID} setp.ne.s32 %p1, %r1, 0; @%p1 bra D; mov.b32 %r2, 1; D: membar.cta;",
        "all threads",
    ),
    "early exit": (f"{TID} setp.gt.u32 %p1, %r1, 31; @%p1 exit; membar.cta;", "warp 0"),
    "range": (f"{TID} setp.lt.u32 %p1, %r1, 7; @%p1 membar.cta;", "threads 0-6"),
    "warps by range": (f"{TID} setp.lt.u32 %p1, %r1, 128; @!%p1 membar.cta;", "warps 4-7"),
    "warp by shift": (f"{TID} shr.u32 %r2, %r1, 5; setp.eq.s32 %p1, %r2, 3; @%p1 membar.cta;", "warp 3"),
    "warp by shuffle": (
        f"{TID} shr.u32 %r2, %r1, 5; shfl.sync.idx.b32 %r3|%p2, %r2, 0, 31, -1; setp.eq.s32 %p1, %r3, 3;"
        "@%p1 membar.cta;",
        "warp 3",
    ),
    "lane of each warp": (
        f"{TID} and.b32 %r2, %r1, 31; setp.eq.s32 %p1, %r2, 0; @%p1 membar.cta;",
        "one lane per warp",
    ),
    "elected lane of a warp": (
        f"{TID} shr.u32 %r2, %r1, 5; setp.ne.s32 %p1, %r2, 2; @%p1 bra D; elect.sync _|%p2, -1;"
        f" @%p2 membar.cta; D:",
        "one lane of warp 2",
    ),
    "elect through selp": (
        "elect.sync %r5|%p1, -1; selp.b32 %r2, 1, 0, %p1; setp.ne.b32 %p2, %r2, 0; @%p2 membar.cta;",
        "one lane per warp",
    ),
    "conjunction": (
        f"{TID} setp.eq.s32 %p1, %r1, 0; mov.u32 %r2, %cluster_ctarank; setp.eq.and.s32 %p2, %r2, 1, %p1;"
        "@%p2 membar.cta;",
        "thread 0, CTA 1",
    ),
    "conjunction by or": (
        f"{TID} mov.u32 %r2, %ctaid.x; or.b32 %r3, %r1, %r2; setp.ne.s32 %p1, %r3, 0; @%p1 bra D;"
        f" membar.cta; D:",
        "thread 0, CTA 0",
    ),
    "negated and": (
        f"{TID} setp.eq.s32 %p1, %r1, 0; not.pred %p2, %p1; @%p2 bra D; membar.cta; D:",
        "thread 0",
    ),
    "uniform": ("ld.param.u32 %r1, [n]; setp.eq.s32 %p1, %r1, 0; @%p1 membar.cta;", "all threads, sometimes"),
    "varying": (
        f"{TID} ld.param.u64 %rd1, [a]; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;"
        f" ld.global.b32 %r2, [%rd1];"
        "setp.eq.s32 %p1, %r2, 0; @%p1 membar.cta;",
        "all threads, some",
    ),
    "unlucky disjunction": (
        f"{TID} setp.eq.s32 %p1, %r1, 0; setp.eq.or.s32 %p2, %r1, 5, %p1; @%p2 membar.cta;",
        "all threads, some",
    ),
}


@pytest.mark.parametrize(("code", "expected"), CASES.values(), ids=CASES)
def test_executors(code, expected):
    assert Kernel(code).who() == expected


def test_two_dimensional_block():
    """`%tid.x == 0` is one thread of each row; `%tid.x + 32 * %tid.y == 0` is one thread."""
    code = f"{TID} setp.eq.s32 %p1, %r1, 0; @%p1 membar.cta;"
    assert Kernel(code, ".reqntid 32, 4, 1").who() == "all threads, some"
    linear = "mov.u32 %r2, %tid.y; mad.lo.s32 %r3, %r2, 32, %r1; setp.eq.s32 %p1, %r3, 0; @%p1 membar.cta;"
    assert Kernel(TID + linear, ".reqntid 32, 4, 1").who() == "thread 0"


def test_predicates_of_executors():
    one = Executors(threads=(0, 0), warps=(0, 0))
    warp = Executors(threads=(0, 31), warps=(0, 0))
    other = Executors(threads=(32, 63), warps=(1, 1))
    assert one.one_thread and not warp.one_thread and warp.one_warp
    assert warp.includes(one) and not one.includes(warp)
    assert warp.disjoint(other) and not warp.disjoint(one)
    assert (
        Executors().everyone and Executors().includes(other) and not Executors(varying=True).includes(other)
    )


def test_uniformity():
    k = Kernel(
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; ld.param.u32 %r3, [n]; add.s32 %r4, %r2, %r3;"
        " add.s32 %r5, %r4, %r1;"
        "shfl.sync.idx.b32 %r6|%p1, %r5, 0, 31, -1; bar.red.popc.u32 %r7, 0, %p1;"
        " ld.volatile.shared.b32 %r8, [sm];"
        "ld.shared.b32 %r9, [sm];"
    )

    def level(register: str) -> Uniform:
        index = next(i.index for i in k.flat.body if register in i.text.split(",")[0])
        return k.threads.level(k.ssa.written(index, register))

    assert [level(f"%r{n}") for n in range(1, 10)] == [
        Uniform.VARYING,
        Uniform.CTA,
        Uniform.CTA,
        Uniform.CTA,
        Uniform.VARYING,
        Uniform.WARP,
        Uniform.CTA,
        Uniform.VARYING,
        Uniform.CTA,
    ]


def test_a_value_joined_after_a_varying_branch_is_varying():
    k = Kernel(
        f"{TID} setp.eq.s32 %p1, %r1, 0; mov.b32 %r2, 0; @%p1 bra D; mov.b32 %r2, 1; D: add.s32 %r3, %r2, 1;"
    )
    index = next(i.index for i in k.flat.body if i.opcode == "add")
    assert k.threads.level(k.ssa.written(index, "%r3")) == Uniform.VARYING
