"""The PTX memory consistency model: derived relations and the axioms, one function each.

Section numbers are those of PTX ISA 9.1, chapter 8. The text of the chapter is prose; where a reading had to be
chosen, the docstring says which. Constant, texture and surface accesses, whose fences the chapter does not define,
follow Lustig, Cooksey and Giroux, "Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency Model" (ISCA 2022);
the asynchronous proxy is treated as one more of these, its fence being `fence.proxy.async`.

All relations grow with what is known of an execution (which write a read returns, the order of two fences or
writes), and every axiom forbids something that such growth never takes back. An axiom that fails on a part of an
execution therefore fails on the whole: this is what lets an enumeration stop early.
"""

from __future__ import annotations

from collections.abc import Mapping

from .events import Kind
from .frames import Frame
from .graph import Graph
from .program import Proxy, Scope
from .relation import Relation, bits, empty, is_acyclic, is_irreflexive, mask, pairs

ReadsFrom = Mapping[int, int]  # read -> the write whose value it returns

# Relations.


def observation_order(g: Graph, reads_from: ReadsFrom) -> Relation:
    """§8.9.2. A write W precedes a read R if R returns W's value and they are morally strong, or through atomics:
    W precedes the read of an atomic operation whose write precedes R."""
    direct = empty(g.n)
    for r, w in reads_from.items():
        if g.morally_strong[w] >> r & 1:
            direct[w] |= 1 << r
    observed = empty(g.n)
    for w in g.writes:
        todo = direct[w]
        while todo:
            observed[w] |= todo
            reached = 0
            for r in bits(todo):
                if r in g.rmw:
                    reached |= direct[g.rmw[r]]
            todo = reached & ~observed[w]
    return observed


def pattern_synchronization(g: Graph, observation: Relation) -> list[tuple[int, int]]:
    """§8.9.4: a release pattern synchronizes with an acquire pattern if a write of the one precedes a read of the
    other in observation order, and the first operation of the one and the last of the other are morally strong."""
    out = []
    for first, w in pairs(g.release_patterns):
        for r in bits(observation[w]):
            for last in bits(g.acquire_patterns[r] & g.morally_strong[first]):
                out.append((first, last))
    return out


def base_causality_order(g: Graph, closed: Relation) -> Relation:
    """§8.9.5. `closed` is the transitive closure of program order and all synchronization; what an asynchronous
    operation inherits from its issuer is added as a last step and never continued (§8.9.1.1)."""
    if not any(g.issued_after):
        return closed
    out = list(closed)
    for i, row in enumerate(closed):
        for k in bits(row | 1 << i):
            out[i] |= g.issued_after[k]
    return out


def proxy_preserved_base_causality_order(g: Graph, base: Relation) -> Relation:
    """§8.9.5. Base causality order counts between two accesses if both are generic and use the same address; or use
    the same proxy and address in the same thread block; or are aliases with an alias proxy fence on the way.

    A non-generic access further reaches, and is reached from, the generic proxy through a fence of its own proxy
    executed in its own thread block (ISCA 2022). The completion of an asynchronous copy, once observed, is such a
    fence for that copy (§9.7.9.25.2).
    """
    out = [row & plain for row, plain in zip(base, g.plain, strict=True)]
    if not g.mixed:
        return out
    accesses = [i for i, e in enumerate(g.events) if e.is_memory and e.thread >= 0]
    alias = [i for i in g.of_kind(Kind.PROXY_FENCE) if g.events[i].proxy == Proxy.ALIAS]
    leaves = {i: _leaves_proxy(g, base, i) for i in accesses}
    enters = {i: _enters_proxy(g, base, i) for i in accesses}
    for x in accesses:
        for y in accesses:
            if x == y or not g.overlaps(x, y) or out[x] >> y & 1 or not base[x] >> y & 1:
                continue
            same_address = g.generic[x] == g.generic[y]
            for a in leaves[x]:
                direct = same_address and base[a] & enters[y]
                if direct or any(base[a] >> f & 1 and base[f] & enters[y] for f in alias):
                    out[x] |= 1 << y
    return out


def _leaves_proxy(g: Graph, base: Relation, access: int) -> list[int]:
    """Events from which on an access counts as one of the generic proxy."""
    e = g.events[access]
    if e.proxy == Proxy.GENERIC:
        return [access]
    fences = [f for f in _own_fences(g, access) if base[access] >> f & 1]
    return fences + list(bits(g.completions[access] & base[access]))


def _enters_proxy(g: Graph, base: Relation, access: int) -> int:
    """Events up to which an access counts as one of the generic proxy, as a mask."""
    if g.events[access].proxy == Proxy.GENERIC:
        return 1 << access
    return mask(f for f in _own_fences(g, access) if base[f] >> access & 1)


def _own_fences(g: Graph, access: int) -> list[int]:
    e = g.events[access]
    return [
        f
        for f in g.of_kind(Kind.PROXY_FENCE)
        if g.events[f].proxy == e.proxy and g.events[f].place.same(e.place, Scope.CTA)
    ]


def causality_order(preserved: Relation, observation: Relation) -> Relation:
    """§8.9.5: proxy-preserved base causality order, or observation order followed by it. Not transitive."""
    out = list(preserved)
    for w, row in enumerate(observation):
        for r in bits(row):
            out[w] |= preserved[r]
    return out


def from_reads(g: Graph, reads_from: ReadsFrom, coherence: Relation) -> Relation:
    """§8.9.7, third item: a read precedes the writes that follow, in coherence order, the write it returns."""
    out = empty(g.n)
    for r, w in reads_from.items():
        out[r] = coherence[w]
    return out


# Axioms. Each returns True when it holds.


def coherence(g: Graph, causality: Relation, order: Relation) -> bool:
    """§8.10.1: a write that precedes an overlapping write in causality order precedes it in coherence order. With
    §8.9.6: coherence order is a partial order, and relates every two overlapping writes that are morally strong."""
    for a in g.writes:
        for b in g.writes:
            if a == b or not g.overlaps(a, b):
                continue
            if causality[a] >> b & 1 and not order[a] >> b & 1:
                return False
            if g.morally_strong[a] >> b & 1 and not (order[a] >> b & 1 or order[b] >> a & 1):
                return False
    return is_irreflexive(order)


def fence_sc(g: Graph, base: Relation) -> bool:
    """§8.10.2 with §8.9.3: of two morally strong fence.sc one synchronizes with the other, and base causality order,
    which holds these edges, stays an order. (Causality order proper relates only memory operations.)"""
    if not is_irreflexive(base):
        return False
    return all(base[a] >> b & 1 or base[b] >> a & 1 for a, b in g.fence_sc_pairs)


def atomicity(g: Graph, reads_from: ReadsFrom, order: Relation) -> bool:
    """§8.10.3, read-modify-write operations: no morally strong write comes, in coherence order, between the write
    that an atomic operation reads and its own. (Single-copy atomicity follows, as no access is torn.)"""
    for r, own in g.rmw.items():
        if r in reads_from:
            between = order[reads_from[r]] & g.morally_strong[own]
            if any(order[w] >> own & 1 for w in bits(between) if w != own):
                return False
    return True


def no_thin_air(g: Graph, reads_from: ReadsFrom) -> bool:
    """§8.10.4: reading and dependencies through registers form no cycle."""
    rows = list(g.dependency)
    for r, w in reads_from.items():
        rows[w] |= 1 << r
    return is_acyclic(rows)


def same_location_order(g: Graph, reads_from: ReadsFrom, order: Relation) -> Relation:
    """Program order between accesses of one address, and communication order (§8.9.7) between morally strong ones."""
    back = from_reads(g, reads_from, order)
    reads = empty(g.n)
    for r, w in reads_from.items():
        reads[w] |= 1 << r
    return [
        (reads[i] | order[i] | back[i]) & g.morally_strong[i] | g.program_order[i] & g.plain[i]
        for i in range(g.n)
    ]


def sc_per_location(g: Graph, reads_from: ReadsFrom, order: Relation) -> bool:
    """§8.10.5: program order and communication order, between operations on one location that are morally strong,
    form no cycle. As in Lustig et al., ASPLOS 2019, each step of a cycle is morally strong, not every two members."""
    return is_acyclic(same_location_order(g, reads_from, order))


def causality(g: Graph, reads_from: ReadsFrom, cause: Relation, order: Relation) -> bool:
    """§8.10.6: a read that precedes a write in causality order does not return its value; a read that a write
    precedes returns nothing that precedes that write in coherence order."""
    for r, w in reads_from.items():
        if cause[r] >> w & 1:
            return False
        if any(cause[later] >> r & 1 for later in bits(order[w])):
            return False
    return True


def phase_order(frame: Frame, base: Relation) -> bool:
    """Not an axiom of the chapter but the meaning of a barrier: what belongs to a later phase does not precede, in
    base causality order, what belongs to an earlier one, and nothing waits for itself."""
    return is_irreflexive(base) and not any(base[a] >> b & 1 for a, b in frame.sequential)


AXIOMS = {
    "Coherence": "§8.10.1",
    "Fence-SC": "§8.10.2",
    "Atomicity": "§8.10.3",
    "No-Thin-Air": "§8.10.4",
    "SC-per-Location": "§8.10.5",
    "Causality": "§8.10.6",
}


# Races.


def data_races(g: Graph, causality: Relation) -> list[tuple[int, int]]:
    """§8.7.1: overlapping accesses, one of them a write, that are neither morally strong nor related in causality
    order. A race between accesses of the same size voids no axiom; it means that values may be stale."""
    accesses = [i for i, e in enumerate(g.events) if e.is_memory and e.thread >= 0]
    out = []
    for i in accesses:
        for j in accesses:
            if i >= j or not g.overlaps(i, j) or g.rmw.get(i) == j:
                continue
            if Kind.WRITE not in (g.events[i].kind, g.events[j].kind):
                continue
            related = causality[i] >> j & 1 or causality[j] >> i & 1 or g.morally_strong[i] >> j & 1
            if not related:
                out.append((i, j))
    return out


def unpublished_mbarriers(g: Graph, base: Relation) -> list[tuple[int, int]]:
    """Uses of an mbarrier that its initialisation does not precede in base causality order, as (init, use)."""
    uses = g.of_kind(Kind.MBARRIER_UPDATE, Kind.MBARRIER_WAIT)
    return [
        (i, u)
        for i in g.of_kind(Kind.MBARRIER_INIT)
        for u in uses
        if g.events[u].address == g.events[i].address and not base[i] >> u & 1
    ]
