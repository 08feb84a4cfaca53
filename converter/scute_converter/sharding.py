"""The part of a normal form that one rank of a tensor-parallel server serves."""

from __future__ import annotations

from dataclasses import replace

import torch

from scute_converter.normal_form import Bias, NormalForm, Pair, Rotation, SharedPair


def shard(form: NormalForm, rows: tuple[int, int], cols: tuple[int, int]) -> NormalForm:
    """The form of output features ``rows`` and input features ``cols``, half-open ranges of the full projection.

    The outputs of shards of the input are partial sums, and biases belong to one of them only: the caller drops
    ``bias`` on the others. A shared basis stays whole (``d`` and ``e`` refer to it); the caller reads it from
    ``(cols[0], rows[0])`` on. What waits for the whole weight must be folded before, and ``base_sample``, which is of
    the whole form, is dropped. Raises ValueError if the rotation mixes features of two shards.
    """
    assert form.fold is None
    return NormalForm(
        in_features=cols[1] - cols[0],
        out_features=rows[1] - rows[0],
        pair=form.pair and Pair(_cut(form.pair.a, cols), _cut(form.pair.b, rows)),
        shared=form.shared and SharedPair(form.shared.basis, form.shared.d, _cut(form.shared.e, rows)),
        scale_delta=None if form.scale_delta is None else _cut(form.scale_delta, rows),
        rotation=form.rotation and _cut_rotation(form.rotation, cols),
        bias=Bias(
            replace=None if form.bias.replace is None else _cut(form.bias.replace, rows),
            add=None if form.bias.add is None else _cut(form.bias.add, rows),
            scaled=form.bias.scaled,
            scale_delta=None if form.bias.scale_delta is None else _cut(form.bias.scale_delta, rows),
        ),
        deferred=form.deferred and form.deferred.shard(rows, cols),
    )


def _cut(tensor: torch.Tensor, features: tuple[int, int]) -> torch.Tensor:
    return tensor[..., features[0] : features[1]].contiguous()


def _cut_rotation(rotation: Rotation, cols: tuple[int, int]) -> Rotation:
    first, last = cols
    block = rotation.block
    if first % block or last % block:
        raise ValueError(
            f"the rotation has blocks of {block} input features, which input features {first} to {last} of a tensor-"
            f"parallel shard would cut; serve it with fewer ranks"
        )
    if rotation.delta.shape[0] == 1:
        return rotation
    return replace(rotation, delta=rotation.delta[first // block : last // block].contiguous())
