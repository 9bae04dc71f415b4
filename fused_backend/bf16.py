"""BF16 values two to a 32-bit word: the low half is the element with the lower index."""

from __future__ import annotations

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from .sync.ptx import pure


def widen(words: list[Int32]) -> list[Float32]:
    """fp32 of both halves of each word: exact, one integer instruction per element."""
    halves = [half for word in words for half in (word << 16, word & Int32(-0x10000))]
    return [Float32(llvm.bitcast(T.f32(), half.ir_value())) for half in halves]


def narrow(values: list[Float32]) -> list[Int32]:
    """Round to nearest even, two elements in one instruction.

    A conversion of one element compiles to F2F, which issues at a sixteenth of the rate.
    """
    pairs = zip(values[0::2], values[1::2], strict=True)
    return [pure("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", (low, high), Int32) for low, high in pairs]
