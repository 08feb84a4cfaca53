"""The files of an adapter, and the tensors in them, each of which is consumed once or the adapter is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import safetensors
import torch

from scute_converter import parallel
from scute_converter.errors import AdapterError
from scute_converter.finite import is_finite
from scute_converter.keys import Key, split_key
from scute_converter.normal_form import NormalForm

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
BIN = "adapter_model.bin"

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def read_folder(adapter: str, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the tensors of a folder that PEFT's ``save_pretrained`` wrote. Safetensors are memory-mapped."""
    if not (folder / CONFIG).exists():
        inner = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG}"))
        remedy = f"give the path of the folder {inner[0]} in it" if inner else "give a folder saved by PEFT"
        raise AdapterError(adapter, str(folder), f"has no {CONFIG}", remedy)
    config = read_json(adapter, folder, CONFIG)
    if (folder / SAFETENSORS).exists():
        return config, read_safetensors(adapter, folder, SAFETENSORS)
    if (folder / BIN).exists():
        return config, _read_bin(adapter, _inside(adapter, folder, BIN))
    raise AdapterError(adapter, str(folder), f"has neither {SAFETENSORS} nor {BIN}", "copy the weights into it")


def _inside(adapter: str, folder: Path, name: str) -> Path:
    """The path of a file of the folder. A link may lead out of it only into the blobs of a Hugging Face cache, whose
    layout is ``models--x/snapshots/<revision>`` beside ``models--x/blobs``."""
    target, folder = (folder / name).resolve(), folder.resolve()
    homes = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if not any(target.is_relative_to(home) for home in homes):
        raise AdapterError(adapter, name, f"is a link out of the folder, to {target}", "copy the file into the folder")
    return target


def read_json(adapter: str, folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder."""
    file = _inside(adapter, folder, name)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(adapter, name, f"is not JSON ({error})", "copy the file again") from error
    if not isinstance(content, dict):
        raise AdapterError(adapter, name, "is not a JSON object", "copy the file again")
    return content


def read_safetensors(adapter: str, folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors in a file of the folder, memory-mapped."""
    file = _inside(adapter, folder, name)
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, safetensors.SafetensorError) as error:
        problem = f"is broken or cut off ({error})"
        raise AdapterError(adapter, name, problem, "download or copy the file again") from error


def _read_bin(adapter: str, file: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises whatever it likes
        problem = f"is broken, cut off, or more than tensors ({error})"
        raise AdapterError(adapter, BIN, problem, f"save the adapter as {SAFETENSORS}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(tensor, torch.Tensor) for key, tensor in tensors.items()
    ):
        raise AdapterError(adapter, BIN, "is not a dict of tensors", f"save the adapter as {SAFETENSORS}")
    return tensors


class Checkpoint:
    """The tensors of one adapter by module path and parameter.

    ``parameters`` counts the elements that were taken so far and trained. ``wrappers``: names of training wrappers
    that were removed from keys.
    """

    def __init__(self, adapter: str, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.adapter = adapter
        self.parameters = 0
        self.wrappers: set[str] = set()
        self._lock = Lock()
        self._tensors: dict[Key, torch.Tensor] = {}
        for name, tensor in tensors.items():
            split = split_key(name, prefix)
            self.wrappers |= split.wrappers
            key = Key(split.module, split.suffix)
            if key in self._tensors:
                raise AdapterError(adapter, f"tensor {name}", f"is stored twice, as {key}", "remove one of the two")
            if wrapper := next((part for part in key.module.split(".") if part.startswith("_")), None):
                problem = f"{wrapper} is no module of a Hugging Face model and no known training wrapper"
                raise AdapterError(adapter, f"tensor {name}", problem, "remove it from the keys")
            self._tensors[key] = tensor

    def left(self) -> list[Key]:
        """The tensors that were not taken yet."""
        return list(self._tensors)

    def modules(self, *suffixes: str) -> list[str]:
        """Paths of the modules that have one of the parameters, in the order of the file."""
        return list(dict.fromkeys(key.module for key in self._tensors if key.suffix in suffixes))

    def each(self, modules: Sequence[str], convert: Callable[[str], NormalForm]) -> dict[str, NormalForm]:
        """The forms of the modules, made side by side. ``convert`` takes the tensors of its module only."""
        return dict(zip(modules, parallel.each(convert, modules), strict=True))

    def has(self, module: str, suffix: str) -> bool:
        return Key(module, suffix) in self._tensors

    def take(
        self, module: str, suffix: str, dims: int, *, trained: bool = True, maybe_empty: bool = False
    ) -> torch.Tensor:
        """A tensor as fp32 on the CPU, contiguous, a copy (the file may be replaced while the adapter is served).

        ``maybe_empty``: one dimension, of several, may be 0.
        """
        tensor = self.take_stored(module, suffix, maybe_empty=maybe_empty)
        self._check_dims(module, suffix, tensor, dims)
        if trained:
            with self._lock:
                self.parameters += tensor.numel()
        return tensor.to("cpu", torch.float32, copy=True).contiguous()

    def take_stored(self, module: str, suffix: str, *, maybe_empty: bool = False) -> torch.Tensor:
        """A tensor as the file holds it; it is checked to be floating-point, finite and not empty."""
        tensor = self._pop(module, suffix)
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            problem = f"is of type {tensor.dtype}, {tensor.layout}"
            raise self.error(module, suffix, problem, "save the adapter as dense floating-point tensors")
        if tensor.numel() == 0 and not (maybe_empty and tensor.dim() > 1 and list(tensor.shape).count(0) == 1):
            problem = f"is empty {tuple(tensor.shape)}"
            raise self.error(module, suffix, problem, "gather the sharded weights (ZeRO-3) before saving")
        if not is_finite(tensor):
            raise self.error(module, suffix, "holds NaN or infinity", "save the adapter from a sound checkpoint")
        return tensor

    def take_integers(self, module: str, suffix: str, dims: int) -> torch.Tensor:
        """Indices as int64 on the CPU, contiguous, a copy. They were not trained."""
        tensor = self._pop(module, suffix)
        if tensor.dtype not in _INTEGERS or tensor.layout != torch.strided:
            problem = f"is of type {tensor.dtype}, {tensor.layout}, and should hold integers"
            raise self.error(module, suffix, problem, "save the adapter again with PEFT")
        if tensor.numel() == 0:
            raise self.error(module, suffix, f"is empty {tuple(tensor.shape)}", "save the adapter again with PEFT")
        self._check_dims(module, suffix, tensor, dims)
        return tensor.to("cpu", torch.int64, copy=True).contiguous()

    def _pop(self, module: str, suffix: str) -> torch.Tensor:
        if not self.has(module, suffix):
            raise self.error(module, suffix, "is missing", "save the whole adapter again")
        return self._tensors.pop(Key(module, suffix)).detach()

    def _check_dims(self, module: str, suffix: str, tensor: torch.Tensor, dims: int) -> None:
        if tensor.dim() != dims:
            problem = f"has {tensor.dim()} dimensions {tuple(tensor.shape)}, {dims} are served"
            raise self.error(module, suffix, problem, "only linear layers and embeddings can be adapted")

    def converted(self, module: str, suffix: str, tensor: torch.Tensor) -> torch.Tensor:
        """What was made of a tensor as contiguous fp32; refused if it is not finite there."""
        tensor = tensor.float().contiguous()
        if not is_finite(tensor):
            problem = "overflows with the scales of the config"
            raise self.error(module, suffix, problem, "correct them in adapter_config.json")
        return tensor

    def error(self, module: str, suffix: str, problem: str, remedy: str) -> AdapterError:
        return AdapterError(self.adapter, f"tensor {Key(module, suffix)}", problem, remedy)
