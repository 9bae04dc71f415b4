"""Which definition of a register an instruction reads: static single assignment over one function.

Registers with one definition need no work; for the others phi functions are placed on iterated dominance
frontiers (Cytron et al., "Efficiently Computing Static Single Assignment Form and the Control Dependence
Graph", 1991). A predicated definition keeps the old value where the predicate is false, so it also reads
the old value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .cfg import CFG
from .effects import defined, used
from .ir import Instruction


@dataclass(slots=True)
class Value:
    """One value of one register.

    `index` is the defining instruction, or -1 for a phi at the head of `block`, a special register, or a
    register read before any definition. `inputs` holds the merged values of a phi with their blocks; a
    predicated definition has one input, the old value.
    """

    register: str
    index: int = -1
    block: int = -1
    inputs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_phi(self) -> bool:
        return self.index < 0 and self.block >= 0


class SSA:
    """Values of one function, numbered from 0; definitions come before uses except round loops."""

    def __init__(self, cfg: CFG) -> None:
        self.cfg = cfg
        self.values: list[Value] = []
        self._single: dict[str, int] = {}
        self._read: dict[tuple[int, str], int] = {}
        self._defined: dict[tuple[int, str], int] = {}
        body = cfg.function.body
        sites: dict[str, list[int]] = {}
        for ins in body:
            for r in defined(ins):
                sites.setdefault(r, []).append(ins.index)
        self._undefined = self._new(Value("?"))
        for ins in body:
            for r in used(ins):
                if r not in sites and r not in self._single:
                    self._single[r] = self._new(Value(r))
        multiple = {r for r, at in sites.items() if len(at) > 1}
        phis = self._place_phis(sites, multiple)
        self._rename(body, multiple, phis)

    def read(self, index: int, register: str) -> int:
        """The value of `register` just before instruction `index`, which reads it."""
        found = self._single.get(register)
        if found is None:
            found = self._read.get((index, register))
        return self._undefined if found is None else found

    def written(self, index: int, register: str) -> int:
        """The value that (reachable) instruction `index` gives `register`."""
        found = self._defined.get((index, register))
        return self.read(index, register) if found is None else found

    def definition(self, value: int) -> Instruction | None:
        """The instruction that computes a value, None for phis and for registers without a definition."""
        index = self.values[value].index
        return self.cfg.function.body[index] if index >= 0 else None

    def _new(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _place_phis(self, sites: dict[str, list[int]], multiple: set[str]) -> dict[int, list[str]]:
        cfg = self.cfg
        if not multiple:
            return {}
        frontier: dict[int, set[int]] = {}
        for b in cfg.order:
            preds = [p for p in cfg.predecessors[b] if p in cfg.reachable]
            if len(preds) > 1:
                for p in preds:
                    while p != cfg.idom[b]:
                        frontier.setdefault(p, set()).add(b)
                        p = cfg.idom[p]
        needed = self._read_before_written(multiple)
        phis: dict[int, list[str]] = {}
        for register in sorted(multiple):
            live = needed.get(register)
            if not live:
                continue
            work = [cfg.block_of[i] for i in sites[register]]
            placed: set[int] = set()
            while work:
                for b in frontier.get(work.pop(), ()):
                    if b not in placed and b != cfg.exit:
                        placed.add(b)
                        work.append(b)
                        phis.setdefault(b, []).append(register)
        return phis

    def _read_before_written(self, multiple: set[str]) -> dict[str, set[int]]:
        """Blocks in which a register is read before it is written: one without any needs no phi at all."""
        out: dict[str, set[int]] = {}
        for block in self.cfg.blocks:
            written: set[str] = set()
            for i in range(block.start, block.end):
                ins = self.cfg.function.body[i]
                for r in used(ins):
                    if r in multiple and r not in written:
                        out.setdefault(r, set()).add(block.index)
                for r in defined(ins):
                    if ins.pred is not None and r in multiple and r not in written:
                        out.setdefault(r, set()).add(block.index)
                    if ins.pred is None:
                        written.add(r)
        return out

    def _rename(self, body: list[Instruction], multiple: set[str], phis: dict[int, list[str]]) -> None:
        cfg = self.cfg
        children: dict[int, list[int]] = {}
        for b in cfg.order[1:]:
            if b != cfg.exit:
                children.setdefault(cfg.idom[b], []).append(b)
        phi_values: dict[tuple[int, str], int] = {}
        stacks: dict[str, list[int]] = {}

        def top(register: str) -> int:
            stack = stacks.get(register)
            if not stack:
                undefined = self._new(Value(register))
                stacks[register] = stack = [undefined]
            return stack[-1]

        work: list[tuple[int, list[str] | None]] = [(0, None)]
        while work:
            b, pushed = work.pop()
            if pushed is not None:
                for r in pushed:
                    stacks[r].pop()
                continue
            pushed = []
            for r in phis.get(b, ()):
                v = phi_values[b, r] = self._phi(b, r, phi_values)
                stacks.setdefault(r, []).append(v)
                pushed.append(r)
            for i in range(cfg.blocks[b].start, cfg.blocks[b].end):
                ins = body[i]
                for r in used(ins):
                    if r in multiple:
                        self._read[i, r] = top(r)
                for r in defined(ins):
                    value = Value(r, i, b)
                    if r not in multiple:
                        self._single[r] = self._new(value)
                        continue
                    if ins.pred is not None:
                        value.inputs.append((b, top(r)))
                    v = self._defined[i, r] = self._new(value)
                    stacks.setdefault(r, []).append(v)
                    pushed.append(r)
            for s in cfg.successors[b]:
                for r in phis.get(s, ()):
                    v = phi_values[s, r] = self._phi(s, r, phi_values)
                    self.values[v].inputs.append((b, top(r)))
            work.append((b, pushed))
            work.extend((c, None) for c in reversed(children.get(b, ())))

    def _phi(self, block: int, register: str, known: dict[tuple[int, str], int]) -> int:
        found = known.get((block, register))
        return self._new(Value(register, -1, block)) if found is None else found
