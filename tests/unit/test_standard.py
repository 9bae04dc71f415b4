"""The standard path against fp64 formulas written here, against `reference`, and against its other schedules.

Tolerances are derived. One rounding: every element within u = 2**-8 of its own size, plus fp32 noise of its
summands (`one_rounding`). k independent roundings: relative L2 error sqrt(k) u (`bf16`). fp32 results: a
multiple of 2**-24. Each formula also comes in wrong forms, which must not pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from k3_audit import reference
from k3_audit.fused_backend import standard
from k3_audit.fused_backend.standard import Config, KDACache, MLACache, StandardLayer, StandardModel
from torch import Tensor

pytestmark = pytest.mark.unit

BF16 = torch.bfloat16


Measure = Callable[[Tensor, Tensor], float]  # (result, truth) -> a number that may be at most 1


def bf16(roundings: int) -> float:
    return 2**-8 * math.sqrt(roundings)


def error(out: Tensor, ref: Tensor) -> float:
    """Relative L2 error; infinite where `out` is not finite."""
    out, ref = out.double(), ref.double()
    return float((out - ref).norm() / ref.norm()) if out.isfinite().all() else math.inf


def in_l2(tolerance: float) -> Measure:
    return lambda out, ref: error(out, ref) / tolerance


def one_rounding(summands: Tensor, terms: int) -> Measure:
    """One rounding to BF16 after an fp32 sum of `terms` terms, whose absolute values add up to `summands`."""
    noise = terms * 2**-24 * summands.double()
    return lambda out, ref: float(((out.double() - ref).abs() / (2**-8 * ref.abs() + noise)).max())


def assert_judges(out: Tensor, right: Tensor, wrong: dict[str, Tensor], measure: Measure) -> None:
    """`out` agrees with `right`; zero and the `wrong` forms agree neither with `right` nor with `out`."""
    assert measure(out, right) <= 1
    for name, other in {**wrong, "zero": torch.zeros_like(right)}.items():
        assert measure(other, right) > 1, f"the tolerance lets the wrong form through: {name}"
        assert measure(out, other.double()) > 1, name


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=rng)).to(dtype)


# Operators.


def test_rms_norm(rng):
    x, w = normal(rng, 5, 96), normal(rng, 96) + 1
    wide = x.double()

    def formula(eps=1e-5, mean=True):
        square = wide.square()
        return w.double() * wide / ((square.mean(-1, True) if mean else square.sum(-1, True)) + eps).sqrt()

    wrong = {
        "sum for mean": formula(mean=False),
        "no weight": formula() / w.double(),
        "eps outside": formula(0.1),
    }
    assert_judges(standard.rms_norm(x, w, 1e-5), formula(), wrong, in_l2(bf16(2)))


def test_linear_rounds_once_from_fp32(rng):
    x, w = normal(rng, 1, 4096), normal(rng, 8, 4096)
    exact = x.double() @ w.double().t()
    in_bf16 = torch.stack(
        [sum((a * b for a, b in zip(row, x[0], strict=True)), x.new_zeros(())) for row in w]
    )
    measure = one_rounding(x.double().abs() @ w.double().abs().t(), 4096)
    assert_judges(standard.linear(x, w), exact, {"accumulated in BF16": in_bf16[None]}, measure)


def test_situ_reference_points():
    g = torch.tensor([-4.0, -1.0, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    # 1875 (u/25)^2 / 25^2 / 3 is the up branch's first correction: 25 tanh(u/25) = 1 at u = 1.000534...
    one = torch.full_like(g, 25 * math.atanh(1 / 25))
    expected = torch.tensor(
        [-0.054793, -0.263475, 0.716200, 1.628126, 2.991584, 3.854817], dtype=torch.float64
    )
    out = standard.situ(g.float(), one.float(), 4.0, 25.0)
    assert torch.allclose(out.double(), expected, atol=1e-6, rtol=0)
    capped = 4 * torch.tanh(g / 4) * torch.sigmoid(4 * torch.tanh(g / 4))
    swapped = standard.situ(one.float(), g.float(), 4.0, 25.0).double()
    for other in (capped, swapped, torch.zeros_like(expected)):
        assert not torch.allclose(other, expected, atol=1e-6, rtol=0)
    extreme = torch.tensor([-3e38, -100.0, 100.0, 3e38], dtype=BF16)
    assert standard.situ(extreme, extreme, 4.0, 25.0).tolist() == [0.0, 0.0, 100.0, 100.0]


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_attn_res_mix(rng, rows):
    x = normal(rng, 3, rows, 128) * torch.tensor([0.1, 1.0, 5.0])[:, None, None].bfloat16()
    n, a = normal(rng, 128) + 1, normal(rng, 1, 128, scale=0.2)
    wide, c = x.double(), (n.double() * a.double()).flatten()
    rms = (wide.square().mean(-1, True) + 1e-5).sqrt()

    def formula(logits, values=wide):
        return (torch.softmax(logits, -1)[..., None] * values).sum(1)

    logits = (wide / rms * c).sum(-1)
    right = formula(logits)
    out = standard.attn_res_mix(x, n, a, 1e-5)
    if rows == 1:
        assert torch.equal(out, x[:, 0])
        return
    wrong = {
        "attention scale": formula(logits / math.sqrt(128)),
        "raw rows in the logits": formula((wide * c).sum(-1)),
        "normed rows in the mixture": formula(logits, wide / rms),
        "a row left out": formula(logits[:, 1:], wide[:, 1:]),
        "softmax in BF16": (torch.softmax(logits.bfloat16(), -1)[..., None] * x).sum(1),
    }
    # a logit's relative error of 128 * 2**-24 moves a weight by as much, times the logit's size (below 8)
    assert_judges(out, right, wrong, one_rounding(formula(logits, wide.abs()), 8 * 128))


def test_short_conv_is_causal_with_history(rng):
    x, history, taps = normal(rng, 6, 10), normal(rng, 3, 10), normal(rng, 10, 4, dtype=torch.float32)
    seen = torch.cat([history, x]).double()

    def formula(order, start=0):
        a = torch.stack(
            [
                sum(taps[:, i].double() * seen[start + t + order[i]] for i in range(4))
                for t in range(6 - start)
            ]
        )
        return a * torch.sigmoid(a)

    out, after = standard.short_conv(x, history, taps)
    newest_first = formula([3, 2, 1, 0])
    # SiLU's slope is at most 1.1
    measure = one_rounding(sum(taps[:, i].double().abs() * seen[i : i + 6].abs() for i in range(4)), 8)
    assert_judges(out, formula([0, 1, 2, 3]), {"taps newest first": newest_first}, measure)
    assert torch.equal(after, x[-3:])
    _, short = standard.short_conv(x[:1], history, taps)
    assert torch.equal(short, torch.cat([history[1:], x[:1]]))


def test_log_decay_keeps_relative_accuracy_where_decay_is_slow():
    z = torch.linspace(-30, 30, 61, dtype=BF16)[:, None, None]
    a_log, bias = torch.tensor([0.6]), torch.tensor([[0.25]])
    x = a_log.double().exp() * (z.double() + 0.25)
    right = -5 * torch.exp(torch.nn.functional.logsigmoid(x))
    g = standard.kda_log_decay(z, a_log, bias, -5.0).double()
    relative = ((g - right) / right).abs().max()
    # exp amplifies the relative error of its argument by the argument, up to 55 here
    assert relative <= 64 * 2**-24
    assert ((-5 * (1 - torch.sigmoid(-x.float())).double() - right) / right).abs().max() > 64 * 2**-24
    assert (g < 0).all() and (g >= -5).all()


# KDA.


def kda_case(rng, tokens, heads=3, dim=8, bias=0.0, dtype=torch.float32):
    """q, k, v, g, beta and a state, in the regime that `bias` of the decay's logits selects."""
    q, k, v = (normal(rng, tokens, heads, dim, dtype=torch.float64) for _ in range(3))
    k = k + 2 * k[:1]  # correlated keys: the triangular system is far from the identity
    q, k = standard.l2_norm(q) * dim**-0.5, standard.l2_norm(k)
    g = -5 * torch.sigmoid(normal(rng, tokens, heads, dim, dtype=torch.float64) + bias)
    beta = torch.sigmoid(normal(rng, tokens, heads, dtype=torch.float64))
    state = normal(rng, heads, dim, dim, dtype=torch.float64)
    return [x.to(dtype) for x in (state, q, k, v, g, beta)]


def kda_formula(state, q, k, v, g, beta, wrong=""):
    """The recurrence, key first, one head after the other, in fp64."""
    S = state.double().mT.clone()
    outs = torch.zeros_like(v, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            kt, qt, vt = k[t, h].double(), q[t, h].double(), v[t, h].double()
            decayed = g[t, h].double().exp()[:, None] * S[h]
            if wrong == "decay along the value":
                decayed = g[t, h].double().exp()[None] * S[h]
            e = vt - (S[h] if wrong == "prediction before decay" else decayed).T @ kt
            S[h] = decayed + beta[t, h].double() * torch.outer(kt, e)
            outs[t, h] = (decayed if wrong == "read before write" else S[h]).T @ qt
    return outs, S.mT


WRONG_KDA = ("decay along the value", "prediction before decay", "read before write")
REGIMES = pytest.mark.parametrize("bias", [8.0, 0.0, -8.0], ids=["saturated", "mixed", "slow"])


@REGIMES
def test_kda_recurrent(rng, bias):
    case = kda_case(rng, 20, bias=bias)
    # each token adds a few fp32 roundings to a contraction: errors add up at worst
    tolerance = 20 * 8 * 2**-24
    o, state = standard.kda_recurrent(*case)
    right, after = kda_formula(*case)
    wrong = {name: kda_formula(*case, wrong=name) for name in WRONG_KDA}
    if bias == -8.0:  # decay of e^-0.002: whether it comes before or after hardly shows
        tolerance /= 4
    assert_judges(o, right, {name: w[0] for name, w in wrong.items()}, in_l2(tolerance))
    assert error(state, after) <= tolerance


@REGIMES
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 150])
def test_chunked_is_the_recurrence(rng, bias, tokens):
    exact = kda_case(rng, tokens, bias=bias, dtype=torch.float64)
    o, state = standard.kda_chunked(*exact)
    right, after = standard.kda_recurrent(*exact)
    assert error(o, right) <= 1e-12 and error(state, after) <= 1e-12
    # in fp32, cumulative logs of up to 64 * 5 are off by that many units in the last place: exp keeps it
    o, state = standard.kda_chunked(*(x.float() for x in exact))
    assert error(o, right) <= 64 * 5 * 2**-24 and error(state, after) <= 64 * 5 * 2**-24
    if tokens > 64:
        cut = [exact[0], *(x[64:] for x in exact[1:])]
        lost = standard.kda_chunked(*(x.float() for x in cut))[0]
        assert bias == 8.0 or error(lost, right[64:]) > 64 * 5 * 2**-24, (
            "a chunk that forgets the state must fail"
        )


# MLA.

MLA = Config(
    hidden_size=64, num_hidden_layers=1, vocab_size=8, rms_norm_eps=1e-5, activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0, first_k_dense_replace=1, num_experts_per_token=2, routed_scaling_factor=1.0,
    num_attention_heads=3, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16,
    attn_res_block_size=3, num_heads=4, head_dim=16, short_conv_kernel_size=4, gate_lower_bound=-5.0, kda_layers=(),
)  # fmt: skip


def test_mla_attend_is_plain_attention_over_expanded_keys(rng):
    c, T, S = MLA, 5, 12
    qn, qr = normal(rng, T, 3, 24), normal(rng, T, 3, 8)
    rows, kv_b = normal(rng, S, 40), normal(rng, 3 * 40, 32, scale=0.3)
    k, v = (rows[:, :32].double() @ kv_b.double().t()).view(S, 3, 40).split([24, 16], -1)

    def formula(scale=32**-0.5, rope=1.0, ahead=0):
        scores = torch.einsum("thd,shd->ths", qn.double(), k)
        scores = (scores + rope * torch.einsum("thd,sd->ths", qr.double(), rows[:, 32:].double())) * scale
        for t in range(T):
            scores[t, :, S - T + t + 1 + ahead :] = -math.inf
        return torch.einsum("ths,shd->thd", torch.softmax(scores, -1), v)

    wrong = {
        "scale of the latent": formula(40**-0.5),
        "no rope term": formula(rope=0.0),
        "future": formula(ahead=1),
    }
    out = standard.mla_attend(qn, qr, rows, kv_b, c)
    # rounded are the weights, the sum and the result, and the absorbed query, which moves the logits
    absorbed = torch.einsum("thd,hdc->thc", qn.double(), kv_b.double().view(3, 40, 32)[:, :24])
    logit_noise = (absorbed.square() @ rows[:, :32].double().square().t()).sqrt().mean() * 32**-0.5 * 2**-8
    assert_judges(out, formula(), wrong, in_l2(bf16(3) + float(logit_noise)))
    one = torch.cat(
        [standard.mla_attend(qn[t : t + 1], qr[t : t + 1], rows[: S - T + t + 1], kv_b, c) for t in range(T)]
    )
    assert error(one, out) <= bf16(2)


def test_latent_cache_grows_and_keeps_its_rows(rng):
    cache, rows = MLACache(torch.empty(2, 4, dtype=BF16)), normal(rng, 11, 4)
    for part in rows.split(3):
        cache.append(part)
    assert cache.length == 11 and torch.equal(cache.rows[:11], rows)
    other = cache.clone()
    other.append(rows[:1])
    assert cache.length == 11 and torch.equal(cache.rows[:11], rows)


# Feed-forward.


def test_router_selects_with_bias_and_weighs_without(rng):
    x, gate = normal(rng, 4, 32), normal(rng, 12, 32, scale=0.3)
    bias = torch.linspace(-2, 2, 12)
    scores = torch.sigmoid(x.double() @ gate.double().t())
    weights, ids = standard.route(x, gate, bias, 3)
    assert (ids >= 9).sum() > (ids < 3).sum(), "the bias must steer the selection"
    picked = scores.gather(1, ids)
    assert_judges(
        weights,
        picked / picked.sum(-1, True),
        {"biased weights": (scores + bias).gather(1, ids), "not renormalised": picked},
        in_l2(32 * 2**-24),
    )
    assert torch.equal(standard.route(x, gate, bias, 3, 2.0)[0], 2 * weights)
    assert torch.equal(
        standard.route(x, gate, bias, 3, 1.0, torch.zeros(4, 3, dtype=torch.int64))[1], torch.zeros(4, 3)
    )


def test_router_ties_go_to_the_lower_expert_and_nan_is_an_error(rng):
    x, gate = normal(rng, 2, 16), normal(rng, 1, 16).expand(40, 16)
    assert standard.route(x, gate, torch.zeros(40), 4)[1].tolist() == [[0, 1, 2, 3]] * 2
    with pytest.raises(ValueError, match="NaN"):
        standard.route(x * math.nan, gate, torch.zeros(40), 4)


def test_mxfp4_known_vector_and_reference():
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    row = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2
    out = standard.dequantise_mxfp4(packed, torch.tensor([[129]], dtype=torch.uint8))
    assert out.dtype == BF16 and out.tolist() == [[4 * v for v in row]]
    swapped = standard.dequantise_mxfp4(
        (packed >> 4) | (packed << 4), torch.tensor([[129]], dtype=torch.uint8)
    )
    assert swapped.tolist() != out.tolist()
    every = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scale = torch.tensor([[1, 127, 100, 200, 7, 250, 128, 126]] * 2, dtype=torch.uint8)
    ours = standard.dequantise_mxfp4(every, scale).double()
    assert torch.equal(ours, reference.mxfp4.decode(every, scale))
    with pytest.raises(ValueError, match="does not fit"):
        standard.dequantise_mxfp4(every, scale[:, :3])


# Layers and the model, on made-up weights in the released layout.


def shrink(layers: int, block: int) -> reference.Config:
    """The shipped tiny configuration with other numbers of layers: MLA every fourth and last, as in the release."""
    document = reference.load_config("tiny").to_json()
    text = document["text_config"]
    mla = sorted({*range(4, layers + 1, 4), layers})
    text |= {"num_hidden_layers": layers, "attn_res_block_size": block}
    text["linear_attn_config"] |= {
        "full_attn_layers": mla,
        "kda_layers": [l for l in range(1, layers + 1) if l not in mla],
    }
    return reference.Config.from_json(document)


@pytest.fixture(scope="module")
def case():
    """(reference config, its tensors, the standard model): 5 layers in blocks of 2, so the last block is short."""
    config = shrink(5, 2)
    tensors = reference.synthesise(config, seed=3)
    return config, tensors, StandardModel(Config.from_json(config.to_json()), tensors)


def test_config_reads_the_release_and_names_what_is_missing(case):
    c = Config.from_json(reference.load_config("kimi-k3").to_json())
    assert (c.hidden_size, c.num_heads, c.kv_lora_rank, c.attn_res_block_size) == (7168, 96, 512, 12)
    assert [l for l in range(93) if not c.is_kda(l)] == [*range(3, 91, 4), 91, 92]
    assert not c.is_moe(0) and c.is_moe(1)
    document = reference.load_config("tiny").to_json()
    del document["text_config"]["kv_lora_rank"], document["text_config"]["linear_attn_config"]["head_dim"]
    with pytest.raises(ValueError, match=r"config: kv_lora_rank, head_dim missing"):
        Config.from_json(document)


def sublayer_inputs(rng, config, tokens):
    return normal(rng, tokens, config.hidden_size)


@pytest.mark.parametrize("l", range(5))
def test_sublayers_err_no_more_than_the_rounded_reference(case, rng, l):
    """The same inputs and experts for three parties: fp64, fp64 rounded at the release's points, and this path.

    Both rounded parties may differ in where they are lucky, not in how much they lose: their errors agree to a factor.
    """
    config, tensors, model = case
    layer, x = model.layers[l], sublayer_inputs(rng, config, 70)
    rounding = reference.Rounding.release()
    exact, rounded = (reference.Layer(config, l, tensors, rd=rd) for rd in (reference.EXACT, rounding))
    wide = x.double()
    right, after = exact.prefill(wide, exact.empty_cache())
    other, _ = rounded.prefill(wide, rounded.empty_cache())
    caches = [layer.empty_cache()]
    out = layer.attention(x, caches, prefill=True)
    assert error(out, right) <= 1.5 * error(other, right)
    assert error(out, right) < 0.05 < error(out.roll(1, 0), right)
    if isinstance(caches[0], KDACache):
        assert error(caches[0].state.mT, after.state) < 0.02 < error(caches[0].state, after.state)
        assert error(caches[0].history, after.history) <= bf16(1)
    else:
        assert error(caches[0].rows[:70], after.rows) <= bf16(3)

    ids = torch.rand(70, config.num_experts, generator=rng).argsort(-1)[:, : config.num_experts_per_token]
    right, other = (party.feed_forward(wide, ids) for party in (exact, rounded))
    out = layer.ffn(x, ids)
    assert error(out, right) <= 1.5 * error(other, right)
    assert error(out, right) < 0.05
    if layer.is_moe:
        assert error(layer.ffn(x, ids.roll(1, 0)), right) > 0.05


@pytest.mark.parametrize(
    ("l", "tokens"), [(0, 70), (1, 70), (4, 8)], ids=["kda saturated", "kda two chunks", "mla"]
)
def test_prefill_hands_over_to_decode(case, rng, l, tokens):
    """Some tokens in one call, then 5 one by one, against all one by one: the outputs and the caches afterwards."""
    config, _, model = case
    layer, x = model.layers[l], sublayer_inputs(rng, config, tokens + 5)
    a, b, cut = ([layer.empty_cache()] for _ in range(3))
    first = layer.attention(x[:tokens], a, prefill=True)
    out = torch.cat([first, *(layer.attention(t, a) for t in x[tokens:].split(1))])
    right = torch.cat([layer.attention(t, b) for t in x.split(1)])
    # the same BF16 inputs through two orders of fp32 sums: each party's last roundings may fall the other way
    assert error(out, right) <= bf16(2)
    layer.attention(x[: tokens - 1], cut, prefill=True)
    lost = torch.cat([layer.attention(t, cut) for t in x[tokens:].split(1)])
    assert error(lost, right[tokens:]) > bf16(2), "a token lost at the hand-over must show"
    if layer.is_kda:
        assert torch.equal(a[0].history, b[0].history)
        assert error(a[0].state, b[0].state) <= 64 * 5 * 2**-24
    else:
        assert torch.equal(a[0].rows[: tokens + 5], b[0].rows[: tokens + 5])


def test_model_follows_the_reference(case, rng):
    """Whole model on the reference's experts: prefill, and prefill that goes on as decode, against fp64."""
    config, tensors, model = case
    tokens = torch.randint(0, config.vocab_size, (24,), generator=rng)
    exact = reference.Model(config, tensors)
    routed: dict[int, Tensor] = {}

    def observe(seen):
        if seen.site == "ffn" and config.is_moe(seen.layer):
            w = model.layers[seen.layer].mlp
            gate, bias = w["gate.weight"], w["gate.e_score_correction_bias"]
            routed[seen.layer] = standard.route(seen.step.normed.to(BF16), gate, bias, 2)[1]

    right = exact.prefill(tokens, exact.empty_cache(), keep=24, observer=observe)

    def median_error(party, start=24):
        """Of a token's logits. The median, since tokens at a near-tie of two mixture rows amplify any rounding."""
        cache = party.empty_cache()
        part = {l: ids[:start] for l, ids in routed.items()}
        logits = [party.prefill(tokens[:start], cache, all_logits=True, expert_ids=part)]
        for t in range(start, 24):
            part = {l: ids[t : t + 1] for l, ids in routed.items()}
            logits.append(party.decode(tokens[None, t : t + 1], [cache], expert_ids=part)[0])
        each = zip(torch.cat(logits), right, strict=True)
        return sorted(error(out, ref) for out, ref in each)[12]

    # 5 layers of two sublayers, each with about 4 roundings that the residuals and mixes pass on
    tolerance = bf16(5 * 2 * 4)
    assert median_error(model) <= tolerance and median_error(model, start=10) <= tolerance
    for name, change in {
        "one layer less": {"num_hidden_layers": 4},
        "other blocks": {"attn_res_block_size": 3},
        "another eps of the latent norms": {"latent_norm_eps": 1.0},
    }.items():
        assert median_error(StandardModel(replace(model.config, **change), tensors)) > tolerance, name


def test_decode_does_not_depend_on_its_schedule(case, rng):
    """Bitwise: three sequences of unequal length in one step or alone, two tokens in one call or in two."""
    config, _, model = case
    lengths = (3, 1, 20)
    prompts = [torch.randint(0, config.vocab_size, (n,), generator=rng) for n in lengths]
    tokens = torch.randint(0, config.vocab_size, (3, 2), generator=rng)

    def prefilled():
        caches = [model.empty_cache() for _ in prompts]
        for prompt, cache in zip(prompts, caches, strict=True):
            model.prefill(prompt, cache)
        return caches

    a, b, c = prefilled(), prefilled(), prefilled()
    together = model.decode(tokens, a)
    alone = torch.cat([model.decode(tokens[i : i + 1], b[i : i + 1]) for i in range(3)])
    one_by_one = torch.cat([model.decode(tokens[:, t : t + 1], c) for t in range(2)], 1)
    assert torch.equal(together, alone) and torch.equal(together, one_by_one)
    for x, y, z in zip(*(cache for caches in (a, b, c) for cache in caches[2:]), strict=True):
        for other in (y, z):
            same = (
                torch.equal(x.state, other.state)
                if isinstance(x, KDACache)
                else torch.equal(x.rows[:22], other.rows[:22])
            )
            assert same
    swapped = model.decode(tokens, [prefilled()[i] for i in (1, 0, 2)])
    assert not torch.equal(swapped, together), "the cache must matter"


def test_fixed_rows_is_needed_and_enough(rng):
    """A library's GEMM gives a row other bits in another shape, which is why decode has one shape."""
    w = normal(rng, 64, 4096)
    x = normal(rng, 8, 4096)
    bare = torch.stack([(x[i : i + 1].float() @ w.float().t())[0] for i in range(8)])
    ours = torch.cat([standard.matmul(x[i : i + 1], w) for i in range(8)])
    assert torch.equal(ours, standard.matmul(x, w))
    if torch.equal(bare, x.float() @ w.float().t()):
        pytest.skip("this machine's GEMM has the same order for 1 and 8 rows")


def test_segments_and_query_blocks_do_not_move_chunks(case, rng, monkeypatch):
    config, _, model = case
    tokens = torch.randint(0, config.vocab_size, (140,), generator=rng)
    ids = torch.rand(140, config.num_experts, generator=rng).argsort(-1)[:, : config.num_experts_per_token]

    def prefill():
        return model.prefill(
            tokens, model.empty_cache(), all_logits=True, expert_ids=dict.fromkeys(range(1, 5), ids)
        )

    whole = prefill()
    monkeypatch.setattr(standard, "PREFILL_SEGMENT", standard.CHUNK)
    monkeypatch.setattr(
        standard, "SCORES", config.num_attention_heads * 140 * 8
    )  # blocks of 8 queries or more
    cut = prefill()
    assert error(cut, whole) <= bf16(5 * 2 * 4)
    assert error(cut.roll(1, 0), whole) > bf16(5 * 2 * 4)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[259]]), "vocabulary"),
        (torch.tensor([[-1]]), "vocabulary"),
        (torch.tensor([[0.5]]), "integer"),
        (torch.zeros(1, 0, dtype=torch.int64), "filled"),
        (torch.zeros(1, dtype=torch.int64), "2 dimensions"),
        (torch.zeros(2, 1, dtype=torch.int64), "2 sequences of tokens, but 1 caches"),
    ],
)
def test_bad_tokens_are_one_line(case, tokens, message):
    _, _, model = case
    with pytest.raises(ValueError, match=message) as caught:
        model.decode(tokens, [model.empty_cache()])
    assert "\n" not in str(caught.value)


def test_missing_tensor_is_named(case):
    config, tensors, model = case
    name = "language_model.model.layers.1.self_attn.f_b_proj.weight"
    layer = StandardLayer(model.config, {n: t for n, t in tensors.items() if n != name}, 1)
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        layer.attention(torch.ones(1, config.hidden_size, dtype=BF16), [layer.empty_cache()])


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu(case, rng):
    config, tensors, model = case
    gpu = StandardModel(model.config, tensors, "cuda")
    for l, layer in enumerate(gpu.layers):
        x = sublayer_inputs(rng, config, 70)
        caches = [layer.empty_cache()], [model.layers[l].empty_cache()]
        out = layer.attention(x.cuda(), caches[0], prefill=True).cpu()
        assert error(out, model.layers[l].attention(x, caches[1], prefill=True)) <= bf16(4)
    tokens = torch.randint(0, config.vocab_size, (4, 2), generator=rng)
    a, b = ([gpu.empty_cache() for _ in range(4)] for _ in range(2))
    together = gpu.decode(tokens, a)
    alone = torch.cat([gpu.decode(tokens[i : i + 1], b[i : i + 1]) for i in range(4)])
    assert torch.equal(together, alone)
