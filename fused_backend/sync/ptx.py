"""Inline PTX, spelled once and correctly.

An asm block without side effects may be merged, moved or dropped by the compiler; one with side effects but
without a memory clobber lets ordinary loads and stores move across it. Whatever orders memory therefore goes
through :func:`ordering`, which always has both. :func:`pure` is for arithmetic that has neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


def _ir(operand: Any, loc: Any, ip: Any) -> Any:
    return operand.ir_value(loc=loc, ip=ip)


@dsl_user_op
def ordering(
    assembly: str, constraints: str = "", operands: Sequence[Any] = (), *, loc: Any = None, ip: Any = None
) -> None:
    """One asm block that the compiler neither moves nor drops, and moves no memory access across."""
    llvm.inline_asm(
        None,
        [_ir(x, loc, ip) for x in operands],
        assembly,
        f"{constraints},~{{memory}}" if constraints else "~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def pure(
    assembly: str, constraints: str, operands: Sequence[Any], result: Any, *, loc: Any = None, ip: Any = None
) -> Any:
    """One asm block that computes a value of type `result` from its operands and touches no memory."""
    return result(
        llvm.inline_asm(
            result.mlir_type,
            [_ir(x, loc, ip) for x in operands],
            assembly,
            constraints,
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )
