"""The arena against a model of it: every live block holds its own bytes and nothing else, whatever came before."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scute_sglang import arena as arena_module
from scute_sglang.arena import ALIGNMENT, Arena, ArenaFull

KEYS = st.sampled_from([f"adapter {number}" for number in range(12)])
UNITS = 24  # aligned units in the arena of the state machine: small, so that it is nearly always full
FEW_UNITS = 5


def random_bytes(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def read(arena: Arena, key: str, elements: int) -> torch.Tensor:
    offset = arena.offset(key)
    return arena.tensor[offset : offset + elements]


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.cpu().view(torch.uint8), right.cpu().view(torch.uint8))


@dataclass
class Expected:
    elements: int
    references: int = 1
    content: torch.Tensor | None = None


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    def teardown(self) -> None:
        self.patch.undo()

    @initialize(
        dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
        slack=st.integers(0, ALIGNMENT - 1),
        staging=st.sampled_from([ALIGNMENT, 3 * ALIGNMENT, arena_module.STAGING_BYTES]),
    )
    def create(self, dtype: torch.dtype, slack: int, staging: int) -> None:
        self.patch.setattr(arena_module, "STAGING_BYTES", staging)
        self.arena = Arena(UNITS * ALIGNMENT + slack, dtype, "cpu")
        self.dtype = dtype
        self.model: dict[str, Expected] = {}
        self.seed = 0

    def bytes_of(self, elements: int) -> int:
        """Counted in bytes from the definition: whole units, as many as it takes."""
        units = 0
        while units * ALIGNMENT < elements * self.dtype.itemsize:
            units += 1
        return units * ALIGNMENT

    def used(self) -> int:
        return sum(self.bytes_of(block.elements) for block in self.model.values())

    def first_gap(self, size: int) -> int | None:
        """Where the first of at least so many bytes begins."""
        end = 0
        for key in sorted(self.model, key=self.arena.offset):
            if block := self.bytes_of(self.model[key].elements):
                begin = self.arena.offset(key) * self.dtype.itemsize
                if begin - end >= size:
                    return end
                end = begin + block
        return end if UNITS * ALIGNMENT - end >= size else None

    def elements(self, data: st.DataObject) -> int:
        """Sizes at, just below and just above whole units, and anything between."""
        per_unit = ALIGNMENT // self.dtype.itemsize
        units = data.draw(st.integers(0, FEW_UNITS))
        return max(0, units * per_unit + data.draw(st.sampled_from([0, 0, 1, -1, per_unit // 3])))

    def allocate_and_write(self, key: str, elements: int) -> None:
        before = {other: self.arena.offset(other) for other in self.model}
        generation, gap = self.arena.generation, self.first_gap(self.bytes_of(elements))
        offset = self.arena.allocate(key, elements)
        assert offset == self.arena.offset(key)
        if elements:
            assert (self.arena.generation == generation) == (gap is not None), "blocks move only if they have to"
            assert gap in (None, offset * self.dtype.itemsize)
        if self.arena.generation == generation:
            assert before == {other: self.arena.offset(other) for other in self.model}, "blocks moved without notice"
        self.model[key] = Expected(elements)
        self.check()  # before the write: moving has already finished

    @rule(key=KEYS, data=st.data())
    def allocate(self, key: str, data: st.DataObject) -> None:
        elements = self.elements(data)
        if key in self.model:
            with pytest.raises(ValueError, match=key):
                self.arena.allocate(key, elements)
        elif self.used() + self.bytes_of(elements) > UNITS * ALIGNMENT:
            with pytest.raises(ArenaFull) as full:
                self.arena.allocate(key, elements)
            assert full.value.needed == self.bytes_of(elements)
            assert full.value.free == UNITS * ALIGNMENT - self.used()
        else:
            self.allocate_and_write(key, elements)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        block = self.model[key]
        self.seed += 1
        block.content = random_bytes(block.elements, self.dtype, self.seed)
        self.arena.write(key, block.content.clone())

    @rule()
    def write_all(self) -> None:
        for key, block in self.model.items():
            self.seed += 1
            block.content = random_bytes(block.elements, self.dtype, self.seed)
            self.arena.write(key, block.content.clone())

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.arena.retain(key)
        self.model[key].references += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.model))))

    def drop(self, key: str) -> None:
        self.arena.release(key)
        self.model[key].references -= 1
        if self.model[key].references == 0:
            del self.model[key]

    @precondition(lambda self: len(self.model) > 3)
    @rule()
    def evict_every_other(self) -> None:
        """Leaves holes of one block each, which is what makes the next large block move the rest."""
        for key in sorted(self.model, key=self.arena.offset)[::2]:
            while key in self.model:
                self.drop(key)

    @rule(wanted=st.sets(KEYS, min_size=1), data=st.data())
    def admit(self, wanted: set[str], data: st.DataObject) -> None:
        """What the scheduler does: ask first, then evict what is not wanted and load what is missing."""
        sizes = {
            key: self.model[key].elements if key in self.model else self.elements(data)
            for key in data.draw(st.permutations(sorted(wanted)))
        }
        admitted = self.arena.fits(sizes)
        assert admitted == (sum(map(self.bytes_of, sizes.values())) <= UNITS * ALIGNMENT)
        if admitted:
            for key in list(self.model):
                while key not in wanted and key in self.model:
                    self.drop(key)
            for key, elements in sizes.items():
                if key not in self.model:
                    self.allocate_and_write(key, elements)

    @rule()
    def scribble_on_dead_memory(self) -> None:
        """Nothing outside a live block may matter, and nothing outside a live block is given to its owner."""
        dead = torch.ones_like(self.arena.tensor, dtype=torch.bool)
        for key, block in self.model.items():
            dead[self.arena.offset(key) : self.arena.offset(key) + block.elements] = False
        self.seed += 1
        self.arena.tensor[dead] = random_bytes(dead.numel(), self.dtype, self.seed)[dead]

    @invariant()
    def check(self) -> None:
        assert set(self.arena.keys()) == set(self.model)
        assert all(key in self.arena for key in self.model)
        assert self.arena.capacity == UNITS * ALIGNMENT
        assert self.arena.used == self.used()
        assert self.arena.free == UNITS * ALIGNMENT - self.used()

        end = 0
        spans = sorted((self.arena.offset(key), self.bytes_of(block.elements)) for key, block in self.model.items())
        for offset, size in spans:
            start = offset * self.dtype.itemsize
            assert start % ALIGNMENT == 0
            assert start >= end, "blocks overlap"
            end = start + size
        assert end <= UNITS * ALIGNMENT

        for key, block in self.model.items():
            if block.content is not None:
                assert same_bytes(read(self.arena, key, block.elements), block.content), key


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("staging_units", [1, 5, 100])
@pytest.mark.parametrize("gap_units", [1, 3, 40])
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_blocks_move_over_their_own_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, gap_units: int, staging_units: int
) -> None:
    """Moves that overlap themselves many times over, once, and not at all, with buffers smaller and larger."""
    per_unit = ALIGNMENT // 2
    monkeypatch.setattr(arena_module, "STAGING_BYTES", staging_units * ALIGNMENT)
    arena = Arena(80 * ALIGNMENT, torch.float16, device)
    sizes = {"long": 31 * per_unit - 5, "short": 3, "middle": 4 * per_unit + 1}
    arena.allocate("gap", gap_units * per_unit)
    content = {}
    for seed, (key, elements) in enumerate(sizes.items()):
        arena.allocate(key, elements)
        content[key] = random_bytes(elements, torch.float16, seed)
        arena.write(key, content[key])
    arena.release("gap")

    offset = arena.allocate("large", (80 - 37) * per_unit)  # everything that is free

    assert arena.generation == 1
    assert arena.free == 0
    assert [arena.offset(key) for key in sizes] == [0, 31 * per_unit, 32 * per_unit]
    assert offset == 37 * per_unit
    for key, elements in sizes.items():
        assert same_bytes(read(arena, key, elements), content[key])


def test_a_hole_is_used_before_anything_moves() -> None:
    arena = Arena(8 * ALIGNMENT, torch.float32, "cpu")
    for key in "abcd":
        arena.allocate(key, 128)
    hole = arena.offset("b")
    arena.release("b")
    assert arena.allocate("e", 65) == hole
    assert arena.generation == 0


def test_write_refuses_another_size_or_dtype() -> None:
    arena = Arena(4096, torch.float16, "cpu")
    arena.allocate("a", 130)
    for wrong in [torch.zeros(129).half(), torch.zeros(130), torch.zeros(130, 1).half()]:
        with pytest.raises(ValueError, match="a holds"):
            arena.write("a", wrong)


def test_released_blocks_are_unknown() -> None:
    arena = Arena(4096, torch.float16, "cpu")
    arena.allocate("a", 130)
    arena.retain("a")
    arena.release("a")
    assert "a" in arena
    arena.release("a")
    assert arena.used == 0
    for call in [arena.release, arena.retain, arena.offset]:
        with pytest.raises(KeyError):
            call("a")


def test_a_full_arena_says_what_to_do() -> None:
    arena = Arena(1000, torch.float16, "cpu")  # 768 usable bytes
    arena.allocate("a", 300)
    with pytest.raises(ArenaFull, match=r"b needs 256 bytes .* 0 of 768 are free: .*--scute-adapter-memory"):
        arena.allocate("b", 1)
