"""GraLoRA: a grid of small LoRAs, one for each block of input and of output features, and perhaps a LoRA beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.normal_form import NormalForm, Pair
from scute_converter.registry import Conversion, Variant, register


@dataclass(frozen=True, kw_only=True)
class GraloraConfig(MethodConfig):
    """PEFT's ``GraloraConfig``. The number of blocks is that of the tensors."""

    irrelevant = frozenset({"gralora_dropout", "gralora_k", "init_weights"})

    r: int = 32
    alpha: float = 64
    hybrid_r: int = 0


VARIANTS = (Variant("GraLoRA", "0.19", "A B", limits="of rank gralora_k * r + hybrid_r"),)


@register("GRALORA", prefix="gralora_", config=GraloraConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: GraloraConfig, base: Base) -> Conversion:
    """``y_j = (x W + b0)_j + scale * sum over i of (x_i A_ij) B_ji`` with ``k`` blocks ``x_i`` and ``y_j`` of features
    and ``scale = alpha / (r + hybrid_r)``; with ``hybrid_r``: ``+ scale * (x A_general^T) B_general^T``
    (``peft.tuners.gralora.layer.Linear``).

    ``A_ij``: columns ``[j r / k, (j + 1) r / k)`` of ``gralora_A[i] (in / k, r)``. ``B_ji``: rows
    ``[i r / k, (i + 1) r / k)`` of ``gralora_B[j] (r, out / k)``.
    """
    modules = checkpoint.modules("gralora_A", "gralora_B")
    return Conversion("GraLoRA", checkpoint.each(modules, lambda module: _convert_module(checkpoint, config, module)))


def _convert_module(checkpoint: Checkpoint, config: GraloraConfig, module: str) -> NormalForm:
    blocks_a = checkpoint.take(module, "gralora_A", dims=3).double()
    blocks_b = checkpoint.take(module, "gralora_B", dims=3).double()
    k, rows, rank = blocks_a.shape
    if blocks_b.shape[:2] != (k, rank) or rank % k:
        problem = f"{tuple(blocks_b.shape)} does not fit gralora_A {tuple(blocks_a.shape)}"
        raise checkpoint.error(module, "gralora_B", problem, "save both from one checkpoint")
    if rank != config.r:
        # The scale is alpha / (r + hybrid_r): with two candidates for r it is not known.
        problem = f"has rank {rank}, but the config says {config.r}"
        raise checkpoint.error(module, "gralora_A", problem, "correct r in adapter_config.json")
    columns = blocks_b.shape[2]
    checkpoint.reserve(module, "gralora_A", k * rank, k * rows)
    checkpoint.reserve(module, "gralora_B", k * rank, k * columns)
    # Component (i, j, q) of the pair reads input block i and writes output block j.
    a = torch.zeros(k, k, rank // k, k, rows, dtype=torch.float64)
    b = torch.zeros(k, k, rank // k, k, columns, dtype=torch.float64)
    for i in range(k):
        a[i, :, :, i] = blocks_a[i].T.unflatten(0, (k, -1))
        b[:, i, :, i] = blocks_b[i].unflatten(0, (k, -1))
    a, b = a.flatten(3).flatten(0, 2), b.flatten(3).flatten(0, 2)
    if config.hybrid_r:
        general_a, general_b = _take_general(checkpoint, config, module, a.shape[1], b.shape[1])
        a, b = torch.cat([a, general_a]), torch.cat([b, general_b])
    scale = config.alpha / (rank + config.hybrid_r)
    pair = Pair(a.float(), checkpoint.converted(module, "gralora_B", b * scale))
    return NormalForm(a.shape[1], b.shape[1], pair=pair)


def _take_general(
    checkpoint: Checkpoint, config: GraloraConfig, module: str, in_features: int, out_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(hybrid_r, in)`` and ``(hybrid_r, out)``."""
    a = checkpoint.take(module, "gralora_A_general.weight", dims=2).double()
    b = checkpoint.take(module, "gralora_B_general.weight", dims=2).double()
    if a.shape != (config.hybrid_r, in_features) or b.shape != (out_features, config.hybrid_r):
        problem = f"{tuple(a.shape)} and gralora_B_general {tuple(b.shape)} do not fit hybrid_r={config.hybrid_r} and "
        problem += f"a layer of {in_features} input and {out_features} output features"
        raise checkpoint.error(module, "gralora_A_general.weight", problem, "correct hybrid_r in adapter_config.json")
    return a, b.T
