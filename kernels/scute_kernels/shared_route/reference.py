"""shared_route: the shared basis of every tile, the specification."""

from __future__ import annotations

import torch

from scute_kernels.plan import live_tiles
from scute_kernels.table import (
    BASIS,
    BASIS_A,
    BASIS_A_STRIDE,
    BASIS_B,
    BASIS_B_STRIDE,
    BASIS_RANK,
    NO_MEMBER,
    SHARED_A,
    SHARED_A_STRIDE,
    SHARED_B,
    SHARED_B_STRIDE,
    SHARED_BASIS,
    SHARED_FIELDS,
    SHARED_RANK,
    D,
    E,
)


def shared_route(
    tiles: torch.Tensor,
    leading: torch.Tensor,
    routes: torch.Tensor,
    table: torch.Tensor,
    bases: torch.Tensor,
    origins: torch.Tensor,
) -> None:
    for tile, _, slots in live_tiles(tiles[:, : int(leading)]):
        basis = table[slots.unique(), :, BASIS].amax(0)
        entries, route = bases[basis.clamp(min=0)], routes[tile]
        route[:, SHARED_BASIS] = basis
        route[:, SHARED_RANK] = entries[:, BASIS_RANK]
        route[:, SHARED_A] = entries[:, BASIS_A] + origins[:, 0]
        route[:, SHARED_A_STRIDE] = entries[:, BASIS_A_STRIDE]
        route[:, SHARED_B] = entries[:, BASIS_B] + origins[:, 1]
        route[:, SHARED_B_STRIDE] = entries[:, BASIS_B_STRIDE]
        if routes.shape[2] > SHARED_FIELDS:
            width = tiles.shape[2]
            places = (tiles[0, tile] >= 0).nonzero().squeeze(1)
            fields, absent = table[slots], table[slots, :, BASIS] < 0
            route[:, SHARED_FIELDS:] = NO_MEMBER
            for first, field in ((SHARED_FIELDS, D), (SHARED_FIELDS + width, E)):
                route[:, first + places] = fields[:, :, field].masked_fill(absent, NO_MEMBER).T
