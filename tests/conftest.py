"""What all tests share: seeds that a failure prints, evidence that a tier writes, GPU tests that skip."""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from k3_audit.artifact.artifact import ARCHITECTURES
from k3_audit.audit.evidence import EvidenceWriter, this_machine, without_gpu
from k3_audit.audit.findings import Verdict
from k3_audit.audit.policy import Policy
from k3_audit.audit.tree import tree_sha256

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("k3-audit")
    group.addoption(
        "--evidence-dir",
        default="build/evidence",
        metavar="DIR",
        help="folder that receives the evidence of the tiers (default: build/evidence)",
    )
    group.addoption(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="base of every test's random seed; a failure prints it",
    )
    group.addoption("--kernel", action="append", default=[], metavar="NAME", help="measure only this kernel")
    group.addoption(
        "--arch", action="append", default=[], metavar="SM", help="measure only this architecture"
    )


@cache
def _why_no_gpu() -> str:
    machine = this_machine()
    if not machine.gpu:
        return "needs a GPU (the CPU form of this tier runs everywhere)"
    if machine.arch not in ARCHITECTURES:
        return f"needs a GPU of {', '.join(ARCHITECTURES)}; this one is {machine.arch}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


# One line that replays a failure.


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    failed = {r.nodeid for kind in ("failed", "error") for r in terminalreporter.stats.get(kind, [])}
    if failed:
        terminalreporter.section("replay")
        for nodeid in sorted(failed):
            terminalreporter.write_line(_replay(nodeid, config))


def _replay(nodeid: str, config: pytest.Config) -> str:
    return f"python -m pytest {shlex.quote(nodeid)} --seed {config.getoption('--seed')}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed below 2**31 of this test alone: the same in every run with the same --seed."""
    return zlib.crc32(f"{request.config.getoption('--seed')}:{request.node.nodeid}".encode()) >> 1


# Evidence.

_OUTCOME = pytest.StashKey[dict[str, pytest.TestReport]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash.setdefault(_OUTCOME, {})[report.when] = report
    return report


class EvidenceOfTest:
    """The evidence of one test.

    `record` may be called for several cases; the files are written after the test, and say *clean* only if it
    passed.
    """

    def __init__(self, writer: EvidenceWriter) -> None:
        self._writer = writer
        self._staged: list[tuple[Any, dict[str, Any]]] = []

    def record(
        self, artifact: Any, *, tier: str, case: str, verdict: Verdict, gpu: bool, **what: Any
    ) -> None:
        """Keep one measurement of `artifact`; see EvidenceWriter.write for counts, figures, seeds, prompts.

        `gpu` is True when the machine code ran on this machine's GPU, False for the CPU form of the tier.
        Call it before the assertions, so that a failing measurement leaves its figures too.
        """
        machine = this_machine() if gpu else without_gpu()
        what |= {"tier": tier, "case": case, "verdict": verdict, "machine": machine}
        self._staged.append((artifact, what))

    def finish(self, failure: str) -> None:
        for artifact, what in self._staged:
            if failure:
                what |= {"verdict": Verdict.FINDING, "detail": failure}
            self._writer.write(artifact, **what)


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Iterator[EvidenceOfTest]:
    """Writes what this test measured to --evidence-dir."""
    folder = Path(request.config.getoption("--evidence-dir"))
    policy = Policy.load(ROOT / "golden" / "policy.toml")
    writer = EvidenceWriter(
        folder if folder.is_absolute() else ROOT / folder,
        command=_replay(request.node.nodeid, request.config),
        reference_sha256=tree_sha256(ROOT, ["reference"]),
        tier_hashes={name: tree_sha256(ROOT, tier.code) for name, tier in policy.tiers.items()},
    )
    staged = EvidenceOfTest(writer)
    yield staged
    call = request.node.stash.get(_OUTCOME, {}).get("call")
    if call is None or call.skipped:
        return
    staged.finish(str(call.longreprtext).strip().splitlines()[-1] if call.failed else "")
