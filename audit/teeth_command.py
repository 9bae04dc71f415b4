"""`k3-audit teeth`: gathers the clean programs, plants the mistakes, prints the kill matrix."""

from __future__ import annotations

from pathlib import Path

import click

from .findings import ExitCode

CORPUS = Path("tests/corpus")
SURVIVORS = CORPUS / "survivors.toml"
DOCUMENT = "k3-audit teeth --format markdown -o docs/teeth.md"


@click.command(short_help="Plant mistakes into clean kernels: does the auditor find them?")
@click.option(
    "--kernel", "kernels", multiple=True, metavar="NAME", help="Only this kernel, no corpus. May be repeated."
)
@click.option("--arch", "archs", multiple=True, metavar="SM", help="Only this architecture of our kernels.")
@click.option(
    "--corpus/--no-corpus", "with_corpus", default=None, help="Also the passing programs of tests/corpus."
)
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Processes.")
@click.option(
    "--format",
    "form",
    type=click.Choice(("terminal", "json", "markdown")),
    default="terminal",
    show_default=True,
    help="Form of the report.",
)
@click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    help="The checkout (default: around this folder).",
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the report to a file."
)
def teeth(
    kernels: tuple[str, ...],
    archs: tuple[str, ...],
    with_corpus: bool | None,
    jobs: int,
    form: str,
    root: Path | None,
    output: Path | None,
) -> int:
    """Plant mistakes into clean programs, one at a time, and say which of them the auditor finds.

    The programs are our own kernels as the artifact store holds them, and the passing half of tests/corpus.
    Exit code 1 when a mutant survives that nobody has argued about (tests/corpus/survivors.toml).

    \b
    Examples:
      k3-audit teeth
      k3-audit teeth --kernel attn_res --arch sm_90a
      k3-audit teeth --format markdown -o docs/teeth.md
    """
    from .cli import _checkout, _emit, _progress, _terminal, open_store
    from .report import teeth as report
    from .teeth import Arguments, Teeth, bite_all, corpus

    root = _checkout(root)
    programs = [*_kernels(open_store(root), root, kernels, archs)]
    if with_corpus or (with_corpus is None and not kernels and not archs):
        programs += corpus(root / CORPUS)
    if not programs:
        raise click.ClickException("no such kernel in the artifact store: run `k3-audit build`")
    with _progress(len(programs), "teeth") as advance:
        outcomes = bite_all(programs, jobs, advance)
    found = Teeth(tuple(outcomes), Arguments.load(root / SURVIVORS))
    if form == "json":
        _emit(report.as_json(found), output)
    elif form == "markdown":
        _emit(report.markdown(found, DOCUMENT), output)
    else:
        with _terminal(output) as console:
            report.terminal(console, found)
    return ExitCode.FINDINGS if found.unargued or found.stale else ExitCode.CLEAN


def _kernels(store, root, kernels, archs):
    """Our kernels in the store as programs: the PTX of each architecture, and the sources of each kernel once."""
    from .teeth import Program

    seen = set()
    for kernel, arch in store.list():
        if (kernels and kernel not in kernels) or (archs and arch not in archs):
            continue
        artifact = store.get(kernel, arch)
        yield Program(f"{kernel} {arch}", artifact.ptx, artifact.contract)
        if kernel not in seen:
            seen.add(kernel)
            sources = {name: (root / name).read_text(encoding="utf-8") for name in artifact.sources}
            yield Program(kernel, sources=tuple(sources.items()))
