"""Artifact store, toolchain and build: reproducible, checked on every load, portable, with one-line errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from k3_audit.artifact import ARCHITECTURES, Artifact, Store, StoreError, ptx_hash, toolchain
from k3_audit.artifact.atomic import write_atomic
from k3_audit.fused_backend import build
from k3_audit.fused_backend.build import BuildError

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Artifact]:
    store = Store(tmp_path_factory.mktemp("store"))
    return store, build.build("attn_res", "sm_90a", store)[0]


def test_a_second_build_gives_the_same_bytes(built: tuple[Store, Artifact], tmp_path: Path) -> None:
    again, fresh = build.build("attn_res", "sm_90a", Store(tmp_path), force=True)
    assert fresh
    assert again == built[1]


def test_an_unchanged_source_is_not_built_again(built: tuple[Store, Artifact]) -> None:
    store, artifact = built
    assert build.build("attn_res", "sm_90a", store) == (artifact, False)


def test_the_artifact_names_no_place_and_no_mangled_symbol(built: tuple[Store, Artifact]) -> None:
    ptx = built[1].ptx
    assert ".entry attn_res(" in ptx
    assert "kernel_cutlass" not in ptx
    files = [line for line in ptx.splitlines() if line.strip().startswith(".file")]
    assert files
    assert not [line for line in files if '"/' in line]


def test_a_moved_line_does_not_change_the_code(built: tuple[Store, Artifact]) -> None:
    ptx = built[1].ptx
    moved = ptx.replace(".loc\t1 ", ".loc\t1 9").replace("// end inline asm", "// other words")
    assert moved != ptx
    assert ptx_hash(moved) == ptx_hash(ptx)
    assert ptx_hash(ptx.replace("griddepcontrol.wait;", "")) != ptx_hash(ptx)


@pytest.mark.parametrize("name", ["kernel.ptx", "kernel.cubin", "kernel.sass", "artifact.json"])
def test_a_damaged_object_is_never_loaded(name: str, built: tuple[Store, Artifact], tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = tmp_path / "objects" / store.put(built[1], "key")
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-2] + b"x\n")
    with pytest.raises(StoreError, match="run `k3-audit build"):
        store.get("attn_res", "sm_90a")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no build of attn_res for sm_90a"):
        Store(tmp_path).get("attn_res", "sm_90a")
    with pytest.raises(BuildError, match="no kernel 'nothing'; known: attn_res"):
        build.build("nothing", "sm_90a", Store(tmp_path))
    with pytest.raises(BuildError, match="sm_80 is not built here"):
        build.build("attn_res", "sm_80", Store(tmp_path))


def test_the_sources_are_the_kernel_and_what_it_imports() -> None:
    names = set(build.source_hashes("attn_res"))
    assert "fused_backend/kernels/attn_res.py" in names
    assert {f"fused_backend/sync/{n}.py" for n in ("ptx", "cluster_exchange", "dependent_launch")} <= names


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomic(target, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"could not write .*No space left"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_ptxas_errors_are_one_line_with_the_ptx_line(built: tuple[Store, Artifact]) -> None:
    broken = built[1].ptx.replace("griddepcontrol.wait;", "griddepcontrol.wait.wrong;")
    with pytest.raises(toolchain.ToolError, match=r"PTX line \d+") as e:
        toolchain.assemble(broken, "sm_90a")
    assert "\n" not in str(e.value)
    assert e.value.line > 0


def test_a_missing_tool_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "_directories", lambda: iter([tmp_path]))
    with pytest.raises(toolchain.ToolError, match="nvidia-cuda-nvcc"):
        toolchain.locate("ptxas")


def test_all_architectures_have_a_kernel_of_their_own() -> None:
    hashes = {build.current("attn_res", arch, Store()).cubin_sha256 for arch in ARCHITECTURES}
    assert len(hashes) == len(ARCHITECTURES)
