"""The released checkpoint on disk: a config, an index, safetensors shards; read lazily, written whole.

    config.json                        the hyper-parameters (`Config`)
    model.safetensors.index.json       {"weight_map": {tensor name: shard file}}
    model-00001-of-000NN.safetensors   tensors; memory-mapped, so that a layer is read when it is asked for

Names, shapes and dtypes are those of `expected_tensors(config)`. Dtypes are read as the shard's header
says: a small tensor that is kept in float32 may be stored narrower and is then widened; nothing is ever
narrowed. Vision tensors are counted and otherwise ignored. Whatever is wrong is told in one
`CheckpointError`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import Config
from .tensors import PREFIX, TensorSpec, expected_tensors, layer_prefix, layer_tensors, shell_tensors

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
SHARD_BYTES = 16 * 2**30
"""Upper size of a shard when writing: the release has 96 of about this size."""

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
}
_NAN_SCALE = 255
_PIECE = 1 << 24
"""Elements that are looked at together, so that a check of a mapped tensor needs little memory."""


@dataclass(frozen=True)
class Problem:
    """One defect: its kind (a key of `_KINDS`), the tensor or file, and what was found."""

    kind: str
    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


_KINDS = {
    "file": "unusable files",
    "missing": "missing tensors",
    "extra": "tensors that do not belong there",
    "shape": "tensors of the wrong shape",
    "dtype": "tensors of the wrong dtype",
    "value": "tensors with bad values",
}
_SHOWN = 8


class CheckpointError(Exception):
    """Everything that is wrong with a checkpoint, in one error.

    `problems` lists all of it; the message groups it by kind and shows the first few of each.
    """

    def __init__(self, path: str | PathLike[str], problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        groups: dict[str, list[Problem]] = defaultdict(list)
        for problem in self.problems:
            groups[problem.kind].append(problem)
        lines = []
        for kind in sorted(groups, key=list(_KINDS).index):
            group = groups[kind]
            rest = f" and {len(group) - _SHOWN} more" if len(group) > _SHOWN else ""
            lines.append(f"{_KINDS[kind]} [{len(group)}]: {', '.join(map(str, group[:_SHOWN]))}{rest}")
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        super().__init__(f"checkpoint {os.fspath(path)} has {count}:\n  " + ";\n  ".join(lines))


class Checkpoint(Mapping[str, Tensor]):
    """The text tensors of a checkpoint folder, by released name, read when they are asked for.

    Opening reads the headers only (not one weight). With `layers`, only these layers have to be there,
    without the shell: a folder with just the shards that hold them will do.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        config: Config | None = None,
        layers: Iterable[int] | None = None,
        values: bool = False,
        strict: bool = True,
    ) -> None:
        """Open the checkpoint at `path`; `config` defaults to its `config.json`.

        `values` also reads every tensor in scope and looks for NaN and Inf. Raises one CheckpointError with
        all problems; without `strict` they are kept in `problems` instead, unless there is no config or
        index.
        """
        self.path = Path(path)
        self.config = self._read_config() if config is None else config
        self.layers = tuple(range(self.config.num_hidden_layers) if layers is None else layers)
        if unknown := [l for l in self.layers if not 0 <= l < self.config.num_hidden_layers]:
            raise ValueError(f"no layer {unknown[0]}: the layers are 0..{self.config.num_hidden_layers - 1}")
        if layers is None:
            self.expected = expected_tensors(self.config)
        else:
            self.expected = {n: s for l in self.layers for n, s in layer_tensors(self.config, l)}
        self._shards: dict[str, Any] = {}
        self.found: dict[str, tuple[tuple[int, ...], str]] = {}
        """Name to (shape, dtype as the header spells it) of each readable text tensor in scope."""
        self._file: dict[str, str] = {}
        problems = list(self._open(whole=layers is None))
        if values:
            problems += self.value_problems(self)
        self.problems = tuple(problems)
        if strict and problems:
            raise CheckpointError(self.path, problems)

    # -- reading

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, memory-mapped; in the header's dtype, or float32 where that is wider and expected.

        Raises KeyError for a name that is not in scope or not in the checkpoint.
        """
        if name not in self.found:
            raise KeyError(f"{self.path} has no tensor {name} in scope")
        tensor = self._shards[self._file[name]].get_tensor(name)
        spec = self.expected.get(name)
        return tensor.float() if spec is not None and _widened(spec, tensor.dtype) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __contains__(self, name: object) -> bool:
        return name in self.found

    def read_layer(self, l: int, values: bool = True) -> dict[str, Tensor]:
        """The tensors of layer `l` (zero-based) under their released names, ready for `Layer`.

        Raises CheckpointError naming every one that holds NaN or Inf, unless `values` is false; ValueError
        for a layer that is not in scope.
        """
        if l not in self.layers:
            raise ValueError(f"layer {l} is not among those opened of {self.path}")
        return self._read((name for name, _ in layer_tensors(self.config, l)), values)

    def read_shell(self, values: bool = True) -> dict[str, Tensor]:
        """The tensors outside the layers: embedding, output mix, last norm, head. Raises as `read_layer`."""
        return self._read((name for name, _ in shell_tensors(self.config)), values)

    def _read(self, names: Iterable[str], values: bool) -> dict[str, Tensor]:
        tensors = {name: self[name] for name in names}
        if values and (problems := list(self.value_problems(tensors))):
            raise CheckpointError(self.path, problems)
        return tensors

    def value_problems(self, names: Iterable[str]) -> Iterator[Problem]:
        """The named tensors that hold NaN or Inf, or an `A_log` whose padding is not zero."""
        for name in names:
            if detail := _bad_values(name, self[name], self.config):
                yield Problem("value", name, detail)

    # -- opening

    def _read_config(self) -> Config:
        try:
            return Config.from_json(self.path / CONFIG_FILE)
        except OSError as error:
            detail = f"{error.strerror}; it must be in the folder, or be given"
        except ValueError as error:
            detail = str(error)
        raise CheckpointError(self.path, [Problem("file", CONFIG_FILE, detail)])

    def _open(self, whole: bool) -> Iterator[Problem]:
        """Open the shards in scope and compare what they hold with what is expected."""
        index = self._read_index()
        self.shard_count = len(set(index.values()))
        self.vision_tensors = sum(name.startswith(VISION_PREFIXES) for name in index)
        scopes = [PREFIX] if whole else [layer_prefix(l) for l in self.layers]
        in_scope = {n: f for n, f in index.items() if n.startswith(tuple(scopes))}
        files = sorted(set(in_scope.values()))
        unreadable = set()
        for file in files:
            try:
                self._shards[file] = _open_shard(self.path, file)
            except OSError as error:
                unreadable.add(file)
                count = sum(f == file for f in in_scope.values())
                yield Problem("file", file, f"{error}; {count} tensors are in it")
        headers = {file: _header(self.path / file) for file in self._shards}
        for name, file in in_scope.items():
            if file in unreadable:
                continue
            if name not in headers[file]:
                yield Problem("missing", name, f"the index says that it is in {file}")
                continue
            self.found[name] = headers[file][name]
            self._file[name] = file
        for file, header in headers.items():
            for name in sorted(n for n in header.keys() - index.keys() if not n.startswith(VISION_PREFIXES)):
                yield Problem("extra", name, f"in {file} but not in the index")
        if whole:
            for name in index:
                if not name.startswith((PREFIX, *VISION_PREFIXES)):
                    yield Problem("extra", name)
        yield from _differences(self.expected, self.found, absent=self.expected.keys() - in_scope.keys())

    def _read_index(self) -> dict[str, str]:
        try:
            index = json.loads((self.path / INDEX_FILE).read_bytes())
            names = index["weight_map"]
            valid = all(isinstance(f, str) and Path(f).name == f for f in set(names.values()))
        except OSError as error:
            detail = f"{error.strerror}: not a sharded safetensors checkpoint"
        except (ValueError, TypeError, KeyError, AttributeError):
            detail = 'not a JSON object with a "weight_map"'
        else:
            if valid:
                return names
            detail = 'its "weight_map" must map tensor names to file names in the same folder'
        raise CheckpointError(self.path, [Problem("file", INDEX_FILE, detail)])


def _open_shard(folder: Path, file: str) -> Any:
    """A memory-mapped shard. Raises OSError with a short reason."""
    if not (folder / file).is_file():
        raise OSError("not there")
    try:
        return safe_open(folder / file, framework="pt")
    except SafetensorError as error:
        raise OSError(f"damaged or cut short: {error}") from None


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name to (shape, dtype) from the header of a shard that `_open_shard` has found sound.

    The same that `safe_open` tells of each tensor, but for all half million of the release in seconds.
    """
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return {n: (tuple(t["shape"]), t["dtype"]) for n, t in header.items() if n != "__metadata__"}


def _differences(
    expected: Mapping[str, TensorSpec],
    found: Mapping[str, tuple[tuple[int, ...], str]],
    absent: Collection[str],
) -> Iterator[Problem]:
    """What is absent, not expected, misshapen, or of a dtype that cannot stand for the expected one."""
    for name in expected:
        if name in absent:
            plain = name.removesuffix("_packed")
            yield Problem("missing", name, "stored unpacked" if plain != name and plain in found else "")
    for name, (shape, dtype) in found.items():
        if name not in expected:
            yield Problem("extra", name)
            continue
        spec = expected[name]
        if shape != spec.shape:
            yield Problem("shape", name, f"{list(shape)}, expected {list(spec.shape)}")
        if _DTYPES.get(dtype) not in _accepted(spec):
            yield Problem("dtype", name, f"{dtype}, expected {_spelt(spec.dtype)}")


def _accepted(spec: TensorSpec) -> tuple[torch.dtype, ...]:
    """Dtypes that may be on disk: small tensors are kept in float32 by some tools and bfloat16 by others."""
    if spec.dtype == torch.float32:
        return torch.float32, torch.bfloat16, torch.float16
    if spec.dtype == torch.bfloat16 and 1 in (len(spec.shape), spec.shape[0]):
        return torch.bfloat16, torch.float32
    return (spec.dtype,)


def _widened(spec: TensorSpec, dtype: torch.dtype) -> bool:
    return spec.dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16)


def _spelt(dtype: torch.dtype) -> str:
    """A dtype as a safetensors header spells it."""
    return next((name for name, d in _DTYPES.items() if d == dtype), str(dtype))


def _bad_values(name: str, tensor: Tensor, config: Config) -> str:
    """What is wrong with the values of a tensor, or "". An E8M0 scale of 255 is NaN (OCP MX 1.0)."""
    flat, nans, infs, first = tensor.flatten(), 0, 0, None
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        if piece.is_floating_point():
            nan, inf = piece.isnan(), piece.isinf()
        elif name.endswith(".weight_scale"):
            nan, inf = piece == _NAN_SCALE, torch.zeros_like(piece, dtype=torch.bool)
        else:
            return ""
        nans, infs = nans + int(nan.sum()), infs + int(inf.sum())
        if first is None and (nans or infs):
            first = start + int((nan | inf).int().argmax())
    if first is not None:
        where = [int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape)]
        counts = [f"{n} {kind}" for n, kind in ((nans, "NaN"), (infs, "Inf")) if n]
        return f"{', '.join(counts)}, the first at {where}"
    if name.endswith(".A_log") and flat[config.linear_attn_config.num_heads :].any():
        return f"the padding after {config.linear_attn_config.num_heads} heads is not zero"
    return ""


# -- writing


def write_checkpoint(
    path: str | PathLike[str],
    config: Config,
    tensors: Mapping[str, Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint folder in the released layout: it is complete at `path` or not there at all.

    `tensors` may hold vision tensors besides the text ones; they are written as they are. A shard holds at
    least one tensor and otherwise at most `shard_bytes` of them. Raises CheckpointError, and writes
    nothing, when the tensors are not those of `config`, when `path` exists, and when it cannot be written
    (a full disk).
    """
    path = Path(path)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be positive, not {shard_bytes}")
    vision = [name for name in tensors if name.startswith(VISION_PREFIXES)]
    expected = expected_tensors(config)
    given = {n: (tuple(t.shape), _spelt(t.dtype)) for n, t in tensors.items() if n not in vision}
    problems = list(_differences(expected, given, expected.keys() - given.keys()))
    problems += [Problem("value", n, detail) for n in given if (detail := _bad_values(n, tensors[n], config))]
    if path.exists():
        problems.append(Problem("file", str(path), "it exists already"))
    if problems:
        raise CheckpointError(path, problems)

    shards = list(_shards((*expected, *vision), tensors, shard_bytes))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside its final place, so that the rename stays on one file system.
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            _write_files(temporary, config, tensors, shards)
            temporary.chmod(0o755)
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(path, [Problem("file", str(path), f"cannot be written: {reason}")]) from None


def _shards(names: Iterable[str], tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterator[list[str]]:
    """Names in order, cut where the next tensor would make a shard too large."""
    shard: list[str] = []
    size = 0
    for name in names:
        if shard and size + tensors[name].nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensors[name].nbytes
    yield shard


def _write_files(
    folder: Path, config: Config, tensors: Mapping[str, Tensor], shards: list[list[str]]
) -> None:
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, file))
        save_file({n: tensors[n].contiguous() for n in names}, folder / file, metadata={"format": "pt"})
    total = sum(tensors[name].nbytes for name in weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(config.to_json(), indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        with open(path, "rb") as f:
            os.fsync(f.fileno())
