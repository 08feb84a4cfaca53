"""Base weights as SGLang serves them, for the slots that need them."""

from __future__ import annotations

import torch

from scute_sglang.sites import Projection, Range, Site

PROBE_ROWS = 512  # rows of the identity per pass: enough for a GEMM, little memory
# Times the static scale of a layer's inputs, what FP8, int8 and NVFP4 (as 6 in a block with scale 16) hold exactly.
PROBE_STEPS = 96


def weight_as_served(site: Site, inputs: int | None = None) -> torch.Tensor:
    """The effective weight of a site: ``(out, in)``, this rank's shard, on the layer's device.

    ``inputs``: how many of the input features, from the first on; all if None. Unquantised layers show it directly. For
    any other, rows of the identity go through the layer's own quantised GEMM, so that what comes out is the weight that
    requests really meet, in whatever format it is stored. Its inputs may be quantised too: with a scale of each row or
    block, which fits the only number in it, or with a static one, for which the number is chosen.
    """
    layer = site.layer.base_layer
    start, stop = site.local_rows
    real = site.cols[1] - site.cols[0] if inputs is None else inputs  # SGLang may have padded the inputs behind them
    if site.layer.shows_weight:
        return layer.weight[start:stop, :real]
    width = getattr(layer, "input_size_per_partition", layer.input_size)
    device = next(layer.parameters()).device
    static = getattr(layer, "input_scale", None)
    unit = 1.0 if static is None else PROBE_STEPS * static.max().item()
    columns = []
    for first in range(0, real, PROBE_ROWS):
        rows = min(PROBE_ROWS, real - first)
        probe = torch.zeros(rows, width, dtype=layer.params_dtype, device=device)
        probe[torch.arange(rows), first + torch.arange(rows)] = unit
        columns.append(layer.quant_method.apply(layer, probe, None)[:, start:stop].T / unit)
    return torch.cat(columns, dim=1)


def held_weight(projection: Projection) -> torch.Tensor:
    """The effective weight of a projection as far as this rank holds it: ``(out, in)`` of the whole projection, a copy
    in fp32 on the layer's device. Where other ranks hold it, there are zeros, so that the ranks' sum is the weight."""
    device = next(projection.sites[0].layer.base_layer.parameters()).device
    held = torch.zeros(projection.out_features, projection.in_features, device=device)
    for site in projection.sites:
        if site.rows[0] < site.rows[1] and site.cols[0] < site.cols[1]:  # else only padding
            held[slice(*site.rows), slice(*site.cols)] = weight_as_served(site)
    return held


def sharded_ranges(projection: Projection) -> list[tuple[Range, Range]]:
    """Output and input features of each site that this rank computes."""
    return [(site.rows, site.cols) for site in projection.sites]
