"""NVIDIA's assembler and disassembler, found in the pinned wheels, called the same way every time. No GPU.

    PTX --ptxas--> cubin --nvdisasm--> SASS            fatbin, .so, executable --cuobjdump--> PTX and cubins

A tool is looked for in this order, so that evidence is made with the pinned toolkit unless somebody says
otherwise: `$K3_AUDIT_CUDA_BIN`, the wheels (`site-packages/nvidia/cu*/bin`), `$CUDA_HOME/bin`, `$PATH`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

WHEELS = {
    "ptxas": "nvidia-cuda-nvcc",
    "nvdisasm": "nvidia-cuda-nvdisasm",
    "cuobjdump": "nvidia-cuda-cuobjdump",
}
BIN_OVERRIDE = "K3_AUDIT_CUDA_BIN"

# A 200k-line PTX file assembles in well under a minute; a tool that takes ten is stuck.
_TIMEOUT_S = 600

# `ptxas kernel.ptx, line 20; error   : Unknown modifier '.acqrel'`
_PTXAS_ERROR = re.compile(r"line (\d+); (?:error|fatal)\s*:\s*(.*)")
# `PTX file    1: name.1.sm_90a.ptx` (-lelf and -lptx) and `... sm_90a.ptx -arch=sm_90a` (-xptx)
_LISTED = re.compile(r"^(?:ELF|PTX) file\s+\d+: (\S+)", re.MULTILINE)
_ARCH_IN_NAME = re.compile(r"\.(sm_\d+[af]?)\.(?:cubin|ptx)$")


class ToolError(Exception):
    """One line: what failed and what to do. `line` is the 1-based PTX line when ptxas names one, else 0."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Embedded:
    """One device image inside a fatbin, shared library or executable. `kind` is "cubin" or "ptx"."""

    kind: str
    name: str
    arch: str


def _directories() -> Iterator[Path]:
    if override := os.environ.get(BIN_OVERRIDE):
        yield Path(override)
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("cu[0-9]*/bin"), reverse=True)
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin"
    yield from map(Path, filter(None, os.environ.get("PATH", "").split(os.pathsep)))


def locate(tool: str) -> Path:
    """Path of `ptxas`, `nvdisasm` or `cuobjdump`. Raises ToolError that names the wheel to install."""
    for directory in _directories():
        if os.access(path := directory / tool, os.X_OK) and path.is_file():
            return path
    raise ToolError(
        f"{tool} not found: `pip install {WHEELS[tool]}`, or set ${BIN_OVERRIDE} to the folder that holds it"
    )


def _run(tool: str, *args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [locate(tool), *args],
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ToolError(f"{tool} did not finish within {_TIMEOUT_S} s") from None
    except OSError as e:
        raise ToolError(f"{tool} could not be started: {e.strerror}") from None


@cache
def _version_of(path: Path) -> str:
    out = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace").stdout
    found = re.search(r"\bV(\d+(?:\.\d+)+)", out)
    return found[1] if found else "unknown"


def version(tool: str) -> str:
    """Release of one tool, e.g. "13.5.37". Raises ToolError when it is not installed."""
    return _version_of(locate(tool))


def versions() -> dict[str, str]:
    """Tool name to release, for those of `ptxas`, `nvdisasm` and `cuobjdump` that are installed."""
    found = {}
    for tool in WHEELS:
        try:
            found[tool] = version(tool)
        except ToolError:
            continue
    return found


# `ptxas fatal   : Value 'sm_42' is not defined ...`
_SEVERITY = re.compile(r"^\w+ (?:fatal|error|info)\s*:\s*")


def _first_line(text: str) -> str:
    return next((_SEVERITY.sub("", s) for line in text.splitlines() if (s := line.strip())), "no message")


def assemble(ptx: str, arch: str, *, line_info: bool = False, opt: int = 3) -> bytes:
    """Cubin of a PTX text for one architecture ("sm_90a"). The same text gives the same bytes.

    `line_info` adds the table from machine code to PTX lines that `disassemble(..., ptx_lines=True)` prints;
    the instructions stay the same. `opt` is ptxas's -O level. Raises ToolError with ptxas's first complaint and
    the PTX line that it names.
    """
    with tempfile.TemporaryDirectory(prefix="k3-audit-") as folder:
        # Fixed names inside a fresh folder: ptxas writes them into the line table.
        (Path(folder) / "kernel.ptx").write_text(ptx, encoding="utf-8")
        flags = ["-lineinfo"] if line_info else []
        done = _run(
            "ptxas", f"-arch={arch}", f"-O{opt}", *flags, "kernel.ptx", "-o", "kernel.cubin", cwd=Path(folder)
        )
        cubin = Path(folder) / "kernel.cubin"
        if done.returncode == 0 and cubin.exists():
            return cubin.read_bytes()
    if named := _PTXAS_ERROR.search(done.stderr):
        line = int(named[1])
        raise ToolError(f"ptxas {version('ptxas')} for {arch}: PTX line {line}: {named[2].strip()}", line)
    raise ToolError(f"ptxas {version('ptxas')} for {arch}: {_first_line(done.stderr or done.stdout)}")


def disassemble(cubin: bytes, *, ptx_lines: bool = False) -> str:
    """SASS listing of a cubin (`nvdisasm -c`), warnings left out.

    With `ptx_lines` the listing names the PTX line of each instruction where the cubin has that table.
    Raises ToolError when the bytes are not a whole cubin.
    """
    if not cubin.startswith(b"\x7fELF"):
        raise ToolError("not a cubin: the file does not start with an ELF header")
    with tempfile.TemporaryDirectory(prefix="k3-audit-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = _run("nvdisasm", "-c", *(["-gp"] if ptx_lines else []), path.name, cwd=Path(folder))
    if done.returncode != 0:
        reason = _first_line(done.stderr or done.stdout)
        raise ToolError(f"nvdisasm {version('nvdisasm')}: {reason.replace('File kernel.cubin', 'the cubin')}")
    return done.stdout


def _list(path: Path, kind: str) -> list[Embedded]:
    done = _run("cuobjdump", "-lelf" if kind == "cubin" else "-lptx", path.resolve())
    if done.returncode != 0 and "does not contain device code" not in done.stdout + done.stderr:
        raise ToolError(f"cuobjdump {version('cuobjdump')}: {_first_line(done.stderr or done.stdout)}")
    found = []
    for name in _LISTED.findall(done.stdout):
        arch = _ARCH_IN_NAME.search(name)
        found.append(Embedded(kind, name, arch[1] if arch else ""))
    return found


def list_embedded(path: Path | str) -> list[Embedded]:
    """The device images inside a fatbin, shared library, executable or cubin; empty when there are none."""
    return [image for kind in ("cubin", "ptx") for image in _list(Path(path), kind)]


def extract(path: Path | str, images: Iterable[Embedded] | None = None) -> Iterator[tuple[Embedded, bytes]]:
    """The bytes of `images` (default: all that `list_embedded` finds), one after the other.

    Large libraries hold thousands of images: they are unpacked into a temporary folder that lives as long as
    the iteration, and read one by one. Raises ToolError when cuobjdump cannot deliver a listed image.
    """
    path = Path(path).resolve()
    wanted = list_embedded(path) if images is None else list(images)
    with tempfile.TemporaryDirectory(prefix="k3-audit-") as folder:
        for kind, flag in (("cubin", "-xelf"), ("ptx", "-xptx")):
            names = [image.name for image in wanted if image.kind == kind]
            if names:
                # One name is a substring match; beyond one, unpacking all in a single pass is the faster way.
                _run("cuobjdump", flag, names[0] if len(names) == 1 else "all", path, cwd=Path(folder))
        for image in wanted:
            file = Path(folder) / image.name
            if not file.exists():
                raise ToolError(
                    f"cuobjdump {version('cuobjdump')}: could not extract {image.name} from {path.name}"
                )
            yield image, file.read_bytes()
