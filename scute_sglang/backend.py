"""The LoRA backend ``scute``: runs the operators beside the base layers, and owns the plan they read."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.environ import envs
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.dense.plan import DenseLoraKind
from sglang.srt.lora.utils import build_lm_head_pass_segments, get_batch_token_counts, get_lm_head_pruned_lens
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner_utils.capture_mode import (
    capture_lora_variant,
    get_capture_lora_variant,
    get_is_capture_mode,
    model_capture_mode,
)

from scute_kernels.expand import expand
from scute_kernels.launch import scratch_ranks, shared_scratch_dtype, shrink_split, widest_block
from scute_kernels.lookup import lookup
from scute_kernels.plan import (
    DECODE_WIDTH,
    PREFILL_WIDTH,
    BatchPlan,
    build_plan,
    few_further,
    first_tiles,
    most_tiles,
    own_tile_rows,
    packed_size,
    shared_fields,
    tile_width,
    view_plan,
    without_dead_tiles,
)
from scute_kernels.rotate import rotate
from scute_kernels.route import route
from scute_kernels.shared_expand import shared_expand
from scute_kernels.shared_route import shared_route
from scute_kernels.shared_shrink import shared_shrink
from scute_kernels.shrink import shrink
from scute_kernels.side_by_side import compile_kernels
from scute_kernels.stream import fork, give_way, on_stream
from scute_kernels.table import FIELDS
from scute_patches.decode_cuda_graph_runner import DECODE_VARIANTS, DecodeVariant

if TYPE_CHECKING:
    from scute_sglang.layers import ScuteLayer
    from scute_sglang.memory_pool import LoadedAdapter, ScuteMemoryPool
    from scute_sglang.sites import SiteMap


logger = logging.getLogger(__name__)

# Of prefill graphs, see ``has_prefill_graph``.
PREFILL_VARIANT = DecodeVariant(shared=True)

# From so many multiplications in a wrapped layer, a prefill with adapters is launched eagerly: a GPU that does 5e14 a
# second takes 0.4 ms for them, and the host no longer for the launches of that layer, if the adapters are LoRA.
LONG_PREFILL = 2e11

# More runs of rows than that are gathered for one base GEMM.
MOST_RUNS = 8

# Of own pairs and of shared bases.
OWN_BLOCK, SHARED_BLOCK = widest_block("shrink", "expand"), widest_block("shared_shrink", "shared_expand")


@dataclass(frozen=True)
class Plans:
    """The two plans of a forward, see ``scute_kernels.plan``. ``filled``: the own plan as ``expand`` has it, in an
    eager prefill without dead tiles."""

    own: BatchPlan
    grouped: BatchPlan
    filled: BatchPlan
    _of: dict[int, Plans] = field(default_factory=dict)

    def of(self, rows: int, slots: int) -> Plans:
        """As the kernels of a forward or graph of ``rows`` rows see them: with no more tiles than they can need, as the
        rest of a static plan is dead for them, and with tiles of one row if they are few."""
        if rows not in self._of:  # every layer asks
            self._of[rows] = self._restricted(rows, slots)
        return self._of[rows]

    def _restricted(self, rows: int, slots: int) -> Plans:
        def part(plan: BatchPlan, tile_rows: int) -> BatchPlan:
            needed = first_tiles(plan, most_tiles(rows, plan.tiles.shape[2], slots))
            return dataclasses.replace(needed, tile_rows=tile_rows)

        tile_rows = own_tile_rows(rows, self.own.tiles.shape[2])
        return Plans(
            part(self.own, tile_rows), part(self.grouped, self.grouped.tile_rows), part(self.filled, tile_rows)
        )


# Rows of a batch: a run of them, or their numbers, ``(M,)`` int64.
Rows = slice | torch.Tensor


@dataclass(frozen=True)
class Transformed:
    """The rows whose inputs some adapters transform. ``rows``: these; ``others``: all others.
    ``plan``: the grouped plan of these rows alone."""

    rows: Rows
    others: Sequence[Rows]
    plan: BatchPlan


@dataclass
class Batch:
    """The current forward, as SGLang's wrapper layers and runners see it (``BaseLoRABackend.batch_info``).

    ``slots``, ``counts``: of each request, and its rows. ``adapters``: by slot, of those that have rows.
    ``has_active_lora``, ``is_prefill``, ``use_cuda_graph``: SGLang reads them.
    ``beside``: whether what does not depend on the base layer is computed beside it: in decode, where the base layer
    waits for memory; in prefill it leaves no multiprocessor idle.
    ``scratch_rank``: in a rehearsal, of the scratch of own pairs; ``None``: that of a graph.
    ``transformed``: of an eager prefill, by the slots of adapters that transform inputs at a layer.
    What an eager forward needs is worked out when its first layer asks; a replayed decode graph never does.
    """

    plans: Plans
    slots: Sequence[int]
    counts: Sequence[int]
    adapters: dict[int, LoadedAdapter]
    use_cuda_graph: bool
    is_prefill: bool
    beside: bool
    scratch_rank: int | None = None
    transformed: dict[frozenset[int], Transformed] = field(default_factory=dict)

    @cached_property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def has_active_lora(self) -> bool:
        return bool(self.adapters)

    @cached_property
    def touched(self) -> frozenset[int]:
        """Layers (``module_index``) at which an adapter has any part."""
        return frozenset().union(*(adapter.touched for adapter in self.adapters.values()))

    @cached_property
    def own(self) -> frozenset[int]:
        """Layers at which an adapter has an own part."""
        return frozenset().union(*(adapter.own for adapter in self.adapters.values()))

    @cached_property
    def own_pairs(self) -> frozenset[int]:
        """Layers at which an adapter has an own pair."""
        return frozenset().union(*(adapter.own_pairs for adapter in self.adapters.values()))

    @cached_property
    def shared(self) -> frozenset[int]:
        """Layers at which an adapter has a shared basis."""
        return frozenset().union(*(adapter.shared for adapter in self.adapters.values()))

    @cached_property
    def rotated(self) -> frozenset[int]:
        """Layers whose inputs an adapter transforms."""
        return frozenset().union(*(adapter.rotated for adapter in self.adapters.values()))

    @cached_property
    def n_further(self) -> int:
        """Rows that have further rows in a fused layer."""
        return further_rows([self.adapters.get(slot) for slot in self.slots], self.counts)

    @cached_property
    def max_rank(self) -> int:
        """At least the rank of every own pair, and of a block of ranks: of an eager forward's scratch. So its kernels
        are those that ``rehearse`` has compiled."""
        return max([OWN_BLOCK, *(next_power_of_2(adapter.max_rank) for adapter in self.adapters.values())])

    @cached_property
    def max_shared_rank(self) -> int:
        """The same of shared bases."""
        return max([SHARED_BLOCK, *(next_power_of_2(adapter.max_shared_rank) for adapter in self.adapters.values())])


@dataclass(frozen=True)
class HeadBatch:
    """The rows that reach the output head of an extend batch: SGLang prunes them before the head."""

    plans: Plans
    expected_tokens: int
    use_cuda_graph: bool = False


@dataclass(frozen=True)
class PlanMemory:
    """Device memory of the two plans of up to ``rows`` rows: what ``build_plan`` packs of both, and their routes.
    ``width``: places of a tile."""

    rows: int
    width: int
    packed: torch.Tensor
    routes: torch.Tensor
    shared_routes: torch.Tensor


class ScuteLoRABackend(BaseLoRABackend):
    """Stands behind SGLang's ``forward_with_base``, through which every wrapper layer runs its adapters."""

    name = "scute"
    supports_prefill_cuda_graph = True
    # A decode batch of base requests replays a graph of its own, without any adapter launch.
    skip_inactive_dense_lora = True

    # SGLang's own backends put metadata of their own here too; its runners read only what Batch has.
    batch_info: Batch | None  # pyright: ignore[reportIncompatibleVariableOverride]
    site_map: SiteMap
    pool: ScuteMemoryPool
    max_rank: int

    def __init__(self, max_loras_per_batch: int, device: torch.device, **kwargs) -> None:
        super().__init__(max_loras_per_batch, device)
        self._decode_memory: PlanMemory | None = None
        self._prefill_memory: PlanMemory | None = None
        # One for own pairs, one for shared bases; None: no stream of its own.
        streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        self._own_stream, self._shared_stream = streams

    def attach(self, site_map: SiteMap, pool: ScuteMemoryPool, max_rank: int) -> None:
        """Called once by the manager, before the first batch. ``max_rank``: of any low-rank pair."""
        self.site_map, self.pool = site_map, pool
        self.max_rank = -(-max_rank // 16) * 16  # by which Triton compiles strides

    # --- the batch -------------------------------------------------------------------------------------------------

    def init_decode_cuda_graph_batch_info(self, max_bs_in_cuda_graph: int, num_tokens_per_req: int) -> None:
        self._decode_memory = self._static_memory(max_bs_in_cuda_graph * num_tokens_per_req, DECODE_WIDTH)
        self.compile(self._decode_memory.rows, DECODE_VARIANTS)

    def init_prefill_cuda_graph_batch_info(self, max_num_tokens: int, max_num_requests: int | None = None) -> None:
        self.prefill_cuda_graph_max_tokens = max_num_tokens
        self.prefill_cuda_graph_max_bs = max_num_tokens if max_num_requests is None else max_num_requests
        self._prefill_memory = self._static_memory(max_num_tokens, PREFILL_WIDTH)

    def _static_memory(self, rows: int, width: int) -> PlanMemory:
        """Plans that graphs may hold: all base rows until a batch is written into them."""
        memory = self._plan_memory(rows, width)
        self._fill([], [], memory)
        return memory

    def compile(self, rows: int, variants: Collection[str | None]) -> None:
        """Have all that ``rehearse`` launches compiled, and loaded by the device: while serving, a request would wait
        for a kernel, or there might be no memory left for it."""
        if self.device.type != "cuda":
            return
        began = time.monotonic()
        count = compile_kernels(lambda: self.rehearse(rows, variants))
        self.rehearse(rows, variants)
        logger.info("%d kernels are ready after %.1f s", count, time.monotonic() - began)

    def rehearse(self, rows: int, variants: Collection[str | None]) -> None:
        """Launch every kernel of the graphs, and of the eager forwards of a prefill, of up to so many rows, for base
        rows. ``variants``: of decode graphs; ``None`` for prefill.

        Powers of two and one less stand for all numbers of rows. What is compiled depends on the entry of the launch
        table, each of which ends with a power of two, on ``LONG_ROWS``, which is one, and in ``launch.expand_rows`` on
        the power of two below: so 5 to 7 rows are alike, but neither like 4 nor like 8.
        """
        kinds = {
            (type(layer), layer.slice_offsets, layer.inputs, layer.in_features): layer for layer in self.site_map.layers
        }
        try:
            for variant in variants:
                decode = variant is not None
                plans = self._fill([], [], self._plan_memory(rows, DECODE_WIDTH if decode else PREFILL_WIDTH))
                powers = [1 << power for power in range(rows.bit_length() + 1)]
                sizes = {rows, *(size for power in powers for size in (power - 1, power) if 0 < size <= rows)}
                # Eager prefills may have a narrower scratch.
                for rank in [self.max_rank] if decode else scratch_ranks(self.max_rank):
                    self.batch_info = Batch(
                        *(plans, [], [], {}),
                        use_cuda_graph=True,
                        is_prefill=not decode,
                        beside=decode,
                        scratch_rank=rank,
                    )
                    for some in sizes:
                        with model_capture_mode(), capture_lora_variant(variant):
                            for layer in kinds.values():
                                layer.rehearse(some)
            if None in variants:
                self._rotate_nothing()
        finally:
            self.batch_info = None

    def _rotate_nothing(self) -> None:
        """With tiles of prefill, which no graph holds: only eager prefills transform inputs."""
        tiles = torch.full((3, 1, PREFILL_WIDTH), -1, dtype=torch.int32, device=self.device)
        linear = (projection for projection in self.site_map.projections.values() if not projection.embedding)
        for features in {site.cols[1] - site.cols[0] for projection in linear for site in projection.sites} - {0}:
            x = torch.zeros(1, features, dtype=self.pool.dtype, device=self.device)
            plan = (tiles[0, 0, :1], tiles[:2, 0, :1], tiles, self.pool.arena.tensor, self.pool.table)
            rotate(x, *plan, 0, 1, torch.empty_like(x))

    def _plan_memory(self, rows: int, width: int) -> PlanMemory:
        slots, sites, _ = self.pool.table.shape
        tiles = most_tiles(rows, width, slots)
        return PlanMemory(
            rows=rows,
            width=width,
            packed=torch.empty(2, packed_size(rows, width, slots), dtype=torch.int32, device=self.device),
            routes=self.pool.table.new_empty(tiles, sites, FIELDS),
            shared_routes=self.pool.table.new_empty(tiles, sites, shared_fields(width)),
        )

    def prepare(
        self, forward_batch: ForwardBatch, slots: Sequence[int], decode_graph: bool, prefill_graph: bool
    ) -> None:
        """Plan the forward. ``slots``: of each request, ``-1`` for the base model. One copy to the device, into the
        static plan of the graph family if one replays, else into a new one; see ``_transformed`` for another."""
        counts, mode = row_counts(forward_batch), forward_batch.forward_mode
        if decode_graph:
            assert self._decode_memory is not None
            plans = self._fill(slots, counts, self._decode_memory)
        elif prefill_graph:
            assert self._prefill_memory is not None
            plans = self._fill(slots, counts, self._prefill_memory)
        else:
            plans = self._eager_plans(slots, counts, mode.is_decode())
        with_rows = {slot for slot, count in zip(slots, counts, strict=True) if count}
        self.batch_info = Batch(
            plans=plans,
            slots=slots,
            counts=counts,
            adapters={slot: self.pool.resident(slot) for slot in with_rows if slot >= 0},
            use_cuda_graph=decode_graph or prefill_graph,
            is_prefill=mode.is_extend() and not mode.is_cuda_graph(),
            beside=mode.is_decode(),
        )
        self._prepare_head(forward_batch, slots)

    def _eager_plans(self, slots: Sequence[int], counts: Sequence[int], decode: bool) -> Plans:
        rows = sum(counts)
        return self._fill(slots, counts, self._plan_memory(rows, tile_width(rows, decode)), exact=not decode)

    def _fill(self, slots: Sequence[int], counts: Sequence[int], memory: PlanMemory, exact: bool = False) -> Plans:
        """Plans of a batch in ``memory``. ``exact``: the expands have only the tiles of the batch, so that in a prefill
        their runs are as long as these need; a graph must have room for all there can be."""
        live = {slot: self.pool.resident(slot) for slot in slots if slot >= 0}
        grouped = [slot if slot >= 0 and (live[slot].shared or live[slot].rotated) else -1 for slot in slots]
        shared = {slot for slot, adapter in live.items() if adapter.shared}
        with_further = {slot for slot, adapter in live.items() if adapter.rotates_fused}
        # A fresh pinned tensor each time: the copy may still be under way when the next batch is planned.
        host = torch.empty(memory.packed.shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        rows, width, apart = memory.rows, memory.width, [-1] * self.max_loras_per_batch
        tile_rows = own_tile_rows(sum(counts), width)
        build_plan(slots, counts, apart, rows, width, tile_rows, with_further=with_further, out=host[0])
        build_plan(grouped, counts, self.pool.groups(live), rows, width, width, shared, with_further, out=host[1])
        memory.packed.copy_(host, non_blocking=True)
        own = view_plan(memory.packed[0], rows, width, memory.routes)
        plans = Plans(own, view_plan(memory.packed[1], rows, width, memory.shared_routes), filled=own)
        if exact:
            plans = Plans(
                own,
                without_dead_tiles(plans.grouped, host[1]),
                # The kernel for tiles of one row depends on their number, for which ``rehearse`` has that of the rows.
                filled=own if tile_rows == 1 else without_dead_tiles(own, host[0]),
            )
        route(plans.own.tiles, plans.own.routes, self.pool.table)
        tables = (self.pool.table, self.pool.bases, self.pool.origins)
        shared_route(plans.grouped.tiles, plans.grouped.leading, plans.grouped.routes, *tables)
        return plans

    def _prepare_head(self, forward_batch: ForwardBatch, slots: Sequence[int]) -> None:
        """Plans for the pruned rows of the output head, whole and per pass, if an adapter of the batch adapts it."""
        self.lm_head_batch_info = self.lm_head_pass_batch_infos = self._lm_head_pass_idx = None
        pruned = get_lm_head_pruned_lens(forward_batch)
        if pruned is None or not self.touches(self.site_map.head):
            return
        self.lm_head_batch_info = HeadBatch(self._eager_plans(slots, pruned, decode=False), sum(pruned))
        pass_rows = envs.SGLANG_LOGPROB_CHUNK_SIZE.get()
        if envs.SGLANG_ENABLE_LOGPROB_CHUNK.get() and sum(pruned) > pass_rows:
            segments = build_lm_head_pass_segments(list(slots), pruned, pass_rows)
            self.lm_head_pass_batch_infos = [
                HeadBatch(self._eager_plans(owners, lengths, decode=False), sum(lengths))
                for owners, lengths in segments
            ]

    def touches(self, module_index: int) -> bool:
        """Whether an adapter of the current batch has any part at the layer."""
        return self.batch_info is not None and module_index in self.batch_info.touched

    # --- the layers ------------------------------------------------------------------------------------------------

    def forward_with_base(
        self,
        layer: ScuteLayer,
        x: torch.Tensor,
        base_fn: Callable[[], torch.Tensor],
        lora_a,
        lora_b,
        output_offset,
        offsets,
        *,
        all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        kind: DenseLoraKind | str = DenseLoraKind.LINEAR,
        pruned_batch_info: HeadBatch | None = None,
    ) -> torch.Tensor:
        """The adapted output of a layer, ``(rows, out)`` of this rank, reduced over ranks if ``all_reduce`` is given.

        Every part is applied before the reduction: scales commute with it, low-rank parts are partial sums like the
        base's own, and shifts are stored on one rank only. So there is one all-reduce, as without adapters.
        """
        output = self.adapted(
            layer,
            x,
            lambda rows: base_fn() if rows is x else layer.base_linear(rows),
            pruned_batch_info,
            embedding=kind is DenseLoraKind.EMBEDDING,
        )
        return output if all_reduce is None else all_reduce(output)

    def adapted(
        self,
        layer: ScuteLayer,
        x: torch.Tensor,
        base: Callable[[torch.Tensor], torch.Tensor],
        pruned: HeadBatch | None,
        embedding: bool = False,
    ) -> torch.Tensor:
        """``base`` of the (transformed) inputs with every part of the batch's adapters applied, before any reduction.

        ``pruned``: the plan of the output head's rows, if ``x`` are those and not the batch's.
        """
        batch = self.batch_info
        assert batch is not None
        # A graph serves every later batch of its variant, so it holds every operator of it; an eager forward runs only
        # what its adapters need here.
        capturing, index = get_is_capture_mode(), layer.module_index
        rows, n_slices = x.shape[0], len(layer.slice_offsets) - 1
        if not capturing and pruned is None and rows < batch.rows:
            # Else kernels would write past the end: SGLang runs in a mode that splits rows among ranks.
            raise RuntimeError(f"a layer was given {rows} of the {batch.rows} rows of the batch")
        own_pairs = capturing or index in batch.own_pairs
        if capturing:
            variant = DECODE_VARIANTS.get(get_capture_lora_variant() or "", PREFILL_VARIANT)
            shared, rotates = variant.shared, variant.rotates_fused if n_slices > 1 else variant.rotates
            n_further = few_further(rows) if variant.few else rows
        else:
            shared, rotates, n_further = index in batch.shared, index in batch.rotated, batch.n_further
        plans = (batch if pruned is None else pruned).plans.of(rows, self.max_loras_per_batch)
        arena, table = self.pool.arena.tensor, self.pool.table
        own_plan = (plans.own.tiles, plans.own.routes, plans.own.tile_rows, arena)
        filled_plan = (plans.filled.tiles, plans.filled.routes, plans.filled.tile_rows, arena)
        grouped_plan = (plans.grouped.tiles, plans.grouped.routes, plans.grouped.leading, arena, table)
        site, slice_offsets = layer.first_site, list(layer.slice_offsets)
        none = x.new_empty(0, dtype=torch.float32)

        own_rank = (batch.scratch_rank or self.max_rank) if capturing else min(self.max_rank, batch.max_rank)
        shared_rank = self.max_rank if capturing else min(self.max_rank, batch.max_shared_rank)

        if embedding:
            output = base(x)
            v = x.new_empty((1, rows, 1, own_rank), dtype=torch.float32)
            lookup(x, plans.own.row_slot, arena, table, site, layer.vocab_size, v)
            expand(output, v, none, *filled_plan, site, slice_offsets)
            return output

        real = x[:, : layer.in_features]

        def split(operator: str, plan: BatchPlan) -> int:
            return shrink_split(operator, rows, plan.tile_rows, x.dtype, real.shape[1]) if x.is_cuda else 1

        # What shared bases add would be as large as the vocabulary at the output head, in every graph, and as the
        # outputs of a prefill in an eager decode of as many rows.
        apart = batch.beside and plans.grouped.tile_rows == DECODE_WIDTH and index != self.site_map.head
        own_stream = self._own_stream if batch.beside and own_pairs else None
        shared_stream = self._shared_stream if batch.beside and shared else None
        u = addend = none
        # Of own pairs only: read and written where there is one.
        v = x.new_empty((split("shrink", plans.own), rows, n_slices, own_rank), dtype=torch.float32)
        if shared:
            planes = split("shared_shrink", plans.grouped)
            dtype = shared_scratch_dtype(planes, plans.grouped.tile_rows, x.dtype) if x.is_cuda else torch.float32
            u = x.new_empty((planes, rows, n_slices, shared_rank), dtype=dtype)
            addend = x.new_empty((rows, slice_offsets[-1]), dtype=torch.float32) if apart else none
        sides = [stream for stream in (own_stream, shared_stream) if stream is not None]
        for side in sides:
            fork(side)
        if shared:  # first, because this chain ends last
            with on_stream(shared_stream):
                shared_shrink(real, *grouped_plan, site, u)
                if apart:
                    shared_expand(addend, u, *grouped_plan, site, slice_offsets, add=False)
        # Kernels of a graph that are ready at once begin in the order of their capture, and the base GEMM takes all
        # registers of a multiprocessor, so it waits for what began before it, and that for it. With nothing else
        # beside, a little later is best; else last. An eager forward is bound by its launches.
        ordered = capturing and own_stream is not None
        own_last = ordered and (shared or rotates)
        if own_pairs and not own_last:
            with on_stream(own_stream):
                if ordered:
                    give_way(v)
                shrink(real, *own_plan, site, v)
        if not rotates:
            h = base(x)
        elif capturing or batch.beside or pruned is not None:
            h = base(self._transform(layer, x, plans.grouped, n_slices, n_further))
        else:
            h = self._transformed_base(layer, x, base)
        if own_last:
            with on_stream(own_stream):
                shrink(real, *own_plan, site, v)
        for side in sides:
            torch.cuda.current_stream().wait_stream(side)
        adapted = h[:, : slice_offsets[-1]]  # a head may have padding columns behind
        if capturing or index in batch.own or addend.numel() or len(h) > rows:
            expand(adapted, v, addend, *filled_plan, site, slice_offsets)
        if shared and not apart:
            shared_expand(adapted[:rows], u, *grouped_plan, site, slice_offsets, add=True)
        return h[:rows]

    def _transform(
        self, layer: ScuteLayer, x: torch.Tensor, plan: BatchPlan, n_slices: int, n_further: int
    ) -> torch.Tensor:
        """The inputs of every slice, as ``rotate`` writes them, padded as ``x`` is. ``plan``: of the rows of ``x``, or
        of the first of them, if behind these SGLang has padded.

        In decode the base GEMM is bound by reading the weight, so one GEMM takes the inputs of all slices; of a further
        row, the columns of other slices are computed in vain.
        """
        real = x[:, : layer.in_features]
        inputs = x.new_empty((len(x) + (n_slices - 1) * n_further, real.shape[1]))
        row_slot, missing = plan.row_slot, len(x) - len(plan.row_slot)
        if missing > 0:  # else pad would copy, which every decode would wait for
            row_slot = torch.nn.functional.pad(row_slot, (0, missing), value=-1)
        memory = (self.pool.arena.tensor, self.pool.table)
        rotate(real, row_slot, plan.further, plan.tiles, *memory, layer.first_site, n_slices, inputs)
        padding = x.shape[1] - real.shape[1]
        return torch.nn.functional.pad(inputs, (0, padding)) if padding else inputs

    def _transformed_base(
        self, layer: ScuteLayer, x: torch.Tensor, base: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The base layer on the transformed inputs of an eager prefill, ``(rows, out)``.

        Here it is bound by arithmetic, so the rows that are not transformed meet the whole weight, the inputs of each
        slice the columns of it, and nothing is computed twice or in vain; ``base`` is not called then. If the weight
        cannot be cut, transformed rows have further rows as in decode, whose columns are put in place here.
        """
        batch = self.batch_info
        assert batch is not None
        rows, n_slices = x.shape[0], len(layer.slice_offsets) - 1
        transformed = self._transformed(batch, layer.module_index)
        chosen, n_chosen = transformed.rows, len(transformed.plan.row_slot)
        inputs = self._transform(layer, x[chosen], transformed.plan, n_slices, n_chosen).unflatten(0, (n_slices, -1))
        if not layer.shows_weight:
            of_all = torch.cat([x, inputs[1:].flatten(0, 1)])
            of_all[chosen] = inputs[0]
            output = base(of_all)
            h, further = output[:rows], output[rows:].unflatten(0, (n_slices - 1, n_chosen))
            for part, ends in zip(further, pairwise(layer.slice_offsets[1:]), strict=True):
                h[chosen, slice(*ends)] = part[:, slice(*ends)]
            return h
        h = x.new_empty((rows, layer.base_layer.weight.shape[0]))
        edges = (*layer.slice_offsets[:-1], h.shape[1])  # a head may have padding columns behind
        others = [*transformed.others, *([slice(batch.rows, rows)] if rows > batch.rows else [])]
        products: list[tuple[Rows, torch.Tensor, slice]] = [(where, x[where], slice(0, None)) for where in others]
        products += [(chosen, part, slice(*ends)) for part, ends in zip(inputs, pairwise(edges), strict=True)]
        for where, part, columns in products:
            if isinstance(where, slice):
                layer.base_columns(part, columns, h[where, columns])
            else:
                h[where, columns] = layer.base_columns(part, columns)
        return h

    def _transformed(self, batch: Batch, module_index: int) -> Transformed:
        """Of an eager prefill, at a layer; adapters have their rotations at all layers, as a rule."""
        slots = frozenset(slot for slot, adapter in batch.adapters.items() if module_index in adapter.rotated)
        if slots not in batch.transformed:
            owners = [(slot, count) for slot, count in zip(batch.slots, batch.counts, strict=True) if slot in slots]
            counts = [count for _, count in owners]
            rows, width = sum(counts), PREFILL_WIDTH
            groups = self.pool.groups(slots)
            packed = build_plan([slot for slot, _ in owners], counts, groups, rows, width, width, with_further=slots)
            plan = view_plan(self._to_device(packed), rows, width, packed)  # no operator asks for its routes
            chosen = np.repeat([slot in slots for slot in batch.slots], batch.counts)
            of_chosen, others = self._rows(chosen, most_runs=1), self._rows(~chosen, MOST_RUNS)
            batch.transformed[slots] = Transformed(of_chosen[0], others, plan)
        return batch.transformed[slots]

    def _rows(self, chosen: np.ndarray, most_runs: int) -> list[Rows]:
        """The rows where ``chosen``, ``(N,)`` bool, is true: their runs, or if these are too many, their numbers."""
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).tolist()
        if len(edges) <= 2 * most_runs:
            return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        return [self._to_device(torch.from_numpy(np.flatnonzero(chosen)))]

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        return (host.pin_memory() if self.device.type == "cuda" else host).to(self.device, non_blocking=True)


def further_rows(owners: Sequence[LoadedAdapter | None], counts: Sequence[int]) -> int:
    """How many rows of a batch have further rows in fused layers. ``owners``: the adapter of each request, ``counts``:
    its rows."""
    fused = (owner is not None and owner.rotates_fused for owner in owners)
    return sum(count for count, further in zip(counts, fused, strict=True) if further)


def decode_variant(owners: Sequence[LoadedAdapter | None], counts: Sequence[int]) -> str:
    """The label of the decode graph that holds what a batch needs, and no operator more. ``owners``: the adapter of
    each request, ``counts``: its rows."""
    adapters = {owner.uid: owner for owner in owners if owner is not None}.values()
    n_further = further_rows(owners, counts)
    needed = DecodeVariant(
        shared=any(adapter.shared for adapter in adapters),
        rotates=any(adapter.rotated for adapter in adapters),
        rotates_fused=n_further > 0,
        few=0 < n_further <= few_further(sum(counts)),
    )
    return next(label for label, variant in DECODE_VARIANTS.items() if variant == needed)


def has_prefill_graph(adapters: Collection[LoadedAdapter], products: float) -> bool:
    """Whether a prefill of base requests and of these adapters replays a graph. ``products``: multiplications of all
    its rows in a wrapped layer, the mean, on this rank.

    Prefill graphs hold no input transforms, which at prefill sizes would cost every batch a second base GEMM. Of the
    other operators they launch all at every layer, in Llama-3.1-8B 14 us for nothing at each, which a long prefill
    does without: it keeps the device busy for longer than the host takes to launch what it needs. Base requests alone
    have the graph that they have without Scute, for their bits are those of its rows.
    """
    return not adapters or (products < LONG_PREFILL and not any(adapter.rotated for adapter in adapters))


def row_counts(forward_batch: ForwardBatch) -> list[int]:
    """Rows of each request in the forward."""
    mode = forward_batch.forward_mode
    if mode.is_extend_without_speculative():
        return list(forward_batch.extend_seq_lens_cpu or [])
    rows, per_request = get_batch_token_counts(forward_batch)
    return [per_request] * (rows // per_request if per_request else 0)


def next_power_of_2(rank: int) -> int:
    """At least ``rank``."""
    return 1 << max(0, rank - 1).bit_length()
