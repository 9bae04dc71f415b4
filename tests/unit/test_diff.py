"""What changed in the synchronisation of two builds, in words."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import samples
from click.testing import CliRunner
from k3_audit.artifact import Store
from k3_audit.audit import diff
from k3_audit.audit.diff import Build, DiffError, compare
from k3_audit.audit.diff_command import diff as command
from k3_audit.audit.mutate import mutants
from k3_audit.audit.ptx.parser import parse
from k3_audit.audit.rules.base import rules
from k3_audit.audit.skeleton import skeleton
from k3_audit.audit.subject import Subject

pytestmark = pytest.mark.unit

HANDOFF = rules()["R06"].passing


def builds(text: str, arch: str = "sm_90a", name: str = "kernel") -> dict[tuple[str, str], Build]:
    module = parse(text)
    return {(name, arch): Build(name, arch, tuple(skeleton(Subject(module, module.entries[0]))))}


def changes(old: str, new: str) -> list[diff.Change]:
    (kernel,) = compare(builds(old), builds(new))
    assert kernel.status == ("changed" if kernel.changes else "same")
    return list(kernel.changes)


def test_the_same_build_is_the_same():
    assert changes(HANDOFF, HANDOFF) == []


def test_registers_labels_and_lines_do_not_matter():
    renamed = re.sub(r"%r(\d+)\b", lambda m: f"%r{int(m[1]) + 40}", HANDOFF).replace("WAIT", "AGAIN")
    assert renamed != HANDOFF
    assert changes(HANDOFF, "// one more line\n" + renamed) == []


def test_a_narrower_scope_is_named():
    (change,) = changes(HANDOFF, HANDOFF.replace("acquire.cluster", "acquire.cta"))
    assert change.kind == "changed" and "scope: .cluster -> .cta (narrower)" in change.notes
    (back,) = changes(HANDOFF.replace("acquire.cluster", "acquire.cta"), HANDOFF)
    assert "scope: .cta -> .cluster" in back.notes


def test_a_weaker_order_is_named():
    (change,) = changes(HANDOFF, HANDOFF.replace("arrive.release.cluster", "arrive.relaxed.cluster"))
    assert change.notes == ("order: .release -> .relaxed",)


def test_a_deleted_instruction_is_gone_and_an_added_one_new():
    without = HANDOFF.replace("    fence.mbarrier_init.release.cluster;\n", "")
    gone = [c for c in changes(HANDOFF, without) if c.kind == "gone"]
    assert [c.old.split()[0] for c in gone] == ["fence.mbarrier_init.release.cluster"]
    new = [c for c in changes(without, HANDOFF) if c.kind == "new"]
    assert [c.new for c in new] == [gone[0].old]


def test_a_moved_instruction_says_from_where_to_where():
    (kernel,) = compare(
        {
            ("k", "a"): Build(
                "k",
                "a",
                ("fence.acq_rel.gpu by all threads", "bar.sync 0 by all threads", "membar.gl by all threads"),
            )
        },
        {
            ("k", "a"): Build(
                "k",
                "a",
                ("bar.sync 0 by all threads", "membar.gl by all threads", "fence.acq_rel.gpu by all threads"),
            )
        },
    )
    (change,) = kernel.changes
    assert change.kind == "moved"
    assert change.notes == ("was first; is after membar.gl by all threads",)


def test_other_executors_and_other_guards_are_named():
    wider = changes(HANDOFF, HANDOFF.replace("setp.ne.s32 %p1, %r1, 0", "setp.gt.s32 %p1, %r1, 31"))
    assert {c.new.split()[0].split(".")[0] for c in wider} == {"mbarrier", "fence"}
    assert all("executed by thread 0 -> warp 0" in c.notes for c in wider)
    notes = [
        n for c in changes(HANDOFF, HANDOFF.replace("    ld.shared.b32 %r8, [%r3];\n", "")) for n in c.notes
    ]
    assert any(n.startswith("accesses after it: ") for n in notes)


def test_every_kind_of_mutant_shows_except_those_that_change_no_order_of_instructions():
    """A change of a value, a poll that asks once and a predicate are not in the skeleton."""
    silent = set()
    for mutant in mutants(HANDOFF):
        if not changes(HANDOFF, mutant.text):
            silent.add(mutant.operator)
    assert silent <= {"ignore-poll", "expect-tx"}


def test_kernels_are_paired():
    one, two = builds(HANDOFF), builds(HANDOFF, "sm_100a")
    (kernel,) = compare(one, two)
    assert kernel.title == "kernel sm_90a -> kernel sm_100a" and kernel.status == "same"
    (renamed,) = compare(one, builds(HANDOFF, name="other"))
    assert renamed.title == "kernel sm_90a -> other sm_90a"
    found = compare({**one, **builds(HANDOFF, name="b")}, {**one, **builds(HANDOFF, name="c")})
    assert {(k.title, k.status) for k in found} == {
        ("kernel sm_90a", "same"), ("b sm_90a", "gone"), ("c sm_90a", "new"),
    }  # fmt: skip


def test_ptx_and_machine_code_are_not_compared():
    ((key, build),) = builds(HANDOFF).items()
    with pytest.raises(DiffError, match="give the same form twice"):
        compare({key: build}, {key: replace(build, form="SASS")})


# -- what it reads ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "artifacts")
    store.put(samples.artifact(ptx=HANDOFF), "key")
    return store


def test_lock_store_and_object(tmp_path, store):
    lock = tmp_path / "kernels.lock"
    samples.lock().save(lock)
    locked = diff.read(lock)
    assert set(locked) == {("attn_res", "sm_90a"), ("attn_res", "sm_100a")}
    assert locked["attn_res", "sm_90a"].skeleton == samples.SKELETON
    built = diff.read(store.root)
    (folder,) = (store.root / "objects").iterdir()
    assert built == diff.read(folder) != {}
    ((_, build),) = built.items()
    assert any("mbarrier.try_wait" in line for line in build.skeleton)


def test_nothing_to_compare_is_one_line(tmp_path):
    with pytest.raises(DiffError, match="no such lock file"):
        diff.read(tmp_path / "no.lock")
    (tmp_path / "empty" / "built").mkdir(parents=True)
    with pytest.raises(DiffError, match="no kernel in it"):
        diff.read(tmp_path / "empty")


def test_command(tmp_path, store):
    other = Store(tmp_path / "other")
    other.put(samples.artifact(ptx=HANDOFF.replace("acquire.cluster", "acquire.cta")), "key")

    def run(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)
        assert done.exception is None, done.exception
        return done.return_value, done.output

    assert run(store.root, store.root) == (0, "kernel sm_90a: same\n")
    code, text = run(store.root, other.root)
    assert code == 1
    assert "kernel sm_90a: changed\n  - mbarrier.try_wait" in text
    assert "      scope: .cluster -> .cta (narrower)\n" in text
    code, text = run(store.root, other.root, "--format", "json")
    document = json.loads(text)
    assert code == 1 and document["changed"] is True
    assert document["kernels"][0]["changes"][0]["kind"] == "changed"


def test_code_and_machine_code(tmp_path):
    """PTX with its contract beside it has names for its parameters; a cubin is compared as machine code."""
    from k3_audit.artifact.toolchain import assemble

    text = rules()["R07"].passing
    (tmp_path / "poll.ptx").write_text(text)
    params = 'params = [{name = "ready", dtype = "i32", role = "flag"}]'
    toml = f'kernel = "kernel"\nlaunch = {{block = [128, 1, 1]}}\n{params}\n'
    ((_, plain),) = diff.read(tmp_path / "poll.ptx").items()
    (tmp_path / "poll.contract.toml").write_text(toml)
    ((_, named),) = diff.read(tmp_path / "poll.ptx").items()
    assert "[p0]" in plain.skeleton[0] and "[ready]" in named.skeleton[0]
    for name, form in (("a", text), ("b", text.replace("ld.acquire.gpu", "ld.relaxed.gpu"))):
        (tmp_path / f"{name}.cubin").write_bytes(assemble(form, "sm_90a"))
    old, new = (diff.read(tmp_path / f"{n}.cubin") for n in "ab")
    assert {b.form for b in old.values()} == {"SASS"}
    (kernel,) = compare(old, new)
    assert [(c.kind, c.old) for c in kernel.changes] == [("gone", "CCTL.IVALL")]
