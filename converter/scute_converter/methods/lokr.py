"""LoKr: the Kronecker product of two matrices, of which at least one is factored."""

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
class LoKrConfig(MethodConfig):
    """PEFT's ``LoKrConfig``. Which matrices are factored, and their shapes, is seen in the tensors."""

    irrelevant = frozenset(
        {
            "decompose_both",
            "decompose_factor",
            "init_weights",
            "module_dropout",
            "rank_dropout",
            "rank_dropout_scale",
            "use_effective_conv2d",
        }
    )

    r: int = 8
    alpha: float = 8
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)


VARIANTS = (Variant("LoKr", "0.6", "A B", limits="w1 or w2 must be factored"),)
_PARAMETERS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


@register("LOKR", prefix="lokr_", config=LoKrConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: LoKrConfig, base: Base) -> Conversion:
    """``y = x W + b0 + x kron(w1, w2)^T * alpha / r`` (``peft.tuners.lokr.layer.Linear``), where ``w1`` or ``w2`` or
    both are products ``w_a w_b``.

    With ``w1 = l1 r1`` and ``w2 = l2 r2`` it is ``kron(l1, l2) kron(r1, r2)``, of the product of the inner dimensions.
    """
    forms, unscaled = {}, False
    for module in checkpoint.modules(*_PARAMETERS):
        forms[module], scale = _convert_module(checkpoint, config, module)
        unscaled |= scale != 1 and config.peft_version is None  # PEFT writes it since 0.18
    note = "no peft_version: served with the scale alpha / r, which PEFT up to 0.13 left out in training and inference"
    return Conversion("LoKr", forms, notes=(note,) if unscaled else ())


def _convert_module(checkpoint: Checkpoint, config: LoKrConfig, module: str) -> tuple[NormalForm, float]:
    if checkpoint.has(module, "lokr_w1") and checkpoint.has(module, "lokr_w2"):
        problem = "and lokr_w2 are both full matrices, whose Kronecker product has full rank and no low-rank form"
        remedy = "train with a smaller r (less than half of the larger dimension of lokr_w2)"
        raise checkpoint.error(module, "lokr_w1", problem, remedy)
    rank = lookup(checkpoint.adapter, "rank_pattern", config.rank_pattern, module, config.r)
    left1, right1 = _factors(checkpoint, module, "lokr_w1", rank)
    left2, right2 = _factors(checkpoint, module, "lokr_w2", rank)
    scale = lookup(checkpoint.adapter, "alpha_pattern", config.alpha_pattern, module, config.alpha) / rank
    inner = right1.shape[0] * right2.shape[0]
    checkpoint.reserve(module, "lokr_w1", inner, right1.shape[1] * right2.shape[1])
    checkpoint.reserve(module, "lokr_w2", inner, left1.shape[0] * left2.shape[0])
    a = torch.kron(right1, right2)
    b = torch.kron(left1, left2).T * scale
    pair = Pair(checkpoint.converted(module, "lokr_w1", a), checkpoint.converted(module, "lokr_w2", b))
    return NormalForm(a.shape[1], b.shape[1], pair=pair), scale


def _factors(checkpoint: Checkpoint, module: str, name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rows, k)`` and ``(k, columns)`` with the product ``w``, fp64: those of the file, or ``w`` and an identity if
    that makes ``k`` smaller."""
    if checkpoint.has(module, name):
        w = checkpoint.take(module, name, dims=2).double()
    else:
        left = checkpoint.take(module, f"{name}_a", dims=2).double()
        right = checkpoint.take(module, f"{name}_b", dims=2).double()
        if left.shape[1] != right.shape[0]:
            problem = f"{tuple(left.shape)} does not fit {name}_b {tuple(right.shape)}"
            raise checkpoint.error(module, f"{name}_a", problem, "save both from one checkpoint")
        if right.shape[0] != rank:
            # The scale is alpha / r: with two candidates for r it is not known.
            problem = f"has rank {right.shape[0]}, but the config says {rank}"
            raise checkpoint.error(module, f"{name}_b", problem, "correct r or rank_pattern in adapter_config.json")
        if rank <= min(left.shape[0], right.shape[1]):
            return left, right
        w = left @ right
    rows, columns = w.shape
    if rows <= columns:
        return torch.eye(rows, dtype=w.dtype), w
    return w, torch.eye(columns, dtype=w.dtype)
