"""Small PTX kernels for the emulator's tests, and the assembler's opinion of them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
from k3_audit.audit import emulator

_BITS = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
_WRITTEN: dict[str, dict[str, str]] = {}  # arch -> name -> text of the entries made so far


def header(arch: str = "sm_90a") -> str:
    return f".version 8.8\n.target {arch}\n.address_size 64\n"


def entry(
    body: str,
    params: str = "",
    arch: str = "sm_90a",
    directives: str = "",
    outside: str = "",
    remember: bool = True,
) -> str:
    """A module with one entry; it is remembered for :func:`assemble_all`."""
    name = "k" + hashlib.sha256("\0".join((body, params, directives, outside)).encode()).hexdigest()[:16]
    text = f"{outside}\n.visible .entry {name}({params})\n{directives}\n{{\n{body}\n}}\n"
    if remember:
        _WRITTEN.setdefault(arch, {})[name] = text
    return header(arch) + text


def elementwise(lines: str, inputs: list[np.ndarray], outputs: list[str], arch: str = "sm_90a", **kwargs):
    """Run `lines` once per element. Inputs are registers a0, a1, ...; outputs d0, d1, ... of PTX types
    ("b32", "pred", ...). Returns one array of unsigned integers (bool for predicates) per output."""
    n = inputs[0].size
    out = [np.zeros(n, np.uint32 if t == "pred" else f"u{int(t[1:]) // 8}") for t in outputs]
    body = [".reg .b32 i, n, t; .reg .b64 p, o; .reg .pred q;"]
    for k, x in enumerate(inputs):
        body.append(f".reg .{_BITS[max(x.itemsize, 2)]} a{k};")
    for k, t in enumerate(outputs):
        body.append(f".reg .{t} d{k};")
    body.append("mov.u32 i, %ctaid.x; mov.u32 t, %tid.x; mad.lo.u32 i, i, 128, t; ld.param.u32 n, [n0];")
    body.append("setp.ge.u32 q, i, n; @q ret;")
    for k, x in enumerate(inputs):
        body.append(f"ld.param.u64 p, [x{k}]; mul.wide.u32 o, i, {x.itemsize}; add.u64 p, p, o;")
        body.append(f"ld.global.{_BITS[x.itemsize]} a{k}, [p];")
    body.append(lines)
    for k, t in enumerate(outputs):
        body.append(f"ld.param.u64 p, [y{k}]; mul.wide.u32 o, i, {out[k].itemsize}; add.u64 p, p, o;")
        if t == "pred":
            body.append(f"selp.u32 t, 1, 0, d{k}; st.global.b32 [p], t;")
        else:
            body.append(f"st.global.{t} [p], d{k};")
    body.append("ret;")
    params = [f".param .u64 x{k}" for k in range(len(inputs))] + [
        f".param .u64 y{k}" for k in range(len(out))
    ]
    text = entry("\n".join(body), ", ".join([*params, ".param .u32 n0"]), arch)
    args = [np.ascontiguousarray(x) for x in inputs]
    emulator.run(text, [*args, *out, n], (-(-n // 128), 1, 1), (128, 1, 1), arch=arch, **kwargs)
    return [o.astype(bool) if t == "pred" else o for o, t in zip(out, outputs, strict=True)]


def ptxas() -> Path | None:
    """The assembler of the pinned wheel, or one on the path."""
    wheel = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / "ptxas"
    found = wheel if wheel.exists() else shutil.which("ptxas")
    return Path(found) if found else None


def assemble_all(tmp_path: Path) -> list[str]:
    """Assemble the kernels made since the last call; returns the assembler's complaints."""
    tool = ptxas()
    assert tool is not None, "ptxas of the nvidia-cuda-nvcc wheel is not installed"
    complaints = []
    for arch, texts in _WRITTEN.items():
        source = tmp_path / f"{arch}.ptx"
        source.write_text(header(arch) + "\n".join(texts.values()))
        done = subprocess.run(
            [tool, f"-arch={arch}", str(source), "-o", str(tmp_path / "out.cubin")],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            complaints.append(done.stderr)
    _WRITTEN.clear()
    return complaints
