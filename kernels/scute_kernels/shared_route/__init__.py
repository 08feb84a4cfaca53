"""``shared_route``: the shared basis of every tile of the grouped plan, looked up once per forward."""

from scute_kernels.operator import register
from scute_kernels.shared_route import kernel, reference

shared_route = register(
    "shared_route",
    "Tensor tiles, Tensor(a!) routes, Tensor table, Tensor bases, Tensor origins",
    reference.shared_route,
    kernel.shared_route,
)
"""``shared_route(tiles, routes, table, bases, origins)``

Writes ``routes`` ``(T, sites, shared_fields(width))`` int64 contiguous, for each of the T tiles of a grouped plan the
basis that its rows have at each site, and where the site reads it; in decode also where the ``d`` and ``e`` of each row
are. ``SHARED_BASIS`` is -1 where no row has one, and for a dead tile; the other fields are unspecified then.
``shared_shrink`` and ``shared_expand`` read it. Run it after the plan and the tables have been written.
"""
