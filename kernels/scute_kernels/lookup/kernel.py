"""lookup: the Triton kernel. A program serves some rows, whatever their slots."""

# What @triton.jit compiles is Python by syntax only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scute_kernels import launch
from scute_kernels.device import FIELDS, RANK, A


@triton.jit(do_not_specialize=["site", "sites", "rows_of_batch"])
def _lookup(
    ids_ptr,
    row_slot_ptr,
    arena_ptr,
    table_ptr,
    v_ptr,
    rows_of_batch,
    site,
    sites,
    vocabulary,
    v_row_stride,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(row_slot_ptr + rows, mask=rows < rows_of_batch, other=-1).to(tl.int64)
    live = slots >= 0
    entries = table_ptr + (slots * sites + site) * FIELDS
    ranks = tl.load(entries + RANK, mask=live, other=0)
    offsets = tl.load(entries + A, mask=live, other=0)
    ids = tl.load(ids_ptr + rows, mask=live, other=-1).to(tl.int64)
    known = (ids >= 0) & (ids < vocabulary)
    for first_rank in range(0, tl.max(ranks, axis=0).to(tl.int32), BLOCK_RANK):
        r = first_rank + tl.arange(0, BLOCK_RANK)
        wanted = r[None, :] < ranks[:, None]
        column = offsets[:, None] + r[None, :].to(tl.int64) * vocabulary + ids[:, None]
        value = tl.load(arena_ptr + column, mask=wanted & known[:, None], other=0.0)
        tl.store(v_ptr + rows[:, None] * v_row_stride + r[None, :], value.to(tl.float32), mask=wanted)


def lookup(
    ids: torch.Tensor,
    row_slot: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    site: int,
    vocabulary: int,
    v: torch.Tensor,
) -> None:
    rows = ids.shape[0]
    parameters = launch.lookup(v.shape[-1])
    _lookup[(-(-rows // parameters.rows),)](
        ids,
        row_slot,
        arena,
        table,
        v,
        rows,
        site,
        table.shape[1],
        vocabulary,
        v.stride(1),
        ROWS=parameters.rows,
        BLOCK_RANK=parameters.block_rank,
        num_warps=parameters.num_warps,
    )
