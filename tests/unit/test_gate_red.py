"""Six edits that a kernel engineer could make, each on a copy of the checkout: the gate must turn red and say why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from emulated import artifact, captured, judged
from k3_audit.artifact import Store
from k3_audit.audit.findings import Verdict

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("artifact", "audit", "fused_backend", "reference")
KERNEL = "fused_backend/kernels/attn_res.py"
EXCHANGE = "fused_backend/sync/cluster_exchange.py"
INLINE = "fused_backend/sync/ptx.py"


@dataclass(frozen=True)
class Edit:
    """Replace text in one file; `told` are words that the gate's report must hold afterwards."""

    file: str
    changes: tuple[tuple[str, str], ...]
    told: tuple[str, ...]


ORDER = {
    "load moved above the dependency wait": Edit(
        KERNEL,
        (
            (
                "    dependent_launch.wait(after=mm)\n    d = _read(delta, row)\n",
                "    d = _read(delta, row)\n    dependent_launch.wait(after=mm)\n",
            ),
        ),
        ("R15", "delta", "attn_res.py"),
    ),
    "fence dropped": Edit(
        EXCHANGE,
        (('        ordering("fence.mbarrier_init.release.cluster;")\n', ""),),
        ("R10", "mbarrier", "cluster_exchange.py"),
    ),
    "scope weakened": Edit(
        EXCHANGE,
        (("try_wait.parity.acquire.cluster", "try_wait.parity.acquire.cta"),),
        ("R06", "cluster", "cluster_exchange.py"),
    ),
    "clobber dropped": Edit(
        INLINE,
        (('f"{constraints},~{{memory}}" if constraints else "~{memory}"', "constraints"),),
        ("DSL01", "memory", "cluster_exchange.py"),
    ),
}
NUMBERS = {
    "softmax rounded to BF16": Edit(
        KERNEL,
        (("e_j = broadcast(e, lane_of_row)", "e_j = widen(narrow([broadcast(e, lane_of_row)] * 2))[0]"),),
        (),
    ),
    "one bank row skipped": Edit(
        KERNEL,
        (("if j >= bank_rows:", "if j >= bank_rows - 1:"), ("if j < bank_rows:", "if j < bank_rows - 1:")),
        (),
    ),
}


def checkout(folder: Path, edit: Edit | None = None) -> Path:
    """A copy of what the gate reads, importable below `folder`/import, with `edit` made in it."""
    for name in (*ROOMS, "golden", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "import" / "k3_audit").mkdir(parents=True)
    for room in ROOMS:
        (folder / "import" / "k3_audit" / room).symlink_to(folder / room)
    if edit is not None:
        path = folder / edit.file
        text = path.read_text()
        for old, new in edit.changes:
            assert old in text, f"{edit.file} no longer has {old!r}: this test edits nothing"
            text = text.replace(old, new)
        path.write_text(text)
    return folder


def gate(folder: Path) -> tuple[int, str]:
    """(exit code, report) of `k3-audit gate` run in the copy, as a person would."""
    command = [
        sys.executable,
        "-c",
        "from k3_audit.audit.cli import main; main()",
        "gate",
        "--root",
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder / "import"), "COLUMNS": "200", "NO_COLOR": "1"}
    environment["K3_AUDIT_STORE"] = str(folder / "store")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def test_the_shipped_checkout_is_green(tmp_path: Path) -> None:
    code, report = gate(checkout(tmp_path))
    assert code == 0, report


@pytest.mark.parametrize("name", ORDER)
def test_an_order_defect_turns_the_gate_red(name: str, tmp_path: Path) -> None:
    edit = ORDER[name]
    code, report = gate(checkout(tmp_path, edit))
    assert code == 1, report
    missing = [word for word in edit.told if word not in report]
    assert not missing, f"the report does not say {missing}:\n{report}"


@pytest.mark.parametrize("name", NUMBERS)
def test_a_numerical_defect_turns_the_gate_red(name: str, tmp_path: Path) -> None:
    """The gate asks for new evidence, and the tier that would give it refuses: here on the emulated kernel."""
    folder = checkout(tmp_path, NUMBERS[name])
    code, report = gate(folder)
    assert code == 1, report
    for words in (
        "the machine code is not the one that the lock names",
        "longctx evidence is missing",
        "regenerate.py",
    ):
        assert words in report, f"the report does not say {words!r}:\n{report}"
    broken = Store(folder / "store").get("attn_res", "sm_90a")
    _, mixes = captured()
    judgement, _ = judged(replace(artifact("sm_90a"), ptx=broken.ptx), "3 ffn", mixes["3 ffn"])
    assert judgement.verdict is Verdict.FINDING, judgement.message
    assert "layer 3 ffn" in judgement.message
    assert "position" in judgement.message
