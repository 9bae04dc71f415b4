"""One launch at run time: its threads, their registers, and the memory that they see.

Threads are numbered through: lane = CTA slot * padded block size + linear thread index. Every register is one
array over all lanes. A *selection* is the set of lanes that execute an instruction together: `slice(None)`
for all of them, else an ascending index array; `register[selection]` works with both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import memory as mem
from .barriers import ClusterBarriers, CtaBarriers, MBarriers, Wait
from .errors import Fault, Where
from .history import History
from .memory import Pool
from .ops_async import Groups
from .program import Program
from .values import UINT, Array

if TYPE_CHECKING:
    from .machine import Machine

Selection = Any  # slice(None) | integer array
WARP = 32
GARBAGE = 0x7FBADBAD  # what an unwritten register holds: a NaN, and an address that is not mapped
EVERYONE = slice(None)
FULL = np.uint32(0xFFFFFFFF)  # the membermask of a whole warp

Dim = tuple[int, int, int]


class Grid:
    """Threads, registers and memories of one launch."""

    def __init__(
        self,
        machine: Machine,
        index: int,
        program: Program,
        params: bytes,
        grid: Dim,
        block: Dim,
        cluster: Dim,
        dynamic_smem: int,
        resident: int,
    ) -> None:
        self.machine = machine
        self.memory = machine.memory
        self.index = index
        self.program = program
        self.dims, self.block, self.cluster = grid, block, cluster
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.n_ctas = grid[0] * grid[1] * grid[2]
        self.n_clusters = self.n_ctas // self.cluster_size
        self.threads = block[0] * block[1] * block[2]
        self.padded = -(-self.threads // WARP) * WARP
        self.slots = min(self.n_ctas, max(1, resident // self.cluster_size) * self.cluster_size)
        self.n = n = self.slots * self.padded
        self.all = np.arange(n)

        linear = self.all % self.padded
        self.slot = self.all // self.padded
        self.base = self.slot // self.cluster_size * self.cluster_size  # slot of the cluster's first CTA
        self.rank = (self.slot - self.base).astype(np.uint32)
        self.warp = self.all // WARP
        self.laneid = (self.all % WARP).astype(np.uint32)
        self.linear = linear.astype(np.uint32)
        bx, by, _ = block
        self.tid = tuple(a.astype(np.uint32) for a in (linear % bx, linear // bx % by, linear // (bx * by)))
        self.exists = linear < self.threads
        self.alive = np.zeros(n, bool)
        self.warp_alive = np.zeros(n // WARP, np.uint32)
        self.cta_alive = np.zeros(self.slots, np.int64)  # threads that have not exited, per slot
        self.cta = np.zeros(self.slots, np.int64)  # linear CTA index in each slot
        self.ctaid = tuple(np.zeros(n, np.uint32) for _ in range(3))
        self.clusterid = tuple(np.zeros(n, np.uint32) for _ in range(3))

        self.dynamic_smem = dynamic_smem
        self.shared_size = program.shared_size(dynamic_smem)
        self.shared_stride = -(-(mem.RESERVED_SHARED + self.shared_size) // 1024) * 1024
        size = self.slots * self.shared_stride
        self.shared = Pool(np.zeros(size, np.uint8), np.zeros(size, np.uint8), self.shared_place)
        size = n * program.local_size
        self.local = Pool(np.full(size, mem.POISON, np.uint8), np.zeros(size, np.uint8), self._local_place)
        self.params = Pool(np.frombuffer(bytearray(params), np.uint8), where="kernel parameters+{}".format)
        self.constants = program.bind(self.memory)

        self.r: list[Array] = []
        self._files: list[tuple[Array, Any]] = []
        self._registers()
        self.returns = [np.zeros(n, np.int64) for _ in program.functions]

        self.barriers = CtaBarriers(self)
        self.cluster_barriers = ClusterBarriers(self)
        self.mbarriers = MBarriers(self)
        self.blocked: list[Wait] = []
        self.parked: dict[
            int, list[Array]
        ] = {}  # pc of a warp-synchronous instruction -> lanes that wait there
        self.bulk = Groups(n)
        self.cp_async = Groups(n)
        self.priority = np.zeros(n, np.int64)

        self.next_cluster = 0
        self.triggered = np.zeros(self.n_ctas, bool)
        self.finished = np.zeros(self.n_ctas, bool)
        self.complete = False
        self.previous: Grid | None = None
        self.last_load: tuple[int, int] | None = (
            None  # (pc, address) of the latest load, to name a stuck poll
        )

        now = machine.time
        self.published = {s: np.full(n, -1, np.int64) for s in ("cluster", "gpu")}
        self.seen = {s: np.full(n, now, np.int64) for s in ("cluster", "gpu")}
        self.pooled = np.full(n, -1, np.int64)
        self.proxy_fenced = np.full(n, -1, np.int64)

    # -- threads ----------------------------------------------------------------------------------------

    def _registers(self) -> None:
        sizes = self.program.register_sizes
        rows: dict[int, int] = {}
        index = []
        for size in sizes:
            index.append(rows.get(size, 0))
            rows[size] = index[-1] + 1
        files: dict[int, Array] = {}
        for size, count in rows.items():
            dtype = np.dtype(bool) if size == 0 else UINT[size]
            fill = False if size == 0 else dtype.type((GARBAGE << 32 | GARBAGE) >> (64 - 8 * size))
            files[size] = np.full((count, self.n), fill, dtype)
            self._files.append((files[size], fill))
        self.r = [files[size][row] for size, row in zip(sizes, index, strict=True)]

    def start_clusters(self) -> Array:
        """Put waiting clusters into free slots; returns the lanes that begin."""
        started = []
        for first in range(0, self.slots, self.cluster_size):
            slots = range(first, first + self.cluster_size)
            if self.next_cluster == self.n_clusters or self.cta_alive[list(slots)].any():
                continue
            self._place(self.next_cluster, first)
            self.next_cluster += 1
            lanes = self.all[first * self.padded : (first + self.cluster_size) * self.padded]
            started.append(lanes[self.exists[lanes]])
        return np.concatenate(started) if started else self.all[:0]

    def _place(self, cluster: int, first: int) -> None:
        (gx, gy, _), (cx, cy, _) = self.dims, self.cluster
        k = (cluster % (gx // cx), cluster // (gx // cx) % (gy // cy), cluster // (gx // cx * (gy // cy)))
        for rank in range(self.cluster_size):
            slot = first + rank
            inside = (rank % cx, rank // cx % cy, rank // (cx * cy))
            ctaid = [k[d] * self.cluster[d] + inside[d] for d in range(3)]
            lanes = slice(slot * self.padded, (slot + 1) * self.padded)
            for d in range(3):
                self.ctaid[d][lanes] = ctaid[d]
                self.clusterid[d][lanes] = k[d]
            self.cta[slot] = ctaid[0] + gx * (ctaid[1] + gy * ctaid[2])
            self.cta_alive[slot] = self.threads
            self.alive[lanes] = self.exists[lanes]
            for file, fill in self._files:
                file[:, lanes] = fill
            bytes_ = slice(slot * self.shared_stride, (slot + 1) * self.shared_stride)
            self.shared.data[bytes_] = mem.POISON
            assert self.shared.shadow is not None
            self.shared.shadow[bytes_] = mem.UNWRITTEN
            self.seen["cluster"][lanes] = self.seen["gpu"][lanes] = self.machine.time
        self._count_warps()

    def _count_warps(self) -> None:
        self.warp_alive = self.warp_bits(self.alive)

    def warp_bits(self, flags: Array) -> Array:
        """bool [lanes] -> one uint32 per warp, bit i for lane i."""
        return np.packbits(flags.reshape(-1, WARP), axis=1, bitorder="little").view(np.uint32).ravel()

    def lanes(self, sel: Selection) -> Array:
        """The lanes of a selection as an index array."""
        return self.all[sel]

    def select(self, lanes: Array) -> Selection:
        """An index array as a selection."""
        return EVERYONE if lanes.size == self.n else lanes

    def exit(self, lanes: Array) -> None:
        """Threads end. Barriers that waited for them only may open; clusters that are done make room."""
        self.alive[lanes] = False
        self._count_warps()
        slots, counts = np.unique(self.slot[lanes], return_counts=True)
        self.cta_alive[slots] -= counts
        for pc, parked in list(self.parked.items()):
            del self.parked[pc]
            for group in parked:
                self.machine.go(self, group, pc)
        for slot in slots[self.cta_alive[slots] == 0].tolist():
            self.finished[self.cta[slot]] = True
            self.triggered[self.cta[slot]] = True
            self.mbarriers.forget(slot)
        self.barriers.recheck(slots)
        self.cluster_barriers.recheck(np.unique(slots // self.cluster_size))
        self.machine.progress += 1
        if self.next_cluster < self.n_clusters:
            begun = self.start_clusters()
            if begun.size:
                self.machine.go(self, begun, self.program.entry_pc)

    def converge(self, sel: Selection, pc: int, mask: Any) -> Array | None:
        """Hold a warp-synchronous instruction until every living lane of `mask` is here.

        None: the selection may execute as it is. Otherwise the lanes that may execute now (perhaps none); the
        others are parked at `pc`, and a later arrival takes them along.
        """
        if sel is EVERYONE and self.alive.all() and (mask(self, sel) == FULL).all():
            return None
        here = self.lanes(sel)
        waiting = self.parked.pop(pc, None)
        if waiting:
            here = np.sort(np.concatenate([here, *waiting]))
        flags = np.zeros(self.n, bool)
        flags[here] = True
        need = np.broadcast_to(mask(self, here), here.shape)
        outside = (need >> self.laneid[here]) & np.uint32(1) == 0
        if outside.any():
            lane = int(here[outside][0])
            raise Fault("undefined", "the executing thread is not in its membermask", lane=lane)
        warp = self.warp[here]
        need = need & self.warp_alive[warp]
        ready = (self.warp_bits(flags)[warp] & need) == need
        if ready.all():
            return here if waiting else None
        self.parked[pc] = [here[~ready]]
        return here[ready]

    def wait(self, wait: Wait) -> None:
        """Block lanes."""
        if wait.lanes.size:
            self.blocked.append(wait)

    def wake(self, kind: str, ready: Any) -> None:
        """Let lanes go on whose wait of this kind is over: `ready(wait)` -> bool per lane."""
        still = []
        for w in self.blocked:
            if w.kind != kind:
                still.append(w)
                continue
            over = ready(w)
            if not over.any():
                still.append(w)
                continue
            lanes = w.lanes[over]
            if w.resume is not None:
                w.resume(self, lanes)
            if w.scope:
                self.acquire(lanes, w.scope)
            self.machine.go(self, lanes, w.pc + 1)
            self.machine.progress += 1
            if not over.all():
                w.lanes, w.keys = w.lanes[~over], w.keys[~over]
                w.detail = None if w.detail is None else w.detail[~over]
                still.append(w)
        self.blocked = still

    # -- memory order -----------------------------------------------------------------------------------

    @property
    def history(self) -> History | None:
        return self.machine.history

    def release(self, lanes: Array, scope: str) -> None:
        if self.machine.history is not None:
            self.machine.history.release(self, lanes, scope)

    def acquire(self, lanes: Array, scope: str) -> None:
        if self.machine.history is not None:
            self.machine.history.acquire(self, lanes, scope)

    # -- memory -----------------------------------------------------------------------------------------

    def resolve(self, space: str, sel: Selection, address: Array, size: int) -> list[tuple[Pool, Any, Array]]:
        """(pool, which positions of the selection, byte offsets) of accesses of `size` bytes at `address`.

        Raises Fault for misaligned accesses and those outside every variable or buffer.
        """
        wrong = address & address.dtype.type(size - 1)
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            raise Fault("misaligned", f"{size}-byte access at {int(address[lane]):#x}", lane)
        if space in ("global", "const"):
            return self.memory.locate(address.astype(np.uint64), size)  # type: ignore[return-value]
        if space.startswith("shared"):
            return [
                (self.shared, EVERYONE, self.shared_offset(sel, address, size, space == "shared::cluster"))
            ]
        if space == "local":
            return [(self.local, EVERYONE, self.local_offset(sel, address, size))]
        if space == "param":
            offset = address.astype(np.int64)
            self._inside(offset, size, self.params.data.size, "the kernel's parameters")
            return [(self.params, EVERYONE, offset)]
        return self._generic(sel, address.astype(np.uint64), size)

    def _generic(self, sel: Selection, address: Array, size: int) -> list[tuple[Pool, Any, Array]]:
        if int(address.min()) >= mem.WINDOW_END or int(address.max()) < mem.SHARED_WINDOW:
            return self.memory.locate(address, size)  # type: ignore[return-value]
        lanes = self.lanes(sel)
        parts: list[tuple[Pool, Any, Array]] = []
        edges = np.array([mem.SHARED_WINDOW, mem.LOCAL_WINDOW, mem.PARAM_WINDOW, mem.WINDOW_END], np.uint64)
        kind = np.searchsorted(edges, address, side="right")
        for k in np.unique(kind).tolist():
            where = np.flatnonzero(kind == k)
            space = {1: "shared::cluster", 2: "local", 3: "param"}.get(k, "global")
            inner = address[where] - (edges[k - 1] if 1 <= k <= 3 else np.uint64(0))
            try:
                for pool, which, offset in self.resolve(space, lanes[where], inner, size):
                    parts.append((pool, where[which], offset))
            except Fault as e:
                e.position = int(where[e.position])
                raise
        if len(parts) == 1 and parts[0][1].size == lanes.size:
            return [(parts[0][0], EVERYONE, parts[0][2])]
        return parts

    def shared_offset(self, sel: Selection, address: Array, size: int, cluster: bool) -> Array:
        """Byte offset in the pool of all CTAs' shared memory."""
        address = address.astype(np.int64)
        rank = address >> mem.RANK_SHIFT
        inner = address & ((1 << mem.RANK_SHIFT) - 1)
        slot = self.slot[sel]
        if cluster:
            bad = (rank < 0) | (rank >= self.cluster_size)
            text = f"no CTA with this rank in a cluster of {self.cluster_size}"
        else:
            bad = rank != self.rank[sel]
            text = "an address in another CTA used as shared::cta"
        if bad.any():
            lane = int(np.flatnonzero(bad)[0])
            raise Fault("out-of-bounds", f"shared address {int(address[lane]):#x}: {text}", lane)
        if cluster:
            slot = self.base[sel] + rank
            gone = self.cta_alive[slot] == 0
            if gone.any():
                lane = int(np.flatnonzero(gone)[0])
                raise Fault("exited", f"shared memory of CTA rank {int(rank[lane])}, which has exited", lane)
        bad = (inner < mem.RESERVED_SHARED) | (inner + size > mem.RESERVED_SHARED + self.shared_size)
        if bad.any():
            lane = int(np.flatnonzero(bad)[0])
            at = int(inner[lane]) - mem.RESERVED_SHARED
            near = self.program.nearest_shared(at)
            raise Fault(
                "out-of-bounds",
                f"{size}-byte access at shared offset {at} of {self.shared_size} bytes{near}",
                lane,
            )
        return slot * self.shared_stride + inner

    def shared_place(self, offset: int) -> str:
        """CTA, offset and variable at a byte offset in the pool of all CTAs' shared memory."""
        slot, inner = divmod(offset, self.shared_stride)
        inner -= mem.RESERVED_SHARED
        return f"shared offset {inner} of CTA {int(self.cta[slot])}{self.program.nearest_shared(inner)}"

    def _local_place(self, offset: int) -> str:
        return f"local offset {offset % self.program.local_size}"

    def need_alive(self, offset: Array) -> None:
        """Raise Fault where an asynchronous operation touches the shared memory of a CTA that has exited."""
        gone = np.flatnonzero(self.cta_alive[offset // self.shared_stride] == 0)
        if gone.size:
            place = self.shared_place(int(offset[gone[0]]))
            raise Fault("exited", f"asynchronous access to {place}, which has exited", int(gone[0]))

    def local_offset(self, sel: Selection, address: Array, size: int) -> Array:
        """Byte offset in the pool of all threads' local memory."""
        offset = address.astype(np.int64)
        self._inside(offset, size, self.program.local_used, "the thread's local memory")
        return self.lanes(sel) * self.program.local_size + offset

    @staticmethod
    def _inside(offset: Array, size: int, limit: int, what: str) -> None:
        bad = (offset < 0) | (offset + size > limit)
        if bad.any():
            lane = int(np.flatnonzero(bad)[0])
            raise Fault("out-of-bounds", f"offset {int(offset[lane])} in {what} ({limit} bytes)", lane)

    def load(self, space: str, sel: Selection, address: Array, width: int, n: int = 1) -> Array:
        """Load `n` elements of `width` bytes per lane: shape [lanes], or [lanes, n] for n > 1."""
        parts = self.resolve(space, sel, address, width * n)
        if len(parts) == 1 and isinstance(parts[0][1], slice):
            return self._read(parts[0][0], sel, EVERYONE, parts[0][2], width, n)
        out = np.empty((address.size, n) if n > 1 else address.size, UINT[width])
        for pool, where, offset in parts:
            out[where] = self._read(pool, sel, where, offset, width, n)
        return out

    def _read(self, pool: Pool, sel: Selection, where: Any, offset: Array, width: int, n: int) -> Array:
        history = self.machine.history
        try:
            if history is not None and history.records.get(pool):
                stale = history.stale(self, self.lanes(sel)[where], pool, offset, width * n)
                if stale is not None:
                    data, shadow = stale
                    if (shadow != mem.WRITTEN).any():
                        lane = int(np.flatnonzero((shadow != mem.WRITTEN).any(axis=1))[0])
                        place = pool.where(int(offset[lane]))
                        raise Fault(
                            "uninitialized",
                            f"read of {place} before the write there has become visible",
                            lane,
                        )
                    values = np.ascontiguousarray(data).view(UINT[width])
                    return values if n > 1 else values.ravel()
            return pool.load(offset, width, n)
        except Fault as e:
            if not isinstance(where, slice):
                e.position = int(where[e.position])
            if e.kind != "uninitialized" or self.machine.uninitialized == "raise":
                raise
            self.machine.diagnose(self, sel, e)
            return pool._view(False, width, n)[offset // (width * n)]

    def store(
        self, space: str, sel: Selection, address: Array, width: int, values: Array, n: int = 1
    ) -> None:
        """Store [lanes] (or [lanes, n]) elements of `width` bytes; a single element broadcasts."""
        for pool, where, offset in self.resolve(space, sel, address, width * n):
            part = values if values.shape[0] == 1 else values[where]
            self.note(pool, sel, where, offset, width * n)
            try:
                pool.store(offset, width, part, n)
            except Fault as e:
                if not isinstance(where, slice):
                    e.position = int(where[e.position])
                raise
        self.machine.progress += 1

    def note(self, pool: Pool, sel: Selection, where: Any, offset: Array, size: int, **kind: bool) -> None:
        """Record a write that other CTAs may see late."""
        history = self.machine.history
        if history is None or pool is self.local:
            return
        lanes = self.lanes(sel)[where]
        if pool is self.shared and not kind and not self.program.shared_is_read_elsewhere:
            away = self.slot[lanes] != offset // self.shared_stride
            lanes, offset = lanes[away], offset[away]
        if lanes.size:
            history.add(self, lanes, pool, offset, size, **kind)

    def release_storage(self) -> None:
        """Free what a completed launch no longer needs."""
        self.r, self._files = [], []
        self.blocked, self.parked = [], {}
        self.local = Pool(np.zeros(0, np.uint8))

    def describe(self, address: int) -> str:
        """A global address in words."""
        try:
            buffer, _, offset = self.memory.locate(np.array([address], np.uint64), 1)[0]
        except Fault:
            return f"{address:#x}"
        return buffer.where(int(offset[0]))

    # -- words ------------------------------------------------------------------------------------------

    def locate(self, lane: int, pc: int) -> Where:
        """A thread and an instruction, for messages."""
        ins = self.program.instructions[pc]
        x, y, z = (int(a[lane]) for a in self.ctaid)
        i, j, k = (int(a[lane]) for a in self.tid)
        source = str(ins.loc) if ins.loc else ""
        return Where(self.program.name, self.index, (x, y, z), (i, j, k), ins.line, ins.text, source)
