"""The registry of methods: PEFT's ``peft_type`` to the function that converts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.normal_form import Basis, NormalForm


@dataclass(frozen=True)
class Conversion:
    """What a method makes of a checkpoint. ``method``: the name shown to people. The rest is as in ``Adapter``."""

    method: str
    forms: dict[str, NormalForm]
    bases: dict[str, Basis] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """What is served of a method, as the documentation lists it.

    ``name``: as ``Conversion.method`` says it. ``versions``: of PEFT that write the files (``"0.9"``: since then).
    ``slots``: the live slots of the normal form (``"A B"``, ``"s"``, ``"R"``, ``"d e"``, ``"b"``). ``base_weight``:
    whether loading needs the base weight. ``limits``: what of it is refused, or must be known; one line.
    """

    name: str
    versions: str
    slots: str
    base_weight: bool = False
    limits: str = ""


@dataclass(frozen=True)
class Method:
    """``prefix``: how the names of the method's parameters begin (PEFT's ``BaseTuner.prefix``)."""

    prefix: str
    config: type[MethodConfig]
    convert: Callable[[Checkpoint, Any, Base], Conversion]
    variants: tuple[Variant, ...]


METHODS: dict[str, Method] = {}

# PEFT types that are not a map of single linear layers, or not one that is served.
UNSERVED = {
    **dict.fromkeys(
        ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE"),
        "adds virtual tokens or a key-value prefix, and no change of linear layers",
    ),
    "ADAPTION_PROMPT": "adds an attention branch, and no change of linear layers",
    "ADAMSS": "adapts groups of output features that come from a clustering of the base weight and are not stored",
    "C3A": "adds block-circulant matrices, which are of full rank",
    "FROD": "adds a sparse matrix between two square bases, which is of full rank",
    "HIRA": "multiplies the base weight by a low-rank matrix element by element, which gives a change of full rank",
    "LILY": "mixes matrices by an average over all tokens of a batch, so that requests would change each other",
    "LN_TUNING": "retrains normalisation layers, and makes no change of linear layers",
    "OSF": "retrains half of the singular values and vectors of the base weight, a change of full rank",
    "PSOFT": "rotates singular vectors of the base weight, whose signs are not stored and differ between devices",
    "RANDLORA": "adds a sum of scaled random matrices, which is of full rank",
    "ROAD": "rotates pairs of output features, which is a change of full rank",
    "SHADOW": "runs a second network beside the layers, and makes no change of linear layers",
    "SHIRA": "adds a sparse matrix, which is of full rank",
    "SUPERTUNING": "changes single elements of the base weight, a sparse matrix of full rank",
    "TRAINABLE_TOKENS": "replaces the embeddings of single tokens, and makes no change of linear layers",
    "WAVEFT": "adds a sum of thousands of wavelets, which has no low rank",
    "XLORA": "mixes adapters by a second forward pass",
}


def register(
    peft_type: str, prefix: str, config: type[MethodConfig], variants: tuple[Variant, ...]
) -> Callable[[Any], Any]:
    """Register ``convert(checkpoint, config, base) -> Conversion`` for a ``peft_type``."""

    def decorate(convert: Callable[[Checkpoint, Any, Base], Conversion]) -> Any:
        METHODS[peft_type] = Method(prefix, config, convert, variants)
        return convert

    return decorate
