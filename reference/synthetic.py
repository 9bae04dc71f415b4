"""Made-up weights in the released layout, with the features that make the real model numerically hard.

Saturated decay gates (the whole of layer 0, as in the real model) beside channels that hardly decay;
outlier channels in the norms; mixtures with near-equal logits beside peaked ones; sharp attention, so that
long contexts do not average away. The bits depend only on the seed and the tensor's name: the numbers come
from Philox's raw words (the part of NumPy's generators that is stable) through exact integer arithmetic and
single rounded operations, on the CPU.
"""

from __future__ import annotations

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor

from .config import Config
from .tensors import TensorSpec, expected_tensors

# Standard deviation of a matrix is gain / sqrt(inputs): unit inputs give outputs of size `gain`.
_GAIN = {
    "q_b_proj.weight": 3.0,  # attention logits of that size: about S / e^9 of S tokens share the weight
    "gate.weight": 2.0,  # router
    "lm_head.weight": 3.0,
    # Sublayer outputs smaller than the embedding; otherwise a random model is chaotic and rounding decides.
    "o_proj.weight": 0.3,
    "down_proj.weight": 0.5,
    "routed_expert_up_proj.weight": 0.15,
    "self_attention_res_proj.weight": 0.03,  # near-equal mixture logits, as reported for the real weights
    "mlp_res_proj.weight": 1.0,
    "output_attn_res_proj.weight": 0.3,
}
_OUTLIER_SHARE = 256  # one channel in so many ...
_OUTLIER_FACTOR = 8.0  # ... has a norm weight that much larger
_CODE_RMS = 2.926  # root mean square of a uniformly random E2M1 code
_SCALE_RMS = 1.323  # and of a scale that is 1/2, 1 or 2


def synthesise(config: Config, seed: int = 0, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A full set of tensors for `config`, with the names, shapes and dtypes of `expected_tensors(config)`."""
    specs = expected_tensors(config)
    # NumPy releases the interpreter lock in its loops; more threads than this only cost memory.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        made = pool.map(lambda name: _tensor(config, seed, name, specs[name]).to(device), specs)
        return dict(zip(specs, made, strict=True))


def _tensor(config: Config, seed: int, name: str, spec: TensorSpec) -> Tensor:
    shape, source = spec.shape, _Source(seed, name)
    module, _, leaf = name.rpartition(".")
    kind = ".".join([module.rpartition(".")[2], leaf])
    if leaf == "weight_packed":
        return source.bytes(shape)
    if leaf == "weight_scale":
        inputs = shape[1] * 32
        exponent = 127 + round(math.log2(1 / (math.sqrt(inputs) * _CODE_RMS * _SCALE_RMS)))
        return (exponent - 1 + source.bytes(shape) % 3).to(torch.uint8)
    if leaf == "A_log":
        values = source.uniform(shape, -0.7, 0.7)
        values[config.linear_attn_config.num_heads :] = 0
    elif leaf == "dt_bias":
        saturated = name.endswith("layers.0.self_attn.dt_bias")
        values = source.uniform(shape, 4, 8) if saturated else source.uniform(shape, -8, 6)
    elif leaf == "e_score_correction_bias":
        values = 0.05 * source.normal(shape)
    elif "conv1d" in kind:
        values = source.normal(shape) / math.sqrt(shape[-1])
    elif "norm" in kind:
        values = 1 + 0.1 * source.normal(shape)
        values[source.indices(max(1, shape[0] // _OUTLIER_SHARE), shape[0])] *= _OUTLIER_FACTOR
    elif "embed_tokens" in kind:
        values = source.normal(shape)
    else:
        values = _GAIN.get(kind, 1.0) / math.sqrt(shape[-1]) * source.normal(shape)
    return values.to(spec.dtype)


class _Source:
    """Random numbers of one tensor."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._philox = Philox(key=int.from_bytes(digest[:16], "little"))

    def _words(self, count: int) -> np.ndarray:
        return self._philox.random_raw(count)

    def bytes(self, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        words = self._words(-(-count // 8)).astype("<u8", copy=False)
        return torch.from_numpy(words.view(np.uint8)[:count].reshape(shape))

    def indices(self, count: int, below: int) -> Tensor:
        return torch.from_numpy((self._words(count) % np.uint64(below)).astype(np.int64))

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        unit = (self._words(math.prod(shape)) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
        return torch.from_numpy(np.float32(low) + np.float32(high - low) * unit).view(shape)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Nearly normal, variance 1, |x| < 3.47: the standardised sum of a word's four 16-bit parts."""
        words = self._words(math.prod(shape))
        total = np.zeros(len(words), np.int64)
        for shift in (0, 16, 32, 48):
            total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
        centred = (total - 2 * 0xFFFF).astype(np.float32)
        return torch.from_numpy(centred * np.float32(1 / math.sqrt((2**32 - 1) / 3))).view(shape)
