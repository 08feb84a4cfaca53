"""``expand``: everything after the base layer, for every slice of a fused projection, in place and in one launch."""

from scute_kernels.expand import kernel, reference
from scute_kernels.operator import PLAN_AND_MEMORY, register

expand = register(
    "expand",
    f"Tensor(a!) h, Tensor v, Tensor u, {PLAN_AND_MEMORY}, int first_site, int[] slice_offsets",
    reference.expand,
    kernel.expand,
)
"""``expand(h, v, u, row_slot, order, tiles, tile_rows, arena, table, bases, origins, first_site, slice_offsets)``

``h <- h + h * (s - 1) + bias + v b + ((u * d) b_shared) * e`` for every row and slice, in fp32 and rounded once; in
fp16 and bf16 ``v`` and ``u * d`` are rounded to the arena's dtype before they are multiplied. Rows without any part at
a site keep their bits there.

``h``: ``(N, slice_offsets[-1])`` of the arena's dtype, last stride 1; slice ``i`` is ``h[:, slice_offsets[i] :
slice_offsets[i + 1]]``, its parts are those of site ``first_site + i``. ``slice_offsets`` begins with 0. ``v``, ``u``:
as ``shrink`` or ``lookup`` wrote them; empty if no own pair, or no shared basis, is resident.
"""
