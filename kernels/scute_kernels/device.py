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
def rows_of_tile(row_slot_ptr, order_ptr, tiles_ptr, tile, ROWS: tl.constexpr):
    """Row numbers (int64), which of them are live, and the slot of each (int64, -1 where not live): all ``(ROWS,)``."""
    start = tl.load(tiles_ptr + 4 * tile)
    length = tl.load(tiles_ptr + 4 * tile + 1)
    slot = tl.load(tiles_ptr + 4 * tile + 2)
    place = tl.arange(0, ROWS)
    live = place < length
    rows = tl.load(order_ptr + start + place, mask=live, other=0).to(tl.int64)
    # A tile of one slot does not wait for row_slot.
    slots = tl.load(row_slot_ptr + rows, mask=live & (slot < 0), other=slot)
    return rows, live, tl.where(live, slots, -1).to(tl.int64)


@triton.jit
def bases_of_tile(table_ptr, sites, first_site, slots, live, N_SLICES: tl.constexpr, SLICES: tl.constexpr):
    """``(SLICES,)`` int64, the basis of a tile at each slice, -1 if none. ``SLICES``: power of two >= ``N_SLICES``."""
    i = tl.arange(0, SLICES)
    entries = table_ptr + (slots[:, None] * sites + first_site + i[None, :]) * FIELDS + BASIS
    return tl.max(tl.load(entries, mask=live[:, None] & (i < N_SLICES)[None, :], other=-1), axis=0)


@triton.jit
def first_slice_with(of_slice, basis, SLICES: tl.constexpr):
    """Where ``u`` of ``basis`` stands (``plan.tile_bases`` has the rule). ``of_slice``: of ``bases_of_tile``."""
    return tl.min(tl.where(of_slice == basis, tl.arange(0, SLICES), SLICES), axis=0)


@triton.jit
def known_multiple(value, STEP: tl.constexpr):
    """``value``, in a form that tells the compiler that it is a multiple of ``STEP``.

    ``tl.multiple_of`` marks the operation that made the value, hence every other use of it too.
    """
    return value // STEP * STEP
