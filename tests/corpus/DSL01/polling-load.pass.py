# expect: clean
# record: LLVM Language Reference, Inline Assembler Expressions: without sideeffect equal calls may be
#    merged or hoisted
# what: The polled load has side effects: it is made anew in every round.
from cutlass._mlir.dialects import llvm


def load_flag(result_type, address):
    return llvm.inline_asm(
        result_type, [address], "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l,~{memory}", has_side_effects=True
    )
