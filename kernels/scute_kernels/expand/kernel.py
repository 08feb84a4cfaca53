"""expand: the Triton kernel. A program finishes one block of columns for some tiles.

It runs on the critical path, after the base layer, so it waits as seldom as it can: what a tile has at a site is in
``routes``, at an address that depends on the launch alone, and everything else follows from that in one step.
"""

# What @triton.jit compiles is Python by syntax only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl

from scute_kernels import launch
from scute_kernels.device import (
    BASIS,
    BASIS_B,
    BASIS_B_STRIDE,
    BASIS_FIELDS,
    BASIS_RANK,
    BIAS,
    FIELDS,
    RANK,
    SCALE,
    B,
    D,
    E,
    known_multiple,
    rows_of_tile,
    slots_of_rows,
    tile_record,
)

# Elements that lie on no 16 bytes are read one by one, into as many registers: in small blocks, so that this rare way
# does not take the registers, hence the occupancy, of the other.
UNALIGNED_BLOCK = tl.constexpr(16)


@triton.jit
def _entry(routes_ptr, tile, n_tiles, sites, site, OWN: tl.constexpr, SHARED: tl.constexpr):
    """``RANK, B, SCALE, BIAS, BASIS`` of a tile at a site; no part at or beyond ``n_tiles``, or without scratch."""
    entry = routes_ptr + (tile.to(tl.int64) * sites + site) * FIELDS
    known = tile < n_tiles
    rank = tl.load(entry + RANK, mask=known & OWN, other=0).to(tl.int32)
    b = tl.load(entry + B, mask=known & OWN, other=-1)
    scale = tl.load(entry + SCALE, mask=known, other=-1)
    bias = tl.load(entry + BIAS, mask=known, other=-1)
    basis = tl.load(entry + BASIS, mask=known & SHARED, other=-1)
    return rank, b, scale, bias, basis


@triton.jit
def _of_rows(table_entries, field, of_tile, live, mixed):
    """A field of each row, ``(ROWS,)``: the tile's, which all rows share unless it is mixed; -1 where not live."""
    values = tl.load(table_entries + field, mask=live & mixed, other=of_tile)
    return tl.where(live, values, -1)


@triton.jit
def _product(
    planes_ptr,
    plane_rank,
    row_stride,
    plane_stride,
    b_ptr,
    b_stride,
    rank,
    arena_ptr,
    d_offsets,
    rows,
    live,
    n,
    n_live,
    DAMPED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``v b``, or ``(u * d) b_shared`` if ``DAMPED``: ``(ROWS, BLOCK_OUT)`` fp32.

    ``planes_ptr``: of the slice; ``plane_rank``: R. ``d_offsets``: of each row, -1 where ``d`` is absent.
    """
    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    for first_rank in range(0, rank, BLOCK_RANK):
        r = first_rank + tl.arange(0, BLOCK_RANK)
        within = (r < rank)[None, :]
        b = tl.load(
            b_ptr + r[:, None].to(tl.int64) * b_stride + n[None, :],
            mask=(r < rank)[:, None] & n_live[None, :],
            other=0.0,
        )
        if PDL:  # b is read while the kernel before this one is still at work, the planes are not
            tl.extra.cuda.gdc_wait()
        # The scratch is R wide: reading past the rank keeps the loads wide, and what lies there is not used.
        pointers = planes_ptr + rows[:, None] * row_stride + r[None, :]
        mask = live[:, None] & (r < plane_rank)[None, :]
        planes = tl.load(pointers, mask=mask, other=0.0)
        for _ in tl.static_range(1, SPLIT):
            pointers += plane_stride
            planes += tl.load(pointers, mask=mask, other=0.0)
        if DAMPED:
            damped = (d_offsets >= 0)[:, None] & within
            planes *= tl.load(arena_ptr + d_offsets[:, None] + r[None, :], mask=damped, other=1.0).to(tl.float32)
        planes = tl.where(within, planes, 0.0)
        total = tl.dot(planes.to(b.dtype), b, total, input_precision="ieee")
    return total


@triton.jit
def _row_vectors(arena_ptr, offsets, n, n_live, identity, VECTOR: tl.constexpr):
    """The vector at each row's offset, ``(ROWS, BLOCK_OUT)`` fp32; ``identity`` for a row without one (-1)."""
    present = offsets >= 0
    pointers = arena_ptr + known_multiple(tl.where(present, offsets, 0), VECTOR)[:, None] + n[None, :]
    return tl.load(pointers, mask=present[:, None] & n_live[None, :], other=identity).to(tl.float32)


@triton.jit(do_not_specialize=["first_site", "sites", "n_tiles"])
def _expand(
    h_ptr,
    v_ptr,
    u_ptr,
    row_slot_ptr,
    order_ptr,
    tiles_ptr,
    routes_ptr,
    arena_ptr,
    table_ptr,
    bases_ptr,
    origins_ptr,
    first_site,
    sites,
    n_tiles,
    h_stride,
    v_rank,
    v_row_stride,
    v_plane_stride,
    u_rank,
    u_row_stride,
    u_plane_stride,
    OWN: tl.constexpr,
    SHARED: tl.constexpr,
    SLICE_OFFSETS: tl.constexpr,
    N_SLICES: tl.constexpr,
    WIDTH_STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    V_SPLIT: tl.constexpr,
    U_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    column_block = tl.program_id(0)
    slice_number = 0
    begin = 0
    width = 0
    first_column = 0
    blocks_before = 0
    for i in tl.static_range(N_SLICES):
        if column_block >= blocks_before:
            slice_number = i
            begin = SLICE_OFFSETS[i]
            width = SLICE_OFFSETS[i + 1] - SLICE_OFFSETS[i]
            first_column = (column_block - blocks_before) * BLOCK_OUT
        blocks_before += (SLICE_OFFSETS[i + 1] - SLICE_OFFSETS[i] + BLOCK_OUT - 1) // BLOCK_OUT
    begin = known_multiple(begin, WIDTH_STEP)
    width = known_multiple(width, WIDTH_STEP)
    site = first_site + slice_number
    n = first_column + tl.arange(0, BLOCK_OUT)
    n_live = n < width

    # The loads of a tile are issued before anything waits for the tile before it.
    tile = tl.program_id(1)
    start, length, slot, first_row = tile_record(tiles_ptr, tile, n_tiles)
    rank, b_offset, scale, bias, basis = _entry(routes_ptr, tile, n_tiles, sites, site, OWN, SHARED)
    while length > 0:
        if (rank > 0) | (basis >= 0) | (scale >= 0) | (bias >= 0):
            rows, live = rows_of_tile(order_ptr, start, length, first_row, ROWS)
            slots = slots_of_rows(row_slot_ptr, rows, live, slot)
            entries = table_ptr + (slots * sites + site) * FIELDS
            scale_offsets = _of_rows(entries, SCALE, scale, live, slot < 0)
            bias_offsets = _of_rows(entries, BIAS, bias, live, slot < 0)
            bases = _of_rows(entries, BASIS, basis, live, (slot < 0) & SHARED)
            touched = live & ((rank > 0) | (scale_offsets >= 0) | (bias_offsets >= 0) | (bases >= 0))

            total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
            if OWN:  # noqa: SIM102 - a constant and a condition on the device
                if rank > 0:
                    total += _product(
                        v_ptr + slice_number * v_rank,
                        v_rank,
                        v_row_stride,
                        v_plane_stride,
                        arena_ptr + known_multiple(b_offset, VECTOR),
                        width,
                        rank,
                        arena_ptr,
                        bases,
                        rows,
                        live,
                        n,
                        n_live,
                        False,
                        V_SPLIT,
                        ROWS,
                        BLOCK_RANK,
                        BLOCK_OUT,
                        PDL,
                    )
            if SHARED:  # noqa: SIM102
                if basis >= 0:
                    u_slice = slice_number
                    for i in tl.static_range(N_SLICES - 1, -1, -1):
                        other = routes_ptr + (tile.to(tl.int64) * sites + first_site + i) * FIELDS
                        u_slice = tl.where(tl.load(other + BASIS) == basis, i, u_slice)
                    shared_entry = bases_ptr + basis * BASIS_FIELDS
                    shared_rank = tl.load(shared_entry + BASIS_RANK).to(tl.int32)
                    offset = tl.load(shared_entry + BASIS_B) + tl.load(origins_ptr + 2 * site + 1)
                    stride = tl.load(shared_entry + BASIS_B_STRIDE)
                    route = routes_ptr + (tile.to(tl.int64) * sites + site) * FIELDS
                    d_offsets = _of_rows(entries, D, tl.load(route + D), bases >= 0, slot < 0)
                    e_offsets = _of_rows(entries, E, tl.load(route + E), bases >= 0, slot < 0)
                    if (offset % VECTOR == 0) & (stride % VECTOR == 0):
                        shared = _product(
                            u_ptr + u_slice * u_rank,
                            u_rank,
                            u_row_stride,
                            u_plane_stride,
                            arena_ptr + known_multiple(offset, VECTOR),
                            known_multiple(stride, VECTOR),
                            shared_rank,
                            arena_ptr,
                            d_offsets,
                            rows,
                            bases >= 0,
                            n,
                            n_live,
                            True,
                            U_SPLIT,
                            ROWS,
                            BLOCK_RANK,
                            BLOCK_OUT,
                            PDL,
                        )
                    else:
                        shared = _product(
                            u_ptr + u_slice * u_rank,
                            u_rank,
                            u_row_stride,
                            u_plane_stride,
                            arena_ptr + offset,
                            stride,
                            shared_rank,
                            arena_ptr,
                            d_offsets,
                            rows,
                            bases >= 0,
                            n,
                            n_live,
                            True,
                            U_SPLIT,
                            ROWS,
                            UNALIGNED_BLOCK,
                            BLOCK_OUT,
                            PDL,
                        )
                    total += shared * _row_vectors(arena_ptr, e_offsets, n, n_live, 1.0, VECTOR)

            if PDL:
                tl.extra.cuda.gdc_wait()
            h_pointers = h_ptr + rows[:, None] * h_stride + begin + n[None, :]
            h_mask = touched[:, None] & n_live[None, :]
            h = tl.load(h_pointers, mask=h_mask, other=0.0).to(tl.float32)
            total += h
            if scale >= 0:
                total += h * _row_vectors(arena_ptr, scale_offsets, n, n_live, 0.0, VECTOR)
            if bias >= 0:
                total += _row_vectors(arena_ptr, bias_offsets, n, n_live, 0.0, VECTOR)
            tl.store(h_pointers, total.to(h_ptr.dtype.element_ty), mask=h_mask)

        tile += tl.num_programs(1)
        start, length, slot, first_row = tile_record(tiles_ptr, tile, n_tiles)
        rank, b_offset, scale, bias, basis = _entry(routes_ptr, tile, n_tiles, sites, site, OWN, SHARED)
    if PDL:  # also where nothing was to be done: who waits for this kernel waits for those before it
        tl.extra.cuda.gdc_wait()


def expand(
    h: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
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
    slice_offsets: Sequence[int],
) -> None:
    own, shared = v.numel() > 0, u.numel() > 0
    v_rank, u_rank = (v.shape[-1] if own else 0), (u.shape[-1] if shared else 0)
    v_split, u_split = (v.shape[0] if own else 1), (u.shape[0] if shared else 1)
    parameters = launch.expand(h.shape[0], arena.dtype, max(v_rank, u_rank))
    column_blocks = sum(triton.cdiv(end - begin, parameters.block_out) for begin, end in pairwise(slice_offsets))
    _expand[(column_blocks, min(tiles.shape[0], parameters.tile_programs))](
        h,
        v,
        u,
        row_slot,
        order,
        tiles,
        routes,
        arena,
        table,
        bases,
        origins,
        first_site,
        table.shape[1],
        tiles.shape[0],
        h.stride(0),
        v_rank,
        v.stride(1) if own else 0,
        v.stride(0) if own else 0,
        u_rank,
        u.stride(1) if shared else 0,
        u.stride(0) if shared else 0,
        OWN=own,
        SHARED=shared,
        SLICE_OFFSETS=tuple(slice_offsets),
        N_SLICES=len(slice_offsets) - 1,
        WIDTH_STEP=16 if all(offset % 16 == 0 for offset in slice_offsets) else 1,
        VECTOR=16 // arena.itemsize,
        V_SPLIT=v_split,
        U_SPLIT=u_split,
        ROWS=tile_rows,
        BLOCK_RANK=parameters.block_rank,
        BLOCK_OUT=parameters.block_out,
        PDL=parameters.pdl,
        num_warps=parameters.num_warps,
        num_stages=parameters.num_stages,
        **launch.pdl(parameters.pdl),
    )
