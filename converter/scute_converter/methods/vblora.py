"""VB-LoRA: a LoRA whose factors are put together from tiles, each a mixture of a few vectors of one bank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.errors import AdapterError
from scute_converter.normal_form import NormalForm, Pair
from scute_converter.registry import Conversion, Variant, register

_BANK = "vblora_vector_bank"
_A, _B = "vblora_logits_A", "vblora_logits_B"

# The file leaves out the last weight of a tile. Weights in bf16 may miss their sum of 1 by this much.
_ROUNDING = 0.01


@dataclass(frozen=True, kw_only=True)
class VBLoRAConfig(MethodConfig):
    """PEFT's ``VBLoRAConfig``. All sizes but ``topk`` are those of the tensors, which also say how they are saved."""

    irrelevant = frozenset(
        {
            "init_logits_std",
            "init_vector_bank_bound",
            "num_vectors",
            "r",
            "save_only_topk_weights",
            "vblora_dropout",
            "vector_length",
        }
    )

    topk: int = 2


@register("VBLORA", prefix="vblora_", config=VBLoRAConfig, variants=(Variant("VB-LoRA", "0.13", "A B"),))
def convert(checkpoint: Checkpoint, config: VBLoRAConfig, base: Base) -> Conversion:
    """``y = x W + b0 + (x A) B``, where every tile of ``A`` and ``B`` is the sum of the ``topk`` vectors of the bank
    with the largest logits, weighted by the softmax of these logits (``peft.tuners.vblora.layer.Linear``).
    """
    bank = checkpoint.take("", _BANK, dims=2).double()
    if not 1 <= config.topk <= bank.shape[0]:
        problem = f"{config.topk} is not within 1 and the {bank.shape[0]} vectors of the bank"
        raise AdapterError(checkpoint.adapter, "field topk of adapter_config.json", problem, "correct it")
    forms = {}
    for module in checkpoint.modules(_A, _B, f"{_A}_topk_indices", f"{_B}_topk_indices"):
        tiles_a = _tiles(checkpoint, config, bank, module, _A)
        tiles_b = _tiles(checkpoint, config, bank, module, _B)
        if tiles_a.shape[0] != tiles_b.shape[1]:
            problem = f"has rank {tiles_b.shape[1]}, and {_A} {tiles_a.shape[0]}"
            raise checkpoint.error(module, _B, problem, "save both from one checkpoint")
        a = checkpoint.converted(module, _A, tiles_a.flatten(1))
        b = checkpoint.converted(module, _B, tiles_b.transpose(0, 1).flatten(1))
        forms[module] = NormalForm(a.shape[1], b.shape[1], pair=Pair(a, b))
    return Conversion("VB-LoRA", forms)


def _tiles(checkpoint: Checkpoint, config: VBLoRAConfig, bank: torch.Tensor, module: str, suffix: str) -> torch.Tensor:
    """The tiles of a factor in fp64: ``(r, in / length, length)`` of ``A``, ``(out / length, r, length)`` of ``B``.

    Stored are logits of all vectors of the bank, or indices of the largest ones with all their weights but the last.
    """
    indices_name, weights_name = f"{suffix}_topk_indices", f"{suffix}_topk_weights"
    if not checkpoint.has(module, indices_name):
        logits = checkpoint.take(module, suffix, dims=3)
        if logits.shape[2] != bank.shape[0]:
            problem = f"{tuple(logits.shape)} does not fit a bank of {bank.shape[0]} vectors"
            raise checkpoint.error(module, suffix, problem, "save both from one checkpoint")
        largest, indices = logits.topk(config.topk, dim=-1)
        weights = largest.double().softmax(dim=-1)
    else:
        indices = checkpoint.take_integers(module, indices_name, dims=3)
        first = checkpoint.take(module, weights_name, dims=3, maybe_empty=config.topk == 1).double()
        if indices.shape[2] != config.topk or first.shape != (*indices.shape[:2], config.topk - 1):
            problem = f"{tuple(first.shape)} does not fit {indices_name} {tuple(indices.shape)} with topk={config.topk}"
            raise checkpoint.error(module, weights_name, problem, "save both from one checkpoint, with its topk")
        if indices.min() < 0 or indices.max() >= bank.shape[0]:
            problem = f"has indices that are not within a bank of {bank.shape[0]} vectors"
            raise checkpoint.error(module, indices_name, problem, "save both from one checkpoint")
        if (indices.sort(dim=-1).values.diff(dim=-1) == 0).any():
            problem = "names a vector twice for one tile"
            raise checkpoint.error(module, indices_name, problem, "save the adapter again with PEFT")
        weights = torch.cat([first, 1 - first.sum(dim=-1, keepdim=True)], dim=-1)
        if weights.min() < -_ROUNDING:
            problem = "has weights that are negative or sum up to more than 1"
            raise checkpoint.error(module, weights_name, problem, "save the adapter again with PEFT")
        weights = weights.clamp(min=0)
    checkpoint.reserve(module, suffix, *indices.shape, bank.shape[1])
    return (weights.unsqueeze(-1) * bank[indices]).sum(dim=-2)
