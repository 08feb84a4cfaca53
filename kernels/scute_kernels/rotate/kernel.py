"""rotate: the Triton kernels. A program does some columns of one row of the output, or of a tile for one slice.

The base layer waits for them. With few rows that is a matter of steps that wait for each other, not of bytes or
products, so every row goes its own way, and finds and reads its rotation while the kernel before this one ends.
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
    BLOCK,
    BLOCK_STRIDE,
    FIELDS,
    ROTATION,
    known_multiple,
    rows_of_tile,
    slots_of_tile,
)
from scute_kernels.plan import DECODE_WIDTH, FEW_ROWS

# Elements that lie on no 16 bytes are read one by one, into as many registers: in small blocks, so that this rare way
# does not take the registers, hence the occupancy, of the other.
UNALIGNED_BLOCK = tl.constexpr(16)


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
def _inputs_of(first_column, k, features, BLOCK_OUT: tl.constexpr):
    """First input that a block of columns depends on, and the end: those of whole blocks of the rotation."""
    return first_column // k * k, tl.minimum((first_column + BLOCK_OUT + k - 1) // k * k, features)


@triton.jit
def _row_product(
    x_row,
    arena_ptr,
    offset,
    k,
    stride,
    c,
    first_column,
    features,
    VECTOR: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``x (R - I)`` of one row at the columns ``c``, ``(BLOCK_OUT,)`` fp32. ``PDL``: waits for ``x``, but not before it
    has read the rotation."""
    first, last = _inputs_of(first_column, k, features, BLOCK_OUT)
    c_live = (c < features)[None, :]
    j = first + tl.arange(0, BLOCK_IN)
    delta = _delta(arena_ptr, offset, k, stride, j, c, (j < last)[:, None] & c_live, VECTOR, RUN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_row + j, mask=j < last, other=0.0).to(tl.float32)
    total = tl.sum(x[:, None] * delta.to(tl.float32), axis=0)
    for start in range(first + BLOCK_IN, last, BLOCK_IN):
        j = start + tl.arange(0, BLOCK_IN)
        delta = _delta(arena_ptr, offset, k, stride, j, c, (j < last)[:, None] & c_live, VECTOR, RUN)
        x = tl.load(x_row + j, mask=j < last, other=0.0).to(tl.float32)
        total += tl.sum(x[:, None] * delta.to(tl.float32), axis=0)
    return total


@triton.jit(do_not_specialize=["first_site", "sites", "rows_of_batch", "n_further", "further_stride"])
def _rotate_rows(
    x_ptr,
    row_slot_ptr,
    further_ptr,
    arena_ptr,
    table_ptr,
    out_ptr,
    first_site,
    sites,
    rows_of_batch,
    n_further,
    features,
    further_stride,
    x_stride,
    VECTOR: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    RUN: tl.constexpr,
    COPY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Does ``RUN`` blocks of columns, one after another. Where nothing is to be multiplied, the first of as many
    programs as ``COPY`` columns have does these at once."""
    tl.static_assert(COPY % (RUN * BLOCK_OUT) == 0)
    begin = tl.program_id(0) * (RUN * BLOCK_OUT)
    number = tl.program_id(1)
    if number < rows_of_batch:
        slice_number = 0
        row = number.to(tl.int64)
        slot = tl.load(row_slot_ptr + number)
    else:
        slice_number = 1 + (number - rows_of_batch) // n_further
        place = further_ptr + (number - rows_of_batch) % n_further
        row = tl.load(place).to(tl.int64)
        slot = tl.load(place + further_stride)
    entry = table_ptr + (slot.to(tl.int64) * sites + first_site + slice_number) * FIELDS
    offset = tl.load(entry + ROTATION, mask=slot >= 0, other=-1)
    k = tl.load(entry + BLOCK, mask=slot >= 0, other=0).to(tl.int32)
    stride = tl.load(entry + BLOCK_STRIDE, mask=slot >= 0, other=0)
    diagonal = (k == 1) & (stride == 1)
    x_row = x_ptr + row * x_stride
    out_row = out_ptr + number.to(tl.int64) * features
    if (offset < 0) | diagonal:
        if begin % COPY != 0:
            return
        c = begin + tl.arange(0, COPY)
        live = c < features
        delta_ptr = arena_ptr + known_multiple(tl.where(offset >= 0, offset, 0), VECTOR)
        delta = tl.load(delta_ptr + c, mask=live & (offset >= 0), other=0.0).to(tl.float32)
        if PDL:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_row + c, mask=live & (row >= 0), other=0.0).to(tl.float32)
        total = tl.where(offset >= 0, x + x * delta, x)  # a copy to the bit, of infinities too
        tl.store(out_row + c, total.to(out_ptr.dtype.element_ty), mask=live)
        return

    end = tl.minimum(begin + RUN * BLOCK_OUT, features)
    for first_column in range(begin, end, BLOCK_OUT):
        c = first_column + tl.arange(0, BLOCK_OUT)
        live = c < features
        if k % 16 == 0:
            total = _row_product(
                x_row,
                arena_ptr,
                offset,
                known_multiple(k, 16),
                known_multiple(stride, 16),
                c,
                first_column,
                features,
                VECTOR,
                16,
                BLOCK_IN,
                BLOCK_OUT,
                PDL,
            )
        else:
            total = _row_product(
                x_row,
                arena_ptr,
                offset,
                k,
                stride,
                c,
                first_column,
                features,
                VECTOR,
                1,
                UNALIGNED_BLOCK,
                BLOCK_OUT,
                PDL,
            )
        total += tl.load(x_row + c, mask=live, other=0.0).to(tl.float32)
        tl.store(out_row + c, total.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _tile_product(
    x_row_ptrs,
    live,
    arena_ptr,
    offset,
    k,
    stride,
    c,
    first_column,
    features,
    VECTOR: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """``x (R - I)`` where every row has the same rotation, ``(ROWS, BLOCK_OUT)`` fp32."""
    first, last = _inputs_of(first_column, k, features, BLOCK_OUT)
    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    for start in range(first, last, BLOCK_IN):
        j = start + tl.arange(0, BLOCK_IN)
        delta = _delta(arena_ptr, offset, k, stride, j, c, (j < last)[:, None] & (c < features)[None, :], VECTOR, RUN)
        x = tl.load(x_row_ptrs[:, None] + j[None, :], mask=live[:, None] & (j < last)[None, :], other=0.0)
        total = tl.dot(x, delta, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["first_site", "sites", "rows_of_batch", "n_further", "n_tiles"])
def _rotate_tiles(
    x_ptr,
    row_slot_ptr,
    further_ptr,
    tiles_ptr,
    arena_ptr,
    table_ptr,
    out_ptr,
    first_site,
    sites,
    rows_of_batch,
    n_further,
    n_tiles,
    features,
    tiles_stride,
    x_stride,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Does ``RUN`` blocks of columns, one after another: the next ones are on their way meanwhile."""
    slice_number = tl.program_id(0)
    begin = tl.program_id(1) * (RUN * BLOCK_OUT)
    end = tl.minimum(begin + RUN * BLOCK_OUT, features)
    tile = tl.program_id(2)
    further = slice_number > 0
    first_row = tl.where(further, rows_of_batch + (slice_number - 1) * n_further, 0).to(tl.int64)
    out_slice_ptr = out_ptr + first_row * features

    if tile >= n_tiles:  # what is in no tile: base rows, and behind the last of ``further``
        places = (tile - n_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        if further:
            without = tl.load(further_ptr + places, mask=places < n_further, other=0) < 0
        else:
            without = tl.load(row_slot_ptr + places, mask=places < rows_of_batch, other=0) < 0
        if tl.max(without.to(tl.int32), axis=0) > 0:
            for first_column in tl.range(begin, end, BLOCK_OUT, num_stages=STAGES):
                c = first_column + tl.arange(0, BLOCK_OUT)
                mask = without[:, None] & (c < features)[None, :]
                x_pointers = x_ptr + places[:, None] * x_stride + c[None, :]
                copy = tl.load(x_pointers, mask=mask & (slice_number == 0), other=0.0)
                tl.store(out_slice_ptr + places[:, None] * features + c[None, :], copy, mask=mask)
        return

    rows = rows_of_tile(tiles_ptr, tile, n_tiles, ROWS, ROWS)
    slots = slots_of_tile(tiles_ptr, tile, n_tiles, tiles_stride, ROWS, ROWS)
    places = rows_of_tile(tiles_ptr + 2 * tiles_stride, tile, n_tiles, ROWS, ROWS)
    places = tl.where(further, places, rows)
    live = places >= 0
    length = tl.sum(live.to(tl.int32), axis=0)
    if length == 0:
        return
    entries = table_ptr + (slots * sites + first_site + slice_number) * FIELDS
    offsets = tl.load(entries + ROTATION, mask=live, other=-1)
    rotated = offsets >= 0
    blocks = tl.load(entries + BLOCK, mask=rotated, other=0).to(tl.int32)
    strides = tl.load(entries + BLOCK_STRIDE, mask=rotated, other=0)
    diagonal = (blocks == 1) & (strides == 1)
    blocks = tl.where(diagonal, 0, blocks)
    k = tl.max(blocks, axis=0)
    x_row_ptrs = x_ptr + rows * x_stride
    out_row_ptrs = out_slice_ptr + places * features

    offset = tl.max(offsets, axis=0)
    stride = tl.max(strides, axis=0)

    if k == 0:
        delta_rows = arena_ptr + known_multiple(tl.where(diagonal, offsets, 0), VECTOR)[:, None]
        for first_column in tl.range(begin, end, BLOCK_OUT, num_stages=STAGES):
            c = first_column + tl.arange(0, BLOCK_OUT)
            mask = live[:, None] & (c < features)[None, :]
            x = tl.load(x_row_ptrs[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
            delta = tl.load(delta_rows + c[None, :], mask=mask & diagonal[:, None], other=0.0)
            total = tl.where(diagonal[:, None], x + x * delta.to(tl.float32), x)
            tl.store(out_row_ptrs[:, None] + c[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)
    elif (k % 16 == 0) & (BLOCK_OUT % k == 0):
        # A block of columns depends on the same inputs, as blocks of the rotation lie in it.
        for first_column in tl.range(begin, end, BLOCK_OUT, num_stages=STAGES):
            c = first_column + tl.arange(0, BLOCK_OUT)
            mask = live[:, None] & (c < features)[None, :]
            x = tl.load(x_row_ptrs[:, None] + c[None, :], mask=mask, other=0.0)
            delta = _delta(
                arena_ptr,
                offset,
                known_multiple(k, 16),
                known_multiple(stride, 16),
                c,
                c,
                (c < features)[:, None] & (c < features)[None, :],
                VECTOR,
                16,
            )
            total = tl.dot(x, delta, x.to(tl.float32), input_precision="ieee")
            tl.store(out_row_ptrs[:, None] + c[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        for first_column in range(begin, end, BLOCK_OUT):
            c = first_column + tl.arange(0, BLOCK_OUT)
            mask = live[:, None] & (c < features)[None, :]
            if k % 16 == 0:
                total = _tile_product(
                    x_row_ptrs,
                    live,
                    arena_ptr,
                    offset,
                    known_multiple(k, 16),
                    known_multiple(stride, 16),
                    c,
                    first_column,
                    features,
                    VECTOR,
                    16,
                    ROWS,
                    BLOCK_IN,
                    BLOCK_OUT,
                )
            else:
                total = _tile_product(
                    x_row_ptrs,
                    live,
                    arena_ptr,
                    offset,
                    k,
                    stride,
                    c,
                    first_column,
                    features,
                    VECTOR,
                    1,
                    ROWS,
                    UNALIGNED_BLOCK,
                    BLOCK_OUT,
                )
            total += tl.load(x_row_ptrs[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(out_row_ptrs[:, None] + c[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


def rotate(
    x: torch.Tensor,
    row_slot: torch.Tensor,
    further: torch.Tensor,
    tiles: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    n_slices: int,
    out: torch.Tensor,
) -> None:
    rows, features = x.shape
    n_further = (out.shape[0] - rows) // max(1, n_slices - 1)
    _, n_tiles, tile_rows = tiles.shape
    if rows <= FEW_ROWS and tile_rows == DECODE_WIDTH:
        of_rows = launch.rotate_rows(out.shape[0], features)
        _rotate_rows[(-(-features // (of_rows.run * of_rows.block_out)), out.shape[0])](
            x,
            row_slot,
            further,
            arena,
            table,
            out,
            first_site,
            table.shape[1],
            rows,
            n_further,
            features,
            further.stride(0),
            x.stride(0),
            VECTOR=16 // arena.itemsize,
            BLOCK_IN=of_rows.block_in,
            BLOCK_OUT=of_rows.block_out,
            RUN=of_rows.run,
            COPY=of_rows.copy,
            PDL=of_rows.pdl,
            num_warps=of_rows.num_warps,
            **launch.options(of_rows.pdl),
        )
        return
    parameters = launch.rotate_tiles(tile_rows, arena.dtype)
    places = n_tiles + -(-rows // tile_rows)
    column_groups = -(-features // (parameters.run * parameters.block_out))
    _rotate_tiles[(n_slices, column_groups, places)](
        x,
        row_slot,
        further,
        tiles,
        arena,
        table,
        out,
        first_site,
        table.shape[1],
        rows,
        n_further,
        n_tiles,
        features,
        tiles.stride(0),
        x.stride(0),
        VECTOR=16 // arena.itemsize,
        ROWS=tile_rows,
        BLOCK_IN=parameters.block_in,
        BLOCK_OUT=parameters.block_out,
        RUN=parameters.run,
        STAGES=parameters.num_stages,
        num_warps=parameters.num_warps,
        **launch.few_registers(parameters.num_warps),
    )
