"""`attn_res` on a real prompt without a GPU: the shipped PTX, emulated, inside a small stack of the real width."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from emulated import EmulatedAttnRes
from k3_audit.artifact import ARCHITECTURES, Artifact, Store
from k3_audit.audit import evidence as records
from k3_audit.audit.findings import Verdict
from k3_audit.audit.numerics import Judgement
from k3_audit.audit.prompts import PromptError, load_manifest, tokens
from k3_audit.audit.tokenizer import ByteTokenizer
from k3_audit.fused_backend import build
from k3_audit.reference import Model, load_config, synthesise
from mixes import Capture, Mix, Windows, judge_mix

pytestmark = pytest.mark.longctx

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
    return build.build("attn_res", arch, Store())[0]


def judged(kernel: Artifact, name: str, mix: Mix) -> tuple[Judgement, list[str]]:
    """The six criteria of one step of `kernel`, emulated; the schedule is varied at random."""
    positions = torch.tensor(WINDOWS.positions)
    other = EmulatedAttnRes(kernel, schedule="random", seed=1)
    variants = {"another interleaving of the warps": lambda: mix.run(other)}
    subject = f"{kernel.kernel} {kernel.arch}, {name}"
    sums = len(STEPS) * len(positions) * 19  # 2 sums for each of at most 9 rows, 1 of the mixture
    return judge_mix(mix, EmulatedAttnRes(kernel), variants, positions, subject=subject, sums=sums, width=1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_steps(arch: str, evidence) -> None:
    """All chosen steps on the architecture that GPUs ran; the last step on the others."""
    prompt, mixes = captured()
    chosen = mixes if arch == "sm_90a" else {"output": mixes["output"]}
    judgements, wrong = [], []
    for name, mix in chosen.items():
        judgement, state = judged(artifact(arch), name, mix)
        print(judgement.message)
        judgements.append(judgement)
        wrong += state
    counts = {"steps": len(chosen), "positions": len(WINDOWS.positions)}
    figures = {"bound_ratio": max(j.figures["bound_ratio"] for j in judgements)}
    evidence.record(
        artifact(arch),
        tier="longctx",
        case="emulated",
        verdict=Verdict.CLEAN,
        gpu=False,
        counts=counts,
        figures=figures,
        seeds=[0],
        prompts=[prompt],
    )
    assert not wrong, wrong[0]
    unclean = [j.message for j in judgements if j.verdict is not Verdict.CLEAN]
    assert not unclean, unclean[0]
