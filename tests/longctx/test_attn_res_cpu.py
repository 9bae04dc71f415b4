"""`attn_res` on a real prompt without a GPU: the shipped PTX, emulated, inside a small stack of the real width."""

from __future__ import annotations

import pytest
from emulated import WINDOWS, artifact, captured, judged
from k3_audit.artifact import ARCHITECTURES
from k3_audit.audit.findings import Verdict

pytestmark = pytest.mark.longctx


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
