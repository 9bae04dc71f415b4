"""What a thread may do: its control-flow paths, each a list of events with symbolic values.

An event reads or writes one location once, or orders others; an atomic is a read and a write, `bar.sync` an arrival
and a wait, a bulk copy a read, a write and a completion. Values are expressions over what earlier reads of the same
thread return; which write a read returns is decided later, by an engine.

Loops are bounded: a backward branch is followed at most `unroll` times per label, and a path that wants more is cut
and marks its program as truncated. An iteration that only reads, and whose registers are all written again before
they are used, is not followed at all: leaving it out changes no final state and only drops constraints, so a loop
that spins on a flag needs no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from .program import (
    ARITHMETIC,
    COMPARISONS,
    AsyncStore,
    Atomic,
    Barrier,
    Branch,
    BulkCommit,
    BulkCopy,
    BulkWait,
    ClusterBarrier,
    Fence,
    GridTrigger,
    GridWait,
    Instruction,
    Label,
    Load,
    Local,
    MbarrierInit,
    MbarrierInitFence,
    MbarrierUpdate,
    MbarrierWait,
    ModelError,
    Operand,
    Place,
    Program,
    Proxy,
    ProxyFence,
    Scope,
    Sem,
    Store,
    wrap,
)

MAX_PATHS = 4096  # of one thread: beyond it the program is not small


@dataclass(frozen=True)
class ReadOf:
    """What the read with this index in the path of this thread returns."""

    thread: int
    index: int


@dataclass(frozen=True)
class Apply:
    op: str
    a: Value
    b: Value


Value = int | ReadOf | Apply


def apply(op: str, a: Value, b: Value) -> Value:
    """`a op b`, computed where both are known."""
    if op == "mov":
        return a
    if isinstance(a, int) and isinstance(b, int):
        return wrap(ARITHMETIC[op](a, b))
    return b if op == "exch" else Apply(op, a, b)


def reads_of(value: Value) -> frozenset[ReadOf]:
    """The reads that an expression depends on."""
    if isinstance(value, Apply):
        return reads_of(value.a) | reads_of(value.b)
    return frozenset((value,)) if isinstance(value, ReadOf) else frozenset()


def evaluate(value: Value, of_read: Callable[[ReadOf], int | None]) -> int | None:
    """An expression under `of_read(ReadOf) -> int | None`; None where a read is not known yet."""
    if isinstance(value, int):
        return value
    if isinstance(value, ReadOf):
        return of_read(value)
    a, b = evaluate(value.a, of_read), evaluate(value.b, of_read)
    if a is None or b is None:
        return None
    result = apply(value.op, a, b)
    assert isinstance(result, int)
    return result


class Kind(StrEnum):
    READ = "R"
    WRITE = "W"
    FENCE = "F"
    PROXY_FENCE = "Fproxy"
    INIT_FENCE = "Finit"
    BARRIER_ARRIVE = "Barrive"
    BARRIER_WAIT = "Bwait"
    CLUSTER_ARRIVE = "Carrive"
    CLUSTER_WAIT = "Cwait"
    MBARRIER_INIT = "Minit"
    MBARRIER_UPDATE = "Mupdate"
    MBARRIER_WAIT = "Mwait"
    GROUP_WAIT = "Gwait"
    GRID_WAIT = "Dwait"
    START = "start"
    END = "end"


@dataclass(frozen=True)
class Event:
    """One operation. `thread` is -1 for the write of an initial value.

    `index` counts the events of a path. An asynchronous event belongs to operation `operation` of its thread, outside
    the program order; `issue` is then the number of events of the thread that precede its instruction, and `index`
    still tells it apart. `depends` holds the reads that it depends on through registers, and `partner` the index of
    the read of the atomic whose write this is. `resource` names a barrier; `completes` are the indices of the
    asynchronous events that this event has waited for. `line` is the line in the PTX text that it was lifted from.
    """

    thread: int
    index: int
    kind: Kind
    source: Instruction | None
    place: Place
    address: str = ""
    sem: Sem = Sem.WEAK
    scope: Scope = Scope.SYS
    proxy: Proxy = Proxy.GENERIC
    value: Value = 0
    depends: frozenset[ReadOf] = frozenset()
    partner: int | None = None
    reduction: bool = False
    operation: int | None = None
    issue: int = 0
    resource: tuple[object, ...] = ()
    count: int | None = None
    tx: int = 0
    parity: int = 0
    completes: tuple[int, ...] = ()
    line: int = 0

    @property
    def is_memory(self) -> bool:
        return self.kind in (Kind.READ, Kind.WRITE)


@dataclass(frozen=True)
class Constraint:
    """The branch condition `a comparison b`, which came out as `truth`."""

    comparison: str
    a: Value
    b: Value
    truth: bool


@dataclass(frozen=True)
class Path:
    """One way through a thread. `registers` are the final values.

    `blocked` is True when the last event is an arrival that never completes its barrier: the thread ends there, and
    the registers that it would still write are absent from `registers`.
    """

    events: tuple[Event, ...]
    constraints: tuple[Constraint, ...]
    registers: Mapping[str, Value | None]
    blocked: bool = False


@dataclass
class Unfolded:
    """All paths of a thread. `truncated` is True when a loop wanted more iterations than the bound."""

    paths: list[Path] = field(default_factory=list)
    truncated: bool = False


@dataclass
class _State:
    pc: int
    registers: dict[str, Value]
    events: list[Event] = field(default_factory=list)
    constraints: list[Constraint] = field(default_factory=list)
    control: frozenset[ReadOf] = frozenset()
    trace: tuple[int, ...] = ()
    jumps: dict[str, int] = field(default_factory=dict)
    operations: int = 0
    blocked: bool = False
    open_group: tuple[int, ...] = ()  # indices of asynchronous events without a commit
    groups: tuple[tuple[int, ...], ...] = ()

    def fork(self) -> _State:
        return replace(
            self,
            registers=dict(self.registers),
            events=list(self.events),
            constraints=list(self.constraints),
            jumps=dict(self.jumps),
        )


def unfold(program: Program, thread: int, unroll: int) -> Unfolded:
    """The paths of one thread. Raises ModelError when there are too many, or a label is missing."""
    return _Unfolder(program, thread, unroll).run()


class _Unfolder:
    def __init__(self, program: Program, thread: int, unroll: int):
        self.program, self.thread, self.unroll = program, thread, unroll
        self.source = program.threads[thread]
        self.body = self.source.body
        self.labels = {x.name: i for i, x in enumerate(self.body) if isinstance(x, Label)}
        self.live = _live_in(self.body, self.labels, self._observed_registers())
        self.barrier_ids = _barrier_ids(program)
        self.out = Unfolded()

    def _observed_registers(self) -> frozenset[str]:
        return frozenset(v.name for v in self.program.observed if v.thread == self.source.name)

    def run(self) -> Unfolded:
        work = [_State(0, dict(self.source.registers))]
        while work:
            state = work.pop()
            while state.pc < len(self.body) and not state.blocked:
                instruction = self.body[state.pc]
                state.trace += (state.pc,)
                state.pc += 1
                if isinstance(instruction, Branch):
                    work += self._branch(state, instruction)
                elif isinstance(instruction, Atomic) and instruction.op == "cas":
                    work += self._compare_and_swap(state, instruction)
                elif isinstance(instruction, Barrier):
                    work += self._barrier(state, instruction)
                else:
                    self._step(state, instruction)
                if state.pc < 0:
                    break
            else:
                self.out.paths.append(self._path(state))
                if len(self.out.paths) + len(work) > MAX_PATHS:
                    raise ModelError(
                        f"thread {self.source.name} has more than {MAX_PATHS} paths: shorten it or unroll less"
                    )
        return self.out

    def _path(self, state: _State) -> Path:
        registers: dict[str, Value | None] = dict(state.registers)
        if state.blocked:
            for instruction in self.body[state.pc :]:
                registers |= dict.fromkeys(_written(instruction))
        return Path(tuple(state.events), tuple(state.constraints), registers, state.blocked)

    # Control. Each takes `state` along one way (pc < 0: that way is dead) and returns the states of the others.

    def _branch(self, state: _State, branch: Branch) -> list[_State]:
        if branch.label not in self.labels:
            raise ModelError(f"thread {self.source.name} branches to {branch.label}, which is no label of it")
        if branch.comparison is None:
            self._jump(state, branch.label)
            return []
        taken = state.fork()
        self._assume(taken, branch.comparison, branch.a, branch.b, True)
        self._assume(state, branch.comparison, branch.a, branch.b, False)
        if taken.pc >= 0:
            self._jump(taken, branch.label)
        return [taken] if taken.pc >= 0 else []

    def _assume(self, state: _State, comparison: str, a: Operand, b: Operand, truth: bool) -> None:
        constraint = Constraint(comparison, self._value(state, a), self._value(state, b), truth)
        if isinstance(constraint.a, int) and isinstance(constraint.b, int):
            if COMPARISONS[comparison](constraint.a, constraint.b) != truth:
                state.pc = -1
            return
        state.constraints.append(constraint)
        state.control |= reads_of(constraint.a) | reads_of(constraint.b)

    def _jump(self, state: _State, label: str) -> None:
        target = self.labels[label]
        if target < state.pc:
            if self._spins(state, target):
                state.pc = -1
                return
            state.jumps[label] = state.jumps.get(label, 0) + 1
            if state.jumps[label] > self.unroll:
                self.out.truncated = True
                state.pc = -1
                return
        state.pc = target

    def _spins(self, state: _State, target: int) -> bool:
        """True when everything since the last visit of `target` can be left out."""
        since = max((i for i, pc in enumerate(state.trace) if pc == target), default=None)
        if since is None:
            return False
        written: set[str] = set()
        for pc in state.trace[since:]:
            instruction = self.body[pc]
            if isinstance(instruction, MbarrierWait) and instruction.register is None:
                return False
            if not isinstance(instruction, (Load, Local, Branch, Label, MbarrierWait)):
                return False
            written |= _written(instruction)
        return not written & self.live[target]

    # Memory and synchronisation.

    def _value(self, state: _State, operand: Operand) -> Value:
        return state.registers.get(operand, 0) if isinstance(operand, str) else wrap(operand)

    def _add(self, state: _State, kind: Kind, source: Instruction, **what: Any) -> int:
        index = len(state.events)
        what["depends"] = state.control | reads_of(what.get("value", 0))
        if self.source.lines:
            what["line"] = self.source.lines[state.pc - 1]
        state.events.append(Event(self.thread, index, kind, source, self.source.place, **what))
        return index

    def _read(self, state: _State, x: Load | Atomic, **what: Any) -> int:
        return self._add(
            state, Kind.READ, x, address=x.address, sem=_read_sem(x.sem), scope=x.scope, proxy=x.proxy, **what
        )

    def _write(self, state: _State, x: Store | Atomic, value: Value, **what: Any) -> int:
        what |= {"address": x.address, "sem": _write_sem(x.sem), "scope": x.scope, "proxy": x.proxy}
        return self._add(state, Kind.WRITE, x, value=value, **what)

    def _compare_and_swap(self, state: _State, x: Atomic) -> list[_State]:
        index = self._read(state, x, reduction=x.register is None)
        old = ReadOf(self.thread, index)
        compare, new = (self._value(state, a) for a in x.arguments)
        failed = state.fork()
        for other, truth in ((state, True), (failed, False)):
            other.constraints.append(Constraint("eq", old, compare, truth))
            other.control |= reads_of(old) | reads_of(compare)
            if x.register is not None:
                other.registers[x.register] = old
        self._write(state, x, new, partner=index)
        return [failed]

    def _barrier(self, state: _State, x: Barrier) -> list[_State]:
        identity = self._value(state, x.id)
        if isinstance(identity, int):
            return self._arrive(state, x, identity)
        # The barrier depends on a read: one way for each barrier that the program names, and one for any other.
        ways = [state.fork() for _ in self.barrier_ids]
        others = list(ways)
        for way, known in zip(ways, self.barrier_ids, strict=True):
            way.constraints.append(Constraint("eq", identity, known, True))
            state.constraints.append(Constraint("eq", identity, known, False))
            way.control |= reads_of(identity)
            others += self._arrive(way, x, known)
        state.control |= reads_of(identity)
        return others + self._arrive(state, x, None)

    def _arrive(self, state: _State, x: Barrier, identity: int | None) -> list[_State]:
        place = self.source.place
        mine = () if identity is not None else (self.thread, len(state.events))
        resource = (place.gpu, place.grid, place.cluster, place.cta, x.instance, identity, *mine)
        self._add(state, Kind.BARRIER_ARRIVE, x, resource=resource, count=x.count)
        if x.arrive:
            return []
        stuck = []
        if x.count is not None:
            stuck.append(state.fork())
            stuck[0].blocked = True
        self._add(state, Kind.BARRIER_WAIT, x, resource=resource, count=x.count)
        return stuck

    def _step(self, state: _State, x: Instruction) -> None:
        match x:
            case Load():
                index = self._read(state, x)
                state.registers[x.register] = ReadOf(self.thread, index)
            case Store():
                self._write(state, x, self._value(state, x.value))
            case Atomic():
                index = self._read(state, x, reduction=x.register is None)
                old = ReadOf(self.thread, index)
                self._write(state, x, apply(x.op, old, self._value(state, x.arguments[0])), partner=index)
                if x.register is not None:
                    state.registers[x.register] = old
            case Local():
                a, b = self._value(state, x.a), self._value(state, x.b)
                state.registers[x.register] = apply(x.op, a, b)
            case Fence():
                self._add(state, Kind.FENCE, x, sem=x.sem, scope=x.scope)
            case ProxyFence():
                self._add(state, Kind.PROXY_FENCE, x, proxy=x.proxy)
            case MbarrierInitFence():
                self._add(state, Kind.INIT_FENCE, x)
            case ClusterBarrier():
                kind = Kind.CLUSTER_ARRIVE if x.arrive else Kind.CLUSTER_WAIT
                self._add(state, kind, x, sem=x.sem, scope=Scope.CLUSTER)
            case MbarrierInit():
                self._add(state, Kind.MBARRIER_INIT, x, address=x.barrier, count=x.count)
            case MbarrierUpdate():
                what = {"address": x.barrier, "count": x.count, "tx": x.tx, "sem": x.sem, "scope": x.scope}
                self._add(state, Kind.MBARRIER_UPDATE, x, **what)
            case MbarrierWait():
                self._mbarrier_wait(state, x)
            case AsyncStore() | BulkCopy():
                self._asynchronous(state, x)
            case BulkCommit():
                state.groups = (*state.groups, state.open_group)
                state.open_group = ()
            case BulkWait():
                self._bulk_wait(state, x)
            case GridWait():
                self._add(state, Kind.GRID_WAIT, x)
            case GridTrigger() | Label():
                pass

    def _mbarrier_wait(self, state: _State, x: MbarrierWait) -> None:
        what = {"address": x.barrier, "parity": x.parity, "sem": x.sem, "scope": x.scope}
        seen = ReadOf(self.thread, self._add(state, Kind.MBARRIER_WAIT, x, **what))
        if x.register is None:
            state.constraints.append(Constraint("eq", seen, 1, True))
            state.control |= {seen}
        else:
            state.registers[x.register] = seen

    def _asynchronous(self, state: _State, x: AsyncStore | BulkCopy) -> None:
        state.operations += 1
        issue = len(state.events)
        part: dict[str, Any] = {"operation": state.operations, "issue": issue}
        moved = []
        if isinstance(x, AsyncStore):
            # A weak store; the ISA does not list st.async among the operations of the async proxy.
            part["proxy"], address, value = Proxy.GENERIC, x.address, self._value(state, x.value)
        else:
            part["proxy"], address, value = Proxy.ASYNC, x.to, ReadOf(self.thread, issue)
            moved.append(self._add(state, Kind.READ, x, address=x.source, **part))
        moved.append(self._add(state, Kind.WRITE, x, address=address, value=value, **part))
        if x.barrier is None:
            state.open_group += tuple(moved)
            return
        part |= {"proxy": Proxy.GENERIC, "address": x.barrier, "sem": Sem.RELEASE, "scope": Scope.CLUSTER}
        self._add(state, Kind.MBARRIER_UPDATE, x, count=0, tx=-x.bytes, completes=tuple(moved), **part)

    def _bulk_wait(self, state: _State, x: BulkWait) -> None:
        done = state.groups[: len(state.groups) - x.pending] if x.pending else state.groups
        covered = [i for group in done for i in group]
        if x.read:
            covered = [i for i in covered if state.events[i].kind == Kind.READ]
        self._add(state, Kind.GROUP_WAIT, x, completes=tuple(covered))


def _read_sem(sem: Sem) -> Sem:
    """Semantics of the read of an operation."""
    if sem == Sem.WEAK:
        return sem
    return Sem.ACQUIRE if sem.acquires else Sem.RELAXED


def _write_sem(sem: Sem) -> Sem:
    if sem == Sem.WEAK:
        return sem
    return Sem.RELEASE if sem.releases else Sem.RELAXED


def _barrier_ids(program: Program) -> list[int]:
    found = {
        x.id for t in program.threads for x in t.body if isinstance(x, Barrier) and isinstance(x.id, int)
    }
    return sorted(found)


# Liveness of registers: which must survive an iteration.


def _written(x: Instruction) -> set[str]:
    match x:
        case Load() | Local():
            return {x.register}
        case Atomic() | MbarrierWait():
            return {x.register} if x.register is not None else set()
    return set()


def _used(x: Instruction) -> set[str]:
    match x:
        case Store() | AsyncStore():
            operands: Iterable[Operand] = (x.value,)
        case Atomic():
            operands = x.arguments
        case Local() | Branch():
            operands = (x.a, x.b)
        case Barrier():
            operands = (x.id,)
        case _:
            operands = ()
    return {o for o in operands if isinstance(o, str)}


def _live_in(
    body: tuple[Instruction, ...], labels: Mapping[str, int], at_exit: frozenset[str]
) -> list[frozenset[str]]:
    """Registers whose value on entry of each instruction may still be used."""
    live: list[frozenset[str]] = [frozenset()] * len(body) + [at_exit]
    changed = True
    while changed:
        changed = False
        for i in range(len(body) - 1, -1, -1):
            x = body[i]
            after = live[i + 1]
            if isinstance(x, Branch):
                jumped = live[labels[x.label]] if x.label in labels else frozenset()
                after = jumped if x.comparison is None else after | jumped
            new = frozenset(_used(x)) | (after - _written(x))
            if new != live[i]:
                live[i], changed = new, True
    return live
