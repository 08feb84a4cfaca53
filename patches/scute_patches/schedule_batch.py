"""``sglang.srt.managers.schedule_batch``: a request of the base model cannot name the cached prefixes of an adapter.

SGLang keeps prefixes by ``extra_key``, to which it appends the id of the adapter. A base request may bring any
``extra_key``, also the id of an adapter, which follows from name and path for those of ``--lora-paths``
(``LoRARef.deterministic_id``): it would be answered from what the adapter has computed, and leave what the base model
has computed to the adapter's users.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_lora

from scute_patches.server_args import BACKEND

# The id of an adapter is 32 hexadecimal digits, so no key that ends with one is a key that ends with this.
BASE = "/base"


def install() -> None:
    def init(original: Callable, self, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        if self.lora_id is None and self.extra_key and get_lora().lora_backend == BACKEND:
            # It may come from a request that had it already (prefill apart from decode).
            self.extra_key = self.extra_key.removesuffix(BASE) + BASE

    HookRegistry.register("sglang.srt.managers.schedule_batch.Req.__init__", init, HookType.AROUND)
