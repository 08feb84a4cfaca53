"""One real SGLang server on the CPU for the whole session, with adapters of every method."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when SGLang is imported, which some tests do in this process

from adapters import EVERY_METHOD, RECIPES, write_all
from models import write_model
from serving import Server, cpu_arguments, cpu_environment, serve


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, fp32, head not tied."""
    path = tmp_path_factory.mktemp("llama")
    write_model(path, "llama", tied=False)
    return path


@pytest.fixture(scope="session")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every recipe, written by PEFT for the tiny Llama; by name."""
    return write_all({**RECIPES, **EVERY_METHOD}, tmp_path_factory.mktemp("adapters"), llama)


@pytest.fixture(scope="session")
def server(llama: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The session's server: all recipes loaded, and slots for all of them and a few more."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with serve(
        llama,
        log,
        *cpu_arguments(),
        "--enable-cache-report",
        "--max-loras-per-batch",
        str(len(adapters) + 4),
        adapters=adapters,
        environment=cpu_environment(),
    ) as running:
        yield running
