"""Mutants of a PTX kernel: the mistakes that people make with synchronisation, planted one at a time.

    mutants(text, contract) -> Mutant(operator, site, lines, ptx, what, fingerprint), ...   in text order

Each operator is a small function over the *units* of a kernel: its instructions, with every polling loop
taken as one. It edits the text where the instruction stands, never adds or removes a line, and leaves a
program that ptxas accepts. A mutant that only hangs (an arrival deleted) is not made: no test passes over
it. Operators whose result would surely mean the same (two initialisations swapped) do not make it either;
what is equivalent for a reason that needs an argument is made, and argued where it survives (docs/teeth.md).
"""

from __future__ import annotations

import ast
import hashlib
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from k3_audit.artifact.contract import Contract, Role

from .findings import Site
from .ptx.cfg import CFG
from .ptx.effects import Access, Effect, Kind, defined, effect, used
from .ptx.ir import Function, Instruction, Module
from .ptx.parser import parse
from .subject import Subject


@dataclass(frozen=True)
class Mutant:
    """One planted defect.

    `site` is the first instruction that was changed, at its line in the original; `lines` the first and last
    line that the change concerns (the text has as many lines as the original). `fingerprint` names the
    mutant across architectures and rebuilds: kernel, operator, instructions, and which of several alike.
    """

    kernel: str
    operator: str
    site: Site
    lines: tuple[int, int]
    what: str
    ptx: str
    fingerprint: str


@dataclass(frozen=True)
class Edit:
    """What an operator proposes: replacements of text spans, at one or two units."""

    at: tuple[Unit, ...]
    what: str
    changes: tuple[tuple[int, int, str], ...]


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


# -- the text of a function -------------------------------------------------------------------------------

# What is no code: strings, comments, line marks.
_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/|^[ \t]*\.loc\b[^\n]*', re.DOTALL | re.MULTILINE)
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_DECLARATIONS = re.compile(r"(?:\s|\.reg\b[^;]*;)*")


class Code:
    """One function of a PTX text: where each instruction stands, and its units in order."""

    def __init__(self, text: str, function: Function, subject: Subject) -> None:
        self.function = function
        self.subject = subject
        self.text = _blank(text)
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]
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
        before = self.spans[first - 1][1] if first else text.rindex("{", 0, self.spans[0][0]) + 1
        start, end = self.spans[first][0], self.spans[last][1]
        labels = list(_LABEL.finditer(text, before, start))
        if not labels:
            return start, end, False
        start = labels[0].start()
        inside = set(_words(text[start:end]))
        while True:
            m = re.compile(r"\s*").match(text, end)
            at = m.end() if m else end
            exit_label = _LABEL.match(text, at)
            if exit_label and exit_label[1] in inside:
                if len(
                    re.findall(rf"(?<![\w$%]){re.escape(exit_label[1])}(?![\w$%])", text[start:end])
                ) != len(re.findall(rf"(?<![\w$%]){re.escape(exit_label[1])}(?![\w$%:])", text)):
                    return start, end, False
                end = exit_label.end()
                continue
            opening = text.rfind("{", before, start)
            if (
                text[at : at + 1] == "}"
                and opening >= 0
                and _DECLARATIONS.fullmatch(text, opening + 1, start)
            ):
                start, end = opening, at + 1
                continue
            break
        used_elsewhere = any(
            re.search(rf"\bbra\b[^;]*(?<![\w$%]){re.escape(m[1])}(?![\w$%])", text[:start] + text[end:])
            for m in labels
            if text[start] != "{"
        )
        return start, end, not used_elsewhere

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
        return unit.movable and not local & set(_words(self.text[unit.start : unit.end]))

    def _blocks(self, offset: int) -> set[tuple[int, int]]:
        return {b for b in self._declared if b[0] < offset < b[1]}

    @cached_property
    def _declared(self) -> dict[tuple[int, int], set[str]]:
        """Blocks inside the function, as (offset of `{`, offset of `}`), with the registers declared in each.
        Vector operands look like blocks and declare nothing."""
        found: dict[tuple[int, int], set[str]] = {}
        stack: list[int] = []
        start = self.text.index("{", self.starts[self.function.line - 1])
        for m in re.compile(r"[{}]").finditer(self.text, start):
            if m.group() == "{":
                stack.append(m.start())
                continue
            opening = stack.pop()
            inner = self.text[opening : m.start()]
            names = (w for d in re.findall(r"\.reg\b([^;]*);", inner) for w in _words(d))
            if stack:
                found[opening, m.start()] = set(names)
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
        for a in _data(unit):
            for base, _ in self.subject.address(unit.instruction.index, a).parts:
                role = self.subject.role(base)
                if role not in _NOT_UPSTREAM and not (role is Role.STABLE and not a.writes):
                    return True
        return False

    @cached_property
    def results(self) -> dict[Kind, set[str]]:
        """Registers that asynchronous matrix operations write, by kind."""
        found: dict[Kind, set[str]] = {Kind.WGMMA: set(), Kind.TCGEN05: set()}
        for ins, e in zip(self.function.body, self.effects, strict=True):
            if e.kind in found and e.op in ("mma", "ld"):
                found[e.kind] |= set(defined(ins))
        return found


def _blank(text: str) -> str:
    """`text` with comments, strings and line marks blanked out, every other character where it was."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def _words(text: str) -> list[str]:
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


# -- which instructions are what --------------------------------------------------------------------------

_WAITS = ("wait", "wait_read", "wait_all", "wait_ld", "wait_st")


def _is_poll(e: Effect) -> bool:
    return e.kind is Kind.MBARRIER and e.op in ("try_wait", "test_wait")


def _is_wait(u: Unit) -> bool:
    """Something is known to have happened after it."""
    e = u.effect
    if e.kind in (Kind.BARRIER, Kind.CLUSTER_BARRIER):
        return e.op not in ("arrive",)
    if e.kind in (Kind.GRID_DEPENDENCY, Kind.ASYNC_GROUP, Kind.BULK_GROUP, Kind.WGMMA, Kind.TCGEN05):
        return e.op in _WAITS or e.op == "after_thread_sync"
    if e.kind is Kind.FENCE:
        return e.acquires and not e.restrict
    if e.kind is Kind.PROXY_FENCE:
        return e.sem == "acquire"
    if any(a.role == "data" and a.reads and a.sem in ("acquire", "acq_rel") for a in e.accesses):
        return True
    return _is_poll(e) or u.first != u.last or e.kind is Kind.WARP_BARRIER


def _is_signal(u: Unit) -> bool:
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


def _data(u: Unit) -> list[Access]:
    quiet = ("local", "param", "const")
    return [a for a in u.effect.accesses if a.role in ("data", "tensor") and a.space not in quiet]


def _plain(u: Unit) -> bool:
    """An access that needs others to order it."""
    return bool(_data(u)) and all(a.sem in ("weak", "") or a.asynchronous for a in _data(u))


Operator = Callable[[Code, int, Unit], Iterator[Edit]]
OPERATORS: dict[str, Operator] = {}
MEANING: dict[str, str] = {}


def _operator(name: str, meaning: str) -> Callable[[Operator], Operator]:
    def register(f: Operator) -> Operator:
        OPERATORS[name], MEANING[name] = f, meaning
        return f

    return register


def _replace(unit: Unit, code: Code, new: str, what: str) -> Edit:
    """The unit's instruction becomes `new`."""
    start, end = code.spans[unit.instruction.index]
    return Edit((unit,), what, ((start, end, new),))


def _rename(unit: Unit, code: Code, name: str, what: str) -> Edit:
    """The unit's instruction gets another name, its operands stay."""
    start, _ = code.spans[unit.instruction.index]
    at = code.text.index(unit.name, start)
    return Edit((unit,), what, ((at, at + len(unit.name), name),))


# -- operators: something is missing ----------------------------------------------------------------------


@_operator("drop-fence", "a fence or proxy fence is deleted")
def _drop_fence(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    fences = ("fence", "before_thread_sync", "after_thread_sync")
    if u.effect.kind in (Kind.FENCE, Kind.PROXY_FENCE) and u.effect.op != "copy":
        yield _replace(u, code, "", f"{u.name} deleted")
    elif u.effect.kind in (Kind.WGMMA, Kind.TCGEN05) and u.effect.op in fences:
        yield _replace(u, code, "", f"{u.name} deleted")


@_operator("drop-barrier", "a barrier is deleted; a cluster barrier with both halves, and its wait alone")
def _drop_barrier(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    e = u.effect
    if e.kind is Kind.WARP_BARRIER or (e.kind is Kind.BARRIER and e.op == "sync"):
        yield _replace(u, code, "", f"{u.name} deleted")
    elif e.kind is Kind.CLUSTER_BARRIER and e.op == "wait":
        yield _replace(u, code, "", f"{u.name} deleted, its arrive left")
    elif e.kind is Kind.CLUSTER_BARRIER:
        for k in range(n + 1, len(code.units)):
            w = code.units[k]
            if w.effect.kind is Kind.CLUSTER_BARRIER:
                if w.effect.op == "wait":
                    spans = [(*code.spans[x.instruction.index], "") for x in (u, w)]
                    yield Edit((u, w), "cluster barrier deleted, arrive and wait", tuple(spans))
                return


@_operator("drop-wait", "a wait is deleted: the code goes on as if it had succeeded")
def _drop_wait(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    e = u.effect
    if _is_poll(e):
        start, end = code.arguments(u)[0]
        result = code.text[start:end].split("|")[0]
        yield _replace(u, code, f"mov.pred {result}, 1;", f"{u.name} deleted, taken as successful")
    elif e.kind is not Kind.MBARRIER and e.op in _WAITS and e.kind is not Kind.CLUSTER_BARRIER:
        yield _replace(u, code, "", f"{u.name} deleted")


@_operator("drop-commit", "a commit is deleted: later waits cover nothing")
def _drop_commit(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if u.effect.op == "commit" and u.effect.kind is not Kind.TCGEN05:
        yield _replace(u, code, "", f"{u.name} deleted")


@_operator("ignore-poll", "a polling loop asks once and goes on whatever the answer")
def _ignore_poll(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if u.first == u.last:
        return
    header = code.cfg.block_of[u.first]
    changes = []
    for i in range(u.first, u.last + 1):
        ins = code.function.body[i]
        block = code.cfg.block_of[i]
        if (
            ins.opcode == "bra"
            and i == code.cfg.blocks[block].end - 1
            and header in code.cfg.successors[block]
        ):
            following = code.cfg.blocks[block].end
            if following == u.last + 1 or ins.pred is None:
                changes.append((*code.spans[i], ""))
    if changes:
        yield Edit((u,), f"result of {u.name} ignored", tuple(changes))


@_operator("one-thread", "a fence or wait that every thread needs is executed by one thread only")
def _one_thread(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    e, ins = u.effect, u.instruction
    kinds = (Kind.FENCE, Kind.PROXY_FENCE, Kind.GRID_DEPENDENCY, Kind.ASYNC_GROUP, Kind.BULK_GROUP)
    if e.kind not in kinds or ins.pred is not None or e.restrict == "mbarrier_init":
        return
    if e.kind in kinds[2:] and e.op not in _WAITS:
        return
    if not code.everyone(u):
        return
    start, end = code.spans[ins.index]
    statement = " ".join(code.text[start:end].split())
    yield _replace(
        u,
        code,
        "{ .reg .pred k3_first; .reg .b32 k3_tid; mov.u32 k3_tid, %tid.x; "
        f"setp.eq.u32 k3_first, k3_tid, 0; @k3_first {statement} }}",
        f"{u.name} by thread 0 only",
    )


# -- operators: something is too weak ---------------------------------------------------------------------

_NARROWER = {"sys": "gpu", "gpu": "cta", "cluster": "cta"}


@_operator("narrow-scope", "a scope is one step narrower: .sys to .gpu, .gpu and .cluster to .cta")
def _narrow_scope(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    mods = list(u.instruction.mods)
    e = u.effect
    if e.kind in (Kind.CLUSTER_BARRIER, Kind.BULK) or e.restrict:
        return
    at = [i for i, m in enumerate(mods) if m in _NARROWER]
    if e.kind is Kind.PROXY_FENCE and e.proxy == "tensormap" and e.op == "copy":
        return
    if at and (e.kind in (Kind.FENCE, Kind.PROXY_FENCE, Kind.MBARRIER) or _strong(u)):
        old = mods[at[0]]
        mods[at[0]] = _NARROWER[old]
        yield _rename(
            u, code, ".".join([u.instruction.opcode, *mods]), f"{u.name}: .{old} becomes .{mods[at[0]]}"
        )
    elif e.kind in (Kind.ATOMIC, Kind.REDUCTION) and not at and e.scope == "gpu":
        mods[:0] = ["relaxed", "cta"] if e.sem == "relaxed" and "relaxed" not in mods else ["cta"]
        if mods[0] == "cta":
            mods[:2] = [mods[1], "cta"]
        yield _rename(
            u, code, ".".join([u.instruction.opcode, *mods]), f"{u.name}: the default .gpu becomes .cta"
        )
    elif u.instruction.opcode == "membar" and e.scope != "cta":
        level = {"sys": "gl", "gpu": "cta"}[e.scope]
        yield _rename(u, code, f"membar.{level}", f"{u.name} becomes membar.{level}")


def _strong(u: Unit) -> bool:
    return any(a.role == "data" and not a.asynchronous and a.sem not in ("weak", "", "volatile", "mmio")
               for a in u.effect.accesses)  # fmt: skip


_WEAKER = {"release": "relaxed", "acquire": "relaxed", "acq_rel": "relaxed"}


@_operator("weaken-order", "release or acquire becomes relaxed, a sequentially consistent fence acq_rel, a strong "
           "access weak, a barrier that waits one that only arrives")  # fmt: skip
def _weaken_order(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    e, ins = u.effect, u.instruction
    mods = list(ins.mods)
    written = next((m for m in mods if m in _WEAKER), "")
    if e.kind is Kind.FENCE:
        if "sc" in mods and not e.restrict:
            yield _rename(u, code, u.name.replace(".sc", ".acq_rel"), f"{u.name}: .sc becomes .acq_rel")
        return
    if e.kind is Kind.CLUSTER_BARRIER:
        if e.op == "arrive" and e.sem == "release":
            new = [m for m in mods if m != "release"]
            new.insert(new.index("arrive") + 1, "relaxed")
            yield _rename(u, code, ".".join([ins.opcode, *new]), f"{u.name} becomes relaxed")
        return
    if e.kind is Kind.BARRIER and e.op == "sync":
        count = code.threads
        if count and len(ins.operands) == 1:
            name = ".".join([ins.opcode, *("arrive" if m == "sync" else m for m in mods)])
            start, end = code.arguments(u)[0]
            statement = f"{name} {code.text[start:end]}, {count};"
            yield _replace(u, code, statement, f"{u.name} only arrives")
        return
    if e.kind is Kind.MBARRIER and e.op != "init" and e.sem in _WEAKER:
        if written:
            new = ["relaxed" if m in _WEAKER else m for m in mods]
        else:
            at = next((i for i, m in enumerate(mods) if m.startswith("shared") or m == "b64"), len(mods))
            new = [*mods[:at], "relaxed", "cta", *mods[at:]]
        yield _rename(u, code, ".".join([ins.opcode, *new]), f"{u.name}: {e.sem} becomes relaxed")
        return
    if written and _strong(u):
        new = ["relaxed" if m in _WEAKER else m for m in mods]
        yield _rename(u, code, ".".join([ins.opcode, *new]), f"{u.name}: .{written} becomes .relaxed")
        return
    strong = next((m for m in mods if m in ("relaxed", "volatile", "mmio")), "")
    if strong and e.kind in (Kind.LOAD, Kind.STORE) and not e.op:
        new = [m for m in mods if m not in (strong, "sys", "gpu", "cluster", "cta")]
        yield _rename(u, code, ".".join([ins.opcode, *new]), f"{u.name}: .{strong} becomes weak")


@_operator("wrong-space", "a proxy fence covers another state space")
def _wrong_space(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    e = u.effect
    if e.kind is not Kind.PROXY_FENCE or e.proxy != "async" or e.restrict:
        return
    new = "global" if e.space.startswith("shared") or not e.space else "shared::cta"
    mods = [m for m in u.instruction.mods if m != e.space]
    yield _rename(u, code, ".".join([u.instruction.opcode, *mods, new]), f"{u.name} covers .{new} only")


@_operator("add-read", "a wait for bulk stores waits for their reads only")
def _add_read(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if u.effect.kind is Kind.BULK_GROUP and u.effect.op == "wait":
        yield _rename(u, code, f"{u.name}.read", f"{u.name} becomes {u.name}.read")


@_operator("wait-fewer", "a wait for groups leaves one more pending")
def _wait_fewer(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    e = u.effect
    if e.kind not in (Kind.BULK_GROUP, Kind.ASYNC_GROUP, Kind.WGMMA) or e.op not in ("wait", "wait_read"):
        return
    start, end = code.arguments(u)[0]
    old = code.text[start:end]
    if old.isdigit():
        yield Edit((u,), f"{u.name} {old} becomes {int(old) + 1}", ((start, end, str(int(old) + 1)),))


# -- operators: the wrong value ---------------------------------------------------------------------------


@_operator("flip-phase", "a wait asks for the other phase parity")
def _flip_phase(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if _is_poll(u.effect) and "parity" in u.instruction.mods:
        yield from _operand(code, u, 2, "phase parity flipped", "xor.b32", "1", lambda v: v ^ 1)


@_operator("expect-tx", "half of the expected transaction bytes")
def _expect_tx(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if u.effect.kind is Kind.MBARRIER and u.effect.op.endswith("expect_tx"):
        yield from _operand(code, u, -1, "half of the bytes are expected", "shr.u32", "1", lambda v: v // 2)


def _operand(
    code: Code, u: Unit, which: int, what: str, opcode: str, by: str, constant: Callable[[int], int]
) -> Iterator[Edit]:
    """One operand becomes `opcode(operand, by)`: folded for a number, computed in a block of its own else."""
    start, end = code.arguments(u)[which]
    old = code.text[start:end]
    what = f"{u.name}: {what}"
    if re.fullmatch(r"\d+", old):
        yield Edit((u,), what, ((start, end, str(constant(int(old)))),))
        return
    first, last = code.spans[u.instruction.index]
    head = f"{{ .reg .b32 k3_value; {opcode} k3_value, {old}, {by}; "
    yield Edit((u,), what, ((first, first, head), (start, end, "k3_value"), (last, last, " }")))


# -- operators: the wrong order ---------------------------------------------------------------------------


@_operator("delay-wait", "a wait stands below the next access that it guards")
def _delay_wait(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if not _is_wait(u):
        return
    for k, other in code.following(n):
        if _guarded(code, n, u, other):
            changes = code.below(n, k)
            if changes:
                yield Edit((u, other), f"{u.name} moved below {other.name}", changes)
            return


@_operator("early-signal", "a signal stands above the access before it")
def _early_signal(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if not _is_signal(u):
        return
    for k, other in code.preceding(n):
        if _plain(other) and _announced(u, other):
            changes = code.below(k, n)
            if changes:
                yield Edit((other, u), f"{u.name} moved above {other.name}", changes)
            return


@_operator("swap", "two neighbouring synchronising instructions change places")
def _swap(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if not _synchronises(u):
        return
    for k, other in code.following(n):
        if _plain(other):
            return
        if _synchronises(other):
            changes = code.below(n, k) if _swappable(u, other) else None
            if changes:
                yield Edit((u, other), f"{u.name} and {other.name} swapped", changes)
            return


def _synchronises(u: Unit) -> bool:
    return _is_wait(u) or _is_signal(u) or (u.effect.kind is Kind.MBARRIER) or _strong(u)


def _swappable(a: Unit, b: Unit) -> bool:
    """The order of the two can matter: they differ, and one of them orders what the other does."""
    if a.name == b.name:
        return False
    orders = [_is_wait(u) or (_is_signal(u) and u.effect.kind is not Kind.MBARRIER) for u in (a, b)]
    return any(orders)


# What a wait is there for, by kind: the state spaces whose accesses it guards.
_GUARDS = {
    Kind.MBARRIER: ("shared", "tmem", "generic"),
    Kind.BARRIER: ("shared", "global", "tmem", "generic"),
    Kind.WARP_BARRIER: ("shared", "generic"),
    Kind.CLUSTER_BARRIER: ("shared", "generic"),
    Kind.GRID_DEPENDENCY: ("global", "multimem", "generic"),
    Kind.ASYNC_GROUP: ("shared", "generic"),
    Kind.BULK_GROUP: ("shared", "generic"),
    Kind.TCGEN05: ("tmem",),
}
_NOT_UPSTREAM = frozenset({Role.WEIGHT, Role.FLAG, Role.PEER, Role.MULTICAST, Role.SCRATCH})


def _guarded(code: Code, n: int, wait: Unit, other: Unit) -> bool:
    """The access (or the first use of a result) that a wait is there for."""
    e = wait.effect
    if e.kind is Kind.WGMMA or (e.kind is Kind.TCGEN05 and e.op == "wait_ld"):
        uses = set(used(other.instruction)) - set(defined(other.instruction))
        return other.effect.kind is not e.kind and bool(code.results[e.kind] & uses)
    if not _plain(other):
        return False
    spaces = _GUARDS.get(e.kind, ("global", "shared", "generic"))
    if not any(a.space.split("::")[0] in spaces for a in _data(other)):
        return False
    return e.kind is not Kind.GRID_DEPENDENCY or code.upstream(other)


def _announced(signal: Unit, other: Unit) -> bool:
    """The accesses that a signal is there for."""
    e = signal.effect
    if e.kind in (Kind.BULK_GROUP, Kind.ASYNC_GROUP, Kind.WGMMA, Kind.TCGEN05):
        wanted = {Kind.BULK_GROUP: Kind.BULK, Kind.ASYNC_GROUP: Kind.ASYNC_COPY}.get(e.kind, e.kind)
        return other.effect.kind is wanted
    if any(a.asynchronous for a in _data(other)):
        return False
    if e.restrict == "mbarrier_init":
        return False
    writes = any(a.writes for a in _data(other))
    if e.kind is Kind.PROXY_FENCE:
        return writes
    return True


# -- source -----------------------------------------------------------------------------------------------


def source_mutants(text: str, file: str) -> Iterator[Mutant]:
    """Mutants of a kernel's Python source: inline assembly that no longer says that it touches memory."""
    spans = []
    for m in re.finditer(r",?~\{\{?memory\}\}?", text):
        spans.append(("drop-clobber", m.start(), m.end(), "", "memory clobber deleted"))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.keyword) or node.arg != "has_side_effects":
            continue
        if isinstance(node.value, ast.Constant) and node.value.value is True:
            lines = text.split("\n")
            at = sum(len(x) + 1 for x in lines[: node.value.lineno - 1]) + node.value.col_offset
            spans.append(("drop-side-effects", at, at + len("True"), "False", "side effects off"))
    code = _code_lines(text)
    seen: Counter[tuple[str, str]] = Counter()
    for operator, start, end, new, what in sorted(spans, key=lambda s: s[1]):
        line = text.count("\n", 0, start) + 1
        if line not in code:
            continue
        shown = text.split("\n")[line - 1].strip()
        seen[operator, shown] += 1
        yield Mutant(
            file, operator, Site(line, shown, "", f"{file}:{line}"), (line, line), what,
            text[:start] + new + text[end:], fingerprint(file, operator, shown, seen[operator, shown]),
        )  # fmt: skip


MEANING["drop-clobber"] = "inline assembly loses its memory clobber (kernel source)"
MEANING["drop-side-effects"] = "inline assembly loses its side effects (kernel source)"


def _code_lines(text: str) -> set[int]:
    """Lines of a Python text that are not part of a docstring."""
    tree = ast.parse(text)
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return set(range(1, text.count("\n") + 2)) - prose


# -- all of them ------------------------------------------------------------------------------------------


def fingerprint(kernel: str, operator: str, instructions: str, number: int) -> str:
    """What names a mutant in tests/corpus/survivors.toml."""
    return hashlib.sha256(f"{kernel}|{operator}|{instructions}|{number}".encode()).hexdigest()[:12]


def mutants(text: str, contract: Contract | None = None, kernel: str = "") -> Iterator[Mutant]:
    """All mutants of one kernel of a PTX text (the only one, unless `kernel` names it), in a fixed order.

    Raises PtxError when the text is no PTX, ValueError when the kernel is not in it.
    """
    module = parse(text)
    entries = [f for f in module.entries if not kernel or f.name == kernel]
    if len(entries) != 1:
        names = ", ".join(f.name for f in module.entries) or "none"
        raise ValueError(f"one kernel to mutate is needed; in the text: {names}")
    entry = entries[0]
    seen: Counter[tuple[str, str]] = Counter()
    for function in _functions(module, entry):
        code = Code(text, function, Subject(module, entry, contract))
        for n, unit in enumerate(code.units):
            for operator, propose in OPERATORS.items():
                for edit in propose(code, n, unit):
                    names = " ".join(u.name for u in edit.at)
                    seen[operator, names] += 1
                    lines = [x for u in edit.at for x in (code.line(u.start), code.line(u.end))]
                    ins = edit.at[0].instruction
                    yield Mutant(
                        entry.name,
                        operator,
                        Site(ins.line, ins.text, operator, str(ins.loc) if ins.loc else ""),
                        (min(lines), max(lines)),
                        edit.what,
                        _apply(text, edit.changes),
                        fingerprint(entry.name, operator, names, seen[operator, names]),
                    )


def _functions(module: Module, entry: Function) -> list[Function]:
    """The kernel and the functions that it may call."""
    return [f for f in module.functions.values() if f.has_body and (f is entry or not f.is_entry)]


def _apply(text: str, changes: tuple[tuple[int, int, str], ...]) -> str:
    """`text` with spans replaced. A span that holds line breaks keeps them, so that no line moves."""
    out, at = [], 0
    for start, end, new in sorted(changes, key=lambda c: (c[0], c[1])):
        out += [text[at:start], new, "\n" * text.count("\n", start, end)]
        at = end
    return "".join([*out, text[at:]])
