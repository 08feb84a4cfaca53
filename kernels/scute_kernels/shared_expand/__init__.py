"""``shared_expand``: the product of the shared bases, added after the base layer, in place."""

from scute_kernels.operator import MEMORY, PLAN, register
from scute_kernels.shared_expand import kernel, reference

shared_expand = register(
    "shared_expand",
    f"Tensor(a!) h, Tensor u, {PLAN}, {MEMORY}, int first_site, int[] slice_offsets",
    reference.shared_expand,
    kernel.shared_expand,
)
"""``shared_expand(h, u, tiles, routes, arena, table, first_site, slice_offsets)``

``h <- h + ((u * d) b_shared) * e`` for every row and slice with a basis, in fp32 and rounded once; in fp16 and bf16
``u * d`` is rounded to the arena's dtype before it is multiplied. Other rows keep their bits.

``h``, ``slice_offsets``: as of ``expand``, which it follows: ``s`` must not scale what is added here. ``u``: as
``shared_shrink`` wrote it. The plan is a grouped plan.
"""
