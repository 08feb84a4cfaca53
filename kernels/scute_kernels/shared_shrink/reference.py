"""shared_shrink: ``(x a_shared^T) * d`` for every slice, the specification."""

from __future__ import annotations

import torch

from scute_kernels.plan import live_tiles
from scute_kernels.table import SHARED_A, SHARED_A_STRIDE, SHARED_BASIS, SHARED_RANK, D, basis_part, part


def shared_shrink(
    x: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    u: torch.Tensor,
) -> None:
    for tile, rows, slots in live_tiles(tiles):
        for i in range(u.shape[2]):
            fields = routes[tile, first_site + i].tolist()
            if fields[SHARED_BASIS] < 0:
                continue
            rank = fields[SHARED_RANK]
            a = basis_part(arena, fields[SHARED_A], fields[SHARED_A_STRIDE], rank, x.shape[1])
            product = x[rows].float() @ a.float().T
            for number, slot in enumerate(slots.tolist()):
                offset = int(table[slot, first_site + i, D])
                if offset >= 0:
                    product[number] *= part(arena, offset, rank).float()
            u[:, rows, i, :rank] = 0
            u[0, rows, i, :rank] = product
