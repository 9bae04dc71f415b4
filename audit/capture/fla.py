"""Recipes for the KDA decode of flash-linear-attention, compiled ahead of time by Triton. Needs no GPU.

A decode step of its KDA layer runs a convolution update, the gate (also inside the recurrence), the
recurrence, and a gated norm. Shapes are those of Kimi K3 at tensor parallelism 8 and 16: 12 and 6 heads of
128; launch options are among those that the package tunes over.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .cutedsl import Code, empty_packages, stub
from .wheels import CaptureError, Wheel, unpack

WHEEL = Wheel("fla-core", "0.6.0", "b0708b70e0b119cd58a0a5146ea56cb175cef6ed969d8ac60267e3e077ce3ebd", 1)
WHEELS = (WHEEL,)
ARCHITECTURES = ("sm_90", "sm_100")
PRELOAD = ("triton",)


@dataclass(frozen=True)
class Recipe:
    """`call` is "module:kernel". An argument that no field names is absent (None).

    `arguments` gives Triton types ("*bf16", "i64", "fp32"); `constants` the values of constexpr arguments.
    """

    name: str
    call: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=dict)


def recipes() -> list[Recipe]:
    """All recipes, by name."""
    found = []
    for tp in (8, 16):
        heads = 96 // tp
        for step in ("decode", "verify", "plain"):
            found.append(_recurrence(tp, heads, step))
        found.append(
            Recipe(
                f"gate.tp{tp}",
                "fla.ops.kda.gate:kda_gate_fwd_kernel",
                {
                    **dict.fromkeys(("g", "yg"), "*bf16"),
                    **dict.fromkeys(("A_log", "dt_bias"), "*fp32"),
                    **{"yg": "*fp32", "lower_bound": "fp32", "T": "i32"},
                },
                {
                    **{"H": heads, "D": 128, "BT": 32, "BD": 128, "HAS_A": True, "HAS_BIAS": True},
                    **{"HAS_BETA": False, "USE_LOWER_BOUND": True},
                },
                {"num_warps": 4, "num_stages": 2},
            )
        )
        found.append(
            Recipe(
                f"convolution.tp{tp}",
                "fla.modules.causal_conv1d.ops:causal_conv1d_update_kernel",
                {
                    **dict.fromkeys(("x", "cache", "y", "weight"), "*bf16"),
                    **dict.fromkeys(("stride_x_n", "stride_x_d", "stride_y_n", "stride_y_d"), "i32"),
                },
                {
                    **{"D": heads * 128, "W": 4, "BD": 64, "BW": 4, "ACTIVATION": "silu"},
                    **{"USE_INITIAL_STATE": True, "HAS_WEIGHT": True, "HAS_BIAS": False},
                    "HAS_RESIDUAL": False,
                },
                {"num_warps": 4},
            )
        )
    for rows in (16, 64):
        found.append(
            Recipe(
                f"norm.rows{rows}",
                "fla.modules.norm.fused_norm_gate:layer_norm_gated_fwd_kernel",
                {
                    **dict.fromkeys(("x", "g", "y"), "*bf16"),
                    **{"w": "*fp32", "rstd": "*fp32", "eps": "fp32", "T": "i32"},
                },
                {
                    **{"D": 128, "BT": rows, "BD": 128, "NB": 1, "ACTIVATION": "sigmoid"},
                    **{"IS_RMS_NORM": True, "STORE_RESIDUAL_OUT": False, "HAS_RESIDUAL": False},
                    **{"HAS_WEIGHT": True, "HAS_BIAS": False},
                },
                {"num_warps": 4},
            )
        )
    return sorted(found, key=lambda r: r.name)


def _recurrence(tp: int, heads: int, step: str) -> Recipe:
    """One token ("decode"), several with rollback ("verify"), both over state slots; or no slots ("plain")."""
    slots, size = step != "plain", 128 * 128
    arguments = {
        **dict.fromkeys(("q", "k", "v", "g", "beta", "o"), "*bf16"),
        **dict.fromkeys(("A_log", "dt_bias", "h0", "ht"), "*fp32"),
        **{"lower_bound": "fp32", "N": "i64", "T": "i64"},
    }
    if slots:
        arguments |= {"cu_seqlens": "*i64", "ssm_state_indices": "*i32"}
    if step == "verify":
        arguments |= {"num_accepted_tokens": "*i32"}
    constants = {
        **{"scale": 128**-0.5, "H": heads, "HV": heads, "K": 128, "V": 128, "BK": 128, "BV": 32},
        **{"stride_init_state_token": heads * size, "stride_final_state_token": heads * size},
        **{"stride_indices_seq": 8 if step == "verify" else 1, "stride_indices_tok": 1},
        **{"USE_INITIAL_STATE": True, "INPLACE_FINAL_STATE": slots, "IS_BETA_HEADWISE": False},
        **{"USE_QK_L2NORM_IN_KERNEL": True, "IS_VARLEN": slots, "IS_CONTINUOUS_BATCHING": slots},
        **{"IS_SPEC_DECODING": step == "verify", "STORE_FINAL_STATE": True, "HAS_A": True, "HAS_BIAS": True},
        **{"USE_GATE_IN_KERNEL": True, "USE_LOWER_BOUND": True, "APPLY_BETA_SIGMOID": True},
        **{"ALLOW_NEG_EIGVAL": False, "STATE_V_FIRST": True, "num_stages": 2},
    }
    kernel = "fla.ops.kda.fused_recurrent:fused_recurrent_kda_fwd_kernel"
    return Recipe(
        f"recurrence.{step}.tp{tp}", kernel, arguments, constants, {"num_warps": 4, "num_stages": 2}
    )


def prepare() -> None:
    """Fetch what the builds need, once. Raises CaptureError as `unpack`, and without Triton."""
    if importlib.util.find_spec("triton") is None:
        raise CaptureError("triton is not installed: pip install 'k3-audit[triton]'")
    unpack(WHEEL, ["fla/"])


def build(name: str, arch: str) -> list[Code]:
    """Compile one recipe for one architecture ("sm_90"), with source lines.

    Raises KeyError for an unknown name, CaptureError as `prepare`, and whatever the compiler raises.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    recipe = {r.name: r for r in recipes()}[name]
    root = unpack(WHEEL, ["fla/"])
    module, kernel = recipe.call.split(":")
    empty_packages(root, module.rpartition(".")[0], "fla.ops")
    stub("einops", rearrange=None)  # host side only
    sys.modules["fla"].__version__ = WHEEL.version  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU here
        function = getattr(importlib.import_module(module), kernel)
    while not isinstance(function, triton.JITFunction):  # below heuristics and autotuning
        function = function.fn
    names = function.arg_names
    constants = {n: recipe.constants.get(n) for n in names if n not in recipe.arguments}
    source = ASTSource(
        function,
        {n: recipe.arguments.get(n, "constexpr") for n in names},
        constants,
        # What the launcher finds for every tensor of a framework: its address is a multiple of 16.
        {
            (names.index(n),): [["tt.divisibility", 16]]
            for n, kind in recipe.arguments.items()
            if kind.startswith("*")
        },
    )
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options=dict(recipe.options))
    ptx = compiled.asm["ptx"].replace(f'"{root}/', '"')
    return [Code(kernel, compiled.metadata.name, ptx, compiled.asm["cubin"])]
