"""What a checkpoint holds, as plain data: totals, a line per layer, and the tensors of one layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from . import mxfp4
from .checkpoint import Checkpoint
from .tensors import PREFIX, layer_prefix

_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1}
_ROWS = 1024
"""Rows of a matrix that are looked at together."""


def inspect(path: str | PathLike[str], layer: int | None = None, values: bool = True) -> dict[str, Any]:
    """Describe the checkpoint at `path`; everything in the result is ready for `json.dump`.

    Keys: `totals`; `layers`, one entry each with its kind, tensors and bytes; with `layer` also `tensors`,
    one entry per tensor (the matrices of all experts together) with shape, dtype, `packed`, bytes, and, if
    `values`, the smallest and largest value, the root mean square and the count that is not finite;
    `problems`, grouped by kind. A damaged checkpoint is described as far as it goes. Raises CheckpointError
    without a config or an index, ValueError for a layer that does not exist.
    """
    checkpoint = Checkpoint(path, strict=False)
    config = checkpoint.config
    if layer is not None and not 0 <= layer < config.num_hidden_layers:
        raise ValueError(f"no layer {layer}: the layers are 0..{config.num_hidden_layers - 1}")
    sizes: dict[int | None, list[int]] = {l: [] for l in (None, *range(config.num_hidden_layers))}
    for name, (shape, dtype) in checkpoint.found.items():
        sizes.setdefault(_layer_of(name), []).append(_bytes(shape, dtype))
    result: dict[str, Any] = {
        "path": str(checkpoint.path),
        "totals": {
            "shards": checkpoint.shard_count,
            "tensors": len(checkpoint.found),
            "expected_tensors": len(checkpoint.expected),
            "packed_matrices": sum(name.endswith("_packed") for name in checkpoint.found),
            "parameters": sum(_parameters(n, s) for n, (s, _) in checkpoint.found.items()),
            "bytes": sum(map(sum, sizes.values())),
            "ignored_vision_tensors": checkpoint.vision_tensors,
            "shell_bytes": sum(sizes[None]),
        },
        "layers": [
            {
                "layer": l,
                "attention": "KDA" if config.is_kda(l) else "MLA",
                "ffn": "latent MoE" if config.is_moe(l) else "dense",
                "block_start": config.is_block_start(l),
                "tensors": len(sizes[l]),
                "bytes": sum(sizes[l]),
            }
            for l in range(config.num_hidden_layers)
        ],
        "problems": [{"kind": p.kind, "name": p.name, "detail": p.detail} for p in checkpoint.problems],
    }
    if layer is not None:
        prefix = layer_prefix(layer)
        names = [name for name in checkpoint.found if name.startswith(prefix)]
        result["tensors"] = list(_rows(checkpoint, prefix, names, values))
    return result


def _rows(
    checkpoint: Checkpoint, prefix: str, names: Iterable[str], values: bool
) -> Iterator[dict[str, Any]]:
    """One row per tensor; a packed matrix is one with its scale, and the experts' are one together."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        plain = name.removesuffix("_packed")
        if name.endswith("_scale") and f"{name.removesuffix('_scale')}_packed" in checkpoint:
            continue
        short = re.sub(r"experts\.[0-9]+\.", "experts.*.", plain.removeprefix(prefix))
        groups.setdefault(short, []).append(name)
    for short, members in groups.items():
        shape, dtype = checkpoint.found[members[0]]
        packed = members[0].endswith("_packed") and len(shape) == 2
        scales = [n.removesuffix("_packed") + "_scale" for n in members if n.endswith("_packed")]
        row = {
            "name": short,
            "count": len(members),
            "shape": [*shape[:-1], shape[-1] * 2] if packed else list(shape),
            "dtype": "MXFP4" if packed else dtype,
            "packed": packed,
            "bytes": sum(_bytes(*checkpoint.found[n]) for n in (*members, *scales) if n in checkpoint),
        }
        if values:
            row |= _statistics(piece for name in members for piece in _pieces(checkpoint, name))
        yield row


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """The values of a stored tensor in float64, some rows at a time; a packed matrix is decoded."""
    tensor = torch.atleast_1d(checkpoint[name])
    scale_name = name.removesuffix("_packed") + "_scale"
    decodable = name.endswith("_packed") and all(
        n in checkpoint
        and n in checkpoint.expected
        and checkpoint.found[n][0] == checkpoint.expected[n].shape
        for n in (name, scale_name)
    )
    scale = checkpoint[scale_name] if decodable else None
    for start in range(0, tensor.shape[0], _ROWS):
        rows = tensor[start : start + _ROWS]
        yield rows.double() if scale is None else mxfp4.decode(rows, scale[start : start + _ROWS])


def _statistics(pieces: Iterable[Tensor]) -> dict[str, Any]:
    low, high, squares, count, bad = math.inf, -math.inf, 0.0, 0, 0
    for piece in pieces:
        finite = piece[piece.isfinite()]
        bad += piece.numel() - finite.numel()
        if finite.numel():
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            squares, count = squares + float(finite.square().sum()), count + finite.numel()
    known = count > 0
    return {
        "min": low if known else None,
        "max": high if known else None,
        "rms": math.sqrt(squares / count) if known else None,
        "not_finite": bad,
    }


def _layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to; None for the shell."""
    number = name.removeprefix(f"{PREFIX}model.layers.").partition(".")[0]
    return int(number) if number.isdecimal() else None


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * _ITEM_BYTES.get(dtype, 1)


def _parameters(name: str, shape: tuple[int, ...]) -> int:
    """A packed byte holds two parameters, a scale none."""
    if name.endswith("_scale"):
        return 0
    return math.prod(shape) * (2 if name.endswith("_packed") else 1)
