"""shared_expand: the Triton kernel. A program finishes some blocks of columns for some tiles.

Rows and route of a tile lie at addresses that depend on the launch alone, in decode with where the ``e`` of each row
is, and all that ``b`` and ``u`` wait for is one of these.
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
    SHARED_RANK,
    E,
    known_multiple,
    membership,
    planes,
    planes_product,
    rows_of_tile,
    slice_of_block,
)

# Elements that lie on no 16 bytes are read one by one, into as many registers: in small blocks, so that this rare way
# does not take the registers, hence the occupancy, of the other.
UNALIGNED_BLOCK = tl.constexpr(16)
# Ranks beyond one block.
LONG_RANK_BLOCK = tl.constexpr(64)


@triton.jit
def _route(routes_ptr, tile, n_tiles, sites, site, ROUTE_FIELDS: tl.constexpr):
    """``SHARED_BASIS, SHARED_RANK, SHARED_B, SHARED_B_STRIDE`` of a tile at a site."""
    route = routes_ptr + (tile.to(tl.int64) * sites + site) * ROUTE_FIELDS
    known = tile < n_tiles
    basis = tl.load(route + SHARED_BASIS, mask=known, other=-1)
    rank = tl.load(route + SHARED_RANK, mask=known, other=0).to(tl.int32)
    offset = tl.load(route + SHARED_B, mask=known, other=0)
    stride = tl.load(route + SHARED_B_STRIDE, mask=known, other=0)
    return basis, rank, offset, stride


@triton.jit
def _factors(arena_ptr, e_offsets, n, n_live, VECTOR: tl.constexpr):
    """``e`` of each row, ``(ROWS, BLOCK_OUT)``; 1 where it is absent (-1)."""
    present = e_offsets >= 0
    pointers = arena_ptr + known_multiple(tl.where(present, e_offsets, 0), VECTOR)[:, None] + n[None, :]
    return tl.load(pointers, mask=present[:, None] & n_live[None, :], other=1.0)


@triton.jit
def _put(pointers, total, mask, ADD: tl.constexpr):
    if ADD:
        total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, total.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _by_blocks_of_ranks(
    out_rows,
    u_rows,
    arena_ptr,
    b_ptr,
    b_stride,
    offset,
    stride,
    aligned,
    rank,
    max_rank,
    member,
    e_offsets,
    plane_stride,
    column,
    width,
    ADD: tl.constexpr,
    VECTOR: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """A block of columns of a tile with more ranks than one block, or whose ``b`` lies on no 16 bytes (not
    ``aligned``). ``b_ptr``, ``b_stride``: ``offset`` and ``stride`` in the form of ``known_multiple``."""
    n = column + tl.arange(0, BLOCK_OUT)
    n_live = n < width
    e = _factors(arena_ptr, e_offsets, n, n_live, VECTOR)
    if aligned:
        total = planes_product(
            u_rows,
            max_rank,
            plane_stride,
            b_ptr,
            b_stride,
            rank,
            member,
            n,
            n_live,
            SPLIT,
            ROWS,
            LONG_RANK_BLOCK,
            BLOCK_OUT,
        )
    else:
        total = planes_product(
            u_rows,
            max_rank,
            plane_stride,
            arena_ptr + offset,
            stride,
            rank,
            member,
            n,
            n_live,
            SPLIT,
            ROWS,
            UNALIGNED_BLOCK,
            BLOCK_OUT,
        )
    total *= e.to(tl.float32)
    _put(out_rows + n[None, :], total, member[:, None] & n_live[None, :], ADD)


@triton.jit(do_not_specialize=["first_site", "sites", "n_tiles"])
def _shared_expand(
    out_ptr,
    u_ptr,
    tiles_ptr,
    routes_ptr,
    leading_ptr,
    arena_ptr,
    table_ptr,
    first_site,
    sites,
    n_tiles,
    tiles_stride,
    out_stride,
    max_rank,
    row_stride,
    plane_stride,
    ADD: tl.constexpr,
    SLICE_OFFSETS: tl.constexpr,
    N_SLICES: tl.constexpr,
    ROUTE_FIELDS: tl.constexpr,
    WIDTH_STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Does ``RUN`` blocks of columns of a slice, one after another: the next ones are on their way meanwhile."""
    slice_number, begin, width, first_column = slice_of_block(
        tl.program_id(0), SLICE_OFFSETS, N_SLICES, RUN * BLOCK_OUT
    )
    begin = known_multiple(begin, WIDTH_STEP)
    width = known_multiple(width, WIDTH_STEP)
    last_column = tl.minimum(first_column + RUN * BLOCK_OUT, width)
    site = first_site + slice_number

    leading = tl.load(leading_ptr)
    tile = tl.program_id(1)
    rows = rows_of_tile(tiles_ptr, tile, n_tiles, ROWS, ROWS)
    basis, rank, offset, stride = _route(routes_ptr, tile, n_tiles, sites, site, ROUTE_FIELDS)
    while tile < leading:
        if basis >= 0:
            live = rows >= 0
            member, e_offsets = membership(
                routes_ptr, tiles_ptr, table_ptr, tile, n_tiles, tiles_stride, sites, site, live, E, ROUTE_FIELDS, ROWS
            )
            u_rows = u_ptr + slice_number * max_rank + rows[:, None] * row_stride
            out_rows = out_ptr + rows[:, None] * out_stride + begin
            aligned = (offset % VECTOR == 0) & (stride % VECTOR == 0)
            b_ptr = arena_ptr + known_multiple(offset, VECTOR)
            b_stride = known_multiple(stride, VECTOR)
            if aligned & (rank <= BLOCK_RANK):
                r = tl.arange(0, BLOCK_RANK)
                # Of every row of the tile, so that reading does not wait for who is a member: others are not written.
                u = planes(u_rows, r, rank, max_rank, live, plane_stride, SPLIT).to(arena_ptr.dtype.element_ty)
                b_rows = b_ptr + r[:, None].to(tl.int64) * b_stride
                for column in tl.range(first_column, last_column, BLOCK_OUT, num_stages=STAGES):
                    n = column + tl.arange(0, BLOCK_OUT)
                    n_live = n < width
                    b = tl.load(b_rows + n[None, :], mask=(r < rank)[:, None] & n_live[None, :], other=0.0)
                    e = _factors(arena_ptr, e_offsets, n, n_live, VECTOR)
                    total = tl.dot(u, b, input_precision="ieee") * e.to(tl.float32)
                    _put(out_rows + n[None, :], total, member[:, None] & n_live[None, :], ADD)
            else:
                for column in range(first_column, last_column, BLOCK_OUT):
                    _by_blocks_of_ranks(
                        out_rows,
                        u_rows,
                        arena_ptr,
                        b_ptr,
                        b_stride,
                        offset,
                        stride,
                        aligned,
                        rank,
                        max_rank,
                        member,
                        e_offsets,
                        plane_stride,
                        column,
                        width,
                        ADD,
                        VECTOR,
                        SPLIT,
                        ROWS,
                        BLOCK_OUT,
                    )

        tile += tl.num_programs(1)
        rows = rows_of_tile(tiles_ptr, tile, n_tiles, ROWS, ROWS)
        basis, rank, offset, stride = _route(routes_ptr, tile, n_tiles, sites, site, ROUTE_FIELDS)


@triton.jit(do_not_specialize=["first_site", "sites", "n_tiles", "run"])
def _shared_expand_pairs(
    out_ptr,
    u_ptr,
    tiles_ptr,
    routes_ptr,
    leading_ptr,
    arena_ptr,
    table_ptr,
    first_site,
    sites,
    n_tiles,
    run,
    tiles_stride,
    out_stride,
    max_rank,
    row_stride,
    plane_stride,
    ADD: tl.constexpr,
    SLICE_OFFSETS: tl.constexpr,
    N_SLICES: tl.constexpr,
    ROUTE_FIELDS: tl.constexpr,
    WIDTH_STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For prefill: two tiles at once, so that ``b`` is read half as often. They have one basis, as a rule; else one
    after the other is multiplied, the rows of the other left out."""
    PLACES: tl.constexpr = 2 * ROWS
    slice_number, begin, width, first_column = slice_of_block(
        tl.program_id(0), SLICE_OFFSETS, N_SLICES, run * BLOCK_OUT
    )
    begin = known_multiple(begin, WIDTH_STEP)
    width = known_multiple(width, WIDTH_STEP)
    # As many blocks as a run, but one beside that of the next program, for memory gives long runs of columns faster.
    first_column = known_multiple(first_column // run, BLOCK_OUT)
    step = known_multiple(tl.cdiv(width, run * BLOCK_OUT) * BLOCK_OUT, BLOCK_OUT)
    site = first_site + slice_number

    leading = tl.minimum(tl.load(leading_ptr), n_tiles)
    place = tl.arange(0, PLACES)
    first_tile = 2 * tl.program_id(1)
    while first_tile < leading:
        tile_of_row = first_tile + place // ROWS
        known = tile_of_row < leading
        rows = tl.load(tiles_ptr + first_tile * ROWS + place, mask=known, other=-1).to(tl.int64)
        slots = tl.load(tiles_ptr + tiles_stride + first_tile * ROWS + place, mask=known, other=-1).to(tl.int64)
        basis_route = routes_ptr + (tile_of_row.to(tl.int64) * sites + site) * ROUTE_FIELDS + SHARED_BASIS
        bases = tl.load(basis_route, mask=known, other=-1)
        entries = table_ptr + (slots * sites + site) * FIELDS
        in_basis = tl.load(entries + BASIS, mask=rows >= 0, other=-1) >= 0
        all_e = tl.load(entries + E, mask=rows >= 0, other=-1)
        before = -1 + tl.zeros((), tl.int64)
        for i in range(2):
            basis, rank, offset, stride = _route(routes_ptr, first_tile + i, leading, sites, site, ROUTE_FIELDS)
            member = in_basis & (bases == basis)
            if (basis >= 0) & (basis != before):
                e_offsets = tl.where(member, all_e, -1)
                first_e = tl.max(e_offsets, axis=0)
                one_e = tl.min(tl.where(member, all_e, first_e), axis=0) == first_e
                u_rows = u_ptr + slice_number * max_rank + rows[:, None] * row_stride
                out_rows = out_ptr + rows[:, None] * out_stride + begin
                aligned = (offset % VECTOR == 0) & (stride % VECTOR == 0)
                b_ptr = arena_ptr + known_multiple(offset, VECTOR)
                b_stride = known_multiple(stride, VECTOR)
                if aligned & (rank <= BLOCK_RANK):
                    r = tl.arange(0, BLOCK_RANK)
                    u = planes(u_rows, r, rank, max_rank, member, plane_stride, SPLIT).to(arena_ptr.dtype.element_ty)
                    b_rows = b_ptr + r[:, None].to(tl.int64) * b_stride
                    if one_e:
                        for column in tl.range(first_column, width, step, num_stages=STAGES):
                            n = column + tl.arange(0, BLOCK_OUT)
                            n_live = n < width
                            b = tl.load(b_rows + n[None, :], mask=(r < rank)[:, None] & n_live[None, :], other=0.0)
                            e_pointers = arena_ptr + known_multiple(tl.maximum(first_e, 0), VECTOR) + n
                            e = tl.load(e_pointers, mask=n_live & (first_e >= 0), other=1.0).to(tl.float32)
                            total = tl.dot(u, b, input_precision="ieee") * e[None, :]
                            _put(out_rows + n[None, :], total, member[:, None] & n_live[None, :], ADD)
                    else:
                        for column in tl.range(first_column, width, step, num_stages=2):
                            n = column + tl.arange(0, BLOCK_OUT)
                            n_live = n < width
                            b = tl.load(b_rows + n[None, :], mask=(r < rank)[:, None] & n_live[None, :], other=0.0)
                            e = _factors(arena_ptr, e_offsets, n, n_live, VECTOR)
                            total = tl.dot(u, b, input_precision="ieee") * e.to(tl.float32)
                            _put(out_rows + n[None, :], total, member[:, None] & n_live[None, :], ADD)
                else:
                    for column in range(first_column, width, step):
                        _by_blocks_of_ranks(
                            out_rows,
                            u_rows,
                            arena_ptr,
                            b_ptr,
                            b_stride,
                            offset,
                            stride,
                            aligned,
                            rank,
                            max_rank,
                            member,
                            e_offsets,
                            plane_stride,
                            column,
                            width,
                            ADD,
                            VECTOR,
                            SPLIT,
                            PLACES,
                            BLOCK_OUT,
                        )
            before = basis

        first_tile += 2 * tl.num_programs(1)


def shared_expand(
    out: torch.Tensor,
    u: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    leading: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    slice_offsets: Sequence[int],
    add: bool,
    parameters: launch.SharedExpand | None = None,
) -> None:
    """``parameters``: those of the table if not given."""
    split, _, n_slices, max_rank = u.shape
    _, n_tiles, tile_rows = tiles.shape
    parameters = parameters or launch.shared_expand(out.shape[0], tile_rows, arena.dtype, max_rank)
    run, reach = parameters.run, 1
    if parameters.pairs:
        run, reach = launch.shared_expand_run(parameters, out.shape[0], n_tiles, slice_offsets), 2
    column_blocks = launch.column_blocks(slice_offsets, run * parameters.block_out)
    grid = column_blocks, min(-(-n_tiles // reach), parameters.tile_programs)
    memory = (out, u, tiles, routes, leading, arena, table)
    strides = (tiles.stride(0), out.stride(0), max_rank, u.stride(1), u.stride(0))
    constants = {
        "ADD": add,
        "SLICE_OFFSETS": tuple(slice_offsets),
        "N_SLICES": n_slices,
        "ROUTE_FIELDS": routes.shape[2],
        "WIDTH_STEP": launch.width_step(slice_offsets),
        "VECTOR": 16 // arena.itemsize,
        "SPLIT": split,
        "ROWS": tile_rows,
        "BLOCK_RANK": parameters.block_rank,
        "BLOCK_OUT": parameters.block_out,
        "STAGES": parameters.num_stages,
        "num_warps": parameters.num_warps,
        "num_stages": 1,  # of the loop over ranks: each stage would hold every plane of u
    }
    if parameters.pairs:
        _shared_expand_pairs[grid](*memory, first_site, routes.shape[1], n_tiles, run, *strides, **constants)
        return
    few_registers = launch.few_registers(parameters.num_warps)
    _shared_expand[grid](*memory, first_site, routes.shape[1], n_tiles, *strides, RUN=run, **constants, **few_registers)
