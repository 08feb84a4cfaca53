"""PEFT checkpoints to the normal form that the kernels serve."""

from scute_converter.base import BaseShapes
from scute_converter.errors import AdapterError
from scute_converter.loading import load, load_tensors
from scute_converter.normal_form import (
    Adapter,
    Basis,
    Bias,
    Deferred,
    Fold,
    NormalForm,
    Pair,
    Rotation,
    SharedPair,
)
from scute_converter.sharding import shard

__all__ = [
    "Adapter",
    "AdapterError",
    "BaseShapes",
    "Basis",
    "Bias",
    "Deferred",
    "Fold",
    "NormalForm",
    "Pair",
    "Rotation",
    "SharedPair",
    "load",
    "load_tensors",
    "shard",
]
