"""`k3-audit contract`: draft the contract of a foreign kernel, or say what is still open in one."""

from __future__ import annotations

from pathlib import Path

import click

from .findings import ExitCode


@click.command(short_help="Draft a foreign kernel's contract, or list what is open in one.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--infer", is_flag=True, help="FILE is code (PTX, or what holds PTX): draft its contract.")
@click.option("--kernel", metavar="NAME", help="Only the kernels whose name holds NAME.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the draft to a file."
)
def contract(file: Path, infer: bool, kernel: str | None, output: Path | None) -> int:
    """Draft the contract of a kernel from its PTX, or read a contract and list what is open in it.

    A draft states what the code shows, and marks every guess with a question mark and a reason. `k3-audit scan`
    reads kernel.contract.toml beside kernel.ptx by itself, and stays inconclusive while a question mark is left.

    \b
    Examples:
      k3-audit contract --infer kernel.ptx -o kernel.contract.toml
      k3-audit contract kernel.contract.toml
    """
    from .cli import _emit

    if infer:
        _emit(_draft(file, kernel), output)
        return ExitCode.CLEAN
    from .contracts import read

    promises = read(file)
    for promise in promises:
        for question in promise.questions:
            click.echo(f"{promise.contract.kernel}: {question}")
    count = sum(len(p.questions) for p in promises)
    click.echo(f"{file}: {len(promises)} contract{'s' * (len(promises) != 1)}, {count or 'nothing'} open")
    return ExitCode.INCONCLUSIVE if count else ExitCode.CLEAN


def _draft(file: Path, kernel: str | None) -> str:
    """The drafts of all kernels in a file as one TOML text."""
    from .contract_draft import draft
    from .frontend import load
    from .ptx.parser import parse
    from .subject import Subject

    drafts = []
    for unit in load(file):
        if unit.ptx:
            module = parse(unit.ptx, unit.file)
            entries = [e for e in module.entries if not kernel or kernel in e.name]
            drafts += [draft(Subject(module, entry), Path(unit.file).name) for entry in entries]
    if not drafts:
        which = f" called {kernel}" if kernel else ""
        raise click.ClickException(
            f"{file}: no PTX of a kernel{which} in it, and a contract is drafted from PTX"
        )
    if len(drafts) == 1:
        return drafts[0]
    return "\n".join(several(text) for text in drafts)


def several(draft: str) -> str:
    """A draft as one of several: its tables below `[[contract]]`."""
    text = draft.replace("\n[launch]\n", "\n[contract.launch]\n")
    for name in ("params", "handoffs"):
        text = text.replace(f"\n[[{name}]]\n", f"\n[[contract.{name}]]\n")
    return text.replace("\nkernel = ", "\n[[contract]]\nkernel = ", 1)
