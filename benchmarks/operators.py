"""Time of every operator of a layer against the time that its bytes need, and two of the project's bars.

    PYTHONPATH=kernels python benchmarks/operators.py --out benchmarks/results/h200 --commit 1a2b3c4

Needs a CUDA GPU, torch and Triton; begins nothing after ``--deadline`` seconds. Writes ``operators.csv``, every
measurement, and ``operators.md``, the bars. With ``--regression`` it compares the times with those of an earlier
``operators.csv`` of the same kind of GPU, and exits with 1 if an operator is more than 10 % slower, or was measured
then and is not now.

A CUDA graph holds one call per layer, each with parts of its own, so what a call reads has left the L2 cache since the
last replay whenever the parts of all layers exceed it. (In serving it always has: the base weights pass through between
two calls.) Times are medians of replays, per call, and include the gap between two launches of a graph. Activations and
scratch are shared by the calls, hence warm, as they are in serving. Plans and scratch are as a server makes them: the
scratch of decode is as wide as the largest rank that may come, that of prefill as the largest of the batch, but no
narrower than a block of ranks. In decode ``shared_expand`` writes an fp32 ``addend``, beside the base layer in a
server, and ``expand`` adds it; otherwise it adds to ``h`` itself. Before it is timed, the result of each operator is
compared with its reference. ``route`` and ``shared_route``, which run once per forward, and ``lookup`` are not
measured.

Bytes: everything that a kernel must move, once. Parts of every adapter, activations in and out, the planes of the
scratch, ``addend``. Rows of ``h`` that have no part at a slice need not be touched. Plans, routes and tables are not
counted.

The bars, numbered as the project numbers them:

- 12: ``expand`` of DoRA over that of LoRA, rank 16, in a prefill of 1024 and 4096 rows of one to four adapters, for
  each module: ``s`` is multiplied while ``h`` is in registers anyway. (The Scute paper: 0.985 to 1.022.)
- 13: the byte model, ``latency + copy(bytes) + pass(bytes of h)``, against the measured time, of all rows whose bytes
  take longer than a launch at the bandwidth of a large copy. Nothing in it is fitted to these rows: ``copy`` is what a
  copy that moves as many bytes takes beyond a launch, from copies of half a megabyte to a gigabyte, since few bytes do
  not come at the pace of many; ``pass`` the same of a kernel that reads and writes one buffer in place again and again,
  as the expands do with ``h``, of which an L2 cache holds what it has room for; ``latency`` the time of the operator
  where it has next to nothing to do, less that of its bytes: for one adapter of rank 1 (a rotation keeps its blocks) at
  the smallest module, in decode for as many rows, else for the fewest that have the tiles of prefill. A launch is an
  empty kernel. All are measured here; the report also says what bytes alone at the bandwidth of a large copy would
  give.

Kernels are compiled in ``--workers`` processes before anything is timed: Triton keeps them on disk.

``--smoke`` tries it all on tiny shapes: with TRITON_INTERPRET=1 on a CPU, where the times mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from scute_kernels import launch
from scute_kernels.expand import kernel as expand_kernel
from scute_kernels.expand import reference as expand_reference
from scute_kernels.plan import MOST_DECODE_ROWS, own_tile_rows, tile_width
from scute_kernels.rotate import kernel as rotate_kernel
from scute_kernels.rotate import reference as rotate_reference
from scute_kernels.shared_expand import kernel as shared_expand_kernel
from scute_kernels.shared_expand import reference as shared_expand_reference
from scute_kernels.shared_shrink import kernel as shared_shrink_kernel
from scute_kernels.shared_shrink import reference as shared_shrink_reference
from scute_kernels.shrink import kernel as shrink_kernel
from scute_kernels.shrink import reference as shrink_reference
from scute_kernels.stream import empty
from shapes import MODELS, ModelShape, Module
from sites import DEVICE, INTERPRETED, Method, Sites

KERNELS: Mapping[str, Callable[..., None]] = {
    "rotate": rotate_kernel.rotate,
    "shrink": shrink_kernel.shrink,
    "shared_shrink": shared_shrink_kernel.shared_shrink,
    "expand": expand_kernel.expand,
    "shared_expand": shared_expand_kernel.shared_expand,
}
REFERENCES: Mapping[str, Callable[..., None]] = {
    "rotate": rotate_reference.rotate,
    "shrink": shrink_reference.shrink,
    "shared_shrink": shared_shrink_reference.shared_shrink,
    "expand": expand_reference.expand,
    "shared_expand": shared_expand_reference.shared_expand,
}
REPLAYS = 20
COLD_BYTES = 512 << 20  # what all calls of a graph move together: several times the L2 of any GPU
MOST_LAYERS = 64

# As scute_sglang/backend.py has it, which needs more than torch and Triton.
MAX_RANK = 1024  # R of the scratch of decode: what a server assumes if it is told nothing

MOST_RATIO = 1.02  # bar 12
MOST_ERROR = 0.14  # bar 13
MOST_SLOWER = 1.1  # a regression


# --- what is measured ------------------------------------------------------------------------------------------------


LORA, DORA = Method("LoRA r16", rank=16), Method("DoRA r16", rank=16, scale=True)
IA3 = Method("(IA)3", scale=True, block=1)  # the scale is on k and v, the diagonal on the inputs of down_proj
METHODS = (
    LORA,
    Method("LoRA r64", rank=64),
    Method("LoRA r256", rank=256),
    DORA,
    IA3,
    Method("VeRA r256", basis_rank=256),
    Method("OFT b32", block=32),
)


@dataclass(frozen=True)
class Batch:
    """Rows of adapters of one method, one request each, as equal in rows as they can be."""

    phase: str
    rows: int
    adapters: int

    @property
    def counts(self) -> list[int]:
        """Rows of each request."""
        few, more = divmod(self.rows, self.adapters)
        return [few + (i < more) for i in range(self.adapters)]


DECODE, CHUNK, PREFILL = "decode", "chunk", "prefill"  # a chunk: what bar 12 is about
BATCHES = (
    Batch(DECODE, 16, 16),
    *(Batch(CHUNK, rows, adapters) for rows in (1024, 4096) for adapters in (1, 2, 3, 4)),
    Batch(PREFILL, 8192, 4),
)
SMOKE_BATCHES = (Batch(DECODE, 3, 3), Batch(CHUNK, 258, 2), Batch(PREFILL, 70, 2))


def methods_of(batch: Batch) -> Sequence[Method]:
    return (LORA, DORA) if batch.phase == CHUNK else METHODS


@dataclass(frozen=True)
class Case:
    """One module, adapted by one method, and a batch for it."""

    batch: Batch
    method: Method
    module: Module
    dtype: torch.dtype

    @property
    def n_slices(self) -> int:
        return len(self.module.widths)

    def scaled(self, i: int) -> bool:
        """Whether slice ``i`` has a scale."""
        if self.method.name != IA3.name:
            return self.method.scale
        return self.module.name == "qkv_proj" and i > 0

    @property
    def block(self) -> int:
        """Of the rotation, 0 if there is none."""
        return 0 if self.method.name == IA3.name and self.module.name != "down_proj" else self.method.block

    @property
    def beside(self) -> bool:
        """Whether ``shared_expand`` writes an ``addend`` for ``expand`` to add."""
        return self.batch.phase == DECODE and self.method.basis_rank > 0

    @property
    def wide(self) -> bool:
        """Whether ``h`` has further rows, from which ``expand`` takes its columns."""
        return self.batch.phase == DECODE and self.block > 0 and self.n_slices > 1

    @property
    def operators(self) -> tuple[str, ...]:
        """Those that have something to do; of a chunk ``expand`` alone."""
        if self.batch.phase == CHUNK:
            return ("expand",)
        scaled = any(self.scaled(i) for i in range(self.n_slices))
        wanted = {
            "rotate": self.block > 0,
            "shrink": self.method.rank > 0,
            "shared_shrink": self.method.basis_rank > 0,
            "expand": self.method.rank > 0 or scaled or self.beside or self.wide,
            "shared_expand": self.method.basis_rank > 0,
        }
        return tuple(name for name, there in wanted.items() if there)

    def planes(self, operator: str) -> int:
        """SPLIT of the scratch that ``operator`` writes."""
        rows, width = self.batch.rows, tile_width(self.batch.rows, decode=True)
        tile_rows = own_tile_rows(rows, width) if operator == "shrink" else width
        return launch.shrink_split(operator, rows, tile_rows, self.dtype, self.module.in_features)

    def scratch_dtype(self, shrink: str) -> torch.dtype:
        """Of the scratch that the operator ``shrink`` writes."""
        if shrink == "shrink":
            return torch.float32
        return launch.shared_scratch_dtype(self.planes(shrink), tile_width(self.batch.rows, decode=True), self.dtype)

    def parts(self, operator: str) -> int:
        """Elements of the parts of all adapters that ``operator`` reads in a layer, those of a shared basis once."""
        method, adapters, in_features = self.method, self.batch.adapters, self.module.in_features
        width = sum(self.module.widths)
        match operator:
            case "rotate":
                return adapters * self.n_slices * in_features * self.block
            case "shrink":
                return adapters * self.n_slices * method.rank * in_features
            case "shared_shrink":  # the slices have one basis, and a d of their own
                return method.basis_rank * (in_features + adapters * self.n_slices)
            case "expand":
                scales = sum(w for i, w in enumerate(self.module.widths) if self.scaled(i))
                return adapters * (method.rank * width + scales)
            case "shared_expand":  # every slice reads a prefix of the same b, and an e of its own
                return method.basis_rank * max(self.module.widths) + adapters * width
        raise ValueError(operator)

    def moved(self, operator: str) -> int:
        """Bytes that a call must move: see the top of this file."""
        rows, size = self.batch.rows, self.dtype.itemsize
        parts = self.parts(operator) * size
        x = rows * self.module.in_features * size
        addend = rows * sum(self.module.widths) * 4 if self.beside else 0
        match operator:
            case "rotate":
                return parts + x + self.n_slices * x
            case "shrink" | "shared_shrink":
                return parts + x + self._scratch(operator)
            case "expand":
                return parts + self._scratch("shrink") + addend + self.in_place(operator)
            case "shared_expand":
                return parts + self._scratch("shared_shrink") + addend + self.in_place(operator)
        raise ValueError(operator)

    def in_place(self, operator: str) -> int:
        """Those of them that are ``h``, read and written; from further rows to the rows of the batch too."""
        columns = 0
        if operator == "shared_expand" and not self.beside:
            columns = sum(self.module.widths)
        elif operator == "expand":
            scaled = (w for i, w in enumerate(self.module.widths) if self.scaled(i) or (self.wide and i > 0))
            columns = sum(self.module.widths if self.method.rank or self.beside else scaled)
        return 2 * self.batch.rows * columns * self.dtype.itemsize

    def _scratch(self, shrink: str) -> int:
        """Bytes that ``shrink`` writes and its expand reads."""
        rank = self.method.rank if shrink == "shrink" else self.method.basis_rank
        size = self.scratch_dtype(shrink).itemsize
        return self.planes(shrink) * self.batch.rows * self.n_slices * rank * size


class MeasuredSites(Sites):
    """A case in several layers, with scratch. ``layers``: as many as it takes for cold parts, if not given."""

    def __init__(self, case: Case, layers: int | None = None) -> None:
        self.case = case
        moved = min(case.moved(operator) for operator in case.operators)
        self.layers = layers or min(MOST_LAYERS, max(4, COLD_BYTES // moved))
        batch, module, method = case.batch, case.module, case.method
        super().__init__(
            module,
            methods=[replace(method, block=case.block)] * batch.adapters,
            slots=range(batch.adapters),
            counts=batch.counts,
            layers=self.layers,
            dtype=case.dtype,
            scaled=[i for i in range(case.n_slices) if case.scaled(i)],
            basis_per_layer=True,  # or the second layer would find it in the L2 cache
        )
        if case.wide:
            self.h = torch.randn(self.n_slices * batch.rows, self.offsets[-1], dtype=case.dtype, device=DEVICE)
        # The kernels of a decode graph have scratch for any pair; an eager prefill has it if there is one.
        decode = batch.phase == DECODE
        max_rank = min(MAX_RANK, module.in_features)  # less in the smoke test only
        self.v = self._scratch("shrink", max_rank if decode else _eager_rank(method.rank, "shrink", "expand"))
        eager = _eager_rank(method.basis_rank, "shared_shrink", "shared_expand")
        self.u = self._scratch("shared_shrink", max_rank if decode else eager)
        self.addend = torch.randn((batch.rows, self.offsets[-1]) if case.beside else 0, device=DEVICE)

    def _scratch(self, shrink: str, max_rank: int) -> torch.Tensor:
        """Random, as if written: ``expand`` is tried without the shrink."""
        case = self.case
        shape = case.planes(shrink), case.batch.rows, case.n_slices, max_rank
        return torch.randn(shape, dtype=case.scratch_dtype(shrink), device=DEVICE)

    @cached_property
    def transformed(self) -> torch.Tensor:
        return torch.empty(self.n_slices * len(self.x), self.x.shape[1], dtype=self.x.dtype, device=DEVICE)

    def output(self, operator: str) -> torch.Tensor:
        """What ``operator`` writes."""
        match operator:
            case "rotate":
                return self.transformed
            case "shrink":
                return self.v
            case "shared_shrink":
                return self.u
            case "shared_expand":
                return self.addend if self.case.beside else self.h[: self.case.batch.rows]
        return self.h

    def arguments(self, operator: str, layer: int, out: torch.Tensor) -> tuple[Any, ...]:
        site = layer * self.n_slices
        match operator:
            case "rotate":
                return self.x, *self.rotated, site, self.n_slices, out
            case "shrink":
                return self.x, *self.own, site, out
            case "shared_shrink":
                return self.x, *self.grouped, site, out
            case "shared_expand":
                return out, self.u, *self.grouped, site, self.offsets, not self.case.beside
        return out, self.v, self.addend, *self.filled, site, self.offsets

    def check(self, operator: str) -> None:
        """Compares ``operator`` with its reference in the last layer. Raises ``AssertionError`` if they differ."""
        in_place = operator == "expand" or (operator == "shared_expand" and not self.case.beside)
        results = []
        for function in (KERNELS[operator], REFERENCES[operator]):
            out = self.output(operator).clone()
            if not in_place:
                out.zero_()
            function(*self.arguments(operator, self.layers - 1, out))
            results.append(out)
        if operator in ("shrink", "shared_shrink"):
            got, wanted = (planes.float().sum(0) for planes in results)
            # fp32 sums in another order, some 1e-6 of the terms; a feature too few shows in the second digit
            allowed = 1e-4 * wanted.abs().max()
            if results[0].dtype == self.case.dtype:  # rounded once
                allowed = allowed + torch.finfo(self.case.dtype).eps * wanted.abs()
        else:
            got, wanted = (out.float() for out in results)
            before = self.output(operator).float() if in_place else 0.0
            if operator == "rotate":
                before = self.x.float().repeat(self.n_slices, 1)
            # v and u are rounded before they meet b, the result once more
            allowed = torch.finfo(self.case.dtype).eps * (wanted.abs() + 4 * (wanted - before).abs().max())
        excess = ((got - wanted).abs() - allowed).max().item()
        if not excess <= 0:
            case = self.case
            raise AssertionError(
                f"{operator} is off by {excess:.3g} more than is allowed: {case.batch}, {case.method.name}, "
                f"{case.module.name}"
            )

    def seconds(self, operator: str) -> float:
        """Of one call."""
        out = self.output(operator)
        return seconds(lambda layer: KERNELS[operator](*self.arguments(operator, layer, out)), self.layers)

    def calm(self) -> None:
        """Makes the parts and ``addend`` so small that ``h``, to which every call adds, stays finite in all replays."""
        self.arena.mul_(0.01)
        self.addend.mul_(0.01)


def _eager_rank(rank: int, *operators: str) -> int:
    """R of the scratch of an eager prefill."""
    return max(launch.widest_block(*operators), triton.next_power_of_2(rank))


def seconds(call: Callable[[int], object], layers: int) -> float:
    """Median time of one call, in a CUDA graph that holds one call per layer."""
    if INTERPRETED:
        begin = time.perf_counter()
        call(0)
        return time.perf_counter() - begin
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    times = []
    for _ in range(REPLAYS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / layers)
    return statistics.median(times[3:])  # the first replays warm up


@dataclass(frozen=True)
class Moves:
    """What kernels took that only move. ``moved``: bytes read and written, ascending. ``taken``: seconds of each."""

    moved: Sequence[int]
    taken: Sequence[float]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the largest."""
        return self.moved[-1] / self.taken[-1]

    def seconds(self, moved: int, launch: float) -> float:
        """To move so many bytes, beyond those of a launch."""
        if moved > self.moved[-1]:
            return moved / self.bandwidth
        beyond = [max(0.0, taken - launch) for taken in self.taken]
        return float(np.interp(moved, [0, *self.moved], [0.0, *beyond]))


MOVED = [1 << power for power in (range(12, 20) if INTERPRETED else range(19, 31))]


def measured_copies() -> Moves:
    """From memory to memory: each call has some of its own, and together they have more than any L2 cache. Not copies
    themselves: the engine that may do these is slower than the multiprocessors."""
    taken = []
    for moved in MOVED:
        calls = max(4, (1 << 22 if INTERPRETED else COLD_BYTES) // moved)
        source = torch.zeros(calls, moved // 8, dtype=torch.int32, device=DEVICE)
        target = torch.empty_like(source)

        def copy(call: int, source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            torch.neg(source[call], out=target[call])

        taken.append(seconds(copy, calls))
    return Moves(MOVED, taken)


def measured_passes() -> Moves:
    """In place, all calls over the same."""
    taken = []
    for moved in MOVED:
        held = torch.zeros(moved // 8, dtype=torch.int32, device=DEVICE)

        def negate(_: int, held: torch.Tensor = held) -> None:
            torch.neg(held, out=held)

        taken.append(seconds(negate, 16))
    return Moves(MOVED, taken)


def launch_seconds() -> float:
    """Of a kernel that does nothing, with four programs for each multiprocessor, in a graph."""
    out = torch.empty(1, device=DEVICE)
    programs = 4 if INTERPRETED else 4 * torch.cuda.get_device_properties(0).multi_processor_count
    return seconds(lambda _: empty[(programs,)](out), 256)


# --- bars and regressions, from rows ---------------------------------------------------------------------------------

Row = Mapping[str, Any]

SETTING = ("gpu", "model", "dtype")
OPERATOR = ("operator", "phase", "rows", "adapters", "method", "module")
COLUMNS = (
    *("date", "commit", *SETTING, "torch", "triton", *OPERATOR),
    *("microseconds", "bytes", "microseconds_by_bytes", "microseconds_by_moving", "microseconds_latency"),
)


def time_of(row: Row) -> float:
    return float(row["microseconds"])


def ratios_of_scale(rows: Sequence[Row]) -> list[float]:
    """Of ``expand`` with ``s`` over without, for each chunk and module that has both."""
    times = {
        (row["rows"], row["adapters"], row["module"], row["method"]): time_of(row)
        for row in rows
        if (row["phase"], row["operator"]) == (CHUNK, "expand")
    }
    plain = [place for *place, method in times if method == LORA.name]
    return [times[*place, DORA.name] / times[*place, LORA.name] for place in plain if (*place, DORA.name) in times]


def error_of(row: Row, *terms: str) -> float:
    """Of the sum of these columns, relative to the measured time."""
    return abs(sum(float(row[term]) for term in terms) - time_of(row)) / time_of(row)


def model_error(row: Row) -> float:
    """Of the byte model."""
    return error_of(row, "microseconds_latency", "microseconds_by_moving")


def heavy(rows: Sequence[Row], launch_us: float) -> list[Row]:
    """The rows whose bytes take longer than a launch."""
    return [row for row in rows if float(row["microseconds_by_bytes"]) > launch_us]


@dataclass(frozen=True)
class Bar:
    """``figure``: ``None`` if nothing was measured for it."""

    number: int
    what: str
    figure: float | None
    limit: float
    remark: str

    @property
    def met(self) -> str:
        return "not measured" if self.figure is None else "yes" if self.figure <= self.limit else "no"

    def row(self) -> str:
        figure = "–" if self.figure is None else f"{self.figure:.3f}"
        return f"| {self.number} | {self.what} | {figure} | ≤ {self.limit:g} | {self.met} | {self.remark} |"


def bars(rows: Sequence[Row], launch_us: float) -> list[Bar]:
    """``launch_us``: microseconds of a launch."""
    ratios, weighed = ratios_of_scale(rows), heavy(rows, launch_us)
    scale = "expand, DoRA r16 / LoRA r16, 1024 and 4096 rows of 1 to 4 adapters: median"
    model = "byte model against measured time, where bytes outweigh a launch: median error"
    by_bytes = [error_of(row, "microseconds_by_bytes") for row in weighed]
    return [
        Bar(
            12,
            scale,
            statistics.median(ratios) if ratios else None,
            MOST_RATIO,
            f"{len(ratios)} pairs, {min(ratios):.3f} to {max(ratios):.3f}" if ratios else "",
        ),
        Bar(
            13,
            model,
            statistics.median(map(model_error, weighed)) if weighed else None,
            MOST_ERROR,
            f"{len(weighed)} of {len(rows)} rows; by bytes alone {statistics.median(by_bytes):.3f}" if weighed else "",
        ),
    ]


def error_table(rows: Sequence[Row], launch_us: float) -> list[str]:
    """Bar 13 by phase and operator."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in heavy(rows, launch_us):
        errors.setdefault((row["phase"], row["operator"]), []).append(model_error(row))
    return [
        f"| {phase} | {operator} | {len(found)} | {statistics.median(found):.3f} | {max(found):.3f} |"
        for (phase, operator), found in errors.items()
    ]


def regressions(rows: Sequence[Row], earlier: Sequence[Row]) -> list[str]:
    """A line for each operator that is more than 10 % slower than in ``earlier``, or not there any more."""

    def place(row: Row) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in OPERATOR)

    found = {place(row): time_of(row) for row in rows}
    lines = []
    for row in earlier:
        operator, phase, n_rows, adapters, method, module = place(row)
        name, before = f"{operator}: {phase}, {n_rows} rows of {adapters} {method}, {module}", time_of(row)
        now = found.get(place(row))
        if now is None:
            lines.append(f"{name}: not measured, {before:.2f} us before")
        elif now > MOST_SLOWER * before:
            lines.append(f"{name}: {now:.2f} us, {before:.2f} us before, {now / before:.2f} times")
    return lines


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- the run ---------------------------------------------------------------------------------------------------------


class Bench:
    """Settings, time and records of a run. ``launch``: seconds of a launch."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.began = arguments, time.monotonic()
        self.model = MODELS["tiny" if arguments.smoke else arguments.model]
        self.dtype = getattr(torch, arguments.dtype)
        self.gpu = device_name()
        self.launch, self.copies, self.passes = launch_seconds(), measured_copies(), measured_passes()
        print(
            f"{self.gpu}, torch {torch.__version__}, triton {triton.__version__}, "
            f"copy {self.copies.bandwidth / 1e12:.2f} TB/s, launch {self.launch * 1e6:.2f} us"
        )
        self.rows: list[Row] = []
        self._latencies: dict[tuple[str, bool, int], float] = {}
        self.out: Path = arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        self._file = (self.out / "operators.csv").open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()

    @property
    def late(self) -> bool:
        return time.monotonic() - self.began > self.arguments.deadline

    def measure(self, case: Case) -> float:
        """Seconds of all operators of the case."""
        total = 0.0
        sites = MeasuredSites(case, layers=1 if INTERPRETED else None)
        for operator in case.operators:
            sites.check(operator)
        sites.calm()
        for operator in case.operators:
            taken = sites.seconds(operator)
            total += taken
            self._record(case, operator, taken)
        return total

    def latency(self, case: Case, operator: str) -> float:
        """Seconds: see bar 13 at the top of this file."""
        decode, block = case.batch.phase == DECODE, case.block if operator == "rotate" else 0
        key = (operator, decode, block)
        if key not in self._latencies:
            rows = case.batch.rows if decode else min(case.batch.rows, MOST_DECODE_ROWS + 1)
            shared = operator.startswith("shared")
            method = Method("least", rank=int(not shared and not block), basis_rank=int(shared), block=block)
            module = min(self.model.modules, key=lambda module: module.in_features * sum(module.widths))
            least = Case(Batch(DECODE if decode else PREFILL, rows, 1), method, module, self.dtype)
            sites = MeasuredSites(least, layers=1 if INTERPRETED else None)
            sites.check(operator)
            sites.calm()
            self._latencies[key] = max(0.0, sites.seconds(operator) - self.moving(least, operator))
            print(f"{'decode' if decode else 'prefill'} {operator}: {self._latencies[key] * 1e6:.2f} us latency")
        return self._latencies[key]

    def moving(self, case: Case, operator: str) -> float:
        """Seconds that the bytes of a call take, beyond a launch."""
        in_place = case.in_place(operator)
        copied = self.copies.seconds(case.moved(operator) - in_place, self.launch)
        return copied + self.passes.seconds(in_place, self.launch)

    def _record(self, case: Case, operator: str, taken: float) -> None:
        moved = case.moved(operator)
        least = moved / self.copies.bandwidth
        row = {
            "date": datetime.date.today().isoformat(),
            "commit": self.arguments.commit,
            "gpu": self.gpu,
            "model": self.model.name,
            "dtype": self.arguments.dtype,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "operator": operator,
            "phase": case.batch.phase,
            "rows": case.batch.rows,
            "adapters": case.batch.adapters,
            "method": case.method.name,
            "module": case.module.name,
            "microseconds": round(taken * 1e6, 3),
            "bytes": moved,
            "microseconds_by_bytes": round(least * 1e6, 3),
            "microseconds_by_moving": round(self.moving(case, operator) * 1e6, 3),
            "microseconds_latency": round(self.latency(case, operator) * 1e6, 3),
        }
        self.rows.append(row)
        self._writer.writerow(row)
        self._file.flush()
        print(
            f"{case.batch.phase:8} {case.batch.rows:5} of {case.batch.adapters:2} {case.method.name:10} "
            f"{case.module.name:13} {operator:13} {taken * 1e6:8.2f} us, {moved / 1e6:8.2f} MB take "
            f"{least * 1e6:7.2f} us, {taken / least:5.2f} times",
            flush=True,
        )

    def report(self) -> None:
        """Prints the bars and writes ``operators.md``."""
        launch_us = self.launch * 1e6
        lines = [
            "# The operators against their bytes",
            "",
            f"{datetime.date.today().isoformat()}, {self.gpu}, commit {self.arguments.commit}, "
            f"torch {torch.__version__}, triton {triton.__version__}.",
            f"{self.model.name} shapes, {self.arguments.dtype}. A launch takes {launch_us:.2f} µs, a large copy moves "
            f"{self.copies.bandwidth / 1e12:.2f} TB/s.",
            "Made by `benchmarks/operators.py`, which says what is measured; all figures are in `operators.csv`.",
            "",
            "| bar | what | figure | limit | met | remark |",
            "|---|---|---|---|---|---|",
            *(bar.row() for bar in bars(self.rows, launch_us)),
            "",
            "Bar 13 in parts:",
            "",
            "| phase | operator | rows | median error | largest |",
            "|---|---|---|---|---|",
            *error_table(self.rows, launch_us),
        ]
        text = "\n".join(lines) + "\n"
        (self.out / "operators.md").write_text(text, encoding="utf-8")
        print(text)


def device_name() -> str:
    return "CPU" if INTERPRETED else torch.cuda.get_device_name()


def batches_of(arguments: argparse.Namespace) -> list[tuple[Batch, list[Method]]]:
    """Those that are asked for."""
    found = []
    for batch in SMOKE_BATCHES if arguments.smoke else BATCHES:
        methods = [method for method in methods_of(batch) if arguments.method in (None, method.name)]
        if arguments.phase in (None, batch.phase) and methods:
            found.append((batch, [small(method) for method in methods] if arguments.smoke else methods))
    return found


def small(method: Method) -> Method:
    """The same with ranks of at most 20: the interpreter is slow."""
    return replace(method, rank=min(method.rank, 20), basis_rank=min(method.basis_rank, 20))


def compile_all(arguments: argparse.Namespace) -> None:
    """Compiles what will be measured, several processes at once. Chunks have the kernels of prefill."""
    model: ModelShape = MODELS[arguments.model]
    dtype = getattr(torch, arguments.dtype)
    jobs = [
        Case(batch, method, module, dtype)
        for batch, methods in batches_of(arguments)
        if batch.phase != CHUNK
        for method, module in product(methods, model.modules)
    ]
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))


def _compile(case: Case) -> None:
    if not case.operators:
        return
    sites = MeasuredSites(case, layers=1)
    for operator in case.operators:
        with suppress(RuntimeError, triton.TritonError):  # reported when it is measured
            KERNELS[operator](*sites.arguments(operator, 0, sites.output(operator)))
    torch.cuda.synchronize()


def run(bench: Bench) -> None:
    """Measures until all is done or the deadline has passed."""
    for batch, methods in batches_of(bench.arguments):
        totals = dict.fromkeys(methods, 0.0)
        # Methods that are compared with each other come one after the other.
        for module, method in product(bench.model.modules, methods):
            case = Case(batch, method, module, bench.dtype)
            if bench.late:
                print(f"the deadline of {bench.arguments.deadline} s has passed")
                return
            if case.operators:
                totals[method] += bench.measure(case)
        for method, total in totals.items():
            print(
                f"{batch.phase:8} {batch.rows:5} of {batch.adapters:2} {method.name:10} all layers of the model: "
                f"{total * bench.model.layers * 1e3:.3f} ms"
            )


def earlier_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Of ``--regression``, what this run measures too, by its options, on the same kind of GPU."""
    model = "tiny" if arguments.smoke else arguments.model
    setting = (device_name(), model, arguments.dtype)
    for row in read_rows(arguments.regression):
        asked = arguments.method in (None, row["method"]) and arguments.phase in (None, row["phase"])
        if asked and tuple(row[name] for name in SETTING) == setting:
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for operators.csv and operators.md")
    parser.add_argument("--commit", default="unknown", help="what is measured, for the report")
    parser.add_argument("--regression", type=Path, metavar="FILE", help="an earlier operators.csv to compare with")
    parser.add_argument("--model", choices=list(MODELS), default="Llama-3.1-8B")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--method", choices=[method.name for method in METHODS], help="only this one")
    parser.add_argument("--phase", choices=[DECODE, CHUNK, PREFILL], help="only this one")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile; 0 compiles when it measures")
    parser.add_argument("--deadline", type=float, default=110, help="seconds")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    arguments = parser.parse_args()

    earlier = []
    if arguments.regression:  # read first: it may be the file that this run writes
        earlier = list(earlier_rows(arguments))
        if not earlier:
            parser.error(f"{arguments.regression} has no row of {device_name()}, {arguments.model}, {arguments.dtype}")
    torch.manual_seed(0)
    bench = Bench(arguments)
    if arguments.workers and not INTERPRETED:
        compile_all(arguments)
        print(f"compiled in {time.monotonic() - bench.began:.1f} s")
    try:
        run(bench)
    finally:
        bench.report()
    slower = regressions(bench.rows, earlier)
    for line in slower:
        print(f"regression: {line}")
    if earlier and not slower:
        print(f"none of {len(earlier)} operators is more than 10 % slower")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
