"""``sglang.srt.layers.logits_processor``: base requests use the output head as without adapters.

SGLang calls a wrapped head through the wrapper even if no adapter of the batch adapts it, which skips its own paths
for the head (fp32 logits, quantised heads, output buffers).
"""

from __future__ import annotations

from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from scute_patches.server_args import BACKEND


def install() -> None:
    def compute_lm_head(self, hidden_states, lm_head, *args, **kwargs):
        wrapped = isinstance(lm_head, BaseLayerWithLoRA) and getattr(lm_head.lora_backend, "name", None) == BACKEND
        if wrapped and not lm_head.lora_active:
            lm_head = lm_head.base_layer
        return (self, hidden_states, lm_head, *args), kwargs

    HookRegistry.register(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", compute_lm_head, HookType.BEFORE
    )
