"""expand: the Triton kernels. A program finishes a block of columns for one row, or some blocks for some tiles.

They run on the critical path, after the base layer, so they wait as seldom as they can: what a tile has at a site is in
``routes``, at an address that depends on the launch alone, and everything else follows from that in one step.
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
    BIAS,
    FIELDS,
    RANK,
    ROTATION,
    SCALE,
    B,
    known_multiple,
    planes,
    planes_product,
    rows_of_tile,
    slice_of_block,
)


@triton.jit
def _entry(
    routes_ptr,
    tile,
    n_tiles,
    sites,
    first_site,
    slice_number,
    SHARED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of a tile at a slice: ``RANK, B, SCALE, BIAS``; whether it has an ``addend``; whether its outputs are those of
    further rows; whether there is anything to do. No part at or beyond ``n_tiles``."""
    first = routes_ptr + (tile.to(tl.int64) * sites + first_site) * FIELDS
    entry = first + slice_number * FIELDS
    known = tile < n_tiles
    rank = tl.load(entry + RANK, mask=known, other=0).to(tl.int32)
    b = tl.load(entry + B, mask=known, other=-1)
    scale = tl.load(entry + SCALE, mask=known, other=-1)
    bias = tl.load(entry + BIAS, mask=known, other=-1)
    shared = tl.load(entry + BASIS, mask=known & SHARED, other=-1) >= 0
    later = known & WIDE & (slice_number > 0)
    from_further = tl.load(first + ROTATION, mask=later, other=-1) >= 0
    from_further |= tl.load(entry + ROTATION, mask=later, other=-1) >= 0
    any_part = (rank > 0) | (scale >= 0) | (bias >= 0) | shared | from_further
    return tl.maximum(rank, 0), b, scale, bias, shared, from_further, any_part


@triton.jit
def _vector(arena_ptr, offset, n, n_live, VECTOR: tl.constexpr):
    """The vector at an offset, ``(BLOCK_OUT,)`` fp32; 0 if absent (-1)."""
    present = offset >= 0
    pointers = arena_ptr + known_multiple(tl.where(present, offset, 0), VECTOR) + n
    return tl.load(pointers, mask=n_live & present, other=0.0).to(tl.float32)


@triton.jit
def _planes(v_ptr, r, within, plane_stride, SPLIT: tl.constexpr):
    """The sum of the planes of one row at the ranks ``r``."""
    v = tl.load(v_ptr + r, mask=within, other=0.0)
    for plane in tl.static_range(1, SPLIT):
        v += tl.load(v_ptr + plane * plane_stride + r, mask=within, other=0.0)
    return v


@triton.jit(do_not_specialize=["first_site", "sites", "n_tiles", "rows_of_batch", "n_further"])
def _expand_rows(
    h_ptr,
    v_ptr,
    addend_ptr,
    tiles_ptr,
    routes_ptr,
    arena_ptr,
    first_site,
    sites,
    n_tiles,
    rows_of_batch,
    n_further,
    tiles_stride,
    h_stride,
    addend_stride,
    slice_stride,
    row_stride,
    plane_stride,
    SHARED: tl.constexpr,
    WIDE: tl.constexpr,
    SLICE_OFFSETS: tl.constexpr,
    N_SLICES: tl.constexpr,
    WIDTH_STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    LATER_RANKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every tile is one row. ``LATER_RANKS``: block of ranks behind the first ``BLOCK_RANK``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slice_number, begin, width, first_column = slice_of_block(tl.program_id(0), SLICE_OFFSETS, N_SLICES, BLOCK_OUT)
    begin = known_multiple(begin, WIDTH_STEP)
    width = known_multiple(width, WIDTH_STEP)
    n = first_column + tl.arange(0, BLOCK_OUT)
    n_live = n < width

    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + tile * WIDTH)
    source = row
    if WIDE:  # beside the route, not after it
        in_further = tl.load(tiles_ptr + 2 * tiles_stride + tile * WIDTH)
    rank, b_offset, scale, bias, shared, from_further, any_part = _entry(
        routes_ptr, tile, n_tiles, sites, first_site, slice_number, SHARED, WIDE
    )
    if WIDE:
        source = tl.where(from_further, rows_of_batch + (slice_number - 1) * n_further + in_further, row)
    if (row >= 0) & any_part:
        # The adapter's own memory is read while the kernel before this one may be at work; h, v and addend are not.
        r = tl.arange(0, BLOCK_RANK)
        within = r < rank
        b_ptr = arena_ptr + known_multiple(b_offset, VECTOR)
        pointers = b_ptr + r[:, None].to(tl.int64) * width + n[None, :]
        b = tl.load(pointers, mask=within[:, None] & n_live[None, :], other=0.0)
        scale_vector = _vector(arena_ptr, scale, n, n_live, VECTOR)
        bias_vector = _vector(arena_ptr, bias, n, n_live, VECTOR)
        if PDL:
            tl.extra.cuda.gdc_wait()
        columns = h_ptr + begin + n
        h = tl.load(columns + source.to(tl.int64) * h_stride, mask=n_live, other=0.0).to(tl.float32)
        total = h + h * scale_vector + bias_vector
        if SHARED:
            addend_pointers = addend_ptr + row.to(tl.int64) * addend_stride + begin + n
            total += tl.load(addend_pointers, mask=n_live & shared, other=0.0)
        v_row = v_ptr + row.to(tl.int64) * row_stride + slice_number * slice_stride
        v = _planes(v_row, r, within, plane_stride, SPLIT)
        total += tl.sum(b.to(tl.float32) * v[:, None], axis=0)
        # Names of their own: in a loop no variable may change its shape.
        for first_rank in range(BLOCK_RANK, rank, LATER_RANKS):
            later = first_rank + tl.arange(0, LATER_RANKS)
            later_within = later < rank
            later_pointers = b_ptr + later[:, None].to(tl.int64) * width + n[None, :]
            later_b = tl.load(later_pointers, mask=later_within[:, None] & n_live[None, :], other=0.0)
            later_v = _planes(v_row, later, later_within, plane_stride, SPLIT)
            total += tl.sum(later_b.to(tl.float32) * later_v[:, None], axis=0)
        tl.store(columns + row.to(tl.int64) * h_stride, total.to(h_ptr.dtype.element_ty), mask=n_live)
    if PDL:  # also where nothing was to be done: who waits for this kernel waits for those before it
        tl.extra.cuda.gdc_wait()


@triton.jit
def _base(h_rows, addend_rows, scale_vector, bias_vector, shared, live, n, n_live, SHARED: tl.constexpr):
    """What rows have besides their own pair, fp32: a row for each of ``live``, a column for each of ``n``. ``h_rows``,
    ``addend_rows``: pointers to the first column of the slice, a row for each."""
    mask = live[:, None] & n_live[None, :]
    h = tl.load(h_rows + n[None, :], mask=mask, other=0.0).to(tl.float32)
    h += h * scale_vector[None, :] + bias_vector[None, :]
    if SHARED:
        h += tl.load(addend_rows + n[None, :], mask=mask & shared, other=0.0)
    return h


@triton.jit
def _columns(
    parts,
    b_ptr,
    arena_ptr,
    rank,
    scale,
    bias,
    shared,
    max_rank,
    plane_stride,
    width,
    first_column,
    last_column,
    SHARED: tl.constexpr,
    VECTOR: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Finishes some columns of a tile whose rank is at most ``BLOCK_RANK``, each block while the next are read.
    ``parts``: of ``_rows``, ``PARTS`` of them, which meet a block one after the other."""
    r = tl.arange(0, BLOCK_RANK)
    v = ()
    for i in tl.static_range(PARTS):
        _, _, _, v_rows, live = parts[i]
        v += (planes(v_rows, r, rank, max_rank, live, plane_stride, SPLIT).to(arena_ptr.dtype.element_ty),)
    for column in tl.range(first_column, last_column, BLOCK_OUT, num_stages=STAGES):
        n = column + tl.arange(0, BLOCK_OUT)
        n_live = n < last_column
        scale_vector = _vector(arena_ptr, scale, n, n_live, VECTOR)
        bias_vector = _vector(arena_ptr, bias, n, n_live, VECTOR)
        b_pointers = b_ptr + r[:, None] * width + n[None, :]
        b = tl.load(b_pointers, mask=(r < rank)[:, None] & n_live[None, :], other=0.0)
        for i in tl.static_range(PARTS):
            out_rows, h_rows, addend_rows, _, live = parts[i]
            total = _base(h_rows, addend_rows, scale_vector, bias_vector, shared, live, n, n_live, SHARED)
            total += tl.dot(v[i], b, input_precision="ieee")
            tl.store(out_rows + n[None, :], total.to(out_rows.dtype.element_ty), mask=live[:, None] & n_live[None, :])


@triton.jit
def _rows(
    rows,
    tiles_ptr,
    of_slice,
    WIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of the ``rows`` of ``ROWS`` places of a tile, the first at ``tiles_ptr``: pointers to the first column of the
    slice, where it is written, where it is read and in ``addend``, and to the row of ``v``, each ``(ROWS, 1)``; which
    places have rows. ``of_slice``: what its parts have in common, see ``_expand_tiles``."""
    h_ptr, v_ptr, addend_ptr, strides, tile_of, further, slice_number, begin = of_slice
    h_stride, addend_stride, row_stride, max_rank = strides
    tile, n_tiles, tiles_stride = tile_of
    rows_of_batch, n_further, from_further = further
    out_rows = h_ptr + rows[:, None] * h_stride + begin
    h_rows = out_rows
    if WIDE:
        in_further = rows_of_tile(tiles_ptr + 2 * tiles_stride, tile, n_tiles, WIDTH, ROWS)
        further_rows = rows_of_batch + (slice_number - 1) * n_further + in_further
        h_rows = h_ptr + tl.where(from_further, further_rows, rows)[:, None] * h_stride + begin
    addend_rows = addend_ptr + rows[:, None] * addend_stride + begin
    v_rows = v_ptr + slice_number * max_rank + rows[:, None] * row_stride
    return out_rows, h_rows, addend_rows, v_rows, rows >= 0


@triton.jit(do_not_specialize=["first_site", "sites", "n_tiles", "rows_of_batch", "n_further", "run"])
def _expand_tiles(
    h_ptr,
    v_ptr,
    addend_ptr,
    tiles_ptr,
    routes_ptr,
    arena_ptr,
    first_site,
    sites,
    n_tiles,
    rows_of_batch,
    n_further,
    tiles_stride,
    h_stride,
    addend_stride,
    max_rank,
    row_stride,
    plane_stride,
    run,
    SHARED: tl.constexpr,
    WIDE: tl.constexpr,
    SLICE_OFFSETS: tl.constexpr,
    N_SLICES: tl.constexpr,
    WIDTH_STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    N_RANK_BLOCKS: tl.constexpr,
    LARGER: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Does ``run`` blocks of columns of a slice, one after another: the next ones are on their way meanwhile.
    ``RANK_BLOCKS``, ``STAGES``, ``PARTS``: see ``launch.rank_blocks`` and ``launch.expand_parts``. ``LARGER``: whether
    there may be larger ranks, which go by blocks of ``BLOCK_RANK``; where there are none, their way would take
    registers from the others."""
    slice_number, begin, width, first_column = slice_of_block(
        tl.program_id(0), SLICE_OFFSETS, N_SLICES, run * BLOCK_OUT
    )
    begin = known_multiple(begin, WIDTH_STEP)
    width = known_multiple(width, WIDTH_STEP)
    first_column = known_multiple(first_column, BLOCK_OUT)
    last_column = known_multiple(tl.minimum(first_column + run * BLOCK_OUT, width), WIDTH_STEP)

    tile = tl.program_id(1)
    rows = rows_of_tile(tiles_ptr, tile, n_tiles, WIDTH, ROWS)
    while tl.max(rows, axis=0) >= 0:
        rank, b_offset, scale, bias, shared, from_further, any_part = _entry(
            routes_ptr, tile, n_tiles, sites, first_site, slice_number, SHARED, WIDE
        )
        if any_part:
            strides = h_stride, addend_stride, row_stride, max_rank
            further = rows_of_batch, n_further, from_further
            tile_of = tile, n_tiles, tiles_stride
            of_slice = h_ptr, v_ptr, addend_ptr, strides, tile_of, further, slice_number, begin
            whole = _rows(rows, tiles_ptr, of_slice, WIDE, WIDTH, ROWS)
            out_rows, h_rows, addend_rows, v_rows, live = whole
            b_ptr = arena_ptr + known_multiple(b_offset, VECTOR)
            for i in tl.static_range(N_RANK_BLOCKS):
                if (rank <= RANK_BLOCKS[i]) & ((i == 0) | (rank > RANK_BLOCKS[i - 1])):
                    parts = (whole,)
                    if PARTS[i] > 1:
                        parts = ()
                        for part in tl.static_range(PARTS[i]):
                            places_ptr = tiles_ptr + part * (ROWS // PARTS[i])
                            places = rows_of_tile(places_ptr, tile, n_tiles, WIDTH, ROWS // PARTS[i])
                            parts += (_rows(places, places_ptr, of_slice, WIDE, WIDTH, ROWS // PARTS[i]),)
                    _columns(
                        parts,
                        b_ptr,
                        arena_ptr,
                        rank,
                        scale,
                        bias,
                        shared,
                        max_rank,
                        plane_stride,
                        width,
                        first_column,
                        last_column,
                        SHARED,
                        VECTOR,
                        SPLIT,
                        PARTS[i],
                        RANK_BLOCKS[i],
                        PARTS[i] * BLOCK_OUT,
                        STAGES[i],
                    )
            if LARGER and rank > RANK_BLOCKS[N_RANK_BLOCKS - 1]:
                for column in range(first_column, last_column, BLOCK_OUT):
                    n = column + tl.arange(0, BLOCK_OUT)
                    n_live = n < width
                    scale_vector = _vector(arena_ptr, scale, n, n_live, VECTOR)
                    bias_vector = _vector(arena_ptr, bias, n, n_live, VECTOR)
                    total = _base(h_rows, addend_rows, scale_vector, bias_vector, shared, live, n, n_live, SHARED)
                    total += planes_product(
                        v_rows,
                        max_rank,
                        plane_stride,
                        b_ptr,
                        width,
                        rank,
                        live,
                        n,
                        n_live,
                        SPLIT,
                        ROWS,
                        BLOCK_RANK,
                        BLOCK_OUT,
                    )
                    tl.store(
                        out_rows + n[None, :], total.to(h_ptr.dtype.element_ty), mask=live[:, None] & n_live[None, :]
                    )
        tile += tl.num_programs(1)
        rows = rows_of_tile(tiles_ptr, tile, n_tiles, WIDTH, ROWS)


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
    parameters: launch.Expand | None = None,
) -> None:
    """``parameters``: those of the table if not given; ``launch.expand_rows`` and ``expand_run`` adapt either."""
    shared = addend.numel() > 0
    split, rows, n_slices, max_rank = v.shape
    plane_stride, row_stride, slice_stride, _ = v.stride()
    wide = h.shape[0] > rows
    n_further = (h.shape[0] - rows) // max(1, n_slices - 1)
    parameters = parameters or launch.expand(rows, tile_rows, arena.dtype, max_rank)
    width_step = launch.width_step(slice_offsets)
    n_tiles, sites, _ = routes.shape
    width = tiles.shape[2]
    if tile_rows == 1:
        parameters, later_ranks = launch.expand_rows(parameters, n_tiles, slice_offsets)
        column_blocks = launch.column_blocks(slice_offsets, parameters.block_out)
        _expand_rows[(column_blocks, n_tiles)](
            h,
            v,
            addend,
            tiles,
            routes,
            arena,
            first_site,
            sites,
            n_tiles,
            rows,
            n_further,
            tiles.stride(0),
            h.stride(0),
            addend.stride(0),
            slice_stride,
            row_stride,
            plane_stride,
            SHARED=shared,
            WIDE=wide,
            SLICE_OFFSETS=tuple(slice_offsets),
            N_SLICES=n_slices,
            WIDTH_STEP=width_step,
            VECTOR=16 // arena.itemsize,
            SPLIT=split,
            WIDTH=width,
            BLOCK_RANK=parameters.block_rank,
            LATER_RANKS=later_ranks,
            BLOCK_OUT=parameters.block_out,
            PDL=parameters.pdl,
            num_warps=parameters.num_warps,
            num_stages=parameters.num_stages,
            **launch.options(parameters.pdl),
        )
        return
    rank_blocks, stages = launch.rank_blocks(parameters, tile_rows, arena.dtype, max_rank)
    parts = launch.expand_parts(tile_rows, arena.dtype, slice_offsets)
    run = launch.expand_run(parameters, rows, n_tiles, tile_rows, rank_blocks[-1], parts, slice_offsets)
    column_blocks = launch.column_blocks(slice_offsets, run * parameters.block_out)
    _expand_tiles[(column_blocks, min(n_tiles, parameters.tile_programs))](
        h,
        v,
        addend,
        tiles,
        routes,
        arena,
        first_site,
        sites,
        n_tiles,
        rows,
        n_further,
        tiles.stride(0),
        h.stride(0),
        addend.stride(0),
        max_rank,
        row_stride,
        plane_stride,
        run,
        SHARED=shared,
        WIDE=wide,
        SLICE_OFFSETS=tuple(slice_offsets),
        N_SLICES=n_slices,
        WIDTH_STEP=width_step,
        VECTOR=16 // arena.itemsize,
        SPLIT=split,
        WIDTH=width,
        ROWS=tile_rows,
        RANK_BLOCKS=rank_blocks,
        STAGES=(max(1, stages[0] - parts + 1), *stages[1:]),
        PARTS=(parts, *(1 for _ in rank_blocks[1:])),
        N_RANK_BLOCKS=len(rank_blocks),
        LARGER=max_rank > rank_blocks[-1],
        BLOCK_RANK=parameters.block_rank,
        BLOCK_OUT=parameters.block_out,
        num_warps=parameters.num_warps,
        num_stages=1,  # of the loop over ranks: each stage would hold every plane of v
        **launch.few_registers(parameters.num_warps),
    )
