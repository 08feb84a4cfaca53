"""Time of every operator against the time that its bytes need.

    PYTHONPATH=kernels python benchmarks/kernels.py --model Llama-3.1-8B --out kernels.csv

Needs a CUDA GPU, torch and Triton. A CUDA graph holds one call per layer, each with parts of its own, so what a call
reads has left the L2 cache since the last replay whenever the parts of all layers exceed it. (In serving it always has:
the base weights pass through between two calls.) Times are medians of replays, per call, and include the gap between
two launches of a graph. Activations and scratch are shared by the calls, hence warm, as they are in serving.
``bytes`` counts every byte once, the least that a kernel can move; ``ratio`` is time over bytes / copy bandwidth.
Before it is timed, the result of each operator is compared with its reference.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton

import scute_kernels
from scute_kernels import launch, table
from scute_kernels.expand import reference as expand_reference
from scute_kernels.plan import most_tiles, tile_rows
from scute_kernels.rotate import reference as rotate_reference
from scute_kernels.shrink import reference as shrink_reference
from shapes import MODELS, ModelShape, Module

ops = torch.ops.scute
REPLAYS = 20
COLD_BYTES = 512 << 20  # parts of all layers together: several times the L2 of any GPU
MOST_LAYERS = 64


@dataclass(frozen=True)
class Method:
    """The parts of an adapter at every site. (IA)3 has the scale on k and v, the input scale on down_proj."""

    name: str
    rank: int = 0
    scale: bool = False
    basis_rank: int = 0
    block: int = 0


METHODS = (
    Method("LoRA r16", rank=16),
    Method("LoRA r64", rank=64),
    Method("LoRA r256", rank=256),
    Method("DoRA r16", rank=16, scale=True),
    Method("(IA)3", scale=True, block=1),
    Method("VeRA r256", basis_rank=256),
    Method("OFT b32", block=32),
)


@dataclass(frozen=True)
class Phase:
    name: str
    requests: int  # one adapter each
    rows: int  # of a request


PHASES = (Phase("decode", 16, 1), Phase("prefill", 4, 2048))


class Bench:
    """One module of a model, adapted by one method in every layer, and a batch for it."""

    def __init__(self, model: ModelShape, module: Module, method: Method, phase: Phase, dtype: torch.dtype) -> None:
        self.module, self.method, self.dtype = module, method, dtype
        self.rows = phase.requests * phase.rows
        self.slots = phase.requests
        self.n_slices = len(module.widths)
        self.offsets = (0, *accumulate(module.widths))
        layer_bytes = self.slots * dtype.itemsize * sum(self._site_elements(i) for i in range(self.n_slices))
        self.layers = min(MOST_LAYERS, max(4, -(-COLD_BYTES // max(layer_bytes, 1))))
        self._fill()

        groups = [0 if method.rank == 0 and method.block <= 1 else -1] * self.slots
        packed = scute_kernels.build_plan(range(self.slots), [phase.rows] * self.slots, groups, self.rows).cuda()
        tiles = most_tiles(self.rows, tile_rows(self.rows), self.slots)
        plan = scute_kernels.view_plan(packed, self.rows, self.table.new_empty(tiles, *self.table.shape[1:]))
        plan_arguments = (plan.row_slot, plan.order, plan.tiles, plan.tile_rows, plan.routes)
        ops.route(*plan_arguments, self.table)
        self.common = (*plan_arguments, self.arena, self.table, self.bases, self.origins)

        max_rank = max(method.rank, method.basis_rank)
        split = launch.shrink_split(self.rows, dtype, module.in_features) if max_rank else 1
        self.x = torch.randn(self.rows, module.in_features, dtype=dtype, device="cuda")
        self.h = torch.randn(self.rows, self.offsets[-1], dtype=dtype, device="cuda")
        self.v = torch.zeros(split, self.rows, self.n_slices, method.rank, device="cuda")
        self.u = torch.zeros(split, self.rows, self.n_slices, method.basis_rank, device="cuda")
        self.split = split

    def _scaled(self, i: int) -> bool:
        if self.method.name != "(IA)3":
            return self.method.scale
        return self.module.name == "qkv_proj" and i > 0

    def _block(self) -> int:
        return 0 if self.method.block == 1 and self.module.name != "down_proj" else self.method.block

    def _site_elements(self, i: int) -> int:
        """Elements of the parts of one adapter at slice ``i``."""
        width, in_features, method = self.module.widths[i], self.module.in_features, self.method
        pair = method.rank * (in_features + width)
        vectors = method.basis_rank + width if method.basis_rank else 0
        return pair + vectors + (width if self._scaled(i) else 0) + in_features * self._block()

    def _fill(self) -> None:
        method, in_features = self.method, self.module.in_features
        sites = self.layers * self.n_slices
        parts = torch.full((self.slots, sites, table.FIELDS), -1, dtype=torch.int64)
        parts[..., table.RANK] = method.rank
        parts[..., table.BLOCK] = self._block()
        end = 0

        def put(elements: int) -> int:
            nonlocal end
            offset = end
            end = -(-(end + elements) // 128) * 128
            return offset

        for site in range(sites):
            width = self.module.widths[site % self.n_slices]
            for slot in range(self.slots):
                row = parts[slot, site]
                if method.rank:
                    row[table.A] = put(method.rank * in_features)
                    row[table.B] = put(method.rank * width)
                if self._scaled(site % self.n_slices):
                    row[table.SCALE] = put(width)
                if method.basis_rank:
                    row[table.BASIS] = 0
                    row[table.D], row[table.E] = put(method.basis_rank), put(width)
                if k := self._block():
                    row[table.ROTATION], row[table.BLOCK_STRIDE] = put(in_features * k), k * k
        bases = torch.zeros(1, table.BASIS_FIELDS, dtype=torch.int64)
        if method.basis_rank:
            widest = max(self.module.widths)
            bases[0, table.BASIS_A], bases[0, table.BASIS_A_STRIDE] = put(method.basis_rank * in_features), in_features
            bases[0, table.BASIS_B], bases[0, table.BASIS_B_STRIDE] = put(method.basis_rank * widest), widest
            bases[0, table.BASIS_RANK] = method.basis_rank
        self.arena = torch.empty(max(end, 128), dtype=self.dtype, device="cuda").normal_(std=0.02)
        self.table, self.bases = parts.cuda(), bases.cuda()
        self.origins = torch.zeros(sites, 2, dtype=torch.int64, device="cuda")

    def bytes_of(self, operator: str) -> int:
        """What one call must move: parts of every adapter, activations in and out, scratch."""
        method, size = self.method, self.dtype.itemsize
        in_features, width = self.module.in_features, self.offsets[-1]
        x, h = self.rows * in_features * size, self.rows * width * size
        ranks = method.rank * self.n_slices + method.basis_rank
        scratch = self.split * self.rows * ranks * 4
        widest = max(self.module.widths)
        if operator == "rotate":
            return x + self.n_slices * (x + self.slots * in_features * self._block() * size)
        if operator == "shrink":
            own = self.slots * self.n_slices * method.rank * in_features
            return x + (own + method.basis_rank * in_features) * size + scratch
        scaled = sum(w for i, w in enumerate(self.module.widths) if self._scaled(i))
        touched = scaled if method.rank == 0 and method.basis_rank == 0 else width
        vectors = scaled + (width + method.basis_rank * self.n_slices if method.basis_rank else 0)
        parts = self.slots * (method.rank * width + vectors) + method.basis_rank * widest
        return parts * size + scratch + 2 * h * touched // width

    def calls(self) -> dict[str, Callable[[int], None]]:
        """The operators that this module needs, as functions of the layer."""
        calls: dict[str, Callable[[int], None]] = {}
        if self._block():
            out = torch.empty(self.n_slices, *self.x.shape, dtype=self.dtype, device="cuda")
            calls["rotate"] = lambda layer: ops.rotate(self.x, *self.common, layer * self.n_slices, out)
        if self.v.numel() or self.u.numel():
            calls["shrink"] = lambda layer: ops.shrink(self.x, *self.common, layer * self.n_slices, self.v, self.u)
        if "shrink" in calls or any(self._scaled(i) for i in range(self.n_slices)):
            calls["expand"] = lambda layer: ops.expand(
                self.h, self.v, self.u, *self.common, layer * self.n_slices, self.offsets
            )
        return calls

    def check(self) -> None:
        """Compares every operator with its reference at the last layer, and stops the benchmark if they differ."""
        site = (self.layers - 1) * self.n_slices
        if self._block():
            out = torch.empty(2, self.n_slices, *self.x.shape, dtype=self.dtype, device="cuda")
            ops.rotate(self.x, *self.common, site, out[0])
            rotate_reference.rotate(self.x, *self.common, site, out[1])
            torch.testing.assert_close(out[0], out[1])
        v, u, h = self.v.clone(), self.u.clone(), self.h.clone()
        if v.numel() or u.numel():
            ops.shrink(self.x, *self.common, site, self.v, self.u)
            shrink_reference.shrink(self.x, *self.common, site, v, u)
            torch.testing.assert_close(self.v.sum(0), v.sum(0), atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(self.u.sum(0), u.sum(0), atol=1e-3, rtol=1e-3)
        ops.expand(h, self.v, self.u, *self.common, site, self.offsets)
        expected = self.h.clone()
        expand_reference.expand(expected, v, u, *self.common, site, self.offsets)
        torch.testing.assert_close(h, expected, atol=0.03, rtol=0.02)


def seconds(call: Callable[[int], object], layers: int) -> float:
    """Median time of one call, in a CUDA graph that holds one call per layer."""
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


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, read and write counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda _: target.copy_(source), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="Llama-3.1-8B")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--method", choices=[method.name for method in METHODS], help="only this one")
    parser.add_argument("--phase", choices=[phase.name for phase in PHASES], help="only this one")
    parser.add_argument("--out", help="CSV file to write")
    arguments = parser.parse_args()

    model = MODELS[arguments.model]
    dtype = getattr(torch, arguments.dtype)
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    print(
        f"{'phase':8} {'method':10} {'module':13} {'operator':8} {'us':>8} {'MB':>8} {'us by bytes':>11} {'ratio':>6}"
    )
    results = []
    for phase in PHASES:
        for method in METHODS:
            if arguments.phase not in (None, phase.name) or arguments.method not in (None, method.name):
                continue
            total = 0.0
            for module in model.modules:
                bench = Bench(model, module, method, phase, dtype)
                calls = bench.calls()
                if calls:
                    bench.check()
                for operator, call in calls.items():
                    time = seconds(call, bench.layers)
                    moved = bench.bytes_of(operator)
                    least = moved / bandwidth
                    total += time
                    print(
                        f"{phase.name:8} {method.name:10} {module.name:13} {operator:8} {time * 1e6:8.2f} "
                        f"{moved / 1e6:8.2f} {least * 1e6:11.2f} {time / least:6.2f}",
                        flush=True,
                    )
                    results.append(
                        {
                            "date": datetime.date.today().isoformat(),
                            "gpu": device,
                            "torch": torch.__version__,
                            "triton": triton.__version__,
                            "model": model.name,
                            "dtype": arguments.dtype,
                            "phase": phase.name,
                            "method": method.name,
                            "module": module.name,
                            "operator": operator,
                            "microseconds": round(time * 1e6, 3),
                            "bytes": moved,
                            "microseconds_by_bytes": round(least * 1e6, 3),
                        }
                    )
                del bench, calls
            print(f"{phase.name:8} {method.name:10} all layers of the model: {total * model.layers * 1e3:.3f} ms")
    if arguments.out:
        with open(arguments.out, "w", newline="") as file:
            writer = csv.DictWriter(file, results[0].keys())
            writer.writeheader()
            writer.writerows(results)


if __name__ == "__main__":
    main()
