"""A rule of the auditor, and how rules are found. One file of this folder holds one rule, named `RULE`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..findings import Finding, Severity


@dataclass(frozen=True)
class Mutation:
    """A change of the passing snippet that must make the rule speak: `old` becomes `new`, once."""

    name: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The mutated text. Raises ValueError when `old` does not occur."""
        if self.old not in text:
            raise ValueError(f"mutation {self.name!r}: {self.old!r} is not in the snippet")
        return text.replace(self.old, self.new, 1)


@dataclass(frozen=True)
class Rule:
    """One rule: what `k3-audit explain ID` prints, and the function that checks a subject.

    `meaning` is one paragraph; `failing` and `passing` are whole texts; `language` says of what: "ptx", "sass" (PTX
    with its disassembly behind it; checked where there is machine code), "python" (source of DSL kernels).
    `contract`, for rules that need one, is the contract that both snippets are audited with, as the dictionary
    that :meth:`Contract.from_dict` takes.
    """

    id: str
    title: str
    severity: Severity
    meaning: str
    looks_for: str
    isa_section: str
    fix: str
    failing: str
    passing: str
    mutations: tuple[Mutation, ...]
    check: Callable[[Any], Iterable[Finding]]
    language: str = "ptx"
    contract: dict[str, Any] | None = None


@cache
def rules() -> dict[str, Rule]:
    """All rules by id, in the order of their ids."""
    package = importlib.import_module(__package__ or "k3_audit.audit.rules")
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        rule = getattr(importlib.import_module(f"{package.__name__}.{info.name}"), "RULE", None)
        if isinstance(rule, Rule):
            if rule.id in found:
                raise ValueError(f"two rules are called {rule.id}")
            found[rule.id] = rule
    return dict(sorted(found.items()))


SNIPPET_HEAD = """.version 8.8
.target {arch}
.address_size 64
"""


def snippet(
    body: str, params: str = "", arch: str = "sm_90a", declare: str = "", directives: str = ""
) -> str:
    """A whole PTX text around the statements of one kernel, with registers declared."""
    registers = (
        ".reg .pred %p<16>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .b64 %rd<32>; .reg .f32 %f<16>;\n"
        "    .reg .b128 %q<2>;"
    )
    lines = "\n".join("    " + line.strip() if not line.rstrip().endswith(":") else line.strip()
                      for line in body.strip().splitlines())  # fmt: skip
    params = f"({params})" if params else "()"
    return (
        f"{SNIPPET_HEAD.format(arch=arch)}{declare}\n.visible .entry kernel{params}\n"
        f".reqntid 128, 1, 1\n{directives}\n{{\n    {registers}\n{lines}\n    ret;\n}}\n"
    )
