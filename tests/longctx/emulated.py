"""`attn_res` without a GPU: the PTX of an artifact, executed by the emulator."""

from __future__ import annotations

import numpy as np
import torch
from k3_audit.artifact import Artifact
from k3_audit.audit import emulator

OPERANDS = ("delta", "prefix", "bank", "res_norm", "res_proj", "norm", "out")


def array(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a BF16 tensor, sharing its memory."""
    return tensor.view(torch.uint16).numpy()


def launch(artifact: Artifact, args: list, tokens: int, *, overlap: bool = False) -> emulator.Launch:
    """One launch of `artifact` over `tokens` tokens, in the shape of its contract."""
    shape = artifact.contract.launch
    grid = tuple(int(g) if g.isdigit() else tokens for g in shape.grid)
    return emulator.Launch(
        artifact.ptx, args, grid, shape.block, shape.cluster, shape.dynamic_smem, overlap=overlap
    )


class EmulatedAttnRes:
    """The operator `executor.AttnRes`, by emulation. `options` go to `emulator.run_stream`."""

    def __init__(self, artifact: Artifact, **options):
        self.artifact, self.options = artifact, options

    def __call__(
        self, *tensors: torch.Tensor, bank_rows: int, bank_write: int, has_prefix: int, out: torch.Tensor
    ):
        args = [array(t) for t in (*tensors, out)]
        scalars = [np.int32(x) for x in (bank_rows, bank_write, has_prefix)]
        emulator.run_stream([launch(self.artifact, [*args, *scalars], len(out))], **self.options)
