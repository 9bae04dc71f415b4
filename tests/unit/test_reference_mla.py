"""Gated MLA: naive, absorbed and PyTorch's attention; blocks, batches, cache; and wrong variants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.reference import Config, Rounding, load_config, synthesise
from k3_audit.reference import mla as module
from k3_audit.reference.mla import MlaCache, absorbed, mla, naive
from k3_audit.reference.norm import rms_norm
from k3_audit.reference.tensors import layer_prefix
from k3_audit.reference.weights import Weights
from torch import Tensor

pytestmark = pytest.mark.unit

F64 = torch.float64
TINY = load_config("tiny")
RAW = synthesise(TINY)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def operands(seed: int, config: Config, T: int, S: int, lead: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """qn, qr, cache rows, kv_b, with attention logits of a few units."""
    H = config.num_attention_heads
    return (
        3 * normal(seed, *lead, T, H, config.qk_nope_head_dim),
        3 * normal(seed + 1, *lead, T, H, config.qk_rope_head_dim),
        normal(seed + 2, *lead, S, config.latent_cache_size),
        normal(seed + 3, H * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
        / config.kv_lora_rank**0.5,
    )


def by_pytorch(qn: Tensor, qr: Tensor, rows: Tensor, kv_b: Tensor, config: Config) -> Tensor:
    """Expand per head with a loop, then PyTorch's attention with an explicit mask."""
    R, nope = config.kv_lora_rank, config.qk_nope_head_dim
    T, S = qn.shape[-3], rows.shape[-2]
    mask = torch.arange(S) <= torch.arange(S - T, S)[:, None]
    heads = []
    for h, matrix in enumerate(kv_b.chunk(config.num_attention_heads)):
        kv = rows[..., :R] @ matrix.T
        q = torch.cat([qn[..., h, :], qr[..., h, :]], -1)
        k = torch.cat([kv[..., :nope], rows[..., R:]], -1)
        heads.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, kv[..., nope:], attn_mask=mask, scale=1 / math.sqrt(config.qk_head_dim)
            )
        )
    return torch.stack(heads, -2)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Config], Tensor]


def check_attend(attend: Attend, seed: int) -> None:
    for T, S in [(1, 1), (1, 9), (5, 5), (3, 12)]:
        inputs = operands(seed, TINY, T, S)
        torch.testing.assert_close(attend(*inputs, TINY), by_pytorch(*inputs, TINY), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("attend", [naive, absorbed])
def test_attention_equals_pytorchs(attend: Attend, seed: int) -> None:
    check_attend(attend, seed)


@settings(deadline=None, max_examples=30)
@given(
    T=st.integers(1, 9),
    before=st.integers(0, 40),
    heads=st.integers(1, 3),
    nope=st.sampled_from([4, 7]),
    rope=st.sampled_from([1, 4]),
    v=st.sampled_from([1, 6]),
    rank=st.sampled_from([3, 16]),
    lead=st.sampled_from([(), (2,)]),
    seed=st.integers(0, 2**31),
)
def test_absorbed_equals_naive(
    T: int, before: int, heads: int, nope: int, rope: int, v: int, rank: int, lead: tuple, seed: int
) -> None:
    config = replace(
        TINY,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=v,
        kv_lora_rank=rank,
    )
    inputs = operands(seed, config, T, before + T, lead)
    torch.testing.assert_close(absorbed(*inputs, config), naive(*inputs, config), rtol=1e-11, atol=1e-13)


def with_key_part_last(qn: Tensor, qr: Tensor, rows: Tensor, kv_b: Tensor, config: Config) -> Tensor:
    per_head = kv_b.unflatten(0, (config.num_attention_heads, -1)).roll(config.v_head_dim, 1)
    return naive(qn, qr, rows, per_head.flatten(0, 1), config)


def scaled_by_the_latent_width(qn: Tensor, qr: Tensor, rows: Tensor, kv_b: Tensor, config: Config) -> Tensor:
    factor = math.sqrt(config.qk_head_dim / config.latent_cache_size)
    return naive(factor * qn, factor * qr, rows, kv_b, config)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda qn, qr, rows, kv_b, c: naive(qn, 0 * qr, rows, kv_b, c),
        lambda qn, qr, rows, kv_b, c: naive(qn.flip(0), qr.flip(0), rows, kv_b, c).flip(0),
        lambda qn, qr, rows, kv_b, c: absorbed(qn, qr, rows.roll(c.qk_rope_head_dim, -1), kv_b, c),
        lambda qn, qr, rows, kv_b, c: absorbed(qn, qr, rows.float().bfloat16().double(), kv_b, c),
        lambda *inputs: torch.zeros_like(naive(*inputs)),
        with_key_part_last,
        scaled_by_the_latent_width,
    ],
    ids=["no rope term", "anti-causal", "rope first", "bf16 cache", "null", "value part first", "scale 576"],
)
def test_wrong_attention_fails(wrong: Attend, seed: int) -> None:
    with pytest.raises(AssertionError):
        check_attend(wrong, seed)


@pytest.mark.parametrize("attend", [naive, absorbed])
def test_blocks_of_queries_change_nothing(attend: Attend, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = operands(seed, TINY, T=23, S=40)
    whole = attend(*inputs, TINY)
    for elements in (1, 4 * 40 * 3, 4 * 40 * 7):
        monkeypatch.setattr(module, "SCORE_ELEMENTS", elements)
        torch.testing.assert_close(attend(*inputs, TINY), whole, rtol=1e-12, atol=1e-13)


def test_future_rows_are_not_read(seed: int) -> None:
    """A row after a query must not matter even if it holds NaN, as an uninitialised one may."""
    qn, qr, rows, kv_b = operands(seed, TINY, T=1, S=6)
    cache = MlaCache(torch.cat([rows, torch.full_like(rows, math.nan)]), 6)
    for attend in (naive, absorbed):
        assert torch.equal(attend(qn, qr, cache.rows, kv_b, TINY), attend(qn, qr, rows, kv_b, TINY))


def test_softmax_against_mpmath(seed: int) -> None:
    """One head, 40 digits; a logit far above the others and near-equal ones."""
    config = replace(TINY, num_attention_heads=1, num_key_value_heads=1, v_head_dim=2, kv_lora_rank=3)
    qn, qr, rows, kv_b = operands(seed, config, T=1, S=30)
    qn = 100 * qn
    R, nope = config.kv_lora_rank, config.qk_nope_head_dim
    with mpmath.workdps(40):
        latent, extra = mpmath.matrix(rows[:, :R].tolist()), mpmath.matrix(rows[:, R:].tolist())
        k = latent * mpmath.matrix(kv_b[:nope].tolist()).T
        v = latent * mpmath.matrix(kv_b[nope:].tolist()).T
        score = (
            k * mpmath.matrix(qn.flatten().tolist()) + extra * mpmath.matrix(qr.flatten().tolist())
        ) / mpmath.sqrt(config.qk_head_dim)
        weight = [mpmath.exp(s - max(score)) for s in score]
        truth = [float(sum(w * v[s, i] for s, w in enumerate(weight)) / sum(weight)) for i in range(2)]
    for attend in (naive, absorbed):
        got = attend(qn, qr, rows, kv_b, config).flatten()
        torch.testing.assert_close(got, torch.tensor(truth, dtype=F64), rtol=1e-11, atol=1e-13)


# The cache.


@settings(deadline=None, max_examples=40)
@given(pieces=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_cache_is_a_list_of_rows(pieces: list[tuple[int, int]]) -> None:
    """Appending and truncating, as drafts and rollbacks do, behaves like a list."""
    cache, model, n = MlaCache.empty(TINY, F64, "cpu"), [], 0
    for count, dropped in pieces:
        rows = torch.arange(n, n + count, dtype=F64)[:, None].expand(-1, TINY.latent_cache_size)
        cache, model, n = cache.append(rows), [*model, *range(n, n + count)], n + count
        keep = max(0, len(model) - dropped)
        cache, model = cache.truncate(keep), model[:keep]
        assert cache.rows[:, 0].tolist() == model and cache.rows[:, -1].tolist() == model


def test_appending_token_by_token_rarely_moves_the_buffer() -> None:
    cache, moves = MlaCache.empty(TINY, F64, "cpu"), 0
    for _ in range(1000):
        after = cache.append(torch.zeros(1, TINY.latent_cache_size, dtype=F64))
        moves += after.buffer.data_ptr() != cache.buffer.data_ptr()
        cache = after
    assert moves <= 11 and cache.length == 1000


# The whole sublayer.


def sublayer() -> Weights:
    return Weights(RAW, F64, "cpu", f"{layer_prefix(3)}self_attn.")


Sublayer = Callable[[Tensor, Weights], tuple[Tensor, MlaCache]]


def run(x: Tensor, w: Weights) -> tuple[Tensor, MlaCache]:
    return mla(x, w, TINY, MlaCache.empty(TINY, F64, "cpu"), naive)


def check_sublayer(layer: Sublayer, w: Weights, seed: int) -> None:
    """Against the formulas, with attention by PyTorch; latent norms with 1e-6, the rope part un-normed."""
    x = normal(seed, 8, TINY.hidden_size)
    y, cache = layer(x, w)
    R, H = TINY.kv_lora_rank, TINY.num_attention_heads
    cq = rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6)
    q = (cq @ w["q_b_proj.weight"].T).view(8, H, -1)
    kv = x @ w["kv_a_proj_with_mqa.weight"].T
    rows = torch.cat([rms_norm(kv[:, :R], w["kv_a_layernorm.weight"], 1e-6), kv[:, R:]], -1)
    nope = TINY.qk_nope_head_dim
    a = by_pytorch(q[..., :nope], q[..., nope:], rows, w["kv_b_proj.weight"], TINY).flatten(1)
    expected = (a * torch.sigmoid(x @ w["g_proj.weight"].T)) @ w["o_proj.weight"].T
    torch.testing.assert_close(cache.rows, rows, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)


def test_sublayer_equals_the_formulas(seed: int) -> None:
    check_sublayer(run, sublayer(), seed)


def test_latent_epsilon_is_a_parameter(seed: int) -> None:
    """1e-6 as in the release, 1e-5 as in serving engines: a difference that the check sees."""
    w = sublayer()
    with pytest.raises(AssertionError):
        check_sublayer(lambda x, w: mla(x, w, TINY, MlaCache.empty(TINY, F64, "cpu"), naive, 1e-5), w, seed)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, w: run(x, {**w, "g_proj.weight": 0 * w["g_proj.weight"]}),
        lambda x, w: run(x, {**w, "kv_a_layernorm.weight": torch.ones_like(w["kv_a_layernorm.weight"])}),
        lambda x, w: run(x.flip(0), w),
        lambda x, w: (run(x, w)[0], MlaCache.empty(TINY, F64, "cpu")),
    ],
    ids=["constant gate", "no latent norm weight", "order of tokens", "cache not kept"],
)
def test_wrong_sublayers_fail(wrong: Sublayer, seed: int) -> None:
    with pytest.raises(AssertionError):
        check_sublayer(wrong, sublayer(), seed)


def test_sublayer_takes_batches(seed: int) -> None:
    w, x = sublayer(), normal(seed, 2, 5, TINY.hidden_size)
    empty = MlaCache(torch.empty(2, 0, TINY.latent_cache_size, dtype=F64))
    y, cache = mla(x, w, TINY, empty, absorbed)
    y2, cache = mla(x, w, TINY, cache, naive)
    assert cache.rows.shape == (2, 10, TINY.latent_cache_size)
    for i in range(2):
        one, after = run(x[i], w)
        two, _ = mla(x[i], w, TINY, after, absorbed)
        torch.testing.assert_close(y[i], one, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(y2[i], two, rtol=1e-11, atol=1e-12)


def test_release_rounding_stays_near_and_differs(seed: int) -> None:
    inputs = operands(seed, TINY, T=4, S=30)
    exact = naive(*inputs, TINY)
    for attend in (naive, absorbed):
        rounded = attend(*inputs, TINY, Rounding.release())
        error = (rounded - exact).norm() / exact.norm()
        assert 2.0**-12 < error < 2.0**-5
