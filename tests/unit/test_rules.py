"""Every rule: its failing snippet speaks, its passing snippet is silent, every mutation flips it, ptxas takes them."""

from __future__ import annotations

import re

import pytest
from k3_audit.artifact.contract import Contract
from k3_audit.artifact.toolchain import assemble
from k3_audit.audit.findings import Finding, Severity, Verdict
from k3_audit.audit.rules.base import Rule, rules
from k3_audit.audit.rules.r25_sass_conformance import subject_of
from k3_audit.audit.scan import scan_ptx

pytestmark = pytest.mark.unit

RULES = list(rules().values())
MUTATIONS = [(rule, m) for rule in RULES for m in rule.mutations]


def findings(rule: Rule, text: str) -> list[Finding]:
    if rule.language == "sass":
        return list(rule.check(subject_of(text)))
    if rule.language != "ptx":
        return list(rule.check(text))
    contract = Contract.from_dict(rule.contract) if rule.contract else None
    (report,) = scan_ptx(text, "snippet", contract)
    return list(report.findings)


def arch_of(text: str) -> str:
    found = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    assert found
    return found[1]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)
def test_failing_snippet(rule):
    found = [f for f in findings(rule, rule.failing) if f.rule == rule.id]
    assert found
    for f in found:
        assert f.sites and f.message
        assert f.verdict is Verdict.FINDING or f.settle
        assert f.verdict is Verdict.INCONCLUSIVE or (f.missing and f.fix)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)
def test_passing_snippet_is_clean_under_all_rules(rule):
    assert [f for f in findings(rule, rule.passing) if f.severity is not Severity.NOTE] == []


@pytest.mark.parametrize(("rule", "mutation"), MUTATIONS, ids=[f"{r.id}: {m.name}" for r, m in MUTATIONS])
def test_mutation_is_caught(rule, mutation):
    assert rule.id in {f.rule for f in findings(rule, mutation.apply(rule.passing))}


@pytest.mark.parametrize(
    "rule", [r for r in RULES if r.language == "ptx" and r.id != "R00"], ids=lambda r: r.id
)
def test_ptxas_accepts_the_snippets(rule):
    for text in (rule.failing, rule.passing):
        assert assemble(text, arch_of(text))


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)
def test_rule_explains_itself(rule):
    for text in (rule.title, rule.meaning, rule.looks_for, rule.isa_section, rule.fix):
        assert text.strip() and "\n" not in text
    assert len(rule.meaning) > 200 and rule.mutations
    assert rule.failing != rule.passing
