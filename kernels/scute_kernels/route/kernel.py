"""route: the Triton kernel. A program gathers some fields of one tile's entries at all sites."""

# What @triton.jit compiles is Python by syntax only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scute_kernels.device import rows_of_tile, tile_record

# Values of one tile that a program gathers at a time; a tile of several slots holds ROWS times as many.
BLOCK_ONE_SLOT = 1024
BLOCK_MIXED = 128


@triton.jit(do_not_specialize=["values"])
def _route(
    row_slot_ptr,
    order_ptr,
    tiles_ptr,
    routes_ptr,
    table_ptr,
    values,
    ROWS: tl.constexpr,
    BLOCK_ONE_SLOT: tl.constexpr,
    BLOCK_MIXED: tl.constexpr,
):
    tile = tl.program_id(1)
    first_value = tl.program_id(0) * BLOCK_ONE_SLOT
    start, length, slot, first_row = tile_record(tiles_ptr, tile, tile + 1)
    out_ptr = routes_ptr + tile.to(tl.int64) * values
    if (slot >= 0) | (length == 0):
        i = first_value + tl.arange(0, BLOCK_ONE_SLOT)
        entries = tl.load(table_ptr + slot.to(tl.int64) * values + i, mask=(i < values) & (length > 0), other=-1)
        tl.store(out_ptr + i, entries, mask=i < values)
    else:
        rows, live = rows_of_tile(order_ptr, start, length, first_row, ROWS)
        slots = tl.load(row_slot_ptr + rows, mask=live, other=0).to(tl.int64)
        for offset in range(0, BLOCK_ONE_SLOT, BLOCK_MIXED):
            i = first_value + offset + tl.arange(0, BLOCK_MIXED)
            entries = tl.load(
                table_ptr + slots[:, None] * values + i[None, :],
                mask=live[:, None] & (i < values)[None, :],
                other=-1,
            )
            tl.store(out_ptr + i, tl.max(entries, axis=0), mask=i < values)


def route(
    row_slot: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    routes: torch.Tensor,
    table: torch.Tensor,
) -> None:
    values = table.shape[1] * table.shape[2]
    _route[(triton.cdiv(values, BLOCK_ONE_SLOT), tiles.shape[0])](
        row_slot,
        order,
        tiles,
        routes,
        table,
        values,
        ROWS=tile_rows,
        BLOCK_ONE_SLOT=BLOCK_ONE_SLOT,
        BLOCK_MIXED=BLOCK_MIXED,
        num_warps=4,
    )
