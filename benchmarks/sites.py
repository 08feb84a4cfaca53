"""One module of several layers with the adapters of a batch, in memory as a server has it.

Shared by ``tune.py`` and ``operators.py``; needs torch and Triton only.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from scute_kernels import table
from scute_kernels.plan import (
    PREFILL_WIDTH,
    BatchPlan,
    build_plan,
    most_tiles,
    own_tile_rows,
    shared_fields,
    tile_width,
    view_plan,
    without_dead_tiles,
)
from scute_kernels.route import kernel as route_kernel
from scute_kernels.shared_route import kernel as shared_route_kernel
from shapes import Module

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SPREAD = 0.1  # standard deviation of the parts: large enough that each of them shows in the results


@dataclass(frozen=True)
class Method:
    """The parts of an adapter at every site. ``block``: of the rotation, 1 for a diagonal, 0 if there is none."""

    name: str
    rank: int = 0
    scale: bool = False
    basis_rank: int = 0
    block: int = 0


class Sites:
    """The sites of one module in several layers, and what the operators read there; everything is random.

    Slice ``i`` of layer ``l`` is site ``l * n_slices + i``. Of the two plans this is what operators take, in order:

    ``own``: ``(tiles, routes, tile_rows, arena)`` of the own plan, which has all rows with an adapter. ``filled``: the
    same for ``expand``: as in an eager prefill no tiles but those that have rows, nor has the grouped plan then.
    ``grouped``: ``(tiles, routes, leading, arena, table)`` of the grouped plan, which has the rows with a shared basis
    or a rotation. Rows with the shared basis share tiles, those with a diagonal too, a rotation has its own.
    ``rotated``: ``(row_slot, further, tiles, arena, table)`` of the grouped plan, for ``rotate``. ``n_further``: how
    many rows have further rows.

    ``x``: ``(N, in)``. ``h``: ``(N, out)``. ``offsets``: of the slices in ``h``, from 0 to ``out``.
    """

    def __init__(
        self,
        module: Module,
        methods: Sequence[Method],
        slots: Sequence[int],
        counts: Sequence[int],
        layers: int,
        dtype: torch.dtype,
        scaled: Collection[int],
        basis_per_layer: bool,
    ) -> None:
        """``methods``: of the adapter in each slot. ``slots``, ``counts``: of each request, -1 for a base request, and
        its rows. ``scaled``: the slices where methods with a scale have it. ``basis_per_layer``: else all layers have
        the same."""
        self.module, self.n_slices, self.n_rows = module, len(module.widths), sum(counts)
        self.offsets = list(accumulate(module.widths, initial=0))
        self._fill(methods, layers, dtype, scaled, basis_per_layer)

        width = tile_width(self.n_rows, decode=True)
        tile_rows = own_tile_rows(self.n_rows, width)
        transforming = [slot for slot, method in enumerate(methods) if method.block]
        self.n_further = sum(count for slot, count in zip(slots, counts, strict=True) if slot in transforming)
        own, filled = self._plan(slots, counts, [-1 for _ in methods], set(), transforming, tile_rows, table.FIELDS)
        route_kernel.route(own.tiles, own.routes, self.table)
        has_work = [method.basis_rank > 0 or method.block > 0 for method in methods]
        grouped_slots = [slot if slot >= 0 and has_work[slot] else -1 for slot in slots]
        groups = [-1 if method.block > 1 else int(method.basis_rank > 0) for method in methods]
        leaders = {slot for slot, method in enumerate(methods) if method.basis_rank > 0}
        _, grouped = self._plan(grouped_slots, counts, groups, leaders, transforming, width, shared_fields(width))
        tables = (self.table, self.bases, self.origins)
        shared_route_kernel.shared_route(grouped.tiles, grouped.leading, grouped.routes, *tables)
        self.own = (own.tiles, own.routes, tile_rows, self.arena)
        self.filled = (filled.tiles, filled.routes, tile_rows, self.arena)
        self.grouped = (grouped.tiles, grouped.routes, grouped.leading, self.arena, self.table)
        self.rotated = (grouped.row_slot, grouped.further, grouped.tiles, self.arena, self.table)

        self.x = torch.randn(self.n_rows, module.in_features, dtype=dtype, device=DEVICE)
        self.h = torch.randn(self.n_rows, self.offsets[-1], dtype=dtype, device=DEVICE)

    def _plan(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        groups: Sequence[int],
        leaders: Collection[int],
        transforming: Collection[int],
        tile_rows: int,
        fields: int,
    ) -> tuple[BatchPlan, BatchPlan]:
        """As ``build_plan`` makes it, and in prefill without dead tiles; ``routes``, of ``fields`` fields, are not
        written yet."""
        rows, width = self.n_rows, tile_width(self.n_rows, decode=True)
        packed = build_plan(slots, counts, groups, rows, width, tile_rows, leaders, transforming)
        routes = self.table.new_empty(most_tiles(rows, width, len(groups)), self.table.shape[1], fields)
        plan = view_plan(packed.to(DEVICE), rows, width, routes)
        return plan, without_dead_tiles(plan, packed) if width == PREFILL_WIDTH else plan

    def _fill(
        self,
        methods: Sequence[Method],
        layers: int,
        dtype: torch.dtype,
        scaled: Collection[int],
        basis_per_layer: bool,
    ) -> None:
        """``arena``, ``table``, ``bases`` and ``origins``, as ``scute_kernels/table.py`` describes them."""
        in_features, widths, sites = self.module.in_features, self.module.widths, layers * self.n_slices
        end = 0

        def put(elements: int) -> int:
            nonlocal end
            offset = end
            end = -(-(end + elements) // 128) * 128
            return offset

        entries = torch.full((len(methods), sites, table.FIELDS), -1, dtype=torch.int64)
        for slot, method in enumerate(methods):
            entries[slot, :, table.RANK] = method.rank
            entries[slot, :, table.BLOCK], entries[slot, :, table.BLOCK_STRIDE] = method.block, method.block**2
            for site in range(sites):
                layer, i = divmod(site, self.n_slices)
                row = entries[slot, site]
                if method.rank:
                    row[table.A], row[table.B] = put(method.rank * in_features), put(method.rank * widths[i])
                if method.scale and i in scaled:
                    row[table.SCALE] = put(widths[i])
                if method.basis_rank:
                    row[table.BASIS] = layer if basis_per_layer else 0
                    row[table.D], row[table.E] = put(method.basis_rank), put(widths[i])
                if method.block:
                    row[table.ROTATION] = put(in_features * method.block)
        bases = torch.zeros(layers if basis_per_layer else 1, table.BASIS_FIELDS, dtype=torch.int64)
        if rank := max(method.basis_rank for method in methods):
            for row in bases:
                row[table.BASIS_A], row[table.BASIS_A_STRIDE] = put(rank * in_features), in_features
                row[table.BASIS_B], row[table.BASIS_B_STRIDE] = put(rank * max(widths)), max(widths)
                row[table.BASIS_RANK] = rank
        self.arena = torch.empty(max(end, 128), dtype=dtype, device=DEVICE).normal_(std=SPREAD)
        self.table, self.bases = entries.to(DEVICE), bases.to(DEVICE)
        self.origins = torch.zeros(sites, 2, dtype=torch.int64, device=DEVICE)
