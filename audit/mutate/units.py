"""A kernel's text as the mutation operators see it: units in order, where each stands, what may be moved where."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from k3_audit.artifact.contract import Role

from ..ptx.cfg import CFG
from ..ptx.effects import Access, Effect, Kind, defined, effect, used
from ..ptx.ir import Function, Instruction
from ..subject import Subject


@dataclass(frozen=True)
class Unit:
    """An instruction, or a polling loop from its label to the branch back. `start` and `end` are offsets in
    the text; `instruction` is the one that synchronises or accesses memory."""

    instruction: Instruction
    effect: Effect
    first: int
    last: int
    start: int
    end: int
    movable: bool = True

    @property
    def name(self) -> str:
        return self.instruction.name


# What is no code: strings, comments, line marks.
_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/|^[ \t]*\.loc\b[^\n]*', re.DOTALL | re.MULTILINE)
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_SPACE = re.compile(r"\s*")
_DECLARATIONS = re.compile(r"(?:\s|\.reg\b[^;]*;)*")


_NOT_UPSTREAM = frozenset({Role.WEIGHT, Role.FLAG, Role.PEER, Role.MULTICAST, Role.SCRATCH})
_QUIET = (Kind.COMPUTE, Kind.WARP, Kind.BRANCH, Kind.PREFETCH)


class Code:
    """One function of a PTX text: where each instruction stands, and its units in order."""

    def __init__(self, text: str, function: Function, subject: Subject) -> None:
        self.function = function
        self.subject = subject
        self.text = blank(text)
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.opening = self.text.index("{", self.starts[function.line - 1])
        self.cfg = CFG(function)
        self.effects = [effect(i) for i in function.body]
        self.spans = self._spans()

    def _spans(self) -> list[tuple[int, int]]:
        """Offsets of each statement, from its predicate to its semicolon."""
        out, cursor = [], 0
        for ins in self.function.body:
            cursor = max(cursor, self.starts[ins.line - 1])
            words = re.escape(ins.name)
            m = re.compile(rf"(?<![\w.$%]){words}(?![\w.:])").search(self.text, cursor)
            if m is None:
                raise ValueError(f"line {ins.line}: {ins.name} is not where the parser says")
            start = self.text.rindex("@", cursor, m.start()) if ins.pred else m.start()
            cursor = self.text.index(";", m.end()) + 1
            out.append((start, cursor))
        return out

    def line(self, offset: int) -> int:
        """1-based line of an offset."""
        return bisect_right(self.starts, offset)

    @cached_property
    def words(self) -> Counter[str]:
        """How often each name stands in the function."""
        return Counter(words_of(self.text[self.opening : self.spans[-1][1]]))

    @cached_property
    def branched_to(self) -> frozenset[int]:
        """First indices of units that some branch jumps to; a loop's own branches do not count."""
        cfg, targets = self.cfg, set()
        last_of = {i: u.last for u in self._polls.values() for i in range(u.first, u.last + 1)}
        for b, successors in enumerate(cfg.successors[:-1]):
            if cfg.terminator(b) is None:
                continue
            end = cfg.blocks[b].end
            own = last_of.get(end - 1)
            for s in successors:
                if s == cfg.exit or cfg.blocks[s].start == end:
                    continue
                to = cfg.blocks[s].start
                if own is None or not (last_of.get(to) == own or to == own + 1):
                    targets.add(to)
        return frozenset(targets)

    @cached_property
    def _polls(self) -> dict[int, Unit]:
        found = (self._poll(sorted(loop.blocks)) for loop in self.cfg.loops)
        return {u.first: u for u in found if u is not None}

    @cached_property
    def units(self) -> list[Unit]:
        out, i = [], 0
        while i < len(self.function.body):
            unit = self._polls.get(i) or Unit(self.function.body[i], self.effects[i], i, i, *self.spans[i])
            if self.cfg.block_of[i] in self.cfg.reachable:
                out.append(unit)
            i = unit.last + 1
        return out

    def _poll(self, blocks: list[int]) -> Unit | None:
        """The unit of a loop that does nothing but ask again and again."""
        if blocks != list(range(blocks[0], blocks[-1] + 1)):
            return None
        first, last = self.cfg.blocks[blocks[0]].start, self.cfg.blocks[blocks[-1]].end - 1
        asks = [i for i in range(first, last + 1) if self.effects[i].accesses]
        if len(asks) != 1:
            return None
        e = self.effects[asks[0]]
        strong = any(a.reads and a.sem not in ("weak", "") for a in e.accesses)
        quiet = (Kind.COMPUTE, Kind.BRANCH, Kind.WARP, e.kind)
        if not strong or any(self.effects[i].kind not in quiet for i in range(first, last + 1)):
            return None
        start, end, movable = self._around(first, last)
        return Unit(self.function.body[asks[0]], e, first, last, start, end, movable)

    def _around(self, first: int, last: int) -> tuple[int, int, bool]:
        """Extent of a loop with the labels and braces that belong to it, and whether it can stand elsewhere."""
        text = self.text
        before = self.spans[first - 1][1] if first else self.opening
        start, end = self.spans[first][0], self.spans[last][1]
        label = _LABEL.search(text, before, start)
        if label is None:
            return start, end, False
        start = label.start()
        jumps = set(words_of(text[start:end]))
        while True:
            at = _SPACE.match(text, end).end()  # type: ignore[union-attr]
            after = _LABEL.match(text, at)
            opening = text.rfind("{", before, start)
            if after and after[1] in jumps:
                end = after.end()
            elif text[at] == "}" and opening >= 0 and _DECLARATIONS.fullmatch(text, opening + 1, start):
                return opening, at + 1, True  # in a block of its own no name is anybody else's
            else:
                break
        inside = Counter(words_of(text[start:end]))
        names = [m[1] for m in _LABEL.finditer(text, start, end)]
        return start, end, all(inside[name] == self.words[name] for name in names)

    def cut(self, unit: Unit) -> str:
        """The text of a unit on one line."""
        return " ".join(self.text[unit.start : unit.end].split())

    def arguments(self, unit: Unit) -> list[tuple[int, int]]:
        """Offsets of the operands of a unit's instruction."""
        start, end = self.spans[unit.instruction.index]
        at = self.text.index(unit.name, start) + len(unit.name)
        depth, first, out = 0, at, []
        for i in range(at, end):
            c = self.text[i]
            if c in "[{(":
                depth += 1
            elif c in "]})":
                depth -= 1
            elif (c == "," and not depth) or i == end - 1:
                inner = self.text[first:i]
                out.append((first + len(inner) - len(inner.lstrip()), first + len(inner.rstrip())))
                first = i + 1
        return out

    # -- what stands near a unit --------------------------------------------------------------------------

    def following(self, n: int) -> Iterator[tuple[int, Unit]]:
        """Units after units[n] that execute whenever it does, by falling through."""
        for k in range(n + 1, len(self.units)):
            unit = self.units[k]
            if unit.first in self.branched_to:
                return
            yield k, unit
            if unit.effect.kind in (Kind.BRANCH, Kind.EXIT, Kind.CALL):
                return

    def preceding(self, n: int) -> Iterator[tuple[int, Unit]]:
        """Units before units[n] from which control falls through to it, nearest first."""
        for k in range(n - 1, -1, -1):
            after, unit = self.units[k + 1], self.units[k]
            if after.first in self.branched_to:
                return
            if unit.effect.kind in (Kind.BRANCH, Kind.EXIT, Kind.CALL):
                return
            yield k, unit

    def below(self, n: int, k: int) -> tuple[tuple[int, int, str], ...] | None:
        """Changes that put units[n] right after units[k], or units[k] right before units[n], whichever keeps
        every value defined before its use; None if neither does."""
        first, last = self.units[n], self.units[k]
        between = self.units[n + 1 : k]
        if self._portable(first, last.end) and not _clash(self, first, [*between, last]):
            return ((first.start, first.end, ""), (last.end, last.end, " " + self.cut(first)))
        if self._portable(last, first.start) and not _clash(self, last, [*between, first]):
            return ((first.start, first.start, self.cut(last) + " "), (last.start, last.end, ""))
        return None

    def _portable(self, unit: Unit, to: int) -> bool:
        """Every name in the unit's text means the same at offset `to`."""
        here, there = self._blocks(unit.start), self._blocks(to)
        local = {name for block in here ^ there for name in self._declared[block]}
        used_names = words_of(self.text[unit.start : unit.end])
        return unit.movable and not any(
            w in local or w.rstrip("0123456789") + "<" in local for w in used_names
        )

    def _blocks(self, offset: int) -> set[tuple[int, int]]:
        return {b for b in self._declared if b[0] < offset < b[1]}

    @cached_property
    def _declared(self) -> dict[tuple[int, int], set[str]]:
        """Blocks inside the function that declare registers, as (offset of `{`, offset of `}`), with the names:
        "done", or "%r<" for a range."""
        found: dict[tuple[int, int], set[str]] = {}
        stack: list[int] = []
        for m in re.compile(r"[{}]").finditer(self.text, self.opening):
            if m.group() == "{":
                stack.append(m.start())
            elif len(stack) > 1:
                inner = self.text[stack[-1] : m.start()]
                lists = re.findall(r"\.reg\s+\.\w+([^;]*);", inner)
                found[stack.pop(), m.start()] = {
                    w for names in lists for w in re.findall(r"[\w$%]+<?", names)
                }
            else:
                break
        return {block: names for block, names in found.items() if names}

    # -- who and what -------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """The subject's analyses speak of this function: it is the kernel, and it calls nothing."""
        return self.subject.function is self.function

    @cached_property
    def threads(self) -> int:
        """Threads of a CTA, 0 where the text does not say."""
        shape = self.subject.entry.directives.get("reqntid", ())
        count = 1
        for n in shape:
            count *= int(n) if n.isdigit() else 0
        return count if shape and count % 32 == 0 else 0

    def everyone(self, unit: Unit) -> bool:
        """All threads of the CTA surely execute the unit."""
        return self.whole and self.subject.executors(unit.instruction.index).everyone

    def upstream(self, unit: Unit) -> bool:
        """The unit may touch what the previous grid touches."""
        if not self.whole:
            return True
        for a in data(unit):
            for base, _ in self.subject.address(unit.instruction.index, a).parts:
                role = self.subject.role(base)
                if role not in _NOT_UPSTREAM and not (role is Role.STABLE and not a.writes):
                    return True
        return False

    def region(self, units: tuple[Unit, ...]) -> tuple[int, int]:
        """Lines from the last event before the first of some units to the first event after the last."""
        first, last = min(u.first for u in units), max(u.last for u in units)
        events = [i for i, e in enumerate(self.effects) if e.accesses or e.kind not in _QUIET]
        before = next((i for i in reversed(events) if i < first), first)
        after = next((i for i in events if i > last), last)
        return self.line(self.spans[before][0]), self.line(self.spans[after][1])

    def guards(self, unit: Unit) -> bool:
        """Something happens after the unit that it could be there for: memory other than the thread's own."""
        after = self.cfg.after([unit.last])
        return any(i < unit.first or i > unit.last for i in after if touches_memory(self.effects[i]))

    def conflicts(self, unit: Unit, others: Iterable[int]) -> bool:
        """One of `others` may touch the same bytes, one of the two writing. Global memory is always taken to have
        readers and writers elsewhere; without analyses of this function everything conflicts."""
        if not self.whole or any(a.space in ("global", "generic", "multimem") for a in data(unit)):
            return True
        i = unit.instruction.index
        for j in others:
            for a in self.effects[j].accesses:
                for own in data(unit):
                    if i == j or a.role != "data" or not (own.writes or a.writes):
                        continue
                    if own.space == a.space == "tmem" or self._overlap(i, own, j, a):
                        return True
        return False

    def _overlap(self, i: int, a: Access, j: int, b: Access) -> bool:
        shared = all(x.space.split("::")[0] == "shared" for x in (a, b))
        return shared and self.subject.order.overlap(i, a, j, b)

    @cached_property
    def results(self) -> set[str]:
        """Accumulators of all wgmma."""
        both = zip(self.function.body, self.effects, strict=True)
        return {r for ins, e in both if (e.kind, e.op) == (Kind.WGMMA, "mma") for r in defined(ins)}


def blank(text: str) -> str:
    """`text` with comments, strings and line marks blanked out, every other character where it was."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def words_of(text: str) -> list[str]:
    return re.findall(r"[\w$%]+", text)


def _registers(code: Code, unit: Unit) -> tuple[set[str], set[str]]:
    """Registers that a unit writes and reads."""
    body = code.function.body[unit.first : unit.last + 1]
    return {r for i in body for r in defined(i)}, {r for i in body for r in used(i)}


def _clash(code: Code, moved: Unit, others: list[Unit]) -> bool:
    """Moving a unit over others changes which value some register holds where it is read."""
    writes, reads = _registers(code, moved)
    for other in others:
        w, r = _registers(code, other)
        if writes & (w | r) or reads & w:
            return True
    return False


# -- what a unit is for --------------------------------------------------------------------------------

WAITS = ("wait", "wait_read", "wait_all", "wait_ld", "wait_st")


def is_poll(e: Effect) -> bool:
    return e.kind is Kind.MBARRIER and e.op in ("try_wait", "test_wait")


def is_wait(u: Unit) -> bool:
    """Something is known to have happened after it."""
    e = u.effect
    if e.kind in (Kind.BARRIER, Kind.CLUSTER_BARRIER):
        return e.op not in ("arrive",)
    if e.kind in (Kind.GRID_DEPENDENCY, Kind.ASYNC_GROUP, Kind.BULK_GROUP, Kind.WGMMA, Kind.TCGEN05):
        return e.op in WAITS or e.op == "after_thread_sync"
    if e.kind is Kind.FENCE:
        return e.acquires and not e.restrict
    if e.kind is Kind.PROXY_FENCE:
        return e.sem == "acquire"
    if any(a.role == "data" and a.reads and a.sem in ("acquire", "acq_rel") for a in e.accesses):
        return True
    return is_poll(e) or u.first != u.last or e.kind is Kind.WARP_BARRIER


def is_signal(u: Unit) -> bool:
    """It tells others that something has happened before it."""
    e = u.effect
    if e.kind in (Kind.BARRIER, Kind.CLUSTER_BARRIER):
        return e.op != "wait"
    if e.kind is Kind.FENCE:
        return e.releases
    if e.kind is Kind.PROXY_FENCE:
        return e.sem != "acquire"
    if e.kind is Kind.MBARRIER:
        return e.op.startswith("arrive") and e.sem == "release"
    if e.kind in (Kind.BULK_GROUP, Kind.ASYNC_GROUP, Kind.WGMMA, Kind.TCGEN05):
        return e.op in ("commit", "mbarrier_arrive", "before_thread_sync")
    if e.kind is Kind.WARP_BARRIER:
        return True
    return any(a.role == "data" and a.writes and a.sem in ("release", "acq_rel") for a in e.accesses)


def data(u: Unit) -> list[Access]:
    quiet = ("local", "param", "const")
    return [a for a in u.effect.accesses if a.role in ("data", "tensor") and a.space not in quiet]


def touches_memory(e: Effect) -> bool:
    quiet = ("local", "param", "const")
    return any(a.space not in quiet and a.role in ("data", "tensor") for a in e.accesses)


def is_plain(u: Unit) -> bool:
    """An access that needs others to order it."""
    return bool(data(u)) and all(a.sem in ("weak", "") or a.asynchronous for a in data(u))
