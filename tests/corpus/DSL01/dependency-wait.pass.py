# expect: clean
# record: flashinfer-ai/flashinfer#2558: griddepcontrol.wait in inline assembly without a memory clobber
# what: The wait has side effects and a memory clobber: no load moves above it.
from cutlass._mlir.dialects import llvm


def wait_for_previous_grid():
    llvm.inline_asm(None, [], "griddepcontrol.wait;", "~{memory}", has_side_effects=True)
