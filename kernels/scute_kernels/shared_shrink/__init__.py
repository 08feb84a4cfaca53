"""``shared_shrink``: ``(x a_shared^T) * d`` of the shared bases, for every slice of a fused projection."""

from scute_kernels.operator import MEMORY, PLAN, register
from scute_kernels.shared_shrink import kernel, reference

shared_shrink = register(
    "shared_shrink",
    f"Tensor x, {PLAN}, Tensor leading, {MEMORY}, int first_site, Tensor(a!) u",
    reference.shared_shrink,
    kernel.shared_shrink,
)
"""``shared_shrink(x, tiles, routes, leading, arena, table, first_site, u)``

``u[:, n, i, :rank].sum(0) = (x[n] a_shared^T) * d`` for every row ``n`` and slice ``i`` with a basis, each with a ``d``
of its own; what is not mentioned is left unwritten. ``x a_shared^T`` is computed once for slices with the same basis.

``x``: ``(N, in)`` of the arena's dtype, last stride 1. ``u``: ``(SPLIT, N, n_slices, R)`` contiguous, R at least every
rank; fp32, whose planes ``shared_expand`` sums, always in the same order. If SPLIT is 1 it may be of the arena's dtype,
see ``launch.shared_scratch_dtype``; in 16 bits R is a multiple of 16, and from the rank up to the next multiple of
16 the inputs times 0 are written, for which the ``b`` of ``shared_expand`` is 0. The plan is a grouped plan.
"""
