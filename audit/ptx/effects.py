"""What each instruction means to memory and to synchronisation.

One table, keyed by opcode. An instruction is described by an :class:`Effect`: what kind of thing it is, its
ordering semantics and scope with the ISA's defaults filled in, and the memory accesses that it makes, each
with its own space, proxy, width and semantics (a bulk copy reads global memory, writes shared memory and
completes on an mbarrier: three accesses). Whatever is not in the table, or carries a modifier that the
table does not know, is `Kind.UNKNOWN`; rules report it and never assume that it is harmless.

Defaults follow the PTX ISA sections of each instruction; the proxy of an access follows "Proxies" in the
chapter "Memory Consistency Model" and the async-operation sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from .ir import Addr, Imm, Instruction, Not, Operand, Pair, Reg, TensorAddr, Vec
from .parser import TYPE_BYTES


class Kind(StrEnum):
    COMPUTE = "compute"  # registers only
    LOAD = "load"
    STORE = "store"
    ATOMIC = "atomic"  # read-modify-write that returns the old value
    REDUCTION = "reduction"  # read-modify-write that returns nothing
    PREFETCH = "prefetch"  # cache hints: no ordering meaning
    FENCE = "fence"  # orders memory accesses of one proxy
    PROXY_FENCE = "proxy_fence"  # orders accesses through different proxies
    BARRIER = "barrier"  # CTA barrier: op sync | red | arrive
    WARP_BARRIER = "warp_barrier"  # bar.warp.sync
    CLUSTER_BARRIER = "cluster_barrier"  # op arrive | wait
    MBARRIER = "mbarrier"  # op init | inval | expect_tx | complete_tx | arrive | test_wait | try_wait
    ASYNC_COPY = "async_copy"  # cp.async
    ASYNC_GROUP = "async_group"  # cp.async groups: op commit | wait | mbarrier_arrive
    BULK = "bulk"  # cp.async.bulk and its tensor, reduce and multimem forms, st.async, red.async, try_cancel
    BULK_GROUP = "bulk_group"  # op commit | wait | wait_read
    WGMMA = "wgmma"  # op fence | mma | commit | wait
    TCGEN05 = (
        "tcgen05"  # op alloc | dealloc | relinquish | mma | cp | shift | ld | st | wait_ld | ... | commit
    )
    GRID_DEPENDENCY = "grid_dependency"  # op wait | launch
    WARP = "warp"  # warp-collective value exchange; no memory ordering
    BRANCH = "branch"
    CALL = "call"
    EXIT = "exit"  # ret, exit, trap
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Access:
    """One memory access of an instruction.

    `operand` is the index of the address (or of the matrix descriptor) among the operands. `width` is in
    bytes per thread, None if the text does not say; `size_operand` is then the index of an operand that
    gives the bytes, or -1. `role` is "data", "mbarrier" (the barrier object of an asynchronous operation or
    of an mbarrier instruction) or "tensormap" (a copy descriptor in memory). `asynchronous` accesses are
    outside the issuing thread's program order.
    """

    operand: int
    space: str
    reads: bool
    writes: bool
    sem: str = "weak"
    scope: str = ""
    proxy: str = "generic"
    width: int | None = None
    size_operand: int = -1
    role: str = "data"
    asynchronous: bool = False
    multicast: bool = False


@dataclass(frozen=True, slots=True)
class Effect:
    """Meaning of one instruction. `op` tells the members of a kind apart.

    `sem` is "weak", "relaxed", "acquire", "release", "acq_rel", "sc", "volatile" or "mmio", "" where it has
    no meaning; `scope` is "cta", "cluster", "gpu", "sys" or "". For proxy fences `proxy` is what is fenced
    against the generic proxy ("async", "tensormap", "alias") and `space` the state space it is limited to
    ("" for all); `sem` is then "release" or "acquire" for the one-directional forms and "" for the others.
    `restrict` holds the `sync_restrict` space or "mbarrier_init" of a fence that covers only some objects.
    `barrier` is the index of the operand that names a CTA barrier.
    """

    kind: Kind
    op: str = ""
    sem: str = ""
    scope: str = ""
    space: str = ""
    proxy: str = ""
    restrict: str = ""
    barrier: int = -1
    accesses: tuple[Access, ...] = ()
    why: str = ""

    @property
    def reads(self) -> bool:
        return any(a.reads for a in self.accesses)

    @property
    def writes(self) -> bool:
        return any(a.writes for a in self.accesses)

    @property
    def acquires(self) -> bool:
        return self.sem in ("acquire", "acq_rel", "sc")

    @property
    def releases(self) -> bool:
        return self.sem in ("release", "acq_rel", "sc")


def effect(ins: Instruction) -> Effect:
    """The meaning of one instruction; Kind.UNKNOWN, with the reason in `why`, if the table has no answer."""
    return _effect(ins.opcode, ins.mods, tuple(map(_shape, ins.operands)))


def bytes_of(ins: Instruction, access: Access) -> int | None:
    """Bytes that one execution of `access` touches, None if the text does not tell."""
    if access.width is not None:
        return access.width
    if 0 <= access.size_operand < len(ins.operands):
        size = ins.operands[access.size_operand]
        if isinstance(size, Imm) and isinstance(size.value, int):
            return size.value
    return None


# -- registers --------------------------------------------------------------------------------------------


def _flat(op: Operand) -> Iterator[str]:
    if isinstance(op, Reg):
        if op.name != "_":
            yield op.name
    elif isinstance(op, Vec):
        for item in op.items:
            yield from _flat(item)
    elif isinstance(op, Pair):
        yield from _flat(op.first)
        yield from _flat(op.second)
    elif isinstance(op, Not):
        yield op.item.name
    elif isinstance(op, Addr):
        if isinstance(op.base, Reg):
            yield op.base.name
    elif isinstance(op, TensorAddr):
        if isinstance(op.base, Reg):
            yield op.base.name
        for c in op.coordinates:
            yield from _flat(c)


# Opcodes whose first operand is a register that they read.
_READS_FIRST = frozenset(
    {"bar", "barrier", "nanosleep", "brx", "bra", "stackrestore", "pmevent", "setmaxnreg"}
)


def defined(ins: Instruction) -> tuple[str, ...]:
    """Registers that the instruction writes, in order; the sink `_` is left out."""
    ops = ins.operands
    if not ops or not isinstance(ops[0], Reg | Vec | Pair):
        return ()
    opcode = ins.opcode
    if opcode in _READS_FIRST and "red" not in ins.mods:
        return ()
    if opcode == "tcgen05" and ins.mods[:1] == ("dealloc",):
        return ()
    return tuple(_flat(ops[0]))


def used(ins: Instruction) -> tuple[str, ...]:
    """Registers that the instruction reads, its predicate included."""
    ops = ins.operands
    skip = 1 if defined(ins) and ins.opcode != "wgmma" else 0
    if ops and isinstance(ops[0], Reg) and ops[0].name == "_":
        skip = 1
    out = [r for op in ops[skip:] for r in _flat(op)]
    if ins.pred:
        out.append(ins.pred[0])
    return tuple(out)


# -- the table --------------------------------------------------------------------------------------------


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SEMS = words("weak relaxed acquire release acq_rel sc volatile mmio")
SCOPES = words("cta cluster gpu sys")
SPACES = words("global shared shared::cta shared::cluster local param param::entry param::func const generic")
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_TYPES = frozenset(TYPE_BYTES) | words("e4m3 e5m2 e4m3x2 e5m2x2 e4m3x4 e5m2x4 b1024 b1 s4 u4")
_HINTS = words("ca cg cs lu cv wb wt nc uni unified L1::no_allocate L1::evict_normal L1::evict_unchanged")
_HINTS |= words(
    "L1::evict_first L1::evict_last L2::evict_last L2::evict_normal L2::evict_first L2::cache_hint"
)
_HINTS |= words("L2::64B L2::128B L2::256B")
_ARITH = words("add min max inc dec and or xor exch cas noftz ftz x2 acc::f32 acc::f16")

Shape = str  # one letter per operand: a(ddress) t(ensor address) v(ector) o(ther)


def _shape(op: Operand) -> Shape:
    if isinstance(op, Addr):
        return "a"
    if isinstance(op, TensorAddr):
        return "t"
    return "v" if isinstance(op, Vec) else "o"


class _Mods:
    """The modifiers of one instruction, taken out one by one; what is left over is not understood."""

    def __init__(self, mods: tuple[str, ...], shapes: tuple[Shape, ...]) -> None:
        self.left = list(mods)
        self.shapes = shapes

    def one(self, choices: frozenset[str], default: str = "") -> str:
        for m in self.left:
            if m in choices:
                self.left.remove(m)
                return m
        return default

    def all(self, choices: frozenset[str]) -> list[str]:
        found = [m for m in self.left if m in choices]
        self.left = [m for m in self.left if m not in choices]
        return found

    def flag(self, name: str) -> bool:
        return bool(self.one(frozenset({name})))

    def addresses(self) -> list[int]:
        return [i for i, s in enumerate(self.shapes) if s in "at"]

    def sem_scope(self, sem: str, scope: str) -> tuple[str, str]:
        """Ordering as written; `volatile` and `mmio` imply system scope."""
        written = self.all(SEMS)
        found = next((s for s in written if s in ("volatile", "mmio")), written[0] if written else sem)
        if found == "weak":
            return "weak", self.one(SCOPES)
        return found, self.one(SCOPES, "sys" if found in ("volatile", "mmio") else scope)

    def space(self, default: str = "generic") -> str:
        return _space(self.one(SPACES, default))

    def width(self) -> int | None:
        vector = _VECTORS.get(self.one(frozenset(_VECTORS)), 1)
        types = self.all(_TYPES)
        sizes = [TYPE_BYTES[t] for t in types if t in TYPE_BYTES]
        return sizes[-1] * vector if sizes else None


def _space(name: str) -> str:
    """`.shared` alone means the executing CTA's window (PTX ISA, "Shared State Space")."""
    return {"shared": "shared::cta", "param::entry": "param", "param::func": "param"}.get(name, name)


_COMPUTE = Effect(Kind.COMPUTE)
_WARP = Effect(Kind.WARP)


class _Bad(Exception):
    """The table does not know this form."""


def _ld(m: _Mods) -> Effect:
    nc = m.flag("nc")
    m.all(_HINTS)
    volatile_first = "volatile" in m.left
    sem, scope = m.sem_scope("weak", "")
    space = m.space()
    proxy = "noncoherent" if nc else "constant" if space == "const" else "generic"
    if volatile_first:
        sem = "volatile"
    access = Access(m.addresses()[0], space, True, False, sem, scope, proxy, m.width())
    return Effect(Kind.LOAD, sem=sem, scope=scope, accesses=(access,))


def _st(m: _Mods) -> Effect:
    if m.flag("async"):
        return _st_async(m)
    if m.flag("bulk"):
        m.all(SEMS)
        access = Access(m.addresses()[0], m.space(), False, True, size_operand=1)
        return Effect(Kind.STORE, op="bulk", sem="weak", accesses=(access,))
    m.all(_HINTS)
    sem, scope = m.sem_scope("weak", "")
    access = Access(m.addresses()[0], m.space(), False, True, sem, scope, width=m.width())
    return Effect(Kind.STORE, sem=sem, scope=scope, accesses=(access,))


_COMPLETION = words("mbarrier::complete_tx::bytes bulk_group")


def _mbarrier_object(operand: int, multicast: bool = False) -> Access:
    """The barrier that an asynchronous operation completes on: generic proxy, release at cluster scope."""
    return Access(
        operand, "shared::cluster", True, True, "release", "cluster", role="mbarrier", multicast=multicast
    )


def _st_async(m: _Mods) -> Effect:
    addresses = m.addresses()
    m.all(_COMPLETION)
    m.all(_HINTS)
    sem, scope = m.sem_scope("weak", "")
    space = m.space("shared::cluster" if len(addresses) > 1 else "generic")
    data = Access(addresses[0], space, False, True, sem, scope, width=m.width(), asynchronous=True)
    barrier = tuple(_mbarrier_object(a) for a in addresses[1:2])
    return Effect(Kind.BULK, op="st_async", sem=sem, scope=scope, accesses=(data, *barrier))


def _red(m: _Mods) -> Effect:
    addresses = m.addresses()
    if m.flag("async"):
        m.all(_COMPLETION)
        m.all(_ARITH)
        sem, scope = m.sem_scope("relaxed", "cluster")
        space = m.space("shared::cluster" if len(addresses) > 1 else "generic")
        data = Access(addresses[0], space, True, True, sem, scope, width=m.width(), asynchronous=True)
        barrier = tuple(_mbarrier_object(a) for a in addresses[1:2])
        return Effect(Kind.BULK, op="red_async", sem=sem, scope=scope, accesses=(data, *barrier))
    return _rmw(m, Kind.REDUCTION)


def _rmw(m: _Mods, kind: Kind) -> Effect:
    m.all(_HINTS)
    m.all(_ARITH)
    sem, scope = m.sem_scope("relaxed", "gpu")
    access = Access(m.addresses()[0], m.space(), True, True, sem, scope, width=m.width())
    return Effect(kind, sem=sem, scope=scope, accesses=(access,))


def _multimem(m: _Mods) -> Effect:
    addresses = m.addresses()
    if m.flag("cp"):
        reduce = m.flag("reduce")
        m.all(words("async bulk"))
        m.all(_COMPLETION | _HINTS | _ARITH)
        m.all(SPACES)
        m.width()
        sem, scope = ("relaxed", "sys") if reduce else ("weak", "")
        common: dict[str, Any] = {"proxy": "async", "size_operand": 2, "asynchronous": True}
        to = Access(addresses[0], "multimem", reduce, True, sem, scope, **common)
        source = Access(addresses[1], "shared::cta", True, False, **common)
        m.flag("cp_mask")
        return Effect(Kind.BULK, op="reduce" if reduce else "copy", accesses=(to, source))
    what = m.one(words("ld_reduce st red"))
    if not what:
        raise _Bad
    m.all(_HINTS)
    m.all(_ARITH)
    m.flag("acc::f32")
    sem, scope = m.sem_scope("relaxed" if what == "red" else "weak", "sys" if what == "red" else "")
    m.one(SPACES)
    reads, writes = what != "st", what != "ld_reduce"
    access = Access(addresses[0], "multimem", reads, writes, sem, scope, width=m.width())
    kind = {"ld_reduce": Kind.LOAD, "st": Kind.STORE, "red": Kind.REDUCTION}[what]
    return Effect(kind, op="multimem", sem=sem, scope=scope, accesses=(access,))


def _fence(m: _Mods) -> Effect:
    if m.flag("proxy"):
        return _proxy_fence(m)
    if m.flag("mbarrier_init"):
        sem, scope = m.sem_scope("release", "cluster")
        return Effect(Kind.FENCE, sem=sem, scope=scope, restrict="mbarrier_init")
    restrict = _restriction(m)
    sem, scope = m.sem_scope("acq_rel", "")
    if not scope:
        raise _Bad
    return Effect(Kind.FENCE, sem=sem, scope=scope, restrict=restrict)


def _restriction(m: _Mods) -> str:
    for mod in m.left:
        if mod.startswith("sync_restrict::"):
            m.left.remove(mod)
            return mod.removeprefix("sync_restrict::")
    return ""


def _proxy_fence(m: _Mods) -> Effect:
    kind = m.one(words("alias async async::generic tensormap::generic"))
    if kind == "alias":
        return Effect(Kind.PROXY_FENCE, proxy="alias")
    if kind == "async":
        space = m.one(words("global shared shared::cta shared::cluster"))
        return Effect(Kind.PROXY_FENCE, proxy="async", space=_space(space))
    if kind == "async::generic":
        restrict = _restriction(m)
        sem, scope = m.sem_scope("", "cluster")
        return Effect(
            Kind.PROXY_FENCE, proxy="async", sem=sem, scope=scope, space=restrict, restrict=restrict
        )
    if kind == "tensormap::generic":
        sem, scope = m.sem_scope("", "")
        accesses = tuple(
            Access(a, "generic", True, False, proxy="tensormap", size_operand=1, role="tensormap")
            for a in m.addresses()
        )
        return Effect(Kind.PROXY_FENCE, proxy="tensormap", sem=sem, scope=scope, accesses=accesses)
    raise _Bad


def _membar(m: _Mods) -> Effect:
    if m.flag("proxy"):
        return _proxy_fence(m)
    level = m.one(words("cta gl sys"))
    if not level:
        raise _Bad
    return Effect(Kind.FENCE, sem="sc", scope="gpu" if level == "gl" else level)


def _barrier(m: _Mods) -> Effect:
    if m.flag("warp"):
        m.flag("sync")
        return Effect(Kind.WARP_BARRIER, op="sync", sem="acq_rel", scope="cta")
    if m.flag("cluster"):
        op = m.one(words("arrive wait"))
        sem, _ = m.sem_scope({"arrive": "release", "wait": "acquire"}.get(op, ""), "")
        m.flag("aligned")
        if not op:
            raise _Bad
        return Effect(Kind.CLUSTER_BARRIER, op=op, sem=sem, scope="cluster")
    m.flag("cta")
    m.flag("aligned")
    op = m.one(words("sync red arrive"))
    if not op:
        raise _Bad
    m.all(words("popc and or pred u32"))
    sem = "release" if op == "arrive" else "acq_rel"
    return Effect(Kind.BARRIER, op=op, sem=sem, scope="cta", barrier=1 if op == "red" else 0)


def _mbarrier(m: _Mods) -> Effect:
    op = m.one(words("init inval expect_tx complete_tx arrive arrive_drop test_wait try_wait pending_count"))
    m.flag("b64")
    if op == "pending_count":
        return _COMPUTE
    if not op:
        raise _Bad
    expects = op in ("arrive", "arrive_drop") and m.flag("expect_tx")
    m.flag("noComplete")
    m.flag("parity")
    default = {"arrive": "release", "arrive_drop": "release", "test_wait": "acquire", "try_wait": "acquire"}
    tx = op in ("expect_tx", "complete_tx")
    sem, scope = m.sem_scope(
        default.get(op, "relaxed" if tx else "weak"), "" if op in ("init", "inval") else "cta"
    )
    space = m.space()
    wait = op.endswith("wait")
    access = Access(m.addresses()[0], space, True, not wait, sem, scope, width=8, role="mbarrier")
    name = "arrive_expect_tx" if expects else op
    return Effect(Kind.MBARRIER, op=name, sem=sem, scope=scope, space=space, accesses=(access,))


_DIMENSIONS = words("1d 2d 3d 4d 5d")
_TILE_MODES = words("tile tile::gather4 tile::scatter4 im2col im2col::w im2col::w::128 im2col_no_offs")
_TENSOR_MODS = _DIMENSIONS | _TILE_MODES | words("tensor cta_group::1 cta_group::2")


def _cp(m: _Mods) -> Effect:
    reduce = m.flag("reduce")
    if not m.flag("async"):
        raise _Bad
    if m.flag("bulk"):
        return _cp_bulk(m, reduce)
    if m.flag("mbarrier"):
        m.flag("noinc")
        if not m.flag("arrive"):
            raise _Bad
        space = m.space()
        m.flag("b64")
        access = Access(m.addresses()[0], space, True, True, "relaxed", "cta", width=8, role="mbarrier")
        return Effect(Kind.ASYNC_GROUP, op="mbarrier_arrive", accesses=(access,))
    op = m.one(words("commit_group wait_group wait_all"))
    if op:
        return Effect(Kind.ASYNC_GROUP, op={"commit_group": "commit", "wait_group": "wait"}.get(op, op))
    m.all(_HINTS)
    spaces = [_space(s) for s in m.all(SPACES)]
    to, source = m.addresses()[:2]
    if spaces[1:] != ["global"]:
        raise _Bad
    write = Access(to, spaces[0], False, True, size_operand=2, asynchronous=True)
    read = Access(source, "global", True, False, size_operand=2, asynchronous=True)
    return Effect(Kind.ASYNC_COPY, sem="weak", accesses=(write, read))


def _cp_bulk(m: _Mods, reduce: bool) -> Effect:
    op = m.one(words("commit_group wait_group"))
    if op:
        read = m.flag("read")
        return Effect(
            Kind.BULK_GROUP, op="commit" if op == "commit_group" else "wait_read" if read else "wait"
        )
    tensor = "tensor" in m.left
    prefetch = m.flag("prefetch")
    m.all(_TENSOR_MODS)
    multicast = m.flag("multicast::cluster")
    completion = m.one(_COMPLETION)
    m.all(_HINTS | _ARITH | words("cp_mask ignore_oob L2"))
    spaces = [_space(s) for s in m.all(SPACES)]
    m.width()
    addresses = m.addresses()
    if prefetch:
        return Effect(Kind.PREFETCH, op="bulk")
    if len(spaces) != 2 or len(addresses) < 2 or not completion:
        raise _Bad
    to, source = addresses[:2]
    sem, scope = ("relaxed", "gpu") if reduce else ("weak", "")
    size = -1 if tensor else 2
    common: dict[str, Any] = {"proxy": "async", "size_operand": size, "asynchronous": True}
    write = Access(to, spaces[0], reduce, True, sem, scope, multicast=multicast, **common)
    source_read = Access(source, spaces[1], True, False, **common)
    accesses = [write, source_read]
    if tensor:
        descriptor = next(i for i in addresses if m.shapes[i] == "t")
        at = 0 if descriptor == to else 1
        accesses[at] = replace(accesses[at], role="tensor")
        accesses.append(
            Access(descriptor, "generic", True, False, proxy="tensormap", width=128, role="tensormap")
        )
    if completion != "bulk_group":
        barrier = next((a for a in addresses[2:] if m.shapes[a] == "a"), -1)
        if barrier < 0:
            raise _Bad
        accesses.append(_mbarrier_object(barrier, multicast=multicast))
    name = ("tensor_" if tensor else "") + ("reduce" if reduce else "copy")
    return Effect(Kind.BULK, op=name, space=spaces[0], accesses=tuple(accesses))


def _tensormap(m: _Mods) -> Effect:
    if m.flag("cp_fenceproxy"):
        m.all(SPACES)
        m.all(words("tensormap::generic sync aligned"))
        sem, scope = m.sem_scope("release", "")
        to, source = m.addresses()[:2]
        write = Access(to, "global", False, True, size_operand=2, role="tensormap")
        read = Access(source, "shared::cta", True, False, size_operand=2, role="tensormap")
        return Effect(
            Kind.PROXY_FENCE, op="copy", proxy="tensormap", sem=sem, scope=scope, accesses=(write, read)
        )
    if not m.flag("replace"):
        raise _Bad
    m.all(words("tile global_address rank box_dim global_dim global_stride element_stride elemtype"))
    m.all(words("interleave_layout swizzle_mode swizzle_atomicity fill_mode"))
    space = m.space()
    m.width()
    access = Access(m.addresses()[0], space, True, True, width=128, role="tensormap")
    return Effect(Kind.STORE, op="tensormap", sem="weak", accesses=(access,))


def _wgmma(m: _Mods) -> Effect:
    op = m.one(words("fence mma_async commit_group wait_group"))
    name = {"mma_async": "mma", "commit_group": "commit", "wait_group": "wait", "fence": "fence"}.get(op)
    if name is None:
        raise _Bad
    if name != "mma":
        m.all(words("sync aligned"))
        return Effect(Kind.WGMMA, op=name)
    shape = next(x for x in m.left if x.startswith("m64n"))
    columns = int(shape.split("n")[1].split("k")[0])
    m.left.clear()  # types have no bearing on order
    common: dict[str, Any] = {"reads": True, "writes": False, "proxy": "async", "asynchronous": True}
    a = Access(1, "shared::cta", width=_operand_bytes(64), **common)
    b = Access(2, "shared::cta", width=_operand_bytes(columns), **common)
    return Effect(Kind.WGMMA, op="mma", accesses=(a, b) if m.shapes[1] != "v" else (b,))


def _operand_bytes(rows: int) -> int:
    """How far a matrix operand reaches from its descriptor's address: groups of 8 rows lie at most 1024
    bytes apart in the canonical layouts without gaps (PTX ISA, "Strides", 128-byte swizzle). A layout with
    gaps reaches further."""
    return max(rows, 8) // 8 * 1024


def _tcgen05(m: _Mods) -> Effect:
    op = m.left.pop(0) if m.left else ""
    addresses = m.addresses()
    group = next((x for x in m.left if x.startswith("cta_group::")), "")
    if op == "alloc":
        m.all(words("cta_group::1 cta_group::2 sync aligned b32"))
        access = Access(addresses[0], m.space(), False, True, width=4)
        return Effect(Kind.TCGEN05, op=op, restrict=group, accesses=(access,))
    if op in ("dealloc", "relinquish_alloc_permit", "fence::before_thread_sync", "fence::after_thread_sync"):
        m.all(words("cta_group::1 cta_group::2 sync aligned b32"))
        name = op.removeprefix("fence::").removesuffix("_alloc_permit")
        return Effect(Kind.TCGEN05, op=name, restrict=group)
    if op in ("wait::ld", "wait::st"):
        m.all(words("sync aligned"))
        return Effect(Kind.TCGEN05, op=op.replace("::", "_"))
    if op == "commit":
        multicast = m.flag("multicast::cluster")
        m.all(words("cta_group::1 cta_group::2 mbarrier::arrive::one b64"))
        space = m.space()
        access = Access(
            addresses[0],
            space,
            True,
            True,
            "release",
            "cluster",
            width=8,
            role="mbarrier",
            multicast=multicast,
        )
        return Effect(Kind.TCGEN05, op=op, sem="release", scope="cluster", restrict=group, accesses=(access,))
    m_left, m.left = m.left, []
    tmem: dict[str, Any] = {"proxy": "tensor", "asynchronous": True}
    smem: dict[str, Any] = {"proxy": "async", "asynchronous": True}
    if op in ("ld", "st"):
        access = Access(addresses[0], "tmem", op == "ld", op == "st", **tmem)
        return Effect(Kind.TCGEN05, op=op, accesses=(access,))
    if op == "cp":
        write = Access(addresses[0], "tmem", False, True, **tmem)
        read = Access(1, "shared::cta", True, False, **smem)
        return Effect(Kind.TCGEN05, op=op, restrict=group, accesses=(write, read))
    if op == "shift":
        return Effect(
            Kind.TCGEN05, op=op, restrict=group, accesses=(Access(addresses[0], "tmem", True, True, **tmem),)
        )
    if op == "mma":
        smem["width"] = _operand_bytes(256)
        a_in_tmem = len(m.shapes) > 1 and m.shapes[1] == "a"
        accesses = [Access(0, "tmem", True, True, **tmem)]
        if a_in_tmem:
            accesses.append(Access(1, "tmem", True, False, **tmem))
        else:
            accesses.append(Access(1, "shared::cta", True, False, **smem))
        accesses.append(Access(2, "shared::cta", True, False, **smem))
        accesses += [Access(i, "tmem", True, False, **tmem) for i in addresses if i > 1]
        return Effect(
            Kind.TCGEN05, op="mma_ws" if "ws" in m_left else "mma", restrict=group, accesses=tuple(accesses)
        )
    raise _Bad


def _griddepcontrol(m: _Mods) -> Effect:
    op = m.one(words("wait launch_dependents"))
    if not op:
        raise _Bad
    return Effect(Kind.GRID_DEPENDENCY, op="wait" if op == "wait" else "launch")


def _clusterlaunchcontrol(m: _Mods) -> Effect:
    if m.flag("query_cancel"):
        m.left.clear()
        return _COMPUTE
    if not m.flag("try_cancel"):
        raise _Bad
    multicast = m.flag("multicast::cluster::all")
    m.all(words("async b128") | _COMPLETION)
    space = m.space()
    to, barrier = m.addresses()[:2]
    write = Access(to, space, False, True, proxy="async", width=16, asynchronous=True, multicast=multicast)
    return Effect(
        Kind.BULK, op="try_cancel", accesses=(write, _mbarrier_object(barrier, multicast=multicast))
    )


def _prefetch(m: _Mods) -> Effect:
    m.left.clear()
    return Effect(Kind.PREFETCH)


def _discard(m: _Mods) -> Effect:
    m.all(words("L2"))
    m.all(_HINTS)
    access = Access(m.addresses()[0], m.space("global"), False, True, width=128)
    return Effect(Kind.STORE, op="discard", sem="weak", accesses=(access,))


def _matrix(reads: bool) -> Callable[[_Mods], Effect]:
    def handler(m: _Mods) -> Effect:
        space = m.space()
        m.left.clear()
        access = Access(m.addresses()[0], space, reads, not reads)
        kind = Kind.LOAD if reads else Kind.STORE
        return Effect(kind, op="matrix", sem="weak", accesses=(access,))

    return handler


def _wmma(m: _Mods) -> Effect:
    op = m.left.pop(0) if m.left else ""
    if op in ("load", "store"):
        return _matrix(op == "load")(m)
    m.left.clear()
    return _COMPUTE


def _texture(m: _Mods) -> Effect:
    m.left.clear()
    access = Access(m.addresses()[0], "texture", True, False, proxy="texture")
    return Effect(Kind.LOAD, op="texture", sem="weak", accesses=(access,))


def _surface(reads: bool, writes: bool) -> Callable[[_Mods], Effect]:
    def handler(m: _Mods) -> Effect:
        m.left.clear()
        access = Access(m.addresses()[0], "surface", reads, writes, proxy="surface")
        kind = Kind.REDUCTION if reads and writes else Kind.LOAD if reads else Kind.STORE
        return Effect(kind, op="surface", sem="weak", accesses=(access,))

    return handler


def _constant(result: Effect) -> Callable[[_Mods], Effect]:
    def handler(m: _Mods) -> Effect:
        m.left.clear()
        return result

    return handler


_compute, _warp = _constant(_COMPUTE), _constant(_WARP)

_ARITHMETIC = """
add sub mul mad mul24 mad24 sad div rem abs neg min max popc clz bfind fns brev bfe bfi bmsk szext dp4a dp2a
addc subc madc testp copysign fma rcp sqrt rsqrt sin cos lg2 ex2 tanh set setp selp slct and or xor not cnot
lop3 shf shl shr mov prmt cvt cvta isspacep mapa getctarank createpolicy istypep txq suq mma movmatrix
stacksave stackrestore alloca vadd vsub vabsdiff vmin vmax vshl vshr vmad vset vadd2 vsub2 vavrg2 vabsdiff2
vmin2 vmax2 vset2 vadd4 vsub4 vavrg4 vabsdiff4 vmin4 vmax4 vset4 nanosleep pmevent brkpt setmaxnreg
"""

TABLE: dict[str, Callable[[_Mods], Effect]] = {
    **dict.fromkeys(_ARITHMETIC.split(), _compute),
    **dict.fromkeys(["shfl", "vote", "match", "activemask", "redux", "elect"], _warp),
    **dict.fromkeys(["bra", "brx"], _constant(Effect(Kind.BRANCH))),
    **dict.fromkeys(["ret", "exit", "trap"], _constant(Effect(Kind.EXIT))),
    "call": _constant(Effect(Kind.CALL)),
    **dict.fromkeys(["ld", "ldu"], _ld),
    "st": _st,
    "atom": lambda m: _rmw(m, Kind.ATOMIC),
    "red": _red,
    "multimem": _multimem,
    "fence": _fence,
    "membar": _membar,
    **dict.fromkeys(["bar", "barrier"], _barrier),
    "mbarrier": _mbarrier,
    "cp": _cp,
    "tensormap": _tensormap,
    "wgmma": _wgmma,
    "tcgen05": _tcgen05,
    "griddepcontrol": _griddepcontrol,
    "clusterlaunchcontrol": _clusterlaunchcontrol,
    **dict.fromkeys(["prefetch", "prefetchu", "applypriority"], _prefetch),
    "discard": _discard,
    "ldmatrix": _matrix(reads=True),
    "stmatrix": _matrix(reads=False),
    "wmma": _wmma,
    **dict.fromkeys(["tex", "tld4"], _texture),
    "suld": _surface(True, False),
    "sust": _surface(False, True),
    "sured": _surface(True, True),
}


@lru_cache(maxsize=4096)
def _effect(opcode: str, mods: tuple[str, ...], shapes: tuple[Shape, ...]) -> Effect:
    handler = TABLE.get(opcode)
    name = ".".join((opcode, *mods))
    if handler is None:
        return Effect(Kind.UNKNOWN, why=f"`{name}` is not in the table of effects")
    m = _Mods(mods, shapes)
    try:
        found = handler(m)
    except (_Bad, IndexError, StopIteration, ValueError):
        return Effect(Kind.UNKNOWN, why=f"`{name}`: this form is not in the table of effects")
    if m.left:
        return Effect(Kind.UNKNOWN, why=f"`{name}`: modifier .{m.left[0]} is not in the table of effects")
    return found
