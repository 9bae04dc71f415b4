"""Which branches the threads that execute one instruction can take elsewhere in the kernel.

A path through the control-flow graph is only a path of some thread. What is known where an instruction executes
(its conditions, the threads that they select) also held, for the same thread, at every branch on values that do not
change: those computed outside loops from parameters, special registers and the like. A branch whose condition
these facts decide is followed one way only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .cfg import CFG
from .ir import Imm, Instruction, Not, Operand, Reg
from .provenance import Affine, Atom, Interval, Provenance
from .ssa import SSA
from .threads import Executors, Fact, Threads

_DEEPEST = 32


@dataclass(frozen=True)
class Context:
    """What holds for the threads that execute one instruction: predicate values, ranges of forms, who they are."""

    facts: dict[int, bool]
    ranges: list[tuple[Affine, Interval]]
    who: Executors


class Feasibility:
    """Decides branches for the threads of one instruction."""

    def __init__(self, cfg: CFG, ssa: SSA, provenance: Provenance, threads: Threads) -> None:
        self.cfg, self.ssa, self.provenance, self.threads = cfg, ssa, provenance, threads
        self._contexts: dict[int, Context] = {}
        self._decided: dict[tuple[int, int], bool | None] = {}

    def context(self, index: int) -> Context:
        """What holds for the threads that execute instruction `index`, as far as it never changes."""
        found = self._contexts.get(index)
        if found is None:
            facts: dict[int, bool] = {}
            for fact in self.threads.facts(index):
                self._expand(fact, facts, 0)
            ranges = [
                (f, i) for f, i in self.threads.ranges(index) if all(self._fixed_atom(a) for a, _ in f.terms)
            ]
            found = self._contexts[index] = Context(facts, ranges, self.threads.executors(index))
        return found

    def possible(self, index: int, block: int, target: int) -> bool:
        """Whether threads that execute instruction `index` can go from `block` to its successor `target`."""
        fact = self.threads.edge_fact(block, target)
        if fact is None:
            return True
        key = (index, fact.value)
        if key not in self._decided:
            self._decided[key] = self.decide(fact.value, self.context(index))
        return self._decided[key] in (None, fact.holds)

    # -- facts --------------------------------------------------------------------------------------------

    def _fixed(self, value: int) -> bool:
        """The value is computed once per thread."""
        v = self.ssa.values[value]
        block = v.block if v.is_phi else self.cfg.block_of[v.index] if v.index >= 0 else -1
        return block not in self.cfg.in_loop

    def _fixed_atom(self, atom: Atom) -> bool:
        if atom[0] == "value":
            return isinstance(atom[1], int) and atom[1] >= 0 and self._fixed(atom[1])
        return not str(atom[1]).startswith(("%clock", "%globaltimer"))

    def _expand(self, fact: Fact, out: dict[int, bool], depth: int) -> None:
        """A fact and those that follow from it."""
        if depth > _DEEPEST:
            return
        if self._fixed(fact.value):
            out[fact.value] = fact.holds
        ins = self.ssa.definition(fact.value)
        if ins is None or self.ssa.values[fact.value].inputs:
            return
        for op, holds in _implied(ins, fact.holds):
            register, negated = (op.item, True) if isinstance(op, Not) else (op, False)
            if isinstance(register, Reg):
                value = self.ssa.read(ins.index, register.name)
                self._expand(Fact(value, holds != negated), out, depth + 1)
        inner = self.threads.tested_predicate(ins)
        if inner is not None:
            self._expand(Fact(inner, (ins.mods[0] == "ne") == fact.holds), out, depth + 1)

    # -- decisions ----------------------------------------------------------------------------------------

    def decide(self, value: int, context: Context, depth: int = 0) -> bool | None:
        """The value of a predicate under a context, None if that does not settle it."""
        if value in context.facts:
            return context.facts[value]
        ins = self.ssa.definition(value)
        if ins is None or depth > _DEEPEST or self.ssa.values[value].inputs or not self._fixed(value):
            return None
        operation: Callable[[bool | None, bool | None], bool | None] | None = _LOGIC.get(ins.opcode)
        if operation is not None and "pred" in ins.mods:
            left = self._operand(ins, ins.operands[1], context, depth)
            right = self._operand(ins, ins.operands[2], context, depth)
            return operation(left, right)
        if ins.opcode in ("mov", "not") and "pred" in ins.mods:
            inner = self._operand(ins, ins.operands[1], context, depth)
            return inner if inner is None or ins.opcode == "mov" else not inner
        if ins.opcode != "setp" or not isinstance(ins.operands[0], Reg):
            return None
        tested = self.threads.tested_predicate(ins)
        if tested is not None:
            inner = self.decide(tested, context, depth + 1)
            return None if inner is None else inner == (ins.mods[0] == "ne")
        compared = self._compare(ins, context)
        if len(ins.operands) < 4:
            return compared
        joined = next((m for m in ins.mods if m in _LOGIC), "")
        other = self._operand(ins, ins.operands[3], context, depth)
        return _LOGIC[joined](compared, other) if joined else None

    def _operand(self, ins: Instruction, op: Operand, context: Context, depth: int) -> bool | None:
        if isinstance(op, Imm):
            return bool(op.value)
        negated = isinstance(op, Not)
        register = op.item if isinstance(op, Not) else op
        if not isinstance(register, Reg):
            return None
        found = self.decide(self.ssa.read(ins.index, register.name), context, depth + 1)
        return None if found is None else found != negated

    def _compare(self, ins: Instruction, context: Context) -> bool | None:
        if ins.mods[-1][0] not in "usb":
            return None
        a = self.provenance.operand_affine(ins, ins.operands[1])
        b = self.provenance.operand_affine(ins, ins.operands[2])
        difference = a.add(b, -1)
        if not all(self._fixed_atom(atom) for atom, _ in difference.terms):
            return None
        comparison = ins.mods[0]
        if (ins.mods[-1][0] == "u" or comparison in _UNSIGNED) and comparison not in ("eq", "ne"):
            if self._interval(a, context)[0] < 0 or self._interval(b, context)[0] < 0:
                return None
            comparison = _UNSIGNED.get(comparison, comparison)
        low, high = self._interval(difference, context)
        never = {"lt": low >= 0, "le": low > 0, "gt": high <= 0, "ge": high < 0, "eq": low > 0 or high < 0}
        always = {"lt": high < 0, "le": high <= 0, "gt": low > 0, "ge": low >= 0, "eq": low == high == 0}
        if comparison == "ne":
            return True if never["eq"] else False if always["eq"] else None
        if comparison not in always:
            return None
        return True if always[comparison] else False if never[comparison] else None

    def _interval(self, form: Affine, context: Context) -> Interval:
        low: float = form.const
        high: float = form.const
        for atom, c in form.terms:
            a, b = self._atom(atom, context)
            ends = [0 if 0 in (c, x) else c * x for x in (a, b)]
            low, high = low + min(ends), high + max(ends)
        return low, high

    def _atom(self, atom: Atom, context: Context) -> Interval:
        low, high = self.provenance.atom_interval(atom)
        for form, interval in context.ranges:
            if form.terms == ((atom, 1),):
                low, high = max(low, interval[0] - form.const), min(high, interval[1] - form.const)
        subject, scale = self.threads.subject(atom)
        if subject == "thread":
            low, high = max(low, context.who.threads[0] // scale), min(high, context.who.threads[1] // scale)
        elif subject == "lane":
            low, high = max(low, context.who.lanes[0]), min(high, context.who.lanes[1])
        elif subject == "rank":
            low, high = max(low, context.who.ranks[0]), min(high, context.who.ranks[1])
        return low, high


def _and(a: bool | None, b: bool | None) -> bool | None:
    if a is False or b is False:
        return False
    return True if a and b else None


def _or(a: bool | None, b: bool | None) -> bool | None:
    if a or b:
        return True
    return False if a is False and b is False else None


def _xor(a: bool | None, b: bool | None) -> bool | None:
    return None if a is None or b is None else a != b


_LOGIC: dict[str, Callable[[bool | None, bool | None], bool | None]] = {"and": _and, "or": _or, "xor": _xor}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _implied(ins: Instruction, holds: bool) -> list[tuple[Operand, bool]]:
    """Predicate operands whose values follow from the result: both operands of an `and` that is true, ..."""
    ops = ins.operands
    if ins.opcode in ("mov", "not") and "pred" in ins.mods:
        return [(ops[1], holds != (ins.opcode == "not"))]
    if (ins.opcode, holds) in (("and", True), ("or", False)) and "pred" in ins.mods:
        return [(ops[1], holds), (ops[2], holds)]
    if ins.opcode == "xor" and "pred" in ins.mods and isinstance(ops[2], Imm) and ops[2].value in (1, -1):
        return [(ops[1], not holds)]
    if ins.opcode == "setp" and len(ops) == 4 and ("and" if holds else "or") in ins.mods:
        return [(ops[3], holds)]
    return []
