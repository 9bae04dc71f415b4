"""The whole model: a transcription in NumPy, prefill against decode, drafts and rollback, observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from k3_audit.reference import Cache, Config, Layer, Model, Observation, Rounding, load_config, synthesise
from k3_audit.reference.kda import KdaCache
from k3_audit.reference.mla import MlaCache
from k3_audit.reference.rounding import nearest_bfloat16
from k3_audit.reference.tensors import expected_tensors
from torch import Tensor

pytestmark = pytest.mark.unit

F64 = torch.float64
TINY = load_config("tiny")
TENSORS = synthesise(TINY)
MODEL = Model(TINY, TENSORS)
N = 70  # more than one chunk of the chunked KDA
TOKENS = torch.randint(256, (N,), generator=torch.Generator().manual_seed(3)).tolist()


# Five layers of the same kinds, KDA x 3 then MLA x 2, for tests of many steps.
FIVE = replace(
    TINY,
    num_hidden_layers=5,
    attn_res_block_size=2,
    linear_attn_config=replace(TINY.linear_attn_config, kda_layers=(1, 2, 3), full_attn_layers=(4, 5)),
)
SMALL = Model(FIVE, synthesise(FIVE))


def prefilled(tokens: list[int], model: Model = MODEL, **how: int) -> tuple[Tensor, Cache]:
    cache = model.empty_cache()
    return model.prefill(tokens, cache, **how), cache


def assert_same(got: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= rtol * expected.abs().max()


def assert_same_cache(got: Cache, expected: Cache, rtol: float = 1e-10) -> None:
    assert got.length == expected.length and got.drafts is None and expected.drafts is None
    for a, b in zip(got.layers, expected.layers, strict=True):
        if isinstance(a, KdaCache):
            assert_same(a.state, b.state, rtol)
            assert_same(a.history, b.history, rtol)
        else:
            assert_same(a.rows, b.rows, rtol)


# A second transcription of the model: NumPy, all tokens at once, no caches, no shared code.


def numpy_logits(config: Config, tensors: Mapping[str, Tensor], tokens: list[int]) -> np.ndarray:
    def get(name: str) -> np.ndarray:
        return tensors[f"language_model.{name}"].double().numpy()

    def expert(name: str) -> np.ndarray:
        packed = tensors[f"language_model.{name}.weight_packed"].numpy().astype(int)
        scale = tensors[f"language_model.{name}.weight_scale"].numpy().astype(int)
        values = np.empty((len(packed), 2 * packed.shape[1]))
        for parity, nibble in enumerate((packed % 16, packed // 16)):
            code = nibble % 8
            half_steps = np.where(code < 4, code, np.where(code < 6, 2 * code - 4, 4 * code - 16))
            values[:, parity::2] = np.where(nibble >= 8, -0.5, 0.5) * half_steps
        return values * np.ldexp(1.0, np.repeat(scale, 32, axis=1) - 127)

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def rms(x: np.ndarray, eps: float = 1e-5) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)

    def glu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        g, u = x @ gate.T, x @ up.T
        return (4 * np.tanh(g / 4) * sigmoid(g) * 25 * np.tanh(u / 25)) @ down.T

    def mixture(rows: list[np.ndarray], name: str) -> np.ndarray:
        c = get(f"{name}_norm.weight") * get(f"{name}_proj.weight")[0]
        e = np.exp(np.stack([rms(row) @ c for row in rows]))
        return np.einsum("jt,jte->te", e / e.sum(0), np.stack(rows))

    def kda(x: np.ndarray, at: str) -> np.ndarray:
        c, out = config.linear_attn_config, []
        parts = []
        for n in "qkv":
            pre = np.pad(x @ get(f"{at}{n}_proj.weight").T, ((3, 0), (0, 0)))
            taps = get(f"{at}{n}_conv1d.weight")[:, 0]
            summed = sum(taps[:, j] * pre[j : j + len(x)] for j in range(4))
            parts.append((summed * sigmoid(summed)).reshape(len(x), c.num_heads, c.head_dim))
        q, k, v = parts
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        z = x @ get(f"{at}f_a_proj.weight").T @ get(f"{at}f_b_proj.weight").T + get(f"{at}dt_bias")
        z = z.reshape(q.shape) * np.exp(get(f"{at}A_log")[: c.num_heads, None])
        alpha, beta = np.exp(-5 * sigmoid(z)), sigmoid(x @ get(f"{at}b_proj.weight").T)
        S = np.zeros((c.num_heads, c.head_dim, c.head_dim))
        for t in range(len(x)):
            S = alpha[t][:, :, None] * S
            e = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", S, k[t]))
            S = S + np.einsum("hk,hv->hkv", k[t], e)
            out.append(np.einsum("hkv,hk->hv", S, q[t]) / np.sqrt(c.head_dim))
        gate = sigmoid(x @ get(f"{at}g_proj.weight").T)
        normed = rms(np.stack(out)) * get(f"{at}o_norm.weight")
        return (normed.reshape(len(x), -1) * gate) @ get(f"{at}o_proj.weight").T

    def mla(x: np.ndarray, at: str) -> np.ndarray:
        H, R, nope = config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim
        cq = rms(x @ get(f"{at}q_a_proj.weight").T, 1e-6) * get(f"{at}q_a_layernorm.weight")
        q = (cq @ get(f"{at}q_b_proj.weight").T).reshape(len(x), H, -1)
        kv = x @ get(f"{at}kv_a_proj_with_mqa.weight").T
        c = rms(kv[:, :R], 1e-6) * get(f"{at}kv_a_layernorm.weight")
        expanded = (c @ get(f"{at}kv_b_proj.weight").T).reshape(len(x), H, -1)
        k = np.concatenate([expanded[..., :nope], np.repeat(kv[:, None, R:], H, 1)], -1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(config.qk_head_dim)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        a = np.einsum("hts,shd->thd", e / e.sum(-1, keepdims=True), expanded[..., nope:])
        gated = a.reshape(len(x), -1) * sigmoid(x @ get(f"{at}g_proj.weight").T)
        return gated @ get(f"{at}o_proj.weight").T

    def moe(x: np.ndarray, at: str) -> np.ndarray:
        scores = sigmoid(x @ get(f"{at}gate.weight").T)
        chosen = np.argsort(-(scores + get(f"{at}gate.e_score_correction_bias")), -1, kind="stable")
        latent, c = x @ get(f"{at}routed_expert_down_proj.weight").T, 0
        share = np.zeros_like(scores)
        for t, ids in enumerate(chosen[:, : config.num_experts_per_token]):
            share[t, ids] = scores[t, ids] / scores[t, ids].sum()
        for i in range(config.num_experts):
            w1, w2, w3 = (expert(f"{at}experts.{i}.w{n}") for n in (1, 2, 3))
            c = c + share[:, i, None] * glu(latent, w1, w3, w2)
        routed = (rms(c) * get(f"{at}routed_expert_norm.weight")) @ get(f"{at}routed_expert_up_proj.weight").T
        return routed + glu(x, *(get(f"{at}shared_experts.{n}_proj.weight") for n in ("gate", "up", "down")))

    bank, p = [], get("model.embed_tokens.weight")[tokens]
    for l in range(config.num_hidden_layers):
        at = f"model.layers.{l}."
        h = mixture([*bank, p], f"{at}self_attention_res")
        opens_block = l % config.attn_res_block_size == 0
        if opens_block:
            bank.append(p)
        h = rms(h) * get(f"{at}input_layernorm.weight")
        is_kda = l + 1 in config.linear_attn_config.kda_layers
        a = (kda if is_kda else mla)(h, f"{at}self_attn.")
        p = a if opens_block else p + a
        h = rms(mixture([*bank, p], f"{at}mlp_res")) * get(f"{at}post_attention_layernorm.weight")
        if l < config.first_k_dense_replace:
            p = p + glu(h, *(get(f"{at}mlp.{n}_proj.weight") for n in ("gate", "up", "down")))
        else:
            p = p + moe(h, f"{at}block_sparse_moe.")
    y = rms(mixture([*bank, p], "model.output_attn_res")) * get("model.norm.weight")
    return y @ get("lm_head.weight").T


@pytest.mark.parametrize(("block", "length"), [(3, N), (12, 20)])
def test_model_equals_a_second_transcription(block: int, length: int) -> None:
    config, tokens = replace(TINY, attn_res_block_size=block), TOKENS[:length]
    logits, _ = prefilled(tokens, Model(config, TENSORS), keep=length)
    assert_same(logits, torch.from_numpy(numpy_logits(config, TENSORS, tokens)))


def test_which_tensors_the_logits_depend_on() -> None:
    """By autograd: all, except layer 0's unused mixture, the padding of `A_log`, and the router's bias."""
    leaves = {n: t.double().requires_grad_() for n, t in TENSORS.items() if t.dtype != torch.uint8}
    model = Model(TINY, {**TENSORS, **leaves})
    y, _ = model._run(torch.tensor(TOKENS[:20]), model.empty_cache(), Layer.prefill, None)
    model._head(y).square().sum().backward()
    heads = TINY.linear_attn_config.num_heads
    for name, leaf in leaves.items():
        if name.endswith("e_score_correction_bias") or "layers.0.self_attention_res" in name:
            assert leaf.grad is None, name
        elif name.endswith("A_log"):
            assert (leaf.grad[:heads] != 0).all() and (leaf.grad[heads:] == 0).all(), name
        else:
            assert leaf.grad.isfinite().all() and (leaf.grad != 0).any(), name


# Prefill, decode, chunks.


def test_decode_token_by_token_equals_prefill() -> None:
    whole, after = prefilled(TOKENS[:24], keep=24)
    cache = MODEL.empty_cache()
    assert_same(torch.stack([MODEL.decode(token, cache) for token in TOKENS[:24]]), whole)
    assert_same_cache(cache, after)


@pytest.mark.parametrize("chunk", [1, 3, 64, 69])
def test_prefill_in_chunks_equals_one_prefill(chunk: int) -> None:
    whole, after = prefilled(TOKENS, SMALL, keep=33)
    pieces, cache = prefilled(TOKENS, SMALL, chunk=chunk, keep=33)
    assert_same(pieces, whole)
    assert_same_cache(cache, after)


def test_a_prefix_goes_on_from_its_cache() -> None:
    whole, _ = prefilled(TOKENS, keep=N)
    _, cache = prefilled(TOKENS[:30])
    a, b = cache, cache.clone()
    assert_same(MODEL.prefill(TOKENS[30:], a, keep=40), whole[30:])
    other = MODEL.prefill(TOKENS[:20], b, keep=20)
    assert_same(other, prefilled(TOKENS[:30] + TOKENS[:20], keep=20)[0])


# Drafts and rollback.


@pytest.mark.parametrize("q", [1, 2, 3, 5, 8])
def test_verify_equals_single_steps_for_every_accepted_count(q: int) -> None:
    prompt, drafts, rest = TOKENS[:20], TOKENS[20 : 20 + q], TOKENS[30:33]
    _, start = prefilled(prompt, SMALL)
    stepwise = start.clone()
    caches, expected = [stepwise.clone()], []
    for token in drafts:
        expected.append(SMALL.decode(token, stepwise))
        caches.append(stepwise.clone())
    for n in range(q + 1):
        cache = start.clone()
        assert_same(SMALL.verify(drafts, cache), torch.stack(expected))
        cache.accept(n)
        assert_same_cache(cache, caches[n])
        assert_same(SMALL.prefill(rest, cache, keep=3), SMALL.prefill(rest, caches[n].clone(), keep=3))


def test_rejected_drafts_leave_no_trace_over_many_rounds() -> None:
    """Speculative decoding of a fixed text, with drafts wrong at a different place in each round."""
    _, cache = prefilled(TOKENS[:10], SMALL)
    position, round_, logits = 10, 0, []
    while position < 40:
        right = TOKENS[position : position + round_ % 4]
        wrong = [(token + 1) % 256 for token in TOKENS[position + len(right) : position + 4]]
        logits.append(SMALL.verify([*right, *wrong], cache)[: len(right)])
        cache.accept(len(right))
        position, round_ = position + len(right), round_ + 1
    assert_same(torch.cat(logits), prefilled(TOKENS[:position], SMALL, keep=position - 10)[0])
    assert_same_cache(cache, prefilled(TOKENS[:position], SMALL)[1])


def keep_history(cache: Cache, n: int) -> None:
    last = cache.drafts[-1]
    cache.accept(n)
    cache.layers = [
        KdaCache(kept.state, end.history) if isinstance(kept, KdaCache) else kept
        for kept, end in zip(cache.layers, last, strict=True)
    ]


def keep_state(cache: Cache, n: int) -> None:
    last = cache.drafts[-1]
    cache.accept(n)
    cache.layers = [
        KdaCache(end.state, kept.history) if isinstance(kept, KdaCache) else kept
        for kept, end in zip(cache.layers, last, strict=True)
    ]


def keep_latents(cache: Cache, n: int) -> None:
    last = cache.drafts[-1]
    cache.accept(n)
    cache.layers = [
        end if isinstance(kept, MlaCache) else kept for kept, end in zip(cache.layers, last, strict=True)
    ]


@pytest.mark.parametrize("wrong", [keep_history, keep_state, keep_latents])
def test_incomplete_rollbacks_are_seen(wrong: Callable[[Cache, int], None]) -> None:
    _, cache = prefilled(TOKENS[:20], SMALL)
    right = cache.clone()
    for target, accept in ((cache, wrong), (right, Cache.accept)):
        SMALL.verify(TOKENS[20:24], target)
        accept(target, 1)
    assert_same(right.layers[3].rows, prefilled(TOKENS[:21], SMALL)[1].layers[3].rows)
    with pytest.raises(AssertionError):
        assert_same(SMALL.decode(5, cache), SMALL.decode(5, right), rtol=1e-6)


def test_misuse_is_refused() -> None:
    _, cache = prefilled(TOKENS[:5], SMALL)
    with pytest.raises(ValueError, match="call verify first"):
        cache.accept(0)
    SMALL.verify([1, 2], cache)
    with pytest.raises(ValueError, match="between 0 and the 2"):
        cache.accept(3)
    with pytest.raises(ValueError, match="call accept"):
        SMALL.decode(1, cache)
    cache.accept(2)
    with pytest.raises(ValueError, match="at most 8"):
        SMALL.verify([1] * 9, cache)
    for bad in ([], [259], [-1], [[1, 2]]):
        with pytest.raises(ValueError, match="token id"):
            SMALL.prefill(bad, cache)
    with pytest.raises(ValueError, match="out of range"):
        SMALL.prefill([1], cache, keep=2)
    assert cache.length == 7


def test_missing_tensors_are_named() -> None:
    name = "language_model.model.norm.weight"
    with pytest.raises(ValueError, match=f"1 tensors are missing, the first is {name}"):
        Model(TINY, {k: v for k, v in TENSORS.items() if k != name})


# What observers see.


def test_observer_sees_every_mix_with_its_bank() -> None:
    seen: list[Observation] = []
    _, cache = prefilled(TOKENS[:6])
    MODEL.prefill(TOKENS[6:11], cache, observer=seen.append)
    assert len(seen) == 2 * 13 + 1 and all(o.first == 6 for o in seen)
    embedding = TENSORS["language_model.model.embed_tokens.weight"].double()[TOKENS[6:11]]
    deltas = [o.step.delta for o in seen]
    assert torch.equal(deltas[0], embedding)
    for i, o in enumerate(seen):
        assert (o.layer, o.site) == (i // 2, "output" if i == 26 else ("attention", "ffn")[i % 2])
        counted = TINY.bank_rows_before_ffn if o.site == "ffn" else TINY.bank_rows_before_attention
        rows = len(o.step.bank)
        assert rows == counted(o.layer)
        assert o.step.write == (o.site == "attention" and o.layer % 3 == 0)
        assert (o.step.before is None) == (i == 0 or (o.site == "ffn" and o.layer % 3 == 0))
        if rows:
            assert torch.equal(o.step.bank[0], embedding)
        for j in range(1, rows):
            block = deltas[1 + 6 * (j - 1) : 1 + 6 * j]  # attention and feed-forward of layers 3(j-1) .. 3j-1
            assert_same(o.step.bank[j], sum(block), rtol=1e-13)
    assert len(seen[-1].step.bank) == 5


def test_observations_replay_the_layer() -> None:
    """A layer run on its own from the recorded input gives the recorded output."""
    seen: list[Observation] = []
    MODEL.prefill(TOKENS[:9], MODEL.empty_cache(), observer=seen.append)
    for l in (0, 3, 7):
        layer = Layer(TINY, l, TENSORS)
        attention, ffn, after = (o.step for o in seen[2 * l : 2 * l + 3])
        y, _ = layer.prefill(attention.normed, layer.empty_cache())
        assert_same(y, ffn.delta)
        assert_same(layer.feed_forward(ffn.normed), after.delta)


def test_observing_changes_nothing() -> None:
    _, cache = prefilled(TOKENS[:9])
    other = cache.clone()
    assert torch.equal(MODEL.decode(1, cache, observer=lambda o: None), MODEL.decode(1, other))


# Precision.


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", ["tiny", "wide"])
def test_float32_and_release_rounding_lie_at_their_own_levels(name: str) -> None:
    config = load_config(name)
    tensors = TENSORS if name == "tiny" else synthesise(config)
    tokens = TOKENS[:16]
    exact, _ = prefilled(tokens, Model(config, tensors), keep=16)
    single, _ = prefilled(tokens, Model(config, tensors, torch.float32), keep=16)
    release, _ = prefilled(tokens, Model(config, tensors, rd=Rounding.release()), keep=16)
    assert single.dtype == torch.float32
    assert 1e-8 < relative_error(single, exact) < 3e-5
    assert 2.0**-9 < relative_error(release, exact) < 0.5
    assert torch.equal(release, nearest_bfloat16(release))


def test_release_mode_is_the_same_in_float32_and_float64_up_to_accumulation() -> None:
    """The roundings swallow most float32 noise: the two agree better than either does with the exact."""
    config, tokens = load_config("tiny"), TOKENS[:24]
    double, _ = prefilled(tokens, Model(config, TENSORS, rd=Rounding.release()), keep=24)
    single, _ = prefilled(tokens, Model(config, TENSORS, torch.float32, rd=Rounding.release()), keep=24)
    exact, _ = prefilled(tokens, keep=24)
    assert relative_error(single, double) < relative_error(double, exact)


# Synthetic weights.


def test_synthetic_weights_have_the_released_layout_and_depend_on_the_seed_alone() -> None:
    specs = expected_tensors(TINY)
    assert TENSORS.keys() == specs.keys()
    assert all((tuple(TENSORS[n].shape), TENSORS[n].dtype) == spec for n, spec in specs.items())
    again, other = synthesise(TINY), synthesise(TINY, seed=1)
    assert all(torch.equal(TENSORS[n], again[n]) for n in specs)
    assert not any(torch.equal(TENSORS[n], other[n]) for n in specs)


def test_synthetic_weights_are_hard_where_the_real_ones_are() -> None:
    """Saturated layer 0; both kinds of channel later; outliers; near-equal mixtures; a spread of experts."""
    seen: list[Observation] = []
    MODEL.prefill(TOKENS, MODEL.empty_cache(), observer=seen.append)

    def log_decay(l: int) -> Tensor:
        w, x = MODEL.layers[l].weights.below("self_attn."), seen[2 * l].step.normed
        z = x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T
        heads = TINY.linear_attn_config.num_heads
        return -5 * torch.sigmoid(w["A_log"][:heads].exp().repeat_interleave(16) * (z + w["dt_bias"]))

    assert log_decay(0).mean() < -4.8
    assert (log_decay(1) < -4.9).double().mean() > 0.1 and (log_decay(1) > -0.05).double().mean() > 0.1
    norm = TENSORS["language_model.model.layers.1.input_layernorm.weight"].float()
    assert norm.abs().max() > 5 * norm.abs().median()
    for o in seen:
        if o.site == "attention" and o.layer:
            rows = torch.stack([*o.step.bank, o.step.prefix])
            w = MODEL.layers[o.layer].weights
            c = w["self_attention_res_norm.weight"] * w["self_attention_res_proj.weight"]
            logits = (rows * c).sum(-1) / rows.square().mean(-1).sqrt()
            assert (logits.max(0).values - logits.min(0).values).max() < 0.5
    logits = MODEL.prefill(TOKENS, MODEL.empty_cache(), keep=N)
    assert 1 < logits.std() < 10 and len(logits.argmax(-1).unique()) > 20


def test_synthetic_bits_are_pinned() -> None:
    """Goldens elsewhere are made from these weights: their bits must not change unnoticed."""
    weights = TENSORS["language_model.model.layers.1.self_attn.q_proj.weight"]
    packed = TENSORS["language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"]
    assert weights.view(torch.int16).flatten()[:4].tolist() == [15233, 15745, -16903, 15645]
    assert packed.flatten()[:8].tolist() == [56, 145, 211, 55, 51, 242, 102, 204]
