"""Inlining, SSA and provenance: where addresses come from, on code small enough to work out by hand."""

from __future__ import annotations

import pytest
from k3_audit.audit.ptx.cfg import CFG
from k3_audit.audit.ptx.effects import effect
from k3_audit.audit.ptx.inline import inline
from k3_audit.audit.ptx.parser import parse
from k3_audit.audit.ptx.provenance import Provenance, may_overlap
from k3_audit.audit.ptx.ssa import SSA

pytestmark = pytest.mark.unit

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 dyn[];
.global .align 8 .u64 table[4];
"""
REGISTERS = ".reg .pred %p<9>; .reg .b32 %r<30>; .reg .b64 %rd<30>; .reg .f32 %f<9>; .shared .b8 sm[4096];"
PARAMS = ".param .u64 .ptr .global a, .param .u64 b, .param .align 8 .b8 s[24], .param .u32 n"


class Kernel:
    def __init__(self, code: str, functions: str = "", directives: str = ".reqntid 128, 1, 1") -> None:
        text = f"{HEAD}{functions}.entry k({PARAMS}) {directives} {{ {REGISTERS}\n{code}\nret; }}"
        module = parse(text)
        assert module.unknown == []
        self.flat = inline(module, module.functions["k"])
        self.cfg = CFG(self.flat)
        self.ssa = SSA(self.cfg)
        self.provenance = Provenance(module, self.flat, self.cfg, self.ssa)

    def addresses(self):
        """Address of the first access of every global or shared memory instruction, in order."""
        out = []
        for ins in self.flat.body:
            for access in effect(ins).accesses[:1]:
                if access.space != "param":
                    out.append(self.provenance.address(ins, access.operand))
        return out

    def described(self) -> list[str]:
        return [a.describe() for a in self.addresses()]


CASES = {
    "parameter and displacement": (
        "ld.param.u64 %rd1, [a]; cvta.to.global.u64 %rd2, %rd1; ld.global.b32 %r1, [%rd2+8];",
        ["parameter 0+8"],
    ),
    "thread index scales": (
        "ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;"
        "ld.global.b32 %r2, [%rd3];",
        ["parameter 0+[0, 508]"],
    ),
    "struct fields differ": (
        "ld.param.u64 %rd1, [s]; ld.param.v2.u64 {%rd2, %rd3}, [s+8]; ld.global.b32 %r1, [%rd1];"
        "ld.global.b32 %r1, [%rd3];",
        ["parameter 2", "parameter 2+16"],
    ),
    "one register, two pointers": (
        "ld.param.u64 %rd1, [a]; ld.global.b32 %r1, [%rd1]; ld.param.u64 %rd1, [b]; "
        "ld.global.b32 %r1, [%rd1];",
        ["parameter 0", "parameter 1"],
    ),
    "select unites": (
        "ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; selp.b64 %rd3, %rd1, %rd2, %p1; "
        "ld.global.b32 %r1, [%rd3];",
        ["parameter 0 or parameter 1"],
    ),
    "predicated move unites": (
        "ld.param.u64 %rd1, [a]; mov.u64 %rd3, %rd1; ld.param.u64 %rd2, [b]; @%p1 mov.u64 %rd3, %rd2;"
        "ld.global.b32 %r1, [%rd3];",
        ["parameter 0 or parameter 1"],
    ),
    "branches join": (
        "ld.param.u64 %rd1, [a]; @%p1 bra J; ld.param.u64 %rd1, [b]; J: ld.global.b32 %r1, [%rd1];",
        ["parameter 0 or parameter 1"],
    ),
    "pointer loaded from memory": (
        "ld.param.u64 %rd1, [a]; ld.global.u64 %rd2, [%rd1+16]; ld.global.b32 %r1, [%rd2];",
        ["parameter 0+16", "pointer loaded from parameter 0+[...]"],
    ),
    "ring of stages": (
        "mov.u32 %r1, sm; mov.b32 %r2, 0; L: shl.b32 %r3, %r2, 8; add.s32 %r4, %r1, %r3; "
        "st.shared.b32 [%r4], %r9;"
        "add.s32 %r5, %r2, 1; setp.eq.s32 %p1, %r5, 4; selp.b32 %r2, 0, %r5, %p1; @%p2 bra L;",
        ["shared sm+[0, 768]"],
    ),
    "swizzle stays near": (
        "mov.u32 %r1, sm; mov.u32 %r2, %tid.x; and.b32 %r3, %r2, 7; shl.b32 %r3, %r3, 4; "
        "xor.b32 %r4, %r1, %r3;"
        "st.shared.b32 [%r4+1024], %r9;",
        ["shared sm+[912, 1136]"],
    ),
    "alignment mask": (
        "mov.u32 %r1, sm; add.s32 %r1, %r1, 127; and.b32 %r2, %r1, -128; st.shared.b32 [%r2], %r9;",
        ["shared sm+[0, 127]"],
    ),
    "peer": (
        "mov.u32 %r1, sm; mapa.shared::cluster.u32 %r2, %r1, 1; st.shared::cluster.b32 [%r2+8], %r9;",
        ["peer shared sm+8"],
    ),
    "dynamic shared memory through generic": (
        "mov.u64 %rd1, dyn; cvta.shared.u64 %rd2, %rd1; st.b32 [%rd2+64], %r9;",
        ["shared dynamic+64"],
    ),
    "matrix descriptor keeps its address": (
        "mov.u32 %r1, sm; shr.u32 %r2, %r1, 4; and.b32 %r3, %r2, 16383; cvt.u64.u32 %rd1, %r3;"
        "or.b64 %rd2, %rd1, 4611686293305294848; add.s64 %rd3, %rd2, 2; mov.b64 {%r3, %r4}, %rd3;"
        "mov.b64 %rd4, {%r3, %r4};"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd4, %rd2, 1, 1, 1, 0, 0;",
        ["shared sm+32"],
    ),
    "matrix descriptor by high constant": (
        "mov.u32 %r1, sm; add.s32 %r1, %r1, 1024; bfe.u32 %r2, %r1, 4, 14; mov.b32 %r9, 64;"
        "mov.b64 %rd1, {%r2, %r9};"
        "add.s64 %rd2, %rd1, -9223371899382267904;"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd2, %rd2, 1, 1, 1, 0, 0;",
        ["shared sm+1024"],
    ),
    "warp index by shuffle": (
        "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; shfl.sync.idx.b32 %r3|%p1, %r2, 0, 31, -1; "
        "mov.u32 %r4, sm;"
        "mad.lo.s32 %r5, %r3, 64, %r4; st.shared.b32 [%r5], %r9;",
        ["shared sm+[0, 192]"],
    ),
    "stride is not the pointer": (
        "ld.param.u64 %rd1, [s]; ld.param.u64 %rd2, [s+16]; add.s64 %rd3, %rd1, %rd2; "
        "ld.global.b32 %r1, [%rd3];",
        ["parameter 2+[...]"],
    ),
    "address of a parameter": ("mov.b64 %rd1, s; ld.b32 %r1, [%rd1];", ["address of parameter s"]),
}


@pytest.mark.parametrize(("code", "expected"), CASES.values(), ids=CASES)
def test_origin(code, expected):
    assert Kernel(code).described() == expected


CALLEE = """
.func (.param .b64 ret) pick (.param .b64 x, .param .b64 y) {
    .reg .b64 %rd<9>; .reg .pred %p<3>; .shared .b8 own[64]; .reg .b32 %r<4>;
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; @%p1 bra T; mov.u64 %rd1, %rd2;
T:  st.param.b64 [ret], %rd1; mov.u32 %r1, own; st.shared.b32 [%r1], %r2; ret;
}
.func twice (.reg .b64 %q) { ld.global.b32 _, [%q+4]; ret; }
"""


def call(x: str, y: str) -> str:
    return f"""{{ .param .b64 p0; .param .b64 p1; .param .b64 r0;
    st.param.b64 [p0], {x}; st.param.b64 [p1], {y}; call.uni (r0), pick, (p0, p1); ld.param.b64 %rd9, [r0]; }}
    ld.global.b32 %r1, [%rd9];"""


def test_calls_are_seen_in_context():
    k = Kernel(
        "ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b];"
        + call("%rd1", "%rd2")
        + call("%rd1", "%rd1")
        + "call twice, (%rd2);",
        functions=CALLEE,
    )
    assert all(i.opcode != "call" for i in k.flat.body)
    assert k.described() == [
        "shared own@1",
        "parameter 0 or parameter 1",
        "shared own@2",
        "parameter 0",
        "parameter 1+4",
    ]
    assert [i.index for i in k.flat.body] == list(range(len(k.flat.body)))


def test_recursion_and_declarations_stay_calls():
    functions = ".func r () { call r; ret; }\n.extern .func out ();\n"
    k = Kernel("call r; call out;", functions=functions)
    assert [i.operands[1].name for i in k.flat.body if i.opcode == "call"] == ["r", "out"]


def test_overlap_by_origin_and_interval():
    k = Kernel(
        "mov.u32 %r1, sm; st.shared.b32 [%r1], %r9; st.shared.b32 [%r1+4], %r9; st.shared.b64 [%r1], %rd9;"
        "mapa.shared::cluster.u32 %r2, %r1, 1; st.shared::cluster.b32 [%r2+4], %r9; ld.param.u64 %rd1, [a];"
        "st.global.b32 [%rd1], %r9; ld.global.u64 %rd2, [%rd1]; st.global.b32 [%rd2], %r9; "
        "st.shared.b32 [%r8], %r9;"
    )
    first, second, wide, peer, param, _, loaded, anywhere = k.addresses()
    assert not may_overlap(first, 4, second, 4)
    assert may_overlap(wide, 8, second, 4)
    assert may_overlap(first, None, second, 4)
    assert may_overlap(peer, 4, second, 4) and not may_overlap(peer, 4, first, 4)
    assert not may_overlap(first, 4, param, 4)
    assert may_overlap(param, 4, loaded, 4)
    assert may_overlap(anywhere, 4, first, 4) and not anywhere.known


def test_equal_addresses_have_equal_forms():
    k = Kernel(
        "mov.u32 %r1, %tid.x; mov.u32 %r2, sm; shr.u32 %r3, %r1, 5; mad.lo.s32 %r4, %r3, 8, %r2;"
        "st.shared.b32 [%r4+16], %r9; add.s32 %r5, %r2, 16; shr.u32 %r6, %r1, 5; shl.b32 %r7, %r6, 3;"
        "add.s32 %r8, %r5, %r7; st.shared.b32 [%r8], %r9; st.shared.b32 [%r8+4], %r9;"
    )
    a, b, c = k.addresses()
    assert a.affine == b.affine != c.affine


def test_range_under_a_condition():
    k = Kernel(
        "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r3, sm; add.s32 %r4, %r3, %r2; "
        "st.shared.b32 [%r4], %r9;"
    )
    ins = next(i for i in k.flat.body if i.opcode == "st")
    tid = k.provenance.operand_affine(ins, k.flat.body[0].operands[1])
    assert k.provenance.address(ins, 0, [(tid, (0, 6))]).describe() == "shared sm+[0, 24]"


def test_ssa_of_a_loop():
    k = Kernel("mov.b32 %r1, 0; L: add.s32 %r1, %r1, 1; @%p1 bra L; mov.b32 %r2, %r1;")
    loop_read, last_read = k.ssa.read(1, "%r1"), k.ssa.read(3, "%r1")
    assert k.ssa.values[loop_read].is_phi
    assert last_read == k.ssa.written(1, "%r1")
    assert {v for _, v in k.ssa.values[loop_read].inputs} == {k.ssa.written(0, "%r1"), last_read}
