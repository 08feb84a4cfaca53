"""The plugin's entry point: symbols of SGLang are as expected, and a start with others stops in one readable line."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from scute_patches import sgl_kernel
from scute_patches.signatures import IncompatibleSGLangError
from scute_sglang import options
from serving import cpu_environment

sgl_kernel.install()

from scute_patches.decode_cuda_graph_runner import share_attention_wrappers, warmed_up_once  # noqa: E402
from scute_sglang.compatibility import MODEL_SIGNATURES, SIGNATURES, check  # noqa: E402

OTHER_SGLANG = """
import sys
from scute_patches import signatures
from scute_sglang import compatibility, plugin
compatibility.SGLANG_VERSION = "0.0.1"
sys.argv = ["launch_server", *sys.argv[1:]]
plugin.register()
print("goes on")
from sglang.srt.lora.backend.lora_registry import get_backend_from_name
get_backend_from_name("scute")
"""


def test_every_symbol_has_the_signature_it_was_written_for() -> None:
    check({**SIGNATURES, **MODEL_SIGNATURES})


def test_a_changed_symbol_is_named() -> None:
    target = "sglang.srt.lora.utils.get_lm_head_pruned_lens"
    with pytest.raises(IncompatibleSGLangError, match=r"get_lm_head_pruned_lens") as caught:
        check({target: ("forward_batch", "more")})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("asked", [["--lora-backend", "scute"], ["--lora-backend=scute"]])
def test_another_sglang_stops_a_start_with_scute(asked: list[str]) -> None:
    result = run_with_another_sglang(asked)
    assert result.returncode == 1
    said = [line for line in result.stderr.splitlines() if "scute-sglang" in line]
    assert len(said) == 1 and "0.0.1" in said[0] and "pip install" in said[0]
    assert "goes on" not in result.stdout and "Traceback" not in result.stderr


def test_another_sglang_goes_on_without_scute() -> None:
    result = run_with_another_sglang(["--lora-backend", "csgmv"])
    assert "goes on" in result.stdout
    # sglang.Engine, whose choice no command line shows, meets the same line when it builds the backend.
    assert "IncompatibleSGLangError" in result.stderr and "0.0.1" in result.stderr


def run_with_another_sglang(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-W", "ignore", "-c", OTHER_SGLANG, *arguments]
    environment = {**os.environ, **cpu_environment()}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("text", "expected"), [("1024", 1024), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2GB", 2 * 10**9)]
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert options.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "5 TiB", "1e9"])
def test_no_amounts_of_memory(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        options.parse_bytes(text)


class Attention:
    """An attention backend that makes a wrapper per capture, as SGLang's for FlashInfer does."""

    decode_backend = "fa2"  # as in FlashInferAttnBackend: the name of a kernel, not a backend

    def init_forward_metadata(self) -> None: ...

    def _create_decode_wrappers(self, bs: int, num_tokens: int) -> list[object]:
        return [object()]


class HybridAttention:
    """Another backend in prefill than in decode, as SGLang's HybridAttnBackend."""

    def __init__(self, decode_backend: Attention) -> None:
        self.decode_backend = decode_backend


@pytest.mark.parametrize("hybrid", [False, True])
def test_graphs_of_a_batch_size_share_their_attention_plan(hybrid: bool) -> None:
    attention = Attention()
    used = HybridAttention(attention) if hybrid else attention
    share_attention_wrappers(used, anew=True)
    first = attention._create_decode_wrappers(4, 4)
    share_attention_wrappers(used, anew=False)  # the graph without adapters
    assert attention._create_decode_wrappers(4, 4) is first
    assert attention._create_decode_wrappers(8, 8) is not first
    share_attention_wrappers(used, anew=True)  # captured again
    assert attention._create_decode_wrappers(4, 4) is not first


def test_a_further_graph_is_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang calls a forward to warm up, again, and to capture it; what is captured always runs."""
    seen: list[int] = []

    def forward(rows: int, *, pp_proxy_tensors: object = None) -> tuple[int, int]:
        seen.append(rows)
        return rows, len(seen)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run = warmed_up_once(forward)
    assert "pp_proxy_tensors" in inspect.signature(run).parameters  # SGLang asks
    assert [run(5), run(5), run(5), run(5)] == [(5, 1), (5, 1), (5, 2), (5, 3)]
    assert seen == [5, 5, 5]
    run = warmed_up_once(forward)
    assert run(6) == (6, 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run(6) == (6, 5)
