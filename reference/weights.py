"""Released tensors, read by name in the working dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from . import mxfp4


class Weights(Mapping[str, Tensor]):
    """The tensors below a name prefix, in `dtype` on `device`, converted (exactly) on first use and then
    kept.

    `tensors` maps released names to tensors and may itself read lazily. A matrix `X.weight` that is stored
    as `X.weight_packed` and `X.weight_scale` is decoded from MXFP4: presence decides, not the quantisation
    config.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str, prefix: str = ""
    ) -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self._tensors, self._prefix = tensors, prefix
        self._converted: dict[str, Tensor] = {}

    def below(self, prefix: str) -> Weights:
        """The tensors whose names go on with `prefix`."""
        return Weights(self._tensors, self.dtype, self.device, self._prefix + prefix)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._converted:
            self._converted[name] = self._read(self._prefix + name)
        return self._converted[name]

    def _read(self, name: str) -> Tensor:
        if f"{name}_packed" in self._tensors:
            packed, scale = self._tensors[f"{name}_packed"], self._tensors[f"{name}_scale"]
            return mxfp4.decode(packed.to(self.device), scale.to(self.device), self.dtype)
        if name not in self._tensors:
            raise KeyError(f"the checkpoint has no tensor {name}")
        return self._tensors[name].to(self.device, self.dtype)

    def __iter__(self) -> Iterator[str]:
        for name in self._tensors:
            if name.startswith(self._prefix) and not name.endswith("_scale"):
                yield name.removeprefix(self._prefix).removesuffix("_packed")

    def __len__(self) -> int:
        return sum(1 for _ in self)
