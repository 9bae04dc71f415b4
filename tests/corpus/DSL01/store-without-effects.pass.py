# expect: clean
# record: LLVM Language Reference, Inline Assembler Expressions: assembly without sideeffect whose result is
#    unused is dropped
# what: A store says that it has side effects.
from cutlass._mlir.dialects import llvm


def publish(address, value):
    llvm.inline_asm(
        None, [address, value], "st.release.sys.global.u32 [$0], $1;", "l,r,~{memory}", has_side_effects=True
    )
