"""The references of the operators, which serve the CPU, against dense fp64 formulas; the registration with torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kernel_cases import (
    FIRST_SITE,
    Case,
    cases,
    check_expanded,
    check_lookup,
    check_rotate,
    check_route,
    check_shared_route,
    check_shrink_and_expand,
    make_case,
    random_ids,
)

ops = torch.ops.scute


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_shrink_and_expand(case: Case) -> None:
    check_shrink_and_expand(ops.shrink, ops.expand, ops.shared_shrink, ops.shared_expand, case)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_rotate(case: Case) -> None:
    check_rotate(ops.rotate, case)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_route(case: Case) -> None:
    check_route(ops.route, case)
    check_shared_route(ops.shared_route, case)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases())
def test_lookup(case: Case) -> None:
    check_lookup(ops.lookup, case, random_ids(case))


def mixed_case() -> Case:
    return make_case(
        seed=3,
        dtype=torch.float32,
        in_features=48,
        widths=(20, 7),
        methods=("lora", "dora", "ia3", "vera", "oft", "everything"),
        requests=[(slot, 3) for slot in (-1, 0, 1, 2, 3, 4, 5, 0)],
        spare_rows=2,
        max_rank=12,
        split=2,
        wide=True,
        beside=True,
    )


@pytest.mark.parametrize(
    "operator",
    ["route", "shared_route", "rotate", "shrink", "shared_shrink", "lookup", "expand", "shared_expand"],
)
def test_registration(operator: str) -> None:
    """Schema, fake implementation and dispatch agree, as ``torch.compile`` needs."""
    case = mixed_case()
    scratch, shared_scratch = torch.zeros_like(case.scratch()), torch.zeros_like(case.shared_scratch())
    expanded = case.h[: len(case.slots)]
    head = (case.own.row_slot, case.arena, case.table, FIRST_SITE, 48)
    arguments = {
        "route": (case.own.tiles, case.own.routes, case.table),
        "shared_route": case.shared_routes(case.grouped.routes),
        "rotate": (case.x, *case.rotate_plan, FIRST_SITE, 2, case.x.new_empty(case.with_further, 48)),
        "shrink": (case.x, *case.own_plan, FIRST_SITE, scratch),
        "shared_shrink": (case.x, *case.grouped_plan, FIRST_SITE, shared_scratch),
        "lookup": (random_ids(case), *head, scratch[:1, :, :1].contiguous()),
        "expand": (case.h, scratch, case.addend(), *case.own_plan, FIRST_SITE, case.slice_offsets),
        "shared_expand": (expanded, shared_scratch, *case.grouped_plan, FIRST_SITE, case.slice_offsets, True),
    }
    torch.library.opcheck(getattr(ops, operator), arguments[operator])


def test_without_own_pairs() -> None:
    """Nothing has written ``v``: expand serves scales and shifts alone, and leaves it unread."""
    case = make_case(1, torch.float32, 37, (19, 5), ("ia3", "nothing"), [(1, 3), (-1, 2), (0, 4)], 0, 8, 1)
    before = case.h.clone()
    unwritten = case.scratch().fill_(torch.nan)
    ops.expand(case.h, unwritten, torch.empty(0), *case.own_plan, FIRST_SITE, case.slice_offsets)
    check_expanded(case, before)
