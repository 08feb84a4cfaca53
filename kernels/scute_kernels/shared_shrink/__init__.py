"""``shared_shrink``: ``x a_shared^T`` of the shared bases, for every slice of a fused projection."""

from scute_kernels.operator import PLAN, register
from scute_kernels.shared_shrink import kernel, reference

shared_shrink = register(
    "shared_shrink",
    f"Tensor x, {PLAN}, Tensor arena, int first_site, Tensor(a!) u",
    reference.shared_shrink,
    kernel.shared_shrink,
)
"""``shared_shrink(x, tiles, routes, arena, first_site, u)``

``u[:, n, i, :rank].sum(0) = x[n] a_shared^T`` for every row ``n`` of a tile with a basis, only at the first slice ``i``
of the module with that basis: the slices read the same ``x``, so it is the same for the others
(``plan.first_slices`` has the rule). What is not mentioned is left unwritten.

``x``: ``(N, in)`` of the arena's dtype, last stride 1. ``u``: ``(SPLIT, N, n_slices, R)`` fp32 contiguous, R at least
every rank; ``shared_expand`` sums the planes, always in the same order. The plan is a grouped plan.
"""
