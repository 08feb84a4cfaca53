"""route: the table entries of every tile, the specification."""

from __future__ import annotations

import torch


def route(tiles: torch.Tensor, routes: torch.Tensor, table: torch.Tensor) -> None:
    slots = tiles[1, :, 0].long()
    routes.fill_(-1)
    routes[slots >= 0] = table[slots[slots >= 0]]
