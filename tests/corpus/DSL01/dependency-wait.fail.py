# expect: DSL01 finding
# record: flashinfer-ai/flashinfer#2558: griddepcontrol.wait in inline assembly without a memory clobber
# what: Without the clobber the compiler may move loads of the previous grid's output above the wait.
from cutlass._mlir.dialects import llvm


def wait_for_previous_grid():
    llvm.inline_asm(None, [], "griddepcontrol.wait;", "", has_side_effects=True)
