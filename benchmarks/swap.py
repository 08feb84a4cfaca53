"""Time to bring an adapter to the device, against one pinned copy of as many bytes (bar 17).

    PYTHONPATH=. python benchmarks/swap.py --out benchmarks/results/h200 --commit HASH

Needs a CUDA GPU and the project installed. The memory pool of a server has one slot, and two adapters of a kind take
turns in it, so each ``bring_in`` evicts the other and copies a block and its rows of the adapter table. Two figures,
each the median of ``--repeats``: seconds until the device is done, from the call on, as a request would wait for it;
and seconds on the device alone, between the first and the last copy. The copy beside them moves one pinned block of
the same size in the same way. Writes ``swap.csv`` and prints a table. ``--device cpu`` tries it out.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from scute_kernels import table
from scute_patches import sgl_kernel
from shapes import MODELS, ModelShape

sgl_kernel.install()  # the pool derives from a class of SGLang, whose import needs it where there is no CUDA

from scute_sglang.arena import Arena  # noqa: E402
from scute_sglang.memory_pool import LoadedAdapter, ScuteMemoryPool  # noqa: E402
from scute_sglang.packing import PackedAdapter, PackedBasis  # noqa: E402

BAR = 1.25
KINDS = ("(IA)3", "VeRA r256", "LoRA r16", "LoRA r64")
DTYPE = torch.float16


def widths(model: ModelShape) -> list[tuple[int, int]]:
    """Inputs and outputs of every site."""
    return [(module.in_features, width) for module in model.modules for width in module.widths] * model.layers


def make(kind: str, uid: str, model: ModelShape, basis: PackedBasis, pinned: bool) -> LoadedAdapter:
    """An adapter of this kind on every site ((IA)3: k, v and the inputs of down) with numbers of its own."""
    name, _, rank_text = kind.partition(" r")
    sites = widths(model)
    rows = torch.full((len(sites), table.FIELDS), -1, dtype=torch.int64)
    rows[:, [table.RANK, table.BLOCK, table.BLOCK_STRIDE]] = 0
    end = 0

    def put(elements: int) -> int:
        nonlocal end
        offset = end
        end = -(-(end + elements) // 8) * 8
        return offset

    per_layer = len(sites) // model.layers
    for number, (inputs, outputs) in enumerate(sites):
        row, place = rows[number], number % per_layer
        if name == "LoRA":
            rank = int(rank_text)
            row[table.RANK], row[table.A], row[table.B] = rank, put(rank * inputs), put(rank * outputs)
        elif name == "VeRA":
            row[table.BASIS], row[table.D], row[table.E] = 0, put(int(rank_text)), put(outputs)
        elif place in (1, 2):
            row[table.SCALE] = put(outputs)
        elif place == per_layer - 1:
            row[table.ROTATION], row[table.BLOCK], row[table.BLOCK_STRIDE] = put(inputs), 1, 1
    block = torch.randn(end).to(DTYPE)
    vera = name == "VeRA"
    return LoadedAdapter(
        uid=uid,
        name=uid,
        method=name,
        content=uid,
        packed=PackedAdapter(block.pin_memory() if pinned else block, rows, ("basis",) if vera else ()),
        bases={"basis": basis} if vera else {},
        basis_views={"basis": ("basis", 0)} if vera else {},
        module_of_site=range(len(sites)),
    )


def measure(actions: Sequence[Callable[[int], None]], repeats: int, device: torch.device) -> list[tuple[float, float]]:
    """Of each action, median seconds of ``action(n)`` until the device is done, and on the device alone. They take
    turns, since the host is faster at some times than at others."""
    times: list[list[tuple[float, float]]] = [[] for _ in actions]
    for n in range(repeats + 2):
        for action, measured in zip(actions, times, strict=True):
            measured.append(_times(action, n, device))
    medians = []
    for measured in times:
        waited, busy = zip(*measured[2:], strict=True)  # the first ones allocate
        medians.append((statistics.median(waited), statistics.median(busy)))
    return medians


def _times(action: Callable[[int], None], n: int, device: torch.device) -> tuple[float, float]:
    if device.type == "cpu":
        began = time.perf_counter()
        action(n)
        taken = time.perf_counter() - began
        return taken, taken
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    first.record()
    action(n)
    last.record()
    last.synchronize()
    return time.perf_counter() - began, first.elapsed_time(last) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for swap.csv")
    parser.add_argument("--model", choices=list(MODELS), default="Llama-3.1-8B")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--commit", default="", help="written into the table")
    arguments = parser.parse_args()
    device, model = torch.device(arguments.device), MODELS[arguments.model]
    cuda = device.type == "cuda"
    where = torch.cuda.get_device_name() if cuda else "CPU"

    rank = 256
    basis_row = torch.zeros(table.BASIS_FIELDS, dtype=torch.int64)
    wide_in, wide_out = (max(of_site[side] for of_site in widths(model)) for side in (0, 1))
    basis_row[[table.BASIS_A_STRIDE, table.BASIS_B, table.BASIS_B_STRIDE, table.BASIS_RANK]] = torch.tensor(
        [wide_in, rank * wide_in, wide_out, rank]
    )
    block = torch.zeros(rank * (wide_in + wide_out), dtype=DTYPE)
    basis = PackedBasis(block.pin_memory() if cuda else block, basis_row)
    shown = Table("adapter", "MB", "swap-in ms", "copy ms", "ratio", "on the device: swap-in", "copy", "ratio", "met")
    found = []
    for kind in KINDS:
        pair = {uid: make(kind, uid, model, basis, cuda) for uid in ("one", "other")}
        anchor = make("VeRA r256", "anchor", model, basis, cuda)  # keeps the basis on the device, as in a server
        adapters = {**pair, anchor.uid: anchor}
        size = pair["one"].packed.block
        capacity = sum(Arena(0, DTYPE, "cpu").footprint(n) for n in {**pair["one"].blocks, **anchor.blocks}.values())
        origins = torch.zeros(len(widths(model)), 2, dtype=torch.int64)
        pool = ScuteMemoryPool(origins, 2, DTYPE, device, capacity, "lru")
        pool.bring_in(["anchor"], adapters)
        target = torch.empty_like(size, device=device)

        def swap(n: int, pool: ScuteMemoryPool = pool, adapters: dict[str, LoadedAdapter] = adapters) -> None:
            pool.remove_lora("other" if n % 2 else "one")
            pool.bring_in(["one" if n % 2 else "other"], adapters)

        def copy(_: int, target: torch.Tensor = target, size: torch.Tensor = size) -> None:
            target.copy_(size, non_blocking=True)

        pool.bring_in(["one"], adapters)
        swapped, copied = measure([swap, copy], arguments.repeats, device)
        ratios = [one / other for one, other in zip(swapped, copied, strict=True)]
        megabytes = size.numel() * size.itemsize / 1e6
        times = (f"{swapped[0] * 1e3:.3f}", f"{copied[0] * 1e3:.3f}", f"{ratios[0]:.2f}")
        on_device = (f"{swapped[1] * 1e3:.3f}", f"{copied[1] * 1e3:.3f}", f"{ratios[1]:.2f}")
        shown.add_row(kind, f"{megabytes:.2f}", *times, *on_device, "yes" if ratios[0] <= BAR else "no")
        found.append(
            {
                "date": datetime.date.today().isoformat(),
                "gpu": where,
                "commit": arguments.commit,
                "model": model.name,
                "adapter": kind,
                "bytes": size.numel() * size.itemsize,
                "swap_seconds": swapped[0],
                "copy_seconds": copied[0],
                "swap_device_seconds": swapped[1],
                "copy_device_seconds": copied[1],
            }
        )
        del pool, target
    shown.title = f"Bar 17: swap-in against one pinned copy, at most {BAR} ({where}, commit {arguments.commit or '-'})"
    Console(width=140).print(shown)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "swap.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys())
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
