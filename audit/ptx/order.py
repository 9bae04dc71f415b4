"""The order graph of a kernel: program order of its events, and the edges by which threads synchronise.

Nodes are the instructions with a memory or synchronisation meaning (*events*), one node for the head of
each basic block, the exit, and one node for each group of synchronisation objects with the same address.
Program-order edges follow control flow. Synchronisation edges lead from whatever arrives at a CTA barrier,
a cluster barrier, an mbarrier or a flag to whatever waits for it in other code (PTX ISA,
"Synchronizes-with"); threads that pass the same barrier instruction change places there without an edge of
their own.

An edge between objects whose addresses are not surely the same is *uncertain*: a path through one can only
make a rule inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from .cfg import CFG
from .effects import Access, Effect, Kind, bytes_of
from .feasible import Feasibility
from .ir import Imm
from .provenance import Address, Affine, Provenance, may_overlap
from .threads import Executors, Threads

# The most shared memory that a CTA has on any architecture so far; a wider range says nothing.
_SHARED_BYTES = 228 * 1024
QUIET = frozenset({Kind.COMPUTE, Kind.WARP, Kind.BRANCH, Kind.PREFETCH, Kind.EXIT})
PRIVATE = frozenset({"local", "param", "const"})


@dataclass(frozen=True, slots=True)
class Object:
    """One group of synchronisation objects: everything that one address can mean."""

    kind: str  # "mbarrier", "flag", "barrier", "cluster"
    address: Address | None
    width: int = 8
    name: str = ""


def must_equal(a: Address, b: Address) -> bool:
    """Both addresses are one known location (up to the CTA of a cluster)."""
    if len(a.parts) != 1 or len(b.parts) != 1 or not (a.known and b.known):
        return False
    (base_a, (low_a, high_a)), (base_b, (low_b, high_b)) = a.parts[0], b.parts[0]
    assert base_a is not None and base_b is not None
    if (base_a.kind, base_a.name, base_a.index) != (base_b.kind, base_b.name, base_b.index):
        return False
    return (low_a, high_a) == (low_b, high_b) and (low_a == high_a or a.affine == b.affine)


class Order:
    """Order graph of one function. Event nodes are instruction indices."""

    def __init__(self, cfg: CFG, effects: list[Effect], provenance: Provenance, threads: Threads) -> None:
        self.cfg, self.effects, self.provenance, self.threads = cfg, effects, provenance, threads
        self.body = cfg.function.body
        size = len(self.body)
        self.exit = size + cfg.exit
        self._heads = size
        self.events = [i for i in range(size) if self._is_event(i)]
        self.successors: dict[int, list[int]] = {}
        self.predecessors: dict[int, list[int]] = {}
        self.objects: list[Object] = []
        self.uncertain: set[tuple[int, int]] = set()
        self._sync_edges: set[tuple[int, int]] = set()
        self._addresses: dict[tuple[int, int], Address] = {}
        self._entering: dict[tuple[int, int], Executors] = {}
        self._program_order()
        self._barriers()
        self._memory_objects()

    def _is_event(self, index: int) -> bool:
        e = self.effects[index]
        if e.kind in QUIET or self.cfg.block_of[index] not in self.cfg.reachable:
            return False
        return not e.accesses or any(a.space not in PRIVATE for a in e.accesses)

    def head(self, block: int) -> int:
        """The node at the head of a block."""
        return self._heads + block

    def instruction(self, node: int) -> int | None:
        """The instruction of an event node, None for the others."""
        return node if node < self._heads else None

    def block(self, node: int) -> int | None:
        """The block of a node, None for synchronisation objects and the exit."""
        if node < self._heads:
            return self.cfg.block_of[node]
        return node - self._heads if node < self.exit else None

    def _edge(self, a: int, b: int) -> None:
        self.successors.setdefault(a, []).append(b)
        self.predecessors.setdefault(b, []).append(a)

    def _program_order(self) -> None:
        by_block: dict[int, list[int]] = {}
        for i in self.events:
            by_block.setdefault(self.cfg.block_of[i], []).append(i)
        self._last = {b: found[-1] for b, found in by_block.items()}
        for b in self.cfg.order:
            if b == self.cfg.exit:
                continue
            last = self.head(b)
            for i in by_block.get(b, ()):
                self._edge(last, i)
                last = i
            for s in self.cfg.successors[b]:
                self._edge(last, self.head(s))

    # -- synchronisation edges ----------------------------------------------------------------------------

    def _connect(self, a: int, b: int, certain: bool = True) -> None:
        self._edge(a, b)
        self._sync_edges.add((a, b))
        if not certain:
            self.uncertain.add((a, b))

    def _barriers(self) -> None:
        groups: dict[str, tuple[list[int], list[int]]] = {}
        for i in self.events:
            e = self.effects[i]
            if e.kind is Kind.BARRIER:
                arrive, wait = groups.setdefault(f"barrier {self.barrier_name(i)}", ([], []))
                arrive.append(i)
                if e.op != "arrive":
                    wait.append(i)
            elif e.kind is Kind.CLUSTER_BARRIER:
                arrive, wait = groups.setdefault("cluster", ([], []))
                (arrive if e.op == "arrive" else wait).append(i)
        for name, (arrive, wait) in groups.items():
            arriving, waiting = self._by_executors(arrive), self._by_executors(wait)
            for who, arrivals in arriving.items():
                for other, waits in waiting.items():
                    if who.disjoint(other):
                        node = self._new_object(Object(name.split()[0], None, name=name))
                        for a in arrivals:
                            self._connect(a, node)
                        for w in waits:
                            self._connect(node, w)

    def _by_executors(self, nodes: list[int]) -> dict[Executors, list[int]]:
        out: dict[Executors, list[int]] = {}
        for i in nodes:
            out.setdefault(self.threads.executors(i), []).append(i)
        return out

    def _new_object(self, thing: Object) -> int:
        """The node of a new group of synchronisation objects."""
        self.objects.append(thing)
        return self.exit + len(self.objects)

    def barrier_name(self, index: int) -> str:
        """Which CTA barrier an instruction uses: its number, or the register's affine form."""
        operand = self.body[index].operands[self.effects[index].barrier]
        if isinstance(operand, Imm):
            return str(operand.value)
        constant = self.provenance.operand_affine(self.body[index], operand)
        return str(constant.const) if constant.constant is not None else repr(constant.terms)

    def arrivals(self, index: int) -> list[tuple[Access, bool]]:
        """mbarrier objects that an event arrives at or completes bytes on, with whether it does so itself (as
        against on completion of something asynchronous)."""
        e = self.effects[index]
        if e.kind is Kind.MBARRIER and e.op.startswith(("arrive", "complete_tx")):
            return [(e.accesses[0], True)]
        if e.kind is Kind.ASYNC_GROUP and e.op == "mbarrier_arrive":
            return [(e.accesses[0], False)]
        if e.kind is Kind.BULK or (e.kind is Kind.TCGEN05 and e.op == "commit"):
            return [(a, False) for a in e.accesses if a.role == "mbarrier"]
        return []

    def is_wait(self, index: int) -> bool:
        """Waits for an mbarrier phase."""
        e = self.effects[index]
        return e.kind is Kind.MBARRIER and e.op in ("try_wait", "test_wait")

    def _memory_objects(self) -> None:
        arrive: dict[Object, list[int]] = {}
        wait: dict[Object, list[int]] = {}
        for i in self.events:
            e = self.effects[i]
            for access, _ in self.arrivals(i):
                arrive.setdefault(Object("mbarrier", self.address(i, access)), []).append(i)
            if self.is_wait(i):
                wait.setdefault(Object("mbarrier", self.address(i, e.accesses[0])), []).append(i)
            for access in e.accesses:
                if access.role != "data" or access.asynchronous or access.sem in ("weak", ""):
                    continue
                flag = Object("flag", self.address(i, access), bytes_of(self.body[i], access) or 8)
                if access.writes:
                    arrive.setdefault(flag, []).append(i)
                if access.reads and e.kind is not Kind.REDUCTION:
                    wait.setdefault(flag, []).append(i)
        nodes: dict[tuple[bool, Object], int] = {}
        for into, groups in ((True, arrive), (False, wait)):
            for thing, users in groups.items():
                node = nodes[into, thing] = self._new_object(thing)
                for u in dict.fromkeys(users):
                    if into:
                        self._connect(u, node)
                    else:
                        self._connect(node, u)
        for a in arrive:
            for w in wait:
                assert a.address is not None and w.address is not None
                if a.kind == w.kind and may_overlap(a.address, a.width, w.address, w.width, same_cta=False):
                    self._connect(nodes[True, a], nodes[False, w], must_equal(a.address, w.address))

    # -- queries ------------------------------------------------------------------------------------------

    def address(self, index: int, access: Access) -> Address:
        """The address of one access, under the conditions that hold there."""
        key = (index, access.operand)
        found = self._addresses.get(key)
        if found is None:
            found = self.provenance.address(self.body[index], access.operand, self.threads.ranges(index))
            self._addresses[key] = found
        return found

    def overlap(self, i: int, a: Access, j: int, b: Access) -> bool:
        """Whether two accesses can touch a common byte."""
        return may_overlap(self.address(i, a), self.width(i, a), self.address(j, b), self.width(j, b))

    def surely_overlap(self, i: int, a: Access, j: int, b: Access) -> bool:
        """Whether two accesses touch a common byte, as far as ranges can tell: each address has one known origin, a
        bounded offset, and the bytes that it is sure to touch meet. Two CTAs' copies of one object count as one."""
        one, two = self.address(i, a), self.address(j, b)
        for x in (one, two):
            if len(x.parts) != 1 or not x.known or not x.parts[0][1][1] - x.parts[0][1][0] <= _SHARED_BYTES:
                return False
        width_a = bytes_of(self.body[i], a) or 1
        width_b = bytes_of(self.body[j], b) or 1
        return may_overlap(one, width_a, two, width_b, same_cta=False)

    def width(self, index: int, access: Access) -> int | None:
        """Bytes of an access. A tensor copy into shared memory brings at most what its mbarrier is told to expect."""
        found = bytes_of(self.body[index], access)
        if found is None and access.writes and access.space.startswith("shared"):
            barrier = next((a for a in self.effects[index].accesses if a.role == "mbarrier"), None)
            if barrier is not None:
                return self._expected.get(self.address(index, barrier).affine, self._most_expected)
        return found

    @cached_property
    def _most_expected(self) -> int | None:
        """The largest number of bytes that any object expects, None unless all such numbers are constants."""
        expecting = [i for i in self.events if "expect_tx" in self.effects[i].op]
        numbers = [
            self.provenance.operand_affine(self.body[i], self.body[i].operands[-1]).constant
            for i in expecting
        ]
        known = [n for n in numbers if n is not None]
        return max(known) if known and len(known) == len(numbers) else None

    @cached_property
    def _expected(self) -> dict[Affine, int]:
        """The largest number of bytes that each object is told to expect, where all of them are constants."""
        out: dict[Affine, int | None] = {}
        for i in self.events:
            e = self.effects[i]
            if e.kind is Kind.MBARRIER and "expect_tx" in e.op:
                number = self.provenance.operand_affine(self.body[i], self.body[i].operands[-1]).constant
                key = self.address(i, e.accesses[0]).affine
                before = out.get(key, 0)
                out[key] = None if number is None or before is None else max(before, number)
        return {key: n for key, n in out.items() if n is not None}

    def is_sync_edge(self, a: int, b: int) -> bool:
        """The edge leads from one thread to another, or to an object between them."""
        return (a, b) in self._sync_edges

    def search(
        self,
        starts: Iterable[int],
        stop: Callable[[int], bool] = lambda i: False,
        backward: bool = False,
        sync: bool = True,
        enter: Callable[[int, int], bool] = lambda before, node: True,
    ) -> dict[int, int]:
        """Nodes reached from `starts`, each with the node before it on the way. Instructions for which
        `stop` holds are reached but not passed; edges for which `enter` does not hold are not followed.
        `sync` includes synchronisation edges. Starts are in the result only if a cycle leads back to them."""
        edges = self.predecessors if backward else self.successors
        came: dict[int, int] = {}
        queue = list(starts)
        for node in queue:
            if node in came and node < self._heads and stop(node):
                continue
            for n in edges.get(node, ()):
                if n in came or not enter(node, n):
                    continue
                if not sync and ((n, node) if backward else (node, n)) in self._sync_edges:
                    continue
                came[n] = node
                queue.append(n)
        return came

    def as_thread_of(self, index: int) -> Callable[[int, int], bool]:
        """Whether an edge can be taken by the threads that execute instruction `index`: for `search`."""
        who = self.threads.executors(index)

        def enter(before: int, node: int) -> bool:
            here = self.entering(before, node)
            if here is not None and here.disjoint(who):
                return False
            block = self.block(before)
            if block is None or node < self._heads or node > self.exit:
                return True
            return self.feasibility.possible(index, block, node - self._heads)

        return enter

    @cached_property
    def feasibility(self) -> Feasibility:
        return Feasibility(self.cfg, self.threads.ssa, self.provenance, self.threads)

    def seen_by(
        self, user: int, index: int, stop: Callable[[int], bool] = lambda i: False
    ) -> tuple[dict[int, int], int]:
        """Nodes that the threads executing `user` reach, in program order, after the place where instruction `index`
        is or would be executed; with the node that the search started from.

        Threads that do not execute `index` themselves are followed from the last block that all paths to either
        pass: what they meet after it is not ordered after `index` unless a stop says so.
        """
        start = index
        if self.threads.executors(index).disjoint(self.threads.executors(user)):
            block = self.cfg.block_of[index]
            while not self.cfg.block_dominates(block, self.cfg.block_of[user]):
                block = self.cfg.idom[block]
            start = self._last.get(block, self.head(block))
        return self.search([start], stop, sync=False, enter=self.as_thread_of(user)), start

    def trace(self, came: dict[int, int], goal: int, starts: Iterable[int]) -> list[int]:
        """Nodes from the start of a search to `goal`."""
        ends = set(starts)
        route = [goal]
        while True:
            before = came.get(route[-1])
            if before is None:
                break
            route.append(before)
            if before in ends:
                break
        return route[::-1]

    def certain(self, route: list[int]) -> bool:
        """No edge of a route is between objects that may differ."""
        return not any({p, p[::-1]} & self.uncertain for p in pairwise(route))

    def syncs(self, index: int) -> bool:
        """Other threads' accesses can become ordered here: a barrier, a wait, or an acquire."""
        e = self.effects[index]
        if e.kind is Kind.BARRIER:
            return e.op != "arrive"
        if e.kind is Kind.CLUSTER_BARRIER:
            return e.op == "wait"
        if e.kind is Kind.WARP_BARRIER or self.is_wait(index):
            return True
        return any(a.role == "data" and a.reads and a.sem not in ("weak", "") for a in e.accesses)

    def entering(self, before: int, node: int) -> Executors | None:
        """Who goes from one node to the next in program order: those of the block, narrowed by its last branch.
        None for nodes that belong to no block."""
        block, to = self.block(before), self.block(node)
        if block is None:
            return None if to is None else self.threads.executors_of_block(to)
        key = (block, node if self._heads <= node <= self.exit else -1)
        found = self._entering.get(key)
        if found is None:
            fact = self.threads.edge_fact(block, node - self._heads) if key[1] >= 0 else None
            who = self.threads.executors_of_block(block)
            found = self._entering[key] = who if fact is None else self.threads.restrict(who, fact)
        return found
