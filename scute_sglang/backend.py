"""The LoRA backend ``scute``: runs the operators beside the base layers, and owns the plan they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from sglang.srt.environ import envs
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.dense.plan import DenseLoraKind
from sglang.srt.lora.utils import build_lm_head_pass_segments, get_batch_token_counts, get_lm_head_pruned_lens
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_lora_variant, get_is_capture_mode

from scute_kernels.expand import expand
from scute_kernels.launch import shrink_split
from scute_kernels.lookup import lookup
from scute_kernels.plan import BatchPlan, build_plan, most_tiles, packed_size, view_plan
from scute_kernels.rotate import rotate
from scute_kernels.shrink import shrink
from scute_patches.decode_cuda_graph_runner import ROTATE_VARIANT

if TYPE_CHECKING:
    from scute_sglang.layers import ScuteLayer
    from scute_sglang.memory_pool import LoadedAdapter, ScuteMemoryPool
    from scute_sglang.sites import SiteMap


@dataclass
class Batch:
    """The current forward, as SGLang's wrapper layers and runners see it (``BaseLoRABackend.batch_info``).

    ``adapters``: those of its requests. ``has_active_lora``, ``is_prefill``, ``use_cuda_graph``: SGLang reads them.
    What an eager forward needs is worked out when its first layer asks; a replayed decode graph never does.
    """

    plan: BatchPlan
    adapters: list[LoadedAdapter]
    use_cuda_graph: bool
    is_prefill: bool

    @property
    def has_active_lora(self) -> bool:
        return bool(self.adapters)

    @cached_property
    def touched(self) -> frozenset[int]:
        """Layers (``module_index``) at which an adapter has any part."""
        return frozenset().union(*(adapter.touched for adapter in self.adapters))

    @cached_property
    def own(self) -> frozenset[int]:
        """Layers at which an adapter has an own pair."""
        return frozenset().union(*(adapter.own for adapter in self.adapters))

    @cached_property
    def shared(self) -> frozenset[int]:
        """Layers at which an adapter has a pair of a shared basis."""
        return frozenset().union(*(adapter.shared for adapter in self.adapters))

    @cached_property
    def rotated(self) -> frozenset[int]:
        """Layers whose inputs an adapter transforms."""
        return frozenset().union(*(adapter.rotated for adapter in self.adapters))

    @cached_property
    def max_rank(self) -> int:
        """The largest rank of a pair: the rank stride of an eager forward's scratch."""
        return max(adapter.max_rank for adapter in self.adapters)


@dataclass(frozen=True)
class HeadBatch:
    """The rows that reach the output head of an extend batch: SGLang prunes them before the head."""

    plan: BatchPlan
    expected_tokens: int
    use_cuda_graph: bool = False


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
        self._decode_plan: torch.Tensor | None = None
        self._decode_rows = 0
        self._prefill_plan: torch.Tensor | None = None

    def attach(self, site_map: SiteMap, pool: ScuteMemoryPool, max_rank: int) -> None:
        """Called once by the manager, before the first batch. ``max_rank``: of any low-rank pair."""
        self.site_map, self.pool, self.max_rank = site_map, pool, max_rank

    # --- the batch -------------------------------------------------------------------------------------------------

    def init_decode_cuda_graph_batch_info(self, max_bs_in_cuda_graph: int, num_tokens_per_req: int) -> None:
        self._decode_rows = max_bs_in_cuda_graph * num_tokens_per_req
        self._decode_plan = self._static_plan(self._decode_rows)

    def init_prefill_cuda_graph_batch_info(self, max_num_tokens: int, max_num_requests: int | None = None) -> None:
        self.prefill_cuda_graph_max_tokens = max_num_tokens
        self.prefill_cuda_graph_max_bs = max_num_tokens if max_num_requests is None else max_num_requests
        self._prefill_plan = self._static_plan(max_num_tokens)

    def _static_plan(self, rows: int) -> torch.Tensor:
        """A plan that graphs may hold: all base rows until a batch is written into it."""
        return build_plan([], [], [-1] * self.max_loras_per_batch, rows).to(self.device)

    def prepare(
        self, forward_batch: ForwardBatch, slots: Sequence[int], decode_graph: bool, prefill_graph: bool
    ) -> None:
        """Plan the forward. ``slots``: of each request, ``-1`` for the base model. One copy to the device, into the
        static plan of the graph family if one replays, else into a new one."""
        counts = row_counts(forward_batch)
        if decode_graph:
            assert self._decode_plan is not None
            plan = self._fill(slots, counts, self._decode_rows, self._decode_plan)
        elif prefill_graph:
            assert self._prefill_plan is not None and self.prefill_cuda_graph_max_tokens is not None
            plan = self._fill(slots, counts, self.prefill_cuda_graph_max_tokens, self._prefill_plan)
        else:
            plan = self._fill(slots, counts, sum(counts))
        mode = forward_batch.forward_mode
        self.batch_info = Batch(
            plan=plan,
            adapters=[self.pool.resident(slot) for slot in set(slots) if slot >= 0],
            use_cuda_graph=decode_graph or prefill_graph,
            is_prefill=mode.is_extend() and not mode.is_cuda_graph(),
        )
        self._prepare_head(forward_batch, slots)

    def _fill(
        self, slots: Sequence[int], counts: Sequence[int], rows: int, into: torch.Tensor | None = None
    ) -> BatchPlan:
        groups = self.pool.groups({slot for slot in slots if slot >= 0})
        # A fresh pinned tensor each time: the copy may still be under way when the next batch is planned.
        host = torch.empty(packed_size(rows, len(groups)), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        build_plan(slots, counts, groups, rows, out=host)
        if into is None:
            into = host.to(self.device, non_blocking=True)
        else:
            into.copy_(host, non_blocking=True)
        return view_plan(into, rows)

    def _prepare_head(self, forward_batch: ForwardBatch, slots: Sequence[int]) -> None:
        """Plans for the pruned rows of the output head, whole and per pass, if an adapter of the batch adapts it."""
        self.lm_head_batch_info = self.lm_head_pass_batch_infos = self._lm_head_pass_idx = None
        pruned = get_lm_head_pruned_lens(forward_batch)
        if pruned is None or not self.touches(self.site_map.head):
            return
        self.lm_head_batch_info = HeadBatch(self._fill(slots, pruned, sum(pruned)), sum(pruned))
        pass_rows = envs.SGLANG_LOGPROB_CHUNK_SIZE.get()
        if envs.SGLANG_ENABLE_LOGPROB_CHUNK.get() and sum(pruned) > pass_rows:
            segments = build_lm_head_pass_segments(list(slots), pruned, pass_rows)
            self.lm_head_pass_batch_infos = [
                HeadBatch(self._fill(owners, lengths, sum(lengths)), sum(lengths)) for owners, lengths in segments
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
        plan = batch.plan if pruned is None else pruned.plan
        # A graph serves every later batch of its variant, so it holds every operator of it; an eager forward runs only
        # what its adapters need here.
        capturing = get_is_capture_mode()
        rows, n_slices = x.shape[0], len(layer.slice_offsets) - 1
        live = plan_of(plan, rows, self.max_loras_per_batch)
        max_rank = self.max_rank if capturing else batch.max_rank
        memory = (self.pool.arena.tensor, self.pool.table, self.pool.bases, self.pool.origins)
        plan_and_memory = (live.row_slot, live.order, live.tiles, live.tile_rows, *memory)

        if embedding:
            output = base(x)
            v = x.new_empty((1, rows, 1, max_rank), dtype=torch.float32)
            lookup(x, *plan_and_memory, layer.first_site, layer.vocab_size, v)
            expand(output, v, v.new_empty(0), *plan_and_memory, layer.first_site, list(layer.slice_offsets))
            return output

        rotates = get_capture_lora_variant() == ROTATE_VARIANT if capturing else layer.module_index in batch.rotated
        output = self._rotated_base(layer, x, base, plan_and_memory) if rotates else base(x)
        adapted = output[:, : layer.slice_offsets[-1]]  # a head may have padding rows behind
        x = x[:, : layer.in_features]
        own = capturing or layer.module_index in batch.own
        shared = capturing or layer.module_index in batch.shared
        v = u = x.new_empty(0, dtype=torch.float32)
        if own or shared:
            split = shrink_split(rows, plan.tile_rows, x.shape[1], n_slices, max_rank) if x.is_cuda else 1
            scratch = (split, rows, n_slices, max_rank)
            v = x.new_empty(scratch if own else 0, dtype=torch.float32)
            u = x.new_empty(scratch if shared else 0, dtype=torch.float32)
            shrink(x, *plan_and_memory, layer.first_site, v, u)
        expand(adapted, v, u, *plan_and_memory, layer.first_site, list(layer.slice_offsets))
        return output

    def _rotated_base(
        self,
        layer: ScuteLayer,
        x: torch.Tensor,
        base: Callable[[torch.Tensor], torch.Tensor],
        plan_and_memory: tuple,
    ) -> torch.Tensor:
        """The base layer on the transformed inputs. Each slice has its own, so the inputs of all slices are rows of one
        base GEMM, which reads the weight once; the columns that a row is not for are computed in vain."""
        rows, n_slices = x.shape[0], len(layer.slice_offsets) - 1
        real = x[:, : layer.in_features]
        rotated = x.new_empty((n_slices, rows, real.shape[1]))
        rotate(real, *plan_and_memory, layer.first_site, rotated)
        if real.shape[1] != x.shape[1]:
            rotated = torch.nn.functional.pad(rotated, (0, x.shape[1] - real.shape[1]))
        output = base(rotated.view(n_slices * rows, -1))
        if n_slices == 1:
            return output
        wide = output.view(n_slices, rows, -1)
        bounds = enumerate(pairwise(layer.slice_offsets))
        return torch.cat([wide[i, :, start:stop] for i, (start, stop) in bounds], dim=1)


def row_counts(forward_batch: ForwardBatch) -> list[int]:
    """Rows of each request in the forward."""
    mode = forward_batch.forward_mode
    if mode.is_extend_without_speculative():
        return list(forward_batch.extend_seq_lens_cpu or [])
    rows, per_request = get_batch_token_counts(forward_batch)
    return [per_request] * (rows // per_request if per_request else 0)


def plan_of(plan: BatchPlan, rows: int, slots: int) -> BatchPlan:
    """The plan with no more tiles than ``rows`` rows can need: the rest of a static plan is dead for them."""
    return dataclasses.replace(plan, tiles=plan.tiles[: most_tiles(rows, plan.tile_rows, slots)])
