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
    BASIS,
    BASIS_A,
    BASIS_A_STRIDE,
    BASIS_FIELDS,
    BASIS_RANK,
    FIELDS,
    RANK,
    A,
    known_multiple,
    rows_of_tile,
    tile_record,
)

# Elements that lie on no 16 bytes are read one by one, into as many registers: in small blocks, so that this rare way
# does not take the registers, hence the occupancy, of the other.
UNALIGNED_BLOCK = tl.constexpr(32)


@triton.jit
def _product(
    x_ptr,
    x_stride,
    a_ptr,
    a_stride,
    r,
    rank,
    rows,
    live,
    first,
    last,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """``x a^T`` over the features from ``first`` to ``last``, ``(ROWS, BLOCK_RANK)`` fp32. ``r``: the ranks."""
    a_rows = a_ptr + r[:, None].to(tl.int64) * a_stride
    x_rows = x_ptr + rows[:, None] * x_stride
    total = tl.zeros((ROWS, BLOCK_RANK), tl.float32)
    for start in range(first, last, BLOCK_IN):
        k = start + tl.arange(0, BLOCK_IN)
        a = tl.load(a_rows + k[None, :], mask=(r < rank)[:, None] & (k < last)[None, :], other=0.0)
        x = tl.load(x_rows + k[None, :], mask=live[:, None] & (k < last)[None, :], other=0.0)
        total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["first_site", "sites", "n_tiles"])
def _shrink(
    x_ptr,
    order_ptr,
    tiles_ptr,
    routes_ptr,
    arena_ptr,
    bases_ptr,
    origins_ptr,
    v_ptr,
    u_ptr,
    first_site,
    sites,
    n_tiles,
    x_stride,
    in_features,
    v_rank,
    v_row_stride,
    v_plane_stride,
    u_rank,
    u_row_stride,
    u_plane_stride,
    OWN: tl.constexpr,
    SHARED: tl.constexpr,
    N_SLICES: tl.constexpr,
    TILES: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slice_number = tl.program_id(1) // SPLIT
    share = tl.program_id(1) % SPLIT
    width_of_share = tl.cdiv(tl.cdiv(in_features, BLOCK_IN), SPLIT) * BLOCK_IN
    first_feature = share * width_of_share
    last_feature = tl.minimum(first_feature + width_of_share, in_features)

    tiles = tl.arange(0, TILES)
    known = tiles < n_tiles
    entries = routes_ptr + (tiles.to(tl.int64) * sites + first_site) * FIELDS
    own_blocks = tl.zeros((TILES,), tl.int32)
    if OWN:
        ranks = tl.load(entries + slice_number * FIELDS + RANK, mask=known, other=0)
        own_blocks = tl.cdiv(tl.maximum(ranks, 0), BLOCK_RANK).to(tl.int32)
    shared_blocks = tl.zeros((TILES,), tl.int32)
    if SHARED:
        bases = tl.load(entries + slice_number * FIELDS + BASIS, mask=known, other=-1)
        first = bases >= 0  # whether this is the first slice of the tile with this basis
        for i in tl.static_range(N_SLICES - 1):
            earlier = tl.load(entries + i * FIELDS + BASIS, mask=known & (i < slice_number), other=-1)
            first = first & (earlier != bases)
        ranks = tl.load(bases_ptr + bases * BASIS_FIELDS + BASIS_RANK, mask=first, other=0)
        shared_blocks = tl.cdiv(ranks, BLOCK_RANK).to(tl.int32)
    blocks = own_blocks + shared_blocks
    ends = tl.cumsum(blocks, axis=0)

    if PDL:
        tl.extra.cuda.gdc_wait()
    for pair in range(tl.program_id(0), tl.sum(blocks, axis=0), tl.num_programs(0)):
        tile = tl.sum((ends <= pair).to(tl.int32), axis=0)
        block = pair - tl.sum(tl.where(tiles == tile, ends - blocks, 0), axis=0)
        blocks_before = tl.sum(tl.where(tiles == tile, own_blocks, 0), axis=0)
        start, length, _, first_row = tile_record(tiles_ptr, tile, n_tiles)
        rows, live = rows_of_tile(order_ptr, start, length, first_row, ROWS)
        entry = routes_ptr + (tile.to(tl.int64) * sites + first_site + slice_number) * FIELDS

        # The own pair, unless this block is of the shared one.
        rank = tl.load(entry + RANK).to(tl.int32)
        offset = tl.load(entry + A)
        stride = tl.cast(in_features, tl.int64)
        out_ptr = v_ptr + slice_number * v_rank
        row_stride = tl.cast(v_row_stride, tl.int64)
        plane_stride = tl.cast(v_plane_stride, tl.int64)
        if SHARED:  # noqa: SIM102 - a constant and a condition on the device
            if block >= blocks_before:
                block -= blocks_before
                shared = bases_ptr + tl.load(entry + BASIS) * BASIS_FIELDS
                rank = tl.load(shared + BASIS_RANK).to(tl.int32)
                offset = tl.load(shared + BASIS_A) + tl.load(origins_ptr + 2 * (first_site + slice_number))
                stride = tl.load(shared + BASIS_A_STRIDE)
                out_ptr = u_ptr + slice_number * u_rank
                row_stride = tl.cast(u_row_stride, tl.int64)
                plane_stride = tl.cast(u_plane_stride, tl.int64)

        r = block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
        if (offset % VECTOR == 0) & (stride % VECTOR == 0):
            product = _product(
                x_ptr,
                x_stride,
                arena_ptr + known_multiple(offset, VECTOR),
                known_multiple(stride, VECTOR),
                r,
                rank,
                rows,
                live,
                first_feature,
                last_feature,
                ROWS,
                BLOCK_RANK,
                BLOCK_IN,
            )
        else:
            product = _product(
                x_ptr,
                x_stride,
                arena_ptr + offset,
                stride,
                r,
                rank,
                rows,
                live,
                first_feature,
                last_feature,
                ROWS,
                BLOCK_RANK,
                UNALIGNED_BLOCK,
            )
        plane_ptr = out_ptr + share.to(tl.int64) * plane_stride
        tl.store(plane_ptr + rows[:, None] * row_stride + r[None, :], product, mask=live[:, None] & (r < rank)[None, :])


def shrink(
    x: torch.Tensor,
    row_slot: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    routes: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    bases: torch.Tensor,
    origins: torch.Tensor,
    first_site: int,
    v: torch.Tensor,
    u: torch.Tensor,
) -> None:
    own, shared = v.numel() > 0, u.numel() > 0
    if not own and not shared:
        return
    split, rows, n_slices, _ = (v if own else u).shape
    v_rank, u_rank = (v.shape[-1] if own else 0), (u.shape[-1] if shared else 0)
    parameters = launch.shrink(rows, arena.dtype, max(v_rank, u_rank))
    # No more programs than blocks of ranks there can be.
    most = tiles.shape[0] * (triton.cdiv(v_rank, parameters.block_rank) + triton.cdiv(u_rank, parameters.block_rank))
    programs = max(1, min(most, parameters.programs // (n_slices * split)))
    _shrink[(programs, n_slices * split)](
        x,
        order,
        tiles,
        routes,
        arena,
        bases,
        origins,
        v,
        u,
        first_site,
        table.shape[1],
        tiles.shape[0],
        x.stride(0),
        x.shape[1],
        v_rank,
        v.stride(1) if own else 0,
        v.stride(0) if own else 0,
        u_rank,
        u.stride(1) if shared else 0,
        u.stride(0) if shared else 0,
        OWN=own,
        SHARED=shared,
        N_SLICES=n_slices,
        TILES=max(16, triton.next_power_of_2(tiles.shape[0])),
        VECTOR=16 // arena.itemsize,
        ROWS=tile_rows,
        SPLIT=split,
        BLOCK_RANK=parameters.block_rank,
        BLOCK_IN=parameters.block_in,
        PDL=parameters.pdl,
        num_warps=parameters.num_warps,
        num_stages=parameters.num_stages,
        **launch.pdl(parameters.pdl),
    )
