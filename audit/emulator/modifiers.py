"""Which modifiers of an instruction the emulator gives their meaning, or knows to have none for the result.

Any other modifier makes the instruction unsupported: a modifier that is merely overlooked could change the result.
"""

from __future__ import annotations

import re
from collections.abc import Container

_SCOPES = "cta cluster gpu sys"
_SPACES = "global shared shared::cta shared::cluster local param param::entry param::func const"
_ROUNDING = "rn rz rm rp"
_COMPARISONS = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan"
_ACCESS = f"{_SCOPES} {_SPACES} weak relaxed volatile ca cg cs lu cv wb wt unified v2 v4 v8"
_ATOMIC = "add min max and or xor exch cas inc dec noftz"
_COMPLETE = "mbarrier::complete_tx::bytes"

_KNOWN: dict[str, str] = {
    "add sub": f"{_ROUNDING} ftz sat",
    "mul mad": f"{_ROUNDING} ftz sat lo hi wide",
    "fma": f"{_ROUNDING} ftz sat relu",
    "mul24 mad24 dp4a dp2a": "lo hi",
    "div": f"{_ROUNDING} ftz approx full",
    "abs neg": "ftz",
    "min max": "ftz NaN xorsign abs relu",
    "and or xor not": "pred",
    "bfind": "shiftamt",
    "bmsk": "clamp wrap",
    "prmt": "f4e b4e rc8 ecl ecr rc16",
    "lop3": "and or",
    "shf": "l r wrap clamp",
    "setp set": f"{_COMPARISONS} and or xor ftz",
    "slct": "ftz",
    "mov": "pred",
    "isspacep cvta mapa getctarank": f"{_SPACES} to",
    "rcp sqrt rsqrt ex2 lg2 sin cos tanh": f"{_ROUNDING} ftz approx",
    "testp": "finite infinite number notanumber normal subnormal",
    "cvt": f"{_ROUNDING} rna rni rzi rmi rpi ftz sat satfinite relu e2m3x2 e3m2x2",
    "ld ldu": f"{_ACCESS} acquire nc",
    "st": f"{_ACCESS} release async {_COMPLETE}",
    "atom red": f"{_ACCESS} acquire release acq_rel {_ATOMIC} async {_COMPLETE}",
    "createpolicy": "fractional range cvt",
    "bra call ret exit": "uni",
    "brx": "idx uni",
    "shfl": "sync up down bfly idx",
    "vote": "sync all any uni ballot pred",
    "match": "sync any all",
    "redux": "sync add min max and or xor abs NaN",
    "elect": "sync",
    "bar barrier": "cta warp cluster sync arrive wait red aligned popc and or pred acquire release relaxed",
    "membar": "cta gl sys",
    "mbarrier": f"{_SCOPES} {_SPACES} init inval arrive arrive_drop expect_tx complete_tx test_wait try_wait "
    "pending_count parity noComplete acquire release relaxed",
    "griddepcontrol": "wait launch_dependents",
    "setmaxnreg": "inc dec sync aligned",
    "prefetch prefetchu applypriority": f"{_SPACES} tensormap",
    "cp": f"{_SPACES} async reduce bulk prefetch L2 ca cg commit_group wait_group wait_all read mbarrier arrive noinc "
    f"bulk_group multicast::cluster {_COMPLETE} add min max and or xor inc dec noftz",
    "ldmatrix stmatrix": f"{_SPACES} sync aligned m8n8 x1 x2 x4 trans",
    "mma": "sync aligned m16n8k8 m16n8k16 row col",
}
_TABLE = {opcode: frozenset(known.split()) for names, known in _KNOWN.items() for opcode in names.split()}
_CACHE = re.compile(
    r"L[12]::\w+"
)  # hints: eviction priority, prefetch size, cache_hint with its policy operand
_FENCE = re.compile(r"sc|acq_rel|acquire|release|mbarrier_init|cta|cluster|gpu|sys|global|shared::\w+|alias|proxy|"
                    r"(proxy|async|tensormap|sync_restrict)(::\w+)*")  # fmt: skip


def unknown(opcode: str, modifiers: tuple[str, ...], types: Container[str]) -> str:
    """The first modifier that is neither known nor one of the `types`, or ""."""
    known = _TABLE.get(opcode, frozenset())
    for m in modifiers:
        if m in known or m in types or _CACHE.fullmatch(m):
            continue
        if opcode == "fence" and _FENCE.fullmatch(m):
            continue
        return m
    return ""
