"""Products with a base weight in fp64: on a GPU an fp32 product may be rounded to TF32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Elements of the weight that are in memory as fp64 at a time: 32 MiB.
_CHUNK = 1 << 22


def product(weight: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``weight @ right`` in fp64 on the device of ``weight (m, n)``, any float dtype. ``right``: ``(n, r)``."""
    right = right.to(weight.device, torch.float64)
    return torch.cat([rows @ right for rows in _chunks(weight)])


def gram(weight: torch.Tensor) -> torch.Tensor:
    """``weight^T weight``: ``(n, n)`` in fp64 on the device of ``weight (m, n)``, any float dtype."""
    total = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=weight.device)
    for rows in _chunks(weight):
        total.addmm_(rows.T, rows)
    return total


def _chunks(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    step = max(1, _CHUNK // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        yield weight[start : start + step].double()
