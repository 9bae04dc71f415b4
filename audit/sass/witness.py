"""What a PTX instruction must leave behind in SASS, and how to recognise it there.

One PTX instruction becomes a short sequence of *marks*: `st.release.gpu` is a MEMBAR followed by a store,
`ld.acquire.gpu` a load followed by CCTL.IVALL. A mark says what SASS instruction it is and which accesses it keeps on
which side. Both are observations of ptxas (see :mod:`.survival`, which measures them and pins the toolkit), read with
the meaning that the PTX ISA gives the PTX instruction (chapter "Memory Consistency Model"). What leaves no instruction
of its own has no mark and is listed as *PTX only*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ptx.effects import Access, Effect, Kind
from ..ptx.ir import Imm, Instruction
from .parser import SassInstruction

# Classes of accesses that a mark can hold back. "strong" is a memory operation with .relaxed or stronger.
GLOBAL = frozenset({"global load", "global store", "cp.async"})
SHARED = frozenset({"shared load", "shared store", "cp.async"})
TENSOR = frozenset({"tensor memory"})
MEMORY = GLOBAL | SHARED
ALL = MEMORY | TENSOR | {"read-only load"}
STRONG = frozenset({"strong"})
NONE: frozenset[str] = frozenset()

_SCOPES = {"": 0, "cta": 0, "cluster": 1, "gpu": 1, "sys": 2}
_MEMBAR = {"CTA": 0, "SM": 0, "GPU": 1, "VC": 1, "SYS": 2}
_MEMBAR_NAME = ("CTA", "GPU", "SYS")


@dataclass(frozen=True, slots=True)
class Mark:
    """One SASS instruction that must, or does, stand for (part of) a PTX instruction.

    `kind` names it ("MEMBAR", "BAR.SYNC", "load", ...); `level` is a fence's scope (0 CTA, 1 GPU, 2 system), `sc`
    asks for the sequentially consistent form, `number` is a barrier's index or a wait's allowance (None: unknown).

    `keeps_after`: classes of accesses that stand after it in program order and must stay there; `keeps_before`: those
    that stand before it and must stay there. `classes`: what it is itself when it accesses memory (then `width` is in
    bytes per thread); empty for pure synchronisation. `touches` tells fences of disjoint spaces apart: two marks with
    nothing in common need not keep their order. `way_round`: part of a cluster barrier, for which a
    grid without clusters takes another way (:func:`.cfg.without_cluster`).
    """

    kind: str
    level: int = 0
    sc: bool = False
    number: int | None = None
    keeps_after: frozenset[str] = NONE
    keeps_before: frozenset[str] = NONE
    classes: frozenset[str] = NONE
    width: int | None = None
    touches: frozenset[str] = frozenset({"global", "shared"})
    way_round: bool = False

    @property
    def is_access(self) -> bool:
        return bool(self.classes)

    @property
    def orders(self) -> bool:
        """Takes part in the order of synchronisation: everything but a plain access."""
        return not self.classes or "strong" in self.classes or bool(self.keeps_after or self.keeps_before)

    def __str__(self) -> str:
        if self.kind == "MEMBAR":
            return f"MEMBAR.{'SC' if self.sc else 'ALL'}.{_MEMBAR_NAME[self.level]}"
        return self.kind


def accepts(expected: Mark, found: Mark) -> bool:
    """True when the SASS mark `found` is what `expected` asks for, or something stronger."""
    if expected.kind != found.kind:
        return bool(_ALSO.get(expected.kind, NONE) & {found.kind})
    if expected.kind == "MEMBAR":
        return found.level >= expected.level and (found.sc or not expected.sc)
    if expected.number is not None and found.number is not None:
        return (
            found.number <= expected.number
            if expected.kind.startswith("DEPBAR")
            else found.number == expected.number
        )
    return True


# A kind that may stand in for another: an atomic without a machine instruction becomes a loop of loads and
# compare-and-swap, an atomic exchange or a reduction whose result is unused a plain access.
_ALSO: dict[str, frozenset[str]] = {
    "load": frozenset({"atomic"}),
    "store": frozenset({"atomic"}),
    "atomic": frozenset({"load", "store"}),
    "BAR.RED": frozenset({"BAR.SYNC"}),
}

_LOADS = frozenset({"LDG", "LD", "LDS", "LDSM", "LDGMC"})
_STORES = frozenset({"STG", "ST", "STS", "STSM"})
_ATOMICS = frozenset({"ATOM", "ATOMG", "ATOMS", "RED", "REDG", "REDGMC"})
_SHARED_OPCODES = frozenset({"LDS", "LDSM", "STS", "STSM", "ATOMS"})
_GENERIC_OPCODES = frozenset({"LD", "ST", "ATOM"})
_BULK = frozenset(
    {"UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG", "STAS", "REDAS", "USTGR", "UGETNEXTWORKID"}
)
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_MMA = frozenset({"HGMMA", "IGMMA", "QGMMA", "BGMMA"})


def found(ins: SassInstruction) -> Mark | None:
    """The mark that a SASS instruction is; None for everything without bearing on memory order."""
    op = ins.opcode
    if ins.pred == ("PT", True):
        return None  # never executed; ptxas places `@!PT LDS RZ, [RZ]` before LDGSTS
    if op in _LOADS or op in _STORES or op in _ATOMICS:
        return _found_access(ins)
    if op == "MEMBAR":
        level = max((_MEMBAR.get(m, 0) for m in ins.mods), default=2)
        return Mark("MEMBAR", level, "SC" in ins.mods)
    if op == "CCTL":
        return Mark("CCTL.IVALL") if "IVALL" in ins.mods else None
    if op == "FENCE":
        space = ins.mods[-1] if ins.mods else ""
        touches = {"S": "shared", "G": "global", "T": "tensor"}.get(space, "shared")
        return Mark(f"FENCE.VIEW.ASYNC.{space}", touches=frozenset({touches}))
    if op == "BAR":
        which = next((m for m in ins.mods if m in ("SYNC", "ARV", "RED")), "")
        return Mark(f"BAR.{which}", number=_immediate(ins.operands, 0)) if which else None
    if op == "DEPBAR":
        return (
            Mark("DEPBAR", number=_immediate(ins.operands, 1))
            if ins.has("LE") and ins.operands[0] == "SB0"
            else None
        )
    if op == "WARPGROUP":
        wait = "DEPBAR" in ins.mods
        return (
            Mark("WARPGROUP.DEPBAR", number=_immediate(ins.operands, 1)) if wait else Mark("WARPGROUP.ARRIVE")
        )
    if op == "SYNCS":
        return Mark(_syncs(ins.mods))
    if op in _MMA:
        return Mark("GMMA")
    if op == "LDGSTS":
        return Mark("LDGSTS", classes=frozenset({"cp.async"}))
    if op in ("LDTM", "STTM"):
        return Mark(op, classes=TENSOR)
    if op.startswith("UTC") and op.endswith("MMA"):
        return Mark("UTCMMA")
    if op == "UTMACCTL":
        return Mark("UTMACCTL.IV") if "IV" in ins.mods else None
    if op in _BULK or op in (
        "ACQBULK",
        "PREEXIT",
        "UCGABAR_ARV",
        "UCGABAR_WAIT",
        "UTMACMDFLUSH",
        "LDGDEPBAR",
    ):
        return Mark(op)
    if op in ("UTCBAR", "UTCCP", "UTCSHIFT", "ARRIVES"):
        return Mark(op)
    return None


def _found_access(ins: SassInstruction) -> Mark:
    op = ins.opcode
    kind = "load" if op in _LOADS else "store" if op in _STORES else "atomic"
    if op in _SHARED_OPCODES:
        spaces: tuple[str, ...] = ("shared",)
    else:
        spaces = ("global", "shared") if op in _GENERIC_OPCODES else ("global",)
    directions = {"load": ("load",), "store": ("store",), "atomic": ("load", "store")}[kind]
    classes = {f"{space} {direction}" for space in spaces for direction in directions}
    if "CONSTANT" in ins.mods:
        classes = {"read-only load"}
    elif kind == "atomic" or {"STRONG", "MMIO"} & set(ins.mods):
        classes.add("strong")
    width = next((_WIDTHS[m] for m in ins.mods if m in _WIDTHS), 4)
    if op in ("LDSM", "STSM"):
        width = 4 * next((int(m) for m in ins.mods if m in ("2", "4")), 1)
    return Mark(kind, classes=frozenset(classes), width=width, touches=frozenset(spaces))


def _syncs(mods: tuple[str, ...]) -> str:
    if "EXCH" in mods:
        return "SYNCS.EXCH"
    if "PHASECHK" in mods:
        return "SYNCS.PHASECHK"
    if "CCTL" in mods:
        return "SYNCS.CCTL"
    if "ARRIVE" in mods:
        if "A0TR" in mods:
            return "SYNCS.ARRIVE.A0TR"
        return "SYNCS.ARRIVE.A0TX" if "A0TX" in mods else "SYNCS.ARRIVE"
    return "SYNCS"


def _immediate(operands: tuple[str, ...], index: int) -> int | None:
    try:
        return int(operands[index], 16)
    except (IndexError, ValueError):
        return None


# -- what a PTX instruction must leave ----------------------------------------------------------------------


def expected(ins: Instruction, effect: Effect) -> tuple[Mark, ...]:
    """Marks of one PTX instruction, in the order in which ptxas emits them. Empty for what has no bearing on memory
    order, and for what leaves no instruction of its own (then :func:`ptx_only` gives the reason)."""
    make = _MAKERS.get(effect.kind)
    return make(ins, effect) if make else ()


def ptx_only(effect: Effect) -> str:
    """Why a synchronising instruction has no SASS instruction of its own; "" for all others."""
    kind, op, sem, scope = effect.kind, effect.op, effect.sem, effect.scope
    if kind is Kind.FENCE and effect.restrict == "mbarrier_init":
        return "a NOP marks the place; the order is implicit in the cluster barrier that follows"
    if kind is Kind.FENCE and sem == "acquire" and (scope == "cta" or effect.restrict):
        return "an acquire within the CTA needs no instruction: its caches are coherent for one CTA"
    if kind is Kind.PROXY_FENCE and effect.proxy == "async" and sem == "acquire":
        return "the acquiring half of the restricted proxy fence is a NOP"
    if kind is Kind.WARP_BARRIER:
        return "a converged warp needs no instruction"
    if kind is Kind.TCGEN05 and op in ("fence_before", "before_thread_sync", "after_thread_sync"):
        return "tcgen05 fences are NOPs: they bind the compiler only"
    if kind is Kind.TCGEN05 and op == "wait_ld":
        return "the wait becomes a scoreboard dependency of the LDTM"
    if kind is Kind.WGMMA and op == "commit":
        return "the group's end is the gsb0 flag of its last GMMA"
    return ""


def _fence_marks(level: int, sc: bool, acquire: bool, release: bool, kept: frozenset[str]) -> list[Mark]:
    """MEMBAR for what releases (both ways when it also acquires), CCTL.IVALL for what acquires beyond the CTA."""
    marks = []
    if release:
        marks.append(
            Mark("MEMBAR", level, sc, keeps_after=kept if acquire else STRONG, keeps_before=kept | STRONG)
        )
    if acquire and level > 0:
        marks.append(Mark("CCTL.IVALL", keeps_after=kept, keeps_before=STRONG))
    return marks


def _fence(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    if ptx_only(e):
        return ()
    if e.restrict:  # fence.release.sync_restrict::shared::cta
        return _async_fence(0, SHARED, NONE)
    return tuple(_fence_marks(_SCOPES[e.scope], e.sem == "sc", e.acquires, e.releases, MEMORY))


def _async_fence(level: int, before: frozenset[str], after: frozenset[str]) -> tuple[Mark, ...]:
    shared = frozenset({"shared"})
    return (
        Mark("MEMBAR", level, keeps_before=before, keeps_after=after, touches=shared),
        Mark("FENCE.VIEW.ASYNC.S", keeps_before=before, keeps_after=after, touches=shared),
    )


def _proxy_fence(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    if ptx_only(e):
        return ()
    if e.proxy == "async":
        if e.space == "global":
            return (
                Mark(
                    "FENCE.VIEW.ASYNC.G",
                    keeps_after=GLOBAL,
                    keeps_before=GLOBAL,
                    touches=frozenset({"global"}),
                ),
            )
        if e.sem == "release":
            return _async_fence(0, SHARED, NONE)
        kept = SHARED if e.space else MEMORY
        marks = _async_fence(0 if e.space == "shared::cta" else 1, kept, kept)
        return marks if e.space else tuple(replace(m, touches=frozenset({"global", "shared"})) for m in marks)
    if e.proxy == "alias":
        return (Mark("MEMBAR", 1, True, keeps_after=MEMORY, keeps_before=MEMORY),)
    if e.op == "copy":
        return (Mark("atomic", classes=frozenset({"global store", "strong"})),)
    if e.sem == "release":
        return (Mark("MEMBAR", max(1, _SCOPES[e.scope]), keeps_before=MEMORY),)
    return (Mark("UTMACCTL.IV"), Mark("UTMACMDFLUSH"))


def _access(ins: Instruction, a: Access, kind: str) -> Mark | None:
    """The access itself; None for spaces that no other thread sees and for those outside the memory model."""
    spaces = {"generic": ("global", "shared"), "global": ("global",), "multimem": ("global",)}.get(
        a.space, ("shared",)
    )
    if a.space in ("local", "param", "const", "texture", "surface", "reg", ""):
        return None
    directions = [d for d, yes in (("load", a.reads), ("store", a.writes)) if yes]
    classes = {f"{space} {direction}" for space in spaces for direction in directions}
    if a.proxy == "noncoherent":
        classes = {"read-only load"}
    elif a.sem != "weak":
        classes.add("strong")
    width = a.width if a.width is not None else _matrix_width(ins)
    return Mark(kind, classes=frozenset(classes), width=width, touches=frozenset(spaces))


def _matrix_width(ins: Instruction) -> int | None:
    """ldmatrix, stmatrix: four bytes per thread and matrix."""
    count = next((int(m[1]) for m in ins.mods if m in ("x1", "x2", "x4")), 0)
    return 4 * count if ins.opcode in ("ldmatrix", "stmatrix") and count else None


def _memory(kind: str):
    def make(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
        if not e.accesses or e.op in ("discard", "texture", "surface", "tensormap"):
            return ()
        core = _access(ins, e.accesses[0], kind)
        if core is None:
            return ()
        level = _SCOPES[e.scope]
        before = _fence_marks(level, False, False, e.releases, MEMORY)
        after = _fence_marks(level, False, e.acquires, False, MEMORY)
        if e.acquires:
            core = replace(core, keeps_after=MEMORY)
        return (*before, core, *after)

    return make


def _barrier(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    which = {"sync": "SYNC", "red": "RED", "arrive": "ARV"}[e.op]
    operand = ins.operands[e.barrier] if 0 <= e.barrier < len(ins.operands) else None
    number = int(operand.value) if isinstance(operand, Imm) else None
    after = NONE if e.op == "arrive" else ALL
    return (Mark(f"BAR.{which}", number=number, keeps_before=ALL, keeps_after=after - {"read-only load"}),)


def _cluster_barrier(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    if e.op == "arrive":
        fence = _fence_marks(1, False, False, e.releases, MEMORY)
        kept = MEMORY if e.releases else NONE
        marks = (*fence, Mark("UCGABAR_ARV", keeps_before=kept))
    else:
        after = MEMORY if e.acquires else NONE
        invalidate = (Mark("CCTL.IVALL", keeps_after=after),) if e.acquires else ()
        marks = (Mark("UCGABAR_WAIT", keeps_after=after), *invalidate)
    return tuple(replace(m, way_round=True) for m in marks)


def _mbarrier(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    if e.op == "init":
        return (Mark("SYNCS.EXCH"),)
    if e.op == "inval":
        return (Mark("SYNCS.CCTL"),)
    if e.op in ("test_wait", "try_wait"):
        wait = Mark("SYNCS.PHASECHK", keeps_after=ALL - {"read-only load"} if e.acquires else NONE)
        return (wait, *_fence_marks(_SCOPES[e.scope], False, e.acquires, False, MEMORY))
    if e.op == "expect_tx":
        return (Mark("SYNCS.ARRIVE.A0TR"),)
    if e.op == "complete_tx":
        return (Mark("SYNCS.ARRIVE.A0TX"),)
    fence = _fence_marks(1, False, False, True, MEMORY) if e.releases and _SCOPES[e.scope] > 0 else []
    return (*fence, Mark("SYNCS.ARRIVE", keeps_before=MEMORY | TENSOR if e.releases else NONE))


def _async_copy(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    return (Mark("LDGSTS", classes=frozenset({"cp.async"})),)


def _async_group(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    copies = frozenset({"cp.async"})
    if e.op == "mbarrier_arrive":
        return (Mark("ARRIVES", keeps_before=copies),)
    commit = Mark("LDGDEPBAR", keeps_before=copies, keeps_after=copies)
    number = 0 if e.op == "wait_all" else _first_number(ins)
    wait = Mark("DEPBAR", number=number, keeps_after=SHARED)
    return {"commit": (commit,), "wait": (wait,), "wait_all": (commit, wait)}.get(e.op, ())


def _bulk(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    to_shared = bool(e.accesses) and e.accesses[0].space.startswith("shared")
    kinds = {
        "copy": "UBLKCP",
        "reduce": "UBLKRED",
        "tensor_copy": "UTMALDG" if to_shared else "UTMASTG",
        "tensor_reduce": "UTMAREDG",
        "st_async": "STAS" if to_shared else "USTGR",
        "red_async": "REDAS",
        "try_cancel": "UGETNEXTWORKID",
    }
    return (Mark(kinds[e.op]),) if e.op in kinds else ()


def _bulk_group(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    if e.op == "commit":
        return (Mark("UTMACMDFLUSH"),)
    wait = Mark("DEPBAR", number=_first_number(ins), keeps_after=MEMORY)
    return (wait,) if e.op == "wait_read" else (wait, Mark("CCTL.IVALL", keeps_after=GLOBAL))


def _wgmma(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    if e.op == "wait":
        return (Mark("WARPGROUP.DEPBAR", number=_first_number(ins)),)
    return {"fence": (Mark("WARPGROUP.ARRIVE"),), "mma": (Mark("GMMA"),)}.get(e.op, ())


def _tcgen05(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    kinds = {"mma": "UTCMMA", "mma_ws": "UTCMMA", "cp": "UTCCP", "shift": "UTCSHIFT", "commit": "UTCBAR"}
    if e.op in kinds:
        return (Mark(kinds[e.op]),)
    if e.op in ("ld", "st"):
        return (Mark("LDTM" if e.op == "ld" else "STTM", classes=TENSOR),)
    if e.op == "wait_st":
        return (Mark("FENCE.VIEW.ASYNC.T", keeps_before=TENSOR, keeps_after=TENSOR, touches=TENSOR),)
    return ()


def _grid(ins: Instruction, e: Effect) -> tuple[Mark, ...]:
    if e.op == "wait":
        return (Mark("ACQBULK", keeps_after=GLOBAL | {"read-only load"}),)
    return (Mark("PREEXIT", keeps_before=frozenset({"global store"})),)


def _first_number(ins: Instruction) -> int | None:
    operand = ins.operands[0] if ins.operands else None
    return int(operand.value) if isinstance(operand, Imm) else None


_MAKERS = {
    Kind.LOAD: _memory("load"),
    Kind.STORE: _memory("store"),
    Kind.ATOMIC: _memory("atomic"),
    Kind.REDUCTION: _memory("atomic"),
    Kind.FENCE: _fence,
    Kind.PROXY_FENCE: _proxy_fence,
    Kind.BARRIER: _barrier,
    Kind.CLUSTER_BARRIER: _cluster_barrier,
    Kind.MBARRIER: _mbarrier,
    Kind.ASYNC_COPY: _async_copy,
    Kind.ASYNC_GROUP: _async_group,
    Kind.BULK: _bulk,
    Kind.BULK_GROUP: _bulk_group,
    Kind.WGMMA: _wgmma,
    Kind.TCGEN05: _tcgen05,
    Kind.GRID_DEPENDENCY: _grid,
}
