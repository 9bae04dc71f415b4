"""`k3-audit model`: what the PTX memory consistency model allows a small program to do."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..cli import EXIT
from ..findings import Verdict, worst
from . import litmus
from .check import UNROLL, Engine, EnginesDisagree, Result, check, why_forbidden
from .draw import Broken, svg, timeline
from .execution import Execution
from .litmus import condition_text
from .program import ModelError, Program

_SHOWN = 24  # outcomes on a terminal


@click.command(short_help="What the PTX memory model allows a small program, or a handoff, to do.")
@click.argument("subjects", nargs=-1, required=True, metavar="FILE.litmus... | KERNEL")
@click.option(
    "--handoff", metavar="NAME", help="Prove this handoff of a kernel's contract, lifted out of its PTX."
)
@click.option(
    "--contract",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.toml",
    help="The contract, where KERNEL is a PTX file.",
)
@click.option("--arch", default="sm_90a", show_default=True, metavar="SM", help="Build of our own kernel.")
@click.option(
    "--set",
    "numbers",
    multiple=True,
    metavar="NAME=N",
    help="A scalar of the launch (default 1). May be repeated.",
)
@click.option(
    "--format", "form", type=click.Choice(("terminal", "json")), default="terminal", show_default=True
)
@click.option("--svg", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw the execution.")
@click.option(
    "--engine",
    type=click.Choice(("auto", "enumerate", "solve", "both")),
    default="auto",
    show_default=True,
    help="enumerate: one execution at a time. solve: as constraints, by z3. auto: enumerate, and solve "
    "where that is too much. both: run the two and compare.",
)
@click.option(
    "--unroll",
    type=click.IntRange(0, 16),
    default=UNROLL,
    show_default=True,
    help="Rounds of a loop that does more than poll.",
)
def model(
    subjects: tuple[str, ...],
    handoff: str | None,
    contract: Path | None,
    arch: str,
    numbers: tuple[str, ...],
    form: str,
    picture: Path | None,
    engine: str,
    unroll: int,
) -> int:
    """All outcomes that the PTX memory consistency model allows a small program (PTX ISA, chapter 8).

    A witness is drawn as a timeline: an execution that satisfies the condition or, where none is allowed, the
    nearest one and the axiom that it breaks. A note that begins with `allowed:` or `forbidden:` is the expectation.

    With --handoff, KERNEL is one of our kernels, as built, or a PTX file with a contract. The protocol of that
    handoff is lifted out of the PTX, and the model must forbid every stale read.

    \b
    Examples:
      k3-audit model tests/corpus/litmus/MP+fences.litmus
      k3-audit model MP.litmus --svg MP.svg
      k3-audit model tests/corpus/litmus/*.litmus --engine both
      k3-audit model attn_res --handoff partial_sums
    """
    if handoff is not None and len(subjects) > 1:
        raise click.UsageError("--handoff takes one kernel")
    if picture is not None and len(subjects) > 1:
        raise click.UsageError("--svg draws one program: give one file")
    if handoff is not None:
        programs, bounds = _lift(subjects[0], handoff, contract, arch, numbers)
    else:
        programs, bounds = [(name, _read(Path(name))) for name in subjects], ()
    results = [(name, _check(name, program, engine, unroll)) for name, program in programs]
    overall = worst([r.verdict for _, r in results])
    worst_result = next(r for _, r in results if r.verdict == overall)
    if picture is not None:
        _draw(picture, *_picture(worst_result))
    if form == "json":
        documents = [_document(name, r, *_picture(r)) for name, r in results]
        single = documents[0] if len(documents) == 1 else documents
        _emit_json(single if handoff is None else {"bounds": bounds, "programs": documents})
        return EXIT[overall]
    if len(results) > 1:
        for name, r in results:
            click.echo(f"{r.verdict!s:12} {_answer(r):10} {name}")
        click.echo(_summary([r.verdict for _, r in results]))
    if len(results) == 1 or (handoff is not None and overall != Verdict.CLEAN):
        click.echo(_report(worst_result, *_picture(worst_result)), nl=False)
    for line in bounds:
        click.echo(f"  {line}")
    return EXIT[overall]


def _emit_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2))


Named = list[tuple[str, Program]]


def _read(file: Path) -> Program:
    try:
        return litmus.parse(file.read_text(encoding="utf-8"))
    except (ModelError, UnicodeDecodeError) as e:
        raise click.ClickException(f"{file}: {e}") from e


def _lift(
    kernel: str, handoff: str, contract: Path | None, arch: str, numbers: Sequence[str]
) -> tuple[Named, tuple[str, ...]]:
    """The programs of a handoff, and what they cover. `kernel` is a PTX file, or the name of a kernel of ours."""
    from k3_audit.artifact import Contract

    from ..cli import open_store
    from ..ptx.inline import inline
    from ..ptx.parser import parse
    from ..tree import find_root
    from .lift import Kernel

    if Path(kernel).is_file():
        if contract is None:
            raise click.UsageError("a PTX file needs --contract, which says what the handoff is")
        ptx = Path(kernel).read_text(encoding="utf-8")
        promised = Contract.from_dict(tomllib.loads(contract.read_text(encoding="utf-8")))
    else:
        artifact = open_store(find_root(Path.cwd())).get(kernel, arch)
        ptx, promised = artifact.ptx, artifact.contract
    module = parse(ptx)
    entry = next((f for f in module.entries if promised.kernel in f.name), None)
    if entry is None:
        raise click.ClickException(f"{kernel}: no entry is called {promised.kernel}, as the contract says")
    try:
        lifted = Kernel(inline(module, entry), promised, _numbers(numbers)).lift(handoff)
    except ModelError as e:
        raise click.ClickException(f"{kernel}: {e}") from e
    return [(p.name, p) for p in lifted.programs], lifted.bounds


def _numbers(texts: Sequence[str]) -> dict[str, int]:
    out = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not value.lstrip("-").isdigit():
            raise click.UsageError(f"--set {text}: give a name and a whole number, as in --set T=2")
        out[name] = int(value)
    return out


def _check(name: str, program: Program, engine: str, unroll: int) -> Result:
    try:
        if engine != "both":
            return check(program, Engine(engine), unroll)
        first, second = check(program, Engine.ENUMERATE, unroll), check(program, Engine.SOLVE, unroll)
    except ModelError as e:
        raise click.ClickException(f"{name}: {e}") from e
    if first.outcomes != second.outcomes:
        raise EnginesDisagree(f"{name}: the engines see different outcomes")
    return first


def _picture(result: Result) -> tuple[Execution | None, Broken]:
    """What to draw: the witness, or the forbidden execution that comes nearest."""
    if result.witness is not None:
        return result.witness, {}
    nearest = why_forbidden(result)
    return (None, {}) if nearest is None else (nearest.execution, nearest.broken)


def _draw(file: Path, shown: Execution | None, broken: Broken) -> None:
    from k3_audit.artifact.atomic import write_atomic

    if shown is None:
        raise click.ClickException("there is no execution to draw: no values satisfy the condition")
    write_atomic(file, svg(shown, broken))


def _answer(result: Result) -> str:
    return "allowed" if result.allowed else "forbidden"


def _quantified(program: Program) -> str:
    if program.condition is None:
        return "no condition"
    return f"{program.quantifier} ({condition_text(program.condition)})"


def _report(result: Result, shown: Execution | None, broken: Broken) -> str:
    program = result.program
    lines = [f"{program.name}: {_quantified(program)}"]
    if program.note:
        lines.append(f"  {program.note}")
    if program.condition is not None:
        expected = {True: ", as expected", False: ", which is not what the note says"}
        agrees = None if result.expected is None else result.allowed == result.expected
        lines.append(
            f"{_answer(result)}{expected.get(agrees, '') if agrees is not None else ''}: {result.verdict}"
        )
        lines.append(f"  the condition {'holds' if result.holds else 'does not hold'}")
    lines.append(f"  bounds: {result.bounds}; engine: {result.engine}; {result.seconds:.2f} s")
    if not result.completes:
        lines.append("  no execution completes: some thread waits for what never comes")
    lines.append(f"allowed outcomes: {len(result.outcomes)}")
    lines += [f"  {o}" for o in result.outcomes[:_SHOWN]]
    if len(result.outcomes) > _SHOWN:
        lines.append(f"  ... and {len(result.outcomes) - _SHOWN} more (--format json lists all)")
    for title, items in (
        ("undefined", result.faults),
        ("data races (in one execution of each outcome)", result.races),
    ):
        if items:
            lines += [f"{title}:", *(f"  {item}" for item in items)]
    if shown is None and program.condition is not None and not result.allowed:
        lines.append("no choice of what the reads return, forbidden or not, ends like that")
    if shown is not None:
        lines.append("a forbidden execution:" if broken else "an execution:")
        lines += [f"  {line}".rstrip() for line in timeline(shown, broken).splitlines()]
    return "\n".join(lines) + "\n"


def _summary(verdicts: Sequence[Verdict]) -> str:
    counts = {v: verdicts.count(v) for v in Verdict if v in verdicts}
    return f"{len(verdicts)} programs: " + ", ".join(f"{n} {v}" for v, n in counts.items())


def _document(name: str, result: Result, shown: Execution | None, broken: Broken) -> dict[str, Any]:
    program = result.program
    return {
        "file": name,
        "program": program.name,
        "note": program.note,
        "quantifier": str(program.quantifier),
        "condition": None if program.condition is None else condition_text(program.condition),
        "answer": _answer(result),
        "allowed": result.allowed,
        "holds": result.holds,
        "expected": {None: None, True: "allowed", False: "forbidden"}[result.expected],
        "verdict": str(result.verdict),
        "completes": result.completes,
        "bounds": {
            "threads": result.bounds.threads,
            "events": result.bounds.events,
            "unroll": result.bounds.unroll,
            "truncated": list(result.bounds.truncated),
        },
        "engine": str(result.engine),
        "seconds": round(result.seconds, 4),
        "outcomes": [{str(k): v for k, v in o.values} for o in result.outcomes],
        "races": result.races,
        "undefined": result.faults,
        "execution": None if shown is None else timeline(shown, broken),
        "breaks": list(broken),
    }
