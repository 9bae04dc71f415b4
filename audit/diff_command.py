"""`k3-audit diff OLD NEW`: what changed in the synchronisation of two builds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .findings import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from .diff import KernelDiff

SCHEMA = "k3-audit/diff/1"
_MARK = {"gone": "-", "new": "+", "moved": ">", "changed": "~"}
_STYLE = {"gone": "red", "new": "green", "moved": "yellow", "changed": "yellow"}


@click.command(short_help="What changed in the synchronisation of two builds.")
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(("terminal", "json")),
    default="terminal",
    show_default=True,
    help="Form of the report.",
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the report to a file."
)
def diff(old: Path, new: Path, form: str, output: Path | None) -> int:
    """Compare the synchronisation of two builds, whatever registers and lines they use.

    OLD and NEW are PTX, cubins, libraries or folders of them, an artifact store or one object of it, or a lock.
    Exit code 1 when something changed.

    \b
    Examples:
      k3-audit diff before.ptx after.ptx
      k3-audit diff golden/kernels.lock build/artifacts
    """
    from .cli import _emit, _terminal
    from .diff import compare, read

    found = compare(read(old), read(new))
    changed = any(d.status != "same" for d in found)
    if form == "json":
        document = {"schema": SCHEMA, "changed": changed, "kernels": [asdict(d) for d in found]}
        _emit(json.dumps(document, indent=2, ensure_ascii=False) + "\n", output)
    else:
        with _terminal(output) as console:
            _show(console, found)
    return ExitCode.FINDINGS if changed else ExitCode.CLEAN


def _show(console: Console, found: Sequence[KernelDiff]) -> None:
    from rich.text import Text

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    for kernel in found:
        status = {"gone": "only in OLD", "new": "only in NEW"}.get(kernel.status, kernel.status)
        say(f"{kernel.title}: {status}", "" if kernel.status == "same" else "bold")
        for change in kernel.changes:
            for line in dict.fromkeys(
                (change.old, change.new) if change.kind == "changed" else (change.new or change.old,)
            ):
                sign = (
                    "-"
                    if change.kind == "changed" and line == change.old
                    else "+"
                    if change.kind == "changed"
                    else ""
                )
                say(
                    f"  {sign or _MARK[change.kind]} {line}",
                    {"-": "red", "+": "green"}.get(sign, _STYLE[change.kind]),
                )
            for note in change.notes:
                say(f"      {note}")
