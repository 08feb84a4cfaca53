"""The operators of Scute, as ``torch.ops.scute``: route, rotate, shrink, lookup, expand. Importing registers them."""

from scute_kernels import expand, lookup, rotate, route, shrink
from scute_kernels.plan import BatchPlan, build_plan, packed_size, view_plan

__all__ = ["BatchPlan", "build_plan", "expand", "lookup", "packed_size", "rotate", "route", "shrink", "view_plan"]
