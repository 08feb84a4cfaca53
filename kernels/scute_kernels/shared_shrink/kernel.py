"""shared_shrink: the Triton kernel. A program multiplies a tile by some ranks and a share of the features of its basis.

The programs of a fixed grid divide the blocks of ranks among them, as those of ``shrink`` do. A product is made once
for all slices with the same basis, and multiplied here by the ``d`` of each: who reads it afterwards waits for less.
"""

# What @triton.jit compiles is Python by syntax only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scute_kernels import launch
from scute_kernels.device import (
    BASIS,
    FIELDS,
    SHARED_A,
    SHARED_A_STRIDE,
    SHARED_BASIS,
    SHARED_FIELDS,
    SHARED_RANK,
    D,
    features_of_share,
    features_product,
    known_multiple,
    piece_of_tiles,
    rows_of_tile,
    slots_of_tile,
)

# Elements that lie on no 16 bytes are read one by one, into as many registers: in small blocks, so that this rare way
# does not take the registers, hence the occupancy, of the other.
UNALIGNED_BLOCK = tl.constexpr(32)


@triton.jit(do_not_specialize=["first_site", "sites", "n_tiles", "split"])
def _shared_shrink(
    x_ptr,
    tiles_ptr,
    routes_ptr,
    arena_ptr,
    table_ptr,
    u_ptr,
    first_site,
    sites,
    n_tiles,
    split,
    tiles_stride,
    x_stride,
    in_features,
    slice_stride,
    row_stride,
    plane_stride,
    N_SLICES: tl.constexpr,
    TILES: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    WAYS: tl.constexpr,
):
    slice_number = tl.program_id(0) // split
    share = tl.program_id(0) % split
    first_feature, last_feature = features_of_share(share, split, in_features, BLOCK_IN)
    site = first_site + slice_number

    tiles = tl.arange(0, TILES)
    known = tiles < n_tiles
    routes = routes_ptr + (tiles.to(tl.int64) * sites + first_site) * SHARED_FIELDS
    bases = tl.load(routes + slice_number * SHARED_FIELDS + SHARED_BASIS, mask=known, other=-1)
    ranks = tl.load(routes + slice_number * SHARED_FIELDS + SHARED_RANK, mask=known, other=0)
    first = bases >= 0  # whether this is the first slice of the tile with this basis
    for i in tl.static_range(N_SLICES - 1):
        earlier = tl.load(routes + i * SHARED_FIELDS + SHARED_BASIS, mask=known & (i < slice_number), other=-1)
        first = first & (earlier != bases)
    blocks = tl.cdiv(tl.where(first, ranks, 0), BLOCK_RANK).to(tl.int32)
    ends = tl.cumsum(blocks, axis=0)

    for piece in range(tl.program_id(1), tl.sum(blocks, axis=0), tl.num_programs(1)):
        tile, block = piece_of_tiles(piece, tiles, blocks, ends)
        rows = rows_of_tile(tiles_ptr, tile, n_tiles, ROWS, ROWS)
        route = routes_ptr + (tile.to(tl.int64) * sites + site) * SHARED_FIELDS
        rank = tl.load(route + SHARED_RANK).to(tl.int32)
        offset = tl.load(route + SHARED_A)
        stride = tl.load(route + SHARED_A_STRIDE)
        live = rows >= 0
        r = block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)

        # What each slice makes of the product is read before it: these loads wait for one another.
        basis = tl.load(route + SHARED_BASIS)
        slots = slots_of_tile(tiles_ptr, tile, n_tiles, tiles_stride, ROWS, ROWS)
        wanted = ()
        factors = ()
        for i in tl.static_range(N_SLICES):
            of_slice = routes_ptr + (tile.to(tl.int64) * sites + first_site + i) * SHARED_FIELDS + SHARED_BASIS
            entries = table_ptr + (slots * sites + first_site + i) * FIELDS
            # A row of the tile may have no basis here though others do.
            member = (tl.load(entries + BASIS, mask=live, other=-1) >= 0) & (tl.load(of_slice) == basis)
            offsets = tl.load(entries + D, mask=live, other=-1)
            mask = member[:, None] & (r < rank)[None, :]
            d = tl.load(arena_ptr + offsets[:, None] + r[None, :], mask=mask & (offsets >= 0)[:, None], other=1.0)
            wanted += (mask,)
            factors += (d.to(tl.float32),)

        x_rows = x_ptr + rows[:, None] * x_stride
        if (offset % VECTOR == 0) & (stride % VECTOR == 0):
            product = features_product(
                x_rows,
                arena_ptr + known_multiple(offset, VECTOR),
                known_multiple(stride, VECTOR),
                r,
                rank,
                live,
                first_feature,
                last_feature,
                ROWS,
                BLOCK_RANK,
                BLOCK_IN,
                STAGES,
                WAYS,
            )
        else:
            product = features_product(
                x_rows,
                arena_ptr + offset,
                stride,
                r,
                rank,
                live,
                first_feature,
                last_feature,
                ROWS,
                BLOCK_RANK,
                UNALIGNED_BLOCK,
                STAGES,
                1,
            )

        out_rows = u_ptr + share.to(tl.int64) * plane_stride + rows[:, None] * row_stride + r[None, :]
        for i in tl.static_range(N_SLICES):
            tl.store(out_rows + i * slice_stride, product * factors[i], mask=wanted[i])


def shared_shrink(
    x: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    u: torch.Tensor,
    parameters: launch.Shrink | None = None,
) -> None:
    """``parameters``: those of the table if not given."""
    split, rows, n_slices, max_rank = u.shape
    _, n_tiles, tile_rows = tiles.shape
    parameters = parameters or launch.shrink("shared_shrink", rows, tile_rows, arena.dtype, max_rank)
    programs = launch.shrink_programs(parameters, n_tiles, n_slices * split, max_rank)
    _shared_shrink[(n_slices * split, programs)](
        x,
        tiles,
        routes,
        arena,
        table,
        u,
        first_site,
        routes.shape[1],
        n_tiles,
        split,
        tiles.stride(0),
        x.stride(0),
        x.shape[1],
        u.stride(2),
        u.stride(1),
        u.stride(0),
        N_SLICES=n_slices,
        TILES=max(16, triton.next_power_of_2(n_tiles)),
        VECTOR=16 // arena.itemsize,
        ROWS=tile_rows,
        BLOCK_RANK=parameters.block_rank,
        BLOCK_IN=parameters.block_in,
        STAGES=parameters.num_stages,
        WAYS=launch.ways(parameters, tile_rows, arena.dtype),
        num_warps=parameters.num_warps,
    )
