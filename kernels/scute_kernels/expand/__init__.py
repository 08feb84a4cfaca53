"""``expand``: the parts of adapters after the base layer, for every slice of a fused projection, in place."""

from scute_kernels.expand import kernel, reference
from scute_kernels.operator import PLAN, register

expand = register(
    "expand",
    f"Tensor(a!) h, Tensor v, Tensor addend, {PLAN}, int tile_rows, Tensor arena, int first_site, int[] slice_offsets",
    reference.expand,
    kernel.expand,
)
"""``expand(h, v, addend, tiles, routes, tile_rows, arena, first_site, slice_offsets)``

``h <- h + h * (s - 1) + bias + v b + addend`` for every row and slice, in fp32 and rounded once; where a tensor core
multiplies fp16 or bf16, ``v`` is rounded to the arena's dtype before. Rows without any part at a site keep their bits
there.

``h``: ``(N, slice_offsets[-1])`` of the arena's dtype, last stride 1; slice ``i`` is ``h[:, slice_offsets[i] :
slice_offsets[i + 1]]``, its parts are those of site ``first_site + i``. ``slice_offsets`` begins with 0. If the slices
have inputs of their own, ``h`` is ``(N + (n_slices - 1) * F, slice_offsets[-1])``, the outputs for what ``rotate``
wrote: where the inputs of slice ``i`` or of the first are transformed for a row, the slice is made from its further row
for this slice, of which nothing else is read, and written to its row among the first ``N``.

``v``: as ``shrink`` or ``lookup`` wrote it, read only where a row has an own pair. ``addend``: ``(N,
slice_offsets[-1])`` fp32, as ``shared_expand`` wrote it, which is read where a row has a basis; empty if there is
nothing to add. The plan is an own plan.
"""
