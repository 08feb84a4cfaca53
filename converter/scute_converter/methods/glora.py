"""GLoRA: five corrections of a layer, of its weight and of its bias, each of a shape of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.double import product
from scute_converter.errors import AdapterError
from scute_converter.finite import is_finite
from scute_converter.normal_form import Bias, NormalForm, Pair
from scute_converter.registry import Conversion, Variant, register

# How the tensors of a correction are called, by what the config calls its kind. "none" holds zeros.
_TENSORS = {"lora": ("Xd", "Xu"), "vector": ("X",), "constant": ("X",), "none": ("zeros",)}


@dataclass(frozen=True, kw_only=True)
class GloraConfig(MethodConfig):
    """PEFT's ``GloraConfig``. The rank is that of the tensors."""

    irrelevant = frozenset({"init_weights", "r"})

    config_A_B: Literal["lora", "vector", "constant", "none"] = "lora"
    config_C: Literal["lora", "vector", "constant", "none"] = "lora"
    config_D_E: Literal["vector", "constant", "none"] = "constant"


VARIANTS = (
    Variant("GLoRA", "0.20", "s, A B, b", base_weight=True, limits="config_A_B=vector, constant or none (not lora)"),
)


@register("GLORA", prefix="glora_", config=GloraConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: GloraConfig, base: Base) -> Conversion:
    """``y = (x W) * (1 + A) + x B^T + b0 * (1 + D) + E + W^T C``, where ``A`` and ``B (out, 1)`` are broadcast over the
    inputs, and ``C``, ``D`` and ``E`` are zero if the base layer has no bias (``peft.tuners.glora.layer.GloraLinear``).

    An ``A`` of low rank multiplies the elements of ``W``, which no slot can do, and is refused unless it is zero.
    """
    kinds = {"A": config.config_A_B, "B": config.config_A_B, "C": config.config_C, "D": config.config_D_E}
    kinds["E"] = config.config_D_E
    modules = checkpoint.modules(*(f"glora_A.{tensor}" for tensors in _TENSORS.values() for tensor in tensors))
    forms = checkpoint.each(modules, lambda module: _convert_module(checkpoint, kinds, base, module))
    return Conversion("GLoRA", forms)


@dataclass(frozen=True)
class WeightToBias:
    """``W^T C``, an output shift that follows from the base weight. ``c``: ``(in,)``. ``rank``: of the form's pair."""

    c: torch.Tensor
    rank: int
    adapter: str = field(compare=False)
    module: str = field(compare=False)

    def fold(self, form: NormalForm, weight: torch.Tensor) -> NormalForm:
        add = product(weight, self.c[:, None])[:, 0].cpu()
        if form.bias.add is not None:
            add = add + form.bias.add
        add = add.float()
        if not is_finite(add):
            problem = "its product with the base weight is not finite"
            remedy = "serve the base model that the adapter was trained on"
            raise AdapterError(self.adapter, f"tensor {self.module}.glora_C", problem, remedy)
        return replace(form, bias=replace(form.bias, add=add), fold=None)


@dataclass(frozen=True)
class _Correction:
    """``left @ right`` if there is a ``right (r, columns)``, else ``left (rows or 1,)`` for every column, else zero.

    ``rows`` and ``columns``: of the correction, 0 where its tensors do not say.
    """

    rows: int
    columns: int
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None

    def vector(self, rows: int) -> torch.Tensor | None:
        """The correction ``(rows,)`` of a single column, or None if it is zero."""
        return None if self.left is None else self.left.expand(rows).contiguous()


def _convert_module(checkpoint: Checkpoint, kinds: dict[str, str], base: Base, module: str) -> NormalForm:
    of = {path: _take(checkpoint, kinds[path], module, path) for path in kinds}
    a, b, c = of["A"], of["B"], of["C"]
    known = base.shapes.get(module, (0, 0))
    out_features = _size(checkpoint, module, "output", a.rows, b.rows, of["D"].rows, of["E"].rows, known[0])
    in_features = _size(checkpoint, module, "input", a.columns, b.columns, c.rows, known[1])
    if a.right is not None:
        problem = "is of low rank and multiplies the elements of the base weight, which is not served"
        raise checkpoint.error(module, "glora_A.Xd", problem, "train with config_A_B=vector or constant")
    if b.left is None:
        pair = None
    elif b.right is None:
        pair = Pair(torch.ones(1, in_features), b.left.expand(out_features)[None].contiguous())
    else:
        pair = Pair(b.right, b.left.T.contiguous())
    fold = None
    if c.left is not None:
        column = c.left if c.right is None else checkpoint.converted(module, "glora_C", (c.left @ c.right).flatten())
        fold = WeightToBias(column, pair.rank if pair else 0, checkpoint.adapter, module)
    bias = Bias(add=of["E"].vector(out_features), scale_delta=of["D"].vector(out_features))
    return NormalForm(in_features, out_features, pair=pair, scale_delta=a.vector(out_features), bias=bias, fold=fold)


def _take(checkpoint: Checkpoint, kind: str, module: str, path: str) -> _Correction:
    name = f"glora_{path}"
    matrix = path in "ABC"  # a vector is stored as (rows, 1) there, as (rows,) else
    if checkpoint.has(module, f"{name}.zeros"):  # also for the corrections of a bias that the base layer does not have
        zeros = checkpoint.take(module, f"{name}.zeros", dims=2 if matrix else 1, trained=False)
        if zeros.any():
            raise checkpoint.error(module, f"{name}.zeros", "is not zero", "save the adapter again with PEFT")
        return _Correction(zeros.shape[0], zeros.shape[1] if path in "AB" else 0)
    if kind == "lora":
        left, right = checkpoint.take(module, f"{name}.Xd", dims=2), checkpoint.take(module, f"{name}.Xu", dims=2)
        if left.shape[1] != right.shape[0] or (path == "C" and right.shape[1] != 1):
            problem = f"{tuple(right.shape)} does not fit {name}.Xd {tuple(left.shape)}"
            raise checkpoint.error(module, f"{name}.Xu", problem, "save both from one checkpoint")
        if not left.any() or not right.any():
            return _Correction(left.shape[0], right.shape[1])
        return _Correction(left.shape[0], right.shape[1], left, right)
    vector = checkpoint.take(module, f"{name}.{_TENSORS[kind][0]}", dims=2 if matrix and kind == "vector" else 1)
    if vector.shape[1:] not in ((), (1,)) or (kind == "constant" and vector.shape[0] != 1):
        problem = f"has shape {tuple(vector.shape)}, which is no {kind}"
        raise checkpoint.error(module, f"{name}.X", problem, "save the adapter again with PEFT")
    return _Correction(vector.shape[0] if kind == "vector" else 0, 0, vector.flatten())


def _size(checkpoint: Checkpoint, module: str, side: str, *found: int) -> int:
    """The number of features, on which all tensors and the base model agree."""
    sizes = sorted(set(found) - {0})
    if not sizes:
        problem = f"belongs to a number of {side} features that no tensor has, and the base layer is not known"
        raise checkpoint.error(module, "glora_A", problem, "serve a base model whose linear layers are known")
    if len(sizes) > 1:
        problem = f"the corrections are for {sizes[0]} and for {sizes[-1]} {side} features"
        raise checkpoint.error(module, "glora_A", problem, "use the base model that the adapter is for")
    return sizes[0]
