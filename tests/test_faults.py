"""A load that fails half-way is refused on all ranks, leaves nothing behind, and changes no answer of the others."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import faulty_plugin
from adapters import Recipe, lora, of, vera, write_all
from faulty_plugin import RANKS, fault
from models import write_model
from scute_converter import load
from scute_converter.files import CONFIG, SAFETENSORS
from scute_converter.normal_form import NormalForm, Pair
from scute_patches import sgl_kernel
from serving import Server, cpu_arguments, cpu_environment, serve
from test_lifecycle import listed
from test_parity_server import EXACT, compare, prompts

sgl_kernel.install()

from scute_sglang.manager import reason  # noqa: E402
from scute_sglang.packing import pack_adapter  # noqa: E402

HELD = {"lora": Recipe(lora(r=5), 1), "vera": Recipe(vera(), 2)}  # loaded all the time
RECIPES = {
    **HELD,
    "dora": Recipe(lora(r=3, use_dora=True, target_modules=["q_proj", "o_proj", "down_proj"]), 3),
    "hra": Recipe(of(peft.HRAConfig, r=3), 4),
    "wide": Recipe(lora(r=100, target_modules=["q_proj", "down_proj"]), 5),
}
ARENA_KIB = 160
Environment = dict[str, str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    write_model(path, "qwen2", tied=False)
    return path


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(RECIPES, tmp_path_factory.mktemp("adapters"), base)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return faulty_plugin.install(tmp_path_factory.mktemp("plugin") / "faulty")


@pytest.fixture(scope="module")
def two_ranks(
    base: Path, folders: dict[str, Path], environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    more = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nonexistent", **environment}
    with serve(
        base,
        tmp_path_factory.mktemp("faults") / "server.log",
        *cpu_arguments(),
        *("--tp", "2", "--max-loras-per-batch", "3", "--scute-adapter-memory", f"{ARENA_KIB}KiB"),
        "--disable-radix-cache",  # the same request twice is computed twice
        adapters={name: folders[name] for name in HELD},
        environment={**cpu_environment(), **more},
    ) as running:
        yield running


def answers(server: Server) -> list[Any]:
    """Of the base model and the adapters that are loaded all the time."""
    owners = [None, *HELD]
    found = server.generate(prompts(len(owners), seed=3), owners)
    return [(answer.output, answer.log_probabilities.tolist()) for answer in found]


def open_files(server: Server) -> int:
    return sum(process.num_fds() for process in psutil.Process(server.process.pid).children(recursive=True))


@pytest.mark.parametrize("rank", [0, 1, RANKS])
@pytest.mark.parametrize(
    ("step", "name", "part"),
    [
        ("disk", "dora", "Input/output error"),
        ("vanish", "dora", SAFETENSORS),
        ("shorten", "dora", SAFETENSORS),
        ("device memory", "dora", "not enough memory (OutOfMemoryError: CUDA out of memory.)"),
        ("host memory", "dora", "not enough memory (MemoryError)"),
        ("resolve", "dora", "it could not be loaded (RuntimeError: resolve)"),
        ("fold", "hra", "it could not be loaded (ArithmeticError: fold fails)"),
    ],
)
def test_a_step_that_fails_on_a_rank(
    two_ranks: Server,
    folders: dict[str, Path],
    environment: Environment,
    tmp_path: Path,
    step: str,
    name: str,
    part: str,
    rank: int | str,
) -> None:
    before = answers(two_ranks)
    folder = shutil.copytree(folders[name], tmp_path / "adapter")
    with fault(environment, step, rank):
        response = two_ranks.load("late", folder)
    message = response.json()["error_message"]
    assert response.status_code == 400
    assert message.startswith("adapter 'late': ") and part in message and "\n" not in message, message
    assert rank != 1 or step in ("vanish", "shorten") or "tensor-parallel rank 1" in message
    assert listed(two_ranks) == set(HELD)
    assert two_ranks.post("generate", input_ids=[7, 8], lora_path="late").status_code == 400
    assert answers(two_ranks) == before


def test_the_sound_folder_loads_after_all_that(
    two_ranks: Server, base: Path, folders: dict[str, Path], environment: Environment
) -> None:
    before, files = answers(two_ranks), open_files(two_ranks)
    for step, name in (("disk", "dora"), ("host memory", "dora"), ("device memory", "dora"), ("fold", "hra")) * 2:
        with fault(environment, step, 1):
            assert two_ranks.load("late", folders[name]).status_code == 400
        assert two_ranks.load("late", folders[name]).ok
        answer = two_ranks.generate(prompts(1, seed=11), ["late"])
        error, effect = compare(base, folders[name], answer)
        assert error <= EXACT < effect
        assert two_ranks.unload("late").ok
    assert listed(two_ranks) == set(HELD)
    assert answers(two_ranks) == before
    assert open_files(two_ranks) <= files + 2  # the client's own connections come and go


def test_more_than_the_arena_holds(two_ranks: Server, folders: dict[str, Path]) -> None:
    before = answers(two_ranks)
    response = two_ranks.load("wide", folders["wide"])
    message = response.json()["error_message"]
    assert response.status_code == 400
    assert "wide" in message and f"{ARENA_KIB << 10} bytes of adapter memory" in message
    assert "--scute-adapter-memory" in message
    assert listed(two_ranks) == set(HELD) and answers(two_ranks) == before


def test_a_dora_whose_row_has_no_length(
    two_ranks: Server, base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """``W + B A`` has a row of zeros on this base, of which each rank sees a half: ``m / 0`` is no scale."""
    folder = shutil.copytree(folders["dora"], tmp_path / "dora")
    tensors = load_file(folder / SAFETENSORS)
    weight = load_file(base / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
    prefix = "base_model.model.model.layers.1.self_attn.o_proj.lora_"
    tensors[f"{prefix}A.weight"] = torch.cat([weight[5:6], torch.zeros(2, weight.shape[1])])
    tensors[f"{prefix}B.weight"] = torch.zeros(weight.shape[0], 3)
    tensors[f"{prefix}B.weight"][5, 0] = -1
    save_file(tensors, folder / SAFETENSORS)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"lora_alpha": 3}))  # alpha / r is 1
    before = answers(two_ranks)
    response = two_ranks.load("flat", folder)
    message = response.json()["error_message"]
    assert response.status_code == 400
    assert "flat" in message and "layers.1.self_attn.o_proj.lora_magnitude_vector" in message and "length 0" in message
    assert listed(two_ranks) == set(HELD) and answers(two_ranks) == before


def test_a_block_that_the_host_has_no_memory_for() -> None:
    """Real: a quarter of the address space is asked of torch."""
    large = Pair(torch.ones(1).expand(1 << 22, 1 << 24), torch.ones(1 << 22, 3))
    with pytest.raises(RuntimeError) as caught:
        pack_adapter("large", {0: NormalForm(1 << 24, 3, pair=large)}, {}, ["q_proj"], torch.float32)
    assert reason(caught.value).startswith("not enough memory (RuntimeError: ") and "\n" not in reason(caught.value)


# On the session's server


def test_unload_of_an_unknown_adapter(server: Server) -> None:
    before = listed(server)
    response = server.unload("nobody")
    assert response.status_code == 400 and "nobody" in response.json()["error_message"]
    assert listed(server) == before


def test_two_adapters_of_one_name(server: Server, llama: Path, adapters: dict[str, Path]) -> None:
    response = server.load("dora", adapters["ia3"])
    assert response.status_code == 400 and "adapter dora is already loaded" in response.json()["error_message"]
    error, _ = compare(llama, adapters["dora"], server.generate(prompts(1, seed=21), ["dora"]))
    assert error <= EXACT


def test_loads_and_refusals_while_others_generate(
    server: Server, llama: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    broken = shutil.copytree(adapters["lora_r1"], tmp_path / "broken")
    os.truncate(broken / SAFETENSORS, os.path.getsize(broken / SAFETENSORS) - 20)
    owners = [None, "dora", "oft", "lora"]
    done = threading.Event()
    found: list[Any] = []

    def generate() -> None:
        seed = 0
        while not done.is_set():
            seed += 1
            found.extend(zip(owners, server.generate(prompts(4, seed), owners, new_tokens=20), strict=True))

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        for _ in range(3):
            assert server.load("sound", adapters["lora_r1"]).ok
            assert server.load("broken", broken).status_code == 400
            assert server.unload("sound").ok
    finally:
        done.set()
        thread.join()
    assert len(found) >= 4
    for name, answer in random.Random(0).sample(found, 4):
        error, _ = compare(llama, None if name is None else adapters[name], [answer])
        assert error <= EXACT, name


def test_what_the_refused_files_are(folders: dict[str, Path]) -> None:
    """The folders that were refused above are sound."""
    for name, folder in folders.items():
        assert load(folder).forms, name
