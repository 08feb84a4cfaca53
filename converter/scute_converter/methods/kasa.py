"""KaSA: LoRA with a trained diagonal between its factors, beside a base weight without its smallest components."""

from __future__ import annotations

import torch

from scute_converter.checkpoint import Checkpoint

DIAGONAL = "lora_diag"


def take_diagonal(checkpoint: Checkpoint, module: str, rank: int, features: int) -> torch.Tensor:
    """``lora_diag (r,)`` (PEFT: ``KasaLinearVariant``). ``features``: the smaller number of features of the layer."""
    diagonal = checkpoint.take(module, DIAGONAL, dims=1)
    if diagonal.shape[0] != rank:
        problem = f"has {diagonal.shape[0]} elements for rank {rank}"
        raise checkpoint.error(module, DIAGONAL, problem, "save the adapter again")
    if rank >= features:
        problem = f"rank {rank} takes all {features} singular components out of the base weight"
        raise checkpoint.error(module, DIAGONAL, problem, "train with a smaller r")
    return diagonal
