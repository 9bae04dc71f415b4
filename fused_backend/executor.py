"""One decode step as a list of launches, and the loop that runs it.

    embed -> delta
    per layer   attn_res    delta, prefix, bank -> prefix, (bank row), x      one fused kernel
                attention   x, cache -> delta                                 standard path
                attn_res    delta, prefix, bank -> prefix, x                  one fused kernel
                ffn         x -> delta                                        standard path
    attn_res -> x           head x -> logits

The plan is data: the loop runs what the list says, and `check_plan` proves on the same list that no kernel
reads early what a running grid may still write. The fused operator comes in as a callable, so the same loop
runs the kernel, the standard operator, or an emulator of the kernel's machine code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, Protocol, TypedDict

import torch
from k3_audit.artifact import Contract, Role
from torch import Tensor

from .launch import ALIGNMENT, Launcher, LaunchError
from .standard import Cache, Config, StandardModel
from .support import BANK_ROWS, MAX_ROWS, FallbackCounter, Support

# The fused operator.


class AttnRes(Protocol):
    """Fused AttnRes + RMSNorm for T <= 8 tokens; `standard.attn_res_norm` says what it computes.

    All tensors BF16, contiguous, 16-byte aligned, on one device, none overlapping another:

        delta     [T, E]      read     output of the previous sublayer; the embedding at the start
        prefix    [T, E]      updated  prefix + delta, or delta where has_prefix is 0
        bank      [T, 8, E]   rows < bank_rows are read; row bank_write, if any, receives the updated prefix
        res_norm, res_proj, norm [E]   read
        out       [T, E]      written  RMSNorm of the mixture of bank rows and prefix

    bank_rows 0..8; bank_write -1 (none) or a row that is not read, bank_rows..7; has_prefix 0 or 1.
    """

    def __call__(
        self,
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
    ) -> None: ...


class AttnResArgs(TypedDict):
    """The scalar arguments of one AttnRes launch."""

    bank_rows: int
    bank_write: int
    has_prefix: int


class FusedAttnRes:
    """`AttnRes` on the GPU, from an artifact. Raises LaunchError, before the launch, for other arguments."""

    def __init__(self, launcher: Launcher):
        self.contract = launcher.artifact.contract
        self._launcher = launcher
        self._hidden = int(self.contract.params[0].shape[1])

    def __call__(
        self,
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
    ) -> None:
        tensors = (delta, prefix, bank, res_norm, res_proj, norm, out)
        args: AttnResArgs = {"bank_rows": bank_rows, "bank_write": bank_write, "has_prefix": has_prefix}
        check_attn_res(*tensors, **args, hidden=self._hidden)
        self._launcher.launch((*tensors, bank_rows, bank_write, has_prefix), {"T": len(delta)})


def check_attn_res(
    delta: Tensor,
    prefix: Tensor,
    bank: Tensor,
    res_norm: Tensor,
    res_proj: Tensor,
    norm: Tensor,
    out: Tensor,
    *,
    bank_rows: int,
    bank_write: int,
    has_prefix: int,
    hidden: int,
) -> None:
    """Raise LaunchError, in one line, for arguments that `AttnRes` does not take. `hidden` is E."""
    tokens = len(delta) if delta.dim() else 0
    if not 1 <= tokens <= MAX_ROWS:
        raise LaunchError(f"attn_res: 1 to {MAX_ROWS} tokens, got {tokens}")
    row, weight = (tokens, hidden), (hidden,)
    named = {
        "delta": (delta, row),
        "prefix": (prefix, row),
        "bank": (bank, (tokens, BANK_ROWS, hidden)),
        "res_norm": (res_norm, weight),
        "res_proj": (res_proj, weight),
        "norm": (norm, weight),
        "out": (out, row),
    }
    for name, (tensor, shape) in named.items():
        if tensor.shape != shape:
            raise LaunchError(f"attn_res: {name} must be {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != torch.bfloat16:
            raise LaunchError(f"attn_res: {name} must be bfloat16, got {tensor.dtype}")
        if tensor.device != delta.device:
            raise LaunchError(f"attn_res: {name} is on {tensor.device}, delta on {delta.device}")
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
            raise LaunchError(f"attn_res: {name} must be contiguous and {ALIGNMENT}-byte aligned")
    for (one, (a, _)), (other, (b, _)) in combinations(named.items(), 2):
        written = {"prefix", "bank", "out"} & {one, other}
        if written and a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes:
            raise LaunchError(f"attn_res: {one} and {other} overlap in memory")
    if not 0 <= bank_rows <= BANK_ROWS:
        raise LaunchError(f"attn_res: bank_rows must be 0 to {BANK_ROWS}, got {bank_rows}")
    if bank_write != -1 and not bank_rows <= bank_write < BANK_ROWS:
        unread = f"{bank_rows} to {BANK_ROWS - 1}"
        raise LaunchError(f"attn_res: bank_write must be -1 or a row not read, {unread}, got {bank_write}")
    if has_prefix not in (0, 1):
        raise LaunchError(f"attn_res: has_prefix must be 0 or 1, got {has_prefix}")


# The plan.


@dataclass(frozen=True)
class Step:
    """One launch: a fused kernel, or an operator of the standard path (its torch kernels counted as one).

    `reads` and `writes` name buffers: "delta", "x", "prefix", "bank.0", a weight's name, "cache.3". `early`
    is the part of `reads` that the kernel reads before its dependency wait, while grids before it may still
    run. `pdl`: launched with programmatic stream serialization, so it may start when the launch before it
    triggers. `trigger`: when this launch lets the next one start: "exit" (no trigger instruction), "late"
    (after its own wait) or "early" (before it). `weights` and `args` are the kernel's arguments beside the
    buffers of the loop; weights by their names in the layer, or in the shell.
    """

    op: Literal["embed", "attn_res", "attention", "ffn", "head"]
    layer: int | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    early: tuple[str, ...] = ()
    pdl: bool = False
    trigger: Literal["exit", "late", "early"] = "exit"
    stable_distance: int = 0
    weights: tuple[str, ...] = ()
    args: AttnResArgs | None = None

    @property
    def name(self) -> str:
        return self.op if self.layer is None else f"layer {self.layer} {self.op}"

    def __str__(self) -> str:
        late = [buffer for buffer in self.reads if buffer not in self.early]
        overlap = f"   (before the wait: {', '.join(self.early)})" if self.early else ""
        return f"{self.name}: {', '.join(late)} -> {', '.join(self.writes)}{overlap}"


def decode_plan(config: Config, contract: Contract | None = None) -> list[Step]:
    """The launches of one decode step; AttnRes is a standard operator, or the fused kernel of `contract`.

    Residual bookkeeping (K3 technical report, block attention residuals), for layer l and blocks of n
    layers: before attention the previous sublayer's output joins the prefix, the mix reads the ceil(l/n)
    stored rows, and at a block's start the prefix is stored. Before the feed-forward the prefix is joined
    by the attention's output, or begins with it at a block's start, and the mix reads floor(l/n) + 1 rows.
    The embedding begins the first prefix.
    """
    block, layers = config.attn_res_block_size, config.num_hidden_layers

    def mix(layer: int | None, res: str, norm: str, rows: int, write: int, has_prefix: bool) -> Step:
        weights = (f"{res}_norm.weight", f"{res}_proj.weight", f"{norm}.weight")
        owner = "" if layer is None else f"model.layers.{layer}."
        reads = {
            "delta": ("delta",),
            "prefix": ("prefix",) if has_prefix else (),
            "bank": tuple(f"bank.{j}" for j in range(rows)),
            **{p: (owner + w,) for p, w in zip(("res_norm", "res_proj", "norm"), weights, strict=True)},
        }
        return Step(
            "attn_res",
            layer,
            reads=tuple(b for buffers in reads.values() for b in buffers),
            writes=("prefix", *((f"bank.{write}",) if write >= 0 else ()), "x"),
            weights=weights,
            args={"bank_rows": rows, "bank_write": write, "has_prefix": int(has_prefix)},
            **_overlap(contract, reads),
        )

    plan = [Step("embed", None, ("tokens", "model.embed_tokens.weight"), ("delta",))]
    for l in range(layers):
        start = l % block == 0
        bank_write = l // block if start else -1
        plan += [
            mix(l, "self_attention_res", "input_layernorm", -(-l // block), bank_write, l > 0),
            Step("attention", l, ("x", f"cache.{l}"), ("delta", f"cache.{l}")),
            mix(l, "mlp_res", "post_attention_layernorm", l // block + 1, -1, not start),
            Step("ffn", l, ("x",), ("delta",)),
        ]
    plan.append(mix(None, "model.output_attn_res", "model.norm", -(-layers // block), -1, True))
    plan.append(Step("head", None, ("x", "lm_head.weight"), ("logits",)))
    return plan


def _overlap(contract: Contract | None, reads: Mapping[str, tuple[str, ...]]) -> dict:
    """What a kernel's contract says about its neighbours; nothing for a standard operator."""
    if contract is None:
        return {}
    early = [p.name for p in contract.params if p.role in (Role.WEIGHT, Role.STABLE) and "r" in p.access]
    return {
        "early": tuple(b for name in early for b in reads[name]),
        "pdl": contract.launch.pdl,
        # A contract does not say when its kernel triggers: assume the earliest moment.
        "trigger": "early" if contract.launch.pdl else "exit",
        "stable_distance": contract.launch.stable_distance,
    }


def check_plan(plan: Sequence[Step]) -> list[str]:
    """What is wrong with the order of `plan`, one line per read that may not see what it should.

    Early reads, by the rule of `sync/dependent_launch.py`: launch i starts when launch i-1 triggers. If that
    trigger is late, or is i-1's exit, everything before i-1 has completed. If it is early, no more has
    completed than had when i-1 itself started. A wait returns when all earlier launches have completed, so
    reads after it are safe. Steps follow each other on one stream: the plan is checked as it meets itself.

    Also named is a read of a buffer that this step writes only later; caches are carried from step to step.
    """
    problems: dict[str, None] = {}  # an ordered set
    writer: dict[str, int] = {}  # buffer -> its last writer so far
    written = {buffer for step in plan for buffer in step.writes}
    completed = 0  # launches before this one are known to be complete when launch i starts
    twice = [*plan, *plan]
    for i, step in enumerate(twice):
        if not step.pdl:
            completed = i
        elif i and twice[i - 1].trigger != "early":
            completed = i - 1
        for buffer in step.reads:
            j = writer.get(buffer)
            if j is None:
                if buffer in written and not buffer.startswith("cache."):
                    problems[f"{step.name} reads {buffer} before any launch of the step writes it"] = None
                continue
            read = f"{step.name} reads {buffer} before its dependency wait"
            if buffer in step.early and j >= completed:
                problems[f"{read}, while {twice[j].name} may still be writing it"] = None
            elif buffer in step.early and i - j < step.stable_distance:
                needs = f"its contract needs {step.stable_distance}"
                problems[f"{read}, {i - j} launches after {twice[j].name} wrote it; {needs}"] = None
        writer.update(dict.fromkeys(step.writes, i))
    return list(problems)


# The loop.


class FusedModel:
    """The model with its fused kernels: same weights and caches as `model`, decode by the plan.

    `supported(batch, query_len)` answers for each step (`support.Deployment.step` does); a step that is not
    supported runs on the standard path and is counted with its reason in `fallbacks`. Prefill is the
    standard path's. Raises ValueError where the plan is not sound.
    """

    def __init__(
        self,
        model: StandardModel,
        attn_res: AttnRes,
        *,
        supported: Callable[[int, int], Support],
        contract: Contract | None = None,
    ):
        self.model, self.attn_res, self.supported = model, attn_res, supported
        self.fallbacks = FallbackCounter()
        self.plan = decode_plan(model.config, contract)
        if problems := check_plan(self.plan):
            raise ValueError(f"launch plan: {problems[0]}")
        # every step writes them before it reads them
        hidden = model.config.hidden_size
        self.bank = torch.empty(MAX_ROWS, BANK_ROWS, hidden, dtype=torch.bfloat16, device=model.device)
        self.prefix, self.x = self.bank.new_empty(MAX_ROWS, hidden), self.bank.new_empty(MAX_ROWS, hidden)

    def prefill(self, tokens: Tensor, cache: Cache, **options) -> Tensor:
        """`StandardModel.prefill`."""
        return self.model.prefill(tokens, cache, **options)

    @torch.no_grad()
    def decode(
        self, tokens: Tensor, caches: Sequence[Cache], *, expert_ids: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """`StandardModel.decode`, by the plan where the step is supported."""
        self.model.check_decode(tokens, caches)
        support = self.supported(*tokens.shape)
        self.fallbacks.count(support)
        if not support:
            return self.model.decode(tokens, caches, expert_ids=expert_ids)
        return self._run(tokens.flatten(), caches, expert_ids or {}).view(*tokens.shape, -1)

    def _run(self, tokens: Tensor, caches: Sequence[Cache], expert_ids: Mapping[int, Tensor]) -> Tensor:
        model, rows = self.model, len(tokens)
        prefix, bank, x = self.prefix[:rows], self.bank[:rows], self.x[:rows]
        delta = logits = torch.empty(0)
        for step in self.plan:
            match step:
                case Step(op="embed"):
                    delta = model.embed(tokens)
                case Step(op="attn_res", args=args) if args is not None:
                    owner = model.shell if step.layer is None else model.layers[step.layer].weights
                    res_norm, res_proj, norm = (owner[name].flatten() for name in step.weights)
                    self.attn_res(delta, prefix, bank, res_norm, res_proj, norm, **args, out=x)
                case Step(op="attention", layer=l) if l is not None:
                    delta = model.layers[l].attention(x, [cache[l] for cache in caches])
                case Step(op="ffn", layer=l) if l is not None:
                    delta = model.layers[l].ffn(x, expert_ids.get(l))
                case Step(op="head"):
                    logits = model.head(x)
        return logits
