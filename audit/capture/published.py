"""Wheels that carry machine code: what is inside, by name, version and sha256, and how to get it out.

Most carry machine code only: the auditor can show it but not decide its order, which is a matter of PTX. They
are here so that the front end and the SASS parser meet what people really ship. What comes as PTX is audited.
"""

from __future__ import annotations

import fnmatch
import re
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_audit.artifact.toolchain import list_embedded

from .builds import Built, File
from .vllm_k3 import FLASHINFER
from .vllm_k3 import WHEEL as VLLM
from .wheels import Wheel, fetch, sha256_of


@dataclass(frozen=True)
class Published:
    """A wheel and the shell patterns of its members to look into. `note` says what they are."""

    wheel: Wheel
    members: tuple[str, ...]
    note: str


PUBLISHED = (
    Published(
        Wheel(
            "flashinfer-cubin",
            "0.6.13",
            "41e4848c2d09d220e8394489b2fb6cfec6b6ad09f897b5ab8b39fc23055f6c24",
            458,
        ),
        ("*.cubin",),
        "attention and GEMM kernels, one cubin each",
    ),
    Published(
        Wheel(
            "tokenspeed-kernel",
            "0.1.4",
            "958ed94e8ec272ba198277bda56b0b4fa10b03626a80bb7d2a5a50440cd0b38b",
            51,
        ),
        ("*.so",),
        "CUDA C++ extensions, among them an AttnRes",
    ),
    Published(
        VLLM,
        ("*/_flashkda_C*.so", "*/_flashmla_C*.so", "*/_deepselect_C*.so", "*/_qutlass_C*.so"),
        "CUDA C++ extensions for KDA, MLA and sparse attention",
    ),
    Published(
        FLASHINFER,
        ("*.cubin", "*.so", "*.ptx", "*.fatbin"),
        "CUDA and CuTe DSL sources, built on the user's machine",
    ),
    Published(
        Wheel(
            "quack-kernels", "0.6.5", "df1ddd31366c82eb9692fe087c671209189dcbde53c909c81a865d4ee66b158d", 1
        ),
        ("*.cubin", "*.so", "*.ptx", "*.fatbin"),
        "CuTe DSL sources",
    ),
    Published(
        Wheel(
            "tokenspeed-mla", "2.0.3", "576ce91e861598347f09c429fe41269863d351bf3de8410a845dae39fa172e4a", 1
        ),
        ("*.cubin", "*.so", "*.ptx", "*.fatbin"),
        "CuTe DSL sources",
    ),
)

_ARCH = re.compile(r"sm_?(\d{2,3}[af]?)", re.IGNORECASE)


def members(published: Published, cache: Path | None = None) -> list[zipfile.ZipInfo]:
    """The wheel's members with machine code, in its order. Raises CaptureError as `fetch`."""
    with zipfile.ZipFile(fetch(published.wheel, cache)) as z:
        return [i for i in z.infolist() if any(fnmatch.fnmatch(i.filename, p) for p in published.members)]


def extract(published: Published, folder: Path, sample: int, cache: Path | None = None) -> dict[str, Any]:
    """Unpack up to `sample` members, evenly spaced, below `folder`, and describe the wheel as plain data.

    `images` counts what the unpacked libraries hold, by kind and architecture; a cubin or PTX counts itself.
    Raises CaptureError as `fetch`, ToolError without cuobjdump.
    """
    found = members(published, cache)
    step = max(1, -(-len(found) // sample))
    taken, images = [], Counter[str]()
    with zipfile.ZipFile(fetch(published.wheel, cache)) as z:
        for info in found[::step]:
            path = Path(z.extract(info, folder))
            taken.append(info.filename)
            if path.suffix == ".so":
                images.update(f"{i.kind} {i.arch}" for i in list_embedded(path))
            else:  # a cubin names its architecture in its file name, PTX in its text
                named = path.read_text().partition(".target")[2][:20] if path.suffix == ".ptx" else path.name
                arch = _ARCH.search(named)
                images[f"{path.suffix[1:]} {f'sm_{arch[1]}' if arch else 'unknown'}"] += 1
    return {
        "name": published.wheel.name,
        "version": published.wheel.version,
        "sha256": published.wheel.sha256,
        "note": published.note,
        "members": len(found),
        "bytes": sum(i.file_size for i in found),
        "taken": taken,
        "images": dict(sorted(images.items())),
    }


def ptx_builds(described: dict[str, Any], folder: Path, root: Path) -> list[Built]:
    """What was unpacked as PTX, in the form that the survey reads; paths relative to `root`."""
    builds = []
    for member in described["taken"]:
        if member.endswith(".ptx"):
            text = (folder / member).read_text()
            arch = _ARCH.search(text.partition(".target")[2][:20])
            entry = re.search(r"\.entry\s+([\w$]+)", text)
            name = str((folder / member).relative_to(root))
            file = File(
                *(Path(member).stem, entry[1] if entry else "", text.count("\n")),
                *(name, sha256_of(folder / member), "", ""),
            )
            builds.append(Built(member, f"sm_{arch[1]}" if arch else "", {}, 0.0, (file,)))
    return builds
