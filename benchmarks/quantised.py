"""Adapters on quantised bases on a GPU: log-probabilities against PEFT in fp32 on what the quantised weights mean.

    PYTHONPATH=tests python benchmarks/quantised.py --out benchmarks/results/h200

For each format: writes the checkpoint of a random four-layer model and adapters, starts the real server with CUDA
graphs, and compares a mixed batch. SGLang repacks the weights of these formats for kernels of its own, so DoRA norms,
HRA and PiSSA, which need the base weight, are what this is about. Passes if for every adapter the mean error is at most
1.5 % of the adapter's own effect; where the format rounds the inputs of a layer too, at most that beyond twice the mean
error of the base model, which has the same rounding without adapters, and in any case less than half of the effect. A
format whose server does not start is reported, and fails.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from shutil import copytree

import peft
import torch
from safetensors.torch import load_file, save_file

from adapters import Oracle, Recipe, ia3, lora, of, oft, vera, write_all
from awq import GROUP, random_awq
from base_model import write_base
from exactness import MEAN_SHARE, prompts
from serving import Answer, ServerDied, serve
from shapes import ModelShape

SHAPE = ModelShape("four layers", 4, 1024, 8, 2, 128, 2816, 4096)
RECIPES = {
    "lora": Recipe(lora(r=16), 1),
    "dora": Recipe(lora(r=8, use_dora=True), 2),
    "ia3": Recipe(ia3(target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]), 3),
    "hra": Recipe(of(peft.HRAConfig, r=6), 4),
    "pissa": Recipe(lora(r=5, init_lora_weights="pissa", target_modules=["q_proj", "up_proj", "down_proj"]), 5),
    "oft": Recipe(oft(oft_block_size=32), 6),
    "vera": Recipe(vera(r=256), 7),
}
WEIGHT_ONLY = 6 * 2**-11  # mean error of the base model: a few steps of fp16
ROUNDED_INPUTS = 0.25  # the same with inputs in fp8, three bits: a few percent of log-probabilities of 1 to 10
FP8 = torch.float8_e4m3fn
BLOCK = 128
GPTQ_GROUP = 128

# Of a weight (out, in): the tensors of its checkpoint by their last name, and what they mean, (out, in) fp32.
Quantise = Callable[[torch.Tensor, torch.Generator], tuple[dict[str, torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """``config``: ``quantization_config`` of the model. ``rounds_inputs``: whether its kernels quantise those too.
    ``family``: of ``base_model.FAMILIES``."""

    quantise: Quantise
    config: Mapping[str, object]
    rounds_inputs: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    family: str = "llama"


def fp8_tensor(weight: torch.Tensor, _: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale for the tensor, the same for all: SGLang puts the slices of a fused layer on one."""
    scale = torch.tensor(6 / weight.shape[1] ** 0.5 / torch.finfo(FP8).max)
    stored = (weight / scale).clamp(-448, 448).to(FP8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def fp8_blocks(weight: torch.Tensor, _: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A scale for every block of 128 outputs and inputs, ``(out / 128, in / 128)``."""
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / torch.finfo(FP8).max
    stored = (blocks / scales[:, None, :, None]).to(FP8)
    meaning = (stored.float() * scales[:, None, :, None]).reshape(weight.shape)
    return {"weight": stored.reshape(weight.shape), "weight_scale_inv": scales}, meaning


def awq(weight: torch.Tensor, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    outputs, inputs = weight.shape
    return random_awq(outputs, inputs, generator)


def gptq(weight: torch.Tensor, _: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Four bits around 8: ``qweight (in / 8, out)`` and ``qzeros (in / 128, out / 8)`` int32, ``scales (in / 128,
    out)`` fp16, ``g_idx (in,)`` int32. Eight neighbouring inputs (of qzeros: outputs) share a word, lowest first; a
    zero point is stored less one."""
    outputs, inputs = weight.shape
    groups = weight.T.unflatten(0, (-1, GPTQ_GROUP))
    scales = (groups.abs().amax(1) / 7).half()
    values = (groups / scales.float()[:, None]).round().clamp(-8, 7)
    meaning = (values * scales.float()[:, None]).flatten(0, 1).T.contiguous()
    nibbles = (values.flatten(0, 1) + 8).long()
    words = sum(nibbles[place::8] << (4 * place) for place in range(8))
    assert isinstance(words, torch.Tensor)
    tensors = {
        "qweight": words.to(torch.int32),  # the highest nibble wraps into the sign
        "qzeros": torch.full((inputs // GPTQ_GROUP, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": scales,
        "g_idx": (torch.arange(inputs) // GPTQ_GROUP).to(torch.int32),
    }
    return tensors, meaning


DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMATS = {
    "fp8, a scale per tensor": Format(fp8_tensor, DYNAMIC, rounds_inputs=True),
    "fp8, weight only": Format(fp8_tensor, DYNAMIC, rounds_inputs=False, environment={"SGLANG_FORCE_FP8_MARLIN": "1"}),
    # SGLang 0.5.23 looks for the scales of blocks under another name in a Llama.
    "fp8, a scale per block": Format(
        fp8_blocks, {**DYNAMIC, "weight_block_size": [BLOCK, BLOCK]}, rounds_inputs=True, family="qwen3"
    ),
    "awq": Format(
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        rounds_inputs=False,
    ),
    "gptq": Format(
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GPTQ_GROUP, "desc_act": False, "sym": True},
        rounds_inputs=False,
    ),
}


def write_quantised(original: Path, meaning: Path, packed: Path, kind: Format) -> None:
    """``original`` twice: with quantised projections, and with what they mean in fp32."""
    for path in (meaning, packed):
        copytree(original, path, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    plain = {name: tensor.float() for name, tensor in load_file(original / "model.safetensors").items()}
    stored = {name: tensor.half() for name, tensor in plain.items()}
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        del stored[name]
        tensors, plain[name] = kind.quantise(plain[name], generator)
        stored.update({name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in tensors.items()})
    for path, tensors in ((meaning, plain), (packed, stored)):
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (meaning / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": kind.config}))


def answers_of(packed: Path, adapters: dict[str, Path], kind: Format, log: Path) -> list[tuple[str | None, Answer]]:
    """Of a server, each with its adapter."""
    arguments = [
        *("--dtype", "float16", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
        *("--mem-fraction-static", "0.3", "--max-total-tokens", "16384"),
        *("--cuda-graph-bs-decode", "8", "24", "--cuda-graph-bs-prefill", "512", "2048"),  # more take long to capture
        *("--max-loras-per-batch", str(len(RECIPES)), "--scute-adapter-memory", "1GiB"),
    ]
    owners = [name for name in [None, *RECIPES] for _ in range(3)]
    with serve(packed, log, *arguments, adapters=adapters, environment=kind.environment) as server:
        texts = prompts(len(owners), seed=31, vocabulary=SHAPE.vocabulary)
        return list(zip(owners, server.generate(texts, owners, 16), strict=True))


@dataclass(frozen=True)
class Row:
    """Mean error and effect of an adapter, of log-probabilities, and whether that is exact."""

    adapter: str
    error: float
    effect: float
    exact: bool


def judge(
    found: list[tuple[str | None, Answer]], meaning: Path, adapters: Mapping[str, Path], kind: Format
) -> Iterator[Row]:
    plain_oracle = Oracle(meaning, None, device="cuda")
    base_error = 0.0
    for name in [None, *RECIPES]:
        mine = [answer for owner, answer in found if owner == name]
        oracle = plain_oracle if name is None else Oracle(meaning, adapters[name], device="cuda")
        expected = torch.cat([oracle.log_probabilities(answer.tokens) for answer in mine])
        plain = torch.cat([plain_oracle.log_probabilities(answer.tokens) for answer in mine])
        error = (torch.cat([answer.log_probabilities for answer in mine]) - expected).abs().mean().item()
        effect = (expected - plain).abs().mean().item()
        if name is None:
            base_error = error
            yield Row("base", error, effect, error <= (ROUNDED_INPUTS if kind.rounds_inputs else WEIGHT_ONLY))
        else:
            allowed = MEAN_SHARE * effect + (2 * base_error if kind.rounds_inputs else 0)
            yield Row(name, error, effect, error <= min(allowed, effect / 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/scute-quantised"), help="folder for the models")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for quantised.md")
    parser.add_argument("--format", action="append", choices=list(FORMATS), help="only this one; may be repeated")
    parser.add_argument("--commit", default="unknown", help="shown in the report")
    arguments = parser.parse_args()
    torch.set_num_threads(4)  # PEFT decomposes for PiSSA: seconds, but with a thread on each of many cores minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("sglang", "torch", "triton", "peft", "transformers"))
    lines = [
        "# Adapters on quantised bases",
        "",
        f"{time.strftime('%Y-%m-%d')}, commit {arguments.commit}, {versions}.",
        "Mean errors of log-probabilities against PEFT in fp32 on what the quantised weights mean, and the mean effect",
        "of the adapter. Made by `benchmarks/quantised.py`.",
        "",
        "| format | adapter | mean error | mean effect | share | exact |",
        "|---|---|---|---|---|---|",
    ]
    passed = True
    report = arguments.out / "quantised.md"
    names = arguments.format or list(FORMATS)
    for family in {FORMATS[name].family for name in names}:
        (arguments.work / family).mkdir(parents=True, exist_ok=True)
        write_base(arguments.work / family, SHAPE, family=family)
    for name in names:
        kind, folder = FORMATS[name], arguments.work / name.replace(" ", "-").replace(",", "")
        write_quantised(arguments.work / kind.family, folder / "meaning", folder / "packed", kind)
        adapters = write_all(RECIPES, folder, folder / "meaning")
        try:
            found = answers_of(folder / "packed", adapters, kind, arguments.out / f"server-{folder.name}.log")
        except ServerDied as died:
            print(died)
            reason = str(died).splitlines()[0]
            lines.append(f"| {name} | no answer: {reason} | | | | no |")
            passed = False
            report.write_text("\n".join(lines) + "\n")
            continue
        print(f"{name}: the server has answered", flush=True)
        for row in judge(found, folder / "meaning", adapters, kind):
            share = f"{row.error / row.effect:.2%}" if row.effect else ""
            exact = "yes" if row.exact else "no"
            lines.append(f"| {name} | {row.adapter} | {row.error:.2e} | {row.effect:.3f} | {share} | {exact} |")
            passed &= row.exact
        report.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
