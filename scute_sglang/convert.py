"""``scute convert``: an adapter in Scute's own format, all of its slots worked out with the base weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from scute_converter import native
from scute_converter.loading import load
from scute_converter.normal_form import Adapter, NormalForm
from scute_sglang import fit
from scute_sglang.base_folder import BaseFolder


def convert(
    source: Path,
    destination: Path,
    base: BaseFolder,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> Adapter:
    """Load ``source``, make every slot plain, and write ``destination`` (``native.write``); returns what was written.

    ``progress``: goes through the modules and may show how far they are. Raises AdapterError if the adapter is not
    served on ``base``, BaseModelError if a weight that is needed cannot be read, OSError if it cannot be written.
    """
    name = source.resolve().name
    adapter = load(source, name, base.shapes, base.dtype)
    fit.check(name, adapter, base.projections, max_rank=None)  # the bound of the rank is an option of the server
    for path, stored in adapter.payloads.items():
        weight = base.weight(path)
        if not torch.equal(stored.to(weight.dtype), weight):
            raise fit.other_payload(name, path)
    check_base_samples(name, adapter, base)
    forms = {path: _plain(path, adapter.forms[path], base) for path in progress(adapter.forms)}
    plain = replace(adapter, forms=forms, payloads={})
    native.write(plain, destination, name)
    return plain


def check_base_samples(name: str, adapter: Adapter, base: BaseFolder) -> None:
    """Raises AdapterError if slots were made from the weights of another base model (``NormalForm.base_sample``)."""
    for path, form in adapter.forms.items():
        if form.base_sample is not None:
            held = base.weight(path)[0, : len(form.base_sample)]
            fit.check_base_sample(name, path, form.base_sample, held, exact=True)


def with_sizes(form: NormalForm, projection: fit.Projection) -> NormalForm:
    """The form with both sizes of its projection, of which the adapter itself may know one only."""
    return replace(form, in_features=projection.in_features, out_features=projection.out_features)


def _plain(path: str, form: NormalForm, base: BaseFolder) -> NormalForm:
    """The form with full sizes and nothing that waits for the base weight."""
    form = with_sizes(form, base.projections[path])
    if form.fold is None and form.deferred is None:
        return form
    weight = base.weight(path)
    if form.fold is not None:
        form = form.fold.fold(form, weight)
    if form.deferred is not None:
        form = form.deferred.resolve(form, form.deferred.measure(weight, form))
    return replace(form, base_sample=weight[0, : native.SAMPLE].float())
