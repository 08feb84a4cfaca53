"""What serving adapters on a base model takes: bytes of memory, and bytes, launches and time of a decode step.

The model counts bytes. One decode step runs, for every wrapped module, the operators that SGLang's CUDA graph holds
there, and takes on top of the base model

    seconds = sum over modules and operators of max(floor, bytes / bandwidth)

``bytes``: the parts of the adapters of the batch that the operator reads at this module, each once, however many
requests share an adapter, or adapters a basis. Activations are not counted, since they stay in the L2 cache, but for
those that only exist because of an input transform. ``floor``: what the operator takes if it has next to nothing to
read. ``shrink``, ``shared_shrink`` and ``shared_expand`` have none: they run on other streams beside the base GEMM,
which is bound by memory too, so they cost their bytes and no more.

Left out: prefill; the host and its scheduling; ``route`` and ``shared_route``, once per step; forwards without CUDA
graphs; bringing adapters in; tensor parallel (everything is of one GPU that serves the whole model); the further
columns that the base GEMM computes for transformed inputs; and whatever a kernel takes beyond its bytes and its floor,
so that a time is rather the least that a step takes than its mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch

from scute_converter.methods.glora import WeightToBias
from scute_converter.normal_form import Adapter, NormalForm, Pair
from scute_converter.sharding import shard
from scute_kernels import table
from scute_kernels.plan import room_for_further
from scute_sglang.arena import Arena
from scute_sglang.base_folder import BaseProjection
from scute_sglang.convert import with_sizes
from scute_sglang.fit import SLICE_NAMES
from scute_sglang.packing import AdapterLayout, lay_out_adapter, pack_basis

# --- constants: measure them anew for another GPU or other kernels ---------------------------------------------------

# Seconds of a launch in a CUDA graph whose programs end at once. H200, empty kernels one after another: 0.5 us with one
# program, 0.8 us with enough of them for every multiprocessor. Data sheets say nothing of it; the Scute paper has
# 0.96 us for an RTX A6000.
LAUNCH = 0.8e-6

# Seconds of an operator between two others that wait for each other, if it reads little. H200: an adapted module adds
# at least 2.5 us per expand, whose loads of plan, table and parts depend on each other.
IN_LINE = 2.5e-6

# Bandwidth of a large copy, bytes read and written counted, over that of the data sheet: 4.3 / 4.8 TB/s on an H200. For
# GPUs that were not measured.
COPY_SHARE = 0.89


@dataclass(frozen=True)
class Gpu:
    """``sheet``: memory bandwidth by NVIDIA's data sheet, bytes per second. ``copied``: of a large copy, bytes read and
    written counted, where it was measured."""

    name: str
    sheet: float
    copied: float | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes per second that kernels are assumed to move."""
        return self.copied or COPY_SHARE * self.sheet


GPUS = {
    "h200": Gpu("H200", 4.8e12, copied=4.3e12),
    "h100": Gpu("H100 SXM", 3.35e12),
    "h100-pcie": Gpu("H100 PCIe", 2.0e12),
    "a100": Gpu("A100 80GB SXM", 2.039e12),
    "a100-40gb": Gpu("A100 40GB", 1.555e12),
    "a6000": Gpu("RTX A6000", 768e9, copied=680e9),  # copied: as the Scute paper measured it
    "l40s": Gpu("L40S", 864e9),
    "l4": Gpu("L4", 300e9),
    "rtx4090": Gpu("GeForce RTX 4090", 1.008e12),
}

SERVED = torch.bfloat16  # what counts is its size, which fp16 shares
SECTOR = 32  # bytes; the least that a GPU reads from memory

Range = tuple[int, int]


# --- the base model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A layer that the server wraps. ``widths``: output features of its slices, whose sites have consecutive numbers
    from ``first_site`` on. ``in_features``: of an embedding the vocabulary."""

    name: str
    in_features: int
    widths: tuple[int, ...]
    first_site: int
    embedding: bool = False

    @property
    def slices(self) -> int:
        """As SGLang computes it, also where Hugging Face itself fuses them."""
        return max(len(self.widths), len(SLICE_NAMES.get(kind(self.name), ())))


@dataclass(frozen=True)
class Model:
    """``projections``: what adapters may name. ``modules``: in the order of their numbers. ``sites``: names of the
    sites. ``places``: of each projection, its sites with the output features of the projection that they compute."""

    projections: Mapping[str, BaseProjection]
    modules: tuple[Module, ...]
    sites: tuple[str, ...]
    places: Mapping[str, tuple[tuple[int, Range], ...]]

    @classmethod
    def of(cls, projections: Mapping[str, BaseProjection]) -> Model:
        """``projections``: ``BaseFolder.projections``. What only SGLang fuses is one module; what Hugging Face itself
        fuses has one site here and several on the server, which is the same but for the padding between parts."""
        sliced = {name for projection in projections.values() for name in projection.slices}
        modules: list[Module] = []
        sites: list[str] = []
        places: dict[str, tuple[tuple[int, Range], ...]] = {}
        for path, projection in projections.items():
            if path in sliced:
                continue
            names = projection.slices or (path,)
            widths = tuple(projections[name].out_features for name in names)
            modules.append(Module(path, projection.in_features, widths, len(sites), projection.embedding))
            ends = pairwise(accumulate(widths, initial=0))
            places[path] = tuple((len(sites) + i, rows) for i, rows in enumerate(ends))
            places |= {name: ((len(sites) + i, (0, widths[i])),) for i, name in enumerate(names)}
            sites += names
        return cls(projections, tuple(modules), tuple(sites), places)


# --- adapters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Elements that an adapter has at one module, by the operator that reads them.

    ``lookup``: of one row of an embedding. ``shared``: its own ``d`` and ``e`` for shared bases. ``bases``: by key, the
    elements of ``a`` and of ``b`` that its slices read.
    """

    shrink: int = 0
    expand: int = 0
    shared: int = 0
    rotate: int = 0
    lookup: int = 0
    bases: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tenant:
    """One adapter on one model.

    ``digest``: adapters of equal content share their block. ``ranks``, ``shared_ranks``: of its pairs. ``resident``:
    bytes of its block in the arena. ``bases``: bytes of each shared basis there, by key. ``parts``: by number of the
    module. ``lora_ranks``: by path, of the LoRA with the same function. ``lora``: bytes of that LoRA. ``full_rank``:
    whether it is one of full rank somewhere. ``folds``: whether the rank of a pair is known only when it is made with
    the base weight, and counted at its most.
    """

    name: str
    method: str
    digest: str
    ranks: tuple[int, ...]
    shared_ranks: tuple[int, ...]
    resident: int
    bases: Mapping[str, int]
    parts: Mapping[int, Parts]
    lora_ranks: Mapping[str, int]
    lora: int
    full_rank: bool
    folds: bool

    @classmethod
    def of(cls, name: str, adapter: Adapter, model: Model) -> Tenant:
        """``adapter``: one that fits the model (``fit.check``)."""
        forms: dict[int, NormalForm] = {}
        shifts: dict[int, torch.Tensor] = {}
        first_rows: dict[int, int] = {}
        ranks: dict[str, int] = {}
        lora = 0
        for path, stored in adapter.forms.items():
            projection = model.projections[path]
            form = _as_served(with_sizes(stored, projection))
            shift = _has_shift(stored, projection.has_bias)
            for site, rows in model.places[path]:
                forms[site] = shard(form, rows=rows, cols=(0, form.in_features))
                first_rows[site] = rows[0]
                if shift:
                    shifts[site] = torch.empty(rows[1] - rows[0])
            ranks[path] = _lora_rank(form, adapter)
            lora += ranks[path] * (form.in_features + form.out_features) + form.out_features * shift
        layout = lay_out_adapter(name, forms, shifts, model.sites, SERVED)
        basis_ranks = [adapter.bases[key].a.shape[0] for key in layout.bases]
        own = layout.rows[:, table.RANK]
        return cls(
            name=name,
            method=adapter.method,
            digest=adapter.digest,
            ranks=tuple(sorted(set(own[own > 0].tolist()))),
            shared_ranks=tuple(sorted(set(basis_ranks))),
            resident=_in_arena(layout.elements),
            bases={key: _in_arena(pack_basis(key, b, SERVED).block.numel()) for key, b in adapter.bases.items()},
            parts=_parts(model, layout, basis_ranks, first_rows),
            lora_ranks=ranks,
            lora=lora * SERVED.itemsize,
            full_rank=any(_changes_at_full_rank(form) for form in forms.values()),
            folds=any(map(_pair_waits, adapter.forms.values())),
        )


def _in_arena(elements: int) -> int:
    """Bytes of a block of the arena, as the pool accounts for it."""
    return Arena(0, SERVED, "cpu").footprint(elements)


def _as_served(form: NormalForm) -> NormalForm:
    """The form with parts of the shapes that they have once nothing waits for the base weight; their numbers are
    undefined."""
    pair, scale = form.pair, form.scale_delta
    if form.fold is not None and _pair_waits(form):
        rank = form.fold.rank
        pair = Pair(torch.empty(rank, form.in_features), torch.empty(rank, form.out_features))
    if form.deferred is not None:
        scale = torch.empty(form.out_features)
    return replace(form, pair=pair, scale_delta=scale, fold=None, deferred=None, base_sample=None)


def _pair_waits(form: NormalForm) -> bool:
    return form.fold is not None and not isinstance(form.fold, WeightToBias)


def _has_shift(form: NormalForm, base_bias: bool) -> bool:
    """Whether an output shift is served: one that the adapter adds, or what its bias rule makes of the base bias."""
    rule = form.bias
    scales = form.scale_delta is not None or form.deferred is not None
    changes = rule.replace is not None or rule.scale_delta is not None or (scales and not rule.scaled)
    return rule.add is not None or isinstance(form.fold, WeightToBias) or (base_bias and changes)


def _changes_at_full_rank(form: NormalForm) -> bool:
    """``W diag(s - 1)`` and ``(R - I) W`` have the rank of ``W``, however close ``s`` and ``R`` are to the identity."""
    return form.scale_delta is not None or form.rotation is not None


def _lora_rank(form: NormalForm, adapter: Adapter) -> int:
    """The least rank at which any adapter of these parts can be converted to LoRA without loss."""
    if _changes_at_full_rank(form):
        return min(form.in_features, form.out_features)
    own = form.pair.rank if form.pair else 0
    shared = adapter.bases[form.shared.basis].a.shape[0] if form.shared else 0
    return min(own + shared, form.in_features, form.out_features)


def _parts(
    model: Model, layout: AdapterLayout, basis_ranks: Sequence[int], first_rows: Mapping[int, int]
) -> dict[int, Parts]:
    """By the rows of the table, as the kernels read them. ``basis_ranks``: of ``layout.bases``. ``first_rows``: of each
    site, its first output feature within the basis."""
    parts = {}
    for number, module in enumerate(model.modules):
        # By offset: a tensor that slices share is read once.
        shrink: dict[int, int] = {}
        expand: dict[int, int] = {}
        shared: dict[int, int] = {}
        rotate: dict[int, int] = {}
        bases: dict[str, tuple[int, int]] = {}
        for site, width in enumerate(module.widths, module.first_site):
            row = layout.rows[site].tolist()
            shrink[row[table.A]] = row[table.RANK] * module.in_features
            expand[row[table.B]] = row[table.RANK] * width
            expand |= dict.fromkeys((row[table.SCALE], row[table.BIAS]), width)
            if row[table.BLOCK]:
                blocks = module.in_features // row[table.BLOCK] if row[table.BLOCK_STRIDE] else 1
                rotate[row[table.ROTATION]] = blocks * row[table.BLOCK] ** 2
            if row[table.BASIS] >= 0:
                key, rank = layout.bases[row[table.BASIS]], basis_ranks[row[table.BASIS]]
                shared |= {row[table.D]: rank, row[table.E]: width}
                # Slices read prefixes of the same b, and x a^T is computed once for all of them.
                _, b = bases.get(key, (0, 0))
                bases[key] = (rank * module.in_features, max(b, rank * (first_rows[site] + width)))
        for operator in (shrink, expand, shared, rotate):
            operator.pop(-1, None)  # absent parts
        if shrink or expand or rotate or bases:
            a = sum(shrink.values())
            parts[number] = Parts(
                shrink=0 if module.embedding else a,
                expand=sum(expand.values()),
                shared=sum(shared.values()),
                rotate=sum(rotate.values()),
                lookup=a // module.in_features if module.embedding else 0,
                bases=bases,
            )
    return parts


# --- a decode step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What a decode step takes beyond the base model. ``moved``: bytes, read but for what an input transform writes.
    ``launches``: of kernels in its CUDA graph. ``seconds``: predicted."""

    moved: int
    launches: int
    seconds: float


def decode_step(model: Model, requests: Sequence[Tenant], gpu: Gpu) -> Step:
    """One token for each request. ``requests``: the adapter of each."""
    adapters = {tenant.digest: tenant for tenant in requests}.values()
    rotated = {tenant.digest: {n for n, parts in tenant.parts.items() if parts.rotate} for tenant in adapters}
    fused = {digest for digest, numbers in rotated.items() if any(model.modules[n].slices > 1 for n in numbers)}
    n_further = sum(tenant.digest in fused for tenant in requests)
    shares = any(parts.bases for tenant in adapters for parts in tenant.parts.values())
    kernels = [
        kernel
        for number, module in enumerate(model.modules)
        for kernel in _kernels(
            module,
            adapters=[tenant.parts[number] for tenant in adapters if number in tenant.parts],
            rows=[tenant.parts[number] for tenant in requests if number in tenant.parts],
            batch=len(requests),
            room=room_for_further(len(requests), n_further),
            shares=shares,
            rotates=bool(fused) or (module.slices == 1 and any(rotated.values())),
        )
    ]
    return Step(
        moved=sum(moved for moved, _ in kernels),
        launches=len(kernels),
        seconds=sum(max(floor, moved / gpu.bandwidth) for moved, floor in kernels),
    )


def _kernels(
    module: Module,
    adapters: Sequence[Parts],
    rows: Sequence[Parts],
    batch: int,
    room: int,
    shares: bool,
    rotates: bool,
) -> list[tuple[int, float]]:
    """Bytes and floor of each kernel at a module.

    A graph holds the operators of every module, whether an adapter of the batch has parts there or not: those without
    work cost a launch. ``adapters``: the different ones that have parts here. ``rows``: those of each request.
    ``batch``: all requests. ``room``: further rows for each slice but the first. ``shares``, ``rotates``: whether
    the graph has shared bases, and input transforms here.
    """
    size = SERVED.itemsize
    bases: dict[str, tuple[int, int]] = {}
    for parts in adapters:
        for key, (a, b) in parts.bases.items():
            bases[key] = (a, max(b, bases.get(key, (0, 0))[1]))
    expand = sum(parts.expand for parts in adapters)
    rotation = sum(parts.rotate for parts in adapters)
    works = expand or bases or (rotation and module.slices > 1)  # adds, or takes columns from other rows
    expand_kernel = (expand * size, IN_LINE if works else LAUNCH)
    if module.embedding:
        read = sum(parts.lookup for parts in rows) * SECTOR  # a column of a: each of its numbers lies by itself
        return [(read, IN_LINE if read else LAUNCH), expand_kernel]
    kernels = [(sum(parts.shrink for parts in adapters) * size, 0.0), expand_kernel]
    if shares:
        shared = sum(parts.shared for parts in adapters) + sum(b for _, b in bases.values())
        kernels += [(sum(a for a, _ in bases.values()) * size, 0.0), (shared * size, 0.0)]
    if rotates:
        # All inputs read, and those of every slice written.
        copies = module.in_features * (2 * batch + (module.slices - 1) * room)
        kernels.append(((rotation + copies) * size, IN_LINE if rotation else LAUNCH))
    return kernels


# --- memory of many tenants ------------------------------------------------------------------------------------------


def arena_bytes(tenants: Iterable[Tenant]) -> int:
    """Bytes of the arena for one adapter like each of these, with numbers of its own, but the same shared bases."""
    tenants = list(tenants)
    bases = {key: size for tenant in tenants for key, size in tenant.bases.items()}
    return sum(tenant.resident for tenant in tenants) + sum(bases.values())


def slot_bytes(model: Model) -> int:
    """Bytes of device memory beside the arena for one slot: its rows of the adapter table."""
    return len(model.sites) * table.FIELDS * torch.int64.itemsize


def stock_slot_bytes(model: Model, tenants: Iterable[Tenant]) -> int:
    """Bytes of one slot of SGLang's own LoRA pool that holds each of these, converted to LoRA.

    ``LoRAMemoryPool.get_lora_A_shape`` and ``get_lora_B_shape``: ``(slices * R, in)`` and ``(out, R)`` with the largest
    rank ``R`` of all adapters, in every layer, for each kind of module that one of them adapts.
    """
    tenants = list(tenants)
    rank = max(rank for tenant in tenants for rank in tenant.lora_ranks.values())
    adapted = {kind(model.modules[number].name) for tenant in tenants for number in tenant.parts}
    features = sum(
        module.slices * module.in_features + sum(module.widths)
        for module in model.modules
        if kind(module.name) in adapted
    )
    return rank * features * SERVED.itemsize


def kind(path: str) -> str:
    """``q_proj`` of the path of a projection."""
    return path.rpartition(".")[2]
