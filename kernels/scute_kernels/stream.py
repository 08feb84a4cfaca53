"""Launching beside the current stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton


def fork(side: torch.cuda.Stream) -> None:
    """What is launched on ``side`` from now on waits for what the current stream holds so far, and for nothing that
    comes to it later."""
    side.wait_stream(torch.cuda.current_stream())


@contextmanager
def on_stream(side: torch.cuda.Stream | None) -> Iterator[None]:
    """Launches within go to ``side``; ``None``: to the current stream."""
    if side is None:
        yield
        return
    with torch.cuda.stream(side):
        yield


@triton.jit
def empty(pointer):
    """Does nothing."""


def give_way(memory: torch.Tensor) -> None:
    """A launch that does nothing. What follows it on the current stream begins a microsecond later, so that a kernel
    launched beside it takes its multiprocessors first: a base GEMM takes all registers of each, and would wait for the
    last program of a shrink that came before it. ``memory``: any tensor on the device."""
    empty[(1,)](memory)
