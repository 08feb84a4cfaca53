"""``sglang.srt.layers.logits_processor``: the output head is computed as without adapters, then adapted.

SGLang calls a wrapped head through the wrapper, past its own paths for the head (fp32 logits, quantised heads, output
buffers), for base requests too. Here those paths compute every row, and adapters are added to their result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from scute_patches.server_args import BACKEND


def install() -> None:
    def compute_lm_head(original: Callable, self, hidden_states, lm_head: Any, embedding_bias=None, *, out=None):
        if not isinstance(lm_head, BaseLayerWithLoRA) or getattr(lm_head.lora_backend, "name", None) != BACKEND:
            return original(self, hidden_states, lm_head, embedding_bias, out=out)

        head: Any = lm_head  # a ScuteParallelLMHead, whose module this package must not import

        def base(rows):
            return original(self, rows, head.base_layer, embedding_bias, out=out)

        return head.logits(hidden_states, base)

    HookRegistry.register(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", compute_lm_head, HookType.AROUND
    )
