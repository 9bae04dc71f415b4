"""JUnit XML: what continuous integration shows as tests. One test case a kernel.

A finding is a failure, an error an error. An inconclusive kernel is *skipped*, with the word in its message:
it is neither passed nor failed, and JUnit has no closer state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from ..findings import Verdict

if TYPE_CHECKING:
    from ..gate import GateResult
    from ..scan import KernelReport

_TAG = {Verdict.FINDING: "failure", Verdict.ERROR: "error", Verdict.INCONCLUSIVE: "skipped"}
# Characters that XML 1.0 cannot hold, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class _Case:
    classname: str
    name: str
    verdict: Verdict
    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()


def _document(suite: str, cases: Iterable[_Case]) -> str:
    cases = list(cases)
    counts = {v: sum(c.verdict == v for c in cases) for v in Verdict}
    root = ET.Element("testsuites", name="k3-audit")
    element = ET.SubElement(
        root,
        "testsuite",
        name=suite,
        tests=str(len(cases)),
        failures=str(counts[Verdict.FINDING]),
        errors=str(counts[Verdict.ERROR]),
        skipped=str(counts[Verdict.INCONCLUSIVE]),
    )
    for case in cases:
        test = ET.SubElement(element, "testcase", classname=_clean(case.classname), name=_clean(case.name))
        if case.verdict != Verdict.CLEAN:
            first = case.lines[0] if case.lines else "no reason given"
            body = ET.SubElement(test, _TAG[case.verdict], message=_clean(f"{case.verdict}: {first}"))
            body.text = _clean("\n".join(case.lines))
        if case.notes:
            ET.SubElement(test, "system-out").text = _clean("\n".join(case.notes))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _NOT_XML.sub("�", text)


def scan(reports: Sequence[KernelReport], texts: Mapping[str, str]) -> str:
    return _document(
        "scan",
        (
            _Case(
                r.file,
                f"{r.name} {r.arch}".strip() or r.file,
                r.verdict,
                tuple(
                    f"{f.rule} PTX line {f.sites[0].line if f.sites else 0}: {f.message}" for f in r.findings
                ),
                tuple(f"suppressed: {why}" for _, why in r.suppressed),
            )
            for r in reports
        ),
    )


def gate(result: GateResult, texts: Mapping[str, str]) -> str:
    cases = [_Case("gate", p.kind, p.verdict, (p.message, *p.commands)) for p in result.problems]
    for row in result.rows:
        lines = tuple(line for p in row.problems for line in (p.message, *p.detail, *p.commands))
        cases.append(_Case(f"gate.{row.kernel}", row.arch, row.verdict, lines))
    return _document("gate", cases)
