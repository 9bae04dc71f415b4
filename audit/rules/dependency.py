"""Where `griddepcontrol.wait` has surely happened: the analysis behind the rules on dependent launch."""

from __future__ import annotations

from enum import IntEnum

from ..ptx.effects import Kind
from ..ptx.threads import Uniform
from ..subject import Subject


class State(IntEnum):
    """Of the thread that executes an instruction: does the dependency wait happen before?"""

    OPEN = 0  # not on some path
    PENDING = 1  # where this thread does not wait another of its CTA does, and they have not met since
    COVERED = 2


class Coverage:
    """State just before every event of a kernel, and at its exit.

    A thread is covered by its own wait, or by a barrier, or by an mbarrier phase that a covered thread
    completes: `griddepcontrol.wait` makes the prerequisite grids' writes visible to the waiting thread, and
    the synchronisation hands that on (causality order is transitive, PTX ISA, "Causality Order").
    """

    def __init__(self, s: Subject) -> None:
        self.s = s
        self.waits = s.find(Kind.GRID_DEPENDENCY, op="wait")
        self.before: dict[int, State] = {}
        self.at_exit = State.COVERED
        self._events: dict[int, list[int]] = {}
        for i in s.order.events:
            self._events.setdefault(s.cfg.block_of[i], []).append(i)
        self._phases: set[int] = set()  # mbarrier waits that cover
        while True:
            self._solve()
            found = {w for w in s.order.events if s.order.is_wait(w) and self._completed_by_covered(w)}
            if found <= self._phases:
                break
            self._phases |= found

    def _solve(self) -> None:
        s = self.s
        out = dict.fromkeys(s.cfg.order, State.COVERED)
        changed = True
        while changed:
            changed = False
            for b in s.cfg.order:
                state = State.OPEN if b == 0 else self._join(b, out)
                if b == s.cfg.exit:
                    self.at_exit = state
                for i in self._events.get(b, ()):
                    self.before[i] = state
                    state = self._after(i, state)
                if state != out[b]:
                    out[b] = state
                    changed = True

    def _join(self, block: int, out: dict[int, State]) -> State:
        s = self.s
        states = {out[p] for p in s.cfg.predecessors[block] if p in out}
        if len(states) < 2:
            return states.pop() if states else State.OPEN
        fork = s.cfg.idom[block]
        last = s.cfg.terminator(fork)
        if last is None or last.pred is None:
            return min(states)
        if s.threads.level(s.ssa.read(last.index, last.pred[0])) is Uniform.CTA:
            return min(states)
        # Waits after the fork and before this join, by threads that surely exist.
        at = [(w, s.cfg.block_of[w]) for w in self.waits]
        inside = [w for w, b in at if s.cfg.block_dominates(fork, b) and not s.cfg.block_dominates(block, b)]
        surely_someone = any(not s.executors(w).varying for w in inside)
        return State.PENDING if surely_someone and max(states) > State.OPEN else min(states)

    def _after(self, i: int, state: State) -> State:
        s, e = self.s, self.s.effects[i]
        if e.kind is Kind.GRID_DEPENDENCY and e.op == "wait":
            pred = s.body[i].pred
            if pred is None:
                return State.COVERED
            level = s.threads.level(s.ssa.read(i, pred[0]))
            known = level is not Uniform.CTA and not s.executors(i).varying
            return max(state, State.PENDING) if known else state
        if i in self._phases:
            return State.COVERED
        if state is not State.PENDING:
            return state
        if e.kind is Kind.CLUSTER_BARRIER and e.op == "wait":
            return State.COVERED
        if e.kind is Kind.BARRIER and e.op != "arrive":
            here = s.executors(i)
            return State.COVERED if any(here.includes(s.executors(w)) for w in self.waits) else state
        if e.kind is Kind.WARP_BARRIER:
            every_warp = [
                w for w in self.waits if s.executors(w).one_lane and s.executors(w).warps == (0, 31)
            ]
            return State.COVERED if every_warp else state
        return state

    def _completed_by_covered(self, wait: int) -> bool:
        """Every arrival that can complete the phase surely is at this object, from a covered thread."""
        order = self.s.order
        arrivals: list[int] = []
        for group in order.predecessors.get(wait, ()):
            if group <= order.exit:
                continue
            for source in order.predecessors.get(group, ()):
                if (source, group) in order.uncertain:
                    return False
                arrivals += order.predecessors.get(source, [])
        return bool(arrivals) and all(self.before.get(a, State.OPEN) is State.COVERED for a in arrivals)


def coverage(s: Subject) -> Coverage:
    """The (cached) coverage of a subject."""
    found = s.__dict__.get("_coverage")
    if found is None:
        found = s.__dict__["_coverage"] = Coverage(s)
    return found
