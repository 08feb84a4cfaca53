"""Launch parameters of every kernel, in one place.

A phase is known by its tile: 16 rows is decode, where the bytes of the adapters bound the work and most of a tile is
empty; more is prefill, where a row of ``a`` or ``b`` serves a whole tile. The blocks of fp32 are smaller: its elements
are twice as large, and its products do not run on tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DECODE_ROWS = 16


@dataclass(frozen=True)
class Rotate:
    block_in: int
    block_out: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Shrink:
    block_rank: int
    rank_programs: int  # programs that share the blocks of ranks between them
    block_in: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Lookup:
    rows: int
    block_rank: int
    num_warps: int


@dataclass(frozen=True)
class Expand:
    block_rank: int
    block_out: int
    num_warps: int
    num_stages: int


# Half of the shared memory of a multiprocessor, so that two programs run side by side. The loops of a kernel come one
# after another and use the same buffers.
_SHARED_MEMORY = 110 << 10


def _stages(bytes_per_stage: int, most: int) -> int:
    """As many stages of a pipelined loop as fit, at least one (which needs no buffers)."""
    return max(1, min(most, _SHARED_MEMORY // bytes_per_stage))


def rotate(rows: int, dtype: torch.dtype) -> Rotate:
    if dtype == torch.float32:
        return Rotate(block_in=32, block_out=32, num_warps=4, num_stages=2)
    if rows == DECODE_ROWS:
        return Rotate(block_in=32, block_out=64, num_warps=2, num_stages=3)
    return Rotate(block_in=32, block_out=64, num_warps=4, num_stages=3)


def shrink(rows: int, dtype: torch.dtype, max_rank: int) -> Shrink:
    """``max_rank``: R of the scratch."""
    decode = rows == DECODE_ROWS
    block_rank = _block(max_rank, 32 if decode or dtype == torch.float32 else 64)
    block_in = 256 if decode and dtype != torch.float32 else 64
    # Programs share the blocks of ranks between them only where a rank can be large; one whose share is empty ends at
    # once, and a small rank has its split of the features instead.
    rank_programs = min(-(-max_rank // block_rank), 2)
    stages = _stages((rows + block_rank) * block_in * dtype.itemsize, most=3 if decode else 4)
    return Shrink(block_rank, rank_programs, block_in, num_warps=4, num_stages=stages)


def shrink_split(rows: int, tile_rows: int, in_features: int, n_slices: int, max_rank: int) -> int:
    """SPLIT of ``shrink``: into how many partial planes the features are split. Depends on shapes only.

    Enough for a few programs on every multiprocessor (in decode if every row has a tile of its own), while each has at
    least one block of features. ``tile_rows``: of the plan. ``max_rank``: R of the scratch.
    """
    decode = tile_rows == DECODE_ROWS
    parameters = shrink(tile_rows, torch.bfloat16, max_rank)
    tiles = min(rows, 64) if decode else -(-rows // tile_rows)
    wanted = 1024 // (tiles * n_slices * parameters.rank_programs)
    split = 1
    while split * 2 <= min(wanted, 16 if decode else 4) and split * 2 * parameters.block_in <= in_features:
        split *= 2
    return split


def lookup(max_rank: int) -> Lookup:
    return Lookup(rows=16, block_rank=_block(max_rank, 64), num_warps=4)


def expand(rows: int, dtype: torch.dtype, max_rank: int) -> Expand:
    """``max_rank``: R of the scratch. One stage: the loop over ranks is short, and the planes of the scratch would
    fill the buffers of more."""
    decode = rows == DECODE_ROWS
    block_rank = _block(max_rank, 32 if dtype == torch.float32 else 64)
    block_out = 64 if dtype == torch.float32 else 128
    return Expand(block_rank, block_out, num_warps=4 if decode or dtype == torch.float32 else 8, num_stages=1)


def _block(rank: int, most: int) -> int:
    """The block of ranks: no larger than needed, at least the 16 that a tensor core multiplies."""
    block = 16
    while block < min(rank, most):
        block *= 2
    return block
