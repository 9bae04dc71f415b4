"""`k3-audit capture`: build or fetch other people's kernels, and audit them."""

from __future__ import annotations

import fnmatch
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from k3_audit.artifact.atomic import write_atomic
from rich.console import Console
from rich.table import Table

from .wheels import CaptureError

_ROOT = Path("build") / "capture"
_TOOLS = ("nvidia-cutlass-dsl", "triton", "nvidia-cuda-nvcc")


@click.group()
def commands() -> None:
    """Other people's real kernels: build them from published wheels, and audit them. No GPU."""


def _builder(name: str, module: str, help: str) -> None:
    """One command of the recipes of a module."""
    recipes = importlib.import_module(f".{module}", __package__)

    @commands.command(name, help=help, short_help=help.split(".")[0] + ".")
    @click.option(
        "-o",
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        default=_ROOT / name,
        show_default=True,
        help="Folder for PTX, cubins and manifest.json.",
    )
    @click.option(
        "--arch",
        "archs",
        multiple=True,
        metavar="SM",
        default=recipes.ARCHITECTURES,
        show_default=True,
        help="May be repeated.",
    )
    @click.option("--only", default="*", metavar="PATTERN", help="Recipes by name, a shell pattern.")
    @click.option("--list", "show", is_flag=True, help="List the recipes and build nothing.")
    @click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Builds at a time.")
    @click.option("--timeout", type=float, default=600, show_default=True, help="Seconds for one build.")
    @click.option("--retry", is_flag=True, help="Build again what failed before.")
    def command(
        output: Path, archs: Sequence[str], only: str, show: bool, jobs: int, timeout: float, retry: bool
    ) -> int:
        from . import builds

        chosen = [r for r in recipes.recipes() if fnmatch.fnmatchcase(r.name, only)]
        if not chosen:
            raise CaptureError(f"no recipe matches {only!r}; --list shows them")
        if show:
            click.echo("\n".join(r.name for r in chosen))
            return 0
        try:
            manifest = builds.Manifest.load(output)
        except CaptureError:
            if (output / builds.MANIFEST).exists():
                raise
            manifest = builds.Manifest(recipes.__name__, builds.wheel_records(recipes.WHEELS), {})
        manifest.tools = _tools()
        todo = builds.wanted(chosen, archs)
        recipes.prepare()
        with _progress(len(todo), "build") as advance:
            builds.run(
                manifest,
                todo,
                output,
                jobs=jobs,
                timeout=timeout,
                retry=retry,
                progress=lambda b: advance(
                    f"{b.recipe} {b.arch}",
                    b.reason or f"{sum(f.lines for f in b.files):,} lines in {b.seconds:.1f} s",
                ),
            )
        asked = {w[:2] for w in todo}
        _show_builds([b for b in manifest.builds if (b.recipe, b.arch) in asked], output)
        return 0


_builder(
    "vllm-k3",
    "vllm_k3",
    "The specialised Kimi K3 decode of vllm 0.33.0. Kernels are built by CuTe DSL from the source in the wheel.",
)
_builder(
    "fla",
    "fla",
    "The KDA decode of flash-linear-attention. Kernels are built ahead of time by Triton, which is the extra "
    "`triton`.",
)


def _show_builds(found: Sequence[Any], folder: Path) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("architecture", "recipes", "kernels", "did not build", "seconds"):
        table.add_column(title)
    for arch in sorted({b.arch for b in found}):
        here = [b for b in found if b.arch == arch]
        kernels, failed = sum(len(b.files) for b in here), sum(bool(b.reason) for b in here)
        seconds = sum(b.seconds for b in here)
        table.add_row(arch, str(len(here)), str(kernels), str(failed), f"{seconds:.0f}")
    console = Console()
    console.print(table)
    for b in found:
        if b.reason:
            console.print(f"{b.recipe} {b.arch}: {b.reason}", highlight=False, markup=False)
    console.print(f"in {folder}", highlight=False)


def _tools() -> dict[str, str]:
    found = {}
    for name in _TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[str, str], None]]:
    """`advance(name, outcome)`: a bar on a terminal's stderr, a line elsewhere."""
    if not sys.stderr.isatty():
        yield lambda name, outcome: click.echo(f"{what}  {name}: {outcome}", err=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[name]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, name="")
        yield lambda name, outcome: bar.update(task, advance=1, name=name)


@commands.command("wheels", short_help="Machine code inside published wheels.")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=_ROOT / "wheels",
    show_default=True,
    help="Folder for what is unpacked, wheels.json, and manifest.json of the PTX among it.",
)
@click.option("--only", default="*", metavar="PATTERN", help="Wheels by name, a shell pattern.")
@click.option(
    "--sample",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Most members to unpack of a wheel.",
)
def wheels(output: Path, only: str, sample: int) -> int:
    """List the machine code inside published wheels by name, version and sha256, and unpack a sample of it."""
    from .builds import Manifest, wheel_records
    from .published import PUBLISHED, extract, ptx_builds

    chosen = [p for p in PUBLISHED if fnmatch.fnmatchcase(p.wheel.name, only)]
    if not chosen:
        raise CaptureError(f"no wheel matches {only!r}: {', '.join(p.wheel.name for p in PUBLISHED)}")
    table = Table(box=None, pad_edge=False)
    for title in ("wheel", "members", "MB", "unpacked", "images in what was unpacked"):
        table.add_column(title)
    found: list[dict[str, Any]] = []
    manifest = Manifest("published", [], {})
    with _progress(len(chosen), "wheels") as advance:
        for p in chosen:
            folder = output / p.wheel.requirement.replace("==", "-")
            found.append(extract(p, folder, sample))
            if texts := ptx_builds(found[-1], folder, output):
                manifest.wheels += wheel_records([p.wheel])
                manifest.builds += texts
            advance(p.wheel.requirement, f"{found[-1]['members']} members with machine code")
    for d in found:
        images = ", ".join(f"{n} {kind}" for kind, n in d["images"].items()) or "none"
        size = f"{d['bytes'] / 1e6:.0f}"
        table.add_row(f"{d['name']} {d['version']}", str(d["members"]), size, str(len(d["taken"])), images)
    Console().print(table)
    write_atomic(output / "wheels.json", json.dumps(found, indent=1) + "\n")
    manifest.save(output)
    return 0


@commands.command("survey", short_help="Audit everything that was captured.")
@click.argument("folders", nargs=-1, type=click.Path(file_okay=False, path_type=Path), metavar="[FOLDER]...")
@click.option(
    "--into",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.md",
    help="Put the tables between the marks of this Markdown file, e.g. docs/findings/README.md.",
)
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Audits at a time.")
@click.option("--timeout", type=float, default=300, show_default=True, help="Seconds for one file.")
def survey(folders: Sequence[Path], into: Path | None, jobs: int, timeout: float) -> int:
    """Audit the PTX of captures (default: all in build/capture), and count verdicts, time and memory.

    Writes survey.json beside each capture's folder; prints the tables.
    """
    from . import survey as s
    from .builds import MANIFEST

    folders = list(folders) or sorted(p.parent for p in _ROOT.glob(f"*/{MANIFEST}"))
    if not folders:
        raise CaptureError(f"{_ROOT} holds no capture: run `k3-audit capture vllm-k3` or `fla` first")
    rows: list[s.Row] = []
    with _progress(sum(1 for f in folders for _ in f.glob("*.ptx")), "audit") as advance:
        rows, manifests = s.survey(
            folders,
            jobs=jobs,
            timeout=timeout,
            progress=lambda r: advance(r.file, r.failure or f"{r.verdict} in {r.seconds:.1f} s"),
        )
    s.save(rows, folders[0].parent / "survey.json")
    table = s.markdown(rows, manifests)
    if into is not None:
        s.insert(into, table)
    click.echo(table, nl=False)
    return 0
