"""Teeth: what counts as a kill, what an argument may excuse, and that nothing survives without one."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache

import pytest
from k3_audit.artifact import Store
from k3_audit.audit import teeth
from k3_audit.audit.findings import Severity, Site
from k3_audit.audit.mutate import OPERATORS, mutants
from k3_audit.audit.report import teeth as report
from k3_audit.audit.rules.base import rules
from k3_audit.audit.teeth import ArgumentError, Arguments, Outcome, Program, Teeth, bite, bite_all, corpus
from k3_audit.audit.teeth_command import DOCUMENT
from k3_audit.fused_backend import build
from rich.console import Console
from test_corpus import ROOT

pytestmark = pytest.mark.unit

REPOSITORY = ROOT.parents[1]
ARGUMENTS = Arguments.load(ROOT / "survivors.toml")
PROGRAMS = list(corpus(ROOT))
STORE = next(p for p in PROGRAMS if p.name == "R01/bulk-store")


def outcome(
    result: str = "killed", name: str = "0" * 12, rules: tuple[str, ...] = ("R01",), **more: str
) -> Outcome:
    return Outcome("p", "drop-fence", 3, "fence;", "", "fence deleted", name, result, rules, **more)


# -- how much is killed -----------------------------------------------------------------------------------

# Measured with this corpus. Not all survivors are argued yet (docs/teeth.md lists them), so this is a ratchet: it may
# only rise, and an argument for a mutant that is killed is stale.
CORPUS_RATE, KERNEL_RATE = 0.846, 0.777


@cache
def bitten() -> Teeth:
    return Teeth(tuple(o for p in PROGRAMS for o in bite(p)), ARGUMENTS)


def test_the_corpus_loses_no_teeth():
    assert bitten().rate >= CORPUS_RATE and bitten().stale == []


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_our_kernels(arch):
    artifact = build.current("attn_res", arch, Store())
    found = bite(Program(f"attn_res {arch}", artifact.ptx, artifact.contract))
    assert len(found) > 20
    assert Teeth(tuple(found), ARGUMENTS).rate >= KERNEL_RATE


def holes(outcomes: list[Outcome]) -> list[str]:
    return [
        f"{o.program}:{o.line} {o.operator}: {o.what}" for o in Teeth(tuple(outcomes), ARGUMENTS).unargued
    ]


def test_our_sources():
    names = build.source_hashes("attn_res")
    sources = {n: (REPOSITORY / n).read_text() for n in names if n.endswith(".py")}
    found = bite(Program("attn_res", sources=tuple(sources.items())))
    assert {o.operator for o in found} == {"drop-clobber", "drop-side-effects"}
    assert holes(found) == []


@cache
def _all_names() -> frozenset[str]:
    artifact = build.build("attn_res", "sm_90a", Store())[0]
    texts = [(p.text, p.contract) for p in PROGRAMS] + [(artifact.ptx, artifact.contract)]
    return frozenset(m.fingerprint for text, contract in texts for m in mutants(text, contract))


def test_every_argument_is_about_a_mutant_that_exists():
    assert set(ARGUMENTS.by_fingerprint) <= _all_names()


def test_the_document_lists_every_argued_mutant():
    text = (REPOSITORY / "docs" / "teeth.md").read_text()
    missing = [name for name in ARGUMENTS.by_fingerprint if name not in text]
    assert not missing, f"run `{DOCUMENT}`"


# -- what counts ------------------------------------------------------------------------------------------


def test_an_auditor_without_rules_kills_nothing(monkeypatch):
    monkeypatch.setattr(teeth, "rules", dict)
    found = bite(STORE)
    assert found and {o.result for o in found} == {"survived"}
    assert Teeth(tuple(found)).rate == 0


def auditor(monkeypatch, check) -> None:
    """The auditor with one rule of ours instead of its own."""
    rule = replace(rules()["R00"], id="R99", check=check)
    monkeypatch.setattr(teeth, "rules", lambda: {"R99": rule})


def test_an_auditor_that_always_says_the_same_kills_nothing(monkeypatch):
    auditor(monkeypatch, lambda s: [s.finding("R99", Severity.ERROR, "wrong", [s.site(0, "here")])])
    assert {o.result for o in bite(STORE)} == {"survived"}


@pytest.mark.parametrize(("near", "result"), [(True, "killed"), (False, "elsewhere")])
def test_a_finding_counts_at_the_changed_place_only(monkeypatch, near, result):
    line = next(n for n, x in enumerate(STORE.text.split("\n"), 1) if "fence.proxy" in x) if near else 1

    def check(s):
        if not any("fence.proxy" in i.text for i in s.body):
            yield s.finding("R99", Severity.ERROR, "no fence", [Site(line, "x", "here")])

    auditor(monkeypatch, check)
    assert {o.operator: o.result for o in bite(STORE)}["drop-fence"] == result


@pytest.mark.parametrize("severity", list(Severity))
def test_a_note_is_no_kill(monkeypatch, severity):
    def check(s):
        if not any("fence.proxy" in i.text for i in s.body):
            yield s.finding("R99", severity, "no fence", [s.site(i, "here") for i in (0, len(s.body) - 1)])

    auditor(monkeypatch, check)
    expected = "noted" if severity is Severity.NOTE else "killed"
    assert {o.operator: o.result for o in bite(STORE)}["drop-fence"] == expected


def test_kills_name_their_rules():
    found = {o.operator: o for o in bite(STORE)}
    assert found["drop-fence"].result == "killed" and "R01" in found["drop-fence"].rules
    assert found["drop-barrier"].result == "killed" and "R02" in found["drop-barrier"].rules


def test_an_inconclusive_answer_is_no_kill():
    program = next(p for p in PROGRAMS if p.name == "R15/no-contract")
    found = [o for o in bite(program) if o.result == "inconclusive"]
    assert found and all(o.settle for o in found)
    assert Teeth(tuple(found)).rate == 0 and Teeth(tuple(found)).unargued == []


def test_parts_and_processes_give_the_same():
    whole = bite(STORE)
    assert sorted(o.fingerprint for n in range(3) for o in bite(STORE, n, 3)) == sorted(
        o.fingerprint for o in whole
    )
    said: list[str] = []
    assert sorted(map(str, bite_all([STORE], 2, said.append))) == sorted(map(str, whole))
    assert said == [STORE.name]


# -- counting ---------------------------------------------------------------------------------------------


def arguments(tmp_path, text: str) -> Arguments:
    file = tmp_path / "survivors.toml"
    file.write_text(text)
    return Arguments.load(file)


ARGUMENT = """
[[argument]]
kind = "{kind}"
reason = "the wait behind it covers what this one covered, so nothing is lost"
mutants = ["{name} p: fence deleted"]
"""


def test_an_equivalent_mutant_leaves_the_count_and_a_limit_stays(tmp_path):
    name = "a" * 12
    pair = (outcome(), outcome("survived", name, ()))
    assert Teeth(pair).rate == 0.5 and Teeth(pair).unargued == [pair[1]]
    for kind, rate in (("equivalent", 1.0), ("limit", 0.5)):
        argued = Teeth(pair, arguments(tmp_path, ARGUMENT.format(kind=kind, name=name)))
        assert argued.rate == rate and argued.unargued == [] and argued.stale == []


def test_an_argument_for_what_is_killed_is_stale(tmp_path):
    known = arguments(tmp_path, ARGUMENT.format(kind="limit", name="0" * 12))
    assert Teeth((outcome(),), known).stale == [outcome()]


def test_matrices():
    found = Teeth((outcome(), outcome(rules=("R01", "R02")), outcome("survived", rules=())))
    assert found.by_operator() == {"drop-fence": {"killed": 2, "survived": 1}}
    assert found.by_rule() == {"R01": {"drop-fence": 2}, "R02": {"drop-fence": 1}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "survivors.toml"),
        ("[[argument]]\nkind = 'limit'", "missing field 'reason'"),
        (ARGUMENT.format(kind="maybe", name="a" * 12), "neither equivalent nor limit"),
        (ARGUMENT.format(kind="limit", name="xyz"), "a fingerprint, once"),
        (ARGUMENT.format(kind="limit", name="a" * 12) * 2, "a fingerprint, once"),
        (
            ARGUMENT.format(kind="limit", name="a" * 12).replace("covers what this one covered, so", ""),
            "argues nothing",
        ),
        ("argument = 3", "survivors.toml"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, text, reason):
    with pytest.raises(ArgumentError, match=reason) as e:
        arguments(tmp_path, text)
    assert "\n" not in str(e.value)


# -- reports ----------------------------------------------------------------------------------------------


def test_reports_hold_every_survivor_and_its_argument(tmp_path):
    known = arguments(tmp_path, ARGUMENT.format(kind="limit", name="b" * 12))
    found = Teeth((outcome(), outcome("survived", "b" * 12, ()), outcome("noted", "c" * 12)), known)
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    report.terminal(console, found)
    for text in (console.export_text(), report.markdown(found, "command"), report.as_json(found)):
        assert "b" * 12 in text and "c" * 12 in text and "the wait behind it covers" in text
    document = json.loads(report.as_json(found))
    assert document["unargued"] == 1 and document["kill_rate"] == pytest.approx(1 / 3, abs=1e-4)
    assert [m["argued"] for m in document["mutants"]] == ["", "limit", ""]


def test_the_document_explains_every_operator_it_counts():
    text = report.markdown(Teeth(tuple(bite(STORE))), "command")
    for operator in {o.operator for o in bite(STORE)} & set(OPERATORS):
        assert f"- `{operator}`: " in text
