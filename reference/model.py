"""The text model: embedding, layers, output mix, norm and head; prefill, decode, and verification of drafts.

One sequence at a time; activations are `[T, E]`. `Model(config, tensors)` is the exact float64 reference,
`Model(..., rd=Rounding.release())` emulates the release's roundings in the same formulas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .attn_res import MixStep, Residual, attn_res
from .config import Config
from .kda import KdaCache, kda
from .linear import linear
from .mla import RELEASE_LATENT_EPS, MlaCache, absorbed, mla, naive
from .moe import dense, latent_moe
from .rounding import EXACT, Rounding
from .tensors import PREFIX, expected_tensors, layer_prefix
from .weights import Weights

MAX_DRAFT = 8
"""Most tokens that one verification takes, as in speculative decoding with a fused decode kernel."""

LayerCache = KdaCache | MlaCache


@dataclass
class Cache:
    """What the model carries from token to token: one cache per layer, and the number of tokens seen.

    Between `verify` and `accept`, `drafts[n]` holds the layer caches after `n` accepted drafts.
    """

    layers: list[LayerCache]
    length: int = 0
    drafts: list[list[LayerCache]] | None = None

    def accept(self, n: int) -> None:
        """Keep the first `n` of the drafts just verified and forget the rest; `n = 0` forgets all.

        Raises ValueError if nothing was verified, or fewer than `n` tokens.
        """
        if self.drafts is None:
            raise ValueError("accept: no drafts to accept; call verify first")
        if not 0 <= n < len(self.drafts):
            raise ValueError(f"accept: {n} is not between 0 and the {len(self.drafts) - 1} verified drafts")
        self.layers, self.length, self.drafts = self.drafts[n], self.length + n, None

    def clone(self) -> Cache:
        """An independent copy, for a second continuation of the same prefix."""
        return copy.deepcopy(self)


@dataclass(frozen=True)
class Observation:
    """One AttnRes step as an observer sees it: before a layer's attention or feed-forward, or at the output.

    `layer` is `num_hidden_layers` at the output; `first` is the position in the sequence of the step's
    first token.
    """

    layer: int
    site: Literal["attention", "ffn", "output"]
    first: int
    step: MixStep


Observer = Callable[[Observation], None]


class Layer:
    """The two sublayers of one decoder layer and the AttnRes steps that feed them. Usable on its own."""

    def __init__(
        self,
        config: Config,
        index: int,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        rd: Rounding = EXACT,
        latent_eps: float = RELEASE_LATENT_EPS,
    ) -> None:
        self.config, self.index, self.rd, self.latent_eps = config, index, rd, latent_eps
        self.is_kda, self.is_moe = config.is_kda(index), config.is_moe(index)
        self.weights = Weights(tensors, dtype, device, layer_prefix(index))
        self._attention = self.weights.below("self_attn.")
        self._ffn = self.weights.below("block_sparse_moe." if self.is_moe else "mlp.")

    def empty_cache(self) -> LayerCache:
        """The cache before the first token."""
        kind = KdaCache if self.is_kda else MlaCache
        return kind.empty(self.config, self.weights.dtype, self.weights.device)

    def before_attention(self, residual: Residual, delta: Tensor) -> MixStep:
        """The mix and norm before attention, on the last layer's output; a block start banks the prefix."""
        return self._mix(
            residual, delta, "self_attention_res", "input_layernorm", self.config.is_block_start(self.index)
        )

    def before_ffn(self, residual: Residual, delta: Tensor) -> MixStep:
        """The mix and norm before the feed-forward, on the attention's output `delta`."""
        return self._mix(residual, delta, "mlp_res", "post_attention_layernorm", write=False)

    def _mix(self, residual: Residual, delta: Tensor, name: str, next_norm: str, write: bool) -> MixStep:
        w = self.weights
        return attn_res(
            residual,
            delta,
            w[f"{name}_norm.weight"],
            w[f"{name}_proj.weight"],
            w[f"{next_norm}.weight"],
            self.config.rms_norm_eps,
            self.rd,
            write,
        )

    def prefill(self, x: Tensor, cache: LayerCache) -> tuple[Tensor, LayerCache]:
        """Attention of many tokens `x [T, E]` (normed): chunked KDA, or MLA with expanded keys and values."""
        if isinstance(cache, KdaCache):
            return kda(x, self._attention, self.config, cache, self.rd)
        return mla(x, self._attention, self.config, cache, naive, self.latent_eps, self.rd)

    def decode(self, x: Tensor, cache: LayerCache) -> tuple[Tensor, LayerCache]:
        """Attention of one token `x [1, E]` (normed): recurrent KDA, or absorbed MLA."""
        if isinstance(cache, KdaCache):
            return kda(x, self._attention, self.config, cache, self.rd)
        return mla(x, self._attention, self.config, cache, absorbed, self.latent_eps, self.rd)

    def verify(self, x: Tensor, cache: LayerCache) -> tuple[Tensor, list[LayerCache]]:
        """Attention of draft tokens `x [q, E]` (normed), and the cache after each of 0 .. q of them."""
        if isinstance(cache, MlaCache):
            y, last = mla(x, self._attention, self.config, cache, absorbed, self.latent_eps, self.rd)
            return y, [last.truncate(cache.length + n) for n in range(len(x) + 1)]
        outputs: list[Tensor] = []
        caches: list[LayerCache] = [cache]
        for token in x.split(1):
            y, cache = kda(token, self._attention, self.config, cache, self.rd)
            outputs.append(y)
            caches.append(cache)
        return torch.cat(outputs), caches

    def feed_forward(self, x: Tensor, experts: Tensor | None = None) -> Tensor:
        """The feed-forward of `x [T, E]` (normed); `experts [T, k]` forces the choice in a MoE layer."""
        if self.is_moe:
            return latent_moe(x, self._ffn, self.config, self.rd, experts)
        return dense(x, self._ffn, self.config, self.rd)


class Model:
    """The whole text model over `tensors`, a mapping of released names to tensors (see `expected_tensors`).

    Raises ValueError if a tensor is missing. Weights are converted to `dtype` on first use and kept, so a
    float64 model grows to 8 bytes per parameter: 26 GB for the `rank` configuration.
    """

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        rd: Rounding = EXACT,
        latent_eps: float = RELEASE_LATENT_EPS,
    ) -> None:
        missing = sorted(expected_tensors(config).keys() - tensors.keys())
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
        self.config, self.rd = config, rd
        self.weights = Weights(tensors, dtype, device, PREFIX)
        self.layers = [
            Layer(config, l, tensors, dtype, device, rd, latent_eps) for l in range(config.num_hidden_layers)
        ]

    def empty_cache(self) -> Cache:
        """The cache before the first token."""
        return Cache([layer.empty_cache() for layer in self.layers])

    @torch.no_grad()
    def prefill(
        self,
        tokens: Sequence[int] | Tensor,
        cache: Cache,
        chunk: int = 2048,
        keep: int = 1,
        observer: Observer | None = None,
    ) -> Tensor:
        """Read `tokens` into `cache`, `chunk` at a time; logits `[keep, vocab]` of the last `keep` tokens."""
        tokens = self._tokens(tokens)
        if chunk < 1 or not 1 <= keep <= len(tokens):
            raise ValueError(
                f"prefill: chunk {chunk} or keep {keep} is out of range for {len(tokens)} tokens"
            )
        logits = []
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            y, cache.layers = self._run(part, cache, Layer.prefill, observer)
            cache.length += len(part)
            unwanted = len(tokens) - keep - start
            if unwanted < len(part):
                logits.append(self._head(y[max(0, unwanted) :]))
        return torch.cat(logits)

    @torch.no_grad()
    def decode(self, token: int, cache: Cache, observer: Observer | None = None) -> Tensor:
        """Read one token into `cache`; returns its logits `[vocab]`."""
        y, cache.layers = self._run(self._tokens([token]), cache, Layer.decode, observer)
        cache.length += 1
        return self._head(y)[0]

    @torch.no_grad()
    def verify(
        self, tokens: Sequence[int] | Tensor, cache: Cache, observer: Observer | None = None
    ) -> Tensor:
        """Logits `[q, vocab]` of up to 8 draft tokens; then `cache.accept(n)` keeps the first `n` of them."""
        tokens = self._tokens(tokens)
        if len(tokens) > MAX_DRAFT:
            raise ValueError(f"verify: at most {MAX_DRAFT} drafts at once, not {len(tokens)}")
        y, snapshots = self._run(tokens, cache, Layer.verify, observer)
        cache.drafts = [[layer[n] for layer in snapshots] for n in range(len(tokens) + 1)]
        return self._head(y)

    def _run(
        self,
        tokens: Tensor,
        cache: Cache,
        attention: Callable[[Layer, Tensor, LayerCache], tuple],
        observer: Observer | None,
    ) -> tuple[Tensor, list]:
        """All layers over `tokens [T]`: the head's input `[T, E]`, and `attention`'s outcome per cache."""
        if cache.drafts is not None:
            raise ValueError("the cache holds drafts; call accept before going on")

        def observe(layer: int, site: Literal["attention", "ffn", "output"], step: MixStep) -> MixStep:
            if observer is not None:
                observer(Observation(layer, site, cache.length, step))
            return step

        residual, delta = Residual(), self.weights["model.embed_tokens.weight"][tokens]
        caches = []
        for l, layer in enumerate(self.layers):
            step = observe(l, "attention", layer.before_attention(residual, delta))
            delta, after = attention(layer, step.normed, cache.layers[l])
            caches.append(after)
            step = observe(l, "ffn", layer.before_ffn(step.after, delta))
            delta = layer.feed_forward(step.normed)
            residual = step.after
        step = observe(len(self.layers), "output", self._output_mix(residual, delta))
        return step.normed, caches

    def _output_mix(self, residual: Residual, delta: Tensor) -> MixStep:
        w = self.weights
        return attn_res(
            residual,
            delta,
            w["model.output_attn_res_norm.weight"],
            w["model.output_attn_res_proj.weight"],
            w["model.norm.weight"],
            self.config.rms_norm_eps,
            self.rd,
        )

    def _head(self, y: Tensor) -> Tensor:
        return linear(y, self.weights["lm_head.weight"], self.rd)

    def _tokens(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """As an int64 tensor on the model's device; raises ValueError if empty or outside the vocabulary."""
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.weights.device)
        if ids.ndim != 1 or len(ids) == 0:
            raise ValueError("expected a non-empty list of token ids")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(f"a token id lies outside the vocabulary [0, {self.config.vocab_size})")
        return ids
