"""The operators of Scute, as ``torch.ops.scute``: rotate, shrink, lookup and expand. Importing registers them."""

from scute_kernels import expand, lookup, rotate, shrink
from scute_kernels.plan import BatchPlan, build_plan, packed_size, view_plan

__all__ = ["BatchPlan", "build_plan", "expand", "lookup", "packed_size", "rotate", "shrink", "view_plan"]
