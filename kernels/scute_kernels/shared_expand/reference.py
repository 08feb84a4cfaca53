"""shared_expand: the product of the shared bases, added in place, the specification."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from scute_kernels.plan import first_slices, live_tiles
from scute_kernels.table import BASIS, SHARED_B, SHARED_B_STRIDE, SHARED_BASIS, SHARED_RANK, D, E, basis_part, part


def shared_expand(
    h: torch.Tensor,
    u: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    slice_offsets: Sequence[int],
) -> None:
    for tile, members, slots in live_tiles(tiles):
        first = first_slices(routes[tile], first_site, u.shape[2])
        for i, (begin, end) in enumerate(pairwise(slice_offsets)):
            route = routes[tile, first_site + i].tolist()
            if route[SHARED_BASIS] < 0:
                continue
            rank, width = route[SHARED_RANK], end - begin
            b = basis_part(arena, route[SHARED_B], route[SHARED_B_STRIDE], rank, width).float()
            for slot in slots.unique().tolist():
                if table[slot, first_site + i, BASIS] < 0:
                    continue
                rows = members[slots == slot]
                fields = table[slot, first_site + i].tolist()
                damped = u[:, rows, first[i], :rank].sum(0)
                if fields[D] >= 0:
                    damped *= part(arena, fields[D], rank).float()
                product = damped @ b
                if fields[E] >= 0:
                    product *= part(arena, fields[E], width).float()
                h[rows, begin:end] = (h[rows, begin:end].float() + product).to(h.dtype)
