"""Functions of the kernels: reading the plan and the table on the device, and the products of tiles."""

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
SHARED_BASIS = tl.constexpr(table.SHARED_BASIS)
SHARED_RANK = tl.constexpr(table.SHARED_RANK)
SHARED_A = tl.constexpr(table.SHARED_A)
SHARED_A_STRIDE = tl.constexpr(table.SHARED_A_STRIDE)
SHARED_B = tl.constexpr(table.SHARED_B)
SHARED_B_STRIDE = tl.constexpr(table.SHARED_B_STRIDE)
SHARED_FIELDS = tl.constexpr(table.SHARED_FIELDS)
NO_MEMBER = tl.constexpr(table.NO_MEMBER)


@triton.jit
def rows_of_tile(tiles_ptr, tile, n_tiles, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Row numbers of a tile (int64), ``(ROWS,)``, -1 where it has none, and everywhere at or beyond ``n_tiles``."""
    places = tiles_ptr + tile * WIDTH + tl.arange(0, ROWS)
    return tl.load(places, mask=tile < n_tiles, other=-1).to(tl.int64)


@triton.jit
def slots_of_tile(tiles_ptr, tile, n_tiles, tiles_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Slots of the rows of a tile, in the form of ``rows_of_tile``. ``tiles_stride``: from the rows to the slots."""
    return rows_of_tile(tiles_ptr + tiles_stride, tile, n_tiles, WIDTH, ROWS)


@triton.jit
def membership(
    routes_ptr,
    tiles_ptr,
    table_ptr,
    tile,
    n_tiles,
    tiles_stride,
    sites,
    site,
    live,
    FIELD: tl.constexpr,
    ROUTE_FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Which rows of a tile of a grouped plan have a shared basis at a site, ``(ROWS,)`` bool, and the offset of their
    ``D`` or ``E``, whichever ``FIELD`` is; -1 if absent."""
    if ROUTE_FIELDS > SHARED_FIELDS:
        tl.static_assert(ROUTE_FIELDS == SHARED_FIELDS + 2 * ROWS)
        route = routes_ptr + (tile.to(tl.int64) * sites + site) * ROUTE_FIELDS
        offsets = tl.load(route + SHARED_FIELDS + (FIELD - D) * ROWS + tl.arange(0, ROWS))
        member = live & (offsets != NO_MEMBER)
    else:
        slots = slots_of_tile(tiles_ptr, tile, n_tiles, tiles_stride, ROWS, ROWS)
        member, offsets = membership_of_slots(table_ptr, slots, sites, site, live, FIELD)
    return member, offsets


@triton.jit
def membership_of_slots(table_ptr, slots, sites, site, live, FIELD: tl.constexpr):
    """The same of rows that have these slots, from the table."""
    entries = table_ptr + (slots * sites + site) * FIELDS
    return tl.load(entries + BASIS, mask=live, other=-1) >= 0, tl.load(entries + FIELD, mask=live, other=-1)


@triton.jit
def slice_of_block(block, SLICE_OFFSETS: tl.constexpr, N_SLICES: tl.constexpr, block_out):
    """Of the n-th block of columns of a module: its slice, the slice's first column and width, and the block's first
    column within the slice. A block lies in one slice."""
    slice_number = 0
    begin = 0
    width = 0
    first_column = 0
    blocks_before = 0
    for i in tl.static_range(N_SLICES):
        if block >= blocks_before:
            slice_number = i
            begin = SLICE_OFFSETS[i]
            width = SLICE_OFFSETS[i + 1] - SLICE_OFFSETS[i]
            first_column = (block - blocks_before) * block_out
        blocks_before += (SLICE_OFFSETS[i + 1] - SLICE_OFFSETS[i] + block_out - 1) // block_out
    return slice_number, begin, width, first_column


@triton.jit
def known_multiple(value, STEP: tl.constexpr):
    """``value``, in a form that tells the compiler that it is a multiple of ``STEP``.

    ``tl.multiple_of`` marks the operation that made the value, hence every other use of it too.
    """
    return value // STEP * STEP


@triton.jit
def features_of_share(share, split, in_features, BLOCK_IN: tl.constexpr):
    """First feature of one of ``split`` shares of the features, and the end: whole blocks, but for the last share."""
    width = tl.cdiv(tl.cdiv(in_features, BLOCK_IN), split) * BLOCK_IN
    return share * width, tl.minimum(share * width + width, in_features)


@triton.jit
def features_product(
    x_rows,
    a_ptr,
    a_stride,
    r,
    rank,
    live,
    first,
    last,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    WAYS: tl.constexpr,
):
    """``x a^T`` over the features from ``first`` to ``last``, ``(ROWS, BLOCK_RANK)`` fp32. ``x_rows``: pointers to the
    rows, ``(ROWS, 1)``, of which those that are ``live`` are read; ``r``: the ranks. ``WAYS``: see ``launch.ways``."""
    if WAYS == 1:
        a_rows = a_ptr + r[:, None].to(tl.int64) * a_stride
        total = tl.zeros((ROWS, BLOCK_RANK), tl.float32)
        for start in tl.range(first, last, BLOCK_IN, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_IN)
            a = tl.load(a_rows + k[None, :], mask=(r < rank)[:, None] & (k < last)[None, :], other=0.0)
            x = tl.load(x_rows + k[None, :], mask=live[:, None] & (k < last)[None, :], other=0.0)
            total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
    else:
        a_columns = a_ptr + r[None, None, :].to(tl.int64) * a_stride
        parts = tl.zeros((WAYS, ROWS, BLOCK_RANK), tl.float32)
        for start in tl.range(first, last, BLOCK_IN, num_stages=STAGES):
            part = start + tl.arange(0, WAYS)[:, None] * (BLOCK_IN // WAYS)
            k = part + tl.arange(0, BLOCK_IN // WAYS)[None, :]
            a_mask = (r < rank)[None, None, :] & (k < last)[:, :, None]
            a = tl.load(a_columns + k[:, :, None], mask=a_mask, other=0.0)
            x_mask = live[None, :, None] & (k < last)[:, None, :]
            x = tl.load(x_rows[None, :, :] + k[:, None, :], mask=x_mask, other=0.0)
            parts = tl.dot(x, a, parts, input_precision="ieee")
        total = tl.sum(parts, axis=0)
    return total


@triton.jit
def written_ranks(pointers, rank):
    """How many columns of a row of scratch are written for a rank: in fp32 as many; in 16 bits, see
    ``launch.shared_scratch_dtype``, up to the next multiple of 16, behind the rank zeros, so that reads stay wide."""
    if pointers.dtype.element_ty.primitive_bitwidth == 16:
        rank = (rank + 15) // 16 * 16
    return rank


@triton.jit
def planes(v_rows, r, rank, max_rank, live, plane_stride, SPLIT: tl.constexpr):
    """The sum of the planes of some rows at the ranks ``r``, ``(ROWS, BLOCK_RANK)`` of their dtype, 0 from ``rank`` on.
    ``v_rows``: pointers to the rows of the first plane, ``(ROWS, 1)``, which are R wide, ``max_rank``; only those that
    are ``live`` are read."""
    pointers = v_rows + r[None, :]
    if v_rows.dtype.element_ty.primitive_bitwidth == 16:
        tl.static_assert(SPLIT == 1)
        # Tensor cores take it from shared memory just as it was read, so nothing is done with it here.
        v = tl.load(pointers, mask=live[:, None] & (r < written_ranks(pointers, rank))[None, :], other=0.0)
    else:
        # Reading past the rank keeps the loads wide; what lies there is not used.
        mask = live[:, None] & (r < max_rank)[None, :]
        v = tl.load(pointers, mask=mask, other=0.0)
        for _ in tl.static_range(1, SPLIT):
            pointers += plane_stride
            v += tl.load(pointers, mask=mask, other=0.0)
        v = tl.where((r < rank)[None, :], v, 0.0)
    return v


@triton.jit
def planes_product(
    v_rows,
    max_rank,
    plane_stride,
    b_ptr,
    b_stride,
    rank,
    live,
    n,
    n_live,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """``v b``, ``(ROWS, BLOCK_OUT)`` fp32, the ``planes`` of ``v`` rounded to the dtype of ``b``. ``n``: the columns of
    ``b``, of which ``n_live`` exist."""
    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    for first_rank in range(0, rank, BLOCK_RANK):
        r = first_rank + tl.arange(0, BLOCK_RANK)
        b_pointers = b_ptr + r[:, None].to(tl.int64) * b_stride + n[None, :]
        b = tl.load(b_pointers, mask=(r < rank)[:, None] & n_live[None, :], other=0.0)
        v = planes(v_rows, r, rank, max_rank, live, plane_stride, SPLIT)
        total = tl.dot(v.to(b.dtype), b, total, input_precision="ieee")
    return total
