"""The kill matrix: for a terminal, as JSON, and as the document docs/teeth.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..mutate import MEANING

if TYPE_CHECKING:
    from ..teeth import Outcome, Teeth

SCHEMA = "k3-audit/teeth/1"
_HEADS = {
    "": "Not argued",
    "equivalent": "Equivalent",
    "limit": "Limit of the auditor",
    "inconclusive": "Inconclusive",
}


def summary(teeth: Teeth) -> str:
    """One line of counts."""
    results = Counter(o.result for o in teeth.outcomes)
    kinds = Counter(teeth.kind(o) for o in teeth.outcomes if o.result != "killed")
    counts = ", ".join(f"{n} {r}" for r, n in results.most_common())
    argued = ", ".join(f"{kinds[k]} {k}" for k in ("equivalent", "limit") if kinds[k])
    programs = len({o.program for o in teeth.outcomes})
    return (
        f"{len(teeth.outcomes)} mutants of {programs} programs: {counts}; argued: {argued or 'none'}; "
        f"kill rate {teeth.rate:.1%}"
    )


def _where(o: Outcome) -> str:
    at = f" ({o.source})" if o.source else ""
    return f"{o.fingerprint} {o.program}:{o.line}{at} {o.operator}: {o.what}"


def terminal(console: Console, teeth: Teeth) -> None:
    """Survivors first, matrices and counts last, where the eye ends."""
    for kind, reason, outcomes in teeth.survivors():
        style = {"": "red", "limit": "yellow"}.get(kind, "")
        console.print(Text(f"{_HEADS[kind]}{': ' if reason else ''}{reason}", style=style), soft_wrap=True)
        for o in outcomes:
            console.print(Text(f"    {_where(o)}", style="dim"), soft_wrap=True)
    for o in teeth.stale:
        console.print(
            Text(f"Stale argument: {_where(o)} is killed by {', '.join(o.rules)}", style="red"),
            soft_wrap=True,
        )
    for title, rows, columns in _matrices(teeth):
        table = Table(box=None, pad_edge=False, title=title, title_justify="left")
        for name in columns:
            table.add_column(name, justify="left" if name == columns[0] else "right")
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
    console.print(Text(summary(teeth)), soft_wrap=True)


def _matrices(teeth: Teeth) -> Iterator[tuple[str, list[list[str]], list[str]]]:
    """(title, rows, columns) of the two tables."""
    from ..teeth import RESULTS

    rows = [[op, *(str(c[r] or "") for r in RESULTS)] for op, c in teeth.by_operator().items()]
    yield "Operators", rows, ["operator", *RESULTS]
    rules = teeth.by_rule()
    operators = sorted({op for c in rules.values() for op in c})
    rows = [[rule, *(str(c[op] or "") for op in operators)] for rule, c in rules.items()]
    yield "Kills per rule", rows, ["rule", *operators]


def as_json(teeth: Teeth) -> str:
    """Every mutant with its outcome, and the arguments."""
    mutants = [
        {
            **asdict(o),
            "argued": teeth.kind(o),
            "reason": teeth.arguments.by_fingerprint.get(o.fingerprint, ("", ""))[1],
        }
        for o in teeth.outcomes
    ]
    document = {
        "schema": SCHEMA,
        "kill_rate": round(teeth.rate, 4),
        "unargued": len(teeth.unargued),
        "stale": len(teeth.stale),
        "mutants": mutants,
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def markdown(teeth: Teeth, command: str) -> str:
    """The document. `command` is what made it."""
    lines = [
        "# Teeth",
        "",
        "What the auditor finds when mistakes are planted into clean programs: our own kernels as they are built, and",
        "the passing half of every pair in `tests/corpus`. One mistake at a time; the operators are in `audit/mutate`.",
        "",
        f"Made by `{command}`; do not edit. {summary(teeth)}.",
        "",
        "A mutant is *killed* by a finding that the clean program does not get, at the changed place. *Inconclusive*",
        "is no kill: the auditor says what would settle it. The kill rate leaves out what is argued to be equivalent.",
        "",
    ]
    for title, rows, columns in _matrices(teeth):
        lines += [f"## {title}", ""]
        lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    lines += ["## What the operators do", ""]
    lines += [f"- `{op}`: {MEANING[op]}" for op in teeth.by_operator()] + [""]
    lines += ["## What survives, and why", ""]
    for kind, reason, outcomes in teeth.survivors():
        lines += [f"### {_HEADS[kind]} ({len(outcomes)})", "", reason or "Nobody has argued about these.", ""]
        lines += [
            f"- `{o.fingerprint}` {o.program}, line {o.line}, {o.operator}: {o.what}" for o in outcomes
        ] + [""]
    return "\n".join(lines)
