"""Base weights as SGLang serves them, for the slots that need them."""

from __future__ import annotations

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

from scute_sglang.sites import Site

PROBE_ROWS = 512  # rows of the identity per pass: enough for a GEMM, little memory


def weight_as_served(site: Site) -> torch.Tensor:
    """The effective weight of a site: ``(out, in)``, this rank's shard, on the layer's device.

    Unquantised layers show it directly. For any other, rows of the identity go through the layer's own quantised
    GEMM, so that what comes out is the weight that requests really meet, in whatever format it is stored.
    """
    layer = site.layer.base_layer
    start, stop = site.local_rows
    real = site.cols[1] - site.cols[0]  # SGLang may have padded the inputs behind them
    plain = isinstance(layer.quant_method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
    if plain and not getattr(layer, "use_intel_amx_backend", False):  # AMX repacks even unquantised weights
        return layer.weight[start:stop, :real]
    width = getattr(layer, "input_size_per_partition", layer.input_size)
    device = next(layer.parameters()).device
    columns = []
    for first in range(0, real, PROBE_ROWS):
        rows = min(PROBE_ROWS, real - first)
        probe = torch.zeros(rows, width, dtype=layer.params_dtype, device=device)
        probe[torch.arange(rows), first + torch.arange(rows)] = 1
        columns.append(layer.quant_method.apply(layer, probe, None)[:, start:stop].T)
    return torch.cat(columns, dim=1)
