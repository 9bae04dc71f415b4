"""Control flow of one function: basic blocks, dominators, post-dominators, natural loops, reachability.

Everything here is linear or near-linear in the number of instructions, and iterative, so that very large
and very deep functions are no problem. Dominators are computed with the algorithm of Cooper, Harvey and
Kennedy, "A Simple, Fast Dominance Algorithm" (2001).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from .ir import Function, Instruction, Symbol

_ENDS = frozenset({"bra", "brx", "ret", "exit", "trap"})


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions [start, end) of the body."""

    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop: `header` dominates every block of `blocks`; `latches` jump back to it."""

    header: int
    latches: tuple[int, ...]
    blocks: frozenset[int]


class CFG:
    """Control-flow graph of one function. Block 0 is the entry; `exit` is a virtual block after all others.

    `successors[b]` lists the block that follows in the text first when there is one, then branch targets.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        body = function.body
        leaders = {0, *(i for i in function.labels.values() if i < len(body))}
        leaders.update(i.index + 1 for i in body if i.opcode in _ENDS and i.index + 1 < len(body))
        starts = sorted(leaders) if body else [0]
        ends = [*starts[1:], len(body)]
        self.blocks = [Block(n, s, e) for n, (s, e) in enumerate(zip(starts, ends, strict=True))]
        self.block_of = [0] * len(body)
        for block in self.blocks:
            for i in range(block.start, block.end):
                self.block_of[i] = block.index
        self.exit = len(self.blocks)
        self.successors: list[list[int]] = [self._follow(b) for b in self.blocks]
        self.successors.append([])
        self.predecessors: list[list[int]] = [[] for _ in range(self.exit + 1)]
        for b, out in enumerate(self.successors):
            for s in out:
                self.predecessors[s].append(b)

    def _block_at(self, index: int) -> int:
        return self.block_of[index] if index < len(self.block_of) else self.exit

    def _follow(self, block: Block) -> list[int]:
        function = self.function
        following = self._block_at(block.end)
        if block.start == block.end:
            return [following]
        last = function.body[block.end - 1]
        out: list[int] = []
        if last.opcode not in _ENDS or last.pred is not None:
            out.append(following)
        # a trap ends the whole launch with an error: nobody goes on from there to be harmed
        if last.opcode in ("ret", "exit"):
            out.append(self.exit)
        elif last.opcode == "bra":
            out += [self._block_at(function.labels[t.name]) for t in last.operands if isinstance(t, Symbol)]
        elif last.opcode == "brx":
            table = last.operands[-1] if last.operands else None
            names = function.branch_targets.get(table.name, ()) if isinstance(table, Symbol) else ()
            targets = [self._block_at(function.labels[n]) for n in names if n in function.labels]
            out += targets or [self.exit]
        return list(dict.fromkeys(out))

    def following(self, block: int) -> int:
        """The block (or the exit) that stands after `block` in the text: where an untaken branch goes."""
        return self._block_at(self.blocks[block].end)

    def terminator(self, block: int) -> Instruction | None:
        """The branch, return or trap that ends a block, None where it falls through."""
        b = self.blocks[block]
        if b.start == b.end:
            return None
        last = self.function.body[b.end - 1]
        return last if last.opcode in _ENDS else None

    @cached_property
    def order(self) -> list[int]:
        """Reachable blocks in reverse post-order, the virtual exit included when something reaches it."""
        return _reverse_postorder(0, self.successors)

    @cached_property
    def reachable(self) -> frozenset[int]:
        return frozenset(self.order)

    # -- dominance ----------------------------------------------------------------------------------------

    @cached_property
    def idom(self) -> list[int]:
        """Immediate dominator of each block; the entry's is itself, an unreachable block's is -1."""
        return _dominators(self.order, self.predecessors, self.exit + 1)

    @cached_property
    def ipdom(self) -> list[int]:
        """Immediate post-dominator of each block; the virtual exit's is itself. A loop without a way out
        counts as if its last block could leave."""
        backward = [list(p) for p in self.predecessors]
        forward = [list(s) for s in self.successors]
        seen = _flood([self.exit], backward)
        for b in reversed(self.order):
            if b not in seen:
                backward[self.exit].append(b)
                forward[b].append(self.exit)
                seen |= _flood([b], backward, seen)
        return _dominators(_reverse_postorder(self.exit, backward), forward, self.exit + 1)

    @cached_property
    def _dom_range(self) -> tuple[list[int], list[int]]:
        return _intervals(self.idom, 0)

    @cached_property
    def _pdom_range(self) -> tuple[list[int], list[int]]:
        return _intervals(self.ipdom, self.exit)

    def block_dominates(self, a: int, b: int) -> bool:
        """Every path from the entry to block `b` passes block `a` (a block dominates itself)."""
        first, last = self._dom_range
        return first[a] >= 0 and first[b] >= 0 and first[a] <= first[b] <= last[a]

    def block_postdominates(self, a: int, b: int) -> bool:
        """Every path from block `b` to the exit passes block `a`."""
        first, last = self._pdom_range
        return first[a] >= 0 and first[b] >= 0 and first[a] <= first[b] <= last[a]

    def dominates(self, a: int, b: int) -> bool:
        """Every path from the entry to instruction `b` passes instruction `a` (not counting predicates)."""
        block_a, block_b = self.block_of[a], self.block_of[b]
        return a <= b if block_a == block_b else self.block_dominates(block_a, block_b)

    def postdominates(self, a: int, b: int) -> bool:
        """Every path from instruction `b` to the exit passes instruction `a` (not counting predicates)."""
        block_a, block_b = self.block_of[a], self.block_of[b]
        return a >= b if block_a == block_b else self.block_postdominates(block_a, block_b)

    # -- loops --------------------------------------------------------------------------------------------

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, outer before inner, loops with one header merged. An edge into the middle of a cycle
        (irreducible flow) makes no loop here; see :attr:`irreducible`."""
        latches: dict[int, list[int]] = {}
        for b in self.order:
            for s in self.successors[b]:
                if self.block_dominates(s, b):
                    latches.setdefault(s, []).append(b)
        found = []
        for header in (b for b in self.order if b in latches):
            inside = {header}
            stack = [b for b in latches[header] if b != header]
            inside.update(stack)
            while stack:
                for p in self.predecessors[stack.pop()]:
                    if p not in inside and p in self.reachable:
                        inside.add(p)
                        stack.append(p)
            found.append(Loop(header, tuple(latches[header]), frozenset(inside)))
        return found

    @cached_property
    def loop_ends(self) -> frozenset[tuple[int, int]]:
        """Edges by which a loop with only one place to go on is left: whoever enters it comes out there."""
        found = set()
        for loop in self.loops:
            leaving = {(b, s) for b in loop.blocks for s in self.successors[b] if s not in loop.blocks}
            if len({s for _, s in leaving}) == 1:
                found |= leaving
        return frozenset(found)

    @cached_property
    def irreducible(self) -> bool:
        """True when some retreating edge does not end at a block that dominates its start."""
        position = {b: n for n, b in enumerate(self.order)}
        return any(
            position[s] <= position[b] and not self.block_dominates(s, b)
            for b in self.order
            for s in self.successors[b]
        )

    @cached_property
    def in_loop(self) -> frozenset[int]:
        """Blocks that lie on some cycle."""
        return frozenset().union(*(loop.blocks for loop in self.loops)) if self.loops else frozenset()

    # -- reachability -------------------------------------------------------------------------------------

    def after(self, starts: Iterable[int], stop: Callable[[int], bool] = lambda i: False) -> set[int]:
        """Instructions that can execute after one of `starts` without first executing an instruction for
        which `stop` holds. The starts are in the result only if a cycle leads back to them; stops are not
        in it."""
        body_end = len(self.function.body)
        seen: set[int] = set()
        entered: set[int] = set()
        stack: list[tuple[int, int]] = [(self.block_of[s], s + 1) for s in starts if s < body_end]
        while stack:
            block, i = stack.pop()
            end = self.blocks[block].end
            while i < end and i not in seen and not stop(i):
                seen.add(i)
                i += 1
            if i < end:
                continue
            for s in self.successors[block]:
                if s != self.exit and s not in entered:
                    entered.add(s)
                    stack.append((s, self.blocks[s].start))
        return seen

    def from_entry(self, stop: Callable[[int], bool]) -> set[int]:
        """Instructions that can execute before any instruction for which `stop` holds."""
        if not self.function.body:
            return set()
        first = set() if stop(0) else {0}
        return first | (self.after([0], stop) if first else set())

    def before(self, ends: Iterable[int], stop: Callable[[int], bool] = lambda i: False) -> set[int]:
        """Instructions from which one of `ends` can be reached without executing a stop in between."""
        seen: set[int] = set()
        entered: set[int] = set()
        stack: list[tuple[int, int]] = [(self.block_of[e], e - 1) for e in ends]
        while stack:
            block, i = stack.pop()
            start = self.blocks[block].start
            while i >= start and i not in seen and not stop(i):
                seen.add(i)
                i -= 1
            if i >= start:
                continue
            for p in self.predecessors[block]:
                if p not in entered:
                    entered.add(p)
                    stack.append((p, self.blocks[p].end - 1))
        return seen

    def path(self, start: int, goal: int, stop: Callable[[int], bool] = lambda i: False) -> list[int]:
        """Blocks of a shortest path between two instructions that executes no stop; [] if there is none."""
        origin, target = self.block_of[start], self.block_of[goal]

        def blocked(block: int, first: int, last: int) -> bool:
            return any(stop(i) for i in range(first, last))

        if origin == target and goal > start:
            return [] if blocked(origin, start + 1, goal) else [origin]
        if blocked(origin, start + 1, self.blocks[origin].end):
            return []
        came: dict[int, int] = {}
        queue = [origin]
        for b in queue:
            for s in self.successors[b]:
                if s == self.exit or s in came:
                    continue
                came[s] = b
                if s == target:
                    if blocked(s, self.blocks[s].start, goal):
                        continue
                    route = [s]
                    while came[route[-1]] != origin:
                        route.append(came[route[-1]])
                    return [origin, *reversed(route)]
                if not blocked(s, self.blocks[s].start, self.blocks[s].end):
                    queue.append(s)
        return []


# -- graph algorithms -------------------------------------------------------------------------------------


def _reverse_postorder(root: int, successors: list[list[int]]) -> list[int]:
    seen = {root}
    order: list[int] = []
    stack = [(root, iter(successors[root]))]
    while stack:
        node, children = stack[-1]
        for child in children:
            if child not in seen:
                seen.add(child)
                stack.append((child, iter(successors[child])))
                break
        else:
            order.append(node)
            stack.pop()
    order.reverse()
    return order


def _dominators(order: list[int], predecessors: list[list[int]], count: int) -> list[int]:
    idom = [-1] * count
    rank = [-1] * count
    for n, b in enumerate(order):
        rank[b] = n
    root = order[0]
    idom[root] = root
    changed = True
    while changed:
        changed = False
        for b in order[1:]:
            new = -1
            for p in predecessors[b]:
                if rank[p] < 0 or idom[p] < 0:
                    continue
                if new < 0:
                    new = p
                    continue
                a = p
                while a != new:
                    while rank[a] > rank[new]:
                        a = idom[a]
                    while rank[new] > rank[a]:
                        new = idom[new]
            if new != idom[b]:
                idom[b] = new
                changed = True
    return idom


def _intervals(parent: list[int], root: int) -> tuple[list[int], list[int]]:
    """Entry and last-descendant numbers of a depth-first walk of a tree: a is an ancestor of b iff
    first[a] <= first[b] <= last[a]."""
    children: list[list[int]] = [[] for _ in parent]
    for node, p in enumerate(parent):
        if p >= 0 and node != root:
            children[p].append(node)
    first, last = [-1] * len(parent), [-1] * len(parent)
    clock = 0
    stack = [(root, iter(children[root]))]
    first[root] = clock
    while stack:
        node, rest = stack[-1]
        child = next(rest, None)
        if child is None:
            last[node] = clock
            stack.pop()
            continue
        clock += 1
        first[child] = clock
        stack.append((child, iter(children[child])))
    return first, last


def _flood(starts: list[int], successors: list[list[int]], known: set[int] | None = None) -> set[int]:
    seen = set(starts)
    stack = list(starts)
    while stack:
        for s in successors[stack.pop()]:
            if s not in seen and (known is None or s not in known):
                seen.add(s)
                stack.append(s)
    return seen
