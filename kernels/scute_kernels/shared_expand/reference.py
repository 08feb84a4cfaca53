"""shared_expand: the product of the shared bases, the specification."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from scute_kernels.plan import live_tiles
from scute_kernels.table import BASIS, SHARED_B, SHARED_B_STRIDE, SHARED_BASIS, SHARED_RANK, E, basis_part, part


def shared_expand(
    out: torch.Tensor,
    u: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    leading: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    slice_offsets: Sequence[int],
    add: bool,
) -> None:
    for tile, members, slots in live_tiles(tiles[:, : int(leading)]):
        for i, (begin, end) in enumerate(pairwise(slice_offsets)):
            route = routes[tile, first_site + i].tolist()
            if route[SHARED_BASIS] < 0:
                continue
            rank, width = route[SHARED_RANK], end - begin
            b = basis_part(arena, route[SHARED_B], route[SHARED_B_STRIDE], rank, width).float()
            for slot in slots.unique().tolist():
                fields = table[slot, first_site + i].tolist()
                if fields[BASIS] < 0:
                    continue
                rows = members[slots == slot]
                product = u[:, rows, i, :rank].float().sum(0) @ b
                if fields[E] >= 0:
                    product *= part(arena, fields[E], width).float()
                if add:
                    product += out[rows, begin:end].float()
                out[rows, begin:end] = product.to(out.dtype)
