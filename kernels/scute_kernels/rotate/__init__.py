"""``rotate``: the input transform ``x R`` of every slice of a fused projection (OFT, a diagonal (IA)3 input scale)."""

from scute_kernels.operator import MEMORY, register
from scute_kernels.rotate import kernel, reference

rotate = register(
    "rotate",
    f"Tensor x, Tensor row_slot, Tensor tiles, {MEMORY}, int first_site, Tensor(a!) out",
    reference.rotate,
    kernel.rotate,
)
"""``rotate(x, row_slot, tiles, arena, table, first_site, out)``

``out[i, n] = x[n] R`` with the rotation of row ``n`` at site ``first_site + i``, computed as ``x + x (R - I)`` in fp32
and rounded once; a copy of ``x[n]`` where there is none, base rows too.

``x``: ``(N, in)`` of the arena's dtype, last stride 1. ``out``: ``(n_slices, N, in)`` contiguous, of the same dtype.
``in`` is a multiple of every block size. The plan is a grouped plan; the rows of a tile have one slot if a rotation of
them is more than a diagonal.
"""
