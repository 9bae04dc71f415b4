"""What one thread of a kernel does to memory: its way through the PTX with concrete thread indices.

Integers and addresses are followed, everything else is unknown. Thread indices, block and cluster shape and the
scalar arguments are numbers, so most branches have one way; at a branch on data both ways are taken, each a walk of
its own. A failed `try_wait` that goes back to try again is left out: the walk continues where it succeeds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

from ..ptx.effects import Effect, Kind, defined, effect, used
from ..ptx.ir import Addr, Function, Imm, Instruction, Not, Operand, Pair, Reg, Symbol, Vec
from .program import ModelError

MAX_STEPS = 200_000  # instructions of one walk
MAX_WALKS = 64  # ways of one thread

Dim = tuple[int, int, int]


class Pointer(NamedTuple):
    """An address: `offset` bytes into a parameter's memory ("param") or a shared variable ("shared") of a CTA."""

    space: str
    name: str
    offset: int = 0
    rank: int | None = None  # CTA in its cluster; None for memory that all share

    def plus(self, more: int) -> Pointer:
        return Pointer(self.space, self.name, self.offset + more, self.rank)

    def of(self, rank: int) -> Pointer:
        """The same place in the shared memory of another CTA."""
        return Pointer(self.space, self.name, self.offset, rank)


Value = int | Pointer | None  # None: unknown


@dataclass(frozen=True)
class Step:
    """One executed instruction that touches memory or synchronizes, with its address operands resolved.

    `addresses[i]` and `numbers[i]` belong to operand i; they are None where that operand is no address, or unknown.
    Numbers are kept only where they are counts, bytes, parities or barrier names.
    """

    instruction: Instruction
    effect: Effect
    addresses: tuple[Pointer | None, ...]
    numbers: tuple[int | None, ...]


@dataclass(frozen=True)
class Walk:
    """The steps of one thread. `taken` holds the outcome of every branch on data, in order."""

    steps: tuple[Step, ...]
    taken: tuple[bool, ...]


@dataclass(frozen=True)
class Where:
    """A thread: its index in the block, and the block's index and shape of the launch."""

    tid: Dim
    block: Dim
    ctaid: Dim
    grid: Dim
    cluster: Dim

    @cached_property
    def rank(self) -> int:
        """Rank of the CTA in its cluster."""
        x, y, z = (i % n for i, n in zip(self.ctaid, self.cluster, strict=True))
        return x + self.cluster[0] * (y + self.cluster[1] * z)

    @cached_property
    def linear(self) -> int:
        x, y, z = self.tid
        return x + self.block[0] * (y + self.block[1] * z)

    @cached_property
    def special(self) -> dict[str, int]:
        """The special registers that a place decides."""
        vectors = {
            "tid": self.tid,
            "ntid": self.block,
            "ctaid": self.ctaid,
            "nctaid": self.grid,
            "cluster_ctaid": tuple(i % n for i, n in zip(self.ctaid, self.cluster, strict=True)),
            "cluster_nctaid": self.cluster,
            "clusterid": tuple(i // n for i, n in zip(self.ctaid, self.cluster, strict=True)),
            "nclusterid": tuple(i // n for i, n in zip(self.grid, self.cluster, strict=True)),
        }
        out = {
            f"%{name}.{axis}": v for name, dim in vectors.items() for axis, v in zip("xyz", dim, strict=True)
        }
        return out | {
            "%laneid": self.linear % 32,
            "%warpid": self.linear // 32,
            "%cluster_ctarank": self.rank,
            "%cluster_nctarank": self.cluster[0] * self.cluster[1] * self.cluster[2],
        }


# Kinds whose register operands are counts, bytes, parities or barrier numbers.
_NUMERIC = (Kind.MBARRIER, Kind.BARRIER, Kind.BULK, Kind.BULK_GROUP)


class Code:
    """A function prepared for walking: which instructions matter to addresses, branches and synchronization.

    The others are skipped: what they compute is data.
    """

    def __init__(self, function: Function):
        self.function = function
        self.body = function.body
        self.effects = [effect(i) for i in self.body]
        self.results = [defined(i) for i in self.body]
        self.parameters = {v.name for v in function.params}
        self.recorded = [
            e.kind not in (Kind.COMPUTE, Kind.WARP, Kind.PREFETCH, Kind.BRANCH, Kind.EXIT)
            and not is_parameter_load(i)
            for i, e in zip(self.body, self.effects, strict=True)
        ]
        needed = self._needed_registers()
        matters = [
            self.recorded[k]
            or e.kind in (Kind.BRANCH, Kind.EXIT)
            or any(r in needed for r in self.results[k])
            for k, e in enumerate(self.effects)
        ]
        self.next = [len(self.body)] * (len(self.body) + 1)  # the next instruction that matters, at or after
        for k in range(len(self.body) - 1, -1, -1):
            self.next[k] = k if matters[k] else self.next[k + 1]

    def _needed_registers(self) -> set[str]:
        """Registers that decide an address, a branch or a number of a recorded instruction, transitively."""
        makers: dict[str, list[int]] = {}
        for k, results in enumerate(self.results):
            for r in results:
                makers.setdefault(r, []).append(k)
        work = [r for k, i in enumerate(self.body) for r in self._roots(k, i)]
        needed: set[str] = set()
        while work:
            r = work.pop()
            if r in needed:
                continue
            needed.add(r)
            for k in makers.get(r, ()):
                if self.effects[k].kind == Kind.COMPUTE and not _is_data(self.body[k]):
                    work += used(self.body[k])
        return needed

    def _roots(self, k: int, ins: Instruction) -> list[str]:
        roots = [ins.pred[0]] if ins.pred and (self.recorded[k] or self._controls(k)) else []
        if self._controls(k):
            roots += used(ins)
        if self.recorded[k]:
            roots += [o.base.name for o in ins.operands if isinstance(o, Addr) and isinstance(o.base, Reg)]
            if self.effects[k].kind in _NUMERIC and self.effects[k].op != "st_async":
                roots += used(ins)
        return roots

    def _controls(self, k: int) -> bool:
        return self.effects[k].kind in (Kind.BRANCH, Kind.EXIT)


def _is_data(ins: Instruction) -> bool:
    """True for arithmetic whose result the walk never knows: that on floating-point numbers."""
    types = _types(ins.mods)
    return bool(types) and types[-1][0] == "f" and ins.opcode not in ("mov", "selp")


@cache
def _types(mods: tuple[str, ...]) -> tuple[str, ...]:
    """The scalar types among modifiers: s32, f32, b64, ..."""
    return tuple(m for m in mods if m[0] in "busf" and m[1:].isdigit())


def is_parameter_load(ins: Instruction) -> bool:
    return ins.opcode == "ld" and ins.has("param")


def walk(code: Code, where: Where, scalars: Mapping[str, int]) -> list[Walk]:
    """Every way of the thread at `where`. `scalars` gives the values of scalar parameters, by name.

    Raises ModelError when a branch target is unknown, or the ways are too many or too long.
    """
    return _Walker(code, where, scalars).run()


@dataclass
class _State:
    pc: int = 0
    registers: dict[str, Value] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    taken: tuple[bool, ...] = ()
    count: int = 0

    def fork(self) -> _State:
        return _State(self.pc, dict(self.registers), list(self.steps), self.taken, self.count)


class _Walker:
    def __init__(self, code: Code, where: Where, scalars: Mapping[str, int]):
        self.code, self.where, self.scalars = code, where, scalars
        self.function, self.body = code.function, code.body

    def run(self) -> list[Walk]:
        out: list[Walk] = []
        work = [_State()]
        while work:
            state = work.pop()
            while True:
                state.pc = self.code.next[min(state.pc, len(self.body))]
                if state.pc == len(self.body):
                    out.append(Walk(tuple(state.steps), state.taken))
                    break
                state.count += 1
                if state.count > MAX_STEPS or len(out) + len(work) > MAX_WALKS:
                    raise ModelError(f"the walk of a thread through {self.function.name} does not end")
                if not self._step(state, work):
                    break
        return sorted(out, key=lambda w: w.taken)

    def _step(self, state: _State, work: list[_State]) -> bool:
        """Execute one instruction; False when the thread is dead. May add other ways to `work`."""
        ins, what = self.body[state.pc], self.code.effects[state.pc]
        runs = self._guard(state, ins)
        if what.kind == Kind.BRANCH:
            return self._branch(state, ins, runs, work)
        if runs is None:
            if ins.opcode == "trap":
                runs = False  # a trap ends the launch with an error: no handoff to speak of
            else:
                other = state.fork()
                other.taken += (False,)
                other.pc += 1
                work.append(other)
                state.taken += (True,)
                runs = True
        if runs and what.kind == Kind.EXIT:
            state.pc = len(self.body)
            return ins.opcode != "trap"
        if runs:
            self._execute(state, ins, what)
        state.pc += 1
        return True

    def _guard(self, state: _State, ins: Instruction) -> bool | None:
        if ins.pred is None:
            return True
        value = state.registers.get(ins.pred[0])
        return None if not isinstance(value, int) else bool(value) != ins.pred[1]

    def _branch(self, state: _State, ins: Instruction, runs: bool | None, work: list[_State]) -> bool:
        target = ins.operands[0] if ins.operands else None
        if not isinstance(target, Symbol) or target.name not in self.function.labels:
            raise ModelError(f"line {ins.line}: a branch whose target is not known: {ins.text}")
        goal = self.function.labels[target.name]
        if runs is None and ins.pred is not None and self._leads_to_trap(goal):
            runs = False
        if runs is None:
            other = state.fork()
            other.taken += (True,)
            other.pc = goal
            work.append(other)
            state.taken += (False,)
            runs = False
        state.pc = goal if runs else state.pc + 1
        return True

    def _leads_to_trap(self, pc: int) -> bool:
        return pc < len(self.body) and self.body[pc].opcode == "trap"

    # Instructions.

    def _execute(self, state: _State, ins: Instruction, what: Effect) -> None:
        if self.code.recorded[state.pc]:
            addresses = tuple(self._address(state, o) for o in ins.operands)
            numbers: tuple[int | None, ...] = ()
            if what.kind in _NUMERIC:
                values = [self._value(state, o) for o in ins.operands]
                numbers = tuple(v if isinstance(v, int) else None for v in values)
            state.steps.append(Step(ins, what, addresses, numbers))
        results = self.code.results[state.pc]
        if results:
            value = self._result(state, ins, what)
            for register in results:
                state.registers[register] = value if len(results) == 1 else None

    def _result(self, state: _State, ins: Instruction, what: Effect) -> Value:
        if is_parameter_load(ins):
            return self._parameter(ins)
        if what.kind == Kind.MBARRIER and what.op in ("try_wait", "test_wait"):
            self._check_retry(state, ins)
            return 1
        if ins.opcode == "mapa":
            base, rank = (self._value(state, o) for o in ins.operands[1:3])
            if isinstance(base, Pointer) and isinstance(rank, int):
                return base.of(rank)
            return None
        if what.kind != Kind.COMPUTE:
            return None
        return _compute(ins, [self._value(state, o) for o in ins.operands[1:]])

    def _parameter(self, ins: Instruction) -> Value:
        source = ins.operands[1]
        if not isinstance(source, Addr) or not isinstance(source.base, Symbol) or source.offset:
            return None
        name = source.base.name
        if name in self.scalars:
            return self.scalars[name]
        return Pointer("param", name) if name in self.code.parameters else None

    def _check_retry(self, state: _State, ins: Instruction) -> None:
        """The wait must be followed by a branch that repeats it when it fails."""
        flag = self.code.results[state.pc]
        for later in self.body[state.pc + 1 : state.pc + 4]:
            if later.opcode == "bra" and later.pred is not None and later.pred[0] in flag:
                target = later.operands[0]
                goal = self.function.labels.get(target.name, -1) if isinstance(target, Symbol) else -1
                if later.pred[1] and goal <= state.pc:
                    return
                if not later.pred[1] and goal > later.index:
                    return
        raise ModelError(f"line {ins.line}: the failure of this wait does not simply lead to another try")

    def _address(self, state: _State, operand: Operand) -> Pointer | None:
        if not isinstance(operand, Addr):
            return None
        base = operand.base
        value = self._value(state, base) if base is not None else None
        if isinstance(value, Pointer):
            value = value.plus(operand.offset) if operand.offset else value
            return value.of(self.where.rank) if value.space == "shared" and value.rank is None else value
        return None

    def _value(self, state: _State, operand: Operand) -> Value:
        match operand:
            case Reg():
                if operand.name in state.registers:
                    return state.registers[operand.name]
                return self.where.special.get(operand.name)
            case Imm():
                return operand.value if isinstance(operand.value, int) else None
            case Symbol():
                variable = self.function.variables.get(operand.name)
                if variable is not None and variable.space == "shared":
                    return Pointer("shared", operand.name, operand.offset)
                return None
            case Not():
                value = self._value(state, operand.item)
                return int(not value) if isinstance(value, int) else None
        return None


# Integer arithmetic. A result that depends on anything unknown is unknown.


def _compute(ins: Instruction, values: Sequence[Value]) -> Value:
    if _is_data(ins):
        return None
    types = _types(ins.mods)
    kind = types[-1] if types else "pred" if "pred" in ins.mods else "b32"
    bits = int(kind[1:]) if kind[1:].isdigit() else 1
    op = ins.opcode
    if op in ("mov", "cvta") and len(values) == 1:
        return values[0] if kind[0] != "f" or isinstance(values[0], Pointer) else None
    if op == "cvt":
        return _convert(types, values[0])
    if op == "selp":
        return (values[0] if values[2] else values[1]) if isinstance(values[2], int) else None
    if op in ("add", "sub") and isinstance(values[0], Pointer) and isinstance(values[1], int):
        by = _signed(values[1], bits)
        return values[0].plus(by if op == "add" else -by)
    if op == "add" and isinstance(values[1], Pointer) and isinstance(values[0], int):
        return values[1].plus(_signed(values[0], bits))
    numbers = [v for v in values if isinstance(v, int)]
    if len(numbers) != len(values) or not numbers:
        return None
    return _integer(ins, kind, bits, numbers)


def _convert(types: Sequence[str], value: Value) -> Value:
    if isinstance(value, Pointer):
        return value
    if not isinstance(value, int) or len(types) != 2 or "f" in (types[0][0], types[1][0]):
        return None
    source = _signed(value, int(types[1][1:])) if types[1][0] == "s" else value
    return source & ((1 << int(types[0][1:])) - 1)


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _integer(ins: Instruction, kind: str, bits: int, values: list[int]) -> int | None:
    signed = kind[0] == "s"
    mask = (1 << bits) - 1
    a, *rest = [_signed(v, bits) if signed else v & mask for v in values]
    b = rest[0] if rest else 0
    wide = (1 << (2 * bits)) - 1
    match ins.opcode:
        case "setp":
            return _compare(ins, a, b)
        case "mul" if ins.has("wide"):
            return a * b & wide
        case "mul" if ins.has("hi"):
            return (a * b >> bits) & mask
        case "mul":
            return a * b & mask
        case "mad" if ins.has("wide"):
            return a * b + rest[1] & wide
        case "mad":
            return a * b + rest[1] & mask
        case "shl":
            return (a << b & mask) if b < bits else 0
        case "shr":
            return (a >> min(b & 0xFFFFFFFF, bits)) & mask
        case "div" if b:
            return int(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)) & mask
        case "rem" if b:
            return (abs(a) % abs(b) * (-1 if a < 0 else 1)) & mask
        case "bfe":
            return (a >> b) & ((1 << rest[1]) - 1)
        case "lop3" | "prmt":
            return None
    if ins.opcode == "not" and kind == "pred":
        return int(not a)
    return _SIMPLE[ins.opcode](a, b) & mask if ins.opcode in _SIMPLE else None


_SIMPLE: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "min": min,
    "max": max,
    "not": lambda a, _: ~a,
    "neg": lambda a, _: -a,
    "abs": lambda a, _: abs(a),
}
_TESTS: dict[str, Callable[[int, int], bool]] = {
    **{"eq": operator.eq, "ne": operator.ne},
    **{"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge},
    **{"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge},
}


def _compare(ins: Instruction, a: int, b: int) -> int | None:
    if ins.has("and") or ins.has("or") or ins.has("xor") or isinstance(ins.operands[0], (Pair, Vec)):
        return None
    return next((int(_TESTS[m](a, b)) for m in ins.mods if m in _TESTS), None)
