# expect: DSL01 finding
# record: llvm/llvm-project#212937: inline PTX with memory effects needs a memory clobber, and the wrapper
#    could not say so
# what: The wrapper leaves the clobber to its callers, and this caller forgets it.
from cutlass._mlir.dialects import llvm


def emit(assembly, constraints, operands):
    llvm.inline_asm(None, operands, assembly, constraints, has_side_effects=True)


def arrive(barrier):
    emit("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", [barrier])
