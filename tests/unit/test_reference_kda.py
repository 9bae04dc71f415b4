"""KDA: recurrent, chunked, as matrices, as gradient steps, by mpmath; and mistakes made elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.reference import load_config, synthesise
from k3_audit.reference.kda import (
    KdaCache,
    chunked,
    decay_gate,
    kda,
    norm_then_gate,
    recurrent,
    short_conv,
)
from k3_audit.reference.norm import l2_norm
from k3_audit.reference.tensors import layer_prefix
from k3_audit.reference.weights import Weights
from torch import Tensor

pytestmark = pytest.mark.unit

F64 = torch.float64
Rule = Callable[..., tuple[Tensor, Tensor]]
REGIMES = ("saturated", "slow", "mixed")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Case:
    """Inputs of the delta rule, head-major, as the layer makes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    state: Tensor

    def __iter__(self):
        return iter((self.q, self.k, self.v, self.log_decay, self.beta, self.state))

    def to(self, dtype: torch.dtype) -> Case:
        return Case(*(tensor.to(dtype) for tensor in self))


def case(seed: int, regime: str, T: int, lead: tuple[int, ...] = (2,), K: int = 16, V: int = 8) -> Case:
    """`saturated`: g ~ -5. `slow`: alpha ~ 1 and keys almost parallel. `mixed`: channels of both kinds."""
    g = generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, dtype=F64, generator=g)

    k = normal(T, K)
    if regime == "slow":
        k = normal(1, K) + 0.1 * k
    logits = {"saturated": 7.0, "slow": -9.0, "mixed": 0.0}[regime] + normal(T, K)
    if regime == "mixed":
        logits = logits + 6 * normal(1, K)
    return Case(
        q=l2_norm(normal(T, K)) * K**-0.5,
        k=l2_norm(k),
        v=normal(T, V),
        log_decay=-5 * torch.sigmoid(logits),
        beta=torch.sigmoid(2 + normal(T, 1).squeeze(-1)),
        state=normal(K, V),
    )


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], rtol: float = 1e-12) -> None:
    """Outputs and state agree, relative to their own largest value."""
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= rtol * b.abs().max()


# Derivation 1: by the token. Derivation 2: by chunks with forward substitution.


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("T", [1, 4, 16, 37, 64, 65, 200])
def test_chunked_equals_recurrent(regime: str, T: int, seed: int) -> None:
    inputs = case(seed, regime, T)
    assert_same(chunked(*inputs), recurrent(*inputs), rtol=1e-13)


@settings(deadline=None, max_examples=40)
@given(
    regime=st.sampled_from(REGIMES),
    T=st.integers(1, 48),
    size=st.integers(1, 50),
    lead=st.sampled_from([(1,), (3,), (2, 2)]),
    K=st.sampled_from([1, 5, 16]),
    V=st.sampled_from([1, 7]),
    seed=st.integers(0, 2**31),
)
def test_chunk_size_does_not_matter(
    regime: str, T: int, size: int, lead: tuple[int, ...], K: int, V: int, seed: int
) -> None:
    inputs = case(seed, regime, T, lead, K, V)
    assert_same(chunked(*inputs, size=size), recurrent(*inputs))


# Derivation 3: dense matrices. Derivation 4: decay, then a gradient step on the prediction error.


def by_matrices(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple:
    """`S_t = (I - beta k k^T) diag(alpha) S + beta k v^T`, `o_t = S_t^T q_t`."""
    outputs, eye = [], torch.eye(q.shape[-1], dtype=q.dtype)
    for t in range(q.shape[-2]):
        k_t, b = k[..., t, :, None], beta[..., t, None, None]
        transition = (eye - b * (k_t @ k_t.mT)) @ torch.diag_embed(log_decay[..., t, :].exp())
        state = transition @ state + b * (k_t @ v[..., t, None, :])
        outputs.append((state.mT @ q[..., t, :, None]).squeeze(-1))
    return torch.stack(outputs, -2), state


def by_gradient(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple:
    """`S <- S' - beta grad_S' of |S'^T k - v|^2 / 2`, with `S' = diag(alpha) S`."""
    outputs = []
    for t in range(q.shape[-2]):
        decayed = (log_decay[..., t, :, None].exp() * state).detach().requires_grad_()
        loss = ((decayed.mT @ k[..., t, :, None]).squeeze(-1) - v[..., t, :]).square().sum() / 2
        (gradient,) = torch.autograd.grad(loss, decayed)
        state = decayed.detach() - beta[..., t, None, None] * gradient
        outputs.append((state.mT @ q[..., t, :, None]).squeeze(-1))
    return torch.stack(outputs, -2), state


def check_delta_rule(rule: Rule, seed: int) -> None:
    for regime in REGIMES:
        inputs = case(seed, regime, 12)
        assert_same(rule(*inputs), by_matrices(*inputs))
        assert_same(rule(*inputs), by_gradient(*inputs))


@pytest.mark.parametrize("rule", [recurrent, chunked])
def test_delta_rule_is_the_matrix_form_and_a_gradient_step(rule: Rule, seed: int) -> None:
    check_delta_rule(rule, seed)


def step_by_step(predict_decayed: bool, read_updated: bool, by_value: bool = False) -> Rule:
    """The recurrence with the choices that can be got wrong."""

    def rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple:
        outputs = []
        for t in range(q.shape[-2]):
            alpha = log_decay[..., t, :].exp()
            decayed = alpha[..., None, : state.shape[-1]] * state if by_value else alpha[..., None] * state
            seen = decayed if predict_decayed else state
            error = v[..., t, :] - torch.einsum("...kv,...k->...v", seen, k[..., t, :])
            written = decayed + torch.einsum("...k,...v->...kv", k[..., t, :], beta[..., t, None] * error)
            outputs.append(
                torch.einsum("...kv,...k->...v", written if read_updated else decayed, q[..., t, :])
            )
            state = written
        return torch.stack(outputs, -2), state

    return rule


def test_step_by_step_is_right_with_the_right_choices(seed: int) -> None:
    check_delta_rule(step_by_step(predict_decayed=True, read_updated=True), seed)


@pytest.mark.parametrize(
    "wrong",
    [
        step_by_step(predict_decayed=False, read_updated=True),
        step_by_step(predict_decayed=True, read_updated=False),
        step_by_step(predict_decayed=True, read_updated=True, by_value=True),
        lambda q, k, v, g, beta, s: recurrent(q, k, v, g, beta.square(), s),
        lambda q, k, v, g, beta, s: recurrent(q * q.shape[-1] ** 0.5, k, v, g, beta, s),
        lambda q, k, v, g, beta, s: recurrent(q, k, v, g, beta.float().bfloat16().double(), s),
        lambda q, k, v, g, beta, s: tuple(torch.zeros_like(x) for x in recurrent(q, k, v, g, beta, s)),
    ],
    ids=[
        "undecayed prediction",
        "old state read",
        "decay by value",
        "beta twice",
        "unscaled q",
        "bf16 beta",
        "null",
    ],
)
def test_wrong_delta_rules_fail(wrong: Rule, seed: int) -> None:
    with pytest.raises(AssertionError):
        check_delta_rule(wrong, seed)


def test_state_carries_over_any_cut(seed: int) -> None:
    inputs = case(seed, "mixed", 50)
    whole = chunked(*inputs)
    state, outputs = inputs.state, []
    for a, b in pairwise([0, 1, 4, 20, 37, 50]):
        part = [x[..., a:b, :] for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay)]
        o, state = (recurrent if b - a < 5 else chunked)(*part, inputs.beta[..., a:b], state)
        outputs.append(o)
    assert_same((torch.cat(outputs, -2), state), whole)


def test_gradients_of_both_forms_agree(seed: int) -> None:
    inputs = [x.requires_grad_() for x in case(seed, "mixed", 4, lead=(1,), K=3, V=2)]
    assert torch.autograd.gradcheck(recurrent, inputs)
    assert torch.autograd.gradcheck(lambda *x: chunked(*x, size=3), inputs)


def test_recurrence_against_mpmath(seed: int) -> None:
    """One head, 40 digits, slow channels beside saturated ones."""
    inputs = case(seed, "mixed", 20, lead=(1,), K=4, V=3)
    q, k, v, g, beta, state = (x[0].tolist() for x in inputs)
    with mpmath.workdps(40):
        S = mpmath.matrix(state)
        outputs = []
        for t in range(20):
            S = mpmath.diag([mpmath.exp(mpmath.mpf(x)) for x in g[t]]) * S
            key = mpmath.matrix(k[t])
            S += key * ((mpmath.matrix(v[t]).T - key.T * S) * mpmath.mpf(beta[t]))
            outputs.append([float(x) for x in mpmath.matrix(q[t]).T * S])
        truth = torch.tensor([outputs], dtype=F64), torch.tensor([S.tolist()], dtype=F64)
    assert_same(recurrent(*inputs), truth, rtol=1e-14)
    assert_same(chunked(*inputs), truth, rtol=1e-14)


# float32: where other formulations of a chunk lose everything.


def factored_decays(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple:
    """One chunk with exp(G_i) and exp(-G_j) as separate factors."""
    G = g.cumsum(-2)
    up, down = G.exp(), (-G).exp()
    A = beta[..., None] * ((up * k) @ (down * k).mT).tril(-1)
    R = beta[..., None] * (v - (up * k) @ state)
    U = torch.linalg.solve_triangular(A, R, upper=False, unitriangular=True)
    o = (up * q) @ state + ((up * q) @ (down * k).mT).tril() @ U
    return o, up[..., -1, :, None] * state + ((G[..., -1:, :] - G).exp() * k).mT @ U


def doubled_powers(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple:
    """One chunk with (I + A)^-1 as the product (I - A)(I + A^2)(I + A^4)..."""
    n, G = q.shape[-2], g.cumsum(-2)
    D = (G[..., :, None, :] - G[..., None, :, :]).clamp(max=0).exp()
    A = beta[..., None] * torch.einsum("...id,...jd,...ijd->...ij", k, k, D).tril(-1)
    Q = torch.einsum("...id,...jd,...ijd->...ij", q, k, D).tril()
    eye = torch.eye(n, dtype=q.dtype)
    inverse, power = eye - A, A @ A
    for _ in range(math.ceil(math.log2(n)) - 1):
        inverse, power = inverse @ (eye + power), power @ power
    R = beta[..., None] * (v - (G.exp() * k) @ state)
    U = inverse @ R
    return (G.exp() * q) @ state + Q @ U, G[..., -1, :, None].exp() * state + (D[..., -1, :, :] * k).mT @ U


def check_float32(rule: Rule, seed: int) -> None:
    """Within 32 units in the last place of float32, in every regime, over one chunk of 64."""
    for regime in REGIMES:
        inputs = case(seed, regime, 64)
        assert_same(rule(*inputs.to(torch.float32)), recurrent(*inputs), rtol=32 * 2.0**-23)


@pytest.mark.parametrize("rule", [recurrent, chunked])
def test_float32_is_close_in_every_regime(rule: Rule, seed: int) -> None:
    check_float32(rule, seed)


@pytest.mark.parametrize("wrong", [factored_decays, doubled_powers])
def test_fragile_chunk_forms_are_right_in_float64_and_fail_in_float32(wrong: Rule, seed: int) -> None:
    inputs = case(seed, "mixed", 12)
    assert_same(wrong(*inputs), recurrent(*inputs), rtol=1e-9)
    with pytest.raises(AssertionError):
        check_float32(wrong, seed)


# The decay gate.


def check_decay_gate(gate: Callable[..., Tensor], dtype: torch.dtype, rtol: float) -> None:
    """Relative to 40 digits: saturated channels, slow ones down to e^-80, one scalar per head."""
    A_log = torch.tensor([-0.5, 0.0, 1.0], dtype=dtype)
    z = torch.linspace(-80, 30, 56, dtype=dtype).view(1, 1, 56).expand(3, 2, 56) * torch.tensor(
        [[1.0], [0.1]]
    )
    z = z.to(dtype)
    dt_bias = torch.linspace(-1, 1, 168, dtype=dtype).view(3, 56)
    got = gate(z, A_log, dt_bias, -5.0)
    with mpmath.workdps(40):
        for h, t, d in [
            (0, 0, 0),
            (0, 0, 3),
            (1, 0, 1),
            (1, 1, 7),
            (2, 0, 30),
            (2, 1, 55),
            (0, 0, 55),
            (2, 1, 0),
        ]:
            x = mpmath.exp(mpmath.mpf(A_log[h].item())) * (
                mpmath.mpf(z[h, t, d].item()) + dt_bias[h, d].item()
            )
            truth = float(-5 / (1 + mpmath.exp(-x)))
            # exp(A_log) and the sum round the argument, which sigmoid turns into |x| times that, relatively.
            assert abs(got[h, t, d].item() - truth) <= rtol * (1 + abs(float(x))) * abs(truth)


@pytest.mark.parametrize(("dtype", "rtol"), [(F64, 1e-15), (torch.float32, 3e-7)])
def test_decay_gate_against_mpmath(dtype: torch.dtype, rtol: float) -> None:
    check_decay_gate(decay_gate, dtype, rtol)


def gate_by_channel(z: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float) -> Tensor:
    per_channel = A_log.repeat(dt_bias.shape[-1])[: dt_bias.shape[-1]]
    return bound * torch.sigmoid(per_channel.exp() * (z + dt_bias[:, None, :]))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda z, A, b, bound: (-A.exp()[:, None, None] * torch.nn.functional.softplus(z + b[:, None])).clamp(
            bound
        ),
        lambda z, A, b, bound: bound * (1 - torch.sigmoid(-A.exp()[:, None, None] * (z + b[:, None]))),
        lambda z, A, b, bound: (
            bound * (0.5 * torch.tanh(A.exp()[:, None, None] * (z + b[:, None]) / 2) + 0.5)
        ),
        lambda z, A, b, bound: bound * A.exp()[:, None, None] * torch.sigmoid(z + b[:, None]),
        gate_by_channel,
    ],
    ids=["softplus", "1 - sigmoid(-x)", "tanh form", "scalar outside", "A_log by channel"],
)
def test_wrong_gates_fail(wrong: Callable[..., Tensor]) -> None:
    with pytest.raises(AssertionError):
        check_decay_gate(wrong, F64, 1e-15)


def test_gate_bounds() -> None:
    z = torch.tensor([-1000.0, 0.0, 1000.0], dtype=F64).view(1, 1, 3)
    g = decay_gate(z, torch.zeros(1, dtype=F64), torch.zeros(1, 3, dtype=F64), -5.0).flatten().tolist()
    assert g == [0.0, -2.5, -5.0]
    assert math.exp(g[2]) == pytest.approx(0.0067379, rel=1e-5)


# Short convolution.


def check_short_conv(conv: Callable[..., tuple[Tensor, Tensor]], seed: int) -> None:
    g = generator(seed)
    x = torch.randn(2, 9, 5, dtype=F64, generator=g)
    taps = torch.randn(5, 4, dtype=F64, generator=g)
    history = torch.randn(2, 3, 5, dtype=F64, generator=g)
    everything = torch.cat([history, x], 1)
    summed = torch.nn.functional.conv1d(everything.mT, taps[:, None, :], groups=5).mT
    expected = torch.nn.functional.silu(summed)
    for cut in range(10):
        a, middle = conv(x[:, :cut], taps, history)
        b, last = conv(x[:, cut:], taps, middle)
        torch.testing.assert_close(torch.cat([a, b], 1), expected, rtol=1e-13, atol=1e-14)
        assert torch.equal(middle, everything[:, cut : cut + 3]) and torch.equal(last, everything[:, -3:])


def test_short_conv_equals_pytorchs_for_every_cut(seed: int) -> None:
    check_short_conv(short_conv, seed)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, taps, history: short_conv(x, taps.flip(-1), history),
        lambda x, taps, history: short_conv(x, taps, torch.zeros_like(history)),
        lambda x, taps, history: (short_conv(x, taps, history)[0], history),
    ],
    ids=["taps reversed", "history ignored", "history kept"],
)
def test_wrong_convolutions_fail(wrong: Callable[..., tuple[Tensor, Tensor]], seed: int) -> None:
    with pytest.raises(AssertionError):
        check_short_conv(wrong, seed)


def test_a_histories_memory_is_its_own(seed: int) -> None:
    """A history that viewed its padded input would keep a whole prefill chunk alive."""
    x = torch.randn(50, 5, dtype=F64, generator=generator(seed))
    _, history = short_conv(x, torch.ones(5, 4, dtype=F64), torch.zeros(3, 5, dtype=F64))
    assert history.untyped_storage().nbytes() == 3 * 5 * 8


# Output norm and gate.


def test_norm_first_then_gate(seed: int) -> None:
    o, gate = torch.randn(2, 3, 5, 8, dtype=F64, generator=generator(seed)).unbind()
    w = torch.rand(8, dtype=F64, generator=generator(seed + 1))
    normed = torch.nn.functional.rms_norm(o, (8,), w, eps=1e-5)
    torch.testing.assert_close(norm_then_gate(o, gate, w, 1e-5), normed * torch.sigmoid(gate))
    gated_first = torch.nn.functional.rms_norm(o * torch.sigmoid(gate), (8,), w, eps=1e-5)
    assert not torch.allclose(norm_then_gate(o, gate, w, 1e-5), gated_first, rtol=1e-3)


# The whole sublayer.


TINY = load_config("tiny")
RAW = synthesise(TINY)


def sublayer() -> tuple[Weights, KdaCache]:
    """Layer 1 (its gates are mixed, those of layer 0 all saturated) and a fresh cache."""
    return Weights(RAW, F64, "cpu", f"{layer_prefix(1)}self_attn."), KdaCache.empty(TINY, F64, "cpu")


def check_sublayer(layer: Callable[..., tuple[Tensor, KdaCache]], seed: int) -> None:
    """Against a transcription by heads, for one token at a time, from a fresh cache."""
    config, c = TINY, TINY.linear_attn_config
    w, cache = sublayer()
    x = torch.randn(7, config.hidden_size, dtype=F64, generator=generator(seed))
    y, last = layer(x, w, config, cache)

    state = torch.zeros(c.num_heads, c.head_dim, c.head_dim, dtype=F64)
    pre = {n: x @ w[f"{n}_proj.weight"].T for n in "qkv"}
    z = x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T
    for t in range(7):
        heads = []
        for h in range(c.num_heads):
            own = slice(h * c.head_dim, (h + 1) * c.head_dim)
            u = {}
            for n in "qkv":
                taps = w[f"{n}_conv1d.weight"][own, 0]
                total = sum(taps[:, 3 - back] * pre[n][t - back, own] for back in range(min(4, t + 1)))
                u[n] = torch.nn.functional.silu(total)
            q = u["q"] / (u["q"].square().sum() + 1e-6).sqrt() / c.head_dim**0.5
            k = u["k"] / (u["k"].square().sum() + 1e-6).sqrt()
            beta = torch.sigmoid(w["b_proj.weight"][h] @ x[t])
            alpha = torch.exp(-5 * torch.sigmoid(w["A_log"][h].exp() * (z[t, own] + w["dt_bias"][own])))
            S = alpha[:, None] * state[h]
            S = S + torch.outer(k, beta * (u["v"] - S.T @ k))
            state[h] = S
            o = S.T @ q
            o = o / (o.square().mean() + 1e-5).sqrt() * w["o_norm.weight"]
            heads.append(o * torch.sigmoid(w["g_proj.weight"][own] @ x[t]))
        torch.testing.assert_close(y[t], w["o_proj.weight"] @ torch.cat(heads), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(last.state, state, rtol=1e-10, atol=1e-12)
    packed = torch.cat([pre[n] for n in "qkv"], -1)
    torch.testing.assert_close(last.history, packed[-3:], rtol=1e-12, atol=1e-14)


def test_sublayer_equals_a_transcription_by_heads(seed: int) -> None:
    check_sublayer(kda, seed)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, w, config, cache: kda(x, {**w, "A_log": w["A_log"].flip(0)}, config, cache),
        lambda x, w, config, cache: kda(x, {**w, "q_proj.weight": w["k_proj.weight"]}, config, cache),
        lambda x, w, config, cache: kda(x, {**w, "k_conv1d.weight": w["v_conv1d.weight"]}, config, cache),
        lambda x, w, config, cache: (kda(x, w, config, cache)[0], cache),
    ],
    ids=["A_log from the padding", "k for q", "v taps for k", "cache not updated"],
)
def test_wrong_sublayers_fail(wrong: Callable[..., tuple[Tensor, KdaCache]], seed: int) -> None:
    with pytest.raises(AssertionError):
        check_sublayer(wrong, seed)


def test_sublayer_takes_batches(seed: int) -> None:
    config = TINY
    w, cache = sublayer()
    x = torch.randn(2, 6, config.hidden_size, dtype=F64, generator=generator(seed))
    batch = KdaCache(cache.state.expand(2, -1, -1, -1), cache.history.expand(2, -1, -1))
    y, last = kda(x, w, config, batch)
    for i in range(2):
        one, cache_one = kda(x[i], w, config, cache)
        torch.testing.assert_close(y[i], one, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(last.state[i], cache_one.state, rtol=1e-12, atol=1e-13)
