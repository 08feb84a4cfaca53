"""Unloading waits for every request that has looked its adapter up, whatever the order in which both go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry

from scute_patches.lora_registry import acquire_at_once

STEPS = 30  # of the event loop: more than any of the coroutines takes


def unloaded_in_use(acquire: Callable, names: str | list[str | None]) -> list[int]:
    """For which head starts of the request (in steps of the event loop) the adapter goes while the request has it."""

    async def one(head_start: int) -> bool:
        registry = LoRARegistry([LoRARef(lora_name=name, lora_path=name) for name in ("one", "other")])
        looked_up = asyncio.create_task(acquire(registry, names))
        for _ in range(head_start):
            await asyncio.sleep(0)

        async def unload() -> None:
            await registry.wait_for_unload(await registry.unregister("one"))

        unloading = asyncio.create_task(unload())
        for _ in range(STEPS):
            await asyncio.sleep(0)
        if isinstance(looked_up.exception(), ValueError):  # the unload came first
            assert unloading.done()
            return False
        in_use = looked_up.result()
        if unloading.done():
            return True
        await registry.release(in_use)
        await asyncio.wait_for(unloading, timeout=5)
        return False

    async def every() -> list[int]:
        return [head_start for head_start in range(STEPS) if await one(head_start)]

    return asyncio.run(every())


@pytest.mark.parametrize("names", ["one", ["one"], ["one", None, "other", "one"]])
def test_what_is_looked_up_is_counted(names: str | list[str | None]) -> None:
    assert unloaded_in_use(acquire_at_once, names) == []


def test_sglang_itself_has_the_gap() -> None:
    """If this fails, ``scute_patches.lora_registry`` is needed no longer."""
    assert unloaded_in_use(LoRARegistry.acquire, ["one", None, "other"])


def test_an_unknown_name_counts_nothing() -> None:
    async def look_up() -> LoRARegistry:
        registry = LoRARegistry([LoRARef(lora_name="one", lora_path="one")])
        with pytest.raises(ValueError, match="not loaded: nobody"):
            await acquire_at_once(registry, ["one", "nobody"])
        return registry

    assert [counter.value() for counter in asyncio.run(look_up())._counters.values()] == [0]
