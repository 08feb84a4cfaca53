"""LoRA beside a base weight that its initialisation took a low-rank part out of: PiSSA, OLoRA (and KaSA)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from scute_converter.double import gram, product
from scute_converter.normal_form import NormalForm
from scute_converter.refactor import folded

# The part of the base weight that is missing in training, by the name of the initialisation.
PISSA, OLORA, KASA = "pissa", "olora", "kasa"


@dataclass(frozen=True)
class Residual:
    """The fold of a LoRA whose base weight is ``W - factor * part`` (PEFT: ``LoraLayer.pissa_init``, ``olora_init``).

    ``part``, of rank ``part_rank``: the largest singular components of ``W`` (PiSSA), the smallest (KaSA), or the first
    rows and columns of its QR decomposition (OLoRA). PEFT computes it in fp32 from the base weight when it loads the
    adapter; the signs of singular vectors cancel. ``adapter`` and ``module`` are for messages only.
    """

    part: str
    part_rank: int
    factor: float
    adapter: str = field(compare=False)
    module: str = field(compare=False)

    @property
    def rank(self) -> int:
        return 2 * self.part_rank

    def fold(self, form: NormalForm, weight: torch.Tensor) -> NormalForm:
        """``A = [A; part_A]``, ``B = [B; -factor * part_B]``, whose terms cancel, since training began at the part."""
        assert form.pair is not None
        if self.part == OLORA:
            a, b = leading_columns(weight, self.part_rank)
        else:
            a, b = singular_components(weight, self.part_rank, largest=self.part == PISSA)
        a = torch.cat([form.pair.a.to(a), a])
        b = torch.cat([form.pair.b.to(b), -self.factor * b])
        return replace(form, pair=folded(a, b, self.adapter, self.module), fold=None)


def singular_components(weight: torch.Tensor, rank: int, *, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``a (rank, in)``, ``b (rank, out)`` in fp64: ``b^T a`` is the sum of ``rank`` singular components of ``weight``.

    From the eigenvectors of the smaller Gram matrix, whose decomposition takes a fraction of the time of an SVD. Only
    the space of the vectors counts, and the product with the weight brings the singular values, so that squaring them
    costs no more than rounding the weight to fp32 would.
    """
    if weight.shape[0] < weight.shape[1]:
        b, a = singular_components(weight.T, rank, largest=largest)
        return a, b
    vectors = torch.linalg.eigh(gram(weight)).eigenvectors  # by ascending eigenvalues
    vectors = vectors[:, -rank:] if largest else vectors[:, :rank]
    return vectors.T, product(weight, vectors).T


def leading_columns(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``a (rank, in)``, ``b (rank, out)`` in fp64: ``b^T a = Q_r R_r`` of ``weight = Q R``.

    That is the projection of the weight on the space of its first ``rank`` columns.
    """
    q = torch.linalg.qr(weight[:, :rank].double()).Q
    return product(weight.T, q).T, q.T
