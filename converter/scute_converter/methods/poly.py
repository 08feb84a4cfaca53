"""Poly: a trained mixture of LoRAs for each task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.normal_form import NormalForm, Pair
from scute_converter.registry import Conversion, Variant, register

# PEFT divides by the sum of the weights plus this.
_EPSILON = 1e-12
_LOGITS = "poly_router.module_logits"


@dataclass(frozen=True, kw_only=True)
class PolyConfig(MethodConfig):
    """PEFT's ``PolyConfig``. The numbers of splits and skills, and the rank, are those of the tensors."""

    irrelevant = frozenset({"init_weights", "n_skills", "n_splits", "n_tasks", "r"})

    poly_type: Literal["poly"] = "poly"


VARIANTS = (Variant("Poly", "0.8", "A B", limits="of one task (n_tasks=1)"),)


@register("POLY", prefix="poly_", config=PolyConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: PolyConfig, base: Base) -> Conversion:
    """``y = x W + b0 + (x A) B / r`` for the one task (``peft.tuners.poly.layer.Linear``).

    Split ``q`` of the rows of ``A``, and of the columns of ``B``, is the sum over skills ``s`` of
    ``w[q, s] * poly_lora_A[q, s]``, and of ``poly_lora_B`` alike. ``w``: the sigmoids of the task's logits, divided by
    their sum over the skills (``PolyRouter`` in eval mode).
    """
    modules = checkpoint.modules("poly_lora_A", "poly_lora_B", _LOGITS)
    return Conversion("Poly", checkpoint.each(modules, lambda module: _convert_module(checkpoint, module)))


def _convert_module(checkpoint: Checkpoint, module: str) -> NormalForm:
    skills_a = checkpoint.take(module, "poly_lora_A", dims=4).double()
    skills_b = checkpoint.take(module, "poly_lora_B", dims=4).double()
    logits = checkpoint.take(module, _LOGITS, dims=2).double()
    splits, skills, _, rank = skills_a.shape
    if skills_b.shape[:3] != (splits, skills, rank):
        problem = f"{tuple(skills_b.shape)} does not fit poly_lora_A {tuple(skills_a.shape)}"
        raise checkpoint.error(module, "poly_lora_B", problem, "save both from one checkpoint")
    tasks, weights = logits.shape
    if weights != splits * skills:
        problem = f"{tuple(logits.shape)} does not fit poly_lora_A {tuple(skills_a.shape)}"
        raise checkpoint.error(module, _LOGITS, problem, "save both from one checkpoint")
    if tasks != 1:
        problem = f"is for {tasks} tasks, among which every request would choose"
        raise checkpoint.error(module, _LOGITS, problem, "keep the row of one task, in an adapter for each task")
    mixture = torch.sigmoid(logits).view(splits, skills)
    mixture = mixture / (mixture.sum(dim=1, keepdim=True) + _EPSILON)
    a = torch.einsum("qs,qsir->rqi", mixture, skills_a).flatten(1)
    b = torch.einsum("qs,qsro->rqo", mixture, skills_b).flatten(1) / rank
    pair = Pair(checkpoint.converted(module, "poly_lora_A", a), checkpoint.converted(module, "poly_lora_B", b))
    return NormalForm(a.shape[1], b.shape[1], pair=pair)
