"""Tensor parallel of two on the CPU, over gloo: every method and every way a layer is sharded, against PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch

from adapters import ALL, Recipe, ia3, lora, of, oft, vera, write_all
from models import write_model
from scute_patches import sgl_kernel  # the manager derives from a class of SGLang, whose import needs it on a CPU
from serving import Server, cpu_arguments, cpu_environment, serve
from test_parity_server import assert_exact, prompts

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


@pytest.fixture(scope="module", params=list(MODELS))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_model(path, "qwen2", tied=False, **MODELS[request.param])
    return path


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all({**RECIPES, "crossing": CROSSING}, tmp_path_factory.mktemp("adapters"), base)


@pytest.fixture(scope="module")
def two_ranks(base: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {
        **cpu_environment(),
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent",  # keeps SGLang from trying NCCL; gloo it is
    }
    with serve(
        base,
        tmp_path_factory.mktemp("tp2") / "server.log",
        *cpu_arguments(),
        *("--tp", "2", "--max-loras-per-batch", str(len(RECIPES))),
        adapters={name: folders[name] for name in RECIPES},
        environment=environment,
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
