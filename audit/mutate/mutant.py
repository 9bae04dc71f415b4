"""What a mutant is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ..findings import Site


@dataclass(frozen=True)
class Mutant:
    """One planted defect.

    `site` is the first instruction that was changed, at its line in the original, which is its line in the
    mutant too; `region` the lines from the access before the change to the access after it, so that whatever
    the change does to order concerns one of them. `fingerprint` names the mutant across architectures and
    rebuilds: kernel, operator, instructions, and which of several alike.
    """

    kernel: str
    operator: str
    site: Site
    region: tuple[int, int]
    what: str
    text: str
    fingerprint: str


def fingerprint(kernel: str, operator: str, instructions: str, number: int) -> str:
    """What names a mutant in tests/corpus/survivors.toml."""
    return hashlib.sha256(f"{kernel}|{operator}|{instructions}|{number}".encode()).hexdigest()[:12]
