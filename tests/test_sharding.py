"""The shards of a projection, each with its part of the form, together give the whole projection."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scute_converter import AdapterError, Basis, Bias, NormalForm, Pair, Rotation, SharedPair, reference, shard
from scute_converter.methods import dora

IN, OUT = 30, 42
# Unequal shards, with edges at multiples of 3 and 6 only.
COLS = [(0, 12), (12, 18), (18, 30)]
ROWS = [(0, 5), (5, 18), (18, 42)]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def scaled_bias() -> Bias:
    return Bias(replace=draw(OUT), add=draw(OUT) - 1, scaled=True, scale_delta=draw(OUT) + 1)


BASES = {"key": Basis(draw(7, 33), draw(7, 50))}
PAIR = Pair(draw(3, IN), draw(3, OUT))
FORMS = {
    "pair": NormalForm(IN, OUT, pair=PAIR),
    "pair-rank-1": NormalForm(IN, OUT, pair=Pair(draw(1, IN), draw(1, OUT)), bias=Bias(add=draw(OUT))),
    "shared": NormalForm(0, OUT, shared=SharedPair("key", draw(7), draw(OUT))),
    "scale": NormalForm(0, OUT, scale_delta=draw(OUT), bias=Bias(scaled=True)),
    "scale-of-new-bias": NormalForm(0, OUT, scale_delta=draw(OUT), bias=scaled_bias()),
    "scale-beside-bias": NormalForm(0, OUT, scale_delta=draw(OUT), bias=Bias(replace=draw(OUT))),
    "scales-of-both": NormalForm(0, OUT, scale_delta=draw(OUT), bias=Bias(scale_delta=draw(OUT) + 1)),
    "input-scale": NormalForm(IN, 0, rotation=Rotation(draw(IN, 1, 1))),
    "rotation": NormalForm(IN, 0, rotation=Rotation(draw(5, 6, 6))),
    "rotation-shared": NormalForm(0, 0, rotation=Rotation(draw(1, 3, 3))),
    "dora": NormalForm(IN, OUT, pair=PAIR, deferred=dora.DoraScale(draw(OUT).abs() + 1, "a", "m")),
    "everything": NormalForm(
        IN,
        OUT,
        pair=PAIR,
        shared=SharedPair("key", draw(7), draw(OUT)),
        scale_delta=draw(OUT),
        rotation=Rotation(draw(5, 6, 6)),
        bias=scaled_bias(),
    ),
}
X, WEIGHT, BASE_BIAS = draw(5, IN), draw(OUT, IN), draw(OUT)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Sums of some 50 fp32 products of size 1 in another order.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", FORMS)
def test_shards_of_the_output(name: str) -> None:
    form = FORMS[name]
    whole = reference.apply(form, BASES, X, WEIGHT, BASE_BIAS)
    assert (whole - (X @ WEIGHT.T + BASE_BIAS)).abs().max() > 0.1 * whole.abs().max()
    parts = []
    for rows in ROWS:
        part = shard(form, rows, (0, IN))
        assert (part.out_features, part.in_features) == (rows[1] - rows[0], IN)
        local = slice(*rows)
        parts.append(reference.apply(part, BASES, X, WEIGHT[local], BASE_BIAS[local], origin=(0, rows[0])))
    assert_same(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("name", FORMS)
def test_shards_of_the_input(name: str) -> None:
    """Partial sums; the bias is of the first shard, and DoRA's norms are over the sum of what the shards measure."""
    form = FORMS[name]
    whole = reference.apply(form, BASES, X, WEIGHT, BASE_BIAS)
    parts = [(slice(*cols), shard(form, (0, OUT), cols)) for cols in COLS]
    if form.deferred is not None:
        measured = sum(part.deferred.measure(WEIGHT[:, cols], part) for cols, part in parts)
        parts = [(cols, part.deferred.resolve(part, measured)) for cols, part in parts]
    total = torch.zeros_like(whole)
    for cols, part in parts:
        first = cols.start == 0
        local = part if first else replace(part, bias=Bias())
        bias = BASE_BIAS if first else None
        total += reference.apply(local, BASES, X[:, cols], WEIGHT[:, cols], bias, origin=(cols.start, 0))
    assert_same(total, whole)


@pytest.mark.parametrize("cols", [(0, 15), (15, 30), (3, 18)])
def test_a_shard_that_cuts_a_block_is_refused(cols: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"blocks of 6 input features, which input features {cols[0]} to {cols[1]}"):
        shard(FORMS["rotation"], (0, OUT), cols)


def test_dora_scale_of_a_large_weight() -> None:
    """Measured chunk by chunk in fp64, so a bf16 weight gives the scale of its exact values."""
    weight = draw(2500, 2048).bfloat16()
    assert weight.numel() > dora._CHUNK
    pair = Pair(draw(3, 2048), draw(3, 2500))
    magnitude = draw(2500).abs() + 1
    form = NormalForm(2048, 2500, pair=pair, deferred=dora.DoraScale(magnitude, "a", "m"))
    measured = form.deferred.measure(weight, form)
    exact = (weight.double() + pair.b.T.double() @ pair.a.double()).norm(dim=1)
    torch.testing.assert_close(measured.sqrt(), exact, rtol=1e-12, atol=0)
    resolved = form.deferred.resolve(form, measured)
    assert resolved.deferred is None
    torch.testing.assert_close(resolved.scale_delta, (magnitude / exact - 1).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(resolved.pair.b, (pair.b * magnitude / exact).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("row", [torch.zeros(IN), torch.full((IN,), torch.inf)])
def test_dora_on_a_row_without_length_is_refused(row: torch.Tensor) -> None:
    form = NormalForm(IN, OUT, pair=Pair(draw(1, IN), torch.zeros(1, OUT)), deferred=FORMS["dora"].deferred)
    weight = WEIGHT.clone()
    weight[7] = row
    with pytest.raises(
        AdapterError, match=r"adapter 'a': tensor m.lora_magnitude_vector: .* length 0 or is not finite"
    ):
        form.deferred.resolve(form, form.deferred.measure(weight, form))
