"""shared_expand: the product of the shared bases, added in place, the specification."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from scute_kernels.plan import live_tiles
from scute_kernels.table import BASIS, SHARED_B, SHARED_B_STRIDE, SHARED_BASIS, SHARED_RANK, E, basis_part, part


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
        for i, (begin, end) in enumerate(pairwise(slice_offsets)):
            fields = routes[tile, first_site + i].tolist()
            if fields[SHARED_BASIS] < 0:
                continue
            rank, width = fields[SHARED_RANK], end - begin
            b = basis_part(arena, fields[SHARED_B], fields[SHARED_B_STRIDE], rank, width).float()
            for slot in slots.unique().tolist():
                if table[slot, first_site + i, BASIS] < 0:
                    continue
                rows = members[slots == slot]
                product = u[:, rows, i, :rank].sum(0) @ b
                e = int(table[slot, first_site + i, E])
                if e >= 0:
                    product *= part(arena, e, width).float()
                h[rows, begin:end] = (h[rows, begin:end].float() + product).to(h.dtype)
