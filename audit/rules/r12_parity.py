"""R12: a wait whose parity does not follow the phases of its object."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.cfg import Loop
from ..ptx.effects import Kind
from ..ptx.order import must_equal
from ..ptx.provenance import Affine, may_overlap
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .rounds import Rounds

_ROUNDS = 24  # more than two laps of any ring that fits in shared memory with useful stages
_STARTS = (0, 1, 2, 3)  # first values that are tried where the text does not tell


def check(s: Subject) -> Iterator[Finding]:
    yield from _repeated(s)
    yield from _first(s)


def _first(s: Subject) -> Iterator[Finding]:
    """The first wait for what asynchronous copies complete must ask for parity 0: parity 1 is the phase before the
    first, which counts as complete."""
    inits = s.find(Kind.MBARRIER, op="init")
    waits = [w for w in s.find(Kind.MBARRIER) if s.order.is_wait(w) and "parity" in s.body[w].mods]
    for w in waits:
        own = s.address(w, s.effects[w].accesses[0])
        here = [i for i in inits if must_equal(own, s.address(i, s.effects[i].accesses[0]))]
        copies = [
            i
            for i in s.order.events
            for a, itself in s.order.arrivals(i)
            if may_overlap(own, 8, s.address(i, a), 8, same_cta=False) and (not itself or _precedes(s, i, w))
        ]
        same = [v for v in waits if s.address(v, s.effects[v].accesses[0]).parts == own.parts]
        earlier = [v for v in same if v != w and s.cfg.dominates(v, w)]
        parity = _parity(s, w)
        if not here or not copies or parity is None or [v for v in earlier if _parity(s, v) != parity]:
            continue
        if _first_value(s, w, parity) == 1:
            yield s.finding(
                "R12",
                Severity.WARNING,
                "the first wait asks for parity 1 of a fresh mbarrier: the phase before the first, which counts "
                "as complete, so the wait returns before the copies have arrived",
                [s.site(copies[0], "copy"), s.site(w, "wait")],
                missing="parity of the first wait = 0",
                fix=f"start with parity 0 at line {s.body[w].line}",
            )
            return


def _precedes(s: Subject, arrival: int, wait: int) -> bool:
    """The waiting threads arrive themselves before they first wait: they wait for the phase that they complete."""
    if s.effects[arrival].op == "arrive_expect_tx":
        return False
    enter = s.order.as_thread_of(wait)
    early = s.order.search([s.order.head(0)], stop=[wait].__contains__, sync=False, enter=enter)
    return arrival in early and wait in s.order.search([arrival], sync=False, enter=enter)


def _first_value(s: Subject, w: int, parity: Affine) -> int | None:
    """The parity that the first execution of a wait asks for, None if the text does not tell."""
    if parity.constant is not None:
        return parity.constant & 1
    around = [loop for loop in s.cfg.loops if s.cfg.block_of[w] in loop.blocks and not _spins(s, loop, w)]
    if len(around) != 1:
        return None
    found = {Rounds(s, around[0], start).form(parity) for start in _STARTS}
    value = found.pop() if len(found) == 1 else None
    return None if value is None else value & 1


def _repeated(s: Subject) -> Iterator[Finding]:
    waits = [w for w in s.find(Kind.MBARRIER) if s.order.is_wait(w) and "parity" in s.body[w].mods]
    for loop in s.cfg.loops:
        for w in waits:
            if s.cfg.block_of[w] not in loop.blocks or _spins(s, loop, w):
                continue
            if not all(s.cfg.block_dominates(s.cfg.block_of[w], b) for b in loop.latches):
                continue
            parity, rearmed = _parity(s, w), _arrival(s, loop, w)
            if parity is None or rearmed is None or not _lags(s, loop, w, parity):
                continue
            yield s.finding(
                "R12",
                Severity.WARNING,
                "the parity that this wait asks for does not flip with every use of its mbarrier in the loop: in some "
                "round it asks for the phase before, and returns at once, or for one that has gone by, and hangs",
                [s.site(rearmed, "next phase"), s.site(w, "wait")],
                missing="parity of the wait = phase of the round (flipped once per use of the object)",
                fix="keep the parity in a variable and flip it (xor 1) each time the object is used again",
            )
            return


def _lags(s: Subject, loop: Loop, w: int, parity: Affine) -> bool:
    """Some object is waited for with one parity twice in a row, whatever unknown variables start from."""
    place = s.address(w, s.effects[w].accesses[0]).affine
    for start in _STARTS:
        rounds = Rounds(s, loop, start)
        last: dict[int, int] = {}
        repeated = False
        for _ in range(_ROUNDS):
            here, asked = rounds.form(place), rounds.form(parity)
            if here is None or asked is None:
                return False
            repeated |= last.get(here) == asked & 1
            last[here] = asked & 1
            rounds.advance()
        if not repeated:
            return False
        if rounds.exact:
            return True
    return True


def _spins(s: Subject, loop: Loop, w: int) -> bool:
    """The loop only waits: nothing else in it has a meaning."""
    inside = (i for b in loop.blocks for i in range(s.cfg.blocks[b].start, s.cfg.blocks[b].end))
    quiet = (Kind.COMPUTE, Kind.BRANCH, Kind.WARP)
    return all(i == w or s.effects[i].kind in quiet or s.order.is_wait(i) for i in inside)


def _parity(s: Subject, w: int) -> Affine | None:
    operands = s.body[w].operands
    return s.provenance.operand_affine(s.body[w], operands[2]) if len(operands) > 2 else None


def _arrival(s: Subject, loop: Loop, w: int) -> int | None:
    """An arrival in the loop that starts the next phase of the object that `w` waits for."""
    own = s.address(w, s.effects[w].accesses[0])
    for i in s.order.events:
        if s.cfg.block_of[i] in loop.blocks:
            for a, _ in s.order.arrivals(i):
                if s.address(i, a).parts == own.parts and may_overlap(own, 8, s.address(i, a), 8):
                    return i
    return None


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [x];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    mov.u32 %r3, full;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r2, %r4;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    READY:
    bar.sync 0;
    mov.b32 %r6, 0;
    mov.b32 %r7, 0;
    LOOP:
    @%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 512;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 512, [%r3];
    ISSUED:
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], %r7;
    @!%p2 bra WAIT;
    ld.shared.b32 %r8, [%r5];
    fence.proxy.async.shared::cta;
    bar.sync 0;
    xor.b32 %r7, %r7, 1;
    add.s64 %rd1, %rd1, 512;
    add.s32 %r6, %r6, 1;
    setp.lt.s32 %p3, %r6, 8;
    @%p3 bra LOOP;
    """,
    params=".param .u64 .ptr .global .align 128 x",
    declare=".shared .align 128 .b8 smem[512];\n.shared .align 8 .b64 full;",
)

RULE = Rule(
    id="R12",
    title="parity of a wait does not follow the phases",
    severity=Severity.WARNING,
    meaning=(
        "A parity wait can only tell the current phase of an mbarrier from the one before. Whoever reuses an "
        "object must "
        "flip the parity with every use, and no party may run two phases ahead of another, or the wait confuses two "
        "laps: it returns at once on an old phase, or waits for one that has gone by. A wait with a fixed parity in a "
        "loop that completes a phase per round is right in one round of two at most."
    ),
    looks_for=(
        "a parity wait that every round of a loop executes, on an object that the loop arrives at, when following the "
        "loop's variables round by round shows one object waited for with the same parity twice in a row; a first wait "
        "for copies that asks for parity 1"
    ),
    isa_section="mbarrier: Phase of the mbarrier object; mbarrier.test_wait / try_wait",
    fix="flip the parity each time the object is used again",
    failing=_PASSING.replace("    xor.b32 %r7, %r7, 1;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation("flip deleted", "    xor.b32 %r7, %r7, 1;\n", ""),
        Mutation("first parity", "mov.b32 %r7, 0;", "mov.b32 %r7, 1;"),
        Mutation("constant parity", "[%r3], %r7;", "[%r3], 0;"),
        Mutation("flip lost", "    xor.b32 %r7, %r7, 1;\n", "    xor.b32 %r9, %r7, 1;\n"),
    ),
    check=check,
)
