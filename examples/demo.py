"""The demo: adapters of six methods and the base model in one batch of a real server, each compared with PEFT.

    make demo

Writes a small base model and the adapters with transformers and PEFT (nothing is downloaded), starts SGLang with
``--lora-backend scute`` on the GPU if there is one and on the CPU if not, and exits non-zero if a row is not exact.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from adapters import RECIPES, Oracle
from models import write_model
from scute_converter import load
from serving import Server, cpu_arguments, cpu_environment, serve

TABLE_WIDTH = 112
SHOWN = ("lora", "lora_rs", "dora", "ia3", "vera", "oft", "oft_cayley")
PROMPTS = ("Which river is the longest?", "2 + 2 =", "Adapters share one base model;")
# fp32 on the CPU: differences of a log-probability that summation order explains. fp16 on a GPU: share of the effect.
EXACT_FP32 = 1e-4
EXACT_SHARE_FP16 = 0.015


@dataclass(frozen=True)
class Row:
    """Error and effect are means over the tokens of all prompts; ``largest`` is the largest error."""

    name: str
    method: str
    parameters: str
    served: str
    effect: float
    error: float
    largest: float
    exact: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write model, adapters and log there, and keep them")
    kept: Path | None = parser.parse_args().keep
    if kept is not None:
        if kept.exists() and any(kept.iterdir()):
            parser.error(f"{kept} is not empty: name a new folder")
        kept.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # of transformers, which would draw one per model
    console = Console()
    if console.width < TABLE_WIDTH:
        console = Console(width=TABLE_WIDTH)  # a wide table that wraps is readable, one with numbers cut off is not
    gpu = torch.cuda.is_available()
    console.print(f"[bold]Scute demo[/bold] on {torch.cuda.get_device_name() if gpu else 'the CPU (no GPU found)'}")
    with tempfile.TemporaryDirectory(prefix="scute-demo-") if kept is None else nullcontext(kept) as folder:
        work = Path(folder)
        with console.status("writing a small Llama with transformers"):
            size = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512} if gpu else {}
            model = write_model(work / "base", "llama", tied=False, **size)
        for name in SHOWN:
            with console.status(f"writing the adapter {name} with PEFT"):
                RECIPES[name].write(work / name, work / "base")
        arguments = ["--dtype", "float16", "--mem-fraction-static", "0.3"] if gpu else cpu_arguments()
        environment = None if gpu else cpu_environment()
        with (
            console.status("starting the server (one to three minutes)"),
            serve(
                work / "base",
                work / "server.log",
                *arguments,
                adapters={name: work / name for name in SHOWN},
                environment=environment,
            ) as server,
        ):
            console.print(f"server ready at {server.url} with {len(SHOWN)} adapters")
            rows = compare(server, work, gpu, model.dtype if not gpu else torch.float16)
    console.print(table(rows))
    if kept is not None:
        console.print(f"kept: the model {kept / 'base'}, and adapters beside it. Next:", soft_wrap=True)
        console.print(f"    scute inspect {kept / 'oft'} --base {kept / 'base'}", soft_wrap=True, markup=False)
        console.print(f"    scute plan {kept / 'base'} {kept / 'lora'} {kept / 'vera'}", soft_wrap=True, markup=False)
    wrong = [row.name for row in rows if not row.exact]
    if wrong:
        console.print(f"[bold red]not exact: {', '.join(wrong)}[/bold red]")
        return 1
    console.print("[bold green]every row is exact[/bold green]: all of it was one batch, no adapter was converted")
    return 0


def compare(server: Server, work: Path, gpu: bool, dtype: torch.dtype) -> list[Row]:
    """Ask for every prompt with the base and every adapter, all in one request, and compare with PEFT in fp32."""
    tokenizer_ids = [token_ids(work / "base", prompt) for prompt in PROMPTS]
    names: list[str | None] = [None, *SHOWN]
    asked = [(name, ids) for name in names for ids in tokenizer_ids]
    answers = server.generate([ids for _, ids in asked], [name for name, _ in asked], new_tokens=8)
    base = Oracle(work / "base", None)
    rows = []
    for name in names:
        oracle = base if name is None else Oracle(work / "base", work / name)
        errors, effects = [], []
        for (owner, _), answer in zip(asked, answers, strict=True):
            if owner == name:
                expected = oracle.log_probabilities(answer.tokens)
                errors.append((answer.log_probabilities - expected).abs())
                effects.append((expected - base.log_probabilities(answer.tokens)).abs())
        error, effect = torch.cat(errors), torch.cat(effects)
        mean, largest = error.mean().item(), error.max().item()
        exact = largest < EXACT_FP32 if not gpu else name is None or mean < EXACT_SHARE_FP16 * effect.mean().item()
        if name is None:
            rows.append(Row("base", "-", "-", "-", 0.0, mean, largest, exact))
            continue
        adapter = load(work / name)
        rows.append(
            Row(
                name,
                adapter.method,
                f"{adapter.parameters:,}",
                f"{served_bytes(server, name):,}",
                effect.mean().item(),
                mean,
                largest,
                exact and effect.max().item() > 100 * EXACT_FP32,
            )
        )
    return rows


def token_ids(base: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(base))(text)["input_ids"]


def served_bytes(server: Server, name: str) -> int:
    """What the server says that the adapter takes on the device."""
    for line in server.log.read_text(errors="replace").splitlines():
        if f"adapter {name}: " in line and " bytes on this rank" in line:
            return int(line.split(" bytes on this rank")[0].rsplit(" ", 1)[1])
    raise LookupError(f"the server's log does not say how many bytes {name} takes")


def table(rows: list[Row]) -> Table:
    found = Table(title="One batch, compared with PEFT's unmerged forward in fp32 (log-probabilities)")
    for column in ("adapter", "method"):
        found.add_column(column)
    for column in ("parameters", "bytes served", "effect", "error", "largest error", "error / effect"):
        found.add_column(column, justify="right")
    found.add_column("exact")
    for row in rows:
        share = f"{row.error / row.effect:.4%}" if row.effect else "-"
        effect = f"{row.effect:.3f}" if row.effect else "-"
        mark = "[green]yes[/green]" if row.exact else "[red]NO[/red]"
        found.add_row(
            row.name,
            row.method,
            row.parameters,
            row.served,
            effect,
            f"{row.error:.1e}",
            f"{row.largest:.1e}",
            share,
            mark,
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
