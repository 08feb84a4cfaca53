"""Random batches for the tests of the kernels, and what the operators make of them: dense fp64 formulas per row."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from hypothesis import strategies as st

from scute_kernels import launch
from scute_kernels.plan import BatchPlan, build_plan, most_tiles, own_tile_rows, shared_fields, tile_width, view_plan
from scute_kernels.route.reference import route
from scute_kernels.shared_route.reference import shared_route
from scute_kernels.table import (
    BASIS,
    BASIS_A,
    BASIS_A_STRIDE,
    BASIS_B,
    BASIS_B_STRIDE,
    BASIS_FIELDS,
    BASIS_RANK,
    BIAS,
    BLOCK,
    BLOCK_STRIDE,
    FIELDS,
    NO_MEMBER,
    RANK,
    ROTATION,
    SCALE,
    SHARED_BASIS,
    SHARED_FIELDS,
    A,
    B,
    D,
    E,
)

NAN = float("nan")
FIRST_SITE = 2  # the sites of the module begin in the middle of the table
EPS32 = 2.0**-23
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Half a step among the subnormal numbers, where a rounding error is not relative any more.
UNDERFLOW = {dtype: torch.finfo(dtype).smallest_normal * unit for dtype, unit in UNIT_ROUNDOFF.items()}
Arguments = tuple[torch.Tensor | int, ...]
METHODS = ("lora", "dora", "ia3", "vera", "oft", "everything", "nothing")


@dataclass
class Memory:
    """An arena that holds NaN wherever no part lies, and the tables over it, filled as a memory pool would."""

    dtype: torch.dtype
    table: torch.Tensor
    bases: torch.Tensor
    origins: torch.Tensor
    generator: torch.Generator
    parts: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    end: int = 0

    def put(self, part: torch.Tensor) -> int:
        """The offset of a copy of ``part``; a gap of NaN precedes it, at least one element wide."""
        step = 16 // self.dtype.itemsize
        offset = (self.end // step + 1) * step
        self.parts.append((offset, part))
        self.end = offset + part.numel()
        return offset

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def arena(self) -> torch.Tensor:
        arena = torch.full((self.end + 64,), NAN, dtype=self.dtype)
        for offset, part in self.parts:
            arena[offset : offset + part.numel()] = part.reshape(-1)
        return arena


@dataclass
class Site:
    """The parts of one slot at one site, dense; absent ones are None."""

    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: torch.Tensor | None = None  # s - 1
    bias: torch.Tensor | None = None
    rotation: torch.Tensor | None = None  # R - I, (in, in)
    basis: int = -1
    shared_a: torch.Tensor | None = None  # as the site reads it, (r, in)
    shared_b: torch.Tensor | None = None
    d: torch.Tensor | None = None
    e: torch.Tensor | None = None

    @property
    def after_base(self) -> bool:
        """Whether anything is to be done after the base layer."""
        return self.a is not None or self.scale is not None or self.bias is not None or self.basis >= 0


@dataclass(repr=False)
class Case:
    """``h``: ``(N, out)``, or with further rows. ``beside``: whether shared_expand makes an
    addend for expand, and adds nothing itself."""

    x: torch.Tensor
    h: torch.Tensor
    beside: bool
    slice_offsets: tuple[int, ...]
    slots: list[int]  # of the rows
    sites: list[list[Site]]  # [slot][slice]
    own: BatchPlan
    grouped: BatchPlan
    arena: torch.Tensor
    table: torch.Tensor
    bases: torch.Tensor
    origins: torch.Tensor
    scratch_rank: int
    split: int
    n_further: int  # that an output has room for, if it has further rows

    def __repr__(self) -> str:
        where = f"x {tuple(self.x.shape)}, h {tuple(self.h.shape)}, slices {self.slice_offsets}"
        return f"Case({self.x.dtype}, {where}, beside {self.beside}, rows of slots {self.slots})"

    @property
    def own_plan(self) -> Arguments:
        """The arguments of shrink and expand after their first."""
        return self.own.tiles, self.own.routes, self.own.tile_rows, self.arena

    @property
    def grouped_plan(self) -> Arguments:
        """The same of shared_shrink and shared_expand."""
        return self.grouped.tiles, self.grouped.routes, self.grouped.leading, self.arena, self.table

    def shared_routes(self, routes: torch.Tensor) -> Arguments:
        """The arguments of shared_route, which writes ``routes``."""
        return self.grouped.tiles, self.grouped.leading, routes, self.table, self.bases, self.origins

    @property
    def rotate_plan(self) -> Arguments:
        return self.grouped.row_slot, self.grouped.further, self.grouped.tiles, self.arena, self.table

    @property
    def n_slices(self) -> int:
        return len(self.slice_offsets) - 1

    @property
    def with_further(self) -> int:
        """Rows of an output that has further rows."""
        return len(self.slots) + (self.n_slices - 1) * self.n_further

    def row_of(self, place: int, i: int) -> int:
        """Of slice ``i``, not the first, of the row at ``place`` among those that have further rows."""
        return len(self.slots) + (i - 1) * self.n_further + place

    def further_rows(self) -> list[int]:
        """The rows that have further rows, in order."""
        return [
            n
            for n, slot in enumerate(self.slots)
            if slot >= 0 and any(site.rotation is not None for site in self.sites[slot])
        ]

    def scratch(self) -> torch.Tensor:
        shape = (self.split, len(self.slots), self.n_slices, self.scratch_rank)
        return torch.full(shape, NAN, device=self.x.device)

    def shared_scratch(self) -> torch.Tensor:
        """``u``, as the forwards of a server have it on a GPU."""
        dtype = launch.shared_scratch_dtype(self.split, self.grouped.tile_rows, self.arena.dtype)
        rank = self.scratch_rank if dtype == torch.float32 else -(-self.scratch_rank // 16) * 16
        return torch.full((self.split, len(self.slots), self.n_slices, rank), NAN, dtype=dtype, device=self.x.device)

    def addend(self) -> torch.Tensor:
        """What shared_expand writes if it runs beside the base layer, else nothing."""
        if not self.beside:
            return torch.empty(0, device=self.x.device)
        return torch.full((len(self.slots), self.slice_offsets[-1]), NAN, device=self.x.device)

    def to(self, device: str) -> Case:
        """A copy on ``device``; row strides are kept."""
        moved = dict(vars(self))
        for name in ("arena", "table", "bases", "origins"):
            moved[name] = moved[name].to(device)
        for name in ("x", "h"):
            *shape, features = moved[name].shape
            padded = torch.empty(*shape, moved[name].stride(-2), dtype=self.arena.dtype, device=device)
            moved[name] = padded[..., :features].copy_(moved[name])
        for name, plan in (("own", self.own), ("grouped", self.grouped)):
            tensors = (plan.row_slot, plan.further, plan.tiles, plan.leading, plan.routes)
            moved[name] = BatchPlan(*(tensor.to(device) for tensor in tensors), tile_rows=plan.tile_rows)
        return Case(**moved)


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def make_case(
    seed: int,
    dtype: torch.dtype,
    in_features: int,
    widths: tuple[int, ...],
    methods: tuple[str, ...],
    requests: list[tuple[int, int]],
    spare_rows: int,
    max_rank: int,
    split: int,
    block: int | None = None,
    places: int | None = None,
    wide: bool = False,
    beside: bool = False,
    n_further: int | None = None,
) -> Case:
    """``methods``: of each slot. ``requests``: slot and rows. ``block``: of the rotations, any divisor if not given.
    ``places``: of a tile, as in an eager forward if not given. ``wide``: whether ``h`` has further rows.
    ``n_further``: for how many rows; about as many as need some if not given."""
    choose = random.Random(seed)
    n_slices, n_slots = len(widths), len(methods)
    sites = FIRST_SITE + n_slices + 1
    table = torch.full((n_slots, sites, FIELDS), -1, dtype=torch.int64)
    table[..., RANK] = 0
    table[..., BLOCK] = 0
    memory = Memory(
        dtype,
        table,
        torch.zeros(3, BASIS_FIELDS, dtype=torch.int64),
        torch.randint(0, 40, (sites, 2), generator=torch.Generator().manual_seed(seed)),
        torch.Generator().manual_seed(seed),
    )
    # Slices of a module read the same features.
    memory.origins[:, 0] = choose.choice([0, 16, 5])
    shared = [_put_basis(memory, choose, row, in_features, max(widths), max_rank) for row in range(2)]

    dense = [[Site() for _ in widths] for _ in methods]
    groups = []
    for slot, method in enumerate(methods):
        basis = choose.randrange(2)
        for i, width in enumerate(widths):
            if choose.random() < 0.7:  # otherwise the adapter does not target this projection
                of_site = basis if method == "vera" else choose.randrange(2)
                _put_site(
                    memory,
                    choose,
                    dense[slot][i],
                    slot,
                    i,
                    method,
                    in_features,
                    width,
                    max_rank,
                    shared,
                    of_site,
                    block,
                )
        of_slot = table[slot, FIRST_SITE : FIRST_SITE + n_slices]
        diagonal = (of_slot[:, BLOCK] <= 0) | ((of_slot[:, BLOCK] == 1) & (of_slot[:, BLOCK_STRIDE] == 1))
        shares = method != "everything" and bool(diagonal.all())  # rotations with blocks have tiles of their own
        groups.append(choose.choice([basis, basis, -1]) if shares else -1)

    live = sum(count for _, count in requests)
    rows = live + spare_rows
    slots = [slot for slot, count in requests for _ in range(count)] + [-1] * spare_rows
    width = places or tile_width(rows, decode=True)
    requests_slots, counts = [slot for slot, _ in requests], [count for _, count in requests]
    sharing = [slot for slot in range(n_slots) if (table[slot, :, BASIS] >= 0).any()]
    transforming = [slot for slot in range(n_slots) if (table[slot, :, BLOCK] > 0).any()]
    if n_further is None:
        needed = sum(count for slot, count in requests if slot in transforming)
        n_further = min(rows, needed + choose.choice([0, 3]))
    plans = {}
    for name, tile_rows, its_groups, leaders, fields in (
        ("own", own_tile_rows(rows, width), [-1] * n_slots, [], FIELDS),
        ("grouped", width, groups, sharing, shared_fields(width)),
    ):
        packed = build_plan(requests_slots, counts, its_groups, rows, width, tile_rows, leaders, transforming)
        routes = torch.empty(most_tiles(rows, width, n_slots), sites, fields, dtype=torch.int64)
        plans[name] = replace(view_plan(packed, rows, width, routes), tile_rows=tile_rows)
    route(plans["own"].tiles, plans["own"].routes, table)
    grouped = plans["grouped"]
    shared_route(grouped.tiles, grouped.leading, grouped.routes, table, memory.bases, memory.origins)
    x = memory.random(rows, in_features + choose.choice([0, 16, 7]))[:, :in_features]
    offsets = tuple(sum(widths[:i]) for i in range(n_slices + 1))
    outputs = rows + (n_slices - 1) * n_further if wide else rows
    h = memory.random(outputs, offsets[-1] + choose.choice([0, 16, 3]))[:, : offsets[-1]]
    return Case(
        x,
        h,
        beside,
        offsets,
        slots,
        dense,
        plans["own"],
        plans["grouped"],
        memory.arena(),
        table,
        memory.bases,
        memory.origins,
        max_rank + 2,
        split,
        n_further,
    )


def _put_basis(
    memory: Memory, choose: random.Random, row: int, in_features: int, width: int, max_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rank = choose.randint(1, max_rank)
    # The rows of a basis lie on 16 bytes in some cases and not in others.
    a = memory.random(rank, -(-(in_features + 40) // 16) * 16 + choose.choice([0, 3]))
    b = memory.random(rank, -(-(width + 40) // 16) * 16 + choose.choice([0, 5]))
    fields = {BASIS_A: memory.put(a), BASIS_A_STRIDE: a.shape[1], BASIS_B: memory.put(b), BASIS_B_STRIDE: b.shape[1]}
    for name, value in {**fields, BASIS_RANK: rank}.items():
        memory.bases[row, name] = value
    return a, b


def _put_site(
    memory: Memory,
    choose: random.Random,
    site: Site,
    slot: int,
    i: int,
    method: str,
    in_features: int,
    width: int,
    max_rank: int,
    shared: list[tuple[torch.Tensor, torch.Tensor]],
    basis: int,
    block: int | None,
) -> None:
    row = memory.table[slot, FIRST_SITE + i]
    if method in ("lora", "dora", "everything"):
        rank = choose.randint(1, max_rank)
        site.a, site.b = memory.random(rank, in_features), memory.random(rank, width)
        row[A], row[B], row[RANK] = memory.put(site.a), memory.put(site.b), rank
    if method in ("dora", "ia3", "everything"):
        site.scale = memory.random(width)
        row[SCALE] = memory.put(site.scale)
    if method in ("dora", "everything") and choose.random() < 0.7:
        site.bias = memory.random(width)
        row[BIAS] = memory.put(site.bias)
    if method in ("vera", "everything"):
        origin_in, origin_out = memory.origins[FIRST_SITE + i].tolist()
        a, b = shared[basis]
        site.basis = basis
        site.shared_a = a[:, origin_in : origin_in + in_features]
        site.shared_b = b[:, origin_out : origin_out + width]
        row[BASIS] = basis
        if choose.random() < 0.9:
            site.d = memory.random(a.shape[0])
            row[D] = memory.put(site.d)
        if choose.random() < 0.9:
            site.e = memory.random(width)
            row[E] = memory.put(site.e)
    if method in ("ia3", "oft", "everything"):
        k = 1 if method == "ia3" else block or choose.choice(divisors(in_features))
        one_for_all = choose.random() < 0.3
        delta = memory.random(1 if one_for_all else in_features // k, k, k)
        row[ROTATION], row[BLOCK], row[BLOCK_STRIDE] = memory.put(delta), k, 0 if one_for_all else k * k
        site.rotation = torch.block_diag(*delta.expand(in_features // k, k, k))


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)) -> Case:
    methods = tuple(draw(st.lists(st.sampled_from(METHODS), min_size=1, max_size=5)))
    request = st.tuples(st.integers(-1, len(methods) - 1), st.integers(0, 20))
    requests = draw(st.lists(request, min_size=1, max_size=7))
    live = sum(count for _, count in requests)
    return make_case(
        seed=draw(st.integers(0, 2**31)),
        dtype=draw(st.sampled_from(dtypes)),
        in_features=draw(st.one_of(st.integers(1, 300), st.sampled_from([48, 288, 512, 576]))),
        widths=tuple(
            draw(st.lists(st.one_of(st.integers(1, 150), st.sampled_from([16, 144])), min_size=1, max_size=3))
        ),
        methods=methods,
        requests=requests,
        # More than 256 rows make the tiles of a prefill.
        spare_rows=draw(st.sampled_from([0 if live else 1, 3, 257])),
        max_rank=draw(st.sampled_from([1, 3, 12, 16, 33, 70])),
        split=draw(st.sampled_from([1, 2, 14])),  # of 14336 features in shares of 1024
        places=draw(st.sampled_from([None, None, 64])),  # a prefill graph of few rows has tiles of 64
        wide=draw(st.booleans()),
        beside=draw(st.booleans()),
    )


Operator = Callable[..., None]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    integer = {4: torch.int32, 2: torch.int16}[left.itemsize]
    return torch.equal(left.contiguous().view(integer), right.contiguous().view(integer))


def check_rotate(rotate: Operator, case: Case) -> None:
    """``rotate`` against ``x R`` with the dense ``R``, fp64."""
    features = case.x.shape[1]
    out = torch.full((case.with_further, features), NAN, dtype=case.x.dtype, device=case.x.device)
    rotate(case.x, *case.rotate_plan, FIRST_SITE, case.n_slices, out)
    out, x_rows = out.cpu(), case.x.cpu()
    unit, underflow = UNIT_ROUNDOFF[case.x.dtype], UNDERFLOW[case.x.dtype]
    places = case.further_rows()
    for place in range(len(places), case.n_further):
        for i in range(1, case.n_slices):
            assert not out[case.row_of(place, i)].any(), f"nothing is at place {place}, slice {i}"
    for n, slot in enumerate(case.slots):
        x = x_rows[n].double()
        for i in range(case.n_slices if n in places else 1):
            row = case.row_of(places.index(n), i) if i else n
            delta = case.sites[slot][i].rotation if slot >= 0 else None
            if delta is None:
                assert same_bits(out[row], x_rows[n]), f"row {n} slice {i} has no rotation and was changed"
                continue
            expected = x + x @ delta.double()
            # fp32 sums of at most `features` products, then one rounding.
            magnitude = x.abs() + x.abs() @ delta.double().abs()
            tolerance = underflow + unit * expected.abs() + (features + 2) * EPS32 * magnitude
            _assert_close(out[row], expected, tolerance, f"row {n} slice {i}")


def check_shrink_and_expand(
    shrink: Operator, expand: Operator, shared_shrink: Operator, shared_expand: Operator, case: Case
) -> None:
    """Both shrinks, then both expands, against the formula with dense matrices, fp64."""
    before = case.h.cpu().clone()
    v, u, addend = case.scratch(), case.shared_scratch(), case.addend()
    shrink(case.x, *case.own_plan, FIRST_SITE, v)
    shared_shrink(case.x, *case.grouped_plan, FIRST_SITE, u)
    _check_scratch(case, v.cpu(), u.cpu())
    after_base = (FIRST_SITE, case.slice_offsets)
    if case.beside:
        shared_expand(addend, u, *case.grouped_plan, *after_base, add=False)
    expand(case.h, v, addend, *case.own_plan, *after_base)
    if not case.beside:
        shared_expand(case.h[: len(case.slots)], u, *case.grouped_plan, *after_base, add=True)
    check_expanded(case, before)


def _check_scratch(case: Case, v: torch.Tensor, u: torch.Tensor) -> None:
    x_rows = case.x.cpu()
    features = x_rows.shape[1]
    for n, slot in enumerate(case.slots):
        x = x_rows[n].double()
        for i in range(case.n_slices):
            site = case.sites[slot][i] if slot >= 0 else Site()
            rank = 0 if site.a is None else site.a.shape[0]
            assert v[:, n, i, rank:].isnan().all(), f"row {n} slice {i}: v is written past the rank"
            if site.a is not None:
                product, magnitude = x @ site.a.double().T, x.abs() @ site.a.double().abs().T
                tolerance = (features + 2) * EPS32 * magnitude
                _assert_close(v[:, n, i, :rank].double().sum(0), product, tolerance, f"v row {n} slice {i}")
            rank = 0 if site.shared_a is None else site.shared_a.shape[0]
            written = rank if u.dtype == torch.float32 else -(-rank // 16) * 16
            assert u[:, n, i, written:].isnan().all(), f"row {n} slice {i}: u is written past the rank"
            assert not u[:, n, i, rank:written].any(), f"row {n} slice {i}: u is not 0 up to the next 16 ranks"
            if site.shared_a is not None:
                d = torch.ones(rank).double() if site.d is None else site.d.double()
                a = site.shared_a.double()
                product, magnitude = x @ a.T * d, x.abs() @ a.abs().T * d.abs()
                tolerance = (features + 3) * EPS32 * magnitude
                if u.dtype != torch.float32:
                    tolerance += UNDERFLOW[u.dtype] + UNIT_ROUNDOFF[u.dtype] * product.abs()
                _assert_close(u[:, n, i, :rank].double().sum(0), product, tolerance, f"u row {n} slice {i}")


def check_expanded(case: Case, before: torch.Tensor) -> None:
    """The first rows of ``case.h`` against the formula; ``before``: what ``case.h`` held before both expands."""
    unit, underflow = UNIT_ROUNDOFF[case.h.dtype], UNDERFLOW[case.h.dtype]
    after, x_rows = case.h.cpu(), case.x.cpu()
    features, places, wide = x_rows.shape[1], case.further_rows(), len(before) > len(case.slots)
    for n, slot in enumerate(case.slots):
        x = x_rows[n].double()
        for i, (begin, end) in enumerate(pairwise(case.slice_offsets)):
            site = case.sites[slot][i] if slot >= 0 else Site()
            transformed = slot >= 0 and (case.sites[slot][0].rotation, site.rotation) != (None, None)
            h = before[case.row_of(places.index(n), i) if transformed and wide and i else n, begin:end]
            if not site.after_base:
                assert same_bits(after[n, begin:end], h), f"row {n} slice {i} has no part, and changed"
                continue
            h = h.double()
            expected, magnitude, pairs = h.clone(), h.abs(), torch.zeros_like(h)
            terms, lost = 4.0, torch.zeros_like(h)  # lost: where v or u is rounded to a subnormal number
            if site.scale is not None:
                expected += h * site.scale.double()
                magnitude += (h * site.scale.double()).abs()
            if site.bias is not None:
                expected += site.bias.double()
                magnitude += site.bias.double().abs()
            if site.a is not None and site.b is not None:
                a, b = site.a.double(), site.b.double()
                expected += x @ a.T @ b
                pairs += x.abs() @ a.abs().T @ b.abs()
                lost += underflow * b.abs().sum(0)
                terms += features + a.shape[0]
            if site.shared_a is not None and site.shared_b is not None:
                a, b = site.shared_a.double(), site.shared_b.double()
                d = torch.ones(a.shape[0]).double() if site.d is None else site.d.double()
                e = torch.ones(b.shape[1]).double() if site.e is None else site.e.double()
                expected += (x @ a.T * d) @ b * e
                pairs += (x.abs() @ a.abs().T * d.abs()) @ b.abs() * e.abs()
                lost += underflow * b.abs().sum(0) * e.abs()
                terms += features + a.shape[0]
            tolerance = underflow + unit * expected.abs() + terms * EPS32 * (magnitude + pairs)
            own = site.a is not None or site.scale is not None or site.bias is not None
            if own and site.basis >= 0 and not case.beside:
                tolerance += underflow + unit * (magnitude + pairs)  # h is rounded between the two expands
            if case.h.dtype != torch.float32:  # v and u are rounded before they meet b
                tolerance += unit * pairs + lost
            _assert_close(after[n, begin:end], expected, tolerance, f"row {n} slice {i} slot {slot}")


def check_route(route: Operator, case: Case) -> None:
    """``route`` against the table, tile by tile."""
    table = case.table.cpu()
    routes = torch.full_like(case.own.routes, 7)
    route(case.own.tiles, routes, case.table)
    routes = routes.cpu()
    for tile, row in enumerate(case.own.tiles[0, :, 0].tolist()):
        expected = table[case.slots[row]] if row >= 0 else torch.full_like(table[0], -1)
        assert torch.equal(routes[tile], expected), f"tile {tile}"


def check_shared_route(shared_route: Operator, case: Case) -> None:
    """``shared_route`` against the bases of the rows of each leading tile, row by row, where a basis is read included,
    and in decode where the ``d`` and ``e`` of each row are."""
    plan, table, bases, origins = case.grouped, case.table.cpu(), case.bases.cpu(), case.origins.cpu()
    routes = torch.full_like(plan.routes, 7)
    shared_route(*case.shared_routes(routes))
    routes = routes.cpu()
    for tile, rows in enumerate(plan.tiles[0, : int(plan.leading)].tolist()):
        for site in range(table.shape[1]):
            of_rows = {int(table[case.slots[n], site, BASIS]) for n in rows if n >= 0} - {-1}
            if not of_rows:
                assert routes[tile, site, SHARED_BASIS] == -1, f"tile {tile} site {site}"
                continue
            (basis,) = of_rows
            entry, (first_in, first_out) = bases[basis].tolist(), origins[site].tolist()
            a, b = entry[BASIS_A] + first_in, entry[BASIS_B] + first_out
            expected = [basis, entry[BASIS_RANK], a, entry[BASIS_A_STRIDE], b, entry[BASIS_B_STRIDE]]
            assert routes[tile, site, SHARED_BASIS : len(expected)].tolist() == expected, f"tile {tile} site {site}"
            if routes.shape[2] > SHARED_FIELDS:
                members = [n >= 0 and int(table[case.slots[n], site, BASIS]) >= 0 for n in rows]
                expected = [
                    int(table[case.slots[n], site, field]) if member else NO_MEMBER
                    for field in (D, E)
                    for n, member in zip(rows, members, strict=True)
                ]
                assert routes[tile, site, SHARED_FIELDS:].tolist() == expected, f"tile {tile} site {site}"


def check_lookup(lookup: Operator, case: Case, ids: torch.Tensor) -> None:
    """``lookup`` against the columns of ``a``, exactly. The vocabulary is ``case.x``'s features, the module slice 0."""
    v = torch.full((1, len(case.slots), 1, case.scratch_rank), NAN, device=case.x.device)
    vocabulary = case.x.shape[1]
    lookup(ids.to(case.x.device), case.own.row_slot, case.arena, case.table, FIRST_SITE, vocabulary, v)
    v = v.cpu()
    for n, slot in enumerate(case.slots):
        a = case.sites[slot][0].a if slot >= 0 else None
        rank = 0 if a is None else a.shape[0]
        assert v[0, n, 0, rank:].isnan().all(), f"row {n}: v is written past the rank"
        if a is not None:
            token = int(ids[n])
            column = a[:, token].float() if 0 <= token < vocabulary else torch.zeros(rank)
            assert torch.equal(v[0, n, 0, :rank], column), f"row {n} token {token}"


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor, where: str) -> None:
    excess = (actual.double() - expected).abs() - tolerance
    assert not excess.isnan().any(), f"{where}: NaN"
    worst = int(excess.argmax())
    assert excess[worst] <= 0, (
        f"{where}, element {worst}: {float(actual[worst])} instead of {float(expected[worst])}, "
        f"off by more than {float(tolerance[worst]):.3g}"
    )


def random_ids(case: Case) -> torch.Tensor:
    """One token of each row; some lie outside the vocabulary on either side."""
    generator = torch.Generator().manual_seed(len(case.slots) + math.prod(case.x.shape))
    return torch.randint(-2, case.x.shape[1] + 2, (len(case.slots),), generator=generator)
