"""HRA: the weight is reflected at learned directions of the input, one Householder reflection after the other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.double import product
from scute_converter.normal_form import NormalForm
from scute_converter.refactor import folded
from scute_converter.registry import Conversion, Variant, register

# PEFT orthogonalises in fp32: what is left of a column below this part of its length has a direction that is rounding
# noise to more than 1e-4, another one on every device.
_INDEPENDENT = 1e-3

# Squares of lengths within these are numbers of fp32.
_SHORTEST, _LONGEST = 1e-18, 1e18


@dataclass(frozen=True, kw_only=True)
class HRAConfig(MethodConfig):
    """PEFT's ``HRAConfig``. The rank is that of the tensors."""

    irrelevant = frozenset({"init_weights", "r"})

    apply_GS: bool = False


VARIANTS = (
    Variant("HRA", "0.12", "A B", base_weight=True, limits="with apply_GS the directions must be linearly independent"),
)


@register("HRA", prefix="hra_", config=HRAConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: HRAConfig, base: Base) -> Conversion:
    """``y = x H_{r-1} ... H_0 W + b0`` with ``H_i = I - 2 u_i^T u_i`` for the unit rows ``u_i`` of ``hra_u^T``; with
    ``apply_GS`` they are first made orthogonal (``peft.tuners.hra.layer.HRALinear``)."""
    forms = {}
    for module in checkpoint.modules("hra_u"):
        vectors = checkpoint.take(module, "hra_u", dims=2)
        _check_directions(checkpoint, config, module, vectors)
        reflections = Reflections(vectors, config.apply_GS, checkpoint.adapter, module)
        forms[module] = NormalForm(vectors.shape[0], 0, fold=reflections)
    return Conversion("HRA", forms)


def _check_directions(checkpoint: Checkpoint, config: HRAConfig, module: str, vectors: torch.Tensor) -> None:
    lengths = vectors.double().norm(dim=0)
    if not lengths.all():
        raise checkpoint.error(module, "hra_u", "has a column of length 0, which is no direction", "train it further")
    if lengths.min() < _SHORTEST or lengths.max() > _LONGEST:
        problem = (
            f"has a column of length {lengths.max():.3g} or {lengths.min():.3g}, by which PEFT cannot divide in fp32"
        )
        raise checkpoint.error(module, "hra_u", problem, "scale the column, whose length does not count")
    if not config.apply_GS:
        return
    size, rank = vectors.shape
    left = torch.linalg.qr(vectors.double() / lengths, mode="r").R.diagonal().abs()
    if rank > size or (left < _INDEPENDENT).any():
        problem = "has linearly dependent columns, whose directions apply_GS leaves to rounding"
        raise checkpoint.error(module, "hra_u", problem, "train it further, or with init_weights=false")


@dataclass(frozen=True)
class Reflections:
    """``vectors``: ``(in, r)``, not normalised. ``adapter`` and ``module`` are for messages only."""

    vectors: torch.Tensor
    orthogonal: bool
    adapter: str = field(compare=False)
    module: str = field(compare=False)

    @property
    def rank(self) -> int:
        return self.vectors.shape[1]

    def fold(self, form: NormalForm, weight: torch.Tensor) -> NormalForm:
        """``A = U^T`` and ``B = -2 C`` with the unit directions ``U (r, in)``.

        Row ``i`` of ``C`` is ``u_i`` times the weight after the reflections before it:
        ``C_i = u_i W - 2 sum_{j<i} (u_i . u_j) C_j``. No row is longer than ``W``, so that nothing is lost in fp64.
        """
        u = self.vectors.to(weight.device, torch.float64).T
        u = u / u.norm(dim=1, keepdim=True)
        if self.orthogonal:
            u = torch.linalg.qr(u.T).Q.T
        before = torch.tril(u @ u.T, -1)
        unit = torch.eye(self.rank, dtype=torch.float64, device=weight.device)
        c = torch.linalg.solve_triangular(unit + 2 * before, product(weight, u.T).T, upper=False)
        pair = folded(u, -2 * c, self.adapter, self.module)
        return replace(form, out_features=weight.shape[0], pair=pair, fold=None)
