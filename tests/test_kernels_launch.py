"""The table of launch parameters: an entry for every batch, of which every kernel can be made."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import pytest
import torch

from scute_kernels import launch
from scute_kernels.plan import DECODE_WIDTH, FEW_ROWS, MOST_DECODE_ROWS, PREFILL_WIDTH, own_tile_rows

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHARED_MEMORY = 99 << 10  # the most that a program can have on an A6000, L40S or RTX 4090; an A100 has 163, an H200 227


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 100_000])
@pytest.mark.parametrize("width", [DECODE_WIDTH, PREFILL_WIDTH])
@pytest.mark.parametrize("kind", ["", "shared_"])
def test_every_batch_has_parameters_that_fit(
    kind: str, width: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a prefill graph of few rows, whose tiles are wide; on a GPU with little shared memory."""
    monkeypatch.setattr(launch, "_shared_memory", lambda: SHARED_MEMORY)
    tile_rows = width if kind else own_tile_rows(rows, width)
    shrink = launch.shrink(f"{kind}shrink", rows, tile_rows, dtype, 1024)
    expand = (launch.shared_expand.__wrapped__ if kind else launch.expand)(rows, tile_rows, dtype, 1024)
    least = 1 if tile_rows == 1 else 16  # what a tensor core multiplies
    for block in (shrink.block_rank, shrink.block_in, expand.block_rank, expand.block_out):
        assert block >= least and block & (block - 1) == 0
    if tile_rows > 1:
        part = shrink.block_in // launch.ways(shrink, tile_rows, dtype)
        assert part >= 16  # features that a tensor core multiplies
        long = launch.long_block(shrink, rows, tile_rows, dtype)
        assert kind or (long == (128, 64)) == (rows >= 4096 and width == PREFILL_WIDTH and dtype != torch.float32)
        for of_ranks, of_features in ((shrink.block_rank, shrink.block_in), long):
            buffers = shrink.num_stages * (tile_rows + of_ranks) * of_features * dtype.itemsize
            assert buffers <= SHARED_MEMORY
        # A stage holds b, and of the rows e and h; or h, and in decode the addend.
        of_rows = 2 * dtype.itemsize if kind else dtype.itemsize + (4 if tile_rows == DECODE_WIDTH else 0)
        stage = expand.block_out * (expand.block_rank * dtype.itemsize + tile_rows * of_rows)
        assert tile_rows * expand.block_rank * dtype.itemsize + expand.num_stages * stage <= SHARED_MEMORY
    for features in (1, 896, 4096, 14336, 28672):
        assert 1 <= launch.shrink_split(f"{kind}shrink", rows, tile_rows, dtype, features) <= 16


@pytest.mark.parametrize("programs", [1, 13, 96, 396])
@pytest.mark.parametrize("parts", [1, 6, 21])
@pytest.mark.parametrize("n_tiles", [1, 4, 256])
@pytest.mark.parametrize(("rank", "blocks"), [(8, 1), (64, 4), (256, 16), (1024, 16)])
def test_programs_of_shared_bases(programs: int, parts: int, n_tiles: int, rank: int, blocks: int) -> None:
    """About as many as asked for, at least one, and of the blocks no more than a common rank has."""
    parameters = dataclasses.replace(launch.shrink("shared_shrink", 16, 16, torch.float16, rank), programs=programs)
    of_blocks, of_tiles = launch.shared_shrink_programs(parameters, n_tiles, parts, rank)
    assert 1 <= of_blocks <= blocks and 1 <= of_tiles <= n_tiles
    assert parts * of_blocks * of_tiles <= max(programs, parts)
    rounds = -(-blocks // of_blocks)
    assert of_blocks == 1 or -(-blocks // (of_blocks - 1)) > rounds  # one less would need more rounds


def test_a_small_largest_rank_makes_small_blocks() -> None:
    assert launch.shrink("shared_shrink", 16, 16, torch.float16, 3).block_rank == 16
    assert launch.shared_expand(16, 16, torch.float16, 17).block_rank <= 32
    wide = [launch.shared_expand(16, 16, torch.float16, rank).block_rank for rank in (512, 1024)]
    assert wide[0] == wide[1]


@pytest.mark.parametrize("rows", [1, 4, 16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_of_expand_are_half_as_wide_where_they_are_few(rows: int, dtype: torch.dtype) -> None:
    whole = launch.expand(rows, 1, dtype, 1024)
    for offsets in ((0, 4096), (0, 4096, 5120, 6144), (0, 14336, 28672), (0, 128256)):
        chosen, further = launch.expand_rows(whole, rows, offsets)
        few = whole.num_warps > 1 and rows * launch.column_blocks(offsets, whole.block_out) < launch.FEW_PROGRAMS
        assert few == (chosen != whole)
        assert launch.expand_rows(whole, 2 * rows - 1, offsets) == (chosen, further)  # the same order of magnitude
        assert chosen.block_out * whole.num_warps == whole.block_out * chosen.num_warps
        assert further >= chosen.block_rank and further & (further - 1) == 0
        of_thread = max(chosen.block_rank, further) * chosen.block_out // (32 * chosen.num_warps)
        assert of_thread <= 128  # more would be in no register
    r16_on_o = launch.expand_rows(launch.expand(16, 1, torch.float16, 1024), 16, (0, 4096))
    assert r16_on_o[0].num_warps == 1 and r16_on_o[1] == 32


QKV, NARROW, GATE_UP = (0, 4096, 5120, 6144), (0, 4096), (0, 14336, 28672)


@pytest.mark.parametrize(
    ("rows", "tiles", "rank", "offsets", "fastest"),
    [
        (300, 6, 16, GATE_UP, {8}),
        (512, 8, 16, GATE_UP, {10}),
        (700, 15, 16, GATE_UP, {18}),
        (1024, 16, 16, NARROW, {3}),
        (1024, 16, 64, GATE_UP, {20}),
        (2048, 32, 16, NARROW, {6}),
        (2100, 36, 16, QKV, {10}),
        (3300, 54, 16, NARROW, {10}),
        (4096, 64, 16, NARROW, {11}),
        (8192, 128, 64, QKV, {16}),
        (8192, 128, 64, NARROW, {22, 24}),
        (8192, 128, 256, NARROW, {32}),
    ],
)
def test_waves_of_a_prefill(
    rows: int, tiles: int, rank: int, offsets: tuple[int, ...], fastest: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was fastest on an H200, or within 5 % of it: see docs/performance.md, "Waves of expand"."""
    monkeypatch.setattr(launch, "_multiprocessors", lambda: 132)
    parameters = launch.expand(rows, PREFILL_WIDTH, torch.float16, rank)

    def run(tiles: int = tiles, tile_rows: int = PREFILL_WIDTH) -> int:
        parts = launch.expand_parts(PREFILL_WIDTH, torch.float16, offsets)
        return launch.expand_run(parameters, rows, tiles, tile_rows, max(rank, 128), parts, offsets)

    assert run() in fastest
    full = -(-rows // PREFILL_WIDTH)
    assert run(tiles=10**6) == run(tiles=full + full // 8 + 2)  # a graph has room for more
    assert run(tile_rows=DECODE_WIDTH) == parameters.run
    monkeypatch.setattr(launch, "_multiprocessors", lambda: 0)
    assert run() == parameters.run


def test_parts_of_a_tile() -> None:
    """Only wide slices in prefill, of which the narrowest counts; blocks of columns come in as many then."""
    offsets = (NARROW, QKV, GATE_UP, (0, 14336, 18432), (0, 28672))
    for tile_rows, dtype, parts in (
        (PREFILL_WIDTH, torch.float16, [1, 1, 2, 1, 2]),
        (PREFILL_WIDTH, torch.float32, [1] * 5),
        (DECODE_WIDTH, torch.float16, [1] * 5),
    ):
        assert [launch.expand_parts(tile_rows, dtype, of_module) for of_module in offsets] == parts
    parameters = launch.expand(8192, PREFILL_WIDTH, torch.float16, 128)
    for run in (3, 8):
        of_table = dataclasses.replace(parameters, run=run)
        assert launch.expand_run(of_table, 8192, 128, PREFILL_WIDTH, 128, 2, GATE_UP) % 2 == 0


@pytest.mark.parametrize("rank", [16, 200, 1024])
@pytest.mark.parametrize(("kilobytes", "tiles"), [(0, 1), (99, 1), (163, 1), (227, 2)])
def test_two_tiles_at_once_fit(kilobytes: int, tiles: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program multiplies two tiles of a prefill at once where there is shared memory for it."""
    monkeypatch.setattr(launch, "_shared_memory", lambda: kilobytes << 10)
    choose = launch.shared_expand.__wrapped__  # which remembers nothing
    for dtype in (torch.float16, torch.bfloat16):
        chosen = choose(4096, PREFILL_WIDTH, dtype, rank)
        assert chosen.tiles == (2 if rank == 16 and kilobytes else tiles)
        assert chosen.tiles == 1 or launch.two_tiles_bytes(chosen, PREFILL_WIDTH, dtype) <= kilobytes << 10
        assert choose(16, DECODE_WIDTH, dtype, rank).tiles == 1
    assert choose(4096, PREFILL_WIDTH, torch.float32, rank).tiles == 1


def run_of_two_tiles(rows: int, tiles: int, offsets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """On an H200."""
    monkeypatch.setattr(launch, "_multiprocessors", lambda: 132)
    monkeypatch.setattr(launch, "_shared_memory", lambda: 227 << 10)
    parameters = launch.shared_expand.__wrapped__(rows, PREFILL_WIDTH, torch.float16, 256)
    return launch.shared_expand_run(parameters, rows, tiles, PREFILL_WIDTH, offsets)


@pytest.mark.parametrize(
    ("rows", "tiles", "offsets", "fastest"),
    [
        (8192, 128, QKV, {16}),
        (8192, 128, NARROW, {32}),
        (8192, 128, GATE_UP, {112}),
        (4096, 64, NARROW, {16}),
        (4096, 64, GATE_UP, {112}),
        (2048, 32, NARROW, {8}),
        (2048, 32, GATE_UP, {56}),
        (1024, 16, QKV, {7}),
        (512, 8, GATE_UP, {14}),
    ],
)
def test_waves_of_two_tiles(
    rows: int, tiles: int, offsets: tuple[int, ...], fastest: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of columns that were fastest on an H200, or within 2 % of it."""
    assert run_of_two_tiles(rows, tiles, offsets, monkeypatch) in fastest


@pytest.mark.parametrize(
    ("rows", "tiles", "offsets", "run"),
    [(512, 8, NARROW, 2), (384, 64, NARROW, 2), (48, 48, NARROW, 1), (32, 32, GATE_UP, 7), (1, 1, (0, 128), 1)],
)
def test_few_tiles_have_short_runs(
    rows: int, tiles: int, offsets: tuple[int, ...], run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As short as one wave lets them be, also in a graph, which has room for more tiles; without a GPU those of the
    table."""
    assert run_of_two_tiles(rows, tiles, offsets, monkeypatch) == run
    monkeypatch.setattr(launch, "_multiprocessors", lambda: 0)
    parameters = launch.shared_expand.__wrapped__(rows, PREFILL_WIDTH, torch.float16, 256)
    assert launch.shared_expand_run(parameters, rows, tiles, PREFILL_WIDTH, offsets) == parameters.run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [64, 4095, 4096])
def test_scratch_of_shared_bases(rows: int, dtype: torch.dtype) -> None:
    """In prefill one plane of the arena's dtype, but of few rows with many features, which need several."""
    for features, planes in ((4096, 1), (14336, 1 if rows >= 4096 and dtype != torch.float32 else 3)):
        split = launch.shrink_split("shared_shrink", rows, PREFILL_WIDTH, dtype, features)
        assert split == planes
        scratch = launch.shared_scratch_dtype(split, PREFILL_WIDTH, dtype)
        assert scratch == (dtype if planes == 1 else torch.float32)
    assert launch.shared_scratch_dtype(1, DECODE_WIDTH, dtype) == torch.float32


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
def test_blocks_of_ranks(kilobytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs of prefill with 256 ranks are resident, or there are no such."""
    monkeypatch.setattr(launch, "_shared_memory", lambda: kilobytes << 10)

    def blocks(rank: int, rows: int, dtype: torch.dtype = torch.float16) -> tuple[int, ...]:
        tile_rows = own_tile_rows(rows, PREFILL_WIDTH if rows > 256 else DECODE_WIDTH)
        parameters = launch.expand(rows, tile_rows, dtype, rank)
        ranks, stages = launch.rank_blocks(parameters, tile_rows, dtype, rank)
        assert len(stages) == len(ranks) and list(ranks) == sorted(ranks)
        for most, count in zip(ranks, stages, strict=True):
            of_stage = parameters.block_out * dtype.itemsize * (most + tile_rows)
            used = tile_rows * most * dtype.itemsize + count * of_stage
            assert used <= SHARED_MEMORY or 2 * used <= kilobytes << 10
        return ranks

    large = (16, 64, 256) if kilobytes == 227 else (16, 64, 128)
    assert [blocks(rank, 8192) for rank in (16, 48, 64, 128)] == [(16,), (16, 64), (16, 64, 128), (16, 64, 128)]
    assert [blocks(rank, 8192) for rank in (144, 256, 272)] == [large, large, (16, 64, 128)]
    assert blocks(256, 8192, torch.float32) == (16, 32)
    assert blocks(256, 100) == (16,)


@pytest.mark.parametrize("block_rank", [16, 32, 64, 128, 256])
def test_blocks_of_ranks_are_ascending(block_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the table has: a tile has the first that holds its rank, and larger ranks go beyond the last."""
    monkeypatch.setattr(launch, "_shared_memory", lambda: 227 << 10)
    parameters = dataclasses.replace(launch.expand(8192, 64, torch.float16, 1024), block_rank=block_rank)
    for rank in (64, 128, 256, 1024):
        ranks, stages = launch.rank_blocks(parameters, PREFILL_WIDTH, torch.float16, rank)
        assert list(ranks) == sorted({16, block_rank, *ranks})
        assert stages[ranks.index(block_rank)] == parameters.num_stages


@pytest.mark.parametrize("max_rank", [*range(16, 400, 16), 512, 1024])
@pytest.mark.parametrize("kilobytes", [99, 227])
def test_a_rehearsal_meets_all_blocks_of_ranks(max_rank: int, kilobytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_shared_memory", lambda: kilobytes << 10)

    def blocks(rank: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        parameters = launch.expand(8192, 64, torch.float16, rank)
        ranks, stages = launch.rank_blocks(parameters, PREFILL_WIDTH, torch.float16, rank)
        return ranks, stages, rank > ranks[-1]  # whether the kernel has a loop for larger ones

    rehearsed = {blocks(rank) for rank in launch.scratch_ranks(max_rank)}
    least = launch.widest_block("shrink", "expand")
    assert {blocks(min(max_rank, max(least, 1 << power))) for power in range(11)} <= rehearsed


def test_the_first_entry_that_is_for_the_batch() -> None:
    options = {"block_rank": 16, "run": 1, "tile_programs": 16, "num_warps": 4, "num_stages": 1, "tiles": 1}
    entries = [{"max_rows": most, "block_out": width, **options} for most, width in ((4, 32), (16, 64), (None, 128))]
    chosen = [launch.choose(entries, rows, 16, launch.SharedExpand).block_out for rows in (1, 4, 5, 16, 17, 10**6)]
    assert chosen == [32, 32, 64, 64, 128, 128]
    assert launch.choose(entries, 4, PREFILL_WIDTH, launch.SharedExpand).block_out == 128
    with pytest.raises(ValueError, match="no entry for 17 rows"):
        launch.choose(entries[:2], 17, 16, launch.SharedExpand)


def test_entries_stand_in_order() -> None:
    table = json.loads(launch.TABLE.read_text())
    for operator in ("shrink", "expand", "shared_shrink", "shared_expand"):
        for precision in ("half", "single"):
            bounds = [entry["max_rows"] for entry in table[operator][precision]]
            assert bounds[-1] is None
            assert bounds[:-1] == sorted(set(bounds[:-1]))
            for before, bound in pairwise([0, *bounds[:-1]]):  # a rehearsal of powers of two meets every entry
                assert 1 << (bound.bit_length() - 1) > before
            assert 256 in bounds  # up to there a tile has 16 rows, and more beyond
            assert operator.startswith("shared") or FEW_ROWS in bounds  # up to there a tile has one


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_no_early_launch_without_a_gpu() -> None:
    assert not launch.supports_pdl()
    assert launch.options(launch.expand(16, 1, torch.float16, 16).pdl) == {}


def test_entries_end_with_powers_of_two() -> None:
    """A rehearsal counts on it, see ``ScuteLoRABackend.rehearse``."""
    table = json.loads(launch.TABLE.read_text())
    ends = {
        entry["max_rows"]
        for name in ("shrink", "expand", "shared_shrink", "shared_expand")
        for of_precision in table[name].values()
        for entry in of_precision
    }
    for rows in ends - {None} | {launch.LONG_ROWS, FEW_ROWS, MOST_DECODE_ROWS}:
        assert rows & (rows - 1) == 0
