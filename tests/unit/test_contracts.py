"""Contracts beside foreign code: drafts, open questions, and findings that somebody has accepted."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from k3_audit.artifact.contract import Contract, Role
from k3_audit.audit import cli, contracts, suppress
from k3_audit.audit.contract_command import several
from k3_audit.audit.contract_draft import draft
from k3_audit.audit.contracts import ContractError
from k3_audit.audit.findings import ExitCode, Verdict
from k3_audit.audit.policy import Policy
from k3_audit.audit.ptx.parser import parse
from k3_audit.audit.report import render_scan
from k3_audit.audit.report import terminal as terminal_report
from k3_audit.audit.rules.base import rules, snippet
from k3_audit.audit.scan import scan_ptx
from k3_audit.audit.subject import Subject
from rich.console import Console
from samples import UNDECIDED, UNORDERED, report

pytestmark = pytest.mark.unit

TODAY = date(2026, 11, 30)

# A dependent grid: weights early, the previous grid's output late, a flag, state, an output, an unused pointer.
STEP = snippet(
    """
    ld.param.u64 %rd1, [weights];
    ld.param.u64 %rd2, [x];
    ld.param.u64 %rd3, [y];
    ld.param.u64 %rd4, [flag];
    ld.param.u64 %rd5, [state];
    ld.global.nc.f32 %f1, [%rd1];
    griddepcontrol.wait;
    ld.global.f32 %f2, [%rd2];
    ld.global.f32 %f3, [%rd5];
    add.f32 %f4, %f1, %f2;
    st.global.f32 [%rd5], %f4;
    WAIT:
    ld.acquire.gpu.global.b32 %r2, [%rd4];
    setp.eq.s32 %p1, %r2, 0;
    @%p1 bra WAIT;
    st.global.f32 [%rd3], %f4;
    """,
    params=", ".join(
        f".param .u64 .ptr .global .align 4 {n}" for n in ("weights", "x", "y", "flag", "state", "spare")
    )
    + ", .param .u32 n",
)


def drafted(text: str) -> str:
    module = parse(text)
    return draft(Subject(module, module.entries[0]), "kernel.ptx")


def confirmed(text: str) -> str:
    """A draft after a person has agreed with every guess."""
    import re

    text = re.sub(r'= "(true|false)\?"', r"= \1", text)
    text = text.replace('role = "?"', 'role = "scratch"').replace('"?"', '""')
    return (
        re.sub(r'= "(\w+)\?"', r'= "\1"', text)
        .replace('coresident_ctas = ""', "coresident_ctas = 8")
        .replace('cooperative = ""', "cooperative = true")
    )


# -- drafts -----------------------------------------------------------------------------------------------


def test_roles_are_guessed_from_accesses_and_marked_as_guesses():
    table = tomllib.loads(drafted(STEP))
    roles = {p["name"]: p.get("role") for p in table["params"]}
    assert roles == {
        "weights": "weight?",
        "x": "upstream?",
        "y": "output?",
        "flag": "flag?",
        "state": "state?",
        "spare": "?",
        "n": None,
    }
    assert {p["name"]: p.get("access") for p in table["params"]}["state"] == "rw"


def test_every_guess_says_why_and_what_to_check():
    text = drafted(STEP)
    for n, p in enumerate(tomllib.loads(text)["params"]):
        if "role" in p:
            above = text[: text.index(f'name = "{p["name"]}"')].rpartition("\n\n")[2].replace("\n# ", " ")
            assert f"Parameter {n}: " in above and "Check: " in above
    wait = next(n for n, line in enumerate(STEP.split("\n"), 1) if "griddepcontrol.wait" in line)
    assert f"griddepcontrol.wait at line {wait}" in text


def test_facts_of_the_launch_are_stated_and_the_rest_is_asked():
    launch = tomllib.loads(drafted(STEP))["launch"]
    assert launch["block"] == [128, 1, 1] and launch["cluster"] == [1, 1, 1]
    assert launch["pdl"] == "true?" and launch["coresident_ctas"] == "?"
    bare = tomllib.loads(
        drafted(STEP.replace(".reqntid 128, 1, 1\n", "").replace("griddepcontrol.wait;", ""))
    )
    assert bare["launch"]["block"] == "?" and bare["launch"]["pdl"] == "false?"


def test_handoffs_are_found():
    table = tomllib.loads(drafted(rules()["R06"].passing))
    by_via = {h["via"]: h for h in table["handoffs"]}
    assert by_via["mbarrier"]["scope"] == "cluster" and by_via["mbarrier"]["producer"] == "thread 0"
    assert "cluster_barrier" in by_via
    assert table["launch"]["cluster"] == [2, 1, 1]
    flags = [h for h in tomllib.loads(drafted(STEP))["handoffs"] if h["via"] == "flag"]
    assert [h["scope"] for h in flags] == ["gpu?"]


@pytest.mark.parametrize("rule", [r for r in rules().values() if r.language == "ptx"], ids=lambda r: r.id)
def test_every_draft_can_be_read_and_confirmed(rule):
    text = drafted(rule.passing)
    (promise,) = contracts.parse(text)
    assert promise.questions  # at least pdl
    (decided,) = contracts.parse(confirmed(text))
    assert not decided.questions
    assert len(decided.contract.params) == len(parse(rule.passing).entries[0].params)


def test_several_drafts_make_one_file():
    both = "\n".join(
        several(drafted(STEP.replace("entry kernel", f"entry {n}"))) for n in ("first", "second")
    )
    assert [p.contract.kernel for p in contracts.parse(both)] == ["first", "second"]
    assert [len(p.contract.params) for p in contracts.parse(both)] == [7, 7]


# -- open questions ---------------------------------------------------------------------------------------


def test_a_draft_is_never_clean_and_says_what_is_open():
    (found,) = contracts.scan(STEP, "kernel.ptx", contracts.parse(drafted(STEP), "kernel.contract.toml"))
    assert found.verdict is Verdict.INCONCLUSIVE
    asked = [f for f in found.findings if f.rule == contracts.RULE]
    assert any("parameter 1 (x)" in f.message and "guessed: upstream" in f.message for f in asked)
    assert all(f.settle and f.verdict is Verdict.INCONCLUSIVE for f in asked)
    assert len({f.fingerprint for f in asked}) == len(asked)


def test_a_guess_is_not_used():
    """Guessed to be a weight, x may be read early; as long as it is a guess the race stays undecided."""
    early = STEP.replace("    griddepcontrol.wait;\n    ld.global.f32 %f2", "    ld.global.f32 %f2").replace(
        "    ld.global.f32 %f3", "    griddepcontrol.wait;\n    ld.global.f32 %f3"
    )
    text = drafted(early)
    assert '"weight?"' in text[text.index('name = "x"') :][:60]

    def r15(toml: str) -> set[Verdict]:
        (found,) = contracts.scan(early, "kernel.ptx", contracts.parse(toml))
        return {f.verdict for f in found.findings if f.rule == "R15" and "(x)" in f.message}

    assert r15(text) == {Verdict.INCONCLUSIVE}
    assert r15(confirmed(text)) == set()
    assert r15(confirmed(text.replace('"weight?"', '"upstream?"'))) == {Verdict.FINDING}


def test_a_confirmed_draft_sharpens_the_verdict():
    (without,) = scan_ptx(STEP)
    (with_contract,) = contracts.scan(STEP, "kernel.ptx", contracts.parse(confirmed(drafted(STEP))))
    assert without.verdict is Verdict.INCONCLUSIVE
    assert with_contract.verdict is Verdict.CLEAN, with_contract.findings


def test_a_contract_of_our_own_form_has_no_questions():
    data = {
        "kernel": "k",
        "params": [{"name": "x", "dtype": "f32", "role": "weight"}],
        "launch": {"block": [1, 1, 1]},
    }
    toml = 'kernel = "k"\nlaunch = {block = [1, 1, 1]}\nparams = [{name = "x", dtype = "f32", role = "weight"}]\n'
    (promise,) = contracts.parse(toml)
    assert promise.contract == Contract.from_dict(data) and promise.contract.params[0].role is Role.WEIGHT
    assert promise.questions == ()


def test_contracts_are_chosen_by_name():
    toml = "\n".join(
        f'[[contract]]\nkernel = "{n}"\nlaunch = {{block = [1, 1, 1]}}' for n in ("step", "step_2")
    )
    known = contracts.parse(toml)
    assert contracts.choose(known, "step_2").contract.kernel == "step_2"
    assert contracts.choose(known, "_Z4stepPf").contract.kernel == "step"
    assert contracts.choose(known, "other") is None and contracts.choose(known, "other", only=True) is None
    assert contracts.choose(known[:1], "other", only=True) is known[0]
    assert [p.contract.kernel for p in contracts.unused(known, ["a_step_b"])] == ["step_2"]


def test_the_file_beside_the_code(tmp_path):
    (tmp_path / "step.contract.toml").write_text(drafted(STEP))
    assert [p.contract.kernel for p in contracts.beside(tmp_path / "step.ptx")] == ["kernel"]
    assert contracts.beside(tmp_path / "other.ptx") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kernel = ", "Invalid value"),
        ("launch = {block = [1, 1, 1]}", "kernel must be"),
        ('kernel = "k"', "launch is missing"),
        ('kernel = "k"\nlaunch = {block = [1, 1, 1], grid = "?"}', "launch.grid has no reading"),
        (
            'kernel = "k"\nlaunch = {block = [1, 1, 1]}\nparams = [{name = "x", dtype = "f", role = "wight"}]',
            "wight",
        ),
        ('kernel = "k"\nlaunch = 3', "not a contract"),
        ('contract = "k"', "not a contract"),
    ],
)
def test_bad_contracts_are_one_line(text, reason):
    with pytest.raises(ContractError, match=reason) as e:
        contracts.parse(text, "x.contract.toml")
    assert str(e.value).startswith("x.contract.toml: ") and "\n" not in str(e.value)


def test_missing_file_is_one_line(tmp_path):
    with pytest.raises(ContractError, match="No such file"):
        contracts.read(tmp_path / "none.toml")


# -- suppressions -----------------------------------------------------------------------------------------


def accepted(finding=UNORDERED, kernel: str = "attn_res", expires: str = "2027-01-31") -> str:
    return (
        f'[[suppress]]\nrule = "{finding.rule}"\nkernel = "{kernel}"\nfingerprint = "{finding.fingerprint}"\n'
        f'reason = "measured, and never seen"\nexpires = {expires}\n'
    )


def taken(tmp_path: Path, text: str, *findings, today: date = TODAY):
    file = tmp_path / "accepted.toml"
    file.write_text(text)
    (found,), idle = suppress.suppress([report(*findings)], suppress.load(file), today)
    return found, idle


def test_an_accepted_finding_does_not_count_and_stays_in_the_report(tmp_path):
    found, idle = taken(tmp_path, accepted(), UNORDERED)
    assert found.verdict is Verdict.CLEAN and found.findings == () and idle == []
    ((finding, why),) = found.suppressed
    assert finding is UNORDERED and "measured, and never seen" in why and "2027-01-31" in why


def test_what_is_not_accepted_still_counts(tmp_path):
    found, _ = taken(tmp_path, accepted(), UNORDERED, UNDECIDED)
    assert found.verdict is Verdict.INCONCLUSIVE and found.findings == (UNDECIDED,)
    for text in (accepted(UNDECIDED), accepted(kernel="other")):
        found, idle = taken(tmp_path, text, UNORDERED)
        assert found.verdict is Verdict.FINDING and not found.suppressed and "matches nothing" in idle[0]


def test_a_suppression_ends(tmp_path):
    found, idle = taken(tmp_path, accepted(expires="2026-11-30"), UNORDERED)
    assert found.verdict is Verdict.FINDING and "expired" in idle[0]


def test_unread_instructions_are_not_excused(tmp_path):
    file = tmp_path / "accepted.toml"
    file.write_text(accepted())
    unread = replace(report(UNORDERED), unknown=("line 3: frobnicate",))
    (found,), _ = suppress.suppress([unread], suppress.load(file), TODAY)
    assert found.verdict is Verdict.INCONCLUSIVE


def test_every_report_lists_it(tmp_path):
    found, _ = taken(tmp_path, accepted(), UNORDERED)
    for form in ("json", "sarif", "junit", "html"):
        assert "measured, and never seen" in render_scan(form, [found], {})
    result = json.loads(render_scan("sarif", [found], {}))["runs"][0]["results"][0]
    assert result["suppressions"] == [{"kind": "external", "justification": found.suppressed[0][1]}]
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    terminal_report.scan(console, [found])
    assert "measured, and never seen" in console.export_text()


def test_json_with_suppressions_fits_its_schema(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(contracts.__file__).parent / "report" / "scan.schema.json").read_text())
    found, _ = taken(tmp_path, accepted(), UNORDERED)
    jsonschema.validate(json.loads(render_scan("json", [found], {})), schema)


def test_a_policy_and_a_file_of_its_own_read_the_same(tmp_path):
    file = tmp_path / "accepted.toml"
    file.write_text(accepted())
    policy = Policy.from_dict({"architectures": {}, **tomllib.loads(accepted())})
    assert policy.suppressions == suppress.load(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no .*suppress"),
        ("[[suppress]]\nrule = 'R1'", "lacks 'kernel'"),
        (accepted(expires='"2027-01-31"'), "must be a date"),
        (accepted().replace("measured, and never seen", " "), "reason is empty"),
        ("[", "accepted.toml"),
        ("suppress = 3", "accepted.toml"),
    ],
)
def test_bad_suppressions_are_one_line(tmp_path, text, reason):
    file = tmp_path / "accepted.toml"
    file.write_text(text)
    with pytest.raises(suppress.SuppressError, match=reason) as e:
        suppress.load(file)
    assert "\n" not in str(e.value)


# -- the command line -------------------------------------------------------------------------------------


def k3(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.run([str(a) for a in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def ptx(tmp_path) -> Path:
    file = tmp_path / "step.ptx"
    file.write_text(STEP)
    return file


def test_draft_confirm_scan(ptx, capsys):
    """From code without a contract to a clean verdict, by the commands alone."""
    beside = ptx.with_name("step.contract.toml")
    assert k3(capsys, "scan", ptx)[0] == ExitCode.INCONCLUSIVE
    assert k3(capsys, "contract", "--infer", ptx, "-o", beside)[0] == ExitCode.CLEAN
    code, out, _ = k3(capsys, "contract", beside)
    assert code == ExitCode.INCONCLUSIVE and "the role of parameter 1 (x) is open (guessed: upstream)" in out
    code, out, _ = k3(capsys, "scan", ptx, "--format", "json")
    assert code == ExitCode.INCONCLUSIVE
    assert "contract" in {f["rule"] for f in json.loads(out)["kernels"][0]["findings"]}
    beside.write_text(confirmed(beside.read_text()))
    assert k3(capsys, "contract", beside)[0] == ExitCode.CLEAN
    assert k3(capsys, "scan", ptx)[0] == ExitCode.CLEAN


def test_suppress_on_the_command_line(ptx, tmp_path, capsys):
    _, out, _ = k3(capsys, "scan", ptx, "--format", "json")
    found = json.loads(out)["kernels"][0]["findings"]
    tables = "".join(
        f'[[suppress]]\nrule = "{f["rule"]}"\nkernel = "kernel"\nfingerprint = "{f["fingerprint"]}"\n'
        'reason = "the launch is in plain stream order"\nexpires = 9999-01-01\n'
        for f in found
    )
    accepted_file = tmp_path / "accepted.toml"
    accepted_file.write_text(tables)
    code, out, err = k3(capsys, "scan", ptx, "--suppress", accepted_file)
    assert code == ExitCode.CLEAN and out.count("the launch is in plain stream order") == len(found) > 0
    assert err == ""
    other = tmp_path / "other.ptx"
    other.write_text(rules()["R22"].passing)
    _, _, err = k3(capsys, "scan", other, "--suppress", accepted_file)
    assert err.count("(matches nothing)") == len(found)


def test_errors_are_one_line(ptx, tmp_path, capsys):
    beside = ptx.with_name("step.contract.toml")
    beside.write_text("kernel = 3\n")
    for arguments in (
        ("scan", ptx),
        ("contract", beside),
        ("contract", tmp_path / "none.toml"),
        ("contract", "--infer", ptx, "--kernel", "nothing"),
        ("scan", ptx, "--suppress", beside),
    ):
        code, _, err = k3(capsys, *arguments)
        assert code == ExitCode.ERROR and err.count("\n") == 1 and "Traceback" not in err, (arguments, err)
