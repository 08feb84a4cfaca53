"""The real server in bf16: errors small beside the effects, and near the identity none larger than PEFT's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adapters import Oracle, Recipe, ia3, load_base, lora, oft, vera, write_all
from serving import Answer, Server, cpu_arguments, cpu_environment, serve
from test_parity_server import prompts

SHARE = 0.015  # of the adapter's own effect
FAR = ["lora", "lora_rs", "dora", "dora_part", "ia3", "vera", "oft", "oft_cayley"]
# Trained vectors lie this close to the identity; bf16 has steps of 0.4 to 0.8 % there.
NEAR = {
    "dora_near": Recipe(lora(use_dora=True), 41, distance=0.007),
    "ia3_near": Recipe(ia3(target_modules=["q_proj", "k_proj", "v_proj", "down_proj"]), 42, distance=0.007),
    "vera_near": Recipe(vera(), 43, distance=0.02),
    "oft_near": Recipe(oft(), 44, distance=0.02),
}
# Errors are means over some 700 tokens whose errors are about as large as they are; a mean of so many is within a few
# per cent of its expectation.
STATISTICAL = 1.1


@pytest.fixture(scope="module")
def base(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with weights rounded to bf16, so that server and oracle have the same ones."""
    path = tmp_path_factory.mktemp("llama-bf16")
    shutil.copytree(llama, path, dirs_exist_ok=True)
    load_base(llama, torch.bfloat16).save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def near(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(NEAR, tmp_path_factory.mktemp("near"), llama)


@pytest.fixture(scope="module")
def bf16_server(
    base: Path, adapters: dict[str, Path], near: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("bf16") / "server.log"
    folders = {**{name: adapters[name] for name in FAR}, **near}
    slots = ("--max-loras-per-batch", str(len(folders)))
    with serve(
        base, log, *cpu_arguments("bfloat16"), *slots, adapters=folders, environment=cpu_environment()
    ) as running:
        yield running


def errors(oracle: Oracle, answers: list[Answer]) -> torch.Tensor:
    return torch.cat([(answer.log_probabilities - oracle.log_probabilities(answer.tokens)).abs() for answer in answers])


def test_errors_are_small_beside_the_effect(bf16_server: Server, base: Path, adapters: dict[str, Path]) -> None:
    plain = Oracle(base, None)
    owners = [name for name in [*FAR, None] for _ in range(6)]
    answers = bf16_server.generate(prompts(len(owners), seed=21), owners)
    for name in FAR:
        mine = [answer for answer, owner in zip(answers, owners, strict=True) if owner == name]
        oracle = Oracle(base, adapters[name])
        error = errors(oracle, mine).mean()
        effect = torch.cat(
            [(oracle.log_probabilities(a.tokens) - plain.log_probabilities(a.tokens)).abs() for a in mine]
        ).mean()
        print(f"{name}: mean error {error:.2e}, effect {effect:.2f}, share {error / effect:.2%}")
        assert error <= SHARE * effect, name


def test_near_the_identity_no_worse_than_peft(bf16_server: Server, base: Path, near: dict[str, Path]) -> None:
    for name in NEAR:
        answers = bf16_server.generate(prompts(40, seed=22), [name] * 40)
        exact, peft = Oracle(base, near[name]), Oracle(base, near[name], torch.bfloat16)
        served = errors(exact, answers).mean()
        of_peft = torch.cat(
            [(peft.log_probabilities(a.tokens) - exact.log_probabilities(a.tokens)).abs() for a in answers]
        ).mean()
        print(f"{name}: served {served:.3e}, PEFT in bf16 {of_peft:.3e}")
        assert served <= STATISTICAL * of_peft, name
