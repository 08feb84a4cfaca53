"""expand: the parts of adapters after the base layer, in place, the specification."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from scute_kernels.plan import live_tiles
from scute_kernels.table import BASIS, BIAS, RANK, ROTATION, SCALE, B, part


def expand(
    h: torch.Tensor,
    v: torch.Tensor,
    addend: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    tile_rows: int,
    arena: torch.Tensor,
    first_site: int,
    slice_offsets: Sequence[int],
) -> None:
    n_rows, n_slices = v.shape[1:3]
    n_further = (len(h) - n_rows) // max(1, n_slices - 1)
    for tile, rows, _ in live_tiles(tiles):
        in_further = tiles[2, tile, : len(rows)]
        transformed = (routes[tile, first_site:, ROTATION] >= 0).tolist()
        for i, (begin, end) in enumerate(pairwise(slice_offsets)):
            fields = routes[tile, first_site + i].tolist()
            rank = fields[RANK]
            shared = addend.numel() > 0 and fields[BASIS] >= 0
            moved = i > 0 and n_further > 0 and (transformed[0] or transformed[i])
            if fields[SCALE] < 0 and fields[BIAS] < 0 and not (rank or shared or moved):
                continue
            h_slice = h[n_rows + (i - 1) * n_further + in_further if moved else rows, begin:end].float()
            total = h_slice.clone()
            if fields[SCALE] >= 0:
                total += h_slice * part(arena, fields[SCALE], end - begin).float()
            if fields[BIAS] >= 0:
                total += part(arena, fields[BIAS], end - begin).float()
            if rank:
                total += v[:, rows, i, :rank].sum(0) @ part(arena, fields[B], rank, end - begin).float()
            if shared:
                total += addend[rows, begin:end]
            h[rows, begin:end] = total.to(h.dtype)
