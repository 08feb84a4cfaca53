"""shared_shrink: ``x a_shared^T`` for every slice, the specification."""

from __future__ import annotations

import torch

from scute_kernels.plan import first_slices, live_tiles
from scute_kernels.table import SHARED_A, SHARED_A_STRIDE, SHARED_RANK, basis_part


def shared_shrink(
    x: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    arena: torch.Tensor,
    first_site: int,
    u: torch.Tensor,
) -> None:
    for tile, rows, _ in live_tiles(tiles):
        for i, first in enumerate(first_slices(routes[tile], first_site, u.shape[2])):
            if first != i:
                continue
            fields = routes[tile, first_site + i].tolist()
            rank = fields[SHARED_RANK]
            a = basis_part(arena, fields[SHARED_A], fields[SHARED_A_STRIDE], rank, x.shape[1])
            u[:, rows, i, :rank] = 0
            u[0, rows, i, :rank] = x[rows].float() @ a.float().T
