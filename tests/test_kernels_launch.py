"""The table of launch parameters: an entry for every batch, of which every kernel can be made."""

from __future__ import annotations

import json

import pytest
import torch

from scute_kernels import launch

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHARED_MEMORY = 227 << 10  # of a multiprocessor of an H100 or H200, the most that a program can have


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 100_000])
def test_every_batch_has_parameters_that_fit(rows: int, dtype: torch.dtype) -> None:
    tile = 16 if rows <= 256 else 64
    shrink, expand = launch.shrink(rows, dtype, 1024), launch.expand(rows, dtype, 1024)
    for block in (shrink.block_rank, shrink.block_in, expand.block_rank, expand.block_out):
        assert block >= 16 and block & (block - 1) == 0
    buffers = shrink.num_stages * (tile + shrink.block_rank) * shrink.block_in * dtype.itemsize
    assert buffers <= SHARED_MEMORY
    # The planes of a scratch would fill the buffers of more stages: expand has one.
    assert expand.num_stages == 1
    assert (tile + expand.block_out) * expand.block_rank * dtype.itemsize <= SHARED_MEMORY
    for features in (1, 896, 4096, 14336, 28672):
        assert 1 <= launch.shrink_split(rows, dtype, features) <= 16


def test_a_small_largest_rank_makes_small_blocks() -> None:
    assert launch.shrink(16, torch.float16, 3).block_rank == 16
    assert launch.expand(16, torch.float16, 17).block_rank <= 32
    assert launch.expand(16, torch.float16, 1024).block_rank == launch.expand(16, torch.float16, 512).block_rank


def test_the_first_entry_that_is_for_the_batch() -> None:
    options = {"num_warps": 4, "num_stages": 1, "max_registers": None, "pdl": False}
    entries = [
        {"max_rows": most, "block_rank": 16, "block_out": width, "tile_programs": 16, **options}
        for most, width in ((4, 32), (16, 64), (None, 128))
    ]
    chosen = [launch.choose(entries, rows, launch.Expand).block_out for rows in (1, 4, 5, 16, 17, 10**6)]
    assert chosen == [32, 32, 64, 64, 128, 128]
    with pytest.raises(ValueError, match="no entry for 17 rows"):
        launch.choose(entries[:2], 17, launch.Expand)


def test_entries_stand_in_order() -> None:
    table = json.loads(launch.TABLE.read_text())
    for operator in ("shrink", "expand"):
        for precision in ("half", "single"):
            bounds = [entry["max_rows"] for entry in table[operator][precision]]
            assert bounds[-1] is None
            assert bounds[:-1] == sorted(set(bounds[:-1]))
            assert 256 in bounds  # up to there a tile has 16 rows, and more beyond


def test_no_early_launch_without_a_gpu_that_can() -> None:
    if not torch.cuda.is_available():
        assert not launch.supports_pdl()
    assert launch.options(launch.shrink(16, torch.float32, 16)) == {}
