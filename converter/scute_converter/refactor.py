"""Low-rank pairs whose terms cancel, rewritten so that rounding their factors rounds the effect of the adapter."""

from __future__ import annotations

import math

import torch

from scute_converter.errors import AdapterError
from scute_converter.finite import is_finite
from scute_converter.normal_form import Pair

# A sum of unrelated rank-1 terms is about as long as its terms together, so that their ratio is near 1. Below this
# ratio the terms cancel each other, as in a PiSSA adapter that PEFT converted: [B, -B0] [A; A0].
CANCELLATION = 0.25


def balanced(pair: Pair) -> Pair:
    """The same product from balanced factors if the rank-1 terms of the pair cancel, else the pair itself.

    ``a`` and ``b``: any float dtype and device; the result is fp32 on the CPU, contiguous. QR of both factors and an
    SVD of the core in fp64; terms that are zero within fp64 are dropped.
    """
    product, terms = _norms(pair.a, pair.b)  # in the type of the factors, which tells all but a few pairs
    if 2 * CANCELLATION * terms < product < math.inf:
        return Pair(_rounded(pair.a), _rounded(pair.b))
    a, b = pair.a.double(), pair.b.double()
    product, terms = _norms(a, b)
    if not product < CANCELLATION * terms:
        return Pair(_rounded(pair.a), _rounded(pair.b))
    basis_a, core_a = torch.linalg.qr(a.T)
    basis_b, core_b = torch.linalg.qr(b.T)
    u, sigma, v = torch.linalg.svd(core_b @ core_a.T, full_matrices=False)
    rank = max(1, int((sigma > 1e-14 * terms).sum()))
    root = sigma[:rank].sqrt()
    return Pair(
        a=_rounded(root[:, None] * (v[:rank] @ basis_a.T)),
        b=_rounded(root[:, None] * (u[:, :rank].T @ basis_b.T)),
    )


def folded(a: torch.Tensor, b: torch.Tensor, adapter: str, module: str) -> Pair:
    """The balanced pair of ``a (r, in)`` and ``b (r, out)`` that a fold made of the base weight; refused if it is not
    finite."""
    pair = balanced(Pair(a, b))
    if not (is_finite(pair.a) and is_finite(pair.b)):
        problem = "what the adapter makes of the base weight is not finite"
        raise AdapterError(adapter, f"module {module}", problem, "serve the base model that it was trained on")
    return pair


def _norms(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """The Frobenius norm of the product, and the root of the summed squared norms of its rank-1 terms."""
    gram_a, gram_b = a @ a.T, b @ b.T
    product = (gram_a * gram_b).sum().clamp(min=0).sqrt()
    terms = (gram_a.diagonal() * gram_b.diagonal()).sum().sqrt()
    return product.item(), terms.item()


def _rounded(factor: torch.Tensor) -> torch.Tensor:
    return factor.to("cpu", torch.float32).contiguous()
