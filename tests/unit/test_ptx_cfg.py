"""Control flow: hand-made graphs, and the textbook definitions checked by brute force on random ones."""

from __future__ import annotations

import time

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.audit.ptx.cfg import CFG
from k3_audit.audit.ptx.parser import parse

pytestmark = pytest.mark.unit


def cfg(code: str) -> CFG:
    head = ".version 8.8\n.target sm_90a\n.address_size 64\n.entry k() { .reg .pred %p<9>; .reg .b32 %r<9>;\n"
    module = parse(head + code + "\n}")
    assert module.unknown == []
    return CFG(module.functions["k"])


LOOP = """
    mov.b32 %r1, 0;
TOP:
    add.s32 %r1, %r1, 1;
    @%p1 bra SKIP;
    bar.sync 0;
SKIP:
    @%p2 bra TOP;
    ret;
"""


def test_loop_with_a_branch():
    g = cfg(LOOP)
    assert [(b.start, b.end) for b in g.blocks] == [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
    assert g.successors == [[1], [2, 3], [3], [4, 1], [5], []]
    assert g.idom == [0, 0, 1, 1, 3, 4]
    assert g.ipdom == [1, 3, 3, 4, 5, 5]
    (loop,) = g.loops
    assert (loop.header, loop.latches, loop.blocks) == (1, (3,), frozenset({1, 2, 3}))
    assert g.dominates(1, 3) and not g.dominates(3, 4)
    assert g.postdominates(4, 1) and not g.postdominates(3, 1)
    assert not g.irreducible


def test_predicated_exit_and_jump_table():
    g = cfg("@%p1 exit; T: .branchtargets A, B; brx.idx %r1, T; A: @!%p2 ret; B: trap;")
    assert g.successors == [[1, 4], [2, 3], [3, 4], [], []]


def test_infinite_loop_still_has_postdominators():
    g = cfg("@%p1 bra OUT; L: bar.sync 0; bra L; OUT: ret;")
    assert g.block_postdominates(g.exit, 0)
    assert all(p >= 0 for p in g.ipdom)


def test_irreducible_flow_is_seen():
    assert cfg("@%p1 bra B; A: bar.sync 0; B: @%p2 bra A; ret;").irreducible


def test_reachability_stops_and_goes_round():
    g = cfg(LOOP)
    barrier = 3
    assert g.after([barrier]) == {1, 2, 3, 4, 5}
    assert g.after([4], stop=lambda i: i == 1) == {5}
    assert g.from_entry(lambda i: i == barrier) == {0, 1, 2, 4, 5}
    assert g.from_entry(lambda i: i == 0) == set()
    assert g.before([barrier], stop=lambda i: i == 4) == {0, 1, 2}
    assert g.path(0, 4) == [0, 1, 3]
    assert g.path(barrier, 1, stop=lambda i: i == 4) == []


def test_empty_body():
    g = cfg("")
    assert g.order == [0, g.exit]
    assert g.from_entry(lambda i: False) == set()


@st.composite
def programs(draw):
    """Random code: every line may be a label, a branch, an exit or plain."""
    n = draw(st.integers(1, 14))
    lines = []
    for i in range(n):
        what = draw(st.integers(0, 4))
        target = draw(st.integers(0, n - 1))
        guard = "@%p1 " if draw(st.booleans()) else ""
        code = {0: f"{guard}bra L{target};", 1: f"{guard}ret;"}.get(what, "bar.sync 0;")
        lines.append(f"L{i}: {code}")
    return "\n".join(lines) + "\nret;"


@settings(max_examples=150, deadline=None)
@given(programs())
def test_dominators_and_loops_agree_with_networkx(code):
    g = cfg(code)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(g.exit + 1))
    graph.add_edges_from((b, s) for b, out in enumerate(g.successors) for s in out)
    expected = {k: v for k, v in nx.immediate_dominators(graph, 0).items() if v is not None}
    assert {b: d for b, d in enumerate(g.idom) if d >= 0 and b != 0} == {
        b: d for b, d in expected.items() if b != 0
    }
    reaching = nx.ancestors(graph, g.exit) | {g.exit}
    if g.reachable <= reaching:
        back = nx.immediate_dominators(graph.subgraph(reaching).reverse(), g.exit)
        for b in g.reachable - {g.exit}:
            assert g.ipdom[b] == back[b]
    for b in g.reachable - {g.exit}:
        start = g.blocks[b].start
        reached = {g.block_of[i] for i in g.after([start])} if g.blocks[b].end - start == 1 else None
        if reached is not None:
            assert reached == nx.descendants(graph, b) - {g.exit} | (
                {b} if any(b in nx.descendants(graph, s) or s == b for s in graph.successors(b)) else set()
            )
    cyclic = {
        b for c in nx.strongly_connected_components(graph) for b in c if len(c) > 1 or graph.has_edge(b, b)
    }
    if not g.irreducible:
        assert set(g.in_loop) == cyclic & g.reachable


def test_sixteen_thousand_branches():
    """Quadratic work here would take minutes; benchmarks/parse_scaling.py shows the curve."""
    code = "".join(f"@%p1 bra L{i}; bar.sync 0;\nL{i}: add.s32 %r1, %r1, 1;\n" for i in range(16_000))
    start = time.process_time()
    g = cfg(code + "ret;")
    assert g.idom and g.ipdom and g.loops == []
    assert len(g.after([0])) == 3 * 16_000
    assert time.process_time() - start < 15
