"""The tensors of an adapter by name, each of which is consumed once or the adapter is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from threading import Lock

import torch

from scute_converter import parallel
from scute_converter.errors import AdapterError
from scute_converter.finite import is_finite
from scute_converter.keys import Key, split_key
from scute_converter.normal_form import NormalForm

# Numbers that may be worked out of smaller tensors: rank 4096 for 32768 features, and rank 64 for all layers of 70B.
MOST_OF_ONE = 1 << 27
MOST_OF_ALL = 1 << 30

_TILE = 1 << 16  # numbers of a matrix that are transposed at a time

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class Checkpoint:
    """The tensors of one adapter by module path and parameter.

    ``parameters`` counts the elements that were taken so far and trained. ``wrappers``: names of training wrappers
    that were removed from keys. ``asked``: the parameters that the method has looked for, there or not.
    """

    def __init__(self, adapter: str, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.adapter = adapter
        self.parameters = 0
        self.wrappers: set[str] = set()
        self.asked: set[str] = set()
        self._lock = Lock()
        self._reserved = 0
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
        self.asked.update(suffixes)
        return list(dict.fromkeys(key.module for key in self._tensors if key.suffix in suffixes))

    def each(self, modules: Sequence[str], convert: Callable[[str], NormalForm]) -> dict[str, NormalForm]:
        """The forms of the modules, made side by side. ``convert`` takes the tensors of its module only."""
        return dict(zip(modules, parallel.each(convert, modules), strict=True))

    def has(self, module: str, suffix: str) -> bool:
        self.asked.add(suffix)
        return Key(module, suffix) in self._tensors

    def take(
        self, module: str, suffix: str, dims: int, *, trained: bool = True, maybe_empty: bool = False
    ) -> torch.Tensor:
        """A tensor as fp32 on the CPU, contiguous, a copy (the file may be replaced while the adapter is served).

        ``maybe_empty``: one dimension, of several, may be 0.
        """
        tensor = self._take(module, suffix, dims, trained=trained, maybe_empty=maybe_empty)
        return tensor.to("cpu", torch.float32, copy=True).contiguous()

    def take_transposed(self, module: str, suffix: str, *, trained: bool = True) -> torch.Tensor:
        """The same for a matrix, its rows as columns."""
        matrix = self._take(module, suffix, 2, trained=trained).cpu()
        rows, columns = matrix.shape
        transposed = torch.empty(columns, rows, dtype=torch.float32, device="cpu")
        # A few rows at a time, so that what is read column by column stays in the cache of the core.
        step = max(1, _TILE // columns)
        for first in range(0, rows, step):
            transposed[:, first : first + step].copy_(matrix[first : first + step].T)
        return transposed

    def _take(self, module: str, suffix: str, dims: int, *, trained: bool, maybe_empty: bool = False) -> torch.Tensor:
        tensor = self.take_stored(module, suffix, maybe_empty=maybe_empty)
        self._check_dims(module, suffix, tensor, dims)
        if trained:
            with self._lock:
                self.parameters += tensor.numel()
        return tensor

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

    def reserve(self, module: str, suffix: str, *shape: int) -> None:
        """To be called before numbers are worked out that may be far more than those they are made of. Refuses a
        tensor of ``shape``, or all of them together, if no adapter that is served has as many."""
        numbers = math.prod(shape)
        with self._lock:
            self._reserved += numbers
            total = self._reserved
        if numbers > MOST_OF_ONE or total > MOST_OF_ALL:
            problem = f"stands for a tensor of shape {shape}, {numbers} numbers, and {total} with those before it"
            remedy = f"{MOST_OF_ONE} and {MOST_OF_ALL} at most are served: train with smaller ranks"
            raise self.error(module, suffix, problem, remedy)

    def converted(self, module: str, suffix: str, tensor: torch.Tensor) -> torch.Tensor:
        """What was made of a tensor as contiguous fp32; refused if it is not finite there."""
        tensor = tensor.float().contiguous()
        if not is_finite(tensor):
            problem = "overflows with the scales of the config"
            raise self.error(module, suffix, problem, "correct them in adapter_config.json")
        return tensor

    def error(self, module: str, suffix: str, problem: str, remedy: str) -> AdapterError:
        return AdapterError(self.adapter, f"tensor {Key(module, suffix)}", problem, remedy)
