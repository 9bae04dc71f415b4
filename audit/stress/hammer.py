"""Hammer: replay a graph of launches whose every output is known bit for bit, and count what came out instead.

A scenario enqueues R steps, each writing one row of `outputs` from a payload of its own. The expected rows
come from the same steps run one at a time, with a full synchronisation between launches, so they need no
reference and no tolerance. Outputs are poisoned before each replay, on the GPU, and compared after it, on the
GPU: nothing but counters comes back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

POISON = 0x7FA5  # a signalling NaN as BF16: no arithmetic produces it, so an unwritten element shows


@dataclass
class Histogram:
    """Outcomes of one hammering: `counts` of steps per outcome, and the environment that produced them.

    Outcomes: `expected`; `stale`, the row of another step of this scenario; `unwritten`, poison left; `other`.
    """

    steps: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    environment: dict[str, str | int] = field(default_factory=dict)

    @property
    def weak(self) -> int:
        """Steps whose outcome was not the expected one."""
        return self.steps - self.counts["expected"]


class Hammer:
    """One captured graph of `enqueue()`, which writes `outputs` `[R, ...]` (BF16, on the GPU).

    `serial()` must run the same steps one launch at a time; its outputs become the expectation.
    """

    def __init__(self, outputs: torch.Tensor, enqueue: Callable[[], None], serial: Callable[[], None]):
        self.outputs = outputs
        self._bits = outputs.view(torch.int16)
        self._bits.fill_(POISON)
        serial()
        torch.cuda.synchronize()
        self.expected = self._bits.clone()
        if (self.expected == POISON).any():
            raise ValueError("the serial run left outputs unwritten: the scenario does not write all of them")
        self._bad = torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)
        self._stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._round(enqueue)  # allocations and lazy loading happen outside the capture
            self._stream.synchronize()
            self._bad.zero_()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._round(enqueue)

    def _round(self, enqueue: Callable[[], None]) -> None:
        self._bits.fill_(POISON)
        enqueue()
        self._bad.add_((self._bits != self.expected).flatten(1).any(1))

    def run(
        self,
        replays: int,
        *,
        until_weak: bool = False,
        beside: Callable[[], None] | None = None,
        **environment: str | int,
    ) -> Histogram:
        """Replay the graph `replays` times (or until the first weak outcome) and classify what came out.

        `beside()` is called between replays and may enqueue traffic on other streams.
        """
        result = Histogram(environment=environment)
        self._bad.zero_()
        begin = time.monotonic()
        with torch.cuda.stream(self._stream):
            for i in range(replays):
                self._graph.replay()
                if beside is not None:
                    beside()
                result.steps += len(self.outputs)
                # a check costs a synchronisation, so checks thin out as the run goes on
                if until_weak and (i < 16 or i % 64 == 0) and self._bad.any().item():
                    break
        self._stream.synchronize()
        result.seconds = time.monotonic() - begin
        weak = int(self._bad.sum().item())
        result.counts["expected"] = result.steps - weak
        if weak:
            result.counts[self._kind()] = weak
        return result

    def _kind(self) -> str:
        """What the last replay shows of the weak outcome; "other" when the last replay was clean."""
        wrong = (self._bits != self.expected).flatten(1)
        kinds: Counter[str] = Counter()
        for row in wrong.any(1).nonzero().flatten().tolist():
            got, bad = self._bits[row].flatten(), wrong[row]
            if (got[bad] == POISON).any():
                kinds["unwritten"] += 1
            elif (got[bad] == self.expected.flatten(1)[:, bad]).all(1).any():
                kinds["stale"] += 1
            else:
                kinds["other"] += 1
        return kinds.most_common(1)[0][0] if kinds else "other"
