"""The identity of what is served: a hash of content, independent of names, paths and methods."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def digest(content: Any) -> str:
    """Hex BLAKE2b-256 of tensors, numbers, strings, None, and mappings and dataclasses of them.

    The order of a mapping does not count, nor does a dataclass field that is declared ``compare=False``.
    """
    hasher = hashlib.blake2b(digest_size=32)
    _update(hasher, content)
    return hasher.hexdigest()


def _update(hasher: hashlib.blake2b, content: Any) -> None:
    if isinstance(content, torch.Tensor):
        hasher.update(f"{content.dtype}{tuple(content.shape)}".encode())
        hasher.update(content.numpy().data)
    elif isinstance(content, Mapping):
        for key in sorted(content):
            _update(hasher, key)
            _update(hasher, content[key])
    elif is_dataclass(content):
        hasher.update(type(content).__name__.encode())
        for field in fields(content):
            if field.compare:
                _update(hasher, getattr(content, field.name))
    else:
        hasher.update(f"{content!r};".encode())
