"""Files as the evidence sees them: written whole or not at all, hashed by content and name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from k3_audit.artifact.artifact import sha256

_SKIP = {"__pycache__", ".pytest_cache"}


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write `data` so that a reader sees the old file or the new one, never a part. Makes missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
        # mkstemp makes files private; a report should have the mode that the user's umask gives.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def tree_hashes(root: Path, paths: Iterable[str]) -> dict[str, str]:
    """File name relative to `root` -> sha256, for the files and the folders' files named in `paths`.

    Caches and hidden files are left out. Raises FileNotFoundError for a path that is not there.
    """
    found: dict[str, str] = {}
    for path in paths:
        top = root / path
        if not top.exists():
            raise FileNotFoundError(f"{path} is not in {root}")
        for file in [top] if top.is_file() else sorted(top.rglob("*")):
            parts = file.relative_to(root).parts
            if file.is_file() and not any(p in _SKIP or p.startswith(".") for p in parts):
                found[file.relative_to(root).as_posix()] = sha256(file.read_bytes())
    return found


def tree_sha256(root: Path, paths: Iterable[str]) -> str:
    """One hash over :func:`tree_hashes`: moves when a file changes, appears, vanishes or is renamed."""
    return sha256("".join(f"{name}:{digest}\n" for name, digest in sorted(tree_hashes(root, paths).items())))
