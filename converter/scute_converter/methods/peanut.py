"""PEANuT: a small neural network over the rows of the base weight gives its change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.nn import functional

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.double import product
from scute_converter.errors import AdapterError, did_you_mean
from scute_converter.files import CONFIG
from scute_converter.normal_form import NormalForm
from scute_converter.refactor import folded
from scute_converter.registry import Conversion, Variant, register

_gelu_tanh = partial(functional.gelu, approximate="tanh")

# By their names in transformers.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "leaky_relu": functional.leaky_relu,
    "mish": functional.mish,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, kw_only=True)
class PeanutConfig(MethodConfig):
    """PEFT's ``PeanutConfig``. The rank is that of the tensors."""

    irrelevant = frozenset({"init_weights", "r"})

    depth: int = 0
    act_fn: str = "relu"
    scaling: float = 1.0


VARIANTS = (Variant("PEANuT", "0.19", "A B", base_weight=True, limits=f"act_fn is one of {', '.join(ACTIVATIONS)}"),)


@register("PEANUT", prefix="peanut_", config=PeanutConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: PeanutConfig, base: Base) -> Conversion:
    """``y = x W + b0 + scaling * (x Z) peanut_B^T`` with ``Z = network(W)`` (``peft.tuners.peanut.layer.Linear``)."""
    if config.act_fn not in ACTIVATIONS:
        problem = f"{config.act_fn!r} is not served{did_you_mean(config.act_fn, ACTIVATIONS)}"
        remedy = f"served are {', '.join(ACTIVATIONS)}"
        raise AdapterError(checkpoint.adapter, f"field act_fn of {CONFIG}", problem, remedy)
    modules = checkpoint.modules("peanut_A.weight")
    forms = checkpoint.each(modules, lambda module: _convert_module(checkpoint, config, module))
    return Conversion("PEANuT", forms)


def _convert_module(checkpoint: Checkpoint, config: PeanutConfig, module: str) -> NormalForm:
    a = checkpoint.take(module, "peanut_A.weight", dims=2)
    b = checkpoint.take(module, "peanut_B.weight", dims=2)
    rank, out_features = a.shape
    if b.shape != (out_features, rank):
        problem = f"{tuple(b.shape)} does not fit peanut_A.weight {tuple(a.shape)}"
        raise checkpoint.error(module, "peanut_B.weight", problem, "save both from one checkpoint")
    network = Network(
        entry=a,
        encoders=_layers(checkpoint, config, module, "peanut_encoders", rank),
        decoders=_layers(checkpoint, config, module, "peanut_decoders", rank),
        exit=checkpoint.converted(module, "peanut_B.weight", b.T.double() * config.scaling),
        act_fn=config.act_fn,
        adapter=checkpoint.adapter,
        module=module,
    )
    return NormalForm(0, out_features, fold=network)


def _layers(checkpoint: Checkpoint, config: PeanutConfig, module: str, name: str, rank: int) -> torch.Tensor:
    """``(depth, r, r)``."""
    layers = torch.empty(0, rank, rank)
    for number in range(config.depth):
        suffix = f"{name}.{number}.weight"
        layer = checkpoint.take(module, suffix, dims=2)
        if layer.shape != (rank, rank):
            problem = f"{tuple(layer.shape)} does not fit rank {rank}"
            raise checkpoint.error(module, suffix, problem, "save all from one checkpoint")
        layers = torch.cat([layers, layer[None]])
    return layers


@dataclass(frozen=True)
class Network:
    """``entry (r, out)``, ``encoders`` and ``decoders (depth, r, r)``, ``exit (r, out)``, scaled: ``peanut_A``, ...,
    ``peanut_B`` transposed. ``adapter`` and ``module`` are for messages only."""

    entry: torch.Tensor
    encoders: torch.Tensor
    decoders: torch.Tensor
    exit: torch.Tensor
    act_fn: str
    adapter: str = field(compare=False)
    module: str = field(compare=False)

    @property
    def rank(self) -> int:
        return self.entry.shape[0]

    def fold(self, form: NormalForm, weight: torch.Tensor) -> NormalForm:
        """``A = Z (in, r)``: the encoders keep what they read, and the decoders add it in the reverse order."""
        activation = ACTIVATIONS[self.act_fn]
        z = activation(product(weight.T, self.entry.T))
        kept = []
        for encoder in self.encoders.to(z):
            kept.append(z)
            z = activation(z @ encoder.T)
        for decoder in self.decoders.to(z):
            z = activation(z @ decoder.T) + kept.pop()
        pair = folded(z.T, self.exit.to(z), self.adapter, self.module)
        return replace(form, in_features=weight.shape[1], pair=pair, fold=None)
