"""Artifact -> running kernel. Nothing is compiled here: the cubin that was audited is the cubin that runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from k3_audit.artifact import Artifact

_TORCH = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
_SCALAR = {"i32": np.int32, "i64": np.int64, "f32": np.float32}
ALIGNMENT = 16  # bytes; kernels use 16-byte accesses through every pointer


class LaunchError(Exception):
    """One line: which argument or machine does not fit the kernel, and what it needs."""


def architecture(device: torch.device | int | None = None) -> str:
    """Name of the architecture-specific target of a CUDA device, such as "sm_90a". Raises LaunchError without a GPU."""
    if not torch.cuda.is_available():
        raise LaunchError(
            "no CUDA device is visible; kernels run on a GPU, the emulator runs them without one"
        )
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


class Launcher:
    """One kernel, loaded from its artifact on the current CUDA device.

    Raises LaunchError when the artifact is for another architecture, or `cuda.core` is missing.
    """

    def __init__(self, artifact: Artifact):
        try:
            from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch
        except ImportError as e:
            raise LaunchError("cuda.core is not installed; run `pip install 'k3-audit[gpu]'`") from e
        if artifact.arch != (here := architecture()):
            raise LaunchError(
                f"{artifact.kernel} was built for {artifact.arch}, this GPU is {here}; run `k3-audit build`"
            )
        self._config, self._stream, self._launch = LaunchConfig, Stream, launch
        Device(torch.cuda.current_device()).set_current()
        self.artifact = artifact
        self._code = ObjectCode.from_cubin(artifact.cubin, name=artifact.kernel)
        self._kernel = self._code.get_kernel(artifact.entry)

    def launch(
        self,
        args: Sequence[torch.Tensor | int | float],
        symbols: Mapping[str, int],
        *,
        stream: torch.cuda.Stream | None = None,
        pdl: bool | None = None,
    ) -> None:
        """Enqueue the kernel on `stream` (default: torch's current one).

        `args` are in the order of the contract's parameters: a CUDA tensor for each pointer, a number for each scalar.
        `symbols` gives the extents that the contract's grid names. `pdl` overrides the contract's choice.
        Raises LaunchError for arguments that the kernel must never see.
        """
        contract = self.artifact.contract
        if len(args) != len(contract.params):
            raise LaunchError(f"{contract.kernel} takes {len(contract.params)} arguments, got {len(args)}")
        values: list[Any] = []
        for param, value in zip(contract.params, args, strict=True):
            if param.role is None:
                values.append(_SCALAR[param.dtype](value))
                continue
            if not isinstance(value, torch.Tensor) or not value.is_cuda:
                raise LaunchError(f"{contract.kernel}: {param.name} must be a CUDA tensor")
            if value.dtype != _TORCH[param.dtype]:
                raise LaunchError(f"{contract.kernel}: {param.name} must be {param.dtype}, got {value.dtype}")
            if not value.is_contiguous() or value.data_ptr() % ALIGNMENT:
                raise LaunchError(
                    f"{contract.kernel}: {param.name} must be contiguous and {ALIGNMENT}-byte aligned"
                )
            values.append(value.data_ptr())
        shape = contract.launch
        # cuda.core counts the grid in clusters, the contract in CTAs
        grid = tuple(_extent(g, symbols) // c for g, c in zip(shape.grid, shape.cluster, strict=True))
        config = self._config(
            grid=grid,
            cluster=shape.cluster if shape.cluster != (1, 1, 1) else None,
            block=shape.block,
            shmem_size=shape.dynamic_smem,
            is_cooperative=shape.cooperative,
            programmatic_stream_serialization=shape.pdl if pdl is None else pdl,
        )
        handle = (stream or torch.cuda.current_stream()).cuda_stream
        self._launch(self._stream.from_handle(handle), config, self._kernel, *values)


def _extent(text: str, symbols: Mapping[str, int]) -> int:
    if re.fullmatch(r"\d+", text):
        return int(text)
    if text not in symbols:
        raise LaunchError(f"the grid needs a value for {text!r}")
    return int(symbols[text])
