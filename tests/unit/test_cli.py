"""The command line: exit codes, one-line errors, a fast start. Whatever it is given, never a traceback."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import samples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from k3_audit.audit import cli
from k3_audit.audit.findings import ExitCode, Verdict

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "audit" / "report" / "scan.schema.json").read_text())

CLEAN = """\
.version 8.8
.target sm_90a
.address_size 64

.visible .entry double(.param .u64 double_param_0)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [double_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    griddepcontrol.wait;
    ld.global.b32 %r1, [%rd2];
    add.s32 %r2, %r1, %r1;
    st.global.b32 [%rd2], %r2;
    ret;
}
"""
UNKNOWN = CLEAN.replace("add.s32 %r2, %r1, %r1;", "frobnicate.b32 %r2, %r1;")

CONTRACT = """\
kernel = "double"
params = [{name = "x", dtype = "i32", role = "upstream", access = "rw"}]
launch = {block = [32, 1, 1], pdl = true}
"""
EARLY = CLEAN.replace("    griddepcontrol.wait;\n", "").replace(
    "    ret;", "    griddepcontrol.wait;\n    ret;"
)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command line in this process."""
    code = cli.run([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def one_line(err: str) -> str:
    """The only line of stderr, which must be ours."""
    (line,) = err.splitlines()
    assert line.startswith("k3-audit: error: ") and "Traceback" not in err
    return line


@pytest.fixture
def ptx(tmp_path: Path) -> Path:
    path = tmp_path / "double.ptx"
    path.write_text(CLEAN)
    return path


# scan


def test_a_clean_file_exits_0(ptx: Path, capsys) -> None:
    code, out, err = run(capsys, "scan", ptx, "--format", "json")
    data = json.loads(out)
    jsonschema.validate(data, SCHEMA)
    (kernel,) = data["kernels"]
    assert (code, err) == (ExitCode.CLEAN, "")
    assert {k: kernel[k] for k in ("name", "arch", "verdict", "findings")} == {
        "name": "double",
        "arch": "sm_90a",
        "verdict": "clean",
        "findings": [],
    }
    assert kernel["file"] == str(ptx)


def test_a_contract_turns_an_early_load_into_a_finding(tmp_path: Path, capsys) -> None:
    path, contract = tmp_path / "double.ptx", tmp_path / "double.toml"
    path.write_text(EARLY)
    contract.write_text(CONTRACT)
    code, out, err = run(capsys, "scan", path, "--contract", contract, "--format", "json")
    data = json.loads(out)
    jsonschema.validate(data, SCHEMA)
    (kernel,) = data["kernels"]
    assert (code, err, kernel["verdict"]) == (ExitCode.FINDINGS, "", "finding")
    assert {f["rule"] for f in kernel["findings"]} == {"R15"}
    line = EARLY.splitlines().index("    ld.global.b32 %r1, [%rd2];") + 1
    assert line in {f["ptx_line"] for f in kernel["findings"]}
    path.write_text(CLEAN)
    assert run(capsys, "scan", path, "--contract", contract)[0] == ExitCode.CLEAN


def test_an_unknown_instruction_is_inconclusive(tmp_path: Path, capsys) -> None:
    path = tmp_path / "new.ptx"
    path.write_text(UNKNOWN)
    code, out, _ = run(capsys, "scan", path)
    assert code == ExitCode.INCONCLUSIVE and "frobnicate" in out and "1 inconclusive" in out


def test_machine_code_alone_is_inconclusive_and_with_its_ptx_it_is_audited(ptx: Path, capsys) -> None:
    from k3_audit.artifact.toolchain import assemble

    cubin = ptx.with_suffix(".cubin")
    cubin.write_bytes(assemble(CLEAN, "sm_90a"))
    code, out, err = run(capsys, "scan", cubin)
    assert (code, err) == (ExitCode.INCONCLUSIVE, "") and "only machine code is here" in out
    code, out, _ = run(capsys, "scan", ptx.parent, "--format", "json")
    assert code == ExitCode.CLEAN and [k["file"] for k in json.loads(out)["kernels"]] == [str(ptx)]


def test_one_unreadable_file_does_not_hide_the_others(ptx: Path, tmp_path: Path, capsys) -> None:
    code, out, err = run(capsys, "scan", ptx, tmp_path / "absent.ptx", "--format", "json")
    data = json.loads(out)
    jsonschema.validate(data, SCHEMA)
    assert code == ExitCode.ERROR and "absent.ptx" in one_line(err)
    assert [k["verdict"] for k in data["kernels"]] == ["clean", "error"]


@pytest.mark.parametrize("form", ["sarif", "junit", "html", "json", "terminal"])
def test_every_form_goes_to_a_file_as_to_stdout(ptx: Path, tmp_path: Path, capsys, form: str) -> None:
    out = run(capsys, "scan", ptx, "--format", form)[1]
    file = tmp_path / "new" / f"report.{form}"
    code, nothing, _ = run(capsys, "scan", ptx, "--format", form, "-o", file)
    assert (code, nothing, file.read_text()) == (0, "", out) and "double" in out


ODD: dict[str, bytes] = {
    "empty": b"",
    "random": random.Random(1).randbytes(4096),
    "not text": CLEAN.encode().replace(b"double", b"d\xff\xfe\x80"),
    "nul": b"\0" * 100,
    "elf cut": b"\x7fELF\x02\x01\x01" + bytes(50),
    "elf cuda cut": b"\x7fELF\x02\x01\x01\x33\x07" + bytes(55) + b"\x01" * 40,
    "prose": b"This is no kernel.\n" * 50,
    "version only": b".version 8.8\n.target sm_90a\n",
    "deep": b"{" * 20000,
    "zip": b"PK\x03\x04" + bytes(26),
    "long line": b"x" * 1_000_000,
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_kernel_is_an_error_in_one_line(tmp_path: Path, capsys, kind: str) -> None:
    path = tmp_path / "input.ptx"
    path.write_bytes(ODD[kind])
    code, out, err = run(capsys, "scan", path)
    assert (code, out) == (ExitCode.ERROR, "") and "input.ptx" in one_line(err)


def test_places_that_hold_no_file_are_errors_in_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "absent", "loop", "pipe", "x" * 300, "nul\0", os.fsdecode(b"\xff.ptx")):
        code, out, err = run(capsys, "scan", tmp_path / name)
        assert (code, out) == (ExitCode.ERROR, ""), name
        assert one_line(err)


LINES = CLEAN.splitlines(keepends=True)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.integers(0, len(CLEAN)).map(lambda n: CLEAN[:n].encode()),
        st.permutations(LINES).map(lambda lines: "".join(lines).encode()),
        st.lists(st.sampled_from(LINES), max_size=30).map(lambda lines: "".join(lines).encode()),
        st.tuples(st.integers(0, len(CLEAN)), st.binary(max_size=8)).map(
            lambda cut: CLEAN[: cut[0]].encode() + cut[1] + CLEAN[cut[0] :].encode()
        ),
    )
)
@example(b"\xff\xfe")
def test_fuzzed_input_gives_a_verdict_or_one_line(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.ptx"
        path.write_bytes(data)
        with pytest.MonkeyPatch.context() as patch:
            lines: list[str] = []
            patch.setattr(cli, "complain", lines.append)
            patch.setattr(
                cli, "_emit", lambda document, output: jsonschema.validate(json.loads(document), SCHEMA)
            )
            code = cli.run(["scan", str(path), "--format", "json"])
    assert code in set(ExitCode)
    assert not [x for x in lines if "defect of k3-audit" in x]
    assert (code == ExitCode.ERROR) == bool(lines)


# bad usage


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["scan"], "Missing argument"),
        (["scan", "--bogus", "x"], "see k3-audit scan --help"),
        (["nonsense"], "see k3-audit --help"),
        (["scan", "x", "--format", "yaml"], "'yaml' is not one of"),
        (["scan", "x", "--contract", "absent.toml"], "absent.toml"),
        (["explain"], "Missing argument"),
        (["explain", "R99"], "R99"),
        (["build", "--arch", "sm_42"], "sm_42"),
        (["build", "--kernel", "nope"], "nope"),
        (["build", "--jobs", "0"], "0"),
        (["gate", "--root", "/"], "checkout"),
        (["report", "--root", "/"], "checkout"),
        (["inspect", "absent"], "absent"),
        (["inspect"], "Missing argument"),
    ],
)
def test_bad_usage_exits_3_with_one_line(capsys, arguments: Sequence[str], says: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (ExitCode.ERROR, "") and says in one_line(err)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "kernel = 3",
        "kernel = 'k'",
        CONTRACT.replace("upstream", "sideways"),
        CONTRACT.replace("block", "blok"),
    ],
)
def test_a_broken_contract_is_named(ptx: Path, tmp_path: Path, capsys, text: str) -> None:
    path = tmp_path / "contract.toml"
    path.write_text(text)
    code, _, err = run(capsys, "scan", ptx, "--contract", path)
    assert code == ExitCode.ERROR and "contract.toml: not a contract" in one_line(err)


def test_a_place_that_cannot_be_written_is_named(ptx: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for form in ("json", "terminal"):
        target = tmp_path / "file" / "report"
        code, _, err = run(capsys, "scan", ptx, "--format", form, "-o", target)
        assert code == ExitCode.ERROR and "report" in one_line(err)


def test_a_defect_of_our_own_is_one_line_too_and_debug_shows_it(ptx: Path, capsys, monkeypatch) -> None:
    def broken(*_: object) -> str:
        raise IndexError("planted\ndefect")

    monkeypatch.setattr("k3_audit.audit.report.render_scan", broken)
    code, _, err = run(capsys, "scan", ptx, "--format", "json")
    assert code == ExitCode.ERROR and "planted defect (a defect of k3-audit" in one_line(err)
    code, _, err = run(capsys, "scan", ptx, "--format", "json", "--debug")
    assert code == ExitCode.ERROR and "Traceback" in err and "planted defect" in err.splitlines()[-1]


def test_help_has_examples(capsys) -> None:
    for command in ([], ["scan"], ["gate"], ["explain"], ["inspect"]):
        code, out, _ = run(capsys, *command, "--help")
        assert code == 0 and "Example" in out and "k3-audit " in out
    assert run(capsys)[1] == run(capsys, "--help")[1]


# rules


def test_explain_says_what_a_rule_means_and_how_to_fix_it(capsys) -> None:
    code, listed, _ = run(capsys, "rules")
    ids = re.findall(r"^(R\d+)\b", listed, re.MULTILINE)
    assert code == 0 and {"R15", "R16", "R25"} <= set(ids)
    for rule in ids:
        code, out, _ = run(capsys, "explain", rule)
        assert code == 0 and rule in out and "fix" in out.lower()
    assert run(capsys, "explain", "r15")[1] == run(capsys, "explain", "R15")[1]


# gate, in a checkout of its own


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A green checkout whose store and auditor are those of tests/unit/samples.py."""
    from k3_audit.audit import tree
    from k3_audit.fused_backend import build

    (tmp_path / "golden").mkdir()
    (tmp_path / "golden" / "policy.toml").write_bytes((ROOT / "golden" / "policy.toml").read_bytes())
    policy = samples.POLICY
    monkeypatch.setattr("k3_audit.audit.policy.Policy.load", lambda path: policy)
    monkeypatch.setattr(tree.Tree, "read", lambda root, policy, sources: samples.TREE)
    monkeypatch.setattr(build, "source_hashes", lambda kernel: samples.TREE.sources[kernel])
    monkeypatch.setattr(cli, "stored_artifacts", lambda *_: [samples.artifact(), samples.artifact("sm_100a")])
    monkeypatch.setattr(cli, "audit_artifact", lambda a, root: (samples.report(arch=a.arch),))
    samples.lock().save(tmp_path / "golden" / "kernels.lock")
    return tmp_path


def test_the_gate_ends_with_the_table(checkout: Path, capsys) -> None:
    code, out, err = run(capsys, "gate", "--no-build", "--root", checkout)
    assert code == ExitCode.CLEAN and out.splitlines()[-1] == "gate: clean"
    assert re.search(r"ok\s+attn_res\s+sm_90a\s+clean\s+longctx: 1 case on NVIDIA H200", out)
    assert "audit  attn_res sm_90a: clean" in err


def test_the_gate_takes_the_verdict_of_its_rows(checkout: Path, capsys, monkeypatch) -> None:
    for findings, code in (
        ((samples.UNORDERED,), ExitCode.FINDINGS),
        ((samples.UNDECIDED,), ExitCode.INCONCLUSIVE),
        ((replace(samples.UNDECIDED, verdict=Verdict.ERROR),), ExitCode.ERROR),
    ):
        monkeypatch.setattr(
            cli, "audit_artifact", lambda a, root, f=findings: (samples.report(*f, arch=a.arch),)
        )
        assert run(capsys, "gate", "--no-build", "--root", checkout)[0] == code
    (checkout / "golden" / "kernels.lock").unlink()
    code, out, _ = run(capsys, "gate", "--no-build", "--root", checkout, "--format", "json")
    assert code == ExitCode.ERROR and "unlocked" in out


def test_the_gate_names_a_damaged_lock(checkout: Path, capsys) -> None:
    path = checkout / "golden" / "kernels.lock"
    path.write_text(path.read_text().replace("0.75", "0.70"))
    code, out, err = run(capsys, "gate", "--no-build", "--root", checkout)
    assert (code, out) == (ExitCode.ERROR, "") and "the digest does not fit" in err.splitlines()[-1]


def test_report_shows_the_evidence(checkout: Path, capsys) -> None:
    code, out, _ = run(capsys, "report", "--root", checkout)
    assert code == 0 and "max_error_ratio = 0.75" in out
    code, out, _ = run(capsys, "report", "--root", checkout, "--format", "json")
    assert code == 0 and json.loads(out)["entries"][0]["kernel"] == "attn_res"


# inspect


def test_inspect_describes_a_checkpoint_and_names_its_problems(tmp_path: Path, capsys) -> None:
    from k3_audit.reference import load_config, synthesise
    from k3_audit.reference.checkpoint import write_checkpoint

    config = load_config("tiny")
    tensors = synthesise(config)
    write_checkpoint(tmp_path / "whole", config, tensors)
    code, out, err = run(capsys, "inspect", tmp_path / "whole", "--layer", 3)
    assert (code, err) == (0, "") and "no problem found" in out and "MLA" in out and "MXFP4" in out
    shard = next((tmp_path / "whole").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:1000])
    code, out, err = run(capsys, "inspect", tmp_path / "whole", "--format", "json")
    assert code in (ExitCode.FINDINGS, ExitCode.ERROR)
    assert json.loads(out)["problems"] if code == ExitCode.FINDINGS else one_line(err)


# processes


def process(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "k3_audit.audit.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


def test_scan_and_explain_start_without_the_heavy_libraries(ptx: Path) -> None:
    for arguments in (
        ["scan", ptx],
        ["scan", ptx, "--format", "sarif"],
        ["explain", "R15"],
        ["rules"],
        ["--help"],
    ):
        done = process(*arguments)
        assert done.returncode == 0
        imported = set(re.findall(r"\|\s+(\w+)$", done.stderr, re.MULTILINE))
        assert "click" in imported and not imported & {"torch", "cutlass", "scipy", "safetensors"}, arguments


def test_a_reader_that_leaves_early_sees_no_traceback(ptx: Path) -> None:
    command = f"{sys.executable} -m k3_audit.audit.cli scan {ptx} --format html | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == "<!doctype " and done.stderr == ""


def test_a_terminal_gets_colour_unless_it_says_no(ptx: Path) -> None:
    def on_a_terminal(**env: str) -> str:
        parent, child = pty.openpty()
        command = [sys.executable, "-m", "k3_audit.audit.cli", "scan", str(ptx), str(ptx)]
        variables = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        with subprocess.Popen(
            command, stdout=child, stderr=child, env={**variables, "TERM": "xterm-256color", **env}
        ) as done:
            os.close(child)
            text = b""
            try:
                while part := os.read(parent, 65536):
                    text += part
            except OSError:  # the other end is closed
                pass
            assert done.wait(timeout=60) == 0
        os.close(parent)
        return text.decode()

    assert re.search(r"\x1b\[[0-9;]*3\dm", on_a_terminal())
    assert not re.search(r"\x1b\[[0-9;]*3\dm", on_a_terminal(NO_COLOR="1"))
