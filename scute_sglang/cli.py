"""The command ``scute``: what an adapter is, and whether it can be served, without a server or a base model."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from scute_converter import Adapter, AdapterError, NormalForm, load
from scute_converter.checkpoint import BIN, SAFETENSORS

# Bytes of a number in fp16 and bf16, the types that an adapter is served in.
_SERVED_BYTES = 2

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def scute() -> None:
    """Scute on SGLang: PEFT adapters of many methods, served exactly, in one batch."""


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with adapter_config.json and the weights.")],
) -> None:
    """Show what an adapter changes and what serving it takes, or why it is refused.

    [bold]Example[/bold]

        scute inspect ./my-adapter

    Slots that are [bold]live[/bold] are applied to every token; what is [bold]folded[/bold] is part of another slot and
    costs nothing. A B: low-rank pair. s: output scale. g: input scale. R(k): rotation of the input in blocks of k
    features. d e: vectors around a shared pair. bias: output shift.

    Exit code 1: the adapter is refused, with the reason on standard error.
    """
    try:
        adapter = load(folder)
    except AdapterError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(1) from None
    weights = folder / SAFETENSORS if (folder / SAFETENSORS).exists() else folder / BIN
    console = Console()
    console.print(f"[bold]{adapter.method}[/bold], {adapter.parameters:,} trained parameters")
    console.print(f"stored: {weights.stat().st_size:,} bytes in {weights.name}")
    own, shared = sum(map(_elements, adapter.forms.values())), sum(_basis_elements(adapter))
    console.print(f"served: {own * _SERVED_BYTES:,} bytes in fp16 or bf16")
    if shared:
        console.print(f"shared: {shared * _SERVED_BYTES:,} bytes, once for all adapters with the same projections")
    console.print(_table(adapter))
    for module, payload in adapter.payloads.items():
        console.print(f"note: the file holds {module} {tuple(payload.shape)}, which must equal that of the base model")
    for note in adapter.notes:
        console.print(f"note: {note}")


def _table(adapter: Adapter) -> Table:
    """One row per projection (``q_proj``): the same projection of other layers may differ in rank and slots."""
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
            _merge(_folded(form) for form in forms),
            f"{sum(map(_elements, forms)) * _SERVED_BYTES:,}",
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
    if form.bias.replace is not None or form.bias.add is not None:
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


def _elements(form: NormalForm) -> int:
    """Numbers of the slots of one projection. A deferred scale has one per output feature, like its magnitude, and a
    pair that is still to be folded replaces the one that is stored."""
    tensors = [form.scale_delta, form.bias.replace if form.bias.add is None else form.bias.add]
    tensors += [form.rotation.delta] if form.rotation else []
    tensors += [form.pair.a, form.pair.b] if form.pair and not form.fold else []
    tensors += [form.shared.d, form.shared.e] if form.shared else []
    deferred = form.out_features if form.deferred is not None else 0
    if form.fold is not None:
        deferred += form.fold.rank * (form.in_features + form.out_features)
    return deferred + sum(tensor.numel() for tensor in tensors if tensor is not None)


def _basis_elements(adapter: Adapter) -> list[int]:
    return [basis.a.numel() + basis.b.numel() for basis in adapter.bases.values()]


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
