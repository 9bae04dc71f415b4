"""From whatever a person has to texts that the auditor reads: PTX, and the machine code beside it.

    .ptx    .cubin    fatbin, .so, executable    folder (also a Triton cache or a CuTe DSL dump)    .whl, .zip

What a file is decides its content, not its name. A `.ptx` and a `.cubin` that differ only in the ending, as compilers'
dump folders have them, are taken as one program: the cubin is then the machine code of that PTX.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3_audit.artifact import toolchain

_ELF = b"\x7fELF"
_EM_CUDA = 190  # e_machine of a cubin, elf.h
_FATBIN = (0xBA55ED50).to_bytes(4, "little")  # magic word of a fatbin, fatbinary_section.h
_ZIP = b"PK\x03\x04"
_ENDINGS = (".ptx", ".cubin", ".fatbin", ".so", ".whl", ".zip")
_TARGET = re.compile(r"^\s*\.target\s+(sm_\w+)", re.MULTILINE)
_HEAD = 4096  # bytes in which a PTX text shows its `.version`; comments may come first


class FrontendError(ValueError):
    """One line: which file cannot be audited, and what to give instead."""


@dataclass(frozen=True)
class Unit:
    """One program: `ptx` is "" where only machine code is there, `sass` None where only PTX is there."""

    name: str
    file: str
    arch: str
    ptx: str
    sass: str | None = None


def load(path: Path | str) -> list[Unit]:
    """All programs in a file or folder, in a stable order; empty when there is no device code in it.

    Raises FrontendError for a file that is no CUDA code or is damaged, ToolError when a disassembler is missing,
    OSError when the file cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and _wanted(p)]
        return _join([unit for p in found for unit in load(p)])
    with path.open("rb") as f:
        head = f.read(_HEAD)
    if head.startswith(_ZIP):
        return _archive(path)
    if head.startswith(_ELF) and int.from_bytes(head[18:20], "little") == _EM_CUDA:
        return [_cubin(path.read_bytes(), str(path))]
    if head.startswith((_ELF, _FATBIN)):
        return _embedded(path)
    return [_text(path)]


def _wanted(path: Path) -> bool:
    return path.suffix in _ENDINGS or ".so." in path.name


def _text(path: Path) -> Unit:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise FrontendError(
            f"{path}: not CUDA code (give PTX, a cubin, a fatbin, a library or a wheel)"
        ) from None
    if not text.strip():
        raise FrontendError(f"{path}: the file is empty")
    return Unit(path.stem, str(path), "", text)


def _cubin(data: bytes, file: str) -> Unit:
    try:
        sass = toolchain.disassemble(data)
    except toolchain.ToolError as e:
        raise FrontendError(f"{file}: {e} (is the cubin whole?)") from None
    target = _TARGET.search(sass)
    return Unit(Path(file).stem, file, target[1] if target else "", "", sass)


def _embedded(path: Path) -> list[Unit]:
    """PTX and cubins inside a fatbin, library or executable."""
    units = []
    for image, data in toolchain.extract(path):
        file = f"{path}!{image.name}"
        if image.kind == "cubin":
            units.append(_cubin(data, file))
        else:
            units.append(
                Unit(Path(image.name).stem, file, image.arch, data.decode("utf-8", "replace").rstrip("\0"))
            )
    return _join(units)


def _archive(path: Path) -> list[Unit]:
    """Device code in the members of a wheel or zip. Unpacked one at a time: wheels hold gigabytes."""
    units: list[Unit] = []
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(prefix="k3-audit-") as folder:
            for info in archive.infolist():
                if info.is_dir() or not _wanted(Path(info.filename)):
                    continue
                member = Path(folder) / Path(info.filename).name
                member.write_bytes(archive.read(info))
                for unit in load(member):
                    file = unit.file.replace(str(member), f"{path}!{info.filename}", 1)
                    units.append(Unit(unit.name, file, unit.arch, unit.ptx, unit.sass))
                member.unlink()
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as e:
        raise FrontendError(f"{path}: the archive is damaged ({e})") from None
    return _join(units)


def _join(units: Sequence[Unit]) -> list[Unit]:
    """PTX and cubin that differ only in the ending become one unit."""
    return list(_joined(units))


def _joined(units: Sequence[Unit]) -> Iterator[Unit]:
    code = {u.file.removesuffix(".cubin"): u for u in units if not u.ptx}
    paired = {u.file.removesuffix(".ptx") for u in units if u.ptx} & code.keys()
    for unit in units:
        stem = unit.file.removesuffix(".ptx" if unit.ptx else ".cubin")
        if stem not in paired:
            yield unit
        elif unit.ptx:
            machine = code[stem]
            yield Unit(unit.name, unit.file, machine.arch or unit.arch, unit.ptx, machine.sass)
