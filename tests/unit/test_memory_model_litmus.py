"""The memory model against its litmus tests: verdicts derived by hand, two engines that must agree."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from k3_audit.audit.findings import Verdict
from k3_audit.audit.memory_model import axioms, check, enumerator, litmus, solver
from k3_audit.audit.memory_model.check import Engine
from k3_audit.audit.memory_model.graph import Graph
from k3_audit.audit.memory_model.program import Program

pytestmark = pytest.mark.unit

CORPUS = Path(__file__).parents[1] / "corpus" / "litmus"
FILES = sorted(CORPUS.glob("*.litmus"))


def read(name: str) -> Program:
    return litmus.parse((CORPUS / f"{name}.litmus").read_text())


def allowed(program: Program, engine: Engine = Engine.ENUMERATE) -> bool:
    return check.check(program, engine).allowed


def test_the_corpus_is_large_and_two_sided() -> None:
    notes = [litmus.parse(f.read_text()).note for f in FILES]
    assert len(FILES) >= 60
    assert all(n.startswith(("allowed: ", "forbidden: ")) for n in notes)
    assert min(sum(n.startswith(w) for n in notes) for w in ("allowed", "forbidden")) > 60


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_verdict(file: Path) -> None:
    program = litmus.parse(file.read_text())
    result = check.check(program, Engine.ENUMERATE)
    assert result.allowed == result.expected, f"{program.note}\n{result.outcomes}"
    assert result.verdict == Verdict.CLEAN
    assert not result.bounds.truncated
    assert litmus.parse(litmus.text(program)) == program


def test_all_verdicts_are_fast() -> None:
    start = time.perf_counter()
    for file in FILES:
        check.check(litmus.parse(file.read_text()), Engine.ENUMERATE)
    assert time.perf_counter() - start < 30  # the bar of the project, on two cores; about 2 s are needed


@pytest.mark.skipif(not solver.available(), reason="needs z3-solver")
@pytest.mark.parametrize("part", range(8))
def test_engines_agree(part: int) -> None:
    for file in FILES[part::8]:
        program = litmus.parse(file.read_text())
        first, second = (check.check(program, e) for e in (Engine.ENUMERATE, Engine.SOLVE))
        assert first.outcomes == second.outcomes, file.stem
        assert first.faults == second.faults, file.stem


# Teeth: each axiom forbids something that nothing else forbids.


def _initial_only(g: Graph, _: list[int]) -> list[int]:
    """A coherence order that relates nothing but the initial writes."""
    return [
        sum(1 << b for b in g.writes if g.is_initial(a) and a != b and g.overlaps(a, b)) for a in range(g.n)
    ]


@pytest.mark.parametrize(
    ("axiom", "name"),
    [
        ("no_thin_air", "LB+ctrl"),
        ("atomicity", "RMW+gpu"),
        ("atomicity", "RMW+relaxed-store-lost"),
        ("causality", "MP+rel+acq"),
        ("causality", "WRC+rel+acq"),
    ],
)
def test_without_its_axiom_the_outcome_is_allowed(
    axiom: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not allowed(read(name))
    monkeypatch.setattr(axioms, axiom, lambda *_: True)
    assert allowed(read(name))


def test_without_coherence_a_store_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumerator, "forced_coherence", _initial_only)
    monkeypatch.setattr(axioms, "coherence", lambda *_: True)
    monkeypatch.setattr(axioms, "sc_per_location", lambda *_: True)
    assert allowed(read("CoWW"))


def test_without_fence_sc_store_buffering_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "fence_sc_pairs", [])
    assert allowed(read("SB+sc"))
    assert allowed(read("IRIW+sc"))


def test_without_sc_per_location_a_store_may_go_behind_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not allowed(read("CoRW2"))
    monkeypatch.setattr(axioms, "coherence", lambda *_: True)
    monkeypatch.setattr(enumerator, "forced_coherence", _initial_only)
    assert not allowed(read("CoRW2"))  # Coherence forbids it too
    monkeypatch.setattr(axioms, "sc_per_location", lambda *_: True)
    assert allowed(read("CoRW2"))


# Teeth: planted defects turn forbidden into allowed.

DEFECTS = [
    ("MP+fences", "fence.acq_rel.gpu ", "                  ", "missing fence"),
    ("MP+fences", "st.relaxed.gpu y", "st.weak y", "weak flag"),
    ("MP+fences", "fence.acq_rel.gpu", "fence.acq_rel.cta", "narrow fence"),
    ("MP+rel+acq", "st.release.gpu", "st.relaxed.gpu", "relaxed flag"),
    ("MP+rel+acq", "ld.acquire.gpu", "ld.relaxed.gpu", "relaxed poll"),
    ("MP+rel+acq", "ld.acquire.gpu", "ld.acquire.cta", "narrow scope"),
    ("MP+sys-other-gpu", ".sys", ".gpu", "scope without the peer GPU"),
    ("MP+cluster-same-cluster", "cta 1,cluster 0", "cta 1,cluster 1", "another cluster"),
    ("MP+atom-acquire", "atom.relaxed.gpu.add r0, y, 10", "red.relaxed.gpu.add y, 10", "reduction as a read"),
    ("SB+sc", "fence.sc", "fence.acq_rel", "acq_rel where sc is needed"),
    ("RS+rmw", "atom.relaxed.gpu", "atom.relaxed.cta", "broken release sequence"),
    ("RMW+gpu", "relaxed.gpu", "relaxed.cta", "atomics without a common scope"),
    ("ISA2+scopes", "st.release.gpu", "st.release.cta", "one narrow link of a chain"),
    ("Alias+fence-producer", "fence.proxy.alias", "", "missing alias fence"),
    ("Surface+texture", "fence.proxy.surface", "fence.proxy.texture", "fence of the wrong proxy"),
    ("Async+fence", "fence.proxy.async", "", "missing proxy fence"),
    ("Async+fence-issuer", "fence.proxy.async", "fence.proxy.alias", "fence of the wrong proxy"),
    ("Group+wait", "wait_group", "wait_group.read", "wait for the source only"),
    ("Group+wait", "cp.async.bulk.commit_group", "", "missing commit"),
    ("Group+source-reuse", "cp.async.bulk.wait_group.read 0", "", "early reuse of the source"),
    ("Bar+sync", "bar.sync 0", "bar.sync 1", "another barrier", 1),
    ("Bar+relay", "fence.acq_rel.gpu", "", "missing fence after the barrier"),
    (
        "Cluster+barrier",
        "barrier.cluster.arrive.release",
        "barrier.cluster.arrive.relaxed",
        "relaxed arrival",
    ),
    ("Cluster+relaxed+fence", "fence.release.cluster", "fence.release.cta", "narrow fence"),
    ("Mbar+remote-cluster", "arrive.release.cluster", "arrive.release.cta", "default scope of an arrival"),
    ("Mbar+remote-cluster", "acquire.cluster", "acquire.cta", "default scope of a wait"),
    ("Mbar+arrive", "arrive.release", "arrive.relaxed", "relaxed arrival"),
    ("Mbar+two-arrivals", "mbarrier 2", "mbarrier 1", "count too small"),
    ("Mbar+st.async-two", "b, 8", "b, 4", "too few bytes expected"),
    ("Mbar+ring", "acquire.cta full, 1", "acquire.cta full, 0", "phase slip"),
    ("Mbar+ring", "mbarrier.try_wait.parity.acquire.cta empty, 0", "", "early reuse"),
    ("Grid+pdl-wait", "griddepcontrol.wait", "", "missing dependency wait"),
    ("Grid+pdl-chain", "griddepcontrol.wait", "", "a grid of the chain that does not wait", 1),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d[0]}: {d[3]}")
def test_a_planted_defect_is_seen(defect: tuple) -> None:
    name, old, new, _, *count = defect
    text = (CORPUS / f"{name}.litmus").read_text()
    assert old in text
    assert not allowed(litmus.parse(text))
    assert allowed(litmus.parse(text.replace(old, new, *count)))


# Swapped neighbours: order matters.

SWAPS = [
    ("MP+rel+acq", 0, 0),  # flag before data
    ("MP+rel+acq", 1, 0),  # data read before the flag
    ("Mbar+arrive", 0, 0),  # arrival before the store
    ("Cluster+barrier", 0, 0),  # arrival before the store
    ("Grid+pdl-wait", 1, 0),  # read before the dependency wait
    ("Async+fence", 0, 0),  # fence before the store
]


@pytest.mark.parametrize("swap", SWAPS, ids=str)
def test_a_swap_is_seen(swap: tuple[str, int, int]) -> None:
    name, t, k = swap
    program = read(name)
    body = list(program.threads[t].body)
    body[k], body[k + 1] = body[k + 1], body[k]
    threads = list(program.threads)
    threads[t] = replace(threads[t], body=tuple(body))
    assert not allowed(program)
    assert allowed(replace(program, threads=tuple(threads)))


# What a verdict says beside yes and no.


def test_an_mbarrier_used_before_its_initialisation_is_a_finding() -> None:
    text = (CORPUS / "Mbar+init-cluster.litmus").read_text()
    broken = litmus.parse(text.replace("fence.mbarrier_init.release.cluster", ""))
    result = check.check(broken)
    assert any("st.async" in f for f in result.faults)
    assert result.verdict == Verdict.FINDING


def test_a_deadlock_is_inconclusive() -> None:
    text = (
        "PTX deadlock\n{}\nP0@cta 0,gpu 0 | P1@cta 0,gpu 0 ;\nbar.sync 0 | bar.sync 1 ;\n"
        "bar.sync 1 | bar.sync 0 ;\nst.weak x, 1 | ld.weak r0, x ;\nexists (P1:r0 == 0)"
    )
    result = check.check(litmus.parse(text))
    assert not result.completes and not result.allowed
    assert result.verdict == Verdict.INCONCLUSIVE


def test_a_barrier_with_a_count_leaves_late_comers_behind() -> None:
    text = (
        "PTX late\n{}\nP0@cta 0,gpu 0 | P1@cta 0,gpu 0 | P2@cta 0,gpu 0 ;\n"
        "bar.sync 0, 2 | bar.sync 0, 2 | bar.sync 0, 2 ;\nmov r0, 1 | mov r0, 1 | mov r0, 1 ;\n"
        "exists (P0:r0 == 1 /\\ P1:r0 == 1 /\\ P2:r0 == 1)"
    )
    result = check.check(litmus.parse(text))
    assert not result.allowed
    assert sorted(sum(v is None for _, v in o.values) for o in result.outcomes) == [1, 1, 1]


def test_loops_that_work_are_bounded_and_say_so() -> None:
    text = (
        "PTX loop\n{}\nP0@cta 0,gpu 0 ;\nmov r0, 0 ;\nL: ;\nadd r0, r0, 1 ;\nst.weak x, r0 ;\nld.weak r1, y ;\n"
        "beq r1, 0, L ;\nexists (x == 9)"
    )
    few, many = (check.check(litmus.parse(text), unroll=n) for n in (2, 4))
    assert few.bounds.truncated == ("P0",) and not few.completes
    assert "cut after 2 rounds" in str(few.bounds) and "cut after 4 rounds" in str(many.bounds)


def test_a_cut_loop_never_proves() -> None:
    text = (
        '"forbidden: never 9"\n{}\nP0@cta 0,gpu 0 | P1@cta 0,gpu 0 ;\nL: | st.relaxed.gpu y, 1 ;\n'
        "atom.add r0, x, 1 | ;\nld.relaxed.gpu r1, y | ;\nbeq r1, 0, L | ;\nexists (P0:r0 == 9)"
    )
    result = check.check(litmus.parse("PTX loop\n" + text))
    assert result.bounds.truncated and result.completes and not result.allowed
    assert result.verdict == Verdict.INCONCLUSIVE


def test_too_large_is_said_in_one_line() -> None:
    with pytest.raises(check.ModelError, match="use the solver"):
        check.check(read("IRIW+relaxed"), Engine.ENUMERATE, steps=10)
    if solver.available():
        assert check.check(read("IRIW+relaxed"), Engine.AUTO, steps=10).engine == Engine.SOLVE
