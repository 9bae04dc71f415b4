"""Audit everything that was captured: verdicts, time, memory, and what the auditor did not understand.

Each file is audited in a process of its own, so that time and peak memory are the file's and a crash is one
row of the table.
"""

from __future__ import annotations

import json
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from k3_audit.artifact.atomic import write_atomic

from .builds import Manifest
from .processes import Fresh
from .wheels import CaptureError

BEGIN, END = "<!-- survey: begin (written by `k3-audit capture survey`) -->", "<!-- survey: end -->"
_PRELOAD = ("k3_audit.audit.scan", "k3_audit.audit.rules.base")
VERDICTS = ("clean", "finding", "inconclusive", "error")
# What these rules leave open is a fact about the neighbouring kernels, which only a contract can tell.
_NEIGHBOURS = ("R15", "R16")


@dataclass(frozen=True)
class Row:
    """One kernel. `mebibytes` is the peak of its process; `findings` counts "R06 finding" and the like, notes
    included; `failure` is why there is no verdict at all.
    """

    source: str
    recipe: str
    file: str
    arch: str
    lines: int
    verdict: str
    seconds: float
    mebibytes: float
    findings: dict[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    failure: str = ""


def survey(
    folders: Iterable[Path],
    *,
    jobs: int = 2,
    timeout: float = 300,
    progress: Callable[[Row], None] = lambda row: None,
) -> tuple[list[Row], list[Manifest]]:
    """Audit the PTX of every capture. `timeout` is in seconds, for one file. Raises CaptureError as `load`."""
    manifests = [Manifest.load(folder) for folder in folders]
    todo = [
        (manifest.source, built.recipe, built.arch, folder / file.ptx, file.lines)
        for folder, manifest in zip(folders, manifests, strict=True)
        for built in manifest.builds
        for file in built.files
    ]
    fresh = Fresh(_PRELOAD)

    def one(job: tuple[str, str, str, Path, int]) -> list[Row]:
        source, recipe, arch, path, lines = job
        kernels, reason = fresh.call(_audit, path, timeout=timeout)
        if kernels is None:
            rows = [Row(source, recipe, path.name, arch, lines, "error", 0.0, 0.0, failure=reason)]
        else:
            rows = [Row(source, recipe, path.name, arch, lines, *k) for k in kernels]
        for row in rows:
            progress(row)
        return rows

    with ThreadPoolExecutor(jobs) as pool:
        return [row for rows in pool.map(one, todo) for row in rows], manifests


def _audit(path: Path) -> list[tuple[str, float, float, dict[str, int], tuple[str, ...]]]:
    from ..findings import Severity
    from ..scan import scan_ptx

    start = time.perf_counter()
    reports = scan_ptx(path.read_text(), path.name)
    seconds = round(time.perf_counter() - start, 2)
    peak = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)  # the kernel counts KiB
    return [
        (
            str(r.verdict),
            seconds,
            peak,
            dict(
                Counter(
                    f"{f.rule} {'note' if f.severity == Severity.NOTE else f.verdict}" for f in r.findings
                )
            ),
            r.unknown,
        )
        for r in reports
    ]


def save(rows: Sequence[Row], path: Path) -> None:
    write_atomic(path, json.dumps([asdict(r) for r in rows], indent=1) + "\n")


def load(path: Path) -> list[Row]:
    """Rows as `save` wrote them. Raises CaptureError."""
    try:
        return [Row(**r | {"unknown": tuple(r["unknown"])}) for r in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise CaptureError(f"{path} is no survey ({e}); run `k3-audit capture survey`") from None


def markdown(rows: Sequence[Row], manifests: Sequence[Manifest]) -> str:
    """The tables of docs/findings/README.md: one line per source and architecture, then per rule."""
    lines = ["| source | architecture | recipes | did not build | kernels | " + " | ".join(VERDICTS)]
    lines[0] += " | inconclusive only for want of a contract | longest | slowest | peak memory |"
    lines.append("|" + "---|" * 13)
    for manifest in manifests:
        for arch in sorted({b.arch for b in manifest.builds}):
            builds = [b for b in manifest.builds if b.arch == arch]
            here = [r for r in rows if (r.source, r.arch) == (manifest.source, arch)]
            counts = Counter(r.verdict for r in here)
            cells = [
                *(_names(manifest), arch, len(builds), sum(bool(b.reason) for b in builds), len(here)),
                *(counts[v] for v in VERDICTS),
                sum(_wants_contract(r) for r in here),
                f"{max((r.lines for r in here), default=0):,} lines",
                f"{max((r.seconds for r in here), default=0):.1f} s",
                f"{max((r.mebibytes for r in here), default=0):.0f} MiB",
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| rule | finding | inconclusive | note | kernels |", "|---|---|---|---|---|"]
    for rule in sorted({key.split()[0] for r in rows for key in r.findings}):
        per = Counter[str]()
        for r in rows:
            per.update({k.split()[1]: n for k, n in r.findings.items() if k.split()[0] == rule})
        kernels = sum(any(k.split()[0] == rule for k in r.findings) for r in rows)
        lines.append(f"| {rule} | {per['finding']} | {per['inconclusive']} | {per['note']} | {kernels} |")
    unknown = sorted({text.split(": ", 1)[-1] for r in rows for text in r.unknown})
    crashed = [f"{r.file}: {r.failure}" for r in rows if r.failure]
    lines += ["", f"Instructions that the auditor could not read: {', '.join(unknown) or 'none'}."]
    lines += [f"Files without a verdict: {'; '.join(crashed) or 'none'}."]
    reasons = Counter((_names(m), b.arch, _kind(b.reason)) for m in manifests for b in m.builds if b.reason)
    if reasons:
        lines += ["", "| what did not build | architecture | recipes | reason |", "|---|---|---|---|"]
        lines += [f"| {s} | {a} | {n} | {r} |" for (s, a, r), n in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def _wants_contract(row: Row) -> bool:
    open_ = {key.split()[0] for key in row.findings if not key.endswith(" note")}
    return row.verdict == "inconclusive" and open_ <= set(_NEIGHBOURS)


def _names(manifest: Manifest) -> str:
    return ", ".join(f"{w['name']} {w['version']}" for w in manifest.wheels)


def _kind(reason: str) -> str:
    """A reason without what differs from kernel to kernel."""
    return reason.replace("|", "\\|").split(" (")[0]


def insert(document: Path, table: str) -> None:
    """Replace what stands between the marks of a Markdown file. Raises CaptureError without the marks."""
    try:
        text = document.read_text()
    except OSError as e:
        raise CaptureError(f"{document}: {e.strerror}") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise CaptureError(f"{document} lacks the marks {BEGIN!r} and {END!r}")
    write_atomic(document, f"{before}{BEGIN}\n\n{table}\n{END}{after}")
