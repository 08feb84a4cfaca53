"""Launching beside the current stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_stream(side: torch.cuda.Stream | None) -> Iterator[None]:
    """Launches within go to ``side``, after what the current stream holds so far; ``None``: to the current stream."""
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
