"""Batch plans: rows of a batch grouped into tiles of one adapter, or of adapters with one shared basis.

A forward has two. The *own* plan, of the rows of all adapters, serves what follows the base layer: its tiles are of one
adapter. The *grouped* plan serves shared bases, which one tile reads for rows of several adapters, and input
transforms; in prefill these have a grouped plan of the transformed rows alone.

Where an adapter transforms the inputs of a fused module, every slice has inputs of its own. Those of the first slice
stand in the rows of the batch, those of the others in *further rows* behind them, for rows of such adapters only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from scute_kernels.table import SHARED_FIELDS


@dataclass(frozen=True)
class BatchPlan:
    """Device tensors that the operators of a forward read; updated in place, so captured graphs stay valid.

    ``row_slot``: ``(N,)`` int32, the slot of each row, ``-1`` for a *base row*, for which this plan has nothing to do.
    ``further``: ``(2, N)`` int32: the rows that have further rows, and their slots, both ``-1`` behind the last. Of F
    further rows for each slice but the first, the i-th is that of the i-th of these rows. The same in both plans.
    ``tiles``: ``(3, T, width)`` int32: the rows of each tile, their slots, and where in ``further`` they are. All -1
    behind the last row of a tile; the third also where a row is not in ``further``. Live tiles come first. Base rows
    are in no tile. In an own plan the rows of a tile have one slot; in a grouped plan, wherever they have a shared
    basis, it is the same, and is read once for all of them; and they have one slot if it has a rotation that is more
    than a diagonal.
    ``leading``: ``(1,)`` int32, of a grouped plan: how many tiles, the first, are of groups with a shared basis.
    ``routes``: what each tile finds in the adapter table, see ``table.py``; ``(T, sites, FIELDS)`` int64 of an own
    plan, which operator ``route`` writes once per forward, ``(T, sites, shared_fields(width))`` of a grouped plan,
    which ``shared_route`` writes.
    ``tile_rows``: most rows that a tile has, at most ``width``: 1, or a power of two >= 16.
    """

    row_slot: torch.Tensor
    further: torch.Tensor
    tiles: torch.Tensor
    leading: torch.Tensor
    routes: torch.Tensor
    tile_rows: int


# Up to so many rows, a tile of the own plan is one row: a multiplication by one row needs no tensor core and no padding
# to 16 rows, and what rows of one adapter read again lies in the L2 cache.
FEW_ROWS = 64

# Places of a tile in a plan for decode, the least that a tensor core multiplies, and for prefill, where a row of a and
# b is read for many rows. A decode of more than MOST_DECODE_ROWS rows has those of prefill.
DECODE_WIDTH = 16
PREFILL_WIDTH = 64
MOST_DECODE_ROWS = 256


def tile_width(rows: int, decode: bool) -> int:
    """Places of a tile in an eager forward of ``rows`` rows: those of the graphs of its phase, so that its kernels are
    theirs, which are compiled when a server starts."""
    return DECODE_WIDTH if decode and rows <= MOST_DECODE_ROWS else PREFILL_WIDTH


def shared_fields(width: int) -> int:
    """Fields of a route of a grouped plan with ``width`` places in a tile: in decode, those of the rows too."""
    return SHARED_FIELDS + 2 * width if width == DECODE_WIDTH else SHARED_FIELDS


def own_tile_rows(rows: int, width: int) -> int:
    """How many places of a tile are filled in the own plan of ``rows`` rows."""
    return 1 if rows <= FEW_ROWS else width


def most_tiles(rows: int, width: int, slots: int) -> int:
    """How many tiles ``rows`` rows of at most ``slots`` adapters can need: the full ones, and one more per adapter; but
    none is without a row. Room for a tile of each of few rows is always there, because a graph of many rows also serves
    a batch of few."""
    return min(rows, max(-(-rows // width) + slots, FEW_ROWS))


def few_further(rows: int) -> int:
    """F of a decode graph of ``rows`` rows for batches in which no more have further rows: a quarter, about the share
    that one method of several has. Never less for more rows: a graph that is larger than its batch has room too."""
    return -(-rows // 4)


def room_for_further(rows: int, n_further: int) -> int:
    """F of the decode graph for a batch of ``rows`` rows, of which ``n_further`` have further rows."""
    return few_further(rows) if n_further <= few_further(rows) else rows


def packed_size(rows: int, width: int, slots: int) -> int:
    """Elements of the packed plan of at most ``rows`` rows of at most ``slots`` adapters."""
    return _first_tile(rows) + 3 * most_tiles(rows, width, slots) * width


def _of_rows(rows: int) -> int:
    """Elements of what a packed plan has for each row, so that the next begins on 16 bytes, however many rows it has:
    Triton compiles a kernel once more for a pointer that does not lie on them."""
    return -(-rows // 4) * 4


def _leading(rows: int) -> int:
    """Where ``leading`` stands in a packed plan."""
    return 3 * _of_rows(rows)


def _first_tile(rows: int) -> int:
    """Where the tiles begin."""
    return _leading(rows) + 4


def build_plan(
    slots: Sequence[int],
    counts: Sequence[int],
    groups: Sequence[int],
    rows: int,
    width: int,
    tile_rows: int,
    leaders: Collection[int] = (),
    with_further: Collection[int] = (),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The packed plan of a batch, built on the host: ``row_slot | further | leading | tiles``, one copy away from the
    device. Each begins on 16 bytes.

    ``slots``: of each request, -1 for base rows. ``counts``: rows of each request; they lie one after another in the
    batch. ``groups``: of each slot, -1 if its rows need tiles of their own; slots with the same group >= 0 share
    tiles. ``rows``: the row capacity N, at least ``sum(counts)``; the rows past the live ones are base rows.
    ``width``: places of a tile; ``tile_rows``: how many of them are filled, 1 or all. ``leaders``: slots whose tiles,
    and those of their groups, come first and are counted. ``with_further``: slots whose rows are in ``further``.
    ``out``: int32 on the CPU (pinned, say), ``(packed_size(rows, width, len(groups)),)``, made if not given.

    Returns ``out``; ``view_plan`` reads it. Rows of one request stay in order. Raises ``ValueError`` for counts that
    exceed the capacity, or for more than ``FEW_ROWS`` rows in tiles of one.
    """
    live = sum(counts)
    if live > rows:
        raise ValueError(f"the batch has {live} rows, the plan has room for {rows}: raise `rows`")
    if tile_rows < width and live > FEW_ROWS:
        raise ValueError(f"{live} rows in tiles of {tile_rows}: a plan has room for {FEW_ROWS} of these")
    if out is None:
        out = torch.empty(packed_size(rows, width, len(groups)), dtype=torch.int32)
    # With numpy: torch would run repeat_interleave on all cores, however few the elements, and wait for each of them.
    packed = out.numpy()
    first_tile, of_rows = _first_tile(rows), _of_rows(rows)
    row_slot, further = packed[:of_rows], packed[of_rows : _leading(rows)].reshape(2, -1)
    tiles = packed[first_tile:].reshape(3, -1)

    members: dict[int, list[int]] = {}  # requests by group; insertion order keeps the plan stable
    first: set[int] = set()  # groups of leaders
    for request, slot in enumerate(slots):
        if slot >= 0 and counts[request]:
            group = slot if groups[slot] < 0 else len(groups) + groups[slot]
            members.setdefault(group, []).append(request)
            if slot in leaders:
                first.add(group)

    arranged: list[int] = []
    places: list[int] = []  # of the first row of each arranged request, if every tile were filled
    tile = leading = 0
    for group in sorted(members, key=lambda group: group not in first):
        place = tile * tile_rows
        for request in members[group]:
            arranged.append(request)
            places.append(place)
            place += counts[request]
        tile = -(-place // tile_rows)
        if group in first:
            leading = tile

    row_slot[:live] = np.repeat(np.asarray(slots, np.int32), counts)
    row_slot[live:] = -1
    further.fill(-1)
    packed[_leading(rows) : first_tile] = leading
    tiles.fill(-1)
    of_arranged = [counts[request] for request in arranged]
    starts, before = list(accumulate(counts, initial=0)), list(accumulate(of_arranged, initial=0))
    number = np.arange(sum(of_arranged))
    shifts = [place - first for place, first in zip(places, before, strict=False)]
    place = number + np.repeat(np.asarray(shifts, np.int64), of_arranged)
    if tile_rows < width:
        place *= width
    shifts = [starts[request] - first for request, first in zip(arranged, before, strict=False)]
    tiles[0, place] = row = number + np.repeat(np.asarray(shifts, np.int64), of_arranged)
    tiles[1, place] = row_slot[row]
    if with_further:  # most batches have none, and every decode step waits for its plans
        chosen = np.flatnonzero(np.repeat([slot in with_further for slot in slots], counts))
        further[:, : len(chosen)] = chosen, row_slot[chosen]
        in_further = np.full(live, -1, np.int32)  # where each row is
        in_further[chosen] = np.arange(len(chosen))
        tiles[2, place] = in_further[row]
    return out


def view_plan(packed: torch.Tensor, rows: int, width: int, routes: torch.Tensor) -> BatchPlan:
    """``packed`` (on any device) as a plan of ``rows`` rows: views, so filling it again in place renews the plan, but
    for ``routes``, which has to be written anew then."""
    further = packed[_of_rows(rows) : _leading(rows)].view(2, -1)[:, :rows]
    leading = packed[_leading(rows) : _leading(rows) + 1]
    tiles = packed[_first_tile(rows) :].view(3, -1, width)
    return BatchPlan(packed[:rows], further, tiles, leading, routes, tile_rows=width)


def first_tiles(plan: BatchPlan, count: int) -> BatchPlan:
    """``plan`` with no more than so many tiles, the first: views."""
    return replace(plan, tiles=plan.tiles[:, :count], routes=plan.routes[:count])


def without_dead_tiles(plan: BatchPlan, packed: torch.Tensor) -> BatchPlan:
    """``plan`` with its live tiles only, or one dead tile: views. ``packed``: the same plan, whole, on the host."""
    rows, width = plan.row_slot.shape[0], plan.tiles.shape[2]
    live = int((packed[_first_tile(rows) :].view(3, -1, width)[0, :, 0] >= 0).sum())
    return first_tiles(plan, max(1, live))


def live_tiles(tiles: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Number, row numbers and slots of every live tile. Reads the plan on the host: for the references only."""
    for tile in range(tiles.shape[1]):
        live = tiles[0, tile] >= 0
        if live.any():
            yield tile, tiles[0, tile, live].long(), tiles[1, tile, live].long()
