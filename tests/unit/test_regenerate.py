"""golden/regenerate.py: what it locks, what it refuses, and that a refusal writes nothing."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import samples
import torch
from k3_audit.artifact import Artifact
from k3_audit.audit.evidence import Evidence, Lock, Machine
from k3_audit.audit.findings import Finding, Verdict
from samples import UNDECIDED, UNORDERED, artifact, record, report

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
POLICY = """
tiers = {longctx = {code = [], reference = true}, sync = {code = []}}
architectures.sm_90a = {required = ["longctx", "sync"]}
architectures.sm_100a = {required = [], static_only = "no such GPU"}
architectures.sm_103a = {required = [], static_only = "no such GPU"}
"""
VALUES = {"config": "tiny", "seed": 0, "tokens": (1, 2), "logits": ((1.0, -0.1), (math.pi, 0.0))}


@pytest.fixture(scope="module")
def regenerate() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("regenerate", ROOT / "golden" / "regenerate.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class World:
    """A checkout in a temporary folder: one kernel for three architectures, no toolkit, no GPU."""

    def __init__(self, module: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module, self.root = module, root
        self.built = {a: artifact(a) for a in ARCHS}
        self.sources = dict(samples.TREE.sources["attn_res"])
        self.findings: tuple[Finding, ...] = ()
        self.machine = Machine()
        self.values = self.module.Values(**VALUES)
        self.measured: list[str] = []
        (root / "reference").mkdir()
        (root / "golden").mkdir()
        (root / "reference" / "norm.py").write_text("x = 1\n")
        (root / "golden" / "policy.toml").write_text(POLICY)
        store = SimpleNamespace(root="build/artifacts", get=lambda kernel, arch: self.built[arch])
        for name, value in {
            "ROOT": root,
            "LOCK": root / "golden" / "kernels.lock",
            "LOGITS": root / "golden" / "expected" / "tiny-logits.json",
            "EVIDENCE": root / "build" / "evidence",
            "KERNELS": ("attn_res",),
            "source_hashes": lambda kernel: self.sources,
            "expected_values": lambda: self.values,
            "this_machine": lambda: self.machine,
        }.items():
            monkeypatch.setattr(self.module, name, value)
        monkeypatch.setattr(self.module.cli, "toolkit_is_here", lambda: False)
        monkeypatch.setattr(self.module.cli, "open_store", lambda root: store)
        monkeypatch.setattr(
            self.module.cli, "audit_artifact", lambda a, root: (report(*self.findings, arch=a.arch),)
        )

    def run(self, *arguments: str) -> int:
        return self.module.main(arguments)

    @property
    def lock(self) -> Lock:
        return Lock.load(self.module.LOCK)

    def evidence(self, *records: Evidence) -> str:
        """A folder that holds `records`."""
        folder = self.root / "elsewhere"
        folder.mkdir(exist_ok=True)
        for i, r in enumerate(records):
            (folder / f"{i}.json").write_text(json.dumps(r.to_dict()))
        return str(folder)

    def fresh(self, tier: str, **changes: Any) -> Evidence:
        """A clean measurement against the reference as it is."""
        reference = self.lock.reference
        assert reference
        return record(tier, self.built["sm_90a"], reference_sha256=reference.sha256, **changes)

    def snapshot(self) -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in (self.root / "golden").rglob("*") if p.is_file()}


@pytest.fixture
def world(regenerate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(regenerate, tmp_path, monkeypatch)


def refused(world: World, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The refusal of a run, which must have written nothing."""
    before = world.snapshot()
    capsys.readouterr()
    assert world.run(*arguments) == 1
    assert world.snapshot() == before
    (line,) = [s for s in capsys.readouterr().err.splitlines() if s.startswith("refused: ")]
    return line


def test_the_first_run_needs_a_reason_and_locks_everything(world: World, capsys) -> None:
    assert "say why with --reason" in refused(world, capsys)
    assert world.run("--reason", "first kernel") == 0
    out = capsys.readouterr().out
    assert "sm_90a: python golden/regenerate.py" not in out
    assert 'python golden/regenerate.py --tier sync --kernel attn_res --arch sm_90a --reason "..."' in out
    lock = world.lock
    assert [(e.arch, e.audit.verdict) for e in lock.entries] == [(a, Verdict.CLEAN) for a in sorted(ARCHS)]
    assert lock.reference and lock.reference.reason == "first kernel"
    before = world.snapshot()
    assert world.run() == 0 and world.snapshot() == before


def test_evidence_of_another_machine_is_folded(world: World, capsys) -> None:
    assert world.run("--reason", "first") == 0
    folder = world.evidence(
        world.fresh("longctx"), world.fresh("sync"), world.fresh("sync", case="cpu", gpu="")
    )
    assert world.run("--from", folder) == 0
    out = capsys.readouterr().out
    assert "left out attn_res.sm_90a.sync.cpu: the CPU form" in out and "max_error_ratio = 0.75" in out
    entry = world.lock.entry("attn_res", "sm_90a")
    assert entry and [r.case for r in entry.evidence] == ["prompt-32k", "handoff"]
    better = world.evidence(world.fresh("longctx", figures={"max_error_ratio": 0.5}))
    (Path(better) / "1.json").unlink(), (Path(better) / "2.json").unlink()
    assert world.run("--from", better) == 0
    assert "max_error_ratio = 0.5   (was 0.75)" in capsys.readouterr().out
    entry = world.lock.entry("attn_res", "sm_90a")
    assert entry and len(entry.evidence) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"verdict": Verdict.FINDING, "detail": "NaN at 7"}, "failed (finding): NaN at 7"),
        ({"cubin_sha256": "0" * 64}, "measured on cubin 000000000000"),
        ({"launch_sha256": "0" * 64}, "another launch shape"),
        ({"reference_sha256": "0" * 64}, "a reference that computes other numbers"),
    ],
)
def test_evidence_that_does_not_fit_is_refused(
    world: World, capsys, changes: dict[str, Any], says: str
) -> None:
    assert world.run("--reason", "first") == 0
    spoilt = replace(world.fresh("longctx"), **changes)
    assert says in refused(world, capsys, "--from", world.evidence(spoilt, world.fresh("sync")))


def test_an_edited_evidence_file_is_an_error(world: World, capsys) -> None:
    assert world.run("--reason", "first") == 0
    folder = world.evidence(world.fresh("longctx"))
    path = Path(folder) / "0.json"
    path.write_text(path.read_text().replace("0.75", "0.25"))
    before = world.snapshot()
    assert world.run("--from", folder) == 3 and world.snapshot() == before
    assert "0.json: the digest does not fit" in capsys.readouterr().err


def test_a_moved_reference_is_refused_without_a_reason(world: World, capsys) -> None:
    assert world.run("--reason", "first") == 0
    norm = world.root / "reference" / "norm.py"
    norm.write_text("x = 2\n")
    assert "its files changed" in refused(world, capsys)
    norm.write_text("x = 1\n")
    values = world.values
    world.values = replace(values, logits=((1.0, -0.1), (math.pi + 1e-6, 0.0)))
    assert "its values changed" in refused(world, capsys)
    assert world.run("--reason", "another epsilon") == 0
    assert world.lock.reference and world.lock.reference.reason == "another epsilon"
    assert values.load(world.module.LOGITS) == world.values
    world.values = replace(values, logits=((1.0, -0.1), (math.pi + 1e-6 + 1e-15, 0.0)))
    assert world.run() == 0  # round-off is no movement, and the file keeps its bits
    assert values.load(world.module.LOGITS) != world.values


def test_a_moved_reference_that_computes_the_same_keeps_its_evidence(world: World) -> None:
    assert world.run("--reason", "first") == 0
    assert world.run("--from", world.evidence(world.fresh("longctx"), world.fresh("sync"))) == 0
    old = world.lock.reference
    (world.root / "reference" / "norm.py").write_text("x = 1  # said better\n")
    assert world.run("--reason", "a comment") == 0
    assert old and world.lock.reference != old and world.lock.same_values(old.sha256)


@pytest.mark.parametrize("verdict", [Verdict.FINDING, Verdict.ERROR])
def test_a_kernel_with_defects_is_not_locked(world: World, capsys, verdict: Verdict) -> None:
    world.findings = (replace(UNORDERED, verdict=verdict),)
    assert f"the audit says {verdict} (R15)" in refused(world, capsys, "--reason", "first")


def test_an_open_question_is_locked_as_one(world: World) -> None:
    world.findings = (UNDECIDED,)
    assert world.run("--reason", "first") == 0
    entry = world.lock.entry("attn_res", "sm_90a")
    assert entry and (entry.audit.verdict, entry.audit.inconclusive) == (Verdict.INCONCLUSIVE, 1)


def test_changed_machine_code_needs_a_reason_and_shows_what_changed(world: World, capsys) -> None:
    assert world.run("--reason", "first") == 0
    world.built["sm_90a"] = replace(world.built["sm_90a"], cubin=b"other")
    assert "attn_res sm_90a: changed; say why" in refused(world, capsys)
    assert world.run("--reason", "one row a step") == 0
    assert f"cubin_sha256  {artifact().cubin_sha256[:12]} -> " in capsys.readouterr().out
    reasons = {e.arch: e.reason for e in world.lock.entries}
    assert reasons == {"sm_90a": "one row a step", "sm_100a": "first", "sm_103a": "first"}


def test_a_store_of_older_sources_is_refused(world: World, capsys) -> None:
    world.sources = {"fused_backend/kernels/attn_res.py": "edited"}
    assert "another version of fused_backend/kernels/attn_res.py" in refused(world, capsys, "--reason", "x")


def test_a_tier_that_was_asked_for_needs_the_gpu(world: World, capsys) -> None:
    line = refused(world, capsys, "--reason", "first", "--tier", "longctx")
    assert "longctx for sm_90a needs a GPU of sm_90a; on such a machine: python golden/regenerate.py" in line


def on_a_gpu(world: World, monkeypatch: pytest.MonkeyPatch, what: Callable[[Artifact, str], bool]) -> None:
    world.machine = Machine("NVIDIA H200", "sm_90a")

    def run_tier(tier: str, kernel: str, arch: str) -> bool:
        world.measured.append(f"{tier} {kernel} {arch}")
        return what(world.built[arch], tier)

    monkeypatch.setattr(world.module, "run_tier", run_tier)


def test_on_a_gpu_the_missing_tiers_run_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.run("--reason", "first") == 0

    def measures(made: Artifact, tier: str) -> bool:
        world.module.EVIDENCE.mkdir(parents=True, exist_ok=True)
        (world.module.EVIDENCE / f"{tier}.json").write_text(json.dumps(world.fresh(tier).to_dict()))
        return True

    on_a_gpu(world, monkeypatch, measures)
    assert world.run() == 0 and world.measured == ["longctx attn_res sm_90a", "sync attn_res sm_90a"]
    assert world.run() == 0 and len(world.measured) == 2
    assert world.run("--tier", "sync") == 0 and world.measured[2:] == ["sync attn_res sm_90a"]
    entry = world.lock.entry("attn_res", "sm_90a")
    assert entry and {r.tier for r in entry.evidence} == {"longctx", "sync"}


def test_a_tier_that_fails_or_measures_nothing_is_refused(world: World, capsys, monkeypatch) -> None:
    assert world.run("--reason", "first") == 0
    on_a_gpu(world, monkeypatch, lambda made, tier: tier == "sync")
    assert "attn_res sm_90a: longctx failed" in refused(world, capsys)
    (world.root / "build" / "evidence").mkdir(parents=True)
    on_a_gpu(world, monkeypatch, lambda made, tier: True)
    assert "longctx, sync passed but measured nothing" in refused(world, capsys)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tier", "nightly"], "there is no tier 'nightly'; known: longctx, sync"),
        (["--arch", "sm_42"], "there is no architecture 'sm_42'"),
        (["--kernel", "nope"], "there is no kernel 'nope'; known: attn_res"),
        (["--reason", "..."], "--reason must say why"),
        (["--from", "nowhere"], "nowhere is not a folder"),
        (["--nonsense"], "No such option"),
        (["stray"], "unexpected extra argument"),
    ],
)
def test_bad_usage_is_one_line(world: World, capsys, arguments: list[str], says: str) -> None:
    if "--reason" not in arguments:
        arguments = [*arguments, "--reason", "first"]
    assert world.run(*arguments) == 3
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("k3-audit: error: ") and says in line


# The values themselves.


def test_values_survive_the_file_bit_for_bit(regenerate: ModuleType, tmp_path: Path) -> None:
    path, values = tmp_path / "logits.json", regenerate.Values(**VALUES)
    path.write_text(values.dumps())
    assert regenerate.Values.load(path) == values and values.difference(values) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": (1,)},
        {"seed": 1},
        {"logits": ((1.0, -0.1),)},
        {"logits": ((math.nan, 0.0), (1.0, 1.0))},
        {"logits": ((0.0, 0.0), (0.0, math.inf))},
    ],
)
def test_other_inputs_and_no_numbers_are_never_the_same(
    regenerate: ModuleType, changes: dict[str, Any]
) -> None:
    values, other = regenerate.Values(**VALUES), regenerate.Values(**{**VALUES, **changes})
    assert values.difference(other) == other.difference(values) == math.inf


def test_zeros_are_not_the_locked_values(regenerate: ModuleType) -> None:
    values = regenerate.Values.load(ROOT / "golden" / "expected" / "tiny-logits.json")
    zeros = replace(values, logits=tuple(tuple(0.0 for _ in row) for row in values.logits))
    assert values.difference(zeros) > 1 and zeros.difference(values) == math.inf


def test_the_reference_computes_the_locked_values_and_float32_does_not(
    regenerate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    locked = regenerate.Values.load(ROOT / "golden" / "expected" / "tiny-logits.json")
    assert locked.difference(regenerate.expected_values()) <= regenerate.SAME
    exact = regenerate.reference_model
    monkeypatch.setattr(regenerate, "reference_model", lambda: exact(dtype=torch.float32))
    assert locked.difference(regenerate.expected_values()) > 100 * regenerate.SAME
