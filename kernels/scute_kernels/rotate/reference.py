"""rotate: ``x R`` for every slice, the specification."""

from __future__ import annotations

import torch

from scute_kernels.table import BLOCK, BLOCK_STRIDE, ROTATION, part


def rotate(
    x: torch.Tensor,
    row_slot: torch.Tensor,
    tiles: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    out: torch.Tensor,
) -> None:
    features = x.shape[1]
    out.copy_(x.expand_as(out))
    for slot in row_slot.unique().tolist():
        if slot < 0:
            continue
        rows = (row_slot == slot).nonzero().squeeze(1)
        for i in range(out.shape[0]):
            fields = table[slot, first_site + i].tolist()
            offset, k = fields[ROTATION], fields[BLOCK]
            if offset < 0:
                continue
            blocks = features // k
            stored = blocks if fields[BLOCK_STRIDE] else 1
            delta = part(arena, offset, stored, k, k).float()
            rotated = x[rows].float()
            rotated += (rotated.view(-1, blocks, 1, k) @ delta).view(-1, features)
            out[i, rows] = rotated.to(out.dtype)
