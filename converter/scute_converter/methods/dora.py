"""DoRA: a LoRA whose rows are scaled to a learned length, ``s = m / n`` with ``n = ||W + (B A)^T||`` per output."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from scute_converter.checkpoint import Checkpoint
from scute_converter.errors import AdapterError
from scute_converter.finite import is_finite
from scute_converter.normal_form import NormalForm, Pair

MAGNITUDE = "lora_magnitude_vector"
# Elements of the weight that are in memory as fp64 at a time: 32 MiB.
_CHUNK = 1 << 22


def take_magnitude(checkpoint: Checkpoint, module: str) -> torch.Tensor | None:
    """The magnitude ``m (out,)``, or None. PEFT saves it without ``.weight``, some other tools with it."""
    suffixes = [suffix for suffix in (MAGNITUDE, f"{MAGNITUDE}.weight") if checkpoint.has(module, suffix)]
    return checkpoint.take(module, suffixes[0], dims=1) if suffixes else None


@dataclass(frozen=True)
class DoraScale:
    """The deferred output scale of a DoRA layer (PEFT: ``DoraLinearLayer``, ``DoraEmbeddingLayer``).

    ``magnitude``: ``(out,)``. ``adapter`` and ``module`` are for messages only, and no part of the content.
    """

    magnitude: torch.Tensor
    adapter: str = field(compare=False)
    module: str = field(compare=False)

    def shard(self, rows: tuple[int, int], cols: tuple[int, int]) -> DoraScale:
        return replace(self, magnitude=self.magnitude[slice(*rows)].contiguous())

    def measure(self, weight: torch.Tensor, form: NormalForm) -> torch.Tensor:
        """Squared norms of the rows of ``W + (B A)^T``: ``(out,)`` fp64 on the device of ``weight (out, in)``.

        Everything is fp64: on a GPU an fp32 product may be rounded to TF32. A chunk of rows at a time.
        """
        assert form.pair is not None
        a = form.pair.a.to(weight.device, torch.float64)
        b = form.pair.b.to(weight.device, torch.float64)
        step = max(1, _CHUNK // weight.shape[1])
        return torch.cat(
            [
                torch.addmm(weight[start : start + step].double(), b[:, start : start + step].T, a).square_().sum(dim=1)
                for start in range(0, weight.shape[0], step)
            ]
        )

    def resolve(self, form: NormalForm, measured: torch.Tensor) -> NormalForm:
        """``scale_delta = (m - n) / n``, and ``s`` folded into ``B``."""
        assert form.pair is not None
        norm = measured.to("cpu", torch.float64).sqrt()
        delta = (self.magnitude.double() - norm) / norm
        # PEFT squares in fp32.
        if not is_finite(delta.float()) or not is_finite(measured.float()) or not measured.float().all():
            problem = "a row of the base weight plus the low-rank product has length 0 or is not finite"
            remedy = "serve the base model that the adapter was trained on"
            raise AdapterError(self.adapter, f"tensor {self.module}.{MAGNITUDE}", problem, remedy)
        b = form.pair.b.double().mul_(1 + delta).float()
        return replace(form, pair=Pair(form.pair.a, b), scale_delta=delta.float(), deferred=None)
