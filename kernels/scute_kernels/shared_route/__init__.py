"""``shared_route``: the shared basis of every tile of the grouped plan, looked up once per forward."""

from scute_kernels.operator import register
from scute_kernels.shared_route import kernel, reference

shared_route = register(
    "shared_route",
    "Tensor tiles, Tensor leading, Tensor(a!) routes, Tensor table, Tensor bases, Tensor origins",
    reference.shared_route,
    kernel.shared_route,
)
"""``shared_route(tiles, leading, routes, table, bases, origins)``

Writes ``routes`` ``(T, sites, shared_fields(width))`` int64 contiguous, for each of the leading of the T tiles of a
grouped plan the basis that its rows have at each site, and where the site reads it; in decode also where the ``d`` and
``e`` of each row are, or ``NO_MEMBER``. ``SHARED_BASIS`` is -1 where no row has one; the other fields of the tile are
unspecified then, as all are of tiles that do not lead.
``shared_shrink`` and ``shared_expand`` read it. Run it after the plan and the tables have been written.
"""
