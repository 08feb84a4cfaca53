"""``route``: the table entries of every tile of the own plan, gathered once per forward."""

from scute_kernels.operator import register
from scute_kernels.route import kernel, reference

route = register(
    "route",
    "Tensor tiles, Tensor(a!) routes, Tensor table",
    reference.route,
    kernel.route,
)
"""``route(tiles, routes, table)``

Writes ``routes`` ``(T, sites, FIELDS)`` int64 contiguous: the entries of the slot of each of the T tiles of an own
plan, -1 for a dead tile. ``shrink`` and ``expand`` read it. Run it after the plan and the table have been written.
"""
