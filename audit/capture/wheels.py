"""Wheels from the package index, by name, version and sha256. What is fetched is unpacked, never installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE_ENV = "K3_AUDIT_CACHE"
_CLIENT_TIMEOUT_S = 1800  # the largest wheel is 460 MB


class CaptureError(Exception):
    """One line: what could not be captured and what to do."""


@dataclass(frozen=True)
class Wheel:
    """One file of the package index. `megabytes` is its size, for the line that announces a download."""

    name: str
    version: str
    sha256: str
    megabytes: int

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def default_cache() -> Path:
    """`$K3_AUDIT_CACHE`, else `~/.cache/k3-audit`."""
    return Path(os.environ.get(CACHE_ENV) or Path.home() / ".cache" / "k3-audit")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch(wheel: Wheel, cache: Path | None = None) -> Path:
    """Path of the wheel in the cache, downloaded on first use by `pip download`.

    Raises CaptureError when pip cannot deliver it or delivers other bytes.
    """
    folder = (cache or default_cache()) / "wheels"
    stem = f"{wheel.name.replace('-', '_')}-{wheel.version}-"
    for path in folder.glob(f"{stem}*.whl"):
        if sha256_of(path) == wheel.sha256:
            return path
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {wheel.requirement} ({wheel.megabytes} MB) ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        command = ["download", "-q", "--no-deps", "--only-binary=:all:", "-d", staging, wheel.requirement]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pip", *command],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=_CLIENT_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise CaptureError(
                f"pip did not deliver {wheel.requirement} within {_CLIENT_TIMEOUT_S} s"
            ) from None
        found = list(Path(staging).glob("*.whl"))
        if done.returncode or not found:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise CaptureError(
                f"could not download {wheel.requirement} ({said[-1] if said else 'pip gave no reason'}); "
                f"put the wheel into {folder}"
            )
        if (digest := sha256_of(found[0])) != wheel.sha256:
            raise CaptureError(f"{found[0].name} has sha256 {digest}, expected {wheel.sha256}")
        return Path(shutil.move(found[0], folder / found[0].name))


def unpack(wheel: Wheel, prefixes: Sequence[str], cache: Path | None = None, suffix: str = ".py") -> Path:
    """Folder with the wheel's members that start with one of `prefixes` and end with `suffix`.

    Unpacked on first use. Raises CaptureError as `fetch`, and when a prefix names no member.
    """
    root = (cache or default_cache()) / wheel.requirement.replace("==", "-")
    if all((root / p).exists() for p in prefixes):
        return root
    archive = fetch(wheel, cache)
    staging = Path(tempfile.mkdtemp(dir=root.parent))
    try:
        with zipfile.ZipFile(archive) as z:
            names = [n for n in z.namelist() if n.endswith(suffix)]
            for prefix in prefixes:
                if not any(n.startswith(prefix) for n in names):
                    raise CaptureError(f"{archive.name} has no {prefix}*{suffix}")
            z.extractall(staging, [n for n in names if n.startswith(tuple(prefixes))])
        shutil.copytree(staging, root, dirs_exist_ok=True)
    finally:
        shutil.rmtree(staging)
    return root
