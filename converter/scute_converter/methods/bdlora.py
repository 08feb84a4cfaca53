"""BD-LoRA: one factor of the LoRA pair is block-diagonal, which one depends on the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scute_converter.checkpoint import Checkpoint


def dense(
    checkpoint: Checkpoint, config: Mapping[str, Any], module: str, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``a (r, in)`` and ``b (r, out)`` with the zeros between the blocks (PEFT: ``BdLoraLinearVariant``).

    ``b``: the transpose of ``lora_B``. ``config``: the field ``use_bdlora``. A name in it matches anywhere in the path
    of the module.
    """
    in_a, in_b = (
        any(name in module for name in config.get(f"target_modules_bd_{factor}") or ()) for factor in ("a", "b")
    )
    where = "lora_A.weight"
    if in_a and in_b:
        problem = "is selected by both target_modules_bd_a and target_modules_bd_b"
        raise checkpoint.error(module, where, problem, "correct use_bdlora in adapter_config.json")
    if not in_a and not in_b and config.get("match_strict", True):
        problem = "is selected by neither target_modules_bd_a nor target_modules_bd_b"
        raise checkpoint.error(module, where, problem, "set match_strict to false if it is plain LoRA")
    if in_a:
        a = _dense(checkpoint, config, module, "lora_A.weight", a)
    if in_b:
        b = _dense(checkpoint, config, module, "lora_B.weight", b.T).T.contiguous()
    return a, b


def _dense(
    checkpoint: Checkpoint, config: Mapping[str, Any], module: str, suffix: str, weight: torch.Tensor
) -> torch.Tensor:
    """``weight``: ``(rows, columns / nblocks)``; block ``i`` of the rows belongs to block ``i`` of the columns."""
    blocks = config.get("nblocks", 1)
    if blocks < 1 or weight.shape[0] % blocks:
        problem = f"{weight.shape[0]} rows are no {blocks} blocks"
        raise checkpoint.error(module, suffix, problem, "correct nblocks of use_bdlora in adapter_config.json")
    checkpoint.reserve(module, suffix, weight.shape[0], blocks * weight.shape[1])
    return torch.block_diag(*weight.chunk(blocks))
