"""Feed-forward sublayers: the dense MLP, and the latent mixture of experts with shared experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .activation import situ_glu
from .config import Config
from .linear import linear
from .norm import rms_norm
from .rounding import EXACT, Rounding
from .router import Routing, route


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, config: Config, rd: Rounding = EXACT) -> Tensor:
    """`down situ(gate x, up x)`."""
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    return linear(situ_glu(linear(x, gate, rd), linear(x, up, rd), beta, linear_beta, rd), down, rd)


def dense(x: Tensor, w: Mapping[str, Tensor], config: Config, rd: Rounding = EXACT) -> Tensor:
    """A dense MLP on normed `x [..., E]`; `w` has `gate_proj`, `up_proj`, `down_proj`."""
    return mlp(x, w["gate_proj.weight"], w["up_proj.weight"], w["down_proj.weight"], config, rd)


def latent_moe(
    x: Tensor, w: Mapping[str, Tensor], config: Config, rd: Rounding = EXACT, experts: Tensor | None = None
) -> Tensor:
    """The MoE sublayer on normed `x [..., E]`; `w` has the released names below `block_sparse_moe.`.

    Routing looks at full-width `x`; the routed experts work in a latent space, and the norm acts on their
    weighted sum. `experts [..., k]` forces the choice of experts.
    """
    routing = route(x, w["gate.weight"], w["gate.e_score_correction_bias"], config, experts)
    latent = linear(x, w["routed_expert_down_proj.weight"], rd)
    combined = rd.bf(combine(latent, routing, w, config, rd))
    combined = rms_norm(combined, w["routed_expert_norm.weight"], config.rms_norm_eps, rd)
    routed = linear(combined, w["routed_expert_up_proj.weight"], rd)
    shared = mlp(
        x,
        w["shared_experts.gate_proj.weight"],
        w["shared_experts.up_proj.weight"],
        w["shared_experts.down_proj.weight"],
        config,
        rd,
    )
    return rd.bf(routed + shared)


def combine(
    latent: Tensor, routing: Routing, w: Mapping[str, Tensor], config: Config, rd: Rounding = EXACT
) -> Tensor:
    """`sum_i weight_i expert_i(latent)` for `latent [..., Lr]`; weights and sum are never rounded.

    `w` has `experts.{i}.w1.weight` (gate), `w3` (up) and `w2` (down). Summed in the order of expert indices.
    """
    tokens = latent.reshape(-1, latent.shape[-1])
    chosen = routing.experts.reshape(len(tokens), -1)
    weights = routing.weights.reshape(len(tokens), -1)
    total = torch.zeros_like(tokens)
    for i in chosen.unique().tolist():
        token, slot = (chosen == i).nonzero(as_tuple=True)
        gate, up, down = (w[f"experts.{i}.{matrix}.weight"] for matrix in ("w1", "w3", "w2"))
        y = mlp(tokens[token], gate, up, down, config, rd)
        total[token] += weights[token, slot, None] * y
    return total.view_as(latent)
