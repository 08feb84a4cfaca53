"""shared_shrink: the Triton kernel. A program multiplies a tile by some ranks and a share of the features of its basis.

The programs of a fixed grid divide the tiles and the blocks of ranks among them. Route and rows of a tile lie at
addresses that depend on the launch alone, so a program begins with its first tile without a look at the others. A
product is made once for all slices with the same basis, and multiplied here by the ``d`` of each: who reads it
afterwards waits for less.
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
    SHARED_A,
    SHARED_A_STRIDE,
    SHARED_BASIS,
    SHARED_RANK,
    D,
    features_of_share,
    features_product,
    known_multiple,
    membership,
    rows_of_tile,
    written_ranks,
)

# Elements that lie on no 16 bytes are read one by one, into as many registers: in small blocks, so that this rare way
# does not take the registers, hence the occupancy, of the other.
UNALIGNED_BLOCK = tl.constexpr(32)


@triton.jit
def _route(
    routes_ptr, tile, n_tiles, sites, first_site, slice_number, N_SLICES: tl.constexpr, ROUTE_FIELDS: tl.constexpr
):
    """Of a tile: the basis of every slice, and ``SHARED_RANK, SHARED_A, SHARED_A_STRIDE`` of this one; rank 0 unless it
    is the first with its basis."""
    routes = routes_ptr + (tile.to(tl.int64) * sites + first_site) * ROUTE_FIELDS
    route = routes + slice_number * ROUTE_FIELDS
    known = tile < n_tiles
    basis = tl.load(route + SHARED_BASIS, mask=known, other=-1)
    rank = tl.load(route + SHARED_RANK, mask=known, other=0).to(tl.int32)
    offset = tl.load(route + SHARED_A, mask=known, other=0)
    stride = tl.load(route + SHARED_A_STRIDE, mask=known, other=0)
    first = basis >= 0
    bases = ()
    for i in tl.static_range(N_SLICES):
        of_slice = tl.load(routes + i * ROUTE_FIELDS + SHARED_BASIS, mask=known, other=-1)
        first = first & ((i >= slice_number) | (of_slice != basis))
        bases += (of_slice,)
    return bases, basis, tl.where(first, rank, 0), offset, stride


@triton.jit(do_not_specialize=["first_site", "sites", "n_tiles", "split"])
def _shared_shrink(
    x_ptr,
    tiles_ptr,
    routes_ptr,
    leading_ptr,
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
    ROUTE_FIELDS: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Some blocks of ranks of some tiles, for the slices whose basis is first read by this one."""
    slice_number = tl.program_id(0) // split
    share = tl.program_id(0) % split
    first_feature, last_feature = features_of_share(share, split, in_features, BLOCK_IN)

    leading = tl.load(leading_ptr)
    tile = tl.program_id(2)
    rows = rows_of_tile(tiles_ptr, tile, n_tiles, ROWS, ROWS)
    bases, basis, rank, offset, stride = _route(
        routes_ptr, tile, n_tiles, sites, first_site, slice_number, N_SLICES, ROUTE_FIELDS
    )
    while tile < leading:
        live = rows >= 0
        same = ()  # of every slice, which rows have this basis there, and where their d is
        offsets = ()
        for i in tl.static_range(N_SLICES):
            member, of_slice = membership(
                routes_ptr,
                tiles_ptr,
                table_ptr,
                tile,
                n_tiles,
                tiles_stride,
                sites,
                first_site + i,
                live,
                D,
                ROUTE_FIELDS,
                ROWS,
            )
            same += (member & (bases[i] == basis),)
            offsets += (of_slice,)

        x_rows = x_ptr + rows[:, None] * x_stride
        for block in range(tl.program_id(1), tl.cdiv(rank, BLOCK_RANK), tl.num_programs(1)):
            r = block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
            factors = ()  # read before the product: these loads wait for one another
            for i in tl.static_range(N_SLICES):
                mask = (same[i] & (offsets[i] >= 0))[:, None] & (r < rank)[None, :]
                d = tl.load(arena_ptr + offsets[i][:, None] + r[None, :], mask=mask, other=1.0)
                factors += (d.to(tl.float32),)
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
            written = (r < written_ranks(out_rows, rank))[None, :]
            for i in tl.static_range(N_SLICES):
                rounded = (product * factors[i]).to(u_ptr.dtype.element_ty)
                tl.store(out_rows + i * slice_stride, rounded, mask=same[i][:, None] & written)

        tile += tl.num_programs(2)
        rows = rows_of_tile(tiles_ptr, tile, n_tiles, ROWS, ROWS)
        bases, basis, rank, offset, stride = _route(
            routes_ptr, tile, n_tiles, sites, first_site, slice_number, N_SLICES, ROUTE_FIELDS
        )


def shared_shrink(
    x: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    leading: torch.Tensor,
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
    programs = launch.shared_shrink_programs(parameters, n_tiles, n_slices * split, max_rank)
    _shared_shrink[(n_slices * split, *programs)](
        x,
        tiles,
        routes,
        leading,
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
        ROUTE_FIELDS=routes.shape[2],
        VECTOR=16 // arena.itemsize,
        ROWS=tile_rows,
        BLOCK_RANK=parameters.block_rank,
        BLOCK_IN=parameters.block_in,
        STAGES=parameters.num_stages,
        WAYS=launch.ways(parameters, tile_rows, arena.dtype),
        num_warps=parameters.num_warps,
    )
