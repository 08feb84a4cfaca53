"""The adapter manager: SGLang's ``LoRAManager`` with Scute's loading, admission and batch preparation."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel, get_schedule, max_prefill_buffer_tokens

import scute_converter
from scute_converter import parallel
from scute_converter.normal_form import Adapter, NormalForm
from scute_converter.sharding import shard
from scute_sglang import fit, options
from scute_sglang.backend import ScuteLoRABackend, decode_variant, has_prefill_graph, row_counts
from scute_sglang.memory_pool import LoadedAdapter, ScuteMemoryPool
from scute_sglang.packing import pack_adapter, pack_basis
from scute_sglang.sites import Range, Site, wrap_model
from scute_sglang.weights import held_weight, sharded_ranges, weight_as_served

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Shared = TypeVar("Shared")


@dataclass(frozen=True)
class _Part:
    """The normal form of one site, sharded. ``key``: projection and slice, the same on every rank, as site numbers need
    not be. ``first_row``: see ``LoadedAdapter.basis_views``."""

    key: str
    site: Site
    form: NormalForm
    first_row: int


class ScuteLoRAManager(LoRAManager):
    """Loads adapters into normal forms, keeps their packed blocks on the host, and prepares every batch.

    Built by ``ModelRunner.init_lora_manager`` in place of SGLang's own manager when ``--lora-backend scute`` is given.
    """

    lora_backend: ScuteLoRABackend
    memory_pool: ScuteMemoryPool
    loras: dict[str, LoadedAdapter]

    def init_state(self, max_lora_rank=None, target_modules=None, lora_paths=None) -> None:
        """Wrap every layer that can serve adapters, create the arena, then load the adapters given at start.

        Nothing is inferred from the first adapters: any rank up to ``max_lora_rank`` and any target can come later.
        """
        self.configs = {}
        self.loras = {}
        self.lora_refs = {}
        self.num_pinned_loras = 0
        self.max_lora_rank = max_lora_rank or options.DEFAULT_MAX_RANK
        self.init_lora_modules()
        self.init_memory_pool()
        self.lora_backend.attach(self.site_map, self.memory_pool, self.max_lora_rank)
        self.lora_backend.compile(max_prefill_buffer_tokens() or get_schedule().max_prefill_tokens, [None])
        for lora_ref in lora_paths or []:
            result = self._load_lora_adapter(lora_ref)
            if not result.success:
                raise RuntimeError(f"--lora-paths: {result.error_message}")

    def init_lora_modules(self) -> None:
        self.site_map = wrap_model(self.base_model, self.lora_backend)
        # What SGLang's own manager keeps; its other methods iterate over it.
        self.lora_modules = []
        self.embed_tokens_module = self.lm_head_module = None

    def init_memory_pool(self) -> None:
        origins = torch.tensor([(site.cols[0], site.rows[0]) for site in self.site_map.sites], dtype=torch.int64)
        self.memory_pool = ScuteMemoryPool(
            origins=origins,
            max_loras_per_batch=self.max_loras_per_batch,
            dtype=self.dtype,
            device=self.device,
            capacity_bytes=options.adapter_memory(),
            eviction_policy=self.eviction_policy,
        )

    def _load_lora_adapter(self, lora_ref: LoRARef) -> LoRAUpdateOutput:
        return self._load(
            lora_ref,
            lambda: scute_converter.load(
                str(lora_ref.lora_path), lora_ref.lora_name, self.site_map.base_shapes(), self._base_dtype()
            ),
        )

    def _load_lora_adapter_from_tensors(
        self, lora_ref: LoRARef, tensors, config_dict, added_tokens_config=None
    ) -> LoRAUpdateOutput:
        return self._load(
            lora_ref,
            lambda: scute_converter.load_tensors(
                tensors, config_dict, str(lora_ref.lora_name), self.site_map.base_shapes(), self._base_dtype()
            ),
        )

    def _base_dtype(self) -> torch.dtype:
        """Of the base weights as PEFT would see them: buffers it makes for an adapter are rounded to it; fp32 if they
        are quantised, to FP8 too."""
        weights = (getattr(layer.base_layer, "weight", None) for layer in self.site_map.layers)
        dtype = next((weight.dtype for weight in weights if weight is not None), self.dtype)
        return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float32

    def _load(self, lora_ref: LoRARef, read: Callable[[], Adapter]) -> LoRAUpdateOutput:
        """Read, resolve and pack an adapter. All ranks load it or none does, and a refusal leaves nothing behind."""
        try:
            loaded = self._build(lora_ref, read)
        except Exception as error:
            if not isinstance(error, ValueError):  # AdapterError is one; anything else is worth a traceback
                logger.exception("adapter %s was not loaded", lora_ref.lora_name)
            message = reason(error)
            if str(lora_ref.lora_name) not in message:
                message = f"adapter {lora_ref.lora_name!r}: {message}"
            logger.warning("refused: %s", message)  # SGLang's own log says that loading completes
            return self.create_lora_update_result(success=False, error_message=message)
        self.loras[lora_ref.lora_id] = loaded
        self.lora_refs[lora_ref.lora_id] = lora_ref
        self.num_pinned_loras += int(bool(lora_ref.pinned))
        return self.create_lora_update_result(success=True)

    def _build(self, lora_ref: LoRARef, read: Callable[[], Adapter]) -> LoadedAdapter:
        name = lora_ref.lora_name
        assert name is not None

        def start() -> Adapter:
            self._check_name_and_pin(lora_ref)
            adapter = read()
            fit.check(name, adapter, self.site_map.projections, self.max_lora_rank)
            self._check_payloads(name, adapter)
            self._check_base_samples(name, adapter)
            return adapter

        adapter, digests = self._on_all_ranks(start, share=lambda adapter: adapter.digest)
        if len(set(digests)) > 1:
            raise ValueError(f"adapter {name}: tensor-parallel ranks have read different files: copy it to all hosts")
        loaded = self._same_content(lora_ref, adapter) or self._pack_anew(lora_ref, adapter)
        self._check_room(loaded)
        for note in adapter.notes:
            logger.warning("adapter %s: %s", name, note)
        logger.info("adapter %s: %s, %d bytes on this rank", name, adapter.method, loaded.packed.block.nbytes)
        return loaded

    def _same_content(self, lora_ref: LoRARef, adapter: Adapter) -> LoadedAdapter | None:
        """The blocks of a loaded adapter that serves the same, under the new name; all ranks have the same adapters."""
        for other in self.loras.values():
            if other.content == adapter.digest:
                name, pinned = str(lora_ref.lora_name), bool(lora_ref.pinned)
                return dataclasses.replace(other, uid=lora_ref.lora_id, name=name, method=adapter.method, pinned=pinned)
        return None

    def _pack_anew(self, lora_ref: LoRARef, adapter: Adapter) -> LoadedAdapter:
        """What needs the base weight is worked out, and everything packed; all ranks do it together."""
        name = str(lora_ref.lora_name)
        whole = {path: self._folded(path, form) for path, form in adapter.forms.items()}

        def measure() -> tuple[list[_Part], dict[str, torch.Tensor]]:
            parts = self._place_on_sites(name, whole)
            measured = {
                part.key: part.form.deferred.measure(weight_as_served(part.site), part.form).cpu()
                for part in parts
                if part.form.deferred is not None
            }
            return parts, measured

        (parts, measured), all_measured = self._on_all_ranks(measure, share=lambda result: result[1])

        def resolved(part: _Part) -> NormalForm:
            assert part.form.deferred is not None
            total = measured[part.key]
            if part.site.input_sharded:  # each rank has measured its share, or has none
                total = torch.stack([rank[part.key] for rank in all_measured if part.key in rank]).sum(dim=0)
            return part.form.deferred.resolve(part.form, total)

        def finish() -> LoadedAdapter:
            forms, shifts = {}, {}
            waiting = [part for part in parts if part.form.deferred is not None]
            done = {part.key: form for part, form in zip(waiting, parallel.each(resolved, waiting), strict=True)}
            for part in parts:
                form = done.get(part.key, part.form)
                shift = output_shift(part.site, form)
                if shift is not None:
                    shifts[part.site.index] = shift
                forms[part.site.index] = form
            return self._pack(lora_ref, adapter, parts, forms, shifts)

        packed, sizes = self._on_all_ranks(finish, share=lambda result: result.packed.block.numel())
        # Every rank accounts for the largest shard, so that all of them admit and evict alike.
        return self._on_all_ranks(lambda: with_block_size(packed, max(sizes)), share=lambda _: None)[0]

    def _check_room(self, adapter: LoadedAdapter) -> None:
        """Raises ``ValueError`` unless this adapter, and every other beside it if it is pinned, can ever run."""
        loaded = {**self.loras, adapter.uid: adapter}
        for other in loaded.values() if adapter.pinned else [adapter]:
            if not self.memory_pool.admits([other.uid], loaded):
                needed = sum(map(self.memory_pool.arena.footprint, other.blocks.values()))
                raise ValueError(
                    f"adapter {adapter.name}: no room for {needed} bytes of {other.name} beside the pinned adapters in "
                    f"{self.memory_pool.arena.capacity} bytes of adapter memory and {self.max_loras_per_batch} slots: "
                    f"raise {options.MEMORY_FLAG} or --max-loras-per-batch, or pin fewer adapters"
                )

    def _on_all_ranks(
        self, work: Callable[[], Result], share: Callable[[Result], Shared]
    ) -> tuple[Result, list[Shared]]:
        """Run ``work`` here; returns its result and what every rank shares of its own.

        If it fails on any rank, every rank raises, so that all of them go on with the same adapters.
        """
        if get_parallel().tp_size == 1:
            result = work()
            return result, [share(result)]
        outcome: tuple[Result, Shared] | Exception
        try:
            result = work()
            outcome = (result, share(result))
        except Exception as error:
            outcome = error
        failed = isinstance(outcome, Exception)
        told = reason(outcome) if isinstance(outcome, Exception) else outcome[1]
        said = get_parallel().tp_group.all_gather_object((failed, told))
        if isinstance(outcome, Exception):
            raise outcome
        for rank, (other_failed, message) in enumerate(said):
            if other_failed:
                raise ValueError(f"{message} (on tensor-parallel rank {rank})")
        return outcome[0], [shared for _, shared in said]

    def _check_name_and_pin(self, lora_ref: LoRARef) -> None:
        for known in self.lora_refs.values():
            if known.lora_name == lora_ref.lora_name:
                raise ValueError(f"adapter {lora_ref.lora_name} is already loaded: unload it first")
        if lora_ref.pinned and self.num_pinned_loras >= self.max_loras_per_batch - 1:
            raise ValueError(
                f"adapter {lora_ref.lora_name} cannot be pinned: {self.num_pinned_loras} of "
                f"{self.max_loras_per_batch} slots are, and one must stay free for the others: load it unpinned or "
                "raise --max-loras-per-batch"
            )

    def _folded(self, path: str, form: NormalForm) -> NormalForm:
        """The form with what needs the whole base weight worked out; every rank does it, from the same weight."""
        if form.fold is None:
            return form
        fold, projection, group = form.fold, self.site_map.projections[path], get_parallel().tp_group
        held, ranges = self._on_all_ranks(lambda: held_weight(projection), share=lambda _: sharded_ranges(projection))
        if len(ranges) > 1:
            drop_replicas(held, ranges, group.rank_in_group)
            held = group.all_reduce(held)
        return self._on_all_ranks(lambda: fold.fold(form, held), share=lambda _: None)[0]

    def _place_on_sites(self, name: str, forms: Mapping[str, NormalForm]) -> list[_Part]:
        """The parts of the forms at this rank's sites. Raises ``ValueError`` for what cannot be sharded."""
        parts = []
        for path, form in forms.items():
            projection = self.site_map.projections[path]
            for slice_number, site in enumerate(projection.sites):
                if site.rows[0] == site.rows[1] or site.cols[0] == site.cols[1]:
                    continue  # this rank computes only padding of this projection
                # A slice of a projection that Hugging Face fuses reads its shared basis further down than the table's
                # origin of the site says.
                first_row = site.rows[0] - self.site_map.sites[site.index].rows[0]
                try:
                    sharded = shard(form, rows=site.rows, cols=site.cols)
                except ValueError as error:
                    raise ValueError(f"adapter {name}, {path}: {error}") from error
                parts.append(_Part(f"{path}/{slice_number}", site, sharded, first_row))
        return parts

    def _check_payloads(self, name: str, adapter: Adapter) -> None:
        """PEFT saves whole embeddings beside some adapters; served are the base's, so they must be the same."""
        for path, stored in adapter.payloads.items():
            site = self.site_map.projections[path].sites[0]
            weight = site.layer.base_layer.weight
            shard = getattr(site.layer.base_layer, "shard_indices", None)
            first, last = (
                (0, weight.shape[0]) if shard is None else (shard.org_vocab_start_index, shard.org_vocab_end_index)
            )
            held = weight[: last - first].detach()
            if not torch.equal(stored[first:last].to(held.device, held.dtype), held):
                raise fit.other_payload(name, path)

    def _check_base_samples(self, name: str, adapter: Adapter) -> None:
        """Slots that were made from a base weight by ``scute convert`` must have been made from this one. The rank that
        holds the start of the weight checks."""
        for path, form in adapter.forms.items():
            if form.base_sample is None:
                continue
            for site in self.site_map.projections[path].sites:
                inputs = min(len(form.base_sample), site.cols[1])
                if site.rows[0] == site.cols[0] == 0 and site.rows[1] and inputs:
                    held = weight_as_served(site, inputs)[0]
                    fit.check_base_sample(name, path, form.base_sample[:inputs], held, exact=site.layer.shows_weight)

    def _pack(
        self,
        lora_ref: LoRARef,
        adapter: Adapter,
        parts: list[_Part],
        forms: dict[int, NormalForm],
        shifts: dict[int, torch.Tensor],
    ) -> LoadedAdapter:
        name = lora_ref.lora_name
        assert name is not None
        views: dict[str, tuple[str, int]] = {}
        for part in parts:
            form = forms[part.site.index]
            if form.shared is not None:
                key = form.shared.basis
                view = f"{key}+{part.first_row}" if part.first_row else key
                views[view] = (key, part.first_row)
                forms[part.site.index] = dataclasses.replace(form, shared=dataclasses.replace(form.shared, basis=view))
        packed = pack_adapter(name, forms, shifts, self.site_map.names, self.dtype)
        # All of them even if this rank computes none of their projections: ranks must account alike.
        bases = {key: self._packed_basis(key, adapter) for key in adapter.bases}
        return LoadedAdapter(
            uid=lora_ref.lora_id,
            name=name,
            method=adapter.method,
            content=adapter.digest,
            packed=packed,
            bases=bases,
            basis_views=views,
            module_of_site=self.site_map.module_of_site,
            pinned=bool(lora_ref.pinned),
        )

    def _packed_basis(self, key: str, adapter: Adapter):
        """The packed basis, shared on the host too with every loaded adapter that reads it."""
        for other in self.loras.values():
            if key in other.bases:
                return other.bases[key]
        return pack_basis(key, adapter.bases[key], self.dtype)

    def validate_lora_batch(self, lora_ids: set[str | None]) -> bool:
        """Whether a batch of these requests can run. The base model (``None``) takes neither a slot nor bytes."""
        return self.memory_pool.admits([uid for uid in lora_ids if uid is not None], self.loras)

    def fetch_new_loras(self, new_loras: set[str | None], running_loras: set[str | None] | None = None) -> None:
        # Sorted: the order decides where blocks lie and what is evicted, and all ranks must agree on the latter.
        uids = sorted(uid for uid in new_loras | (running_loras or set()) if uid is not None)
        self.memory_pool.bring_in(uids, self.loras)

    def prepare_lora_batch(self, forward_batch: ForwardBatch) -> None:
        """Group the rows of the batch by adapter for the operators; in place where a CUDA graph reads the plan."""
        graph = self._use_cuda_graph_batch(forward_batch)
        self.lora_backend.prepare(
            forward_batch,
            slots=[-1 if uid is None else self.memory_pool.get_buffer_id(uid) for uid in forward_batch.lora_ids or []],
            decode_graph=graph,
            prefill_graph=not graph and self.can_use_prefill_cuda_graph(forward_batch),
        )

    def can_use_prefill_cuda_graph(self, forward_batch: ForwardBatch) -> bool:
        """As ``has_prefill_graph`` says."""
        if not super().can_use_prefill_cuda_graph(forward_batch):
            return False
        products = (forward_batch.extend_num_tokens or 0) * self.site_map.products_of_a_row / self.attn_tp_size
        return has_prefill_graph(self._adapters_of(forward_batch), products)

    def decode_variant(self, forward_batch: ForwardBatch) -> str:
        """The label of the decode graph for a batch."""
        owners = [None if uid is None else self.loras[uid] for uid in forward_batch.lora_ids or []]
        return decode_variant(owners, row_counts(forward_batch))

    def _adapters_of(self, forward_batch: ForwardBatch) -> list[LoadedAdapter]:
        return [self.loras[uid] for uid in set(forward_batch.lora_ids or []) - {None}]


def drop_replicas(held: torch.Tensor, ranges: list[list[tuple[Range, Range]]], rank: int) -> None:
    """Zero in this rank's ``held_weight`` what an earlier rank holds too. ``ranges``: ``sharded_ranges`` of all ranks.

    Key and value heads are replicated if there are fewer of them than ranks, also those of a projection whose query
    heads are not.
    """
    for i, (rows, cols) in enumerate(ranges[rank]):
        if any(earlier[i] == (rows, cols) for earlier in ranges[:rank]):
            held[slice(*rows), slice(*cols)] = 0


def reason(error: Exception) -> str:
    """What went wrong, in one line. A refusal is one that says what to do; of anything else the log has a traceback."""
    if isinstance(error, ValueError):
        return str(error)
    said = str(error).strip().partition("\n")[0]
    kind = "not enough memory" if is_out_of_memory(error) else "it could not be loaded"
    remedy = "free some, or serve fewer adapters" if is_out_of_memory(error) else "see the log of the server"
    return f"{kind} ({type(error).__name__}{': ' if said else ''}{said}); {remedy}"


def is_out_of_memory(error: Exception) -> bool:
    """On the host torch says it by a message."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def output_shift(site: Site, form: NormalForm) -> torch.Tensor | None:
    """What the site adds to its output so that the bias comes out as the method has it; ``(out,)`` fp32, or ``None``.

    The layer's output holds ``b0`` (unless SGLang hands it out separately) and is multiplied by ``s`` as a whole, so a
    bias that the method does not scale is put right here: ``target - b0 s``.
    """
    base_bias = site.bias
    rule = form.bias
    if not site.adds_bias:
        return None
    shift = None if rule.add is None else rule.add.double()
    if base_bias is not None:
        b0 = base_bias.detach().cpu().double()
        scale = torch.ones_like(b0) if form.scale_delta is None else 1 + form.scale_delta.double()
        target = (b0 if rule.replace is None else rule.replace.double()) * (scale if rule.scaled else 1)
        if rule.scale_delta is not None:
            target = target * (1 + rule.scale_delta.double())
        held = b0 * scale if site.bias_in_output else b0
        difference = target - held
        if difference.any():
            shift = difference if shift is None else shift + difference
    return None if shift is None else shift.float()


def with_block_size(adapter: LoadedAdapter, elements: int) -> LoadedAdapter:
    """The same adapter with its block padded to ``elements``."""
    block = adapter.packed.block
    if block.numel() == elements:
        return adapter
    padded = torch.zeros(elements, dtype=block.dtype, pin_memory=block.is_pinned())
    padded[: block.numel()] = block
    return dataclasses.replace(adapter, packed=dataclasses.replace(adapter.packed, block=padded))
