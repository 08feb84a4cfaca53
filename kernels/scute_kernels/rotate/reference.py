"""rotate: ``x R`` for every slice, the specification."""

from __future__ import annotations

import torch

from scute_kernels.table import BLOCK, BLOCK_STRIDE, ROTATION, part


def rotate(
    x: torch.Tensor,
    row_slot: torch.Tensor,
    further: torch.Tensor,
    tiles: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    n_slices: int,
    out: torch.Tensor,
) -> None:
    rows = len(x)
    _transform(x, row_slot[:rows], arena, table[:, first_site], out[:rows])
    for i in range(1, n_slices):
        of_slice = out[rows:].unflatten(0, (n_slices - 1, -1))[i - 1]
        chosen, slots = further[:, : len(of_slice)]
        inputs = torch.where(chosen[:, None] >= 0, x[chosen], 0)
        _transform(inputs, slots, arena, table[:, first_site + i], of_slice)


def _transform(
    x: torch.Tensor, slots: torch.Tensor, arena: torch.Tensor, entries: torch.Tensor, out: torch.Tensor
) -> None:
    """``slots``: of the rows of ``x``. ``entries``: of each slot, at the site."""
    features = x.shape[1]
    out.copy_(x)
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        fields = entries[slot].tolist()
        offset, k = fields[ROTATION], fields[BLOCK]
        if offset < 0:
            continue
        rows = (slots == slot).nonzero().squeeze(1)
        blocks = features // k
        stored = blocks if fields[BLOCK_STRIDE] else 1
        delta = part(arena, offset, stored, k, k).float()
        rotated = x[rows].float()
        rotated += (rotated.view(-1, blocks, 1, k) @ delta).view(-1, features)
        out[rows] = rotated.to(out.dtype)
