"""Writes weights in the format of AWQ checkpoints (4 bits, groups along the inputs, zero points)."""

from __future__ import annotations

import torch

GROUP = 32
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the nibbles of an int32: where the eight neighbouring outputs lie


def random_awq(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors ``qweight (in, out/8)`` and ``qzeros (in/GROUP, out/8)`` int32, ``scales (in/GROUP, out)`` fp16, and what
    they mean: ``(out, in)`` fp32 that is rounded to fp16, about as large as a linear layer of unit gain."""
    values = torch.randint(16, (inputs, outputs), generator=generator)
    zeros = torch.randint(5, 11, (inputs // GROUP, outputs), generator=generator)
    spread = 5 * inputs**0.5  # of the difference of both, and of the sum over the inputs
    scales = ((0.5 + torch.rand(inputs // GROUP, outputs, generator=generator)) / spread).half()
    difference = (values - zeros.repeat_interleave(GROUP, dim=0)).half()
    weight = (difference * scales.repeat_interleave(GROUP, dim=0)).float().T.contiguous()
    return {"qweight": _pack(values), "qzeros": _pack(zeros), "scales": scales}, weight


def _pack(values: torch.Tensor) -> torch.Tensor:
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for column, place in enumerate(ORDER):
        words |= values[:, column::8] << (4 * place)
    return words.to(torch.int32)  # the highest nibble wraps into the sign
