"""Launch parameters of every kernel, in one place."""

from __future__ import annotations


def shrink_split(rows: int, in_features: int, n_slices: int, max_rank: int) -> int:
    """SPLIT of ``shrink``: into how many partial planes the features are split. Depends on shapes only.

    ``max_rank``: R of the scratch.
    """
    return 1
