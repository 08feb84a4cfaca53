"""The adapter table: where in the arena the parts of every adapted projection lie.

``arena`` is one flat tensor of the serving dtype. ``table`` is ``(slots, sites, FIELDS)`` int64. A *slot* is the row of
a resident adapter, a *site* is one Hugging Face projection as one rank serves it (the sites of a fused module have
consecutive numbers: q, k, v). Offsets count elements of the arena; ``-1`` in an offset field means that the part is
absent, which is the identity.

``bases`` is ``(capacity, BASIS_FIELDS)`` int64, one row per shared basis. ``origins`` is ``(sites, 2)`` int64: the
first input and the first output feature of the site within the full Hugging Face projection (nonzero under tensor
parallel, or for a slice of a projection that Hugging Face itself fuses); a shared basis is read from there.

The *own* parts of an adapter are its pairs, scales and shifts; the *shared* one is a pair of a shared basis between its
``d`` and ``e``.

Every offset in ``table`` lies on 16 bytes (the arena itself does too): the kernels read 16 bytes at a time. A shared
basis may begin anywhere and its rows may be of any length; where both lie on 16 bytes, reading is faster.

Routes are what a tile of a batch plan (see ``plan.py``) finds at every site, gathered once per forward, so that a
kernel finds in one step what it would find by way of the plan and the table in three. For the own parts, ``routes`` is
``(tiles, sites, FIELDS)`` int64: the entries of the tile's slot, -1 in every field of a dead tile. For the shared part
it is ``(tiles, sites, SHARED_FIELDS)`` int64: the basis that the rows of the tile have in common, resolved. Tiles of
decode, which are narrow, also have there the offset of ``d`` of the row in every place, then that of ``e``;
``NO_MEMBER`` where there is no row, or one without a basis at the site.
"""

import torch

A = 0  # own pair: offset of a (r, in)
B = 1  # own pair: offset of b (r, out)
RANK = 2  # own pair: r, 0 if absent
SCALE = 3  # offset of s - 1, (out,)
BIAS = 4  # offset of the output shift, (out,)
ROTATION = 5  # offset of R - I, (blocks, k, k)
BLOCK = 6  # k, 0 if absent, 1 for a diagonal
BLOCK_STRIDE = 7  # k * k, or 0 if one block serves every position
BASIS = 8  # row in bases, or -1
D = 9  # offset of d, (r,)
E = D + 1  # offset of e, (out,); after d in routes too
FIELDS = 12  # padded, so that a row of the table stays aligned

BASIS_A = 0  # offset of the shared a (r, in_max)
BASIS_A_STRIDE = 1  # in_max: elements from one row of a to the next
BASIS_B = 2  # offset of the shared b (r, out_max)
BASIS_B_STRIDE = 3  # out_max
BASIS_RANK = 4  # r
BASIS_FIELDS = 8

SHARED_BASIS = 0  # row in bases, or -1; the other fields mean nothing then
SHARED_RANK = 1  # r
SHARED_A = 2  # offset of the first element of the shared a that the site reads
SHARED_A_STRIDE = 3
SHARED_B = 4  # the same of b
SHARED_B_STRIDE = 5
SHARED_FIELDS = 8
NO_MEMBER = -2  # -1 is a member whose d or e is absent


def part(arena: torch.Tensor, offset: int, *shape: int) -> torch.Tensor:
    """The part of ``shape`` at ``offset`` of the arena, a view."""
    size = 1
    for width in shape:
        size *= width
    return arena[offset : offset + size].view(shape)


def basis_part(arena: torch.Tensor, offset: int, stride: int, rank: int, width: int) -> torch.Tensor:
    """``width`` features of a shared matrix from ``offset`` on, ``(rank, width)``, a view of the arena."""
    return arena.as_strided((rank, width), (stride, 1), arena.storage_offset() + offset)
