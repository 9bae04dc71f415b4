"""R25: machine code that lost or moved what the PTX asks for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ..findings import Finding, Severity, Site
from ..ptx.parser import parse
from ..sass.conformance import Conformance, Deviation, Problem, conformance
from ..sass.parser import SassError, SassFunction, SassInstruction
from ..sass.parser import parse as parse_sass
from ..subject import Subject
from .base import Mutation, Rule, snippet

# Between the two parts of a snippet of this rule.
SEPARATOR = "// ---- machine code ----\n"
_MOST_SITES = 4
_SETTLE_BY_LINES = (
    "a listing that names PTX lines (ptxas -lineinfo, nvdisasm -gp), or a look at the machine code"
)


@lru_cache(maxsize=4)
def _listing(sass: str) -> dict[str, SassFunction]:
    return parse_sass(sass)


def compare(s: Subject) -> Conformance | None:
    """The comparison of a subject with its machine code; None where the listing does not hold the kernel.

    Raises SassError for a text that is no listing.
    """
    found = s.__dict__.get("_conformance")
    if found is None:
        code = _listing(s.sass).get(s.kernel)
        if code is None:
            return None
        found = s.__dict__["_conformance"] = conformance(s.function, code, s.arch)
    return found


def check(s: Subject) -> Iterator[Finding]:
    if not s.sass:
        return
    try:
        result = compare(s)
    except SassError as e:
        result, why = None, str(e)
    else:
        why = "the listing does not hold this kernel"
    if result is None:
        settle = "the disassembly (nvdisasm -c) of the cubin that was assembled from this PTX"
        yield s.finding("R25", Severity.ERROR, f"the machine code was not compared: {why}", [], settle=settle)
        return
    for deviation in result.deviations:
        yield _finding(s, deviation)


def _finding(s: Subject, d: Deviation) -> Finding:
    sites = [s.site(d.ptx.index, d.problem)] if d.ptx is not None else []
    sites += [_machine_code(i) for i in d.sass[:_MOST_SITES]]
    sites += [s.site(g.index, "guard") for g in d.guards[:_MOST_SITES]]
    sites += [_machine_code(i) for i in d.guard_sass[:_MOST_SITES]]
    subject = f"`{d.ptx.name}` (line {d.ptx.line})" if d.ptx is not None else "the machine code"
    if d.problem is Problem.UNDECIDED:
        message = f"{subject}: order in the machine code could not be compared: {d.detail}"
        return s.finding("R25", Severity.ERROR, message, sites, settle=_SETTLE_BY_LINES)
    if d.read_only:
        message = f"{subject}, a read-only load, was {d.problem}: {d.detail}"
        settle = "whether anybody writes that memory while the kernel runs; if so, drop `.nc`"
        return s.finding("R25", Severity.WARNING, message, sites, settle=settle)
    return s.finding(
        "R25",
        Severity.ERROR,
        f"{subject} was {d.problem} between PTX and machine code: {d.detail}",
        sites,
        missing=f"{d.mark or 'the order of the PTX'} in the machine code",
        fix="report the pair to the assembler's maker; until then build with another ptxas, or make the order explicit "
        "(a stronger fence, or volatile inline assembly with a memory clobber)",
    )


def _machine_code(i: SassInstruction) -> Site:
    return Site(i.line, i.text, "machine code")


def subject_of(text: str) -> Subject:
    """The subject of one of this rule's snippets: PTX, SEPARATOR, listing."""
    ptx, _, sass = text.partition(SEPARATOR)
    module = parse(ptx)
    return Subject(module, module.entries[0], None, sass)


_PTX = snippet(
    """
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    griddepcontrol.wait;
    ld.global.u32 %r1, [%rd1];
    st.global.u32 [%rd2], %r1;
    """,
    params=".param .u64 x, .param .u64 y",
)
_WAIT = "        /*0030*/                   ACQBULK ;\n"
_LOAD = "        /*0040*/                   LDG.E R3, desc[UR4][R2.64] ;\n"
_SASS = f"""\
	.target	sm_90a
//--------------------- .text.kernel              --------------------------
	.section	.text.kernel,"ax",@progbits
	.align	128
        .global         kernel
        .type           kernel,@function
        .size           kernel,(.L_x_2 - kernel)
        .other          kernel,@"STO_CUDA_ENTRY STV_DEFAULT"
kernel:
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDC.64 R2, c[0x0][0x210] ;
        /*0020*/                   ULDC.64 UR4, c[0x0][0x208] ;
{_WAIT}{_LOAD}\
        /*0050*/                   LDC.64 R4, c[0x0][0x218] ;
        /*0060*/                   STG.E desc[UR4][R4.64], R3 ;
.L_x_1:
        /*0070*/                   EXIT ;
.L_x_0:
        /*0080*/                   BRA `(.L_x_0);
.L_x_2:
"""

RULE = Rule(
    id="R25",
    title="the machine code lost or moved a synchronisation that the PTX has",
    severity=Severity.ERROR,
    meaning=(
        "PTX is where order is asked for; SASS is what runs. An assembler may copy, merge and move code, but on every "
        "path each access must stay on its side of the synchronisation that guards it, and no synchronisation may "
        "vanish. The rule finds for every synchronising PTX instruction its marks in the machine code and compares "
        "order path by path. Instructions that leave no mark (some fences, a converged bar.warp.sync) can be checked "
        "on PTX only."
    ),
    looks_for="a mark that is missing, or that an access has crossed, on some path of the disassembly",
    isa_section="Memory Consistency Model: Program Order; the marks are measured per architecture and toolkit",
    fix="build with another ptxas, or make the order explicit so that the assembler keeps it",
    failing=_PTX + SEPARATOR + _SASS.replace(_WAIT + _LOAD, _LOAD + _WAIT),
    passing=_PTX + SEPARATOR + _SASS,
    mutations=(
        Mutation("load moved above the wait", _WAIT + _LOAD, _LOAD + _WAIT),
        Mutation("wait dropped", _WAIT, ""),
    ),
    check=check,
    language="sass",
)
