"""Memory: pools of bytes with a shadow, and the global memory that a stream of launches shares.

Global buffers are the caller's own numpy arrays, changed in place, at made-up 64-bit addresses with
unmapped gaps between them: an access outside every buffer is an error, never a neighbour's bytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import Fault
from .values import UINT, Array

# Windows of the generic address space. The values are ours; what matters is that they do not overlap.
SHARED_WINDOW = 0x7E00_0000_0000
LOCAL_WINDOW = 0x7E80_0000_0000
PARAM_WINDOW = 0x7EC0_0000_0000
WINDOW_END = 0x7F00_0000_0000
GLOBAL_BASE = 0x7F00_0000_0000
GUARD = 1 << 20  # unmapped bytes after each buffer

# A shared address is (rank of the CTA in its cluster) << 24 | offset, so that an address of the own CTA is
# valid in the window of the cluster too; offsets below 1 KiB are reserved by the system on sm_90 and later.
RANK_SHIFT = 24
RESERVED_SHARED = 1024

UNWRITTEN, WRITTEN, MBARRIER = 0, 1, 2  # shadow values
_ONES = {width: UINT[width].type(int.from_bytes(b"\x01" * width, "little")) for width in UINT}
POISON = 0xFF  # fills poisoned bytes: a NaN in every float format that has one


class Pool:
    """Bytes that threads read and write. `shadow`, if any, holds one state per byte."""

    def __init__(
        self, data: Array, shadow: Array | None = None, where: Callable[[int], str] = "byte {}".format
    ) -> None:
        self.data = data
        self.shadow = shadow
        self.where = where  # what stands at a byte offset, in words
        self._views: dict[tuple[bool, int, int], Array] = {}

    def _view(self, shadow: bool, width: int, n: int) -> Array:
        key = (shadow, width, n)
        view = self._views.get(key)
        if view is None:
            source = self.shadow if shadow else self.data
            assert source is not None
            whole = source[: source.size // (width * n) * (width * n)].view(UINT[width])
            view = self._views[key] = whole.reshape(-1, n) if n > 1 else whole
        return view

    def load(self, offset: Array, width: int, n: int = 1) -> Array:
        """`n` elements of `width` bytes at each byte offset: shape [lanes] for n = 1, else [lanes, n].

        Offsets are multiples of width * n and inside the pool. Raises Fault for bytes nobody has written.
        """
        index = offset // (width * n)
        if self.shadow is not None:
            bad = self._view(True, width, n)[index] != _ONES[width]
            if bad.any():
                self._complain(offset, bad.any(axis=1) if n > 1 else bad, width * n)
        return self._view(False, width, n)[index]

    def store(self, offset: Array, width: int, values: Array, n: int = 1) -> None:
        """Inverse of :meth:`load`. Where two lanes name one address, the later lane wins."""
        index = offset // (width * n)
        if self.shadow is not None:
            shadow = self._view(True, width, n)
            barrier = shadow[index] & (_ONES[width] << UINT[width].type(1))
            if barrier.any():
                hit = barrier.any(axis=1) if n > 1 else barrier
                raise Fault(
                    "mbarrier", "plain store over a live mbarrier object", int(np.flatnonzero(hit)[0])
                )
            shadow[index] = _ONES[width]
        self._view(False, width, n)[index] = values

    def _complain(self, offset: Array, bad: Array, size: int) -> None:
        lane = int(np.flatnonzero(bad)[0])
        assert self.shadow is not None
        at = int(offset[lane])
        if (self.shadow[at : at + size] == MBARRIER).any():
            raise Fault("mbarrier", "plain load of an mbarrier object", lane)
        raise Fault("uninitialized", f"read of {self.where(at)}, which nobody has written", lane)

    def read(self, offset: int, size: int) -> Array:
        """A copy of `size` bytes, shadow checked."""
        if self.shadow is not None:
            bad = np.flatnonzero(self.shadow[offset : offset + size] != WRITTEN)
            if bad.size:
                raise Fault(
                    "uninitialized", f"read of {self.where(offset + int(bad[0]))}, which nobody has written"
                )
        return self.data[offset : offset + size].copy()

    def write(self, offset: int, values: Array) -> None:
        """Write bytes and mark them written."""
        self.data[offset : offset + values.size] = values
        if self.shadow is not None:
            self.shadow[offset : offset + values.size] = WRITTEN


class Buffer(Pool):
    """A global buffer: `array`'s bytes at `address`."""

    def __init__(self, array: Array, address: int, name: str) -> None:
        super().__init__(array.reshape(-1).view(np.uint8), where=self._place)
        self.array = array
        self.address = address
        self.name = name

    @property
    def size(self) -> int:
        return int(self.data.size)

    def _place(self, offset: int) -> str:
        return f"{self.name}+{offset} (of {self.size} bytes)"


class Memory:
    """The global memory of one device. Arrays stay the caller's; add them once, in any order."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []  # ascending by address
        self._starts: list[int] = []
        self._next = GLOBAL_BASE
        self._known: dict[tuple[int, int], Buffer] = {}
        self.variables: dict[tuple[int, str], Buffer] = {}  # (id of a module, name) -> its `.global` variable
        self._keep: list[Any] = []

    def add(self, array: Array, name: str = "") -> Buffer:
        """Map an array (C-contiguous, writable). Adding it again gives the same buffer.

        Raises ValueError for an array whose memory is not one block.
        """
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            raise ValueError("a global buffer must be a C-contiguous numpy array")
        if not array.flags.writeable:
            raise ValueError("a global buffer must be writable: the program runs on the array itself")
        key = (array.__array_interface__["data"][0], array.nbytes)
        buffer = self._known.get(key)
        if buffer is None:
            buffer = Buffer(array, self._next, name or f"buffer{len(self.buffers)}")
            self._next = -(-(self._next + array.nbytes + GUARD) // GUARD) * GUARD
            self._known[key] = buffer
            self.buffers.append(buffer)
            self._starts.append(buffer.address)
        elif name:
            buffer.name = name
        return buffer

    def alloc(self, nbytes: int, name: str) -> Buffer:
        """A zeroed buffer of the emulator's own."""
        return self.add(np.zeros(nbytes, np.uint8), name)

    def address(self, array: Array) -> int:
        """Device address of an array, or of a contiguous part of one that was added."""
        data, nbytes = array.__array_interface__["data"][0], array.nbytes
        if (data, nbytes) not in self._known:
            for buffer in self.buffers:
                start = buffer.data.__array_interface__["data"][0]
                if start <= data and data + nbytes <= start + buffer.size:
                    return buffer.address + data - start
        return self.add(array).address

    def poison(self, array: Array) -> None:
        """Fill with NaN patterns and report every read of a byte that no thread has written since."""
        buffer = self.add(array)
        buffer.data[:] = POISON
        buffer.shadow = np.full(buffer.size, UNWRITTEN, np.uint8)
        buffer._views.clear()

    def unwritten(self, array: Array) -> Array:
        """Elements of a poisoned array with a byte that no thread has written: bool, the array's shape."""
        shadow = self.add(array).shadow
        if shadow is None:
            raise ValueError("unwritten() is known for poisoned arrays only: call poison() before the launch")
        return (shadow.reshape(*array.shape, array.itemsize) == UNWRITTEN).any(axis=-1)

    def locate(self, address: Array, size: int) -> list[tuple[Buffer, Array | slice, Array]]:
        """Resolve uint64 addresses of `size`-byte accesses: (buffer, which lanes, byte offsets in it).

        Raises Fault for the first access that is not inside one buffer.
        """
        low, high = int(address.min()), int(address.max())
        k = bisect.bisect_right(self._starts, low) - 1
        if k >= 0:
            buffer = self.buffers[k]
            if high + size <= buffer.address + buffer.size:
                return [(buffer, slice(None), (address - np.uint64(buffer.address)).astype(np.int64))]
        which = np.searchsorted(np.array(self._starts, np.uint64), address, side="right") - 1
        parts: list[tuple[Buffer, Array | slice, Array]] = []
        for k in np.unique(which).tolist():
            lanes = np.flatnonzero(which == k)
            if k < 0:
                raise Fault("out-of-bounds", self.nearest(int(address[lanes[0]]), size), int(lanes[0]))
            buffer = self.buffers[k]
            offset = (address[lanes] - np.uint64(buffer.address)).astype(np.int64)
            outside = np.flatnonzero(offset + size > buffer.size)
            if outside.size:
                lane = int(lanes[outside[0]])
                raise Fault("out-of-bounds", self.nearest(int(address[lane]), size), lane)
            parts.append((buffer, lanes, offset))
        return parts

    def nearest(self, address: int, size: int) -> str:
        """An address outside every buffer, in words."""
        text = f"{size}-byte access at {address:#x}"
        if not self.buffers:
            return f"{text}; no buffer is mapped"

        def distance(b: Buffer) -> int:
            return max(b.address - address, address + size - b.address - b.size)

        b = min(self.buffers, key=distance)
        far = distance(b)
        if far > GUARD:
            return f"{text}; no buffer within {GUARD} bytes (nearest: {b.name})"
        side = f"starts {far} bytes before" if address < b.address else f"reaches {far} bytes past the end of"
        return f"{text} {side} {b.name} ({b.size} bytes at {b.address:#x})"
