"""The artifact store: a content-addressed folder between the builder, the auditor and the launcher.

    <root>/objects/<sha256>/{kernel.ptx, kernel.cubin, kernel.sass, artifact.json}     never changed once written
    <root>/built/<kernel>.<arch>.json                                                    {build key, object}

The object name is the hash of `artifact.json`, which holds the hashes of the other three files: whoever loads an
object by name gets exactly the bytes that were audited, or an error. The build key says which sources, toolkit and
options made it, so a second build of the same thing is a look-up.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from .artifact import Artifact, sha256
from .atomic import write_atomic
from .contract import Contract

STORE_ENV = "K3_AUDIT_STORE"
DEFAULT_ROOT = Path("build/artifacts")
_SCHEMA = 1


class StoreError(Exception):
    """One line: what is missing or damaged in the store, and the command that mends it."""


class Store:
    """Artifacts below `root` (default: `$K3_AUDIT_STORE`, else `build/artifacts` in the working directory)."""

    def __init__(self, root: Path | str | None = None):
        self.root = Path(root or os.environ.get(STORE_ENV) or DEFAULT_ROOT)

    def _pointer(self, kernel: str, arch: str) -> Path:
        return self.root / "built" / f"{kernel}.{arch}.json"

    def put(self, artifact: Artifact, key: str) -> str:
        """Write `artifact` as the current build of its kernel and architecture; returns the object's name."""
        record = {
            "schema": _SCHEMA,
            "kernel": artifact.kernel,
            "arch": artifact.arch,
            "entry": artifact.entry,
            "contract": artifact.contract.to_dict(),
            "toolkit": artifact.toolkit,
            "sources": artifact.sources,
            "files": {
                "kernel.ptx": sha256(artifact.ptx),
                "kernel.cubin": sha256(artifact.cubin),
                "kernel.sass": sha256(artifact.sass),
            },
        }
        text = json.dumps(record, indent=1, sort_keys=True) + "\n"
        name = sha256(text)
        folder = self.root / "objects" / name
        write_atomic(folder / "kernel.ptx", artifact.ptx)
        write_atomic(folder / "kernel.cubin", artifact.cubin)
        write_atomic(folder / "kernel.sass", artifact.sass)
        write_atomic(folder / "artifact.json", text)  # last: its presence means that the object is whole
        write_atomic(
            self._pointer(artifact.kernel, artifact.arch), json.dumps({"key": key, "object": name}) + "\n"
        )
        return name

    def load(self, name: str) -> Artifact:
        """The object `name`, with every hash checked. Raises StoreError."""
        folder = self.root / "objects" / name
        try:
            text = (folder / "artifact.json").read_text()
            if sha256(text) != name:
                raise StoreError(
                    f"{folder}/artifact.json was changed after the build; run `k3-audit build --force`"
                )
            record = json.loads(text)
            data = {f: (folder / f).read_bytes() for f in record["files"]}
        except (OSError, ValueError) as e:
            raise StoreError(
                f"object {name[:12]} of {self.root} cannot be read ({e}); run `k3-audit build`"
            ) from e
        for f, digest in record["files"].items():
            if sha256(data[f]) != digest:
                raise StoreError(f"{folder}/{f} was changed after the build; run `k3-audit build --force`")
        return Artifact(
            kernel=record["kernel"],
            arch=record["arch"],
            entry=record["entry"],
            ptx=data["kernel.ptx"].decode(),
            cubin=data["kernel.cubin"],
            sass=data["kernel.sass"].decode(),
            contract=Contract.from_dict(record["contract"]),
            toolkit=record["toolkit"],
            sources=record["sources"],
        )

    def built(self, kernel: str, arch: str) -> dict[str, str] | None:
        """{"key", "object"} of the current build, or None where there is none."""
        try:
            return json.loads(self._pointer(kernel, arch).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            raise StoreError(
                f"{self._pointer(kernel, arch)} cannot be read ({e}); run `k3-audit build --force`"
            ) from e

    def get(self, kernel: str, arch: str) -> Artifact:
        """The current build of `kernel` for `arch`. Raises StoreError where there is none."""
        pointer = self.built(kernel, arch)
        if pointer is None:
            raise StoreError(f"no build of {kernel} for {arch} in {self.root}; run `k3-audit build`")
        return self.load(pointer["object"])

    def list(self) -> list[tuple[str, str]]:
        """(kernel, architecture) of every current build, sorted."""
        names = sorted(p.name.removesuffix(".json") for p in (self.root / "built").glob("*.json"))
        return [(n.rpartition(".")[0], n.rpartition(".")[2]) for n in names]
