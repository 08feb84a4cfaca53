"""Compiling kernels side by side, before their first launch.

Triton compiles a kernel when it is launched first, so one after the other: a minute or two for all that the graphs of a
server hold, on a machine that has not compiled them before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_THREADS = min(16, len(os.sched_getaffinity(0)))


def _use(device: int) -> None:
    """Each thread has a current device, for which it compiles."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device)


def compile_kernels(rehearse: Callable[[], None]) -> int:
    """Compiles what ``rehearse`` launches; returns how many kernels that were.

    Their launches do nothing; those of kernels that are compiled already happen. Other threads must launch none
    meanwhile.
    """
    wanted: dict[tuple[str, str, str], tuple[JITFunction, str]] = {}

    def note(*, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        wanted[fn.module, fn.name, key] = (fn.jit_function, compile["specialization_data"])
        return True  # Triton goes no further

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note  # pyright: ignore[reportAttributeAccessIssue]
        rehearse()
    device = driver.active.get_current_device()  # pyright: ignore[reportAttributeAccessIssue]
    # Most of the work is in libraries that let go of the interpreter's lock, and in a program of its own, ptxas.
    with ThreadPoolExecutor(_THREADS, initializer=_use, initargs=(device,)) as pool:
        return len(list(pool.map(lambda kernel: kernel[0].preload(kernel[1]), wanted.values())))
