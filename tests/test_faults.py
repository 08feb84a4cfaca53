"""Loads and unloads that fail while others are served; the host has no memory for a block."""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from scute_converter.files import SAFETENSORS
from scute_converter.normal_form import NormalForm, Pair
from scute_patches import sgl_kernel
from serving import Server
from test_lifecycle import listed
from test_parity_server import EXACT, compare, prompts

sgl_kernel.install()

from scute_sglang.manager import reason  # noqa: E402
from scute_sglang.packing import pack_adapter  # noqa: E402


def test_a_block_that_the_host_has_no_memory_for() -> None:
    """Real: a quarter of the address space is asked of torch."""
    large = Pair(torch.ones(1).expand(1 << 22, 1 << 24), torch.ones(1 << 22, 3))
    with pytest.raises(RuntimeError) as caught:
        pack_adapter("large", {0: NormalForm(1 << 24, 3, pair=large)}, {}, ["q_proj"], torch.float32)
    assert reason(caught.value).startswith("not enough memory (RuntimeError: ") and "\n" not in reason(caught.value)


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
