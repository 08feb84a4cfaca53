"""``sglang.srt.model_executor.model_runner``: which class manages the adapters."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.model_executor import model_runner
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_lora

from scute_patches.server_args import BACKEND


def install(manager_class: Callable[[], type]) -> None:
    """Let ``ModelRunner.init_lora_manager`` build ``manager_class()`` if the backend is Scute's.

    ``manager_class`` is called then and not before: its imports would load SGLang's model layers into every process.
    """

    def init_lora_manager(original: Callable, self) -> None:
        if get_lora().lora_backend != BACKEND:
            return original(self)
        stock = model_runner.LoRAManager
        model_runner.LoRAManager = manager_class()
        try:
            return original(self)
        finally:
            model_runner.LoRAManager = stock

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager", init_lora_manager, HookType.AROUND
    )
