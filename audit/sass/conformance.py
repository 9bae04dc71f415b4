"""Does the machine code keep the order that the PTX asks for?

Every synchronising PTX instruction must have its marks in SASS (:mod:`.witness`), in the same order against each other
and against the accesses that they guard. Counts prove nothing, because ptxas copies code (loop rotation, unrolling,
tail duplication) and drops paths that it can decide; so order is compared path by path, pair by pair
(:mod:`.eventgraph`).

Which SASS instruction stands for which PTX instruction is read from the table of PTX lines in the listing
(`ptxas -lineinfo`, `nvdisasm -gp`) and checked: a SASS instruction that cannot be what its line says is not believed.
Without that table :mod:`.alignment` matches the two programs by their structure.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import ClassVar

from ..ptx.cfg import CFG
from ..ptx.effects import Kind, defined, effect
from ..ptx.ir import Function, Imm, Instruction, Reg
from ..ptx.ssa import SSA
from . import cfg as sass_cfg
from . import witness
from .alignment import Alignment, align, align_sync, alike
from .eventgraph import EventGraph, Flow, Order, Step, unfold
from .parser import SassFunction, SassInstruction
from .window import excesses
from .witness import Mark


class Problem(StrEnum):
    MISSING = "missing"  # a mark has no SASS instruction at all
    DROPPED = "dropped"  # a mark is not on some path where the PTX has it
    MOVED_UP = "moved up"  # an access comes before a mark that it must come after
    MOVED_DOWN = "moved down"  # an access comes after a mark that it must come before
    MOVED_IN = "moved in"  # more accesses between two marks than the PTX has there
    UNDECIDED = "undecided"  # the comparison could not be made; `detail` says why


@dataclass(frozen=True)
class Deviation:
    """One thing that differs. `ptx` and `sass` are the instruction concerned and its copies in machine code; `guards`
    are the synchronising instructions that it crossed. `read_only` marks `ld.global.nc`, which ptxas may move
    freely: it is harmless exactly when nobody writes the data while the kernel runs."""

    problem: Problem
    detail: str
    ptx: Instruction | None = None
    sass: tuple[SassInstruction, ...] = ()
    guards: tuple[Instruction, ...] = ()
    guard_sass: tuple[SassInstruction, ...] = ()
    mark: str = ""
    read_only: bool = False


@dataclass
class Conformance:
    """Outcome for one function. `matched` counts PTX marks found in SASS, of `expected`; `by_line` says whether the
    listing named PTX lines; `ptx_only` lists instructions without a SASS witness, with the reason; `removed` those
    whose whole block ptxas has removed because it is never executed."""

    deviations: list[Deviation] = field(default_factory=list)
    ptx_only: list[tuple[Instruction, str]] = field(default_factory=list)
    removed: list[Instruction] = field(default_factory=list)
    expected: int = 0
    matched: int = 0
    by_line: bool = False


@dataclass(slots=True)
class _PtxEvent:
    ins: Instruction
    mark: Mark
    block: int
    counts_as: int = -1  # the event with which it is indistinguishable in SASS


@dataclass(slots=True)
class _SassEvent:
    ins: SassInstruction
    mark: Mark
    origin: int = -1  # the PTX event that it stands for
    choices: list[int] = field(default_factory=list)
    doubtful: bool = False  # another PTX event would do as well


def conformance(function: Function, sass: SassFunction, arch: str = "", by_line=True) -> Conformance:
    """Compare one PTX function, its `.func` calls inlined, with its machine code.

    `arch` is only named in messages. Near-linear in the instructions for code whose loops hold few marks.
    """
    result = Conformance(by_line=sass.has_ptx_lines and by_line)
    cfg = CFG(function)
    ptx_events = _ptx_events(function, cfg, result)
    graph = sass_cfg.build(sass)
    for line, text in (*sass.unknown, *graph.problems):
        result.deviations.append(Deviation(Problem.UNDECIDED, f"SASS line {line} cannot be followed: {text}"))
    result.expected = len(ptx_events)
    ptx_graph = unfold(_ptx_flow(function, cfg, ptx_events), cfg.exit)
    marks = [e.mark for e in ptx_events]
    around = sass_cfg.without_cluster(graph)
    loops_of = [
        frozenset(n for n, loop in enumerate(cfg.loops) if b.index in loop.blocks) for b in cfg.blocks
    ]
    left_out: set[int] = set()
    if result.by_line:
        sass_events = _match_by_line(ptx_events, sass, around)
        sass_graph = unfold(_sass_flow(graph, sass_events), graph.exit)
        _match_rest(ptx_events, sass_events, ptx_graph, sass_graph)
        helpers = {i.line for i in function.body if i.opcode in ("tcgen05", "tensormap")}
        unexplained = [
            e.ins for e in sass_events if e.mark.is_access and e.origin < 0 and e.ins.ptx_line not in helpers
        ]
    else:
        sass_events = [
            _SassEvent(i, m)
            for i in sass.body
            if (m := Mark(around[i.index]) if i.index in around else witness.found(i))
        ]
        sass_graph = unfold(_sass_flow(graph, sass_events), graph.exit)
        loops = [loops_of[e.block] for e in ptx_events]
        aligned = align(marks, [e.mark for e in sass_events], ptx_graph, sass_graph, loops)
        left_out, unexplained = aligned.left_out, [sass_events[n].ins for n in aligned.unexplained]
        sass_events = _aligned(ptx_events, sass_events, aligned, around)
        sass_graph = unfold(_sass_flow(graph, sass_events), graph.exit)
    comparison = _Comparison(ptx_events, sass_events, ptx_graph, sass_graph, loops_of)
    _missing(result, function, cfg, ptx_events, comparison, sass)
    _report(result, comparison)
    reported = {d.ptx.index for d in result.deviations if d.ptx is not None}
    for n in sorted(left_out):
        if ptx_events[n].ins.index not in reported:
            detail = f"on some path of the machine code its {marks[n]} is passed over"
            copies = tuple(comparison.copies[n])
            result.deviations.append(
                Deviation(Problem.DROPPED, detail, ptx_events[n].ins, copies, mark=str(marks[n]))
            )
    _unexplained(result, function, unexplained)
    _surplus(result, sass_events)
    _overfull(result, function, ptx_events, sass_events, ptx_graph, sass_graph, comparison)
    return result


def _surplus(result: Conformance, sass: list[_SassEvent]) -> None:
    """Synchronisation in SASS that nothing in the PTX explains. More fences than asked for do no harm."""
    for e in sass:
        if e.origin < 0 and not e.mark.is_access and not e.mark.kind.startswith(_HARMLESS):
            detail = f"`{e.ins.text}` at SASS line {e.ins.line} has no counterpart in the PTX on its path"
            result.deviations.append(Deviation(Problem.UNDECIDED, detail, sass=(e.ins,), mark=str(e.mark)))


_HARMLESS = ("MEMBAR", "CCTL", "FENCE", "DEPBAR")


_NOTHING = Mark("")
_BOOKKEEPING_BYTES = (
    16  # shared memory that one allocation or release of tensor memory touches, per thread at most
)


def _overfull(
    result: Conformance,
    function: Function,
    ptx: list[_PtxEvent],
    sass: list[_SassEvent],
    ptx_graph: EventGraph,
    sass_graph: EventGraph,
    comparison: _Comparison,
) -> None:
    """Windows between two marks in which the machine code does more than the PTX."""
    counted = [_NOTHING if e.origin < 0 and _is_bookkeeping(function, e.ins) else e.mark for e in sass]
    allocations = sum(i.opcode == "tcgen05" and i.mods[0] in _BOOKKEEPING for i in function.body)
    slack = 0 if result.by_line else _BOOKKEEPING_BYTES * allocations
    found = excesses(
        [e.mark for e in ptx],
        counted,
        comparison.letters,
        [comparison.letters[e.origin] if e.origin >= 0 else -1 for e in sass],
        ptx_graph,
        sass_graph,
        slack,
    )
    known = {
        i.index
        for d in result.deviations
        if d.problem in (Problem.MOVED_UP, Problem.MOVED_DOWN)
        for i in d.sass
    }
    for x in found:
        copies = tuple(sass[e].ins for e in x.events)
        if known & {i.index for i in copies}:
            continue
        close = ptx[x.closes].ins
        open_ = f"`{ptx[x.opens].ins.name}` (line {ptx[x.opens].ins.line})" if x.opens >= 0 else "the entry"
        detail = (
            f"between {open_} and `{close.name}` (line {close.line}) the machine code can move {x.found} bytes per "
            f"thread by {x.access[1]}, the PTX at most {x.allowed}: accesses have been moved in from elsewhere"
        )
        result.deviations.append(
            Deviation(Problem.MOVED_IN, detail, None, copies, (close,), mark=str(ptx[x.closes].mark))
        )


def _unexplained(result: Conformance, function: Function, accesses: list[SassInstruction]) -> None:
    """Machine accesses without a PTX access. The allocator of tensor memory keeps its books in shared memory."""
    for ins in accesses:
        if _is_bookkeeping(function, ins):
            continue
        detail = f"`{ins.text}` at SASS line {ins.line} has no counterpart in the PTX between the same synchronisation"
        result.deviations.append(Deviation(Problem.UNDECIDED, detail, sass=(ins,)))


def _is_bookkeeping(function: Function, ins: SassInstruction) -> bool:
    """Perhaps part of the allocator of tensor memory, which ptxas expands in place."""
    allocates = any(i.opcode == "tcgen05" and i.mods[0] in _BOOKKEEPING for i in function.body)
    return allocates and ins.opcode in ("LDS", "STS", "ATOMS")


_BOOKKEEPING = frozenset({"alloc", "dealloc", "relinquish_alloc_permit"})


def _missing(
    result: Conformance,
    function: Function,
    cfg: CFG,
    events: list[_PtxEvent],
    comparison: _Comparison,
    sass: SassFunction,
) -> None:
    """Marks without any SASS instruction, unless ptxas has removed the whole block as never executed."""
    lines = (
        {i.ptx_line for i in sass.body} if result.by_line else {events[n].ins.line for n in comparison.copies}
    )
    constants = _Constants(cfg)
    marked = {e.ins.index for e in events}

    def body_of(block: int) -> list[Instruction]:
        return function.body[cfg.blocks[block].start : cfg.blocks[block].end]

    def always(block: int) -> bool:
        """Every execution that ends passes the block."""
        return block == 0 or cfg.block_postdominates(block, 0)

    for n, e in enumerate(events):
        if comparison.s.exists(n) or e.counts_as >= 0:
            result.matched += 1
            continue
        if e.mark.is_access and "strong" not in e.mark.classes:
            continue
        detail = f"no {e.mark} in the machine code"
        others = [
            i for i in body_of(e.block) if i.index != e.ins.index and i.opcode not in ("bra", "ret", "exit")
        ]
        if result.by_line is False:
            others = [i for i in others if i.index in marked]
        traces = any(i.line in lines for i in others)
        dead = e.ins.pred and constants.value(e.ins, e.ins.pred[0]) is e.ins.pred[1]
        if dead or (others and not traces and not always(e.block)):
            result.removed.append(e.ins)
        elif not traces and not always(e.block):
            why = f"{detail}, and nothing of its block either: removed as never executed, or lost"
            result.deviations.append(Deviation(Problem.UNDECIDED, why, e.ins, mark=str(e.mark)))
        elif e.ins.pred and not any(i.pred == e.ins.pred and i.line in lines for i in others):
            why = f"{detail}; perhaps its predicate {e.ins.pred[0]} never holds"
            result.deviations.append(Deviation(Problem.UNDECIDED, why, e.ins, mark=str(e.mark)))
        else:
            result.deviations.append(Deviation(Problem.MISSING, detail, e.ins, mark=str(e.mark)))


class _Constants:
    """Predicates whose value the PTX text fixes: enough to follow a compiler's unused options in inline asm."""

    _COMPARE: ClassVar[dict[str, Callable[[int, int], bool]]] = {
        "eq": operator.eq,
        "ne": operator.ne,
        "lt": operator.lt,
        "le": operator.le,
        "gt": operator.gt,
        "ge": operator.ge,
    }

    def __init__(self, cfg: CFG) -> None:
        self.cfg = cfg

    @cached_property
    def _ssa(self) -> SSA:
        return SSA(self.cfg)

    def value(self, ins: Instruction, register: str, depth: int = 12) -> int | bool | None:
        """What `register` holds where `ins` reads it; None when that is no constant."""
        source = self._ssa.definition(self._ssa.read(ins.index, register))
        if source is None or source.pred is not None or depth == 0:
            return None
        args = [self._operand(source, o, depth) for o in source.operands[1:]]
        if source.opcode == "mov" and len(args) == 1:
            return args[0]
        compare = self._COMPARE.get(source.mods[0]) if source.opcode == "setp" else None
        if compare and len(args) == 2 and None not in args:
            return compare(args[0], args[1])
        if source.opcode in ("and", "or") and source.has("pred"):
            absorbing = source.opcode == "or"
            return absorbing if absorbing in args else None if None in args else not absorbing
        return None

    def _operand(self, ins: Instruction, operand: object, depth: int) -> int | bool | None:
        if isinstance(operand, Imm) and isinstance(operand.value, int):
            return operand.value
        return self.value(ins, operand.name, depth - 1) if isinstance(operand, Reg) else None


# -- events -------------------------------------------------------------------------------------------------


def _ptx_events(function: Function, cfg: CFG, result: Conformance) -> list[_PtxEvent]:
    events = []
    for ins in function.body:
        block = cfg.block_of[ins.index]
        if block not in cfg.reachable:
            continue
        e = effect(ins)
        if e.kind is Kind.UNKNOWN or e.kind is Kind.CALL:
            why = e.why or f"`{ins.name}`: what the callee does is not known"
            result.deviations.append(Deviation(Problem.UNDECIDED, why, ins))
        if reason := witness.ptx_only(e):
            result.ptx_only.append((ins, reason))
        events += [_PtxEvent(ins, m, block) for m in witness.expected(ins, e)]
    return events


def _ptx_flow(function: Function, cfg: CFG, events: list[_PtxEvent]) -> list[Flow]:
    of: dict[int, list[int]] = defaultdict(list)
    for n, e in enumerate(events):
        of[e.ins.index].append(n)
    predicates = {r for r, t in function.registers.items() if t == "pred"}
    flows = []
    for block in cfg.blocks:
        flow = Flow()
        flags: dict[str, tuple[str, bool]] = {}  # registers that hold 0 or 1 for a predicate of this block
        for ins in function.body[block.start : block.end]:
            written = tuple(r for r in defined(ins) if r in predicates)
            define = [Step(pred=ins.pred, defines=written, copy_of=_copied(ins, flags))] if written else []
            marks = [Step(n, ins.pred) for n in of[ins.index]]
            if marks and written and effect(ins).kind is Kind.MBARRIER and ins.pred is None:
                # The wait's acquire takes effect only when it returns true.
                marks = [marks[0], *define, *(Step(m.event, (written[0], False)) for m in marks[1:])]
                define = []
            flow.steps += marks + define
            flags = {r: f for r, f in flags.items() if f[0] not in written and r not in defined(ins)}
            if ins.opcode == "selp" and (flag := _flag(ins)):
                flags[defined(ins)[0]] = flag
        successors = tuple(cfg.successors[block.index])
        last = cfg.terminator(block.index)
        if last is not None and last.pred is not None and len(successors) == 2:
            flow.pred = last.pred
            flow.following, flow.taken = successors[:1], successors[1:]
        else:
            flow.taken = successors
        flows.append(flow)
    return flows


def _flag(ins: Instruction) -> tuple[str, bool] | None:
    """`selp.u32 %r, 1, 0, p`: the predicate that %r stands for, and whether negated."""
    chosen = [o.value for o in ins.operands[1:3] if isinstance(o, Imm)]
    p = ins.operands[3] if len(ins.operands) == 4 else None
    if ins.pred is None and chosen in ([1, 0], [0, 1]) and isinstance(p, Reg):
        return p.name, chosen == [0, 1]
    return None


def _copied(ins: Instruction, flags: dict[str, tuple[str, bool]]) -> tuple[str, bool] | None:
    """`setp.ne %q, %r, 0` of such a register: the predicate that %q equals, and whether negated."""
    if (
        ins.opcode != "setp"
        or ins.pred is not None
        or len(ins.operands) != 3
        or ins.mods[0] not in ("ne", "eq")
    ):
        return None
    _, register, zero = ins.operands
    if isinstance(register, Reg) and register.name in flags and isinstance(zero, Imm) and zero.value == 0:
        predicate, negated = flags[register.name]
        return predicate, negated != (ins.mods[0] == "eq")
    return None


def _sass_flow(graph: sass_cfg.SassCFG, events: list[_SassEvent]) -> list[Flow]:
    of: dict[int, list[int]] = defaultdict(list)
    for n, e in enumerate(events):
        of[e.ins.index].append(n)
    body = graph.function.body
    flows = []
    for block in graph.blocks:
        flow = Flow()
        for ins in body[block.start : block.end]:
            flow.steps += [Step(n, _condition(ins)) for n in of.get(ins.index, ())]
            defines = _predicates_written(ins)
            if defines:
                # VOTEU.ALL UP0, P1: the warp's value, taken as the thread's (they differ only in divergent warps).
                copied = ins.operands[-1] if ins.opcode in ("VOTEU", "VOTE") else ""
                name = copied.lstrip("!")
                copy = (
                    (name, copied != name)
                    if name.lstrip("U").startswith("P") and name[-1].isdigit()
                    else None
                )
                flow.steps.append(Step(pred=_condition(ins), defines=defines, copy_of=copy))
        last = body[block.end - 1]
        if block.following is None or not block.taken:
            flow.taken = block.successors
        else:
            flow.taken, flow.following, flow.pred = block.taken, (block.following,), _branch_condition(last)
        flows.append(flow)
    return flows


def _condition(ins: SassInstruction) -> tuple[str, bool] | None:
    return None if ins.pred is None or ins.pred[0].endswith("T") else ins.pred


def _branch_condition(ins: SassInstruction) -> tuple[str, bool] | None:
    """The predicate that decides a branch; a fresh name where it is no single predicate (`BRA.DIV UR4`)."""
    if len(ins.operands) < 2:
        return _condition(ins) or (f"line {ins.line}", False)
    own = ins.operands[0]
    if _condition(ins) is None and own.lstrip("!U").startswith("P"):
        return own.lstrip("!"), own.startswith("!")
    return f"line {ins.line}", False


def _predicates_written(ins: SassInstruction) -> tuple[str, ...]:
    """Destination predicates: the leading operands, after at most one leading register; two at most."""
    out: list[str] = []
    if ins.opcode in ("BRA", "SEL", "FSEL", "USEL", "BSSY", "BSYNC", "EXIT"):
        return ()
    if ins.opcode in ("R2P", "UR2UP") or (ins.operands and ins.operands[0] in ("PR", "UPR")):
        prefix = "UP" if ins.opcode == "UR2UP" else "P"
        return tuple(f"{prefix}{i}" for i in range(7))
    most = 1 if ins.opcode in ("VOTE", "VOTEU", "ELECT") else 2
    for n, operand in enumerate(ins.operands):
        name = operand.split(".")[0]
        if name.lstrip("U").startswith("P") and (name[-1].isdigit() or name[-1] == "T") and len(name) <= 3:
            if name[-1] != "T":
                out.append(name)
            most -= 1
            if most == 0:
                break
        elif n > 0 or not name.lstrip("U").startswith("R"):
            break
    return tuple(out)


# -- matching by line ---------------------------------------------------------------------------------------


def _match_by_line(ptx: list[_PtxEvent], sass: SassFunction, around: dict[int, str]) -> list[_SassEvent]:
    """SASS events with the PTX mark that each stands for, where its line says so and its kind allows it."""
    at: dict[int, list[int]] = defaultdict(list)
    for n, e in enumerate(ptx):
        at[e.ins.line].append(n)
    events: list[_SassEvent] = []
    same: dict[tuple[int, str], list[_SassEvent]] = defaultdict(list)
    for ins in sass.body:
        here = at.get(ins.ptx_line, ())
        mark = witness.found(ins)
        if ins.index in around:
            events += [_SassEvent(ins, ptx[n].mark, n) for n in here if ptx[n].mark.way_round]
        elif mark is not None:
            fitting = [n for n in here if witness.accepts(ptx[n].mark, mark)]
            # Of two fences of one instruction (MEMBAR.CTA, MEMBAR.GPU) the closest in strength.
            rank = max(((ptx[n].mark.kind == mark.kind, ptx[n].mark.level) for n in fitting), default=None)
            fitting = [n for n in fitting if (ptx[n].mark.kind == mark.kind, ptx[n].mark.level) == rank]
            event = _SassEvent(ins, mark, fitting[0] if fitting else -1)
            events.append(event)
            if len(fitting) > 1:  # several instructions on one line of text
                same[ins.ptx_line, str(mark)].append(event)
                event.choices = fitting
    _share_out(ptx, same)
    return events


def _share_out(ptx: list[_PtxEvent], same: dict[tuple[int, str], list[_SassEvent]]) -> None:
    """Equal marks on one line of PTX text, one after the other as they stand in SASS. When the numbers do not fit,
    they count as one."""
    for events in same.values():
        choices = events[0].choices
        if len(events) % len(choices) == 0:
            for n, event in enumerate(events):
                event.origin = choices[n % len(choices)]
        else:
            for n in choices:
                ptx[n].counts_as = choices[0]


def _match_rest(
    ptx: list[_PtxEvent], sass: list[_SassEvent], ptx_graph: EventGraph, sass_graph: EventGraph
) -> None:
    """What the lines do not tell. ptxas gives no line to a GMMA, and to the head of a rotated loop that of an operand;
    such synchronisation is matched by its place between the events that are known. Whatever fits nowhere is taken for
    the nearest like mark that has nothing: the comparison then shows that it has moved."""
    unknown = [e for e in sass if e.origin < 0 and not e.mark.is_access]
    if any(not e.mark.kind.startswith(_HARMLESS) for e in unknown):
        fixed = [e.origin for e in sass]
        aligned = align_sync([e.mark for e in ptx], [e.mark for e in sass], ptx_graph, sass_graph, fixed)
        for event, origin in zip(sass, aligned.origin, strict=True):
            if event.origin < 0 and not event.mark.is_access:
                event.origin = origin
    claimed = {e.origin for e in sass}
    free = [n for n, e in enumerate(ptx) if n not in claimed and e.counts_as < 0]
    for event in sass:
        if event.origin >= 0:
            continue
        mark = event.mark
        fitting = [
            n
            for n in free
            if witness.accepts(ptx[n].mark, mark) and (not mark.is_access or _could_be(ptx[n].mark, mark))
        ]
        if fitting:
            event.origin = min(
                fitting,
                key=lambda n: (
                    ptx[n].mark.width not in (None, mark.width),
                    abs(ptx[n].ins.line - event.ins.ptx_line),
                ),
            )
            free.remove(event.origin)


def _could_be(expected: Mark, found: Mark) -> bool:
    """An access of the same space, of the same width or (ptxas joins accesses) narrower."""
    return alike(expected.classes, found.classes) and (expected.width or 0) <= (found.width or 0)


def _aligned(
    ptx: list[_PtxEvent], sass: list[_SassEvent], aligned: Alignment, around: dict[int, str]
) -> list[_SassEvent]:
    """SASS events with the origins of an alignment; what stands in for half a cluster barrier has all its marks."""
    events = []
    for n, first in aligned.counts_as.items():
        ptx[n].counts_as = first
    for n, (event, origin) in enumerate(zip(sass, aligned.origin, strict=True)):
        event.origin = origin
        event.doubtful = n in aligned.ambiguous
        if origin >= 0 and event.ins.index in around:
            index = ptx[origin].ins.index
            halves = [m for m in range(len(ptx)) if ptx[m].ins.index == index]
            events += [_SassEvent(event.ins, ptx[m].mark, m, doubtful=event.doubtful) for m in halves]
        else:
            events.append(event)
    return events


# -- comparison ---------------------------------------------------------------------------------------------


class _Comparison:
    """Order of the PTX marks in the two programs, and what differs where it must not."""

    def __init__(
        self,
        ptx: list[_PtxEvent],
        sass: list[_SassEvent],
        ptx_graph: EventGraph,
        sass_graph: EventGraph,
        loops_of: list[frozenset[int]],
    ) -> None:
        self.ptx = ptx
        self.copies: dict[int, list[SassInstruction]] = defaultdict(list)
        self.letters = letters = [e.counts_as if e.counts_as >= 0 else n for n, e in enumerate(ptx)]
        for event in sass:
            if event.origin >= 0:
                self.copies[letters[event.origin]].append(event.ins)
        count = len(ptx)
        self.p = Order(ptx_graph, [letters[e] if e >= 0 else -1 for e in ptx_graph.event], count)
        origin = [letters[e.origin] if e.origin >= 0 else -1 for e in sass]
        self.s = Order(sass_graph, [origin[e] if e >= 0 else -1 for e in sass_graph.event], count)
        self.present = [n for n in range(count) if self.p.exists(n) and self.s.exists(n)]
        marks = [e.mark for e in ptx]
        self.everything = self._set(self.present)
        self.pure = self._set(n for n in self.present if not marks[n].is_access)
        # By class of access: the marks that keep it after them, and before them.
        classes = {c for m in marks for c in m.classes}
        self.keeps_after = {
            c: self._set(n for n in self.present if c in marks[n].keeps_after) for c in classes
        }
        self.keeps_before = {
            c: self._set(n for n in self.present if c in marks[n].keeps_before) for c in classes
        }
        self.accesses = {c: self._set(n for n in self.present if c in marks[n].classes) for c in classes}
        # avoidable[x]: marks that lie in a loop of the PTX in which x does not lie.
        members: dict[frozenset[int], int] = defaultdict(int)
        for n in self.present:
            members[loops_of[ptx[n].block]] |= 1 << n
        outside = {
            here: self._set(n for other, m in members.items() if other - here for n in _bits(m))
            for here in members
        }
        self.avoidable = [outside.get(loops_of[e.block], 0) for e in ptx]
        # Pure synchronisation keeps its order against all other that touches the same spaces.
        spaces = {t for m in marks for t in m.touches}
        touching = {
            t: self._set(n for n in self.present if t in marks[n].touches) & self.pure for t in spaces
        }
        self.related = [0] * count
        for n in self.present:
            for t in marks[n].touches:
                self.related[n] |= touching[t]

    @staticmethod
    def _set(members: Iterable[int]) -> int:
        out = 0
        for n in members:
            out |= 1 << n
        return out

    def guards(self, x: int) -> tuple[int, int]:
        """Marks that x must stay after, and before, where the PTX has it so."""
        mark = self.ptx[x].mark
        if not mark.is_access:
            return self.related[x] & ~(1 << x), self.related[x] & ~(1 << x)
        after = before = 0
        for c in mark.classes:
            after |= self.keeps_after[c]
            before |= self.keeps_before[c]
        return after & ~(1 << x), before & ~(1 << x)

    def violations(self) -> Iterator[tuple[int, int, Problem]]:
        """Triples (x, g, problem): x stands on the wrong side of g on some path of the machine code."""
        p, s = self.p, self.s
        always_first = self._transpose(s.before)  # [x]: what never comes before the first x
        always_last = self._transpose(s.after)
        for x in self.present:
            after, before = self.guards(x)
            # A loop that ptxas has unrolled can be passed by on a path that no execution takes, because the test of the
            # trip count is repeated. For marks of such a loop the order itself must be the other way round.
            up = p.before[x] & ~s.before[x] & (~self.avoidable[x] | always_first[x])
            down = p.after[x] & ~s.after[x] & (~self.avoidable[x] | always_last[x])
            up = after & (up | (s.reaches[x] & ~p.reaches[x]))
            down = before & (down | (s.reached_by[x] & ~p.reached_by[x]))
            for g in _bits(up):
                yield x, g, Problem.MOVED_UP
            for g in _bits(down):
                yield x, g, Problem.MOVED_DOWN
        # What is written is not optional: if it always came before g, it still must.
        lasting = self._set(x for x in self.present if self._lasts(x))
        kept_after = {g: self._kept(g, self.ptx[g].mark.keeps_after) for g in self.present}
        kept_before = {g: self._kept(g, self.ptx[g].mark.keeps_before) for g in self.present}
        for g in self.present:
            firm = lasting & ~self.avoidable[g]
            for x in _bits(kept_before[g] & firm & p.before[g] & ~s.before[g]):
                yield x, g, Problem.MOVED_DOWN
            for x in _bits(kept_after[g] & firm & p.after[g] & ~s.after[g]):
                yield x, g, Problem.MOVED_UP
            if p.reaches[g] >> g & 1 and (kept_after[g] | kept_before[g]):
                # In a loop: between two rounds of x there was always a g.
                new = s.repeats(g) & ~p.repeats(g) & (kept_after[g] | kept_before[g])
                for x in _bits(new):
                    if p.reaches[x] >> x & 1 and not self._split(x):
                        yield x, g, Problem.MOVED_UP if kept_after[g] >> x & 1 else Problem.MOVED_DOWN

    def _transpose(self, sets: list[int]) -> dict[int, int]:
        out = dict.fromkeys(self.present, 0)
        for x in self.present:
            for y in _bits(sets[x] & self.everything):
                out[y] |= 1 << x
        return out

    def _kept(self, g: int, classes: frozenset[str]) -> int:
        """What `g` holds on one side of itself: accesses of `classes`, and synchronisation that it is related to."""
        out = self.related[g] if not self.ptx[g].mark.is_access else 0
        for c in classes:
            out |= self.accesses.get(c, 0)
        return out & ~(1 << g)

    def _lasts(self, x: int) -> bool:
        mark = self.ptx[x].mark
        return not mark.is_access or any(c.endswith("store") for c in mark.classes)

    def _split(self, x: int) -> bool:
        """One PTX access made from several machine accesses."""
        width = self.ptx[x].mark.width or 0
        marks = [witness.found(i) for i in self.copies[x]]
        return any(m is not None and (m.width or 0) < width for m in marks)


def _bits(value: int) -> Iterator[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def _report(result: Conformance, c: _Comparison) -> None:
    """One deviation per culprit: the event that stands in most of the pairs that are out of order."""
    pairs = set(c.violations())
    while pairs:
        involved: dict[int, int] = defaultdict(int)
        for x, g, _ in pairs:
            involved[x] += 1
            if not c.ptx[x].mark.is_access or involved[x] > 1:
                involved[g] += 1
            else:
                involved[g] += 1
        culprit = max(involved, key=lambda n: (involved[n], c.ptx[n].mark.is_access, -n))
        mine = {t for t in pairs if culprit in t[:2]}
        pairs -= mine
        result.deviations.append(_deviation(c, culprit, mine))


def _deviation(c: _Comparison, culprit: int, pairs: set[tuple[int, int, Problem]]) -> Deviation:
    e = c.ptx[culprit]
    others = sorted({g if x == culprit else x for x, g, _ in pairs})
    problems = {problem if x == culprit else _OTHER_SIDE[problem] for x, _, problem in pairs}
    problem = problems.pop() if len(problems) == 1 else Problem.DROPPED
    named = ", ".join(f"`{c.ptx[o].ins.name}` (line {c.ptx[o].ins.line})" for o in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    detail = f"on some path of the machine code it stands on the wrong side of {named}{more}"
    return Deviation(
        problem,
        detail,
        e.ins,
        tuple(c.copies[culprit]),
        tuple(c.ptx[o].ins for o in others),
        tuple(i for o in others[:3] for i in c.copies[o]),
        str(e.mark),
        "read-only load" in e.mark.classes,
    )


_OTHER_SIDE = {Problem.MOVED_UP: Problem.MOVED_DOWN, Problem.MOVED_DOWN: Problem.MOVED_UP}
