"""The command ``scute inspect``: a table for every method, one readable line for a refused adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from scute_converter import load
from scute_sglang.base_folder import BaseFolder
from scute_sglang.cli import app

LAYERS = "base_model.model.model.layers"


def write(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def inspect(folder: Path) -> str:
    result = CliRunner().invoke(app, ["inspect", str(folder)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def row(output: str, projection: str) -> list[str]:
    line = next(line for line in output.splitlines() if f"│ {projection} " in line)
    return [cell.strip() for cell in line.strip("│\n").split("│")]


@pytest.mark.parametrize("dora", [False, True])
def test_lora(dora: bool, tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"{LAYERS}.{layer}.q_proj.lora_A.weight": (3, 30) for layer in (0, 1, 2)} | {
        f"{LAYERS}.{layer}.q_proj.lora_B.weight": (42, 3) for layer in (0, 1, 2)
    }
    shapes |= {f"{LAYERS}.0.v_proj.lora_A.weight": (12, 30), f"{LAYERS}.0.v_proj.lora_B.weight": (18, 12)}
    if dora:
        shapes |= {f"{LAYERS}.{layer}.q_proj.lora_magnitude_vector": (42,) for layer in (0, 1, 2)}
        shapes |= {f"{LAYERS}.0.v_proj.lora_magnitude_vector": (18,)}
    config = {"peft_type": "LORA", "r": 3, "rank_pattern": {"v_proj": 12}, "lora_alpha": 5, "use_dora": dora}
    output = inspect(write(tmp_path / "a", config, shapes))
    trained = 3 * 3 * 72 + 12 * 48 + (3 * 42 + 18 if dora else 0)
    assert f"{'DoRA' if dora else 'LoRA'}, {trained:,} trained parameters" in output
    assert f"served: {2 * trained:,} bytes" in output
    live, folded = ("s A B", "alpha/r and s into B") if dora else ("A B", "alpha/r into B")
    assert row(output, "q_proj") == ["q_proj", "3", "3", live, folded, f"{2 * 3 * (216 + 42 * dora):,}"]
    assert row(output, "v_proj")[:3] == ["v_proj", "1", "12"]


def test_ia3(tmp_path: Path) -> None:
    shapes = {f"{LAYERS}.0.k_proj.ia3_l": (18, 1), f"{LAYERS}.0.down_proj.ia3_l": (1, 52)}
    output = inspect(write(tmp_path / "a", {"peft_type": "IA3"}, shapes))
    assert "(IA)3, 70 trained parameters" in output
    assert row(output, "k_proj") == ["k_proj", "1", "", "s", "", "36"]
    assert row(output, "down_proj") == ["down_proj", "1", "", "g", "", "104"]


def test_vera(tmp_path: Path) -> None:
    shapes = {
        "base_model.vera_A": (7, 30),
        "base_model.vera_B": (42, 7),
        f"{LAYERS}.0.q_proj.vera_lambda_d": (7,),
        f"{LAYERS}.0.q_proj.vera_lambda_b": (42,),
    }
    output = inspect(write(tmp_path / "a", {"peft_type": "VERA", "r": 7}, shapes))
    assert "VeRA, 49 trained parameters" in output
    assert f"shared: {2 * 7 * 72:,} bytes" in output
    assert row(output, "q_proj") == ["q_proj", "1", "7 shared", "d e", "", "98"]


def test_oft_with_notes(tmp_path: Path) -> None:
    config = {"peft_type": "OFT", "use_cayley_neumann": True, "num_cayley_neumann_terms": 5}
    output = inspect(write(tmp_path / "a", config, {f"{LAYERS}.0.o_proj.oft_R.weight": (5, 15)}))
    assert row(output, "o_proj") == ["o_proj", "1", "", "R(6)", "", "360"]
    assert "note: no peft_version" in output


def test_biases_and_payloads(tmp_path: Path) -> None:
    shapes = {
        f"{LAYERS}.0.q_proj.lora_A.weight": (3, 30),
        f"{LAYERS}.0.q_proj.lora_B.weight": (42, 3),
        f"{LAYERS}.0.q_proj.base_layer.bias": (42,),
        f"{LAYERS}.0.k_proj.bias": (18,),
        "base_model.model.lm_head.weight": (93, 30),
    }
    output = inspect(write(tmp_path / "a", {"peft_type": "LORA", "r": 3, "bias": "all"}, shapes))
    assert row(output, "q_proj")[3:] == ["bias A B", "alpha/r into B", f"{2 * (216 + 42)}"]
    assert row(output, "k_proj")[2:] == ["", "bias", "", "36"]
    assert "note: the file holds lm_head (93, 30), which must equal that of the base model" in output


def test_refusal(tmp_path: Path) -> None:
    folder = write(tmp_path / "broken", {"peft_type": "LORA", "r": 4}, {f"{LAYERS}.0.q_proj.lora_A.weight": (3, 30)})
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 1
    assert result.stdout == "LORA\n"
    assert result.stderr.startswith("refused: adapter 'broken': tensor model.layers.0.q_proj.lora_B.weight: is missing")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "method", "reason"),
    [
        ({"peft_type": "HRA", "apply_GS": "yes"}, "HRA", "field apply_GS of adapter_config.json: 'yes' is not of type"),
        (
            {"peft_type": "LORA", "arrow_config": {"top_k": 2}},
            "LORA",
            "field arrow_config of adapter_config.json: Arrow",
        ),
        ({"peft_type": "ROAD"}, "ROAD", "'ROAD' rotates pairs of output features"),
        ({"peft_type": "[NEW]_TUNER"}, "[NEW]_TUNER", "'[NEW]_TUNER' is no method that is served"),
        ({"peft_type": 3}, "", "3 is no method that is served"),
        ({}, "", "None is no method that is served"),
    ],
)
def test_method_and_reason_of_what_is_refused(config: dict[str, Any], method: str, reason: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", config, {f"{LAYERS}.0.q_proj.weight": (3, 30)})
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 1
    assert result.stdout == (f"{method}\n" if method else "")
    assert result.stderr.startswith("refused: adapter 'a': ") and reason in result.stderr


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_config_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (1, "") and "adapter_config.json" in result.stderr


@pytest.mark.parametrize(
    ("name", "live"),
    [("pissa", "A B"), ("hra", "A B"), ("loha", "A B"), ("boft", "R(4) s"), ("beft", "bias"), ("fourierft", "d e")],
)
def test_methods_with_a_base(name: str, live: str, llama: Path, adapters: dict[str, Path]) -> None:
    """One of each kind: folded with and without the base weight, a rotation, a shift, and a basis that needs shapes."""
    result = CliRunner().invoke(app, ["inspect", str(adapters[name]), "--base", str(llama)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{load(adapters[name], base=BaseFolder.open(str(llama)).shapes).method}, ")
    assert f"fits {llama}" in result.output
    assert row(result.output, "o_proj")[3] == live


def test_bytes_of_a_fold(llama: Path, adapters: dict[str, Path]) -> None:
    """The file of HRA does not say how many outputs there are: 120, 40, 40, 72, 192, 192 and 72 of this model."""
    inputs, outputs = 72 * 5 + 120 + 192, 120 + 40 + 40 + 72 + 192 + 192 + 72
    assert f"served: at least {2 * 2 * 6 * inputs:,} bytes" in inspect(adapters["hra"])
    result = CliRunner().invoke(app, ["inspect", str(adapters["hra"]), "--base", str(llama)])
    assert f"served: {2 * 2 * 6 * (inputs + outputs):,} bytes" in result.output


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["inspect", "--help"])
    assert result.exit_code == 0 and "scute inspect ./my-adapter" in result.output


def test_the_command_does_not_import_sglang() -> None:
    program = "import sys, scute_sglang.cli; assert not {'sglang', 'peft', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Its method is shown as far as the file may be read at all."""
    os.mkfifo(tmp_path / "adapter_config.json")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 1 and result.stdout == ""
    assert "is no regular file" in result.stderr
