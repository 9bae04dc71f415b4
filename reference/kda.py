"""KDA, Kimi Delta Attention: a gated delta rule with one decay per channel, state of fixed size.

Shapes: `T` tokens, `H` heads, `K = V = head_dim`, `P = H * head_dim`; leading batch axes may precede. The
delta rule works head-major, `[..., H, T, K]`. The state is `S [..., H, K, V]`, indexed key first as in the
formulas (GPU kernels store the transpose).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Config
from .linear import linear
from .norm import inverse_rms, l2_norm
from .rounding import EXACT, Rounding

CHUNK = 64
"""Tokens per chunk of the chunked form, as in the release's prefill. The result does not depend on it."""


@dataclass(frozen=True)
class KdaCache:
    """What a KDA layer carries: `state [..., H, K, V]` and `history [..., n-1, 3P]`.

    `history` is the packed q|k|v projections of the last `short_conv_kernel_size - 1` tokens, before the
    convolution.
    """

    state: Tensor
    history: Tensor

    @classmethod
    def empty(cls, config: Config, dtype: torch.dtype, device: torch.device | str) -> KdaCache:
        """Before the first token: zeros."""
        c = config.linear_attn_config
        return cls(
            state=torch.zeros(c.num_heads, c.head_dim, c.head_dim, dtype=dtype, device=device),
            history=torch.zeros(
                c.short_conv_kernel_size - 1, 3 * c.projection_size, dtype=dtype, device=device
            ),
        )


def kda(
    x: Tensor, w: Mapping[str, Tensor], config: Config, cache: KdaCache, rd: Rounding = EXACT
) -> tuple[Tensor, KdaCache]:
    """The KDA sublayer on normed `x [..., T, E]`: the output `[..., T, E]`, and the cache after token T.

    `w` has the released names below `self_attn.`. One token takes the recurrent form, more the chunked one.
    """
    c = config.linear_attn_config
    packed = torch.cat([linear(x, w[f"{name}_proj.weight"], rd) for name in "qkv"], dim=-1)
    taps = torch.cat([w[f"{name}_conv1d.weight"] for name in "qkv"]).squeeze(1)
    convolved, history = short_conv(packed, taps, cache.history)
    q, k, v = (split_heads(part, c.num_heads) for part in rd.bf(convolved).chunk(3, dim=-1))
    q, k = l2_norm(q) * c.head_dim**-0.5, l2_norm(k)

    beta = torch.sigmoid(linear(x, w["b_proj.weight"], rd)).mT
    z = linear(linear(x, w["f_a_proj.weight"], rd), w["f_b_proj.weight"], rd)
    log_decay = decay_gate(
        split_heads(z, c.num_heads),
        w["A_log"][: c.num_heads],
        w["dt_bias"].view(c.num_heads, c.head_dim),
        c.gate_lower_bound,
    )

    delta_rule = recurrent if x.shape[-2] == 1 else chunked
    o, state = delta_rule(q, k, v, log_decay, beta, cache.state)

    gate = split_heads(linear(x, w["g_proj.weight"], rd), c.num_heads)
    y = norm_then_gate(rd.bf(o), gate, w["o_norm.weight"], config.rms_norm_eps, rd)
    return linear(merge_heads(y), w["o_proj.weight"], rd), KdaCache(state, history)


def short_conv(x: Tensor, taps: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution, then SiLU.

    `x [..., T, C]`, `taps [C, n]` oldest first, `history [..., n-1, C]`. Returns the activated output
    `[..., T, C]` and the history after the last token.
    """
    n, T = taps.shape[-1], x.shape[-2]
    padded = torch.cat([history, x], dim=-2)
    summed = torch.zeros_like(x)
    for j in range(n):
        summed = summed + taps[:, j] * padded[..., j : j + T, :]
    return summed * torch.sigmoid(summed), padded[..., T:, :].clone()


def decay_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log-decay `g = bound * sigmoid(exp(A_log) (z + dt_bias))` in `(bound, 0)`, bound = -5 in the release.

    `z [..., H, T, K]`, `A_log [H]` (one scalar per head, inside the sigmoid), `dt_bias [H, K]`. Slow
    channels have `g` near 0 where only the sigmoid's RELATIVE accuracy counts; `torch.sigmoid` has it.
    """
    return lower_bound * torch.sigmoid(A_log.exp()[:, None, None] * (z + dt_bias[:, None, :]))


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: decay, predict, write, read.

    `q, k, log_decay [..., H, T, K]` (q scaled, q and k normalised), `v [..., H, T, V]`, `beta [..., H, T]`.
    Returns `o [..., H, T, V]` and the last state.
    """
    outputs = []
    for t in range(q.shape[-2]):
        state = log_decay[..., t, :, None].exp() * state
        error = v[..., t, :] - read(state, k[..., t, :])
        state = state + k[..., t, :, None] * (beta[..., t, None] * error)[..., None, :]
        outputs.append(read(state, q[..., t, :]))
    return torch.stack(outputs, dim=-2), state


def read(state: Tensor, key: Tensor) -> Tensor:
    """`S^T k`: `state [..., K, V]`, `key [..., K]` give `[..., V]`."""
    return (key[..., None, :] @ state).squeeze(-2)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The same function as `recurrent`, by chunks of `size` tokens.

    The corrections that a chunk's tokens make to each other solve a unit lower triangular system, by
    forward substitution: an explicit inverse or a power series loses all digits when decay is slow (keys
    nearly parallel).
    """
    outputs = []
    for start in range(0, q.shape[-2], size):
        t = slice(start, start + size)
        o, state = _chunk(q[..., t, :], k[..., t, :], v[..., t, :], log_decay[..., t, :], beta[..., t], state)
        outputs.append(o)
    return torch.cat(outputs, dim=-2), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    n = q.shape[-2]
    # span[i, j] = log-decay from token j to token i: the difference G_i - G_j of cumulative log-decays, but
    # summed directly to be free of cancellation; 0 on and above the diagonal. Its exponential is at most 1.
    # The factors exp(G_i) and exp(-G_j) would underflow and overflow, in float32 after 18 saturated tokens.
    later = torch.ones(n, n, dtype=q.dtype, device=q.device).tril(-1)
    span = (log_decay[..., :, None, :] * later[:, :, None]).cumsum(-3)
    decayed_k = span.exp() * k[..., None, :, :]
    A = beta[..., None] * (decayed_k @ k[..., None]).squeeze(-1).tril(-1)
    Q = (decayed_k @ q[..., None]).squeeze(-1).tril()

    decay = log_decay.cumsum(-2).exp()
    R = beta[..., None] * (v - (decay * k) @ state)
    U = torch.linalg.solve_triangular(A, R, upper=False, unitriangular=True)
    o = (decay * q) @ state + Q @ U
    return o, decay[..., -1, :, None] * state + decayed_k[..., -1, :, :].mT @ U


def norm_then_gate(o: Tensor, gate: Tensor, weight: Tensor, eps: float, rd: Rounding = EXACT) -> Tensor:
    """RMSNorm of each head's output, then its sigmoid gate; `o, gate [..., H, T, V]`, `weight [V]`."""
    return rd.bf(o * inverse_rms(o, eps) * weight * torch.sigmoid(gate))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`[..., T, H * D]` to `[..., H, T, D]`."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def merge_heads(x: Tensor) -> Tensor:
    """`[..., H, T, D]` to `[..., T, H * D]`."""
    return x.transpose(-2, -3).flatten(-2)
