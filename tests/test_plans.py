"""The static plans of graphs: a graph of any number of rows sees every live tile of a batch that it serves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_kernels.plan import (
    FEW_ROWS,
    build_plan,
    most_tiles,
    own_tile_rows,
    packed_size,
    view_plan,
    without_dead_tiles,
)

pytest.importorskip("sglang")
from scute_patches import sgl_kernel  # the backend derives from a class of SGLang, whose import needs it on a CPU

sgl_kernel.install()

from scute_sglang.backend import Plans  # noqa: E402


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    slots=st.sampled_from([1, 2, 8, 64]),
    width=st.sampled_from([16, 64]),
    capacity=st.sampled_from([64, 128, 256, 1024]),
    requests=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 40)), min_size=1, max_size=40),
    padding=st.sampled_from([0, 1, 5, 30]),
)
def test_a_graph_sees_every_live_tile(
    slots: int, width: int, capacity: int, requests: list[tuple[int, int]], padding: int
) -> None:
    """``capacity``: rows of the largest graph. ``padding``: rows that the graph has beyond those of the batch."""
    owners, counts = [owner % (slots + 1) - 1 for owner, _ in requests], [count for _, count in requests]
    live = sum(counts)
    if live > capacity or not live:
        return
    rows = min(capacity, live + padding)
    tiles = most_tiles(capacity, width, slots)
    packed = torch.empty(2, packed_size(capacity, width, slots), dtype=torch.int32)
    build_plan(owners, counts, [-1] * slots, capacity, width, own_tile_rows(live, width), out=packed[0])
    build_plan(owners, counts, [0] * slots, capacity, width, width, leaders=range(slots), out=packed[1])
    routes = torch.arange(tiles)
    own, grouped = (view_plan(plan, capacity, width, routes) for plan in packed)
    whole = Plans(own, grouped, filled=without_dead_tiles(own, packed[0]))

    seen = whole.of(rows, slots)
    adapted = sorted(
        row
        for row, owner in enumerate(owner for owner, count in zip(owners, counts, strict=True) for _ in range(count))
        if owner >= 0
    )
    for plan in (seen.own, seen.grouped, seen.filled):
        assert plan.tiles.shape[1] == plan.routes.shape[0] <= rows
        # What a kernel reads: of each tile as many places as it has rows.
        read = plan.tiles[0, :, : plan.tile_rows].flatten().tolist()
        assert sorted(row for row in read if row >= 0) == adapted
        assert plan.routes.tolist() == list(range(plan.routes.shape[0]))
    assert seen.own.tile_rows == (1 if rows <= FEW_ROWS else width)
    assert seen.filled.tile_rows == seen.own.tile_rows
    assert seen.filled.tiles.shape[1] == max(1, int((seen.own.tiles[0, :, 0] >= 0).sum()))
    assert seen.grouped.tile_rows == width
    assert bool(adapted) <= int(seen.grouped.leading) <= seen.grouped.tiles.shape[1]
