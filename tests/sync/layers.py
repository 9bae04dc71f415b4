"""The launches that the handoffs of `attn_res` are hammered with: a stack of layers, as the model would enqueue it.

Each step is a producer (the previous sublayer, with a random pause) and one AttnRes launch. `chained` steps follow the
model's bookkeeping: the prefix grows in place, a block starts every 8 steps and banks it, and the producer triggers
late, as `Launch.stable_distance` demands. `eager` steps write nothing that is read before a wait, so the producer may
trigger at once, and the grids overlap as far as the hardware lets them.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import torch
from k3_audit.artifact import Artifact, Contract, Launch, Param, Role, ptx_code
from k3_audit.artifact.toolchain import assemble
from k3_audit.fused_backend.launch import Launcher

HIDDEN, BANK_ROWS = 7168, 8
STEPS, BLOCK = 64, 8
THREADS, VECTOR = 128, 8
PAUSE_MASK_NS = 0x7FF  # pauses up to 2 us: longer than the part of the consumer before its wait

PRODUCER_PTX = files("k3_audit.audit.stress").joinpath("producer.ptx").read_text()
PRODUCER = Contract(
    kernel="producer",
    params=(
        Param("target", "bf16", Role.OUTPUT, "w", ("T", "7168")),
        Param("payload", "bf16", Role.WEIGHT, "r", ("T", "7168")),
        Param("pause_mask", "i32", note="pauses are hashed, then masked with this, in ns"),
        Param("salt", "i32"),
        Param("early", "i32"),
    ),
    launch=Launch(block=(THREADS, 1, 1), grid=("CTAS", "1", "1"), pdl=True),
)


def bookkeeping(step: int) -> tuple[int, int, int]:
    """(bank_rows, bank_write, has_prefix) of a step of the chained mode; a block starts every BLOCK steps."""
    block, place = divmod(step, BLOCK)
    if place == 0:  # the attention mix of a block's first layer reads the old prefix, then banks it
        return block, block, int(step > 0)
    return block + 1, -1, int(place > 1)


def with_ptx(artifact: Artifact, ptx: str) -> Artifact:
    """The same kernel with other PTX, assembled here."""
    return replace(artifact, ptx=ptx, cubin=assemble(ptx_code(ptx), artifact.arch), sass="")


def producer(arch: str) -> Artifact:
    ptx = PRODUCER_PTX.replace("sm_90a", arch)
    return Artifact("producer", arch, "producer", ptx, assemble(ptx, arch), "", PRODUCER)


class Layers:
    """STEPS steps for `tokens` tokens on the GPU, with payloads drawn from `seed`."""

    def __init__(self, kernel: Artifact, previous: Artifact, tokens: int, seed: int, *, chained: bool):
        g = torch.Generator(device="cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=g).bfloat16()

        self.tokens, self.chained = tokens, chained
        self.kernel, self.previous = Launcher(kernel), Launcher(previous)
        self.payload = normal(STEPS, tokens, HIDDEN)
        self.weights = [normal(HIDDEN) for _ in range(3)]
        self.delta, self.prefix = normal(tokens, HIDDEN), normal(tokens, HIDDEN)
        self.bank = normal(tokens, BANK_ROWS, HIDDEN)
        self.out = torch.empty(STEPS, tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def _step(self, step: int, pdl: bool) -> None:
        rows, write, has_prefix = bookkeeping(step) if self.chained else (step % (BANK_ROWS + 1), -1, 0)
        ctas = self.tokens * HIDDEN // (THREADS * VECTOR)
        args = (self.delta, self.payload[step], PAUSE_MASK_NS, step * ctas, int(not self.chained))
        self.previous.launch(args, {"CTAS": ctas}, pdl=pdl)
        operands = (self.delta, self.prefix, self.bank, *self.weights, self.out[step])
        self.kernel.launch((*operands, rows, write, has_prefix), {"T": self.tokens}, pdl=pdl)

    def enqueue(self) -> None:
        for step in range(STEPS):
            self._step(step, pdl=True)

    def serial(self) -> None:
        for step in range(STEPS):
            self._step(step, pdl=False)
            torch.cuda.synchronize()
