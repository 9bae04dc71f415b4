"""The working tree as the gate sees it: hashes of the files that decide what a measurement means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from k3_audit.artifact.artifact import sha256

from .policy import Policy

REFERENCE = ("reference",)
EXPECTED = ("golden/expected",)

_SKIP = {"__pycache__", ".pytest_cache"}


def tree_hashes(root: Path, paths: Iterable[str]) -> dict[str, str]:
    """File name relative to `root` -> sha256, for the files and the folders' files named in `paths`.

    Caches, hidden files and paths that do not exist are left out.
    """
    found: dict[str, str] = {}
    for path in paths:
        top = root / path
        for file in [top] if top.is_file() else sorted(top.rglob("*")):
            parts = file.relative_to(root).parts
            if file.is_file() and not any(p in _SKIP or p.startswith(".") for p in parts):
                found[file.relative_to(root).as_posix()] = sha256(file.read_bytes())
    return found


def combine(hashes: Mapping[str, str]) -> str:
    """One hash over a table of file hashes: moves when a file changes, appears, vanishes or is renamed."""
    return sha256("".join(f"{name}:{digest}\n" for name, digest in sorted(hashes.items())))


def tree_sha256(root: Path, paths: Iterable[str]) -> str:
    """One hash over the files and folders named in `paths`; see :func:`tree_hashes`."""
    return combine(tree_hashes(root, paths))


@dataclass(frozen=True)
class Tree:
    """Hashes of one checkout.

    `reference` and `expected` hash reference/ and golden/expected/, `tiers` the code of each tier; `sources`
    maps each kernel that exists to the hashes of the files which decide its machine code.
    """

    reference: str
    expected: str
    tiers: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path, policy: Policy, sources: Mapping[str, Mapping[str, str]]) -> Tree:
        """Hash the checkout at `root`."""
        return cls(
            reference=tree_sha256(root, REFERENCE),
            expected=tree_sha256(root, EXPECTED),
            tiers={name: tree_sha256(root, tier.code) for name, tier in policy.tiers.items()},
            sources=sources,
        )


class NotACheckout(Exception):
    """One line: the gate needs a checkout of the repository."""


def find_root(start: Path) -> Path:
    """The nearest folder from `start` upwards that holds golden/policy.toml. Raises NotACheckout."""
    for folder in (start, *start.parents):
        if (folder / "golden" / "policy.toml").is_file():
            return folder
    raise NotACheckout(
        "no golden/policy.toml here or above: this command needs a checkout of the repository; "
        "change into one or give it with --root"
    )
