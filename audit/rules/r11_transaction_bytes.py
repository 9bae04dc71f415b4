"""R11: an mbarrier is told to expect another number of bytes than its copies bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..findings import Finding, Severity
from ..ptx.effects import Kind
from ..ptx.ir import Imm, Instruction
from ..ptx.provenance import Affine
from ..subject import Subject
from .base import Mutation, Rule, snippet


@dataclass
class _Phase:
    """One expectation of one thread, and the copies that follow it in the same straight line of code."""

    expect: int
    bytes: int
    copies: list[int] = field(default_factory=list)
    total: int = 0
    known: bool = True


def check(s: Subject) -> Iterator[Finding]:
    shared = _completed_elsewhere(s)
    for b in s.cfg.blocks:
        if b.index not in s.cfg.reachable:
            continue
        open_: dict[Affine, _Phase] = {}
        for i in range(b.start, b.end):
            e = s.effects[i]
            if e.kind is Kind.MBARRIER and e.op in ("arrive_expect_tx", "expect_tx"):
                key = s.address(i, e.accesses[0]).affine
                if key in open_:
                    yield from _judge(s, open_.pop(key))
                count = _expected(s, s.body[i])
                if count is not None and key not in shared and e.op == "arrive_expect_tx":
                    open_[key] = _Phase(i, count)
            elif e.kind is Kind.BULK:
                for a in e.accesses:
                    key = s.address(i, a).affine
                    if a.role == "mbarrier" and key in open_:
                        _add(s, open_[key], i)
        for phase in open_.values():
            yield from _judge(s, phase)


def _completed_elsewhere(s: Subject) -> set[Affine]:
    """Objects on which bytes are completed in more than one block, or that are expected in more than one way."""
    blocks: dict[Affine, set[int]] = {}
    for i in s.find(Kind.BULK, Kind.MBARRIER):
        e = s.effects[i]
        if e.kind is Kind.MBARRIER and "expect_tx" not in e.op and e.op != "complete_tx":
            continue
        for a in e.accesses:
            if a.role == "mbarrier":
                blocks.setdefault(s.address(i, a).affine, set()).add(s.cfg.block_of[i])
    return {key for key, found in blocks.items() if len(found) > 1}


def _expected(s: Subject, ins: Instruction) -> int | None:
    number = ins.operands[-1]
    if isinstance(number, Imm) and isinstance(number.value, int):
        return number.value
    return s.provenance.operand_affine(ins, number).constant


def _add(s: Subject, phase: _Phase, i: int) -> None:
    phase.copies.append(i)
    data = next(a for a in s.effects[i].accesses if a.role == "data" and a.writes)
    if s.effects[i].op == "try_cancel":
        phase.total += 16
    elif data.size_operand >= 0 and not data.multicast:
        size = s.provenance.operand_affine(s.body[i], s.body[i].operands[data.size_operand]).constant
        if size is None:
            phase.known = False
        else:
            phase.total += size
    elif data.width is not None:
        phase.total += data.width
    else:
        phase.known = False  # a tensor copy: the tensor map knows how many bytes


def _judge(s: Subject, phase: _Phase) -> Iterator[Finding]:
    if not phase.copies or not phase.known or phase.total == phase.bytes:
        return
    less = phase.total < phase.bytes
    outcome = (
        "the phase never completes" if less else "the phase completes while bytes are still on their way"
    )
    if s.executors(phase.expect) != s.executors(phase.copies[0]):
        return
    yield s.finding(
        "R11",
        Severity.ERROR,
        f"the mbarrier expects {phase.bytes} bytes, but the copies that name it bring {phase.total}: {outcome}",
        [s.site(phase.expect, "expect"), *(s.site(i, "copy") for i in phase.copies[:4])],
        missing="expected bytes = sum of the bytes of the phase's copies",
        fix=f"expect {phase.total} bytes at line {s.body[phase.expect].line}, or correct the copies' sizes",
    )


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [x];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    mov.u32 %r3, full;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 768;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 512, [%r3];
    add.s32 %r4, %r2, 512;
    add.s64 %rd2, %rd1, 512;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd2], 256, [%r3];
    READY:
    bar.sync 0;
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
    ld.shared.b32 %r8, [%r2];
    """,
    params=".param .u64 .ptr .global .align 128 x",
    declare=".shared .align 128 .b8 smem[1024];\n.shared .align 8 .b64 full;",
)

RULE = Rule(
    id="R11",
    title="expected bytes differ from the bytes of the copies",
    severity=Severity.ERROR,
    meaning=(
        "A phase of an mbarrier completes when no arrival is pending and its transaction count is zero. The count "
        "is what "
        "was announced with expect-tx minus what copies have completed. Announcing more than comes makes every waiter "
        "hang; announcing less completes the phase early, and waiters read bytes that have not arrived. The rule "
        "adds up "
        "where one thread expects and issues in a straight line with sizes that the text gives;"
        " tensor copies, whose size "
        "is in the tensor map, and copies from other CTAs or other branches are not counted."
    ),
    looks_for="an arrive.expect_tx and, after it in the same block, copies with constant sizes on the same object",
    isa_section="mbarrier: Tracking asynchronous operations, expect-tx operation, complete-tx operation",
    fix="expect exactly the sum of the bytes of all operations that name the object in the phase",
    failing=_PASSING.replace("[%r3], 768", "[%r3], 512"),
    passing=_PASSING,
    mutations=(
        Mutation("too few", "[%r3], 768", "[%r3], 512"),
        Mutation("too many", "[%r3], 768", "[%r3], 1024"),
        Mutation("copy shrunk", "[%rd2], 256", "[%rd2], 128"),
        Mutation(
            "copy deleted",
            "    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd2], 256, [%r3];\n",
            "",
        ),
    ),
    check=check,
)
