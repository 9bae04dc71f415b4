"""The PTX parser: what it reads, what it reports as unknown, and that bad text gives one error line."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from k3_audit.audit.ptx.ir import Addr, Imm, Not, Pair, Reg, Symbol, TensorAddr, Vec
from k3_audit.audit.ptx.parser import PtxError, parse

pytestmark = pytest.mark.unit

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"


def body(*lines: str, params: str = ".param .u64 p0", declare: str = "") -> str:
    registers = ".reg .pred %p<9>;\n.reg .b32 %r<40>;\n.reg .b64 %rd<40>;\n.reg .f32 %f<9>;\n"
    return f"{HEAD}.visible .entry k({params})\n{{\n{registers}{declare}\n" + "\n".join(lines) + "\nret;\n}\n"


def one(line: str, **kw: str):
    module = parse(body(line, **kw))
    assert module.unknown == []
    return module.functions["k"].body[0]


OPERANDS = [
    ("add.s32 %r1, %r2, -4;", (Reg("%r1"), Reg("%r2"), Imm(-4, "-4"))),
    ("mov.u32 %r1, %tid.x;", (Reg("%r1"), Reg("%tid.x"))),
    ("mov.f32 %f1, 0f3F800000;", (Reg("%f1"), Imm(1.0, "0f3F800000"))),
    ("ld.global.b32 %r1, [%rd1+-16];", (Reg("%r1"), Addr(Reg("%rd1"), -16))),
    ("ld.param.b64 %rd1, [p0+8];", (Reg("%rd1"), Addr(Symbol("p0"), 8))),
    (
        "ld.global.v4.b32 {%r1, _, %r3, %r4}, [%rd1 + 32];",
        (Vec((Reg("%r1"), Reg("_"), Reg("%r3"), Reg("%r4"))), Addr(Reg("%rd1"), 32)),
    ),
    (
        "setp.lt.and.s32 %p1|%p2, %r1, 0x10, !%p3;",
        (Pair(Reg("%p1"), Reg("%p2")), Reg("%r1"), Imm(16, "0x10"), Not(Reg("%p3"))),
    ),
    ("elect.sync _|%p1, 0xffffffff;", (Pair(Reg("_"), Reg("%p1")), Imm(0xFFFFFFFF, "0xffffffff"))),
    ("st.shared.u32 [16], WARP_SZ;", (Addr(None, 16), Imm(32, "WARP_SZ"))),
    (
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1, {%r2, %r3}], [%r4];",
        (Addr(Reg("%r1")), TensorAddr(Reg("%rd1"), (Reg("%r2"), Reg("%r3"))), Addr(Reg("%r4"))),
    ),
]


@pytest.mark.parametrize(("line", "operands"), OPERANDS, ids=[line.split()[0] for line, _ in OPERANDS])
def test_operands(line, operands):
    assert one(line).operands == operands


def test_modifiers_and_predicate():
    ins = one("@!%p3 ld.acquire.gpu.shared::cluster.L1::no_allocate.b32 %r1, [%r2];")
    assert ins.pred == ("%p3", True)
    assert (ins.opcode, ins.mods) == ("ld", ("acquire", "gpu", "shared::cluster", "L1::no_allocate", "b32"))
    assert ins.name == "ld.acquire.gpu.shared::cluster.L1::no_allocate.b32"


def test_scoped_names_do_not_collide():
    wait = "mbarrier.try_wait.parity.shared::cta.b64 done, [%r1], %r2;"
    loop = f"{{ .reg .pred done; LAB: {wait}\n@done bra OUT; bra LAB; OUT: }}"
    f = parse(body(loop, loop)).functions["k"]
    first, second = f.body[0].operands[0], f.body[3].operands[0]
    assert (first, second) == (Reg("done"), Reg("done#1"))
    assert f.registers["done"] == f.registers["done#1"] == "pred"
    assert f.labels[f.body[2].operands[0].name] == 0
    assert f.labels[f.body[5].operands[0].name] == 3
    assert f.labels[f.body[1].operands[0].name] == 3


def test_inner_register_shadows_outer():
    f = parse(body("{ .reg .b32 %r1; mov.b32 %r1, 1; }", "mov.b32 %r1, 2;")).functions["k"]
    assert f.body[0].operands[0] != f.body[1].operands[0]


def test_inline_asm_and_locations():
    text = body(
        ".loc 1 7 0",
        "// begin inline asm",
        "fence.proxy.async; fence.acq_rel.gpu;",
        "// end inline asm",
        ".loc\t1 9 3, function_name $L__info_string0, inlined_at 1 20 3",
        "bar.sync 0;",
    )
    module = parse(
        text + '.file 1 "/src/a;b//c.py", 12, 34\n.section .debug_str { $L__info_string0: .b8 1,2 }\n'
    )
    a, b, c, ret = module.functions["k"].body
    assert (a.inline_asm, b.inline_asm, c.inline_asm, ret.inline_asm) == (True, True, False, False)
    assert str(a.loc) == "/src/a;b//c.py:7"
    assert str(c.loc.inlined_at) == "/src/a;b//c.py:20"
    assert text.splitlines()[a.line - 1].startswith("fence.proxy.async")
    assert module.unknown == []


def test_line_numbers_survive_block_comments():
    text = body("/* one\ntwo\nthree */ bar.sync 0;", "// x", "membar.gl;")
    for ins in parse(text).functions["k"].body:
        assert ins.opcode in text.splitlines()[ins.line - 1]


CALLS = (
    HEAD
    + """
.extern .func (.param .b32 out) vprintf (.param .b64 a, .param .b64 b);
.func (.reg .b32 %res) twice (.reg .b32 %arg) { add.s32 %res, %arg, %arg; ret; }
.alias other, twice;
.global .u64 table[2] = {twice, twice};
.entry k(.param .align 8 .b8 s[24], .param .u64 .ptr .global .align 16 p)
.reqntid 128, 1, 1
.reqnctapercluster 2, 1, 1
.explicitcluster
{
    .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<3>;
    .shared .align 16 .b8 sm[4][8];
    .extern .shared .align 16 .b8 dyn[];
    { .param .b64 param0; .param .b64 param1; .param .b32 ret0;
      st.param.b64 [param0], %rd1;
      call.uni (ret0),
      vprintf,
      (
      param0, param1
      );
      ld.param.b32 %r1, [ret0]; }
    { .param .b64 param0; call helper_, (param0); }
    call (%r1), %rd3, (%r2), proto;
    proto: .callprototype (.param .b32 _) _ (.param .b32 _);
    cases: .branchtargets A, B;
    brx.idx %r1, cases;
A:  call twice;
B:  mov.u64 %rd1, sm+8;
    ret;
}
"""
)


def test_functions_calls_and_tables():
    module = parse(CALLS)
    assert module.unknown == []
    k = module.functions["k"]
    assert k.directives == {
        "reqntid": ("128", "1", "1"),
        "reqnctapercluster": ("2", "1", "1"),
        "explicitcluster": (),
    }
    assert [(p.size, p.pointer_space, p.align) for p in k.params] == [(24, "", 8), (8, "global", 16)]
    assert (k.variables["sm"].size, k.variables["dyn"].size, k.variables["dyn"].linkage) == (
        32,
        None,
        "extern",
    )
    calls = [i for i in k.body if i.opcode == "call"]
    assert calls[0].operands == (
        Vec((Symbol("ret0"),)),
        Symbol("vprintf"),
        Vec((Symbol("param0"), Symbol("param1"))),
    )
    assert calls[1].operands == (Vec(()), Symbol("helper_"), Vec((Symbol("param0#1"),)))
    assert calls[2].operands == (Vec((Reg("%r1"),)), Reg("%rd3"), Vec((Reg("%r2"),)), Symbol("proto"))
    assert calls[3].operands == (Vec(()), Symbol("twice"), Vec(()))
    assert k.branch_targets == {"cases": ("A", "B")}
    assert [k.body[k.labels[t]].opcode for t in ("A", "B")] == ["call", "mov"]
    assert module.functions["other"] is module.functions["twice"]
    assert not module.functions["vprintf"].has_body
    assert [f.name for f in module.entries] == ["k"]
    assert module.variables["table"].init == "{twice, twice}"


UNKNOWN = [
    "frob %r1 %r2;",
    ".frobnicate 3;",
    "add.s32 %r1, %q77, 3;",
    "ld.global.b32 %r1, [[%rd1]];",
    "mov.b32 %r1, 1e;",
    "@%p1;",
    "brx.idx %r1, nowhere;",
    ".reg .q32 %z<3>;",
]


@pytest.mark.parametrize("line", UNKNOWN)
def test_unknown_is_reported_with_its_line(line):
    text = body("bar.sync 0;", line)
    unknown = parse(text).unknown
    assert len(unknown) == 1
    assert line.rstrip(";") in text.splitlines()[unknown[0][0] - 1]


NO_PTX = [
    ("", "not PTX"),
    ("ELF\x7f\x00\x01", "binary"),
    ("int main() {}\n", "not PTX"),
    (HEAD + ".entry k() { ret;", "missing"),
    (HEAD + ".entry k() { ret; } }", "unbalanced"),
    (HEAD + ".entry k() { bra GONE; }", "does not exist"),
    (HEAD + ".entry k() { L: L: ret; }", "twice"),
    (HEAD + ".entry k() { ret; }\n.entry k() { ret; }", "twice"),
    (HEAD + "/* open", "not closed"),
    (HEAD + '.file 1 "open\n', "not closed"),
    (HEAD + ".entry k() {" + "{" * 5000 + "}" * 5000 + "}", "nested"),
    (HEAD + ".entry k() { add.s32 }", "without `;`"),
    (HEAD + ".entry k(.param .zz p) { ret; }", "parameter"),
    (".version x\n", "number"),
    (".version 1.0\n.address_size 32\n", "64"),
    (b"\xff\xfe.version", "UTF-8"),
]


@pytest.mark.parametrize(("text", "message"), NO_PTX, ids=range(len(NO_PTX)))
def test_no_ptx_gives_one_error(text, message):
    with pytest.raises(PtxError, match=message):
        parse(text)


SEEDS = [
    CALLS,
    body(
        "{ .reg .pred q; L: @q bra L; }",
        "// begin inline asm",
        "bar.sync 0;",
        "// end inline asm",
        "ld.global.v2.b32 {%r1,%r2}, [%rd1];",
        ".loc 1 2 3",
        '.pragma "nounroll";',
    )
    + '.file 1 "x"\n',
]
TOKENS = [
    *"{}()[];:,.@!|<>+-_=\"'/*\\\n\x01\x00 ",
    "//",
    "/*",
    "*/",
    ".reg .b32 ",
    "%r1",
    "%r<5>",
    ".entry ",
    ".func ",
    ".loc 1 2 3",
    ".section",
    "bra ",
    "0x",
    "9" * 40,
    "1" * 5000,
    "é",
    "mov.b32 ",
    ".param .b64 x",
    ".version 9.9\n",
    "// begin inline asm\n",
    ".branchtargets ",
    ".callprototype ",
]


@st.composite
def damaged(draw):
    """A valid text with lines cut, dropped, doubled, shuffled, and tokens thrown in."""
    lines = draw(st.sampled_from(SEEDS)).splitlines(keepends=True)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        what = draw(st.sampled_from(["cut", "drop", "double", "swap", "token"]))
        if what == "cut":
            lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
        elif what == "drop":
            lines[at] = ""
        elif what == "double":
            lines[at] *= 2
        elif what == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        else:
            cut = draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:cut] + draw(st.sampled_from(TOKENS)) + lines[at][cut:]
    text = "".join(lines)
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged())
def test_damaged_text_raises_only_ptx_error(text):
    try:
        parse(text)
    except PtxError as e:
        assert 1 <= e.line <= text.count("\n") + 1
        assert "\n" not in str(e)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(TOKENS), max_size=60).map("".join))
def test_token_soup_raises_only_ptx_error(soup):
    for text in (soup, HEAD + soup, HEAD + ".entry k() {" + soup + "}"):
        with contextlib.suppress(PtxError):
            parse(text)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_raise_only_ptx_error(data):
    with pytest.raises(PtxError):
        parse(data)


def test_twenty_thousand_lines_in_two_seconds():
    line = "fma.rn.f32 %f1, %f2, %f3, %f4;\nld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1+16];"
    text = body(*[line] * 10_000)
    start = time.process_time()
    assert len(parse(text).functions["k"].body) == 20_001
    assert time.process_time() - start < 2
