"""route: the table entries of every tile, the specification."""

from __future__ import annotations

import torch

from scute_kernels.plan import live_tiles


def route(
    row_slot: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    routes: torch.Tensor,
    table: torch.Tensor,
) -> None:
    routes.fill_(-1)
    for tile, rows in live_tiles(order, tiles):
        routes[tile] = table[row_slot[rows].unique().long()].amax(0)
