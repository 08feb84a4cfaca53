"""The memory pool against a model: slots, table rows and bytes after random batches, unloads and pins."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_converter.normal_form import Basis, NormalForm, Pair, Rotation, SharedPair
from scute_kernels import table

pytest.importorskip("sglang")
from scute_patches import sgl_kernel  # the pool derives from a class of SGLang, whose import needs it on a CPU

sgl_kernel.install()

from scute_sglang.backend import LONG_PREFILL, decode_variant, has_prefill_graph  # noqa: E402
from scute_sglang.memory_pool import LoadedAdapter, ScuteMemoryPool  # noqa: E402
from scute_sglang.packing import pack_adapter, pack_basis  # noqa: E402

SITES, IN, OUT, SLOTS = 4, 12, 10, 3
CAPACITY = 8 * 1024  # a few adapters
BASES = {key: Basis(torch.randn(3, IN), torch.randn(3, OUT)) for key in ("basis-a", "basis-b")}
PACKED_BASES = {key: pack_basis(key, basis, torch.float32) for key, basis in BASES.items()}


def adapter(uid: str, draw: random.Random, pinned: bool) -> LoadedAdapter:
    """Random sites with own pairs of random ranks, or scales, or shares of one basis; every number tells its owner."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    basis = draw.choice([None, *BASES])
    forms: dict[int, NormalForm] = {}
    for site in draw.sample(range(SITES), draw.randint(1, SITES)):
        if basis is not None:
            d, e = torch.randn(3, generator=generator), torch.randn(OUT, generator=generator)
            forms[site] = NormalForm(IN, OUT, shared=SharedPair(basis, d, e))
        else:
            rank = draw.randint(1, 9)
            pair = Pair(torch.randn(rank, IN, generator=generator), torch.randn(rank, OUT, generator=generator))
            forms[site] = NormalForm(IN, OUT, pair=pair, scale_delta=torch.randn(OUT, generator=generator))
    packed = pack_adapter(uid, forms, {}, [f"site {i}" for i in range(SITES)], torch.float32)
    return LoadedAdapter(
        uid=uid,
        name=uid,
        method="test",
        content=f"content of {uid}",
        packed=packed,
        bases={} if basis is None else {basis: PACKED_BASES[basis]},
        basis_views={} if basis is None else {basis: (basis, 0)},
        module_of_site=range(SITES),
        pinned=pinned,
    )


def check(pool: ScuteMemoryPool, loaded: dict[str, LoadedAdapter]) -> None:
    """Every resident adapter is read back through the table, part by part, as it was packed; bytes are exact."""
    resident = pool.uid_to_buffer_id
    assert len(set(resident.values())) == len(resident) <= SLOTS
    blocks: dict[str, int] = {}
    for uid, slot in resident.items():
        assert uid is not None and pool.buffer_id_to_uid[slot] == uid
        mine = loaded[uid]
        blocks.update(mine.blocks)
        for site in range(SITES):
            packed, placed = mine.packed.rows[site], pool.table[slot, site]
            for field, size in ((table.A, IN), (table.B, OUT), (table.SCALE, OUT), (table.D, 3), (table.E, OUT)):
                rows = int(packed[table.RANK]) if field in (table.A, table.B) else 1
                if packed[field] < 0:
                    assert placed[field] == -1
                    continue
                start, length = int(placed[field]), rows * size
                source = mine.packed.block[int(packed[field]) : int(packed[field]) + length]
                assert torch.equal(pool.arena.tensor[start : start + length], source)
            if packed[table.BASIS] >= 0:
                basis = BASES[mine.packed.bases[int(packed[table.BASIS])]]
                row = pool.bases[int(placed[table.BASIS])]
                a, b = int(row[table.BASIS_A]), int(row[table.BASIS_B])
                assert torch.equal(pool.arena.tensor[a : a + basis.a.numel()], basis.a.flatten())
                assert torch.equal(pool.arena.tensor[b : b + basis.b.numel()], basis.b.flatten())
    assert pool.arena.used == sum(map(pool.arena.footprint, blocks.values()))
    assert set(pool.arena.keys()) == set(blocks)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), policy=st.sampled_from(["lru", "fifo"]))
def test_random_life(seed: int, policy: str) -> None:
    draw = random.Random(seed)
    origins = torch.zeros(SITES, 2, dtype=torch.int64)
    pool = ScuteMemoryPool(origins, SLOTS, torch.float32, torch.device("cpu"), CAPACITY, policy)
    loaded: dict[str, LoadedAdapter] = {}
    for step in range(30):
        if len(loaded) < 3 or draw.random() < 0.3:
            new = adapter(f"adapter-{step}", draw, pinned=draw.random() < 0.2)
            if loaded and draw.random() < 0.3:  # the content of another, under a name of its own
                new = replace(draw.choice(list(loaded.values())), uid=new.uid, name=new.name, pinned=new.pinned)
            beside = {**loaded, new.uid: new}
            if all(pool.admits([other], beside) for other in (beside if new.pinned else [new.uid])):
                loaded[new.uid] = new
        elif draw.random() < 0.2:
            gone = draw.choice(list(loaded))
            pool.remove_lora(gone)
            del loaded[gone]
        batch = draw.sample(list(loaded), min(len(loaded), draw.randint(1, 4)))
        before = set(pool.uid_to_buffer_id)
        if pool.admits(batch, loaded):
            pool.bring_in(batch, loaded)  # what is admitted never fails
            assert set(batch) <= set(pool.uid_to_buffer_id)
            kept = {uid for uid in before if uid in loaded and loaded[uid].pinned}
            assert kept <= set(pool.uid_to_buffer_id), "a pinned adapter was evicted"
        check(pool, loaded)
        for uid in loaded:  # nobody is shut out for ever
            assert pool.admits([uid], loaded)
    for uid in list(loaded):
        pool.remove_lora(uid)
    assert pool.arena.used == 0 and not pool.uid_to_buffer_id


def test_rows_of_one_basis_share_tiles() -> None:
    draw = random.Random(5)
    adapters: dict[str, LoadedAdapter] = {}
    while len({a.group for a in adapters.values()}) < 3:
        new = adapter(f"a{len(adapters)}", draw, pinned=False)
        adapters[new.uid] = new
    for one in adapters.values():
        for other in adapters.values():
            assert (one.group == other.group) == (one.packed.bases == other.packed.bases)


def of_forms(forms: dict[int, NormalForm], module_of_site: list[int]) -> LoadedAdapter:
    packed = pack_adapter("adapter", forms, {}, [f"site {i}" for i in range(SITES)], torch.float32)
    uid = f"uid of sites {sorted(forms)}"
    return LoadedAdapter(uid, "name", "test", "content", packed, {}, {}, module_of_site)


@pytest.mark.parametrize(
    ("delta", "shares"),
    [((IN, 1, 1), True), ((1, 1, 1), False), ((IN // 4, 4, 4), False), ((1, 4, 4), False), ((1, IN, IN), False)],
)
def test_rotations_have_tiles_of_their_own(delta: tuple[int, int, int], shares: bool) -> None:
    """Unless they are diagonals, which are read for each row."""
    rotation = Rotation(torch.randn(delta))
    group = of_forms({1: NormalForm(IN, OUT, rotation=rotation)}, list(range(SITES))).group
    assert (group is not None) == shares


def test_the_decode_graph_holds_what_a_batch_needs() -> None:
    """Sites 0 to 2 are one fused layer, site 3 is one of its own."""
    layers = [0, 0, 0, 1]
    scaled = of_forms({0: NormalForm(IN, OUT, scale_delta=torch.randn(OUT))}, layers)
    shared = of_forms({1: NormalForm(IN, OUT, shared=SharedPair("basis-a", torch.randn(3), torch.randn(OUT)))}, layers)
    rotation = NormalForm(IN, OUT, rotation=Rotation(torch.randn(IN, 1, 1)))
    unfused, fused = of_forms({3: rotation}, layers), of_forms({2: rotation}, layers)

    def variant(*owners: LoadedAdapter | None, rows: int = 1) -> str:
        return decode_variant(owners, [rows] * len(owners))

    assert variant(scaled) == "lora"
    assert variant(scaled, None, shared) == "shared"
    assert variant(scaled, shared, unfused) == "shared-rotate"
    assert variant(scaled, unfused, shared, fused) == "shared-rotate-few"
    assert variant(fused, unfused, shared, fused, None) == "shared-rotate-few"
    assert variant(fused, fused, shared) == "shared-rotate-fused"
    assert variant(fused, unfused, shared, fused, fused) == "shared-rotate-fused"
    assert variant(fused, fused, shared, rows=3) == "shared-rotate-fused"
    assert variant(scaled, unfused) == "rotate"
    assert variant(None, fused, scaled, None) == variant(fused, scaled) == variant(fused) == "rotate-few"
    assert variant(fused, fused, fused, scaled) == "rotate-fused"


def test_prefills_that_replay_a_graph() -> None:
    scaled = of_forms({0: NormalForm(IN, OUT, scale_delta=torch.randn(OUT))}, [0])
    transforming = of_forms({0: NormalForm(IN, OUT, rotation=Rotation(torch.randn(IN, 1, 1)))}, [0])
    assert has_prefill_graph([scaled], LONG_PREFILL / 2)
    assert not has_prefill_graph([scaled], LONG_PREFILL)
    assert not has_prefill_graph([scaled, transforming], 0)
    assert has_prefill_graph([], 2 * LONG_PREFILL)  # base requests keep their bits
