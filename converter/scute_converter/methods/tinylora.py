"""TinyLoRA: a few trained numbers mix random matrices between the frozen singular vectors of the base weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.errors import AdapterError
from scute_converter.normal_form import NormalForm, Pair
from scute_converter.registry import Conversion, Variant, register
from scute_converter.targets import selected_layers

_VECTOR = "tinylora_v."
_REMEDY = "save the adapter with save_projection=true; with weight_tying=1 it then needs no base model"


@dataclass(frozen=True, kw_only=True)
class TinyLoraConfig(MethodConfig):
    """PEFT's ``TinyLoraConfig``. All sizes are those of the tensors."""

    irrelevant = frozenset({"init_v_bound", "init_weights", "r", "tinylora_dropout", "u"})

    projection_seed: int = 42
    save_projection: bool = True
    weight_tying: float = 0.0


VARIANTS = (
    Variant(
        "TinyLoRA",
        "0.19",
        "A B",
        limits="not on embeddings; needs the base model to be known unless weight_tying=1 and save_projection=true",
    ),
)


@register("TINYLORA", prefix="tinylora_", config=TinyLoraConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: TinyLoraConfig, base: Base) -> Conversion:
    """``y = x W + b0 + x tinylora_A^T R^T tinylora_B^T`` with ``R = sum_i v[i] tinylora_P[i]``, folded into ``B``.

    A group of successive layers shares one ``v`` (``peft.tuners.tinylora.layer.Linear``).
    """
    if not 0 <= config.weight_tying <= 1:
        problem = f"{config.weight_tying} is not within 0 and 1"
        raise AdapterError(checkpoint.adapter, "field weight_tying of adapter_config.json", problem, "correct it")
    vectors = {
        key.suffix: checkpoint.take("", key.suffix, dims=1)
        for key in checkpoint.left()
        if not key.module and key.suffix.startswith(_VECTOR)
    }
    modules = checkpoint.modules("tinylora_A", "tinylora_B")
    drawn = not config.save_projection and not checkpoint.modules("tinylora_P")
    # PEFT: TinyLoraModel._create_and_replace
    groups = max(1, round(len(modules) * (1.0 - config.weight_tying)))
    size = max(1, len(modules) // groups)
    if groups > 1 or drawn:
        modules = _in_order_of_the_base(checkpoint.adapter, config, base, modules)
    if drawn and base.dtype is None:
        problem = "false: the projections must be drawn again, which needs the type of the base model"
        raise AdapterError(checkpoint.adapter, "field save_projection of adapter_config.json", problem, _REMEDY)

    forms, used = {}, set()
    for index, module in enumerate(modules):
        name = f"{_VECTOR}{min(index // size, groups - 1)}"
        if name not in vectors:
            raise checkpoint.error("", name, "is missing", "save the whole adapter again")
        used.add(name)
        forms[module] = _convert_module(checkpoint, config, base, module, vectors[name], index if drawn else None)
    if unused := sorted(vectors.keys() - used):
        problem = f"belongs to none of the {len(modules)} layers of the file"
        raise checkpoint.error("", unused[0], problem, "save the whole adapter again, with its weight_tying")
    notes = ()
    if drawn and forms:
        note = f"projections drawn again and rounded to {base.dtype}: exact if the base had this type in training"
        notes = (f"{note} (save_projection=true is always exact)",)
    return Conversion("TinyLoRA", forms, notes=notes)


def _convert_module(
    checkpoint: Checkpoint, config: TinyLoraConfig, base: Base, module: str, v: torch.Tensor, drawn: int | None
) -> NormalForm:
    """``drawn``: the index of the layer if its projections are drawn, else None."""
    a = checkpoint.take(module, "tinylora_A", dims=2, trained=False)
    b = checkpoint.take(module, "tinylora_B", dims=2, trained=False)
    rank, shape = a.shape[0], (v.shape[0], a.shape[0], a.shape[0])
    if b.shape[1] != rank:
        problem = f"{tuple(b.shape)} does not fit tinylora_A {tuple(a.shape)}"
        raise checkpoint.error(module, "tinylora_B", problem, "save both from one checkpoint")
    if base.shapes.get(module, (b.shape[0], a.shape[1])) != (b.shape[0], a.shape[1]):
        problem = f"factors for {a.shape[1]} inputs and {b.shape[0]} outputs do not fit the base layer"
        raise checkpoint.error(module, "tinylora_A", problem, "use the base model that the adapter is for")
    if drawn is None:
        p = checkpoint.take(module, "tinylora_P", dims=3, trained=False)
        if p.shape != shape:
            problem = f"{tuple(p.shape)} does not fit a vector of {v.shape[0]} and rank {rank}"
            raise checkpoint.error(module, "tinylora_P", problem, "save both from one checkpoint")
    else:  # PEFT: TinyLoraLayer._init_projection
        assert base.dtype is not None
        checkpoint.reserve(module, "tinylora_P", *shape)
        generator = torch.Generator("cpu").manual_seed(config.projection_seed + drawn)
        p = torch.normal(mean=0.0, std=1.0 / rank**0.5, size=shape, generator=generator).to(base.dtype).float()
    r = torch.einsum("i,ijk->jk", v.double(), p.double())
    pair = Pair(a, checkpoint.converted(module, "tinylora_B", (b.double() @ r).T))
    return NormalForm(a.shape[1], b.shape[0], pair=pair)


def _in_order_of_the_base(adapter: str, config: TinyLoraConfig, base: Base, modules: Sequence[str]) -> list[str]:
    """The modules of the file in the order in which PEFT counts them."""
    if not base.shapes:
        problem = "the layers must be counted in the order of the base model, which is not known"
        raise AdapterError(adapter, "weights", problem, _REMEDY)
    selected = list(selected_layers(adapter, config, base, _REMEDY))
    if odd := sorted(set(selected) ^ set(modules)):
        if odd[0] in selected:
            problem = f"{odd[0]} has no tensors, but the config selects it"
        else:
            problem = f"{odd[0]} has tensors, but is no linear layer of the base model that the config selects"
        raise AdapterError(adapter, "weights", problem, "use the base model that the adapter is for")
    return selected
