"""shared_expand: the Triton kernel. A program finishes one block of columns for some tiles.

It runs on the critical path, after the base layer: rows, slots and route of a tile lie at addresses that depend on the
launch alone, and all that ``b`` and ``u`` wait for is one of these. What differs between rows is read meanwhile.
"""

# What @triton.jit compiles is Python by syntax only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from scute_kernels import launch
from scute_kernels.device import (
    BASIS,
    FIELDS,
    SHARED_B,
    SHARED_B_STRIDE,
    SHARED_BASIS,
    SHARED_FIELDS,
    SHARED_RANK,
    D,
    E,
    known_multiple,
    rows_of_tile,
    slice_of_block,
    slots_of_tile,
)

# Elements that lie on no 16 bytes are read one by one, into as many registers: in small blocks, so that this rare way
# does not take the registers, hence the occupancy, of the other.
UNALIGNED_BLOCK = tl.constexpr(16)


@triton.jit
def _ranks_of_basis(b_ptr, b_stride, d_rows, damped, r, rank, n, n_live):
    """``b`` ``(BLOCK_RANK, BLOCK_OUT)``, and the ``d`` of each row ``(ROWS, BLOCK_RANK)``, at the ranks ``r``."""
    within = r < rank
    b_pointers = b_ptr + r[:, None].to(tl.int64) * b_stride + n[None, :]
    b = tl.load(b_pointers, mask=within[:, None] & n_live[None, :], other=0.0)
    d = tl.load(d_rows + r[None, :], mask=damped & within[None, :], other=1.0)
    return b, d


@triton.jit
def _added(total, b, d, u_rows, live, r, rank, max_rank, plane_stride, SPLIT: tl.constexpr):
    """``total + (u * d) b``."""
    # The scratch is R wide: reading past the rank keeps the loads wide, and what lies there is not used.
    pointers = u_rows + r[None, :]
    mask = live[:, None] & (r < max_rank)[None, :]
    u = tl.load(pointers, mask=mask, other=0.0)
    for _ in tl.static_range(1, SPLIT):
        pointers += plane_stride
        u += tl.load(pointers, mask=mask, other=0.0)
    u = tl.where((r < rank)[None, :], u * d.to(tl.float32), 0.0)
    return tl.dot(u.to(b.dtype), b, total, input_precision="ieee")


@triton.jit
def _finish(
    h_pointers,
    h_mask,
    u_rows,
    max_rank,
    plane_stride,
    b_ptr,
    b_stride,
    d_rows,
    damped,
    e,
    rank,
    live,
    n,
    n_live,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``h + ((u * d) b) * e``, stored. ``u_rows``: pointers to the rows, ``(ROWS, 1)``; ``max_rank``: R. ``d_rows``:
    the same to ``d``, of the rows that have one, ``damped``."""
    r = tl.arange(0, BLOCK_RANK)
    b, d = _ranks_of_basis(b_ptr, b_stride, d_rows, damped, r, rank, n, n_live)
    # So far the kernel before this one may have been at work still; u and h are read after its end. This must not be in
    # the loop: with several stages the compiler moves reads of u to before it.
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = tl.load(h_pointers, mask=h_mask, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    total = _added(total, b, d, u_rows, live, r, rank, max_rank, plane_stride, SPLIT)
    for first_rank in range(BLOCK_RANK, rank, BLOCK_RANK):
        r = first_rank + tl.arange(0, BLOCK_RANK)
        b, d = _ranks_of_basis(b_ptr, b_stride, d_rows, damped, r, rank, n, n_live)
        total = _added(total, b, d, u_rows, live, r, rank, max_rank, plane_stride, SPLIT)
    tl.store(h_pointers, (h + total * e.to(tl.float32)).to(h_pointers.dtype.element_ty), mask=h_mask)


@triton.jit
def _route(routes_ptr, tile, n_tiles, sites, site):
    """``SHARED_BASIS, SHARED_RANK, SHARED_B, SHARED_B_STRIDE`` of a tile at a site."""
    route = routes_ptr + (tile.to(tl.int64) * sites + site) * SHARED_FIELDS
    known = tile < n_tiles
    basis = tl.load(route + SHARED_BASIS, mask=known, other=-1)
    rank = tl.load(route + SHARED_RANK, mask=known, other=0).to(tl.int32)
    offset = tl.load(route + SHARED_B, mask=known, other=0)
    stride = tl.load(route + SHARED_B_STRIDE, mask=known, other=0)
    return basis, rank, offset, stride


@triton.jit(do_not_specialize=["first_site", "sites", "n_tiles"])
def _shared_expand(
    h_ptr,
    u_ptr,
    tiles_ptr,
    routes_ptr,
    arena_ptr,
    table_ptr,
    first_site,
    sites,
    n_tiles,
    tiles_stride,
    h_stride,
    max_rank,
    row_stride,
    plane_stride,
    SLICE_OFFSETS: tl.constexpr,
    N_SLICES: tl.constexpr,
    WIDTH_STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    slice_number, begin, width, first_column = slice_of_block(tl.program_id(0), SLICE_OFFSETS, N_SLICES, BLOCK_OUT)
    begin = known_multiple(begin, WIDTH_STEP)
    width = known_multiple(width, WIDTH_STEP)
    site = first_site + slice_number
    n = first_column + tl.arange(0, BLOCK_OUT)
    n_live = n < width

    tile = tl.program_id(1)
    rows = rows_of_tile(tiles_ptr, tile, n_tiles, ROWS, ROWS)
    slots = slots_of_tile(tiles_ptr, tile, n_tiles, tiles_stride, ROWS, ROWS)
    basis, rank, offset, stride = _route(routes_ptr, tile, n_tiles, sites, site)
    while tl.max(rows, axis=0) >= 0:
        if basis >= 0:
            live = rows >= 0
            entries = table_ptr + (slots * sites + site) * FIELDS
            row_bases = tl.load(entries + BASIS, mask=live, other=-1)
            d_offsets = tl.load(entries + D, mask=live, other=-1)
            e_offsets = tl.load(entries + E, mask=live, other=-1)
            damped = ((row_bases >= 0) & (d_offsets >= 0))[:, None]
            d_rows = arena_ptr + d_offsets[:, None]
            present = (row_bases >= 0) & (e_offsets >= 0)
            e_pointers = arena_ptr + known_multiple(tl.where(present, e_offsets, 0), VECTOR)[:, None] + n[None, :]
            e = tl.load(e_pointers, mask=present[:, None] & n_live[None, :], other=1.0)
            u_slice = slice_number  # the first with the same basis
            for i in tl.static_range(N_SLICES - 2, -1, -1):
                other = routes_ptr + (tile.to(tl.int64) * sites + first_site + i) * SHARED_FIELDS
                earlier = tl.load(other + SHARED_BASIS, mask=i < slice_number, other=-1)
                u_slice = tl.where(earlier == basis, i, u_slice)
            u_rows = u_ptr + u_slice * max_rank + rows[:, None] * row_stride
            h_pointers = h_ptr + rows[:, None] * h_stride + begin + n[None, :]
            h_mask = (row_bases >= 0)[:, None] & n_live[None, :]
            if (offset % VECTOR == 0) & (stride % VECTOR == 0):
                _finish(
                    h_pointers,
                    h_mask,
                    u_rows,
                    max_rank,
                    plane_stride,
                    arena_ptr + known_multiple(offset, VECTOR),
                    known_multiple(stride, VECTOR),
                    d_rows,
                    damped,
                    e,
                    rank,
                    live,
                    n,
                    n_live,
                    SPLIT,
                    ROWS,
                    BLOCK_RANK,
                    BLOCK_OUT,
                    PDL,
                )
            else:
                _finish(
                    h_pointers,
                    h_mask,
                    u_rows,
                    max_rank,
                    plane_stride,
                    arena_ptr + offset,
                    stride,
                    d_rows,
                    damped,
                    e,
                    rank,
                    live,
                    n,
                    n_live,
                    SPLIT,
                    ROWS,
                    UNALIGNED_BLOCK,
                    BLOCK_OUT,
                    PDL,
                )

        tile += tl.num_programs(1)
        rows = rows_of_tile(tiles_ptr, tile, n_tiles, ROWS, ROWS)
        slots = slots_of_tile(tiles_ptr, tile, n_tiles, tiles_stride, ROWS, ROWS)
        basis, rank, offset, stride = _route(routes_ptr, tile, n_tiles, sites, site)
    if PDL:  # also where nothing was to be done: who waits for this kernel waits for those before it
        tl.extra.cuda.gdc_wait()


def shared_expand(
    h: torch.Tensor,
    u: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    slice_offsets: Sequence[int],
    parameters: launch.Expand | None = None,
) -> None:
    """``parameters``: those of the table if not given."""
    split, rows, n_slices, max_rank = u.shape
    _, n_tiles, tile_rows = tiles.shape
    parameters = parameters or launch.expand("shared_expand", rows, tile_rows, arena.dtype, max_rank)
    column_blocks = launch.column_blocks(slice_offsets, parameters.block_out)
    _shared_expand[(column_blocks, min(n_tiles, parameters.tile_programs))](
        h,
        u,
        tiles,
        routes,
        arena,
        table,
        first_site,
        table.shape[1],
        n_tiles,
        tiles.stride(0),
        h.stride(0),
        max_rank,
        u.stride(1),
        u.stride(0),
        SLICE_OFFSETS=tuple(slice_offsets),
        N_SLICES=n_slices,
        WIDTH_STEP=launch.width_step(slice_offsets),
        VECTOR=16 // arena.itemsize,
        SPLIT=split,
        ROWS=tile_rows,
        BLOCK_RANK=parameters.block_rank,
        BLOCK_OUT=parameters.block_out,
        PDL=parameters.pdl,
        num_warps=parameters.num_warps,
        num_stages=parameters.num_stages,
        **launch.options(parameters),
    )
