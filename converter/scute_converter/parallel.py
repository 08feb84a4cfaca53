"""Work on many modules at a time: an adapter of a large model has hundreds, and torch and hashlib let go of the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = min(8, os.cpu_count() or 1)
_SHARES = 4  # of each thread: handing out every item by itself takes longer than many items do


def each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``work`` of every item, in their order; raises what the first item raised that failed. Inference mode, which
    torch has for each thread, is the caller's."""
    inference = torch.is_inference_mode_enabled()

    def of_share(share: Sequence[Item]) -> list[Result]:
        with torch.inference_mode(inference):
            return [work(item) for item in share]

    size = -(-len(items) // (_SHARES * _THREADS)) or 1
    shares = [items[first : first + size] for first in range(0, len(items), size)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [result for results in pool.map(of_share, shares) for result in results]
