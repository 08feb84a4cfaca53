"""LoHa: the element-wise product of two low-rank matrices, which has the product of their ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.normal_form import NormalForm, Pair
from scute_converter.patterns import lookup
from scute_converter.registry import Conversion, Variant, register


@dataclass(frozen=True, kw_only=True)
class LoHaConfig(MethodConfig):
    """PEFT's ``LoHaConfig``."""

    irrelevant = frozenset({"init_weights", "module_dropout", "rank_dropout", "use_effective_conv2d"})

    r: int = 8
    alpha: float = 8
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)


VARIANTS = (Variant("LoHa", "0.6", "A B", limits="of rank r * r"),)


@register("LOHA", prefix="hada_", config=LoHaConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: LoHaConfig, base: Base) -> Conversion:
    """``y = x W + b0 + x ((w1_a w1_b) * (w2_a w2_b))^T * alpha / r`` (``peft.tuners.loha.layer.Linear``).

    Component ``(p, q)`` of the pair is ``w1_b[p] * w2_b[q]`` and ``w1_a[:, p] * w2_a[:, q] * alpha / r``.
    """
    modules = checkpoint.modules("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    return Conversion("LoHa", checkpoint.each(modules, lambda module: _convert_module(checkpoint, config, module)))


def _convert_module(checkpoint: Checkpoint, config: LoHaConfig, module: str) -> NormalForm:
    w1_a, w1_b, w2_a, w2_b = (
        checkpoint.take(module, f"hada_{name}", dims=2).double() for name in ("w1_a", "w1_b", "w2_a", "w2_b")
    )
    rank = w1_b.shape[0]
    if w1_a.shape != w2_a.shape or w1_b.shape != w2_b.shape or w1_a.shape[1] != rank:
        shapes = ", ".join(str(tuple(factor.shape)) for factor in (w1_a, w1_b, w2_a, w2_b))
        problem = f"w1_a, w1_b, w2_a and w2_b of {shapes} do not fit each other"
        raise checkpoint.error(module, "hada_w1_a", problem, "save all four from one checkpoint")
    if rank != (expected := lookup(checkpoint.adapter, "rank_pattern", config.rank_pattern, module, config.r)):
        # The scale is alpha / r: with two candidates for r it is not known.
        problem = f"has rank {rank}, but the config says {expected}"
        raise checkpoint.error(module, "hada_w1_b", problem, "correct r or rank_pattern in adapter_config.json")
    alpha = lookup(checkpoint.adapter, "alpha_pattern", config.alpha_pattern, module, config.alpha)
    checkpoint.reserve(module, "hada_w1_b", rank * rank, w1_b.shape[1])
    checkpoint.reserve(module, "hada_w1_a", rank * rank, w1_a.shape[0])
    a = torch.einsum("pi,qi->pqi", w1_b, w2_b).flatten(0, 1)
    b = torch.einsum("op,oq->pqo", w1_a, w2_a).flatten(0, 1) * (alpha / rank)
    pair = Pair(checkpoint.converted(module, "hada_w1_b", a), checkpoint.converted(module, "hada_w1_a", b))
    return NormalForm(a.shape[1], b.shape[1], pair=pair)
