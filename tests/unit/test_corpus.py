"""tests/corpus: small PTX programs, each with the verdict that it must get and the public record of its kind of bug.

    // expect: R01 finding          rule and verdict, several if need be; or: clean
    // record: OWNER/REPO#123: ...  where the world has seen this kind of bug, or the ISA's section
    // what: ...                    what happens in this program
    // xfail: ...                   (rarely) why the auditor does not get it right yet

`case.fail.ptx` and `case.pass.ptx` are a pair that differs in one place; `case.contract.toml`, where it exists, is
the contract of both. Python (`.py`) and MLIR files are for the rules about kernel source and compiler IR.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from k3_audit.artifact.contract import Contract
from k3_audit.artifact.toolchain import locate
from k3_audit.audit.findings import Finding, Severity
from k3_audit.audit.rules.base import rules
from k3_audit.audit.rules.dsl_inline_asm import check_ir, check_sources
from k3_audit.audit.scan import scan_ptx

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1] / "corpus"
FILES = sorted(p for p in ROOT.glob("*/*") if p.suffix in (".ptx", ".py", ".mlir"))
RECORD = re.compile(r"[\w.-]+/[\w.-]+#\d+|PTX ISA, |LLVM Language Reference")
HOPPER, BLACKWELL = "sm_90a", "sm_100a"
# Instructions that exist on one of the two only.
ONE_ARCHITECTURE = {"R13": BLACKWELL, "R14": HOPPER, "R24": BLACKWELL}
# R00 speaks of text that no assembler takes as well; R25 compares PTX with machine code (test_sass_*.py).
NOT_HERE = {"R25"}
FEWER_PAIRS = {"R00": 2}


def head(path: Path) -> dict[str, str]:
    """The fields of a file's first comment."""
    fields: dict[str, str] = {}
    name = ""
    for line in path.read_text().splitlines():
        m = re.match(r"(?://|#) (?:(\w+): )?\s*(.*)", line)
        if m is None:
            break
        name = m[1] or name
        fields[name] = f"{fields.get(name, '')} {m[2]}".strip()
    return fields


def case(path: Path) -> str:
    return path.name.split(".")[0]


def contract(path: Path) -> Contract | None:
    file = path.with_name(f"{case(path)}.contract.toml")
    return Contract.from_dict(tomllib.loads(file.read_text())) if file.exists() else None


def findings(path: Path) -> tuple[Finding, ...]:
    if path.suffix == ".py":
        return tuple(check_sources({path.name: path.read_text()}))
    if path.suffix == ".mlir":
        return tuple(check_ir(path.read_text(), path.name))
    (report,) = scan_ptx(path.read_text(), path.name, contract(path))
    return report.findings


def expected(path: Path) -> set[str]:
    words = head(path)["expect"].split()
    return set() if words == ["clean"] else {f"{a} {b}" for a, b in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_verdict(path):
    """Exactly the expected findings; notes count only where they are expected."""
    want = expected(path)
    got = {f"{f.rule} {'note' if f.severity is Severity.NOTE else f.verdict}" for f in findings(path)}
    got -= {g for g in got if g.endswith(" note")} - want
    if reason := head(path).get("xfail"):
        assert got != want, f"{path.name} is right now: delete its xfail line"
        pytest.xfail(reason)
    assert got == want


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_head(path):
    fields = head(path)
    assert RECORD.search(fields["record"]), "record: OWNER/REPO#NUMBER or a section of the ISA"
    assert len(fields["what"]) > 10
    which = path.name.split(".")[1]
    assert (which, bool(expected(path))) in (("fail", True), ("pass", False))
    if which == "fail":
        assert any(e.startswith(path.parent.name) for e in expected(path))


@pytest.mark.parametrize(
    "path", [p for p in FILES if ".fail." in p.name], ids=lambda p: f"{p.parent.name}/{case(p)}"
)
def test_pair_differs_in_one_place(path):
    def body(p: Path) -> list[str]:
        text = re.sub(r"_(pass|fail)\b", "", p.read_text())
        return [s for line in text.splitlines() if (s := line.strip()) and not re.match(r"//|#|\.reg", s)]

    good, bad = body(path.with_name(path.name.replace(".fail.", ".pass."))), body(path)
    changed = [d for d in difflib.ndiff(good, bad) if d[0] in "+-"]
    assert 0 < len(changed) <= 10


@pytest.mark.parametrize("rule", [r for r in rules().values() if r.id not in NOT_HERE], ids=lambda r: r.id)
def test_every_rule_has_pairs_on_both_architectures(rule):
    fails = sorted((ROOT / rule.id).glob("*.fail.*"))
    assert len(fails) >= FEWER_PAIRS.get(rule.id, 4)
    if rule.language == "ptx":
        found = {m[1] for p in fails if (m := re.search(r"^\.target (\w+)", p.read_text(), re.MULTILINE))}
        only = ONE_ARCHITECTURE.get(rule.id)
        assert found == ({only} if only else {HOPPER, BLACKWELL})


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL])
def test_ptxas_accepts_all(arch, tmp_path):
    """All files of an architecture in one call: names are unique over the corpus."""
    files = [p for p in FILES if p.suffix == ".ptx" and f".target {arch}\n" in p.read_text()]
    command = [locate("ptxas"), f"-arch={arch}", "-O0", *files, "-o", tmp_path / "corpus.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
