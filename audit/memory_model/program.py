"""Small programs for the memory model: threads with a place in the machine, instructions, a final condition.

The vocabulary is that of the PTX ISA, chapters "Memory Consistency Model" and "Parallel Synchronization and
Communication Instructions". A location holds one scalar; every access to it covers it completely, so the mixed-size
races of the ISA do not arise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class ModelError(ValueError):
    """A program that the model cannot take, said in one line."""


class Sem(StrEnum):
    WEAK = "weak"
    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQ_REL = "acq_rel"
    SC = "sc"  # fences only

    @property
    def acquires(self) -> bool:
        return self in (Sem.ACQUIRE, Sem.ACQ_REL, Sem.SC)

    @property
    def releases(self) -> bool:
        return self in (Sem.RELEASE, Sem.ACQ_REL, Sem.SC)


class Scope(IntEnum):
    """Scopes of a strong operation, narrowest first. A warp is not a scope."""

    CTA = 0
    CLUSTER = 1
    GPU = 2
    SYS = 3

    def __str__(self) -> str:
        return self.name.lower()


class Proxy(StrEnum):
    """Access paths to memory. ALIAS names only a fence: aliases are different addresses of one location."""

    GENERIC = "generic"
    CONSTANT = "constant"
    TEXTURE = "texture"
    SURFACE = "surface"
    ASYNC = "async"
    ALIAS = "alias"


@dataclass(frozen=True)
class Place:
    """Where a thread runs. Numbers count within the next larger thing; `grid` counts launches in stream order.

    `cluster` is None for a launch without clusters: each CTA is then its own. `pdl` says that the grid was launched
    with programmatic stream serialization, so that it may start before its predecessor has completed.
    """

    cta: int = 0
    gpu: int = 0
    cluster: int | None = None
    grid: int = 0
    pdl: bool = False

    def same(self, other: Place, scope: Scope) -> bool:
        """True when both places lie within one instance of `scope`."""
        if scope == Scope.SYS:
            return True
        if self.gpu != other.gpu:
            return False
        if scope == Scope.GPU:
            return True
        if (self.grid, self.cluster) != (other.grid, other.cluster):
            return False
        return self.cta == other.cta or (scope == Scope.CLUSTER and self.cluster is not None)


Operand = int | str  # a constant or the name of a register


@dataclass(frozen=True)
class Load:
    register: str
    address: str
    sem: Sem = Sem.WEAK
    scope: Scope = Scope.SYS
    proxy: Proxy = Proxy.GENERIC


@dataclass(frozen=True)
class Store:
    address: str
    value: Operand
    sem: Sem = Sem.WEAK
    scope: Scope = Scope.SYS
    proxy: Proxy = Proxy.GENERIC


@dataclass(frozen=True)
class Atomic:
    """`atom`, or `red` where `register` is None. `arguments` of cas are (compare, value)."""

    register: str | None
    address: str
    op: str
    arguments: tuple[Operand, ...]
    sem: Sem = Sem.RELAXED
    scope: Scope = Scope.GPU
    proxy: Proxy = Proxy.GENERIC


@dataclass(frozen=True)
class Fence:
    """`fence.sem.scope`; `membar.{cta,gl,sys}` is `fence.sc.{cta,gpu,sys}`."""

    sem: Sem
    scope: Scope


@dataclass(frozen=True)
class ProxyFence:
    """`fence.proxy.<proxy>`: bidirectional between the generic proxy and `proxy`, or between aliases."""

    proxy: Proxy


@dataclass(frozen=True)
class Barrier:
    """`bar.cta.{sync,arrive} [instance,] id [, count]`.

    `count` is the number of arrivals that complete the barrier, None for the threads of the CTA that name it.
    `instance` tells apart the dynamic executions of one barrier where the text numbers them itself.
    """

    arrive: bool
    id: Operand
    count: int | None = None
    instance: int | None = None


@dataclass(frozen=True)
class ClusterBarrier:
    """`barrier.cluster.arrive{.release,.relaxed}` or, with `arrive` False, `barrier.cluster.wait.acquire`."""

    arrive: bool
    sem: Sem


@dataclass(frozen=True)
class MbarrierInitFence:
    """`fence.mbarrier_init.release.cluster`: releases earlier `mbarrier.init`s of this thread, nothing else."""


@dataclass(frozen=True)
class MbarrierInit:
    barrier: str
    count: int


@dataclass(frozen=True)
class MbarrierUpdate:
    """`mbarrier.arrive{.expect_tx}` (count > 0), `.expect_tx` (tx > 0) and `.complete_tx` (tx < 0), in one."""

    barrier: str
    count: int = 1
    tx: int = 0
    sem: Sem = Sem.RELEASE
    scope: Scope = Scope.CTA


@dataclass(frozen=True)
class MbarrierWait:
    """`mbarrier.{test,try}_wait.parity`. Without a register it repeats until it has seen the phase complete."""

    barrier: str
    parity: int
    sem: Sem = Sem.ACQUIRE
    scope: Scope = Scope.CTA
    register: str | None = None


@dataclass(frozen=True)
class AsyncStore:
    """`st.async ...mbarrier::complete_tx::bytes [address], value, [barrier]`."""

    address: str
    value: Operand
    barrier: str
    bytes: int = 4


@dataclass(frozen=True)
class BulkCopy:
    """`cp.async.bulk [to], [source], bytes, [barrier]`; without a barrier it completes by bulk group."""

    to: str
    source: str
    bytes: int
    barrier: str | None = None


@dataclass(frozen=True)
class BulkCommit:
    pass


@dataclass(frozen=True)
class BulkWait:
    """`cp.async.bulk.wait_group{.read} pending`."""

    pending: int
    read: bool = False


@dataclass(frozen=True)
class GridWait:
    """`griddepcontrol.wait`."""


@dataclass(frozen=True)
class GridTrigger:
    """`griddepcontrol.launch_dependents`. Orders no memory: that a dependent has started says nothing."""


@dataclass(frozen=True)
class Local:
    """`register = a op b`, or `register = a` where `op` is "mov"."""

    register: str
    op: str
    a: Operand
    b: Operand = 0


@dataclass(frozen=True)
class Branch:
    """Go to `label` if `a comparison b`; always where `comparison` is None."""

    label: str
    comparison: str | None = None
    a: Operand = 0
    b: Operand = 0


@dataclass(frozen=True)
class Label:
    name: str


Instruction = (
    Load
    | Store
    | Atomic
    | Fence
    | ProxyFence
    | Barrier
    | ClusterBarrier
    | MbarrierInitFence
    | MbarrierInit
    | MbarrierUpdate
    | MbarrierWait
    | AsyncStore
    | BulkCopy
    | BulkCommit
    | BulkWait
    | GridWait
    | GridTrigger
    | Local
    | Branch
    | Label
)


@dataclass(frozen=True)
class Thread:
    """One thread. `registers` holds the initial values that are not 0; `lines`, if any, the line of each
    instruction in the PTX that it was lifted from."""

    name: str
    place: Place
    body: tuple[Instruction, ...]
    registers: Mapping[str, int] = field(default_factory=dict)
    lines: tuple[int, ...] = ()


# Values and arithmetic: 64-bit two's complement, as a register of type .s64.

_WORD = 64


def wrap(value: int) -> int:
    """`value` as a signed 64-bit integer."""
    value &= (1 << _WORD) - 1
    return value - (1 << _WORD) if value >> (_WORD - 1) else value


def _divide(a: int, b: int) -> int:
    """Division that truncates; by zero it gives -1, as the hardware's unsigned quotient of all ones."""
    return -1 if b == 0 else int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "mov": lambda a, _: a,
    "exch": lambda _, b: b,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "min": min,
    "max": max,
}

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


# The final condition.


@dataclass(frozen=True, order=True)
class Variable:
    """A register of a thread, or a memory location where `thread` is None, in the final state."""

    thread: str | None
    name: str

    def __str__(self) -> str:
        return f"{self.thread}:{self.name}" if self.thread else self.name


@dataclass(frozen=True)
class Compare:
    comparison: str
    a: Variable | int
    b: Variable | int


@dataclass(frozen=True)
class Logic:
    """`op` is "and", "or" or "not"."""

    op: str
    items: tuple[Condition, ...]


Condition = Compare | Logic
State = Mapping[Variable, int]


def holds(condition: Condition, state: State) -> bool:
    """The truth of `condition` in a final state. Raises KeyError for a variable that the state lacks."""
    if isinstance(condition, Compare):
        a, b = (state[v] if isinstance(v, Variable) else v for v in (condition.a, condition.b))
        return COMPARISONS[condition.comparison](a, b)
    values = (holds(item, state) for item in condition.items)
    if condition.op == "not":
        return not next(values)
    return all(values) if condition.op == "and" else any(values)


def variables(condition: Condition | None) -> Iterator[Variable]:
    """The variables that a condition speaks of, with repetitions."""
    if isinstance(condition, Compare):
        yield from (v for v in (condition.a, condition.b) if isinstance(v, Variable))
    elif condition is not None:
        for item in condition.items:
            yield from variables(item)


class Quantifier(StrEnum):
    EXISTS = "exists"
    NOT_EXISTS = "~exists"
    FORALL = "forall"


@dataclass(frozen=True)
class Address:
    """A virtual address. Addresses with one `physical` overlap; those with one `generic` also share their generic
    address: a surface, texture or constant address is a view of one generic address, not an alias of it."""

    name: str
    generic: str
    physical: str


@dataclass(frozen=True)
class Program:
    """Threads, initial memory and a final condition.

    `memory` maps a physical location to its initial value (0 where absent); `addresses` holds the names that are
    not simply locations of their own. `mbarriers` maps each mbarrier object that is initialised, and known to all
    threads, before they start to its arrival count. `show` lists more variables to report; `note` is free text.
    """

    name: str
    threads: tuple[Thread, ...]
    memory: Mapping[str, int] = field(default_factory=dict)
    mbarriers: Mapping[str, int] = field(default_factory=dict)
    addresses: Mapping[str, Address] = field(default_factory=dict)
    quantifier: Quantifier = Quantifier.EXISTS
    condition: Condition | None = None
    filter: Condition | None = None
    show: tuple[Variable, ...] = ()
    note: str = ""

    def address(self, name: str) -> Address:
        return self.addresses.get(name) or Address(name, name, name)

    @property
    def observed(self) -> tuple[Variable, ...]:
        """The variables of a final state that are worth telling apart, sorted."""
        named = {*variables(self.condition), *variables(self.filter), *self.show}
        return tuple(sorted(named, key=lambda v: (v.thread or "~", v.name)))
