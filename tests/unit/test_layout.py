"""The repository's shape: rooms import only whom they may, every package ships, no file names a machine."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
ROOMS = ("artifact", "audit", "fused_backend", "reference")
MAY_IMPORT = {
    "artifact": {"artifact"},
    "audit": {"audit", "artifact"},
    "fused_backend": {"fused_backend", "artifact"},
    "reference": {"reference"},
}
# The only file of a room that puts rooms together.
COMPOSES = {"audit/cli.py"}


def imported_rooms(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of one of our rooms in `text`, the file at `path` below the root."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            depth = len(path.parts) - 1  # packages around the file, its room being the outermost
            if node.level > depth:
                yield node.lineno, (node.module or node.names[0].name).split(".")[0]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{n}" for n in names]
            for name in names:
                parts = name.split(".")
                if parts[0] == "k3_audit":
                    yield node.lineno, parts[1]


def strangers(path: Path, text: str) -> list[str]:
    room = path.parts[0]
    if path.as_posix() in COMPOSES:
        return []
    return [
        f"{path}:{line} imports {name}"
        for line, name in imported_rooms(path, text)
        if name not in MAY_IMPORT[room]
    ]


def test_rooms_import_only_their_neighbours() -> None:
    files = [p for room in ROOMS for p in (ROOT / room).rglob("*.py")]
    assert len(files) > 20
    assert [s for p in files for s in strangers(p.relative_to(ROOT), p.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "line",
    [
        "from k3_audit.fused_backend import launch",
        "import k3_audit.fused_backend.build",
        "from k3_audit import fused_backend",
        "from ..fused_backend.build import build_all",
        "from .. import fused_backend",
        "def f():\n    from k3_audit.fused_backend.build import build_all",
    ],
)
def test_the_border_check_sees_every_way_to_cross(line: str) -> None:
    assert strangers(Path("audit/gate.py"), line)
    assert not strangers(Path("audit/cli.py"), line)


def test_the_border_check_lets_neighbours_through() -> None:
    assert not strangers(Path("audit/report/sarif.py"), "from ..findings import Finding\nimport json")
    assert not strangers(Path("audit/gate.py"), "from k3_audit.artifact import Artifact\nfrom . import scan")


def test_every_package_is_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        "k3_audit." + ".".join(p.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for p in (ROOT / room).rglob("*.py")
    }
    assert listed == found


def tracked() -> list[Path]:
    """Files under version control; in a tree without it, all files that are not hidden or built."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        return [ROOT / name for name in listing.stdout.split("\0") if name]
    skip = {"build", "dist", "__pycache__"}
    return [
        p
        for p in ROOT.rglob("*")
        if p.is_file() and not any(x in skip or x[0] == "." for x in p.relative_to(ROOT).parts)
    ]


# Folders below which only one machine's files lie, followed by a name.
_MACHINE = re.compile(r"(?<![\w.:/*-])/(?:work|root|home|Users|mnt|opt)/[\w.-]+")


def test_no_file_names_a_place_on_somebody_s_machine() -> None:
    assert _MACHINE.search('.file 1 "' + "/home" + '/me/kernel.py"')
    assert not _MACHINE.search("https://example.org/home/x and a/root/b")
    found = []
    for path in tracked():
        if not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        found += [f"{path.relative_to(ROOT)}: {m[0]}" for m in _MACHINE.finditer(text)]
    assert found == []


def test_scripts_can_be_run() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
