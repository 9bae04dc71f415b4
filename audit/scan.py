"""Audit PTX: every rule on every kernel of a text, one report per kernel.

    scan_ptx(text, "kernel.ptx") -> [KernelReport(name, file, arch, verdict, findings, sync_skeleton,
    unknown), ...]

No contract is needed. A contract makes rules exact that otherwise have to answer *inconclusive*; machine
code lets the auditor confirm that the assembler kept the order.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from k3_audit.artifact.contract import Contract

from .findings import Finding, Severity, Verdict, worst
from .ptx.parser import PtxError, parse
from .rules.base import rules
from .skeleton import skeleton
from .subject import Subject


@dataclass(frozen=True)
class KernelReport:
    """What the auditor says about one kernel.

    `sync_skeleton` lists its synchronising instructions, one line each (:mod:`.skeleton`); `unknown` what the
    auditor could not read, one line each. `name` is "" for a text that is no PTX. `suppressed` holds findings
    that somebody has accepted, each with who says why (:mod:`.suppress`); they do not count.
    """

    name: str
    file: str
    arch: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    sync_skeleton: tuple[str, ...]
    unknown: tuple[str, ...]
    suppressed: tuple[tuple[Finding, str], ...] = ()


ContractOf = Callable[[str, int], Contract | None]


def scan_ptx(
    text: str | bytes,
    name: str = "<ptx>",
    contract: Contract | ContractOf | None = None,
    sass: str | None = None,
) -> list[KernelReport]:
    """Audit every kernel of one PTX text. Raises PtxError when the text is no PTX.

    `contract` applies to the kernel that it names, or to the only kernel of the text; or it is a function that
    chooses one, given a kernel's name and how many kernels there are.
    """
    with _no_garbage_collection():
        module = parse(text, name)
        entries = module.entries
        return [
            audit(Subject(module, entry, _contract_of(contract, entry.name, len(entries)), sass or ""), name)
            for entry in entries
        ]


def audit(subject: Subject, file: str = "") -> KernelReport:
    """Run all rules on one kernel."""
    findings: list[Finding] = []
    for rule in rules().values():
        if rule.language in ("ptx", "sass"):
            findings += rule.check(subject)
    unknown = tuple(f"line {line}: {text}" for line, text in unread(subject))
    order = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}
    findings.sort(key=lambda f: (f.verdict != Verdict.FINDING, order[f.severity], f.rule))
    verdict = worst([f.verdict for f in findings if f.severity != Severity.NOTE])
    return KernelReport(
        subject.kernel, file, subject.arch, verdict, tuple(findings), tuple(skeleton(subject)), unknown
    )


def sass_only(sass: str, file: str, arch: str) -> list[KernelReport]:
    """One *inconclusive* report per kernel of a listing that no PTX stands beside. Raises SassError for no listing.

    Machine code does not say what order was asked for: `.relaxed` and `.release` at CTA scope, most tcgen05 fences and
    the publication of an mbarrier look alike or leave no instruction.
    """
    from .sass.parser import parse as parse_sass

    message = "only machine code is here, and the order that was asked for cannot be read from it"
    settle = f"the PTX that it was assembled from, beside it with the same name ({file.removesuffix('.cubin')}.ptx)"
    finding = {
        "severity": Severity.WARNING,
        "verdict": Verdict.INCONCLUSIVE,
        "message": message,
        "settle": settle,
    }
    return [
        KernelReport(
            name, file, arch, Verdict.INCONCLUSIVE, (Finding("R00", kernel=name, **finding),), (), ()
        )
        for name in parse_sass(sass)
    ]


def unread(subject: Subject) -> list[tuple[int, str]]:
    """(line, text) of what the auditor does not understand in the kernel or outside all kernels."""
    from .rules.r00_unread import unread as of

    return of(subject)


def _contract_of(contract: Contract | ContractOf | None, kernel: str, kernels: int) -> Contract | None:
    if contract is None or not isinstance(contract, Contract):
        return contract(kernel, kernels) if contract is not None else None
    return contract if contract.kernel == kernel or kernels == 1 or contract.kernel in kernel else None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The analyses build millions of small objects and no cycles; collecting in between only costs time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


__all__ = ["KernelReport", "PtxError", "audit", "sass_only", "scan_ptx"]
