"""Packed adapters, read back through the table the way a kernel does, equal their source rounded once."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_converter.normal_form import Basis, Bias, NormalForm, Pair, Rotation, SharedPair
from scute_kernels import table
from scute_sglang.arena import Arena
from scute_sglang.packing import PART_ALIGNMENT, PackedAdapter, pack_adapter, pack_basis

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
OFFSET_FIELDS = [table.A, table.B, table.SCALE, table.BIAS, table.ROTATION, table.D, table.E]
NAMES = [f"model.layers.{number}.mlp.down_proj" for number in range(7)]


@dataclass
class Case:
    forms: dict[int, NormalForm] = field(default_factory=dict)
    shift: dict[int, torch.Tensor] = field(default_factory=dict)

    def parts(self, site: int) -> dict[int, torch.Tensor]:
        """Offset field to the tensor that belongs there."""
        form = self.forms[site]
        parts: dict[int, torch.Tensor | None] = {table.SCALE: form.scale_delta, table.BIAS: self.shift.get(site)}
        if form.pair is not None and form.pair.rank > 0:
            parts |= {table.A: form.pair.a, table.B: form.pair.b}
        if form.rotation is not None:
            parts |= {table.ROTATION: form.rotation.delta}
        if form.shared is not None:
            parts |= {table.D: form.shared.d, table.E: form.shared.e}
        return {name: part for name, part in parts.items() if part is not None}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int) -> torch.Tensor:
        return 3 * torch.randn(*shape, generator=generator)

    case = Case()
    fused_a = normal(5, 24)  # one a of a fused projection, whose slices keep their own b
    square = normal(24, 24)
    fused_rotation = normal(3, 8, 8)
    for site in draw(st.lists(st.integers(0, len(NAMES) - 1), unique=True)):
        out = draw(st.integers(1, 40))
        pair = shared = rotation = scale = None
        inputs = 24
        match draw(st.sampled_from(["none", "own", "fused", "prefix", "slice", "square", "transposed", "empty"])):
            case "own":
                rank = draw(st.integers(1, 9))
                pair = Pair(normal(rank, inputs), normal(rank, out))
            case "fused":
                pair = Pair(fused_a, normal(5, out))
            case "prefix":  # the same address, fewer rows
                pair = Pair(fused_a[:3], normal(3, out))
            case "square":
                pair = Pair(square, normal(24, out))
            case "transposed":  # the same address and shape, another order
                pair = Pair(square.T, normal(24, out))
            case "slice":  # not contiguous, and a new tensor object over the same memory every time
                inputs = 16
                pair = Pair(fused_a[:, 8:], normal(5, out))
            case "empty":
                pair = Pair(normal(0, inputs), normal(0, out))
        if draw(st.booleans()):
            shared = SharedPair(draw(st.sampled_from(["basis x", "basis y", "basis z"])), normal(11), normal(out))
        if draw(st.booleans()):
            scale = normal(out)
        match draw(st.sampled_from(["none", "fused", "shared", "diagonal"])):
            case "fused" if inputs == 24:
                rotation = Rotation(fused_rotation)
            case "shared":
                rotation = Rotation(normal(1, 4, 4))
            case "diagonal":
                rotation = Rotation(normal(inputs, 1, 1))
        case.forms[site] = NormalForm(inputs, out, pair=pair, shared=shared, scale_delta=scale, rotation=rotation)
        if draw(st.booleans()):
            case.shift[site] = normal(out)
    return case


def identity(part: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return part.data_ptr(), part.shape, part.stride()


@settings(max_examples=150, deadline=None)
@given(case=cases(), dtype=st.sampled_from(DTYPES), before=st.integers(0, 1000), order=st.permutations("xyz"))
def test_every_part_reads_back_through_the_table(case: Case, dtype: torch.dtype, before: int, order: list[str]) -> None:
    packed = pack_adapter("ada", case.forms, case.shift, NAMES, dtype)
    arena = Arena(1 << 17, dtype, "cpu")
    arena.tensor.fill_(float("nan"))
    arena.allocate("other", before)
    offset = arena.allocate("ada", packed.block.numel())
    arena.write("ada", packed.block)
    basis_rows = {f"basis {key}": 4 + number for number, key in enumerate(order)}
    rows = packed.placed(offset, basis_rows)

    assert rows.dtype == torch.int64
    assert rows.shape == (len(NAMES), table.FIELDS)
    for site, row in enumerate(rows.tolist()):
        parts = case.parts(site) if site in case.forms else {}
        assert {name for name in OFFSET_FIELDS if row[name] != -1} == parts.keys()
        for name, part in parts.items():
            read = arena.tensor[row[name] : row[name] + part.numel()]
            assert torch.equal(read, part.flatten().to(dtype)), (site, name)
        form = case.forms.get(site, NormalForm(1, 1))
        assert row[table.RANK] == (form.pair.rank if form.pair else 0)
        assert row[table.BASIS] == (basis_rows[form.shared.basis] if form.shared else -1)
        assert row[table.BLOCK] == (form.rotation.block if form.rotation else 0)
        assert row[11] == 0
        if form.rotation:  # the kernel's way to block j must end at block j
            delta = form.rotation.delta
            for position in range(form.in_features // form.rotation.block):
                start = row[table.ROTATION] + position * row[table.BLOCK_STRIDE]
                expected = delta[0 if delta.shape[0] == 1 else position].flatten().to(dtype)
                assert torch.equal(arena.tensor[start : start + expected.numel()], expected)


@settings(max_examples=150, deadline=None)
@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_parts_are_aligned_and_stored_once(case: Case, dtype: torch.dtype) -> None:
    packed = pack_adapter("ada", case.forms, case.shift, NAMES, dtype)
    spans: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[int, int]] = {}
    for site in case.forms:
        for name, part in case.parts(site).items():
            start = int(packed.rows[site, name])
            assert start * dtype.itemsize % PART_ALIGNMENT == 0
            # Every reader of one tensor finds it in one place.
            assert spans.setdefault(identity(part), (start, start + part.numel())) == (start, start + part.numel())
    end = 0
    for start, stop in sorted(spans.values()):
        gap = (start - end) * dtype.itemsize
        assert 0 <= gap < PART_ALIGNMENT, "parts overlap, or memory is wasted"
        assert not packed.block[end:start].any()
        end = stop
    assert packed.block.dtype == dtype
    assert packed.block.shape == (end,)
    assert packed.block.is_pinned() == torch.cuda.is_available()


def test_an_adapter_without_parts_or_a_rank_without_sites() -> None:
    packed = pack_adapter("ada", {2: NormalForm(4, 5)}, {}, NAMES, torch.float16)
    assert packed.block.shape == (0,)
    assert (packed.placed(512, {})[:, OFFSET_FIELDS] == -1).all()
    assert pack_adapter("ada", {}, {}, [], torch.float16).placed(512, {}).shape == (0, table.FIELDS)


def test_in_inference_mode() -> None:
    """Which torch has for each thread, and packing has several."""
    forms = {0: NormalForm(8, 8, pair=Pair(torch.ones(2, 8), torch.ones(2, 8)))}
    expected = pack_adapter("a", forms, {}, NAMES, torch.float16).block
    with torch.inference_mode():
        assert torch.equal(pack_adapter("a", forms, {}, NAMES, torch.float16).block, expected)


def test_placing_leaves_the_packed_rows_alone() -> None:
    form = NormalForm(3, 5, shared=SharedPair("basis", torch.ones(2), torch.ones(5)))
    packed = pack_adapter("ada", {0: form}, {}, NAMES, torch.float16)
    first = packed.placed(128, {"basis": 9})
    assert torch.equal(packed.placed(128, {"basis": 9}), first)
    assert packed.placed(256, {"basis": 1})[0, [table.D, table.E, table.BASIS]].tolist() == [256, 264, 1]
    with pytest.raises(KeyError, match="basis"):
        packed.placed(128, {})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_basis_reads_back(dtype: torch.dtype) -> None:
    basis = Basis(torch.randn(5, 33), torch.randn(5, 21))
    packed = pack_basis("basis", basis, dtype)
    row = packed.placed(384)
    arena = torch.full((2048,), float("nan"), dtype=dtype)
    arena[384 : 384 + packed.block.numel()] = packed.block
    for start, stride, part in [
        (table.BASIS_A, table.BASIS_A_STRIDE, basis.a),
        (table.BASIS_B, table.BASIS_B_STRIDE, basis.b),
    ]:
        assert row[start] * dtype.itemsize % PART_ALIGNMENT == 0
        for number in range(int(row[table.BASIS_RANK])):
            begin = int(row[start] + number * row[stride])
            assert torch.equal(arena[begin : begin + part.shape[1]], part[number].to(dtype))
    assert row[table.BASIS_RANK] == 5
    assert row[5:].tolist() == [0, 0, 0]
    # b follows a at the next multiple of 16 bytes: nothing else is stored
    aligned = -(-5 * 33 * dtype.itemsize // PART_ALIGNMENT) * PART_ALIGNMENT // dtype.itemsize
    assert packed.block.numel() == aligned + 5 * 21


def form_with(part: str, value: float) -> tuple[NormalForm, dict[int, torch.Tensor]]:
    def holding(name: str, *shape: int) -> torch.Tensor:
        tensor = torch.full(shape, 0.5)
        if name == part:
            tensor.view(-1)[-1] = value
        return tensor

    form = NormalForm(
        6,
        10,
        pair=Pair(holding("a", 3, 6), holding("b", 3, 10)),
        shared=SharedPair("basis", holding("d", 4), holding("e", 10)),
        scale_delta=holding("scale", 10),
        rotation=Rotation(holding("rotation", 3, 2, 2)),
    )
    return form, {1: holding("output shift", 10)}


PARTS = ["a", "b", "d", "e", "scale", "rotation", "output shift"]


def pack_with(part: str, value: float, dtype: torch.dtype) -> PackedAdapter:
    form, shift = form_with(part, value)
    return pack_adapter("ada", {1: form}, shift, NAMES, dtype)


@pytest.mark.parametrize("part", PARTS)
def test_a_value_that_overflows_is_refused_by_name(part: str) -> None:
    with pytest.raises(ValueError, match=rf"adapter ada, {NAMES[1]}, {part}: 65520 overflows torch.float16; .*--dtype"):
        pack_with(part, -65520.0, torch.float16)  # the smallest magnitude that rounds to infinity
    pack_with(part, -65519.0, torch.float16)
    pack_with(part, -65520.0, torch.bfloat16)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_refused(value: float, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"ada, {NAMES[1]}, rotation: holds NaN or infinity"):
        pack_with("rotation", value, dtype)
    with pytest.raises(ValueError, match="shared basis key, b: holds NaN or infinity"):
        pack_basis("key", Basis(torch.ones(2, 3), torch.full((2, 5), value)), dtype)


class Unresolved:
    def shard(self, rows: tuple[int, int], cols: tuple[int, int]) -> "Unresolved":
        return self

    def measure(self, weight: torch.Tensor, form: NormalForm) -> torch.Tensor:
        return weight

    def resolve(self, form: NormalForm, measured: torch.Tensor) -> NormalForm:
        return form


ones = torch.ones


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (NormalForm(6, 10, deferred=Unresolved()), "resolve it before packing"),
        (NormalForm(6, 10, pair=Pair(ones(3, 7), ones(3, 10))), r"a: shape \(3, 7\), expected \(3, 6\)"),
        (NormalForm(6, 10, pair=Pair(ones(3, 6), ones(2, 10))), r"b: shape \(2, 10\), expected \(3, 10\)"),
        (NormalForm(6, 10, scale_delta=ones(6)), r"scale: shape \(6,\), expected \(10,\)"),
        (NormalForm(6, 10, scale_delta=ones(10, 1)), r"scale: shape \(10, 1\), expected \(10,\)"),
        (NormalForm(6, 10, rotation=Rotation(ones(2, 2, 2))), r"rotation: shape \(2, 2, 2\), expected \(3, 2, 2\)"),
        (NormalForm(6, 10, rotation=Rotation(ones(3, 3, 2))), r"rotation: shape \(3, 3, 2\), expected \(3, 2, 2\)"),
        (NormalForm(6, 10, rotation=Rotation(ones(1, 4, 4))), "rotation: blocks of 4 do not divide 6 input features"),
        (NormalForm(6, 10, shared=SharedPair("k", ones(4), ones(6))), r"e: shape \(6,\), expected \(10,\)"),
        (NormalForm(6, 10, shared=SharedPair("k", ones(4, 1), ones(10))), r"d: shape \(4, 1\), expected \(4,\)"),
    ],
)
def test_what_cannot_be_served_is_refused(form: NormalForm, message: str) -> None:
    with pytest.raises(ValueError, match=rf"adapter ada, {NAMES[3]}.*{message}"):
        pack_adapter("ada", {3: form}, {}, NAMES, torch.float32)


def test_a_wrong_shift_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"{NAMES[3]}, output shift: shape \(6,\), expected \(10,\)"):
        pack_adapter("ada", {3: NormalForm(6, 10, bias=Bias(add=ones(10)))}, {3: ones(6)}, NAMES, torch.float32)
    with pytest.raises(ValueError, match=f"output shift for {NAMES[4]}, which it does not adapt"):
        pack_adapter("ada", {3: NormalForm(6, 10)}, {4: ones(10)}, NAMES, torch.float32)


def test_a_basis_of_two_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shared basis key, b: shape \(3, 5\), expected \(2, 5\)"):
        pack_basis("key", Basis(ones(2, 4), ones(3, 5)), torch.float32)
