"""The K3 text model as mathematics: plain PyTorch, dtype and device by argument (float64 or float32)."""

from .config import Config, config_names, load_config
from .model import Cache, Layer, Model, Observation
from .rounding import EXACT, Rounding
from .synthetic import synthesise
from .tensors import TensorSpec, expected_tensors

__all__ = [
    "EXACT",
    "Cache",
    "Config",
    "Layer",
    "Model",
    "Observation",
    "Rounding",
    "TensorSpec",
    "config_names",
    "expected_tensors",
    "load_config",
    "synthesise",
]
