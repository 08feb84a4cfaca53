"""The shift that a site adds to SGLang's output, with its scale, gives the bias as the method has it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scute_converter import Bias, NormalForm, reference
from scute_patches import sgl_kernel  # the manager derives from a class of SGLang, whose import needs it on a CPU

sgl_kernel.install()

from scute_sglang.manager import output_shift  # noqa: E402
from scute_sglang.sites import Site  # noqa: E402

OUT, IN = 42, 30


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    "rule",
    [
        Bias(),
        Bias(scaled=True),
        Bias(replace=draw(OUT) + 1),
        Bias(replace=draw(OUT) + 1, add=draw(OUT) - 1, scaled=True),
        Bias(scale_delta=draw(OUT) + 2),
        Bias(replace=draw(OUT) + 1, add=draw(OUT) - 1, scale_delta=draw(OUT) + 2),
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_output_shift(rule: Bias, scaled: bool, separate: bool) -> None:
    """``separate``: the layer hands its bias out instead of adding it, and its caller adds it at the end."""
    form = NormalForm(IN, OUT, scale_delta=draw(OUT) if scaled else None, bias=rule)
    layer = nn.Linear(IN, OUT)
    layer.weight.data, layer.bias.data = draw(OUT, IN), draw(OUT) + 3
    layer.skip_bias_add = separate
    site = Site(0, SimpleNamespace(base_layer=layer), (0, OUT), (0, IN), (0, OUT))  # type: ignore[arg-type]
    x = draw(5, IN)
    shift = output_shift(site, form)
    output = nn.functional.linear(x, layer.weight, None if separate else layer.bias)
    output = output * (1 + (draw(OUT) if scaled else 0)) + (0 if shift is None else shift)
    actual = output + (layer.bias if separate else 0)
    expected = reference.apply(form, {}, x, layer.weight, layer.bias)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
