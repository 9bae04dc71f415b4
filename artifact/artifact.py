"""An artifact: one kernel's machine code for one architecture, with everything needed to audit and launch it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from .contract import Contract

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")

_NOT_CODE = re.compile(r"^\s*(?:\.loc\b.*|\.file\b.*|//.*)?$\n?", re.MULTILINE)


def sha256(data: bytes | str) -> str:
    """Hex digest of bytes, or of text as UTF-8."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def ptx_code(ptx: str) -> str:
    """`ptx` without its line table and comments, which move whenever a comment in the source moves."""
    return _NOT_CODE.sub("", ptx)


def ptx_hash(ptx: str) -> str:
    """Hash of the instructions of a PTX text."""
    return sha256(ptx_code(ptx))


@dataclass(frozen=True)
class Artifact:
    """The unit that is audited, tested, locked and launched: always the same bytes.

    `entry` is the symbol of the kernel inside the cubin; `toolkit` maps tool name to version;
    `sources` maps each source file (relative to the repository) to its sha256.
    """

    kernel: str
    arch: str
    entry: str
    ptx: str
    cubin: bytes
    sass: str
    contract: Contract
    toolkit: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def ptx_sha256(self) -> str:
        return ptx_hash(self.ptx)

    @property
    def cubin_sha256(self) -> str:
        return sha256(self.cubin)

    @property
    def source_sha256(self) -> str:
        """One hash over all sources that decide this artifact."""
        return sha256("".join(f"{name}:{digest}\n" for name, digest in sorted(self.sources.items())))
