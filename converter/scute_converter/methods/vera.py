"""VeRA: two trained vectors per layer around a pair of random matrices that all layers share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.digest import digest
from scute_converter.errors import AdapterError
from scute_converter.normal_form import Basis, NormalForm, SharedPair
from scute_converter.registry import Conversion, Variant, register
from scute_converter.targets import selects


@dataclass(frozen=True, kw_only=True)
class VeraConfig(MethodConfig):
    """PEFT's ``VeraConfig``. The rank is that of the tensors."""

    irrelevant = frozenset({"d_initial", "init_weights", "r", "vera_dropout"})

    projection_prng_key: int = 0
    save_projection: bool = True


VARIANTS = (Variant("VeRA", "0.11", "d e", limits="save_projection=false needs the base model to be known"),)


@register("VERA", prefix="vera_", config=VeraConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: VeraConfig, base: Base) -> Conversion:
    """``y = x W + b0 + ((x vera_A[:, :in]^T * lambda_d) vera_B[:out]^T) * lambda_b`` (``peft.tuners.vera``)."""
    vectors = {
        module: (checkpoint.take(module, "vera_lambda_d", dims=1), checkpoint.take(module, "vera_lambda_b", dims=1))
        for module in checkpoint.modules("vera_lambda_d", "vera_lambda_b")
    }
    if not vectors:
        return Conversion("VeRA", {})
    notes = ()
    if checkpoint.has("", "vera_A") or config.save_projection:
        basis = _stored(checkpoint)
    else:
        rank = next(iter(vectors.values()))[0].shape[0]
        basis, notes = _regenerated(checkpoint.adapter, config, base, rank)
    key = digest(basis)

    forms = {}
    for module, (d, e) in vectors.items():
        if d.shape[0] != basis.a.shape[0] or e.shape[0] > basis.b.shape[1]:
            problem = f"vectors of {d.shape[0]} and {e.shape[0]} do not fit projections of rank {basis.a.shape[0]} for "
            problem += f"{basis.b.shape[1]} output features"
            raise checkpoint.error(module, "vera_lambda_d", problem, "save both from one checkpoint")
        if (in_features := base.shapes.get(module, (0, 0))[1]) > basis.a.shape[1]:
            problem = f"the projections have {basis.a.shape[1]} input features, the base layer has {in_features}"
            raise checkpoint.error(module, "vera_lambda_d", problem, "use the base model that the adapter is for")
        forms[module] = NormalForm(0, e.shape[0], shared=SharedPair(key, d, e))
    return Conversion("VeRA", forms, {key: basis}, notes)


def _stored(checkpoint: Checkpoint) -> Basis:
    a = checkpoint.take("", "vera_A", dims=2, trained=False)
    b = checkpoint.take("", "vera_B", dims=2, trained=False)
    if a.shape[0] != b.shape[1]:
        problem = f"{tuple(b.shape)} does not fit vera_A {tuple(a.shape)}"
        raise checkpoint.error("", "vera_B", problem, "save both from one checkpoint")
    return Basis(a, b.T.contiguous())


def _regenerated(adapter: str, config: VeraConfig, base: Base, rank: int) -> tuple[Basis, tuple[str, ...]]:
    """The projections that PEFT draws from ``projection_prng_key`` (``VeraModel._init_vera_A_vera_B``).

    Their sizes are maxima over all linear layers that the config selects, and they are rounded to the type of the base
    weights, so both must be known.
    """
    where = "field save_projection of adapter_config.json"
    remedy = "save the adapter with save_projection=true"
    if not base.shapes or base.dtype is None:
        problem = "false: the projections must be drawn again, which needs the shapes and the type of the base model"
        raise AdapterError(adapter, where, problem, remedy)
    try:
        shapes = [shape for module, shape in base.shapes.items() if selects(config, module)]
    except re.error as error:
        raise AdapterError(adapter, "field target_modules", f"is no regular expression ({error})", remedy) from error
    if not shapes:
        raise AdapterError(adapter, "field target_modules", "selects no linear layer of the base model", remedy)
    out_max, in_max = (max(sizes) for sizes in zip(*shapes, strict=True))

    generator = torch.Generator("cpu").manual_seed(config.projection_prng_key)
    a = _uniform((rank, in_max), generator)
    b = _uniform((out_max, rank), generator)
    rounded = Basis(a.to(base.dtype).float(), b.to(base.dtype).float().T.contiguous())
    note = f"projections drawn again and rounded to {base.dtype}: exact if the base had this type in training"
    return rounded, (f"{note} (save_projection=true is always exact)",)


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Kaiming-uniform in fp32 (PEFT: ``peft.tuners.vera.model._kaiming_init``), in the same order of operations."""
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
