"""Questions about memory and fences that several rules ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ..ptx.effects import Access, Effect, Kind, defined, used
from ..ptx.ir import Instruction
from ..ptx.provenance import may_overlap
from ..subject import Subject

SHARED = ("shared::cta", "shared::cluster")
RANK = {"": 0, "cta": 1, "cluster": 2, "gpu": 3, "sys": 4}


def async_shared_reads(s: Subject) -> Iterator[tuple[int, Access]]:
    """Reads of shared memory through the async proxy: bulk stores, wgmma and tcgen05 operands."""
    for i in s.find(Kind.BULK, Kind.WGMMA, Kind.TCGEN05):
        for a in s.effects[i].accesses:
            if a.reads and a.proxy == "async" and a.space in SHARED and a.role == "data":
                yield i, a


def async_shared_writes(s: Subject) -> Iterator[tuple[int, Access]]:
    """Writes of shared memory through the async proxy: bulk loads, try_cancel."""
    for i in s.find(Kind.BULK):
        for a in s.effects[i].accesses:
            if a.writes and a.proxy == "async" and a.space in SHARED and a.role == "data":
                yield i, a


def generic_shared(s: Subject, writes: bool) -> Iterator[tuple[int, Access]]:
    """Ordinary accesses of shared memory, and `cp.async` writes, which use the generic proxy too."""
    for i, a in s.accesses(*SHARED):
        if a.proxy == "generic" and a.role == "data" and (a.writes if writes else a.reads):
            yield i, a


def fences_async(e: Effect, space: str = "shared") -> bool:
    """A fence between the generic and the async proxy that covers `space`."""
    if e.kind is not Kind.PROXY_FENCE or e.proxy != "async":
        return False
    return e.space == "" or e.space.split("::")[0] == space


def exact(s: Subject, i: int, a: Access) -> bool:
    """The access has one known origin and a bounded range, so that an overlap is one and not a lack of knowledge."""
    parts = s.address(i, a).parts
    if len(parts) != 1 or parts[0][0] is None or not s.address(i, a).known:
        return False
    return all(map(math.isfinite, parts[0][1]))


def peer(s: Subject, i: int, a: Access) -> bool:
    """The address may be in another CTA of the cluster."""
    return any(b is not None and b.peer for b, _ in s.address(i, a).parts)


def groups(s: Subject, accesses: Iterator[tuple[int, Access]]) -> list[list[tuple[int, Access]]]:
    """Accesses with the same address and width together, so that each place is looked at once."""
    found: dict[object, list[tuple[int, Access]]] = {}
    for i, a in accesses:
        found.setdefault((s.address(i, a).parts, s.width(i, a), a.multicast), []).append((i, a))
    return list(found.values())


def narrow(scope: str, needed: str) -> bool:
    """`scope` does not include everything that `needed` includes."""
    return RANK[scope] < RANK[needed]


def waits_on(s: Subject, i: int, own: Access) -> list[int]:
    """mbarrier waits for the object that access `own` of instruction `i` arrives at, whose result is looked at."""
    target = s.address(i, own)
    return [
        w
        for w in s.find(Kind.MBARRIER)
        if s.order.is_wait(w)
        and may_overlap(target, 8, s.address(w, s.effects[w].accesses[0]), 8, same_cta=False)
        and looked_at(s, w)
    ]


def looked_at(s: Subject, i: int) -> bool:
    """The result of a wait or a load decides some branch."""
    values = deciding(s)
    return any(s.ssa.written(i, r) in values for r in defined(s.body[i]))


def deciding(s: Subject) -> set[int]:
    """All values on which some branch depends, directly or through computation. Made once per subject."""
    return _slice(s, "_deciding", lambda ins: ins.opcode in ("bra", "brx", "exit", "ret", "trap"))


def live(s: Subject) -> set[int]:
    """All values that matter: to a branch, or to an instruction that does more than compute. Made once per subject."""
    quiet = (Kind.COMPUTE, Kind.WARP)
    return _slice(s, "_live", lambda ins: s.effects[ins.index].kind not in quiet)


def _slice(s: Subject, name: str, matters: Callable[[Instruction], bool]) -> set[int]:
    """Values that the instructions that matter read, and all values from which those are computed."""
    found: set[int] | None = s.__dict__.get(name)
    if found is None:
        found = set()
        registers = s.function.registers
        work = [
            s.ssa.read(ins.index, r)
            for ins in s.body
            if s.cfg.block_of[ins.index] in s.cfg.reachable and matters(ins)
            for r in used(ins)
            if r in registers
        ]
        while work:
            v = work.pop()
            if v in found:
                continue
            found.add(v)
            value = s.ssa.values[v]
            work.extend(i for _, i in value.inputs)
            if value.index >= 0:
                work.extend(s.ssa.read(value.index, r) for r in used(s.body[value.index]) if r in registers)
        s.__dict__[name] = found
    return found


def one_place(s: Subject, i: int, a: Access) -> bool:
    """The address is a variable's, or an element of it that only the thread index chooses: the same in every round of
    every loop, and in every CTA."""
    address = s.address(i, a)
    if len(address.parts) == 1 and address.known and address.parts[0][1][0] == address.parts[0][1][1]:
        return True
    return all(
        atom[0] == "sym" or s.threads.subject(atom)[0] in ("thread", "lane")
        for atom, _ in address.affine.terms
    )
