"""Control flow of one SASS function: basic blocks and their successors.

What differs from PTX: `BSYNC Bn` goes where the last `BSSY Bn` said, `WARPSYNC.COLLECTIVE` and `BRA.U.ANY` serve the
other lanes of the warp (one thread passes them once), `CALL.REL` into a helper behind the kernel comes back, and code
of such helpers is not part of the kernel's own flow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .parser import SassFunction, SassInstruction

_BRANCH_TABLE = re.compile(r'BRANCH_TARGETS ([^"]*)"')
_ENDS = frozenset({"BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "EXIT", "RET", "BSYNC", "KILL"})


@dataclass
class SassBlock:
    """Instructions [start, end). `taken` are the blocks that the last instruction jumps to, `following` the next one
    in the text where it may be reached (None where not)."""

    start: int
    end: int
    taken: tuple[int, ...] = ()
    following: int | None = None

    @property
    def successors(self) -> tuple[int, ...]:
        return self.taken if self.following is None else (*self.taken, self.following)


@dataclass
class SassCFG:
    """Block 0 is the entry; the virtual exit has the index `exit`.

    `problems` names what could not be followed, as (line, text): an indirect jump without a table, a call into code
    that is not in the listing. A graph with problems lacks paths.
    """

    function: SassFunction
    blocks: list[SassBlock] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)

    @property
    def exit(self) -> int:
        return len(self.blocks)


def build(function: SassFunction) -> SassCFG:
    """Blocks and edges. Linear in the instructions."""
    body = function.body
    graph = SassCFG(function)
    leaders = {0, *(i for i in function.labels.values() if i < len(body))}
    for ins in body:
        if ins.opcode in _ENDS:
            leaders.add(ins.index + 1)
            if (target := _target(function, ins)) is not None:
                leaders.add(target)
    starts = sorted(i for i in leaders if i < len(body))
    at = {start: n for n, start in enumerate(starts)}
    graph.blocks = [SassBlock(s, e) for s, e in zip(starts, [*starts[1:], len(body)], strict=True)]
    joins: list[int] = []
    for n, block in enumerate(graph.blocks):
        last = body[block.end - 1]
        falls = n + 1 if block.end < len(body) else graph.exit
        always = last.pred is None or last.pred == ("PT", False)
        if last.opcode not in _ENDS:
            block.following = falls
            continue
        if last.opcode in ("EXIT", "RET", "KILL"):
            block.taken = (graph.exit,)
        elif last.opcode == "BSYNC":
            joins.append(n)
        elif last.opcode in ("BRX", "BRXU", "JMX", "JMXU"):
            table = _BRANCH_TABLE.search(last.text)
            targets = [function.labels.get(t.strip()) for t in table[1].split(",")] if table else []
            known = [at[t] for t in targets if t is not None and t in at]
            if not known or len(known) != len(targets):
                graph.problems.append((last.line, last.text))
            block.taken = tuple(dict.fromkeys(known))
        elif last.has("U", "ANY"):
            always = False  # the loop that serves the lanes one by one: each thread passes once
        else:
            target = _target(function, last)
            if target is None or target not in at:
                graph.problems.append((last.line, last.text))
            else:
                block.taken = (at[target],)
            # `BRA P0, L`, `BRA.U UP0, L` and `BRA.DIV UR0, L` carry a condition of their own.
            always = always and len(last.operands) == 1
        if not always:
            block.following = falls
    _follow_joins(graph, joins, at)
    return graph


def _target(function: SassFunction, ins: SassInstruction) -> int | None:
    return function.target(ins.operands[-1]) if ins.operands and ins.opcode in ("BRA", "JMP") else None


def _follow_joins(graph: SassCFG, joins: list[int], at: dict[int, int]) -> None:
    """Successors of BSYNC: the labels that the BSSY reaching it have put into its barrier register."""
    if not joins:
        return
    body = graph.function.body
    sets: list[dict[str, frozenset[int]]] = []
    for block in graph.blocks:
        here = {}
        for ins in body[block.start : block.end]:
            if ins.opcode == "BSSY" and (target := graph.function.target(ins.operands[-1])) in at:
                here[ins.operands[0]] = frozenset({at[target]})
        sets.append(here)
    arriving: list[dict[str, frozenset[int]] | None] = [None] * len(graph.blocks)
    if graph.blocks:
        arriving[0] = {}
    work = [0] if graph.blocks else []
    is_join = set(joins)
    while work:
        n = work.pop()
        block = graph.blocks[n]
        leaving = {**(arriving[n] or {}), **sets[n]}
        if n in is_join:
            register = body[block.end - 1].operands[0]
            block.taken = tuple(sorted(set(block.taken) | leaving.get(register, frozenset())))
        for s in block.successors:
            if s == graph.exit:
                continue
            before = arriving[s]
            if before is None:
                arriving[s] = dict(leaving)
                work.append(s)
                continue
            grown = False
            for register, targets in leaving.items():
                if not targets <= before.get(register, frozenset()):
                    before[register] = before.get(register, frozenset()) | targets
                    grown = True
            if grown:
                work.append(s)
    for n in joins:
        if arriving[n] is not None and not graph.blocks[n].taken:
            # Its BSSY is not in the listing: continue behind it, as a converged warp does.
            graph.blocks[n].following = n + 1 if n + 1 < len(graph.blocks) else graph.exit


def without_cluster(graph: SassCFG) -> dict[int, str]:
    """Instructions that stand in for the halves of a cluster barrier when the grid was launched without clusters.

    ptxas tests for that at run time: beside the block with UCGABAR_ARV (or UCGABAR_WAIT) is one with a NOP (or a CTA
    barrier). Index of the instruction to the opcode that it stands in for.
    """
    body = graph.function.body
    predecessors: list[list[int]] = [[] for _ in range(graph.exit + 1)]
    for n, block in enumerate(graph.blocks):
        for s in block.successors:
            predecessors[s].append(n)
    found: dict[int, str] = {}
    for n, block in enumerate(graph.blocks):
        half = next((i.opcode for i in body[block.start : block.end] if i.opcode in _CLUSTER), "")
        if not half or len(predecessors[n]) != 1:
            continue
        for sibling in graph.blocks[predecessors[n][0]].successors:
            if sibling in (n, graph.exit):
                continue
            for ins in body[graph.blocks[sibling].start : graph.blocks[sibling].end]:
                if ins.opcode == _CLUSTER[half]:
                    found[ins.index] = half
                    break
    return found


_CLUSTER = {"UCGABAR_ARV": "NOP", "UCGABAR_WAIT": "BAR"}
