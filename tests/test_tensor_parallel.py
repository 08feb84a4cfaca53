"""Tensor parallel of two on the CPU, over gloo: every method and every way a layer is sharded, against PEFT; and a load
that fails half-way is refused on both ranks, leaves nothing behind, and changes no answer of the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import faulty_plugin
from adapters import ALL, Recipe, ia3, lora, of, oft, vera, write_all
from faulty_plugin import RANKS, fault, held
from models import write_model
from scute_converter import load
from scute_converter.files import CONFIG, SAFETENSORS
from scute_patches import sgl_kernel  # the manager derives from a class of SGLang, whose import needs it on a CPU
from serving import Server, cpu_arguments, cpu_environment, serve
from test_lifecycle import listed
from test_parity_server import EXACT, assert_exact, compare, prompts

sgl_kernel.install()

from scute_sglang.manager import drop_replicas  # noqa: E402

# Qwen2: biases on q, k and v; 6 heads of 12. Even: attention shards are 36 wide, MLP shards 96. Padded: one KV head for
# two ranks and an MLP of 132, both of which SGLang pads on the CPU, so that the second rank computes no attention of
# the model at all, and 36 of its 96 MLP features.
MODELS: dict[str, dict[str, int]] = {"even": {}, "padded": {"num_key_value_heads": 1, "intermediate_size": 132}}
RECIPES = {
    "lora": Recipe(lora(r=6), 1),
    "lora_r1": Recipe(lora(r=1, target_modules=["o_proj", "down_proj", "k_proj"]), 2),
    "lora_bias": Recipe(lora(r=4, lora_bias=True, target_modules=["o_proj", "q_proj", "down_proj"]), 3),
    "lora_bias_all": Recipe(lora(bias="all", target_modules=["q_proj", "o_proj"]), 4),
    "lora_vocabulary": Recipe(lora(target_modules=["embed_tokens", "lm_head", "v_proj"]), 5),
    "dora": Recipe(lora(use_dora=True), 6),  # row-parallel norms of o_proj and down_proj
    "ia3": Recipe(ia3(), 7),  # the input scale of down_proj is sharded
    "ia3_rows": Recipe(ia3(target_modules=["o_proj", "q_proj"], feedforward_modules=["o_proj"]), 8),
    "vera": Recipe(vera(), 9),  # shards read slices of the shared basis
    "oft": Recipe(oft(oft_block_size=4, target_modules=ALL), 10),
    "oft_shared": Recipe(oft(oft_block_size=12, block_share=True, target_modules=["o_proj", "down_proj"]), 11),
    # Folded with the whole base weight, which the ranks bring together.
    "hra": Recipe(of(peft.HRAConfig, r=6), 13),
    "pissa": Recipe(lora(r=6, init_lora_weights="pissa"), 14),
    "pissa_dora": Recipe(lora(r=4, init_lora_weights="pissa", use_dora=True, target_modules=["k_proj", "o_proj"]), 15),
    "glora": Recipe(of(peft.GloraConfig, config_A_B="vector", config_D_E="vector"), 16),  # W^T C joins the biases
    "fourierft": Recipe(of(peft.FourierFTConfig, n_frequency=100), 17),
    "miss": Recipe(of(peft.MissConfig, r=7), 18),
    "boft": Recipe(of(peft.BOFTConfig, boft_block_size=4), 19),
    "beft": Recipe(of(peft.BeftConfig), 20),  # one rank adds the shift of o_proj and down_proj
}
# The three blocks of o_proj's 72 inputs cannot be split in two.
CROSSING = Recipe(oft(oft_block_size=24, target_modules=["o_proj"]), 12)

# Loads that fail: nothing of them is equal to what is loaded already, which would be shared.
FAILING = {
    "other_dora": Recipe(lora(r=3, use_dora=True, target_modules=["q_proj", "o_proj", "down_proj"]), 21),
    "other_hra": Recipe(of(peft.HRAConfig, r=3), 22),
    "wide": Recipe(lora(r=1000), 23),
}
ARENA_KIB = 2048


@pytest.fixture(scope="module", params=list(MODELS))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_model(path, "qwen2", tied=False, **MODELS[request.param])
    return path


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all({**RECIPES, **FAILING, "crossing": CROSSING}, tmp_path_factory.mktemp("adapters"), base)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a server with a plugin that lets steps of a load fail when it is asked to."""
    return faulty_plugin.install(tmp_path_factory.mktemp("plugin") / "faulty")


@pytest.fixture(scope="module")
def two_ranks(
    base: Path, folders: dict[str, Path], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    more = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent",  # keeps SGLang from trying NCCL; gloo it is
    }
    with serve(
        base,
        tmp_path_factory.mktemp("tp2") / "server.log",
        *cpu_arguments(),
        *("--tp", "2", "--max-loras-per-batch", str(len(RECIPES) + 1), "--scute-adapter-memory", f"{ARENA_KIB}KiB"),
        "--disable-radix-cache",  # the same request twice is computed twice
        adapters={name: folders[name] for name in RECIPES},
        environment={**cpu_environment(), **more, **environment},
    ) as running:
        yield running


def test_one_mixed_batch_equals_peft(two_ranks: Server, base: Path, folders: dict[str, Path]) -> None:
    names: list[str | None] = [None, *RECIPES]
    answers = two_ranks.generate(prompts(len(names), seed=9), names)
    assert_exact(base, folders, names, answers)


def test_replicated_heads_are_summed_once() -> None:
    """A projection that Hugging Face fuses: the query heads are sharded, the one key head is on both ranks. SGLang does
    not do that on a CPU, where it pads heads instead."""
    weight = torch.randn(10, 7)
    columns = (0, 7)
    ranges = [[((3 * rank, 3 * rank + 3), columns), ((6, 8), columns), ((8, 10), columns)] for rank in (0, 1)]
    held = []
    for rank in (0, 1):
        part = torch.zeros_like(weight)
        for rows, _ in ranges[rank]:
            part[slice(*rows)] = weight[slice(*rows)]
        drop_replicas(part, ranges, rank)
        held.append(part)
    assert torch.equal(held[0] + held[1], weight)


def test_blocks_across_a_shard_edge_are_refused(
    two_ranks: Server, folders: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    if "padded" in request.node.name:
        assert two_ranks.load("crossing", folders["crossing"]).ok  # all 72 inputs are the first rank's
        return
    response = two_ranks.load("crossing", folders["crossing"])
    assert response.status_code == 400
    message = response.json()["error_message"]
    assert "crossing" in message and "o_proj" in message and "24" in message
    assert two_ranks.generate([[7, 8, 9]], [None])[0].output


# Loads that fail

one_model = pytest.mark.parametrize("base", ["even"], indirect=True)


def answers(server: Server) -> list[Any]:
    """Of the base model and two of the adapters."""
    owners = [None, "lora", "vera"]
    found = server.generate(prompts(len(owners), seed=3), owners)
    return [(answer.output, answer.log_probabilities.tolist()) for answer in found]


def open_files(server: Server) -> int:
    return sum(process.num_fds() for process in psutil.Process(server.process.pid).children(recursive=True))


@one_model
@pytest.mark.parametrize("rank", [0, 1, RANKS])
@pytest.mark.parametrize(
    ("step", "name", "part"),
    [
        ("disk", "other_dora", "Input/output error"),
        ("vanish", "other_dora", SAFETENSORS),
        ("shorten", "other_dora", SAFETENSORS),
        ("device memory", "other_dora", "not enough memory (OutOfMemoryError: CUDA out of memory.)"),
        ("host memory", "other_dora", "not enough memory (MemoryError)"),
        ("resolve", "other_dora", "it could not be loaded (RuntimeError: resolve)"),
        ("fold", "other_hra", "it could not be loaded (ArithmeticError: fold fails)"),
    ],
)
def test_a_step_that_fails_on_a_rank(
    two_ranks: Server,
    folders: dict[str, Path],
    environment: dict[str, str],
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
    for each in (0, 1):
        held_before, held_after = held(environment, each, "late")
        assert held_after == held_before, "the load has left something behind"
    assert listed(two_ranks) == set(RECIPES)
    assert two_ranks.post("generate", input_ids=[7, 8], lora_path="late").status_code == 400
    assert answers(two_ranks) == before


@one_model
def test_the_sound_folder_loads_after_all_that(
    two_ranks: Server, base: Path, folders: dict[str, Path], environment: dict[str, str]
) -> None:
    before, files, arenas = answers(two_ranks), open_files(two_ranks), []
    steps = {"disk": "other_dora", "host memory": "other_dora", "device memory": "other_dora", "fold": "other_hra"}
    for step, name in [*steps.items()] * 2:
        with fault(environment, step, 1):
            assert two_ranks.load("late", folders[name]).status_code == 400
        arenas.append([held(environment, rank, "late")[1]["arena"][:2] for rank in (0, 1)])
        assert two_ranks.load("late", folders[name]).ok
        answer = two_ranks.generate(prompts(1, seed=11), ["late"])
        error, effect = compare(base, folders[name], answer)
        assert error <= EXACT < effect
        assert two_ranks.unload("late").ok
    assert all(arena == arenas[0] for arena in arenas), "bytes of an adapter that is gone are still taken"
    assert listed(two_ranks) == set(RECIPES)
    assert answers(two_ranks) == before
    assert open_files(two_ranks) <= files + 2  # the client's own connections come and go


@one_model
def test_more_than_the_arena_holds(two_ranks: Server, folders: dict[str, Path], environment: dict[str, str]) -> None:
    before = answers(two_ranks)
    assert load(folders["wide"]).forms  # it is sound
    response = two_ranks.load("wide", folders["wide"])
    message = response.json()["error_message"]
    assert response.status_code == 400
    assert "wide" in message and f"{ARENA_KIB << 10} bytes of adapter memory" in message
    assert "--scute-adapter-memory" in message
    for rank in (0, 1):
        held_before, held_after = held(environment, rank, "wide")
        assert held_after == held_before
    assert listed(two_ranks) == set(RECIPES) and answers(two_ranks) == before


@one_model
def test_a_dora_whose_row_has_no_length(
    two_ranks: Server, base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """``W + B A`` has a row of zeros on this base, of which each rank sees a half: ``m / 0`` is no scale."""
    folder = shutil.copytree(folders["other_dora"], tmp_path / "dora")
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
    assert listed(two_ranks) == set(RECIPES) and answers(two_ranks) == before
