"""The auditor's answers. Four verdicts that are never folded into each other."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Verdict(StrEnum):
    CLEAN = "clean"
    FINDING = "finding"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class ExitCode(IntEnum):
    CLEAN = 0
    FINDINGS = 1
    INCONCLUSIVE = 2
    ERROR = 3


@dataclass(frozen=True)
class Site:
    """One instruction that a finding speaks of.

    `line` is the 1-based line in the PTX (or SASS) text; `source` is "file:line" of the kernel source, from
    `.loc`, or "" where the compiler left no line table. `role` says why it is here ("store", "load",
    "fence", ...).
    """

    line: int
    text: str
    role: str = ""
    source: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing a rule has to say about one kernel.

    `verdict` is FINDING or INCONCLUSIVE; `sites` holds both ends of the unordered pair, first site first;
    `missing` names the ordering edge that is not there; `fix` is concrete; `settle` says, for an inconclusive
    verdict, what would settle it.
    """

    rule: str
    severity: Severity
    verdict: Verdict
    kernel: str
    message: str
    sites: tuple[Site, ...] = ()
    missing: str = ""
    fix: str = ""
    settle: str = ""
    path: tuple[Site, ...] = field(default=())

    @property
    def fingerprint(self) -> str:
        """Stable under renumbered registers and moved lines: rule, kernel, message, opcodes and files of the sites."""
        sites = "|".join(f"{s.role}:{_opcode(s.text)}:{s.source.rpartition(':')[0]}" for s in self.sites)
        said = _UNSTABLE.sub("", f"{self.message}|{self.missing}")
        whole = f"{self.rule}|{self.kernel}|{said}|{sites}"
        return hashlib.sha256(whole.encode(errors="backslashreplace")).hexdigest()[:16]


# Line numbers and registers inside a message.
_UNSTABLE = re.compile(r"\blines? \d+|%\w+")


def _opcode(text: str) -> str:
    """The first word of an instruction after its guard predicate, which names a register."""
    return next((word for word in text.split() if not word.startswith("@")), "")


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict of a whole from those of its parts: error, then finding, then inconclusive, then clean."""
    for v in (Verdict.ERROR, Verdict.FINDING, Verdict.INCONCLUSIVE):
        if v in verdicts:
            return v
    return Verdict.CLEAN
