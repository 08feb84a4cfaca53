"""``sglang.srt.model_executor.runner.decode_cuda_graph_runner``: graphs by which operators a batch needs.

SGLang captures a decode graph with adapters and one without. Shared bases (VeRA) need launches of their own, and an
input transform (OFT, a feed-forward (IA)3) changes what the base GEMM reads; a graph of batches without them should not
pay for them. So SGLang's graph with adapters holds the own parts only, and there is one more for each set of other
operators, or two that differ in their further rows, see ``DecodeVariant``.

All graphs of a batch size must read the attention plan that a replay renews. FlashInfer's backend makes new wrappers,
each with a plan of its own, at every capture, and renews the plan of the last: with two graphs or more, the others read
freed memory. So its wrappers are made once per batch size here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from sglang.srt.model_executor.runner_utils.capture_mode import capture_lora_variant
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from scute_patches.server_args import BACKEND

_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"


@dataclass(frozen=True)
class DecodeVariant:
    """What a decode graph holds besides the operators of own parts.

    ``shared``: those of shared bases. ``rotates``: the input transforms of layers of one projection, which is what
    (IA)3 needs. ``rotates_fused``: those of all layers; each projection of a fused one has inputs of its own then, and
    the base GEMM further rows, ``few`` or as many as there can be.
    """

    shared: bool = False
    rotates: bool = False
    rotates_fused: bool = False
    few: bool = False


OWN_VARIANT = "lora"  # SGLang's own label of the graph with adapters
# By the labels under which the graphs are captured and found again.
DECODE_VARIANTS = {
    OWN_VARIANT: DecodeVariant(),
    "shared": DecodeVariant(shared=True),
    "rotate": DecodeVariant(rotates=True),
    "shared-rotate": DecodeVariant(shared=True, rotates=True),
    "rotate-fused": DecodeVariant(rotates=True, rotates_fused=True),
    "shared-rotate-fused": DecodeVariant(shared=True, rotates=True, rotates_fused=True),
    "rotate-few": DecodeVariant(rotates=True, rotates_fused=True, few=True),
    "shared-rotate-few": DecodeVariant(shared=True, rotates=True, rotates_fused=True, few=True),
}


def _is_scute(runner) -> bool:
    manager = runner.model_runner.lora_manager
    return manager is not None and manager.lora_backend.name == BACKEND


def install() -> None:
    def capture_one_shape(
        original: Callable, self, size, forward, stream_idx=None, variant_label=None, attention_variant=None
    ):
        if not _is_scute(self):
            return original(self, size, forward, stream_idx, variant_label, attention_variant)
        share_attention_wrappers(self.model_runner.attn_backend, anew=variant_label != "nolora")
        result = original(self, size, forward, stream_idx, variant_label, attention_variant)
        if variant_label == OWN_VARIANT:
            for label in DECODE_VARIANTS:
                if label != OWN_VARIANT:
                    with capture_lora_variant(label):
                        original(self, size, warmed_up_once(forward), stream_idx, label, attention_variant)
        return result

    def resolve_lora_variant(label: str | None, self, forward_batch) -> str | None:
        if label != OWN_VARIANT or not _is_scute(self):
            return label
        return self.model_runner.lora_manager.decode_variant(forward_batch)

    HookRegistry.register(f"{_RUNNER}.capture_one_shape", capture_one_shape, HookType.AROUND)
    HookRegistry.register(f"{_RUNNER}._resolve_lora_variant", resolve_lora_variant, HookType.AFTER)


def warmed_up_once(forward: Callable) -> Callable:
    """``forward``, whose second call only returns what the first did, unless that call is captured.

    SGLang runs a forward twice before it captures it, and looks at the output. Another graph of a batch size has been
    warmed up by those before, but for kernels of base GEMMs that only its number of further rows needs.
    """
    calls, first = 0, None

    @wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        nonlocal calls, first
        calls += 1
        if calls == 2 and not torch.cuda.is_current_stream_capturing():
            output, first = first, None
            return output
        output = forward(*arguments, **named)
        first = output if calls == 1 else None
        return output

    return run


def share_attention_wrappers(attention: Any, anew: bool) -> None:
    """From now on ``attention`` (a SGLang attention backend) makes the wrappers of a batch size once. ``anew``: those
    of before are not used again.

    Raises ``RuntimeError`` for FlashInfer's backend for latent attention, which makes them where none can be shared.
    """
    inner = getattr(attention, "decode_backend", None)  # FlashInfer's own attribute of that name is a string
    if hasattr(inner, "init_forward_metadata"):  # a backend that is another in prefill
        attention = inner
    if type(attention).__name__ == "FlashInferMLAAttnBackend":
        raise RuntimeError(
            "--lora-backend scute: the flashinfer attention backend of SGLang for latent attention keeps one plan for "
            "several decode graphs; start with --attention-backend triton"
        )
    for name in ("_create_decode_wrappers", "_create_prefill_wrappers"):
        create = getattr(type(attention), name, None)
        if create is not None and (anew or name not in vars(attention)):
            setattr(attention, name, cache(partial(create, attention)))
