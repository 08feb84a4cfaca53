"""``load``: from a PEFT checkpoint to an ``Adapter``. Whatever is not understood completely is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import scute_converter.methods  # noqa: F401 (registers the methods)
from scute_converter import native
from scute_converter.base import Base, BaseShapes
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig, parse
from scute_converter.digest import digest
from scute_converter.errors import AdapterError, did_you_mean
from scute_converter.files import CONFIG, open_folder, read_added_tokens, read_folder
from scute_converter.keys import Key
from scute_converter.normal_form import Adapter, NormalForm
from scute_converter.registry import METHODS, UNSERVED, Method
from scute_converter.targets import selects, unused_names

# PEFT saves the whole weights of these modules beside the adapter (EMBEDDING_LAYER_NAMES).
_EMBEDDINGS = ("embed_tokens", "lm_head")


def load(
    path: str | Path,
    name: str | None = None,
    base: BaseShapes | None = None,
    base_dtype: torch.dtype | None = None,
) -> Adapter:
    """Load the folder of an adapter: ``adapter_config.json`` and ``adapter_model.safetensors`` or ``.bin``, or
    ``scute_adapter.json`` and ``scute_adapter.safetensors`` (``native.py``).

    ``name``: for messages; the name of the folder if None. ``base``: shapes of the linear layers of the base model,
    and ``base_dtype``: the type of its weights (fp32 if they are quantised); both are needed only by adapters that do
    not store everything (VeRA with ``save_projection=false``). Raises AdapterError.
    """
    folder = open_folder(name or Path(path).name, path)
    name = name or folder.name
    if (folder / native.HEADER).exists():
        if (folder / CONFIG).exists():
            problem = f"holds both {native.HEADER} and {CONFIG}, which may be two adapters"
            raise AdapterError(name, str(folder), problem, "move one of them to a folder of its own")
        return _with_effect_noted(native.read(name, folder))
    config, tensors = read_folder(name, folder)
    adapter = load_tensors(tensors, config, name, base, base_dtype)
    tokens, notes = read_added_tokens(name, folder)
    return replace(adapter, added_tokens=tokens, notes=(*adapter.notes, *notes))


def load_tensors(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    name: str,
    base: BaseShapes | None = None,
    base_dtype: torch.dtype | None = None,
) -> Adapter:
    """The same for an adapter in memory: the tensors as PEFT stores them, ``config`` as in ``adapter_config.json``."""
    method = _method(name, config)
    record = parse(name, config, method.config)
    if record.modules_to_save:
        modules = ", ".join(record.modules_to_save)
        problem = f"whole modules were retrained ({modules}), which is not served"
        raise AdapterError(name, f"field modules_to_save of {CONFIG}", problem, "train without modules_to_save")
    if not tensors:
        raise AdapterError(name, "weights", "there are no tensors", "save the adapter again")

    checkpoint = Checkpoint(name, tensors, method.prefix)
    conversion = method.convert(checkpoint, record, Base(base or {}, base_dtype))
    _check_selection(name, record, conversion.forms)
    payloads = _take_payloads(checkpoint)
    forms, bias_notes = _replace_biases(checkpoint, record, conversion.forms)
    if left := checkpoint.left():
        raise _unconsumed(checkpoint, record, left[0])
    if not forms:
        raise AdapterError(name, "weights", f"no tensor of {conversion.method} was found", "save the adapter again")

    notes = [*conversion.notes, *bias_notes]
    if checkpoint.wrappers:
        notes.append(f"names of training wrappers removed from the keys: {', '.join(sorted(checkpoint.wrappers))}")
    return _with_effect_noted(
        Adapter(
            method=conversion.method,
            forms=forms,
            bases=conversion.bases,
            digest=digest({"forms": forms, "bases": dict.fromkeys(conversion.bases)}),  # keys are digests themselves
            parameters=checkpoint.parameters,
            notes=tuple(notes),
            payloads=payloads,
        )
    )


def _with_effect_noted(adapter: Adapter) -> Adapter:
    """With a note if the adapter changes nothing (a file of Scute's own may have it already)."""
    note = "the adapter has no effect: every change in it is zero"
    if note in adapter.notes or not all(_is_identity(form) for form in adapter.forms.values()):
        return adapter
    return replace(adapter, notes=(*adapter.notes, note))


def _method(adapter: str, config: Mapping[str, Any]) -> Method:
    peft_type = config.get("peft_type")
    if isinstance(peft_type, str) and peft_type in METHODS:
        return METHODS[peft_type]
    reason = UNSERVED.get(str(peft_type), f"is no method that is served{did_you_mean(str(peft_type), METHODS)}")
    remedy = f"served are {', '.join(sorted(METHODS))}"
    raise AdapterError(adapter, f"field peft_type of {CONFIG}", f"{peft_type!r} {reason}", remedy)


def _check_selection(adapter: str, config: MethodConfig, forms: Mapping[str, NormalForm]) -> None:
    """PEFT ignores tensors of modules that its config does not select, so they cannot be served as they are."""
    if config.target_modules in (None, "all-linear"):
        return
    where = f"field target_modules of {CONFIG}"
    for module in forms:
        tied = config.ensure_weight_tying and module.rpartition(".")[2] in _EMBEDDINGS
        try:
            selected = selects(config, module)
        except re.error as error:
            raise AdapterError(adapter, where, f"is no regular expression ({error})", "correct it") from error
        if not selected and not tied:
            problem = f"does not select {module} (with exclude_modules and layers_to_transform), which has tensors"
            if unused := unused_names(config, forms):
                leaves = {path.rpartition(".")[2] for path in forms}
                problem += f", while its {unused[0]!r} selects none{did_you_mean(unused[0], leaves)}"
            raise AdapterError(adapter, where, problem, "correct the field or remove the tensors")


def _take_payloads(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    payloads = {}
    for key in checkpoint.left():
        if key.suffix in ("weight", "base_layer.weight") and key.module.rpartition(".")[2] in _EMBEDDINGS:
            if key.module in payloads:
                raise checkpoint.error(key.module, key.suffix, "is stored twice", "remove one of the two")
            payloads[key.module] = checkpoint.take_stored(key.module, key.suffix)
    return payloads


def _replace_biases(
    checkpoint: Checkpoint, config: MethodConfig, forms: Mapping[str, NormalForm]
) -> tuple[dict[str, NormalForm], list[str]]:
    """Forms with the biases of ``bias="all"`` or ``"lora_only"`` (absolute values) in place of the base's.

    A module that has nothing but a bias gets a form of its own. Whether it is a linear layer is not known here.
    """
    forms = dict(forms)
    if config.bias == "none":
        return forms, []
    keys = [key for key in checkpoint.left() if key.suffix in ("bias", "base_layer.bias")]
    for key in keys:
        bias = checkpoint.take(key.module, key.suffix, dims=1)
        form = forms.get(key.module) or NormalForm(0, bias.shape[0])
        if form.out_features not in (0, bias.shape[0]):
            problem = f"has {bias.shape[0]} elements for {form.out_features} output features"
            raise checkpoint.error(key.module, key.suffix, problem, "save the adapter again")
        if form.bias.replace is not None:
            raise checkpoint.error(key.module, key.suffix, "is stored twice", "remove one of the two")
        forms[key.module] = replace(form, bias=replace(form.bias, replace=bias))
    if keys:
        return forms, []
    # Until 0.20 PEFT lost the biases of "lora_only" when saving; a model without biases has none either.
    return forms, [f"the config says bias={config.bias!r}, but the file holds no biases: the base's are served"]


def _unconsumed(checkpoint: Checkpoint, config: MethodConfig, key: Key) -> AdapterError:
    """Why a tensor that no method took is refused."""
    remedy = "remove it if it does not belong to the adapter"
    prefixes = tuple(method.prefix for method in METHODS.values())
    foreign = any(part.startswith(prefixes) for part in str(key).split("."))
    if key.suffix.startswith("base_layer.") and foreign:
        problem, remedy = "adapts expert parameters (target_parameters), which is not served", "train without them"
    elif "trainable_tokens" in key.suffix:
        problem, remedy = "holds retrained tokens, which are not served", "train without trainable_token_indices"
    elif key.suffix in ("bias", "base_layer.bias") and not foreign:
        problem, remedy = f"is a bias, with bias={config.bias!r}", f"set bias to 'all' in {CONFIG} if it was trained"
    elif key.suffix.endswith("weight") and not foreign:
        problem, remedy = "is a weight of the base model, not of the adapter", "train without modules_to_save"
    elif key.suffix in checkpoint.asked:
        problem = f"is left over: {config.peft_type} has no use for it with the other tensors of the file"
        remedy = "save the whole adapter again"
    else:
        problem = f"is no tensor that {config.peft_type} is known to have{did_you_mean(key.suffix, checkpoint.asked)}"
    return checkpoint.error(key.module, key.suffix, problem, remedy)


def _is_identity(form: NormalForm) -> bool:
    """Whether a form changes nothing. A replaced bias, or what waits for the base weight, may change
    something."""
    if form.deferred is not None or form.fold is not None or form.bias.replace is not None:
        return False
    changes = [form.scale_delta, form.bias.add, form.bias.scale_delta]
    changes += [form.rotation.delta] if form.rotation else []
    changes += [form.pair.b] if form.pair else []
    changes += [form.shared.e * form.shared.d.any()] if form.shared else []
    return not any(change is not None and change.any() for change in changes)
