"""The weight that SGLang's own quantised layers serve, as read through their GEMM.

``test_quantised_bases.py`` runs this file in a process of its own: SGLang quantises activations and unpacks int4 by
Triton kernels, which on a CPU need Triton's interpreter from the start.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from scute_patches import sgl_kernel

sgl_kernel.install()

from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_triton  # noqa: E402
from sglang.kernels.ops.quantization.fp8_kernel import static_quant_fp8  # noqa: E402
from sglang.srt.hardware_backend.gpu.quantization import awq_kernels  # noqa: E402
from sglang.srt.layers.linear import ReplicatedLinear  # noqa: E402
from sglang.srt.layers.quantization import utils as quantisation  # noqa: E402
from sglang.srt.layers.quantization.awq.awq import AWQConfig  # noqa: E402
from sglang.srt.layers.quantization.base_config import QuantizationConfig  # noqa: E402
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8Config  # noqa: E402
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config  # noqa: E402

from awq import GROUP, random_awq  # noqa: E402
from scute_sglang.layers import wrap  # noqa: E402
from scute_sglang.sites import Site  # noqa: E402
from scute_sglang.weights import weight_as_served  # noqa: E402

IN, OUT = 96, 80
# The layers answer in fp16, and unpack in it.
TOLERANCE = 2 * 2**-11


def quantised(config: QuantizationConfig) -> ReplicatedLinear:
    return ReplicatedLinear(IN, OUT, bias=False, params_dtype=torch.float16, quant_config=config)


def served(layer: ReplicatedLinear, rows: tuple[int, int] = (0, OUT)) -> torch.Tensor:
    """As of a site of some of the layer's outputs."""
    wrapper = wrap(layer, None)  # type: ignore[arg-type]  # its operators are not run
    assert wrapper is not None
    site = Site(0, wrapper, (0, rows[1] - rows[0]), (0, IN), rows)
    assert not site.layer.shows_weight
    assert torch.equal(weight_as_served(site, 5), weight_as_served(site)[:, :5])
    return weight_as_served(site).float()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_fp8_with_a_scale_per_token() -> None:
    layer = quantised(W8A8Fp8Config())
    original = torch.randn(OUT, IN)
    layer.weight.data.copy_(original)
    layer.quant_method.process_weights_after_loading(layer)
    expected = (layer.weight.float() * layer.weight_scale).T
    close(served(layer), expected)
    assert (
        expected - original.half()
    ).abs().max() > 10 * TOLERANCE * expected.abs().max()  # not the weight of the file


@pytest.mark.parametrize("scale", [0.00137, 0.031, 0.7])
def test_fp8_with_a_static_scale(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is beyond the range of the first scale, and between the steps of all three. SGLang puts the
    weight on one scale by a CUDA kernel; on inputs it runs the Triton kernel."""
    monkeypatch.setattr(quantisation, "scaled_fp8_quant", static_quant_fp8)
    config = ModelOptFp8Config(is_checkpoint_fp8_serialized=True, packed_modules_mapping={})
    layer = quantised(config)
    layer.weight.data.copy_((100 * torch.randn(OUT, IN)).to(torch.float8_e4m3fn))
    layer.weight_scale.data.fill_(0.013)
    layer.input_scale.data.fill_(scale)
    layer.quant_method.process_weights_after_loading(layer)
    close(served(layer), (layer.weight.float() * layer.weight_scale).T)


def test_awq(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has no AWQ on a CPU without AMX; the Triton kernel is the one that it runs on ROCm."""
    monkeypatch.setattr(awq_kernels, "awq_dequantize", awq_dequantize_triton)
    layer = quantised(AWQConfig(weight_bits=4, group_size=GROUP, zero_point=True))
    packed, expected = random_awq(OUT, IN, torch.Generator().manual_seed(1))
    for name, tensor in packed.items():
        getattr(layer, name).data.copy_(tensor)
    layer.quant_method.process_weights_after_loading(layer)
    close(served(layer), expected)
    for rows in pairwise((0, 32, 56, OUT)):
        close(served(layer, rows), expected[slice(*rows)])
