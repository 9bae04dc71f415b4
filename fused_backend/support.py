"""Can this deployment run on the fused kernels? One ordered table; the first condition that fails answers.

Imports neither torch nor the kernel toolkit, so the question can be asked anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from k3_audit.artifact import ARCHITECTURES, Store, StoreError

from .kernels import KERNELS

# What the kernels are compiled for; each kernel's contract and source say the same.
HIDDEN = 7168
EPS = 1e-5
BANK_ROWS = 8
MAX_ROWS = 8


@dataclass(frozen=True)
class Deployment:
    """The facts that decide. `describe` collects them; a test or a planner may invent them.

    `arch` is the GPU's target, such as "sm_90a", or "" without a GPU. `missing_artifacts` names the kernels
    that the artifact store lacks for it. `model_type` to `attn_res_block_size` are the model's, under their
    released names. A step takes `batch_size` sequences with `query_len` tokens each.
    """

    torch: bool
    cuda_core: bool
    arch: str
    missing_artifacts: tuple[str, ...]
    model_type: str
    dtype: str
    hidden_size: int
    rms_norm_eps: float
    num_hidden_layers: int
    attn_res_block_size: int
    tensor_parallel_size: int = 1
    batch_size: int = 1
    query_len: int = 1

    @property
    def bank_rows(self) -> int:
        """Blocks of the model, rounded up: rows of the AttnRes bank at the output."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    @property
    def rows(self) -> int:
        """Rows of one decode step."""
        return self.batch_size * self.query_len

    def step(self, batch_size: int, query_len: int) -> Support:
        """The answer for a step of another size."""
        return check(replace(self, batch_size=batch_size, query_len=query_len))


@dataclass(frozen=True)
class Support:
    """Yes (true), or no with the one reason that comes first."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


# Ordered from what the user can mend at once to what needs another model. `{d.x}` is filled in.
TABLE: tuple[tuple[Callable[[Deployment], bool], str], ...] = (
    (lambda d: d.torch, "torch is not installed; run `pip install torch`"),
    (lambda d: d.arch != "", "no CUDA device is visible"),
    (
        lambda d: d.arch in ARCHITECTURES,
        "no kernels for {d.arch}; they exist for " + ", ".join(ARCHITECTURES),
    ),
    (lambda d: d.cuda_core, "cuda.core is not installed; run `pip install 'k3-audit[gpu]'`"),
    (
        lambda d: not d.missing_artifacts,
        "the artifact store lacks {missing} for {d.arch}; run `k3-audit build`",
    ),
    (lambda d: d.model_type == "kimi_linear", "the model type is {d.model_type!r}, not 'kimi_linear'"),
    (lambda d: d.dtype == "bfloat16", "activations are {d.dtype}, the kernels take bfloat16"),
    (
        lambda d: d.hidden_size == HIDDEN,
        f"hidden_size is {{d.hidden_size}}, the kernels are built for {HIDDEN}",
    ),
    (lambda d: d.rms_norm_eps == EPS, f"rms_norm_eps is {{d.rms_norm_eps}}, the kernels are built for {EPS}"),
    (
        lambda d: d.attn_res_block_size > 0,
        "attn_res_block_size is {d.attn_res_block_size}, the model has no AttnRes",
    ),
    (
        lambda d: d.bank_rows <= BANK_ROWS,
        "{d.num_hidden_layers} layers in blocks of {d.attn_res_block_size} need {d.bank_rows} bank rows, "
        f"the kernels hold {BANK_ROWS}",
    ),
    (
        lambda d: d.tensor_parallel_size == 1,
        "tensor parallel size is {d.tensor_parallel_size}, this backend has no collectives",
    ),
    (
        lambda d: 1 <= d.rows <= MAX_ROWS,
        f"a step of {{d.batch_size}} x {{d.query_len}} tokens, the kernels take 1 to {MAX_ROWS}",
    ),
)


def check(deployment: Deployment) -> Support:
    """The first reason of `TABLE` that stands against `deployment`, or yes."""
    for holds, reason in TABLE:
        if not holds(deployment):
            return Support(reason.format(d=deployment, missing=", ".join(deployment.missing_artifacts)))
    return Support()


def describe(
    config: Mapping[str, Any],
    *,
    tensor_parallel_size: int = 1,
    batch_size: int = 1,
    query_len: int = 1,
    store: Store | None = None,
) -> Deployment:
    """The facts of this machine and of a model, given as its parsed `config.json` or the `text_config` alone.

    Raises ValueError naming a field that the config lacks.
    """
    text = config.get("text_config", config)
    names = ("model_type", "dtype", "hidden_size", "rms_norm_eps", "num_hidden_layers", "attn_res_block_size")
    if missing := [name for name in names if name not in text]:
        raise ValueError(
            f"config: {', '.join(missing)} missing; give the released config.json of a Kimi K3 model"
        )
    arch = _architecture()
    return Deployment(
        torch=find_spec("torch") is not None,
        cuda_core=find_spec("cuda") is not None and find_spec("cuda.core") is not None,
        arch=arch,
        missing_artifacts=_missing_artifacts(store or Store(), arch),
        **{name: text[name] for name in names},
        tensor_parallel_size=tensor_parallel_size,
        batch_size=batch_size,
        query_len=query_len,
    )


def _architecture() -> str:
    """Target of the current CUDA device, "" where there is none."""
    if find_spec("torch") is None:
        return ""
    from .launch import LaunchError, architecture

    try:
        return architecture()
    except LaunchError:
        return ""


def _missing_artifacts(store: Store, arch: str) -> tuple[str, ...]:
    def present(kernel: str) -> bool:
        try:
            return store.built(kernel, arch) is not None
        except StoreError:
            return False

    return tuple(kernel for kernel in KERNELS if not present(kernel))


@dataclass
class FallbackCounter:
    """How many decode steps ran fused, and why the others did not."""

    fused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self, support: Support) -> None:
        """Count one step."""
        if support:
            self.fused += 1
        else:
            self.reasons[support.reason] += 1

    @property
    def fallback(self) -> int:
        """Steps that ran on the standard path."""
        return self.reasons.total()

    def __str__(self) -> str:
        lines = [f"{self.fused} of {self.fused + self.fallback} decode steps on the fused kernels"]
        return "\n".join([*lines, *(f"  {n} x {reason}" for reason, n in self.reasons.most_common())])
