"""Which adapters are resident on the device: slots, the arena's bytes, and the adapter table that kernels read."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from sglang.srt.lora.eviction_policy import get_eviction_policy
from sglang.srt.lora.mem_pool import EMPTY_SLOT, LoRAMemoryPool

from scute_kernels import table
from scute_sglang.arena import Arena
from scute_sglang.packing import PackedAdapter, PackedBasis

INITIAL_BASIS_ROWS = 64


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that this rank has loaded, resident or not.

    ``uid``: SGLang's ``lora_id``, another for every load. ``content``: the digest of what is served, the key of its
    block: adapters of equal content share one. ``bases``: the shared bases that it reads, by arena key.
    ``basis_views``: for each key in ``packed.bases``, the arena key of the basis and the first row of the projection
    that the view stands for. ``module_of_site``: the wrapped layer (``module_index``) of each site. ``pinned``: never
    evicted.
    """

    uid: str
    name: str
    method: str
    content: str
    packed: PackedAdapter
    bases: Mapping[str, PackedBasis]
    basis_views: Mapping[str, tuple[str, int]]
    module_of_site: Sequence[int]
    pinned: bool = False

    def _layers(self, sites: torch.Tensor) -> frozenset[int]:
        return frozenset(self.module_of_site[site] for site in sites.nonzero().flatten().tolist())

    @cached_property
    def own_pairs(self) -> frozenset[int]:
        """Layers at which it has an own pair."""
        return self._layers(self.packed.rows[:, table.RANK] > 0)

    @cached_property
    def shared(self) -> frozenset[int]:
        """Layers at which it has a pair of a shared basis."""
        return self._layers(self.packed.rows[:, table.BASIS] >= 0)

    @cached_property
    def rotated(self) -> frozenset[int]:
        """Layers whose inputs it transforms."""
        return self._layers(self.packed.rows[:, table.BLOCK] > 0)

    @cached_property
    def rotates_fused(self) -> bool:
        """Whether it transforms inputs of a layer of several projections, each of which has inputs of its own then."""
        return any(self.module_of_site.count(layer) > 1 for layer in self.rotated)

    @cached_property
    def own(self) -> frozenset[int]:
        """Layers at which it has an own part: a pair, a scale or a shift."""
        rows = self.packed.rows
        return self.own_pairs | self._layers((rows[:, table.SCALE] >= 0) | (rows[:, table.BIAS] >= 0))

    @cached_property
    def touched(self) -> frozenset[int]:
        """Layers at which it has any part."""
        return self.own | self.shared | self.rotated

    @cached_property
    def max_rank(self) -> int:
        """Of any own pair."""
        return max(int(self.packed.rows[:, table.RANK].max()), 0)

    @cached_property
    def max_shared_rank(self) -> int:
        """Of any shared basis."""
        return max((int(basis.row[table.BASIS_RANK]) for basis in self.bases.values()), default=0)

    @cached_property
    def group(self) -> Hashable | None:
        """Adapters with equal groups may share tiles of the grouped plan; ``None``: it shares with no other.

        They must have the same basis wherever they have one. A rotation that is more than a diagonal is read once for a
        tile, so an adapter with one must share none.
        """
        rows, bases = self.packed.rows, self.packed.bases
        rotates = rows[:, table.BLOCK] > 0
        if (rotates & ((rows[:, table.BLOCK] > 1) | (rows[:, table.BLOCK_STRIDE] != 1))).any():
            return None  # more than a diagonal
        if len(bases) <= 1:
            return bases
        sites = (rows[:, table.BASIS] >= 0).nonzero().flatten().tolist()
        return tuple((site, bases[int(rows[site, table.BASIS])]) for site in sites)

    @cached_property
    def blocks(self) -> dict[str, int]:
        """The arena blocks it needs: key to elements."""
        return {key: block.numel() for key, block in self.host_blocks.items()}

    @cached_property
    def host_blocks(self) -> dict[str, torch.Tensor]:
        """The same with their content in host memory."""
        return {self.content: self.packed.block, **{key: basis.block for key, basis in self.bases.items()}}


def needs(adapters: Collection[LoadedAdapter]) -> tuple[dict[str, int], set[str]]:
    """What the adapters need together: arena blocks, key to elements, and views of shared bases."""
    blocks: dict[str, int] = {}
    views: set[str] = set()
    for adapter in adapters:
        blocks.update(adapter.blocks)
        views.update(adapter.basis_views)
    return blocks, views


class ScuteMemoryPool(LoRAMemoryPool):
    """Takes the place of SGLang's pool: the same slots and eviction policies, but memory is one arena.

    A slot (``--max-loras-per-batch``) is a row of ``table`` and nearly free; what bounds residency is the bytes of the
    arena. The base model needs no slot. ``table``: ``(slots, sites, FIELDS)`` int64 on the device; ``bases``:
    ``(capacity, BASIS_FIELDS)``; ``origins``: ``(sites, 2)``; see ``scute_kernels.table``.
    """

    def __init__(
        self,
        origins: torch.Tensor,
        max_loras_per_batch: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity_bytes: int,
        eviction_policy: str,
    ) -> None:
        self.max_loras_per_batch = max_loras_per_batch
        self.dtype = dtype
        self.device = device
        self.eviction_policy = get_eviction_policy(eviction_policy)
        self.uid_to_buffer_id: dict[str | None, int] = {}
        self.buffer_id_to_uid: list = [EMPTY_SLOT] * max_loras_per_batch
        self.arena = Arena(capacity_bytes, dtype, device)
        self.origins = origins.to(device)
        sites = origins.shape[0]
        self.table = torch.full((max_loras_per_batch, sites, table.FIELDS), -1, dtype=torch.int64, device=device)
        # One adapter may read a basis through several views, so the rows are not bounded by the slots; the tensor is
        # sized once all the same, because captured graphs hold it.
        self.bases = torch.zeros(
            (max(INITIAL_BASIS_ROWS, 4 * max_loras_per_batch), table.BASIS_FIELDS), dtype=torch.int64, device=device
        )
        self._basis_rows: dict[str, int] = {}
        self._resident: dict[str, LoadedAdapter] = {}

    def admits(self, uids: Collection[str], adapters: Mapping[str, LoadedAdapter]) -> bool:
        """Whether a batch of these adapters can run: slots and bytes suffice beside all the pinned ones.

        ``adapters``: every loaded adapter. Whatever this admits, ``bring_in`` succeeds with.
        """
        needed = set(uids) | {uid for uid, adapter in adapters.items() if adapter.pinned}
        return len(needed) <= self.max_loras_per_batch and self._fits([adapters[uid] for uid in needed])

    def bring_in(self, uids: Collection[str], adapters: Mapping[str, LoadedAdapter]) -> None:
        """Make these adapters resident, evicting others by the policy. Copies run on the current stream."""
        for uid in uids:
            self.eviction_policy.mark_used(uid)
        new = [adapters[uid] for uid in uids if uid not in self._resident]
        if not new:
            return
        keep = set(uids)
        while not self._has_room(new):
            candidates: set[str | None] = {
                uid for uid, held in self._resident.items() if uid not in keep and not held.pinned
            }
            if not candidates:
                raise RuntimeError(f"no room for adapters {[a.name for a in new]}: the batch was not admitted")
            victim = self.eviction_policy.select_victim(candidates)
            assert victim is not None
            self.remove_lora(victim)
        generation = self.arena.generation
        for adapter in new:
            self._place(adapter)
        if self.arena.generation != generation:  # blocks have moved: every offset handed out is stale
            self._basis_rows.clear()
            for adapter in self._resident.values():
                self._write_rows(adapter)

    def remove_lora(self, lora_uid: str) -> int | None:
        """Free the adapter's slot and bytes; returns the slot, or ``None`` if it is not resident."""
        adapter = self._resident.pop(lora_uid, None)
        if adapter is None:
            return None
        slot = self.uid_to_buffer_id.pop(lora_uid)
        self.buffer_id_to_uid[slot] = EMPTY_SLOT
        self.eviction_policy.remove(lora_uid)
        for key in adapter.blocks:
            self.arena.release(key)
        for view in adapter.basis_views:
            if not any(view in other.basis_views for other in self._resident.values()):
                self._basis_rows.pop(view, None)
        return slot

    def resident(self, slot: int) -> LoadedAdapter:
        """The adapter in a slot."""
        return self._resident[self.buffer_id_to_uid[slot]]

    def groups(self, slots: Collection[int]) -> list[int]:
        """For the grouped plan: of each slot a number, equal for those whose adapters share tiles, else ``-1``."""
        numbers: dict[Hashable, int] = {}
        groups = [-1] * self.max_loras_per_batch
        for slot in slots:
            group = self.resident(slot).group
            if group is not None:
                groups[slot] = numbers.setdefault(group, len(numbers))
        return groups

    def _fits(self, adapters: Collection[LoadedAdapter]) -> bool:
        blocks, views = needs(adapters)
        return len(views) <= self.bases.shape[0] and self.arena.fits(blocks)

    def _has_room(self, new: list[LoadedAdapter]) -> bool:
        """Whether these fit beside the resident ones; of those only the sums count, since there may be thousands."""
        if len(self._resident) + len(new) > self.max_loras_per_batch:
            return False
        blocks, views = needs(new)
        missing = (elements for key, elements in blocks.items() if key not in self.arena)
        return (
            len(views | self._basis_rows.keys()) <= self.bases.shape[0]
            and sum(map(self.arena.footprint, missing)) <= self.arena.free
        )

    def _place(self, adapter: LoadedAdapter) -> None:
        for key, block in adapter.host_blocks.items():
            if key in self.arena:
                self.arena.retain(key)
            else:
                self.arena.allocate(key, block.numel())
                self.arena.write(key, block)
        slot = self.buffer_id_to_uid.index(EMPTY_SLOT)
        self.buffer_id_to_uid[slot] = adapter.uid
        self.uid_to_buffer_id[adapter.uid] = slot
        self._resident[adapter.uid] = adapter
        self._write_rows(adapter)

    def _write_rows(self, adapter: LoadedAdapter) -> None:
        """Its rows of the table, and those of the bases that no adapter before it has read."""
        for view, (key, first_row) in adapter.basis_views.items():
            if view in self._basis_rows:
                continue
            used = set(self._basis_rows.values())
            number = next(row for row in range(self.bases.shape[0]) if row not in used)  # who was admitted fits
            self._basis_rows[view] = number
            row = adapter.bases[key].placed(self.arena.offset(key))
            row[table.BASIS_B] += first_row
            self.bases[number].copy_(row, non_blocking=True)
        rows = adapter.packed.placed(self.arena.offset(adapter.content), self._basis_rows)
        self.table[self.uid_to_buffer_id[adapter.uid]].copy_(rows, non_blocking=True)
