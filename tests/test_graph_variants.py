"""The operators of a decode graph serve every batch that is sent to it: as captured, eagerly, and as a prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
import torch

from scute_converter.normal_form import Basis, NormalForm, Pair, Rotation, SharedPair

pytest.importorskip("sglang")
from scute_patches import sgl_kernel  # SGLang's layers need it on a CPU

sgl_kernel.install()

from sglang.srt.layers.linear import ReplicatedLinear  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402

from scute_kernels.plan import FEW_ROWS, MOST_DECODE_ROWS, PREFILL_WIDTH  # noqa: E402
from scute_sglang import backend as backend_module  # noqa: E402
from scute_sglang.backend import (  # noqa: E402
    LONG_PREFILL,
    OWN_BLOCK,
    Batch,
    HeadBatch,
    ScuteLoRABackend,
    decode_variant,
)
from scute_sglang.layers import ScuteLayer, wrap  # noqa: E402
from scute_sglang.manager import ScuteLoRAManager  # noqa: E402
from scute_sglang.memory_pool import LoadedAdapter, ScuteMemoryPool  # noqa: E402
from scute_sglang.packing import PackedAdapter, PackedBasis, pack_adapter, pack_basis  # noqa: E402
from scute_sglang.sites import Projection, Site, SiteMap  # noqa: E402

IN, WIDTHS = 24, (18, 10, 7, 13)  # of four sites: three of a fused layer, and one of a layer of its own
MODULE_OF_SITE = (0, 0, 0, 1)
RANK = 5
WIDE_RANK = OWN_BLOCK + 6  # more than the scratch of an eager forward has at least
BASIS = Basis(torch.randn(RANK, IN), torch.randn(RANK, max(WIDTHS)))
PACKED_BASIS = pack_basis("basis", BASIS, torch.float32)
SLOTS, CPU = 8, torch.device("cpu")


def forms_of(kind: str) -> dict[int, NormalForm]:
    """By site. (IA)3 scales outputs of the fused layer and inputs of the other; OFT leaves one slice as it is."""

    def pair(site: int, rank: int = 3) -> NormalForm:
        return NormalForm(IN, WIDTHS[site], pair=Pair(torch.randn(rank, IN), torch.randn(rank, WIDTHS[site])))

    def shared(site: int) -> NormalForm:
        parts = SharedPair("basis", torch.randn(RANK), torch.randn(WIDTHS[site]))
        return NormalForm(IN, WIDTHS[site], shared=parts)

    def rotated(site: int, block: int) -> NormalForm:
        return NormalForm(IN, WIDTHS[site], rotation=Rotation(torch.randn(IN // block, block, block)))

    scaled = NormalForm(IN, WIDTHS[1], scale_delta=torch.randn(WIDTHS[1]))
    match kind:
        case "lora":
            return {site: pair(site) for site in (0, 2, 3)}
        case "wide lora":
            return {site: pair(site, WIDE_RANK) for site in (1, 3)}
        case "vera":
            return {site: shared(site) for site in (0, 1, 3)}
        case "ia3":
            return {1: scaled, 3: rotated(3, 1)}
        case "oft":
            return {site: rotated(site, 6) for site in (0, 2, 3)}
        case "oft of v":
            return {2: rotated(2, 4)}
    raise ValueError(kind)


def packed(kind: str, forms: dict[int, NormalForm]) -> LoadedAdapter:
    block = pack_adapter(kind, forms, {}, [f"site {i}" for i in range(len(WIDTHS))], torch.float32)
    return loaded(kind, block, {"basis": PACKED_BASIS} if kind == "vera" else {}, MODULE_OF_SITE)


def loaded(
    kind: str, packed: PackedAdapter, bases: Mapping[str, PackedBasis], module_of_site: Sequence[int]
) -> LoadedAdapter:
    """As a server holds it; ``bases``: each is read from its first row."""
    return LoadedAdapter(
        uid=kind,
        name=kind,
        method=kind,
        content=kind,
        packed=packed,
        bases=bases,
        basis_views={key: (key, 0) for key in bases},
        module_of_site=module_of_site,
    )


def layer(backend: ScuteLoRABackend, number: int) -> ScuteLayer:
    """Of the sites with this number in ``MODULE_OF_SITE``."""
    widths = [width for width, module in zip(WIDTHS, MODULE_OF_SITE, strict=True) if module == number]
    linear = ReplicatedLinear(IN, sum(widths), bias=True, params_dtype=torch.float32)
    for parameter in linear.parameters():
        parameter.data.normal_()
    wrapper = wrap(linear, backend)
    assert wrapper is not None
    wrapper.set_slices(widths)
    wrapper.module_index, wrapper.first_site = number, MODULE_OF_SITE.index(number)
    return wrapper


def dense(wrapper: ScuteLayer, forms: dict[int, NormalForm], x: torch.Tensor) -> torch.Tensor:
    """The adapted output ``(out,)`` of one input ``(in,)``, by the formula."""
    outputs = []
    for i, (start, stop) in enumerate(pairwise(wrapper.slice_offsets)):
        form = forms.get(wrapper.first_site + i, NormalForm(IN, stop - start))
        inputs = x if form.rotation is None else x + x @ torch.block_diag(*form.rotation.delta)
        output = wrapper.base_layer.weight[start:stop] @ inputs + wrapper.base_layer.bias[start:stop]
        if form.scale_delta is not None:
            output = output * (1 + form.scale_delta)
        if form.pair is not None:
            output = output + x @ form.pair.a.T @ form.pair.b
        if form.shared is not None:
            product = (x @ BASIS.a.T * form.shared.d) @ BASIS.b[:, : stop - start]
            output = output + product * form.shared.e
        outputs.append(output)
    return torch.cat(outputs)


def serving(forms: dict[str, dict[int, NormalForm]]) -> tuple[ScuteLoRABackend, list[ScuteLayer]]:
    """A backend with an adapter of every kind resident, and its two layers."""
    backend = ScuteLoRABackend(SLOTS, CPU)
    layers = [layer(backend, number) for number in (0, 1)]
    pool = ScuteMemoryPool(torch.zeros(len(WIDTHS), 2, dtype=torch.int64), SLOTS, torch.float32, CPU, 1 << 20, "lru")
    pool.bring_in(list(forms), {kind: packed(kind, of_kind) for kind, of_kind in forms.items()})
    backend.attach(SiteMap({}, tuple(layers), (), "llama"), pool, max_rank=WIDE_RANK)
    return backend, layers


@torch.no_grad()
def test_the_output_head_has_rows_of_its_own() -> None:
    """SGLang prunes the rows of a prefill before it, so numbers of the batch's rows mean nothing there."""
    torch.manual_seed(0)
    forms = {kind: forms_of(kind) for kind in ("lora", "oft")}
    backend, (_, head) = serving(forms)
    owners = [None, "oft", "lora", "oft"]
    slots = [-1 if owner is None else backend.pool.get_buffer_id(owner) for owner in owners]
    backend.batch_info = eager(backend, slots, [3, 2, 4, 1])
    x = torch.randn(len(owners), IN)
    output = backend.adapted(
        head, x, head.base_linear, HeadBatch(backend._eager_plans(slots, [1] * 4, decode=False), 4)
    )
    expected = [dense(head, {} if owner is None else forms[owner], row) for owner, row in zip(owners, x, strict=True)]
    torch.testing.assert_close(output, torch.stack(expected), rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_a_prefill_in_which_an_adapter_has_no_row() -> None:
    torch.manual_seed(0)
    forms = {kind: forms_of(kind) for kind in ("lora", "oft")}
    backend, layers = serving(forms)
    owners, counts = ["oft", "lora", None], [0, 3, 2]
    slots = [-1 if owner is None else backend.pool.get_buffer_id(owner) for owner in owners]
    none = torch.empty(0)
    batch = ForwardBatch(ForwardMode.EXTEND, len(owners), none, none, none, none, sum(counts), lora_ids=owners)
    batch.extend_seq_lens_cpu = counts
    backend.prepare(batch, slots, decode_graph=False, prefill_graph=False)
    for wrapper in layers:
        x = torch.randn(sum(counts), IN)
        expected = [dense(wrapper, forms["lora"] if row < 3 else {}, x[row]) for row in range(len(x))]
        found = backend.adapted(wrapper, x, wrapper.base_linear, None)
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-4)


def test_which_prefills_replay_a_graph() -> None:
    """As SGLang asks the manager, for a batch on one of two ranks: not those that transform inputs, and not long ones,
    unless they are of base requests alone."""
    long, most = 1000, 4000
    backend, layers = serving({kind: forms_of(kind) for kind in ("lora", "oft")})
    backend.init_prefill_cuda_graph_batch_info(most)
    site = Site(0, layers[0], (0, WIDTHS[0]), (0, IN), (0, WIDTHS[0]))
    features = int(LONG_PREFILL / long) * len(layers) * 2  # of all layers and both ranks, all in one projection
    projection = Projection("q_proj", features, 1, (site,))
    manager = object.__new__(ScuteLoRAManager)  # of a server, its constructor needs all
    manager.lora_backend, manager.attn_dp_enabled, manager.attn_tp_size = backend, False, 2
    manager.site_map = SiteMap({"q_proj": projection}, tuple(layers), (site,), "llama")
    manager.loras = {kind: backend.pool.resident(backend.pool.get_buffer_id(kind)) for kind in ("lora", "oft")}

    def replays(owners: list[str | None], rows: int, mode: ForwardMode = ForwardMode.EXTEND) -> bool:
        none = torch.empty(0)
        batch = ForwardBatch(mode, len(owners), none, none, none, none, rows, lora_ids=owners, extend_num_tokens=rows)
        return manager.can_use_prefill_cuda_graph(batch)

    assert replays(["lora", None], long - 1)
    assert not replays(["lora", None], long)
    assert not replays([None, "oft"], 2)
    assert replays([None], long)
    assert not replays([None], most + 1)  # than any graph has
    assert not replays(["lora"], 1, ForwardMode.DECODE)


def check_transformed(batch: Batch) -> None:
    """Every transformed row is in one tile, which is of one adapter if its rotation is more than a diagonal."""
    for transformed in batch.transformed.values():
        plan = transformed.plan
        rows, slots, in_further = plan.tiles[:, plan.tiles[0] >= 0]
        assert sorted(rows.tolist()) == list(range(len(plan.row_slot)))
        assert torch.equal(slots, plan.row_slot[rows.long()])
        assert torch.equal(in_further, rows)  # all of these rows have further rows
        for tile in plan.tiles[1]:
            owners = {batch.adapters[slot].method for slot in tile[tile >= 0].tolist()}
            assert len(owners) <= 1 or owners == {"ia3"}


def test_tiles_of_shared_bases_come_first() -> None:
    """The kernels of shared bases do not see those of adapters that transform inputs."""
    kinds = ("ia3", "lora", "oft", "vera")
    backend, _ = serving({kind: forms_of(kind) for kind in kinds})
    slots = [backend.pool.get_buffer_id(kind) for kind in kinds for _ in range(2)]
    grouped = backend._eager_plans([-1, *slots], [1] * 9, decode=True).grouped
    vera = backend.pool.get_buffer_id("vera")
    assert grouped.leading.item() == 1
    assert grouped.tiles[1, 0].tolist() == [vera, vera] + [-1] * 14
    assert {slot for slot in grouped.tiles[1, 1:].flatten().tolist() if slot >= 0} == {
        backend.pool.get_buffer_id(kind) for kind in ("ia3", "oft")
    }
    others = backend._eager_plans(slots[:6], [1] * 6, decode=True).grouped
    assert others.leading.item() == 0


def test_an_eager_prefill_has_no_tiles_but_its_own() -> None:
    """Of the grouped plan, and of what ``expand`` has of the own one: launches count on it. An eager decode has room
    for as many as a graph, and so has the own plan of few rows, whose tiles are of one row."""
    kinds = ("lora", "vera", "oft")
    backend, _ = serving({kind: forms_of(kind) for kind in kinds})
    lora, vera, oft = (backend.pool.get_buffer_id(kind) for kind in kinds)
    for slots, counts, tiles, own_tiles in (
        # the rows of one basis share tiles, those of OFT have two
        ([vera, -1, oft, vera], [100, 9, 70, 40], 3 + 2, 3 + 2),
        ([lora, vera], [300, 1], 1, 5 + 1),
        ([lora, -1], [300, 7], 1, 5),  # there is always one, if dead
        ([-1, vera], [70, 1], 1, 1),
        ([-1, vera], [63, 1], 1, 64),
    ):
        plans = backend._eager_plans(slots, counts, decode=False)
        assert plans.filled.tiles.shape == (3, own_tiles, PREFILL_WIDTH)
        assert plans.filled.routes.shape[0] == own_tiles < plans.own.tiles.shape[1] or plans.filled is plans.own
        assert (plans.filled is plans.own) == (sum(counts) <= FEW_ROWS)
        grouped = plans.grouped
        assert grouped.tiles.shape == (3, tiles, PREFILL_WIDTH)
        assert grouped.routes.shape[0] == tiles
        with_work = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
        rows = [row for row, slot in enumerate(with_work) if slot in (vera, oft)]
        assert sorted(row for row in grouped.tiles[0].flatten().tolist() if row >= 0) == rows
        of_decode = backend._eager_plans(slots, counts, decode=True)
        assert of_decode.grouped.tiles.shape[1] > tiles and of_decode.filled is of_decode.own


@torch.no_grad()
def test_an_eager_decode_of_many_rows() -> None:
    """More than any graph has: tiles are those of a prefill."""
    torch.manual_seed(0)
    forms = {kind: forms_of(kind) for kind in ("lora", "vera", "ia3", "oft")}
    backend, layers = serving(forms)
    owners = [None, *forms] * 52
    slots = [-1 if owner is None else backend.pool.get_buffer_id(owner) for owner in owners]
    assert len(slots) > MOST_DECODE_ROWS
    backend.batch_info = eager(backend, slots, [1] * len(slots), beside=True)
    x = torch.randn(len(slots), IN)
    for wrapper in layers:
        output = backend.adapted(wrapper, x, wrapper.base_linear, None)
        rows = [dense(wrapper, {} if own is None else forms[own], row) for own, row in zip(owners, x, strict=True)]
        torch.testing.assert_close(output, torch.stack(rows), rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_rows_behind_the_batch_are_base_rows() -> None:
    """SGLang may pad a forward."""
    torch.manual_seed(0)
    forms = {"oft": forms_of("oft")}
    backend, layers = serving(forms)
    backend.batch_info = eager(backend, [-1, backend.pool.get_buffer_id("oft")], [2, 3])
    for wrapper in layers:
        x = torch.randn(7, IN)
        output = backend.adapted(wrapper, x, wrapper.base_linear, None)
        expected = [dense(wrapper, forms["oft"] if 2 <= number < 5 else {}, row) for number, row in enumerate(x)]
        torch.testing.assert_close(output, torch.stack(expected), rtol=1e-5, atol=1e-4)


def test_a_layer_that_sees_only_some_rows_is_an_error() -> None:
    forms = {"lora": forms_of("lora")}
    backend, (wrapper, _) = serving(forms)
    backend.batch_info = eager(backend, [backend.pool.get_buffer_id("lora")] * 2, [1, 2])
    with pytest.raises(RuntimeError, match="2 of the 3 rows"):
        backend.adapted(wrapper, torch.randn(2, IN), wrapper.base_linear, None)


@torch.no_grad()
def test_a_graph_has_room_for_every_rank_at_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    forms = {"wide lora": forms_of("wide lora")}
    backend, (_, embedding) = serving(forms)
    embedding.vocab_size = IN  # type: ignore[attr-defined]  # of the class that wraps embeddings
    slots = [-1, backend.pool.get_buffer_id("wide lora")]
    ids = torch.tensor([4, 7])

    def base(tokens: torch.Tensor) -> torch.Tensor:
        return embedding.base_linear(torch.nn.functional.one_hot(tokens, IN).float())

    def embed(adapters: dict[int, LoadedAdapter]) -> torch.Tensor:
        backend.batch_info = dataclasses.replace(eager(backend, slots, [1, 1], beside=True), adapters=adapters)
        return backend.adapted(embedding, ids, base, None, embedding=True)

    found = [embed({slots[1]: backend.pool.resident(slots[1])})]
    with monkeypatch.context() as patch:
        patch.setattr(backend_module, "get_is_capture_mode", lambda: True)
        found.append(embed({}))
    rows = torch.nn.functional.one_hot(ids, IN).float()
    expected = [dense(embedding, of, row) for of, row in zip(({}, forms["wide lora"]), rows, strict=True)]
    for output in found:
        torch.testing.assert_close(output, torch.stack(expected), rtol=1e-5, atol=1e-4)


def eager(backend: ScuteLoRABackend, slots: list[int], counts: list[int], beside: bool = False) -> Batch:
    """An eager forward of a request in each slot; ``beside``: a decode."""
    return Batch(
        plans=backend._eager_plans(slots, counts, decode=beside),
        slots=slots,
        counts=counts,
        adapters={slot: backend.pool.resident(slot) for slot in set(slots) - {-1}},
        use_cuda_graph=False,
        is_prefill=not beside,
        beside=beside,
    )


@pytest.mark.parametrize(
    ("kinds", "variant"),
    [
        (["lora", "wide lora"], "lora"),
        (["lora", "vera"], "shared"),
        (["lora", "vera", "ia3"], "shared-rotate"),
        (["lora", "ia3"], "rotate"),
        (["lora", "vera", "ia3", "oft", "oft of v"], "shared-rotate-few"),
        (["oft", "vera", "oft of v"], "shared-rotate-fused"),
        (["oft of v"], "rotate-fused"),
        (["lora", "ia3", "oft"], "rotate-few"),
    ],
)
@torch.no_grad()
def test_every_forward_of_a_batch_is_exact(kinds: list[str], variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph that is captured for it, in an eager decode and in a prefill."""
    torch.manual_seed(0)
    forms = {kind: forms_of(kind) for kind in kinds}
    backend, layers = serving(forms)
    pool = backend.pool
    owners = [None, *kinds, None, kinds[0]]
    adapters = [None if owner is None else pool.resident(pool.get_buffer_id(owner)) for owner in owners]
    assert decode_variant(adapters, [1] * len(owners)) == variant

    slots = [-1 if owner is None else pool.get_buffer_id(owner) for owner in owners]
    lengths = [1 + number % 3 for number in range(len(owners))]  # rows of each request of a prefill

    def forward(wrapper: ScuteLayer, beside: bool, captured: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        counts = [1] * len(slots) if beside else lengths
        backend.batch_info = eager(backend, slots, counts, beside)
        if captured:  # of base requests, before it is known what will be replayed
            backend.batch_info.adapters = {}
        x = torch.randn(sum(counts), IN)
        found = backend.adapted(wrapper, x, wrapper.base_linear, None)
        check_transformed(backend.batch_info)
        of_rows = [owner for owner, count in zip(owners, counts, strict=True) for _ in range(count)]
        rows = [dense(wrapper, {} if own is None else forms[own], row) for own, row in zip(of_rows, x, strict=True)]
        return found, torch.stack(rows)

    for wrapper in layers:
        found = {"prefill": forward(wrapper, beside=False), "decode": forward(wrapper, beside=True)}
        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "MOST_RUNS", 0)
            found["prefill, rows gathered"] = forward(wrapper, beside=False)
        with monkeypatch.context() as patch:
            patch.setattr(ScuteLayer, "shows_weight", False)
            found["prefill, weight not to be read"] = forward(wrapper, beside=False)
        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "get_is_capture_mode", lambda: True)
            patch.setattr(backend_module, "get_capture_lora_variant", lambda: variant)
            found["graph"] = forward(wrapper, beside=True, captured=True)
        for name, (output, expected) in found.items():
            # sums of some 30 products of about 5, and values of up to 100, in fp32
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
