"""The operators of Scute: ``torch.ops.scute.rotate``, ``shrink``, ``lookup``, ``expand``; importing registers them."""

from scute_kernels.expand import expand
from scute_kernels.lookup import lookup
from scute_kernels.plan import BatchPlan, build_plan, packed_size, view_plan
from scute_kernels.rotate import rotate
from scute_kernels.shrink import shrink

__all__ = ["BatchPlan", "build_plan", "expand", "lookup", "packed_size", "rotate", "shrink", "view_plan"]
