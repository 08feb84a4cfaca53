"""shared_expand: the Triton kernels. A program finishes some blocks of columns for some tiles: one after another, or in
prefill two at once, if the GPU has the shared memory for it.

In the first, rows and route of a tile lie at addresses that depend on the launch alone, in decode with where the ``e``
of each row is, and all that ``b`` and ``u`` wait for is one of these.
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
    SHARED_B,
    SHARED_B_STRIDE,
    SHARED_BASIS,
    SHARED_RANK,
    E,
    known_multiple,
    membership,
    membership_of_slots,
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
def _columns(
    out_rows,
    u,
    b_rows,
    arena_ptr,
    r,
    rank,
    member,
    e_offsets,
    first_column,
    last_column,
    step,
    width,
    ADD: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some blocks of columns of a tile whose rank is at most that of ``u``, ``(ROWS, BLOCK_RANK)``, each while the next
    are read. ``b_rows``: pointers to the rows ``r``. ``e_offsets``: of each row, or one for all."""
    for column in tl.range(first_column, last_column, step, num_stages=STAGES):
        n = column + tl.arange(0, BLOCK_OUT)
        n_live = n < width
        b = tl.load(b_rows + n[None, :], mask=(r < rank)[:, None] & n_live[None, :], other=0.0)
        e = _factors(arena_ptr, e_offsets, n, n_live, VECTOR)
        total = tl.dot(u, b, input_precision="ieee") * e.to(tl.float32)
        _put(out_rows + n[None, :], total, member[:, None] & n_live[None, :], ADD)


@triton.jit
def _by_blocks_of_ranks(
    out_rows,
    u_rows,
    arena_ptr,
    offset,
    stride,
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
    """A block of columns of a tile with more ranks than one block, or whose ``b`` lies on no 16 bytes."""
    n = column + tl.arange(0, BLOCK_OUT)
    n_live = n < width
    e = _factors(arena_ptr, e_offsets, n, n_live, VECTOR)
    if (offset % VECTOR == 0) & (stride % VECTOR == 0):
        total = planes_product(
            u_rows,
            max_rank,
            plane_stride,
            arena_ptr + known_multiple(offset, VECTOR),
            known_multiple(stride, VECTOR),
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
                _columns(
                    out_rows,
                    u,
                    b_ptr + r[:, None].to(tl.int64) * b_stride,
                    arena_ptr,
                    r,
                    rank,
                    member,
                    e_offsets,
                    first_column,
                    last_column,
                    BLOCK_OUT,
                    width,
                    ADD,
                    VECTOR,
                    BLOCK_OUT,
                    STAGES,
                )
            else:
                for column in range(first_column, last_column, BLOCK_OUT):
                    _by_blocks_of_ranks(
                        out_rows,
                        u_rows,
                        arena_ptr,
                        offset,
                        stride,
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
def _shared_expand_two(
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
    run,
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
    """Two tiles at once, so that ``b`` is read half as often. They have one basis, as a rule; else one after the other
    is multiplied, the rows of the other left out. ``ROWS``: of one tile. ``run``: blocks of columns that a program
    does. Programs side by side have blocks side by side: memory is faster for long runs of columns."""
    PLACES: tl.constexpr = 2 * ROWS
    slice_number, begin, width, first_column = slice_of_block(
        tl.program_id(0), SLICE_OFFSETS, N_SLICES, run * BLOCK_OUT
    )
    begin = known_multiple(begin, WIDTH_STEP)
    width = known_multiple(width, WIDTH_STEP)
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
        in_basis, all_e = membership_of_slots(table_ptr, slots, sites, site, rows >= 0, E)
        before = tl.full((), -1, tl.int64)
        for i in range(2):
            basis, rank, offset, stride = _route(routes_ptr, first_tile + i, leading, sites, site, ROUTE_FIELDS)
            member = in_basis & (bases == basis)
            if (basis >= 0) & (basis != before):
                e_offsets = tl.where(member, all_e, -1)
                some_e = tl.max(e_offsets, axis=0)
                one_e = tl.min(tl.where(member, all_e, some_e), axis=0) == some_e
                u_rows = u_ptr + slice_number * max_rank + rows[:, None] * row_stride
                out_rows = out_ptr + rows[:, None] * out_stride + begin
                aligned = (offset % VECTOR == 0) & (stride % VECTOR == 0)
                if aligned & (rank <= BLOCK_RANK):
                    r = tl.arange(0, BLOCK_RANK)
                    u = planes(u_rows, r, rank, max_rank, member, plane_stride, SPLIT).to(arena_ptr.dtype.element_ty)
                    b_ptr = arena_ptr + known_multiple(offset, VECTOR)
                    b_rows = b_ptr + r[:, None].to(tl.int64) * known_multiple(stride, VECTOR)
                    if one_e:
                        _columns(
                            out_rows,
                            u,
                            b_rows,
                            arena_ptr,
                            r,
                            rank,
                            member,
                            some_e + tl.zeros((1,), tl.int64),
                            first_column,
                            width,
                            step,
                            width,
                            ADD,
                            VECTOR,
                            BLOCK_OUT,
                            STAGES,
                        )
                    else:  # e of each row is as large as out: no room for it in another stage
                        _columns(
                            out_rows,
                            u,
                            b_rows,
                            arena_ptr,
                            r,
                            rank,
                            member,
                            e_offsets,
                            first_column,
                            width,
                            step,
                            width,
                            ADD,
                            VECTOR,
                            BLOCK_OUT,
                            STAGES - 1,
                        )
                else:
                    for column in range(first_column, width, step):
                        _by_blocks_of_ranks(
                            out_rows,
                            u_rows,
                            arena_ptr,
                            offset,
                            stride,
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
    run = parameters.run
    if parameters.tiles == 2:
        run = launch.shared_expand_run(parameters, out.shape[0], n_tiles, tile_rows, slice_offsets)
    column_blocks = launch.column_blocks(slice_offsets, run * parameters.block_out)
    grid = column_blocks, min(-(-n_tiles // parameters.tiles), parameters.tile_programs)
    arguments = (
        out,
        u,
        tiles,
        routes,
        leading,
        arena,
        table,
        first_site,
        routes.shape[1],
        n_tiles,
        tiles.stride(0),
        out.stride(0),
        max_rank,
        u.stride(1),
        u.stride(0),
    )
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
    if parameters.tiles == 2:  # its shared memory lets one program be resident, whatever its registers
        _shared_expand_two[grid](*arguments, run, **constants)
    else:
        _shared_expand[grid](*arguments, RUN=run, **constants, **launch.few_registers(parameters.num_warps))
