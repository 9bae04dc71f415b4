"""Gated MLA without position encoding: attention over one compressed latent per token, then a sigmoid gate.

Shapes: `T` queries, `S` cached tokens of which the queries are the last, `H` heads; leading batch axes may
precede. `R = kv_lora_rank`; `rope = qk_rope_head_dim`; a cache row is `[c (R) | kr (rope)]`. The
`rope` dimensions carry no rotation in this model, but their term is part of the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Config
from .linear import linear
from .norm import rms_norm
from .rounding import EXACT, Rounding

RELEASE_LATENT_EPS = 1e-6
"""Epsilon of the two latent norms in the release's code (a class default); serving engines use 1e-5."""

SCORE_ELEMENTS = 2**27
"""Scores held at once (1 GiB in float64): long prompts are attended in blocks of queries."""


@dataclass(frozen=True)
class MlaCache:
    """The latents of the tokens so far: the first `length` rows of `buffer [..., capacity, R + rope]`.

    Appending returns a new value that shares the buffer while it has room, so keep only one continuation of
    a cache; `clone` first to keep two.
    """

    buffer: Tensor
    length: int = 0

    @classmethod
    def empty(cls, config: Config, dtype: torch.dtype, device: torch.device | str) -> MlaCache:
        """Before the first token."""
        return cls(torch.empty(0, config.latent_cache_size, dtype=dtype, device=device))

    @property
    def rows(self) -> Tensor:
        """The valid rows, `[..., length, R + rope]`."""
        return self.buffer[..., : self.length, :]

    def append(self, rows: Tensor) -> MlaCache:
        """The cache with `rows [..., T, R + rope]` at its end; the buffer grows by doubling."""
        length, buffer = self.length + rows.shape[-2], self.buffer
        if length > buffer.shape[-2]:
            grown = rows.new_full((*rows.shape[:-2], max(length, 2 * self.length), rows.shape[-1]), math.nan)
            grown[..., : self.length, :] = self.rows
            buffer = grown
        buffer[..., self.length : length, :] = rows
        return MlaCache(buffer, length)

    def truncate(self, length: int) -> MlaCache:
        """The cache of the first `length` tokens."""
        return MlaCache(self.buffer, length)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Config, Rounding], Tensor]


def mla(
    x: Tensor,
    w: Mapping[str, Tensor],
    config: Config,
    cache: MlaCache,
    attend: Attend,
    latent_eps: float = RELEASE_LATENT_EPS,
    rd: Rounding = EXACT,
) -> tuple[Tensor, MlaCache]:
    """The MLA sublayer on normed `x [..., T, E]`: its output `[..., T, E]` and the cache with the new rows.

    `w` has the released names below `self_attn.`; `attend` is `naive` or `absorbed`, the same function.
    """
    H, R = config.num_attention_heads, config.kv_lora_rank
    cq = rms_norm(linear(x, w["q_a_proj.weight"], rd), w["q_a_layernorm.weight"], latent_eps, rd)
    q = linear(cq, w["q_b_proj.weight"], rd).unflatten(-1, (H, config.qk_head_dim))
    qn, qr = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)

    c, kr = linear(x, w["kv_a_proj_with_mqa.weight"], rd).split([R, config.qk_rope_head_dim], dim=-1)
    c = rms_norm(c, w["kv_a_layernorm.weight"], latent_eps, rd)
    cache = cache.append(torch.cat([c, kr], dim=-1))

    a = attend(qn, qr, cache.rows, w["kv_b_proj.weight"], config, rd)
    gate = rd.bf(torch.sigmoid(linear(x, w["g_proj.weight"], rd)))
    return linear(rd.bf(a.flatten(-2) * gate), w["o_proj.weight"], rd), cache


def naive(qn: Tensor, qr: Tensor, rows: Tensor, kv_b: Tensor, config: Config, rd: Rounding = EXACT) -> Tensor:
    """Expand each head's keys and values from the latents, then attend.

    `qn [..., T, H, nope]`, `qr [..., T, H, rope]`, `rows [..., S, R + rope]`, `kv_b [H (nope + v), R]`;
    returns `[..., T, H, v]`.
    """
    c, kr = _split_rows(rows, config)
    uk, uv = _split_kv_b(kv_b, config)
    kn = rd.bf(torch.einsum("...sr,hdr->...shd", c, uk))
    v = rd.bf(torch.einsum("...sr,hdr->...shd", c, uv))

    def score(t: slice, s: slice) -> Tensor:
        nope = torch.einsum("...thd,...shd->...hts", qn[..., t, :, :], kn[..., s, :, :])
        return nope + torch.einsum("...thd,...sd->...hts", qr[..., t, :, :], kr[..., s, :])

    def value(weights: Tensor, s: slice) -> Tensor:
        return torch.einsum("...hts,...shd->...thd", weights, v[..., s, :, :])

    return rd.bf(_attend(score, value, config, T=qn.shape[-3], S=rows.shape[-2]))


def absorbed(
    qn: Tensor, qr: Tensor, rows: Tensor, kv_b: Tensor, config: Config, rd: Rounding = EXACT
) -> Tensor:
    """Move each head's key and value projections onto its query and output, and attend in latent space.

    Equal to `naive` in exact arithmetic. The scale is still that of the head's query width. Rounded where
    engines round: at the outcome of each product.
    """
    c, _ = _split_rows(rows, config)
    uk, uv = _split_kv_b(kv_b, config)
    q = torch.cat([rd.bf(torch.einsum("...thd,hdr->...thr", qn, uk)), qr], dim=-1)

    def score(t: slice, s: slice) -> Tensor:
        return torch.einsum("...thr,...sr->...hts", q[..., t, :, :], rows[..., s, :])

    def value(weights: Tensor, s: slice) -> Tensor:
        return torch.einsum("...hts,...sr->...thr", weights, c[..., s, :])

    latent = rd.bf(_attend(score, value, config, T=qn.shape[-3], S=rows.shape[-2]))
    return rd.bf(torch.einsum("...thr,hdr->...thd", latent, uv))


def _attend(
    score: Callable[[slice, slice], Tensor],
    value: Callable[[Tensor, slice], Tensor],
    config: Config,
    T: int,
    S: int,
) -> Tensor:
    """Causal softmax attention of the last `T` of `S` tokens, in blocks of queries; `[..., T, H, width]`."""
    block = max(1, SCORE_ELEMENTS // (config.num_attention_heads * S))
    outputs = []
    for start in range(0, T, block):
        stop = min(start + block, T)
        seen = S - T + stop
        queries, keys = slice(start, stop), slice(0, seen)
        scores = score(queries, keys) * config.qk_head_dim**-0.5
        future = torch.ones_like(scores[..., :1, :, :], dtype=torch.bool).triu(S - T + start + 1)
        outputs.append(value(scores.masked_fill(future, -math.inf).softmax(-1), keys))
    return torch.cat(outputs, dim=-3)


def _split_rows(rows: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    c, kr = rows.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
    return c, kr


def _split_kv_b(kv_b: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """`kv_b_proj` is head-major with the key part first: `UK [H, nope, R]`, `UV [H, v, R]`."""
    per_head = kv_b.unflatten(0, (config.num_attention_heads, -1))
    uk, uv = per_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return uk, uv
