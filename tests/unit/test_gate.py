"""The gate: green in the green world, and red with the right words for every way to leave it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date

import pytest
import samples
from k3_audit.audit.evidence import Lock, Reference
from k3_audit.audit.findings import Verdict
from k3_audit.audit.gate import GateResult, Problem, Row, gate
from k3_audit.audit.policy import Policy, PolicyError, Suppression
from samples import SKELETON, TODAY, UNDECIDED, UNORDERED, World, artifact, entry, green, record, report

pytestmark = pytest.mark.unit

LONGCTX = 'python golden/regenerate.py --tier longctx --kernel attn_res --arch sm_90a --reason "..."'
SYNC = LONGCTX.replace("longctx", "sync")
RELOCK = 'python golden/regenerate.py --kernel attn_res --arch sm_90a --reason "..."'


def row(result: GateResult, arch: str = "sm_90a") -> Row:
    return next(r for r in result.rows if r.arch == arch)


def kinds(result: GateResult) -> list[str]:
    return [p.kind for p in (*result.problems, *(p for r in result.rows for p in r.problems))]


def problem(result: GateResult, kind: str) -> Problem:
    return next(
        p for p in (*result.problems, *(p for r in result.rows for p in r.problems)) if p.kind == kind
    )


def relocked(world: World, **changes: object) -> World:
    """The world after its kernel was locked again, with the evidence that it had."""
    old = world.lock.entry("attn_res", "sm_90a")
    assert old is not None
    fields = {"sync_skeleton": world.skeleton, **changes}
    return replace(world, lock=world.lock.with_entry(entry(world.hopper, *old.evidence, **fields)))


def with_evidence(world: World, *evidence: object) -> World:
    return replace(world, lock=world.lock.with_entry(entry(world.hopper, *evidence)))


def test_the_green_world_is_green() -> None:
    result = green().judge()
    assert result.verdict == Verdict.CLEAN and kinds(result) == []
    hopper, blackwell = row(result), row(result, "sm_100a")
    assert hopper.evidence == (
        "longctx: 1 case on NVIDIA H200, 2026-11-29, sync: 1 case on NVIDIA H200, 2026-11-29"
    )
    assert blackwell.evidence == "static only"
    assert blackwell.notes == ("static only: no such GPU was available",)


def test_other_machine_code_needs_all_evidence_again() -> None:
    world = green()
    skeleton = (SKELETON[0], "barrier.cluster.arrive.relaxed", SKELETON[2])
    world = replace(
        world,
        hopper=replace(
            world.hopper, cubin=b"other", sources={"fused_backend/kernels/attn_res.py": "source-2"}
        ),
        tree=replace(world.tree, sources={"attn_res": {"fused_backend/kernels/attn_res.py": "source-2"}}),
        skeleton=skeleton,
    )
    result = world.judge()
    assert row(result).verdict == Verdict.FINDING
    assert [p.kind for p in row(result).problems] == [
        "code-changed",
        "evidence-missing:longctx",
        "evidence-missing:sync",
    ]
    detail = problem(result, "code-changed").detail
    assert "source changed: fused_backend/kernels/attn_res.py" in detail
    assert "  -barrier.cluster.arrive.release" in detail and "  +barrier.cluster.arrive.relaxed" in detail
    missing = problem(result, "evidence-missing:longctx")
    assert missing.commands == (LONGCTX,) and problem(result, "evidence-missing:sync").commands == (SYNC,)
    old, new = artifact().cubin_sha256[:12], world.hopper.cubin_sha256[:12]
    assert missing.detail == (f"case prompt-32k: measured on cubin {old}, this one is {new}",)
    # Locking again alone does not help: the evidence is still that of other machine code.
    again = row(relocked(world).judge())
    assert [p.kind for p in again.problems] == ["evidence-missing:longctx", "evidence-missing:sync"]


def test_a_toolkit_that_changes_the_code_is_named() -> None:
    world = green()
    toolkit = {**world.hopper.toolkit, "ptxas": "13.6.1"}
    changed = replace(world, hopper=replace(world.hopper, cubin=b"other", toolkit=toolkit)).judge()
    assert "toolkit changed: ptxas 13.5.37 -> 13.6.1" in problem(changed, "code-changed").detail
    same = replace(world, hopper=replace(world.hopper, toolkit=toolkit)).judge()
    assert same.verdict == Verdict.CLEAN
    assert row(same).notes == ("built with another toolkit, same machine code: ptxas 13.5.37 -> 13.6.1",)


def test_a_source_change_without_a_code_change_needs_no_gpu() -> None:
    sources = {"fused_backend/kernels/attn_res.py": "a comment more"}
    world = green()
    world = replace(
        world,
        hopper=replace(world.hopper, sources=sources),
        tree=replace(world.tree, sources={"attn_res": sources}),
    )
    result = world.judge()
    assert [p.kind for p in row(result).problems] == ["source-changed"]
    found = problem(result, "source-changed")
    assert "no GPU" in found.message and found.commands == (RELOCK,)
    after = relocked(world).judge()
    assert [p.kind for p in row(after).problems] == [] and row(after).verdict == Verdict.CLEAN


def test_a_build_of_older_sources_is_not_judged_as_the_current_one() -> None:
    world = green()
    tree = replace(world.tree, sources={"attn_res": {"fused_backend/kernels/attn_res.py": "edited"}})
    result = replace(world, tree=tree).judge()
    assert row(result).verdict == Verdict.ERROR
    assert problem(result, "build-stale").commands == ("k3-audit build",)


SPOILT: dict[str, tuple[Callable[[World], World], str]] = {
    "none": (lambda w: with_evidence(w, record("sync", w.hopper)), "never measured"),
    "failed": (
        lambda w: with_evidence(
            w,
            record("longctx", w.hopper, verdict=Verdict.FINDING, detail="NaN at 7"),
            record("sync", w.hopper),
        ),
        "case prompt-32k: measured, and it failed (finding): NaN at 7",
    ),
    "cpu": (
        lambda w: with_evidence(w, record("longctx", w.hopper, gpu=""), record("sync", w.hopper)),
        "case prompt-32k: measured by the CPU form of the tier, which does not run the machine code",
    ),
    "launch": (
        lambda w: with_evidence(w, record("longctx", w.hopper, launch_sha256="0"), record("sync", w.hopper)),
        "case prompt-32k: measured with another launch shape",
    ),
    "reference": (
        lambda w: with_evidence(
            w, record("longctx", w.hopper, reference_sha256="r0"), record("sync", w.hopper)
        ),
        "case prompt-32k: measured against a reference that computes other numbers",
    ),
    "case": (
        lambda w: replace(w, policy=replace(w.policy, cases={("attn_res", "longctx"): ("prompt-128k",)})),
        "case prompt-128k: never measured",
    ),
    "inconclusive": (
        lambda w: with_evidence(
            w, record("longctx", w.hopper, verdict=Verdict.INCONCLUSIVE), record("sync", w.hopper)
        ),
        "case prompt-32k: measured, and it failed (inconclusive)",
    ),
}


@pytest.mark.parametrize("way", SPOILT)
def test_evidence_that_does_not_count_is_missing(way: str) -> None:
    spoil, reason = SPOILT[way]
    result = spoil(green()).judge()
    assert kinds(result) == ["evidence-missing:longctx"]
    found = problem(result, "evidence-missing:longctx")
    assert found.detail == (reason,) and found.commands == (LONGCTX,)
    assert row(result).evidence.startswith("longctx: missing, sync: 1 case")


def test_a_reference_that_moved_with_a_reason_keeps_evidence_only_if_the_values_stayed() -> None:
    world = green()
    tree = replace(world.tree, reference="ref-2")
    moved = replace(world, tree=tree)
    assert kinds(moved.judge()) == ["reference-moved"]
    same = replace(moved, lock=world.lock.with_reference(Reference("ref-2", "values-1", "renamed", "d")))
    assert kinds(same.judge()) == []
    other = replace(
        moved,
        tree=replace(tree, expected="values-2"),
        lock=world.lock.with_reference(Reference("ref-2", "values-2", "another epsilon", "d")),
    )
    assert kinds(other.judge()) == ["evidence-missing:longctx"]  # sync does not compare with the reference
    assert kinds(replace(world, tree=replace(world.tree, expected="edited")).judge()) == ["expected-moved"]
    assert "reference-unlocked" in kinds(replace(world, lock=Lock()).judge())


def test_a_measurement_by_older_tier_code_counts_and_is_noted() -> None:
    world = green()
    result = replace(world, tree=replace(world.tree, tiers={**world.tree.tiers, "sync": "newer"})).judge()
    assert result.verdict == Verdict.CLEAN
    assert row(result).notes == ("sync was measured with another version of the tier's own code",)


def test_findings_and_open_questions_of_the_audit_are_kept_apart() -> None:
    found = replace(green(), findings=(UNORDERED, UNDECIDED)).judge()
    assert row(found).audit == Verdict.FINDING and kinds(found) == ["audit-finding"]
    text = "\n".join(problem(found, "audit-finding").detail)
    assert "R15 finding at PTX line 3 (attn_res.py:88)" in text and "move the load below the wait" in text
    open_ = replace(green(), findings=(UNDECIDED,)).judge()
    assert row(open_).audit == Verdict.INCONCLUSIVE and open_.verdict == Verdict.INCONCLUSIVE
    assert "a contract that names the flag" in "\n".join(problem(open_, "audit-inconclusive").detail)


def test_no_report_and_unknown_instructions_are_never_clean() -> None:
    world, made = green(), artifact()
    nothing = gate([made], world.lock, {}, world.policy, world.tree, TODAY)
    assert row(nothing).audit == Verdict.ERROR
    unknown = replace(report(), unknown=("line 3: new.instruction",))
    result = gate([made], world.lock, {("attn_res", "sm_90a"): [unknown]}, world.policy, world.tree, TODAY)
    assert row(result).audit == Verdict.INCONCLUSIVE


def test_suppressions_are_listed_and_end() -> None:
    def judged(**changes: object) -> GateResult:
        fields = {
            "rule": "R15",
            "kernel": "attn_res",
            "fingerprint": UNORDERED.fingerprint,
            "reason": "measured to be harmless",
            "expires": date(2027, 1, 1),
            **changes,
        }
        policy = replace(samples.POLICY, suppressions=(Suppression(**fields),))  # type: ignore[arg-type]
        return replace(green(), findings=(UNORDERED,), policy=policy).judge()

    accepted = judged()
    assert accepted.verdict == Verdict.CLEAN
    assert accepted.suppressions == (
        f"attn_res: R15 {UNORDERED.fingerprint} until 2027-01-01: measured to be harmless",
    )
    for changes, word in (
        ({"expires": TODAY}, "expired"),
        ({"fingerprint": "0" * 16}, "matches nothing"),
        ({"rule": "R16"}, "matches nothing"),
        ({"kernel": "kda"}, "matches nothing"),
    ):
        result = judged(**changes)
        assert kinds(result) == ["audit-finding"] and result.suppressions[0].endswith(f"({word})")


def test_what_is_new_gone_or_not_built_is_said() -> None:
    world = green()
    new = replace(world, lock=replace(world.lock, entries=())).judge()
    assert kinds(new).count("unlocked") == 2 and "evidence-missing:sync" in kinds(new)
    not_built = gate([], world.lock, {}, world.policy, world.tree, TODAY)
    assert kinds(not_built) == ["not-built", "not-built"] and not_built.verdict == Verdict.ERROR
    gone = gate([], world.lock, {}, world.policy, replace(world.tree, sources={}), TODAY)
    assert kinds(gone) == ["gone", "gone"] and gone.verdict == Verdict.FINDING


def test_a_changed_launch_or_reading_of_the_same_code_is_red() -> None:
    world = green()
    contract = world.hopper.contract
    hopper = replace(world.hopper, contract=replace(contract, launch=replace(contract.launch, pdl=False)))
    launch = replace(world, hopper=hopper).judge()
    assert kinds(launch) == ["launch-changed", "evidence-missing:longctx", "evidence-missing:sync"]
    reading = replace(world, skeleton=SKELETON[:2]).judge()
    assert (
        kinds(reading) == ["skeleton-changed"] and "-st.global" in problem(reading, "skeleton-changed").detail
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "missing field 'architectures'"),
        ("[architectures.sm_90a]\nrequired = ['sync']", "requires tier 'sync', which [tiers] does not name"),
        ("[architectures.sm_90a]\nrequired = []", "missing field 'static_only'"),
        ("architectures = 3", "policy.toml"),
        ("[architectures]\n[[suppress]]\nrule = 'R1'", "missing"),
        (
            "[architectures]\n[[suppress]]\nrule='R1'\nkernel='k'\nfingerprint='f'\nreason='r'\nexpires='soon'",
            "must be a date",
        ),
        ("[", "policy.toml"),
    ],
)
def test_a_broken_policy_is_explained_in_one_line(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_the_shipped_policy_demands_gpu_evidence_on_hopper_and_says_why_not_elsewhere(pytestconfig) -> None:
    policy = Policy.load(pytestconfig.rootpath / "golden" / "policy.toml")
    assert policy.required["sm_90a"] == ("longctx", "sync")
    assert set(policy.static_only) == {"sm_100a", "sm_103a"}
    assert policy.tiers["longctx"].reference
