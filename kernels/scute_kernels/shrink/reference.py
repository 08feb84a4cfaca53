"""shrink: ``x a^T`` for every slice, the specification."""

from __future__ import annotations

import torch

from scute_kernels.plan import live_tiles
from scute_kernels.table import RANK, A, part


def shrink(
    x: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    tile_rows: int,
    arena: torch.Tensor,
    first_site: int,
    v: torch.Tensor,
) -> None:
    for tile, rows, _ in live_tiles(tiles):
        for i in range(v.shape[2]):
            fields = routes[tile, first_site + i].tolist()
            if (rank := fields[RANK]) > 0:
                a = part(arena, fields[A], rank, x.shape[1]).float()
                v[:, rows, i, :rank] = 0
                v[0, rows, i, :rank] = x[rows].float() @ a.T
