"""Capture of other people's kernels: wheels, fresh processes, manifests, recipes, the survey. Fetches nothing."""

import hashlib
import json
import subprocess
import sys
import types
import zipfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import capture_fake
import pytest
from k3_audit.audit import cli
from k3_audit.audit.capture import builds, cutedsl, fla, published, survey, vllm_k3, wheels
from k3_audit.audit.capture.processes import Fresh, one_line

pytestmark = pytest.mark.unit

CORPUS = Path(__file__).parents[1] / "corpus"


# -- wheels


def wheel(tmp_path, members, name="some-kernels", version="1.2", digest=None):
    """A wheel file in the cache below `tmp_path`, and its record."""
    path = tmp_path / "wheels" / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as z:
        for member, text in members.items():
            z.writestr(member, text)
    digest = digest or hashlib.sha256(path.read_bytes()).hexdigest()
    return wheels.Wheel(name, version, digest, 1)


def no_pip(*args, **kwargs):
    raise AssertionError("pip must not be asked")


def test_a_cached_wheel_is_not_fetched_again(tmp_path, monkeypatch):
    record = wheel(tmp_path, {"p/a.py": "A = 1"})
    monkeypatch.setattr(subprocess, "run", no_pip)
    assert wheels.fetch(record, tmp_path).name == "some_kernels-1.2-py3-none-any.whl"


def pip(data=None, code=0, stderr=""):
    def run(command, **kwargs):
        if data is not None:
            folder = Path(command[command.index("-d") + 1])
            (folder / "some_kernels-1.2-py3-none-any.whl").write_bytes(data)
        return subprocess.CompletedProcess(command, code, None, stderr)

    return run


def test_a_fetched_wheel_must_have_the_recorded_hash(tmp_path, monkeypatch):
    data = b"the right bytes"
    record = wheels.Wheel("some-kernels", "1.2", hashlib.sha256(data).hexdigest(), 1)
    monkeypatch.setattr(subprocess, "run", pip(b"other bytes"))
    with pytest.raises(wheels.CaptureError, match=f"expected {record.sha256}"):
        wheels.fetch(record, tmp_path)
    assert not list((tmp_path / "wheels").iterdir())
    monkeypatch.setattr(subprocess, "run", pip(data))
    assert wheels.fetch(record, tmp_path).read_bytes() == data


def test_what_pip_cannot_deliver_is_one_line(tmp_path, monkeypatch):
    record = wheels.Wheel("some-kernels", "1.2", "0" * 64, 1)
    monkeypatch.setattr(subprocess, "run", pip(code=1, stderr="WARNING: x\nERROR: no such version\n"))
    with pytest.raises(wheels.CaptureError, match="ERROR: no such version") as e:
        wheels.fetch(record, tmp_path)
    assert "\n" not in str(e.value)


def test_unpack_takes_only_what_is_asked_for(tmp_path, monkeypatch):
    record = wheel(tmp_path, {"p/a.py": "", "p/b.so": "", "q/c.py": "", "r/d.py": ""})
    root = wheels.unpack(record, ["p/"], tmp_path)
    assert [str(f.relative_to(root)) for f in root.rglob("*.*")] == ["p/a.py"]
    wheels.unpack(record, ["p/", "q/"], tmp_path)
    assert {f.name for f in root.rglob("*.*")} == {"a.py", "c.py"}
    with pytest.raises(wheels.CaptureError, match="has no z/"):
        wheels.unpack(record, ["z/"], tmp_path)
    monkeypatch.setattr(wheels, "fetch", no_pip)
    assert wheels.unpack(record, ["p/"], tmp_path) == root


# -- fresh processes


@pytest.fixture(scope="module")
def fresh():
    return Fresh()


def test_a_fresh_process_answers(fresh):
    assert fresh.call(capture_fake.answer, {"a": (1, 2)}, timeout=60) == ({"a": (1, 2)}, "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong", "RuntimeError: error: PTX assembly failed"),
        ("crash", "the process ended without an answer (SIGSEGV)"),
        ("exit", "SystemExit: 7"),
    ],
)
def test_a_fresh_process_that_fails_says_why_in_one_line(fresh, name, reason):
    assert fresh.call(capture_fake.build, name, "sm_90a", timeout=60) == (None, reason)


def test_a_process_that_leaves_or_hangs_is_reported(fresh):
    assert fresh.call(capture_fake.leave, timeout=60)[1].endswith("(exit code 3)")
    assert fresh.call(capture_fake.build, "hang", "sm_90a", timeout=0.5) == (None, "not done within 0.5 s")


def test_the_assembler_s_first_complaint_is_the_reason():
    log = (
        "\x1b[91merror:\x1b[0m PTX assembly failed\n  note: ptxas log:\n"
        "    ptxas application ptx input, line 9; error   : Feature 'fma.f32x2' requires .target\n"
        "        sm_100 or higher\n    ptxas application ptx input, line 12; error   : something else\n"
    )
    assert one_line(RuntimeError(log)) == "ptxas: Feature 'fma.f32x2' requires .target sm_100 or higher"
    log = (
        "error: NVVM backend compilation failed\n   extra log: splitk.py(287) Error: unsupported operation\n"
    )
    assert one_line(RuntimeError(log)) == "the compiler's back end: unsupported operation"


# -- the runner


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    """One run of the fake recipes: (folder, manifest, what was built in which order)."""
    folder = tmp_path_factory.mktemp("capture")
    manifest = builds.Manifest("capture_fake", [], {})
    seen = []
    todo = builds.wanted([r for r in capture_fake.recipes() if r.name != "hang"], ["sm_90a"])
    builds.run(manifest, todo, folder, timeout=60, progress=seen.append)
    return folder, manifest, seen


def test_every_recipe_has_an_outcome(capture):
    folder, manifest, seen = capture
    outcome = {b.recipe: b.reason or len(b.files) for b in manifest.builds}
    assert outcome == {
        **{"good": 1, "two": 2, "none": "the recipe compiled nothing"},
        **{"wrong": "RuntimeError: error: PTX assembly failed", "exit": "SystemExit: 7"},
        "crash": "the process ended without an answer (SIGSEGV)",
    }
    assert sorted(b.recipe for b in seen) == sorted(outcome)
    assert builds.Manifest.load(folder) == manifest
    two = next(b for b in manifest.builds if b.recipe == "two")
    assert [f.ptx for f in two.files] == ["two.Kernel.sm_90a.ptx", "two.Kernel1.sm_90a.ptx"]
    assert (folder / two.files[1].ptx).read_text() == capture_fake.PTX


def test_a_run_continues_where_the_last_one_stopped(capture, tmp_path):
    folder, manifest, _ = capture
    todo = builds.wanted(capture_fake.recipes()[:3], ["sm_90a"])

    def again(retry=False, todo=todo):
        seen = []
        copy = replace(manifest, builds=list(manifest.builds))
        builds.run(copy, todo, folder, timeout=60, retry=retry, progress=seen.append)
        return sorted(b.recipe for b in seen)

    assert again() == []
    assert again(retry=True) == ["wrong"]
    (folder / "good.Kernel.sm_90a.ptx").write_text("damaged")
    assert again() == ["good"]
    (folder / "two.Kernel1.sm_90a.cubin").unlink()
    assert again() == ["two"]
    changed = [(name, arch, parameters | {"arguments": [3]}) for name, arch, parameters in todo[:1]]
    assert again(todo=changed) == ["good"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "other"}', '{"schema": "k3-audit/capture-1"}'])
def test_a_damaged_manifest_is_one_line(tmp_path, text):
    (tmp_path / builds.MANIFEST).write_text(text)
    with pytest.raises(wheels.CaptureError, match=r"capture again"):
        builds.Manifest.load(tmp_path)


# -- recording what CuTe DSL compiles


@pytest.fixture
def dsl(monkeypatch):
    """Stand-ins for the toolkit and torch: `cute.compile` returns what it was asked for."""

    def compile(kernel, *args, options=""):
        ptx = f'.visible .entry made()\n{{\n}}\n.file 1 "/src/pkg/k.py"\n// {options}\n'
        return types.SimpleNamespace(artifacts=types.SimpleNamespace(PTX=ptx, CUBIN=b"\x7fELF"))

    cute = types.SimpleNamespace(compile=compile, experimental=types.SimpleNamespace(compile=compile))
    runtime = types.SimpleNamespace(get_device_attribute=no_pip)
    torch = types.SimpleNamespace(accelerator=types.SimpleNamespace(device_index=no_pip))
    modules = {"cutlass": types.SimpleNamespace(cute=cute), "cutlass.cute": cute, "torch": torch}
    for name, module in (modules | {"cutlass.base_dsl.runtime.cuda": runtime}).items():
        monkeypatch.setitem(sys.modules, name, module)
    return cute, runtime, torch


class Kernel:
    def __call__(self): ...

    def push(self): ...


def test_recording_compiles_for_the_architecture_and_puts_everything_back(dsl):
    cute, runtime, torch = dsl
    before = cute.compile, cute.experimental.compile, runtime.get_device_attribute
    with cutedsl.recording("sm_100a", "/scratch", "/src") as built:
        with torch.accelerator.device_index(0):
            cute.compile(Kernel(), 1, options="--gpu-arch=sm_90a --enable-tvm-ffi --ptxas-options=-O1")
        cute.experimental.compile(Kernel().push, 1)
        shared = types.SimpleNamespace(name="CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
        assert runtime.get_device_attribute(shared) == 228 * 1024
        with pytest.raises(RuntimeError, match="CLOCK_RATE"):
            runtime.get_device_attribute(types.SimpleNamespace(name="CLOCK_RATE"))
    assert (cute.compile, cute.experimental.compile, runtime.get_device_attribute) == before
    assert [(c.kernel, c.entry) for c in built] == [("Kernel", "made")] * 2
    assert '"pkg/k.py"' in built[0].ptx and "/src" not in built[0].ptx
    for wanted in (
        "--gpu-arch=sm_100a",
        "--ptxas-options=-O1",
        "--generate-line-info",
        "--dump-dir /scratch",
    ):
        assert wanted in built[0].ptx
    assert "sm_90a" not in built[0].ptx and "tvm" not in built[0].ptx


def test_packages_below_empty_parents_import(tmp_path, monkeypatch):
    folder = tmp_path / "outer_k3" / "inner"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('needs a GPU')")
    (folder / "kernel.py").write_text("NAME = __name__")
    cutedsl.empty_packages(tmp_path, "outer_k3.inner")
    cutedsl.stub("outer_k3.other", answer=42)
    try:
        from outer_k3.inner import kernel
        from outer_k3.other import answer
    finally:
        for name in [m for m in sys.modules if m.startswith("outer_k3")]:
            del sys.modules[name]
    assert (kernel.NAME, answer) == ("outer_k3.inner.kernel", 42)


# -- recipes

CLASSES = [
    *("attn_res", "embedding", "prefetch", "gemm", "kda", "mla.tp", "mla.dcp"),
    *("oproj.producer", "oproj.consumer", "oproj.fused", "recoverssm.verify", "recoverssm.commit"),
    *(f"moe.{k}" for k in ("front", "route", "experts", "group", "plan", "shared", "down", "dense", "situ")),
    *(f"moe.tail.{k}" for k in ("front", "front_poll", "publish", "twoshot", "push")),
    *(f"moe.small_batch.{k}" for k in ("front", "experts", "shared", "tables", "probe")),
    "flashinfer.splitk",
]


@pytest.mark.parametrize("prefix", CLASSES)
def test_every_class_of_kernel_has_recipes(prefix):
    assert any(r.name.startswith(prefix) for r in vllm_k3.recipes())


@pytest.mark.parametrize("module", [vllm_k3, fla])
def test_recipes_are_plain_data_with_names_of_their_own(module):
    found = module.recipes()
    assert max(Counter(r.name for r in found).values()) == 1
    for r in found:
        assert r.call.count(":") == 1
        assert json.loads(json.dumps(asdict(r)))["name"] == r.name
    parallel = [r.name for r in found if ".tp" in r.name]
    assert {t for n in parallel for t in n.split(".") if t.startswith("tp")} == {"tp8", "tp16"}


def test_verify_steps_of_up_to_eight_tokens_are_there():
    names = [r.name for r in vllm_k3.recipes()]
    for kernel in ("kda.tp8", "kda.tp16", "mla.tp8", "mla.tp16"):
        assert {"q4", "q8"} <= {n.rsplit(".", 1)[-1] for n in names if n.startswith(kernel)}


def test_a_layout_is_row_major_unless_it_says_otherwise():
    assert vllm_k3.layout("int32", 2, 3, 4)["layout"] == [[2, 3, 4], [12, 4, 1], "int32"]
    assert vllm_k3.layout("int32", 2, 3, stride=(9, 1))["layout"][1] == [9, 1]


def test_the_rows_of_a_projection_add_up():
    """q|k|v, output gate, F_A, beta: the packed columns that the KDA recipes slice fit the row pitch."""
    for tp, pitch in ((8, 6288), (16, 3216)):
        heads = 96 // tp
        columns = 3 * heads * 128 + heads * 128 + 128 + heads
        assert columns <= pitch < columns + 16
        operands = next(r for r in vllm_k3.recipes() if r.name == f"kda.tp{tp}.b1").arguments[0]
        assert operands[0]["layout"] == [[1, 3 * heads * 128], [pitch, 1], "bfloat16"]


def test_triton_recipes_give_each_argument_once():
    for r in fla.recipes():
        assert not r.arguments.keys() & r.constants.keys()


# -- published wheels


def test_published_machine_code_is_counted_and_ptx_is_audited(tmp_path):
    ptx = (CORPUS / "R06").glob("*.fail.ptx")
    text = sorted(ptx)[0].read_text()
    members = {f"k/sm100f_{i}.cubin": "x" for i in range(5)} | {"k/one.ptx": text, "k/readme.md": ""}
    p = published.Published(wheel(tmp_path, members), ("*.cubin", "*.ptx"), "a note")
    assert len(published.members(p, tmp_path)) == 6
    described = published.extract(p, tmp_path / "out" / "w", 3, tmp_path)
    assert described["members"] == 6 and len(described["taken"]) == 3
    assert described["images"] == {"cubin sm_100f": 3}
    described = published.extract(p, tmp_path / "out" / "w", 100, tmp_path)
    assert described["images"]["cubin sm_100f"] == 5
    (built,) = published.ptx_builds(described, tmp_path / "out" / "w", tmp_path / "out")
    assert built.files[0].ptx == "w/k/one.ptx" and built.arch.startswith("sm_")


# -- the survey


def test_the_survey_counts_verdicts_and_never_hides_a_failure(tmp_path):
    cases = {
        "bad": sorted((CORPUS / "R06").glob("*.fail.ptx"))[0].read_text(),
        "good": capture_fake.PTX,
        "broken": "this is no PTX {",
    }
    manifest = builds.Manifest("capture_fake", [{"name": "p", "version": "1", "sha256": ""}], {})
    for name, text in cases.items():
        (tmp_path / f"{name}.ptx").write_text(text)
        file = builds.File(name, "", text.count("\n"), f"{name}.ptx", "", "", "")
        manifest.builds.append(builds.Built(name, "sm_90a", {}, 0.0, (file,)))
    manifest.builds.append(builds.Built("absent", "sm_90a", {}, 0.0, (), "ptxas: no | such thing"))
    manifest.save(tmp_path)
    rows, manifests = survey.survey([tmp_path], timeout=120)
    verdicts = {r.recipe: r.verdict for r in rows}
    assert verdicts == {"bad": "finding", "good": "clean", "broken": "error"}
    assert next(r for r in rows if r.recipe == "bad").findings["R06 finding"] >= 1
    assert all(r.mebibytes > 0 for r in rows if not r.failure)
    survey.save(rows, tmp_path / "survey.json")
    assert survey.load(tmp_path / "survey.json") == rows
    table = survey.markdown(rows, manifests)
    assert "| p 1 | sm_90a | 4 | 1 | 3 | 1 | 1 | 0 | 1 | 0 |" in table
    assert "broken.ptx: PtxError" in table and "no \\| such thing" in table
    document = tmp_path / "README.md"
    document.write_text(f"before\n{survey.BEGIN}\nold\n{survey.END}\nafter\n")
    survey.insert(document, table)
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and table in text
    document.write_text("no marks")
    with pytest.raises(wheels.CaptureError, match="lacks the marks"):
        survey.insert(document, table)
    assert document.read_text() == "no marks"


@pytest.mark.parametrize(
    ("findings", "wants"),
    [
        ({"R15 inconclusive": 3, "R20 note": 1}, 1),
        ({"R15 inconclusive": 3, "R16 inconclusive": 1}, 1),
        ({"R15 inconclusive": 3, "R01 inconclusive": 1}, 0),
    ],
)
def test_what_only_a_contract_can_settle_is_counted_apart(findings, wants):
    manifest = builds.Manifest("m", [{"name": "p", "version": "1", "sha256": ""}], {})
    manifest.builds = [builds.Built("k", "sm_90a", {}, 0.0)]
    row = survey.Row("m", "k", "k.ptx", "sm_90a", 9, "inconclusive", 0.1, 20.0, findings)
    assert f"| p 1 | sm_90a | 1 | 0 | 1 | 0 | 0 | 1 | 0 | {wants} | 9 lines |" in survey.markdown(
        [row], [manifest]
    )


# -- the command line


def test_commands_answer_bad_input_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, said in (
        (["vllm-k3", "--only", "nothing*"], "no recipe matches"),
        (["fla", "--only", "nothing*"], "no recipe matches"),
        (["wheels", "--only", "nothing*"], "no wheel matches"),
        (["survey"], "holds no capture"),
        (["survey", "elsewhere"], "holds no capture"),
    ):
        assert cli.run(["capture", *arguments]) == 3
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err


def test_recipes_are_listed_without_building(capsys):
    assert cli.run(["capture", "vllm-k3", "--list", "--only", "kda.tp8.*"]) == 0
    listed = capsys.readouterr().out.split()
    assert "kda.tp8.b1.q8" in listed and all(n.startswith("kda.tp8.") for n in listed)
