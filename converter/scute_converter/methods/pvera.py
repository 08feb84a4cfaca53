"""PVeRA: a VeRA whose inner vector is a distribution; served is its mean, as PEFT does unless it samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.methods.vera import LIMITS, VeraConfig, convert_projected
from scute_converter.registry import Conversion, Variant, register


@dataclass(frozen=True, kw_only=True)
class PveraConfig(VeraConfig):
    """PEFT's ``PveraConfig``. The rank is that of the tensors."""

    irrelevant = frozenset({"d_initial", "generator_seed", "init_weights", "pvera_dropout", "r"})
    refused: ClassVar[Mapping[str, str]] = {
        "sample_at_inference": "true: every answer is a random sample, which is not served (the mean is)"
    }


VARIANTS = (Variant("PVeRA", "0.19", "d e", limits=f"no sample_at_inference; {LIMITS}"),)


@register("PVERA", prefix="pvera_", config=PveraConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: PveraConfig, base: Base) -> Conversion:
    """``y = x W + b0 + ((x pvera_A[:r, :in]^T * lambda_d[:r]) pvera_B[:out]^T) * lambda_b`` (``peft.tuners.pvera``).

    ``pvera_A (2 r, in_max)`` and ``lambda_d (2 r)``: the second halves give the logarithm of the variance.
    """
    return convert_projected(checkpoint, config, base, "PVeRA", "pvera", halves=2)
