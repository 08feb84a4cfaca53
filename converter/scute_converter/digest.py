"""The identity of what is served: a hash of content, independent of names, paths and methods."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from scute_converter.parallel import each


def digest(content: Any) -> str:
    """Hex SHA-256 of tensors, numbers, strings, None, and mappings and dataclasses of them.

    The order of a mapping does not count, nor does a dataclass field that is declared ``compare=False``.
    """
    parts: list[str | torch.Tensor] = []
    _flatten(content, parts)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    hashes = iter(each(_of_tensor, tensors))
    whole = b"".join(next(hashes) if isinstance(part, torch.Tensor) else part.encode() for part in parts)
    return hashlib.sha256(whole).hexdigest()


def _of_tensor(tensor: torch.Tensor) -> bytes:
    hasher = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    hasher.update(tensor.numpy().data)
    return hasher.digest()


def _flatten(content: Any, parts: list[str | torch.Tensor]) -> None:
    if isinstance(content, torch.Tensor):
        parts.append(content)
    elif isinstance(content, Mapping):
        for key in sorted(content):
            _flatten(key, parts)
            _flatten(content[key], parts)
    elif is_dataclass(content):
        parts.append(type(content).__name__)
        for field in fields(content):
            if field.compare:
                _flatten(getattr(content, field.name), parts)
    else:
        parts.append(f"{content!r};")
