"""`attn_res` without a GPU: the PTX of an artifact, executed by the emulator, on steps of a real prompt."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from k3_audit.artifact import Artifact, Store
from k3_audit.audit import emulator
from k3_audit.audit import evidence as records
from k3_audit.audit.numerics import Judgement
from k3_audit.audit.prompts import PromptError, load_manifest, tokens
from k3_audit.audit.tokenizer import ByteTokenizer
from k3_audit.fused_backend import build
from k3_audit.reference import Model, load_config, synthesise
from mixes import Capture, Mix, Windows, judge_mix

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


CONFIG = "wide"  # hidden 7168, everything else small
PROMPT, LENGTH = "cpython-lib", 1024
WINDOWS = Windows(LENGTH, count=32, width=1)
# Bank write and empty bank; empty prefix; prefix and bank; the last mix.
STEPS = ("0 attention", "0 ffn", "3 ffn", "output")


@cache
def captured() -> tuple[records.Prompt, dict[str, Mix]]:
    """The operands of the chosen steps, from the fp64 reference over the prompt."""
    prompt = next(p for p in load_manifest() if p.id == PROMPT)
    try:
        ids = torch.as_tensor(tokens(prompt, ByteTokenizer(), LENGTH)).long()
    except PromptError as e:
        pytest.skip(f"the prompt is not here: {e}")
    config = load_config(CONFIG)
    tensors = synthesise(config, seed=0)
    capture = Capture(WINDOWS.positions)
    model = Model(config, tensors)
    model.prefill(ids, model.empty_cache(), observer=capture)
    mixes = {m.name: m for m in capture.mixes(config, tensors)}
    return records.Prompt(prompt.id, prompt.sha256, LENGTH), {name: mixes[name] for name in STEPS}


@cache
def artifact(arch: str) -> Artifact:
    return build.current("attn_res", arch, Store())


def judged(kernel: Artifact, name: str, mix: Mix) -> tuple[Judgement, list[str]]:
    """The six criteria of one step of `kernel`, emulated; the schedule is varied at random."""
    positions = torch.tensor(WINDOWS.positions)
    other = EmulatedAttnRes(kernel, schedule="random", seed=1)
    variants = {"another interleaving of the warps": lambda: mix.run(other)}
    subject = f"{kernel.kernel} {kernel.arch}, {name}"
    sums = len(STEPS) * len(positions) * 19  # 2 sums for each of at most 9 rows, 1 of the mixture
    return judge_mix(mix, EmulatedAttnRes(kernel), variants, positions, subject=subject, sums=sums, width=1)
