"""shrink: the Triton kernel. A program multiplies one tile, one share of the features and some blocks of ranks."""

# What @triton.jit compiles is Python by syntax only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scute_kernels import launch
from scute_kernels.device import (
    BASIS_A,
    BASIS_A_STRIDE,
    BASIS_FIELDS,
    BASIS_RANK,
    FIELDS,
    RANK,
    A,
    bases_of_tile,
    first_slice_with,
    known_multiple,
    rows_of_tile,
)


@triton.jit
def _product(
    x_ptr,
    x_stride,
    in_features,
    a_ptr,
    a_stride,
    rank,
    planes_ptr,
    plane_stride,
    row_stride,
    rows,
    live,
    rank_program,
    share,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Writes ``x a^T`` over this program's share of the features. ``planes_ptr``: of the slice, plane 0."""
    blocks_of_share = tl.cdiv(tl.cdiv(in_features, BLOCK_IN), SPLIT)
    first_block = share * blocks_of_share
    last_block = tl.minimum(first_block + blocks_of_share, tl.cdiv(in_features, BLOCK_IN))
    plane_ptr = planes_ptr + share.to(tl.int64) * plane_stride
    for first_rank in range(rank_program * BLOCK_RANK, rank, RANK_PROGRAMS * BLOCK_RANK):
        r = first_rank + tl.arange(0, BLOCK_RANK)
        total = tl.zeros((ROWS, BLOCK_RANK), tl.float32)
        for block in range(first_block, last_block):
            k = block * BLOCK_IN + tl.arange(0, BLOCK_IN)
            a = tl.load(
                a_ptr + r[:, None].to(tl.int64) * a_stride + k[None, :],
                mask=(r < rank)[:, None] & (k < in_features)[None, :],
                other=0.0,
            )
            x = tl.load(
                x_ptr + rows[:, None] * x_stride + k[None, :],
                mask=live[:, None] & (k < in_features)[None, :],
                other=0.0,
            )
            total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
        tl.store(plane_ptr + rows[:, None] * row_stride + r[None, :], total, mask=live[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["first_site", "sites"])
def _shrink(
    x_ptr,
    row_slot_ptr,
    order_ptr,
    tiles_ptr,
    arena_ptr,
    table_ptr,
    bases_ptr,
    origins_ptr,
    v_ptr,
    u_ptr,
    first_site,
    sites,
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
    SLICES: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    slice_number = tl.program_id(0) // RANK_PROGRAMS
    rank_program = tl.program_id(0) % RANK_PROGRAMS
    share = tl.program_id(1)
    tile = tl.program_id(2)
    if tl.load(tiles_ptr + 4 * tile + 1) == 0:
        return
    rows, live, slots = rows_of_tile(row_slot_ptr, order_ptr, tiles_ptr, tile, ROWS)
    if OWN:
        slot = tl.load(tiles_ptr + 4 * tile + 2).to(tl.int64)
        if slot >= 0:
            entry = table_ptr + (slot * sites + first_site + slice_number) * FIELDS
            rank = tl.load(entry + RANK).to(tl.int32)
            a_ptr = arena_ptr + known_multiple(tl.load(entry + A), VECTOR)
            _product(
                x_ptr,
                x_stride,
                in_features,
                a_ptr,
                in_features,
                rank,
                v_ptr + slice_number * v_rank,
                v_plane_stride,
                v_row_stride,
                rows,
                live,
                rank_program,
                share,
                ROWS,
                SPLIT,
                RANK_PROGRAMS,
                BLOCK_RANK,
                BLOCK_IN,
            )
    if SHARED:
        of_slice = bases_of_tile(table_ptr, sites, first_site, slots, live, N_SLICES, SLICES)
        basis = tl.max(tl.where(tl.arange(0, SLICES) == slice_number, of_slice, -1), axis=0)
        if (basis >= 0) & (first_slice_with(of_slice, basis, SLICES) == slice_number):
            entry = bases_ptr + basis * BASIS_FIELDS
            rank = tl.load(entry + BASIS_RANK).to(tl.int32)
            offset = tl.load(entry + BASIS_A) + tl.load(origins_ptr + 2 * (first_site + slice_number))
            stride = tl.load(entry + BASIS_A_STRIDE)
            u_slice_ptr = u_ptr + slice_number * u_rank
            if (offset % VECTOR == 0) & (stride % VECTOR == 0):
                _product(
                    x_ptr,
                    x_stride,
                    in_features,
                    arena_ptr + known_multiple(offset, VECTOR),
                    known_multiple(stride, VECTOR),
                    rank,
                    u_slice_ptr,
                    u_plane_stride,
                    u_row_stride,
                    rows,
                    live,
                    rank_program,
                    share,
                    ROWS,
                    SPLIT,
                    RANK_PROGRAMS,
                    BLOCK_RANK,
                    BLOCK_IN,
                )
            else:
                _product(
                    x_ptr,
                    x_stride,
                    in_features,
                    arena_ptr + offset,
                    stride,
                    rank,
                    u_slice_ptr,
                    u_plane_stride,
                    u_row_stride,
                    rows,
                    live,
                    rank_program,
                    share,
                    ROWS,
                    SPLIT,
                    RANK_PROGRAMS,
                    BLOCK_RANK,
                    BLOCK_IN,
                )


def shrink(
    x: torch.Tensor,
    row_slot: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
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
    split, _, n_slices, _ = (v if own else u).shape
    v_rank, u_rank = (v.shape[-1] if own else 0), (u.shape[-1] if shared else 0)
    parameters = launch.shrink(tile_rows, arena.dtype, max(v_rank, u_rank))
    _shrink[(n_slices * parameters.rank_programs, split, tiles.shape[0])](
        x,
        row_slot,
        order,
        tiles,
        arena,
        table,
        bases,
        origins,
        v,
        u,
        first_site,
        table.shape[1],
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
        SLICES=triton.next_power_of_2(n_slices),
        VECTOR=16 // arena.itemsize,
        ROWS=tile_rows,
        SPLIT=split,
        RANK_PROGRAMS=parameters.rank_programs,
        BLOCK_RANK=parameters.block_rank,
        BLOCK_IN=parameters.block_in,
        num_warps=parameters.num_warps,
        num_stages=parameters.num_stages,
    )
