"""Mutants of a kernel: the mistakes that people make with synchronisation, planted one at a time.

    mutants(text, contract) -> Mutant(operator, site, region, what, text, fingerprint), ...   in text order

Each operator is a small function over the *units* of a kernel: its instructions, with every polling loop
taken as one. It edits the text where the instruction stands, never adds or removes a line, and leaves a
program that ptxas accepts. A mutant that only hangs (an arrival deleted) is not made: no test passes over
it. Nor is one that surely means the same (two initialisations swapped, a wait that guards nothing dropped);
what is equivalent for a reason that needs an argument is made, and argued where it survives (docs/teeth.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from k3_audit.artifact.contract import Contract

from ..findings import Site
from ..ptx.ir import Function, Module
from ..ptx.parser import parse
from ..subject import Subject
from .mutant import Mutant, fingerprint
from .operators import MEANING, OPERATORS
from .source import source_mutants
from .units import Code

__all__ = ["MEANING", "OPERATORS", "Mutant", "mutants", "source_mutants"]


def mutants(text: str, contract: Contract | None = None, kernel: str = "") -> Iterator[Mutant]:
    """All mutants of one kernel of a PTX text (the only one, unless `kernel` names it), in a fixed order.

    Raises PtxError when the text is no PTX, ValueError when the kernel is not in it.
    """
    module = parse(text)
    entries = [f for f in module.entries if not kernel or f.name == kernel]
    if len(entries) != 1:
        names = ", ".join(f.name for f in module.entries) or "none"
        raise ValueError(f"one kernel to mutate is needed; in the text: {names}")
    entry = entries[0]
    seen: Counter[tuple[str, str]] = Counter()
    for function in _functions(module, entry):
        code = Code(text, function, Subject(module, entry, contract))
        for n, unit in enumerate(code.units):
            for operator, propose in OPERATORS.items():
                for edit in propose(code, n, unit):
                    names = " ".join(u.name for u in edit.at)
                    seen[operator, names] += 1
                    ins = edit.at[0].instruction
                    yield Mutant(
                        entry.name,
                        operator,
                        Site(ins.line, ins.text, operator, str(ins.loc) if ins.loc else ""),
                        code.region(edit.at),
                        edit.what,
                        _apply(text, edit.changes),
                        fingerprint(entry.name, operator, names, seen[operator, names]),
                    )


def _functions(module: Module, entry: Function) -> list[Function]:
    """The kernel and the functions that it may call."""
    return [f for f in module.functions.values() if f.has_body and (f is entry or not f.is_entry)]


def _apply(text: str, changes: tuple[tuple[int, int, str], ...]) -> str:
    """`text` with spans replaced. A span that holds line breaks keeps them, so that no line moves."""
    out, at = [], 0
    for start, end, new in sorted(changes, key=lambda c: (c[0], c[1])):
        out += [text[at:start], new, "\n" * text.count("\n", start, end)]
        at = end
    return "".join([*out, text[at:]])
