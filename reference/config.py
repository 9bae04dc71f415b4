"""The model's configuration, in the released `config.json` layout.

Field names are those of `text_config` in the checkpoint `moonshotai/Kimi-K3`. Layer numbers in this package
are zero-based (`l = 0 .. num_hidden_layers - 1`); the two lists in `linear_attn_config` are 1-based, as
released.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, get_type_hints

MXFP4_GROUP = 32
"""Input columns that share one E8M0 scale (OCP Microscaling Formats 1.0, MXFP4)."""

_ARCHITECTURE = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
_TEXT_ARCHITECTURE = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}

# What the release says about quantisation. It is not the rule for reading tensors: the router, the latent
# and the AttnRes projections are missing from `ignore` and still stored as BF16. `weight_packed` being
# there decides.
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "type": "float",
                "num_bits": 4,
                "symmetric": True,
                "strategy": "group",
                "group_size": MXFP4_GROUP,
                "scale_dtype": "uint8",
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "kv_cache_scheme": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}


@dataclass(frozen=True)
class LinearAttnConfig:
    """The KDA part: which layers are KDA (1-based), and their shape."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    use_full_rank_gate: bool
    gate_lower_bound: float
    full_attn_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]

    @property
    def projection_size(self) -> int:
        """Width P of the q, k, v, gate and decay projections: num_heads * head_dim."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class Config:
    """The text model's hyper-parameters, under the released names."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    hidden_act: str
    activation_situ_beta: float
    activation_situ_linear_beta: float
    intermediate_size: int
    first_k_dense_replace: int
    moe_layer_freq: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    latent_moe_use_norm: bool
    moe_router_activation_func: str
    topk_method: str
    use_grouped_topk: bool
    num_expert_group: int
    topk_group: int
    moe_renormalize: bool
    routed_scaling_factor: float
    num_attention_heads: int
    num_key_value_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_nope: bool
    mla_use_output_gate: bool
    linear_attn_config: LinearAttnConfig
    attn_res_block_size: int
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    num_nextn_predict_layers: int = 0
    dtype: str = "bfloat16"
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _validate(self)

    # -- which layer is what

    def is_kda(self, l: int) -> bool:
        """Layer `l` (zero-based) is KDA; otherwise it is gated MLA."""
        return l + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, l: int) -> bool:
        """Layer `l` has a latent MoE; otherwise a dense feed-forward."""
        return l >= self.first_k_dense_replace and l % self.moe_layer_freq == 0

    def is_block_start(self, l: int) -> bool:
        """Layer `l` opens an AttnRes block: it banks the prefix right after its attention mix has read it."""
        return l % self.attn_res_block_size == 0

    def bank_rows_before_attention(self, l: int) -> int:
        """Bank rows that the mix before layer `l`'s attention reads (the prefix is one row more)."""
        return -(-l // self.attn_res_block_size)

    def bank_rows_before_ffn(self, l: int) -> int:
        """Bank rows that the mix before layer `l`'s feed-forward reads (the prefix is one row more)."""
        return l // self.attn_res_block_size + 1

    @property
    def bank_rows_at_output(self) -> int:
        """Bank rows that the output mix reads: the number of AttnRes blocks."""
        return self.bank_rows_before_attention(self.num_hidden_layers)

    # -- derived widths

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_cache_size(self) -> int:
        """Entries of one MLA cache row: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, stored as one MLP."""
        return self.num_shared_experts * self.moe_intermediate_size

    # -- JSON

    @classmethod
    def from_json(cls, source: str | PathLike[str] | Mapping[str, Any]) -> Config:
        """Read a released `config.json`, given as a path or as the parsed object. Unknown fields are ignored.

        Raises ValueError naming the field that is missing, of the wrong type, or outside what this model is.
        Raises OSError if the file cannot be read.
        """
        if isinstance(source, Mapping):
            document: Any = source
        else:
            try:
                document = json.loads(Path(source).read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{source}: not a JSON file ({error})") from None
        text = _object(document, "text_config", "")
        quantization = text.get("quantization_config")
        if quantization is not None:
            _check_quantization(quantization)
        linear = _read(LinearAttnConfig, _object(text, "linear_attn_config", "text_config."), _LINEAR)
        return _read(cls, {**text, "linear_attn_config": linear}, "text_config.")

    def to_json(self) -> dict[str, Any]:
        """This configuration in the released layout, ready for `json.dump`."""
        text = dataclasses.asdict(self)
        linear = text["linear_attn_config"]
        for name in ("full_attn_layers", "kda_layers"):
            linear[name] = list(linear[name])
        text = {**_TEXT_ARCHITECTURE, **text, "quantization_config": _QUANTIZATION}
        return copy.deepcopy({**_ARCHITECTURE, "text_config": text})


def load_config(name: str) -> Config:
    """One of the configurations shipped with this package; `config_names()` lists them.

    Raises ValueError for an unknown name.
    """
    if name not in config_names():
        raise ValueError(f"no configuration named {name!r}; there are: {', '.join(config_names())}")
    return Config.from_json(json.loads((_CONFIGS / f"{name}.json").read_text(encoding="utf-8")))


def config_names() -> tuple[str, ...]:
    """Names of the shipped configurations: the released model and reduced ones that keep its structure."""
    return tuple(
        sorted(
            entry.name.removesuffix(".json") for entry in _CONFIGS.iterdir() if entry.name.endswith(".json")
        )
    )


_CONFIGS = files(__package__) / "configs"
_LINEAR = "text_config.linear_attn_config."

# Fields that select another model when they differ; this reference is the mathematics of these values only.
_REQUIRED_VALUES = {
    "tie_word_embeddings": False,
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_nextn_predict_layers": 0,
}


def _object(parent: Any, name: str, prefix: str) -> Mapping[str, Any]:
    value = parent.get(name) if isinstance(parent, Mapping) else None
    if not isinstance(value, Mapping):
        raise ValueError(f"config: {prefix}{name} is missing or not an object")
    return value


def _read(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    """Build the dataclass `cls` from the fields of `values` that it knows, checking types."""
    hints = get_type_hints(cls)
    read = {}
    for field in dataclasses.fields(cls):
        if field.name in values:
            read[field.name] = _typed(values[field.name], hints[field.name], prefix + field.name)
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"config: {prefix}{field.name} is missing")
    return cls(**read)


def _typed(value: Any, expected: Any, name: str) -> Any:
    if expected == tuple[int, ...]:
        if isinstance(value, list | tuple) and all(type(item) is int for item in value):
            return tuple(value)
        raise ValueError(f"config: {name} must be a list of integers, not {value!r}")
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise ValueError(f"config: {name} must be {expected.__name__}, not {value!r}")
    return value


def _check_quantization(quantization: Any) -> None:
    """Only MXFP4 in groups of 32 can be read; anything else would be decoded wrongly without a sign."""
    prefix = "config: text_config.quantization_config."
    if not isinstance(quantization, Mapping) or quantization.get("format") != _QUANTIZATION["format"]:
        raise ValueError(f"{prefix}format must be {_QUANTIZATION['format']!r}")
    groups = quantization.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or (weights.get("num_bits"), weights.get("group_size")) != (
            4,
            MXFP4_GROUP,
        ):
            raise ValueError(
                f"{prefix}config_groups.{name}.weights must have num_bits 4 and group_size {MXFP4_GROUP}"
            )


def _validate(c: Config) -> None:
    linear = c.linear_attn_config

    def require(holds: bool, field: str, why: str) -> None:
        if not holds:
            raise ValueError(f"config: text_config.{field} {why}")

    for part, prefix in ((c, ""), (linear, "linear_attn_config.")):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if type(value) is int and not field.name.endswith(("_token_id", "_replace", "_predict_layers")):
                require(value > 0, prefix + field.name, f"must be positive, not {value}")
    for name, needed in _REQUIRED_VALUES.items():
        value = getattr(c, name)
        require(value == needed, name, f"must be {needed!r} for this model, not {value!r}")

    require(linear.use_full_rank_gate, "linear_attn_config.use_full_rank_gate", "must be true for this model")
    require(
        linear.gate_lower_bound < 0,
        "linear_attn_config.gate_lower_bound",
        f"must be negative, not {linear.gate_lower_bound}",
    )
    layers = sorted((*linear.kda_layers, *linear.full_attn_layers))
    require(
        layers == list(range(1, c.num_hidden_layers + 1)),
        "linear_attn_config.kda_layers",
        f"and full_attn_layers must together name each layer 1..{c.num_hidden_layers} once (1-based)",
    )
    require(c.first_k_dense_replace >= 0, "first_k_dense_replace", "must not be negative")
    require(
        c.num_key_value_heads == c.num_attention_heads,
        "num_key_value_heads",
        "must equal num_attention_heads in MLA",
    )
    require(
        c.num_experts_per_token <= c.num_experts,
        "num_experts_per_token",
        f"must not exceed num_experts ({c.num_experts})",
    )
    for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
        value = getattr(c, name)
        require(
            value % MXFP4_GROUP == 0,
            name,
            f"must be a multiple of the MXFP4 group {MXFP4_GROUP}, not {value}",
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(c, name)
        require(
            0 <= value < c.vocab_size, name, f"must lie in the vocabulary [0, {c.vocab_size}), not {value}"
        )
    for name in ("rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta"):
        value = getattr(c, name)
        require(value > 0, name, f"must be positive, not {value}")
