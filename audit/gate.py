"""The gate: is there fresh evidence for exactly the machine code that would run?

A pure function of what was built, what the auditor says about it, what the lock holds, and what the policy
demands. Every red row names what is missing and the command that produces it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from k3_audit.artifact.artifact import Artifact

from .evidence import Entry, Evidence, Lock, launch_sha256
from .findings import Finding, Severity, Verdict, worst
from .policy import Policy, Suppression
from .tree import Tree

if TYPE_CHECKING:
    from .scan import KernelReport

# More lines of a changed sync skeleton than a person reads in a terminal; the lock's diff has all of them.
_MOST_DIFF_LINES = 40


@dataclass(frozen=True)
class Problem:
    """One reason why a row is not green: `kind` for machines, `message` for people.

    `commands` mend it, `detail` are lines to show below (a diff, the findings).
    """

    kind: str
    verdict: Verdict
    message: str
    commands: tuple[str, ...] = ()
    detail: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture. `audit` is None when there was nothing to audit."""

    kernel: str
    arch: str
    audit: Verdict | None
    evidence: str
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    reports: tuple[KernelReport, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return worst([p.verdict for p in self.problems])


@dataclass(frozen=True)
class GateResult:
    """All rows, the problems that concern no single kernel, and every suppression with what became of it."""

    rows: tuple[Row, ...]
    problems: tuple[Problem, ...] = ()
    suppressions: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return worst([p.verdict for p in self.problems] + [r.verdict for r in self.rows])


def regenerate_command(*, kernel: str = "", arch: str = "", tier: str = "") -> str:
    """The command that refreshes the lock for one kernel, architecture and tier."""
    parts = ["python golden/regenerate.py"]
    for option, value in (("--tier", tier), ("--kernel", kernel), ("--arch", arch)):
        if value:
            parts.append(f"{option} {value}")
    return " ".join([*parts, '--reason "..."'])


def gate(
    artifacts: Iterable[Artifact],
    lock: Lock,
    reports: Mapping[tuple[str, str], Sequence[KernelReport]],
    policy: Policy,
    tree: Tree,
    today: date,
) -> GateResult:
    """Judge every kernel in `tree.sources` on every architecture of the policy, and every entry of the lock.

    `reports` holds the auditor's reports by (kernel, architecture). Nothing is read or written here.
    """
    built = {(a.kernel, a.arch): a for a in artifacts}
    wanted = {(k, arch) for k in tree.sources for arch in policy.required}
    used: set[Suppression] = set()
    rows = []
    for kernel, arch in sorted(wanted | {(e.kernel, e.arch) for e in lock.entries}):
        entry = lock.entry(kernel, arch)
        if (kernel, arch) not in wanted:
            rows.append(_gone(kernel, arch))
        elif (artifact := built.get((kernel, arch))) is None:
            rows.append(_not_built(kernel, arch))
        else:
            found = tuple(reports.get((kernel, arch), ()))
            rows.append(_row(artifact, entry, lock, found, policy, tree, today, used))
    suppressions = tuple(s.fate(s in used, today) for s in policy.suppressions)
    return GateResult(tuple(rows), tuple(_reference(lock, tree)), suppressions)


def _reference(lock: Lock, tree: Tree) -> Iterable[Problem]:
    now, command = lock.reference, (regenerate_command(),)
    if now is None:
        yield Problem(
            "reference-unlocked", Verdict.FINDING, "the lock does not name the reference yet", command
        )
    elif now.sha256 != tree.reference:
        message = "the reference (reference/) moved and the lock gives no reason for it"
        yield Problem("reference-moved", Verdict.FINDING, message, command)
    elif now.values_sha256 != tree.expected:
        message = "the expected values (golden/expected/) are not those that the lock names"
        yield Problem("expected-moved", Verdict.FINDING, message, command)


def _gone(kernel: str, arch: str) -> Row:
    message = "in the lock, but the kernel or its architecture no longer exists"
    problem = Problem("gone", Verdict.FINDING, message, (regenerate_command(),))
    return Row(kernel, arch, None, "", (problem,))


def _not_built(kernel: str, arch: str) -> Row:
    problem = Problem("not-built", Verdict.ERROR, "there is no machine code to judge", ("k3-audit build",))
    return Row(kernel, arch, None, "", (problem,))


def _row(
    artifact: Artifact,
    entry: Entry | None,
    lock: Lock,
    reports: tuple[KernelReport, ...],
    policy: Policy,
    tree: Tree,
    today: date,
    used: set[Suppression],
) -> Row:
    problems: list[Problem] = []
    notes: list[str] = []
    kernel, arch = artifact.kernel, artifact.arch
    if stale := changed(artifact.sources, tree.sources[kernel]):
        message = f"built from another version of {', '.join(stale)}"
        problems.append(Problem("build-stale", Verdict.ERROR, message, ("k3-audit build",)))
    audit, left = judge(kernel, reports, policy.suppressions, today, used)
    if audit != Verdict.CLEAN:
        problems.append(_audit_problem(audit, left))
    problems += _code(artifact, entry, reports, notes)
    required = policy.required[arch]
    if not required:
        evidence = "static only"
        notes.append(f"static only: {policy.static_only[arch]}")
    else:
        parts = []
        for tier in required:
            records = [r for r in entry.evidence if r.tier == tier] if entry else []
            missing = list(missing_evidence(artifact, tier, records, lock, policy))
            if missing:
                command = (regenerate_command(kernel=kernel, arch=arch, tier=tier),)
                message = f"{tier} evidence is missing; on a machine with a GPU of {arch}:"
                problems.append(
                    Problem(f"evidence-missing:{tier}", Verdict.FINDING, message, command, tuple(missing))
                )
                parts.append(f"{tier}: missing")
            else:
                parts.append(_summary(tier, records))
                if any(r.tier_sha256 != tree.tiers.get(tier) for r in records):
                    notes.append(f"{tier} was measured with another version of the tier's own code")
        evidence = ", ".join(parts)
    return Row(kernel, arch, audit, evidence, tuple(problems), tuple(notes), reports)


def judge(
    kernel: str,
    reports: Sequence[KernelReport],
    suppressions: Sequence[Suppression],
    today: date,
    used: set[Suppression] | None = None,
) -> tuple[Verdict, list[Finding]]:
    """(verdict, findings that count) of one kernel's reports, once the accepted findings are taken out.

    The suppressions that matched are added to `used`. No report at all is an error, never clean.
    """
    verdicts: list[Verdict] = [] if reports else [Verdict.ERROR]
    left = []
    for report in reports:
        # A note is a remark about cost, never a reason for red.
        counted = [f for f in report.findings if f.severity != Severity.NOTE]
        open_findings = []
        for finding in counted:
            accepted = [s for s in suppressions if s.covers(kernel, finding, today)]
            if accepted:
                if used is not None:
                    used.update(accepted)
            else:
                open_findings.append(finding)
        left += open_findings
        # With every finding accepted what remains is what no finding speaks of, such as unknown instructions.
        explained = {f.verdict for f in counted}
        if report.verdict not in explained and report.verdict != Verdict.CLEAN:
            verdicts.append(report.verdict)
        elif report.unknown:
            verdicts.append(Verdict.INCONCLUSIVE)
        verdicts += [f.verdict for f in open_findings]
    return worst(verdicts), left


def _audit_problem(audit: Verdict, findings: Sequence[Finding]) -> Problem:
    detail = []
    for f in findings:
        detail.append(f"{f.rule} {f.verdict} at {_where(f)}: {f.message}")
        detail += [f"  fix: {f.fix}"] if f.fix else []
        detail += [f"  would be settled by: {f.settle}"] if f.settle else []
    message = {
        Verdict.FINDING: "the auditor found defects in the machine code",
        Verdict.INCONCLUSIVE: "the auditor could not decide",
        Verdict.ERROR: "the auditor could not read the machine code",
    }[audit]
    rules = sorted({f.rule for f in findings})
    return Problem(
        f"audit-{audit}", audit, message, tuple(f"k3-audit explain {r}" for r in rules), tuple(detail)
    )


def _where(finding: Finding) -> str:
    """PTX line and source line of a finding's first site; the source line alone when a rule read the source."""
    if not finding.sites:
        return "the kernel"
    site = finding.sites[0]
    if site.source.endswith(f":{site.line}"):
        return site.source
    return f"PTX line {site.line}" + (f" ({site.source})" if site.source else "")


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names whose value differs, appears or vanishes between two tables of hashes or versions."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def skeleton_diff(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    """What changed between two sync skeletons, as the lines of a unified diff without its header."""
    lines = list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]
    more = len(lines) - _MOST_DIFF_LINES
    return tuple(lines[:_MOST_DIFF_LINES]) + ((f"... {more} more lines",) if more > 0 else ())


def _versions(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    return ", ".join(f"{n} {old.get(n, 'absent')} -> {new.get(n, 'absent')}" for n in changed(old, new))


def _code(
    artifact: Artifact, entry: Entry | None, reports: tuple[KernelReport, ...], notes: list[str]
) -> Iterable[Problem]:
    """How the machine code and its sources stand against the lock."""
    relock = (regenerate_command(kernel=artifact.kernel, arch=artifact.arch),)
    if entry is None:
        yield Problem(
            "unlocked", Verdict.FINDING, "a new kernel or architecture: the lock does not know it", relock
        )
        return
    sources = changed(entry.sources, artifact.sources)
    toolkit = _versions(entry.toolkit, artifact.toolkit)
    skeleton = tuple(line for r in reports for line in r.sync_skeleton)
    diff = skeleton_diff(entry.sync_skeleton, skeleton)
    because = [f"source changed: {', '.join(sources)}"] if sources else []
    because += [f"toolkit changed: {toolkit}"] if toolkit else []
    if artifact.cubin_sha256 != entry.cubin_sha256:
        what = [f"cubin {entry.cubin_sha256[:12]} -> {artifact.cubin_sha256[:12]}"]
        sync = (
            ["synchronisation changed:", *(f"  {d}" for d in diff)] if diff else ["synchronisation unchanged"]
        )
        message = "the machine code is not the one that the lock names"
        yield Problem("code-changed", Verdict.FINDING, message, relock, (*because, *what, *sync))
    elif launch_sha256(artifact) != entry.launch_sha256:
        message = "the same machine code would be launched in another shape or with other arguments"
        yield Problem("launch-changed", Verdict.FINDING, message, relock, tuple(because))
    elif sources or artifact.ptx_sha256 != entry.ptx_sha256:
        message = "the source changed, the machine code did not: lock it again, no GPU is needed"
        yield Problem("source-changed", Verdict.FINDING, message, relock, tuple(because))
    elif diff:
        message = "the auditor reads the same machine code differently now: lock it again, no GPU is needed"
        yield Problem("skeleton-changed", Verdict.FINDING, message, relock, diff)
    elif toolkit:
        notes.append(f"built with another toolkit, same machine code: {toolkit}")


def missing_evidence(
    artifact: Artifact, tier: str, records: Sequence[Evidence], lock: Lock, policy: Policy
) -> Iterable[str]:
    """Why the records of one tier are not enough, a line for each reason; nothing when they are."""
    have = {r.case for r in records}
    for case in policy.cases.get((artifact.kernel, tier), ()):
        if case not in have:
            yield f"case {case}: never measured"
    if not records:
        yield "never measured"
    for record in records:
        if reason := why_stale(record, artifact, lock, policy):
            yield f"case {record.case}: {reason}"


def why_stale(record: Evidence, artifact: Artifact, lock: Lock, policy: Policy) -> str:
    """Why `record` says nothing about `artifact`, or "" when it does."""
    if record.cubin_sha256 != artifact.cubin_sha256:
        return f"measured on cubin {record.cubin_sha256[:12]}, this one is {artifact.cubin_sha256[:12]}"
    if record.launch_sha256 != launch_sha256(artifact):
        return "measured with another launch shape"
    if not record.gpu:
        return "measured by the CPU form of the tier, which does not run the machine code"
    if record.verdict != Verdict.CLEAN:
        return f"measured, and it failed ({record.verdict})" + (f": {record.detail}" if record.detail else "")
    tier = policy.tiers.get(record.tier)
    if tier and tier.reference and not lock.same_values(record.reference_sha256):
        return "measured against a reference that computes other numbers"
    return ""


def _summary(tier: str, records: Sequence[Evidence]) -> str:
    gpus = ", ".join(sorted({r.gpu for r in records}))
    cases = f"{len(records)} case" + "s" * (len(records) != 1)
    return f"{tier}: {cases} on {gpus}, {max(r.date for r in records)[:10]}"
