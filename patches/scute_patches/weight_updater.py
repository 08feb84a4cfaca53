"""``sglang.srt.model_executor.model_runner_components.weight_updater``: base weights stay while adapters are loaded.

DoRA's scales and every output shift are made from the base weights when an adapter is loaded. New base weights under a
loaded adapter would be served with the old ones' scales.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from scute_patches.server_args import BACKEND

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


def install() -> None:
    def update(original: Callable, self, *args, **kwargs):
        manager = self.get_model_runner().lora_manager
        if manager is not None and manager.lora_backend.name == BACKEND and manager.loras:
            names = ", ".join(sorted(adapter.name for adapter in manager.loras.values()))
            return False, (
                f"adapters are loaded ({names}), which were made for the present base weights: unload them, update the "
                "weights, then load them again"
            )
        return original(self, *args, **kwargs)

    for name in _UPDATES:
        HookRegistry.register(f"{_UPDATER}.{name}", update, HookType.AROUND)
