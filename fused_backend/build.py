"""Kernel source -> artifact store. Needs no GPU.

    source --CuTe DSL--> PTX --paths and symbol made portable--> PTX --ptxas--> cubin --nvdisasm--> SASS

The PTX that is audited is the PTX that ptxas reads. Machine-dependent text (folders in `.file`, the mangled symbol)
is replaced before hashing, and the cubin carries no line table, so two machines build the same bytes and a comment
does not change them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version as distribution_version
from pathlib import Path

from k3_audit.artifact import ARCHITECTURES, Artifact, Store, ptx_code, sha256, toolchain

from .kernels import KERNELS

_ROOM = Path(__file__).parent
_FILE = re.compile(r'^(\s*\.file\s+\d+\s+)"([^"]*)"', re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_DSL = "nvidia-cutlass-dsl"


class BuildError(Exception):
    """One line: which kernel did not build for which architecture, and why."""


def source_hashes(kernel: str, root: Path = _ROOM) -> dict[str, str]:
    """sha256 of every source file that decides the machine code of `kernel`: its module and what that imports here.

    Found by reading the import statements, so it works where the kernel toolkit is not installed. `root` is the
    folder of this room. Raises BuildError for an unknown kernel.
    """
    first = root / "kernels" / f"{kernel}.py"
    if not first.is_file():
        raise BuildError(f"there is no kernel {kernel!r}; known: {', '.join(KERNELS)}")
    todo, seen = [first], {}
    while todo:
        path = todo.pop()
        name = f"{_ROOM.name}/{path.relative_to(root).as_posix()}"
        if name in seen:
            continue
        text = path.read_text()
        seen[name] = sha256(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                todo += [
                    p
                    for p in (folder.with_suffix(".py"), *(folder / f"{a.name}.py" for a in node.names))
                    if p.is_file()
                ]
    return dict(sorted(seen.items()))


def toolkit_versions() -> dict[str, str]:
    """Versions of everything that turns source into machine code."""
    return {_DSL: distribution_version(_DSL), **toolchain.versions()}


def build_key(kernel: str, arch: str, toolkit: Mapping[str, str], sources: Mapping[str, str]) -> str:
    """Identity of a build: same key, same bytes."""
    parts = [
        kernel,
        arch,
        *(f"{k}={v}" for k, v in sorted(toolkit.items())),
        *(f"{k}={v}" for k, v in sorted(sources.items())),
    ]
    return sha256("\n".join(parts))


def portable(ptx: str, symbol: str) -> tuple[str, str]:
    """(`ptx` with its one entry renamed to `symbol` and without folders of this machine, the entry's old name)."""
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise BuildError(f"{symbol}: expected one .entry in the PTX, found {len(entries)}")

    def shorten(match: re.Match[str]) -> str:
        path = Path(match[2])
        for base in (_ROOM.parent, *(Path(p) for p in sys.path if p)):
            if path.is_relative_to(base):
                return f'{match[1]}"{path.relative_to(base).as_posix()}"'
        return f'{match[1]}"{path.name}"'

    return _FILE.sub(shorten, re.sub(rf"\b{re.escape(entries[0])}", symbol, ptx)), entries[0]


def trace(kernel: str, arch: str) -> str:
    """PTX of `kernel` for `arch` as CuTe DSL emits it, with `.loc` lines that point at the Python source."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    module = importlib.import_module(f"{__package__}.kernels.{kernel}")
    contract = module.CONTRACT
    types = {
        "bf16": cutlass.BFloat16,
        "f32": cutlass.Float32,
        "i32": cutlass.Int32,
        "i64": cutlass.Int64,
        "u8": cutlass.Uint8,
    }
    arguments = [
        make_ptr(types[p.dtype], 16, cute.AddressSpace.gmem, assumed_align=16)
        if p.role
        else types[p.dtype](1)
        for p in contract.params
    ]
    # the symbols of the grid ("T") are host arguments after the kernel's own
    arguments += [cutlass.Int32(1) for extent in contract.launch.grid if not extent.isdigit()]
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch={arch} --generate-line-info --keep-ptx --dump-dir {folder}"
        compiled = cute.compile(module.launch, *arguments, make_fake_stream(), options=options)
        return compiled.artifacts.PTX


def finish(kernel: str, arch: str, ptx: str, toolkit: dict[str, str], sources: dict[str, str]) -> Artifact:
    """Assemble and disassemble portable PTX, and put all of it into an artifact."""
    module = importlib.import_module(f"{__package__}.kernels.{kernel}")
    cubin = toolchain.assemble(ptx_code(ptx), arch)  # ptxas would put the line table into the cubin
    return Artifact(
        kernel, arch, kernel, ptx, cubin, toolchain.disassemble(cubin), module.CONTRACT, toolkit, sources
    )


def build(kernel: str, arch: str, store: Store, *, force: bool = False) -> tuple[Artifact, bool]:
    """(artifact of `kernel` for `arch`, whether it had to be built). Raises BuildError."""
    if arch not in ARCHITECTURES:
        raise BuildError(f"{arch} is not built here; choose one of {', '.join(ARCHITECTURES)}")
    sources = source_hashes(kernel)
    toolkit = toolkit_versions()
    key = build_key(kernel, arch, toolkit, sources)
    pointer = store.built(kernel, arch)
    if pointer and pointer["key"] == key and not force:
        return store.load(pointer["object"]), False
    try:
        ptx, _ = portable(trace(kernel, arch), kernel)
        artifact = finish(kernel, arch, ptx, toolkit, sources)
    except Exception as e:  # the toolkit raises many kinds; all of them mean: this kernel does not build
        raise BuildError(
            f"{kernel} for {arch}: {type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else e}"
        ) from e
    store.put(artifact, key)
    return artifact, True


def current(kernel: str, arch: str, store: Store) -> Artifact:
    """The artifact of the sources as they are now: built, or from the store where the toolkit is not installed.

    Raises BuildError where the store holds another version.
    """
    if importlib.util.find_spec("cutlass") is not None:
        return build(kernel, arch, store)[0]
    artifact = store.get(kernel, arch)
    if artifact.sources != source_hashes(kernel):
        raise BuildError(
            f"{store.root} holds {kernel} of other sources; run `k3-audit build` where the toolkit is"
        )
    return artifact


def _job(kernel: str, arch: str, root: str, force: bool) -> tuple[str, str, bool]:
    _, fresh = build(kernel, arch, Store(root), force=force)
    return kernel, arch, fresh


def build_all(
    archs: Iterable[str] = ARCHITECTURES,
    store: Store | None = None,
    *,
    kernels: Iterable[str] = KERNELS,
    force: bool = False,
    jobs: int = 2,
    progress: Callable[[str, str, bool], None] | None = None,
) -> list[Artifact]:
    """Build every kernel for every architecture, in `jobs` processes.

    `progress(kernel, arch, fresh)` is called as each one is ready. Raises BuildError with the first failure.
    """
    store = store or Store()
    wanted = [(k, a) for k in kernels for a in archs]
    toolkit = toolkit_versions()
    stale = []
    for kernel, arch in wanted:
        pointer = store.built(kernel, arch)
        if (
            not force
            and pointer
            and pointer["key"] == build_key(kernel, arch, toolkit, source_hashes(kernel))
        ):
            if progress:
                progress(kernel, arch, False)
        else:
            stale.append((kernel, arch))
    if stale:
        # every trace gets a fresh process: the toolkit keeps state between traces that can end up in the PTX
        with ProcessPoolExecutor(max_workers=min(jobs, len(stale)), max_tasks_per_child=1) as pool:
            futures = [pool.submit(_job, k, a, str(store.root), force) for k, a in stale]
            for future in as_completed(futures):
                done = future.result()
                if progress:
                    progress(*done)
    return [store.get(k, a) for k, a in wanted]
