"""``route``: the table entries of every tile, gathered once per forward."""

from scute_kernels.operator import register
from scute_kernels.route import kernel, reference

route = register(
    "route",
    "Tensor row_slot, Tensor order, Tensor tiles, int tile_rows, Tensor(a!) routes, Tensor table",
    reference.route,
    kernel.route,
)
"""``route(row_slot, order, tiles, tile_rows, routes, table)``

Writes ``routes`` ``(T, sites, FIELDS)`` int64 contiguous, as ``table.py`` describes it, for all T tiles of the plan:
of each field the largest among the table entries of the tile's rows, -1 for a dead tile. Every other operator of the
forward reads it. Run it after the plan and the table have been written.
"""
