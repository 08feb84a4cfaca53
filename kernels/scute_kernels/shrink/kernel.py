"""shrink: the Triton kernel. A program multiplies some pairs of a tile and a block of ranks by a share of the features.

Which pairs there are differs from batch to batch, and a captured graph cannot change its grid. So the grid is fixed,
and its programs divide the pairs among them: each counts the blocks of ranks of every tile, in ``routes``, and takes
its own. No program is launched for a rank that no adapter has, and one adapter of rank 256 occupies as many
multiprocessors as sixteen of rank 16.
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
    FIELDS,
    RANK,
    A,
    features_of_share,
    features_product,
    known_multiple,
    rows_of_tile,
)

LONG_RANK = tl.constexpr(launch.LONG_RANK)


@triton.jit
def _piece_of_tiles(piece, tiles, blocks, ends):
    """Tile and block of ranks of the n-th of all blocks. ``tiles``: numbers; ``blocks``: how many each has; ``ends``:
    their running sum."""
    tile = tl.sum((ends <= piece).to(tl.int32), axis=0)
    return tile, piece - tl.sum(tl.where(tiles == tile, ends - blocks, 0), axis=0)


@triton.jit
def _rows_product(
    x_ptr,
    a_ptr,
    out_ptr,
    rows,
    block,
    rank,
    x_stride,
    in_features,
    row_stride,
    first_feature,
    last_feature,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Of a tile and a block of ranks. ``out_ptr``: the slice in the plane of this share of the features."""
    r = block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    live = rows >= 0
    total = features_product(
        x_ptr + rows[:, None] * x_stride,
        a_ptr,
        in_features,
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
    out_rows = out_ptr + rows[:, None] * row_stride
    tl.store(out_rows + r[None, :], total, mask=live[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["first_site", "sites", "n_tiles", "split"])
def _shrink(
    x_ptr,
    tiles_ptr,
    routes_ptr,
    arena_ptr,
    v_ptr,
    first_site,
    sites,
    n_tiles,
    split,
    x_stride,
    in_features,
    slice_stride,
    row_stride,
    plane_stride,
    TILES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    LONG_BLOCK_RANK: tl.constexpr,
    LONG_BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    WAYS: tl.constexpr,
):
    """``LONG_BLOCK_RANK``, ``LONG_BLOCK_IN``: see ``launch.long_block``."""
    slice_number = tl.program_id(0) // split
    share = tl.program_id(0) % split
    first_feature, last_feature = features_of_share(share, split, in_features, BLOCK_IN)
    site = first_site + slice_number

    tiles = tl.arange(0, TILES)
    ranks = tl.load(routes_ptr + (tiles.to(tl.int64) * sites + site) * FIELDS + RANK, mask=tiles < n_tiles, other=0)
    of_tile = tl.where(ranks > LONG_RANK, LONG_BLOCK_RANK, BLOCK_RANK)
    blocks = tl.cdiv(tl.maximum(ranks, 0), of_tile).to(tl.int32)
    ends = tl.cumsum(blocks, axis=0)

    for pair in range(tl.program_id(1), tl.sum(blocks, axis=0), tl.num_programs(1)):
        tile, block = _piece_of_tiles(pair, tiles, blocks, ends)
        entry = routes_ptr + (tile.to(tl.int64) * sites + site) * FIELDS
        rank = tl.load(entry + RANK).to(tl.int32)
        a_ptr = arena_ptr + known_multiple(tl.load(entry + A), VECTOR)
        out_ptr = v_ptr + share.to(tl.int64) * plane_stride + slice_number * slice_stride
        if ROWS == 1:
            r = block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
            row = tl.load(tiles_ptr + tile * WIDTH).to(tl.int64)
            x_row = x_ptr + row * x_stride
            a_rows = a_ptr + r[:, None].to(tl.int64) * in_features
            total = tl.zeros((BLOCK_RANK, BLOCK_IN), tl.float32)
            for feature in tl.range(first_feature, last_feature, BLOCK_IN, num_stages=STAGES):
                k = feature + tl.arange(0, BLOCK_IN)
                a = tl.load(a_rows + k[None, :], mask=(r < rank)[:, None] & (k < last_feature)[None, :], other=0.0)
                x = tl.load(x_row + k, mask=k < last_feature, other=0.0)
                total += a.to(tl.float32) * x.to(tl.float32)[None, :]
            product = tl.sum(total, axis=1)
            tl.store(out_ptr + row * row_stride + r, product, mask=r < rank)
        else:
            rows = rows_of_tile(tiles_ptr, tile, n_tiles, WIDTH, ROWS)
            if LONG_BLOCK_RANK != BLOCK_RANK and rank > LONG_RANK:
                _rows_product(
                    x_ptr,
                    a_ptr,
                    out_ptr,
                    rows,
                    block,
                    rank,
                    x_stride,
                    in_features,
                    row_stride,
                    first_feature,
                    last_feature,
                    ROWS,
                    LONG_BLOCK_RANK,
                    LONG_BLOCK_IN,
                    STAGES,
                    WAYS,
                )
            else:
                _rows_product(
                    x_ptr,
                    a_ptr,
                    out_ptr,
                    rows,
                    block,
                    rank,
                    x_stride,
                    in_features,
                    row_stride,
                    first_feature,
                    last_feature,
                    ROWS,
                    BLOCK_RANK,
                    BLOCK_IN,
                    STAGES,
                    WAYS,
                )


def shrink(
    x: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    tile_rows: int,
    arena: torch.Tensor,
    first_site: int,
    v: torch.Tensor,
    parameters: launch.Shrink | None = None,
) -> None:
    """``parameters``: those of the table if not given."""
    split, rows, n_slices, max_rank = v.shape
    parameters = parameters or launch.shrink("shrink", rows, tile_rows, arena.dtype, max_rank)
    _, n_tiles, width = tiles.shape
    programs = launch.shrink_programs(parameters, n_tiles, n_slices * split, max_rank)
    long_rank, long_in = launch.long_block(parameters, rows, tile_rows, arena.dtype)
    _shrink[(n_slices * split, programs)](
        x,
        tiles,
        routes,
        arena,
        v,
        first_site,
        routes.shape[1],
        n_tiles,
        split,
        x.stride(0),
        x.shape[1],
        v.stride(2),
        v.stride(1),
        v.stride(0),
        TILES=max(16, triton.next_power_of_2(n_tiles)),
        VECTOR=16 // arena.itemsize,
        WIDTH=width,
        ROWS=tile_rows,
        BLOCK_RANK=parameters.block_rank,
        BLOCK_IN=parameters.block_in,
        LONG_BLOCK_RANK=long_rank,
        LONG_BLOCK_IN=long_in,
        STAGES=parameters.num_stages,
        WAYS=launch.ways(parameters, tile_rows, arena.dtype),
        num_warps=parameters.num_warps,
    )
