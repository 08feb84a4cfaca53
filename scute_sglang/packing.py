"""Packing: one adapter's normal forms, or one shared basis, as one block of the serving dtype and its table rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from scute_converter.finite import is_finite
from scute_converter.normal_form import Basis, NormalForm
from scute_converter.parallel import each
from scute_kernels import table

PART_ALIGNMENT = 16  # bytes; the widest load of one thread

_OFFSETS = [table.A, table.B, table.SCALE, table.BIAS, table.ROTATION, table.D, table.E]
_BASIS_OFFSETS = [table.BASIS_A, table.BASIS_B]
_ABSENT = [-1 if field in {*_OFFSETS, table.BASIS} else 0 for field in range(table.FIELDS)]


@dataclass(frozen=True)
class PackedAdapter:
    """What one rank serves of one adapter, on the host.

    ``block``: ``(elements,)`` of the serving dtype, pinned if CUDA is available. ``rows``: ``(sites, FIELDS)`` int64,
    with offsets from the start of the block, and in ``BASIS`` an index into ``bases``, the keys of the shared bases.
    """

    block: torch.Tensor
    rows: torch.Tensor
    bases: tuple[str, ...]

    # A request waits for its adapter, so what ``placed`` needs each time is kept as numpy has it: torch takes longer.
    @cached_property
    def _fixed(self) -> np.ndarray:
        return self.rows.numpy()

    @cached_property
    def _moving(self) -> np.ndarray:
        return _at_offsets(self.rows, _OFFSETS)

    @cached_property
    def _pinned(self) -> bool:
        return self.block.is_pinned()

    def placed(self, offset: int, basis_rows: Mapping[str, int]) -> torch.Tensor:
        """The rows for a block at ``offset`` (elements) of the arena. ``basis_rows``: basis key to row in ``bases``.

        Pinned as the block is, and made anew each time, so that nothing overwrites them while they are being copied.
        """
        rows = torch.empty(self._fixed.shape, dtype=torch.int64, pin_memory=self._pinned)
        array = rows.numpy()
        np.multiply(self._moving, offset, out=array)
        array += self._fixed
        if self.bases:
            # The last entry is what index -1 reads: no basis.
            numbers = np.array([*(basis_rows[key] for key in self.bases), -1])
            array[:, table.BASIS] = numbers[array[:, table.BASIS]]
        return rows


@dataclass(frozen=True)
class AdapterLayout:
    """Where the parts of an adapter lie. ``elements``: of the block. ``rows``, ``bases``: as of ``PackedAdapter``."""

    elements: int
    rows: torch.Tensor
    bases: tuple[str, ...]


@dataclass(frozen=True)
class PackedBasis:
    """A shared basis on the host. ``block``: as of an adapter, ``a`` then ``b``. ``row``: ``(BASIS_FIELDS,)`` int64."""

    block: torch.Tensor
    row: torch.Tensor

    def placed(self, offset: int) -> torch.Tensor:
        """The row for a block at ``offset`` (elements) of the arena."""
        return self.row + torch.from_numpy(_at_offsets(self.row, _BASIS_OFFSETS) * offset)


def pack_adapter(
    adapter: str,
    forms: Mapping[int, NormalForm],
    shift: Mapping[int, torch.Tensor],
    sites: Sequence[str],
    dtype: torch.dtype,
) -> PackedAdapter:
    """Packs an adapter; every value is rounded from fp32 to ``dtype`` once.

    ``adapter``: its name, for messages. ``forms``: by site number, sharded, with no deferred slot left. ``shift``: by
    site number, the output shift ``(out,)`` that the caller made from the bias of the form and of the base layer.
    ``sites``: the names of all sites. A tensor that several sites share is stored once.

    Raises ``ValueError`` for a slot that is still deferred, a part of the wrong shape, and a value that is not finite
    in ``dtype``.
    """
    packer, rows, bases = _lay_out(adapter, forms, shift, sites, dtype)
    return PackedAdapter(packer.block(), rows, bases)


def lay_out_adapter(
    adapter: str,
    forms: Mapping[int, NormalForm],
    shift: Mapping[int, torch.Tensor],
    sites: Sequence[str],
    dtype: torch.dtype,
) -> AdapterLayout:
    """The same without the block, so that only the shapes of the parts count, and which of them are one tensor."""
    packer, rows, bases = _lay_out(adapter, forms, shift, sites, dtype)
    return AdapterLayout(packer.elements, rows, bases)


def _lay_out(
    adapter: str,
    forms: Mapping[int, NormalForm],
    shift: Mapping[int, torch.Tensor],
    sites: Sequence[str],
    dtype: torch.dtype,
) -> tuple[_Packer, torch.Tensor, tuple[str, ...]]:
    unknown = shift.keys() - forms.keys()
    if unknown:
        raise ValueError(f"adapter {adapter}: output shift for {sites[min(unknown)]}, which it does not adapt")
    packer = _Packer(dtype)
    rows = [list(_ABSENT) for _ in sites]
    bases: dict[str, int] = {}

    for site, form in forms.items():
        where = f"adapter {adapter}, {sites[site]}"
        row = rows[site]
        if form.deferred is not None:
            raise ValueError(f"{where}: a slot still waits for the base weight; resolve it before packing")
        if form.pair is not None:
            row[table.A] = packer.add(f"{where}, a", form.pair.a, (form.pair.rank, form.in_features))
            row[table.B] = packer.add(f"{where}, b", form.pair.b, (form.pair.rank, form.out_features))
            row[table.RANK] = form.pair.rank
        if form.scale_delta is not None:
            row[table.SCALE] = packer.add(f"{where}, scale", form.scale_delta, (form.out_features,))
        if form.rotation is not None:
            delta, k = form.rotation.delta, form.rotation.block
            every_position = delta.shape[0] == 1
            blocks = 1 if every_position else form.in_features // k
            if form.in_features % k:
                raise ValueError(f"{where}, rotation: blocks of {k} do not divide {form.in_features} input features")
            row[table.ROTATION] = packer.add(f"{where}, rotation", delta, (blocks, k, k))
            row[table.BLOCK] = k
            row[table.BLOCK_STRIDE] = 0 if every_position else k * k
        if form.shared is not None:
            row[table.BASIS] = bases.setdefault(form.shared.basis, len(bases))
            row[table.D] = packer.add(f"{where}, d", form.shared.d, (form.shared.d.numel(),))
            row[table.E] = packer.add(f"{where}, e", form.shared.e, (form.out_features,))
        if site in shift:
            row[table.BIAS] = packer.add(f"{where}, output shift", shift[site], (form.out_features,))

    table_rows = torch.tensor(rows, dtype=torch.int64).reshape(len(sites), table.FIELDS)
    return packer, table_rows, tuple(bases)


def pack_basis(key: str, basis: Basis, dtype: torch.dtype) -> PackedBasis:
    """Packs a shared basis. Raises ``ValueError`` as ``pack_adapter`` does; ``key`` is for messages."""
    packer = _Packer(dtype)
    rank, in_max = basis.a.shape
    out_max = basis.b.shape[-1]
    row = torch.zeros(table.BASIS_FIELDS, dtype=torch.int64)
    row[table.BASIS_A] = packer.add(f"shared basis {key}, a", basis.a, (rank, in_max))
    row[table.BASIS_A_STRIDE] = in_max
    row[table.BASIS_B] = packer.add(f"shared basis {key}, b", basis.b, (rank, out_max))
    row[table.BASIS_B_STRIDE] = out_max
    row[table.BASIS_RANK] = rank
    return PackedBasis(packer.block(), row)


def _at_offsets(rows: torch.Tensor, fields: list[int]) -> np.ndarray:
    """Of the shape of ``rows (..., fields)``, int64: 1 in those of ``fields`` that are not absent, else 0."""
    offsets = np.zeros(rows.shape, dtype=np.int64)
    offsets[..., fields] = rows.numpy()[..., fields] >= 0
    return offsets


@dataclass(frozen=True)
class _Part:
    name: str
    source: torch.Tensor
    offset: int  # elements


class _Packer:
    """Lays parts one after the other, then copies them into one block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # Two sites of a fused projection may hold the same tensor, or slice it alike. The parts keep their sources
        # alive, so an address cannot come to mean another tensor.
        self._parts: dict[tuple[int, torch.Size, tuple[int, ...]], _Part] = {}
        self.elements = 0

    def add(self, name: str, source: torch.Tensor, shape: tuple[int, ...]) -> int:
        """The offset of the part, in elements; -1 for a part without elements (a pair of rank 0)."""
        if source.shape != shape:
            raise ValueError(f"{name}: shape {tuple(source.shape)}, expected {shape}")
        if source.numel() == 0:
            return -1
        identity = (source.data_ptr(), source.shape, source.stride())
        if identity not in self._parts:
            offset = self._aligned(self.elements)
            self._parts[identity] = _Part(name, source, offset)
            self.elements = offset + source.numel()
        return self._parts[identity].offset

    def _aligned(self, elements: int) -> int:
        alignment = PART_ALIGNMENT // self._dtype.itemsize
        return -(-elements // alignment) * alignment

    def block(self) -> torch.Tensor:
        block = torch.empty(self.elements, dtype=self._dtype, pin_memory=torch.cuda.is_available())

        def place(part: _Part) -> None:
            end = part.offset + part.source.numel()
            packed = block[part.offset : end]
            packed.copy_(part.source.reshape(-1))
            block[end : self._aligned(end)] = 0
            if not is_finite(packed):
                self._refuse(part)

        each(place, list(self._parts.values()))
        return block

    def _refuse(self, part: _Part) -> None:
        largest = part.source.abs().max().item()  # NaN if there is any
        if math.isfinite(largest):
            raise ValueError(
                f"{part.name}: {largest:.6g} overflows {self._dtype}; serve the model with --dtype bfloat16 or float32"
            )
        raise ValueError(f"{part.name}: holds NaN or infinity; the checkpoint is damaged, train or download it again")
