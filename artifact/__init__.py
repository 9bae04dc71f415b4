"""The seam between the backend and the auditor: what a kernel is, once it is machine code."""

from .artifact import ARCHITECTURES, Artifact, ptx_code, ptx_hash, sha256
from .contract import Contract, Handoff, Launch, Param, Role
from .store import Store, StoreError

__all__ = [
    "ARCHITECTURES",
    "Artifact",
    "Contract",
    "Handoff",
    "Launch",
    "Param",
    "Role",
    "Store",
    "StoreError",
    "ptx_code",
    "ptx_hash",
    "sha256",
]
