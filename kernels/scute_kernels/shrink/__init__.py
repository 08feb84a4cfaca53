"""``shrink``: ``x a^T`` of the own pairs, for every slice of a fused projection."""

from scute_kernels.operator import PLAN, register
from scute_kernels.shrink import kernel, reference

shrink = register(
    "shrink",
    f"Tensor x, {PLAN}, int tile_rows, Tensor arena, int first_site, Tensor(a!) v",
    reference.shrink,
    kernel.shrink,
)
"""``shrink(x, tiles, routes, tile_rows, arena, first_site, v)``

``v[:, n, i, :rank].sum(0) = x[n] a^T`` with the own pair of row ``n`` at site ``first_site + i``. Rows and slices
without a pair and columns at or beyond the rank are left unwritten.

``x``: ``(N, in)`` of the arena's dtype, last stride 1. ``v``: ``(SPLIT, N, n_slices, R)`` fp32 contiguous, R at least
every rank. SPLIT is how many ways the features are split over programs (``launch.shrink_split`` chooses it); ``expand``
sums the planes, always in the same order. The plan is an own plan.
"""
