// expect: clean
// record: NVIDIA/cccl#11211 (review): barrier.cluster in inline assembly without a memory clobber
// what: The compiled form still says that the fence touches memory.
module {
  func.func @fence() {
    %0 = llvm.inline_asm has_side_effects asm_dialect = att "fence.acq_rel.gpu;", "~{memory}" : () -> !llvm.void
    return
  }
}
