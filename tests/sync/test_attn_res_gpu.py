"""The handoffs of `attn_res` on a GPU: previous grid to `delta`, and warp to warp across the cluster."""

from __future__ import annotations

import pytest
import torch
from defects import DEFECTS, SEEN_BY_HARDWARE
from k3_audit.artifact import Artifact, Store
from k3_audit.audit.findings import Verdict
from k3_audit.audit.stress.hammer import Hammer, Histogram
from k3_audit.fused_backend import build
from k3_audit.fused_backend.launch import architecture
from layers import Layers, producer, with_ptx

pytestmark = [pytest.mark.sync, pytest.mark.gpu]

REPLAYS = 12000
CTAS, WARPS, ROUNDS = 7, 4, 2
MODES = ("chained", "eager")


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return build.current("attn_res", architecture(), Store())


@pytest.fixture(scope="module")
def previous() -> Artifact:
    return producer(architecture())


class Traffic:
    """Copies through L2 and HBM on a stream of their own, while the hammer runs."""

    def __init__(self, megabytes: int = 256):
        self.stream = torch.cuda.Stream()
        self.source = torch.ones(megabytes << 18, device="cuda")
        self.target = torch.empty_like(self.source)

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            self.target.copy_(self.source, non_blocking=True)


def hammer(kernel: Artifact, previous: Artifact, tokens: int, seed: int, mode: str) -> Hammer:
    layers = Layers(kernel, previous, tokens, seed, chained=mode == "chained")
    return Hammer(layers.out, layers.enqueue, layers.serial)


def handoffs(histogram: Histogram, tokens: int) -> int:
    """Words handed over: one grid dependency per CTA, and per round one push of every warp to every CTA."""
    per_cluster = CTAS + ROUNDS * CTAS * WARPS * CTAS
    return histogram.steps * tokens * per_cluster


def test_no_weak_outcome(artifact: Artifact, previous: Artifact, evidence, seed: int) -> None:
    counts = {"launches": 0, "handoffs": 0, "weak": 0}
    figures = {"seconds": 0.0}
    for mode in MODES:
        for tokens in (1, 2, 5, 8):
            for beside in (None, Traffic()):
                h = hammer(artifact, previous, tokens, seed, mode)
                got = h.run(REPLAYS if beside is None else REPLAYS // 4, beside=beside, mode=mode)
                counts["launches"] += got.steps
                counts["handoffs"] += handoffs(got, tokens)
                counts["weak"] += got.weak
                figures["seconds"] += got.seconds
    evidence.record(
        artifact,
        tier="sync",
        case="handoffs",
        verdict=Verdict.CLEAN,
        gpu=True,
        counts=counts,
        figures=figures,
        seeds=[seed],
    )
    assert counts["weak"] == 0, f"{counts['weak']} of {counts['launches']} steps came out wrong"


def test_power(artifact: Artifact, previous: Artifact, evidence, seed: int) -> None:
    """How soon the same engine sees planted defects: what a clean result is worth."""
    counts, figures, missed = {}, {}, []
    for name, plant in DEFECTS.items():
        if name == "cluster_wait_dropped":
            continue  # a push to an mbarrier that is not armed yet loses bytes, and the wait would never end
        broken = with_ptx(artifact, plant(artifact.ptx))
        first = 0
        for mode in MODES:
            # The expectation must come from the shipped kernel: a broken one may be wrong even when run alone.
            good = hammer(artifact, previous, 8, seed, mode)
            h = hammer(broken, previous, 8, seed, mode)
            h.expected = good.expected
            got = h.run(REPLAYS // 30, until_weak=True, mode=mode)
            counts[f"{name}_{mode}_steps"] = got.steps
            counts[f"{name}_{mode}_weak"] = got.weak
            first = first or got.weak
        if not first and name in SEEN_BY_HARDWARE:
            missed.append(name)
    figures["defects_seen"] = sum(1 for n in DEFECTS if any(counts.get(f"{n}_{m}_weak") for m in MODES))
    evidence.record(
        artifact,
        tier="sync",
        case="power",
        verdict=Verdict.CLEAN,
        gpu=True,
        counts=counts,
        figures=figures,
        seeds=[seed],
    )
    assert not missed, f"planted defects that the hammer did not see: {', '.join(missed)}"
