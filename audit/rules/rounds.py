"""Values of a loop's variables, round by round, where they depend on nothing but constants."""

from __future__ import annotations

from collections.abc import Callable

from ..ptx.cfg import Loop
from ..ptx.effects import Kind, defined
from ..ptx.ir import Imm, Instruction, Not, Operand, Pair, Reg
from ..ptx.provenance import Affine
from ..subject import Subject

_DEEPEST = 200
_COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


class Rounds:
    """Evaluates SSA values in consecutive rounds of one loop.

    Variables of the loop (phis of its header) start from constants, or from `start` where their first value is not
    known; everything outside the loop counts as zero, because only differences between rounds matter.
    """

    def __init__(self, s: Subject, loop: Loop, start: int) -> None:
        self.s, self.loop = s, loop
        self.exact = True
        self.variables: dict[int, int | None] = {}
        for v, value in enumerate(s.ssa.values):
            if value.is_phi and value.block == loop.header:
                self.variables[v] = self._first(v, start)
        self._round: dict[int, int | None] = {}

    def _first(self, v: int, start: int) -> int | None:
        outside = [i for b, i in self.s.ssa.values[v].inputs if b not in self.loop.blocks]
        constants = {self.s.provenance.forms[i].constant for i in outside}
        constant = constants.pop() if len(constants) == 1 else None
        if constant is None:
            self.exact = False
            return start
        return constant

    def advance(self) -> None:
        """Go on to the next round."""
        following: dict[int, int | None] = {}
        for v in self.variables:
            inside = [i for b, i in self.s.ssa.values[v].inputs if b in self.loop.blocks]
            found = {self.value(i) for i in inside}
            following[v] = found.pop() if len(found) == 1 else None
        self.variables = following
        self._round = {}

    def form(self, form: Affine) -> int | None:
        """An affine form in this round, without its parts from outside the loop."""
        total = form.const
        for atom, c in form.terms:
            if atom[0] == "value" and isinstance(atom[1], int) and atom[1] >= 0:
                here = self.value(atom[1])
                if here is None:
                    return None
                total += c * here
        return total

    def value(self, v: int, depth: int = 0) -> int | None:
        """One value in this round, None if it depends on something unknown inside the loop."""
        if v in self.variables:
            return self.variables[v]
        if v in self._round:
            return self._round[v]
        self._round[v] = None
        self._round[v] = self._compute(v, depth)
        return self._round[v]

    def _compute(self, v: int, depth: int) -> int | None:
        s = self.s
        value = s.ssa.values[v]
        block = value.block if value.is_phi else s.cfg.block_of[value.index] if value.index >= 0 else -1
        if block not in self.loop.blocks:
            constant = s.provenance.forms[v].constant
            return 0 if constant is None else constant
        if depth > _DEEPEST:
            return None
        if value.is_phi:
            found = {self.value(i, depth + 1) for _, i in value.inputs}
            return found.pop() if len(found) == 1 else None
        ins = s.body[value.index]
        if value.inputs or s.effects[value.index].kind is not Kind.COMPUTE or len(defined(ins)) != 1:
            return None
        return self._operation(ins, depth)

    def _operation(self, ins: Instruction, depth: int) -> int | None:
        args = [self._operand(ins, op, depth) for op in ins.operands[1:]]
        if ins.opcode == "selp" and args[2] is not None:
            return args[0] if args[2] else args[1]
        if any(a is None for a in args):
            return None
        x = [a for a in args if a is not None]
        op, mods = ins.opcode, ins.mods
        if op in ("mov", "cvt", "cvta"):
            return x[0]
        if op == "setp" and len(x) == 2 and mods[0] in _COMPARE:
            return int(_COMPARE[mods[0]](x[0], x[1]))
        if op == "not":
            return int(not x[0]) if "pred" in mods else ~x[0]
        if op in ("mad", "fma") and "hi" not in mods:
            return x[0] * x[1] + x[2]
        if op == "shl":
            return x[0] << x[1] if 0 <= x[1] < 64 else None
        if op == "shr":
            return x[0] >> x[1] if 0 <= x[1] < 64 else None
        if op in ("div", "rem") and x[1]:
            return x[0] // x[1] if op == "div" else x[0] % x[1]
        simple: dict[str, Callable[[int, int], int]] = {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul": lambda a, b: a * b,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "xor": lambda a, b: a ^ b,
            "min": min,
            "max": max,
        }
        return simple[op](x[0], x[1]) if op in simple and len(x) == 2 and "hi" not in mods else None

    def _operand(self, ins: Instruction, op: Operand, depth: int) -> int | None:
        if isinstance(op, Imm):
            return op.value if isinstance(op.value, int) else None
        if isinstance(op, Not):
            inner = self._operand(ins, op.item, depth)
            return None if inner is None else int(not inner)
        if isinstance(op, Pair) or not isinstance(op, Reg):
            return None
        if op.name not in self.s.function.registers:
            return 0  # a special register: the same in every round
        return self.value(self.s.ssa.read(ins.index, op.name), depth + 1)
