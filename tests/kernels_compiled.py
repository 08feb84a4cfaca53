"""Which kernels Triton compiles for an H100 or H200, and when; none is launched.

``test_kernels_triton.py`` runs this file in a process of its own, because what Triton takes for the active GPU is one
for a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JitFunctionInfo

pytest.importorskip("sglang")
from scute_patches import sgl_kernel

sgl_kernel.install()

from sglang.srt.layers.linear import ReplicatedLinear  # noqa: E402

from scute_converter.normal_form import Basis, NormalForm, Pair, Rotation, SharedPair  # noqa: E402
from scute_kernels import launch  # noqa: E402
from scute_kernels.expand import kernel as expand  # noqa: E402
from scute_kernels.rotate import kernel as rotate  # noqa: E402
from scute_kernels.route import kernel as route  # noqa: E402
from scute_kernels.shared_expand import kernel as shared_expand  # noqa: E402
from scute_kernels.shared_route import kernel as shared_route  # noqa: E402
from scute_kernels.shared_shrink import kernel as shared_shrink  # noqa: E402
from scute_kernels.shrink import kernel as shrink  # noqa: E402
from scute_kernels.side_by_side import compile_kernels  # noqa: E402
from scute_kernels.stream import empty  # noqa: E402
from scute_patches.decode_cuda_graph_runner import DECODE_VARIANTS  # noqa: E402
from scute_sglang import backend as backend_module  # noqa: E402
from scute_sglang.backend import Batch, ScuteLoRABackend  # noqa: E402
from scute_sglang.layers import ScuteLayer, wrap  # noqa: E402
from scute_sglang.memory_pool import LoadedAdapter, ScuteMemoryPool  # noqa: E402
from scute_sglang.packing import pack_adapter, pack_basis  # noqa: E402
from scute_sglang.sites import Projection, Site, SiteMap  # noqa: E402
from test_graph_variants import loaded  # noqa: E402

CPU, SLOTS, RANK = torch.device("cpu"), 8, 256
MODULES = ((512, (512, 128, 128)), (4096, (512,)), (512, (1536, 1000)), (16384, (512,)))  # qkv, o, gate and up, down
SITES = [(features, width, module) for module, (features, widths) in enumerate(MODULES) for width in widths]
KINDS = ("lora", "lora 100", "lora 200", "vera", "oft", "ia3")
# The numbers of rows for which SGLang captures graphs by default.
PREFILL_ROWS = [4, 8, 12, 16, 20, 24, 28, 32, 48, 64, *range(80, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
PREFILL_ROWS += [*range(1280, 4097, 256)]
MOST_PREFILL_ROWS = 8192  # more than its graphs are for
DECODE_ROWS = [1, 2, 4, 8, 12, 16, 24, 32, *range(40, 129, 8), 160, 192, 224, 256]


class Hopper:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU


driver.set_active(Hopper())  # pyright: ignore[reportArgumentType]


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Name and key of every kernel that would have been compiled so far: launches end where that would begin."""
    kernels: set[tuple[str, str]] = set()

    def stop(*, key: str, fn: JitFunctionInfo, **_: object) -> bool:
        kernels.add((fn.name, str(key)))
        return True

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", stop)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(launch, "supports_pdl", lambda: True)
    monkeypatch.setattr(launch, "_compiles_for_nvidia", lambda: True)
    monkeypatch.setattr(launch, "_shared_memory", lambda: 227 << 10)
    monkeypatch.setattr(launch, "_multiprocessors", lambda: 132)
    for module in (expand, rotate, route, shared_expand, shared_route, shared_shrink, shrink):
        name = module.__name__.split(".")[-2]
        monkeypatch.setattr(backend_module, name, getattr(module, name))
    return kernels


def adapter(kind: str, dtype: torch.dtype) -> LoadedAdapter:
    """On every site: LoRA of a rank, VeRA or OFT; (IA)3 on outputs of two and on inputs of the last."""
    forms = {}
    for site, (features, width, _) in enumerate(SITES):
        match kind:
            case "lora" | "lora 100" | "lora 200":
                rank = int(kind.removeprefix("lora") or 16)
                forms[site] = NormalForm(
                    features, width, pair=Pair(torch.ones(rank, features), torch.ones(rank, width))
                )
            case "vera":
                forms[site] = NormalForm(features, width, shared=SharedPair("b", torch.ones(RANK), torch.ones(width)))
            case "oft":
                forms[site] = NormalForm(features, width, rotation=Rotation(torch.ones(features // 32, 32, 32)))
            case "ia3" if site in (1, 2):
                forms[site] = NormalForm(features, width, scale_delta=torch.ones(width))
            case "ia3" if site == len(SITES) - 1:
                forms[site] = NormalForm(features, width, rotation=Rotation(torch.ones(features, 1, 1)))
    basis = pack_basis("b", Basis(torch.ones(RANK, 16384), torch.ones(RANK, 1536)), dtype)
    packed = pack_adapter(kind, forms, {}, [str(site) for site in range(len(SITES))], dtype)
    return loaded(kind, packed, {"b": basis} if kind == "vera" else {}, [module for _, _, module in SITES])


def serving(dtype: torch.dtype) -> tuple[ScuteLoRABackend, list[ScuteLayer]]:
    """A backend with an adapter of each kind resident, and one layer of each kind."""
    backend = ScuteLoRABackend(SLOTS, CPU)
    layers, sites, projections = [], [], {}
    for number, (features, widths) in enumerate(MODULES):
        layer = wrap(ReplicatedLinear(features, sum(widths), bias=False, params_dtype=dtype), backend)
        assert layer is not None
        layer.set_slices(list(widths))
        layer.module_index, layer.first_site = number, len(sites)
        layers.append(layer)
        for width in widths:
            site = Site(len(sites), layer, (0, width), (0, features), (0, width))
            sites.append(site)
            projections[str(site.index)] = Projection(str(site.index), features, width, (site,))
    pool = ScuteMemoryPool(torch.zeros(len(sites), 2, dtype=torch.int64), SLOTS, dtype, CPU, 1 << 26, "lru")
    pool.bring_in(KINDS, {kind: adapter(kind, dtype) for kind in KINDS})
    backend.attach(SiteMap(projections, tuple(layers), tuple(sites), "llama"), pool, max_rank=1024)
    backend.init_prefill_cuda_graph_batch_info(max(PREFILL_ROWS))
    backend.init_decode_cuda_graph_batch_info(max(DECODE_ROWS), 1)
    return backend, layers


def forward(backend: ScuteLoRABackend, layers: list[ScuteLayer], batch: Batch) -> None:
    backend.batch_info = batch
    for layer in layers:
        x = torch.empty(batch.rows, layer.inputs, dtype=backend.pool.dtype)
        backend.adapted(layer, x, lambda rows, layer=layer: rows.new_empty(len(rows), layer.slice_offsets[-1]), None)


def capture(
    backend: ScuteLoRABackend, layers: list[ScuteLayer], rows: int, variant: str | None, patch: pytest.MonkeyPatch
) -> None:
    """A graph of ``rows`` rows, of a prefill if it has no ``variant``, as it is captured: of base requests."""
    memory = backend._prefill_memory if variant is None else backend._decode_memory
    assert memory is not None
    decode = variant is not None
    patch.setattr(backend_module, "get_is_capture_mode", lambda: True)
    patch.setattr(backend_module, "get_capture_lora_variant", lambda: variant)
    forward(backend, layers, Batch(backend._fill([], [], memory), [-1], [rows], {}, True, not decode, decode))


def eager(backend: ScuteLoRABackend, layers: list[ScuteLayer], owners: Sequence[str | None], rows: int) -> None:
    """A prefill of ``rows`` rows."""
    slots = [-1 if owner is None else backend.pool.get_buffer_id(owner) for owner in owners]
    counts = [rows // len(owners) + (number < rows % len(owners)) for number in range(len(owners))]
    adapters = {slot: backend.pool.resident(slot) for slot in slots if slot >= 0}
    plans = backend._eager_plans(slots, counts, decode=False)
    forward(backend, layers, Batch(plans, slots, counts, adapters, False, True, False))


def test_kernels_are_compiled_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    memory = torch.empty(4, dtype=torch.float16), torch.empty(4, dtype=torch.float32)

    def rehearse() -> None:
        for tensor in (*memory, *memory):
            empty[(1,)](tensor)

    assert compile_kernels(rehearse) == len(memory)
    compiled = list(empty.device_caches[0][0].values())
    assert [kernel.metadata.target for kernel in compiled] == [Hopper().get_current_target()] * len(memory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_all_kernels_are_compiled_before_the_graphs(
    dtype: torch.dtype, wanted: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the graphs side by side; and a prefill without a graph has none of its own, for which it would wait."""
    monkeypatch.setattr(launch, "FEW_PROGRAMS", 100)  # the modules are narrow
    monkeypatch.setattr(launch, "WIDE_SLICE", 900)
    backend, layers = serving(dtype)
    backend.rehearse(MOST_PREFILL_ROWS, [None])
    backend.rehearse(max(DECODE_ROWS), DECODE_VARIANTS)
    rehearsed = set(wanted)
    assert {name.rpartition(".")[2] for name, _ in rehearsed} >= {"_shrink", "_expand_rows", "_expand_tiles"}
    with monkeypatch.context() as patch:
        for rows in PREFILL_ROWS:
            capture(backend, layers, rows, None, patch)
        for rows in DECODE_ROWS:
            for variant in DECODE_VARIANTS:
                capture(backend, layers, rows, variant, patch)
    assert not wanted - rehearsed
    for rows in (3, 50, 65, 214, 579, 2561, 8191):
        for owners in (
            ["ia3"],
            ["oft", None, "lora"],
            ["lora 100"],
            ["lora", "lora 200"],
            ["vera", None, None, None, None],  # many rows, few of them in tiles of shared bases
            ["lora", None, None, None, None],  # or of own pairs
            ["vera", "oft", "ia3", "lora", "oft", None, "oft"],
        ):
            if rows >= len(owners):
                eager(backend, layers, owners, rows)
        assert not wanted - rehearsed, rows


def test_every_kernel_of_a_server_compiles(
    wanted: set[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the interpreter runs may not compile: there a name may have several types."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(launch, "WIDE_SLICE", 900)  # the modules are narrow
    backend, _ = serving(torch.bfloat16)
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)  # that of ``wanted``, which ends a launch before

    def rehearse() -> None:
        backend.rehearse(MOST_PREFILL_ROWS, [None])
        backend.rehearse(max(DECODE_ROWS), DECODE_VARIANTS)

    count = compile_kernels(rehearse)
    assert count == len(list(tmp_path.rglob("*.cubin"))) > 50


def test_how_much_a_row_takes() -> None:
    """In a wrapped layer, whose slices are projections of their own."""
    backend, _ = serving(torch.float16)
    products = sum(features * sum(widths) for features, widths in MODULES)
    assert backend.site_map.products_of_a_row == products / len(MODULES)
