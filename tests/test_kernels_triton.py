"""Runs the tests of the Triton kernels, each device, also one that there is not, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent


def run(*files: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / file) for file in files)]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_under_the_interpreter() -> None:
    run("kernels_triton.py", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def test_what_is_compiled_for_a_gpu() -> None:
    pytest.importorskip("sglang")
    run("kernels_compiled.py")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu() -> None:
    run("kernels_triton.py", "kernels_cuda_graph.py", TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
