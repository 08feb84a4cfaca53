"""shrink: ``x a^T`` for every slice, the specification."""

from __future__ import annotations

import torch

from scute_kernels.plan import live_tiles, tile_bases
from scute_kernels.table import (
    BASIS_A,
    BASIS_A_STRIDE,
    BASIS_RANK,
    RANK,
    A,
    basis_part,
    part,
)


def shrink(
    x: torch.Tensor,
    row_slot: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    arena: torch.Tensor,
    table: torch.Tensor,
    bases: torch.Tensor,
    origins: torch.Tensor,
    first_site: int,
    v: torch.Tensor,
    u: torch.Tensor,
) -> None:
    features = x.shape[1]
    for rows, slot in live_tiles(order, tiles):
        x_tile = x[rows].float()
        if v.numel() and slot >= 0:
            for i in range(v.shape[2]):
                fields = table[slot, first_site + i].tolist()
                if rank := fields[RANK]:
                    a = part(arena, fields[A], rank, features).float()
                    _write(v, rows, i, x_tile @ a.T)
        if u.numel():
            of_slice = tile_bases(table, row_slot[rows], first_site, u.shape[2])
            for i, basis in enumerate(of_slice):
                if basis >= 0 and of_slice.index(basis) == i:
                    fields = bases[basis].tolist()
                    origin = int(origins[first_site + i, 0])
                    a = basis_part(arena, fields[BASIS_A], fields[BASIS_A_STRIDE], fields[BASIS_RANK], origin, features)
                    _write(u, rows, i, x_tile @ a.float().T)


def _write(planes: torch.Tensor, rows: torch.Tensor, i: int, product: torch.Tensor) -> None:
    planes[:, rows, i, : product.shape[1]] = 0
    planes[0, rows, i, : product.shape[1]] = product
