"""Registration of an operator with torch: the reference on the CPU, the Triton kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

PLAN = "Tensor tiles, Tensor routes"
MEMORY = "Tensor arena, Tensor table"


def register(
    name: str, schema: str, reference: Callable[..., None], kernel: Callable[..., None]
) -> Callable[..., None]:
    """Makes ``torch.ops.scute.<name>``, which writes to the tensors that ``schema`` marks and returns nothing.

    The fake implementation lets it go through ``torch.compile`` whole.
    """
    qualified = f"scute::{name}"
    torch.library.define(qualified, f"({schema}) -> ()")
    torch.library.impl(qualified, "CPU", reference)
    torch.library.impl(qualified, "CUDA", kernel)
    torch.library.register_fake(qualified, _fake)
    return getattr(torch.ops.scute, name)


def _fake(*_: object) -> None:
    """The outputs are the caller's, so there is no shape to infer."""
