"""`scan_ptx` as a whole: reports, skeletons, contracts, and that nothing but PtxError comes out of bad text."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from k3_audit.artifact.contract import Contract
from k3_audit.audit.findings import Severity, Verdict
from k3_audit.audit.ptx.parser import PtxError
from k3_audit.audit.rules.base import rules
from k3_audit.audit.rules.dsl_inline_asm import check_ir, check_sources
from k3_audit.audit.scan import scan_ptx

pytestmark = pytest.mark.unit

SNIPPETS = [t for r in rules().values() if r.language == "ptx" for t in (r.failing, r.passing)]
R10, R15, R16 = (rules()[i] for i in ("R10", "R15", "R16"))


@st.composite
def damaged(draw):
    lines = draw(st.sampled_from(SNIPPETS)).splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 5))):
        at, other = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
        what = draw(st.integers(0, 3))
        if what == 0:
            lines[at] = ""
        elif what == 1:
            lines[at], lines[other] = lines[other], lines[at]
        elif what == 2:
            lines[at] += lines[other]
        else:
            lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
    return "".join(lines)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged())
def test_damaged_kernels_never_crash_a_rule(text):
    try:
        reports = scan_ptx(text)
    except PtxError:
        return
    for report in reports:
        assert report.verdict in Verdict
        assert report.unknown == () or report.verdict is not Verdict.CLEAN


def test_report_of_a_module_with_two_kernels():
    second = re.sub(r"(?s)^.*?(?=\.visible)", "", R15.failing).replace(".entry kernel", ".entry other")
    first, other = scan_ptx(R10.passing + second, "two.ptx")
    assert (first.name, other.name, first.file, first.arch) == ("kernel", "other", "two.ptx", "sm_90a")
    assert (first.verdict, other.verdict) == (Verdict.CLEAN, Verdict.INCONCLUSIVE)


def test_a_contract_turns_inconclusive_into_an_answer():
    contract = Contract.from_dict(R15.contract)
    assert scan_ptx(R15.failing)[0].verdict is Verdict.INCONCLUSIVE
    assert scan_ptx(R15.failing, contract=contract)[0].verdict is Verdict.FINDING
    assert scan_ptx(R15.passing, contract=contract)[0].verdict is Verdict.CLEAN


@pytest.mark.parametrize(("distance", "verdict"), [(0, "finding"), (1, "finding"), (2, "clean")])
def test_stable_inputs_need_two_launches_of_distance(distance, verdict):
    data = {**R15.contract, "launch": {**R15.contract["launch"], "stable_distance": distance}}
    data["params"] = [{**data["params"][0], "role": "stable"}, *data["params"][1:]]
    (report,) = scan_ptx(R15.passing, contract=Contract.from_dict(data))
    assert report.verdict == verdict


def test_without_dependent_launch_the_rule_does_not_apply():
    data = {**R15.contract, "launch": {**R15.contract["launch"], "pdl": False}}
    assert scan_ptx(R15.failing, contract=Contract.from_dict(data))[0].verdict is Verdict.CLEAN


def test_notes_do_not_make_a_finding():
    rule = rules()["R22"]
    (report,) = scan_ptx(rule.failing, contract=Contract.from_dict(rule.contract))
    assert [f.severity for f in report.findings] == [Severity.NOTE]
    assert report.verdict is Verdict.CLEAN


def test_skeleton_names_objects_executors_and_guards():
    (report,) = scan_ptx(R10.passing)
    assert report.sync_skeleton == (
        "mbarrier.init.shared::cta.b64 [shared bar+0] 1 by thread 0",
        "mbarrier.arrive.expect_tx.shared::cta.b64 [shared bar+0] 4 by thread 0",
        "fence.mbarrier_init.release.cluster by thread 0",
        "barrier.cluster.arrive.relaxed.aligned by all threads",
        "barrier.cluster.wait.aligned by all threads",
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [peer shared bar+0] by thread 0",
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 [shared bar+0] 0 by all threads |  ; R shared buf",
    )


def test_skeleton_survives_a_renaming_of_registers_and_labels():
    renamed = re.sub(r"%r(\d+)\b", lambda m: f"%r{(int(m[1]) + 17) % 64}", R10.passing)
    renamed = renamed.replace("WAIT", "AGAIN").replace("\n    mov.u32", "\n\n    // moved\n    mov.u32")
    assert scan_ptx(renamed)[0].sync_skeleton == scan_ptx(R10.passing)[0].sync_skeleton


@pytest.mark.parametrize(
    ("old", "new"),
    [("acquire.cluster", "acquire.cta"), ("], 4;", "], 8;"), ("_init.release", "_init.release")],
)
def test_skeleton_shows_a_change(old, new):
    changed = (
        scan_ptx(R10.passing.replace(old, new))[0].sync_skeleton != scan_ptx(R10.passing)[0].sync_skeleton
    )
    assert changed == (old != new)


def test_fingerprint_ignores_lines_and_registers():
    moved = R10.failing.replace("\n    mov.u32", "\n\n    mov.u32").replace("%r3", "%r33")
    (a,), (b,) = scan_ptx(R10.failing)[0].findings, scan_ptx(moved)[0].findings
    assert a.sites[0].line != b.sites[0].line
    assert a.fingerprint == b.fingerprint


IR = [
    ('llvm.inline_asm has_side_effects asm_dialect = att "bar.sync 0;", "~{memory}" : () -> ()', None),
    ('llvm.inline_asm asm_dialect = att "bar.sync 0;", "~{memory}" : () -> ()', "side effects are off"),
    ('llvm.inline_asm has_side_effects "st.global.b32 [$0], $1;", "l,r" %a, %b : (i64, i32) -> ()', "memory"),
    ('llvm.inline_asm "add.f32 $0, $1, $1;", "=f,f" %a : (f32) -> f32', None),
    ('llvm.inline_asm "ld.global.nc.f32 $0, [$1];", "=f,l" %a : (i64) -> f32', None),
    ('call void asm sideeffect "fence.acq_rel.gpu;", ""()', "memory"),
    (
        '%1 = call i32 asm "ld.volatile.global.u32 $0, [$1];", "=r,l,~{memory}"(i64 %0)',
        "side effects are off",
    ),
]


@pytest.mark.parametrize(("text", "message"), IR)
def test_inline_assembly_in_compiler_ir(text, message):
    found = check_ir(f"// module\n{text}\n", "dump.mlir")
    assert [message in f.message for f in found] == ([True] if message else [])
    assert all(f.sites[0].line == 2 for f in found)


def test_inline_assembly_behind_a_decorator_and_in_pieces():
    source = """
@asm()
def push(pointer, value, wide=False):
    code = "{ .reg .b32 a; mapa.shared::cluster.u32 a,$0,$2; "
    code += f"st.async.shared::cluster.mbarrier::complete_tx::bytes{'.v2' if wide else ''}.b32 [a],$1,[$3]; }}"
    return code, "r,r,r,r" + EXTRA, (pointer, value)


@asm(pure=True)
def peek(pointer):
    return "ld.volatile.global.u32 $0, [$1];", "=r,l,~{memory}", (pointer,)


@asm(pure=True)
def twice(x):
    return "add.f32 $0, $1, $1;", "=f,f", (x,)
"""
    for extra, verdict in (('""', "finding"), ('",~{memory}"', None), ("unknown()", "inconclusive")):
        found = check_sources({"k.py": source.replace("EXTRA", extra)})
        assert [(f.kernel, f.verdict) for f in found if f.kernel == "push"] == (
            [("push", verdict)] if verdict else []
        )
        assert [f.kernel for f in found if f.kernel != "push"] == ["peek"]


@pytest.mark.parametrize("text", ["def f(:", "\0", "(" * 500, "x = '\\ud800'\n" * 3])
def test_source_that_is_no_python_is_one_error(text):
    for finding in check_sources({"broken.py": text}):
        assert finding.verdict is Verdict.ERROR
        assert "\n" not in finding.message
