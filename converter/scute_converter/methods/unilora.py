"""UniLoRA: a LoRA whose factors of all layers are filled with the numbers of one trained vector, at random places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.errors import AdapterError
from scute_converter.normal_form import NormalForm, Pair
from scute_converter.registry import Conversion, Variant, register
from scute_converter.targets import selected_layers

_VECTOR = "unilora_theta_d"
_REMEDY = "save the adapter with save_indices=true"


@dataclass(frozen=True, kw_only=True)
class UniLoraConfig(MethodConfig):
    """PEFT's ``UniLoraConfig``."""

    irrelevant = frozenset({"init_theta_d_bound", "init_weights", "unilora_dropout"})

    proj_seed: int = 42
    r: int = 4
    save_indices: bool = False
    theta_d_length: int = 256


VARIANTS = (Variant("UniLoRA", "0.20", "A B", limits="save_indices=false needs the base model to be known"),)


@register("UNILORA", prefix="unilora_", config=UniLoraConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: UniLoraConfig, base: Base) -> Conversion:
    """``y = x W + b0 + x A^T B^T`` with ``A = theta_d[indices_A] * scales_A``, and ``B`` alike
    (``peft.tuners.unilora.layer.Linear``).
    """
    theta = checkpoint.take("", _VECTOR, dims=1)
    if theta.shape[0] != config.theta_d_length:
        problem = f"has {theta.shape[0]} elements, but the config says {config.theta_d_length}"
        raise checkpoint.error("", _VECTOR, problem, "correct theta_d_length in adapter_config.json")
    modules = checkpoint.modules("unilora_indices_A", "unilora_indices_B")
    if config.save_indices and not modules:
        where = "field save_indices of adapter_config.json"
        raise AdapterError(checkpoint.adapter, where, "true, but the file holds no indices", "save the adapter again")
    if modules:
        return Conversion("UniLoRA", checkpoint.each(modules, lambda module: _of_stored(checkpoint, module, theta)))
    note = f"indices drawn again and their scales rounded to {base.dtype}: exact if the base had this type in training"
    return Conversion("UniLoRA", _of_drawn(checkpoint, config, base, theta), notes=(f"{note} ({_REMEDY})",))


def _of_stored(checkpoint: Checkpoint, module: str, theta: torch.Tensor) -> NormalForm:
    def factor(side: str) -> torch.Tensor:
        name = f"unilora_indices_{side}"
        indices = checkpoint.take_integers(module, name, dims=2)
        scales = checkpoint.take(module, f"unilora_scales_{side}", dims=2, trained=False)
        if indices.shape != scales.shape:
            problem = f"{tuple(indices.shape)} does not fit unilora_scales_{side} {tuple(scales.shape)}"
            raise checkpoint.error(module, name, problem, "save both from one checkpoint")
        if indices.min() < 0 or indices.max() >= theta.shape[0]:
            problem = f"has indices that are not within the {theta.shape[0]} elements of {_VECTOR}"
            raise checkpoint.error(module, name, problem, "save both from one checkpoint")
        return checkpoint.converted(module, name, theta[indices].double() * scales)

    a, b = factor("A"), factor("B").T.contiguous()
    if a.shape[0] != b.shape[0]:
        problem = f"has rank {b.shape[0]}, and unilora_indices_A {a.shape[0]}"
        raise checkpoint.error(module, "unilora_indices_B", problem, "save both from one checkpoint")
    return NormalForm(a.shape[1], b.shape[1], pair=Pair(a, b))


def _of_drawn(checkpoint: Checkpoint, config: UniLoraConfig, base: Base, theta: torch.Tensor) -> dict[str, NormalForm]:
    """All layers that the config selects, in the order of the base model, with indices as PEFT draws them from
    ``proj_seed`` (``UniLoraModel.generate_index``) and scales of one over the root of how often an index occurs.

    PEFT rounds the scales to the type of the base weights.
    """
    adapter = checkpoint.adapter
    if not base.shapes or base.dtype is None:
        problem = "false: the indices must be drawn again, which needs the layers and the type of the base model"
        raise AdapterError(adapter, "field save_indices of adapter_config.json", problem, _REMEDY)
    layers = selected_layers(adapter, config, base, _REMEDY)
    most = max(max(shape) for shape in layers.values())
    if not 1 <= config.r <= most:
        problem = f"{config.r} is not within 1 and {most}, the most features of a layer"
        raise AdapterError(adapter, "field r of adapter_config.json", problem, "correct it")
    if config.proj_seed < 0:
        raise AdapterError(adapter, "field proj_seed of adapter_config.json", "is negative", "correct it")

    elements, places = theta.shape[0], config.r * sum(map(sum, layers.values()))
    for out_features, in_features in layers.values():
        checkpoint.reserve("", _VECTOR, config.r, in_features + out_features)
    generator = np.random.default_rng(config.proj_seed)
    indices = np.repeat(np.arange(elements), places // elements)
    if places % elements:
        indices = np.concatenate([indices, generator.choice(elements, size=places % elements, replace=False)])
    generator.shuffle(indices)
    stream = torch.from_numpy(indices)
    scales = stream.bincount(minlength=elements).float().rsqrt().to(base.dtype).float()
    scaled = (theta.double() * scales)[stream].float()  # an element that is never used has an infinite scale

    forms, start = {}, 0
    for module, (out_features, in_features) in layers.items():
        middle, end = start + config.r * in_features, start + config.r * (in_features + out_features)
        a = scaled[start:middle].view(config.r, in_features)
        b = scaled[middle:end].view(out_features, config.r)
        forms[module] = NormalForm(in_features, out_features, pair=Pair(a.clone(), b.T.contiguous()))
        start = end
    return forms
