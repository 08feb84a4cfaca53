"""The operators of Scute, as ``torch.ops.scute``. Importing registers them.

Once per forward: ``route``, ``shared_route``. At every adapted layer: ``rotate`` before the base layer, ``shrink``
(``lookup`` for an embedding) and ``shared_shrink`` beside it, ``expand`` and ``shared_expand`` after it.
"""

from scute_kernels import expand, lookup, rotate, route, shared_expand, shared_route, shared_shrink, shrink
from scute_kernels.plan import BatchPlan, build_plan, packed_size, view_plan

__all__ = [
    "BatchPlan",
    "build_plan",
    "expand",
    "lookup",
    "packed_size",
    "rotate",
    "route",
    "shared_expand",
    "shared_route",
    "shared_shrink",
    "shrink",
    "view_plan",
]
