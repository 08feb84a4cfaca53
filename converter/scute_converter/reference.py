"""The specification of a normal form in plain torch: every kernel and every test is compared with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from scute_converter.normal_form import Basis, NormalForm


def apply(
    form: NormalForm,
    bases: Mapping[str, Basis],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    origin: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """``F(x)`` of one projection, ``(N, out)``.

    ``x``: ``(N, in)``. ``weight``: ``(out, in)`` as PyTorch stores it. ``bias``: ``(out,)`` of the base layer, or None.
    ``origin``: first input and first output feature of a shard, which is where a shared basis is read from.
    """
    if form.fold is not None:
        form = form.fold.fold(form, weight)
    if form.deferred is not None:
        form = form.deferred.resolve(form, form.deferred.measure(weight, form))
    scale = 1 if form.scale_delta is None else 1 + form.scale_delta
    bias = bias if form.bias.replace is None else form.bias.replace
    if bias is not None and form.bias.scale_delta is not None:
        bias = bias * (1 + form.bias.scale_delta)

    rotated = x
    if form.rotation is not None:
        blocks = x.unflatten(-1, (-1, form.rotation.block))
        delta = form.rotation.delta.expand(blocks.shape[1], -1, -1)
        rotated = x + torch.einsum("nbk,bkj->nbj", blocks, delta).flatten(1)
    y = rotated @ weight.T * scale
    if bias is not None:
        y = y + (bias * scale if form.bias.scaled else bias)
    if form.bias.add is not None:
        y = y + form.bias.add
    if form.pair is not None:
        y = y + x @ form.pair.a.T @ form.pair.b
    if form.shared is not None:
        basis, (first_in, first_out) = bases[form.shared.basis], origin
        a = basis.a[:, first_in : first_in + weight.shape[1]]
        b = basis.b[:, first_out : first_out + weight.shape[0]]
        y = y + (x @ a.T * form.shared.d) @ b * form.shared.e
    return y
