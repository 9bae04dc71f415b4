"""The unfused path: a whole K3 text model from plain torch operators on BF16 tensors.

It is what runs where no fused kernel can, and the control of every numerical comparison: a fused kernel may
not err more than this path does. So it rounds where the released model rounds. Every linear layer takes BF16,
accumulates in fp32 and rounds once; the statistics of norms, router logits, beta, decay, convolution, KDA
state, softmax, SiTU and the MoE sum are fp32. `_bf` marks a rounding.

    prefill   one sequence; KDA in chunks of 64 tokens by forward substitution, one token by the recurrence
    decode    B sequences of q tokens each; KDA by the recurrence, MLA absorbed, one query at a time

Decode is bitwise independent of its schedule: up to 8 rows, a token's result depends neither on how many
sequences share the step nor on whether the q tokens come in one call or in q. `fixed_rows` makes it so.

Runs on CPU and CUDA; deterministic. It reads lengths and expert numbers on the host, so a CUDA graph cannot
capture it. Layers are numbered from 0. `W x` is `x @ W.T` with `W` stored `[out, in]`. In shapes: E is
hidden_size, T tokens of one sequence, R rows (tokens of all sequences, sequence by sequence), H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import reduce, wraps
from typing import Any, Concatenate, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 8  # most tokens that one decode step of the fused kernels takes
CHUNK = 64  # tokens of one KDA chunk in the released prefill
PREFILL_SEGMENT = (
    32 * CHUNK
)  # tokens that go through all layers at a time; bounds memory, does not move a chunk's edge
SCORES = 2**26  # most attention scores of one layer held at a time in prefill (256 MiB of fp32)
L2_EPS = 1e-6  # of the q and k norm, on the SUM of squares, inside the root
ROUTER_EPS = 1e-20  # of the renormalisation of the routing weights
PREFIX = "language_model."  # of all text tensors of the multimodal checkpoint


@dataclass(frozen=True)
class Config:
    """What this path needs of the released `config.json`: its names, with `linear_attn_config` flattened."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    rms_norm_eps: float
    activation_situ_beta: float
    activation_situ_linear_beta: float
    first_k_dense_replace: int
    num_experts_per_token: int
    routed_scaling_factor: float
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attn_res_block_size: int
    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    kda_layers: tuple[int, ...]  # 1-based, as released
    # The released code builds MLA's two latent norms with its class default; serving engines use 1e-5.
    latent_norm_eps: float = 1e-6

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Config:
        """From a parsed `config.json`, or its `text_config`. Raises ValueError naming what is missing."""
        text = document.get("text_config", document)
        given = {**text, **text.get("linear_attn_config", {})}
        needed = [f.name for f in fields(cls) if f.default is MISSING]
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"config: {', '.join(missing)} missing; give the config.json of a Kimi K3 model")
        return cls(**{name: given[name] for name in needed} | {"kda_layers": tuple(given["kda_layers"])})

    def is_kda(self, l: int) -> bool:
        """Layer `l` is KDA; otherwise it is gated MLA."""
        return l + 1 in self.kda_layers

    def is_moe(self, l: int) -> bool:
        """Layer `l` has a latent MoE; otherwise a dense feed-forward."""
        return l >= self.first_k_dense_replace

    def starts_block(self, l: int) -> bool:
        """Layer `l` opens an AttnRes block."""
        return l % self.attn_res_block_size == 0


# Arithmetic.

_P = ParamSpec("_P")


def fixed_rows(op: Callable[Concatenate[Tensor, _P], Tensor]) -> Callable[Concatenate[Tensor, _P], Tensor]:
    """Run `op`, which treats the rows of its first argument alike, on a multiple of 8 rows.

    Libraries choose the order of a reduction by the shape of the whole tensor: the same row gives other
    bits alone than among eight. Decode steps of 1 to 8 rows all have the same shape here. The last row is
    repeated, not zeros added, so that padding cannot meet a case that no real row meets.
    """

    @wraps(op)
    def padded(x: Tensor, *args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        rows = x.shape[0]
        if missing := -rows % ROWS:
            x = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])
        return op(x, *args, **kwargs)[:rows]

    return padded


def _bf(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


@fixed_rows
def matmul(x: Tensor, w: Tensor) -> Tensor:
    """`x @ w.T` of BF16 `x [R, in]` and `w [out, in]`, accumulated and returned in fp32."""
    if x.is_cuda:
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    return x.float() @ w.float().t()


def in_order(terms: Iterable[Tensor]) -> Tensor:
    """Sum of `terms`, first to last."""
    return reduce(torch.add, terms)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """`W x`, rounded once."""
    return _bf(matmul(x, w))


def per_head(x: Tensor, w: Tensor) -> Tensor:
    """One matrix per head: BF16 `x [T, H, in]`, `w [H, in, out]` -> BF16 `[T, H, out]`."""
    x = x.transpose(0, 1)
    y = torch.bmm(x, w, out_dtype=torch.float32) if x.is_cuda else x.float() @ w.float()
    return _bf(y.transpose(0, 1))


@fixed_rows
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim with the release's two roundings: x / rms, then weight * that."""
    wide = x.float()
    return weight * _bf(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))


@fixed_rows
def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dim, in the dtype of `x`."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU-GLU: b1 tanh(g/b1) sigmoid(g) * b2 tanh(u/b2); the sigmoid sees the uncapped gate. fp32 inside."""
    g, u = gate.float(), up.float()
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)).to(
        gate.dtype
    )


# Block attention residuals (AttnRes).


@fixed_rows
def attn_res_mix(rows: Tensor, res_norm: Tensor, res_proj: Tensor, eps: float) -> Tensor:
    """Mixture of `rows [R, m+1, E]` (bank, then prefix) by a softmax of one logit per row -> `[R, E]`.

    The logit is the RMS-normed row against `res_norm * res_proj`, formed in fp32; the rows mixed are the
    raw ones.
    """
    wide = rows.float()
    direction = res_norm.float() * res_proj.float()
    logits = (wide * direction).sum(-1) * torch.rsqrt(wide.square().mean(-1) + eps)
    return _bf((torch.softmax(logits, -1)[..., None] * wide).sum(1))


def attn_res_norm(
    delta: Tensor,
    prefix: Tensor,
    bank: Tensor,
    res_norm: Tensor,
    res_proj: Tensor,
    norm: Tensor,
    *,
    bank_rows: int,
    bank_write: int,
    has_prefix: int,
    out: Tensor,
    eps: float = 1e-5,
) -> None:
    """The standard form of the fused AttnRes kernel, with its signature (see `executor.AttnRes`)."""
    prefix.copy_(_bf(prefix.float() + delta.float()) if has_prefix else delta)
    rows = torch.cat([bank[:, :bank_rows], prefix[:, None]], 1)
    if bank_write >= 0:
        bank[:, bank_write] = prefix
    out.copy_(rms_norm(attn_res_mix(rows, res_norm, res_proj, eps), norm, eps))


# Kimi Delta Attention (KDA).


@dataclass
class KDACache:
    """What one sequence leaves in a KDA layer.

    `state [H, V, K]` fp32, K contiguous; `history [3, 3 H D]` BF16: q|k|v before the convolution, oldest
    first.
    """

    state: Tensor
    history: Tensor

    def clone(self) -> KDACache:
        return KDACache(self.state.clone(), self.history.clone())


def short_conv(x: Tensor, history: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution, then SiLU: (BF16 `[T, C]`, next history).

    `x [T, C]`, `history [3, C]`, `taps [C, 4]` fp32, oldest first.
    """
    seen = torch.cat([history, x])
    width = taps.shape[1]
    y = in_order(seen[i : i + len(x)].float() * taps[:, i] for i in range(width))
    return _bf(F.silu(y)), seen[-(width - 1) :].clone()


def kda_log_decay(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log decay per channel, lower_bound * sigmoid(exp(A_log) (z + dt_bias)), in (lower_bound, 0).

    `z [R, H, D]`, `A_log [H]`, `dt_bias [H, D]`.
    """
    return lower_bound * torch.sigmoid(A_log.exp()[:, None] * (z.to(A_log.dtype) + dt_bias))


def kda_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the delta rule: decay, predict, write, read -> (`o [H, V]`, next `state [H, V, K]`)."""
    state = state * g.exp()[:, None]
    error = v - (state * k[:, None]).sum(-1)
    state = state + (beta[:, None] * error)[:, :, None] * k[:, None]
    return (state * q[:, None]).sum(-1), state


def kda_recurrent(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """(`o [T, H, V]`, state after) token by token; q, k, v, g `[T, H, D]`, beta `[T, H]`, q and k normed."""
    outs = []
    for token in zip(q, k, v, g, beta, strict=True):
        o, state = kda_step(state, *token)
        outs.append(o)
    return torch.stack(outs), state


def kda_chunked(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as `kda_recurrent` in exact arithmetic, 64 tokens at a time."""
    outs = []
    for part in zip(*(x.split(CHUNK) for x in (q, k, v, g, beta)), strict=True):
        o, state = _chunk(state, *(x.transpose(0, 1) for x in part))
        outs.append(o.transpose(0, 1))
    return torch.cat(outs), state


def _chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """n <= 64 tokens, head first: q, k, v, g `[H, n, D]`, beta `[H, n]`.

    Decays over a span are exponentials of a DIFFERENCE of cumulative logs, which is <= 0: the factored form
    overflows fp32 after 18 tokens at the lower bound of -5.
    """
    n = q.shape[1]
    up_to = torch.ones(n, n, dtype=g.dtype, device=g.device).tril()
    log = up_to @ g  # torch's cumsum is not deterministic on CUDA
    span = (log[:, :, None] - log[:, None]).masked_fill_((up_to == 0)[..., None], -math.inf).exp_()
    # [H, i, j]: how much of key j is left for key i, and for query i
    pairs = (span * k[:, None]) @ torch.stack([k, q], -1)
    to_key, to_query = pairs[..., 0] * beta[..., None], pairs[..., 1]
    old, decay = state.mT, log.exp()
    target = beta[..., None] * (v - (decay * k) @ old)
    # forward substitution with I + strictly lower(to_key)
    u = torch.linalg.solve_triangular(to_key, target, upper=False, unitriangular=True)
    o = (decay * q) @ old + to_query @ u
    left = (log[:, -1:] - log).exp() * k
    return o, (decay[:, -1, :, None] * old + left.mT @ u).mT.contiguous()


@fixed_rows
def norm_and_gate(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, then the sigmoid gate, rounded once. `x [R, H, 2 D]` BF16: o, then the gate's logits."""
    o, gate = x.float().chunk(2, -1)
    return _bf(
        o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * weight.float() * torch.sigmoid(gate)
    )


def kda(
    x: Tensor, w: Mapping[str, Tensor], c: Config, caches: Sequence[KDACache], *, prefill: bool
) -> Tensor:
    """KDA sublayer: normed `x [R, E]`, R / len(caches) tokens for each cache -> `[R, E]`."""
    heads, dim, tokens = c.num_heads, c.head_dim, len(x) // len(caches)
    qkv = torch.cat([linear(x, w[f"{name}_proj.weight"]) for name in "qkv"], -1)
    taps = torch.cat([w[f"{name}_conv1d.weight"] for name in "qkv"])[:, 0].float()
    z = linear(linear(x, w["f_a_proj.weight"]), w["f_b_proj.weight"]).view(-1, heads, dim)
    # A_log is stored padded; one entry per head
    g = kda_log_decay(
        z, w["A_log"][:heads].float(), w["dt_bias"].float().view(heads, dim), c.gate_lower_bound
    )
    beta = torch.sigmoid(linear(x, w["b_proj.weight"]).float())
    scan = kda_chunked if prefill and tokens > 1 else kda_recurrent
    outs = []
    for s, cache in enumerate(caches):
        rows = slice(s * tokens, (s + 1) * tokens)
        mixed, cache.history = short_conv(qkv[rows], cache.history, taps)
        q, k, v = mixed.float().view(tokens, 3, heads, dim).unbind(1)
        o, cache.state = scan(cache.state, l2_norm(q) * dim**-0.5, l2_norm(k), v, g[rows], beta[rows])
        outs.append(_bf(o))
    gate = linear(x, w["g_proj.weight"]).view(-1, heads, dim)
    y = norm_and_gate(torch.cat([torch.cat(outs), gate], -1), w["o_norm.weight"], c.rms_norm_eps)
    return linear(y.flatten(1), w["o_proj.weight"])


# Gated multi-head latent attention (MLA), without positions.


@dataclass
class MLACache:
    """What one sequence leaves in an MLA layer.

    `rows [capacity, kv_lora_rank + qk_rope_head_dim]` BF16: the normed latent, then the raw shared key.
    """

    rows: Tensor
    length: int = 0

    def append(self, new: Tensor) -> None:
        """Add `new [T, width]` at the end, doubling the capacity where it does not fit."""
        end = self.length + len(new)
        if end > len(self.rows):
            grown = self.rows.new_empty(max(end, 2 * len(self.rows)), self.rows.shape[1])
            grown[: self.length] = self.rows[: self.length]
            self.rows = grown
        self.rows[self.length : end] = new
        self.length = end

    def clone(self) -> MLACache:
        return replace(self, rows=self.rows.clone())


def mla_attend(q_nope: Tensor, q_rope: Tensor, rows: Tensor, kv_b: Tensor, c: Config) -> Tensor:
    """Absorbed attention of the last T tokens of `rows [S, latent + rope]` -> BF16 `[T, H, v_head_dim]`.

    `q_nope [T, H, nope]`, `q_rope [T, H, rope]`; `kv_b [H (nope + v), latent]`, the key's part first in
    each head. The key's up-projection is applied to the query and the value's to the result, so that scores
    and sums run on the cached latents.
    """
    heads, latent = c.num_attention_heads, c.kv_lora_rank
    up = kv_b.view(heads, c.qk_nope_head_dim + c.v_head_dim, latent)
    up_key, up_value = up.split([c.qk_nope_head_dim, c.v_head_dim], 1)
    queries, keys = len(q_nope), len(rows)
    q = torch.cat([per_head(q_nope, up_key), q_rope], -1).flatten(0, 1)  # [T H, latent + rope]
    scores = matmul(q, rows).view(queries, heads, keys) * (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
    if queries > 1:
        position = torch.arange(keys, device=rows.device)
        scores.masked_fill_((position > position[keys - queries :, None])[:, None], -math.inf)
    attention = _bf(torch.softmax(scores, -1)).view(queries * heads, keys)
    return per_head(linear(attention, rows[:, :latent].t()).view(queries, heads, latent), up_value.mT)


def mla(
    x: Tensor, w: Mapping[str, Tensor], c: Config, caches: Sequence[MLACache], *, prefill: bool
) -> Tensor:
    """Gated MLA sublayer: normed `x [R, E]`, R / len(caches) tokens for each cache -> `[R, E]`."""
    heads, tokens = c.num_attention_heads, len(x) // len(caches)
    compressed = rms_norm(linear(x, w["q_a_proj.weight"]), w["q_a_layernorm.weight"], c.latent_norm_eps)
    q = linear(compressed, w["q_b_proj.weight"]).view(-1, heads, c.qk_nope_head_dim + c.qk_rope_head_dim)
    q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
    latent, key = linear(x, w["kv_a_proj_with_mqa.weight"]).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
    new = torch.cat([rms_norm(latent, w["kv_a_layernorm.weight"], c.latent_norm_eps), key], -1)
    outs = []
    for s, cache in enumerate(caches):
        before = cache.length
        cache.append(new[s * tokens : (s + 1) * tokens])
        block = max(1, SCORES // (heads * cache.length)) if prefill else 1
        for first in range(0, tokens, block):
            last = min(first + block, tokens)
            rows = slice(s * tokens + first, s * tokens + last)
            visible = cache.rows[: before + last]
            outs.append(mla_attend(q_nope[rows], q_rope[rows], visible, w["kv_b_proj.weight"], c))
    gate = torch.sigmoid(linear(x, w["g_proj.weight"]))
    return linear(torch.cat(outs).flatten(1) * gate, w["o_proj.weight"])


# Feed-forward.


def mlp(x: Tensor, w: Mapping[str, Tensor], names: Iterable[str], c: Config) -> Tensor:
    """down(situ(gate x, up x)) of `x [R, in]`; `names` are those of gate, up and down in `w`."""
    gate, up, down = (w[f"{name}.weight"] for name in names)
    return linear(
        situ(linear(x, gate), linear(x, up), c.activation_situ_beta, c.activation_situ_linear_beta), down
    )


def dense(x: Tensor, w: Mapping[str, Tensor], c: Config, prefix: str = "") -> Tensor:
    """Dense sublayer, or the shared experts: normed `x [R, E]` -> `[R, E]`."""
    return mlp(x, w, (f"{prefix}{name}_proj" for name in ("gate", "up", "down")), c)


def route(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scale: float = 1.0, expert_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights `[R, k]` fp32, expert numbers `[R, k]`) of normed `x [R, E]`, best first.

    `bias` takes part in the selection only; of equal scores the lower number wins. `expert_ids` forces the
    choice. Raises ValueError where a score is NaN.
    """
    scores = torch.sigmoid(matmul(x, gate))
    if scores.isnan().any():
        raise ValueError("router: a score is NaN, so the input of this layer is damaged")
    if expert_ids is None:
        expert_ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, expert_ids)
    total = in_order(weights.unbind(-1)) + ROUTER_EPS
    return weights / total[:, None] * scale, expert_ids


def latent_moe(x: Tensor, w: Mapping[str, Tensor], c: Config, expert_ids: Tensor | None = None) -> Tensor:
    """Latent MoE sublayer: normed `x [R, E]` -> `[R, E]`.

    Routed experts work in a narrower space; their weighted sum is formed and normed there.
    """
    bias = w["gate.e_score_correction_bias"].float()
    weights, ids = route(
        x, w["gate.weight"], bias, c.num_experts_per_token, c.routed_scaling_factor, expert_ids
    )
    latent = linear(x, w["routed_expert_down_proj.weight"])
    y = latent.new_empty(*ids.shape, latent.shape[1])
    for e in ids.unique().tolist():
        row, slot = (ids == e).nonzero(as_tuple=True)
        y[row, slot] = mlp(latent[row], w, (f"experts.{e}.{name}" for name in ("w1", "w3", "w2")), c)
    combined = _bf(in_order(weights[:, i, None] * y[:, i].float() for i in range(ids.shape[1])))
    routed = linear(
        rms_norm(combined, w["routed_expert_norm.weight"], c.rms_norm_eps), w["routed_expert_up_proj.weight"]
    )
    return routed + dense(x, w, c, "shared_experts.")


# Weights.

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0 = [*(math.ldexp(1.0, e - 127) for e in range(255)), math.nan]


def dequantise_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """MXFP4 (OCP Microscaling Formats 1.0) to BF16 `[out, in]`, exactly.

    `packed [out, in/2]` u8, even columns in the low nibble; `scale [out, in/32]` u8, the exponent of 32
    consecutive columns. Raises ValueError where the shapes do not fit.
    """
    if packed.shape[0] != scale.shape[0] or packed.shape[1] * 2 != scale.shape[1] * 32:
        raise ValueError(
            f"MXFP4: weight_packed {tuple(packed.shape)} does not fit weight_scale {tuple(scale.shape)}"
        )
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.bfloat16, device=packed.device)
    powers = torch.tensor(_E8M0, dtype=torch.bfloat16, device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1)
    return (values[codes.int()].view(*scale.shape, 32) * powers[scale.int()][..., None]).flatten(1)


class Weights(dict[str, Tensor]):
    """Tensors of one module under their names inside it."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str):
        super().__init__(tensors)
        self.prefix = prefix

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"tensor {self.prefix}{name} is missing from the checkpoint")

    def below(self, prefix: str) -> Weights:
        """The tensors of one submodule."""
        part = {n.removeprefix(prefix): t for n, t in self.items() if n.startswith(prefix)}
        return Weights(part, self.prefix + prefix)


def load(tensors: Mapping[str, Tensor], prefix: str, device: torch.device | str) -> Weights:
    """The tensors whose released names start with `prefix`, on `device`, MXFP4 dequantised.

    The name `weight_packed` says what is packed; the release's quantisation config names other layers too.
    """
    w = Weights({}, prefix)
    for name in (n for n in tensors if n.startswith(prefix)):
        local, tensor = name.removeprefix(prefix), tensors[name].to(device)
        if local.endswith(".weight_packed"):
            base = local.removesuffix("_packed")
            w[base] = dequantise_mxfp4(tensor, tensors[f"{prefix}{base}_scale"].to(device))
        elif not local.endswith(".weight_scale"):
            w[local] = tensor
    return w


# Layers and the model.

LayerCache = KDACache | MLACache
Cache = list[LayerCache]  # one sequence's memory, one entry per layer


class StandardLayer:
    """Layer `l`: its two sublayers without norms, mixes and residuals, which belong to the model's loop."""

    def __init__(
        self, config: Config, tensors: Mapping[str, Tensor], l: int, device: torch.device | str = "cpu"
    ):
        self.config, self.device = config, torch.device(device)
        self.is_kda, self.is_moe = config.is_kda(l), config.is_moe(l)
        self.weights = load(tensors, f"{PREFIX}model.layers.{l}.", device)
        self.self_attn = self.weights.below("self_attn.")
        self.mlp = self.weights.below("block_sparse_moe." if self.is_moe else "mlp.")

    def empty_cache(self, capacity: int = 256) -> LayerCache:
        """Memory of a sequence without tokens."""
        c = self.config
        if not self.is_kda:
            width = c.kv_lora_rank + c.qk_rope_head_dim
            return MLACache(torch.empty(capacity, width, dtype=torch.bfloat16, device=self.device))
        state = torch.zeros(c.num_heads, c.head_dim, c.head_dim, device=self.device)
        past = (c.short_conv_kernel_size - 1, 3 * c.num_heads * c.head_dim)
        return KDACache(state, torch.zeros(past, dtype=torch.bfloat16, device=self.device))

    def attention(self, x: Tensor, caches: Sequence[Any], *, prefill: bool = False) -> Tensor:
        """Normed `x [R, E]`, R / len(caches) tokens for each cache, which is updated -> `[R, E]`."""
        sublayer = kda if self.is_kda else mla
        return sublayer(x, self.self_attn, self.config, caches, prefill=prefill)

    def ffn(self, x: Tensor, expert_ids: Tensor | None = None) -> Tensor:
        """Normed `x [R, E]` -> `[R, E]`. `expert_ids [R, k]` forces the router's choice."""
        if self.is_moe:
            return latent_moe(x, self.mlp, self.config, expert_ids)
        return dense(x, self.mlp, self.config)


class StandardModel:
    """The whole text model. `tensors` maps released names to tensors, as read from the checkpoint."""

    def __init__(self, config: Config, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"):
        self.config, self.device = config, torch.device(device)
        self.layers = [StandardLayer(config, tensors, l, device) for l in range(config.num_hidden_layers)]
        names = (n for n in tensors if n.startswith(PREFIX) and not n.startswith(f"{PREFIX}model.layers."))
        self.shell = load({name: tensors[name] for name in names}, PREFIX, device)

    def empty_cache(self) -> Cache:
        """Memory of one sequence without tokens."""
        return [layer.empty_cache() for layer in self.layers]

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        cache: Cache,
        *,
        all_logits: bool = False,
        expert_ids: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Append `tokens [T]` to a sequence: BF16 logits of the last one `[vocab]`, or of all `[T, vocab]`.

        `expert_ids` forces the router's choice: layer -> `[T, k]`. Raises ValueError for unfit tokens.
        """
        self._check_tokens(tokens, 1)
        parts = []
        for first in range(0, len(tokens), PREFILL_SEGMENT):
            part = slice(first, first + PREFILL_SEGMENT)
            forced = {l: ids[part] for l, ids in (expert_ids or {}).items()}
            h = self._run(self.embed(tokens[part]), [cache], prefill=True, expert_ids=forced)
            parts.append(self.head(h if all_logits else h[-1:]))
        return torch.cat(parts) if all_logits else parts[-1][0]

    @torch.no_grad()
    def decode(
        self, tokens: Tensor, caches: Sequence[Cache], *, expert_ids: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """Append `tokens [B, q]` to B sequences: BF16 logits `[B, q, vocab]`.

        `expert_ids` forces the router's choice: layer -> `[B q, k]`. Raises ValueError for unfit tokens.
        """
        self.check_decode(tokens, caches)
        h = self._run(self.embed(tokens.flatten()), caches, prefill=False, expert_ids=expert_ids or {})
        return self.head(h).view(*tokens.shape, -1)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows `[R, E]` of the embedding."""
        return self.shell["model.embed_tokens.weight"][tokens.to(self.device)]

    def head(self, y: Tensor) -> Tensor:
        """Logits `[R, vocab]` of the normed output `y [R, E]`."""
        return linear(y, self.shell["lm_head.weight"])

    def _run(
        self, x: Tensor, caches: Sequence[Cache], *, prefill: bool, expert_ids: Mapping[int, Tensor]
    ) -> Tensor:
        """All layers with their residuals: embedded `x [R, E]` -> normed output `[R, E]`.

        `bank` holds the prefix of every finished block, the embedding first; `prefix` sums the running one.
        """
        c = self.config

        def mix(bank: Iterable[Tensor], prefix: Tensor, w: Weights, name: str, norm: str) -> Tensor:
            rows = torch.stack([*bank, prefix], 1)
            mixed = attn_res_mix(rows, w[f"{name}_norm.weight"], w[f"{name}_proj.weight"], c.rms_norm_eps)
            return rms_norm(mixed, w[f"{norm}.weight"], c.rms_norm_eps)

        prefix: Tensor = x
        bank: list[Tensor] = []
        for l, layer in enumerate(self.layers):
            h = mix(bank, prefix, layer.weights, "self_attention_res", "input_layernorm")
            attention = layer.attention(h, [cache[l] for cache in caches], prefill=prefill)
            if c.starts_block(l):
                bank.append(prefix)
                prefix = attention
            else:
                prefix = prefix + attention
            h = mix(bank, prefix, layer.weights, "mlp_res", "post_attention_layernorm")
            prefix = prefix + layer.ffn(h, expert_ids.get(l))
        return mix(bank, prefix, self.shell, "model.output_attn_res", "model.norm")

    def check_decode(self, tokens: Tensor, caches: Sequence[Cache]) -> None:
        """Raise ValueError, in one line, for arguments that `decode` does not take."""
        self._check_tokens(tokens, 2)
        if len(tokens) != len(caches):
            raise ValueError(f"decode: {len(tokens)} sequences of tokens, but {len(caches)} caches")

    def _check_tokens(self, tokens: Tensor, dim: int) -> None:
        if tokens.dim() != dim or not tokens.numel() or tokens.dtype not in (torch.int32, torch.int64):
            got = f"{tokens.dtype} {list(tokens.shape)}"
            raise ValueError(f"tokens must be a filled integer tensor of {dim} dimensions, got {got}")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise ValueError(f"tokens must lie in the vocabulary [0, {self.config.vocab_size})")
        if self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
            raise ValueError(
                "the standard path needs full fp32: call torch.set_float32_matmul_precision('highest')"
            )
