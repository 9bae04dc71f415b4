"""R12: a wait whose parity does not follow the phases of its object."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.cfg import Loop
from ..ptx.effects import Kind
from ..ptx.ir import Reg
from ..ptx.provenance import Affine, may_overlap
from ..subject import Subject
from .base import Mutation, Rule, snippet


def check(s: Subject) -> Iterator[Finding]:
    waits = [w for w in s.find(Kind.MBARRIER) if s.order.is_wait(w) and "parity" in s.body[w].mods]
    for loop in s.cfg.loops:
        inside = [w for w in waits if s.cfg.block_of[w] in loop.blocks and not _spins(s, loop, w)]
        for w in inside:
            object_, parity = s.address(w, s.effects[w].accesses[0]), _parity(s, w)
            if parity is None or _changes(s, parity, loop) or _changes(s, object_.affine, loop):
                continue
            rearmed = _arrival(s, loop, w)
            if rearmed is None:
                continue
            yield s.finding(
                "R12",
                Severity.WARNING,
                "in every round of a loop the wait asks for the same parity of the same mbarrier, although the loop "
                "starts a new phase each time: from the second round on the wait returns at once, or never",
                [s.site(rearmed, "next phase"), s.site(w, "wait")],
                missing="parity of the wait = phase of the round (flipped once per use of the object)",
                fix="keep the parity in a variable and flip it (xor 1) each time the object is used again",
            )
            return


def _spins(s: Subject, loop: Loop, w: int) -> bool:
    """The loop only waits: nothing else in it has a meaning."""
    inside = (i for b in loop.blocks for i in range(s.cfg.blocks[b].start, s.cfg.blocks[b].end))
    quiet = (Kind.COMPUTE, Kind.BRANCH, Kind.WARP)
    return all(i == w or s.effects[i].kind in quiet or s.order.is_wait(i) for i in inside)


def _parity(s: Subject, w: int) -> Affine | None:
    operands = s.body[w].operands
    return s.provenance.operand_affine(s.body[w], operands[2]) if len(operands) > 2 else None


def _changes(s: Subject, form: Affine, loop: Loop) -> bool:
    """The value can differ from one round of the loop to the next."""
    for atom, _ in form.terms:
        if atom[0] != "value" or not isinstance(atom[1], int) or atom[1] < 0:
            continue
        value = s.ssa.values[atom[1]]
        block = value.block if value.is_phi else s.cfg.block_of[value.index] if value.index >= 0 else -1
        if block not in loop.blocks:
            continue
        if value.is_phi or s.effects[value.index].kind is not Kind.COMPUTE:
            return True
        ins = s.body[value.index]
        if any(
            _changes(s, s.provenance.operand_affine(ins, op), loop)
            for op in ins.operands[1:]
            if isinstance(op, Reg)
        ):
            return True
    return False


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
        "a parity wait in a loop, on the same object in every round, whose parity does not change in the loop "
        "while the "
        "loop arrives at that object"
    ),
    isa_section="mbarrier: Phase of the mbarrier object; mbarrier.test_wait / try_wait",
    fix="flip the parity each time the object is used again",
    failing=_PASSING.replace("    xor.b32 %r7, %r7, 1;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation("flip deleted", "    xor.b32 %r7, %r7, 1;\n", ""),
        Mutation("constant parity", "[%r3], %r7;", "[%r3], 0;"),
        Mutation("flip lost", "    xor.b32 %r7, %r7, 1;\n", "    xor.b32 %r9, %r7, 1;\n"),
    ),
    check=check,
)
