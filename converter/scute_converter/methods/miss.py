"""MiSS and its predecessor Bone: the input features are summed in ``r`` groups, and a trained block maps the sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.errors import AdapterError, did_you_mean
from scute_converter.normal_form import NormalForm, Pair
from scute_converter.registry import Conversion, Variant, register


@dataclass(frozen=True, kw_only=True)
class BoneConfig(MethodConfig):
    """PEFT's ``BoneConfig``. The rank is that of the tensors; ``init_weights`` chooses the formula."""

    irrelevant = frozenset({"r"})

    init_weights: bool | str = True


@dataclass(frozen=True, kw_only=True)
class MissConfig(BoneConfig):
    """PEFT's ``MissConfig``."""

    irrelevant = frozenset({"miss_dropout", "r"})

    mini_r: int = 1


_LIMITS = "needs the base model to be known; init_weights='bat' is refused"


@register("MISS", prefix="miss_", config=MissConfig, variants=(Variant("MiSS", "0.17", "A B", limits=_LIMITS),))
def convert(checkpoint: Checkpoint, config: MissConfig, base: Base) -> Conversion:
    """``y = x W + b0 + (x F) miss_block`` with ``F (in, r)`` of zeros and ones, ``F[i, j] = 1`` where ``i mod r = j``
    (``peft.tuners.miss.layer.MissLinear``).

    With ``init_weights="mini"`` the file holds ``(r, mini_r)``, which is repeated along the output features.
    """
    _check_formula(checkpoint.adapter, config, known=(True, False, "mini"))
    mini_r = config.mini_r if config.init_weights == "mini" else None
    modules = checkpoint.modules("miss_block")
    forms = checkpoint.each(modules, lambda module: _convert_module(checkpoint, base, module, "miss_block", mini_r))
    return Conversion("MiSS", forms)


@register("BONE", prefix="bone_", config=BoneConfig, variants=(Variant("Bone", "0.14 to 0.18", "A B", limits=_LIMITS),))
def convert_bone(checkpoint: Checkpoint, config: BoneConfig, base: Base) -> Conversion:
    """The same with ``bone_block`` (``peft.tuners.bone.layer.BoneLinear``, which PEFT 0.19 removed)."""
    _check_formula(checkpoint.adapter, config, known=(True, False))
    modules = checkpoint.modules("bone_block")
    forms = checkpoint.each(modules, lambda module: _convert_module(checkpoint, base, module, "bone_block", None))
    return Conversion("Bone", forms)


def _check_formula(adapter: str, config: BoneConfig, known: tuple[bool | str, ...]) -> None:
    if config.init_weights in known:
        return
    where = "field init_weights of adapter_config.json"
    if config.init_weights == "bat":
        problem = "'bat' multiplies the base weight with the blocks, a change of full rank"
        raise AdapterError(adapter, where, problem, "train with init_weights=true")
    problem = f"{config.init_weights!r} is not known, and it chooses the formula"
    problem += did_you_mean(str(config.init_weights), known)
    raise AdapterError(adapter, where, problem, "correct it")


def _convert_module(checkpoint: Checkpoint, base: Base, module: str, suffix: str, mini_r: int | None) -> NormalForm:
    if module not in base.shapes:
        problem = "does not say how many input features there are, which needs the shape of the base layer"
        raise checkpoint.error(module, suffix, problem, "load it for a base model that has this linear layer")
    out_features, in_features = base.shapes[module]
    block = checkpoint.take(module, suffix, dims=2)
    rank, columns = block.shape
    expected = out_features if mini_r is None else mini_r
    if columns != expected or out_features % columns:
        problem = f"has {columns} columns instead of {expected} for {out_features} output features"
        raise checkpoint.error(module, suffix, problem, "use the base model and the mini_r that it was trained with")
    checkpoint.reserve(module, suffix, rank, in_features)
    checkpoint.reserve(module, suffix, rank, out_features)
    a = (torch.arange(in_features) % rank == torch.arange(rank)[:, None]).float()
    return NormalForm(in_features, out_features, pair=Pair(a, block.repeat(1, out_features // columns)))
