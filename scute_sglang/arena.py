"""The arena: one flat device tensor that holds the weights of every resident adapter and shared basis."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import torch

ALIGNMENT = 256  # bytes; what the CUDA allocator guarantees at least, so kernels may assume it of every block
STAGING_BYTES = 8 << 20  # enough to move a block at memory bandwidth


class ArenaFull(RuntimeError):
    """The free bytes do not suffice. ``needed``, ``free``: bytes, the first with alignment."""

    def __init__(self, key: str, needed: int, free: int, capacity: int) -> None:
        super().__init__(
            f"{key} needs {needed} bytes of adapter memory, but {free} of {capacity} are free: "
            "evict another adapter first, or raise --scute-adapter-memory"
        )
        self.needed = needed
        self.free = free


@dataclass
class _Block:
    offset: int  # elements
    elements: int
    size: int  # elements, aligned
    references: int = 1


@dataclass
class _Hole:
    offset: int  # elements
    size: int  # elements


class Arena:
    """Blocks of one flat tensor, by key. A block holds the packed parts of one adapter, or one shared basis.

    ``tensor``: ``(elements,)`` of ``dtype`` on ``device``, never reallocated, so captured CUDA graphs may hold it.
    ``capacity``, ``used``, ``free``: bytes; a block counts with its alignment, and the capacity is rounded down to it.
    ``generation``: changes whenever blocks have moved; their owner then rewrites every offset that it handed out.

    Copies run on the current stream. The caller orders it after the steps that read released or moving blocks, and
    before the steps that read the new ones.
    """

    def __init__(self, capacity_bytes: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.capacity = capacity_bytes // ALIGNMENT * ALIGNMENT
        self.generation = 0
        self.tensor = torch.empty(self.capacity // dtype.itemsize, dtype=dtype, device=device)
        # Allocated now: when blocks have to move, the device may have no memory left.
        staging = min(self.capacity, STAGING_BYTES) // dtype.itemsize
        self._staging = torch.empty(staging, dtype=dtype, device=device)
        self._blocks: dict[str, _Block] = {}
        self._holes = [_Hole(0, self.tensor.numel())]  # by offset; no two of them touch
        self.used = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def __contains__(self, key: str) -> bool:
        return key in self._blocks

    def keys(self) -> list[str]:
        return list(self._blocks)

    def offset(self, key: str) -> int:
        """Where the block starts, in elements. Valid until ``generation`` changes."""
        return self._blocks[key].offset

    def footprint(self, elements: int) -> int:
        """The bytes that a block of so many elements takes."""
        return -(-elements * self.tensor.itemsize // ALIGNMENT) * ALIGNMENT

    def fits(self, elements: Mapping[str, int]) -> bool:
        """Whether these blocks (key to size in elements) can be resident together, once every other is released.

        If so, allocating those of them that are not resident succeeds, in any order.
        """
        return sum(map(self.footprint, elements.values())) <= self.capacity

    def allocate(self, key: str, elements: int) -> int:
        """Reserves a block with one reference and returns its offset in elements; the content is undefined.

        Moves live blocks together (a new ``generation``) if the free bytes suffice but no hole is large enough. Raises
        ``ArenaFull`` if they do not suffice, and ``ValueError`` if the key is resident.
        """
        if key in self._blocks:
            raise ValueError(f"{key} is already in the arena")
        needed = self.footprint(elements)
        if needed > self.free:
            raise ArenaFull(key, needed, self.free, self.capacity)
        size = needed // self.tensor.itemsize
        offset = self._take(size)
        if offset is None:
            self._compact()
            offset = self._take(size)
            assert offset is not None
        self._blocks[key] = _Block(offset, elements, size)
        self.used += needed
        return offset

    def write(self, key: str, host: torch.Tensor) -> None:
        """Fills the block from ``host``: ``(elements,)`` of the arena's dtype; asynchronous if it is pinned.

        The caller keeps a pinned ``host`` unchanged until the copy is done.
        """
        block = self._blocks[key]
        if host.dtype != self.tensor.dtype or host.shape != (block.elements,):
            raise ValueError(
                f"{key} holds ({block.elements},) of {self.tensor.dtype}, got {tuple(host.shape)} of {host.dtype}"
            )
        self._view(block.offset, block.elements).copy_(host, non_blocking=True)

    def retain(self, key: str) -> None:
        """Adds a reference, for a basis that another resident adapter uses."""
        self._blocks[key].references += 1

    def release(self, key: str) -> None:
        """Drops a reference; with the last one the block is free."""
        block = self._blocks[key]
        block.references -= 1
        if block.references == 0:
            del self._blocks[key]
            self.used -= block.size * self.tensor.itemsize
            self._give(block.offset, block.size)

    def _view(self, offset: int, elements: int) -> torch.Tensor:
        return self.tensor[offset : offset + elements]

    def _take(self, size: int) -> int | None:
        """Where a block of so many elements starts: in the first hole that is large enough, ``None`` if there is none.
        An empty one may lie anywhere."""
        if not size:
            return 0
        for place, hole in enumerate(self._holes):
            if hole.size >= size:
                offset = hole.offset
                hole.offset, hole.size = offset + size, hole.size - size
                if not hole.size:
                    del self._holes[place]
                return offset
        return None

    def _give(self, offset: int, size: int) -> None:
        """Makes a hole of a block, one with those that it touches."""
        if not size:
            return
        place = bisect_left(self._holes, offset, key=lambda hole: hole.offset)
        if place < len(self._holes) and offset + size == self._holes[place].offset:
            size += self._holes.pop(place).size
        if place and self._holes[place - 1].offset + self._holes[place - 1].size == offset:
            self._holes[place - 1].size += size
        else:
            self._holes.insert(place, _Hole(offset, size))

    def _compact(self) -> None:
        """Moves all blocks to the left, so that one hole is behind them."""
        end = 0
        for block in sorted(self._blocks.values(), key=lambda block: block.offset):
            self._move(block, end)
            end += block.size
        self._holes = [_Hole(end, self.tensor.numel() - end)]
        self.generation += 1

    def _move(self, block: _Block, offset: int) -> None:
        """Moves a block to the left. Chunks go from left to right, so a write only meets what was already read."""
        distance = block.offset - offset
        if distance == 0:
            return
        step = max(distance, self._staging.numel())
        for start in range(0, block.elements, step):
            elements = min(step, block.elements - start)
            source = self._view(block.offset + start, elements)
            target = self._view(offset + start, elements)
            if elements > distance:  # the two overlap, and an overlapping copy is undefined
                source = self._staging[:elements].copy_(source)
            target.copy_(source)
        block.offset = offset
