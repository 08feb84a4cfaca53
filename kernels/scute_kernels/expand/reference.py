"""expand: everything after the base layer, in place, the specification."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from scute_kernels.plan import live_tiles, tile_bases
from scute_kernels.table import (
    BASIS,
    BASIS_B,
    BASIS_B_STRIDE,
    BASIS_RANK,
    BIAS,
    RANK,
    SCALE,
    B,
    D,
    E,
    basis_part,
    part,
)


def expand(
    h: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    row_slot: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    arena: torch.Tensor,
    table: torch.Tensor,
    bases: torch.Tensor,
    origins: torch.Tensor,
    first_site: int,
    slice_offsets: Sequence[int],
) -> None:
    n_slices = len(slice_offsets) - 1
    for tile, _ in live_tiles(order, tiles):
        of_slice = tile_bases(table, row_slot[tile], first_site, n_slices)
        for slot in row_slot[tile].unique().tolist():
            rows = tile[row_slot[tile] == slot]
            for i, (begin, end) in enumerate(pairwise(slice_offsets)):
                fields = table[slot, first_site + i].tolist()
                rank = fields[RANK] if v.numel() else 0
                basis = fields[BASIS] if u.numel() else -1
                if fields[SCALE] < 0 and fields[BIAS] < 0 and not rank and basis < 0:
                    continue
                h_slice = h[rows, begin:end].float()
                total = h_slice.clone()
                if fields[SCALE] >= 0:
                    total += h_slice * part(arena, fields[SCALE], end - begin).float()
                if fields[BIAS] >= 0:
                    total += part(arena, fields[BIAS], end - begin).float()
                if rank:
                    total += v[:, rows, i, :rank].sum(0) @ part(arena, fields[B], rank, end - begin).float()
                if basis >= 0:
                    shared = bases[basis].tolist()
                    r, origin = shared[BASIS_RANK], int(origins[first_site + i, 1])
                    b = basis_part(arena, shared[BASIS_B], shared[BASIS_B_STRIDE], r, origin, end - begin).float()
                    damped = u[:, rows, of_slice.index(basis), :r].sum(0)
                    if fields[D] >= 0:
                        damped = damped * part(arena, fields[D], r).float()
                    product = damped @ b
                    if fields[E] >= 0:
                        product = product * part(arena, fields[E], end - begin).float()
                    total += product
                h[rows, begin:end] = total.to(h.dtype)
