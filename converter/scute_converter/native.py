"""Scute's own format: the normal form of an adapter as a folder, ready to be served (``docs/format.md``).

``scute_adapter.json`` says what each module is, ``scute_adapter.safetensors`` holds its slots as ``<module>/<slot>``
and the shared bases as ``bases/<key>/a`` and ``bases/<key>/b``. Nothing in it depends on PEFT.
"""

from __future__ import annotations

import json
import reprlib
import shutil
import typing
import uuid
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from scute_converter import parallel
from scute_converter.config import has_type
from scute_converter.digest import digest
from scute_converter.errors import AdapterError
from scute_converter.files import MOST_HEADER, read_json, read_safetensors
from scute_converter.finite import is_finite
from scute_converter.normal_form import Adapter, Basis, Bias, NormalForm, Pair, Rotation, SharedPair

HEADER = "scute_adapter.json"
WEIGHTS = "scute_adapter.safetensors"
FORMAT = "scute-adapter"
VERSION = 1
BASES = "bases"
SAMPLE = 8  # numbers of the base weight by which another base model is told

SLOTS = (
    "a",
    "b",
    "d",
    "e",
    "scale_delta",
    "rotation_delta",
    "bias_replace",
    "bias_add",
    "bias_scale_delta",
    "base_sample",
)


@dataclass(frozen=True, kw_only=True)
class Header:
    """``scute_adapter.json``. ``source``: what it was converted from, for people. ``parameters``: how many numbers were
    trained; those of the slots if None. ``modules``: by Hugging Face module path, each as ``Module``."""

    format: str
    version: int
    method: str
    modules: dict
    source: str = ""
    parameters: int | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Module:
    """``bias_scaled``: see ``Bias.scaled``. ``basis``: key of the shared basis that ``d`` and ``e`` stand around."""

    in_features: int
    out_features: int
    bias_scaled: bool = False
    basis: str | None = None


Record = TypeVar("Record", Header, Module)


def read(name: str, folder: Path) -> Adapter:
    """Load a folder in this format. ``name``: of the adapter, for messages. Raises AdapterError."""
    raw = read_json(name, folder, HEADER, MOST_HEADER)
    if raw.get("format") != FORMAT or raw.get("version") != VERSION:
        problem = f"format {raw.get('format')!r}, version {raw.get('version')!r}: read is {FORMAT!r}, version {VERSION}"
        raise AdapterError(name, HEADER, problem, "convert the source again with this version of Scute")
    header = _record(name, "", raw, Header)
    if not header.modules:
        raise AdapterError(name, HEADER, "has no modules", "convert the source again")
    tensors = _Tensors(name, read_safetensors(name, folder, WEIGHTS))
    modules = {path: _record(name, f"modules[{path!r}]: ", entry, Module) for path, entry in header.modules.items()}
    named = dict.fromkeys(module.basis for module in modules.values() if module.basis is not None)
    bases = {key: _basis(tensors, key) for key in named}
    # The key of a basis in memory is its content, whatever the file calls it, since adapters share bases by key.
    keys = {key: digest(basis) for key, basis in bases.items()}
    paths = list(modules)
    made = parallel.each(lambda path: _form(tensors, path, modules[path], bases, keys), paths)
    forms = dict(zip(paths, made, strict=True))
    tensors.check_nothing_left(modules)
    content = {keys[key]: basis for key, basis in bases.items()}
    return Adapter(
        method=header.method,
        forms=forms,
        bases=content,
        digest=digest({"forms": forms, "bases": dict.fromkeys(content)}),
        parameters=tensors.numbers if header.parameters is None else header.parameters,
        notes=tuple(header.notes),
    )


def write(adapter: Adapter, folder: Path, source: str) -> None:
    """Write an adapter whose slots are all plain. ``folder`` must not exist, or be empty; it appears whole or not at
    all. ``source``: what it was converted from. Raises AdapterError if nothing is left to write, OSError if it cannot.
    """
    assert not adapter.payloads
    tensors = {f"{BASES}/{key}/{side}": getattr(basis, side) for key, basis in adapter.bases.items() for side in "ab"}
    modules = {}
    for path, form in adapter.forms.items():
        slots = _slots(form)
        if not slots:
            continue  # a pair of rank 0 and nothing else
        tensors.update({f"{path}/{slot}": tensor for slot, tensor in slots.items()})
        modules[path] = {"in_features": form.in_features, "out_features": form.out_features}
        if form.bias.scaled:
            modules[path]["bias_scaled"] = True
        if form.shared is not None:
            modules[path]["basis"] = form.shared.basis
    if not modules:
        raise AdapterError(source, "weights", "the adapter has no effect: there is nothing to convert", "train it")
    header = {
        "format": FORMAT,
        "version": VERSION,
        "method": adapter.method,
        "source": source,
        "parameters": adapter.parameters,
        "notes": list(adapter.notes),
        "modules": modules,
    }
    unfinished = folder.absolute().with_name(f".{folder.absolute().name}.{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        (unfinished / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        # A copy of each: safetensors refuses tensors that share memory, as those of tied modules may.
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, unfinished / WEIGHTS)
        # Who may read the header may read the weights: safetensors lets nobody else.
        (unfinished / WEIGHTS).chmod((unfinished / HEADER).stat().st_mode & 0o777)
        unfinished.rename(folder.absolute())  # takes the place of an empty folder only
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def _slots(form: NormalForm) -> dict[str, torch.Tensor]:
    assert form.deferred is None and form.fold is None
    slots = {
        "scale_delta": form.scale_delta,
        "bias_replace": form.bias.replace,
        "bias_add": form.bias.add,
        "bias_scale_delta": form.bias.scale_delta,
    }
    if form.pair is not None and form.pair.rank:
        slots |= {"a": form.pair.a, "b": form.pair.b}
    if form.shared is not None:
        slots |= {"d": form.shared.d, "e": form.shared.e}
    if form.rotation is not None:
        slots["rotation_delta"] = form.rotation.delta
    if form.base_sample is not None and any(tensor is not None for tensor in slots.values()):
        slots["base_sample"] = form.base_sample
    return {slot: tensor for slot, tensor in slots.items() if tensor is not None}


def _record(adapter: str, where: str, raw: Any, record: type[Record]) -> Record:
    """``raw``, an object of the header, as a record; ``where``: of it in the header, for messages."""
    if not isinstance(raw, dict):
        raise AdapterError(adapter, HEADER, f"{where}{reprlib.repr(raw)} is no object", "correct it")
    hints, known = typing.get_type_hints(record), {field.name: field for field in fields(record)}
    for name, value in raw.items():
        if name not in known:
            problem = f"{where}field {name} is not known; known are {', '.join(known)}"
            raise AdapterError(adapter, HEADER, problem, "remove or correct it")
        if not has_type(value, hints[name]) or (hints[name] is int and value < 1):
            problem = f"{where}field {name}: {reprlib.repr(value)} is not of type {known[name].type}"
            problem += ", from 1 on" if hints[name] is int else ""
            raise AdapterError(adapter, HEADER, problem, "correct it")
    for name, entry in known.items():
        if entry.default is MISSING and entry.default_factory is MISSING and name not in raw:
            raise AdapterError(adapter, HEADER, f"{where}field {name} is missing", "add it")
    return record(**raw)


def _basis(tensors: _Tensors, key: str) -> Basis:
    a = tensors.take(f"{BASES}/{key}", "a", None, None)
    return Basis(a, tensors.take(f"{BASES}/{key}", "b", a.shape[0], None))


def _form(
    tensors: _Tensors, path: str, module: Module, bases: Mapping[str, Basis], keys: Mapping[str, str]
) -> NormalForm:
    inputs, outputs = module.in_features, module.out_features
    pair = shared = None
    if tensors.has(path, "a") or tensors.has(path, "b"):
        a = tensors.take(path, "a", None, inputs)
        pair = Pair(a, tensors.take(path, "b", a.shape[0], outputs))
    if module.basis is not None:
        basis = bases[module.basis]
        if basis.a.shape[1] < inputs or basis.b.shape[1] < outputs:
            problem = f"the basis {module.basis} is for at most {basis.a.shape[1]} input and {basis.b.shape[1]} output "
            problem += f"features, the module has {inputs} and {outputs}"
            raise AdapterError(tensors.adapter, f"module {path}", problem, "correct the sizes or the basis")
        d = tensors.take(path, "d", basis.a.shape[0])
        shared = SharedPair(keys[module.basis], d, tensors.take(path, "e", outputs))
    form = NormalForm(
        in_features=inputs,
        out_features=outputs,
        pair=pair,
        shared=shared,
        scale_delta=tensors.maybe(path, "scale_delta", outputs),
        rotation=_rotation(tensors, path, inputs) if tensors.has(path, "rotation_delta") else None,
        bias=Bias(
            replace=tensors.maybe(path, "bias_replace", outputs),
            add=tensors.maybe(path, "bias_add", outputs),
            scaled=module.bias_scaled,
            scale_delta=tensors.maybe(path, "bias_scale_delta", outputs),
        ),
        base_sample=tensors.maybe(path, "base_sample", min(SAMPLE, inputs), trained=False),
    )
    if not _slots(form):
        remedy = f"add one of its slots, or remove it from {HEADER}"
        raise AdapterError(tensors.adapter, f"module {path}", f"has no tensors in {WEIGHTS}", remedy)
    return form


def _rotation(tensors: _Tensors, path: str, inputs: int) -> Rotation:
    delta = tensors.take(path, "rotation_delta", None, None, None)
    blocks, rows, columns = delta.shape
    if rows != columns or inputs % rows or blocks not in (1, inputs // rows):
        problem = f"has shape {tuple(delta.shape)}, expected (blocks, k, k) with k a divisor of {inputs} input "
        problem += f"features and {inputs} / k blocks, or one for all positions"
        raise AdapterError(tensors.adapter, f"tensor {path}/rotation_delta", problem, "correct the tensor")
    return Rotation(delta)


class _Tensors:
    """The tensors of a file by module and slot, each of which is taken once or the adapter is refused. ``numbers``:
    how many were taken that an adapter can have trained."""

    def __init__(self, adapter: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.adapter = adapter
        self.numbers = 0
        self._tensors = dict(tensors)
        self._lock = Lock()

    def has(self, path: str, slot: str) -> bool:
        return f"{path}/{slot}" in self._tensors

    def maybe(self, path: str, slot: str, *shape: int | None, trained: bool = True) -> torch.Tensor | None:
        return self.take(path, slot, *shape, trained=trained) if self.has(path, slot) else None

    def take(self, path: str, slot: str, *shape: int | None, trained: bool = True) -> torch.Tensor:
        """A tensor of this shape (``None``: any length but 0) as fp32 on the CPU, contiguous, a copy."""
        name = f"{path}/{slot}"
        if name not in self._tensors:
            partner = {"a": "b", "b": "a", "d": "the basis", "e": "the basis"}[slot]
            raise AdapterError(self.adapter, f"tensor {name}", f"is missing, and {partner} needs it", "add it")
        tensor = self._tensors.pop(name)
        if not tensor.is_floating_point():
            problem = f"is of type {tensor.dtype}"
            raise AdapterError(self.adapter, f"tensor {name}", problem, "store it as floating-point numbers")
        if tensor.dim() != len(shape) or any(
            found == 0 or expected not in (None, found) for found, expected in zip(tensor.shape, shape, strict=True)
        ):
            wanted = ", ".join("any" if length is None else str(length) for length in shape)
            problem = f"has shape {tuple(tensor.shape)}, expected ({wanted})"
            raise AdapterError(self.adapter, f"tensor {name}", problem, f"correct it, or the sizes in {HEADER}")
        tensor = tensor.to("cpu", torch.float32, copy=True).contiguous()
        if not is_finite(tensor):
            problem = "holds NaN, infinity or a number beyond fp32"
            raise AdapterError(self.adapter, f"tensor {name}", problem, "write it from a sound checkpoint")
        if trained and not path.startswith(f"{BASES}/"):
            with self._lock:
                self.numbers += tensor.numel()
        return tensor

    def check_nothing_left(self, modules: Mapping[str, Module]) -> None:
        for name in self._tensors:
            path, _, slot = name.rpartition("/")
            if path in modules and slot in ("d", "e"):
                problem, remedy = "stands around no shared basis", f"name its basis in {HEADER}"
            elif path in modules:
                problem, remedy = f"is no slot; slots are {', '.join(SLOTS)}", "remove or correct it"
            else:
                problem, remedy = f"belongs to no module of {HEADER}, nor to a basis of one", "add or remove it"
            raise AdapterError(self.adapter, f"tensor {name}", problem, remedy)
