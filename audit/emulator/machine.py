"""The scheduler: which threads execute which instruction next, and the stream of launches.

Lanes at one instruction execute together. Of all groups the one at the lowest instruction runs first (so that
branches meet again), until it reaches another group's instruction, branches, or blocks. A group that has spun
through a loop gives way to the others; one that provably cannot change by itself (same registers, no memory
written since) waits until something changes, so that a deadlock is found and not waited out.

Schedules:
  "lockstep"  everything together, the oldest launch first; the same every time
  "eager"     as lockstep, but the newest launch that may run goes first: a launch that overlaps its
  predecessor
              runs as far ahead of it as it may
  "random"    launches, CTAs and warps get random priorities, and lose them at random moments. This is the
              scheduler of S. Burckhardt et al., "A randomized scheduler with probabilistic guarantees of
              finding bugs", ASPLOS 2010, with sets of threads in the place of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .approx import Approximator
from .barriers import NAMED
from .errors import Deadlock, EmulationError, Fault, Where
from .grid import Dim, Grid
from .history import History
from .memory import Memory
from .ops_async import Batch
from .program import Program
from .values import Array

SPINS = 16  # backward branches after which a group gives way
CHANGE_EVERY = 300  # instructions between priority changes of the random schedule, on average
RESIDENT_BYTES = 1 << 29  # registers and shared memory of the CTAs that are resident at a time
SCHEDULES = ("lockstep", "eager", "random")


@dataclass(eq=False)
class Group:
    """Lanes at one instruction. `epoch` grows when a group gives way; the lowest epoch runs first."""

    grid: Grid
    pc: int
    lanes: Array
    rank: int = 0
    epoch: int = 0
    spins: int = 0
    digest: Any = None


@dataclass(frozen=True)
class Prepared:
    """A launch with its parameters packed."""

    program: Program
    params: bytes
    grid: Dim
    block: Dim
    cluster: Dim
    dynamic_smem: int
    overlap: bool  # programmatic stream serialization: may start before its predecessor has completed


@dataclass
class Trace:
    """What a run did, for the result."""

    executed: list[set[int]] = field(default_factory=list)
    overlapped: list[bool] = field(default_factory=list)
    diagnostics: list[EmulationError] = field(default_factory=list)


class Machine:
    """Runs a stream of launches on one memory."""

    def __init__(
        self,
        memory: Memory,
        launches: Sequence[Prepared],
        *,
        schedule: str = "lockstep",
        seed: int = 0,
        weak: bool = False,
        max_steps: int = 20_000_000,
        uninitialized: str = "raise",
        approx_seed: int | None = None,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r}: one of {', '.join(SCHEDULES)}")
        if uninitialized not in ("raise", "record", "ignore"):
            raise ValueError(f"uninitialized {uninitialized!r}: raise, record or ignore")
        self.memory = memory
        self.launches = launches
        self.random = schedule == "random"
        self.newest_first = schedule == "eager"
        self.rng = np.random.default_rng(seed)
        self.max_steps = max_steps
        self.uninitialized = uninitialized
        self.approx = Approximator(approx_seed)
        self.history = History(self.rng, lambda: self.time) if weak else None
        self.time = 0
        self.progress = 0
        self.ready: list[Group] = []
        self.stuck: list[Group] = []  # provably waiting for memory to change
        self.stuck_since = 0
        self.pending: list[Batch] = []
        self.grids: list[Grid] = []
        self.trace = Trace()
        self.changed = False  # has the set of runnable groups changed since the current step began?
        self.current: Group | None = None
        self.epoch = 0  # of the group that ran last
        self.pc = 0
        self.lowest_rank = 0
        self.next_change = 0

    # -- the stream -------------------------------------------------------------------------------------

    def start_ready(self) -> bool:
        """Start the next launches of the stream that may start now."""
        started = False
        while len(self.grids) < len(self.launches):
            launch = self.launches[len(self.grids)]
            previous = self.grids[-1] if self.grids else None
            # PTX ISA, griddepcontrol: dependents may be scheduled once every CTA has issued
            # launch_dependents or has completed.
            if previous is not None and not previous.complete:
                may = launch.overlap and previous.triggered.all()
                if not may:
                    break
            self._start(launch, previous)
            started = True
        return started

    def _start(self, launch: Prepared, previous: Grid | None) -> None:
        program = launch.program
        lane_bytes = sum(max(1, s) for s in program.register_sizes) + program.local_size
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        cta_bytes = lane_bytes * threads + 2 * program.shared_size(launch.dynamic_smem) + 1
        g = Grid(
            self,
            len(self.grids),
            program,
            launch.params,
            launch.grid,
            launch.block,
            launch.cluster,
            launch.dynamic_smem,
            max(1, RESIDENT_BYTES // cta_bytes),
        )
        self.grids.append(g)
        self.trace.executed.append(set())
        self.trace.overlapped.append(previous is not None and not previous.complete)
        # A launch without the attribute begins after its predecessor, so its wait has nothing to wait for.
        g.previous = previous if launch.overlap else None
        if self.random:
            self._draw_priorities(g)
        elif self.newest_first:
            g.priority[:] = -g.index
        else:
            g.priority[:] = g.index
        self.go(g, g.start_clusters(), program.entry_pc)

    def _finish(self, g: Grid) -> None:
        """A launch whose threads have all ended completes, with what it left in flight."""
        for batch in [b for b in self.pending if b.grid is g]:
            batch.complete()
        self.pending = [b for b in self.pending if not b.done]
        g.complete = True
        self.progress += 1
        if self.history is not None:
            self.history.finish(g)
        for later in self.grids:
            if later.previous is g:
                later.wake("griddep", lambda w: np.ones(w.lanes.size, bool))
        g.release_storage()
        self.start_ready()

    # -- priorities -------------------------------------------------------------------------------------

    def _draw_priorities(self, g: Grid) -> None:
        """Random priorities to random units; few different ones, so that lanes still run together."""
        unit = self._units(g)
        levels = int(self.rng.integers(2, 5))
        g.priority[:] = self.rng.integers(0, levels, int(unit.max()) + 1)[unit]
        g.priority[:] += int(self.rng.integers(0, 3)) * 4  # the launch as a whole, against its neighbours
        self.lowest_rank = max(self.lowest_rank, int(g.priority.max()))

    def _units(self, g: Grid) -> Array:
        """The number of each lane's unit: its warp, CTA or cluster, whichever there are several of."""
        kinds = [k for k in (g.warp, g.slot, g.slot // g.cluster_size) if k[-1] > 0]
        return kinds[int(self.rng.integers(0, len(kinds)))] if kinds else g.warp

    def _change_priorities(self) -> None:
        """Move one random unit of one running launch to the lowest priority."""
        self.next_change = self.time + 1 + int(self.rng.exponential(CHANGE_EVERY))
        live = [g for g in self.grids if not g.complete]
        if not live:
            return
        g = live[int(self.rng.integers(0, len(live)))]
        unit = self._units(g)
        self.lowest_rank += 1
        g.priority[unit == int(self.rng.integers(0, int(unit.max()) + 1))] = self.lowest_rank
        old, self.ready = self.ready, []
        for group in old:
            for rank in np.unique(group.grid.priority[group.lanes]).tolist():
                lanes = group.lanes[group.grid.priority[group.lanes] == rank]
                self.ready.append(Group(group.grid, group.pc, lanes, rank, group.epoch, group.spins))

    # -- groups -----------------------------------------------------------------------------------------

    def go(
        self, g: Grid, lanes: Array, pc: int, spins: int = 0, epoch: int | None = None, digest: Any = None
    ) -> None:
        """Make lanes runnable at `pc`."""
        if not lanes.size:
            return
        if epoch is None:
            epoch = self.epoch
        ranks = g.priority[lanes]
        first = int(ranks[0])
        if not self.random or (ranks == first).all():
            self.ready.append(Group(g, pc, lanes, first, epoch, spins, digest))
        else:
            for rank in np.unique(ranks).tolist():
                self.ready.append(Group(g, pc, lanes[ranks == rank], rank, epoch, spins))
        self.changed = True

    def jump(self, g: Grid, lanes: Array, to: int, pc: int) -> None:
        """A taken branch. Loops give way now and then."""
        if to > pc or self.current is None:
            self.go(g, lanes, to)
            return
        spins = self.current.spins + 1
        if spins % SPINS:
            self.go(g, lanes, to, spins, digest=self.current.digest)
            return
        self.advance()
        digest = self._digest(g, lanes, to)
        # Random priorities mean little if every loop gives way; a poll that counts its tries must, some time.
        epoch = self.current.epoch + (not self.random or bool(self.rng.random() < 0.1))
        if digest is not None and digest == self.current.digest:
            self.stuck.append(Group(g, to, lanes, int(g.priority[lanes[0]]), epoch, spins))
            self.stuck_since = self.progress
            return
        self.go(g, lanes, to, spins, epoch, digest)

    def give_way(self, g: Grid, lanes: Array, pc: int) -> None:
        """Let everyone else run first."""
        self.advance()
        self.go(g, lanes, pc, 0, self.epoch + 1)

    def _digest(self, g: Grid, lanes: Array, pc: int) -> Any:
        """State of a looping group, or None when memory has changed since it last gave way."""
        assert self.current is not None
        if self.current.digest is not None and self.current.digest[0] != self.progress:
            return (self.progress, None, self.time)  # cheap, and equal to nothing else
        state = hash(tuple(hash(r[lanes].tobytes()) for r in g.r))
        return (self.progress, pc, lanes.tobytes(), state)

    def _pick(self) -> Group:
        """Remove the group that runs next, merged with those at the same instruction."""
        best = min(self.ready, key=lambda group: (group.epoch, group.rank, group.pc))
        g, pc, rank = best.grid, best.pc, best.rank
        same = [x for x in self.ready if x.pc == pc and x.rank == rank and x.grid is g]
        if len(same) == 1:
            self.ready.remove(best)
            return best
        self.ready = [x for x in self.ready if not (x.pc == pc and x.rank == rank and x.grid is g)]
        lanes = np.sort(np.concatenate([x.lanes for x in same]))
        return Group(g, pc, lanes, rank, max(x.epoch for x in same), max(x.spins for x in same))

    # -- asynchronous operations ------------------------------------------------------------------------

    def issue(self, batch: Batch) -> None:
        """Queue asynchronous operations."""
        self.pending.append(batch)

    def advance(self) -> bool:
        """Carry out the oldest asynchronous operations; under a random schedule one warp's part of any.

        False when there is nothing to carry out.
        """
        self.pending = [b for b in self.pending if not b.done]
        if not self.pending:
            return False
        if not self.random:
            self.pending.pop(0).complete()
            return True
        batch = self.pending[int(self.rng.integers(0, len(self.pending)))]
        warps = batch.grid.warp[batch.lanes]
        left = warps[batch.left]
        batch.complete(np.flatnonzero(warps == left[int(self.rng.integers(0, left.size))]))
        return True

    def gives_up(self) -> bool:
        """Whether a try_wait returns false although it could have waited longer."""
        return self.random and bool(self.rng.random() < 0.1)

    # -- running ----------------------------------------------------------------------------------------

    def run(self) -> Trace:
        """Run the stream to its end."""
        with np.errstate(all="ignore"):
            self.start_ready()
            while True:
                if self.stuck and self.progress != self.stuck_since:
                    polls, self.stuck = self.stuck, []  # memory has changed: look again
                    for x in polls:
                        self.go(x.grid, x.lanes, x.pc, x.spins, x.epoch)
                if self.ready:
                    if self.random:
                        self._shake()
                    if self.history is not None:
                        self.history.prune()
                    self._execute(self._pick())
                elif not self._unblock():
                    break
        return self.trace

    def _shake(self) -> None:
        if self.time >= self.next_change:
            self._change_priorities()
        if self.pending and self.rng.random() < 0.1:
            self.current = None
            self.advance()

    def _unblock(self) -> bool:
        """Nothing is runnable: complete something. False when the stream is done; raises Deadlock."""
        self.current = None
        for g in self.grids:
            if not g.complete and g.finished.all():
                self._finish(g)
                return True
        if self.advance():
            # In lockstep all of them, so that whoever waits goes on together; else some.
            more = int(self.rng.geometric(0.02)) if self.random else len(self.pending)
            while more and self.advance():
                more -= 1
            return True
        if self.history is not None and self.stuck and self.history.reveal_all():
            self.progress += 1
            return True
        if not self.stuck and all(g.complete for g in self.grids) and len(self.grids) == len(self.launches):
            return False
        raise Deadlock(self._waits())

    def _execute(self, group: Group) -> None:
        """Run a group until it blocks, branches, or meets another group."""
        g, pc = group.grid, group.pc
        self.current, self.epoch = group, group.epoch
        limit = min(
            (x.pc for x in self.ready if x.grid is g and x.rank == group.rank and x.pc > pc), default=1 << 60
        )
        sel = g.select(group.lanes)
        code = g.program.code
        start = pc
        try:
            while True:
                self.changed = False
                self.pc = pc
                stop = code[pc](g, sel)
                self.time += 1
                pc += 1
                if stop is not None:
                    break
                if self.changed or pc >= limit:
                    self.go(g, group.lanes, pc, group.spins, digest=group.digest)
                    break
        except Fault as e:
            e.settle(g.lanes(sel))
            raise self.blame(g, pc, e) from e
        self.trace.executed[g.index].update(range(start, pc))
        if self.time > self.max_steps:
            raise EmulationError(
                "limit", f"more than {self.max_steps} steps; still running: {self._running()}"
            )
        if not g.complete and g.finished.all():
            self._finish(g)

    # -- messages ---------------------------------------------------------------------------------------

    def blame(self, g: Grid, pc: int, e: Fault) -> EmulationError:
        """A fault as an error that names the thread and the instruction."""
        assert e.lane is not None
        return EmulationError(e.kind, e.message, g.locate(e.lane, pc))

    def diagnose(self, g: Grid, sel: Any, e: Fault) -> None:
        """Note a tolerated fault (uninitialized="record")."""
        if self.uninitialized == "record":
            e.settle(g.lanes(sel))
            self.trace.diagnostics.append(self.blame(g, self.pc, e))

    def _running(self) -> str:
        groups = sorted(self.ready, key=lambda x: -x.lanes.size)[:3]
        return "; ".join(self._group(x) for x in groups)

    def _group(self, x: Group) -> str:
        where: Where = x.grid.locate(int(x.lanes[0]), x.pc)
        return f"{x.lanes.size} threads from {where}"

    def _waits(self) -> list[str]:
        lines = []
        for x in self.stuck:
            text = f"{x.lanes.size} threads poll without end from {x.grid.locate(int(x.lanes[0]), x.pc)}"
            if x.grid.last_load is not None:
                pc, address = x.grid.last_load
                ins = x.grid.program.instructions[pc]
                text += f", last load PTX line {ins.line} at {x.grid.describe(address)}"
            lines.append(text)
        for g in self.grids:
            for w in g.blocked:
                lines.append(self._wait(g, w))
            for pc, parked in g.parked.items():
                lanes = np.concatenate(parked)
                if lanes.size:
                    where = g.locate(int(lanes[0]), pc)
                    lines.append(f"{lanes.size} threads wait for the rest of their membermask at {where}")
        return lines

    def _wait(self, g: Grid, w: Any) -> str:
        where = g.locate(int(w.lanes[0]), w.pc)
        n = w.lanes.size
        if w.kind == "mbarrier":
            offset, phase = int(w.keys[0]), int(w.detail[0])
            b = g.mbarriers.objects.get(offset)
            state = f"pending {b.pending} of {b.count} arrivals, tx-count {b.tx}" if b else "gone"
            what = f"phase {phase} of the mbarrier at {g.shared_place(offset)} ({state})"
            return f"{n} threads wait for {what} at {where}"
        if w.kind == "barrier":
            slot, barrier = divmod(int(w.keys[0]), NAMED)
            have, need = (int(x[slot]) for x in g.barriers.reached(barrier))
            return f"{n} threads wait at barrier {barrier} ({have} of {need} have arrived) at {where}"
        if w.kind == "cluster":
            return f"{n} threads wait at the cluster barrier at {where}"
        return f"{n} threads wait for launch {int(w.keys[0])} to complete at {where}"
