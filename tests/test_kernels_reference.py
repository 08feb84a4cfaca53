"""The references of the operators, which serve the CPU, against dense fp64 formulas; the registration with torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kernel_cases import (
    FIRST_SITE,
    Case,
    cases,
    check_lookup,
    check_rotate,
    check_shrink_and_expand,
    make_case,
    random_ids,
)

ops = torch.ops.scute


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_shrink_and_expand(case: Case) -> None:
    check_shrink_and_expand(ops.shrink, ops.expand, case)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_rotate(case: Case) -> None:
    check_rotate(ops.rotate, case)


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
    )


@pytest.mark.parametrize("operator", ["rotate", "shrink", "lookup", "expand"])
def test_registration(operator: str) -> None:
    """Schema, fake implementation and dispatch agree, as ``torch.compile`` needs."""
    case = mixed_case()
    zeros = torch.zeros_like(case.scratch())
    rows = len(case.slots)
    arguments = {
        "rotate": (case.x, *case.common, FIRST_SITE, case.x.new_empty(2, rows, 48)),
        "shrink": (case.x, *case.common, FIRST_SITE, zeros.clone(), zeros.clone()),
        "lookup": (random_ids(case), *case.common, FIRST_SITE, 48, zeros[:1, :, :1].contiguous()),
        "expand": (case.h, zeros, zeros.clone(), *case.common, FIRST_SITE, case.slice_offsets),
    }
    torch.library.opcheck(getattr(ops, operator), arguments[operator])


def test_without_bases() -> None:
    """An empty ``u`` says that there is no basis: shrink and expand then serve the own pairs alone."""
    case = make_case(1, torch.float32, 37, (19, 5), ("lora", "dora"), [(1, 3), (-1, 2), (0, 4)], 0, 8, 1)
    empty = torch.empty(0)
    check_shrink_and_expand(
        lambda x, *rest: ops.shrink(x, *rest[:-1], empty),
        lambda h, v, u, *rest: ops.expand(h, v, empty, *rest),
        case,
    )
