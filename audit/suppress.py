"""Accepted findings of a scan: `k3-audit scan --suppress FILE.toml`, the same tables as in golden/policy.toml.

    [[suppress]]
    rule = "R22"
    kernel = "attn_res"
    fingerprint = "0123456789abcdef"
    reason = "why it is acceptable"
    expires = 2027-01-31

A suppressed finding no longer counts, stays in every report with its reason, and counts again on the day it expires.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from .findings import Finding, Severity, Verdict, worst
from .policy import Suppression, suppressions
from .scan import KernelReport


class SuppressError(Exception):
    """One line: which entry of the file does not fit."""


def load(path: Path) -> tuple[Suppression, ...]:
    """The suppressions of one file. Raises SuppressError in one line."""
    try:
        found = suppressions(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as e:
        raise SuppressError(f"{path}: {e.strerror}") from e
    except (
        UnicodeDecodeError,
        tomllib.TOMLDecodeError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as e:
        reason = f"a suppression lacks {e}" if isinstance(e, KeyError) else " ".join(str(e).split())
        raise SuppressError(f"{path}: {reason}") from e
    if not found:
        raise SuppressError(f"{path}: no [[suppress]] table in it")
    return found


def suppress(
    reports: Iterable[KernelReport], accepted: Sequence[Suppression], today: date
) -> tuple[list[KernelReport], list[str]]:
    """(reports without the accepted findings, what became of each suppression that no longer does anything)."""
    used: set[Suppression] = set()
    out = [_one(report, accepted, today, used) for report in reports]
    return out, [s.fate(False, today) for s in accepted if s not in used]


def _one(
    report: KernelReport, accepted: Sequence[Suppression], today: date, used: set[Suppression]
) -> KernelReport:
    taken: list[tuple[Finding, str]] = []
    left: list[Finding] = []
    for finding in report.findings:
        matching = next((s for s in accepted if s.covers(report.name, finding, today)), None)
        if matching is None:
            left.append(finding)
        else:
            used.add(matching)
            taken.append((finding, str(matching)))
    if not taken:
        return report
    verdict = worst([f.verdict for f in left if f.severity is not Severity.NOTE])
    if report.unknown:  # what could not be read stays unread
        verdict = worst([verdict, Verdict.INCONCLUSIVE])
    return replace(report, findings=tuple(left), verdict=verdict, suppressed=(*report.suppressed, *taken))
