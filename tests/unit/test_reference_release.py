"""The release's rounding points, one by one: a `Rounding` that takes notes, and values that must stay exact."""

from __future__ import annotations

import pytest
import torch
from k3_audit.reference import Layer, Model, Rounding, load_config, synthesise
from k3_audit.reference.attn_res import Residual
from k3_audit.reference.kda import KdaCache
from k3_audit.reference.mla import MlaCache
from k3_audit.reference.rounding import nearest_bfloat16
from torch import Tensor

pytestmark = pytest.mark.unit

TINY = load_config("tiny")
RAW = synthesise(TINY)
T = 3
E = TINY.hidden_size
H, D = TINY.linear_attn_config.num_heads, TINY.linear_attn_config.head_dim
P = H * D
Shapes = list[tuple[int, ...]]


class Notes:
    """The rounding of the release that notes the shape of everything it rounds."""

    def __init__(self) -> None:
        self.shapes: Shapes = []
        self.rounding = Rounding(bf=self._bf)

    def _bf(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return nearest_bfloat16(x)

    def taken(self) -> Shapes:
        shapes, self.shapes = self.shapes, []
        return shapes


def layer(l: int, rounding: Rounding) -> Layer:
    return Layer(TINY, l, RAW, rd=rounding)


def normed(seed: int, tokens: int = T) -> Tensor:
    x = torch.randn(tokens, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return nearest_bfloat16(x)


def mlp(inner: int, width: int, tokens: int = T) -> Shapes:
    """Gate and up projections, activation, down projection."""
    return [(tokens, inner), (tokens, inner), (tokens, inner), (tokens, width)]


def test_kda_rounds_projections_convolution_output_and_gated_norm(seed: int) -> None:
    notes = Notes()
    kda = layer(1, notes.rounding)
    kda.prefill(normed(seed), kda.empty_cache())
    assert notes.taken() == [
        *[(T, P)] * 3,  # q, k, v
        (T, 3 * P),  # after convolution and SiLU
        (T, H),  # beta logits; their sigmoid stays
        (T, D),  # decay bottleneck
        (T, P),  # decay logits; everything from them to the state stays
        (T, P),  # output gate logits
        (H, T, D),  # o
        (H, T, D),  # norm times gate, once
        (T, E),  # output projection
    ]


def test_mla_rounds_products_and_norms(seed: int) -> None:
    heads, rank = TINY.num_attention_heads, TINY.kv_lora_rank
    nope, v = TINY.qk_nope_head_dim, TINY.v_head_dim
    before: Shapes = [
        *[(T, TINY.q_lora_rank)] * 3,  # projection; norm, twice
        (T, heads * TINY.qk_head_dim),
        (T, TINY.latent_cache_size),
        *[(T, rank)] * 2,  # norm of the latent, twice; not of the rope part
    ]
    after: Shapes = [(T, heads * v)] * 3 + [(T, E)]  # gate logits, their sigmoid, the product; output
    notes = Notes()
    mla = layer(3, notes.rounding)
    mla.prefill(normed(seed), mla.empty_cache())
    assert notes.taken() == [*before, (T, heads, nope), (T, heads, v), (T, heads, v), *after]
    mla.verify(normed(seed), mla.empty_cache())
    assert notes.taken() == [*before, (T, heads, rank), (T, heads, rank), (T, heads, v), *after]


def test_feed_forwards_round_products_activations_and_the_combined_output(seed: int) -> None:
    latent = TINY.routed_expert_hidden_size
    notes = Notes()
    moe = layer(1, notes.rounding)
    moe.feed_forward(normed(seed), experts=torch.tensor([[0, 5]] * T))
    assert notes.taken() == [
        (T, latent),
        *mlp(TINY.moe_intermediate_size, latent) * 2,  # two experts
        (T, latent),  # the weighted sum, once; its terms and weights stay
        *[(T, latent)] * 2,  # norm, twice
        (T, E),
        *mlp(TINY.shared_intermediate_size, E),
        (T, E),  # routed plus shared
    ]
    layer(0, notes.rounding).feed_forward(normed(seed))
    assert notes.taken() == mlp(TINY.intermediate_size, E)


def test_attn_res_rounds_prefix_mixture_and_norm(seed: int) -> None:
    rows = normed(seed), normed(seed + 1), normed(seed + 2)
    notes = Notes()
    layer(4, notes.rounding).before_ffn(Residual(rows[:1], rows[1]), rows[2])
    assert notes.taken() == [(T, E)] * 4  # prefix, mixture, norm twice


def test_the_head_rounds_the_logits() -> None:
    notes = Notes()
    model = Model(TINY, RAW, rd=notes.rounding)
    model.decode(65, model.empty_cache())
    assert notes.taken()[-1] == (1, TINY.vocab_size)


def test_caches_hold_bfloat16_values_and_the_state_does_not(seed: int) -> None:
    """The latents and the convolution history are stored as BF16; the recurrent state is float32 or better."""
    for l in (1, 3):
        one = layer(l, Rounding.release())
        _, cache = one.prefill(normed(seed, tokens=9), one.empty_cache())
        if isinstance(cache, KdaCache):
            assert torch.equal(cache.history, nearest_bfloat16(cache.history))
            assert (cache.state != nearest_bfloat16(cache.state)).double().mean() > 0.99
        else:
            assert isinstance(cache, MlaCache)
            assert torch.equal(cache.rows, nearest_bfloat16(cache.rows))
