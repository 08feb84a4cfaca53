"""Faults that people have met elsewhere and that no other test keeps away, through the real server.

``docs/field-reports.md`` lists every kind and the test that keeps it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from peft import PeftConfig
from safetensors.torch import load_file, save_file

from adapters import CONFIG, WEIGHTS, Oracle, Recipe, ia3, lora, oft, vera
from models import write_model
from serving import Answer, Server
from test_api import model_name, native_text
from test_lifecycle import listed
from test_parity_server import CLEAR, EXACT, compare, prompts


@contextmanager
def loaded(server: Server, name: str, folder: Path) -> Iterator[None]:
    response = server.load(name, folder)
    assert response.ok, response.text
    try:
        yield
    finally:
        assert server.unload(name).ok


def answers(server: Server, folder: Path, seed: int = 51) -> list[Answer]:
    with loaded(server, "mine", folder):
        return server.generate(prompts(2, seed), ["mine", "mine"])


def exact(server: Server, base: Path, folder: Path) -> list[Answer]:
    """What the adapter answers; it equals PEFT and is not what the base would answer."""
    found = answers(server, folder)
    error, effect = compare(base, folder, found)
    assert error <= EXACT < CLEAR < effect, f"error {error:.2g}, effect {effect:.2g}"
    return found


def refused(server: Server, folder: Path, *parts: str) -> None:
    """Refused with status 400 in one line that names the adapter and holds ``parts``; nothing is left behind."""
    before = listed(server)
    response = server.load("refused", folder)
    assert response.status_code == 400
    message = response.json()["error_message"]
    assert "\n" not in message
    for part in ("refused", *parts):
        assert part in message, message
    assert listed(server) == before
    assert server.generate([[7, 8, 9]], [None])[0].output


def distance(one: list[Answer], other: list[Answer]) -> float:
    """Largest difference of the log-probabilities of the prompts, which are equal."""
    return max(
        (a.log_probabilities - b.log_probabilities)[: len(a.prompt) - 1].abs().max().item()
        for a, b in zip(one, other, strict=True)
    )


def rewritten(folder: Path, target: Path, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> Path:
    """A copy of the adapter with other fields of its config, and with other tensors."""
    shutil.copytree(folder, target)
    config = json.loads((target / CONFIG).read_text())
    (target / CONFIG).write_text(json.dumps({**config, **fields}))
    if tensors is not None:
        save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


# Scales


@pytest.mark.parametrize("rank", [16, 64])
def test_flag_of_rslora_changes_the_scale(server: Server, llama: Path, tmp_path: Path, rank: int) -> None:
    """The same weights with the flag and without, with patterns of ranks and of alphas in both spellings."""
    patterns = {
        "rank_pattern": {"k_proj": 3, r"layers\.1\.mlp\.down_proj": 20},
        "alpha_pattern": {"v_proj": 40, r"layers\.0\.self_attn\.o_proj": 2},
    }
    Recipe(lora(r=rank, use_rslora=True, **patterns), 61, distance=0.5).write(tmp_path / "on", llama)
    off = rewritten(tmp_path / "on", tmp_path / "off", use_rslora=False)
    assert distance(exact(server, llama, tmp_path / "on"), exact(server, llama, off)) > CLEAR


def test_magnitude_of_dora_is_not_ignored(server: Server, llama: Path, tmp_path: Path) -> None:
    Recipe(lora(r=4, use_dora=True, target_modules=["q_proj", "down_proj"]), 62).write(tmp_path / "dora", llama)
    tensors = load_file(tmp_path / "dora" / WEIGHTS)
    plain = {key: tensor for key, tensor in tensors.items() if "magnitude" not in key}
    rewritten(tmp_path / "dora", tmp_path / "plain", plain, use_dora=False)
    assert distance(exact(server, llama, tmp_path / "dora"), exact(server, llama, tmp_path / "plain")) > CLEAR
    # Without the flag it is a DoRA all the same: the tensors decide.
    unmarked = rewritten(tmp_path / "dora", tmp_path / "unmarked", use_dora=False)
    assert distance(answers(server, tmp_path / "dora"), answers(server, unmarked)) == 0


@pytest.mark.parametrize("suffix", ["", ".weight", ".default.weight"])
def test_spellings_of_the_magnitude(server: Server, llama: Path, tmp_path: Path, suffix: str) -> None:
    Recipe(lora(r=4, use_dora=True, target_modules=["o_proj", "up_proj"]), 67).write(tmp_path / "dora", llama)
    tensors = load_file(tmp_path / "dora" / WEIGHTS)
    spelled = {re.sub(r"(magnitude_vector).*", rf"\1{suffix}", key): tensor for key, tensor in tensors.items()}
    exact(server, llama, tmp_path / "dora")
    other = rewritten(tmp_path / "dora", tmp_path / "spelled", spelled)
    assert distance(answers(server, other), answers(server, tmp_path / "dora")) == 0


def test_files_of_older_oft(server: Server, adapters: dict[str, Path], tmp_path: Path) -> None:
    """What says nothing of how the rotation is built, and what was built to rotate the output."""
    refused(server, rewritten(adapters["oft"], tmp_path / "silent", use_cayley_neumann=None), "use_cayley_neumann")
    tensors = load_file(adapters["oft"] / WEIGHTS)
    old = {key.replace("oft_R.weight", "oft_r"): torch.randn(3, 4, 4) for key in tensors}
    refused(server, rewritten(adapters["oft"], tmp_path / "old", old), "oft_r", "before 0.14", "train it again")


# Keys


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"])
def test_names_of_training_wrappers(
    server: Server, llama: Path, adapters: dict[str, Path], tmp_path: Path, wrapper: str
) -> None:
    """The first wraps the whole model, as do DDP's and FSDP's, the others single layers."""
    before, after = (
        ("self_attn.", f"self_attn.{wrapper}.")
        if wrapper.startswith("_c")
        else ("base_model.", f"{wrapper}.base_model.")
    )
    wrapped = {key.replace(before, after): tensor for key, tensor in load_file(adapters["lora"] / WEIGHTS).items()}
    folder = rewritten(adapters["lora"], tmp_path / "wrapped", wrapped)
    logged = len(server.log.read_text())
    error, effect = compare(llama, adapters["lora"], answers(server, folder))
    assert error <= EXACT < CLEAR < effect
    assert f"names of training wrappers removed from the keys: {wrapper}" in server.log.read_text()[logged:]


def test_a_wrapper_that_nobody_knows(server: Server, adapters: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(adapters["lora"] / WEIGHTS)
    wrapped = {key.replace("self_attn.", "self_attn._new_wrapper."): tensor for key, tensor in tensors.items()}
    refused(server, rewritten(adapters["lora"], tmp_path / "wrapped", wrapped), "_new_wrapper", "remove it from the")


# Targets


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.down_proj", "up_proj"]},
        {"target_modules": r".*layers\.[01]\.(self_attn\.(q|v)|mlp\.gate)_proj"},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj", "up_proj"]},
        {"target_modules": ["k_proj"], "layers_to_transform": [0]},
    ],
    ids=["dotted", "regex", "all-linear", "one-layer"],
)
def test_targets_in_every_spelling(server: Server, llama: Path, tmp_path: Path, targets: dict[str, Any]) -> None:
    Recipe(lora(r=5, **targets), 63).write(tmp_path / "adapter", llama)
    exact(server, llama, tmp_path / "adapter")


# Of layer 0 and of layer 1: parts of the fused layers, and others in each layer.
PARTS = {
    "v,q": r".*(0\.self_attn\.v|1\.self_attn\.q)_proj",
    "qko,up": r".*(0\.self_attn\.[qko]|1\.mlp\.up)_proj",
    "gate,k": r".*(0\.mlp\.gate|1\.self_attn\.k)_proj",
}
METHODS: dict[str, Callable[..., Callable[[], PeftConfig]]] = {
    "lora": lambda **fields: lora(r=3, **fields),
    "dora": lambda **fields: lora(r=3, use_dora=True, **fields),
    "ia3": lambda **fields: ia3(feedforward_modules=[], **fields),
    "vera": lambda **fields: vera(r=9, **fields),
    "oft": oft,
}


@pytest.mark.parametrize("method", METHODS)
def test_parts_of_fused_layers_that_an_adapter_leaves_out(
    server: Server, llama: Path, tmp_path: Path, method: str
) -> None:
    """What is not adapted keeps the scale 1, not 0, whatever the other parts of the same layer have."""
    folders = {}
    for number, (name, targets) in enumerate(PARTS.items()):
        folders[f"parts {name}"] = tmp_path / str(number)
        Recipe(METHODS[method](target_modules=targets), 70 + number).write(tmp_path / str(number), llama)
    for name, folder in folders.items():
        assert server.load(name, folder).ok
    found = server.generate(prompts(len(folders) + 1, seed=52), [None, *folders])
    for name, answer in zip(folders, found[1:], strict=True):
        error, effect = compare(llama, folders[name], [answer])
        assert error <= EXACT < CLEAR < effect, f"{name}: error {error:.2g}, effect {effect:.2g}"
    for name in folders:
        assert server.unload(name).ok


# The model that an adapter was made for


def test_an_adapter_of_fewer_layers_is_served(server: Server, llama: Path, tmp_path: Path) -> None:
    """Of a model with as many features and one layer less: it adapts the layers that it has."""
    write_model(tmp_path / "shallow", "llama", tied=False, num_hidden_layers=1)
    Recipe(lora(r=5), 64).write(tmp_path / "adapter", tmp_path / "shallow")
    exact(server, llama, tmp_path / "adapter")


def test_whole_modules_are_never_left_out(server: Server, llama: Path, tmp_path: Path) -> None:
    """A norm or a head that was retrained as a whole: by the field, and by the tensor if the field is gone."""
    for module, tensor in (("norm", "model.norm"), ("lm_head", "lm_head")):
        Recipe(lora(r=2, target_modules=["q_proj"]), 65).write(tmp_path / module, llama)
        weight = load_file(llama / "model.safetensors")[f"{tensor}.weight"] + 1
        tensors = {
            **load_file(tmp_path / module / WEIGHTS),
            f"base_model.model.{tensor}.weight": weight,
        }
        marked = rewritten(tmp_path / module, tmp_path / f"{module} marked", tensors, modules_to_save=[module])
        refused(server, marked, "modules_to_save", module)
        refused(server, rewritten(tmp_path / module, tmp_path / f"{module} unmarked", tensors), module)


# Tokens


def test_tokens_beyond_the_vocabulary_are_refused(server: Server, adapters: dict[str, Path], tmp_path: Path) -> None:
    for name, content in (
        ("inside", {"<pad>": 0, "<|system|>": 310}),
        ("beyond", {"<|system|>": 5, "<new>": 311}),
    ):
        folder = rewritten(adapters["lora_r1"], tmp_path / name)
        (folder / "added_tokens.json").write_text(json.dumps(content))
    assert distance(answers(server, tmp_path / "inside"), answers(server, adapters["lora_r1"])) == 0
    refused(server, tmp_path / "beyond", "added_tokens.json", "'<new>'", "311")


@pytest.mark.parametrize("content", ["{", "[1]", '{"<new>": "311"}'])
def test_a_broken_table_of_tokens_is_a_note(
    server: Server, adapters: dict[str, Path], tmp_path: Path, content: str
) -> None:
    folder = rewritten(adapters["lora_r1"], tmp_path / "adapter")
    (folder / "added_tokens.json").write_text(content)
    logged = len(server.log.read_text())
    assert distance(answers(server, folder), answers(server, adapters["lora_r1"])) == 0
    assert "adapter mine: tokens that were added are not known" in server.log.read_text()[logged:]


# Files


def test_a_bin_file_is_the_same_adapter(server: Server, adapters: dict[str, Path], tmp_path: Path) -> None:
    targets = {"target_modules": r".*\.(q|k|v|o)_proj|.*mlp\.[a-z]+_proj"}
    folder = rewritten(adapters["lora"], tmp_path / "bin", **targets)
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    assert distance(answers(server, folder), answers(server, adapters["lora"])) == 0


def test_tensors_that_were_not_gathered(server: Server, adapters: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(adapters["lora_r1"] / WEIGHTS)
    key = next(iter(tensors))
    refused(server, rewritten(adapters["lora_r1"], tmp_path / "one", tensors | {key: torch.empty(0)}), "is empty (0,)")
    refused(server, rewritten(adapters["lora_r1"], tmp_path / "none", {}), "there are no tensors")
    nothing = {name: tensor * ("lora_A" in name) for name, tensor in tensors.items()}
    logged = len(server.log.read_text())
    with loaded(server, "mine", rewritten(adapters["lora_r1"], tmp_path / "nothing", nothing)):
        assert "adapter mine: the adapter has no effect" in server.log.read_text()[logged:]


# Types


def test_types_of_the_file(server: Server, llama: Path, tmp_path: Path) -> None:
    """bf16 with a number beyond fp16, which fp32 serves; equal numbers in three types are one adapter."""
    Recipe(lora(r=4, target_modules=["v_proj", "down_proj"]), 66).write(tmp_path / "fp32", llama)
    tensors = load_file(tmp_path / "fp32" / WEIGHTS)
    half = {key: tensor.half().bfloat16().half() for key, tensor in tensors.items()}  # exact in all three
    wide = dict(half)
    first = next(key for key in half if "lora_B" in key)
    second = first.replace("lora_B", "lora_A")
    wide[first], wide[second] = half[first] * 0 + 3e-5, half[second].bfloat16() * 1e6
    assert wide[second].abs().max() > torch.finfo(torch.float16).max
    found = {}
    for name, dtype, content in (
        ("half", torch.float16, half),
        ("bf16", torch.bfloat16, half),
        ("float", torch.float32, half),
        ("wide", torch.bfloat16, wide),
    ):
        folder = rewritten(
            tmp_path / "fp32", tmp_path / name, {key: tensor.to(dtype) for key, tensor in content.items()}
        )
        found[name] = exact(server, llama, folder)
    assert distance(found["half"], found["float"]) == distance(found["bf16"], found["float"]) == 0


# Names


def test_the_name_in_the_model_wins(server: Server) -> None:
    """Two fields that name an adapter: one of them answers, and always the same."""
    request = {"prompt": "Adapters share", "temperature": 0, "max_tokens": 8, "lora_path": "ia3"}
    both = server.post("v1/completions", model=f"{model_name(server)}:dora", **request)
    assert both.json()["choices"][0]["text"] == native_text(server, "dora")
    one = server.post("v1/completions", model=model_name(server), **request)
    assert one.json()["choices"][0]["text"] == native_text(server, "ia3") != native_text(server, "dora")
    streamed = requests.post(
        f"{server.url}/v1/completions",
        json={**request, "model": f"{model_name(server)}:nobody", "stream": True},
        timeout=300,
    )
    assert streamed.status_code in (400, 404) or "error" in streamed.text
    assert '"text"' not in streamed.text


def test_an_unloaded_adapter_is_loaded_again_when_it_is_named(server: Server, llama: Path, tmp_path: Path) -> None:
    """SGLang remembers where an adapter came from. What answers is what lies there now, or nothing."""
    folder = tmp_path / "adapter"
    Recipe(lora(r=4), 67).write(folder, llama)
    before = exact(server, llama, folder)  # and it is unloaded
    shutil.rmtree(folder)
    response = server.post("generate", input_ids=[7, 8, 9], lora_path="mine")
    assert response.status_code == 400 and "mine" in response.text
    Recipe(lora(r=4), 68).write(folder, llama)
    after = server.generate(prompts(2, 51), ["mine", "mine"])
    error, _ = compare(llama, folder, after)
    assert error <= EXACT and distance(before, after) > CLEAR
    assert server.unload("mine").ok


# The oracle itself


def test_the_oracle_does_not_depend_on_what_it_answered_before(llama: Path, adapters: dict[str, Path]) -> None:
    tokens = prompts(1, seed=53)[0]
    one = Oracle(llama, adapters["dora"])
    first = one.log_probabilities(tokens)
    plain, other = Oracle(llama, None), Oracle(llama, adapters["dora_part"])
    expected = plain.log_probabilities(tokens)
    other.log_probabilities(tokens)
    assert torch.equal(one.log_probabilities(tokens), first)
    assert torch.equal(plain.log_probabilities(tokens), expected)
    assert (first - expected).abs().max() > CLEAR
