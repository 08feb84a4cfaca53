"""Chooses the launch parameters of the shrinks and expands, and measures what they cost one step.

    PYTHONPATH=kernels python benchmarks/tune.py --out benchmarks/results/h200 --deadline 480

Needs a CUDA GPU, torch and Triton; begins nothing after ``--deadline`` seconds. Writes ``tune.csv``, every measurement,
and ``launch_table.json``, the table with the best entries: copy it over ``kernels/scute_kernels/launch_table.json`` and
commit it. Prints both in short.

What is measured is what a server adds to a step. In decode a CUDA graph of ``--layers`` layers holds the base GEMMs of
the modules of a layer, each with the adapters' kernels, with weights and adapters of its own for every layer, but one
shared basis for all; the time of the same graph without adapters is subtracted. So base weights pass through the L2
cache between two kernels, as they do when serving. In prefill the graph holds the kernels alone: nothing runs beside
them, and beside the base GEMMs, a hundred times as long, their time would not show. As in the graphs of a server, the
scratch is as wide as the largest rank that may come. Figures are microseconds per layer, medians of replays.

The order is that of a server. In decode ``shared_shrink`` runs on a second stream beside the base GEMM, then
``shared_expand``, which writes an ``addend``; on a third ``shrink``, which gives way to the base GEMM, or comes after
it where there is a shared basis or an input transform; ``expand`` waits for all and adds it. In prefill there is one
stream, and ``shared_expand`` adds to ``h`` after ``expand``.

An input transform (``rotate``) comes before the base GEMM, which then has further rows for each slice of a module but
the first. ``expand`` adapts the parameters of a candidate to a module as it does those of the table, see ``launch.py``.

Stages: ``floor``, an empty kernel per launch, and a chain of dependent loads from memory, per load; ``mix``, batches of
several methods with the parameters of the checked-in table, which nothing is tuned for. Then those that begin with the
best of the one before, for each number of rows ``expand``, ``early`` (programmatic dependent
launch), ``tiles``, ``shrink``, ``share``, ``grid``, candidates on batches, of shared bases in decode those of
``shared_shrink`` first; ``final``, the best: all, ``us_shrink`` without what follows the base GEMM, ``us_expand``
without what does not wait for it, and a copy that moves as many bytes.

Every candidate is compared with the references before it is timed; one that fails or is wrong is reported and left out.
Kernels are compiled in ``--workers`` processes before anything but the floor is timed: Triton keeps them on disk.

``--smoke`` tries it all on tiny shapes: with TRITON_INTERPRET=1 on a CPU, where the times mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from scute_kernels import launch
from scute_kernels.expand import kernel as expand_kernel
from scute_kernels.expand import reference as expand_reference
from scute_kernels.plan import DECODE_WIDTH, FEW_ROWS, MOST_DECODE_ROWS, own_tile_rows, room_for_further
from scute_kernels.rotate import kernel as rotate_kernel
from scute_kernels.rotate import reference as rotate_reference
from scute_kernels.shared_expand import kernel as shared_expand_kernel
from scute_kernels.shared_expand import reference as shared_expand_reference
from scute_kernels.shared_shrink import kernel as shared_shrink_kernel
from scute_kernels.shared_shrink import reference as shared_shrink_reference
from scute_kernels.shrink import kernel as shrink_kernel
from scute_kernels.shrink import reference as shrink_reference
from scute_kernels.side_by_side import compile_kernels
from scute_kernels.stream import empty, fork, give_way, on_stream
from shapes import MODELS, ModelShape, Module
from sites import DEVICE, INTERPRETED, Method, Sites

MAX_RANK = 1024  # R of the scratch: what a server assumes if it is told nothing
REPLAYS = 15


# --- what is tried ---------------------------------------------------------------------------------------------------

Parameters = launch.Shrink | launch.Expand | launch.SharedExpand


def shrinks(start: launch.Shrink, **options: Sequence[Any]) -> list[launch.Shrink]:
    """``start``, and it with each of the values of each option."""
    return [start, *(replace(start, **{name: value}) for name, values in options.items() for value in values)]


ROW_SHRINK = launch.Shrink(block_rank=4, block_in=1024, share=16384, programs=528, num_warps=4, num_stages=3)
ROW_SHRINKS = [
    replace(ROW_SHRINK, block_rank=block_rank, block_in=block_in, num_warps=num_warps, num_stages=num_stages)
    for block_rank, block_in, num_warps, num_stages in (
        (4, 1024, 4, 3),
        (4, 512, 4, 3),
        (4, 1024, 8, 3),
        (4, 2048, 8, 2),
        (8, 512, 4, 3),
        (8, 1024, 8, 3),
        (8, 512, 8, 4),
        (2, 2048, 4, 3),
        (2, 1024, 4, 4),
        (16, 512, 8, 3),
        (16, 256, 4, 3),
    )
]
ROW_EXPAND = launch.Expand(block_rank=16, block_out=128, run=1, tile_programs=1, num_warps=1, num_stages=1, pdl=False)
ROW_EXPANDS = [
    replace(ROW_EXPAND, block_rank=block_rank, block_out=block_out, num_warps=num_warps)
    for block_rank, block_out, num_warps in (
        (16, 128, 1),
        (16, 256, 1),
        (16, 256, 2),
        (16, 512, 2),
        (32, 128, 1),
        (32, 256, 1),
        (32, 256, 2),
        (64, 128, 1),
        (64, 128, 2),
    )
]
TILE_SHRINK = launch.Shrink(block_rank=16, block_in=256, share=2048, programs=396, num_warps=4, num_stages=3)
TILE_SHRINKS = shrinks(TILE_SHRINK, block_in=(128,), block_rank=(32,), num_warps=(2,))
TILE_EXPAND = launch.Expand(block_rank=16, block_out=128, run=1, tile_programs=32, num_warps=4, num_stages=1, pdl=False)
TILE_EXPANDS = [
    replace(
        TILE_EXPAND, block_rank=block_rank, block_out=block_out, run=run, num_warps=num_warps, num_stages=num_stages
    )
    for block_rank, block_out, run, num_warps, num_stages in (
        (16, 128, 1, 4, 1),
        (16, 64, 1, 2, 1),
        (16, 256, 1, 4, 1),
        (16, 256, 1, 8, 1),
        (64, 128, 1, 4, 1),
        (16, 128, 4, 4, 2),
        (16, 128, 4, 4, 3),
        (64, 128, 4, 4, 3),
    )
]
PREFILL_SHRINK = launch.Shrink(block_rank=32, block_in=128, share=16384, programs=1056, num_warps=4, num_stages=3)
PREFILL_SHRINKS = [
    replace(PREFILL_SHRINK, block_rank=block_rank, block_in=block_in, num_warps=num_warps, num_stages=num_stages)
    for block_rank, block_in, num_warps, num_stages in (
        (64, 64, 4, 4),
        (64, 128, 8, 3),
        (32, 128, 4, 3),
        (32, 128, 4, 4),
        (16, 128, 4, 3),
        (16, 128, 4, 4),
    )
]
PREFILL_EXPAND = launch.Expand(
    block_rank=64, block_out=64, run=8, tile_programs=256, num_warps=4, num_stages=3, pdl=False
)
PREFILL_EXPANDS = [
    replace(PREFILL_EXPAND, block_out=block_out, run=run, num_warps=num_warps, num_stages=num_stages)
    for block_out, run, num_warps, num_stages in (
        (64, 8, 4, 3),
        (64, 8, 4, 4),
        (64, 8, 4, 2),
        (128, 4, 4, 2),
        (128, 8, 8, 3),
    )
]
PREFILL_SHARED_EXPAND = launch.SharedExpand(
    block_rank=256, block_out=64, run=16, tile_programs=128, num_warps=8, num_stages=3, tiles=2
)
PREFILL_SHARED_EXPANDS = [  # where two tiles do not fit into the shared memory, launch.shared_expand has another
    replace(
        PREFILL_SHARED_EXPAND, block_out=block_out, run=run, num_warps=num_warps, num_stages=num_stages, tiles=tiles
    )
    for block_out, run, num_warps, num_stages, tiles in (
        (64, 16, 8, 3, 2),
        (32, 32, 8, 3, 2),
        (32, 8, 4, 2, 1),
    )
]
SHARED_SHRINKS = [
    replace(TILE_SHRINK, block_rank=block_rank, block_in=block_in, num_warps=num_warps, num_stages=num_stages)
    for block_rank, block_in, num_warps, num_stages in (
        (16, 512, 4, 3),
        (16, 512, 4, 2),
        (16, 1024, 4, 2),
        (16, 256, 4, 3),
        (32, 512, 4, 2),
    )
]
SHARED_EXPAND = launch.SharedExpand(
    block_rank=256, block_out=64, run=1, tile_programs=4, num_warps=8, num_stages=1, tiles=1
)
SHARED_EXPANDS = [
    replace(SHARED_EXPAND, block_rank=block_rank, block_out=block_out, num_warps=num_warps, num_stages=num_stages)
    for block_rank, block_out, num_warps, num_stages in (
        (256, 64, 8, 1),
        (256, 64, 4, 1),
        (256, 32, 4, 1),
        (256, 128, 8, 1),
        (128, 64, 4, 1),
        (64, 64, 4, 1),  # more stages would hold every plane of u in shared memory, once for each
        (64, 128, 4, 1),
    )
]
SHARES = (1024, 2048, 4096, 16384)
SHARED_SHARES = (1024, 2048, 4096, 8192)  # large ones too: every program of shared_expand reads all planes
PROGRAMS = (264, 396, 792, 1584)
SHARED_PROGRAMS = (48, 96, 192, 396)  # the base GEMM beside waits for what they hold
TILE_PROGRAMS = (1, 2, 4, 32)


R16, R64, R256 = Method("LoRA r16", 16), Method("LoRA r64", 64), Method("LoRA r256", 256)
DORA, IA3, VERA = Method("DoRA r16", 16, scale=True), Method("(IA)3", scale=True), Method("VeRA r256", basis_rank=256)


@dataclass(frozen=True)
class Batch:
    """``slots``: methods of the resident adapters. ``rows``: the slot of each row, -1 for a base row."""

    name: str
    slots: tuple[Method, ...]
    rows: tuple[int, ...]
    decode: bool = True

    @property
    def shares(self) -> bool:
        """Whether an adapter has a shared basis."""
        return any(method.basis_rank for method in self.slots)

    def rotates(self, module: Module) -> bool:
        """Whether its graph transforms the inputs of a module: of all, if an adapter rotates by blocks; if they only
        scale inputs, of those of one projection."""
        blocks = {method.block for method in self.slots} - {0}
        return bool(blocks) and (blocks != {1} or len(module.widths) == 1)


# Of feed-forward (IA)3, whose input scale is at down_proj only, see TunedSites.
FEED_FORWARD, OFT = Method("(IA)3 with down", scale=True, block=1), Method("OFT b32", block=32)


def distinct(name: str, methods: Sequence[Method]) -> Batch:
    return Batch(name, tuple(methods), tuple(range(len(methods))))


# By the entry of the table that they decide: own parts or shared bases, and the most rows that it is for; prefill is
# for any number.
ANY = sys.maxsize
BATCHES = {
    ("own", 16): (
        distinct("16 LoRA r16", [R16] * 16),
        distinct("16 LoRA r64", [R64] * 16),
        distinct("16 LoRA r256", [R256] * 16),
        distinct("16: LoRA DoRA (IA)3", [R16, DORA, IA3, R16] * 4),
        Batch("16 rows of one LoRA r16", (R16,), (0,) * 16),
    ),
    ("shared", 32): (
        distinct("1 VeRA r256", [VERA]),
        distinct("16 VeRA r256", [VERA] * 16),
        distinct("20: LoRA DoRA (IA)3 VeRA", [R16, DORA, IA3, VERA] * 5),
    ),
    ("shared", 64): (
        distinct("64: (IA)3 VeRA", [IA3] * 32 + [VERA] * 32),
        distinct("64 VeRA r256", [VERA] * 64),
    ),
    ("own", 32): (
        distinct("20 LoRA r16", [R16] * 20),
        distinct("32 LoRA r16", [R16] * 32),
        Batch("32 rows of one LoRA r16", (R16,), (0,) * 32),
    ),
    ("own", 64): (
        Batch("64 rows of 20 LoRA r16", (R16,) * 20, tuple(n % 20 for n in range(64))),
        Batch("64 rows of one LoRA r16", (R16,), (0,) * 64),
        distinct("64 LoRA r16", [R16] * 64),
    ),
    ("own", ANY): (
        Batch("4 x 2048 rows of LoRA r16", (R16,) * 4, tuple(n // 2048 for n in range(8192)), decode=False),
        Batch("4 x 512 rows of LoRA r64", (R64,) * 4, tuple(n // 512 for n in range(2048)), decode=False),
    ),
    ("shared", ANY): (
        Batch("4 x 2048 rows of VeRA r256", (VERA,) * 4, tuple(n // 2048 for n in range(8192)), decode=False),
    ),
    ("own", 4): (
        distinct("1 LoRA r16", [R16]),
        distinct("4 LoRA r16", [R16] * 4),
        distinct("4 LoRA r64", [R64] * 4),
    ),
    ("own", 256): (
        Batch("128 rows of 20 LoRA r16", (R16,) * 20, tuple(n % 20 for n in range(128))),
        Batch("256 rows of 64 LoRA r16", (R16,) * 64, tuple(n % 64 for n in range(256))),
        Batch("256 rows of one LoRA r16", (R16,), (0,) * 256),
    ),
}
Entry = tuple[str, int]

MIXES = (
    distinct("16: LoRA DoRA (IA)3 OFT", [R16, DORA, FEED_FORWARD, OFT] * 4),
    distinct("20: LoRA DoRA (IA)3 VeRA OFT", [R16, DORA, FEED_FORWARD, VERA, OFT] * 4),
    distinct("64: (IA)3 with down, VeRA", [FEED_FORWARD] * 32 + [VERA] * 32),
    distinct("4 OFT", [OFT] * 4),
    distinct("64 OFT", [OFT] * 64),
)


# --- one batch in one model ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scratch:
    """``v``, ``u``: ``(SPLIT, N, n_slices, R)``. ``addend``: ``(N, out)``, or empty. All fp32, but for ``u`` see
    ``launch.shared_scratch_dtype``."""

    v: torch.Tensor
    u: torch.Tensor
    addend: torch.Tensor


class TunedSites(Sites):
    """One module in every layer, with the operators in the order of a server: what is *before* the base layer needs
    nothing of it and, in decode, runs beside it. ``max_rank``: R of the scratch."""

    def __init__(self, module: Module, batch: Batch, dtype: torch.dtype, layers: int, max_rank: int) -> None:
        at_down = module.name == "down_proj"
        self.methods = [
            replace(method, block=0) if method.block == 1 and not at_down else method for method in batch.slots
        ]
        super().__init__(
            module,
            methods=self.methods,
            slots=batch.rows,
            counts=[1 for _ in batch.rows],
            layers=layers,
            dtype=dtype,
            scaled=range(len(module.widths)),
            basis_per_layer=False,
        )
        self.batch, self.dtype, self.layers, self.max_rank = batch, dtype, layers, max_rank
        self.beside = batch.shares and batch.decode
        self.inputs: torch.Tensor | None = None  # of all slices, if the graph transforms them
        if batch.rotates(module):
            with_further = self.n_rows + (self.n_slices - 1) * room_for_further(self.n_rows, self.n_further)
            self.inputs = torch.empty(with_further, module.in_features, dtype=dtype, device=DEVICE)
            self.h = torch.randn(with_further, self.offsets[-1], dtype=dtype, device=DEVICE)

    def bytes(self) -> int:
        """Of the adapters of one layer, each once; activations are small beside them."""
        elements, width = 0, self.offsets[-1]
        for slot in set(self.batch.rows):
            method = self.methods[slot]
            elements += self.n_slices * self.module.in_features * method.block
            elements += method.rank * (self.n_slices * self.module.in_features + width) + width * method.scale
            elements += (method.basis_rank * self.n_slices + width) if method.basis_rank else 0
        basis = max(self.methods[slot].basis_rank for slot in self.batch.rows)
        return (elements + basis * (self.module.in_features + max(self.module.widths))) * self.dtype.itemsize

    def scratch(self, setting: Setting) -> Scratch:
        """As a server makes it for a graph."""

        def split(operator: str, tile_rows: int, parameters: launch.Shrink) -> int:
            rows, in_features = self.n_rows, self.module.in_features
            return launch.shrink_split(operator, rows, tile_rows, self.dtype, in_features, parameters)

        width = self.grouped[0].shape[2]
        own, shared = split("shrink", self.own[2], setting.shrink), split("shared_shrink", width, setting.shared_shrink)
        shape = self.n_rows, self.n_slices, self.max_rank
        dtype = launch.shared_scratch_dtype(shared, width, self.dtype)
        v = torch.empty(own, *shape, device=DEVICE)
        u = torch.empty(shared, *shape, dtype=dtype, device=DEVICE)
        return Scratch(v, u, self._addend())

    def _addend(self) -> torch.Tensor:
        return torch.empty((self.n_rows, self.offsets[-1]) if self.beside else 0, device=DEVICE)

    def base(self, h: torch.Tensor, layer: int, weight: torch.Tensor, transform: bool) -> None:
        """The base GEMM; ``transform``: after the input transform, if there is one. ``weight``: ``(out, in)``."""
        x = self.x
        if transform and self.inputs is not None:
            rotate_kernel.rotate(x, *self.rotated, layer * self.n_slices, self.n_slices, self.inputs)
            x = self.inputs
        torch.mm(x, weight.t(), out=h[: len(x)])

    def own_before(self, layer: int, scratch: Scratch, setting: Setting) -> None:
        shrink_kernel.shrink(self.x, *self.own, layer * self.n_slices, scratch.v, setting.shrink)

    def shared_before(self, layer: int, scratch: Scratch, setting: Setting) -> None:
        """For batches with shared bases only."""
        site = layer * self.n_slices
        shared_shrink_kernel.shared_shrink(self.x, *self.grouped, site, scratch.u, setting.shared_shrink)
        if self.beside:
            self._shared_expand(scratch.addend, layer, scratch, setting, add=False)

    def after(self, h: torch.Tensor, layer: int, scratch: Scratch, setting: Setting) -> None:
        """``h``: the output of the base layer, ``(N, out)``, or with further rows."""
        site = layer * self.n_slices
        expand_kernel.expand(h, scratch.v, scratch.addend, *self.filled, site, self.offsets, setting.expand)
        if self.batch.shares and not self.beside:
            self._shared_expand(h[: self.n_rows], layer, scratch, setting, add=True)

    def _shared_expand(self, out: torch.Tensor, layer: int, scratch: Scratch, setting: Setting, add: bool) -> None:
        shared_expand_kernel.shared_expand(
            out, scratch.u, *self.grouped, layer * self.n_slices, self.offsets, add, setting.shared_expand
        )

    @cached_property
    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``v``, ``u`` and ``h`` of the last layer by the references, the planes summed, 0 where nothing is written."""
        site = (self.layers - 1) * self.n_slices
        shape = (1, self.n_rows, self.n_slices, self.max_rank)
        v, u, h = torch.zeros(shape, device=DEVICE), torch.zeros(shape, device=DEVICE), self.h.clone()
        addend = self._addend()
        shrink_reference.shrink(self.x, *self.own, site, v)
        if self.batch.shares:
            shared_shrink_reference.shared_shrink(self.x, *self.grouped, site, u)
        if self.beside:
            shared_expand_reference.shared_expand(addend, u, *self.grouped, site, self.offsets, add=False)
        expand_reference.expand(h, v, addend, *self.filled, site, self.offsets)
        if self.batch.shares and not self.beside:
            shared_expand_reference.shared_expand(h[: self.n_rows], u, *self.grouped, site, self.offsets, add=True)
        return v[0], u[0], h

    def wrong(self, setting: Setting) -> str | None:
        """How the kernels differ from the references in the last layer, if they do."""
        layer, scratch, h = self.layers - 1, self.scratch(setting), self.h.clone()
        for planes in (scratch.v, scratch.u):
            planes.zero_()
        self.own_before(layer, scratch, setting)
        if self.batch.shares:
            self.shared_before(layer, scratch, setting)
        self.after(h, layer, scratch, setting)
        if self.inputs is not None:
            rotated = torch.empty_like(self.inputs)
            transform = (*self.rotated, layer * self.n_slices, self.n_slices)
            rotate_kernel.rotate(self.x, *transform, self.inputs)
            rotate_reference.rotate(self.x, *transform, rotated)
            error = (self.inputs - rotated).float().abs().max().item()
            if not error <= torch.finfo(self.dtype).eps * rotated.float().abs().max().item():
                return f"the inputs are off by {error:.3g} at {self.module.name}"
        v, u, expected = self.expected
        for name, planes, wanted in (("v", scratch.v, v), ("u", scratch.u, u)):
            # fp32 sums in another order, some 1e-6 of the terms; a feature too few shows in the second digit
            close = 1e-4 + (0 if planes.dtype == torch.float32 else torch.finfo(planes.dtype).eps)  # rounded once
            error, allowed = (planes.float().sum(0) - wanted).abs().max().item(), close * wanted.abs().max().item()
            if not error <= allowed:
                return f"{name} is off by {error:.3g}, {allowed:.3g} is allowed, at {self.module.name}"
        # v and u are rounded before they meet b, the result once more, in prefill that of each expand
        effect = (expected - self.h).float().abs().amax(-1, keepdim=True)  # of each row
        allowed = torch.finfo(self.dtype).eps * (expected.float().abs() + 4 * effect)
        excess = ((h.float() - expected.float()).abs() - allowed).max().item()
        return None if excess <= 0 else f"h is off by {excess:.3g} more than is allowed at {self.module.name}"


@dataclass(frozen=True)
class Setting:
    """Parameters of a step."""

    shrink: launch.Shrink
    expand: launch.Expand
    shared_shrink: launch.Shrink = TILE_SHRINK
    shared_expand: launch.SharedExpand = SHARED_EXPAND


@cache
def side_streams() -> Sequence[torch.cuda.Stream]:
    """For own pairs, and for shared bases. Made once: torch gives out the same few streams again and again, that of the
    graphs among them."""
    return [torch.cuda.Stream() for _ in range(2)]


class Step:
    """The adapted modules of all layers for one batch."""

    def __init__(self, model: ModelShape, batch: Batch, dtype: torch.dtype, layers: int, weights: Weights) -> None:
        max_rank = min(MAX_RANK, model.hidden)  # less in the smoke test only
        self.batch, self.layers, self.weights = batch, layers, weights
        self.modules = [TunedSites(module, batch, dtype, layers, max_rank) for module in model.modules]
        self.outputs = [torch.empty_like(sites.h) for sites in self.modules]

    def wrong(self, setting: Setting) -> str | None:
        return next(filter(None, (sites.wrong(setting) for sites in self.modules)), None)

    def added(self, setting: Setting, before: bool = True, after: bool = True) -> float:
        """Seconds that the adapters add to a layer, in prefill of their kernels alone; on request without what is
        before or after the base layer, but for input transforms."""
        seconds = self._seconds(setting, before, after)
        return seconds - self._seconds(setting, before=False, after=False) if self.batch.decode else seconds

    def _seconds(self, setting: Setting, before: bool, after: bool) -> float:
        scratch = [sites.scratch(setting) for sites in self.modules]
        return seconds(lambda: self.run(setting, scratch, before, after)) / self.layers

    def run(self, setting: Setting, scratch: Sequence[Scratch], before: bool, after: bool) -> None:
        """``scratch``: of each module. With nothing before or after the base layer there are no input transforms."""
        own_side = shared_side = None
        if before and self.batch.decode and not INTERPRETED:
            own_side, shared_side = side_streams()
        sides = list(filter(None, (own_side, shared_side if self.batch.shares else None)))
        for layer in range(self.layers):
            for number, (sites, h, of_module) in enumerate(zip(self.modules, self.outputs, scratch, strict=True)):
                own_last = own_side is not None and (self.batch.shares or sites.inputs is not None)
                for side in sides:
                    fork(side)
                if before and self.batch.shares:
                    with on_stream(shared_side):
                        sites.shared_before(layer, of_module, setting)
                if before and not own_last:
                    with on_stream(own_side):
                        if own_side is not None:
                            give_way(h)
                        sites.own_before(layer, of_module, setting)
                if self.batch.decode:
                    sites.base(h, layer, self.weights.of(number, layer), transform=before or after)
                if own_last:
                    with on_stream(own_side):
                        sites.own_before(layer, of_module, setting)
                for side in sides:
                    torch.cuda.current_stream().wait_stream(side)
                if after:
                    sites.after(h, layer, of_module, setting)

    def copy_seconds(self) -> float:
        """Per layer, of a copy of as many bytes at every module: half of them read, half written."""
        buffers = [
            torch.empty(self.layers, 2, max(1, sites.bytes() // 2), dtype=torch.uint8, device=DEVICE)
            for sites in self.modules
        ]

        def run() -> None:
            for layer in range(self.layers):
                for buffer in buffers:
                    buffer[layer, 0].copy_(buffer[layer, 1])

        return seconds(run) / self.layers

    def bytes(self) -> int:
        return sum(sites.bytes() for sites in self.modules)


class Weights:
    """The base weights of all layers, ``(out, in)``."""

    def __init__(self, model: ModelShape, dtype: torch.dtype, layers: int) -> None:
        self._weights = [
            torch.empty(layers, sum(module.widths), module.in_features, dtype=dtype, device=DEVICE).normal_(std=0.02)
            for module in model.modules
        ]

    def of(self, module: int, layer: int) -> torch.Tensor:
        return self._weights[module][layer]


def seconds(run: Callable[[], None]) -> float:
    """Median time of ``run`` as a CUDA graph, of fewer replays if it takes long."""
    if INTERPRETED:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    while len(times) < REPLAYS + 2 and (len(times) < 7 or sum(times) < 0.2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


# --- the floor -------------------------------------------------------------------------------------------------------


@triton.jit
def _chain(next_ptr, out_ptr, steps):
    """Follows ``steps`` links: each load waits for the one before it."""
    place = tl.program_id(0).to(tl.int64)
    for _ in range(steps):
        place = tl.load(next_ptr + place)
    tl.store(out_ptr + tl.program_id(0), place)


def floor(bench: Bench) -> None:
    """Microseconds of a launch in a graph, and of a load from memory that the next load waits for."""
    launches, programs = 256, 4 if INTERPRETED else 528
    size = 1 << (10 if INTERPRETED else 27)  # 1 GiB of links: far more than any L2
    out = torch.empty(programs, dtype=torch.int64, device=DEVICE)
    links = (torch.arange(size, device=DEVICE) * 1_000_003 + 12_345_677) % size  # neighbours lie far apart
    for grid in (1, programs):

        def many_empty(grid: int = grid) -> None:
            for _ in range(launches):
                empty[(grid,)](out)

        bench.record("floor", f"empty kernel, {grid} programs", us=seconds(many_empty) / launches * 1e6)
    times = {}
    for steps in (1, 9):

        def many_chains(steps: int = steps) -> None:
            for _ in range(16):
                _chain[(programs,)](links, out, steps)

        times[steps] = seconds(many_chains)
    bench.record("floor", "a dependent load", us=(times[9] - times[1]) / 16 / 8 * 1e6)


# --- the search ------------------------------------------------------------------------------------------------------


class DeadlinePassed(RuntimeError):
    """There is no time for more."""


COLUMNS = ("seconds", "stage", "what", "batch", "us", "us_shrink", "us_expand", "us_by_copy", "bytes", "error")


class Bench:
    """Settings, time and records of a run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.began = arguments, time.monotonic()
        self.dtype = getattr(torch, arguments.dtype)
        self.model = MODELS["tiny" if arguments.smoke else arguments.model]
        self.out = Path(arguments.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self._file = (self.out / "tune.csv").open("w", newline="")
        self._writer: csv.DictWriter[str] = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()

    def check_deadline(self) -> None:
        if time.monotonic() - self.began > self.arguments.deadline:
            raise DeadlinePassed(f"the deadline of {self.arguments.deadline} s has passed")

    def record(self, stage: str, what: str, **fields: Any) -> None:
        passed = time.monotonic() - self.began
        row: dict[str, Any] = {"seconds": round(passed, 1), "stage": stage, "what": what, **fields}
        self._writer.writerow(row)
        self._file.flush()
        values = ", ".join(f"{name} {value:.2f}" for name, value in fields.items() if isinstance(value, float))
        batch, error = fields.get("batch", ""), fields.get("error", "")
        print(f"{passed:6.1f} s  {stage:7} {what:40.40} {batch:26} {values} {error}", flush=True)


def brief(parameters: Parameters) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(parameters).items() if value is not False)


def best(
    bench: Bench, stage: str, steps: Sequence[Step], settings: Iterable[tuple[str, Setting]], so_far: Setting
) -> Setting:
    """The setting whose times have the least geometric mean over the batches."""
    times: dict[Setting, list[float]] = {}
    for what, setting in settings:
        bench.check_deadline()
        try:
            problem = next(filter(None, (step.wrong(setting) for step in steps)), None)
            if problem is None:
                times[setting] = [step.added(setting) for step in steps]
        except (RuntimeError, ValueError, triton.TritonError) as error:  # out of shared memory, say
            problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if problem is not None:
            bench.record(stage, what, error=problem)
            times.pop(setting, None)
            continue
        for step, seconds_added in zip(steps, times[setting], strict=True):
            bench.record(stage, what, batch=step.batch.name, us=seconds_added * 1e6)
    if not times:
        return so_far
    # The logarithms of two settings differ by the mean ratio of their times. Below a microsecond is noise.
    return min(times, key=lambda setting: math.fsum(math.log(max(added, 1e-6)) for added in times[setting]))


def settings_of(kind: str, most: int, stage: str, chosen: Setting, smoke: bool) -> Iterator[tuple[str, Setting]]:
    """The candidates of a stage for the entry of ``kind`` ("own" or "shared") and ``most`` rows."""
    row_tiles, decode = kind == "own" and most <= FEW_ROWS, most <= MOST_DECODE_ROWS
    shared_decode = kind == "shared" and decode
    prefix = "shared_" if kind == "shared" else ""
    shrink: launch.Shrink = getattr(chosen, f"{prefix}shrink")
    expand: launch.Expand | launch.SharedExpand = getattr(chosen, f"{prefix}expand")
    tried: Sequence[Parameters] = []
    if stage == "expand":
        if kind == "shared":
            tried = SHARED_EXPANDS if decode else PREFILL_SHARED_EXPANDS
        else:
            tried = ROW_EXPANDS if row_tiles else TILE_EXPANDS if decode else PREFILL_EXPANDS
    elif stage == "early" and isinstance(expand, launch.Expand) and row_tiles and launch.supports_pdl():
        tried = [expand, replace(expand, pdl=True)]
    elif stage == "tiles" and not row_tiles and decode:  # in prefill a tile has programs of its own
        tried = [replace(expand, tile_programs=count) for count in TILE_PROGRAMS]
    elif stage == "shrink":
        of_tiles = TILE_SHRINKS if decode else PREFILL_SHRINKS
        tried = ROW_SHRINKS if row_tiles else SHARED_SHRINKS if shared_decode else of_tiles
    elif stage == "share":
        tried = [shrink, *(replace(shrink, share=share) for share in (SHARED_SHARES if shared_decode else SHARES))]
    elif stage == "grid":
        counts = SHARED_PROGRAMS if shared_decode else PROGRAMS
        tried = [shrink, *(replace(shrink, programs=programs) for programs in counts)]
    for parameters in tried[: 2 if smoke else None]:
        name = "shrink" if isinstance(parameters, launch.Shrink) else "expand"
        yield brief(parameters), replace(chosen, **{prefix + name: parameters})


def shrinks_first(kind: str, most: int) -> bool:
    """Whether the shrink of an entry is tuned before its expand: where every program of the expand reads all planes."""
    return kind == "shared" and most <= MOST_DECODE_ROWS


def stages_of(kind: str, most: int) -> Sequence[str]:
    """In the order in which they are run."""
    of_expand, of_shrink = ("expand", "early", "tiles"), ("shrink", "share", "grid")
    return (*of_shrink, *of_expand) if shrinks_first(kind, most) else (*of_expand, *of_shrink)


def start_of(kind: str, most: int) -> Setting:
    """Where the search for an entry begins."""
    if most == ANY:
        return Setting(PREFILL_SHRINK, PREFILL_EXPAND, PREFILL_SHRINK, PREFILL_SHARED_EXPAND)
    if kind == "own" and most > FEW_ROWS:
        return Setting(TILE_SHRINK, TILE_EXPAND)
    return Setting(ROW_SHRINK, ROW_EXPAND)


def compile_all(arguments: argparse.Namespace) -> None:
    """Compiles what the stages will try, several processes at once."""
    jobs: dict[tuple[int, bool, Setting], None] = {}  # in order, each once; kernels depend on tiles by a power of two
    for (kind, most), batches in BATCHES.items():
        start = start_of(kind, most)
        # The kernels of shared_expand depend on the share, which is chosen before them.
        shares = SHARED_SHARES if shrinks_first(kind, most) else (start.shared_shrink.share,)
        starts = [replace(start, shared_shrink=replace(start.shared_shrink, share=share)) for share in shares]
        stages = [stage for stage in stages_of(kind, most) if stage not in ("grid", "tiles")]  # these change no kernel
        for rows in dict.fromkeys(triton.next_power_of_2(len(batch.rows)) for batch in batches):
            for stage in stages:
                for first in starts if stage == "expand" else [start]:
                    for _, setting in settings_of(kind, most, stage, first, smoke=False):
                        jobs[max(16, rows), kind == "shared", setting] = None
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, ((arguments, *job) for job in jobs)))


def _compile(job: tuple[argparse.Namespace, int, bool, Setting]) -> None:
    """Launches the kernels over dead tiles, which touch no memory of the adapters."""
    arguments, rows, shares, setting = job
    method = Method("none", basis_rank=1 if shares else 0)
    batch = Batch("none", (method,), (-1,) * rows, decode=rows <= MOST_DECODE_ROWS)
    for module in MODELS[arguments.model].modules:
        sites = TunedSites(module, batch, getattr(torch, arguments.dtype), 1, MAX_RANK)
        scratch = sites.scratch(setting)
        with suppress(RuntimeError, triton.TritonError):  # reported when it is measured
            sites.own_before(0, scratch, setting)
            if shares:
                sites.shared_before(0, scratch, setting)
            sites.after(sites.h, 0, scratch, setting)
    torch.cuda.synchronize()


def setting_of(batch: Batch, dtype: torch.dtype, max_rank: int) -> Setting:
    """As the checked-in table has it for a decode of this batch."""
    rows, width = len(batch.rows), DECODE_WIDTH
    of_own, of_shared = (rows, own_tile_rows(rows, width), dtype, max_rank), (rows, width, dtype, max_rank)
    return Setting(
        launch.shrink("shrink", *of_own),
        launch.expand(*of_own),
        launch.shrink("shared_shrink", *of_shared),
        launch.shared_expand(*of_shared),
    )


def mixes(bench: Bench, weights: Weights) -> None:
    """Times of batches of several methods."""
    arguments = bench.arguments
    for batch in MIXES:
        bench.check_deadline()
        tried = small(batch) if arguments.smoke else batch
        step = Step(bench.model, tried, bench.dtype, arguments.layers, weights)
        setting = setting_of(tried, bench.dtype, step.modules[0].max_rank)
        if not INTERPRETED:
            scratch = [sites.scratch(setting) for sites in step.modules]
            compile_kernels(partial(step.run, setting, scratch, before=True, after=True))
        if problem := step.wrong(setting):
            bench.record("mix", "as checked in", batch=batch.name, error=problem)
            continue
        bench.record("mix", "as checked in", batch=batch.name, **times_of(step, setting))


def times_of(step: Step, setting: Setting) -> dict[str, float]:
    """Microseconds per layer, and bytes, as columns."""
    return {
        "us": step.added(setting) * 1e6,
        "us_shrink": step.added(setting, after=False) * 1e6,
        "us_expand": step.added(setting, before=False) * 1e6,
        "us_by_copy": step.copy_seconds() * 1e6,
        "bytes": step.bytes(),
    }


def write_table(bench: Bench, chosen: dict[Entry, Setting]) -> None:
    """The checked-in table with the entries that were decided replaced."""
    new = json.loads(launch.TABLE.read_text())
    device = "CPU" if INTERPRETED else torch.cuda.get_device_name()
    new["made"] = f"benchmarks/tune.py, {device}, torch {torch.__version__}, triton {triton.__version__}"
    for (kind, most), setting in chosen.items():
        for name in ("shrink", "expand"):
            operator = name if kind == "own" else f"shared_{name}"
            bound = None if most == ANY else most
            rows = [row for row in new[operator]["half"] if row["max_rows"] != bound]
            rows.append({"max_rows": bound, **asdict(getattr(setting, operator))})
            new[operator]["half"] = sorted(rows, key=lambda row: row["max_rows"] or ANY)
    (bench.out / "launch_table.json").write_text(table_text(new))


def table_text(new: dict[str, Any]) -> str:
    """As JSON, an entry a line."""
    lines = ["{", f' "made": {json.dumps(new["made"])},']
    operators = ("shrink", "expand", "shared_shrink", "shared_expand")
    for operator in operators:
        lines.append(f' "{operator}": {{')
        for precision in ("half", "single"):
            entries = ",\n".join(f"   {json.dumps(row)}" for row in new[operator][precision])
            lines += [f'  "{precision}": [', entries, "  ]" + ("," if precision == "half" else "")]
        lines.append(" }" + ("" if operator == operators[-1] else ","))
    return "\n".join([*lines, "}", ""])


def run(bench: Bench) -> None:
    arguments = bench.arguments
    floor(bench)
    if arguments.workers and not INTERPRETED:
        compile_all(arguments)
        bench.record("compile", f"in {arguments.workers} processes")
    weights = Weights(bench.model, bench.dtype, arguments.layers)
    mixes(bench, weights)
    chosen: dict[Entry, Setting] = {}
    own: Setting | None = None  # the best for own parts, which the batches of shared bases have beside them
    for (kind, most), batches in BATCHES.items():
        tried = [small(batches[-1])] if arguments.smoke else batches
        steps = [Step(bench.model, batch, bench.dtype, arguments.layers, weights) for batch in tried]
        setting = own if own and kind == "shared" and most <= MOST_DECODE_ROWS else start_of(kind, most)
        try:
            for stage in stages_of(kind, most):
                candidates = settings_of(kind, most, stage, setting, arguments.smoke)
                setting = best(bench, stage, steps, candidates, setting)
                chosen[kind, most] = setting
            own = own or setting
            for step in steps:
                bench.check_deadline()
                bench.record(
                    "final",
                    f"{kind}, prefill" if most == ANY else f"{kind}, at most {most} rows",
                    batch=step.batch.name,
                    **times_of(step, setting),
                )
        finally:
            write_table(bench, chosen)
        del steps


def small(batch: Batch) -> Batch:
    """The same mix with few rows, 3 if they need no kernel of more: the interpreter is slow."""
    rows = batch.rows if FEW_ROWS < len(batch.rows) <= MOST_DECODE_ROWS else batch.rows[:2] + batch.rows[-1:]
    slots = tuple(
        replace(method, rank=min(method.rank, 20), basis_rank=min(method.basis_rank, 20)) for method in batch.slots
    )
    return replace(batch, slots=slots, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for tune.csv and launch_table.json")
    parser.add_argument("--model", choices=list(MODELS), default="Llama-3.1-8B")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--layers", type=int, default=8, help="layers of the measured graph")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile; 0 compiles when it measures")
    parser.add_argument("--deadline", type=float, default=480, help="seconds")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and few candidates")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.layers = 1
    bench = Bench(arguments)
    torch.manual_seed(0)
    try:
        run(bench)
    except DeadlinePassed as passed:
        bench.record("end", "", error=str(passed))
    finally:
        if (bench.out / "launch_table.json").exists():
            print((bench.out / "launch_table.json").read_text())


if __name__ == "__main__":
    main()
