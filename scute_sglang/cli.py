"""The command ``scute``: what an adapter is, whether a server will serve it and what that takes, and how to bring it
into Scute's format.

SGLang is never imported, and transformers only for a base model, so that a look at a file takes no longer than torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from scute_converter import Adapter, AdapterError, NormalForm, load, native
from scute_converter.files import BIN, CONFIG, MOST_CONFIG, SAFETENSORS, read_json
from scute_converter.registry import METHODS
from scute_sglang import fit, options, plan
from scute_sglang.base_folder import BaseFolder, BaseModelError
from scute_sglang.convert import check_base_samples, with_sizes
from scute_sglang.convert import convert as convert_adapter

# Bytes of a number in fp16 and bf16, the types that an adapter is served in.
SERVED_BYTES = 2

_PLAN_WIDTH = 120  # of the tables of a large model
_UNITS = ("bytes", "KB", "MB", "GB", "TB")

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def scute() -> None:
    """Scute on SGLang: PEFT adapters of many methods, served exactly, in one batch."""


@contextmanager
def _refusals() -> Iterator[None]:
    """A refused adapter or base model, or a full disk, ends the command with the reason and exit code 1."""
    try:
        yield
    except (AdapterError, BaseModelError) as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"not written: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the adapter, as PEFT saves it or converted.")
    ],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Check it against this base model too: a folder, or an id on the Hub."),
    ] = None,
) -> None:
    """Show what an adapter changes and what serving it takes, or why it is refused.

    [bold]Example[/bold]

        scute inspect ./my-adapter --base ./my-model

    With [bold]--base[/bold] the verdict is that of a server of this model: modules, shapes, biases and rank. Its
    weights are not loaded.

    Slots that are [bold]live[/bold] are applied to every token; what is [bold]folded[/bold] is part of another slot and
    costs nothing. A B: low-rank pair. s: output scale. g: input scale. R(k): rotation of the input in blocks of k
    features. d e: vectors around a shared pair. bias: output shift.

    Exit code 1: the adapter is refused. Its method is shown if its config says it, and the reason on standard error.
    """
    console = Console()
    with _refusals():
        try:
            adapter, base_notes = (load(folder), []) if base is None else _checked(folder, BaseFolder.open(base))
        except AdapterError:
            if method := _method_of(folder):
                console.print(f"[bold]{escape(method)}[/bold]")
            raise
    weights = next(folder / file for file in (native.WEIGHTS, SAFETENSORS, BIN) if (folder / file).exists())
    console.print(f"[bold]{adapter.method}[/bold], {adapter.parameters:,} trained parameters")
    console.print(f"stored: {weights.stat().st_size:,} bytes in {weights.name}")
    own, shared = sum(map(served_elements, adapter.forms.values())), sum(basis_elements(adapter))
    known = all(form.in_features and form.out_features for form in adapter.forms.values() if form.fold is not None)
    console.print(f"served: {'' if known else 'at least '}{own * SERVED_BYTES:,} bytes in fp16 or bf16")
    if shared:
        console.print(f"shared: {shared * SERVED_BYTES:,} bytes, once for all adapters with the same projections")
    converted = weights.name == native.WEIGHTS
    console.print(_table(adapter, converted))
    if base is not None:
        fits = f"fits {base}: all {len(adapter.forms)} modules and their shapes"
        console.print(fits, markup=False, soft_wrap=True)
    for module, payload in adapter.payloads.items():
        console.print(f"note: the file holds {module} {tuple(payload.shape)}, which must equal that of the base model")
    for note in [*adapter.notes, *base_notes]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _method_of(folder: Path) -> str:
    """The method of an adapter that is refused: its one name, else the ``peft_type``, else ``""``."""
    try:
        peft_type = read_json(folder.name, folder, CONFIG, MOST_CONFIG).get("peft_type")
    except AdapterError:
        return ""
    if not isinstance(peft_type, str):
        return ""
    variants = METHODS[peft_type].variants if peft_type in METHODS else ()
    return variants[0].name if len(variants) == 1 else peft_type


def _checked(folder: Path, base: BaseFolder) -> tuple[Adapter, list[str]]:
    """The adapter, by the server's rules for this base model, and notes on what only the server knows."""
    name = folder.resolve().name
    # Like the server, which knows all linear layers of some families only.
    adapter = load(folder, name, base.shapes if base.known else None, base.dtype)
    fit.check(name, adapter, base.projections, options.DEFAULT_MAX_RANK)
    forms = {path: with_sizes(form, base.projections[path]) for path, form in adapter.forms.items()}
    adapter = replace(adapter, forms=forms)
    notes = []
    if not base.known:
        notes.append(f"which modules of {base.family} models can be adapted is known for certain to the server only")
    if base.quantised:
        notes.append("the base model is quantised: whether each of its layers can be adapted, the server knows only")
    sampled = any(form.base_sample is not None for form in adapter.forms.values())
    if sampled and base.has_weights and not base.quantised:
        check_base_samples(name, adapter, base)
    elif sampled:
        notes.append("whether it was converted for this very base model, the server knows only")
    return adapter, notes


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of the adapter.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; it must not exist or be empty.")],
    base: Annotated[str, typer.Option(metavar="MODEL", help="The base model: a folder, or an id on the Hub.")],
) -> None:
    """Write an adapter in Scute's own format, which a server loads without knowing the method.

    [bold]Example[/bold]

        scute convert ./my-dora ./my-dora-scute --base ./my-model

    What needs the base weights, such as DoRA's norms, is worked out with those of MODEL, once. A server whose base
    model is another one refuses what was made that way.

    Exit code 1: the adapter or the base model is refused, with the reason on standard error.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise typer.BadParameter(f"{destination} exists and is not empty", param_hint="DST")

    def progress(modules: Iterable[str]) -> Iterable[str]:
        return track(list(modules), "converting", console=Console(stderr=True), transient=True)

    with _refusals():
        adapter = convert_adapter(source, destination, BaseFolder.open(base), progress)
    size = (destination / native.WEIGHTS).stat().st_size
    typer.echo(f"{destination}: {adapter.method}, {len(adapter.forms)} modules, {size:,} bytes")


@app.command("plan")
def plan_command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL_CONFIG", help="The base model: its folder or config.json, or an id on the Hub."),
    ],
    folders: Annotated[list[Path], typer.Argument(metavar="ADAPTER...", help="Folders of adapters.")],
    gpu: Annotated[str, typer.Option(metavar="GPU", help=f"One of {', '.join(plan.GPUS)}.")] = "h200",
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests in the mixed batch, spread over the adapters in turn. Default: one each."),
    ] = None,
    tenants: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Numbers of adapters to show the memory of; may be repeated. Default: 16, 128, 1024."),
    ] = None,
) -> None:
    """Show what serving adapters on a base model takes, before anything is started or bought.

    [bold]Example[/bold]

        scute plan ./my-model/config.json ./my-lora ./my-vera --gpu a100 --requests 32 --tenants 500

    Needs neither a GPU nor the weights of the model. An adapter that the server would refuse is refused.

    First table: the device memory that an adapter takes, and what it adds to a decode step with one request of it:
    bytes moved, kernels launched, and milliseconds by the byte model, which are a lower bound: batches of 16 and more
    were measured to take 2 to 4 times as long. Last row: all adapters in one batch.

    Second table: the device memory of many adapters like each of these, with Scute; converted to LoRA, at the least
    rank that computes the same; and as LoRA in a stock SGLang server, which pads them to the largest rank.

    docs/plan.md has the formula, and what it leaves out.

    Exit code 1: an adapter or the base model is refused, with the reason on standard error.
    """
    if gpu not in plan.GPUS:
        raise typer.BadParameter(f"{gpu!r} is none of {', '.join(plan.GPUS)}", param_hint="--gpu")
    console = Console()
    if console.width < _PLAN_WIDTH:
        console = Console(width=_PLAN_WIDTH)  # a table that wraps is readable, one with numbers cut off is not
    found: list[plan.Tenant] = []
    notes: list[str] = []
    with _refusals():
        base = BaseFolder.open(model)
        served = plan.Model.of(base.projections)
        for folder in folders:
            adapter, of_adapter = _checked(folder, base)
            found.append(plan.Tenant.of(folder.resolve().name, adapter, served))
            notes += [f"{found[-1].name}: {note}" for note in [*adapter.notes, *of_adapter]]
            if found[-1].folds:
                notes.append(
                    f"{found[-1].name}: pairs are made with the base weight, and counted at their largest rank"
                )
    device = plan.GPUS[gpu]
    source = "measured" if device.copied else f"{plan.COPY_SHARE:.0%} of the data sheet's {device.sheet / 1e12:g}"
    console.print(f"[bold]{device.name}[/bold]: {device.bandwidth / 1e12:.2f} TB/s ({source}); fp16 or bf16, one GPU")
    console.print(_step_table(served, found, requests or len(found), device))
    bases = {key: size for tenant in found for key, size in tenant.bases.items()}
    for key, size in bases.items():
        users = ", ".join(tenant.name for tenant in found if key in tenant.bases)
        console.print(f"shared: {size:,} bytes, once for {users}", markup=False, soft_wrap=True)
    console.print(_memory_table(served, found, tenants or [16, 128, 1024]))
    console.print(f"beside it, a slot of --max-loras-per-batch takes {plan.slot_bytes(served):,} bytes")
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _step_table(model: plan.Model, tenants: list[plan.Tenant], requests: int, gpu: plan.Gpu) -> Table:
    """One row per adapter, and one for a batch of all."""
    shown = Table("adapter", "method", "rank")
    for heading in ("bytes resident", "bytes per step", "launches", "ms per step, at least"):
        shown.add_column(heading, justify="right")

    def cells(step: plan.Step) -> list[str]:
        return [f"{step.moved:,}", f"{step.launches:,}", f"{step.seconds * 1e3:.3f}"]

    for tenant in tenants:
        ranks = [*map(str, tenant.ranks), *(f"{rank} shared" for rank in tenant.shared_ranks)]
        step = plan.decode_step(model, [tenant], gpu)
        shown.add_row(escape(tenant.name), tenant.method, ", ".join(ranks), f"{tenant.resident:,}", *cells(step))
    shown.add_section()
    batch = list(islice(cycle(tenants), requests))
    resident = plan.arena_bytes({tenant.digest: tenant for tenant in tenants}.values())
    mixed = "1 request" if requests == 1 else f"{requests} requests"
    shown.add_row("all", mixed, "", f"{resident:,}", *cells(plan.decode_step(model, batch, gpu)))
    return shown


def _memory_table(model: plan.Model, tenants: list[plan.Tenant], numbers: list[int]) -> Table:
    """A section for each adapter, and one for all of them in turn; a row for each number of adapters like these."""
    shown = Table("adapters like", "rank as LoRA")
    for heading in ("adapters", "Scute", "as LoRA", "stock, padded"):
        shown.add_column(heading, justify="right")
    kinds = [(escape(tenant.name), [tenant]) for tenant in tenants]
    for name, alike in [*kinds, ("all, in turn", tenants)] if len(tenants) > 1 else kinds:
        ranks = "min(in, out): " if all(tenant.full_rank for tenant in alike) else ""
        ranks += _merge_numbers(rank for tenant in alike for rank in tenant.lora_ranks.values())
        for i, number in enumerate(numbers):
            held = list(islice(cycle(alike), number))
            shown.add_row(
                *((name, ranks) if i == 0 else ("", "")),
                f"{number:,}",
                _amount(plan.arena_bytes(held)),
                _amount(sum(tenant.lora for tenant in held)),
                _amount(number * plan.stock_slot_bytes(model, alike)),
            )
        shown.add_section()
    return shown


def _merge_numbers(values: Iterable[int]) -> str:
    """The values, or the least and the largest if there are many."""
    found = sorted(set(values))
    return ", ".join(map(str, found)) if len(found) <= 3 else f"{found[0]} – {found[-1]}"


def _amount(count: int) -> str:
    """Bytes with three digits: ``1.34 GB``."""
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}" if size < 999.5 else f"{size:,.0f} {_UNITS[unit]}"


def _table(adapter: Adapter, converted: bool) -> Table:
    """One row per projection (``q_proj``): the same projection of other layers may differ in rank and slots. What was
    folded when it was ``converted`` is not known."""
    projections: dict[str, list[NormalForm]] = defaultdict(list)
    for module, form in adapter.forms.items():
        projections[module.rpartition(".")[2]].append(form)
    table = Table("projection", "layers", "rank", "live", "folded", "bytes served")
    for name, forms in sorted(projections.items()):
        table.add_row(
            name,
            str(len(forms)),
            _merge(_rank(adapter, form) for form in forms),
            _merge(" ".join(_live(form)) for form in forms),
            "" if converted else _merge(_folded(form) for form in forms),
            f"{sum(map(served_elements, forms)) * SERVED_BYTES:,}",
        )
    return table


def _merge(values) -> str:
    return " / ".join(sorted(set(values)))


def _rank(adapter: Adapter, form: NormalForm) -> str:
    if form.shared:
        return f"{adapter.bases[form.shared.basis].a.shape[0]} shared"
    if form.fold:
        return str(form.fold.rank)
    return str(form.pair.rank) if form.pair else ""


def _live(form: NormalForm) -> list[str]:
    slots = []
    if form.rotation:
        slots.append("g" if form.rotation.block == 1 else f"R({form.rotation.block})")
    if form.scale_delta is not None or form.deferred is not None:
        slots.append("s")
    if _shift(form) is not None:
        slots.append("bias")
    if form.pair or form.fold:
        slots.append("A B")
    if form.shared:
        slots.append("d e")
    return slots


def _folded(form: NormalForm) -> str:
    if form.fold is not None:
        return "the base weight into A B"
    if form.pair is None:
        return ""
    return "alpha/r and s into B" if form.deferred is not None else "alpha/r into B"


def served_elements(form: NormalForm) -> int:
    """Numbers of the slots of one projection. A deferred scale has one per output feature, like its magnitude, and a
    pair that is still to be folded, at its largest rank, replaces the one that is stored."""
    tensors = [form.scale_delta, _shift(form)]
    tensors += [form.rotation.delta] if form.rotation else []
    tensors += [form.pair.a, form.pair.b] if form.pair and not form.fold else []
    tensors += [form.shared.d, form.shared.e] if form.shared else []
    deferred = form.out_features if form.deferred is not None else 0
    if form.fold is not None:
        deferred += form.fold.rank * (form.in_features + form.out_features)
    return deferred + sum(tensor.numel() for tensor in tensors if tensor is not None)


def _shift(form: NormalForm) -> torch.Tensor | None:
    """A tensor as long as the output shift that is served, None if there is none."""
    changes = (form.bias.replace, form.bias.add, form.bias.scale_delta)
    return next((change for change in changes if change is not None), None)


def basis_elements(adapter: Adapter) -> list[int]:
    return [basis.a.numel() + basis.b.numel() for basis in adapter.bases.values()]


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
