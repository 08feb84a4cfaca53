"""The batch plan: every adapted row in exactly one tile of its slot or group, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_kernels.plan import build_plan, packed_size, tile_rows, view_plan

SLOTS = 6


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(-1, SLOTS - 1), st.integers(0, 150)), min_size=1, max_size=12),
    groups=st.lists(st.integers(-1, 2), min_size=SLOTS, max_size=SLOTS),
    spare=st.integers(0, 30),
)
def test_plan(requests: list[tuple[int, int]], groups: list[int], spare: int) -> None:
    slots, counts = [slot for slot, _ in requests], [count for _, count in requests]
    rows = sum(counts) + spare
    stale = torch.full((packed_size(rows, SLOTS),), 7, dtype=torch.int32)
    packed = build_plan(slots, counts, groups, rows, out=stale)
    assert packed is stale
    assert torch.equal(packed, build_plan(slots, counts, groups, rows))
    plan = view_plan(packed, rows)

    row_slot = [slot for slot, count in requests for _ in range(count)] + [-1] * spare
    assert plan.row_slot.tolist() == row_slot
    order = plan.order.tolist()
    assert sorted(order) == list(range(rows))
    tiled: list[int] = []
    for start, length, slot, _ in plan.tiles.tolist():
        assert 0 <= length <= plan.tile_rows
        members = order[start : start + length]
        tiled += members
        member_slots = {row_slot[row] for row in members}
        if slot >= 0:
            assert not length or member_slots == {slot}
        else:
            assert len({groups[member] for member in member_slots}) == 1
            assert groups[min(member_slots)] >= 0
    assert sorted(tiled) == [row for row, slot in enumerate(row_slot) if slot >= 0]
    # Stable: rows of one slot keep their order, which keeps runs of x and h together.
    for slot in range(SLOTS):
        of_slot = [row for row in tiled if row_slot[row] == slot]
        assert of_slot == sorted(of_slot)


def test_a_group_fills_its_tiles() -> None:
    """Sixteen adapters on one basis, a row each, are one tile; with tiles of their own they are sixteen."""
    shared = view_plan(build_plan(range(16), [1] * 16, [0] * 16, 16), 16)
    assert shared.tiles[0].tolist() == [0, 16, -1, 0]
    assert not shared.tiles[1:].any()
    own = view_plan(build_plan(range(16), [1] * 16, [-1] * 16, 16), 16)
    assert own.tiles[:16].tolist() == [[row, 1, row, 0] for row in range(16)]


def test_a_group_with_one_live_slot_is_a_tile_of_that_slot() -> None:
    plan = view_plan(build_plan([2, -1, 2], [3, 1, 2], [0] * 4, 8), 8)
    assert plan.tiles[0].tolist() == [0, 5, 2, 0]
    assert plan.order.tolist() == [0, 1, 2, 4, 5, 3, 6, 7]


def test_views_follow_the_packed_plan() -> None:
    """A graph keeps the views: filling the packed plan again renews them."""
    packed = build_plan([0], [5], [-1, -1], 9)
    plan = view_plan(packed, 9)
    build_plan([1, 0], [2, 3], [-1, -1], 9, out=packed)
    assert plan.row_slot.tolist() == [1, 1, 0, 0, 0, -1, -1, -1, -1]
    assert plan.tiles[:2, :3].tolist() == [[0, 2, 1], [2, 3, 0]]


def test_prefill_has_larger_tiles() -> None:
    assert tile_rows(256) == 16
    assert tile_rows(257) == 64


def test_too_many_rows() -> None:
    with pytest.raises(ValueError, match="12 rows, the plan has room for 11"):
        build_plan([0, -1], [7, 5], [-1], 11)
