"""Exactness on a GPU: adapters of every method and the base in one batch, CUDA graphs on, against PEFT in fp32.

    PYTHONPATH=tests python benchmarks/exactness.py --attention triton --out benchmarks/results/h200

Writes a random base model of Llama-3.1-8B's shapes (fp16, 16 GB; ``--layers`` for less) and fifteen adapters made by
PEFT itself into ``--work``, starts the real server, and compares log-probabilities of
prompt and generated tokens with PEFT's unmerged forward in fp32 on the same GPU. Passes if for every adapter the mean
error is at most 1.5 % of the adapter's own effect, and the largest error at most twice that of the plain LoRAs, and if
the device loaded no kernel of Scute's after the server had started, but for more requests than the graphs are for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pkgutil
import random
import re
import subprocess
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import scute_kernels
from adapters import ALL, Recipe, ia3, lora, oft, redraw, vera
from base_model import write_base
from serving import Server, serve
from shapes import MODELS

MEAN_SHARE = 0.015  # of the adapter's effect
LARGEST = 2.0  # times the largest error of a plain LoRA: two draws of the same rounding

RECIPES: dict[str, Recipe] = {
    "lora_r16": Recipe(lora(r=16, lora_alpha=16), 1),
    "lora_r64_rs": Recipe(lora(r=64, use_rslora=True, lora_alpha=8), 2),
    "lora_r200": Recipe(lora(r=200, lora_alpha=50), 15),
    "lora_r5": Recipe(lora(r=5, lora_alpha=5, target_modules=["q_proj", "v_proj", "down_proj"]), 3),
    "dora_r16": Recipe(lora(r=16, lora_alpha=16, use_dora=True), 4),
    "dora_r8": Recipe(lora(r=8, lora_alpha=8, use_dora=True, target_modules=["k_proj", "o_proj", "up_proj"]), 5),
    "ia3": Recipe(ia3(), 6),
    "ia3_all": Recipe(ia3(target_modules=ALL, feedforward_modules=["down_proj"]), 7),
    "vera_r256": Recipe(vera(r=256), 8),
    "vera_r256_b": Recipe(vera(r=256), 9),
    "oft_32": Recipe(oft(oft_block_size=32, target_modules=ALL), 10),
    "oft_64_cayley": Recipe(
        oft(oft_block_size=64, use_cayley_neumann=False, target_modules=["q_proj", "v_proj", "down_proj"]), 11
    ),
}
# Loaded only later, so that slots change their method.
LATER = {
    "dora_late": Recipe(lora(r=24, lora_alpha=24, use_dora=True), 12),
    "oft_late": Recipe(oft(oft_block_size=32, target_modules=["o_proj", "gate_proj"]), 13),
    "vera_late": Recipe(vera(r=256, target_modules=["q_proj", "v_proj"], projection_prng_key=3), 14),
}


def write_adapters(base: torch.nn.Module, folder: Path) -> None:
    for name, recipe in {**RECIPES, **LATER}.items():
        model = get_peft_model(base, recipe.config())
        model.float()
        generator = torch.Generator().manual_seed(recipe.seed)
        redraw_on_host(model, generator)
        model.save_pretrained(str(folder / name))
        base = model.unload()


def redraw_on_host(model: torch.nn.Module, generator: torch.Generator) -> None:
    """``redraw`` draws on the CPU; move each trained parameter there and back."""
    devices = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            devices[name] = parameter.device
            parameter.data = parameter.data.cpu()
    redraw(model, generator)
    for name, parameter in model.named_parameters():
        if name in devices:
            parameter.data = parameter.data.to(devices[name])


class Reference:
    """PEFT's unmerged forward in fp32 on the GPU, one adapter at a time over one base."""

    def __init__(self, base: Path, adapters: Path) -> None:
        self.adapters = adapters
        self.model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32, device_map="cuda").eval()

    @torch.no_grad()
    def log_probabilities(self, adapter: str | None, sequences: list[list[int]]) -> list[torch.Tensor]:
        model: Any = self.model
        if adapter is not None:
            model = PeftModel.from_pretrained(self.model, str(self.adapters / adapter)).eval()
        found = []
        for tokens in sequences:
            logits = model(input_ids=torch.tensor([tokens], device="cuda")).logits[0, :-1].double()
            chosen = torch.tensor(tokens[1:], device="cuda")
            found.append(logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].cpu())
        if adapter is not None:
            self.model = model.unload()
        return found


def prompts(count: int, seed: int, vocabulary: int = 128000, shortest: int = 20) -> list[list[int]]:
    """Of up to 70 tokens more than the shortest may have."""
    draw = random.Random(seed)
    return [
        [draw.randrange(10, vocabulary) for _ in range(draw.randrange(shortest, shortest + 70))] for _ in range(count)
    ]


def scenario(
    server: Server, names: list[str | None], new_tokens: int, seed: int, shortest: int = 20
) -> list[tuple[str | None, object]]:
    """Requests sent together; returns (adapter, answer)."""
    texts = prompts(len(names), seed, shortest=shortest)
    return list(zip(names, server.generate(texts, names, new_tokens), strict=True))


def loaded_while_serving(log: Path) -> list[str]:
    """The kernels of Scute's that SGLang, as it is started here, has reported so far."""
    modules = [name for _, name, _ in pkgutil.walk_packages(scute_kernels.__path__, "scute_kernels.")]
    kernels = {
        function.__name__
        for name in modules
        for function in vars(import_module(name)).values()
        if isinstance(function, triton.JITFunction)
    }
    reported = re.findall(r"Triton kernel '(\w+)' device-loaded", log.read_text(errors="replace"))
    return [name for name in reported if name in kernels]


def run_server(base: Path, adapters: Path, attention: str, log: Path) -> tuple[dict[str, list], list[str]]:
    """Requests and answers of each scenario; the kernels that were first needed for them."""
    arguments = [
        *("--dtype", "float16", "--attention-backend", attention, "--sampling-backend", "pytorch"),
        *("--mem-fraction-static", "0.35", "--cuda-graph-max-bs-decode", "32", "--max-running-requests", "64"),
        *("--max-loras-per-batch", "13", "--scute-adapter-memory", "8GiB"),
    ]
    everything: list[str | None] = [None, *RECIPES]
    started = time.monotonic()
    environment = {"SGLANG_TRITON_LOAD_WARNING_THRESHOLD_GB": "1e9"}  # else it reports those that might not find room
    given = {name: adapters / name for name in RECIPES}
    with serve(base, log, *arguments, adapters=given, environment=environment) as server:
        print(f"{attention}: server ready after {time.monotonic() - started:.0f} s", flush=True)
        found = {
            "one mixed batch": scenario(server, everything, 16, seed=1),
            "after 300 decode steps": scenario(server, everything, 300, seed=2),
            "two adapters": scenario(server, ["dora_r16", "lora_r16"], 8, seed=3),
            "one adapter": scenario(server, ["vera_r256"], 8, seed=4),
            # Other sets of operators that a decode graph has.
            "no fused rotation": scenario(
                server, [None, "lora_r64_rs", "dora_r8", "ia3_all", "vera_r256_b"], 8, seed=5
            ),
            "no basis": scenario(server, [None, "lora_r200", "dora_r16", "ia3", "oft_32", "oft_64_cayley"], 8, seed=11),
            "no basis, no fused rotation": scenario(server, [None, "lora_r5", "dora_r8", "ia3", "ia3_all"], 8, seed=12),
            "mostly fused rotations": scenario(server, ["oft_32", "vera_r256", "oft_64_cayley"], 8, seed=14),
            "mostly fused rotations, no basis": scenario(server, ["oft_32", "lora_r16", "oft_64_cayley"], 8, seed=15),
            "no rotation": scenario(server, [None, "lora_r16", "lora_r200", "vera_r256"], 8, seed=13),
            # Prefills of more rows of each adapter than a tile has, and of LONG_ROWS together, without the first too.
            "long prompts": scenario(server, everything, 4, seed=10, shortest=400),
            "more requests than slots": scenario(server, [*everything, *everything, None, None], 8, seed=6),
        }
        for name in LATER:  # one slot is free: the others are taken from older adapters
            server.load(name, adapters / name).raise_for_status()
        found["slots with another method"] = scenario(server, [*LATER, "lora_r16", None, "oft_32"], 16, seed=7)
        found["brought back"] = scenario(server, everything, 16, seed=8)
        for name in LATER:
            server.unload(name).raise_for_status()
        late = loaded_while_serving(log)
        found["more requests than graphs"] = scenario(server, [*everything, *everything, *everything], 8, seed=9)
    return found, late


def judge(found: dict[str, list], reference: Reference) -> list[dict]:
    """A row per scenario and adapter: mean and largest error, and the adapter's mean effect."""
    rows = []
    for name in [None, *RECIPES, *LATER]:
        mine = {key: [answer for owner, answer in pairs if owner == name] for key, pairs in found.items()}
        sequences = [answer.tokens for answers in mine.values() for answer in answers]
        if not sequences:
            continue
        expected, plain = reference.log_probabilities(name, sequences), reference.log_probabilities(None, sequences)
        place = 0
        for key, answers in mine.items():
            if not answers:
                continue
            these = range(place, place + len(answers))
            place += len(answers)
            errors = torch.cat([(a.log_probabilities - expected[i]).abs() for i, a in zip(these, answers, strict=True)])
            effects = torch.cat([(expected[i] - plain[i]).abs() for i in these])
            rows.append(
                {
                    "scenario": key,
                    "adapter": name or "base",
                    "tokens": errors.numel(),
                    "mean error": errors.mean().item(),
                    "largest error": errors.max().item(),
                    "mean effect": effects.mean().item(),
                    "share": errors.mean().item() / effects.mean().item() if name else None,
                }
            )
    return rows


def failures(rows: list[dict]) -> list[str]:
    plain = max(row["largest error"] for row in rows if row["adapter"].startswith("lora"))
    found = []
    for row in rows:
        where = f"{row['scenario']}, {row['adapter']}"
        if row["share"] is not None and row["share"] > MEAN_SHARE:
            found.append(f"{where}: mean error is {row['share']:.2%} of the effect")
        if row["largest error"] > LARGEST * plain:
            found.append(f"{where}: largest error {row['largest error']:.3g}, plain LoRA's is {plain:.3g}")
    return found


def report(rows: list[dict], problems: list[str], args: argparse.Namespace) -> str:
    commit = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("sglang", "torch", "triton", "peft", "transformers"))
    lines = [
        "# Exactness on the GPU",
        "",
        f"{time.strftime('%Y-%m-%d')}, {torch.cuda.get_device_name()}, commit {commit}, {versions}.",
        f"Llama-3.1-8B shapes, {args.layers} layers, fp16, CUDA graphs on, {args.attention} attention.",
        "Errors of log-probabilities against PEFT's unmerged forward in fp32; share: mean error over the adapter's",
        "mean effect. Made by `benchmarks/exactness.py`.",
        "",
        f"Result: {'passed' if not problems else 'failed'}.",
        *(f"- {problem}" for problem in problems),
        "",
        "| scenario | adapter | tokens | mean error | largest error | mean effect | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = "" if row["share"] is None else f"{row['share']:.2%}"
        lines.append(
            f"| {row['scenario']} | {row['adapter']} | {row['tokens']} | {row['mean error']:.2e} | "
            f"{row['largest error']:.2e} | {row['mean effect']:.3f} | {share} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/scute"), help="folder for model and adapters")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the report")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--attention", default="triton", help="attention backend, e.g. triton or flashinfer")
    parser.add_argument("--commit", help="shown in the report; asked from git if not given")
    args = parser.parse_args()
    work = args.work / f"{args.layers}-layers"
    base, adapters = work / "base", work / "adapters"
    args.out.mkdir(parents=True, exist_ok=True)
    if not (base / "config.json").exists():
        base.mkdir(parents=True, exist_ok=True)
        write_base(base, dataclasses.replace(MODELS["Llama-3.1-8B"], layers=args.layers))
    if not adapters.exists():
        model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float16, device_map="cuda")
        write_adapters(model, adapters)
        del model
        torch.cuda.empty_cache()
    print("model and adapters written", flush=True)
    found, late = run_server(base, adapters, args.attention, args.out / f"server-{args.attention}.log")
    rows = judge(found, Reference(base, adapters))
    problems = failures(rows) + [f"loaded while serving: {name}" for name in late]
    name = f"exactness-{args.attention}"
    (args.out / f"{name}.md").write_text(report(rows, problems, args))
    (args.out / f"{name}.json").write_text(json.dumps(rows, indent=1))
    print(report(rows, problems, args))
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
