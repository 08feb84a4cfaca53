"""The Triton kernels against dense fp64 formulas: on a GPU, or on the CPU under Triton's interpreter.

``test_kernels_triton.py`` runs this file in a process of its own, because whether kernels are interpreted is decided
when Triton is imported.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import Phase, given, settings

from kernel_cases import (
    Case,
    Operator,
    cases,
    check_lookup,
    check_rotate,
    check_shrink_and_expand,
    make_case,
    random_ids,
)
from scute_kernels.expand import kernel as expand_kernel
from scute_kernels.lookup import kernel as lookup_kernel
from scute_kernels.rotate import kernel as rotate_kernel
from scute_kernels.shrink import kernel as shrink_kernel

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# The interpreter multiplies the bit patterns of bf16 as integers, so bf16 needs a GPU.
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)

bounded = settings(
    max_examples=15 if DEVICE == "cpu" else 150,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # the interpreter is too slow to shrink a failure
)


@bounded
@given(case=cases(DTYPES))
def test_shrink_and_expand(case: Case) -> None:
    check_shrink_and_expand(shrink_kernel.shrink, expand_kernel.expand, case.to(DEVICE))


@bounded
@given(case=cases(DTYPES))
def test_rotate(case: Case) -> None:
    check_rotate(rotate_kernel.rotate, case.to(DEVICE))


@bounded
@given(case=cases(DTYPES))
def test_lookup(case: Case) -> None:
    check_lookup(lookup_kernel.lookup, case.to(DEVICE), random_ids(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spare_rows", [0, 240])
def test_every_loop_runs_twice(dtype: torch.dtype, spare_rows: int) -> None:
    """More ranks, features and columns than one round of blocks holds, own and shared, decode and prefill tiles."""
    case = make_case(
        seed=7,
        dtype=dtype,
        in_features=1168,
        widths=(272, 48),
        methods=("lora", "vera", "vera", "everything"),
        requests=[(0, 3), (1, 1), (2, 18), (-1, 1), (3, 2)],
        spare_rows=spare_rows,
        max_rank=600,
        split=2,
    )
    check_shrink_and_expand(shrink_kernel.shrink, expand_kernel.expand, case.to(DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 3, 8, 32, 48, 64, 192])
def test_rotation_blocks(block: int, dtype: torch.dtype) -> None:
    """Every size of block, one slot to a tile and several."""
    case = make_case(
        seed=block,
        dtype=dtype,
        in_features=576,
        widths=(8,),
        methods=("oft", "oft", "ia3", "everything"),
        requests=[(0, 1), (2, 1), (1, 2), (-1, 1), (3, 1)],
        spare_rows=0,
        max_rank=3,
        split=1,
        block=block,
    )
    check_rotate(rotate_kernel.rotate, case.to(DEVICE))


def test_only_the_kinds_that_are_resident() -> None:
    """Empty scratch for own pairs, or for shared pairs, leaves the other exact."""
    shrink: Operator = shrink_kernel.shrink
    expand: Operator = expand_kernel.expand
    empty = torch.empty(0, device=DEVICE)
    own = make_case(1, torch.float32, 37, (19, 5), ("lora", "dora"), [(1, 3), (-1, 2), (0, 4)], 0, 8, 1)
    check_shrink_and_expand(
        lambda x, *rest: shrink(x, *rest[:-1], empty),
        lambda h, v, u, *rest: expand(h, v, empty, *rest),
        own.to(DEVICE),
    )
    shared = make_case(2, torch.float32, 37, (19, 5), ("vera", "ia3"), [(1, 3), (-1, 2), (0, 4)], 0, 8, 1)
    check_shrink_and_expand(
        lambda x, *rest: shrink(x, *rest[:-2], empty, rest[-1]),
        lambda h, v, u, *rest: expand(h, empty, u, *rest),
        shared.to(DEVICE),
    )
