"""rotate: the Triton kernel. A program rotates one tile (or copies some base rows) over some columns for one slice."""

# What @triton.jit compiles is Python by syntax only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scute_kernels import launch
from scute_kernels.device import (
    BLOCK,
    BLOCK_STRIDE,
    FIELDS,
    ROTATION,
    known_multiple,
    rows_of_tile,
    slots_of_tile,
)


@triton.jit
def _delta(arena_ptr, offset, k, stride, j, c, mask, VECTOR: tl.constexpr, RUN: tl.constexpr):
    """Rows ``j``, columns ``c`` of the block-diagonal ``R - I``. ``RUN``: a power of two up to 16 that divides k."""
    position = tl.max_constancy(c // k, RUN)
    within = tl.max_contiguous(tl.multiple_of(c % k, RUN), RUN)
    same_block = (j // k)[:, None] == position[None, :]
    base_ptr = arena_ptr + known_multiple(offset, VECTOR)
    pointers = base_ptr + position.to(tl.int64)[None, :] * stride + (j % k)[:, None] * k + within[None, :]
    return tl.load(pointers, mask=mask & same_block, other=0.0)


@triton.jit
def _tile_product(
    x_row_ptrs,
    live,
    arena_ptr,
    offset,
    k,
    stride,
    c,
    first,
    last,
    features,
    VECTOR: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """``x (R - I)`` where every row has the same rotation, ``(ROWS, BLOCK_OUT)`` fp32."""
    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    for start in range(first, last, BLOCK_IN):
        j = start + tl.arange(0, BLOCK_IN)
        delta = _delta(arena_ptr, offset, k, stride, j, c, (j < last)[:, None] & (c < features)[None, :], VECTOR, RUN)
        x = tl.load(x_row_ptrs[:, None] + j[None, :], mask=live[:, None] & (j < last)[None, :], other=0.0)
        total = tl.dot(x, delta, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["first_site", "sites", "rows_of_batch", "n_tiles"])
def _rotate(
    x_ptr,
    row_slot_ptr,
    tiles_ptr,
    arena_ptr,
    table_ptr,
    out_ptr,
    first_site,
    sites,
    rows_of_batch,
    n_tiles,
    features,
    tiles_stride,
    x_stride,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    slice_number = tl.program_id(0)
    first_column = tl.program_id(1) * BLOCK_OUT
    tile = tl.program_id(2)
    c = first_column + tl.arange(0, BLOCK_OUT)
    out_slice_ptr = out_ptr + slice_number.to(tl.int64) * rows_of_batch * features

    if tile >= n_tiles:  # base rows are in no tile
        base_rows = (tile - n_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        base = tl.load(row_slot_ptr + base_rows, mask=base_rows < rows_of_batch, other=0) < 0
        copied = base[:, None] & (c < features)[None, :]
        copy = tl.load(x_ptr + base_rows[:, None] * x_stride + c[None, :], mask=copied)
        tl.store(out_slice_ptr + base_rows[:, None] * features + c[None, :], copy, mask=copied)
        return

    rows = rows_of_tile(tiles_ptr, tile, n_tiles, ROWS, ROWS)
    slots = slots_of_tile(tiles_ptr, tile, n_tiles, tiles_stride, ROWS, ROWS)
    live = rows >= 0
    length = tl.sum(live.to(tl.int32), axis=0)
    if length == 0:
        return
    slot = tl.max(slots, axis=0)
    one_slot = tl.sum((slots == slot).to(tl.int32), axis=0) == length
    entries = table_ptr + (slots * sites + first_site + slice_number) * FIELDS
    offsets = tl.load(entries + ROTATION, mask=live, other=-1)
    rotated = offsets >= 0
    blocks = tl.load(entries + BLOCK, mask=rotated, other=0).to(tl.int32)
    strides = tl.load(entries + BLOCK_STRIDE, mask=rotated, other=0)

    mask = live[:, None] & (c < features)[None, :]
    x_row_ptrs = x_ptr + rows * x_stride
    x = tl.load(x_row_ptrs[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    total = x

    diagonal = (blocks == 1) & (strides == 1)
    if tl.max(diagonal.to(tl.int32), axis=0) > 0:
        delta_ptrs = arena_ptr + known_multiple(tl.where(diagonal, offsets, 0), VECTOR)
        delta = tl.load(delta_ptrs[:, None] + c[None, :], mask=mask & diagonal[:, None], other=0.0)
        total += x * delta.to(tl.float32)

    blocks = tl.where(diagonal, 0, blocks)
    k = tl.max(blocks, axis=0)
    if k > 0:
        if one_slot:  # one rotation for all rows
            first = first_column // k * k
            last = tl.minimum((first_column + BLOCK_OUT + k - 1) // k * k, features)
            offset = tl.max(offsets, axis=0)
            stride = tl.max(strides, axis=0)
            if k % 16 == 0:
                total += _tile_product(
                    x_row_ptrs,
                    live,
                    arena_ptr,
                    offset,
                    known_multiple(k, 16),
                    known_multiple(stride, 16),
                    c,
                    first,
                    last,
                    features,
                    VECTOR,
                    16,
                    ROWS,
                    BLOCK_IN,
                    BLOCK_OUT,
                )
            else:
                total += _tile_product(
                    x_row_ptrs,
                    live,
                    arena_ptr,
                    offset,
                    k,
                    stride,
                    c,
                    first,
                    last,
                    features,
                    VECTOR,
                    1,
                    ROWS,
                    BLOCK_IN,
                    BLOCK_OUT,
                )
        else:  # every row its own
            place = tl.arange(0, ROWS)
            for i in range(length):
                row_k = tl.sum(tl.where(place == i, blocks, 0), axis=0)
                if row_k > 0:
                    row = tl.sum(tl.where(place == i, rows, 0), axis=0)
                    row_offset = tl.sum(tl.where(place == i, offsets, 0), axis=0)
                    row_stride = tl.sum(tl.where(place == i, strides, 0), axis=0)
                    row_last = tl.minimum((first_column + BLOCK_OUT + row_k - 1) // row_k * row_k, features)
                    for start in range(first_column // row_k * row_k, row_last, BLOCK_IN):
                        j = start + tl.arange(0, BLOCK_IN)
                        delta = _delta(
                            arena_ptr,
                            row_offset,
                            row_k,
                            row_stride,
                            j,
                            c,
                            (j < row_last)[:, None] & (c < features)[None, :],
                            VECTOR,
                            1,
                        )
                        x_row = tl.load(x_ptr + row * x_stride + j, mask=j < row_last, other=0.0).to(tl.float32)
                        product = tl.sum(x_row[:, None] * delta.to(tl.float32), axis=0)
                        total += tl.where((place == i)[:, None], product[None, :], 0.0)

    result = tl.where(rotated[:, None], total, x).to(out_ptr.dtype.element_ty)
    tl.store(out_slice_ptr + rows[:, None] * features + c[None, :], result, mask=mask)


def rotate(
    x: torch.Tensor,
    row_slot: torch.Tensor,
    tiles: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    out: torch.Tensor,
) -> None:
    n_slices, rows, features = out.shape
    _, n_tiles, tile_rows = tiles.shape
    parameters = launch.rotate(tile_rows, arena.dtype)
    places = n_tiles + triton.cdiv(rows, tile_rows)
    _rotate[(n_slices, triton.cdiv(features, parameters.block_out), places)](
        x,
        row_slot,
        tiles,
        arena,
        table,
        out,
        first_site,
        table.shape[1],
        rows,
        n_tiles,
        features,
        tiles.stride(0),
        x.stride(0),
        VECTOR=16 // arena.itemsize,
        ROWS=tile_rows,
        BLOCK_IN=parameters.block_in,
        BLOCK_OUT=parameters.block_out,
        num_warps=parameters.num_warps,
        num_stages=parameters.num_stages,
    )
