"""The mutation engine: what each operator does to a small program, and that the result is a program."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict

import pytest
from k3_audit.artifact.contract import Contract, Launch, Param, Role
from k3_audit.artifact.toolchain import locate
from k3_audit.audit.mutate import MEANING, OPERATORS, mutants, source_mutants
from k3_audit.audit.ptx.parser import PtxError
from k3_audit.audit.rules.base import rules, snippet
from k3_audit.audit.teeth import corpus
from test_corpus import ROOT

pytestmark = pytest.mark.unit

# All threads write a tile and its first thread stores it; then they wait for a copy, and for the previous grid.
PROGRAM = snippet(
    """
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [flag];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, tile;
    mov.u32 %r3, full;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r2, %r4;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 512;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 512, [%r3];
    READY:
    bar.sync 0;
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
    ld.shared.b32 %r6, [%r5];
    st.shared.b32 [%r5+512], %r6;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1+512], [%r2+512], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    fence.sc.gpu;
    st.relaxed.gpu.global.b32 [%rd2], 1;
    DONE:
    griddepcontrol.wait;
    ld.global.b32 %r7, [%rd1];
    st.global.b32 [%rd1+1024], %r7;
    """,
    params=".param .u64 .ptr .global .align 128 out, .param .u64 .ptr .global .align 4 flag",
    declare=".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b64 full;",
)

# operator -> the first mutant of PROGRAM: lines that go, lines that come
FIRST = {
    "drop-fence": ("fence.proxy.async.shared::cta;", ""),
    "drop-barrier": ("bar.sync 0;", ""),
    "drop-wait": ("mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;", "mov.pred %p2, 1;"),
    "drop-commit": ("cp.async.bulk.commit_group;", ""),
    "ignore-poll": ("@!%p2 bra WAIT;", ""),
    "one-thread": ("fence.proxy.async.shared::cta;", "@k3_first fence.proxy.async.shared::cta; }"),
    "narrow-scope": ("fence.sc.gpu;", "fence.sc.cta;"),
    "weaken-order": ("bar.sync 0;", "bar.arrive 0, 128;"),
    "wrong-space": ("fence.proxy.async.shared::cta;", "fence.proxy.async.global;"),
    "add-read": ("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"),
    "wait-fewer": ("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group 1;"),
    "flip-phase": ("%p2, [%r3], 0;", "%p2, [%r3], 1;"),
    "expect-tx": ("_, [%r3], 512;", "_, [%r3], 256;"),
    "delay-wait": ("ld.shared.b32 %r6, [%r5];", "ld.shared.b32 %r6, [%r5]; bar.sync 0;"),
    "early-signal": (
        "st.shared.b32 [%r5+512], %r6;",
        "fence.proxy.async.shared::cta; st.shared.b32 [%r5+512], %r6;",
    ),
    "swap": ("bar.sync 0;", "@!%p2 bra WAIT; bar.sync 0;"),
}


def changes(original: str, mutant: str) -> tuple[str, str]:
    """Lines that differ, joined: as they were, as they are."""
    pairs = [(a, b) for a, b in zip(original.split("\n"), mutant.split("\n"), strict=True) if a != b]
    return " ".join(a.strip() for a, _ in pairs), " ".join(b.strip() for _, b in pairs)


def test_every_operator_is_tried_and_explained():
    assert set(FIRST) == set(OPERATORS)
    assert set(MEANING) == {*OPERATORS, "drop-clobber", "drop-side-effects"}


@pytest.mark.parametrize("operator", OPERATORS)
def test_operator(operator):
    mutant = next(m for m in mutants(PROGRAM) if m.operator == operator)
    gone, came = changes(PROGRAM, mutant.text)
    assert FIRST[operator][0] in gone
    assert FIRST[operator][1] in came
    moves = operator in ("one-thread", "delay-wait", "early-signal", "swap")
    assert moves or FIRST[operator][0] not in came


def test_every_mutant_differs_keeps_its_lines_and_has_a_name_of_its_own():
    found = list(mutants(PROGRAM))
    assert len(found) > 25
    assert all(m.text != PROGRAM and m.text.count("\n") == PROGRAM.count("\n") for m in found)
    assert len({m.text for m in found}) == len({m.fingerprint for m in found}) == len(found)
    assert all(m.region[0] <= m.site.line <= m.region[1] for m in found)


def test_order_and_names_are_the_same_every_time_and_on_every_architecture():
    first, second = list(mutants(PROGRAM)), list(mutants(PROGRAM.replace("sm_90a", "sm_100a")))
    assert [m.fingerprint for m in first] == [m.fingerprint for m in second]
    moved = list(mutants(PROGRAM.replace("{\n", "{\n\n// a comment; bar.sync 0;\n")))
    assert [m.fingerprint for m in first] == [m.fingerprint for m in moved]


def test_delay_moves_the_whole_poll_with_its_block():
    text = PROGRAM.replace(
        "WAIT:\n    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;\n    @!%p2 bra WAIT;\n",
        "{\n.reg .pred done;\n.loc 1 2 3\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%r3], 0;\n"
        "@done bra OUT;\nbra WAIT;\nOUT:\n}\n",
    )
    mutant = next(m for m in mutants(text) if m.operator == "delay-wait" and "try_wait" in m.what)
    (line,) = (x for x in mutant.text.split("\n") if "ld.shared" in x)
    assert line.strip() == (
        "ld.shared.b32 %r6, [%r5]; { .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%r3], 0; "
        "@done bra OUT; bra WAIT; OUT: }"
    )
    assert "WAIT" not in mutant.text.replace(line, "")


def test_nothing_moves_out_of_the_block_that_declares_its_registers():
    text = PROGRAM.replace(
        "griddepcontrol.wait;",
        "{ .reg .pred never; setp.lt.s32 never, %r1, 0; @!never griddepcontrol.wait; }",
    )
    (mutant,) = (m for m in mutants(text) if m.operator == "delay-wait" and "griddep" in m.what)
    assert re.search(r"\{[^{}]*ld\.global\.b32 %r7[^{}]*never[^{}]*griddepcontrol\.wait; \}", mutant.text)


def test_a_value_is_never_used_before_it_is_made():
    """A barrier that takes its thread count from the load before it cannot change places with it."""

    def early(count: str) -> list[str]:
        text = PROGRAM.replace(
            "griddepcontrol.wait;\n", f"ld.global.b32 %r8, [%rd1];\n    bar.sync 1, {count};\n"
        )
        return [m.what for m in mutants(text) if m.operator == "early-signal" and "ld.global" in m.what]

    assert early("128") and not early("%r8")


def test_contract_says_what_the_dependency_wait_guards():
    def waits(role: Role) -> list[str]:
        params = (Param("out", "i32", role, "r"), Param("flag", "i32", Role.FLAG, "w"))
        contract = Contract("kernel", params, Launch((128, 1, 1), pdl=True))
        text = PROGRAM.replace("    st.global.b32 [%rd1+1024], %r7;\n", "")
        return [m.what for m in mutants(text, contract) if m.operator == "delay-wait" and "griddep" in m.what]

    assert waits(Role.UPSTREAM) and not waits(Role.WEIGHT)


def test_waits_that_guard_nothing_are_left_alone():
    alone = snippet("griddepcontrol.launch_dependents;\n    griddepcontrol.wait;")
    assert not [m for m in mutants(alone) if m.operator in ("drop-wait", "delay-wait", "one-thread")]


def test_bad_input():
    with pytest.raises(PtxError):
        list(mutants("not ptx"))
    with pytest.raises(ValueError, match="one kernel to mutate is needed; in the text: none"):
        list(mutants(".version 8.8\n.target sm_90a\n.address_size 64\n"))
    with pytest.raises(ValueError, match="in the text: kernel"):
        list(mutants(PROGRAM, kernel="other"))


def test_source_mutants():
    text = rules()["DSL01"].passing
    found = list(source_mutants(text, "kernel.py"))
    assert {m.operator for m in found} == {"drop-clobber", "drop-side-effects"}
    for m in found:
        compile(m.text, "kernel.py", "exec")
        assert m.text.count("\n") == text.count("\n") and m.text != text
    assert not list(source_mutants('"""Prose about ~{memory}."""\n', "kernel.py"))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_ptxas_accepts_mutants(arch, tmp_path):
    """One mutant of each operator per program of the corpus that has new instructions, all in one call."""
    chosen: dict[tuple[str, str], str] = {}
    for program in corpus(ROOT):
        if f".target {arch}" in program.text:
            for m in mutants(program.text):
                chosen.setdefault((m.operator, m.site.text.split()[0]), m.text)
    files, used = [], defaultdict(int)
    for n, text in enumerate(chosen.values()):
        name = re.search(r"\.entry (\w+)", text)[1]
        used[name] += 1
        file = tmp_path / f"{n}.ptx"
        file.write_text(re.sub(rf"\b{name}", f"{name}_{n}", text))
        files.append(file)
    assert len(files) > 60
    command = [locate("ptxas"), f"-arch={arch}", "-O0", *files, "-o", tmp_path / "mutants.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
