// expect: DSL01 finding
// record: NVIDIA/cccl#11211 (review): barrier.cluster in inline assembly without a memory clobber
// what: In the compiled form the clobber is gone: the compiler may move accesses across the fence.
module {
  func.func @fence() {
    %0 = llvm.inline_asm has_side_effects asm_dialect = att "fence.acq_rel.gpu;", "" : () -> !llvm.void
    return
  }
}
