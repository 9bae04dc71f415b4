"""Loads, stores, atomics and address conversions.

PTX ISA, "Data Movement and Conversion Instructions" (ld, st, cvta, mapa, getctarank, createpolicy) and
"Parallel Synchronization and Communication Instructions" (atom, red).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ptx.ir import Addr, Vec
from . import memory as mem
from . import values
from .program import WIDTH, Decoder, Reader, Step, dtype, op
from .values import FORMATS, UINT, Array

if TYPE_CHECKING:
    from .grid import Grid, Selection

_VECTOR = {"v2": 2, "v4": 4, "v8": 8}


def elements(d: Decoder) -> int:
    """Number of vector elements."""
    return next((_VECTOR[m] for m in d.mods if m in _VECTOR), 1)


def _space(d: Decoder, address: int) -> str:
    space = d.space()
    return d.param_space(address) if space == "param" else space


def _plain(d: Decoder) -> None:
    for m in ("mmio", "b128"):
        if m in d.mods:
            raise d.fail(f".{m}")


@op("ld", "ldu")
def load(d: Decoder) -> Step:
    _plain(d)
    t, n = d.type, elements(d)
    width = WIDTH[t]
    space = _space(d, 1)
    address = d.address(1)
    writers = [d.dst(o, t) for o in d.items(0, n)]
    acquire = "acquire" in d.mods
    scope = d.scope("cta")
    pc = d.pc
    if space == "param":
        return _load_parameter(d, address, writers, width, n)

    def run(g: Grid, sel: Selection) -> None:
        at = address(g, sel)
        x = g.load(space, sel, at, width, n)
        g.last_load = (pc, int(at[0]))
        if n == 1:
            writers[0](g, sel, x)
        else:
            for k, write in enumerate(writers):
                write(g, sel, x[:, k])
        if acquire:
            g.acquire(g.lanes(sel), scope)

    return run


def _load_parameter(d: Decoder, address: Reader, writers: list[Any], width: int, n: int) -> Step:
    """A kernel parameter: the same for all threads when its address is written in the instruction."""
    o = d.operand(1)
    fixed = isinstance(o, Addr) and not isinstance(o.base, type(None)) and hasattr(o.base, "offset")

    def run(g: Grid, sel: Selection) -> None:
        at = address(g, sel)
        if fixed:
            at = at[:1]
        x = g.load("param", sel, at, width, n)
        for k, write in enumerate(writers):
            write(g, sel, x if n == 1 else x[:, k])

    return run


@op("st")
def store(d: Decoder) -> Step:
    if "async" in d.mods:
        from .ops_async import store_async

        return store_async(d)
    _plain(d)
    if "bulk" in d.mods:
        raise d.fail("st.bulk")
    t, n = d.type, elements(d)
    width = WIDTH[t]
    space = _space(d, 0)
    address = d.address(0)
    sources = [d.src(o, f"b{8 * width}") for o in d.items(1, n)]
    release = "release" in d.mods
    scope = d.scope("cta")

    def run(g: Grid, sel: Selection) -> None:
        if release:
            g.release(g.lanes(sel), scope)
        g.store(space, sel, address(g, sel), width, stack(g, sel, sources), n)

    return run


def stack(g: Grid, sel: Selection, sources: list[Reader]) -> Array:
    """Vector operands as [lanes, n]; a single one as it is."""
    if len(sources) == 1:
        return sources[0](g, sel)
    columns = [s(g, sel) for s in sources]
    count = max(c.size for c in columns)
    out = np.empty((count, len(columns)), columns[0].dtype)
    for k, c in enumerate(columns):
        out[:, k] = c
    return out


# -- atomics --------------------------------------------------------------------------------------------

Update = Callable[[Array, Array, Array], Array]  # (old, b, c) -> new, unsigned bits throughout


def update(name: str, t: str, flush: bool) -> Update:
    """One atomic operation as a function on bits. Raises KeyError for operations that do not exist."""
    dt, u = dtype(t), UINT[WIDTH[t]]
    if t in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2") and name in ("add", "min", "max"):
        return _float_update(name, t, flush)

    def typed(f: Callable[[Array, Array], Array]) -> Update:
        return lambda old, b, c: f(old.view(dt), b.view(dt)).astype(dt).view(u)

    return {
        "add": typed(np.add),
        "min": typed(np.minimum),
        "max": typed(np.maximum),
        "and": typed(np.bitwise_and),
        "or": typed(np.bitwise_or),
        "xor": typed(np.bitwise_xor),
        "exch": lambda old, b, c: b,
        "cas": lambda old, b, c: np.where(old == b, c, old),
        "inc": lambda old, b, c: np.where(old >= b, u.type(0), old + u.type(1)),
        "dec": lambda old, b, c: np.where((old == 0) | (old > b), b, old - u.type(1)),
    }[name]


def _float_update(name: str, t: str, flush: bool) -> Update:
    if t == "f32":
        if name == "add":
            return lambda old, b, c: values.add_f32(
                old.view(np.float32), b.view(np.float32), "rn", flush
            ).view(np.uint32)
        return lambda old, b, c: values.minmax_f32(
            old.view(np.float32), b.view(np.float32), name == "max"
        ).view(np.uint32)
    if t == "f64":
        if name == "add":
            return lambda old, b, c: values.add_f64(old.view(np.float64), b.view(np.float64)).view(np.uint64)
        return lambda old, b, c: values.minmax(
            old.view(np.float64), b.view(np.float64), name == "max", False
        ).view(np.uint64)
    f = FORMATS[t.removesuffix("x2")]
    one = values.encode(np.ones(1), f)

    def half(old: Array, b: Array) -> Array:
        if name == "add":
            return values.fma_narrow(old, one, b, f)
        return values.encode(
            values.minmax(values.decode(old, f), values.decode(b, f), name == "max", False), f
        )

    if not t.endswith("x2"):
        return lambda old, b, c: half(old, b).astype(np.uint16)
    low = np.uint32(0xFFFF)
    return lambda old, b, c: (
        (half(old >> np.uint32(16), b >> np.uint32(16)) << np.uint32(16)) | half(old & low, b & low)
    )


def apply(pool: Any, offset: Array, width: int, f: Update, b: Array, c: Array) -> tuple[Array, bool]:
    """Atomic updates in lane order: (old values, did any value change). Lanes with one address take turns."""
    b, c = np.broadcast_to(b, offset.shape), np.broadcast_to(c, offset.shape)
    old = np.empty(offset.size, UINT[width])
    changed = False
    left = np.arange(offset.size)
    while left.size:
        _, first = np.unique(offset[left], return_index=True)
        turn = left[first]
        old[turn] = pool.load(offset[turn], width)
        new = f(old[turn], b[turn], c[turn])
        changed |= bool((new != old[turn]).any())
        pool.store(offset[turn], width, new)
        left = np.delete(left, first)
    return old, changed


@op("atom", "red")
def atomic(d: Decoder) -> Step:
    if "async" in d.mods:
        from .ops_async import reduce_async

        return reduce_async(d)
    _plain(d)
    name = next(m for m in d.mods if m in _ATOMIC)
    t, n = d.type, elements(d)
    width = WIDTH[t]
    bits = f"b{8 * width}"
    returns = d.ins.opcode == "atom"
    space = d.space()
    address = d.address(1 if returns else 0)
    k = 2 if returns else 1
    sources = [d.src(o, bits) for o in d.items(k, n)]
    third = d.src(k + 1, bits) if name == "cas" else None
    writers = [d.dst(o, bits) for o in d.items(0, n)] if returns else []
    # atom.add.f32 flushes subnormals in global memory and keeps them in shared memory.
    f = update(name, t, flush=not space.startswith("shared"))
    release = "release" in d.mods or "acq_rel" in d.mods
    acquire = "acquire" in d.mods or "acq_rel" in d.mods
    scope = d.scope("gpu")
    pc = d.pc

    def run(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        if release:
            g.release(lanes, scope)
        at = address(g, sel)
        b = stack(g, sel, sources)
        c = third(g, sel) if third is not None else b
        old = np.empty((lanes.size, n), UINT[width])
        for pool, where, offset in g.resolve(space, sel, at, width * n):
            g.note(pool, sel, where, offset, width * n)
            for i in range(n):
                bi, ci = (np.broadcast_to(x if n == 1 else x[:, i], lanes.shape)[where] for x in (b, c))
                old[where, i], changed = apply(pool, offset + width * i, width, f, bi, ci)
                g.machine.progress += changed  # a polling atomic that changes nothing is no progress
        for i, write in enumerate(writers):
            write(g, sel, np.ascontiguousarray(old[:, i]))
        g.last_load = (pc, int(at[0]))
        if acquire and returns:
            g.acquire(lanes, scope)

    return run


_ATOMIC = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


# -- addresses ------------------------------------------------------------------------------------------


@op("cvta")
def cvta(d: Decoder) -> Step:
    """State space address <-> generic address."""
    space = next(
        m for m in d.mods if m in ("global", "const", "local", "param", "param::entry") or "shared" in m
    )
    window = {"local": mem.LOCAL_WINDOW, "param": mem.PARAM_WINDOW, "param::entry": mem.PARAM_WINDOW}.get(
        space, mem.SHARED_WINDOW if "shared" in space else 0
    )
    if "u32" in d.mods:
        raise d.fail("32-bit generic addresses")
    o = d.operand(1)
    if isinstance(o, Vec):
        raise d.fail()
    source, write = d.src(o, "u64"), d.dst(0, "u64")
    step = np.uint64(window)
    if "to" in d.mods:
        return lambda g, sel: write(g, sel, source(g, sel) - step)
    return lambda g, sel: write(g, sel, source(g, sel) + step)


@op("mapa")
def mapa(d: Decoder) -> Step:
    """The same shared address in another CTA of the cluster."""
    t = d.type
    generic = not any("shared" in m for m in d.mods)
    source, rank, write = d.src(1, t), d.src(2, "u32"), d.dst(0, t)
    dt = dtype(t)
    window = dt.type(mem.SHARED_WINDOW if generic and WIDTH[t] == 8 else 0)
    keep = dt.type((1 << mem.RANK_SHIFT) - 1)

    def run(g: Grid, sel: Selection) -> None:
        inner = (source(g, sel) - window) & keep
        write(g, sel, window + inner + (rank(g, sel).astype(dt) << dt.type(mem.RANK_SHIFT)))

    return run


@op("getctarank")
def getctarank(d: Decoder) -> Step:
    t = d.type
    source, write = d.src(1, t), d.dst(0, "u32")
    shift = dtype(t).type(mem.RANK_SHIFT)
    return lambda g, sel: write(g, sel, ((source(g, sel) >> shift) & dtype(t).type(0xFF)).astype(np.uint32))


@op("createpolicy")
def createpolicy(d: Decoder) -> Step:
    """A cache policy is opaque and changes no value."""
    write = d.dst(0, "b64")
    zero = np.zeros(1, np.uint64)
    return lambda g, sel: write(g, sel, zero)
