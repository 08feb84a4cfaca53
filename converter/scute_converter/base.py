"""What a few methods must know about the base model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

# ``(out, in)`` of every linear layer by its Hugging Face module path, in the order of ``named_modules()``, the output
# head included.
BaseShapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Base:
    """The base model that an adapter is loaded for, as far as it is known.

    ``shapes``: empty if not known. ``dtype``: of the base weights, or None if not known; fp32 if they are quantised,
    because PEFT casts its buffers to the type of the base weights only if that is a floating-point type.
    """

    shapes: BaseShapes = field(default_factory=dict)
    dtype: torch.dtype | None = None
