"""The operators: one mistake each, as a function that proposes edits at one unit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..ptx.effects import Kind, defined, used
from .units import WAITS, Code, Unit, data, is_plain, is_poll, is_signal, is_wait


@dataclass(frozen=True)
class Edit:
    """What an operator proposes: replacements of text spans, at one or two units."""

    at: tuple[Unit, ...]
    what: str
    changes: tuple[tuple[int, int, str], ...]


Operator = Callable[[Code, int, Unit], Iterator[Edit]]
OPERATORS: dict[str, Operator] = {}
MEANING: dict[str, str] = {
    "drop-clobber": "inline assembly loses its memory clobber (kernel source)",
    "drop-side-effects": "inline assembly loses its side effects (kernel source)",
}


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
    e = u.effect
    ordinary = e.kind in (Kind.FENCE, Kind.PROXY_FENCE) and e.op != "copy"
    tensor = e.op in ("fence", "before_thread_sync", "after_thread_sync")
    if ordinary or (tensor and e.kind in (Kind.WGMMA, Kind.TCGEN05)):
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
    if not code.guards(u):
        return
    if is_poll(e):
        start, end = code.arguments(u)[0]
        result = code.text[start:end].split("|")[0]
        yield _replace(u, code, f"mov.pred {result}, 1;", f"{u.name} deleted, taken as successful")
    elif e.kind is not Kind.MBARRIER and e.op in WAITS and e.kind is not Kind.CLUSTER_BARRIER:
        yield _replace(u, code, "", f"{u.name} deleted")


@_operator("drop-commit", "a commit is deleted: later waits cover nothing")
def _drop_commit(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if u.effect.op == "commit" and u.effect.kind is not Kind.TCGEN05:
        yield _replace(u, code, "", f"{u.name} deleted")


@_operator("ignore-poll", "a polling loop asks once and goes on whatever the answer")
def _ignore_poll(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if u.first == u.last or not code.guards(u):
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
    if e.kind in kinds[2:] and e.op not in WAITS:
        return
    if not code.everyone(u) or not code.guards(u):
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
        if (is_poll(e) and not code.guards(u)) or _tensor_fenced(code, n, u):
            return
        if e.op == "arrive_expect_tx" and not any(is_plain(x) for _, x in code.preceding(n)):
            return  # it announces bytes to come, and nothing that the thread has done
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


def _tensor_fenced(code: Code, n: int, u: Unit) -> bool:
    """A tcgen05 fence stands beside the arrival or wait: for tensor memory it orders with relaxed ones too (PTX ISA,
    "tcgen05 Memory Consistency Model")."""
    near, name = (
        (code.following(n), "after_thread_sync")
        if is_poll(u.effect)
        else (code.preceding(n), "before_thread_sync")
    )
    beside = next((x for _, x in near if x.effect.kind is not Kind.COMPUTE), None)
    return beside is not None and beside.effect.op == name


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
    if is_poll(u.effect) and "parity" in u.instruction.mods and code.guards(u):
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
    if not is_wait(u):
        return
    # An mbarrier is completed from elsewhere too; a barrier hands over what was done before it.
    anywhere = u.effect.kind is Kind.MBARRIER
    earlier = range(len(code.effects)) if anywhere else code.cfg.before([u.first])
    for k, other in code.following(n):
        if _guarded(code, n, u, other) and (not is_plain(other) or code.conflicts(other, earlier)):
            changes = code.below(n, k)
            if changes:
                yield Edit((u, other), f"{u.name} moved below {other.name}", changes)
            return


@_operator("early-signal", "a signal stands above the access before it")
def _early_signal(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if not is_signal(u):
        return
    for k, other in code.preceding(n):
        if is_plain(other) and _announced(u, other) and code.conflicts(other, code.cfg.after([u.last])):
            changes = code.below(k, n)
            if changes:
                yield Edit((other, u), f"{u.name} moved above {other.name}", changes)
            return


@_operator("swap", "two neighbouring synchronising instructions change places")
def _swap(code: Code, n: int, u: Unit) -> Iterator[Edit]:
    if not _synchronises(u):
        return
    for k, other in code.following(n):
        if is_plain(other):
            return
        if _synchronises(other):
            changes = code.below(n, k) if _swappable(u, other) else None
            if changes:
                yield Edit((u, other), f"{u.name} and {other.name} swapped", changes)
            return


def _synchronises(u: Unit) -> bool:
    return is_wait(u) or is_signal(u) or (u.effect.kind is Kind.MBARRIER) or _strong(u)


def _swappable(a: Unit, b: Unit) -> bool:
    """The order of the two can matter: they differ, and one of them orders what the other does.

    A signal that moves below a wait makes the code wait longer or for ever, and is no weaker.
    """
    kinds = {a.effect.kind, b.effect.kind}
    if a.name == b.name or Kind.GRID_DEPENDENCY in kinds:
        return False
    if any(u.effect.restrict == "mbarrier_init" for u in (a, b)):
        return a.effect.op == "init" or Kind.CLUSTER_BARRIER in kinds
    if Kind.MBARRIER in kinds and any(u.effect.proxy == "tensormap" for u in (a, b)):
        return False  # they speak of different memory
    fences = (Kind.FENCE, Kind.PROXY_FENCE, Kind.BARRIER, Kind.WARP_BARRIER)
    if is_signal(a) and is_wait(b) and not kinds & set(fences):
        return False
    return any(is_wait(u) or (is_signal(u) and u.effect.kind is not Kind.MBARRIER) for u in (a, b))


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


def _guarded(code: Code, n: int, wait: Unit, other: Unit) -> bool:
    """The access (or the first use of a result) that a wait is there for."""
    e = wait.effect
    if e.kind is Kind.WGMMA:
        uses = set(used(other.instruction)) - set(defined(other.instruction))
        return other.effect.kind is not e.kind and bool(code.results & uses)
    if e.kind is Kind.TCGEN05 and e.op in ("wait_ld", "wait_st"):
        # The value of a load is ordered by its register; the wait is for whoever uses the tensor memory next.
        return is_signal(other) or other.effect.kind is Kind.TCGEN05
    if not is_plain(other):
        return False
    spaces = _GUARDS.get(e.kind, ("global", "shared", "generic"))
    if not any(a.space.split("::")[0] in spaces for a in data(other)):
        return False
    return e.kind is not Kind.GRID_DEPENDENCY or code.upstream(other)


def _announced(signal: Unit, other: Unit) -> bool:
    """The accesses that a signal is there for."""
    e = signal.effect
    if e.kind in (Kind.BULK_GROUP, Kind.ASYNC_GROUP, Kind.WGMMA, Kind.TCGEN05):
        wanted = {Kind.BULK_GROUP: Kind.BULK, Kind.ASYNC_GROUP: Kind.ASYNC_COPY}.get(e.kind, e.kind)
        return other.effect.kind is wanted
    if any(a.asynchronous for a in data(other)):
        return False
    if e.restrict == "mbarrier_init":
        return False
    writes = any(a.writes for a in data(other))
    if e.kind is Kind.PROXY_FENCE:
        return writes
    return True
