"""Adapters on a quantised base: they are made for the weight that is served, not for the one it was quantised from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import Oracle, Recipe, ia3, lora, of, oft, vera, write_all
from awq import GROUP, random_awq
from models import write_model
from serving import Server, cpu_arguments, cpu_environment, serve
from test_bf16 import SHARE
from test_parity_server import prompts

TESTS = Path(__file__).parent
SIZES = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 160}
RECIPES = {
    "lora": Recipe(lora(r=6), 1),
    "dora": Recipe(lora(use_dora=True), 2),
    "ia3": Recipe(ia3(target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]), 3),
    "hra": Recipe(of(peft.HRAConfig, r=6), 4),
    "pissa": Recipe(lora(r=5, init_lora_weights="pissa", target_modules=["q_proj", "up_proj", "down_proj"]), 5),
    "oft": Recipe(oft(), 6),
    "vera": Recipe(vera(), 7),
}
# SGLang has kernels for AWQ on a CPU with AMX and on GPUs. Beside them it has the formula in torch.
PLUGIN = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def dequantize(original, qweight, scales, qzeros):
    from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition
    return awq_dequantize_decomposition(qweight, scales, qzeros)

def register():
    target = "sglang.srt.hardware_backend.gpu.quantization.awq_kernels.awq_dequantize"
    HookRegistry.register(target, dequantize, HookType.AROUND)
"""


def test_layers_under_the_interpreter() -> None:
    """FP8 and int4: the weight as SGLang's own layers serve it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "quantised_layers.py")]
    environment = {**os.environ, **cpu_environment(), "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model twice: with AWQ weights, and with what they mean, rounded to fp16, in fp32."""
    meaning, packed = tmp_path_factory.mktemp("meaning"), tmp_path_factory.mktemp("awq")
    for path in (meaning, packed):
        write_model(path, "qwen2", tied=False, **SIZES)
    generator = torch.Generator().manual_seed(0)
    plain = {name: tensor.half() for name, tensor in load_file(meaning / "model.safetensors").items()}
    stored = dict(plain)
    for name in [name for name in plain if "_proj.weight" in name]:
        tensors, weight = random_awq(*plain[name].shape, generator)
        stored.update({name.removesuffix("weight") + part: tensor for part, tensor in tensors.items()})
        del stored[name]
        plain[name] = weight
    metadata = {"format": "pt"}
    save_file({name: tensor.float() for name, tensor in plain.items()}, meaning / "model.safetensors", metadata)
    save_file(stored, packed / "model.safetensors", metadata)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {
        **{"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    }
    (packed / "config.json").write_text(json.dumps(config))
    return meaning, packed


@pytest.fixture(scope="module")
def folders(bases: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(RECIPES, tmp_path_factory.mktemp("adapters"), bases[0])


@pytest.fixture(scope="module")
def quantised(
    bases: tuple[Path, Path], folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    site = tmp_path_factory.mktemp("plugin")
    (site / "awq_on_cpu.py").write_text(PLUGIN)
    (site / "awq_on_cpu-0.dist-info").mkdir()
    (site / "awq_on_cpu-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: awq-on-cpu\nVersion: 0\n")
    (site / "awq_on_cpu-0.dist-info" / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nawq_on_cpu = awq_on_cpu:register\n"
    )
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    slots = ("--max-loras-per-batch", str(len(RECIPES)))
    with serve(
        bases[1],
        tmp_path_factory.mktemp("quantised") / "server.log",
        *cpu_arguments("float16"),
        *slots,
        adapters=folders,
        environment={**cpu_environment(), "PYTHONPATH": path},
    ) as running:
        yield running


def test_int4_base_with_every_kind_of_slot(
    quantised: Server, bases: tuple[Path, Path], folders: dict[str, Path]
) -> None:
    """Against PEFT in fp32 on what the int4 weights mean; the server computes in fp16. Scales, folds and rotations are
    made from the weight as it is served."""
    owners = [name for name in [None, *RECIPES] for _ in range(4)]
    answers = quantised.generate(prompts(len(owners), seed=31), owners)
    plain = Oracle(bases[0], None)
    for name in [None, *RECIPES]:
        mine = [answer for answer, owner in zip(answers, owners, strict=True) if owner == name]
        oracle = plain if name is None else Oracle(bases[0], folders[name])
        expected = torch.cat([oracle.log_probabilities(answer.tokens) for answer in mine])
        served = torch.cat([answer.log_probabilities for answer in mine])
        base = torch.cat([plain.log_probabilities(answer.tokens) for answer in mine])
        error, effect = (served - expected).abs().mean(), (expected - base).abs().mean()
        print(f"{name}: mean error {error:.2e}, effect {effect:.2f}")
        if name is None:
            assert error <= 6 * 2**-11  # the base itself, a few steps of fp16
        else:
            assert error <= SHARE * effect, name
