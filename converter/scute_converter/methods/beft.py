"""BEFT: a trained shift of the output of a layer, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.normal_form import Bias, NormalForm
from scute_converter.registry import Conversion, Variant, register


@dataclass(frozen=True, kw_only=True)
class BeftConfig(MethodConfig):
    """PEFT's ``BeftConfig``."""

    irrelevant = frozenset({"init_weights"})


@register("BEFT", prefix="beft_", config=BeftConfig, variants=(Variant("BEFT", "0.20", "b"),))
def convert(checkpoint: Checkpoint, config: BeftConfig, base: Base) -> Conversion:
    """``y = x W + b0 + beft_bias`` with ``beft_bias (1, out)`` (``peft.tuners.beft.layer.Linear``)."""
    forms = {}
    for module in checkpoint.modules("beft_bias"):
        shift = checkpoint.take(module, "beft_bias", dims=2)
        if shift.shape[0] != 1:
            problem = f"has shape {tuple(shift.shape)}, not (1, out)"
            raise checkpoint.error(module, "beft_bias", problem, "save the adapter again with PEFT")
        forms[module] = NormalForm(0, shift.shape[1], bias=Bias(add=shift.flatten()))
    return Conversion("BEFT", forms)
