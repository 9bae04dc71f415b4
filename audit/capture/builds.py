"""Run recipes, each in a fresh process with a time limit, into a folder of PTX, cubins and a manifest.

    DIR/manifest.json      what was asked, what was built, and for the rest the one-line reason
    DIR/<recipe>.<kernel>.<arch>.{ptx,cubin}

A run continues where the last one stopped: what the manifest has, and whose files still have their sha256,
is not built again. A compiler that crashes or hangs takes one recipe with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from k3_audit.artifact.atomic import write_atomic

from .wheels import CaptureError, Wheel, sha256_of

MANIFEST = "manifest.json"
SCHEMA = "k3-audit/capture-1"

# Imported once by the server that the builds are forked from: half of a build's time otherwise.
_PRELOAD = {"vllm_k3": ["torch", "cutlass.cute"], "fla": ["triton"]}


@dataclass(frozen=True)
class File:
    """One captured kernel. Paths are relative to the folder; `lines` counts the PTX."""

    kernel: str
    entry: str
    lines: int
    ptx: str
    ptx_sha256: str
    cubin: str
    cubin_sha256: str


@dataclass(frozen=True)
class Built:
    """The outcome of one recipe on one architecture: `files`, or `reason` when there are none."""

    recipe: str
    arch: str
    parameters: Any
    seconds: float
    files: tuple[File, ...] = ()
    reason: str = ""


@dataclass
class Manifest:
    """`source` names the module of recipes; `wheels` and `tools` what the kernels were made from and with."""

    source: str
    wheels: list[dict[str, Any]]
    tools: dict[str, str]
    builds: list[Built] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Raises CaptureError when there is none or it is damaged."""
        path = folder / MANIFEST
        try:
            document = json.loads(path.read_text())
            if document.pop("schema") != SCHEMA:
                raise CaptureError(f"{path} is of another version; remove {folder} and capture again")
            builds = [
                Built(**(b | {"files": tuple(File(**f) for f in b["files"])})) for b in document.pop("builds")
            ]
            return cls(**document, builds=builds)
        except FileNotFoundError:
            raise CaptureError(f"{folder} holds no capture: run `k3-audit capture` first") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise CaptureError(f"{path} cannot be read ({e}); remove it and capture again") from None

    def save(self, folder: Path) -> None:
        self.builds.sort(key=lambda b: (b.recipe, b.arch))
        write_atomic(folder / MANIFEST, json.dumps({"schema": SCHEMA} | asdict(self), indent=1) + "\n")

    def done(self, folder: Path, recipe: str, arch: str, parameters: Any) -> bool:
        """Built with these parameters, and the files are still there; or known not to build."""
        for b in self.builds:
            if (b.recipe, b.arch) == (recipe, arch) and b.parameters == parameters:
                return all(
                    (folder / f).is_file() and sha256_of(folder / f) == digest
                    for file in b.files
                    for f, digest in ((file.ptx, file.ptx_sha256), (file.cubin, file.cubin_sha256))
                )
        return False


def wheel_records(wheels: Iterable[Wheel]) -> list[dict[str, Any]]:
    return [{"name": w.name, "version": w.version, "sha256": w.sha256} for w in wheels]


def run(
    manifest: Manifest,
    wanted: Sequence[tuple[str, str, Any]],
    folder: Path,
    *,
    jobs: int = 2,
    timeout: float = 300,
    retry: bool = False,
    progress: Callable[[Built], None] = lambda built: None,
) -> Manifest:
    """Build what is wanted, (recipe, architecture, parameters) each, and is not there yet.

    `timeout` is in seconds for one build; `retry` builds again what failed before. The manifest is saved after
    every build. Returns it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = {(b.recipe, b.arch) for b in manifest.builds if b.reason} if retry else set()
    todo = [
        w for w in wanted if (w[0], w[1]) in failed or not manifest.done(folder, w[0], w[1], w[2])
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD.get(manifest.source, []))
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(_supervise, context, manifest.source, w, folder, timeout) for w in todo]
        try:
            for future in as_completed(waiting):
                built = future.result()
                same = (built.recipe, built.arch)
                manifest.builds = [b for b in manifest.builds if (b.recipe, b.arch) != same]
                manifest.builds.append(built)
                manifest.save(folder)
                progress(built)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return manifest


def _supervise(
    context: Any, source: str, wanted: tuple[str, str, Any], folder: Path, timeout: float
) -> Built:
    recipe, arch, parameters = wanted
    start = time.monotonic()
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(source, recipe, arch, folder, theirs), daemon=True)
    child.start()
    theirs.close()
    files: list[File] = []
    try:
        if ours.poll(timeout):
            files, reason = ours.recv()
        else:
            reason = f"not built within {timeout:g} s"
    except EOFError:
        child.join()
        reason = f"the compiler ended the process ({_ending(child.exitcode)})"
    finally:
        child.kill()
        child.join()
        ours.close()
    seconds = round(time.monotonic() - start, 2)
    return Built(recipe, arch, parameters, seconds, tuple(files), reason)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _child(source: str, recipe: str, arch: str, folder: Path, pipe: Connection) -> None:
    """The fresh process: compile, write, answer. What the compiler prints goes nowhere."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    module = importlib.import_module(f"{__package__}.{source}")
    try:
        codes = module.build(recipe, arch)
        files = []
        for i, code in enumerate(codes):
            twice = sum(c.kernel == code.kernel for c in codes[:i])
            stem = f"{recipe}.{code.kernel}{twice or ''}.{arch}"
            for suffix, data in (("ptx", code.ptx), ("cubin", code.cubin)):
                write_atomic(folder / f"{stem}.{suffix}", data)
            digests = [sha256_of(folder / f"{stem}.{s}") for s in ("ptx", "cubin")]
            files.append(
                File(
                    *(code.kernel, code.entry, code.ptx.count("\n")),
                    *(f"{stem}.ptx", digests[0], f"{stem}.cubin", digests[1]),
                )
            )
        pipe.send((files, "" if files else "compiled nothing"))
    except BaseException as e:
        pipe.send(([], one_line(e)))


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# `ptxas application ptx input, line 2048; error   : Feature 'fma.f32x2' requires .target` / `sm_100 or higher`
_PTXAS = re.compile(r"line \d+; (?:error|fatal)\s*: (.+(?:\n\s+sm_\w+ or higher)?)")


def one_line(error: BaseException) -> str:
    """Why a kernel did not build: what the assembler said first, else what the compiler said first."""
    text = _ANSI.sub("", str(error))
    if found := _PTXAS.search(text):
        return "ptxas: " + " ".join(found[1].split())
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
    return f"{type(error).__name__}: {first}"[:300]


@contextlib.contextmanager
def progress_bar(total: int, what: str) -> Iterator[Callable[[Built], None]]:
    """A bar on a terminal's stderr; elsewhere one line per build."""
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():

        def line(built: Built) -> None:
            outcome = built.reason or f"{sum(f.lines for f in built.files)} lines"
            print(f"{what}  {built.recipe} {built.arch}: {outcome} ({built.seconds:.1f} s)", file=sys.stderr)

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(built: Built) -> None:
            bar.update(task, advance=1, description=f"{built.recipe} {built.arch}")

        yield advance
