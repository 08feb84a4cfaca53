"""expand: the Triton kernel. A program finishes one tile over some columns of one slice."""

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
    bases_of_tile,
    first_slice_with,
    known_multiple,
    rows_of_tile,
)


@triton.jit
def _sum_of_planes(pointers, plane_stride, mask, SPLIT: tl.constexpr):
    total = tl.load(pointers, mask=mask, other=0.0)
    for _ in tl.static_range(1, SPLIT):
        pointers += plane_stride
        total += tl.load(pointers, mask=mask, other=0.0)
    return total


@triton.jit
def _own_product(
    v_ptr,
    v_columns,
    v_row_stride,
    v_plane_stride,
    b_ptr,
    b_stride,
    rank,
    rows,
    live,
    n,
    n_live,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """``v b``, ``(ROWS, BLOCK_OUT)`` fp32. ``v_ptr``: of the slice; ``v_columns``: R."""
    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    for first_rank in range(0, rank, BLOCK_RANK):
        r = first_rank + tl.arange(0, BLOCK_RANK)
        b = tl.load(
            b_ptr + r[:, None].to(tl.int64) * b_stride + n[None, :],
            mask=(r < rank)[:, None] & n_live[None, :],
            other=0.0,
        )
        # The scratch is R wide: reading past the rank keeps the loads wide, and what lies there is not used.
        v = _sum_of_planes(
            v_ptr + rows[:, None] * v_row_stride + r[None, :],
            v_plane_stride,
            live[:, None] & (r < v_columns)[None, :],
            SPLIT,
        )
        v = tl.where((r < rank)[None, :], v, 0.0)
        total = tl.dot(v.to(b.dtype), b, total, input_precision="ieee")
    return total


@triton.jit
def _shared_product(
    u_ptr,
    u_columns,
    u_row_stride,
    u_plane_stride,
    b_ptr,
    b_stride,
    rank,
    arena_ptr,
    d_offsets,
    rows,
    live,
    n,
    n_live,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """``(u * d) b_shared``, ``(ROWS, BLOCK_OUT)`` fp32. ``live``: the rows that have a shared pair here."""
    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    for first_rank in range(0, rank, BLOCK_RANK):
        r = first_rank + tl.arange(0, BLOCK_RANK)
        b = tl.load(
            b_ptr + r[:, None].to(tl.int64) * b_stride + n[None, :],
            mask=(r < rank)[:, None] & n_live[None, :],
            other=0.0,
        )
        u = _sum_of_planes(
            u_ptr + rows[:, None] * u_row_stride + r[None, :],
            u_plane_stride,
            live[:, None] & (r < u_columns)[None, :],
            SPLIT,
        )
        d = tl.load(
            arena_ptr + d_offsets[:, None] + r[None, :],
            mask=(d_offsets >= 0)[:, None] & (r < rank)[None, :],
            other=1.0,
        )
        u = tl.where((r < rank)[None, :], u * d.to(tl.float32), 0.0)
        total = tl.dot(u.to(b.dtype), b, total, input_precision="ieee")
    return total


@triton.jit
def _row_vectors(arena_ptr, offsets, n, n_live, identity, VECTOR: tl.constexpr):
    """The vector at each row's offset, ``(ROWS, BLOCK_OUT)`` fp32; ``identity`` for a row without one (-1)."""
    present = offsets >= 0
    pointers = arena_ptr + known_multiple(tl.where(present, offsets, 0), VECTOR)[:, None] + n[None, :]
    return tl.load(pointers, mask=present[:, None] & n_live[None, :], other=identity).to(tl.float32)


@triton.jit(do_not_specialize=["first_site", "sites"])
def _expand(
    h_ptr,
    v_ptr,
    u_ptr,
    row_slot_ptr,
    order_ptr,
    tiles_ptr,
    arena_ptr,
    table_ptr,
    bases_ptr,
    origins_ptr,
    first_site,
    sites,
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
    SLICES: tl.constexpr,
    WIDTH_STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    V_SPLIT: tl.constexpr,
    U_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    tile = tl.program_id(1)
    if tl.load(tiles_ptr + 4 * tile + 1) == 0:
        return

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

    rows, live, slots = rows_of_tile(row_slot_ptr, order_ptr, tiles_ptr, tile, ROWS)
    entries = table_ptr + (slots * sites + site) * FIELDS
    scale_offsets = tl.load(entries + SCALE, mask=live, other=-1)
    bias_offsets = tl.load(entries + BIAS, mask=live, other=-1)
    touched = (scale_offsets >= 0) | (bias_offsets >= 0)
    if OWN:
        # Every row of a tile with own pairs has the tile's slot.
        slot = tl.load(tiles_ptr + 4 * tile + 2).to(tl.int64)
        own_entry = table_ptr + (tl.maximum(slot, 0) * sites + site) * FIELDS
        own_rank = tl.where(slot >= 0, tl.load(own_entry + RANK), 0).to(tl.int32)
        touched = touched | (live & (own_rank > 0))
    if SHARED:
        row_basis = tl.load(entries + BASIS, mask=live, other=-1)
        touched = touched | (row_basis >= 0)
    if tl.max(touched.to(tl.int32), axis=0) == 0:
        return

    h_pointers = h_ptr + rows[:, None] * h_stride + begin + n[None, :]
    h_mask = touched[:, None] & n_live[None, :]
    h = tl.load(h_pointers, mask=h_mask, other=0.0).to(tl.float32)
    total = h
    if OWN:  # noqa: SIM102 - own_rank exists only then
        if own_rank > 0:
            total += _own_product(
                v_ptr + slice_number * v_rank,
                v_rank,
                v_row_stride,
                v_plane_stride,
                arena_ptr + known_multiple(tl.load(own_entry + B), VECTOR),
                width,
                own_rank,
                rows,
                live,
                n,
                n_live,
                V_SPLIT,
                ROWS,
                BLOCK_RANK,
                BLOCK_OUT,
            )
    if SHARED:
        basis = tl.max(row_basis, axis=0)
        if basis >= 0:
            of_slice = bases_of_tile(table_ptr, sites, first_site, slots, live, N_SLICES, SLICES)
            u_slice_ptr = u_ptr + first_slice_with(of_slice, basis, SLICES) * u_rank
            shared_entry = bases_ptr + basis * BASIS_FIELDS
            shared_rank = tl.load(shared_entry + BASIS_RANK).to(tl.int32)
            offset = tl.load(shared_entry + BASIS_B) + tl.load(origins_ptr + 2 * site + 1)
            stride = tl.load(shared_entry + BASIS_B_STRIDE)
            d_offsets = tl.load(entries + D, mask=row_basis >= 0, other=-1)
            e_offsets = tl.load(entries + E, mask=row_basis >= 0, other=-1)
            if (offset % VECTOR == 0) & (stride % VECTOR == 0):
                shared = _shared_product(
                    u_slice_ptr,
                    u_rank,
                    u_row_stride,
                    u_plane_stride,
                    arena_ptr + known_multiple(offset, VECTOR),
                    known_multiple(stride, VECTOR),
                    shared_rank,
                    arena_ptr,
                    d_offsets,
                    rows,
                    row_basis >= 0,
                    n,
                    n_live,
                    U_SPLIT,
                    ROWS,
                    BLOCK_RANK,
                    BLOCK_OUT,
                )
            else:
                shared = _shared_product(
                    u_slice_ptr,
                    u_rank,
                    u_row_stride,
                    u_plane_stride,
                    arena_ptr + offset,
                    stride,
                    shared_rank,
                    arena_ptr,
                    d_offsets,
                    rows,
                    row_basis >= 0,
                    n,
                    n_live,
                    U_SPLIT,
                    ROWS,
                    BLOCK_RANK,
                    BLOCK_OUT,
                )
            total += shared * _row_vectors(arena_ptr, e_offsets, n, n_live, 1.0, VECTOR)
    if tl.max(scale_offsets, axis=0) >= 0:
        total += h * _row_vectors(arena_ptr, scale_offsets, n, n_live, 0.0, VECTOR)
    if tl.max(bias_offsets, axis=0) >= 0:
        total += _row_vectors(arena_ptr, bias_offsets, n, n_live, 0.0, VECTOR)
    tl.store(h_pointers, total.to(h_ptr.dtype.element_ty), mask=h_mask)


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
    own, shared = v.numel() > 0, u.numel() > 0
    n_slices = len(slice_offsets) - 1
    v_rank, u_rank = (v.shape[-1] if own else 0), (u.shape[-1] if shared else 0)
    v_split, u_split = (v.shape[0] if own else 1), (u.shape[0] if shared else 1)
    parameters = launch.expand(tile_rows, arena.dtype, max(v_rank, u_rank))
    column_blocks = sum(triton.cdiv(end - begin, parameters.block_out) for begin, end in pairwise(slice_offsets))
    _expand[(column_blocks, tiles.shape[0])](
        h,
        v,
        u,
        row_slot,
        order,
        tiles,
        arena,
        table,
        bases,
        origins,
        first_site,
        table.shape[1],
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
        N_SLICES=n_slices,
        SLICES=triton.next_power_of_2(n_slices),
        WIDTH_STEP=16 if all(offset % 16 == 0 for offset in slice_offsets) else 1,
        VECTOR=16 // arena.itemsize,
        V_SPLIT=v_split,
        U_SPLIT=u_split,
        ROWS=tile_rows,
        BLOCK_RANK=parameters.block_rank,
        BLOCK_OUT=parameters.block_out,
        num_warps=parameters.num_warps,
        num_stages=parameters.num_stages,
    )
