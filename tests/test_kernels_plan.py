"""The batch plan: every adapted row in exactly one tile of its slot or group, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_kernels.plan import (
    FEW_ROWS,
    build_plan,
    few_further,
    most_tiles,
    packed_size,
    room_for_further,
    view_plan,
)

SLOTS = 6
NO_ROUTES = torch.empty(0)  # of no interest here


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(-1, SLOTS - 1), st.integers(0, 150)), min_size=1, max_size=12),
    groups=st.lists(st.integers(-1, 2), min_size=SLOTS, max_size=SLOTS),
    spare=st.integers(0, 30),
    width=st.sampled_from([16, 64]),
    of_one_row=st.booleans(),
    leaders=st.sets(st.integers(0, SLOTS - 1)),
    with_further=st.sets(st.integers(0, SLOTS - 1)),
)
def test_plan(
    requests: list[tuple[int, int]],
    groups: list[int],
    spare: int,
    width: int,
    of_one_row: bool,
    leaders: set[int],
    with_further: set[int],
) -> None:
    slots, counts = [slot for slot, _ in requests], [count for _, count in requests]
    rows = sum(counts) + spare
    tile_rows = 1 if of_one_row and sum(counts) <= FEW_ROWS else width
    stale = torch.full((packed_size(rows, width, SLOTS),), 7, dtype=torch.int32)
    arguments = (slots, counts, groups, rows, width, tile_rows, leaders, with_further)
    packed = build_plan(*arguments, out=stale)
    assert packed is stale
    assert torch.equal(packed, build_plan(*arguments))
    plan = view_plan(packed, rows, width, NO_ROUTES)

    row_slot = [slot for slot, count in requests for _ in range(count)] + [-1] * spare
    assert plan.row_slot.tolist() == row_slot
    further = [row for row, slot in enumerate(row_slot) if slot in with_further]
    behind = [-1] * (rows - len(further))
    assert plan.further.tolist() == [further + behind, [row_slot[row] for row in further] + behind]
    tiled: list[int] = []
    dead = False
    for tile, (members, member_slots, in_further) in enumerate(zip(*plan.tiles.tolist(), strict=True)):
        live = [row for row in members if row >= 0]
        assert members == live + [-1] * (width - len(live))
        assert member_slots == [row_slot[row] for row in live] + [-1] * (width - len(live))
        places = [further.index(row) if row in further else -1 for row in live]
        assert in_further == places + [-1] * (width - len(live))
        assert len(live) <= tile_rows
        assert not (dead and live)  # live tiles come first
        dead = not live
        tiled += live
        in_tile = {row_slot[row] for row in live}
        shared = {groups[slot] for slot in in_tile} - {-1}
        kin = {slot for slot in row_slot if slot in in_tile or (slot >= 0 and groups[slot] in shared)}
        assert (tile < int(plan.leading)) == (not kin.isdisjoint(leaders))
        assert len(in_tile) <= 1 or (len({groups[slot] for slot in in_tile}) == 1 and groups[min(in_tile)] >= 0)
    assert sorted(tiled) == [row for row, slot in enumerate(row_slot) if slot >= 0]
    # Stable: rows of one slot keep their order, which keeps runs of x and h together.
    for slot in range(SLOTS):
        of_slot = [row for row in tiled if row_slot[row] == slot]
        assert of_slot == sorted(of_slot)


def tiles_of(slots: list[int], counts: list[int], groups: list[int], rows: int) -> list[list[int]]:
    """The live rows of the live tiles, 16 places each."""
    tiles = view_plan(build_plan(slots, counts, groups, rows, 16, 16), rows, 16, NO_ROUTES).tiles[0]
    return [[row for row in tile if row >= 0] for tile in tiles.tolist() if tile[0] >= 0]


def test_a_group_fills_its_tiles() -> None:
    """Sixteen adapters on one basis, a row each, are one tile; with tiles of their own they are sixteen."""
    assert tiles_of(list(range(16)), [1] * 16, [0] * 16, 16) == [list(range(16))]
    assert tiles_of(list(range(16)), [1] * 16, [-1] * 16, 16) == [[row] for row in range(16)]


def test_rows_of_one_slot_lie_together() -> None:
    assert tiles_of([2, -1, 2], [3, 1, 2], [0] * 4, 8) == [[0, 1, 2, 4, 5]]
    assert tiles_of([2, 1, 2], [20, 1, 2], [-1] * 4, 30) == [list(range(16)), [16, 17, 18, 19, 21, 22], [20]]


def test_views_follow_the_packed_plan() -> None:
    """A graph keeps the views: filling the packed plan again renews them."""
    packed = build_plan([0], [5], [-1, -1], 9, 16, 16)
    plan = view_plan(packed, 9, 16, NO_ROUTES)
    build_plan([1, 0], [2, 3], [-1, -1], 9, 16, 16, with_further=[0], out=packed)
    assert plan.row_slot.tolist() == [1, 1, 0, 0, 0, -1, -1, -1, -1]
    assert plan.further[:, :4].tolist() == [[2, 3, 4, -1], [0, 0, 0, -1]]
    assert plan.tiles[:, :2, :4].tolist() == [
        [[0, 1, -1, -1], [2, 3, 4, -1]],
        [[1, 1, -1, -1], [0, 0, 0, -1]],
        [[-1, -1, -1, -1], [0, 1, 2, -1]],
    ]


def test_a_plan_of_many_rows_has_room_for_a_tile_of_each_of_few() -> None:
    """A graph of many rows serves a batch of few, whose tiles are one row each."""
    rows = 200
    plan = view_plan(build_plan([1], [FEW_ROWS], [-1, -1], rows, 16, 1), rows, 16, NO_ROUTES)
    assert plan.tiles[0, :, 0].tolist() == list(range(FEW_ROWS))
    assert (plan.tiles[:, :, 1:] == -1).all()
    assert most_tiles(rows, 16, 2) == FEW_ROWS
    assert most_tiles(rows, 16, 60) == 73
    with pytest.raises(ValueError, match="65 rows in tiles of 1"):
        build_plan([1], [65], [-1, -1], rows, 16, 1)


def test_too_many_rows() -> None:
    with pytest.raises(ValueError, match="12 rows, the plan has room for 11"):
        build_plan([0, -1], [7, 5], [-1], 11, 16, 16)


def test_a_larger_graph_has_room_for_the_further_rows_of_a_batch() -> None:
    for rows in range(1, 600):
        assert 1 <= few_further(rows) <= few_further(rows + 1) <= rows + 1
        for n_further in range(rows + 1):
            assert n_further <= room_for_further(rows, n_further) <= rows
