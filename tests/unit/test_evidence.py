"""The lock file and the evidence records: whole, sorted, and every hand edit shows."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import samples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from k3_audit.audit.evidence import (
    Evidence,
    EvidenceError,
    EvidenceWriter,
    Lock,
    Machine,
    Prompt,
    Reference,
    launch_sha256,
    read_folder,
)
from k3_audit.audit.findings import Verdict

pytestmark = pytest.mark.unit

TEXT = samples.lock().dumps()
GPU = Machine("NVIDIA H200", "sm_90a", "580.1", {"torch": "2.13.0"})

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
hashes = st.text("0123456789abcdef", min_size=1, max_size=8)
records = st.builds(
    Evidence,
    kernel=st.just("attn_res"),
    arch=st.just("sm_90a"),
    tier=st.sampled_from(["longctx", "sync"]),
    case=names,
    verdict=st.sampled_from(Verdict),
    cubin_sha256=hashes,
    launch_sha256=hashes,
    date=names,
    command=names,
    gpu=names,
    driver=names,
    toolkit=st.dictionaries(names, names, max_size=2),
    counts=st.dictionaries(names, st.integers(-(2**62), 2**62), max_size=2),
    figures=st.dictionaries(names, st.floats(allow_nan=False), max_size=3),
    seeds=st.lists(st.integers(0, 2**31), max_size=2).map(tuple),
    prompts=st.lists(st.builds(Prompt, names, hashes, st.integers(0, 2**40)), max_size=2).map(tuple),
    detail=names,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(records, max_size=3, unique_by=lambda r: r.key), names, st.lists(names, max_size=3))
def test_a_lock_survives_writing_and_reading(
    evidence: list[Evidence], reason: str, skeleton: list[str]
) -> None:
    made = samples.artifact()
    entry = samples.entry(
        made, *sorted(evidence, key=lambda r: r.key), reason=reason, sync_skeleton=tuple(skeleton)
    )
    lock = Lock((Reference("a", "b", reason, "c"),), (entry,))
    assert Lock.loads(lock.dumps()) == lock


def test_the_order_of_entries_and_records_does_not_change_the_file() -> None:
    lock = samples.lock()
    shuffled = replace(
        lock,
        entries=tuple(replace(e, evidence=tuple(reversed(e.evidence))) for e in reversed(lock.entries)),
    )
    assert shuffled != lock
    assert shuffled.dumps() == TEXT == Lock.loads(TEXT).dumps()


def test_the_file_says_what_it_is_and_that_nobody_edits_it() -> None:
    head = TEXT.split("schema")[0]
    assert all(line.startswith("#") for line in head.splitlines() if line)
    assert "Never edit it by hand" in head and "regenerate.py" in head


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_error_ratio = 0.75", "max_error_ratio = 0.74"),
        ("tokens = 32768}\n", "tokens = 32769}\n"),
        ('verdict = "clean"\ncubin', 'verdict = "finding"\ncubin'),
        ('gpu = "NVIDIA H200"', 'gpu = "NVIDIA H100"'),
        ("seeds = [1, 2]", "seeds = [1, 3]"),
        ('date = "2026-11-29', 'date = "2026-11-30'),
        ("[[kernels.attn_res.sm_90a.evidence]]", "[[kernels.attn_res.sm_100a.evidence]]"),
        (samples.artifact().cubin_sha256, "0" * 64),
    ],
)
def test_an_edited_record_is_named(old: str, new: str) -> None:
    assert old in TEXT
    with pytest.raises(EvidenceError, match=r"kernels.lock: attn_res sm_(90|100)a: evidence 0: the digest"):
        Lock.loads(TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "schema None"),
        ("schema = 99\n", "schema 99"),
        ("schema = 1\nkernels = 3\n", "kernels must be a table"),
        ("schema = 1\nreference = 3\n", "must be an array"),
        ("schema = 1\n[[reference]]\nsha256 = 'a'\n", "missing field"),
        (
            "schema = 1\n[kernels.k.sm_90a]\nnonsense = 1\n[kernels.k.sm_90a.audit]\nverdict='clean'",
            "missing field",
        ),
        (TEXT.replace("launch_sha256", "lunch_sha256", 1), "missing field 'launch_sha256'"),
        (
            TEXT.replace('reason = "first kernel"', 'reason = "x"\nsurprise = 1', 1),
            "unknown field 'surprise'",
        ),
        (
            TEXT.replace('verdict = "clean"\nfindings', 'verdict = "perfect"\nfindings', 1),
            "'perfect' is not Verdict",
        ),
        ("schema = [" * 5000, "restore it"),
    ],
)
def test_a_broken_lock_is_explained_in_one_line(text: str, says: str) -> None:
    with pytest.raises(EvidenceError) as caught:
        Lock.loads(text)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, len(TEXT)), st.text(max_size=4))
@example(0, len(TEXT), "")
def test_a_damaged_lock_never_gives_anything_but_its_own_error(start: int, end: int, text: str) -> None:
    try:
        lock = Lock.loads(TEXT[:start] + text + TEXT[end:])
    except EvidenceError as e:
        assert "\n" not in str(e)
    else:
        for entry in lock.entries:  # what is read is whole: no record lost its digest on the way
            assert all(r.to_dict()["digest"] in TEXT for r in entry.evidence)


def test_bytes_that_are_no_text_and_folders_are_explained(tmp_path: Path) -> None:
    assert Lock.load(tmp_path / "absent.lock") == Lock()
    (tmp_path / "kernels.lock").write_bytes(random.Random(0).randbytes(999))
    for path in (tmp_path, tmp_path / "kernels.lock"):
        with pytest.raises(EvidenceError, match="restore it"):
            Lock.load(path)


def test_older_references_stay_only_while_evidence_refers_to_them() -> None:
    lock = samples.lock()
    moved = lock.with_reference(Reference("ref-2", "values-1", "a comment", "d"))
    assert [r.sha256 for r in moved.references] == ["ref-1", "ref-2"]
    assert moved.same_values("ref-1") and moved.same_values("ref-2") and not moved.same_values("ref-0")
    changed = moved.with_reference(Reference("ref-3", "values-3", "another epsilon", "d"))
    assert changed.same_values("ref-3") and not changed.same_values("ref-1")
    forgotten = replace(moved, entries=()).with_reference(moved.references[-1])
    assert [r.sha256 for r in forgotten.references] == ["ref-2"]


# Writing records.


def test_what_a_tier_writes_can_be_read_back(tmp_path: Path) -> None:
    made = samples.artifact()
    writer = EvidenceWriter(tmp_path, command="replay me", reference_sha256="r", tier_hashes={"sync": "t"})
    written = writer.write(
        made,
        tier="sync",
        case="hand/off 1",
        verdict=Verdict.CLEAN,
        machine=GPU,
        counts={"launches": 10},
        figures={"bad": float("nan"), "ratio": 1.5},
        seeds=[7],
    )
    assert [p.name for p in tmp_path.iterdir()] == ["attn_res.sm_90a.sync.hand_off_1.json"]
    (read,) = read_folder(tmp_path)
    assert repr(read) == repr(written)  # repr: nan equals itself there
    assert (read.cubin_sha256, read.launch_sha256) == (made.cubin_sha256, launch_sha256(made))
    assert (read.gpu, read.tier_sha256, read.toolkit["ptxas"]) == ("NVIDIA H200", "t", "13.5.37")


def test_a_count_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    writer = EvidenceWriter(tmp_path, command="")
    with pytest.raises(EvidenceError, match=r"n = 1\.5 is not a whole number"):
        writer.write(
            samples.artifact(), tier="sync", case="c", verdict=Verdict.CLEAN, machine=GPU, counts={"n": 1.5}
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace('"tokens": 32768', '"tokens": 32767'),
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "gpu"}),
    ],
)
def test_a_spoilt_record_is_named(tmp_path: Path, spoil) -> None:
    text = json.dumps(samples.record("sync", samples.artifact()).to_dict())
    (tmp_path / "one.json").write_text(spoil(text))
    with pytest.raises(EvidenceError, match=r"^one\.json: ") as caught:
        read_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_another_launch_is_other_evidence() -> None:
    made = samples.artifact()
    contract = made.contract
    for other in (
        replace(made, entry="other"),
        replace(made, contract=replace(contract, launch=replace(contract.launch, pdl=False))),
        replace(made, contract=replace(contract, params=contract.params * 2)),
    ):
        assert launch_sha256(other) != launch_sha256(made)
    assert launch_sha256(replace(made, contract=replace(contract, notes=("prose",)))) == launch_sha256(made)


# The fixtures of tests/conftest.py, in a pytest of their own.

TIER = """
import samples
from k3_audit.audit.findings import Verdict

def test_measures(evidence, seed):
    what = {"tier": "sync", "verdict": Verdict.CLEAN, "gpu": False, "seeds": [seed]}
    evidence.record(samples.artifact(), case="good", **what)

def test_fails(evidence, seed):
    what = {"tier": "sync", "verdict": Verdict.CLEAN, "gpu": False, "seeds": [seed]}
    evidence.record(samples.artifact(), case="bad", **what)
    assert seed < 0, "the handoff lost a row"
"""


def test_a_failing_test_leaves_failing_evidence_and_one_line_that_replays_it(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    (tmp_path / "test_tier.py").write_text(TIER)

    def run(seed: int, *options: str) -> tuple[str, dict[str, Evidence]]:
        folder = tmp_path / f"evidence-{seed}"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "conftest",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            tmp_path,
        ]
        command += ["test_tier.py", "--evidence-dir", folder, "--seed", str(seed), *options]
        path = os.pathsep.join(map(str, (tests, tests / "unit")))
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
        )
        return done.stdout, {r.case: r for r in read_folder(folder)}

    out, records = run(5)
    assert records["good"].verdict == Verdict.CLEAN
    assert records["bad"].verdict == Verdict.FINDING and records["bad"].detail
    assert records["good"].gpu == "" and records["good"].seeds != records["bad"].seeds
    (line,) = [s for s in out.splitlines() if s.startswith("python -m pytest")]
    assert line == "python -m pytest test_tier.py::test_fails --seed 5"
    again, other = run(5, "-k", "fails"), run(6)[1]
    assert again[1]["bad"].seeds == records["bad"].seeds != other["bad"].seeds
