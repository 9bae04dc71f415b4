"""The front end: what a file is decides its content; damaged and foreign files give one line."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from k3_audit.artifact.toolchain import ToolError, assemble
from k3_audit.audit.frontend import FrontendError, load
from k3_audit.audit.rules.base import snippet

pytestmark = pytest.mark.unit

PTX = snippet("griddepcontrol.wait;\nst.global.u32 [%rd1], %r1;")
CUBIN = assemble(PTX, "sm_90a")


def test_ptx(tmp_path: Path) -> None:
    (tmp_path / "a.ptx").write_text(PTX)
    (unit,) = load(tmp_path / "a.ptx")
    assert (unit.name, unit.ptx, unit.sass) == ("a", PTX, None)


def test_a_cubin_has_machine_code_only(tmp_path: Path) -> None:
    (tmp_path / "no-ending").write_bytes(CUBIN)
    (unit,) = load(tmp_path / "no-ending")
    assert unit.ptx == ""
    assert unit.arch == "sm_90a"
    assert unit.sass
    assert "ACQBULK" in unit.sass


def test_a_dump_folder_pairs_ptx_and_cubin(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_text(PTX)
    (tmp_path / "k.cubin").write_bytes(CUBIN)
    (tmp_path / "k.json").write_text("{}")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "other.ptx").write_text(PTX)
    units = {u.name: u for u in load(tmp_path)}
    assert set(units) == {"k", "other"}
    assert units["k"].sass is not None
    assert units["other"].sass is None


def test_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "p-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("p/k.ptx", PTX)
        z.writestr("p/k.cubin", CUBIN)
        z.writestr("p/readme.txt", "no kernel")
    (unit,) = load(wheel)
    assert unit.file == f"{wheel}!p/k.ptx"
    assert unit.sass


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    cases = {
        "cut.cubin": CUBIN[:700],
        "bytes.ptx": b"\xff\xfe\x00",
        "empty.ptx": b" \n",
        "z.whl": b"PK\x03\x04cut",
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FrontendError) as e:
            load(tmp_path / name)
        assert name in str(e.value)
        assert "\n" not in str(e.value)


@given(st.binary(max_size=300), st.sampled_from([b"", b"\x7fELF", b"PK\x03\x04", bytes.fromhex("50ed55ba")]))
def test_any_bytes_give_units_or_one_known_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, head: bytes
):
    path = tmp_path_factory.mktemp("f") / "x"
    path.write_bytes(head + data)
    try:
        load(path)
    except (FrontendError, ToolError) as e:
        assert "\n" not in str(e)
