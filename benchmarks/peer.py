"""Build the AttnRes kernel that the vllm 0.33.0 wheel ships as Python source, to measure and audit it beside ours.

    python benchmarks/peer.py [--arch sm_90a]

The wheel is fetched by name and version, checked by sha256, and only its Kimi K3 package is unpacked, into the cache.
Nothing of it enters this repository. Needs no GPU and none of vLLM's compiled parts: the package is imported below
empty parents. Writes `build/peer/attn_res.<arch>.bank<n>.{ptx,cubin,json}`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path

from k3_audit.artifact import sha256
from k3_audit.artifact.atomic import write_atomic
from k3_audit.artifact.toolchain import assemble

WHEEL = "vllm==0.33.0"
WHEEL_SHA256 = "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa"
MODEL = "vllm/models/kimi_k3/"
DECODE = "vllm.models.kimi_k3.nvidia.specialized_decode.cutedsl"
# packages whose __init__ would import vLLM's compiled parts
EMPTY = (DECODE, "vllm.models.kimi_k3.nvidia.ops.cute_dsl.latent_moe_tail")
OUT = Path("build/peer")


def unpack(cache: Path) -> Path:
    """Folder with the wheel's Kimi K3 package, fetched on first use. Exits with one line when it cannot be had."""
    root = cache / WHEEL.replace("==", "-")
    if (root / MODEL).is_dir():
        return root
    with tempfile.TemporaryDirectory() as folder:
        print(f"fetching the {WHEEL} wheel (about 340 MB) ...", flush=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            folder,
            WHEEL,
        ]
        if subprocess.run(command, check=False).returncode:
            sys.exit(
                f"peer.py: could not download {WHEEL}; run `{' '.join(command[1:])}` where there is a network"
            )
        wheel = next(Path(folder).glob("*.whl"))
        if (digest := sha256(wheel.read_bytes())) != WHEEL_SHA256:
            sys.exit(f"peer.py: {wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}")
        staging = Path(tempfile.mkdtemp(dir=cache))
        with zipfile.ZipFile(wheel) as z:
            z.extractall(staging, [n for n in z.namelist() if n.startswith(MODEL) and n.endswith(".py")])
        staging.rename(root)
    return root


def import_peer(root: Path) -> types.ModuleType:
    """The peer's `attn_res.prepared`, below parents that are empty packages."""
    for package in EMPTY:
        parts = package.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            module = types.ModuleType(name)
            module.__path__ = [str(root.joinpath(*parts[:i]))]
            sys.modules.setdefault(name, module)
    return importlib.import_module(f"{DECODE}.attn_res.prepared")


def build(bank_rows: int, arch: str, cache: Path) -> Path:
    """Compile the peer's kernel for a plain delta tensor and `bank_rows` saved rows. Returns the path of the cubin."""
    import cutlass.cute as cute

    prepared = import_peer(unpack(cache))
    original, kept = cute.compile, {}
    with tempfile.TemporaryDirectory() as folder:

        def keep(kernel, *args, options=""):
            options += f" --generate-line-info --keep-ptx --keep-cubin --dump-dir {folder}"
            kept["code"] = original(kernel, *args, options=options)
            return kept["code"]

        cute.compile = keep
        try:
            # (saved rows, has delta, bank row to write, final, mailbox slots, capacity, architecture)
            prepared.compile_consumer(bank_rows, True, -1, False, 0, 0, arch)
        finally:
            cute.compile = original
        ptx, cubin = kept["code"].artifacts.PTX, kept["code"].artifacts.CUBIN
    entry = re.findall(r"\.entry\s+([\w$]+)", ptx)[0]
    stem = OUT / f"attn_res.{arch}.bank{bank_rows}"
    write_atomic(stem.with_name(stem.name + ".ptx"), ptx)
    write_atomic(stem.with_name(stem.name + ".cubin"), cubin)
    info = {
        "wheel": WHEEL,
        "wheel_sha256": WHEEL_SHA256,
        "entry": entry,
        "arch": arch,
        "cubin_sha256": sha256(cubin),
    }
    # its SmemAllocator asks for 1816 bytes of dynamic shared memory: 64 + 3*112 + 3*16 floats and 3 mbarriers
    info |= {"cluster": [7, 1, 1], "block": [128, 1, 1], "dynamic_smem": 2048, "bank_rows": bank_rows}
    write_atomic(stem.with_name(stem.name + ".json"), json.dumps(info, indent=1) + "\n")
    return stem.with_name(stem.name + ".cubin")


# The floor of any kernel launched this way: seven CTAs that only wait for the previous grid.
EMPTY_KERNEL = """.version 8.0
.target {arch}
.address_size 64
.visible .entry empty()
.reqntid 128, 1, 1
{{
    griddepcontrol.launch_dependents;
    griddepcontrol.wait;
    ret;
}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument(
        "--bank-rows", type=int, nargs="+", default=[1, 4, 8], help="saved rows, one build each"
    )
    arguments = parser.parse_args()
    cache = Path(os.environ.get("K3_AUDIT_CACHE", Path.home() / ".cache" / "k3-audit"))
    cache.mkdir(parents=True, exist_ok=True)
    write_atomic(
        OUT / f"empty.{arguments.arch}.cubin",
        assemble(EMPTY_KERNEL.format(arch=arguments.arch), arguments.arch),
    )
    for rows in arguments.bank_rows:
        print(build(rows, arguments.arch, cache))


if __name__ == "__main__":
    main()
