"""``sglang.srt.lora.lora_registry``: an adapter is unloaded after the requests that have looked it up, without a gap.

SGLang's ``acquire`` looks names up under its lock and counts the request when the lock is gone. An unload in between
finds nobody counted, and the request reaches a scheduler that has no such adapter any more, and ends with it.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_lora

from scute_patches.server_args import BACKEND


def install() -> None:
    async def acquire(original: Callable, self, lora_name):
        if get_lora().lora_backend != BACKEND:
            return await original(self, lora_name)
        return await acquire_at_once(self, lora_name)

    HookRegistry.register("sglang.srt.lora.lora_registry.LoRARegistry.acquire", acquire, HookType.AROUND)


async def acquire_at_once(registry, lora_name: str | list[str | None]) -> str | list[str | None]:
    """The ids of the named adapters (of one, or of each request of a batch; ``None`` is the base model), each counted
    as in use before an unload can come in between. Raises ``ValueError``, and counts none, if one is not loaded."""
    names = [lora_name] if isinstance(lora_name, str) else lora_name
    async with registry._registry_lock.writer_lock:
        refs = registry._registry
        unknown = [name for name in names if name is not None and name not in refs]
        if unknown:
            raise ValueError(
                f"The following requested LoRA adapters are not loaded: {unknown[0]}\nLoaded adapters: {list(refs)}."
            )
        ids = []
        for name in names:
            if name is not None:
                refs.move_to_end(name)  # the registry is in the order of last use
                await registry._counters[refs[name].lora_id].increment(notify_all=False)
            ids.append(None if name is None else refs[name].lora_id)
    return ids[0] if isinstance(lora_name, str) else ids
