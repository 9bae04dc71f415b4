"""The handoffs of `attn_res` without a GPU: the shipped PTX, emulated under random schedules and late visibility."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from defects import DEFECTS
from emulated import array, launch
from k3_audit.artifact import ARCHITECTURES, Artifact, Store
from k3_audit.audit import emulator
from k3_audit.audit.findings import Verdict
from k3_audit.fused_backend import build
from layers import BANK_ROWS, HIDDEN, PRODUCER, PRODUCER_PTX, THREADS, VECTOR, bookkeeping

pytestmark = pytest.mark.sync

STEPS = 4
# How a run is scheduled: as overlapped as the dependency allows, at random, and with stores that become visible late.
SCHEDULES = ({"schedule": "eager"}, {"schedule": "random"}, {"schedule": "random", "weak": True})


@cache
def artifact(arch: str) -> Artifact:
    return build.current("attn_res", arch, Store())


class Operands:
    """Buffers of a stack of STEPS layers for one token; `fresh()` gives the launches over new copies of them."""

    def __init__(self, seed: int):
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g).bfloat16()

        self.payload = [normal(1, HIDDEN) for _ in range(STEPS)]
        self.weights = [normal(HIDDEN) for _ in range(3)]
        self.state = (normal(1, HIDDEN), normal(1, HIDDEN), normal(1, BANK_ROWS, HIDDEN))

    def run(self, kernel: Artifact, *, pdl: bool, **options) -> list[torch.Tensor]:
        """Outputs of all steps, and the prefix and bank that they leave."""
        delta, prefix, bank = (x.clone() for x in self.state)
        outs = [torch.full((1, HIDDEN), torch.nan).bfloat16() for _ in range(STEPS)]
        ctas = HIDDEN // (THREADS * VECTOR)
        ptx = PRODUCER_PTX.replace("sm_90a", kernel.arch)
        # Memory is known by its array, so each buffer is viewed once.
        buffers = [array(x) for x in (delta, prefix, bank, *self.weights)]
        launches = []
        for step, out in enumerate(outs):
            args = [buffers[0], array(self.payload[step]), *map(np.int32, (0, step * ctas, 0))]
            shape = PRODUCER.launch
            launches.append(emulator.Launch(ptx, args, (ctas, 1, 1), shape.block, overlap=pdl))
            scalars = map(np.int32, bookkeeping(step))
            launches.append(launch(kernel, [*buffers, array(out), *scalars], 1, overlap=pdl))
        emulator.run_stream(launches, arch=kernel.arch, **options)
        return [*outs, prefix, bank]


def differing(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[int]:
    """Indices of the tensors that are not the same bits."""
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not np.array_equal(array(x), array(y))]


def outcomes(kernel: Artifact, operands: Operands, expected: list[torch.Tensor], seeds: int) -> Iterator[str]:
    """For each schedule and seed: "" if all is as expected, else what went wrong in one line."""
    for seed in range(seeds):
        for options in SCHEDULES:
            try:
                got = operands.run(kernel, pdl=True, seed=seed, **options)
            except emulator.EmulationError as e:
                yield f"{options}: {e}"
                continue
            wrong = differing(got, expected)
            yield f"{options}: steps {wrong} differ from the serial run" if wrong else ""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_weak_outcome(arch: str, evidence, seed: int) -> None:
    kernel, operands = artifact(arch), Operands(seed)
    expected = operands.run(kernel, pdl=False)
    seeds = 3 if arch == "sm_90a" else 1
    seen = list(outcomes(kernel, operands, expected, seeds))
    counts = {"schedules": len(seen), "launches": len(seen) * STEPS, "weak": sum(map(bool, seen))}
    evidence.record(
        kernel, tier="sync", case="emulated", verdict=Verdict.CLEAN, gpu=False, counts=counts, seeds=[seed]
    )
    assert not any(seen), next(filter(None, seen))


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_defects_show(name: str, seed: int) -> None:
    """What the emulator is worth: each defect shows under some schedule."""
    kernel, operands = artifact("sm_90a"), Operands(seed)
    expected = operands.run(kernel, pdl=False)
    broken = replace(kernel, ptx=DEFECTS[name](kernel.ptx))
    assert any(outcomes(broken, operands, expected, 2)), f"{name} passes every schedule that was tried"
