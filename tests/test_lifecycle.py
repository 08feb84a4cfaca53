"""Adapters come and go on the running server: load, unload, load again, more adapters than slots, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adapters import RECIPES, Recipe, lora
from serving import Server, cpu_arguments, cpu_environment, serve
from test_parity_server import CLEAR, EXACT, compare, prompts

SLOTS = 3
BYTES = 200_000  # of the arena: a few of the tiny adapters, so that bytes run out as well as slots


@pytest.fixture(scope="module")
def small_server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with no adapters at start, few slots and an arena that holds only some of them at a time."""
    log = tmp_path_factory.mktemp("small") / "server.log"
    options = ("--max-loras-per-batch", str(SLOTS), "--scute-adapter-memory", f"{BYTES // 1024}KiB")
    with serve(
        llama, log, *cpu_arguments(), *options, "--enable-cache-report", environment=cpu_environment()
    ) as running:
        yield running


def listed(server: Server) -> set[str]:
    response = server.post("load_lora_adapter", lora_name="probe", lora_path="/nonexistent")
    assert response.status_code == 400
    return set(response.json()["loaded_adapters"] or {})


def test_more_adapters_than_slots_and_bytes(small_server: Server, llama: Path, adapters: dict[str, Path]) -> None:
    names = [name for name in RECIPES if name not in ("lora_wide", "lora_patterns")]
    for name in names:
        response = small_server.load(name, adapters[name])
        assert response.ok, response.text
    owners: list[str | None] = [None, *names, None, *reversed(names)]
    answers = small_server.generate(prompts(len(owners), seed=4), owners)
    for name in [None, *names]:
        mine = [answer for answer, owner in zip(answers, owners, strict=True) if owner == name]
        error, _ = compare(llama, None if name is None else adapters[name], mine)
        assert error <= EXACT, f"{name}: {error:.2g}"
    for name in names:
        assert small_server.unload(name).ok
    assert listed(small_server) == set()


def test_same_name_with_other_weights(small_server: Server, llama: Path, tmp_path: Path) -> None:
    """The prefix cache must not answer with what the old weights computed."""
    first, second = tmp_path / "first", tmp_path / "second"
    Recipe(lora(r=4), 31).write(first, llama)
    Recipe(lora(r=4), 32).write(second, llama)
    prompt = prompts(1, seed=5)[0] * 3
    served = tmp_path / "adapter"
    for folder in (first, second, first):
        shutil.copytree(folder, served, dirs_exist_ok=True)
        assert small_server.load("same", served).ok
        answer = small_server.generate([prompt], ["same"])[0]
        assert answer.cached_tokens == 0
        error, effect = compare(llama, folder, [answer])
        assert error <= EXACT < CLEAR < effect
        assert small_server.unload("same").ok


def test_prefix_cache_belongs_to_one_adapter(server: Server, llama: Path, adapters: dict[str, Path]) -> None:
    prompt = prompts(1, seed=6)[0] * 4
    for name in [None, "dora", "ia3", None, "dora"]:
        answer = server.generate([prompt], [name])[0]
        error, _ = compare(llama, None if name is None else adapters[name], [answer])
        assert error <= EXACT, name


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("no_config", "adapter_config.json"),
        ("other_model", "layers.9"),
        ("truncated", "adapter_model.safetensors"),
        ("unknown_method", "peft_type"),
        ("not_a_number", "lora_B"),
        ("whole_modules", "modules_to_save"),
    ],
)
def test_refused_with_a_reason(
    server: Server, adapters: dict[str, Path], tmp_path: Path, breakage: str, message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(adapters["lora_r1"], folder)
    break_adapter(folder, breakage)
    before = listed(server)
    response = server.load("broken", folder)
    assert response.status_code == 400
    assert "broken" in response.json()["error_message"]
    assert message in response.json()["error_message"]
    assert "Traceback" not in response.json()["error_message"]
    assert listed(server) == before
    assert server.post("generate", text="hello", lora_path="broken").status_code == 400
    assert server.generate([[7, 8, 9]], [None])[0].output


def break_adapter(folder: Path, breakage: str) -> None:
    import json

    from safetensors.torch import load_file, save_file

    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, fields = load_file(weights), json.loads(config.read_text())
    if breakage == "no_config":
        config.unlink()
    elif breakage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-20])
    elif breakage == "unknown_method":
        config.write_text(json.dumps({**fields, "peft_type": "SOMETHING"}))
    elif breakage == "whole_modules":
        config.write_text(json.dumps({**fields, "modules_to_save": ["lm_head"]}))
    elif breakage == "not_a_number":
        name = next(key for key in tensors if "lora_B" in key)
        tensors[name].view(-1)[0] = torch.nan
        save_file(tensors, weights)
    elif breakage == "other_model":
        moved = {key.replace("layers.1.", "layers.9."): value for key, value in tensors.items()}
        save_file(moved, weights)


def test_base_weights_stay_while_adapters_are_loaded(server: Server, llama: Path) -> None:
    """DoRA's scales were made from the present ones."""
    response = server.post("update_weights_from_disk", model_path=str(llama))
    assert response.status_code == 400
    assert "unload" in response.json()["message"]
    assert server.generate([[7, 8, 9]], ["dora"])[0].output


def test_pinned_adapters_leave_room_for_the_others(small_server: Server, adapters: dict[str, Path]) -> None:
    """A pinned adapter is never evicted, so one that would shut others out for ever is refused."""
    for name in ("ia3", "vera"):
        assert small_server.load(name, adapters[name], pinned=True).ok
    response = small_server.load("lora_wide", adapters["lora_wide"])
    crowded = small_server.load("dora", adapters["dora"], pinned=True)
    assert crowded.status_code == 400 and "pin" in crowded.json()["error_message"]
    if response.ok:
        assert small_server.generate([[7, 8, 9]], ["lora_wide"])[0].output
        assert small_server.unload("lora_wide").ok
    for name in ("ia3", "vera"):
        assert small_server.unload(name).ok


def test_equal_content_under_two_names_is_one_block(small_server: Server, llama: Path, tmp_path: Path) -> None:
    """Pinned adapters must fit together: twice more than half of the arena does so only as one block. The prefix cache
    still keeps the names apart."""
    recipe = lora(r=17)
    for name, seed in (("one", 33), ("two", 33), ("other", 34)):
        Recipe(recipe, seed).write(tmp_path / name, llama)
    stored = (tmp_path / "one" / "adapter_model.safetensors").stat().st_size
    assert BYTES / 2 < stored < BYTES
    for name in ("one", "two"):
        response = small_server.load(name, tmp_path / name, pinned=True)
        assert response.ok, response.text
    response = small_server.load("other", tmp_path / "other")
    assert response.status_code == 400 and "no room" in response.json()["error_message"]

    prompt = prompts(1, seed=9)[0] * 3
    for name in ("one", "two"):
        answer = small_server.generate([prompt], [name])[0]
        assert answer.cached_tokens == 0
        error, effect = compare(llama, tmp_path / "one", [answer])
        assert error <= EXACT < CLEAR < effect
    assert small_server.unload("one").ok
    error, _ = compare(llama, tmp_path / "two", small_server.generate([prompt], ["two"]))
    assert error <= EXACT, "its block went with the other name"
    assert small_server.unload("two").ok


def test_base_requests_are_bit_equal_without_scute(
    server: Server, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    asked = prompts(5, seed=8)
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with serve(llama, log, *cpu_arguments(), "--lora-backend", "csgmv", environment=cpu_environment()) as plain:
        expected = [plain.generate([prompt])[0] for prompt in asked]
    for prompt, without in zip(asked, expected, strict=True):
        answer = server.generate([prompt], [None])[0]
        assert answer.output == without.output
        assert answer.log_probabilities.tolist() == without.log_probabilities.tolist()
