"""AttnRes: the mixture against attention by PyTorch and by mpmath; what is banked, and when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.reference.attn_res import MixStep, Residual, attn_res, mix
from k3_audit.reference.norm import rms_norm
from k3_audit.reference.rounding import EXACT, Rounding, nearest_bfloat16
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.unit

F64 = torch.float64
EPS = 1e-5
Mix = Callable[..., Tensor]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def check_mix(mixture: Mix, rows: list[Tensor], norm: Tensor, proj: Tensor) -> None:
    """The mixture is attention with one query, keys = rows after a weightless RMSNorm, values = raw rows."""
    values = torch.stack(rows, dim=-2)
    keys = torch_rms_norm(values, values.shape[-1:], eps=EPS)
    query = (norm * proj).expand(*values.shape[:-2], 1, -1)
    expected = scaled_dot_product_attention(query, keys, values, scale=1.0).squeeze(-2)
    error = (mixture(rows, norm, proj, EPS) - expected).abs().max()
    assert error <= 1e-13 * values.abs().max()


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 9),
    tokens=st.integers(1, 8),
    width=st.sampled_from([1, 7, 128]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 2**31),
)
def test_mix_is_attention_over_rows(rows: int, tokens: int, width: int, scale: float, seed: int) -> None:
    values = [scale * normal(seed + j, tokens, width) for j in range(rows)]
    check_mix(mix, values, normal(seed + 10, width), normal(seed + 11, width))


def mix_of_normed_rows(rows: list[Tensor], norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    logits = torch.stack([rms_norm(row, norm, eps) @ proj for row in rows], -1)
    return sum(
        p[..., None] * rms_norm(r, norm, eps)
        for p, r in zip(logits.softmax(-1).unbind(-1), rows, strict=True)
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rows, n, a, eps: mix(rows, n * rows[0].shape[-1] ** -0.5, a, eps),
        lambda rows, n, a, eps: mix(rows, torch.ones_like(n), a, eps),
        lambda rows, n, a, eps: mix(rows[1:], n, a, eps),
        lambda rows, n, a, eps: mix(rows[:-1], n, a, eps),
        lambda rows, n, a, eps: torch.stack(rows).mean(0),
        lambda rows, n, a, eps: nearest_bfloat16(mix(rows, n, a, eps)),
        lambda rows, n, a, eps: torch.zeros_like(rows[0]),
        mix_of_normed_rows,
    ],
    ids=[
        "1/sqrt(E)",
        "no norm weight",
        "no bank row 0",
        "no prefix",
        "mean",
        "rounded",
        "null",
        "normed values",
    ],
)
def test_wrong_mixtures_fail(wrong: Mix, seed: int) -> None:
    rows = [normal(seed + j, 4, 64) for j in range(5)]
    with pytest.raises(AssertionError):
        check_mix(wrong, rows, normal(seed + 10, 64), normal(seed + 11, 64) / 8)


def test_near_equal_logits_against_mpmath(seed: int) -> None:
    """Margins near 0.02, as reported for the real weights; 60 digits are the truth."""
    width, count = 64, 9
    rows = [normal(seed + j, width) for j in range(count)]
    norm, proj = 1 + 0.1 * normal(seed + 20, width), 0.002 * normal(seed + 21, 1, width)
    with mpmath.workdps(60):
        exact = [[mpmath.mpf(v) for v in row.tolist()] for row in rows]
        c = [mpmath.mpf(n) * mpmath.mpf(a) for n, a in zip(norm.tolist(), proj[0].tolist(), strict=True)]
        dot = [sum(x * y for x, y in zip(row, c, strict=True)) for row in exact]
        power = [sum(x * x for x in row) / width for row in exact]
        logits = [d / mpmath.sqrt(p + mpmath.mpf(EPS)) for d, p in zip(dot, power, strict=True)]
        weights = [mpmath.exp(s) for s in logits]
        total = sum(weights)
        truth = [
            float(sum(w * row[i] for w, row in zip(weights, exact, strict=True)) / total)
            for i in range(width)
        ]
    assert max(logits) - min(logits) < 0.1
    torch.testing.assert_close(
        mix(rows, norm, proj, EPS), torch.tensor(truth, dtype=F64), rtol=1e-13, atol=1e-15
    )


def test_gradient_of_the_mixture(seed: int) -> None:
    rows = [normal(seed + j, 2, 6).requires_grad_() for j in range(3)]
    n, a = normal(seed + 5, 6).requires_grad_(), normal(seed + 6, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda n, a, *rows: mix(rows, n, a, EPS), (n, a, *rows))


def test_one_row_is_returned_as_it_is(seed: int) -> None:
    row = normal(seed, 3, 16)
    assert torch.equal(mix([row], normal(seed + 1, 16), normal(seed + 2, 16), EPS), row)


# What is banked, and when.


class Site:
    """Weights of one mixture site and its step."""

    def __init__(self, seed: int, width: int) -> None:
        self.norm, self.proj, self.next_norm = (normal(seed + i, width) for i in range(3))

    def __call__(
        self, residual: Residual, delta: Tensor, write: bool = False, rd: Rounding = EXACT
    ) -> MixStep:
        return attn_res(residual, delta, self.norm, self.proj, self.next_norm, EPS, rd, write)


Step = Callable[..., MixStep]


def check_bookkeeping(step_at: Callable[[Site], Step], seed: int, layers: int, block: int) -> None:
    """Run made-up sublayers through the steps, and compare with sums made from the deltas alone."""
    width, tokens = 8, 2
    deltas = [
        normal(seed + 100 * i, tokens, width) for i in range(2 * layers + 1)
    ]  # embedding, then sublayers
    site = Site(seed, width)
    residual = Residual()

    def expected_rows(layer: int, sublayers: int) -> list[Tensor]:
        """Rows of the mix after `sublayers` sublayers, with the block starts below `layer` closed."""
        edges = [0, *(1 + 2 * start for start in range(0, layer, block)), 1 + sublayers]
        return [sum(deltas[a:b]) for a, b in pairwise(edges)]

    for layer in range(layers):
        attention = step_at(site)(residual, deltas[2 * layer], write=layer % block == 0)
        check_rows(attention, expected_rows(layer, 2 * layer))
        ffn = step_at(site)(attention.after, deltas[2 * layer + 1])
        check_rows(ffn, expected_rows(layer + 1, 2 * layer + 1))
        assert (ffn.before is None) == (layer % block == 0)
        residual = ffn.after
    output = step_at(site)(residual, deltas[-1])
    check_rows(output, expected_rows(layers, 2 * layers))
    assert len(output.bank) == -(-layers // block)


def check_rows(step: MixStep, expected: list[Tensor]) -> None:
    rows = [*step.bank, step.prefix]
    assert len(rows) == len(expected)
    for row, truth in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, truth, rtol=1e-12, atol=1e-13)


@settings(deadline=None, max_examples=25)
@given(layers=st.integers(1, 13), block=st.integers(1, 14), seed=st.integers(0, 2**20))
def test_bank_rows_are_sums_of_sublayer_outputs(layers: int, block: int, seed: int) -> None:
    check_bookkeeping(lambda site: site, seed, layers, block)


def bank_the_mixture(site: Site) -> Step:
    def step(residual: Residual, delta: Tensor, write: bool = False) -> MixStep:
        s = site(residual, delta, write)
        return MixStep(s.bank, s.before, s.delta, s.mixed if write else s.prefix, s.mixed, s.normed, s.write)

    return step


def bank_without_clearing(site: Site) -> Step:
    def step(residual: Residual, delta: Tensor, write: bool = False) -> MixStep:
        if residual.bank and residual.prefix is None:
            residual = Residual(residual.bank, residual.bank[-1])
        return site(residual, delta, write)

    return step


def mix_after_clear(site: Site) -> Step:
    def step(residual: Residual, delta: Tensor, write: bool = False) -> MixStep:
        s = site(residual, delta, write)
        if not write or not s.bank:
            return s
        return MixStep(s.bank, s.before, s.delta, torch.zeros_like(s.prefix), s.mixed, s.normed, s.write)

    return step


@pytest.mark.parametrize("wrong", [bank_the_mixture, bank_without_clearing, mix_after_clear])
def test_wrong_bookkeeping_fails(wrong: Callable[[Site], Step], seed: int) -> None:
    with pytest.raises(AssertionError):
        check_bookkeeping(wrong, seed % 1000, layers=7, block=3)


def test_the_block_start_mixes_the_prefix_that_it_banks(seed: int) -> None:
    """The attention mix at a block start has the old prefix as its last row, then moves that very row."""
    site = Site(seed, 16)
    bank, prefix, delta = (normal(seed + 5, 3, 16),), normal(seed + 6, 3, 16), normal(seed + 7, 3, 16)
    step = site(Residual(bank, prefix), delta, write=True)
    check_mix(lambda *_: step.mixed, [*bank, prefix + delta], site.norm, site.proj)
    assert step.after.prefix is None
    assert len(step.after.bank) == 2 and torch.equal(step.after.bank[-1], prefix + delta)
    for cleared in ([*bank], [*bank, torch.zeros_like(prefix)]):
        with pytest.raises(AssertionError):
            check_mix(lambda *_: step.mixed, cleared, site.norm, site.proj)


def test_nothing_is_written_in_place(seed: int) -> None:
    """The aliasing hazard: an output buffer that holds the prefix still to be read. Here no input changes."""
    bank, prefix, delta = (normal(seed, 3, 16),), normal(seed + 1, 3, 16), normal(seed + 2, 3, 16)
    before = [t.clone() for t in (*bank, prefix, delta)]
    step = Site(seed, 16)(Residual(bank, prefix), delta, write=True)
    assert all(torch.equal(a, b) for a, b in zip(before, (*bank, prefix, delta), strict=True))
    assert step.before is prefix and step.delta is delta and step.bank == bank
    assert step.mixed.data_ptr() not in {t.data_ptr() for t in (*bank, prefix, delta, step.prefix)}


def test_the_release_rounds_prefix_mixture_and_norm(seed: int) -> None:
    rows = [nearest_bfloat16(normal(seed + i, 3, 64)) for i in range(3)]
    site = Site(seed, 64)
    step = partial(site, Residual(tuple(rows[:1]), rows[1]), rows[2])
    exact, rounded = step(), step(rd=Rounding.release())
    assert torch.equal(rounded.prefix, nearest_bfloat16(exact.prefix))
    assert not torch.equal(rounded.prefix, exact.prefix)
    unrounded = mix([rows[0], rounded.prefix], site.norm, site.proj, EPS)
    assert torch.equal(rounded.mixed, nearest_bfloat16(unrounded))
    assert torch.equal(rounded.normed, rms_norm(rounded.mixed, site.next_norm, EPS, Rounding.release()))
