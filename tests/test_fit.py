"""One verdict: what ``scute inspect --base`` says of an adapter is what the server says, word by word."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from models import FAMILIES, TIED, write_model
from scute_converter import AdapterError
from scute_sglang.base_folder import ADAPTABLE, BaseFolder, BaseModelError
from scute_sglang.cli import app
from scute_sglang.fit import LANGUAGE_MODEL, check_base_sample
from serving import Server

ATTENTION = "model.layers.{}.self_attn."
HIDDEN, HEAD = 72, 120  # of the tiny Llama: inputs and outputs of q_proj


def q_projections(prefix: str = ATTENTION, layers: int = 2) -> list[str]:
    return [f"{prefix.format(layer)}q_proj" for layer in range(layers)]


def write_lora(
    folder: Path, modules: list[str], rank: int = 3, inputs: int = HIDDEN, outputs: int = HEAD, **fields: Any
) -> Path:
    """``fields``: of the config; ``tensors`` are added to those of the pairs."""
    tensors = fields.pop("tensors", {})
    for module in modules:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, **fields}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_refused(folder: Path) -> dict[str, tuple[Path, str]]:
    """Adapters that the tiny Llama cannot serve, each with a part of the reason."""
    one, other = q_projections(), q_projections("model.language_model.layers.{}.self_attn.")
    nearest = "the nearest is model.layers.{}.self_attn.q_proj"
    head = torch.zeros(99, HIDDEN)
    bias = {f"base_model.model.{one[1]}.bias": torch.randn(HEAD)}
    whole = {"base_model.model.model.wte.embed_tokens.weight": head}
    cases = {
        "wrong_prefix": ({"modules": other}, f"module {other[0]}: is no module of this model"),
        "none_matched": ({"modules": other}, f"(0 of 2 modules matched; {nearest.format(0)})"),
        "half_matched": ({"modules": [one[0], other[1]]}, f"(1 of 2 modules matched; {nearest.format(1)})"),
        "more_layers": ({"modules": q_projections(layers=5)}, f"(2 of 5 modules matched; {nearest.format(1)})"),
        "unknown_module": (
            {"modules": ["model.layers.1.mlp.router"]},
            "(0 of 1 modules matched; the nearest is model.",
        ),
        "hidden_size": ({"modules": one, "inputs": 80}, f"{one[0]}: made for 80 input features, but the model has 72"),
        "outputs": ({"modules": one, "outputs": 64}, f"{one[0]}: made for 64 output features, but the model has 120"),
        "rank": (
            {"modules": one, "rank": 1025},
            "rank 1025 exceeds the server's 1024; start the server with --max-lora",
        ),
        "no_base_bias": ({"modules": one, "bias": "all", "tensors": bias}, f"module {one[1]}: it replaces a bias"),
        "vocabulary": (
            {"modules": one, "tensors": {"lm_head.weight": head}},
            "module lm_head: the file holds its whole",
        ),
        "other_weight": ({"modules": one, "tensors": whole}, "model.wte.embed_tokens: the file holds its weight, but"),
        "dora_on_embedding": (
            {
                "modules": ["model.embed_tokens"],
                "inputs": 311,
                "outputs": HIDDEN,
                "tensors": {"base_model.model.model.embed_tokens.lora_magnitude_vector": torch.ones(HIDDEN)},
            },
            "module model.embed_tokens: only plain LoRA is served on embeddings",
        ),
        "misspelt_type": ({"modules": one, "peft_type": "LORAA"}, "(did you mean 'LORA'?); served are ADALORA"),
        "misspelt_field": ({"modules": one, "rank_patern": {"q_proj": 3}}, "(did you mean 'rank_pattern'?); remove"),
        "misspelt_value": ({"modules": one, "bias": "lora_onyl"}, "(did you mean 'lora_only'?); correct it"),
        "misspelt_target": (
            {"modules": one, "target_modules": ["qproj"]},
            "while its 'qproj' selects none (did you mean 'q_proj'?); correct the field",
        ),
    }
    return {name: (write_lora(folder / name, **fields), part) for name, (fields, part) in cases.items()}


def test_refusals_are_those_of_the_server(
    server: Server, llama: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    for name, (folder, part) in write_refused(tmp_path).items():
        result = CliRunner().invoke(app, ["inspect", str(folder), "--base", str(llama)])
        assert result.exit_code == 1, f"{name}: {result.output}"
        offline = result.stderr.removeprefix("refused: ").rstrip("\n")
        assert offline.startswith(f"adapter {name!r}: ") and part in offline and "\n" not in offline, offline
        response = server.load(name, folder)
        assert response.status_code == 400
        assert response.json()["error_message"] == offline
    # What either serves, both do: with the base, projections that are not stored can be drawn again.
    folder = str(adapters["vera_regenerated"])
    assert CliRunner().invoke(app, ["inspect", folder]).exit_code == 1
    result = CliRunner().invoke(app, ["inspect", folder, "--base", str(llama)], env={"COLUMNS": "160"})
    assert result.exit_code == 0 and f"fits {llama}: all 4 modules and their shapes" in result.output


def test_modules_are_those_of_sglang() -> None:
    """Every name that is taken for adaptable is one that SGLang's LoRA layers take too."""
    from sglang.srt.lora import utils

    assert utils.get_normalized_target_modules(ADAPTABLE) <= utils._KNOWN_LORA_TARGET_MODULES


@pytest.mark.parametrize(("family", "tied"), [(family, tied) for family in FAMILIES for tied in TIED[family]])
def test_a_base_as_files(family: str, tied: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path / "base", family, tied=tied)
    if family == "mistral":  # in shards
        (tmp_path / "base" / "model.safetensors").unlink()
        model.save_pretrained(tmp_path / "base", max_shard_size="100KB")
        assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    base = BaseFolder.open(str(tmp_path / "base"))
    assert base.known and base.has_weights and not base.quantised and base.dtype == torch.float32
    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert list(base.shapes.items()) == [(name, tuple(layer.weight.shape)) for name, layer in linear.items()]
    found = set()
    for name, projection in base.projections.items():
        if projection.slices:
            layers = [linear[part] for part in projection.slices]
            weight = torch.cat([layer.weight for layer in layers])
            bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        else:
            layer = model.get_submodule(name)
            weight, bias = layer.weight, getattr(layer, "bias", None)
            found.add(name)
        assert torch.equal(base.weight(name), weight)
        assert projection.has_bias == (bias is not None)
        assert (base.bias(name) is None) if bias is None else torch.equal(base.bias(name), bias)
    ends = set() if family == "gemma3" else {"model.embed_tokens", "lm_head"}
    assert found == {name for name in linear if LANGUAGE_MODEL.match(name) and name != "lm_head"} | ends
    attention = base.projections["model.layers.1.self_attn.qkv_proj"]
    assert attention.out_features == sum(base.projections[part].out_features for part in attention.slices)


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("no_folder", "there is no such folder"),
        ("no_config", "has no config.json"),
        ("unknown_type", "transformers builds no model from its config.json"),
        ("no_weights", "has no model.safetensors"),
        ("lost_tensor", "holds no tensor model.layers.0.self_attn.q_proj.weight"),
        ("other_shape", "should have (120, 72)"),
        ("cut_off", "model.safetensors is broken or cut off"),
        ("quantised", "its weights are quantised"),
    ],
)
def test_a_base_that_cannot_be_read(breakage: str, message: str, llama: Path, tmp_path: Path) -> None:
    folder, weights = tmp_path / "base", tmp_path / "base" / "model.safetensors"
    config = folder / "config.json"
    shutil.copytree(llama, folder)
    tensors, fields = load_file(weights), json.loads(config.read_text())
    if breakage == "no_folder":
        shutil.rmtree(folder)
    elif breakage == "no_config":
        config.unlink()
    elif breakage == "unknown_type":
        config.write_text(json.dumps({"model_type": "mine"}))
    elif breakage == "no_weights":
        weights.unlink()
    elif breakage == "lost_tensor":
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        save_file(tensors, weights)
    elif breakage == "other_shape":
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(120, 71)
        save_file(tensors, weights)
    elif breakage == "cut_off":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif breakage == "quantised":
        config.write_text(json.dumps({**fields, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(BaseModelError, match=re.escape(message)) as caught:
        BaseFolder.open(str(folder)).weight("model.layers.0.self_attn.q_proj")
    assert str(caught.value).startswith(f"base model {folder}: ") and "\n" not in str(caught.value)


def test_experts_and_routers_are_refused_with_a_note(tmp_path: Path) -> None:
    """A mixture of experts: its attention can be adapted, and that the server knows better is said."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 72, "intermediate_size": 96, "moe_intermediate_size": 40, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "num_experts": 4, "vocab_size": 99}
    AutoConfig.for_model("qwen3_moe", **sizes, **heads).save_pretrained(tmp_path / "moe")
    base = BaseFolder.open(str(tmp_path / "moe"))
    leaves = {name.removeprefix("model.layers.0.") for name in base.projections}
    attention = {f"self_attn.{name}_proj" for name in ("q", "k", "v", "o", "qkv")}
    assert leaves == attention | {"model.embed_tokens", "lm_head"}
    assert not base.known and not base.has_weights
    for number, module in enumerate(["model.layers.0.mlp.experts.0.gate_proj", "model.layers.0.mlp.gate"]):
        folder = write_lora(tmp_path / str(number), [module])
        result = CliRunner().invoke(app, ["inspect", str(folder), "--base", str(tmp_path / "moe")])
        assert result.exit_code == 1 and f"module {module}: is no module of this model" in result.stderr
    folder = write_lora(tmp_path / "attention", q_projections(layers=1))
    result = CliRunner().invoke(app, ["inspect", str(folder), "--base", str(tmp_path / "moe")])
    assert result.exit_code == 0 and "note: which modules of qwen3_moe models can be adapted" in result.output


def test_a_local_base_needs_no_network(llama: Path) -> None:
    program = """
import socket, sys
def refuse(*_, **__): raise SystemExit("went to the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from scute_sglang.base_folder import BaseFolder
assert not {"sglang", "peft", "transformers"} & set(sys.modules)
BaseFolder.open(sys.argv[1]).weight("model.layers.0.self_attn.q_proj")
assert "sglang" not in sys.modules and "peft" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(llama)], check=True)


def test_a_base_of_the_hub(llama: Path, tmp_path: Path) -> None:
    """Its files come from the cache of the Hub's client; the machine is told to be offline."""
    cached = tmp_path / "hub" / "models--me--tiny"
    shutil.copytree(llama, cached / "snapshots" / "0123abcd")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd")
    program = """
from scute_sglang.base_folder import BaseFolder, BaseModelError
base = BaseFolder.open("me/tiny")
assert base.weight("model.layers.0.self_attn.q_proj").shape == (120, 72) and base.folder is None
try:
    BaseFolder.open("me/other")
except BaseModelError as error:
    assert str(error).startswith("base model me/other: there is no such folder, and config.json did not come"), error
else:
    raise SystemExit("me/other was found")
"""
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path)


def test_a_sample_of_a_quantised_weight_may_be_off_by_a_tenth() -> None:
    sample = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.0, -0.125, 3.0, 1.5])
    check = partial(check_base_sample, "mine", "lm_head", sample)
    rounded = sample.half()
    rounded[2] += 2**-6
    check((sample * 1.09).bfloat16(), exact=False)
    check(sample.half(), exact=True)
    for held, exact in ((rounded, True), (sample * 1.11, False), (-sample, False)):
        with pytest.raises(AdapterError, match=r"module lm_head: was converted for another base model"):
            check(held, exact=exact)
