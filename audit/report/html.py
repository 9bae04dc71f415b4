"""One HTML file that works offline: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from ..findings import Finding, worst

if TYPE_CHECKING:
    from ..gate import GateResult
    from ..scan import KernelReport

# PTX lines shown before and after each site of a finding.
_CONTEXT = 4


@dataclass(frozen=True)
class _Line:
    number: int
    text: str
    role: str = ""
    gap: bool = False


def excerpt(text: str, finding: Finding) -> list[_Line]:
    """The lines around the sites of a finding. `gap` marks a line that does not follow its predecessor.

    Without the text of the file the sites themselves are the excerpt.
    """
    roles = {s.line: s.role or "here" for s in finding.sites}
    if not text:
        return [_Line(s.line, s.text, roles[s.line]) for s in finding.sites]
    lines = text.splitlines()
    wanted = sorted(
        {n for line in roles for n in range(line - _CONTEXT, line + _CONTEXT + 1) if 1 <= n <= len(lines)}
    )
    return [
        _Line(n, lines[n - 1], roles.get(n, ""), gap=i > 0 and n != wanted[i - 1] + 1)
        for i, n in enumerate(wanted)
    ]


def _kernel(report: KernelReport, texts: Mapping[str, str]) -> dict[str, Any]:
    text = texts.get(report.file, "")
    return {"report": report, "findings": [(f, excerpt(text, f)) for f in report.findings]}


def _document(**values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html.j2").render(version=version("k3-audit"), **values)


def scan(reports: Sequence[KernelReport], texts: Mapping[str, str]) -> str:
    verdict = worst([r.verdict for r in reports])
    return _document(title="scan", verdict=verdict, gate=None, kernels=[_kernel(r, texts) for r in reports])


def gate(result: GateResult, texts: Mapping[str, str]) -> str:
    kernels = [_kernel(report, texts) for row in result.rows for report in row.reports]
    return _document(title="gate", verdict=result.verdict, gate=result, kernels=kernels)
