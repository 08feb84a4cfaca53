"""Work on many modules at a time: an adapter of a large model has hundreds, and torch and hashlib let go of the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = min(8, os.cpu_count() or 1)


def each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``work`` of every item, in their order; raises what the first item raised that failed."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, items))
