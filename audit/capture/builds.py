"""Run recipes, each in a fresh process with a time limit, into a folder of PTX, cubins and a manifest.

    DIR/manifest.json      what was asked, what was built, and for the rest the one-line reason
    DIR/<recipe>.<kernel>.<arch>.{ptx,cubin}

A run continues where the last one stopped: what the manifest has, and whose files still have their sha256,
is not built again. A compiler that crashes or hangs takes one recipe with it.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k3_audit.artifact.atomic import write_atomic

from .processes import Fresh
from .wheels import CaptureError, Wheel, sha256_of

MANIFEST = "manifest.json"
SCHEMA = "k3-audit/capture-1"


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
    """The outcome of one recipe on one architecture: `files`, or the `reason` why there are none.

    `parameters` are the recipe's, as plain data; `seconds` is the time that the build took.
    """

    recipe: str
    arch: str
    parameters: Any
    seconds: float
    files: tuple[File, ...] = ()
    reason: str = ""


@dataclass
class Manifest:
    """`source` is the module of the recipes, which has `recipes()`, `build(name, arch)` and `PRELOAD`; `wheels`
    and `tools` are what the kernels were made from and with.
    """

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
        """Built with these parameters and its files are whole, or known not to build with them."""
        for b in self.builds:
            if (b.recipe, b.arch) == (recipe, arch) and b.parameters == parameters:
                return all(
                    (folder / name).is_file() and sha256_of(folder / name) == digest
                    for f in b.files
                    for name, digest in ((f.ptx, f.ptx_sha256), (f.cubin, f.cubin_sha256))
                )
        return False


def wheel_records(wheels: Iterable[Wheel]) -> list[dict[str, Any]]:
    return [{"name": w.name, "version": w.version, "sha256": w.sha256} for w in wheels]


def wanted(recipes: Iterable[Any], archs: Sequence[str]) -> list[tuple[str, str, Any]]:
    """(recipe, architecture, parameters as JSON reads them back) of every build."""
    plain = [(r.name, json.loads(json.dumps(asdict(r)))) for r in recipes]
    return [(name, arch, parameters) for name, parameters in plain for arch in archs]


def run(
    manifest: Manifest,
    todo: Sequence[tuple[str, str, Any]],
    folder: Path,
    *,
    jobs: int = 2,
    timeout: float = 600,
    retry: bool = False,
    progress: Callable[[Built], None] = lambda built: None,
) -> None:
    """Build what is not there yet; `retry` also what failed before. `timeout` is in seconds, for one build.

    The manifest is saved after every build.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = {(b.recipe, b.arch) for b in manifest.builds if b.reason} if retry else set()
    fresh = Fresh(importlib.import_module(manifest.source).PRELOAD)
    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = [
            pool.submit(_supervise, fresh, manifest.source, *w, folder, timeout)
            for w in todo
            if w[:2] in failed or not manifest.done(folder, *w)
        ]
        for future in as_completed(waiting):
            built = future.result()
            same = (built.recipe, built.arch)
            manifest.builds = [b for b in manifest.builds if (b.recipe, b.arch) != same]
            manifest.builds.append(built)
            manifest.save(folder)
            progress(built)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _supervise(
    fresh: Fresh, source: str, recipe: str, arch: str, parameters: Any, folder: Path, timeout: float
) -> Built:
    start = time.monotonic()
    files, reason = fresh.call(_build, source, recipe, arch, folder, timeout=timeout)
    if files == ():
        reason = "the recipe compiled nothing"
    return Built(recipe, arch, parameters, round(time.monotonic() - start, 2), files or (), reason)


def _build(source: str, recipe: str, arch: str, folder: Path) -> tuple[File, ...]:
    """In the fresh process: compile and write."""
    codes = importlib.import_module(source).build(recipe, arch)
    files = []
    for i, code in enumerate(codes):
        twin = sum(c.kernel == code.kernel for c in codes[:i])
        ptx, cubin = (f"{recipe}.{code.kernel}{twin or ''}.{arch}.{s}" for s in ("ptx", "cubin"))
        write_atomic(folder / ptx, code.ptx)
        write_atomic(folder / cubin, code.cubin)
        digests = sha256_of(folder / ptx), sha256_of(folder / cubin)
        lines = code.ptx.count("\n")
        files.append(File(code.kernel, code.entry, lines, ptx, digests[0], cubin, digests[1]))
    return tuple(files)
