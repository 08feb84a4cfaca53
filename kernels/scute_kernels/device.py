"""Functions of the kernels: reading the plan and the table on the device."""

# What @triton.jit compiles is Python by syntax only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from scute_kernels import table

A = tl.constexpr(table.A)
B = tl.constexpr(table.B)
RANK = tl.constexpr(table.RANK)
SCALE = tl.constexpr(table.SCALE)
BIAS = tl.constexpr(table.BIAS)
ROTATION = tl.constexpr(table.ROTATION)
BLOCK = tl.constexpr(table.BLOCK)
BLOCK_STRIDE = tl.constexpr(table.BLOCK_STRIDE)
BASIS = tl.constexpr(table.BASIS)
D = tl.constexpr(table.D)
E = tl.constexpr(table.E)
FIELDS = tl.constexpr(table.FIELDS)
BASIS_A = tl.constexpr(table.BASIS_A)
BASIS_A_STRIDE = tl.constexpr(table.BASIS_A_STRIDE)
BASIS_B = tl.constexpr(table.BASIS_B)
BASIS_B_STRIDE = tl.constexpr(table.BASIS_B_STRIDE)
BASIS_RANK = tl.constexpr(table.BASIS_RANK)
BASIS_FIELDS = tl.constexpr(table.BASIS_FIELDS)


@triton.jit
def tile_record(tiles_ptr, tile, n_tiles):
    """``start, length, slot, row`` of a tile, see ``plan.py``; length 0 at or beyond ``n_tiles``."""
    entry = tiles_ptr + 4 * tile
    known = tile < n_tiles
    start = tl.load(entry, mask=known, other=0)
    length = tl.load(entry + 1, mask=known, other=0)
    slot = tl.load(entry + 2, mask=known, other=0)
    row = tl.load(entry + 3, mask=known, other=0)
    return start, length, slot, row


@triton.jit
def rows_of_tile(order_ptr, start, length, first_row, ROWS: tl.constexpr):
    """Row numbers (int64) and which of them are live, both ``(ROWS,)``. The arguments: of ``tile_record``."""
    place = tl.arange(0, ROWS)
    live = place < length
    rows = tl.load(order_ptr + start + place, mask=live & (place > 0), other=first_row)
    return rows.to(tl.int64), live


@triton.jit
def slots_of_rows(row_slot_ptr, rows, live, slot):
    """Slots (int64) of the rows of a tile, -1 where not live. ``slot``: the tile's; of one slot it does not wait."""
    slots = tl.load(row_slot_ptr + rows, mask=live & (slot < 0), other=slot)
    return tl.where(live, slots, -1).to(tl.int64)


@triton.jit
def known_multiple(value, STEP: tl.constexpr):
    """``value``, in a form that tells the compiler that it is a multiple of ``STEP``.

    ``tl.multiple_of`` marks the operation that made the value, hence every other use of it too.
    """
    return value // STEP * STEP
