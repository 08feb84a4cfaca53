"""QALoRA: LoRA on sums of neighbouring input features, for a base model quantised in groups."""

from __future__ import annotations

import torch

from scute_converter.checkpoint import Checkpoint
from scute_converter.errors import AdapterError
from scute_converter.files import CONFIG

# Input features per group; users take 16 to 128.
_MOST = 4096


def spread(checkpoint: Checkpoint, module: str, a: torch.Tensor, group_size: int) -> tuple[torch.Tensor, float]:
    """``lora_A`` for single features, and the factor that goes with it (PEFT: ``QALoraLinearVariant``).

    PEFT takes the mean over each group times the number of groups: ``x_pooled = sum(x_group) * in / group_size^2``.
    ``a``: ``(r, in / group_size)``, the result ``(r, in)``.
    """
    if not 1 <= group_size <= _MOST:
        problem = f"{group_size} is not within 1 and {_MOST}"
        raise AdapterError(checkpoint.adapter, f"field qalora_group_size of {CONFIG}", problem, "correct it")
    checkpoint.reserve(module, "lora_A.weight", a.shape[0], a.shape[1] * group_size)
    return a.repeat_interleave(group_size, dim=1), a.shape[1] / group_size
