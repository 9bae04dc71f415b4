"""Where addresses come from.

Each value of a function gets two descriptions.

*Parts*: a set of origins, each with an interval of byte offsets. An origin is a kernel parameter (with the
field offset inside a by-value struct), a named variable, a parameter's own address, or a pointer loaded
from memory; plain integers have no origin. Joins, selects and predicated moves unite; loops widen to
thresholds taken from the comparisons of the function. Two addresses with no origin in common, or with
disjoint intervals, cannot overlap.

*Affine form*: constant + sum of coefficient * atom, where an atom is a special register, a parameter, a
symbol or an expression that occurs somewhere in the function. Equal forms are equal values at one point of
one thread. An address is evaluated once more from its affine form with the conditions that hold where it is
used, which gives the tight range of `base + 8*i` under `i < 7`.

Integer arithmetic is read as if it did not wrap around.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from .cfg import CFG, Loop
from .effects import defined, used, words
from .ir import Addr, Function, Imm, Instruction, Module, Not, Operand, Pair, Reg, Symbol, TensorAddr, Vec
from .parser import TYPE_BYTES
from .ssa import SSA

INF = math.inf
Number = int | float
Interval = tuple[Number, Number]
FULL: Interval = (-INF, INF)
MOST_PARTS = 8


@dataclass(frozen=True, slots=True)
class Base:
    """An origin. `kind` is "param" (the value of a kernel parameter), "param_space" (its address), "shared",
    "global", "const", "local" (a variable's address), "loaded" (a pointer read from memory), or "unknown".

    `index` and `offset` locate a kernel parameter; `name` is the parameter's or variable's name, or says from
    where a pointer was loaded. `peer` marks shared memory reached through `mapa`: it may be another CTA's.
    `shift` counts the bits that a shared address was shifted right by: matrix descriptors hold `address >> 4`
    in their low 14 bits (PTX ISA, "Matrix Descriptor Format"), and its interval is then in those units.
    """

    kind: str
    name: str = ""
    index: int = -1
    offset: int = 0
    peer: bool = False
    shift: int = 0

    def __str__(self) -> str:
        if self.kind == "param":
            return f"parameter {self.index}" + (f"+{self.offset}" if self.offset else "")
        where = {"param_space": "address of parameter", "loaded": "pointer loaded from"}.get(
            self.kind, self.kind
        )
        return f"{'peer ' * self.peer}{where} {self.name}".strip()


UNKNOWN = Base("unknown")
Parts = dict[Base | None, Interval]

Atom = tuple[str, str] | tuple[str, int] | tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Affine:
    """`const + sum(coefficient * atom)`; `terms` is sorted. Atoms: ("reg", "%tid.x"), ("param", index,
    offset), ("sym", name), ("value", number of an SSA value)."""

    const: int
    terms: tuple[tuple[Atom, int], ...] = ()

    @property
    def constant(self) -> int | None:
        return None if self.terms else self.const

    def add(self, other: Affine, sign: int = 1) -> Affine:
        if not other.terms:
            return Affine(self.const + sign * other.const, self.terms)
        coefficients = dict(self.terms)
        for atom, c in other.terms:
            coefficients[atom] = coefficients.get(atom, 0) + sign * c
        terms = tuple(sorted((a, c) for a, c in coefficients.items() if c))
        return Affine(self.const + sign * other.const, terms)

    def times(self, factor: int) -> Affine:
        if factor == 0:
            return Affine(0)
        return Affine(self.const * factor, tuple((a, c * factor) for a, c in self.terms))


_TID = Affine(0, ((("reg", "%tid.x"), 1),))


@dataclass(frozen=True, slots=True)
class Address:
    """Everything known about one address operand at one instruction.

    `parts` holds its origins with byte offsets, the displacement in the text included; `affine` its affine
    form.
    """

    parts: tuple[tuple[Base | None, Interval], ...]
    affine: Affine

    @property
    def bases(self) -> tuple[Base, ...]:
        return tuple(b for b, _ in self.parts if b is not None)

    @property
    def known(self) -> bool:
        """True when every origin is a parameter or a variable, so that nothing else can be meant."""
        return bool(self.parts) and all(
            b is not None and b.kind not in ("loaded", "unknown") for b, _ in self.parts
        )

    def describe(self) -> str:
        words = []
        for base, (low, high) in self.parts:
            name = str(base) if base is not None else "absolute address"
            if low == high:
                words.append(f"{name}+{low}" if low else name)
            elif math.isfinite(low) and math.isfinite(high):
                words.append(f"{name}+[{low}, {high}]")
            else:
                words.append(f"{name}+[...]")
        return " or ".join(words) or "unknown address"


def may_overlap(
    a: Address, width_a: int | None, b: Address, width_b: int | None, same_cta: bool = True
) -> bool:
    """Whether two accesses of these widths (None: unknown) can touch a common byte.

    With `same_cta` False, offsets into shared memory are compared as if both were in one CTA: whatever two
    CTAs of a cluster hold at the same place counts as one object.
    """
    for base_a, (low_a, high_a) in a.parts:
        for base_b, (low_b, high_b) in b.parts:
            if not _related(base_a, base_b):
                continue
            same = base_a is not None and base_b is not None and base_a.kind == base_b.kind
            if not same or base_a is None:
                return True
            end_a = high_a + (INF if width_a is None else width_a)
            end_b = high_b + (INF if width_b is None else width_b)
            if low_a < end_b and low_b < end_a:
                return True
    return False


_DESCRIPTOR_MASK = 0x3FFF


def _shifted(pointer: Parts, by: int) -> Parts:
    """A shared address shifted right by `by` bits (left if negative)."""
    out: Parts = {}
    for base, (low, high) in pointer.items():
        assert base is not None
        if not 0 <= base.shift + by <= 16:
            return _blur(pointer)
        scaled = (_scale(low, by), _scale(high, by))
        out[replace(base, shift=base.shift + by)] = scaled
    return out


def _scale(x: Number, by: int) -> Number:
    if not math.isfinite(x):
        return x
    return int(x) >> by if by >= 0 else int(x) << -by


def _in_bytes(base: Base | None, interval: Interval) -> Parts:
    if base is None or not base.shift:
        return {base: interval}
    low, high = (_scale(x, -base.shift) for x in interval)
    return {replace(base, shift=0): (low, high)}


def _related(a: Base | None, b: Base | None) -> bool:
    if a is None or b is None or a.kind == "unknown" or b.kind == "unknown":
        return True
    if "loaded" in (a.kind, b.kind):
        return {a.kind, b.kind} <= {"loaded", "param", "global"}
    return (a.kind, a.name, a.index, a.offset) == (b.kind, b.name, b.index, b.offset)


# -- interval arithmetic ----------------------------------------------------------------------------------


def _mul(a: Interval, b: Interval) -> Interval:
    products = [0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(products), max(products)


def _add(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _neg(a: Interval) -> Interval:
    return -a[1], -a[0]


def _hull(a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), max(a[1], b[1])


def _unite(values: Iterable[Parts]) -> Parts:
    out: Parts = {}
    for value in values:
        for base, interval in value.items():
            out[base] = _hull(out[base], interval) if base in out else interval
    if len(out) > MOST_PARTS:
        return {UNKNOWN: FULL}
    return out


def _only_int(value: Parts) -> Interval | None:
    """The interval of a plain integer, None for anything that may be a pointer."""
    return value[None] if len(value) == 1 and None in value else None


def _blur(value: Parts) -> Parts:
    """Some function of a pointer and perhaps integers: its origins remain, its offset is lost."""
    return {b: FULL for b in value if b is not None} or {None: FULL}


# -- the analysis -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Induction:
    """A loop variable that grows by `step` per round, in a loop that goes round again at most `rounds` times."""

    loop: Loop
    step: int
    rounds: int


_SIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_PASS = frozenset({"mov", "cvta", "shfl"})
_MAX_ROUNDS = 4  # changes of one phi before its bounds are widened
# `mapa`-like masks: clearing this bit of a shared::cluster address selects the even CTA of a pair.
_PEER_MASKS = frozenset({0xFEFFFFFF, -16777217, 0xFFFFFFFFFEFFFFFF})


@dataclass
class Provenance:
    """Origins and affine forms of all values of one (inlined) function."""

    module: Module
    function: Function
    cfg: CFG
    ssa: SSA
    cluster_size: int = 16
    parts: list[Parts] = field(init=False)
    forms: list[Affine] = field(init=False)

    def __post_init__(self) -> None:
        self._params = {p.name: n for n, p in enumerate(self.function.params)}
        self._ranges = _special_ranges(self.function, self.cluster_size)
        self._expressions: dict[tuple[object, ...], int] = {}
        self.forms = self._affine_forms()
        self.parts = self._solve()

    # -- queries ------------------------------------------------------------------------------------------

    def address(
        self, ins: Instruction, operand: int, facts: Iterable[tuple[Affine, Interval]] = ()
    ) -> Address:
        """The address that `operand` of `ins` names. `facts` are affine forms whose range is known there."""
        op = ins.operands[operand]
        offset = 0
        if isinstance(op, Addr):
            offset = op.offset
            if op.base is None:
                return Address(((None, (offset, offset)),), Affine(offset))
            op = op.base
        elif isinstance(op, TensorAddr):
            op = op.base
        parts = {b: (lo + offset, hi + offset) for b, (lo, hi) in self.operand_parts(ins, op).items()}
        affine = self.operand_affine(ins, op).add(Affine(offset))
        if any(b is not None and b.shift for b in parts):
            parts = _unite(_in_bytes(b, i) for b, i in parts.items())
        elif len(parts) == 1:
            ((base, interval),) = parts.items()
            tight = self._interval_of(affine, base, dict(facts))
            if tight is not None:
                parts[base] = max(interval[0], tight[0]), min(interval[1], tight[1])
        return Address(tuple(sorted(parts.items(), key=lambda p: str(p[0]))), affine)

    def operand_parts(self, ins: Instruction, op: Operand) -> Parts:
        if isinstance(op, Reg):
            return self.parts[v] if (v := self._value(ins, op)) is not None else self._special(op.name)
        return self._constant_parts(op)

    def operand_affine(self, ins: Instruction, op: Operand) -> Affine:
        if isinstance(op, Imm) and isinstance(op.value, int):
            return Affine(op.value)
        if isinstance(op, Symbol):
            return Affine(op.offset, ((("sym", op.name), 1),))
        if isinstance(op, Reg):
            v = self._value(ins, op)
            return Affine(0, ((("reg", op.name), 1),)) if v is None else self.forms[v]
        return Affine(0, ((("value", -1), 1),))

    def interval(self, affine: Affine, facts: Iterable[tuple[Affine, Interval]] = ()) -> Interval:
        """Range of an integer form, given the ranges of some other forms."""
        found = self._interval_of(affine, None, dict(facts))
        return FULL if found is None else found

    def _value(self, ins: Instruction, op: Reg) -> int | None:
        """SSA value of a register operand, None for special registers."""
        if op.name in self._ranges or (op.name.startswith("%") and op.name not in self.function.registers):
            return None
        return self.ssa.read(ins.index, op.name)

    def atom_interval(self, atom: Atom) -> Interval:
        if atom[0] == "reg":
            return self._ranges.get(str(atom[1]), FULL)
        if atom[0] == "value" and isinstance(atom[1], int) and atom[1] >= 0:
            found = _only_int(self.parts[atom[1]]) if hasattr(self, "parts") else None
            return FULL if found is None else found
        return FULL

    def _interval_of(
        self, affine: Affine, base: Base | None, facts: dict[Affine, Interval]
    ) -> Interval | None:
        """Range of an affine form without its symbol or parameter `base`; None if that is not in it once."""
        total: Interval = (affine.const, affine.const)
        found_base = base is None
        for atom, c in affine.terms:
            if not found_base and c == 1 and base is not None and _is_base(atom, base):
                found_base = True
                continue
            here = self.atom_interval(atom)
            for form, interval in facts.items():
                if form.terms == ((atom, 1),):
                    here = max(here[0], interval[0] - form.const), min(here[1], interval[1] - form.const)
            total = _add(total, _mul(here, (c, c)))
        return total if found_base and total[0] <= total[1] else None

    # -- affine forms -------------------------------------------------------------------------------------

    def _affine_forms(self) -> list[Affine]:
        ssa, cfg = self.ssa, self.cfg
        count = len(ssa.values)
        forms = [Affine(0, ((("value", v), 1),)) for v in range(count)]
        self.forms = forms
        at_block: dict[int, list[int]] = {}
        for v, value in enumerate(ssa.values):
            if value.is_phi:
                at_block.setdefault(value.block, []).append(v)
        done = [False] * count
        for b in cfg.order:
            if b == cfg.exit:
                continue
            for v in at_block.get(b, ()):
                inputs = {forms[i] if done[i] else None for _, i in ssa.values[v].inputs if i != v}
                if len(inputs) == 1 and None not in inputs:
                    forms[v] = inputs.pop() or forms[v]
                done[v] = True
            for index in range(cfg.blocks[b].start, cfg.blocks[b].end):
                ins = self.function.body[index]
                for position, register in enumerate(defined(ins)):
                    v = ssa.written(index, register)
                    if not ssa.values[v].inputs:
                        forms[v] = self._form(ins, v, position)
                    done[v] = True
        return forms

    def _form(self, ins: Instruction, v: int, position: int) -> Affine:
        ops = ins.operands
        op = ins.opcode
        of = self.operand_affine
        own = Affine(0, ((("value", v), 1),))
        if op == "ld" and ins.mods[:1] == ("param",):
            return self._param_form(ins, position) or own
        if op in ("mov", "cvta") and len(ops) == 2:
            source = ops[1]
            if isinstance(source, Vec) or isinstance(ops[0], Vec):
                if (
                    isinstance(source, Vec)
                    and isinstance(ops[0], Vec)
                    and len(source.items) == len(ops[0].items)
                ):
                    return of(ins, source.items[position])
                return self._shared_value(ins, v, position)
            return of(ins, source)
        if op == "shfl" and not position and self._same_in_warp(shuffled := of(ins, ops[1])):
            return shuffled
        if position or isinstance(ops[0], Vec | Pair):
            return self._shared_value(ins, v, position) if op not in _EFFECTFUL else own
        if op == "cvt" and len(ins.mods) >= 2 and _widens(ins.mods):
            return of(ins, ops[1])
        if op in ("add", "sub") and _integer(ins.mods) and not {"cc", "sat"} & set(ins.mods):
            return of(ins, ops[1]).add(of(ins, ops[2]), 1 if op == "add" else -1)
        if op in ("mul", "mad") and _integer(ins.mods) and "hi" not in ins.mods:
            a, b = of(ins, ops[1]), of(ins, ops[2])
            if b.constant is None and a.constant is not None:
                a, b = b, a
            if b.constant is not None:
                product = a.times(b.constant)
                return product.add(of(ins, ops[3])) if op == "mad" else product
            if op == "mad":
                return self._expression(("product", *sorted((repr(a), repr(b)))), v).add(of(ins, ops[3]))
            return self._expression(("product", *sorted((repr(a), repr(b)))), v)
        if op == "shl":
            shift = of(ins, ops[2]).constant
            if shift is not None and 0 <= shift < 64:
                return of(ins, ops[1]).times(1 << shift)
        if op == "neg" and _integer(ins.mods):
            return of(ins, ops[1]).times(-1)
        if op == "or":
            a, b = of(ins, ops[1]), of(ins, ops[2])
            if _disjoint(a, b, self) or _disjoint(b, a, self):
                return a.add(b)
        return self._shared_value(ins, v, position)

    def _same_in_warp(self, form: Affine) -> bool:
        """All lanes of a warp agree on the value, so shuffling it changes nothing."""
        for atom, _ in form.terms:
            if atom[0] == "reg":
                if str(atom[1]).startswith(("%tid", "%lane", "%clock", "%globaltimer")):
                    return False
            elif atom[0] == "value":
                ins = self.ssa.definition(int(atom[1])) if atom[1] >= 0 else None  # type: ignore[operator]
                warp = (
                    ins is not None and ins.opcode == "shr" and ins.text.endswith(", 5") and ins.pred is None
                )
                if not (warp and ins and self.operand_affine(ins, ins.operands[1]) == _TID):
                    return False
        return True

    def _shared_value(self, ins: Instruction, v: int, position: int) -> Affine:
        """Value numbering: the same pure operation on the same operands is the same atom."""
        if ins.opcode in _EFFECTFUL or ins.pred is not None:
            return Affine(0, ((("value", v), 1),))
        operands = tuple(self._key(ins, op) for op in ins.operands[1:])
        return self._expression((ins.opcode, ins.mods, position, operands), v)

    def _key(self, ins: Instruction, op: Operand) -> object:
        if isinstance(op, Vec):
            return tuple(self._key(ins, x) for x in op.items)
        if isinstance(op, Imm):
            return op.bits
        if isinstance(op, Not):
            return ("not", self.operand_affine(ins, op.item))
        return self.operand_affine(ins, op) if isinstance(op, Reg | Symbol) else repr(op)

    def _expression(self, key: tuple[object, ...], v: int) -> Affine:
        return Affine(0, ((("value", self._expressions.setdefault(key, v)), 1),))

    def _param_form(self, ins: Instruction, position: int) -> Affine | None:
        where = self._kernel_param(ins, position)
        if where is None:
            return None
        return Affine(0, ((("param", *where), 1),))

    def _kernel_param(self, ins: Instruction, position: int) -> tuple[int, int] | None:
        """(parameter, byte offset) that an `ld.param` reads, None if it is no kernel parameter."""
        address = ins.operands[1]
        if not isinstance(address, Addr) or not isinstance(address.base, Symbol):
            return None
        index = self._params.get(address.base.name)
        if index is None:
            return None
        return index, address.offset + position * TYPE_BYTES.get(ins.mods[-1], 0)

    # -- parts --------------------------------------------------------------------------------------------

    def _special(self, name: str) -> Parts:
        return {None: self._ranges.get(name, FULL)}

    def _constant_parts(self, op: Operand) -> Parts:
        if isinstance(op, Imm):
            return {None: (op.value, op.value) if isinstance(op.value, int) else FULL}
        if isinstance(op, Symbol):
            variable = self.function.variables.get(op.name) or self.module.variables.get(op.name)
            interval = (op.offset, op.offset)
            if op.name in self._params:
                return {Base("param_space", op.name, self._params[op.name]): interval}
            if variable is None:
                return {Base("unknown", op.name): interval}
            space = variable.space.split("::")[0]
            name = "dynamic" if space == "shared" and variable.size is None else op.name
            return {Base(space, name): interval}
        if isinstance(op, Vec):
            return _blur(_unite(self._constant_parts(x) for x in op.items))
        return {None: FULL}

    @cached_property
    def _inductions(self) -> dict[int, _Induction]:
        """Loop variables that grow by a constant per round, in loops whose number of rounds is known."""
        ssa = self.ssa
        stepping: dict[int, dict[int, int]] = {}
        for v, value in enumerate(ssa.values):
            if not value.is_phi:
                continue
            loop = self._loop_at.get(value.block)
            inside = {i for b, i in value.inputs if loop is not None and b in loop.blocks}
            if loop is None or len(inside) != 1 or len(value.inputs) - len(loop.latches) < 1:
                continue
            form = self.forms[inside.pop()]
            if form.terms == ((("value", v), 1),):
                stepping.setdefault(value.block, {})[v] = form.const
        found: dict[int, _Induction] = {}
        for header, variables in stepping.items():
            loop = self._loop_at[header]
            rounds = self._rounds(loop, variables)
            if rounds is not None:
                found |= {v: _Induction(loop, step, rounds) for v, step in variables.items()}
        return found

    @cached_property
    def _loop_at(self) -> dict[int, Loop]:
        return {loop.header: loop for loop in self.cfg.loops}

    def _rounds(self, loop: Loop, variables: dict[int, int]) -> int | None:
        """How often at most the loop goes round again, from a test of a loop variable against a fixed limit."""
        cfg = self.cfg
        best: int | None = None
        for b in loop.blocks:
            last = cfg.terminator(b)
            leaves = [t for t in cfg.successors[b] if t not in loop.blocks]
            if last is None or last.pred is None or len(leaves) != 1 or last.opcode != "bra":
                continue
            if not all(cfg.block_dominates(b, latch) for latch in loop.latches):
                continue
            setp = self.ssa.definition(self.ssa.read(last.index, last.pred[0]))
            if (
                setp is None
                or setp.opcode != "setp"
                or len(setp.operands) != 3
                or setp.mods[-1][0] not in "usb"
            ):
                continue
            stays = (leaves[0] == cfg.following(b)) != last.pred[1]
            tested = self.operand_affine(setp, setp.operands[1]).add(
                self.operand_affine(setp, setp.operands[2]), -1
            )
            rounds = self._repeats(loop, variables, tested, setp.mods[0], stays)
            if rounds is not None:
                best = rounds if best is None else min(best, rounds)
        return best

    def _repeats(
        self, loop: Loop, variables: dict[int, int], tested: Affine, comparison: str, stays: bool
    ) -> int | None:
        """How often in a row `tested comparison 0` is `stays`, when a loop variable in `tested` starts anew."""
        for v, step in variables.items():
            if dict(tested.terms).get(("value", v)) != 1 or not step:
                continue
            outside = [i for b, i in self.ssa.values[v].inputs if b not in loop.blocks]
            if len(outside) != 1:
                continue
            rest = Affine(tested.const, tuple((a, c) for a, c in tested.terms if a != ("value", v)))
            first = self.forms[outside[0]].add(rest).constant
            if first is None:
                continue
            low, high = clip(FULL, _SIGNED.get(comparison, comparison), 0, stays)
            if comparison in ("eq", "ne") and (comparison == "ne") == stays:
                return -first // step if -first % step == 0 and -first // step >= 0 else None
            if not low <= first <= high:
                return 0
            limit = high if step > 0 else low
            return int((limit - first) // step) + 1 if math.isfinite(limit) else None
        return None

    @cached_property
    def _thresholds(self) -> list[int]:
        """Constants of comparisons and their neighbours: bounds that loops are likely to keep."""
        found = {0, 1}
        for ins in self.function.body:
            if ins.opcode in ("setp", "min", "max"):
                for op in ins.operands:
                    if isinstance(op, Imm) and isinstance(op.value, int):
                        found.update((op.value - 1, op.value, op.value + 1))
        return sorted(found)

    def _widen(self, old: Interval, new: Interval) -> Interval:
        low, high = new
        if low < old[0]:
            low = next((t for t in reversed(self._thresholds) if t <= low), -INF)
        if high > old[1]:
            high = next((t for t in self._thresholds if t >= high), INF)
        return low, high

    def _solve(self) -> list[Parts]:
        ssa, body = self.ssa, self.function.body
        self.parts = [{} for _ in ssa.values]
        for v, value in enumerate(ssa.values):
            if value.index < 0 and not value.is_phi:
                self.parts[v] = (
                    self._special(value.register) if value.register in self._ranges else {UNKNOWN: FULL}
                )
        readers: dict[int, list[int]] = {}
        definers: list[int] = []
        for v, value in enumerate(ssa.values):
            for _, i in value.inputs:
                readers.setdefault(i, []).append(v)
            if value.index >= 0:
                for name in used(body[value.index]):
                    source = self._value(body[value.index], Reg(name))
                    if source is not None:
                        readers.setdefault(source, []).append(v)
            definers.append(v)
        rank = self._rank()
        pending = sorted(definers, key=rank.__getitem__)
        queued = set(pending)
        rounds: dict[int, int] = {}
        while pending:
            batch, pending = pending, []
            for v in batch:
                queued.discard(v)
                new = self._evaluate(v)
                old = self.parts[v]
                if new == old:
                    continue
                rounds[v] = rounds.get(v, 0) + 1
                if rounds[v] > _MAX_ROUNDS and self.ssa.values[v].inputs:
                    wide = self._widen if rounds[v] < 40 else lambda a, b: FULL
                    new = {b: wide(old[b], _hull(old[b], i)) if b in old else i for b, i in new.items()}
                    if new == old:
                        continue
                self.parts[v] = new
                for r in readers.get(v, ()):
                    if r not in queued:
                        queued.add(r)
                        pending.append(r)
            pending.sort(key=rank.__getitem__)
        return self.parts

    def _rank(self) -> dict[int, tuple[int, int]]:
        order = {b: n for n, b in enumerate(self.cfg.order)}
        last = len(order)
        return {
            v: (order.get(value.block, last) if value.block >= 0 else -1, value.index)
            for v, value in enumerate(self.ssa.values)
        }

    def _evaluate(self, v: int) -> Parts:
        value = self.ssa.values[v]
        steps = self._inductions.get(v)
        if steps is not None:
            first = _unite(self.parts[i] for b, i in value.inputs if b not in steps.loop.blocks)
            low, high = min(0, steps.step * steps.rounds), max(0, steps.step * steps.rounds)
            return {b: (a + low, z + high) for b, (a, z) in first.items()}
        merged = [self.parts[i] for _, i in value.inputs if self.parts[i]]
        if value.index < 0:
            return _unite(merged) if value.is_phi else self.parts[v]
        ins = self.function.body[value.index]
        names = defined(ins)
        position = next(n for n, r in enumerate(names) if r == value.register)
        computed = self._transfer(ins, position)
        return _unite([computed, *merged]) if value.inputs else computed

    def _transfer(self, ins: Instruction, position: int) -> Parts:
        """What one instruction puts into its `position`-th destination register."""
        ops, op, mods = ins.operands, ins.opcode, ins.mods

        def get(n: int) -> Parts:
            return self.operand_parts(ins, ops[n]) if not isinstance(ops[n], Vec) else self._pack(ins, ops[n])

        if op == "ld":
            return self._loaded(ins, position)
        if op in _PASS:
            if isinstance(ops[0], Vec):
                source = ops[1]
                if isinstance(source, Vec) and len(source.items) == len(ops[0].items):
                    return self.operand_parts(ins, source.items[position])
                # The low half of an address in shared memory, or of a descriptor, is all of it.
                return {None: FULL} if position else self.operand_parts(ins, source)
            if isinstance(ops[0], Pair) and position:
                return {None: (0, 1)}
            return get(1)
        if op == "mapa":
            own = get(1)
            if self.operand_affine(ins, ops[2]) == Affine(0, ((("reg", "%cluster_ctarank"), 1),)):
                return own
            return {
                (replace(b, peer=True) if b else Base("shared", "?", peer=True)): i for b, i in own.items()
            }
        if op in ("atom", "ldmatrix", "mbarrier", "tex", "wgmma", "tcgen05", "mma", "wmma"):
            return {None: FULL}
        if op == "selp":
            return self._select(ins)
        if op == "cvt":
            return self._convert(mods, get(1))
        if op == "elect":
            return {None: (0, 31)}
        if not _integer(mods) and op not in (
            "and",
            "or",
            "xor",
            "not",
            "shl",
            "shr",
            "prmt",
            "lop3",
            "shf",
            "bfi",
        ):
            return {None: FULL}
        args = [get(n) for n in range(1, len(ops))]
        return self._arithmetic(ins, args)

    def _pack(self, ins: Instruction, op: Operand) -> Parts:
        assert isinstance(op, Vec)
        items = [self.operand_parts(ins, x) for x in op.items]
        if len(items) == 2 and _only_int(items[1]) is not None and _only_int(items[0]) is None:
            return items[0]
        return _blur(_unite(items))

    def _loaded(self, ins: Instruction, position: int) -> Parts:
        size = TYPE_BYTES.get(ins.mods[-1], 0)
        if ins.mods[:1] == ("param",):
            where = self._kernel_param(ins, position)
            if where is not None:
                if size == 8:
                    return {Base("param", self.function.params[where[0]].name, *where): (0, 0)}
                return {None: (0, 2 ** (8 * size) - 1)} if "u" in ins.mods[-1] and size < 4 else {None: FULL}
            return {UNKNOWN: FULL} if size == 8 else {None: FULL}
        if size == 8:
            address = self.address_parts(ins, 1)
            names = {str(b) for b in address if b is not None} or {"memory"}
            return {Base("loaded", " or ".join(sorted(names))): FULL}
        if size < 4 and ins.mods[-1][0] in "ub":
            return {None: (0, 2 ** (8 * size) - 1)}
        return {None: FULL}

    def address_parts(self, ins: Instruction, operand: int) -> Parts:
        """Origins of an address operand, without its displacement."""
        op = ins.operands[operand]
        base = op.base if isinstance(op, Addr | TensorAddr) else op
        return {None: FULL} if base is None else self.operand_parts(ins, base)

    def _select(self, ins: Instruction) -> Parts:
        chosen, other = self.operand_parts(ins, ins.operands[1]), self.operand_parts(ins, ins.operands[2])
        condition = ins.operands[3]
        if isinstance(condition, Reg):
            chosen = self._under(ins, condition, True, ins.operands[1], chosen)
            other = self._under(ins, condition, False, ins.operands[2], other)
        return _unite([chosen, other])

    def _under(self, ins: Instruction, p: Reg, holds: bool, op: Operand, value: Parts) -> Parts:
        """`value` of operand `op` where `p` is known: `selp %i, 0, %j, %p` after `setp.eq %p, %j, 7`."""
        v = self._value(ins, p)
        setp = self.ssa.definition(v) if v is not None else None
        interval = _only_int(value)
        if setp is None or setp.opcode != "setp" or interval is None or len(setp.operands) != 3:
            return value
        left, right = setp.operands[1:]
        limit = self.operand_affine(setp, right).constant
        if limit is None or self.operand_affine(setp, left) != self.operand_affine(ins, op):
            return value
        low, high = clip(interval, setp.mods[0], limit, holds)
        return {None: (low, high)} if low <= high else {}

    @staticmethod
    def _convert(mods: tuple[str, ...], source: Parts) -> Parts:
        target = next((m for m in mods if m in TYPE_BYTES), "")
        if not target or target[0] not in "usb" or mods[-1][0] not in "usb":
            return {None: FULL}
        integer = _only_int(source)
        size = TYPE_BYTES[mods[-1]]
        if integer is None or size >= 4:
            return source
        full = (
            (0, 2 ** (8 * size) - 1)
            if mods[-1][0] != "s"
            else (-(2 ** (8 * size - 1)), 2 ** (8 * size - 1) - 1)
        )
        return {None: integer if full[0] <= integer[0] and integer[1] <= full[1] else full}

    def _arithmetic(self, ins: Instruction, args: list[Parts]) -> Parts:
        op, mods = ins.opcode, ins.mods
        ints = [_only_int(a) for a in args]
        if op in ("add", "sub") and len(args) == 2:
            return _sum(args[0], args[1], op == "sub", self._pointers)
        if op == "mad" and len(args) == 3:
            product = _mul(ints[0] or FULL, ints[1] or FULL) if "hi" not in mods else FULL
            return _sum({None: product}, args[2], False, self._pointers)
        if not args or any(not a for a in args):
            return {} if args else {None: FULL}
        if None in ints:
            return self._pointer_arithmetic(op, args, ints)
        return {None: _integer_result(op, mods, [i for i in ints if i is not None])}

    def _pointer_arithmetic(self, op: str, args: list[Parts], ints: list[Interval | None]) -> Parts:
        if op in ("mul", "mul24", "div", "rem", "popc", "clz", "setp", "set"):
            return {None: FULL}
        pointer = next(a for a, i in zip(args, ints, strict=True) if i is None)
        if op == "bfe" and len(args) == 3 and ints[1] and ints[2] and pointer is args[0]:
            (start, same), (length, _) = ints[1], ints[2]
            if start == same and length >= 14 and all(b and b.kind == "shared" for b in pointer):
                return _shifted(pointer, int(start))
        integer = next((i for i in ints if i is not None), None)
        if len(args) == 2 and integer is not None and math.isfinite(integer[0]) and math.isfinite(integer[1]):
            low, high = integer
            in_shared = all(b is not None and b.kind == "shared" for b in pointer)
            if op in ("shr", "shl") and low == high and in_shared:
                return _shifted(pointer, int(low) if op == "shr" else -int(low))
            if op == "and" and low == high:
                step = int(low) & -int(low)
                if in_shared and low > 0 and any(b and b.shift for b in pointer):
                    mask = int(low) | (step - 1)
                    if mask >= _DESCRIPTOR_MASK and mask & (mask + 1) == 0:
                        return {b: (lo - step + 1 if step > 1 else lo, hi) for b, (lo, hi) in pointer.items()}
                if low in _PEER_MASKS:
                    return {(replace(b, peer=True) if b else b): i for b, i in pointer.items()}
                if in_shared and low >= _DESCRIPTOR_MASK and int(low) & (int(low) + 1) == 0:
                    return pointer
                step = _alignment(int(low))
                if step:
                    return {b: (lo - step + 1, hi) for b, (lo, hi) in pointer.items()}
                if 0 <= low < 4096:
                    return {None: (0, low)}
            if op == "or" and low >= 0:
                if in_shared and low == high:
                    high = int(high) & _DESCRIPTOR_MASK if any(b and b.shift for b in pointer) else high
                return {b: (lo, hi + high) for b, (lo, hi) in pointer.items()}
            if op == "xor" and low >= 0:
                return {b: (lo - high, hi + high) for b, (lo, hi) in pointer.items()}
        return _blur(_unite(args))

    @cached_property
    def _pointers(self) -> frozenset[tuple[int, int]]:
        """Parameters that the text itself declares as pointers."""
        return frozenset((n, 0) for n, p in enumerate(self.function.params) if p.pointer_space)


# Results of these differ from one execution to the next although their operands are the same.
_EFFECTFUL = words(
    """ld ldu atom mbarrier shfl vote match elect activemask redux bar barrier call tex tld4 suld ldmatrix
    wgmma tcgen05 mma wmma multimem clusterlaunchcontrol stackrestore stacksave alloca"""
)


def _sum(a: Parts, b: Parts, minus: bool, pointers: frozenset[tuple[int, int]]) -> Parts:
    out: Parts = {}
    for base_a, i in a.items():
        for base_b, j in b.items():
            if base_a is not None and base_a.shift and j[0] == j[1] and math.isfinite(j[0]):
                j = (int(j[0]) & _DESCRIPTOR_MASK,) * 2  # the rest of the constant is for other fields
            offset = _add(i, _neg(j) if minus else j)
            if base_a is not None and base_b is not None:
                if minus:
                    pieces: Parts = {None: FULL}
                else:
                    pieces = dict.fromkeys(_which_pointer(base_a, base_b, pointers), FULL)
            elif base_b is not None and minus:
                pieces = {None: FULL}
            else:
                pieces = {base_a if base_a is not None else base_b: offset}
            for base, interval in pieces.items():
                out[base] = _hull(out[base], interval) if base in out else interval
    return out if len(out) <= MOST_PARTS else {UNKNOWN: FULL}


def _which_pointer(a: Base, b: Base, pointers: frozenset[tuple[int, int]]) -> tuple[Base, ...]:
    """Of two 64-bit values that are added, the one that is the pointer: a variable rather than a parameter, a
    declared pointer rather than a plain 64-bit parameter, field 0 of a struct rather than a later field."""
    if (a.kind == "param") != (b.kind == "param"):
        return (b if a.kind == "param" else a,) if "loaded" not in (a.kind, b.kind) else (a, b)
    if a.kind == b.kind == "param":
        declared = [x for x in (a, b) if (x.index, x.offset) in pointers]
        if len(declared) == 1:
            return (declared[0],)
        if a.index == b.index and a.offset != b.offset:
            return (min(a, b, key=lambda x: x.offset),)
    return (a, b)


def _integer_result(op: str, mods: tuple[str, ...], i: list[Interval]) -> Interval:
    """Interval of an integer operation on plain integers."""
    a = i[0]
    b = i[1] if len(i) > 1 else (0, 0)
    if op in ("mul", "mul24"):
        return _mul(a, b) if "hi" not in mods else FULL
    if op == "neg":
        return _neg(a)
    if op == "abs":
        return (0, max(abs(a[0]), abs(a[1])))
    if op == "min":
        return min(a[0], b[0]), min(a[1], b[1])
    if op == "max":
        return max(a[0], b[0]), max(a[1], b[1])
    exact = b[0] == b[1] and math.isfinite(b[0])
    if op == "shl" and exact and 0 <= b[0] < 64:
        return _mul(a, (1 << int(b[0]), 1 << int(b[0])))
    if op == "shr" and exact and 0 <= b[0] < 64:
        if a[0] < 0 and mods and mods[0][0] != "s":
            return (0, 2 ** (64 - int(b[0])) - 1)
        return _shift_right(a[0], int(b[0])), _shift_right(a[1], int(b[0]))
    if op == "and":
        for x, y in ((a, b), (b, a)):
            if y[0] >= 0 and math.isfinite(y[1]):
                return 0, min(x[1], y[1]) if x[0] >= 0 else y[1]
            if y[0] == y[1] and math.isfinite(y[0]) and (step := _alignment(int(y[0]))):
                return x[0] - step + 1, x[1]
        return (0, INF) if a[0] >= 0 or b[0] >= 0 else FULL
    if op in ("or", "xor") and a[0] >= 0 and b[0] >= 0:
        return (max(a[0], b[0]) if op == "or" else 0, a[1] + b[1])
    if op == "rem" and exact and b[0] > 0:
        return (0 if a[0] >= 0 else 1 - b[0], min(a[1], b[0] - 1) if a[0] >= 0 else b[0] - 1)
    if op == "div" and exact and b[0] > 0 and a[0] >= 0:
        return a[0] // b[0] if math.isfinite(a[0]) else a[0], a[1] // b[0] if math.isfinite(a[1]) else INF
    if op == "bfe" and len(i) > 2 and i[2][0] == i[2][1] and 0 < i[2][0] < 64 and mods and mods[0][0] == "u":
        return 0, 2 ** int(i[2][0]) - 1
    if op in ("popc", "clz", "bfind", "fns"):
        return 0, 64
    if op == "set":
        return -1, 1
    return FULL


def _shift_right(x: Number, by: int) -> Number:
    return int(x) >> by if math.isfinite(x) else x


def _alignment(mask: int) -> int:
    """2**k for a mask that clears the k lowest bits (as a 32- or 64-bit or negative number), else 0."""
    for width in (32, 64):
        inverted = ~mask & (2**width - 1)
        if 0 < inverted < 2**20 and inverted & (inverted + 1) == 0:
            return inverted + 1
    return 0


def _disjoint(a: Affine, b: Affine, provenance: Provenance) -> bool:
    """`a` is a multiple of 2**k and `b` lies in [0, 2**k): then `a | b` is `a + b`. Symbols count as
    aligned to nothing, so only plain integers qualify."""
    if any(atom[0] in ("sym", "param") for atom, _ in (*a.terms, *b.terms)):
        return False
    high = 0
    low_end = b.const
    for atom, c in b.terms:
        if atom[0] != "reg":
            return False
        low, top = provenance._ranges.get(str(atom[1]), FULL)
        if low < 0 or not math.isfinite(top) or c < 0:
            return False
        high += int(c * top)
    high += b.const
    return low_end >= 0 and all(
        c % (1 << high.bit_length()) == 0 for c in (a.const, *(c for _, c in a.terms))
    )


def clip(interval: Interval, comparison: str, limit: int, holds: bool) -> Interval:
    """The part of `interval` where `x comparison limit` holds (or does not)."""
    low, high = interval
    opposite = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq",
                "lo": "hs", "ls": "hi", "hi": "ls", "hs": "lo"}  # fmt: skip
    c = comparison if holds else opposite.get(comparison, "")
    if c in ("lt", "lo"):
        high = min(high, limit - 1)
    elif c in ("le", "ls"):
        high = min(high, limit)
    elif c in ("gt", "hi"):
        low = max(low, limit + 1)
    elif c in ("ge", "hs"):
        low = max(low, limit)
    elif c == "eq":
        low, high = max(low, limit), min(high, limit)
    elif c == "ne":
        low = low + 1 if low == limit else low
        high = high - 1 if high == limit else high
    return low, high


def _is_base(atom: Atom, base: Base) -> bool:
    if atom[0] == "sym":
        return base.kind in ("shared", "global", "const", "local", "param_space") and (
            base.name == atom[1] or base.name == "dynamic"
        )
    return base.kind == "param" and atom[0] == "param" and atom[1:] == (base.index, base.offset)


def _integer(mods: tuple[str, ...]) -> bool:
    return bool(mods) and mods[-1][0] in "usb" and mods[-1] in TYPE_BYTES


def _widens(mods: tuple[str, ...]) -> bool:
    """`cvt.u64.u32`, `cvt.s64.s32`, and 64 to 32 bits of a shared address: the value stays."""
    return mods[-1] in ("u32", "s32", "u64", "s64", "b32", "b64") and mods[-2] in ("u32", "s32", "u64", "s64")


def _special_ranges(function: Function, cluster_size: int) -> dict[str, Interval]:
    """What the launch bounds say about special registers: PTX ISA, "Special Registers"."""
    exact = "reqntid" in function.directives
    bound = function.directives.get("reqntid") or function.directives.get("maxntid") or ()
    sizes = [int(x) for x in bound if x.isdigit()]
    sizes += [1] * (3 - len(sizes)) if sizes else [1024, 1024, 64]
    cluster = [int(x) for x in function.directives.get("reqnctapercluster", ()) if x.isdigit()]
    ranges: dict[str, Interval] = {}
    for axis, size in zip("xyz", sizes, strict=True):
        ranges[f"%tid.{axis}"] = (0, size - 1)
        ranges[f"%ntid.{axis}"] = (size if exact else 1, size)
        ranges[f"%ctaid.{axis}"] = (0, 2**31 - 1)
        ranges[f"%nctaid.{axis}"] = (1, 2**31 - 1)
        ranges[f"%clusterid.{axis}"] = (0, 2**31 - 1)
        ranges[f"%nclusterid.{axis}"] = (1, 2**31 - 1)
        ranges[f"%cluster_ctaid.{axis}"] = (0, cluster_size - 1)
        ranges[f"%cluster_nctaid.{axis}"] = (1, cluster_size)
    total = math.prod(cluster) if cluster else cluster_size
    ranges["%cluster_ctarank"] = (0, total - 1)
    ranges["%cluster_nctarank"] = (total if cluster else 1, total)
    ranges["%laneid"] = (0, 31)
    ranges["%warpid"] = (0, 63)
    ranges["%nwarpid"] = (1, 64)
    return ranges
