"""VeRA: two trained vectors per layer around a pair of random matrices that all layers share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.digest import digest
from scute_converter.errors import AdapterError
from scute_converter.normal_form import Basis, NormalForm, SharedPair
from scute_converter.registry import Conversion, Variant, register
from scute_converter.targets import selected_layers


@dataclass(frozen=True, kw_only=True)
class VeraConfig(MethodConfig):
    """PEFT's ``VeraConfig``. The rank is that of the tensors."""

    irrelevant = frozenset({"d_initial", "init_weights", "r", "vera_dropout"})

    projection_prng_key: int = 0
    save_projection: bool = True


LIMITS = "save_projection=false needs the base model to be known"
VARIANTS = (Variant("VeRA", "0.11", "d e", limits=LIMITS),)


@register("VERA", prefix="vera_", config=VeraConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: VeraConfig, base: Base) -> Conversion:
    """``y = x W + b0 + ((x vera_A[:, :in]^T * lambda_d) vera_B[:out]^T) * lambda_b`` (``peft.tuners.vera``)."""
    return convert_projected(checkpoint, config, base, "VeRA", "vera")


def convert_projected(
    checkpoint: Checkpoint, config: VeraConfig, base: Base, method: str, prefix: str, halves: int = 1
) -> Conversion:
    """The formula above with tensors called ``<prefix>_...``, or the same of the first half.

    ``halves``: 2 if ``lambda_d`` and the rows of ``A`` are means followed by as many others, which are not served.
    """
    name_d, name_b = f"{prefix}_lambda_d", f"{prefix}_lambda_b"
    vectors = {
        module: (checkpoint.take(module, name_d, dims=1), checkpoint.take(module, name_b, dims=1))
        for module in checkpoint.modules(name_d, name_b)
    }
    if not vectors:
        return Conversion(method, {})
    first, (d, _) = next(iter(vectors.items()))
    if d.shape[0] % halves:
        raise checkpoint.error(first, name_d, f"has an odd number of elements ({d.shape[0]})", "save the adapter again")
    notes = ()
    if checkpoint.has("", f"{prefix}_A") or config.save_projection:
        a, b = _stored(checkpoint, prefix, halves)
    else:
        a, b, notes = _drawn(checkpoint, prefix, config, base, d.shape[0], halves)
    rows, (rank, out_max) = a.shape[0], b.shape
    basis = Basis(a[:rank].contiguous(), b)
    key = digest(basis)

    forms = {}
    for module, (d, e) in vectors.items():
        if d.shape[0] != rows or e.shape[0] > out_max:
            problem = f"vectors of {d.shape[0]} and {e.shape[0]} do not fit projections of rank {rows} for "
            problem += f"{out_max} output features"
            raise checkpoint.error(module, name_d, problem, "save both from one checkpoint")
        if (in_features := base.shapes.get(module, (0, 0))[1]) > a.shape[1]:
            problem = f"the projections have {a.shape[1]} input features, the base layer has {in_features}"
            raise checkpoint.error(module, name_d, problem, "use the base model that the adapter is for")
        forms[module] = NormalForm(0, e.shape[0], shared=SharedPair(key, d[:rank].contiguous(), e))
    return Conversion(method, forms, {key: basis}, notes)


def _stored(checkpoint: Checkpoint, prefix: str, halves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``A (halves r, in_max)`` and the transpose of ``B``, ``(r, out_max)``."""
    a = checkpoint.take("", f"{prefix}_A", dims=2, trained=False)
    b = checkpoint.take_transposed("", f"{prefix}_B", trained=False)
    if a.shape[0] != halves * b.shape[0]:
        problem = f"{tuple(b.T.shape)} does not fit {prefix}_A {tuple(a.shape)}"
        raise checkpoint.error("", f"{prefix}_B", problem, "save both from one checkpoint")
    return a, b


def _drawn(
    checkpoint: Checkpoint, prefix: str, config: VeraConfig, base: Base, rows: int, halves: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """The same, as PEFT draws them from ``projection_prng_key`` (``VeraModel._init_vera_A_vera_B``), and a note.

    Their sizes are maxima over all linear layers that the config selects, and they are rounded to the type of the base
    weights, so both must be known. ``rows``: of ``A``.
    """
    remedy = "save the adapter with save_projection=true, or give the base model to scute inspect or convert (--base)"
    if not base.shapes or base.dtype is None:
        problem = "false: the projections must be drawn again, which needs the shapes and the type of the base model"
        raise AdapterError(checkpoint.adapter, "field save_projection of adapter_config.json", problem, remedy)
    shapes = selected_layers(checkpoint.adapter, config, base, remedy).values()
    out_max, in_max = (max(sizes) for sizes in zip(*shapes, strict=True))

    checkpoint.reserve("", f"{prefix}_A", rows, in_max)
    checkpoint.reserve("", f"{prefix}_B", out_max, rows)
    generator = torch.Generator("cpu").manual_seed(config.projection_prng_key)
    a = _uniform((rows, in_max), generator).to(base.dtype).float()
    b = _uniform((out_max, rows // halves), generator).to(base.dtype).float()
    note = f"projections drawn again and rounded to {base.dtype}: exact if the base had this type in training"
    return a, b.T.contiguous(), (f"{note} (save_projection=true is always exact)",)


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Kaiming-uniform in fp32 (PEFT: ``peft.tuners.vera.model._kaiming_init``), in the same order of operations."""
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
