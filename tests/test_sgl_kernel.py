"""Without CUDA, a stand-in for sgl_kernel lets SGLang start; it never pretends to compute."""

import subprocess
import sys

import pytest
import torch

PROGRAM = """
import subprocess, sys
from scute_patches import sgl_kernel
print(sgl_kernel.install(), sgl_kernel.install())
child = "from sgl_kernel.kvcacheio import transfer_kv_all_layer as f; print(f.__class__.__module__); f.variant(1)"
child = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
print(child.stdout.strip())
print(child.stderr.strip().splitlines()[-1])
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real sgl_kernel loads here")
def test_stand_in_reaches_child_processes_and_raises_when_called():
    used, module, error = run(SGLANG_USE_CPU_ENGINE="1").stdout.splitlines()
    assert used == "True True"
    assert module == "sgl_kernel"
    assert error.startswith("NotImplementedError: sgl_kernel.kvcacheio.transfer_kv_all_layer.variant is compiled code")


def test_nothing_changes_unless_the_cpu_is_asked_for():
    used, *child = run().stdout.splitlines()
    assert used == "False False"
    assert not any("stand-in" in line or "NotImplementedError" in line for line in child)
