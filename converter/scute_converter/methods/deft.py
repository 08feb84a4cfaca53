"""DEFT: a subspace of the outputs is projected out of the weight and filled anew; PaRa only projects it out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.double import product
from scute_converter.errors import AdapterError
from scute_converter.normal_form import NormalForm
from scute_converter.refactor import folded
from scute_converter.registry import Conversion, Variant, register

# Cosine between a trained row of the injection and its initial value that only another sign of its direction explains.
_REVERSED = -0.5


@dataclass(frozen=True, kw_only=True)
class DeftConfig(MethodConfig):
    """PEFT's ``DeftConfig``."""

    irrelevant = frozenset({"deft_dropout", "init_scale", "init_weights"})

    r: int = 8
    alpha: float | None = None
    decomposition_method: Literal["relu", "qr"] = "relu"
    para: bool = False


VARIANTS = (
    Variant("DEFT", "0.20", "A B", base_weight=True, limits="qr: if QR has the same signs here as in training"),
    Variant("PaRa", "0.20", "A B", base_weight=True),
)


@register("DEFT", prefix="deft_", config=DeftConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: DeftConfig, base: Base) -> Conversion:
    """``y = x W + b0 + (x (scale * R^T - W right)) left^T`` with ``R = deft_R``, 0 for PaRa.

    ``left`` and ``right`` are made of ``P = deft_P``: ``P`` and ``relu(P)``, or the ``Q`` of its QR decomposition
    twice (``peft.tuners.deft.layer.DeftLinear``).
    """
    forms = checkpoint.each(checkpoint.modules("deft_P"), lambda module: _convert_module(checkpoint, config, module))
    return Conversion("PaRa" if config.para else "DEFT", forms)


def _convert_module(checkpoint: Checkpoint, config: DeftConfig, module: str) -> NormalForm:
    p = checkpoint.take(module, "deft_P", dims=2)
    out_features, rank = p.shape
    if rank != (expected := min(config.r, out_features)):
        problem = f"has rank {rank}, but the config says {expected}"
        raise checkpoint.error(module, "deft_P", problem, "correct r in adapter_config.json")
    orthogonal = config.decomposition_method == "qr"
    if orthogonal:
        # In fp32 by Householder reflections, as PEFT: the signs of the columns count, since R was trained with them.
        left = right = torch.linalg.qr(p).Q.contiguous()
    else:
        left, right = p, p.relu()
    if config.para:
        return NormalForm(0, out_features, fold=Projection(left, right, None, orthogonal, checkpoint.adapter, module))

    injection = checkpoint.take(module, "deft_R", dims=2)
    if injection.shape[0] != rank:
        problem = f"{tuple(injection.shape)} does not fit deft_P {tuple(p.shape)}"
        raise checkpoint.error(module, "deft_R", problem, "save both from one checkpoint")
    scale = config.alpha / rank if config.alpha else 1.0
    injection = checkpoint.converted(module, "deft_R", injection.double() * scale)
    fold = Projection(left, right, injection, orthogonal, checkpoint.adapter, module)
    return NormalForm(injection.shape[1], out_features, fold=fold)


@dataclass(frozen=True)
class Projection:
    """``left``, ``right``: ``(out, r)``. ``injection``: ``(r, in)``, scaled, or None. ``orthogonal``: by QR.

    ``adapter`` and ``module`` are for messages only.
    """

    left: torch.Tensor
    right: torch.Tensor
    injection: torch.Tensor | None
    orthogonal: bool
    adapter: str = field(compare=False)
    module: str = field(compare=False)

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    def fold(self, form: NormalForm, weight: torch.Tensor) -> NormalForm:
        """``A = injection^T - W right`` and ``B = left^T``. In a fresh adapter the two terms of ``A`` are equal."""
        removed = product(weight.T, self.right).T
        injected = torch.zeros_like(removed) if self.injection is None else self.injection.to(removed)
        if self.orthogonal:
            self._check_signs(injected, removed)
        pair = folded(injected - removed, self.left.T.to(removed), self.adapter, self.module)
        return replace(form, in_features=weight.shape[1], pair=pair, fold=None)

    def _check_signs(self, injected: torch.Tensor, removed: torch.Tensor) -> None:
        """Training starts with ``injected == removed``. The signs of QR are a convention of the library that computes
        it, and a row that was trained with the other one points the other way."""
        if (torch.cosine_similarity(injected, removed) < _REVERSED).any():
            problem = "points against what is projected out, as if QR had other signs where it was trained"
            remedy = "train with decomposition_method='relu', whose result has no signs to choose"
            raise AdapterError(self.adapter, f"tensor {self.module}.deft_R", problem, remedy)
