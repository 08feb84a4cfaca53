"""The Triton kernels against dense fp64 formulas: on a GPU, or on the CPU under Triton's interpreter.

``test_kernels_triton.py`` runs this file in a process of its own, because whether kernels are interpreted is decided
when Triton is imported.
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings

from kernel_cases import (
    FIRST_SITE,
    Case,
    Operator,
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
from scute_kernels import launch
from scute_kernels.expand import kernel as expand_kernel
from scute_kernels.lookup import kernel as lookup_kernel
from scute_kernels.plan import DECODE_WIDTH, PREFILL_WIDTH
from scute_kernels.rotate import kernel as rotate_kernel
from scute_kernels.route import kernel as route_kernel
from scute_kernels.shared_expand import kernel as shared_expand_kernel
from scute_kernels.shared_route import kernel as shared_route_kernel
from scute_kernels.shared_shrink import kernel as shared_shrink_kernel
from scute_kernels.shrink import kernel as shrink_kernel
from scute_kernels.table import NO_MEMBER, RANK, SHARED_BASIS, SHARED_FIELDS

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# The interpreter multiplies the bit patterns of bf16 as integers, so bf16 needs a GPU.
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)

KERNELS: tuple[Operator, ...] = (
    shrink_kernel.shrink,
    expand_kernel.expand,
    shared_shrink_kernel.shared_shrink,
    shared_expand_kernel.shared_expand,
)

bounded = settings(
    max_examples=10 if DEVICE == "cpu" else 40,  # nearly each compiles kernels of its own
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # the interpreter is too slow to shrink a failure
)


@bounded
@given(case=cases(DTYPES))
def test_shrink_and_expand(case: Case) -> None:
    check_shrink_and_expand(*KERNELS, case.to(DEVICE))


@bounded
@given(case=cases(DTYPES))
def test_rotate(case: Case) -> None:
    check_rotate(rotate_kernel.rotate, case.to(DEVICE))


def test_rotate_runs_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of so many rows and columns that a program does more than one block."""
    assert launch.rotate_rows(64, 14336).run > launch.rotate_rows(16, 4096).run == 1
    runs = dataclasses.replace(launch.rotate_rows(1, 64), run=2, copy=256)
    monkeypatch.setattr(launch, "rotate_rows", lambda rows, features: runs)
    for block, seed in ((32, 1), (96, 2), (12, 3), (1, 4)):
        case = make_case(
            seed=seed,
            dtype=torch.float32,
            in_features=672,
            widths=(40, 24),
            methods=("oft", "ia3", "lora", "everything"),
            requests=[(0, 2), (-1, 1), (1, 1), (2, 1), (3, 1)],
            spare_rows=1,
            max_rank=16,
            split=1,
            block=block,
        )
        check_rotate(rotate_kernel.rotate, case.to(DEVICE))


@bounded
@given(case=cases(DTYPES))
def test_route(case: Case) -> None:
    check_route(route_kernel.route, case.to(DEVICE))
    check_shared_route(shared_route_kernel.shared_route, case.to(DEVICE))


@bounded
@given(case=cases(DTYPES))
def test_lookup(case: Case) -> None:
    check_lookup(lookup_kernel.lookup, case.to(DEVICE), random_ids(case))


@pytest.mark.skipif(DEVICE == "cpu", reason="minutes under the interpreter; the next test loops over small blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spare_rows", [0, 60, 240])
def test_every_loop_runs_twice(dtype: torch.dtype, spare_rows: int) -> None:
    """More ranks, features and columns than one round of blocks holds, own and shared, every size of tiles."""
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
        wide=True,
        beside=spare_rows < 240,  # as in decode
    )
    check_shrink_and_expand(*KERNELS, case.to(DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("programs", [1, 40])
@pytest.mark.parametrize("spare_rows", [5, 90])
def test_few_programs_do_all_the_work(dtype: torch.dtype, programs: int, spare_rows: int) -> None:
    """A program takes several pairs, blocks of ranks and tiles, and the unaligned basis goes in small blocks."""
    case = make_case(
        seed=11,
        dtype=dtype,
        in_features=144,
        widths=(80, 23),
        methods=("lora", "vera", "everything", "vera", "dora", "everything"),
        requests=[(0, 2), (1, 1), (2, 17), (-1, 2), (3, 1), (4, 1), (5, 1), (0, 1)],
        spare_rows=spare_rows,
        max_rank=40,
        split=2,
        wide=True,
        beside=programs == 1,
    )
    shrink = launch.Shrink(16, 64, 72, programs, num_warps=4, num_stages=2)
    expand = launch.Expand(16, 16, run=3, tile_programs=2, num_warps=4, num_stages=2, pdl=False)
    shared_expand = launch.SharedExpand(16, 16, run=3, tile_programs=2, num_warps=4, num_stages=2, tiles=1)
    check_shrink_and_expand(
        *(
            partial(kernel, parameters=parameters)
            for kernel, parameters in zip(KERNELS, (shrink, expand, shrink, shared_expand), strict=True)
        ),
        case.to(DEVICE),
    )


@pytest.mark.parametrize("run", [1, 2, 6])
def test_runs_of_expand(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of columns that a program does, whatever the table has, and slices that end within one."""
    monkeypatch.setattr(launch, "expand_run", lambda *_: run)
    for places, seed in ((DECODE_WIDTH, 1), (PREFILL_WIDTH, 2)):
        case = make_case(
            seed=seed,
            dtype=torch.float32,
            in_features=24,
            widths=(200, 72, 136),
            methods=("lora", "dora", "oft", "everything"),
            requests=[(0, 3), (1, 2), (-1, 2), (2, 1), (3, 2)],
            spare_rows=60,
            max_rank=9,
            split=1,
            places=places,
            wide=True,
        )
        check_shrink_and_expand(*KERNELS, case.to(DEVICE))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
@pytest.mark.parametrize(
    ("run", "max_rank", "beside"), [(1, 9, False), (2, 16, True), (3, 16, False), (3, 40, True), (6, 140, False)]
)
def test_parts_of_a_tile(
    dtype: torch.dtype, run: int, max_rank: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of wide slices: pairs of at most 16 ranks have blocks of twice as many columns for half of a tile's rows. Of
    an odd run the last block ends before them, and where it ends another program begins."""
    monkeypatch.setattr(launch, "WIDE_SLICE", 0)
    monkeypatch.setattr(launch, "expand_run", lambda *_: run)
    case = make_case(
        seed=run,
        dtype=dtype,
        in_features=24,
        widths=(200, 72, 391),
        methods=("lora", "dora", "oft", "everything", "ia3"),
        requests=[(0, 3), (1, 50), (-1, 2), (2, 1), (3, 33), (4, 70)],
        spare_rows=60,
        max_rank=max_rank,
        split=1 + run % 2,
        places=PREFILL_WIDTH,
        wide=True,
        beside=beside,
    )
    assert launch.expand_parts(PREFILL_WIDTH, dtype, case.slice_offsets) == 2
    check_shrink_and_expand(*KERNELS, case.to(DEVICE))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_long_pairs_of_rows(seed: int) -> None:
    """Few programs: the ranks behind the first block come in larger ones."""
    case = make_case(
        seed=seed,
        dtype=torch.float16,
        in_features=40,
        widths=(144, 23),
        methods=("lora", "dora", "oft", "everything"),
        requests=[(0, 2), (1, 1), (-1, 1), (2, 1), (3, 1)],
        spare_rows=seed,
        max_rank=110,
        split=1,
        wide=True,
    )
    chosen, later_ranks = launch.expand_rows(
        launch.expand(len(case.slots), 1, torch.float16, case.scratch_rank), len(case.slots), case.slice_offsets
    )
    ranks = case.table[..., RANK]
    assert later_ranks > chosen.block_rank and ranks.max() > chosen.block_rank + later_ranks
    check_shrink_and_expand(*KERNELS, case.to(DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [DECODE_WIDTH, PREFILL_WIDTH])
def test_tiles_of_rows_with_and_without_further_rows(places: int, dtype: torch.dtype) -> None:
    case = make_case(
        seed=5,
        dtype=dtype,
        in_features=48,
        widths=(32, 20, 8),
        methods=("ia3", "lora", "ia3", "dora", "oft"),
        requests=[(0, 3), (1, 4), (2, 2), (-1, 1), (3, 5), (4, 2)],
        spare_rows=60,
        max_rank=5,
        split=1,
        places=places,
        wide=True,
    )
    rows, _, in_further = case.grouped.tiles
    mixed = ((rows >= 0) & (in_further >= 0)).any(1) & ((rows >= 0) & (in_further < 0)).any(1)
    assert mixed.any() and 0 < case.n_further < len(case.slots)
    check_rotate(rotate_kernel.rotate, case.to(DEVICE))
    check_shrink_and_expand(*KERNELS, case.to(DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("largest", "seed"), [(62, 64), (100, 106), (126, 126), (200, 203), (254, 263), (300, 301)])
def test_large_ranks_of_a_prefill(largest: int, seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside smaller ones; with blocks of ranks as for many rows, and as on a GPU with much shared memory."""
    monkeypatch.setattr(launch, "LONG_ROWS", 1)
    monkeypatch.setattr(launch, "_shared_memory", lambda: 227 << 10)
    case = make_case(
        seed=seed,
        dtype=dtype,
        in_features=144,
        widths=(80, 23),
        methods=("lora", "dora", "lora", "lora"),
        requests=[(0, 3), (1, 66), (-1, 2), (2, 1), (3, 7)],
        spare_rows=0,
        max_rank=largest,
        split=1,
        places=PREFILL_WIDTH,
    )
    ranks = case.table[..., RANK][case.table[..., RANK] > 0]
    assert ranks.max() > 0.9 * largest and ranks.min() < 0.3 * largest
    check_shrink_and_expand(*KERNELS, case.to(DEVICE))


TWO_TILES = launch.SharedExpand(32, 16, run=4, tile_programs=2, num_warps=8, num_stages=3, tiles=2)
TWO_TILES_SEEDS = (3, 4, 83)


def make_two_tiles(seed: int, dtype: torch.dtype, split: int) -> Case:
    return make_case(
        seed=seed,
        dtype=dtype,
        in_features=48,
        widths=(80, 23),
        methods=("vera", "everything", "vera", "lora", "vera", "vera"),
        requests=[(0, 150), (1, 3), (2, 66), (-1, 2), (3, 5), (4, 20), (5, 70), (0, 1)],
        spare_rows=1,
        max_rank=40,
        split=split,
        places=PREFILL_WIDTH,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("split", "run"), [(1, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("seed", TWO_TILES_SEEDS)
def test_two_tiles_at_once(
    seed: int, split: int, run: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runs of blocks of columns that end beyond a slice, in it, and within one block."""
    monkeypatch.setattr(launch, "shared_expand", lambda *_: TWO_TILES)
    monkeypatch.setattr(launch, "shared_expand_run", lambda *_: run)
    check_shrink_and_expand(*KERNELS, make_two_tiles(seed, dtype, split).to(DEVICE))


def test_two_tiles_are_of_every_kind() -> None:
    """Those of the test above: each way through the kernel, for one basis or both of two."""
    ways, bases_of_two = set(), set()
    for seed in TWO_TILES_SEEDS:
        case = make_two_tiles(seed, torch.float16, 1)
        leading = int(case.grouped.leading)
        for i in range(case.n_slices):
            for first in range(0, leading, 2):
                tiles = range(first, min(first + 2, leading))
                routes = {tile: case.grouped.routes[tile, FIRST_SITE + i].tolist() for tile in tiles}
                bases = {route[SHARED_BASIS] for route in routes.values()} - {-1}
                bases_of_two.add((len(routes), len(bases)))
                for basis in bases:
                    of_basis = [tile for tile, route in routes.items() if route[SHARED_BASIS] == basis]
                    slots = {slot for tile in of_basis for slot in case.grouped.tiles[1, tile].tolist()} - {-1}
                    sites = [case.sites[slot][i] for slot in slots if case.sites[slot][i].basis >= 0]
                    factors = {None if site.e is None else id(site.e) for site in sites}
                    _, rank, _, _, offset, stride, *_ = routes[of_basis[0]]
                    e = "several" if len(factors) > 1 else "none" if None in factors else "one"
                    ways.add((e, rank <= TWO_TILES.block_rank, offset % 8 == 0 and stride % 8 == 0, len(bases)))
    assert bases_of_two >= {(1, 1), (2, 0), (2, 1), (2, 2)}
    for e in ("one", "several", "none"):
        assert any(way[:3] == (e, True, True) for way in ways), f"no tiles with {e} e go in one block of ranks"
    assert any(way[1:] == (True, True, 2) for way in ways), "no tiles with two bases do"
    assert any(not way[1] for way in ways), "no tiles have more ranks than one block"
    assert any(not way[2] for way in ways), "no basis lies on no 16 bytes"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 3, 8, 16, 32, 48, 64, 192])
@pytest.mark.parametrize(("spare_rows", "places"), [(0, None), (70, None), (0, PREFILL_WIDTH)])
def test_rotation_blocks(spare_rows: int, places: int | None, block: int, dtype: torch.dtype) -> None:
    """Every size of block, by rows, and by tiles of each width with more columns than one program does."""
    case = make_case(
        seed=block,
        dtype=dtype,
        in_features=576 if dtype == torch.float32 or not places else 1152,
        widths=(8,),
        methods=("oft", "oft", "ia3", "everything"),
        requests=[(0, 3), (2, 1), (1, 2), (-1, 1), (3, 1)],
        spare_rows=spare_rows,
        max_rank=3,
        split=1,
        block=block,
        places=places,
    )
    check_rotate(rotate_kernel.rotate, case.to(DEVICE))


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("seed", [5, 8, 15])
def test_rows_without_the_basis_of_their_tile(seed: int, beside: bool) -> None:
    """A tile of decode where some rows have the basis and others do not, with ``d`` and ``e`` and without."""
    requests = [(0, 3), (1, 2), (-1, 1), (2, 4), (3, 1), (4, 2)]
    methods = ("vera", "lora", "vera", "ia3", "vera")
    case = make_case(seed, torch.float32, 48, (40, 24), methods, requests, 2, 12, 2, places=DECODE_WIDTH, beside=beside)
    places = case.grouped.routes[: int(case.grouped.leading), FIRST_SITE : FIRST_SITE + 2, SHARED_FIELDS:]
    d, e = places.unflatten(2, (2, DECODE_WIDTH)).unbind(2)
    live = (case.grouped.tiles[0, : int(case.grouped.leading)] >= 0)[:, None, :]
    assert ((d == NO_MEMBER) & live).any()
    for offsets in (d, e):
        assert (offsets == -1).any() and (offsets >= 0).any()
    case = case.to(DEVICE)
    routes = torch.empty_like(case.grouped.routes)
    shared_route_kernel.shared_route(*case.shared_routes(routes))
    case.grouped = dataclasses.replace(case.grouped, routes=routes)
    check_shrink_and_expand(*KERNELS, case)


@pytest.mark.parametrize("spare_rows", [0, 70])
def test_without_own_pairs(spare_rows: int) -> None:
    """Nothing has written ``v``: expand serves scales and shifts alone, and leaves it unread."""
    methods = ("ia3", "nothing")
    case = make_case(1, torch.float32, 37, (19, 5), methods, [(1, 3), (-1, 2), (0, 4)], spare_rows, 8, 1).to(DEVICE)
    before = case.h.cpu().clone()
    unwritten, none = case.scratch().fill_(torch.nan), torch.empty(0, device=DEVICE)
    expand_kernel.expand(case.h, unwritten, none, *case.own_plan, FIRST_SITE, case.slice_offsets)
    check_expanded(case, before)
