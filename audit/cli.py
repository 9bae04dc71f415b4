"""`k3-audit`: the one place that puts the rooms together for a person at a terminal.

Exit codes: 0 clean, 1 findings, 2 inconclusive, 3 error (bad input and bad usage too). Whatever is given, an
error is one line on stderr that says what to do; `--debug` adds the traceback. Heavy imports (torch, the
kernel toolkit) happen inside the commands that need them, so that `scan` and `explain` start at once.
"""

from __future__ import annotations

import os
import stat
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .findings import ExitCode, Finding, Severity, Verdict, worst

if TYPE_CHECKING:
    from k3_audit.artifact import Artifact, Store
    from rich.console import Console

    from .contracts import Promise
    from .frontend import Unit
    from .scan import KernelReport

EXIT = {
    Verdict.CLEAN: ExitCode.CLEAN,
    Verdict.FINDING: ExitCode.FINDINGS,
    Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    Verdict.ERROR: ExitCode.ERROR,
}
FORMATS = ("terminal", "json", "sarif", "junit", "html")

# Columns of a table where the output is no terminal and $COLUMNS says nothing.
_WIDTH = 120


def main() -> None:
    """Entry point of the command `k3-audit`."""
    for stream in (sys.stdout, sys.stderr):
        # A file name may hold bytes that are no text; naming it must not fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Never raises. `--debug` may stand anywhere in it."""
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"] or ["--help"]
    try:
        code = cli.main(arguments, prog_name="k3-audit", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:
        # The reader (`| head`) has gone: nothing is left to say, also not when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.ERROR
    except (Exception, KeyboardInterrupt) as e:
        if debug:
            traceback.print_exc()
        complain(reason(e))
        return ExitCode.ERROR


def complain(message: str) -> None:
    """The one line of an error."""
    print(f"k3-audit: error: {' '.join(message.split())}", file=sys.stderr)


def reason(error: BaseException) -> str:
    """What to tell a person about an exception, in one line."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return "interrupted"
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "k3-audit"
        return f"{error.format_message().rstrip('.')} (see {command} --help)"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed (pip install {error.name})"
    if type(error).__module__.startswith("k3_audit.") or isinstance(error, (OSError, ValueError)):
        return str(error) or type(error).__name__
    return (
        f"{type(error).__name__}: {error} (a defect of k3-audit: please report it with the output of --debug)"
    )


# Commands of other modules, imported only when they are asked for: name -> (module, attribute).
_ELSEWHERE = {
    "capture": ("k3_audit.audit.capture.commands", "commands"),
    "plan": ("k3_audit.fused_backend.commands", "plan"),
    "contract": ("k3_audit.audit.contract_command", "contract"),
    "diff": ("k3_audit.audit.diff_command", "diff"),
    "model": ("k3_audit.audit.memory_model.commands", "model"),
    "prompts": ("k3_audit.audit.prompts", "commands"),
    "support": ("k3_audit.fused_backend.commands", "support"),
    "teeth": ("k3_audit.audit.teeth_command", "teeth"),
}


class _Commands(click.Group):
    """The commands below, and those of `_ELSEWHERE`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _ELSEWHERE:
            module, name = _ELSEWHERE[cmd_name]
            return getattr(import_module(module), name)
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 clean, 1 findings, 2 inconclusive, 3 error. --debug, anywhere on the line, shows "
    "the traceback of an error. NO_COLOR is honoured.",
)
@click.version_option(package_name="k3-audit", prog_name="k3-audit")
def cli() -> None:
    """Evidence that GPU kernels are right: order, scope and proxy in PTX and SASS, and the gate over it.

    \b
    Examples:
      k3-audit scan kernel.ptx                    what the auditor says about anyone's PTX
      k3-audit scan build/*.cubin --format sarif -o findings.sarif
      k3-audit explain R15                        what a rule means, and how to fix it
      k3-audit gate                               is there fresh evidence for our own kernels?
    """


_format = click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="terminal",
    show_default=True,
    help="Form of the report.",
)
_output = click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the report to a file."
)
_root = click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    help="The checkout (default: the one that holds the current folder).",
)


# Output.


def _console(file: Any = None) -> Console:
    from rich.console import Console

    plain = file is not None or not sys.stdout.isatty()
    width = None if not plain or "COLUMNS" in os.environ else _WIDTH
    return Console(file=file, width=width, highlight=False, emoji=False, markup=False)


@contextmanager
def _terminal(output: Path | None) -> Iterator[Console]:
    """A console on stdout, or one whose text goes to `output` at the end, whole."""
    if output is None:
        yield _console()
        return
    import io

    text = io.StringIO()
    yield _console(text)
    _write(text.getvalue(), output)


def _emit(document: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(document)
    else:
        _write(document, output)


def _write(document: str, output: Path) -> None:
    from k3_audit.artifact.atomic import write_atomic

    try:
        # File names may hold bytes that are no text; JSON and XML must stay UTF-8.
        write_atomic(output, document.encode("utf-8", "backslashreplace"))
    except OSError as e:
        raise click.ClickException(f"the report cannot be written to {output}: {e.strerror}") from e


@contextmanager
def _progress(total: int, what: str) -> Iterator[Any]:
    """`advance(text)`: a bar on a terminal's stderr, silent elsewhere."""
    if not sys.stderr.isatty() or total < 2:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[name]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, name="")

        def advance(text: str) -> None:
            bar.update(task, advance=1, name=text)

        yield advance


def _say(text: str) -> None:
    """A line about what is being done; reports go to stdout, this to stderr."""
    click.echo(text, err=True)


# scan


@cli.command(short_help="Audit anyone's PTX, cubins, fatbins and libraries.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--contract",
    "contracts",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="What a kernel promises its neighbours; sharpens the verdicts. May be repeated. "
    "kernel.contract.toml beside kernel.ptx is read without being named.",
)
@click.option(
    "--suppress",
    "accepted",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="Findings that are accepted, each with a reason and an end; they stay in the report. May be repeated.",
)
@_format
@_output
def scan(
    paths: tuple[str, ...],
    contracts: tuple[Path, ...],
    accepted: tuple[Path, ...],
    form: str,
    output: Path | None,
) -> int:
    """Audit anyone's kernels: PTX, cubins, fatbins, shared libraries, folders. No contract is needed.

    \b
    Examples:
      k3-audit scan kernel.ptx
      k3-audit scan libkernels.so --format json
      k3-audit scan kernel.ptx --contract kernel.toml --suppress accepted.toml
    """
    from . import contracts as promises
    from . import suppress as suppression
    from .report import render_scan

    promised = [p for path in contracts for p in promises.read(path)]
    suppressions = [s for path in accepted for s in suppression.load(path)]
    reports: list[KernelReport] = []
    texts: dict[str, str] = {}
    with _progress(len(paths), "scan") as advance:
        for path in paths:
            advance(path)
            reports += _scan_path(path, promised, texts)
    for p in promises.unused(promised, [r.name for r in reports]):
        raise click.ClickException(f"no scanned kernel is called {p.contract.kernel}, as {p.file} says")
    reports, idle = suppression.suppress(reports, suppressions, datetime.now(UTC).date())
    for line in idle:
        _say(f"suppression  {line}")
    for report in reports:
        for finding in report.findings:
            if finding.verdict == Verdict.ERROR:
                complain(f"{report.file}: {finding.message}")
    if form != "terminal":
        _emit(render_scan(form, reports, texts), output)
    elif any(r.name for r in reports):
        from .report import terminal

        with _terminal(output) as console:
            terminal.scan(console, reports)
    return EXIT[worst([r.verdict for r in reports])]


def _scan_path(path: str, promised: Sequence[Promise], texts: dict[str, str]) -> list[KernelReport]:
    """The reports of one path. What cannot be read becomes a report with verdict *error*."""
    from . import contracts
    from .frontend import load

    name = os.fsencode(path).decode("utf-8", "replace")
    try:
        if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
            return [_unreadable(name, "neither a file nor a folder (write what comes from a pipe to a file)")]
        reports: list[KernelReport] = []
        for unit in load(Path(path)):
            if not unit.ptx:
                reports.append(_machine_code_only(unit))
                continue
            texts[unit.file] = unit.ptx
            found = [*promised, *(contracts.beside(Path(path)) or contracts.beside(Path(unit.file)))]
            reports += contracts.scan(unit.ptx, unit.file, found, unit.sass or "")
        return reports or [
            _unreadable(name, "no kernel in it (give PTX, a cubin, a fatbin or a library with them)")
        ]
    except Exception as e:
        return [_unreadable(name, reason(e))]


def _machine_code_only(unit: Unit) -> KernelReport:
    from .scan import KernelReport

    finding = Finding(
        "input",
        Severity.WARNING,
        Verdict.INCONCLUSIVE,
        unit.name,
        "only machine code is here: scopes, proxies and some fences leave no trace in it",
        settle="the PTX that it was assembled from: beside the cubin under the same name, or inside the library",
    )
    return KernelReport(unit.name, unit.file, unit.arch, Verdict.INCONCLUSIVE, (finding,), (), ())


def _unreadable(file: str, message: str) -> KernelReport:
    from .scan import KernelReport

    message = " ".join(message.removeprefix(f"{file}: ").split())
    finding = Finding("input", Severity.ERROR, Verdict.ERROR, file, message)
    return KernelReport("", file, "", Verdict.ERROR, (finding,), (), ())


# rules


@cli.command(name="rules", short_help="List the rules.")
def list_rules() -> int:
    """List the rules of the auditor: id, severity, what it finds."""
    from .report import terminal
    from .rules.base import rules

    terminal.rules(_console(), rules().values())
    return ExitCode.CLEAN


@cli.command(short_help="What a rule means, and how to fix it.")
@click.argument("rule_id", metavar="RULE")
def explain(rule_id: str) -> int:
    """Explain a rule: what it means, what it looks for, how to fix it, and a failing and a passing snippet.

    \b
    Example:
      k3-audit explain R15
    """
    from .report import terminal
    from .rules.base import rules

    known = rules()
    if rule_id.upper() not in known:
        raise click.ClickException(f"there is no rule {rule_id!r}; known: {', '.join(known)}")
    terminal.rule(_console(), known[rule_id.upper()])
    return ExitCode.CLEAN


# gate and build


def _checkout(root: Path | None) -> Path:
    from .tree import find_root

    return find_root((root or Path.cwd()).resolve())


def open_store(root: Path) -> Store:
    from k3_audit.artifact.store import DEFAULT_ROOT, STORE_ENV, Store

    return Store(os.environ.get(STORE_ENV) or root / DEFAULT_ROOT)


def toolkit_is_here() -> bool:
    from importlib.util import find_spec

    return find_spec("cutlass") is not None


def build_artifacts(
    store: Store, archs: Sequence[str], kernels: Sequence[str], force: bool = False, jobs: int = 2
) -> list[Artifact]:
    """Build what is not built yet, and say so line by line. Raises BuildError."""
    from k3_audit.fused_backend.build import build_all

    def say(kernel: str, arch: str, fresh: bool) -> None:
        _say(f"build  {kernel} {arch}: {'built' if fresh else 'unchanged'}")

    return build_all(archs, store, kernels=kernels, force=force, jobs=jobs, progress=say)


def stored_artifacts(store: Store, archs: Iterable[str], kernels: Sequence[str]) -> list[Artifact]:
    """What the store holds; a missing build is left out, a damaged one raises StoreError."""
    return [store.get(k, a) for k in kernels for a in archs if store.built(k, a)]


def audit_artifact(artifact: Artifact, root: Path) -> tuple[KernelReport, ...]:
    """The auditor's reports of one artifact of ours, whose sources lie below `root`.

    One of its PTX, under the file name `kernel.arch.ptx`, and one of each source file that a rule speaks of.
    """
    from .rules.dsl_inline_asm import check_sources
    from .scan import KernelReport, scan_ptx

    file = f"{artifact.kernel}.{artifact.arch}.ptx"
    reports = scan_ptx(artifact.ptx, file, contract=artifact.contract, sass=artifact.sass)
    sources = {name: (root / name).read_text(encoding="utf-8") for name in artifact.sources}
    by_file: dict[str, list[Finding]] = {}
    for finding in check_sources(sources):
        by_file.setdefault(finding.sites[0].source.rpartition(":")[0], []).append(finding)
    for name, found in sorted(by_file.items()):
        verdict = worst([f.verdict for f in found])
        reports.append(KernelReport(artifact.kernel, name, artifact.arch, verdict, tuple(found), (), ()))
    return tuple(reports)


@cli.command(short_help="Is there fresh evidence for our own kernels?")
@click.option("--no-build", is_flag=True, help="Judge what the artifact store holds; build nothing.")
@_root
@_format
@_output
def gate(no_build: bool, root: Path | None, form: str, output: Path | None) -> int:
    """Build, audit, and check the evidence of our own kernels against golden/kernels.lock.

    Red rows name what is missing and the command that produces it.

    \b
    Examples:
      k3-audit gate
      k3-audit gate --no-build --format junit -o gate.xml
    """
    from k3_audit.fused_backend.build import source_hashes
    from k3_audit.fused_backend.kernels import KERNELS

    from .evidence import Lock
    from .gate import gate as judge
    from .policy import Policy
    from .report import render_gate
    from .tree import Tree

    root = _checkout(root)
    policy = Policy.load(root / "golden" / "policy.toml")
    lock = Lock.load(root / "golden" / "kernels.lock")
    store = open_store(root)
    if not no_build and toolkit_is_here():
        artifacts = build_artifacts(store, list(policy.required), KERNELS)
    else:
        _say(f"build  skipped: judging what {store.root} holds" + ("" if no_build else " (no CuTe DSL here)"))
        artifacts = stored_artifacts(store, policy.required, KERNELS)
    reports: dict[tuple[str, str], tuple[KernelReport, ...]] = {}
    texts: dict[str, str] = {}
    for artifact in artifacts:
        found = reports[artifact.kernel, artifact.arch] = audit_artifact(artifact, root)
        texts[found[0].file] = artifact.ptx
        _say(f"audit  {artifact.kernel} {artifact.arch}: {worst([r.verdict for r in found])}")
    tree = Tree.read(root, policy, {k: source_hashes(k) for k in KERNELS})
    result = judge(artifacts, lock, reports, policy, tree, datetime.now(UTC).date())
    _say("evidence  golden/kernels.lock")
    if form == "terminal":
        from .report import terminal

        with _terminal(output) as console:
            terminal.gate(console, result)
    else:
        _emit(render_gate(form, result, texts), output)
    return EXIT[result.verdict]


@cli.command(short_help="Compile our kernels; needs no GPU.")
@click.option("--kernel", "kernels", multiple=True, metavar="NAME", help="Only this kernel. May be repeated.")
@click.option("--arch", "archs", multiple=True, metavar="SM", help="Only this architecture. May be repeated.")
@click.option("--force", is_flag=True, help="Build again what is built.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Builds at a time.")
@_root
def build(kernels: tuple[str, ...], archs: tuple[str, ...], force: bool, jobs: int, root: Path | None) -> int:
    """Compile our kernels to machine code, into the artifact store. Needs no GPU."""
    from k3_audit.artifact import ARCHITECTURES
    from k3_audit.fused_backend.kernels import KERNELS
    from rich.table import Table

    store = open_store(_checkout(root))
    artifacts = build_artifacts(store, archs or ARCHITECTURES, kernels or KERNELS, force, jobs)
    table = Table(box=None, pad_edge=False)
    for name in ("kernel", "architecture", "cubin", "bytes"):
        table.add_column(name)
    for a in artifacts:
        table.add_row(a.kernel, a.arch, a.cubin_sha256[:16], str(len(a.cubin)))
    _console().print(table)
    return ExitCode.CLEAN


# report


@cli.command(short_help="Show the evidence in golden/kernels.lock.")
@click.option(
    "--format", "form", type=click.Choice(("terminal", "json")), default="terminal", show_default=True
)
@_root
@_output
def report(form: str, root: Path | None, output: Path | None) -> int:
    """Show the evidence that golden/kernels.lock holds: every measurement with its figures and command."""
    from .evidence import Lock

    lock = Lock.load(_checkout(root) / "golden" / "kernels.lock")
    if form == "json":
        import json
        from dataclasses import asdict

        _emit(json.dumps(asdict(lock), indent=2) + "\n", output)
    else:
        from .report import terminal

        with _terminal(output) as console:
            terminal.evidence(console, lock)
    return ExitCode.CLEAN


# inspect


@cli.command(short_help="Show what a released checkpoint holds.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--layer", type=int, metavar="N", help="Also list the tensors of this layer.")
@click.option("--no-values", is_flag=True, help="Read shapes only: fast, and NaN stays unseen.")
@click.option(
    "--format", "form", type=click.Choice(("terminal", "json")), default="terminal", show_default=True
)
@_output
def inspect(checkpoint: Path, layer: int | None, no_values: bool, form: str, output: Path | None) -> int:
    """Show what a released checkpoint holds, and what is missing, extra, misshapen or not finite.

    \b
    Examples:
      k3-audit inspect Kimi-K3/
      k3-audit inspect Kimi-K3/ --layer 3
    """
    from k3_audit.reference.inspect import inspect as describe

    found = describe(checkpoint, layer, values=not no_values)
    if form == "json":
        import json

        _emit(json.dumps(found, indent=2) + "\n", output)
    else:
        from .report import terminal

        with _terminal(output) as console:
            terminal.checkpoint(console, found)
    not_finite = any(row.get("not_finite") for row in found.get("tensors", ()))
    return ExitCode.FINDINGS if found["problems"] or not_finite else ExitCode.CLEAN


if __name__ == "__main__":
    main()
