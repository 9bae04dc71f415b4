"""The protocol of a contract's handoff, lifted out of a kernel's PTX as small programs for the model.

Every thread of one cluster (or block) is walked. Threads that walk alike, instruction by instruction, form a class;
for each pair of a producing and a consuming class one program is made of one thread of each, with the threads that
set the synchronization up. Everything that the program leaves out is left out on the safe side:

- accesses to other data, waits on other barriers: they could only add order;
- transactions of all other threads on the same mbarrier are merged into one. They have one sign, so the count reaches
  zero only when all are in, and their total is taken from the walks, so missing or surplus bytes show;
- branches on data are followed both ways, but all threads go the same way (a kernel whose threads may disagree on
  whether to take part in a handoff is outside these programs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from k3_audit.artifact.contract import Contract, Handoff

from ..ptx.effects import Effect, Kind
from ..ptx.ir import Function
from .program import (
    AsyncStore,
    Barrier,
    BulkCopy,
    ClusterBarrier,
    Compare,
    Condition,
    Fence,
    GridTrigger,
    GridWait,
    Instruction,
    Load,
    Logic,
    MbarrierInit,
    MbarrierInitFence,
    MbarrierUpdate,
    MbarrierWait,
    ModelError,
    Place,
    Program,
    Proxy,
    ProxyFence,
    Scope,
    Sem,
    Store,
    Thread,
    Variable,
)
from .walk import Code, Dim, Pointer, Step, Walk, Where, walk

DATA, BARRIER, OTHER = "data", "mbar", "rest"  # names of locations in a lifted program


@dataclass(frozen=True)
class Lifted:
    """Programs whose condition must be forbidden, and what their verdicts cover, in words."""

    programs: tuple[Program, ...]
    bounds: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Actor:
    """A thread and its walk under one choice of the branches on data."""

    where: Where
    walk: Walk

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The instructions that it executes: threads of one shape differ in addresses only."""
        return tuple(s.instruction.index for s in self.walk.steps)


class Kernel:
    """A kernel with its contract, walked once for all its handoffs.

    `scalars` maps scalar parameters (names of the contract) and the symbols of the grid to numbers; 1 where absent.
    """

    def __init__(self, function: Function, contract: Contract, scalars: Mapping[str, int]):
        self.function, self.contract, self.scalars = function, contract, scalars

    def lift(self, name: str) -> Lifted:
        """The programs of handoff `name`; those that differ only in which CTAs take part count as one.

        Raises ModelError when the contract has no such handoff, or its mechanism cannot be lifted from this PTX.
        """
        handoff = next((h for h in self.contract.handoffs if h.name == name), None)
        if handoff is None:
            known = ", ".join(h.name for h in self.contract.handoffs) or "none"
            raise ModelError(f"{self.contract.kernel} has no handoff {name!r}; known: {known}")
        lifters = {"mbarrier": _mbarrier, "grid_dependency": _grid_dependency}
        if handoff.via not in lifters:
            raise ModelError(
                f"handoffs via {handoff.via} are not lifted yet: write the protocol as a .litmus file"
            )
        programs: dict[object, Program] = {}
        for actors in self.actors:
            for program in lifters[handoff.via](self, handoff, actors):
                programs.setdefault(_essence(program), program)
        if not programs:
            raise ModelError(
                f"no thread of {self.contract.kernel} consumes what the handoff {name} describes"
            )
        return Lifted(tuple(programs.values()), self.bounds)

    @cached_property
    def walks(self) -> list[tuple[Where, list[Walk]]]:
        """The ways of every thread of the first cluster."""
        launch = self.contract.launch
        grid: Dim = tuple(self._extent(text) for text in launch.grid)  # type: ignore[assignment]
        values = {
            variable.name: self.scalars.get(p.name, 1)
            for variable, p in zip(self.function.params, self.contract.params, strict=False)
            if p.role is None
        }
        code = Code(self.function)
        out = []
        for ctaid in _indices(launch.cluster):
            for tid in _indices(launch.block):
                where = Where(tid, launch.block, ctaid, grid, launch.cluster)
                out.append((where, walk(code, where, values)))
        return out

    @cached_property
    def actors(self) -> list[list[_Actor]]:
        """All threads, for each choice of the branches on data that is common to them."""
        groups = []
        for taken in sorted({w.taken for _, ways in self.walks for w in ways}):
            members = [_Actor(where, w) for where, ways in self.walks for w in ways if w.taken == taken]
            if len(members) == len(self.walks):
                groups.append(members)
        if not groups:
            raise ModelError("threads pass different branches on data: no choice of them is common to all")
        return groups

    @property
    def bounds(self) -> tuple[str, ...]:
        launch = self.contract.launch
        named = ", ".join(
            f"{p.name}={self.scalars.get(p.name, 1)}" for p in self.contract.params if p.role is None
        )
        unknown = {
            s.instruction.line
            for actors in self.actors
            for a in actors
            for s in a.walk.steps
            if any(s.addresses[x.operand] is None for x in s.effect.accesses)
        }
        return (
            f"one cluster of {_product(launch.cluster)} CTAs x {_product(launch.block)} threads, "
            f"all {len(self.walks)} walked",
            f"scalars: {named or 'none'}; {len(self.actors)} choices of the branches on data, alike in all threads",
            *(
                [f"left out, address not known: PTX lines {', '.join(map(str, sorted(unknown)))}"]
                if unknown
                else []
            ),
        )

    def _extent(self, text: str) -> int:
        return int(text) if text.isdigit() else self.scalars.get(text, 1)


def _essence(program: Program) -> object:
    """A program without names and with its CTAs numbered in order of appearance."""
    ctas: dict[int, int] = {}
    return (
        program.condition,
        tuple(
            (ctas.setdefault(t.place.cta, len(ctas)), t.place.cluster, t.place.grid, t.body, t.lines)
            for t in program.threads
        ),
    )


def _product(dim: Dim) -> int:
    return dim[0] * dim[1] * dim[2]


def _indices(shape: Dim) -> Iterable[Dim]:
    for z, y, x in product(range(shape[2]), range(shape[1]), range(shape[0])):
        yield (x, y, z)


# Handoffs by mbarrier transactions.


@dataclass(frozen=True)
class _Push:
    """An asynchronous write of `actor` that completes on `barrier`."""

    actor: _Actor
    step: Step
    target: Pointer
    barrier: Pointer
    size: int


def _mbarrier(kernel: Kernel, handoff: Handoff, actors: list[_Actor]) -> Iterable[Program]:
    pushes = [p for a in actors for s in a.walk.steps if (p := _push(a, s)) is not None]
    written = {(p.target, p.barrier): p for p in pushes}
    by_target: dict[Pointer, list[_Push]] = {}
    for p in written.values():
        by_target.setdefault(p.target, []).append(p)
    setup: dict[Pointer, list[_Actor]] = {}
    for a in actors:
        for barrier in dict.fromkeys(_barrier_of(s) for s in a.walk.steps if _sets_up(s)):
            setup.setdefault(barrier, []).append(a)
    done = set()
    for reader in actors:
        for step in reader.walk.steps:
            if step.effect.kind == Kind.LOAD and (address := step.addresses[1]) is not None:
                for push in by_target.get(address, ()):
                    near = push.actor.where.rank == reader.where.rank
                    same = push.actor is reader
                    key = (reader.shape, push.actor.shape, push.barrier.name, push.barrier.offset, near, same)
                    if key not in done:
                        done.add(key)
                        chosen = [push.actor, *setup.get(push.barrier, ()), reader]
                        yield _mbarrier_program(kernel.contract, handoff, chosen, pushes, push, reader)


def _push(actor: _Actor, step: Step) -> _Push | None:
    what = step.effect
    if what.kind != Kind.BULK:
        return None
    data = next((a for a in what.accesses if a.writes and a.role == "data"), None)
    flag = next((a for a in what.accesses if a.role == "mbarrier"), None)
    if data is None or flag is None:
        return None
    target, barrier = step.addresses[data.operand], step.addresses[flag.operand]
    size = data.width or (step.numbers[data.size_operand] if data.size_operand >= 0 else None)
    if target is None or barrier is None or size is None:
        raise ModelError(f"line {step.instruction.line}: address or size not known: {step.instruction.text}")
    return _Push(actor, step, target, barrier, size)


def _barrier_of(step: Step) -> Pointer:
    access = next(a for a in step.effect.accesses if a.role == "mbarrier")
    address = step.addresses[access.operand]
    if address is None:
        raise ModelError(f"line {step.instruction.line}: mbarrier not known: {step.instruction.text}")
    return address


def _mbarrier_program(
    contract: Contract,
    handoff: Handoff,
    chosen: list[_Actor],
    pushes: list[_Push],
    push: _Push,
    reader: _Actor,
) -> Program:
    barrier = push.barrier
    chosen = list(dict.fromkeys(chosen))
    if len(chosen) > 8:
        raise ModelError(f"{len(chosen)} threads take part in one mbarrier: too many for a small program")
    view = _View(push.target, barrier)
    threads = [_thread(f"P{k}", a, view, contract) for k, a in enumerate(chosen)]
    rest = [p for p in pushes if p.barrier == barrier and p.actor not in chosen]
    if rest:
        other = rest[0].actor
        total = sum(p.size for p in rest)
        threads.append(_rest(f"P{len(chosen)}", other, rest[0].step, total, contract))
    name = f"P{chosen.index(reader)}"
    where = "own CTA" if push.actor.where.rank == reader.where.rank else "another CTA"
    title = (
        f"{handoff.name}.{barrier.name}+{barrier.offset}.thread{push.actor.where.linear}-of-rank"
        f"{push.actor.where.rank}-to-thread{reader.where.linear}-of-rank{reader.where.rank}"
        f".{''.join('t' if x else 'f' for x in reader.walk.taken)}"
    )
    return Program(
        title.strip("."),
        tuple(threads),
        condition=_stale(threads, name),
        note=f"forbidden: handoff {handoff.name}: a value sent from {where} is seen by everyone who waited for it",
    )


def _sets_up(step: Step) -> bool:
    """True for an initialisation, arrival or expectation of bytes at an mbarrier."""
    ops = ("init", "arrive", "arrive_expect_tx", "expect_tx")
    return step.effect.kind == Kind.MBARRIER and step.effect.op in ops


@dataclass(frozen=True)
class _View:
    """What a lifted program keeps: one location of data, and at most one mbarrier."""

    data: Pointer | None
    barrier: Pointer | None = None
    parameter: str = ""

    def is_data(self, address: Pointer | None) -> bool:
        if address is None:
            return False
        return address == self.data or (bool(self.parameter) and address.name == self.parameter)


def _stale(threads: list[Thread], reader: str) -> Condition:
    thread = next(t for t in threads if t.name == reader)
    loads = [x for x in thread.body if isinstance(x, Load)]
    terms: list[Condition] = [Compare("eq", Variable(reader, x.register), 0) for x in loads]
    return terms[0] if len(terms) == 1 else Logic("or", tuple(terms))


def _place(actor: _Actor, contract: Contract, grid: int = 0) -> Place:
    clustered = _product(contract.launch.cluster) > 1
    pdl = bool(grid) and contract.launch.pdl
    return Place(actor.where.rank, 0, 0 if clustered else None, grid, pdl)


def _rest(name: str, actor: _Actor, step: Step, total: int, contract: Contract) -> Thread:
    """All other transactions on the barrier, as one of a thread that issues some of them."""
    body: list[Instruction] = []
    lines = []
    for s in actor.walk.steps:
        if s is step:
            body.append(AsyncStore(OTHER, 1, BARRIER, total))
            lines.append(s.instruction.line)
        elif s.effect.kind == Kind.CLUSTER_BARRIER:
            body.append(ClusterBarrier(s.effect.op == "arrive", Sem(s.effect.sem)))
            lines.append(s.instruction.line)
    return Thread(name, _place(actor, contract), tuple(body), {}, tuple(lines))


def _thread(name: str, actor: _Actor, view: _View, contract: Contract, grid: int = 0) -> Thread:
    body: list[Instruction] = []
    lines: list[int] = []
    for step in actor.walk.steps:
        made = _instruction(step, view, len(body))
        if made is not None:
            body.append(made)
            lines.append(step.instruction.line)
    return Thread(name, _place(actor, contract, grid), tuple(body), {}, tuple(lines))


def _instruction(step: Step, view: _View, number: int) -> Instruction | None:
    """The model's instruction for one step, None where the step does not matter to this handoff."""
    what, ins = step.effect, step.instruction
    match what.kind:
        case Kind.CLUSTER_BARRIER:
            return ClusterBarrier(what.op == "arrive", Sem(what.sem))
        case Kind.BARRIER:
            identity = step.numbers[0] if step.numbers else 0
            if identity is None:
                raise ModelError(f"line {ins.line}: barrier not known: {ins.text}")
            return Barrier(what.op == "arrive", identity)
        case Kind.FENCE:
            if what.restrict == "mbarrier_init":
                return MbarrierInitFence()
            # A fence that covers only some objects is left out.
            return Fence(Sem(what.sem), Scope[what.scope.upper()]) if not what.restrict else None
        case Kind.PROXY_FENCE:
            # One-directional forms, and those of another state space than the data's, are left out.
            covers = not what.space or (view.data is not None and what.space.startswith(view.data.space))
            whole = what.proxy in ("async", "alias") and not what.sem and not what.restrict
            return ProxyFence(Proxy(what.proxy)) if whole and covers else None
        case Kind.GRID_DEPENDENCY:
            return GridWait() if what.op == "wait" else GridTrigger()
        case Kind.MBARRIER:
            return _mbarrier_instruction(step, view)
        case Kind.BULK:
            return _bulk(step, view)
        case Kind.LOAD if view.is_data(step.addresses[1]):
            sem, scope = _order(what)
            return Load(f"r{number}", DATA, sem, scope)
        case Kind.STORE if view.is_data(step.addresses[0]):
            sem, scope = _order(what)
            return Store(DATA, 1, sem, scope)
        case Kind.ATOMIC | Kind.REDUCTION if any(map(view.is_data, step.addresses)):
            raise ModelError(f"line {ins.line}: atomics on handed-over data are not lifted yet: {ins.text}")
    return None


def _order(what: Effect) -> tuple[Sem, Scope]:
    if what.sem in ("volatile", "mmio"):
        return Sem.RELAXED, Scope.SYS
    return Sem(what.sem or "weak"), Scope[(what.scope or "sys").upper()]


def _mbarrier_instruction(step: Step, view: _View) -> Instruction | None:
    what, ins = step.effect, step.instruction
    if view.barrier is None or _barrier_of(step) != view.barrier:
        return None
    numbers = [n for n in step.numbers if n is not None]
    if what.op == "init" and numbers:
        return MbarrierInit(BARRIER, numbers[-1])
    sem, scope = Sem(what.sem), Scope[(what.scope or "cta").upper()]
    match what.op:
        case "arrive_expect_tx" if numbers:
            return MbarrierUpdate(BARRIER, 1, numbers[-1], sem, scope)
        case "arrive":
            return MbarrierUpdate(BARRIER, numbers[-1] if numbers else 1, 0, sem, scope)
        case "expect_tx" if numbers:
            return MbarrierUpdate(BARRIER, 0, numbers[-1], sem, scope)
        case "try_wait" | "test_wait" if ins.has("parity") and numbers:
            return MbarrierWait(BARRIER, numbers[-1] & 1, sem, scope)
    raise ModelError(f"line {ins.line}: not lifted yet: {ins.text}")


def _bulk(step: Step, view: _View) -> Instruction | None:
    what = step.effect
    flag = next((a for a in what.accesses if a.role == "mbarrier"), None)
    data = next((a for a in what.accesses if a.writes and a.role == "data"), None)
    if flag is None or data is None or view.barrier is None or step.addresses[flag.operand] != view.barrier:
        return None
    size = data.width or (step.numbers[data.size_operand] if data.size_operand >= 0 else None)
    assert size is not None  # `_push` has looked at this step
    target = DATA if step.addresses[data.operand] == view.data else OTHER
    if what.op == "st_async":
        return AsyncStore(target, 1, BARRIER, size)
    return BulkCopy(target, f"{target}_source", size, BARRIER)


# Handoffs by completion of the previous grid.


def _grid_dependency(kernel: Kernel, handoff: Handoff, actors: list[_Actor]) -> Iterable[Program]:
    contract, function = kernel.contract, kernel.function
    index = next((k for k, p in enumerate(contract.params) if p.name == handoff.data), None)
    if index is None:
        raise ModelError(
            f"the data of handoff {handoff.name}, {handoff.data!r}, is no parameter of the contract"
        )
    view = _View(None, parameter=function.params[index].name)
    producer = Thread("P0", Place(gpu=0), (GridTrigger(), Store(DATA, 1)))
    done = set()
    for reader in actors:
        thread = _thread("P1", reader, view, contract, grid=1)
        if reader.shape in done or not any(isinstance(x, Load) for x in thread.body):
            continue
        done.add(reader.shape)
        threads = [producer, thread]
        if not any(isinstance(x, GridWait) for x in thread.body):
            # Perhaps another thread of its CTA waits, and a barrier carries that on.
            helper = next(
                (a for a in actors if a.where.rank == reader.where.rank and _waits_for_grid(a)), None
            )
            if helper is not None:
                threads.append(_thread("P2", helper, view, contract, grid=1))
        suffix = "".join("t" if x else "f" for x in reader.walk.taken)
        yield Program(
            f"{handoff.name}.thread{reader.where.linear}-of-rank{reader.where.rank}.{suffix}".strip("."),
            tuple(threads),
            condition=_stale(threads, "P1"),
            note=f"forbidden: handoff {handoff.name}: what the previous grid stored is read after it completed",
        )


def _waits_for_grid(actor: _Actor) -> bool:
    return any(s.effect.kind == Kind.GRID_DEPENDENCY and s.effect.op == "wait" for s in actor.walk.steps)
