"""The litmus dialect and `k3-audit model`."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.audit import cli
from k3_audit.audit.findings import ExitCode
from k3_audit.audit.memory_model import check, litmus, solver
from k3_audit.audit.memory_model.draw import svg, timeline
from k3_audit.audit.memory_model.litmus import LitmusError
from k3_audit.audit.memory_model.program import (
    Address,
    Atomic,
    Barrier,
    Compare,
    Fence,
    Label,
    Load,
    Local,
    Logic,
    Place,
    Quantifier,
    Scope,
    Sem,
    Store,
    Variable,
)

pytestmark = pytest.mark.unit

CORPUS = Path(__file__).parents[1] / "corpus" / "litmus"

# Everything that the dialect of the public collections writes: quotes over several lines, comments, registers that
# are set beside locations, aliases, spaces in places, thread numbers without P, labels, old names of operations.
DIALECT = r"""PTX Everything_1-x
"a note
over two lines"
"https://example.org/a|b;c"
(* a comment { with braces } *)
{
x = 0; y=-1;
z = 0x10;
P0:r0 = 0; 1:r1=7;
y2 @ generic aliases y;
s @ surface aliases y2;
c @ constant aliases x;
}
 P0@cta 0,gpu 0                   | P1@cta 1, gpu 0                 |P2@cta 0,gpu 1 ;
 LC00:                            | atom.acquire.gpu.plus r1, x, 1  | ld r3, 1 ;
 ld.relaxed.gpu r0, x             | atom.acq_rel.sys.cas r2, x, 0, r1 | ld.weak r4, 2 ;
 beq r0,r1,LC01                   | red.release.gpu.minus y, 1      | add r3, r3, r4;
 goto LC00                        | suatom.relaxed.cta.exch r5, s, 1 | st.weak x, r3;
 LC01:                            | sust.weak s, 2                  | bar.cta.sync 1, r3, 2;
 st.release.sys y2, 1             | tld.weak r6, y                  | bar.cta.arrive 1;
 fence.sc.gpu                     | cold.weak r7, c                 | fence.proxy.alias;
 membar.gl                        | suld.weak r8, s                 | mul r9, r3, 2 ;
locations [x; P0:r0; y;]
filter (P0:r0 != 5)
~exists
(0:r0 == 1 /\ ~(P1:r1 = 2) \/ not [x] >= 3 /\ (P1: r2 < P2:r3 \/ y <= 0x2))
"""


def test_the_whole_dialect() -> None:
    p = litmus.parse(DIALECT)
    assert p.name == "Everything_1-x"
    assert p.note.startswith("a note over two lines")
    assert dict(p.memory) == {"x": 0, "y": -1, "z": 16}
    assert [dict(t.registers) for t in p.threads] == [{}, {"r1": 7}, {}]
    assert [t.place for t in p.threads] == [Place(0, 0), Place(1, 0), Place(0, 1)]
    assert p.addresses["s"] == Address("s", "y2", "y") and p.addresses["c"] == Address("c", "x", "x")
    one, two, three = (t.body for t in p.threads)
    assert one[:2] == (Label("LC00"), Load("r0", "x", Sem.RELAXED, Scope.GPU))
    assert one[-3:] == (Store("y2", 1, Sem.RELEASE, Scope.SYS), *[Fence(Sem.SC, Scope.GPU)] * 2)
    assert two[0] == Atomic("r1", "x", "add", (1,), Sem.ACQUIRE, Scope.GPU)
    assert two[1] == Atomic("r2", "x", "cas", (0, "r1"), Sem.ACQ_REL, Scope.SYS)
    assert three[:3] == (Local("r3", "mov", 1), Local("r4", "mov", 2), Local("r3", "add", "r3", "r4"))
    assert three[4:6] == (Barrier(False, "r3", 2, 1), Barrier(True, 1))
    assert p.quantifier == Quantifier.NOT_EXISTS
    assert p.show == (Variable(None, "x"), Variable("P0", "r0"), Variable(None, "y"))
    assert p.filter == Compare("ne", Variable("P0", "r0"), 5)
    assert isinstance(p.condition, Logic) and p.condition.op == "or"
    assert [i.op for i in p.condition.items if isinstance(i, Logic)] == ["and", "and"]
    again = litmus.parse(litmus.text(p))
    assert (again.threads, again.condition, again.memory) == (p.threads, p.condition, p.memory)


DEFAULTS = [
    ("ld r0, [x]", "ld.weak r0, x"),
    ("ld.global.u32 %r1, [x]", "ld.weak r1, x"),
    ("ld.volatile.global.u32 r0, [x]", "ld.relaxed.sys r0, x"),
    ("st.mmio.relaxed.sys.global.u32 [x], 1", "st.relaxed.sys x, 1"),
    ("atom.add r0, x, 1", "atom.relaxed.gpu.add r0, x, 1"),
    ("atom.global.cta.acquire.exch.b32 r0, [x], 1", "atom.acquire.cta.exch r0, x, 1"),
    ("red.add x, 1", "red.relaxed.gpu.add x, 1"),
    ("fence.gpu", "fence.acq_rel.gpu"),
    ("membar.cta", "fence.sc.cta"),
    ("membar.sys", "fence.sc.sys"),
    ("mbarrier.arrive b", "mbarrier.arrive.release.cta b, 1"),
    (
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [b], 16",
        "mbarrier.arrive.expect_tx.release.cta b, 16",
    ),
    ("mbarrier.complete_tx b, 16", "mbarrier.complete_tx.relaxed.cta b, 16"),
    ("mbarrier.try_wait.parity b, 1", "mbarrier.try_wait.parity.acquire.cta b, 1"),
    (
        "mbarrier.test_wait.parity.acquire.cluster r1, b, 0",
        "mbarrier.test_wait.parity.acquire.cluster r1, b, 0",
    ),
    ("barrier.cluster.arrive.aligned", "barrier.cluster.arrive.release"),
    ("barrier.cluster.wait", "barrier.cluster.wait.acquire"),
    ("barrier.sync.aligned 1, 64", "bar.sync 1, 64"),
    ("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [x], r0, [b]", "st.async.v4.b32 x, r0, b"),
    (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [d], [s], 64, [b]",
        "cp.async.bulk d, s, 64, b",
    ),
    ("cp.async.bulk.wait_group.read 1", "cp.async.bulk.wait_group.read 1"),
    ("bra L", "goto L"),
    ("mov.u32 r0, r1", "mov r0, r1"),
]


@pytest.mark.parametrize(("written", "meant"), DEFAULTS)
def test_defaults_are_filled_in(written: str, meant: str) -> None:
    assert litmus.instruction_text(litmus.instruction(written)) == meant
    assert litmus.instruction(meant) == litmus.instruction(written)


WRONG = [
    ("frobnicate x", "no such instruction"),
    ("ld.relaxed r0, x", "the scope is missing"),
    ("ld.weak.gpu r0, x", "a weak access has no scope"),
    ("ld.release.gpu r0, x", "a load is not release"),
    ("st.acquire.gpu x, 1", "a store is not acquire"),
    ("ld.global.nc.b32 r0, [x]", "outside the memory consistency model"),
    ("ld.weak x, r0", "is no register"),
    ("st.weak r0, 1", "is no location"),
    ("st.weak x", "2 operands are needed, 1 are there"),
    ("atom.weak.gpu.add r0, x, 1", "an atomic is not weak"),
    ("atom.relaxed.gpu r0, x, 1", "the operation is missing"),
    ("red.relaxed.gpu.cas x, 1, 2", "not one of the model"),
    ("fence.acq_rel", "the scope is missing"),
    ("fence.weak.gpu", "a fence is not weak"),
    ("fence.proxy.async.global", "some state space only is not modelled"),
    ("fence.proxy.tensormap", "the proxy is"),
    ("fence.mbarrier_init.release.gpu", "fence.mbarrier_init.release.cluster"),
    ("membar.gpu", "cta, gl or sys"),
    ("cp.async.ca d, s, 4", "only cp.async.bulk"),
    ("mbarrier.inval b", "not one of the model"),
    ("mbarrier.try_wait.parity b", "operands are needed"),
    ("bar.red 0", "sync or arrive"),
    ("beq r0, 1", "operands are needed"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_instruction_is_named(text: str, message: str) -> None:
    with pytest.raises(LitmusError, match=message):
        litmus.parse(f"PTX x\n{{}}\nP0@cta 0,gpu 0 ;\n{text} ;\nexists (x == 1)")


BROKEN = [
    ("", "begins with"),
    ("ARM x\n{}\nP0@cta 0,gpu 0;", "begins with"),
    ("PTX x\n{ x = 0;", "no closing brace"),
    ("PTX x\n{ x : 0 }\nP0@cta 0,gpu 0;", "cannot read `x : 0`"),
    ("PTX x\n{ P3:r0=1 }\nP0@cta 0,gpu 0;", "names no thread"),
    ("PTX x\n{ P0:r0=&x }\nP0@cta 0,gpu 0;", "only numbers"),
    ("PTX x\n{ a @ magic aliases x }\nP0@cta 0,gpu 0;", "the proxy is"),
    ("PTX x\n{}\n", "no threads"),
    ("PTX x\n{}\nP0 ; st.weak x, 1;", "is declared as"),
    ("PTX x\n{}\nP0@warp 0 ;", "a place is made of"),
    ("PTX x\n{}\nP0@cta 0,gpu 0 | P0@cta 0,gpu 0 ;", "same name"),
    ("PTX x\n{}\nP0@cta 0,gpu 0 ; st.weak x, 1 | st.weak y, 1 ;", "2 cells for 1"),
    ("PTX x\n{}\nP0@cta 0,gpu 0 ; st.weak x, 1 ; exists (P7:r0 == 1)", "no thread P7"),
    ("PTX x\n{}\nP0@cta 0,gpu 0 ; st.weak x, 1 ; exists (x == ", "ends too early"),
    ("PTX x\n{}\nP0@cta 0,gpu 0 ; st.weak x, 1 ; exists (x 1)", "is no comparison"),
    ("PTX x\n{}\nP0@cta 0,gpu 0 ; st.weak x, 1 ; exists (x == 1) ?", "cannot read"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_a_broken_file_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(LitmusError, match=message) as error:
        litmus.parse(text)
    assert "\n" not in str(error.value)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="PTX x{}01@cta,gpu|;().=/\\~exists ldst.weakr\n", max_size=120))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for whole in (text, "PTX x\n{}\nP0@cta 0,gpu 0 ;\n" + text):
        try:
            program = litmus.parse(whole)
        except LitmusError:
            continue
        litmus.text(program)


# The command.


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.run(["model", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_forbidden_outcome_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "mp.svg"
    code, out, _ = run(capsys, CORPUS / "MP+fences.litmus", "--svg", picture)
    assert code == ExitCode.CLEAN
    assert "forbidden, as expected: clean" in out
    assert "breaks Causality §8.10.6" in out and "a -> b" in out
    assert "bounds: 2 threads, at most 6 events" in out
    root = ET.parse(picture).getroot()
    drawn = "".join(root.itertext())
    assert root.tag.endswith("svg") and "fence.acq_rel.gpu" in drawn and "breaks Causality" in drawn
    assert "href" not in picture.read_text() and "script" not in picture.read_text()


def test_a_witness_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, CORPUS / "MP+weak.litmus")
    assert code == ExitCode.CLEAN
    assert "an execution:" in out and "breaks" not in out
    assert "data races (in one execution of each outcome):" in out
    assert "init x -> " in out


def test_an_expectation_that_fails_is_a_finding(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "broken.litmus"
    file.write_text(
        (CORPUS / "MP+fences.litmus").read_text().replace("fence.acq_rel.gpu", "fence.acq_rel.cta")
    )
    code, out, _ = run(capsys, file)
    assert code == ExitCode.FINDINGS
    assert "allowed, which is not what the note says: finding" in out


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ("exists (P0:r0 == 5)", ExitCode.CLEAN),
        ("~exists (P0:r0 == 5)", ExitCode.CLEAN),
        ("~exists (P0:r0 == 0)", ExitCode.FINDINGS),
        ("forall (P0:r0 == 0)", ExitCode.CLEAN),
        ("forall (P0:r0 == 1)", ExitCode.FINDINGS),
    ],
)
def test_properties_decide_the_exit_code(
    condition: str, code: ExitCode, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "p.litmus"
    file.write_text(f"PTX p\n{{}}\nP0@cta 0,gpu 0 ;\nld.weak r0, x ;\n{condition}")
    assert run(capsys, file)[0] == code


def test_json_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, CORPUS / "SB+sc.litmus", "--format", "json")
    d = json.loads(out)
    assert code == ExitCode.CLEAN
    assert (d["answer"], d["holds"], d["allowed"], d["expected"]) == ("forbidden", False, False, "forbidden")
    assert {"P0:r0": 0, "P1:r1": 1} in d["outcomes"] and len(d["outcomes"]) == 3
    assert d["breaks"] == ["Causality"] and "fence.sc" in d["execution"]
    assert d["bounds"] == {"threads": 2, "events": 6, "unroll": 2, "truncated": []}
    _, out, _ = run(capsys, CORPUS / "SB+sc.litmus", CORPUS / "CoWW.litmus", "--format", "json")
    assert [x["program"] for x in json.loads(out)] == ["SB+sc", "CoWW"]


@pytest.mark.skipif(not solver.available(), reason="needs z3-solver")
@pytest.mark.parametrize("engine", ["solve", "both"])
def test_the_other_engine(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, CORPUS / "IRIW+sc.litmus", "--engine", engine)
    assert code == ExitCode.CLEAN and "forbidden, as expected" in out


def test_without_z3_one_line_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solver, "z3", None)
    code, _, err = run(capsys, CORPUS / "CoWW.litmus", "--engine", "solve")
    assert code == ExitCode.ERROR and "pip install z3-solver" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuch.litmus"],
        [CORPUS],
        ["nosuch", "--handoff", "x"],
        [CORPUS / "CoWW.litmus", CORPUS / "CoRW1.litmus", "--svg", "x.svg"],
        [CORPUS / "CoWW.litmus", "--handoff", "x"],
        ["a", "b", "--handoff", "x"],
        ["a", "--handoff", "x", "--set", "T"],
    ],
    ids=str,
)
def test_bad_input_is_one_line(arguments: list, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == ExitCode.ERROR and out == ""
    assert err.startswith("k3-audit: error: ") and err.count("\n") == 1


def test_a_handoff_of_a_ptx_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from test_memory_model_lift import EXCHANGE

    ptx, contract = tmp_path / "exchange.ptx", tmp_path / "exchange.toml"
    contract.write_text(
        'kernel = "exchange"\nparams = [{name = "x", dtype = "f32", role = "upstream", access = "rw"}, '
        '{name = "n", dtype = "i32"}]\n'
        'launch = {block = [32, 1, 1], cluster = [2, 1, 1], grid = ["2", "1", "1"], pdl = true}\n'
        'handoffs = [{name = "values", data = "v", producer = "a", consumer = "b", '
        'via = "mbarrier", scope = "cluster"}]\n'
    )
    ptx.write_text(EXCHANGE)
    code, out, _ = run(capsys, ptx, "--contract", contract, "--handoff", "values")
    assert code == ExitCode.CLEAN and "all 64 walked" in out
    ptx.write_text(EXCHANGE.replace("acquire.cluster.shared::cta", "acquire.cta.shared::cta"))
    picture = tmp_path / "p.svg"
    code, out, _ = run(capsys, ptx, "--contract", contract, "--handoff", "values", "--svg", picture)
    assert code == ExitCode.FINDINGS
    assert "[PTX line " in out and "mbarrier.try_wait.parity.acquire.cta" in out
    assert "PTX line" in picture.read_text()
    assert run(capsys, ptx, "--handoff", "values")[0] == ExitCode.ERROR


# Drawings.


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.litmus"))[::4], ids=lambda f: f.stem)
def test_every_execution_can_be_drawn(file: Path) -> None:
    result = check.check(litmus.parse(file.read_text()))
    nearest = check.why_forbidden(result)
    pictures = [(x, {}) for x in result.executions.values()]
    if nearest is not None:
        assert nearest.broken
        pictures.append((nearest.execution, nearest.broken))
    for execution, broken in pictures:
        ET.fromstring(svg(execution, broken))
        lines = timeline(execution, broken).splitlines()
        events = [e for e in execution.graph.events if e.thread >= 0]
        assert sum(": " in line and " -> " not in line and "breaks" not in line for line in lines) >= len(
            events
        )
