"""Who executes an instruction: which threads of the CTA, which CTAs of the cluster.

The conditions that hold at an instruction are its own predicate and the branch conditions of every edge
that all paths to it pass. Conditions on the thread, lane and warp index, on `elect.sync`, and on the CTA's
rank are turned into ranges; every other condition is *uniform* (all threads of the CTA agree on it) or
*varying* (they may not).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

from .cfg import CFG
from .effects import used
from .ir import Imm, Instruction, Not, Operand, Pair, Reg
from .provenance import Affine, Interval, Provenance, clip
from .ssa import SSA


class Uniform(IntEnum):
    """Over which threads a value is the same. A mix of values is as uniform as its least uniform part."""

    VARYING = 0
    WARP = 1
    CTA = 2


@dataclass(frozen=True, slots=True)
class Fact:
    """The predicate value `value` is `holds` here. `waited` marks what is only known because a loop has ended: it
    keeps no thread away."""

    value: int
    holds: bool
    waited: bool = False


ALL_THREADS: Interval = (0, 1023)
ALL_LANES: Interval = (0, 31)
ALL_RANKS: Interval = (0, float("inf"))


@dataclass(frozen=True, slots=True)
class Executors:
    """A set of threads, as the product of ranges.

    `threads`, `lanes`, `warps` bound the linear thread index, the lane and the warp; `ranks` the CTA's rank
    in its cluster, or the block index. `elected`: at most one lane of each warp. `uniform` and `varying`
    tell that other conditions apply, which all threads of the CTA share or not: the set may then be any
    part of the ranges.
    """

    threads: Interval = ALL_THREADS
    lanes: Interval = ALL_LANES
    warps: Interval = (0, 31)
    ranks: Interval = ALL_RANKS
    elected: bool = False
    uniform: bool = False
    varying: bool = False

    @property
    def one_warp(self) -> bool:
        """All executing threads of a CTA are in one warp."""
        return self.warps[0] == self.warps[1]

    @property
    def one_lane(self) -> bool:
        """At most one thread of each warp."""
        return self.elected or self.lanes[0] == self.lanes[1] or self.threads[0] == self.threads[1]

    @property
    def one_thread(self) -> bool:
        """At most one thread of each CTA, always the same one."""
        return self.threads[0] == self.threads[1] or (self.one_warp and self.one_lane)

    @property
    def everyone(self) -> bool:
        """All threads of the CTA, whenever one of them."""
        return (self.threads, self.lanes, self.warps) == (ALL_THREADS, ALL_LANES, (0, 31)) and not (
            self.elected or self.varying
        )

    def includes(self, other: Executors) -> bool:
        """Whenever a thread of `other` executes, that thread is surely among these."""
        if self.varying or self.uniform:
            return self == other
        if self.elected and not other.elected and not other.one_thread:
            return False
        ranges = [(self.threads, other.threads), (self.warps, other.warps), (self.ranks, other.ranks)]
        if not (self.elected and other.elected):
            ranges.append((self.lanes, other.lanes))
        return all(a[0] <= b[0] and b[1] <= a[1] for a, b in ranges)

    def disjoint(self, other: Executors) -> bool:
        """No thread of a CTA is in both."""
        pairs = ((self.threads, other.threads), (self.lanes, other.lanes), (self.warps, other.warps))
        return any(a[1] < b[0] or b[1] < a[0] for a, b in pairs)

    def __str__(self) -> str:
        if self.threads[0] == self.threads[1]:
            who = f"thread {self.threads[0]}"
        elif self.warps == (0, 31):
            who = "all threads" if not self.one_lane else "one lane per warp"
        else:
            which = f"warp {self.warps[0]}" if self.one_warp else f"warps {self.warps[0]}-{self.warps[1]}"
            who = f"one lane of {which}" if self.one_lane and self.one_warp else which
            if self.one_lane and not self.one_warp:
                who = f"one lane of each of {which}"
        if not self.one_lane and self.lanes != ALL_LANES:
            who += f", lanes {self.lanes[0]}-{self.lanes[1]}"
        first, last = self.threads
        if (first, last) != ALL_THREADS and first != last and not (first % 32 == 0 and (last + 1) % 32 == 0):
            who = f"threads {first}-{last}"
        if self.ranks != ALL_RANKS:
            low, high = self.ranks
            who += f", CTA {low}" if low == high else f", CTAs {low}-{high}"
        return who + (", some" if self.varying else "") + (", sometimes" if self.uniform else "")


class Threads:
    """Executors and facts for every instruction of one function."""

    def __init__(self, cfg: CFG, ssa: SSA, provenance: Provenance) -> None:
        self.cfg, self.ssa, self.provenance = cfg, ssa, provenance
        self._body = cfg.function.body
        first = provenance._ranges["%tid.x"]
        rows, planes = provenance._ranges["%tid.y"][1] + 1, provenance._ranges["%tid.z"][1] + 1
        known = "reqntid" in cfg.function.directives
        axes = {r for i in self._body for r in i.text.replace(",", " ").split()}
        # Without launch bounds, a kernel that never looks at the other axes is taken to have one.
        self._flat = (rows, planes) == (1, 1) if known else not axes & {"%tid.y", "%tid.z"}
        width = int(first[1]) + 1
        self._linear = {("reg", "%tid.x"): 1, ("reg", "%tid.y"): width, ("reg", "%tid.z"): width * rows}
        self._count = int(width * rows * planes) if known else 1024
        self._facts: dict[int, tuple[Fact, ...]] = {}
        self._executors: dict[int, Executors] = {}
        self._block_executors: dict[int, Executors] = {}
        self._ranges: dict[int, list[tuple[Affine, Interval]]] = {}
        self._conditions: dict[Fact, tuple[Executors, ...]] = {}

    # -- facts --------------------------------------------------------------------------------------------

    def facts_of_block(self, block: int) -> tuple[Fact, ...]:
        """Predicate values that are known whenever control is in `block`; not those of loops that have ended."""
        for b, parent in self._unknown_chain(block, self._facts):
            known = self._facts[parent] if parent >= 0 else ()
            edge = self._edge_fact(b)
            if edge is not None and not edge.waited:
                known = (*(f for f in known if f.value != edge.value), edge)
            self._facts[b] = known
        return self._facts[block]

    def _unknown_chain(self, block: int, done: dict[int, Any]) -> list[tuple[int, int]]:
        """Blocks above `block` in the dominator tree that are not in `done`, top first, each with its parent."""
        chain: list[tuple[int, int]] = []
        b = block
        while b >= 0 and b not in done:
            parent = self.cfg.idom[b]
            chain.append((b, parent if parent != b else -1))
            b = chain[-1][1]
        return chain[::-1]

    def _edge_fact(self, block: int) -> Fact | None:
        """What holds on the only edge into a block, edges that loop back to it aside: they change no value that was
        computed before the loop."""
        before = self.cfg.predecessors[block]
        if len(before) > 1:
            before = [p for p in before if not self.cfg.block_dominates(block, p)]
        return self.edge_fact(before[0], block) if len(before) == 1 else None

    def edge_fact(self, block: int, target: int) -> Fact | None:
        """The predicate value with which control goes from `block` to its successor `target`, None without one."""
        last = self.cfg.terminator(block)
        if last is None or last.pred is None or last.opcode == "trap":
            return None
        successors = self.cfg.successors[block]
        if len(successors) < 2 or target not in successors:
            return None
        register, negated = last.pred
        taken = target != self.cfg.following(block)
        waited = (block, target) in self.cfg.loop_ends
        return Fact(self.ssa.read(last.index, register), taken != negated, waited)

    def facts(self, index: int) -> tuple[Fact, ...]:
        """Predicate values known whenever instruction `index` executes."""
        ins = self._body[index]
        known = self.facts_of_block(self.cfg.block_of[index])
        if ins.pred is None:
            return known
        return (*known, Fact(self.ssa.read(index, ins.pred[0]), not ins.pred[1]))

    def ranges(self, index: int) -> list[tuple[Affine, Interval]]:
        """Ranges of forms that the conditions at `index` imply: `%tid.x < 7` gives (%tid.x, [.., 6])."""
        block = self.cfg.block_of[index]
        for b, parent in self._unknown_chain(block, self._ranges):
            edge = self._edge_fact(b)
            known = self._ranges[parent] if parent >= 0 else []
            self._ranges[b] = [*known, *self._ranges_of(edge)] if edge and not edge.waited else known
        pred = self._body[index].pred
        if pred is None:
            return self._ranges[block]
        own = Fact(self.ssa.read(index, pred[0]), not pred[1])
        return [*self._ranges[block], *self._ranges_of(own)]

    def _ranges_of(self, fact: Fact) -> list[tuple[Affine, Interval]]:
        compared = self._comparisons(fact.value, fact.holds)
        return [pair for setp, holds in compared for pair in self._implied(*self._compared(setp, holds))]

    # -- executors ----------------------------------------------------------------------------------------

    def executors(self, index: int) -> Executors:
        """Who executes instruction `index`."""
        pred = self._body[index].pred
        who = self.executors_of_block(self.cfg.block_of[index])
        if pred is None:
            return who
        found = self._executors.get(index)
        if found is None:
            found = self.restrict(who, Fact(self.ssa.read(index, pred[0]), not pred[1]))
            self._executors[index] = found
        return found

    def executors_of_block(self, block: int) -> Executors:
        """Who enters a block, by the branch conditions alone."""
        for b, parent in self._unknown_chain(block, self._block_executors):
            who = self._block_executors[parent] if parent >= 0 else Executors()
            edge = self._edge_fact(b)
            self._block_executors[b] = who if edge is None else self.restrict(who, edge)
        return self._block_executors[block]

    def restrict(self, who: Executors, fact: Fact) -> Executors:
        if fact.waited:
            return who
        understood = False
        for setp, holds in self._comparisons(fact.value, fact.holds):
            narrowed = self._apply(who, setp, holds)
            understood |= narrowed is not None
            who = narrowed or self._blame(who, fact.value)
        if not understood and not self._comparisons(fact.value, fact.holds):
            who = self._blame(who, fact.value)
        return who

    def _blame(self, who: Executors, value: int) -> Executors:
        if self.level(value) == Uniform.CTA:
            return replace(who, uniform=True)
        return replace(who, varying=True)

    def _comparisons(self, value: int, holds: bool, depth: int = 0) -> list[tuple[Instruction, bool]]:
        """The `setp` and `elect` instructions whose results `value == holds` settles."""
        ins = self.ssa.definition(value)
        if ins is None or depth > 16 or self.ssa.values[value].inputs:
            return []
        op, operands = ins.opcode, ins.operands
        if op == "elect":
            return [(ins, holds)]
        if op == "setp":
            pair = operands[0]
            if isinstance(pair, Pair) and isinstance(pair.second, Reg) and self._is(ins, pair.second, value):
                holds = not holds
            if len(operands) == 4:
                joined = next((m for m in ins.mods if m in ("and", "or", "xor")), "")
                if (joined == "and" and holds) or (joined == "or" and not holds):
                    return [(ins, holds), *self._operand_comparisons(ins, operands[3], holds, depth)]
                return []
            inner = self.tested_predicate(ins)
            if inner is not None:
                negate = (ins.mods[0] == "ne") == holds
                return self._comparisons(inner, negate, depth + 1)
            return [(ins, holds)]
        if op in ("mov", "not") and "pred" in ins.mods:
            return self._operand_comparisons(ins, operands[1], holds != (op == "not"), depth)
        if op in ("and", "or") and "pred" in ins.mods and (op == "and") == holds:
            return [
                *self._operand_comparisons(ins, operands[1], holds, depth),
                *self._operand_comparisons(ins, operands[2], holds, depth),
            ]
        if (
            op == "xor"
            and "pred" in ins.mods
            and isinstance(operands[2], Imm)
            and operands[2].value in (1, -1)
        ):
            return self._operand_comparisons(ins, operands[1], not holds, depth)
        return []

    def _is(self, ins: Instruction, register: Reg, value: int) -> bool:
        return self.ssa.values[value].register == register.name and self.ssa.values[value].index == ins.index

    def _operand_comparisons(
        self, ins: Instruction, op: Operand, holds: bool, depth: int
    ) -> list[tuple[Instruction, bool]]:
        if isinstance(op, Not):
            op, holds = op.item, not holds
        if not isinstance(op, Reg):
            return []
        return self._comparisons(self.ssa.read(ins.index, op.name), holds, depth + 1)

    def tested_predicate(self, setp: Instruction) -> int | None:
        """The predicate behind `selp %r, 1, 0, %p; setp.ne %q, %r, 0`, None for any other instruction."""
        if setp.opcode != "setp" or len(setp.operands) != 3:
            return None
        left, right = setp.operands[1], setp.operands[2]
        if setp.mods[0] not in ("eq", "ne") or not isinstance(left, Reg):
            return None
        if self.provenance.operand_affine(setp, right).constant != 0 or left.name.startswith("%tid"):
            return None
        if left.name not in self.cfg.function.registers:
            return None
        selp = self.ssa.definition(self.ssa.read(setp.index, left.name))
        if selp is None or selp.opcode != "selp" or selp.pred is not None:
            return None
        values = [self.provenance.operand_affine(selp, o).constant for o in selp.operands[1:3]]
        p = selp.operands[3]
        return (
            self.ssa.read(selp.index, p.name) if values in ([1, 0], [-1, 0]) and isinstance(p, Reg) else None
        )

    def _compared(self, setp: Instruction, holds: bool) -> tuple[Affine | None, Interval]:
        """`form in interval` for a comparison of a form with a constant."""
        if setp.opcode != "setp" or len(setp.operands) < 3 or setp.mods[-1][0] == "f":
            return None, (0, 0)
        left, right = setp.operands[1], setp.operands[2]
        a, b = self.provenance.operand_affine(setp, left), self.provenance.operand_affine(setp, right)
        comparison = setp.mods[0]
        if a.constant is not None and b.constant is None:
            swapped = {
                "lt": "gt",
                "le": "ge",
                "gt": "lt",
                "ge": "le",
                "lo": "hi",
                "ls": "hs",
                "hi": "lo",
                "hs": "ls",
            }
            a, b, comparison = b, a, swapped.get(comparison, comparison)
        if b.constant is None or not a.terms:
            return None, (0, 0)
        a = self._plain(a)
        if not a.terms:
            return None, (0, 0)
        limit = b.constant - a.const
        form = Affine(0, a.terms)
        unsigned = setp.mods[-1][0] == "u" or comparison in ("lo", "ls", "hi", "hs")
        low, high = self.provenance.interval(form)
        start: Interval = (max(low, 0) if unsigned and a.const == 0 else low, high)
        return form, clip(start, comparison, limit, holds)

    def _plain(self, form: Affine) -> Affine:
        """Without the atoms that are always zero: `%tid.y` of a one-dimensional block."""
        terms = tuple((atom, c) for atom, c in form.terms if self.provenance.atom_interval(atom) != (0, 0))
        return form if len(terms) == len(form.terms) else Affine(form.const, terms)

    def _apply(self, who: Executors, setp: Instruction, holds: bool) -> Executors | None:
        """Narrow `who` by one comparison, None if it says nothing about threads."""
        if setp.opcode == "elect":
            return replace(who, elected=True) if holds else None
        narrowed = None
        for form, interval in self._implied(*self._compared(setp, holds)):
            narrowed = self._narrow(narrowed or who, form, interval) or narrowed
        return narrowed

    def _implied(self, form: Affine | None, interval: Interval) -> list[tuple[Affine, Interval]]:
        """`form in interval`, or what it says of its parts: `a | b == 0` means that both are 0."""
        if form is None:
            return []
        if interval == (0, 0) and len(form.terms) == 1 and form.terms[0][0][0] == "value":
            ins = self.ssa.definition(int(form.terms[0][0][1]))
            if ins is not None and ins.opcode == "or" and ins.pred is None:
                parts = [self._plain(self.provenance.operand_affine(ins, op)) for op in ins.operands[1:]]
                return [pair for part in parts for pair in self._implied(part, interval)]
        return [(form, interval)]

    def _narrow(self, who: Executors, form: Affine, interval: Interval) -> Executors | None:
        linear = {a: c for a, c in self._linear.items() if self.provenance.atom_interval(a) != (0, 0)}
        if dict(form.terms) == linear:
            form = Affine(0, ((("reg", "%tid"), 1),))
        if len(form.terms) != 1 or form.const:
            return None
        ((atom, c),) = form.terms
        if c != 1:
            return None
        subject, scale = self.subject(atom)
        if subject == "thread":
            low, high = interval[0] * scale, interval[1] * scale + scale - 1
            low, high = _meet(_meet(who.threads, (low, high)), (0, self._count - 1))
            everyone = (low, high) == (0, self._count - 1)
            return (
                who
                if everyone
                else replace(who, threads=(low, high), warps=_meet(who.warps, (low // 32, high // 32)))
            )
        if subject == "lane":
            return replace(who, lanes=_meet(who.lanes, interval))
        if subject == "rank":
            return replace(who, ranks=_meet(who.ranks, interval))
        return None

    @cached_property
    def _subjects(self) -> dict[object, tuple[str, int]]:
        return {}

    def subject(self, atom: object) -> tuple[str, int]:
        """What an atom counts: "thread" (in groups of so many threads), "lane", "rank", or ""."""
        if atom not in self._subjects:
            self._subjects[atom] = ("", 1)
            self._subjects[atom] = self._find_subject(atom)
        return self._subjects[atom]

    def _find_subject(self, atom: object) -> tuple[str, int]:
        assert isinstance(atom, tuple)
        unknown = ("", 1)
        if atom[0] == "reg":
            if atom[1] in ("%cluster_ctarank", "%cluster_ctaid.x", "%ctaid.x"):
                return "rank", 1
            if atom[1] == "%tid" or (atom[1] == "%tid.x" and self._flat):
                return "thread", 1
            return ("lane", 1) if atom[1] == "%laneid" else unknown
        if atom[0] != "value" or atom[1] < 0:
            return unknown
        ins = self.ssa.definition(atom[1])
        if ins is None or ins.pred is not None or len(ins.operands) < 2:
            return unknown
        inner = self._plain(self.provenance.operand_affine(ins, ins.operands[1]))
        if dict(inner.terms) == self._linear and not inner.const:
            inner = Affine(0, ((("reg", "%tid"), 1),))
        if len(inner.terms) != 1 or inner.terms[0][1] != 1 or inner.const:
            return unknown
        source, scale = self.subject(inner.terms[0][0])
        if ins.opcode == "shfl":
            return (source, scale) if source == "rank" or scale % 32 == 0 else unknown
        if len(ins.operands) < 3 or source != "thread":
            return unknown
        by = self.provenance.operand_affine(ins, ins.operands[2]).constant
        if ins.opcode == "shr" and by is not None and 0 <= by < 16:
            return "thread", scale << by
        if ins.opcode == "div" and by is not None and 0 < by <= 1024:
            return "thread", scale * by
        if scale == 1 and (ins.opcode, by) in (("and", 31), ("rem", 32)):
            return "lane", 1
        return unknown

    # -- uniformity ---------------------------------------------------------------------------------------

    def level(self, value: int) -> Uniform:
        """Over which threads an SSA value is the same, when all of them execute its definition."""
        return self._levels[value]

    @cached_property
    def _levels(self) -> list[Uniform]:
        ssa, body = self.ssa, self._body
        levels = [Uniform.CTA] * len(ssa.values)
        readers: dict[int, list[int]] = {}
        inputs: list[list[int]] = []
        for v, value in enumerate(ssa.values):
            sources = [i for _, i in value.inputs]
            if value.index >= 0:
                ins = body[value.index]
                sources += [ssa.read(value.index, r) for r in used(ins) if r in self.cfg.function.registers]
            elif value.is_phi:
                sources += self._deciding(value.block)
            inputs.append(sources)
            for s in sources:
                readers.setdefault(s, []).append(v)
        work = list(range(len(levels)))
        while work:
            v = work.pop()
            level = min([levels[s] for s in inputs[v]], default=Uniform.CTA)
            index = ssa.values[v].index
            if index >= 0:
                level = _own_level(body[index], level)
            if level < levels[v]:
                levels[v] = level
                work.extend(readers.get(v, ()))
        return levels

    def _deciding(self, block: int) -> list[int]:
        """Predicates that decide along which edge control enters `block`."""
        found = []
        for b in {self.cfg.idom[block], *self.cfg.predecessors[block]}:
            last = self.cfg.terminator(b) if 0 <= b < self.cfg.exit else None
            if last is not None and last.pred is not None:
                found.append(self.ssa.read(last.index, last.pred[0]))
        return found


_THREAD_REGISTERS = ("%tid", "%laneid", "%lanemask", "%clock", "%globaltimer")


def _own_level(ins: Instruction, level: Uniform) -> Uniform:
    """Uniformity of a result, from that of the operands and the nature of the instruction."""
    registers = [op.name for op in ins.operands if isinstance(op, Reg) and op.name.startswith("%")]
    if any(r.startswith(_THREAD_REGISTERS) for r in registers):
        level = Uniform.VARYING
    elif "%warpid" in registers:
        level = min(level, Uniform.WARP)
    op = ins.opcode
    if op in ("vote", "activemask", "match", "redux") or (op == "shfl" and "idx" in ins.mods):
        lane_is_constant = op != "shfl" or isinstance(ins.operands[2], Imm)
        return min(Uniform.WARP, Uniform.CTA if lane_is_constant else level)
    if op in ("bar", "barrier"):
        return Uniform.CTA
    if op in ("ld", "ldu"):
        # Weak loads of one address agree, or they race with a store and other rules speak.
        return (
            Uniform.VARYING if {"relaxed", "acquire", "volatile", "mmio", "local"} & set(ins.mods) else level
        )
    return Uniform.VARYING if op in ("elect", "atom", "mbarrier") else level


def _meet(a: Interval, b: Interval) -> Interval:
    return max(a[0], b[0]), min(a[1], b[1])
