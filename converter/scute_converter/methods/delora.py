"""DeLoRA: a LoRA whose rank-1 terms have a normalised length, with one trained strength per layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.normal_form import NormalForm, Pair
from scute_converter.patterns import lookup
from scute_converter.registry import Conversion, Variant, register

# The square of a longer factor is no number of fp32, in which PEFT takes the norms.
_LONGEST = 1e18
# PEFT clamps the norms of the factors to at least this.
_SHORTEST = 1e-4


@dataclass(frozen=True, kw_only=True)
class DeloraConfig(MethodConfig):
    """PEFT's ``DeloraConfig``. The lambdas in it are initial values of a trained parameter."""

    irrelevant = frozenset({"delora_lambda", "init_weights", "lambda_pattern", "module_dropout"})

    r: int = 8
    rank_pattern: dict[str, int] = field(default_factory=dict)


@register("DELORA", prefix="delora_", config=DeloraConfig, variants=(Variant("DeLoRA", "0.18", "A B"),))
def convert(checkpoint: Checkpoint, config: DeloraConfig, base: Base) -> Conversion:
    """``y = x W + b0 + (((x * w_norm) delora_A^T) * c) delora_B^T`` with ``c = lambda / (r ||A_j|| ||B_j||)`` for row
    ``j`` of ``delora_A`` and column ``j`` of ``delora_B`` (``peft.tuners.delora.layer.DeloraLinear``).

    ``w_norm (in,)`` is stored: norms of the base weight when the adapter was created.
    """
    modules = checkpoint.modules("delora_A", "delora_B", "delora_lambda", "delora_w_norm")
    return Conversion("DeLoRA", checkpoint.each(modules, lambda module: _convert_module(checkpoint, config, module)))


def _convert_module(checkpoint: Checkpoint, config: DeloraConfig, module: str) -> NormalForm:
    a = checkpoint.take(module, "delora_A", dims=2).double()
    b = checkpoint.take(module, "delora_B", dims=2).double()
    strength = checkpoint.take(module, "delora_lambda", dims=1).double()
    w_norm = checkpoint.take(module, "delora_w_norm", dims=1, trained=False).double()
    rank, in_features = a.shape
    if b.shape[1] != rank:
        problem = f"{tuple(b.shape)} does not fit delora_A {tuple(a.shape)}"
        raise checkpoint.error(module, "delora_B", problem, "save both from one checkpoint")
    if strength.shape != (1,) or w_norm.shape != (in_features,):
        problem = f"{tuple(w_norm.shape)} and delora_lambda {tuple(strength.shape)} do not fit delora_A "
        problem += f"{tuple(a.shape)}"
        raise checkpoint.error(module, "delora_w_norm", problem, "save all from one checkpoint")
    if rank != (expected := lookup(checkpoint.adapter, "rank_pattern", config.rank_pattern, module, config.r)):
        # The scale has a factor 1 / r: with two candidates for r it is not known.
        problem = f"has rank {rank}, but the config says {expected}"
        raise checkpoint.error(module, "delora_A", problem, "correct r or rank_pattern in adapter_config.json")
    if max(a.norm(dim=1).max(), b.norm(dim=0).max()) > _LONGEST:
        problem = "has a term whose length fp32 cannot square, as PEFT does"
        raise checkpoint.error(module, "delora_A", problem, "scale the factors, whose lengths do not count")
    lengths = a.norm(dim=1).clamp(min=_SHORTEST) * b.norm(dim=0).clamp(min=_SHORTEST)
    scaled = b.T * (strength / rank / lengths)[:, None]
    pair = Pair(checkpoint.converted(module, "delora_A", a * w_norm), checkpoint.converted(module, "delora_B", scaled))
    return NormalForm(in_features, b.shape[0], pair=pair)
