"""Launch parameters of every kernel, in one place; those of the shrinks and expands from ``launch_table.json``.

``benchmarks/tune.py`` measures and writes that table. Parameters depend on shapes only, never on the batch, because a
captured graph keeps them. The blocks of fp32 are smaller: its elements are twice as large, and its products do not run
on tensor cores.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from scute_kernels.plan import DECODE_WIDTH, FEW_ROWS

TABLE = Path(__file__).with_name("launch_table.json")


@dataclass(frozen=True)
class RotateRows:
    """``block_in``: features that a step of a product takes. ``run``: blocks of columns that a program does. ``copy``:
    columns that it does where nothing is to be multiplied. ``pdl``: see ``supports_pdl``."""

    block_in: int
    block_out: int
    run: int
    copy: int
    num_warps: int
    pdl: bool


@dataclass(frozen=True)
class RotateTiles:
    """``run``: blocks of columns that a program does, one after another."""

    block_in: int
    block_out: int
    run: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Shrink:
    """Of ``shrink`` and ``shared_shrink``. ``share``: features that a program multiplies, about. ``programs``: of a
    launch, about."""

    block_rank: int
    block_in: int
    share: int
    programs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Lookup:
    rows: int
    block_rank: int
    num_warps: int


@dataclass(frozen=True)
class Expand:
    """Of ``expand``. Where a tile is one row: ``pdl``, programmatic dependent launch, see ``supports_pdl``, and what
    ``expand_rows`` makes of the others. Where it is more: ``run``, blocks of columns that a program does, one after
    another, in prefill about, see ``expand_run``, and ``tile_programs``, how many programs share the tiles of these, at
    most."""

    block_rank: int
    block_out: int
    run: int
    tile_programs: int
    num_warps: int
    num_stages: int
    pdl: bool


@dataclass(frozen=True)
class SharedExpand:
    """Of ``shared_expand``. ``tiles``: that a program multiplies at once, 1 or 2. ``run``: blocks of columns that it
    does, one after another; with two tiles about, see ``shared_expand_run``. ``tile_programs``: how many programs share
    the tiles of these, at most."""

    block_rank: int
    block_out: int
    run: int
    tile_programs: int
    num_warps: int
    num_stages: int
    tiles: int


Parameters = TypeVar("Parameters", Shrink, Expand, SharedExpand)
_MOST_PLANES = 16
LONG_RANK, LONG_ROWS = 64, 4096  # see long_block; LONG_ROWS also shrink_split
# Below so many, programs of expand for rows are half as wide. On an H200 that takes up to a third off the time of r256
# at o, q, k and v for 16 and 24 rows, 256 to 384 programs; for 32 and 64, of 512 and more, it makes no difference or is
# slower, and for gate and up it is slower.
FEW_PROGRAMS = 500
WIDE_SLICE = 8192  # columns, see expand_parts
_ELEMENTS = 128  # of b in the registers of a thread, the most with which nothing spills
# Of shared bases. The scratch has room for larger ones, but programs for their blocks would have nothing to do.
_COMMON_RANK = 256


def precision(dtype: torch.dtype) -> str:
    """The part of the table for a dtype."""
    return "single" if dtype == torch.float32 else "half"


def choose(rows_of_table: Sequence[Mapping[str, Any]], rows: int, tile_rows: int, kind: type[Parameters]) -> Parameters:
    """The parameters of the first entry that is for ``rows`` rows too. ``max_rows``: None for any number, and for tiles
    as wide as those of prefill, which a prefill graph of few rows has too."""
    for entry in rows_of_table:
        most = entry["max_rows"]
        if most is None or (rows <= most and tile_rows <= DECODE_WIDTH):
            return kind(**{name: value for name, value in entry.items() if name != "max_rows"})
    raise ValueError(f'{TABLE.name}: no entry for {rows} rows; the last one needs "max_rows": null')


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def widest_block(*operators: str) -> int:
    """The largest block of ranks that one of them may have, for any batch and precision."""
    return max(entry["block_rank"] for name in operators for entries in _table()[name].values() for entry in entries)


@functools.lru_cache(1024)  # every launch asks
def shrink(operator: str, rows: int, tile_rows: int, dtype: torch.dtype, max_rank: int) -> Shrink:
    """``operator``: "shrink" or "shared_shrink". ``rows``: N of the batch. ``max_rank``: R of the scratch."""
    chosen = choose(_table()[operator][precision(dtype)], rows, tile_rows, Shrink)
    return replace(chosen, block_rank=_block(max_rank, chosen.block_rank))


@functools.lru_cache(1024)
def shrink_split(
    operator: str,
    rows: int,
    tile_rows: int,
    dtype: torch.dtype,
    in_features: int,
    parameters: Shrink | None = None,
) -> int:
    """SPLIT of the operator: into how many partial planes the features are split. Depends on shapes only. ``rows``: N
    of the batch. ``parameters``: those of the table if not given."""
    if operator == "shared_shrink" and _is_long(rows, tile_rows, dtype):
        return 1  # programs enough without; and every program of shared_expand would read all planes
    parameters = parameters or choose(_table()[operator][precision(dtype)], rows, tile_rows, Shrink)
    return max(1, min(_MOST_PLANES, in_features // parameters.share))


def shared_scratch_dtype(split: int, tile_rows: int, dtype: torch.dtype) -> torch.dtype:
    """Of ``u``. Of one plane in prefill that of the arena, to which ``shared_expand`` would round it: so it is half as
    large, and tensor cores read it from shared memory as it came. For ``v``, whose ranks are fewer, that is slower."""
    return dtype if split == 1 and tile_rows > DECODE_WIDTH else torch.float32


def ways(parameters: Shrink, tile_rows: int, dtype: torch.dtype) -> int:
    """Into how many parts each block of features is split, whose products with ``a`` are summed at the end. Of a tile
    of 16 rows one warp multiplies all, so the others have a part each; else these products would be one chain, in which
    each waits for the one before it. Tensor cores only."""
    return parameters.num_warps if tile_rows == DECODE_WIDTH and precision(dtype) == "half" else 1


def long_block(parameters: Shrink, rows: int, tile_rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """Block of ranks, and of features, for the pairs of ``shrink`` of more than ``LONG_RANK`` ranks: a tile of prefill
    reads its inputs again for each block. That of the others, if the rows are too few to make enough programs then."""
    return (128, 64) if _is_long(rows, tile_rows, dtype) else (parameters.block_rank, parameters.block_in)


def _is_long(rows: int, tile_rows: int, dtype: torch.dtype) -> bool:
    """Whether the rows of a prefill are so many that their tiles are programs enough."""
    return tile_rows > DECODE_WIDTH and rows >= LONG_ROWS and precision(dtype) == "half"


def shrink_programs(parameters: Shrink, n_tiles: int, parts: int, max_rank: int) -> int:
    """Programs that divide the blocks of ranks among them, no more than there can be. ``parts``: how often they are
    launched, for each slice and share of the features."""
    most = n_tiles * -(-max_rank // parameters.block_rank)
    return max(1, min(most, parameters.programs // parts))


def shared_shrink_programs(parameters: Shrink, n_tiles: int, parts: int, max_rank: int) -> tuple[int, int]:
    """Programs that divide the blocks of ranks among them, and how many divide the tiles. ``parts``: how often they are
    launched, for each slice and share of the features."""
    blocks = -(-min(max_rank, _COMMON_RANK) // parameters.block_rank)
    rounds = -(-blocks // max(1, parameters.programs // parts))
    blocks = -(-blocks // rounds)  # as few as do them in as many rounds
    return blocks, max(1, min(n_tiles, parameters.programs // (parts * blocks)))


def column_blocks(slice_offsets: Sequence[int], block_out: int) -> int:
    """Blocks of columns of a module, each of which lies in one slice."""
    return sum(-(-(end - begin) // block_out) for begin, end in pairwise(slice_offsets))


def width_step(slice_offsets: Sequence[int]) -> int:
    """What the kernels may take for granted to divide the first column and the width of every slice."""
    return 16 if all(offset % 16 == 0 for offset in slice_offsets) else 1


@functools.lru_cache(1024)
def expand(rows: int, tile_rows: int, dtype: torch.dtype, max_rank: int) -> Expand:
    """``rows``: N of the batch. ``max_rank``: R of the scratch."""
    chosen = choose(_table()["expand"][precision(dtype)], rows, tile_rows, Expand)
    return replace(chosen, block_rank=_block(max_rank, chosen.block_rank), pdl=chosen.pdl and supports_pdl())


def expand_rows(parameters: Expand, n_tiles: int, slice_offsets: Sequence[int]) -> tuple[Expand, int]:
    """Where a tile is one row: those of a module, and the block of ranks behind the first, which has the most common.

    With few columns and rows there are few programs, so these are half as wide, with half the warps, and read as many
    later ranks at once as registers have room for: in small blocks, one after another, these would not come at the pace
    of the memory. Of many programs, more registers would let fewer be resident. A program of one warp stays as it is.
    Tiles count as a power of two, at most as many, so that a server can rehearse all there is.
    """
    programs = column_blocks(slice_offsets, parameters.block_out) << max(0, n_tiles.bit_length() - 1)
    if programs >= FEW_PROGRAMS or parameters.num_warps == 1:
        return parameters, parameters.block_rank
    half = replace(parameters, block_out=parameters.block_out // 2, num_warps=parameters.num_warps // 2)
    return half, max(half.block_rank, _ELEMENTS * 32 * half.num_warps // half.block_out)


def expand_run(
    parameters: Expand,
    rows: int,
    n_tiles: int,
    tile_rows: int,
    largest_rank: int,
    parts: int,
    slice_offsets: Sequence[int],
) -> int:
    """Where a tile is more than one row: blocks of columns that a program does, a multiple of ``parts``.

    In prefill, of all from about 3 to four times those of the table, what makes the shortest waves of programs: 4096
    rows of 4096 columns are two waves of 512 programs of 8 blocks on an H200, or one of 384 programs of 11 blocks,
    which takes three quarters of the time. A program takes as long as its blocks and three more. ``n_tiles``: of the
    plan, which in an eager prefill all have rows, and in a graph are as many as there can be; see ``_filled_tiles``.
    ``largest_rank``: of ``rank_blocks``. ``parts``: ``expand_parts``.
    """
    if tile_rows <= DECODE_WIDTH or not _multiprocessors():
        return -(-parameters.run // parts) * parts
    resident = 3 if parameters.num_warps <= 4 and largest_rank < 256 else 2  # see few_registers and rank_blocks
    tiles = min(_filled_tiles(rows, n_tiles, tile_rows), parameters.tile_programs)
    runs = -(-min(3, parameters.run) // parts) * parts, 4 * parameters.run, parts
    return _shortest_run(runs, parameters.block_out, tiles, resident * _multiprocessors(), tuple(slice_offsets))


def _filled_tiles(rows: int, n_tiles: int, tile_rows: int) -> int:
    """How many tiles of a prefill have rows, about. A plan with fewer than one for each of few rows is that of an eager
    prefill, whose tiles all have; in any other most may be dead, so at most as many count as are full, and some. (That
    is less than there are where an eager prefill of short requests has ``FEW_ROWS`` tiles or more.)"""
    full = -(-rows // tile_rows)
    return n_tiles if n_tiles < min(rows, FEW_ROWS) else min(n_tiles, full + full // 8 + 2)


@functools.lru_cache(4096)  # every launch of a prefill asks
def _shortest_run(
    runs: tuple[int, int, int], block_out: int, tile_programs: int, resident: int, slice_offsets: tuple[int, ...]
) -> int:
    """Which run of blocks of columns makes the shortest waves of programs, see ``expand_run``. ``runs``: the shortest,
    the longest and the step."""

    def cost(run: int) -> int:
        programs = column_blocks(slice_offsets, run * block_out) * tile_programs
        return -(-programs // resident) * (run + 3)

    return min(range(runs[0], runs[1] + 1, runs[2]), key=cost)


def rank_blocks(
    parameters: Expand, tile_rows: int, dtype: torch.dtype, max_rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks of ranks of ``expand`` for tiles of several rows, ascending, and the stages of each: a tile has the first
    that holds its rank. The most common ranks have one of their own, so that they do not take the time of larger ones.

    In prefill, ranks up to 128 have too, else a tile would read all of ``v`` again for each block of columns. The
    shared memory of 256 ranks lets fewer programs be resident, whatever their rank, so these have one only if none is
    larger and some may be (an eager prefill has a scratch no wider than it needs), and if two programs are resident.
    """
    stages = {16: parameters.num_stages, parameters.block_rank: parameters.num_stages}
    if tile_rows > DECODE_WIDTH and precision(dtype) == "half" and max_rank >= 64:
        columns = 2 * parameters.block_out
        needed = dtype.itemsize * (256 * (tile_rows + columns) + tile_rows * columns)
        largest = 256 if 128 < max_rank <= 256 and 2 * needed <= _shared_memory() else 128
        if largest > parameters.block_rank:
            stages[largest] = 2
    ranks, counts = zip(*sorted(stages.items()), strict=True)
    return ranks, counts


def expand_parts(tile_rows: int, dtype: torch.dtype, slice_offsets: Sequence[int]) -> int:
    """Into how many parts ``expand`` divides the rows of a tile with the smallest block of ranks; its blocks of columns
    are as many times wider then, with one stage less.

    In prefill memory is faster for long runs of columns: 8192 rows of r16 at gate and up take a tenth less on an H200.
    For larger ranks, ``b`` would take the shared memory; for 4096 columns it is as fast or slower.
    """
    narrowest = min(end - begin for begin, end in pairwise(slice_offsets))
    return 2 if tile_rows > DECODE_WIDTH and precision(dtype) == "half" and narrowest > WIDE_SLICE else 1


def scratch_ranks(max_rank: int) -> set[int]:
    """Ranks of scratches for which ``rank_blocks``, or whether ranks go beyond them, may differ, up to ``max_rank``."""
    return {min(rank, max_rank) for rank in (128, 256, max_rank)}


@functools.lru_cache(1024)
def shared_expand(rows: int, tile_rows: int, dtype: torch.dtype, max_rank: int) -> SharedExpand:
    """As ``expand``; one tile at a time where the shared memory has no room for two."""
    chosen = choose(_table()["shared_expand"][precision(dtype)], rows, tile_rows, SharedExpand)
    chosen = replace(chosen, block_rank=_block(max_rank, chosen.block_rank))
    if chosen.tiles == 2 and two_tiles_bytes(chosen, tile_rows, dtype) > _shared_memory():
        return replace(chosen, **_ONE_TILE)
    return chosen


# Of shared_expand, in place of two tiles: fits into the shared memory of every GPU that the project serves.
_ONE_TILE: dict[str, Any] = {"block_out": 32, "run": 8, "num_warps": 4, "num_stages": 2, "tiles": 1}


def two_tiles_bytes(parameters: SharedExpand, tile_rows: int, dtype: torch.dtype) -> int:
    """At most the shared memory of a program of ``shared_expand`` that multiplies two tiles at once: ``u``, in each
    stage ``b`` and ``out``, and once more as much as ``out`` for ``e`` of each row and for what the compiler adds."""
    rows, columns, stages = 2 * tile_rows, parameters.block_out, parameters.num_stages
    return dtype.itemsize * (parameters.block_rank * (rows + stages * columns) + rows * columns * (stages + 1))


def shared_expand_run(
    parameters: SharedExpand, rows: int, n_tiles: int, tile_rows: int, slice_offsets: Sequence[int]
) -> int:
    """Of two tiles at once: as ``expand_run``, from 1 block to eight times those of the table; one program is
    resident."""
    if not _multiprocessors():
        return parameters.run
    pairs = -(-_filled_tiles(rows, n_tiles, tile_rows) // 2)
    runs = 1, 8 * parameters.run, 1
    tile_programs = min(pairs, parameters.tile_programs)
    return _shortest_run(runs, parameters.block_out, tile_programs, _multiprocessors(), tuple(slice_offsets))


def rotate_rows(rows: int, features: int) -> RotateRows:
    """``rows``: of the output. A program for every block of columns, unless they are so many that they come in several
    waves, most of them to find that another copies what is theirs."""
    block = 64
    many = rows * -(-features // block) > 6000
    return RotateRows(
        block_in=block,
        block_out=block,
        run=8 if many else 1,
        copy=8 * block,
        num_warps=2,
        pdl=supports_pdl(),
    )


def rotate_tiles(tile_rows: int, dtype: torch.dtype) -> RotateTiles:
    if dtype == torch.float32:
        return RotateTiles(block_in=32, block_out=32, run=8, num_warps=4, num_stages=2)
    if tile_rows == DECODE_WIDTH:
        return RotateTiles(block_in=32, block_out=64, run=1, num_warps=2, num_stages=1)
    return RotateTiles(block_in=32, block_out=64, run=8, num_warps=4, num_stages=3)


def lookup(max_rank: int) -> Lookup:
    return Lookup(rows=16, block_rank=_block(max_rank, 64), num_warps=4)


@functools.cache
def supports_pdl() -> bool:
    """Whether a kernel can begin while the one before it ends (programmatic dependent launch): from Hopper on."""
    return _compiles_for_nvidia() and torch.cuda.get_device_capability() >= (9, 0)


@functools.cache
def _multiprocessors() -> int:
    """0 if not of an NVIDIA GPU."""
    return torch.cuda.get_device_properties().multi_processor_count if _compiles_for_nvidia() else 0


@functools.cache
def _shared_memory() -> int:
    """Bytes that a program may have, which is about what a multiprocessor has."""
    return torch.cuda.get_device_properties().shared_memory_per_block_optin if _compiles_for_nvidia() else 0


@functools.cache
def _compiles_for_nvidia() -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.cuda.is_available() and not torch.version.hip and not interpreted


def few_registers(num_warps: int) -> dict[str, Any]:
    """A launch option for a kernel that the compiler would give so many registers that fewer programs are resident:
    three of four warps on a multiprocessor of an NVIDIA GPU, or two of eight. It spills next to nothing, but where a
    rare way through the kernel needs more."""
    return {"maxnreg": 168 if num_warps <= 4 else 128} if _compiles_for_nvidia() else {}


def options(pdl: bool) -> dict[str, Any]:
    """A launch option that is given only where it is wanted: the interpreter does not know it."""
    return {"launch_pdl": True} if pdl else {}


def _block(rank: int, most: int) -> int:
    """The block of ranks: no larger than needed, at least the 16 that a tensor core multiplies, if the table has so."""
    block = min(16, most)
    while block < min(rank, most):
        block *= 2
    return block
