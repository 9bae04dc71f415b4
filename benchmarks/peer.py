"""Build the AttnRes kernel that the vllm 0.33.0 wheel ships as Python source, to measure and audit it beside ours.

    python benchmarks/peer.py [--arch sm_90a]

The wheel is fetched by name and version, checked by sha256, and only its Kimi K3 package is unpacked, into the cache.
Nothing of it enters this repository. Needs no GPU and none of vLLM's compiled parts: the package is imported below
empty parents. Writes `build/peer/attn_res.<arch>.bank<n>.{ptx,cubin,json}`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from k3_audit.artifact import sha256
from k3_audit.artifact.atomic import write_atomic
from k3_audit.artifact.toolchain import assemble
from k3_audit.audit.capture.cutedsl import recording
from k3_audit.audit.capture.vllm_k3 import WHEEL, prepared
from k3_audit.audit.capture.wheels import CaptureError

OUT = Path("build/peer")


def build(bank_rows: int, arch: str) -> Path:
    """Compile the peer's kernel for a plain delta tensor and `bank_rows` saved rows. Returns the path of the cubin."""
    compile_consumer = prepared("attn_res.prepared").compile_consumer
    with tempfile.TemporaryDirectory() as folder, recording(arch, folder) as built:
        # (saved rows, has delta, bank row to write, final, mailbox slots, capacity, architecture)
        compile_consumer(bank_rows, True, -1, False, 0, 0, arch)
    (code,) = built
    stem = OUT / f"attn_res.{arch}.bank{bank_rows}"
    write_atomic(stem.with_name(stem.name + ".ptx"), code.ptx)
    write_atomic(stem.with_name(stem.name + ".cubin"), code.cubin)
    info = {
        "wheel": WHEEL.requirement,
        "wheel_sha256": WHEEL.sha256,
        "entry": code.entry,
        "arch": arch,
        "cubin_sha256": sha256(code.cubin),
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
    write_atomic(
        OUT / f"empty.{arguments.arch}.cubin",
        assemble(EMPTY_KERNEL.format(arch=arguments.arch), arguments.arch),
    )
    try:
        for rows in arguments.bank_rows:
            print(build(rows, arguments.arch))
    except CaptureError as e:
        sys.exit(f"peer.py: {e}")


if __name__ == "__main__":
    main()
