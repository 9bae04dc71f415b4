"""Relations over events 0 .. n-1 as n rows of bits: bit j of row i says that i is related to j."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Relation = list[int]


def empty(n: int) -> Relation:
    return [0] * n


def bits(row: int) -> Iterator[int]:
    """The members of a row, smallest first."""
    while row:
        low = row & -row
        yield low.bit_length() - 1
        row ^= low


def mask(members: Iterable[int]) -> int:
    out = 0
    for i in members:
        out |= 1 << i
    return out


def pairs(relation: Relation) -> Iterator[tuple[int, int]]:
    for i, row in enumerate(relation):
        for j in bits(row):
            yield i, j


def union(*relations: Relation) -> Relation:
    out = list(relations[0])
    for other in relations[1:]:
        for i, row in enumerate(other):
            out[i] |= row
    return out


def compose(a: Relation, b: Relation) -> Relation:
    """`a ; b`."""
    out = []
    for row in a:
        reached = 0
        for j in bits(row):
            reached |= b[j]
        out.append(reached)
    return out


def closure(relation: Relation) -> Relation:
    """The smallest transitive relation that contains `relation`."""
    out = list(relation)
    for k, _ in enumerate(out):
        through = out[k]
        if through:
            bit = 1 << k
            for i, row in enumerate(out):
                if row & bit:
                    out[i] = row | through
    return out


def add_edge(transitive: Relation, a: int, b: int) -> None:
    """Add a -> b to a transitive relation and close it again, in place."""
    if transitive[a] >> b & 1:
        return
    reached = transitive[b] | 1 << b
    bit = 1 << a
    for i, row in enumerate(transitive):
        if i == a or row & bit:
            transitive[i] = row | reached


def is_irreflexive(relation: Relation) -> bool:
    return not any(row >> i & 1 for i, row in enumerate(relation))


def is_acyclic(relation: Relation) -> bool:
    return is_irreflexive(closure(relation))
