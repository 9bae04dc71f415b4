"""R00: what the auditor could not read. The rule that keeps a clean verdict honest."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity, Site
from ..ptx.effects import Kind
from ..ptx.ir import Symbol
from ..subject import Subject
from .base import Mutation, Rule, snippet

# Device functions without a body in the text that touch only their own arguments and order nothing.
HARMLESS = frozenset({"vprintf", "__assertfail", "__assert_fail", "malloc", "free", "__nv_debug_trap"})


def unread(s: Subject) -> list[tuple[int, str]]:
    """(line, text) of what the auditor does not understand in this kernel and outside all functions."""
    first, last = s.entry.line, max((i.line for i in s.entry.body), default=s.entry.line)
    others = [f for f in s.module.functions.values() if f is not s.entry and f.has_body]
    elsewhere = [(f.line, max((i.line for i in f.body), default=f.line)) for f in others if f.is_entry]
    found = [
        (line, text)
        for line, text in s.module.unknown
        if first <= line <= last or not any(a <= line <= b for a, b in elsewhere)
    ]
    for i in s.find(Kind.UNKNOWN):
        found.append((s.body[i].line, s.effects[i].why))
    for i in s.find(Kind.CALL):
        target = s.body[i].operands[1]
        name = target.name if isinstance(target, Symbol) else ""
        if name not in HARMLESS:
            found.append(
                (s.body[i].line, f"call of {name or 'a function pointer'}: its instructions are not here")
            )
    return sorted(set(found))


def check(s: Subject) -> Iterator[Finding]:
    found = unread(s)
    if found:
        _, text = found[0]
        more = f" (and {len(found) - 1} more places)" if len(found) > 1 else ""
        yield s.finding(
            "R00",
            Severity.WARNING,
            f"not understood: {text}{more}",
            [Site(n, t[:160], "unread") for n, t in found[:5]],
            settle="extend the parser or the table of effects, or inline the called function into this "
            "module",
        )


RULE = Rule(
    id="R00",
    title="something in the kernel was not understood",
    severity=Severity.WARNING,
    meaning=(
        "The auditor judges order only where it knows what every instruction does. Text that the parser "
        "does not "
        "understand, an instruction or modifier that is not in the table of effects, and a call whose "
        "callee is not in "
        "the module could each store, load or synchronise. None of them is assumed to be harmless, so "
        "the kernel is "
        "at best inconclusive until they are known."
    ),
    looks_for="unparsed statements, instructions without a known effect, calls that could not be inlined",
    isa_section="Instruction Set",
    fix="extend audit/ptx/effects.py with the instruction and a test, or give the module the called "
    "function's body",
    failing=snippet(
        """
        frobnicate.sync.aligned %r1, %r2;
        """
    ),
    passing=snippet(
        """
        bar.sync 0;
        """
    ),
    mutations=(
        Mutation("unknown modifier", "bar.sync 0;", "bar.sync.sideways 0;"),
        Mutation("unknown opcode", "bar.sync 0;", "barsync 0;"),
        Mutation("unparsed operand", "bar.sync 0;", "bar.sync 0 1;"),
        Mutation("function pointer", "bar.sync 0;", "call %rd1;"),
    ),
    check=check,
)
