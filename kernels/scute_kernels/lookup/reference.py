"""lookup: the shrink of an embedding, the specification."""

from __future__ import annotations

import torch

from scute_kernels.table import RANK, A, part


def lookup(
    ids: torch.Tensor,
    row_slot: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    site: int,
    vocabulary: int,
    v: torch.Tensor,
) -> None:
    for slot in row_slot.unique().tolist():
        if slot < 0:
            continue
        fields = table[slot, site].tolist()
        if not fields[RANK]:
            continue
        rows = (row_slot == slot).nonzero().squeeze(1)
        known = (ids[rows] >= 0) & (ids[rows] < vocabulary)
        columns = part(arena, fields[A], fields[RANK], vocabulary)[:, torch.where(known, ids[rows], 0)].float()
        v[0, rows, 0, : fields[RANK]] = torch.where(known, columns, 0.0).T
