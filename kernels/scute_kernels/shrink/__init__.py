"""``shrink``: ``x a^T`` of the own pair and of the shared basis, for every slice of a fused projection."""

from scute_kernels.operator import PLAN_AND_MEMORY, register
from scute_kernels.shrink import kernel, reference

shrink = register(
    "shrink",
    f"Tensor x, {PLAN_AND_MEMORY}, int first_site, Tensor(a!) v, Tensor(b!) u",
    reference.shrink,
    kernel.shrink,
)
"""``shrink(x, row_slot, order, tiles, tile_rows, arena, table, bases, origins, first_site, v, u)``

``v[:, n, i, :rank].sum(0) = x[n] a^T`` with the own pair of row ``n`` at site ``first_site + i``;
``u[:, n, i, :rank].sum(0) = x[n] a_shared^T`` (without ``d``) with the basis of the tile of row ``n``, only at the
first slice with that basis (``plan.tile_bases`` has the rule). What is not mentioned is left unwritten: rows and slices
without a pair, columns at or beyond the rank.

``x``: ``(N, in)`` of the arena's dtype, last stride 1. ``v``, ``u``: ``(SPLIT, N, n_slices, R)`` fp32 contiguous, R at
least every rank; R may differ between the two. SPLIT is how many ways the features are split over programs
(``launch.shrink_split`` chooses it); ``expand`` sums the planes, always in the same order. Pass an empty ``v`` if no
own pair is resident, an empty ``u`` if no shared basis is: it then costs nothing.
"""
