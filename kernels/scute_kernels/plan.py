"""The batch plan: rows of a batch grouped into tiles of one adapter (or one shared basis)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
