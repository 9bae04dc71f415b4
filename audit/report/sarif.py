"""SARIF 2.1.0 (OASIS): what code-scanning services and editors read.

A finding is a result of kind *fail*; an inconclusive answer is a result of kind *open*, which is SARIF's word
for a rule that was evaluated without enough information to decide. An unordered pair is a code flow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..findings import Finding, Severity, Site, Verdict

if TYPE_CHECKING:
    from ..gate import GateResult, Problem, Row
    from ..scan import KernelReport

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LOCK = "golden/kernels.lock"

_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def _uri(path: str) -> str:
    return ("file://" if path.startswith("/") else "") + quote(path, safe="/", errors="replace")


def _location(path: str, line: int, text: str = "") -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": max(line, 1)}
    if text:
        region["snippet"] = {"text": text}
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}, "region": region}}


def _site(path: str, site: Site) -> dict[str, Any]:
    source = f" ({site.source})" if site.source else ""
    return {
        **_location(path, site.line, site.text),
        "message": {"text": f"{site.role or 'here'}: {site.text}{source}"},
    }


def _sources(sites: Iterable[Site]) -> list[dict[str, Any]]:
    """Locations in the kernel source, from `file:line` of the line table; each named once."""
    locations: list[dict[str, Any]] = []
    for source in dict.fromkeys(s.source for s in sites if s.source):
        path, _, line = source.rpartition(":")
        if path and line.isdigit():
            locations.append({**_location(path, int(line)), "id": len(locations) + 1})
    return locations


def _finding(report: KernelReport, finding: Finding) -> dict[str, Any]:
    parts = [finding.message]
    for label, text in (("Missing", finding.missing), ("Fix", finding.fix), ("To settle", finding.settle)):
        parts += [f"{label}: {text}"] if text else []
    decided = finding.verdict == Verdict.FINDING
    first = finding.sites[0] if finding.sites else Site(1, "")
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "kind": "fail" if decided else "open",
        "level": _LEVEL[finding.severity] if decided else "none",
        "message": {"text": "\n".join(parts)},
        "locations": [
            {
                **_location(report.file, first.line, first.text),
                "logicalLocations": [{"name": report.name, "kind": "function"}],
            }
        ],
        "partialFingerprints": {"k3AuditFinding/v1": finding.fingerprint},
    }
    if related := _sources(finding.sites):
        result["relatedLocations"] = related
    if len(finding.sites) > 1:
        steps = (finding.sites[0], *finding.path, *finding.sites[1:])
        flow = {"locations": [{"location": _site(report.file, s)} for s in steps]}
        result["codeFlows"] = [{"threadFlows": [flow]}]
    return result


def _problem(problem: Problem, row: Row | None) -> dict[str, Any]:
    where = f"{row.kernel} {row.arch}: " if row else ""
    lines = [where + problem.message, *problem.detail, *(f"run: {c}" for c in problem.commands)]
    decided = problem.verdict != Verdict.INCONCLUSIVE
    return {
        "ruleId": f"gate/{problem.kind.partition(':')[0]}",
        "kind": "fail" if decided else "open",
        "level": "error" if decided else "none",
        "message": {"text": "\n".join(lines)},
        "locations": [_location(LOCK, 1)],
        "partialFingerprints": {"k3AuditGate/v1": f"{problem.kind}|{where}"},
    }


def _rule(rule_id: str) -> dict[str, Any]:
    """What a rule means, for viewers that show it beside the finding; the gate's own rules are their name."""
    from ..rules.base import rules

    rule = rules().get(rule_id)
    if rule is None:
        return {"id": rule_id}
    return {
        "id": rule_id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.meaning},
        "help": {"text": f"{rule.meaning}\n\nFix: {rule.fix}\n\nPTX ISA: {rule.isa_section}"},
        "defaultConfiguration": {"level": _LEVEL[rule.severity]},
    }


def _document(reports: Sequence[KernelReport], more: Iterable[dict[str, Any]] = ()) -> str:
    results, broken = _split(reports)
    results += more
    ids = sorted({r["ruleId"] for r in results})
    for result in results:
        result["ruleIndex"] = ids.index(result["ruleId"])
    notifications = [{"level": "error", "message": {"text": text}} for text in broken]
    run = {
        "tool": {
            "driver": {"name": "k3-audit", "version": version("k3-audit"), "rules": [_rule(i) for i in ids]}
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not broken, "toolExecutionNotifications": notifications}],
        "artifacts": [{"location": {"uri": _uri(file)}} for file in dict.fromkeys(r.file for r in reports)],
        "results": results,
    }
    document = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _split(reports: Iterable[KernelReport]) -> tuple[list[dict[str, Any]], list[str]]:
    """(results, complaints about files that could not be read)."""
    results, broken = [], []
    for report in reports:
        for finding in report.findings:
            if finding.verdict == Verdict.ERROR:
                broken.append(f"{report.file}: {finding.message}")
            else:
                results.append(_finding(report, finding))
        for finding, why in report.suppressed:
            accepted = [{"kind": "external", "justification": why}]
            results.append({**_finding(report, finding), "suppressions": accepted})
        if report.verdict == Verdict.ERROR and not report.findings:
            broken.append(f"{report.file}: {report.name} could not be audited")
    return results, broken


def scan(reports: Sequence[KernelReport], texts: Mapping[str, str]) -> str:
    return _document(reports)


def gate(result: GateResult, texts: Mapping[str, str]) -> str:
    problems = [_problem(p, None) for p in result.problems]
    # What the auditor found is there as itself; the gate's own row about it would say it twice.
    problems += [_problem(p, r) for r in result.rows for p in r.problems if not p.kind.startswith("audit-")]
    return _document([report for row in result.rows for report in row.reports], problems)
