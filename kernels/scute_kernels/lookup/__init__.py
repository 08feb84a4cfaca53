"""``lookup``: the shrink of an embedding, whose ``x a^T`` is a column of ``a``."""

from scute_kernels.lookup import kernel, reference
from scute_kernels.operator import MEMORY, register

lookup = register(
    "lookup",
    f"Tensor ids, Tensor row_slot, {MEMORY}, int site, int vocabulary, Tensor(a!) v",
    reference.lookup,
    kernel.lookup,
)
"""``lookup(ids, row_slot, arena, table, site, vocabulary, v)``

``v[0, n, 0, :rank] = a[:, ids[n]]`` with the own pair of row ``n`` at ``site``, whose ``a`` is ``(rank, vocabulary)``;
0 for an id outside ``[0, vocabulary)``. Rows without a pair and columns at or beyond the rank are left unwritten.

``ids``: ``(N,)`` int32 or int64. ``v``: ``(1, N, 1, R)`` fp32 contiguous, as ``expand`` reads it.
``row_slot``: of an own plan.
"""
