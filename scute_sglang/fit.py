"""Whether an adapter fits a model, by names and shapes: one verdict for the server and for ``scute inspect``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from scute_converter.errors import AdapterError
from scute_converter.files import ADDED_TOKENS
from scute_converter.normal_form import Adapter, NormalForm

# Decoder layers and the vocabulary's two ends; not the layers of vision towers, whose rows are not those of the batch.
LANGUAGE_MODEL = re.compile(r"((language_model|model)\.)*(layers\.\d+\.|embed_tokens$|lm_head$)")

# How Hugging Face names the slices of the modules that SGLang fuses.
SLICE_NAMES = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# ``model_type`` of the families whose linear layers are the seven split projections and the head, and nothing else.
KNOWN_LINEAR_LAYERS = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"})

_OTHER_MODEL = "load it on the model that it was trained for"


class Projection(Protocol):
    """What adapters may name of a model. ``name``: Hugging Face module path. For an embedding ``in_features`` is the
    vocabulary."""

    @property
    def name(self) -> str: ...

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def embedding(self) -> bool: ...

    @property
    def has_bias(self) -> bool: ...


def check(name: str, adapter: Adapter, projections: Mapping[str, Projection], max_rank: int | None) -> None:
    """Raises AdapterError unless every form and payload has a projection of its shape, and every token a row.

    ``name``: of the adapter. ``projections``: of the model, by name. ``max_rank``: of a pair; ``None``: any.
    """
    unknown = [path for path in adapter.forms if path not in projections]
    if unknown:
        known = len(adapter.forms) - len(unknown)
        problem = f"is no module of this model that can serve adapters ({known} of {len(adapter.forms)} modules matched"
        problem += f"; the nearest is {nearest(unknown[0], projections)})"
        remedy = f"{_OTHER_MODEL}, or rename its tensors to the names of this model's modules"
        raise AdapterError(name, f"module {unknown[0]}", problem, remedy)
    for path, form in adapter.forms.items():
        _check_form(name, projections[path], form, max_rank)
    for path, stored in adapter.payloads.items():
        if path not in projections:
            found = nearest(path, projections)
            problem = f"the file holds its weight, but the model has no such module (the nearest is {found})"
            raise AdapterError(name, f"module {path}", problem, _OTHER_MODEL)
        projection = projections[path]
        shape = (projection.out_features, projection.in_features)
        if tuple(stored.shape) != (shape[::-1] if projection.embedding else shape):
            raise other_payload(name, path)
    for projection in projections.values():
        beyond = [token for token, number in adapter.added_tokens.items() if number >= projection.in_features]
        if projection.embedding and beyond:
            problem = f"{len(beyond)} of its tokens ({beyond[0]!r}, …) are beyond the model's {projection.in_features}"
            raise AdapterError(name, ADDED_TOKENS, problem, "train without adding tokens, or merge it")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known module that ``name`` most likely means, ``"none"`` if there is none."""
    known = list(known)
    leaf = name.rpartition(".")[2]
    same_leaf = [path for path in known if path.rpartition(".")[2] == leaf]
    matches = difflib.get_close_matches(name, same_leaf or known, n=1, cutoff=0.0)
    return matches[0] if matches else "none"


def other_payload(name: str, path: str) -> AdapterError:
    """The refusal of a whole weight beside the adapter that is not the base's."""
    problem = "the file holds its whole weight, which differs from the base model's and is not served"
    remedy = "train without modules_to_save and without resizing the vocabulary, or merge it"
    return AdapterError(name, f"module {path}", problem, remedy)


def check_base_sample(name: str, path: str, sample: torch.Tensor, held: torch.Tensor, *, exact: bool) -> None:
    """Raises AdapterError if the base weight is not the one that the slots of a converted module were made from.

    ``sample``: ``NormalForm.base_sample``, as far as ``held`` reaches. ``held``: the same numbers of the base weight
    that is served, any float dtype and device. ``exact``: whether they must be equal in that dtype; a quantised weight
    may be off by 10 % of the sample's length.
    """
    sample = sample.to(held.device)
    if exact:
        same = torch.equal(sample.to(held.dtype), held)
    else:
        same = bool((sample - held.float()).norm() <= 0.1 * sample.norm())
    if not same:
        problem = "was converted for another base model: the first row of the base weight is not that of base_sample"
        raise AdapterError(name, f"module {path}", problem, "convert the source again with --base set to this model")


def _check_form(name: str, projection: Projection, form: NormalForm, max_rank: int | None) -> None:
    where = f"module {projection.name}"
    for side, found, expected in (
        ("input", form.in_features, projection.in_features),
        ("output", form.out_features, projection.out_features),
    ):
        if found not in (0, expected):  # 0: no tensor of the adapter has that length
            raise AdapterError(
                name, where, f"made for {found} {side} features, but the model has {expected}", _OTHER_MODEL
            )
    if form.rotation is not None and projection.in_features % form.rotation.block:
        problem = f"rotates blocks of {form.rotation.block} input features, which do not divide the model's"
        raise AdapterError(name, where, f"{problem} {projection.in_features}", _OTHER_MODEL)
    beyond_lora = (form.shared, form.rotation, form.scale_delta, form.deferred, form.fold, form.base_sample)
    if projection.embedding and any(slot is not None for slot in beyond_lora):
        remedy = f"train without {projection.name} as target"
        raise AdapterError(name, where, "only plain LoRA is served on embeddings", remedy)
    if form.bias.replace is not None and not projection.has_bias:
        raise AdapterError(name, where, "it replaces a bias of the base layer, which has none", _OTHER_MODEL)
    rank = max(
        0 if form.pair is None else form.pair.rank,
        0 if form.shared is None else form.shared.d.numel(),
        0 if form.fold is None else form.fold.rank,
    )
    if max_rank is not None and rank > max_rank:
        remedy = f"start the server with --max-lora-rank {rank}"
        raise AdapterError(name, where, f"rank {rank} exceeds the server's {max_rank}", remedy)
