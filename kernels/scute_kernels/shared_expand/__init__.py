"""``shared_expand``: the product of the shared bases, beside the base layer or added after it, in place."""

from scute_kernels.operator import MEMORY, PLAN, register
from scute_kernels.shared_expand import kernel, reference

shared_expand = register(
    "shared_expand",
    f"Tensor(a!) out, Tensor u, {PLAN}, Tensor leading, {MEMORY}, int first_site, int[] slice_offsets, bool add",
    reference.shared_expand,
    kernel.shared_expand,
)
"""``shared_expand(out, u, tiles, routes, leading, arena, table, first_site, slice_offsets, add)``

``(u b_shared) * e`` for every row and slice with a basis; in fp16 and bf16 ``u`` is rounded to the arena's dtype before
it is multiplied.

With ``add``, ``out <- out + `` that, in fp32 and rounded once: ``out`` is the output of the base layer, after
``expand``, since ``s`` must not scale what is added here. Without, ``out <- `` that: ``out`` is fp32, the ``addend``
of ``expand``; it needs nothing of the base layer, so it can be computed meanwhile. What is not mentioned keeps its
bits.

``out``: ``(N, slice_offsets[-1])``, last stride 1; slice ``i`` is ``out[:, slice_offsets[i] : slice_offsets[i + 1]]``,
its parts are those of site ``first_site + i``. ``slice_offsets`` begins with 0. ``u``: as ``shared_shrink`` wrote it.
The plan is a grouped plan.
"""
