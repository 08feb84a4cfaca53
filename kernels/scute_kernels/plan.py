"""The batch plan: rows of a batch grouped into tiles of one adapter (or one shared basis)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from scute_kernels.table import BASIS


@dataclass(frozen=True)
class BatchPlan:
    """Device tensors that every operator of a forward reads; updated in place, so captured graphs stay valid.

    ``row_slot``: ``(N,)`` int32, the slot of each row, ``-1`` for the base model.
    ``order``: ``(N,)`` int32, row numbers with the rows of a tile side by side.
    ``tiles``: ``(T, 4)`` int32 of ``start, length, slot, 0``: the tile covers ``order[start : start + length]``.
    ``slot >= 0``: every row has this slot. ``slot == -1``: rows of several slots that have no own pair anywhere and,
    wherever they have a shared pair, the same basis (so the basis is read once for all of them). ``length == 0``: a
    dead tile; tiles past the live ones are dead. ``tile_rows``: most rows a tile may have, a power of two >= 16.
    Base rows are in no tile.
    """

    row_slot: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    tile_rows: int


def tile_rows(rows: int) -> int:
    """Most rows of a tile in a batch of ``rows`` rows.

    Decode: 16, the least that a tensor core multiplies. Prefill: 64, so that a row of a and b is read for many rows.
    """
    return 16 if rows <= 256 else 64


def most_tiles(rows: int, tile_rows: int, slots: int) -> int:
    """How many tiles ``rows`` rows of at most ``slots`` adapters can need: the full ones, and one more per adapter."""
    return -(-rows // tile_rows) + min(rows, slots)


def packed_size(rows: int, slots: int) -> int:
    """Elements of the packed plan of at most ``rows`` rows of at most ``slots`` adapters."""
    return 2 * rows + 4 * most_tiles(rows, tile_rows(rows), slots)


def build_plan(
    slots: Sequence[int], counts: Sequence[int], groups: Sequence[int], rows: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The packed plan of a batch, built on the host: ``row_slot | order | tiles``, one copy away from the device.

    ``slots``: of each request, -1 for the base model. ``counts``: rows of each request; they lie one after another in
    the batch. ``groups``: of each slot, -1 if its rows need tiles of their own; slots with the same group >= 0 may
    share tiles: they have no own pair anywhere and, wherever they have a shared pair, the same basis. (A rotation
    with blocks is served in a shared tile too, but only row by row: give such a slot tiles of its own.)
    ``rows``: the row capacity N, at least ``sum(counts)``; the rows past the live ones are base rows.
    ``out``: int32 on the CPU (pinned, say), ``(packed_size(rows, len(groups)),)``, made if not given.

    Returns ``out``; ``view_plan`` reads it. Rows of one request stay in order. Raises ``ValueError`` for counts that
    exceed the capacity.
    """
    live = sum(counts)
    if live > rows:
        raise ValueError(f"the batch has {live} rows, the plan has room for {rows}: raise `rows`")
    if out is None:
        out = torch.empty(packed_size(rows, len(groups)), dtype=torch.int32)
    row_slot, order, tiles = out[:rows], out[rows : 2 * rows], out[2 * rows :].view(-1, 4)

    members: dict[int, list[int]] = {}  # requests by group; insertion order keeps the plan stable
    base: list[int] = []
    for request, slot in enumerate(slots):
        if slot < 0:
            base.append(request)
        elif counts[request]:
            group = groups[slot]
            members.setdefault(slot if group < 0 else len(groups) + group, []).append(request)

    most = tile_rows(rows)
    live_tiles: list[int] = []
    arranged: list[int] = []
    begin = 0
    for group, requests in members.items():
        slot = slots[requests[0]]
        if group >= len(groups) and any(slots[request] != slot for request in requests):
            slot = -1
        end = begin + sum([counts[request] for request in requests])
        for first in range(begin, end, most):
            live_tiles += (first, min(most, end - first), slot, 0)
        arranged += requests
        begin = end
    arranged += base
    tiles.zero_()
    tiles.view(-1)[: len(live_tiles)] = torch.tensor(live_tiles, dtype=torch.int32)

    row_slot[:live] = _repeat(slots, counts, live)
    row_slot[live:] = -1
    starts = list(accumulate(counts, initial=0))
    arranged_counts = [counts[request] for request in arranged]
    places = accumulate(arranged_counts, initial=0)
    shifts = [starts[request] - place for request, place in zip(arranged, places, strict=False)]
    torch.arange(rows, out=order)
    order[:live] += _repeat(shifts, arranged_counts, live)
    return out


def _repeat(values: Sequence[int], counts: Sequence[int], total: int) -> torch.Tensor:
    return torch.repeat_interleave(
        torch.tensor(values, dtype=torch.int32), torch.tensor(counts, dtype=torch.int64), output_size=total
    )


def view_plan(packed: torch.Tensor, rows: int) -> BatchPlan:
    """``packed`` (on any device) as a plan of ``rows`` rows: views, so filling it again in place renews the plan."""
    return BatchPlan(packed[:rows], packed[rows : 2 * rows], packed[2 * rows :].view(-1, 4), tile_rows(rows))


def live_tiles(order: torch.Tensor, tiles: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Row numbers and slot of every live tile. Reads the plan on the host: for the references only."""
    for start, length, slot, _ in tiles.tolist():
        if length:
            yield order[start : start + length].long(), slot


def tile_bases(table: torch.Tensor, slots: torch.Tensor, first_site: int, n_slices: int) -> list[int]:
    """The basis of a tile at each slice, -1 if none; ``slots`` are those of its rows.

    Where slices of a tile have the same basis, ``x a_shared^T`` is the same for them (they read the same ``x``): it is
    computed once, and stands in ``u`` at the first slice of the tile with that basis, ``tile_bases(...).index(basis)``.
    It is undamped (without ``d``) and there for every row of the tile. ``device.py`` has the same rule for the kernels.
    """
    return table[slots.long(), first_site : first_site + n_slices, BASIS].amax(0).tolist()
