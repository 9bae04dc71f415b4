"""For people at a terminal. Rich leaves colour out where the output is no terminal or NO_COLOR is set."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..findings import Finding, Verdict
from ..rules.base import rules as known_rules

if TYPE_CHECKING:
    from ..evidence import Lock
    from ..gate import GateResult, Problem
    from ..rules.base import Rule
    from ..scan import KernelReport

_STYLE = {
    Verdict.CLEAN: "green",
    Verdict.FINDING: "red",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.ERROR: "bold red",
}


def _say(console: Console, text: str = "", style: str = "") -> None:
    """One line exactly as given: not wrapped, no markup read, so that commands can be copied."""
    console.print(Text(text, style=style), soft_wrap=True)


def _word(verdict: Verdict) -> Text:
    return Text(str(verdict), style=_STYLE[verdict])


def _counts(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdicts)
    return ", ".join(f"{counts[v]} {v}" for v in Verdict if counts[v])


def _finding(console: Console, report: KernelReport, finding: Finding) -> None:
    line = f":{finding.sites[0].line}" if finding.sites else ""
    head = f"{finding.rule} {finding.severity}"
    head += " (inconclusive)" if finding.verdict == Verdict.INCONCLUSIVE else ""
    _say(console, f"{head}  {report.file}{line}  in {report.name}", _STYLE[finding.verdict])
    _say(console, f"    {finding.message}")
    width = max((len(str(s.line)) for s in finding.sites), default=1)
    for site in finding.sites:
        role = f"  <- {site.role}" if site.role else ""
        source = f"  ({site.source})" if site.source else ""
        _say(console, f"      {site.line:>{width}} | {site.text}{role}{source}", "cyan")
    for label, text in (
        ("missing", finding.missing),
        ("fix", finding.fix),
        ("would settle it", finding.settle),
    ):
        if text:
            _say(console, f"    {label}: {text}")
    more = f"k3-audit explain {finding.rule}    " if finding.rule in known_rules() else ""
    _say(console, f"    {more}fingerprint {finding.fingerprint}", "dim")


def scan(console: Console, reports: Sequence[KernelReport]) -> None:
    """Findings first, the table and the counts last, where the eye ends."""
    for report in reports:
        for finding in report.findings:
            if finding.verdict != Verdict.ERROR:
                _finding(console, report, finding)
                _say(console)
        for _, why in report.suppressed:
            _say(console, f"{report.file}: suppressed in {report.name}: {why}", "yellow")
        for text in report.unknown:
            _say(console, f"{report.file}: not understood: {text}", "yellow")
    table = Table(box=None, pad_edge=False)
    for name in ("kernel", "file", "architecture", "verdict", "findings"):
        table.add_column(name, overflow="fold")
    for report in reports:
        rules = ", ".join(
            f"{n}x {rule}" for rule, n in sorted(Counter(f.rule for f in report.findings).items())
        )
        table.add_row(
            Text(report.name),
            Text(report.file),
            Text(report.arch),
            _word(report.verdict),
            Text(rules or "none"),
        )
    console.print(table)
    _say(console, f"{len(reports)} kernels: {_counts([r.verdict for r in reports])}")


def rules(console: Console, known: Iterable[Rule]) -> None:
    """One line a rule."""
    _table(console, ("rule", "severity", "finds"), ((r.id, str(r.severity), r.title) for r in known))


def rule(console: Console, rule: Rule) -> None:
    """Everything about one rule."""
    _say(console, f"{rule.id} ({rule.severity}): {rule.title}", "bold")
    for label, text in (
        ("What it means", rule.meaning),
        ("What it looks for", rule.looks_for),
        ("How to fix it", rule.fix),
        ("PTX ISA", rule.isa_section),
    ):
        _say(console)
        _say(console, label, "bold")
        console.print(Padding(Text(text), (0, 0, 0, 2), expand=False))
    for label, text in (("Fails", rule.failing), ("Passes", rule.passing)):
        _say(console)
        _say(console, label, "bold")
        _say(console, textwrap.indent(text.rstrip(), "  "), "cyan")


def _problem(console: Console, where: str, problem: Problem) -> None:
    _say(console, f"{where}: {problem.message}", _STYLE[problem.verdict])
    for line in problem.detail:
        style = {"-": "red", "+": "green"}.get(line.strip()[:1], "")
        _say(console, f"    {line}", style)
    for command in problem.commands:
        _say(console, f"    $ {command}", "bold")


def gate(console: Console, result: GateResult) -> None:
    """What is wrong and how to mend it first, then the table, then the verdict."""
    for problem in result.problems:
        _problem(console, "repository", problem)
    for row in result.rows:
        for problem in row.problems:
            _problem(console, f"{row.kernel} {row.arch}", problem)
    for row in result.rows:
        for note in row.notes:
            _say(console, f"note: {row.kernel} {row.arch}: {note}", "dim")
    for suppression in result.suppressions:
        _say(console, f"suppressed: {suppression}", "yellow")
    table = Table(box=None, pad_edge=False)
    for name in ("", "kernel", "architecture", "audit", "evidence"):
        table.add_column(name, overflow="fold")
    for row in result.rows:
        mark = {Verdict.CLEAN: "ok", Verdict.INCONCLUSIVE: "??"}.get(row.verdict, "XX")
        audit = _word(row.audit) if row.audit else Text("not audited")
        table.add_row(Text(mark, _STYLE[row.verdict]), row.kernel, row.arch, audit, Text(row.evidence))
    console.print(table)
    _say(console, f"gate: {result.verdict}", _STYLE[result.verdict])


def evidence(console: Console, lock: Lock) -> None:
    """What the lock holds: every measurement with its figures."""
    now = lock.reference
    if now:
        _say(console, f"reference {now.sha256[:12]}, {now.date[:10]}: {now.reason}")
    for entry in sorted(lock.entries, key=lambda e: (e.kernel, e.arch)):
        a = entry.audit
        _say(console)
        _say(
            console, f"{entry.kernel} {entry.arch}  cubin {entry.cubin_sha256[:12]}  ({entry.reason})", "bold"
        )
        _say(
            console,
            f"  audit {a.verdict}: {a.findings} findings, {a.inconclusive} inconclusive, {a.unknown} unknown",
        )
        for line in a.suppressed:
            _say(console, f"  suppressed: {line}")
        for record in entry.evidence:
            fresh = "" if record.cubin_sha256 == entry.cubin_sha256 else ", on another cubin"
            gpu = record.gpu or "CPU form"
            head = f"  {record.tier} {record.case}: {record.verdict}{fresh}, {gpu}, {record.date[:10]}"
            _say(console, head, _STYLE[record.verdict])
            for name, value in {**record.counts, **record.figures}.items():
                _say(
                    console,
                    f"    {name} = {value:.6g}" if isinstance(value, float) else f"    {name} = {value}",
                )
            for prompt in record.prompts:
                _say(
                    console, f"    prompt {prompt.name}, {prompt.tokens} tokens, sha256 {prompt.sha256[:12]}"
                )
            _say(console, f"    $ {record.command}", "dim")
        if not entry.evidence:
            _say(console, "  static only: never run" if not entry.required else "  no measurement")


def _table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def checkpoint(console: Console, found: Mapping[str, Any]) -> None:
    """What `k3_audit.reference.inspect.inspect` returned: totals, layers, tensors of one layer, problems."""
    _say(console, found["path"], "bold")
    for name, value in found["totals"].items():
        _say(console, f"  {name.replace('_', ' ')}: {value:,}")
    _say(console)
    columns = ("layer", "attention", "ffn", "block_start", "tensors", "bytes")
    _table(console, columns, ([row[c] for c in columns] for row in found["layers"]))
    if tensors := found.get("tensors"):
        _say(console)
        columns = tuple(tensors[0])
        _table(console, columns, ([row[c] for c in columns] for row in tensors))
    _say(console)
    for problem in found["problems"]:
        _say(console, f"{problem['kind']}: {problem['name']}: {problem['detail']}", "red")
    _say(console, f"{len(found['problems'])} problems" if found["problems"] else "no problem found")
