"""One kernel as one body: calls of `.func`s that the module defines are replaced by the callee's
instructions.

All later analyses then see the whole kernel, in the context of each call, and none of them needs to know
about calls. What cannot be inlined stays a `call`: functions without a body, calls through a register,
recursion, and anything beyond `MOST_INSTRUCTIONS`. Rules see those by their CALL effect.

Call parameters live in the `.param` space. Inside an inlined call they become registers, one per byte
offset, so that `st.param [arg+8], %rd1` in the caller and `ld.param %rd7, [f_param_0+8]` in the callee are
plain moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .ir import Addr, Function, Instruction, Module, Not, Operand, Pair, Reg, Symbol, TensorAddr, Vec

MOST_INSTRUCTIONS = 1_000_000
DEEPEST = 32


def inline(module: Module, kernel: Function) -> Function:
    """A copy of `kernel` with calls expanded; the kernel itself when it makes none.

    `index` is renumbered; `line`, `loc` and `text` stay those of the original instruction.
    """
    if not any(i.opcode == "call" for i in kernel.body):
        return kernel
    flat = replace(
        kernel,
        body=[],
        labels={},
        variables=dict(kernel.variables),
        registers=dict(kernel.registers),
        branch_targets={},
    )
    _Inliner(module, flat).copy(kernel, _Names("", {}), None, (kernel.name,))
    return flat


class _Names:
    """How names of one inlined copy read in the flat body. `cells` maps formal parameters to actual ones."""

    def __init__(self, suffix: str, cells: dict[str, str]) -> None:
        self.suffix = suffix
        self.cells = cells

    def register(self, name: str, known: Iterable[str]) -> str:
        return name + self.suffix if name in known else name

    def variable(self, name: str, known: Iterable[str]) -> str:
        if name in self.cells:
            return self.cells[name]
        return name + self.suffix if name in known else name


class _Inliner:
    def __init__(self, module: Module, flat: Function) -> None:
        self.module = module
        self.flat = flat
        self.copies = 0

    def copy(self, source: Function, names: _Names, end: str | None, chain: tuple[str, ...]) -> None:
        """Append `source`. `end` is the label that its `ret` jumps to, None in the kernel itself."""
        flat = self.flat
        at = [0] * (len(source.body) + 1)
        passed = self._passed(source, chain)
        for ins in source.body:
            at[ins.index] = len(flat.body)
            callee = self._callee(ins, chain)
            if callee is not None:
                self._call(ins, callee, source, names, chain)
            elif end is not None and ins.opcode == "ret":
                self._emit(
                    replace(ins, opcode="bra", mods=(), operands=(Symbol(end),)), source, names, passed
                )
            else:
                self._emit(ins, source, names, passed)
        at[len(source.body)] = len(flat.body)
        for label, index in source.labels.items():
            flat.labels[label + names.suffix] = at[index]
        for name, targets in source.branch_targets.items():
            flat.branch_targets[name + names.suffix] = tuple(t + names.suffix for t in targets)

    def _callee(self, ins: Instruction, chain: tuple[str, ...]) -> Function | None:
        if ins.opcode != "call" or not isinstance(ins.operands[1], Symbol):
            return None
        callee = self.module.functions.get(ins.operands[1].name)
        if callee is None or not callee.has_body or callee.name in chain or len(chain) > DEEPEST:
            return None
        if len(self.flat.body) + len(callee.body) > MOST_INSTRUCTIONS:
            return None
        return callee

    def _passed(self, source: Function, chain: tuple[str, ...]) -> set[str]:
        """`.param` variables of `source` that carry values of inlined calls, or its formals when inlined."""
        found = {v.name for v in (*source.params, *source.returns)} if len(chain) > 1 else set()
        for ins in source.body:
            if self._callee(ins, chain) is not None:
                for operand in (ins.operands[0], ins.operands[2]):
                    if isinstance(operand, Vec):
                        found |= {x.name for x in operand.items if isinstance(x, Symbol)}
        return found

    def _call(
        self, ins: Instruction, callee: Function, source: Function, names: _Names, chain: tuple[str, ...]
    ) -> None:
        self.copies += 1
        suffix = f"@{self.copies}"
        inner = _Names(suffix, {})
        results, _, arguments = ins.operands[:3]
        assert isinstance(results, Vec) and isinstance(arguments, Vec)
        moves: list[tuple[Operand, Operand, str]] = []
        after: list[tuple[Operand, Operand, str]] = []
        pairs = [(a, f, True) for a, f in zip(arguments.items, callee.params, strict=False)]
        pairs += [(a, f, False) for a, f in zip(results.items, callee.returns, strict=False)]
        for actual, formal, into in pairs:
            if isinstance(actual, Symbol) and formal.space == "param":
                inner.cells[formal.name] = names.variable(actual.name, source.variables)
            elif into:
                target: Operand = Reg(formal.name + suffix)
                if formal.space == "param":
                    inner.cells[formal.name] = formal.name + suffix
                    target = Reg(f"{formal.name}{suffix}+0")
                moves.append((target, self._operand(actual, source, names), formal.type))
            else:
                result = Reg(formal.name + suffix if formal.space == "reg" else f"{formal.name}{suffix}+0")
                if formal.space == "param":
                    inner.cells[formal.name] = formal.name + suffix
                after.append((self._operand(actual, source, names), result, formal.type))
        for name, type_ in callee.registers.items():
            self.flat.registers[name + suffix] = type_
        for name, variable in callee.variables.items():
            if name not in inner.cells:
                self.flat.variables[name + suffix] = replace(variable, name=name + suffix)
        done = f"return{suffix}"
        skipped = f"skipped{suffix}"
        pred = (names.register(ins.pred[0], source.registers), not ins.pred[1]) if ins.pred else None
        if pred:
            self._append(replace(ins, opcode="bra", mods=(), operands=(Symbol(skipped),), pred=pred))
        for to, value, type_ in moves:
            self._append(replace(ins, opcode="mov", mods=(type_,), operands=(to, value), pred=None))
        self.copy(callee, inner, done, (*chain, callee.name))
        self.flat.labels[done] = len(self.flat.body)
        for to, value, type_ in after:
            self._append(replace(ins, opcode="mov", mods=(type_,), operands=(to, value), pred=None))
        self.flat.labels[skipped] = len(self.flat.body)

    def _emit(self, ins: Instruction, source: Function, names: _Names, passed: set[str]) -> None:
        if ins.opcode in ("ld", "st") and ins.mods[:1] == ("param",):
            at = 1 if ins.opcode == "ld" else 0
            address = ins.operands[at] if len(ins.operands) == 2 else None
            if isinstance(address, Addr) and isinstance(address.base, Symbol) and address.base.name in passed:
                self._append(self._move(ins, address, ins.operands[1 - at], source, names))
                return
        operands = tuple(self._operand(op, source, names) for op in ins.operands)
        pred = (names.register(ins.pred[0], source.registers), ins.pred[1]) if ins.pred else None
        self._append(replace(ins, operands=operands, pred=pred))

    def _move(
        self, ins: Instruction, address: Addr, value: Operand, source: Function, names: _Names
    ) -> Instruction:
        """`ld.param` or `st.param` of a call parameter as a `mov` between registers."""
        assert isinstance(address.base, Symbol)
        cell = names.variable(address.base.name, source.variables)
        width = {"8": 1, "6": 2, "2": 4, "4": 8}.get(ins.mods[-1][-1], 8)
        items = value.items if isinstance(value, Vec) else (value,)
        cells = [Reg(f"{cell}+{address.offset + n * width}") for n in range(len(items))]
        for c in cells:
            self.flat.registers.setdefault(c.name, ins.mods[-1])
        inside = [self._operand(x, source, names) for x in items]
        here: Operand = Vec(tuple(cells)) if len(cells) > 1 else cells[0]
        there: Operand = Vec(tuple(inside)) if len(inside) > 1 else inside[0]
        operands = (there, here) if ins.opcode == "ld" else (here, there)
        pred = (names.register(ins.pred[0], source.registers), ins.pred[1]) if ins.pred else None
        return replace(ins, opcode="mov", mods=(ins.mods[-1],), operands=operands, pred=pred)

    def _append(self, ins: Instruction) -> None:
        self.flat.body.append(replace(ins, index=len(self.flat.body)))

    def _operand(self, op: Operand, source: Function, names: _Names) -> Operand:
        if not names.suffix:
            return op
        if isinstance(op, Reg):
            return Reg(names.register(op.name, source.registers))
        if isinstance(op, Symbol):
            if op.name in source.labels or op.name in source.branch_targets or op.name in source.prototypes:
                return Symbol(op.name + names.suffix, op.offset)
            return Symbol(names.variable(op.name, source.variables), op.offset)
        if isinstance(op, Addr):
            base = self._operand(op.base, source, names) if op.base is not None else None
            assert base is None or isinstance(base, Reg | Symbol)
            return Addr(base, op.offset)
        if isinstance(op, Vec):
            return Vec(tuple(self._operand(x, source, names) for x in op.items))
        if isinstance(op, Not):
            return Not(Reg(names.register(op.item.name, source.registers)))
        if isinstance(op, Pair):
            return Pair(self._operand(op.first, source, names), self._operand(op.second, source, names))
        if isinstance(op, TensorAddr):
            base = self._operand(op.base, source, names)
            assert isinstance(base, Reg | Symbol)
            return TensorAddr(base, tuple(self._operand(x, source, names) for x in op.coordinates))
        return op
