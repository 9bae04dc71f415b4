"""Router, latent MoE and dense feed-forward: against loops over tokens and experts; and wrong variants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.reference import Config, Rounding, load_config, synthesise
from k3_audit.reference.moe import combine, dense, latent_moe, mlp
from k3_audit.reference.mxfp4 import decode
from k3_audit.reference.norm import rms_norm
from k3_audit.reference.rounding import nearest_bfloat16
from k3_audit.reference.router import Routing, route
from k3_audit.reference.tensors import layer_prefix
from k3_audit.reference.weights import Weights
from torch import Tensor

pytestmark = pytest.mark.unit

F64 = torch.float64
TINY = load_config("tiny")
RAW = synthesise(TINY)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def experts_config(experts: int, k: int) -> Config:
    return replace(TINY, num_experts=experts, num_experts_per_token=k)


# Router.

Router = Callable[[Tensor, Tensor, Tensor, Config], Routing]


def check_route(router: Router, x: Tensor, gate: Tensor, bias: Tensor, config: Config) -> None:
    """Against plain Python: sort by (-(score + bias), index), weights from the unbiased scores."""
    got = router(x, gate, bias, config)
    logits = (x @ gate.T).tolist()
    for t, row in enumerate(logits):
        scores = [1 / (1 + math.exp(-r)) for r in row]
        order = sorted(range(len(row)), key=lambda i: (-(scores[i] + bias[i].item()), i))
        chosen = order[: config.num_experts_per_token]
        assert got.experts[t].tolist() == chosen
        total = sum(scores[i] for i in chosen)
        np.testing.assert_allclose(got.weights[t].tolist(), [scores[i] / total for i in chosen], rtol=1e-12)


@settings(deadline=None, max_examples=40)
@given(experts=st.integers(1, 40), data=st.data(), seed=st.integers(0, 2**31))
def test_router_equals_plain_python(experts: int, data: st.DataObject, seed: int) -> None:
    config = experts_config(experts, data.draw(st.integers(1, experts)))
    check_route(
        route, normal(seed, 5, 12), normal(seed + 1, experts, 12), normal(seed + 2, experts) / 10, config
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, g, b, c: route(x, g, 0 * b, c),
        lambda x, g, b, c: replace(r := route(x, g, b, c), weights=r.selection.gather(-1, r.experts)),
        lambda x, g, b, c: replace(r := route(x, g, b, c), weights=r.weights * 2.5),
        lambda x, g, b, c: route(nearest_bfloat16(x @ g.T), torch.eye(len(g), dtype=F64), b, c),
    ],
    ids=["no bias", "biased weights", "scaled", "bf16 logits"],
)
def test_wrong_routers_fail(wrong: Router, seed: int) -> None:
    with pytest.raises(AssertionError):
        check_route(
            wrong, normal(seed, 64, 12), normal(seed + 1, 32, 12), normal(seed + 2, 32), experts_config(32, 4)
        )


def test_softmax_scores_fail(seed: int) -> None:
    def softmax_router(x: Tensor, gate: Tensor, bias: Tensor, config: Config) -> Routing:
        probabilities = (x @ gate.mT).softmax(-1)
        weights, experts = (probabilities + bias).topk(config.num_experts_per_token)
        return Routing(experts, weights / weights.sum(-1, keepdim=True), probabilities)

    with pytest.raises(AssertionError):
        check_route(softmax_router, normal(seed, 8, 12), normal(seed + 1, 32, 12), 0 * normal(seed, 32), TINY)


def test_ties_go_to_the_lower_index() -> None:
    config = experts_config(6, 3)
    gate = torch.tensor([[0.0], [1.0], [0.0], [1.0], [1.0], [1.0]], dtype=F64)
    routing = route(torch.ones(1, 1, dtype=F64), gate, torch.zeros(6, dtype=F64), config)
    assert routing.experts.tolist() == [[1, 3, 4]]
    assert routing.weights[0].tolist() == pytest.approx([1 / 3] * 3)


def crowded(seed: int) -> tuple[Tensor, Tensor, Tensor, Config]:
    """The released router's 896 experts and top 16, with five different scores among them."""
    gate = torch.randint(5, (896, 1), generator=torch.Generator().manual_seed(seed)).double()
    return torch.ones(2, 1, dtype=F64), gate, torch.zeros(896, dtype=F64), experts_config(896, 16)


def test_many_ties_at_the_released_width(seed: int) -> None:
    check_route(route, *crowded(seed))


def test_topk_breaks_ties_otherwise(seed: int) -> None:
    def by_topk(x: Tensor, gate: Tensor, bias: Tensor, config: Config) -> Routing:
        picked = (torch.sigmoid(x @ gate.mT) + bias).topk(config.num_experts_per_token).indices
        return route(x, gate, bias, config, experts=picked)

    with pytest.raises(AssertionError):
        check_route(by_topk, *crowded(seed))


def test_bias_selects_and_does_not_weigh(seed: int) -> None:
    config, gate, x = experts_config(8, 2), normal(seed, 8, 4), normal(seed + 1, 3, 4)
    favoured = torch.zeros(8, dtype=F64)
    favoured[[5, 2]] = torch.tensor([20.0, 10.0], dtype=F64)
    routing = route(x, gate, favoured, config)
    assert routing.experts.tolist() == [[5, 2]] * 3
    scores = torch.sigmoid(x @ gate.T)[:, [5, 2]]
    torch.testing.assert_close(routing.weights, scores / scores.sum(-1, keepdim=True))


def test_nan_is_an_error(seed: int) -> None:
    x = normal(seed, 4, 12)
    x[2, 3] = math.nan
    with pytest.raises(ValueError, match="NaN score at token 2 of 4"):
        route(x, normal(seed, 8, 12), torch.zeros(8, dtype=F64), TINY)


def test_forced_experts_keep_their_own_scores(seed: int) -> None:
    x, gate, bias = normal(seed, 3, 12), normal(seed + 1, 8, 12), normal(seed + 2, 8)
    free = route(x, gate, bias, TINY)
    again = route(x, gate, bias, TINY, experts=free.experts)
    assert torch.equal(again.weights, free.weights)
    other = (free.experts + 1) % 8
    forced = route(x, gate, bias, TINY, experts=other)
    scores = torch.sigmoid(x @ gate.T).gather(-1, other)
    torch.testing.assert_close(forced.weights, scores / scores.sum(-1, keepdim=True))


def test_vanishing_scores_do_not_divide_by_zero() -> None:
    gate = torch.full((8, 1), -2000.0, dtype=F64)
    routing = route(torch.ones(1, 1, dtype=F64), gate, torch.zeros(8, dtype=F64), TINY)
    assert routing.weights.tolist() == [[0.0, 0.0]]


# Latent MoE.


def moe_weights() -> Weights:
    return Weights(RAW, F64, "cpu", f"{layer_prefix(1)}block_sparse_moe.")


def situ(g: Tensor, u: Tensor) -> Tensor:
    return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)


Moe = Callable[[Tensor, Weights], Tensor]


def check_moe(moe: Moe, seed: int) -> None:
    """Against loops: a token at a time, all experts dense with weight zero where not chosen."""
    w = moe_weights()
    x = normal(seed, 9, TINY.hidden_size)
    got = moe(x, w)
    prefix = f"{layer_prefix(1)}block_sparse_moe.experts"
    matrices = [
        [
            decode(RAW[f"{prefix}.{i}.{n}.weight_packed"], RAW[f"{prefix}.{i}.{n}.weight_scale"])
            for n in ("w1", "w3", "w2")
        ]
        for i in range(8)
    ]
    for t in range(9):
        scores = torch.sigmoid(w["gate.weight"] @ x[t])
        chosen = (scores + w["gate.e_score_correction_bias"]).topk(2).indices.tolist()
        share = torch.zeros(8, dtype=F64)
        share[chosen] = scores[chosen] / scores[chosen].sum()
        latent = w["routed_expert_down_proj.weight"] @ x[t]
        outputs = [w2 @ situ(w1 @ latent, w3 @ latent) for w1, w3, w2 in matrices]
        c = rms_norm(
            sum(s * y for s, y in zip(share, outputs, strict=True)), w["routed_expert_norm.weight"], 1e-5
        )
        gate, up, down = (w[f"shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down"))
        expected = w["routed_expert_up_proj.weight"] @ c + down @ situ(gate @ x[t], up @ x[t])
        torch.testing.assert_close(got[t], expected, rtol=1e-11, atol=1e-13)


def test_moe_equals_loops(seed: int) -> None:
    check_moe(lambda x, w: latent_moe(x, w, TINY), seed)


def with_swapped_halves(w: Weights, of: str) -> dict[str, Tensor]:
    """Gate and up exchanged, in the routed or in the shared experts."""
    pair = {"routed": (".w1.", ".w3."), "shared": ("shared_experts.gate", "shared_experts.up")}[of]
    swapped = dict(w)
    for name in w:
        for a, b in (pair, pair[::-1]):
            if a in name:
                swapped[name] = w[name.replace(a, b)]
    return swapped


def norm_per_expert(x: Tensor, w: Weights) -> Tensor:
    """The norm on each expert's output instead of on their sum."""
    routing = route(x, w["gate.weight"], w["gate.e_score_correction_bias"], TINY)
    latent = x @ w["routed_expert_down_proj.weight"].T
    c = torch.zeros_like(latent)
    for slot in range(2):
        one = Routing(routing.experts[:, slot, None], torch.ones(len(x), 1, dtype=F64), routing.selection)
        y = rms_norm(combine(latent, one, w, TINY), w["routed_expert_norm.weight"], 1e-5)
        c = c + routing.weights[:, slot, None] * y
    shared = mlp(x, *(w[f"shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down")), TINY)
    return c @ w["routed_expert_up_proj.weight"].T + shared


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, w: latent_moe(x, with_swapped_halves(w, "routed"), TINY),
        lambda x, w: latent_moe(x, with_swapped_halves(w, "shared"), TINY),
        lambda x, w: latent_moe(x, w, TINY, experts=torch.tensor([[0, 1]]).expand(len(x), -1)),
        lambda x, w: latent_moe(
            x, {**w, "routed_expert_norm.weight": 2 * w["routed_expert_norm.weight"]}, TINY
        ),
        lambda x, w: latent_moe(x, w, replace(TINY, activation_situ_beta=8.0)),
        lambda x, w: latent_moe(x, w, TINY, Rounding.release()),
        norm_per_expert,
    ],
    ids=[
        "routed halves",
        "shared halves",
        "other experts",
        "norm weight",
        "beta",
        "rounded",
        "norm per expert",
    ],
)
def test_wrong_moe_fails(wrong: Moe, seed: int) -> None:
    with pytest.raises(AssertionError):
        check_moe(wrong, seed)


def test_routed_branch_ignores_a_common_scale_of_the_weights(seed: int) -> None:
    """The norm acts on the aggregate, so `routed_scaling_factor` drops out, up to epsilon."""
    w, x = moe_weights(), normal(seed, 5, TINY.hidden_size)
    scaled = replace(TINY, routed_scaling_factor=64.0)
    torch.testing.assert_close(latent_moe(x, w, scaled), latent_moe(x, w, TINY), rtol=1e-2, atol=1e-3)
    assert not torch.equal(latent_moe(x, w, scaled), latent_moe(x, w, TINY))


def test_leading_axes_are_only_batches(seed: int) -> None:
    w, x = moe_weights(), normal(seed, 6, TINY.hidden_size)
    torch.testing.assert_close(latent_moe(x.view(2, 3, -1), w, TINY).view(6, -1), latent_moe(x, w, TINY))


def test_dense_feed_forward(seed: int) -> None:
    w = Weights(RAW, F64, "cpu", f"{layer_prefix(0)}mlp.")
    x = normal(seed, 4, TINY.hidden_size)
    gate, up = x @ w["gate_proj.weight"].T, x @ w["up_proj.weight"].T
    expected = situ(gate, up) @ w["down_proj.weight"].T
    torch.testing.assert_close(dense(x, w, TINY), expected, rtol=1e-12, atol=1e-14)
    swapped = situ(up, gate) @ w["down_proj.weight"].T
    assert not torch.allclose(dense(x, w, TINY), swapped, rtol=1e-2)


# Weights by presence.


def test_packed_matrices_are_decoded_where_they_exist() -> None:
    w = moe_weights()
    name = f"{layer_prefix(1)}block_sparse_moe.experts.3.w2.weight"
    assert torch.equal(w["experts.3.w2.weight"], decode(RAW[f"{name}_packed"], RAW[f"{name}_scale"]))
    assert w["experts.3.w2.weight"] is w["experts.3.w2.weight"]
    plain = {k: v for k, v in RAW.items() if not k.startswith(name)} | {
        name: w["experts.3.w2.weight"].bfloat16()
    }
    again = Weights(plain, F64, "cpu", f"{layer_prefix(1)}block_sparse_moe.")
    assert torch.equal(again["experts.3.w2.weight"], w["experts.3.w2.weight"])
    assert set(again) == set(w) and len(again) == len(w)


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(KeyError, match=r"no tensor layer\.x\.weight"):
        Weights({}, F64, "cpu", "layer.")["x.weight"]
