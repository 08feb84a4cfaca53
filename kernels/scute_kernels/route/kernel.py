"""route: the Triton kernel. A program copies some of one tile's entries."""

# What @triton.jit compiles is Python by syntax only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["values"])
def _route(slots_ptr, routes_ptr, table_ptr, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + tile * WIDTH)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entries = tl.load(table_ptr + slot.to(tl.int64) * values + i, mask=(i < values) & (slot >= 0), other=-1)
    tl.store(routes_ptr + tile.to(tl.int64) * values + i, entries, mask=i < values)


def route(tiles: torch.Tensor, routes: torch.Tensor, table: torch.Tensor) -> None:
    values = table.shape[1] * table.shape[2]
    _, n_tiles, width = tiles.shape
    grid = (-(-values // BLOCK), n_tiles)
    _route[grid](tiles[1], routes, table, values, WIDTH=width, BLOCK=BLOCK, num_warps=4)
