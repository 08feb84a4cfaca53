"""``expand``: the own parts of adapters after the base layer, for every slice of a fused projection, in place."""

from scute_kernels.expand import kernel, reference
from scute_kernels.operator import PLAN, register

expand = register(
    "expand",
    f"Tensor(a!) h, Tensor v, {PLAN}, int tile_rows, Tensor arena, int first_site, int[] slice_offsets",
    reference.expand,
    kernel.expand,
)
"""``expand(h, v, tiles, routes, tile_rows, arena, first_site, slice_offsets)``

``h <- h + h * (s - 1) + bias + v b`` for every row and slice, in fp32 and rounded once; where a tensor core multiplies
fp16 or bf16, ``v`` is rounded to the arena's dtype before. Rows without any own part at a site keep their bits there.

``h``: ``(N, slice_offsets[-1])`` of the arena's dtype, last stride 1; slice ``i`` is ``h[:, slice_offsets[i] :
slice_offsets[i + 1]]``, its parts are those of site ``first_site + i``. ``slice_offsets`` begins with 0. ``v``: as
``shrink`` or ``lookup`` wrote it; empty if no adapter of the batch has an own pair here. The plan is an own plan.
"""
