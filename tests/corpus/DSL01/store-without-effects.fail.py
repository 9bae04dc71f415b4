# expect: DSL01 finding
# record: LLVM Language Reference, Inline Assembler Expressions: assembly without sideeffect whose result is
#    unused is dropped
# what: A store without side effects and without a result may be dropped.
from cutlass._mlir.dialects import llvm


def publish(address, value):
    llvm.inline_asm(None, [address, value], "st.release.sys.global.u32 [$0], $1;", "l,r,~{memory}")
