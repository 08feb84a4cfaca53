"""``rotate``: the input transform ``x R`` of every slice of a fused projection (OFT, a diagonal (IA)3 input scale)."""

from scute_kernels.operator import MEMORY, register
from scute_kernels.rotate import kernel, reference

rotate = register(
    "rotate",
    f"Tensor x, Tensor row_slot, Tensor further, Tensor tiles, {MEMORY}, int first_site, int n_slices, Tensor(a!) out",
    reference.rotate,
    kernel.rotate,
)
"""``rotate(x, row_slot, further, tiles, arena, table, first_site, n_slices, out)``

The inputs of every slice, those of a row ``x[n] R`` with its rotation at the slice's site, computed as
``x + x (R - I)`` in fp32 and rounded once; a copy of ``x[n]`` where there is none.

``out[n]`` are those of the first slice, site ``first_site``, of all rows, base rows too. ``out[N + (i - 1) * F + j]``
are those of slice ``i``, site ``first_site + i``, of the row ``further[0, j]``, zeros where that is -1. ``F`` is what
``out`` has room for, at most ``N``, and must be enough for all rows that are in ``further``.

``x``: ``(N, in)`` of the arena's dtype, last stride 1. ``out``: ``(N + (n_slices - 1) * F, in)`` contiguous, of the
same dtype. ``in`` is a multiple of every block size. ``row_slot (N,)``, ``further (2, N)`` and ``tiles``, of a grouped
plan: see ``plan.py``; the rows of a tile have one slot if a rotation of them is more than a diagonal.
"""
