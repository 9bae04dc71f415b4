"""JSON. The schemas are beside this file: scan.schema.json, gate.schema.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..findings import Finding

if TYPE_CHECKING:
    from ..gate import GateResult, Problem
    from ..scan import KernelReport

SCAN_SCHEMA = "k3-audit/scan/1"
GATE_SCHEMA = "k3-audit/gate/1"


def finding_dict(finding: Finding) -> dict[str, Any]:
    """`ptx_line` is 0 and `source` is "" where the finding has no such place."""
    return {
        "rule": finding.rule,
        "severity": str(finding.severity),
        "verdict": str(finding.verdict),
        "ptx_line": finding.sites[0].line if finding.sites else 0,
        "source": next((s.source for s in finding.sites if s.source), ""),
        "message": finding.message,
        "fingerprint": finding.fingerprint,
    }


def kernel_dict(report: KernelReport) -> dict[str, Any]:
    """`suppressed` is there only where something is."""
    suppressed = [{**finding_dict(f), "suppression": why} for f, why in report.suppressed]
    return {
        "name": report.name,
        "file": report.file,
        "arch": report.arch,
        "verdict": str(report.verdict),
        "findings": [finding_dict(f) for f in report.findings],
        **({"suppressed": suppressed} if suppressed else {}),
    }


def _problem_dict(problem: Problem) -> dict[str, Any]:
    return {
        "kind": problem.kind,
        "verdict": str(problem.verdict),
        "message": problem.message,
        "commands": list(problem.commands),
        "detail": list(problem.detail),
    }


def scan(reports: Sequence[KernelReport], texts: Mapping[str, str]) -> str:
    document = {"schema": SCAN_SCHEMA, "kernels": [kernel_dict(r) for r in reports]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def gate(result: GateResult, texts: Mapping[str, str]) -> str:
    document = {
        "schema": GATE_SCHEMA,
        "verdict": str(result.verdict),
        "problems": [_problem_dict(p) for p in result.problems],
        "suppressions": list(result.suppressions),
        "rows": [
            {
                "kernel": row.kernel,
                "arch": row.arch,
                "verdict": str(row.verdict),
                "audit": str(row.audit) if row.audit else None,
                "evidence": row.evidence,
                "problems": [_problem_dict(p) for p in row.problems],
                "notes": list(row.notes),
                "kernels": [kernel_dict(r) for r in row.reports],
            }
            for row in result.rows
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
