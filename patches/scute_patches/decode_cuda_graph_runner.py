"""``sglang.srt.model_executor.runner.decode_cuda_graph_runner``: a third graph per batch size.

SGLang captures a decode graph with adapters and one without. An input transform (OFT, a feed-forward (IA)3) changes
what the base GEMM reads, which a graph of batches without one should not pay for: so those with one get a graph of
their own.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.model_executor.runner_utils.capture_mode import capture_lora_variant
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from scute_patches.server_args import BACKEND

_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"


ROTATE_VARIANT = "rotate"  # under this label the graph with input transforms is captured and found again


def _is_scute(runner) -> bool:
    manager = runner.model_runner.lora_manager
    return manager is not None and manager.lora_backend.name == BACKEND


def install() -> None:
    def capture_one_shape(
        original: Callable, self, size, forward, stream_idx=None, variant_label=None, attention_variant=None
    ):
        result = original(self, size, forward, stream_idx, variant_label, attention_variant)
        if variant_label == "lora" and _is_scute(self):
            with capture_lora_variant(ROTATE_VARIANT):
                original(self, size, forward, stream_idx, ROTATE_VARIANT, attention_variant)
        return result

    def resolve_lora_variant(label: str | None, self, forward_batch) -> str | None:
        if label == "lora" and _is_scute(self) and self.model_runner.lora_manager.rotates(forward_batch):
            return ROTATE_VARIANT
        return label

    HookRegistry.register(f"{_RUNNER}.capture_one_shape", capture_one_shape, HookType.AROUND)
    HookRegistry.register(f"{_RUNNER}._resolve_lora_variant", resolve_lora_variant, HookType.AFTER)
