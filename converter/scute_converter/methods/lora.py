"""LoRA and its variants: rsLoRA, per-module ranks and alphas, LoRA bias, embeddings, DoRA (the scale is in dora.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.errors import AdapterError
from scute_converter.methods.dora import MAGNITUDE, DoraScale, take_magnitude
from scute_converter.normal_form import Bias, NormalForm, Pair
from scute_converter.patterns import lookup
from scute_converter.refactor import balanced
from scute_converter.registry import Conversion, Variant, register

# Initialisations that leave the base weights as they are.
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")


@dataclass(frozen=True, kw_only=True)
class LoraConfig(MethodConfig):
    """PEFT's ``LoraConfig``. ``target_modules`` of an embedding and the head may be tied (``ensure_weight_tying``)."""

    irrelevant = frozenset(
        {
            "corda_config",
            "eva_config",
            "loftq_config",
            "lora_dropout",
            "lora_ga_config",
            "megatron_config",
            "megatron_core",
            "qalora_group_size",
        }
    )
    refused: ClassVar[Mapping[str, str]] = {
        "alora_invocation_tokens": "the adapter is active from a token of the prompt on (aLoRA), which is not served",
        "arrow_config": "Arrow chooses among adapters per token, which is not served",
        "kasa_config": "KaSA changes the base weights, which is not served",
        "layer_replication": "the adapter is for a model with repeated layers",
        "monteclora_config": "MonteCLoRA is not served",
        "target_parameters": "adapters of expert parameters are not served",
        "trainable_token_indices": "retrained tokens are not served",
        "use_bdlora": "block-diagonal LoRA is not served",
        "use_qalora": "QALoRA pools the input, which is not served",
        "velora_config": "VeLoRA is not served",
    }

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_dora: bool = False
    lora_bias: bool = False
    init_lora_weights: bool | str = True


VARIANTS = (
    Variant("LoRA", "0.1", "A B", limits="no expert parameters, retrained tokens, aLoRA, Arrow or layer replication"),
    Variant("rsLoRA", "0.7", "A B"),
    Variant("DoRA", "0.9", "A B, s", base_weight=True, limits="not on embeddings"),
)


@register("LORA", prefix="lora_", config=LoraConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: LoraConfig, base: Base) -> Conversion:
    """``y = x W + b0 + scale * ((x lora_A^T) lora_B^T + bias_B)``; with a magnitude ``m`` (DoRA) and its ``s = m / n``:
    ``y = (x W) * s + b0 + scale * ((x lora_A^T) lora_B^T) * s``. The scale is folded into ``B`` in fp32.

    PEFT: ``peft.tuners.lora.layer.Linear``, ``Embedding``.
    """
    notes = _check_initialisation(checkpoint.adapter, config)
    forms = {}
    for module in checkpoint.modules("lora_A.weight", "lora_embedding_A"):
        forms[module] = _convert_module(checkpoint, config, module)
    dora = [form for form in forms.values() if form.deferred]
    if dora and not config.use_dora:
        notes.append(f"the config says use_dora=false, but the file has {MAGNITUDE} tensors: served as DoRA")
    return Conversion("DoRA" if dora else "rsLoRA" if config.use_rslora else "LoRA", forms, notes=tuple(notes))


def _convert_module(checkpoint: Checkpoint, config: LoraConfig, module: str) -> NormalForm:
    embedding = checkpoint.has(module, "lora_embedding_A")
    name_a, name_b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
    a = checkpoint.take(module, name_a, dims=2)
    b = checkpoint.take(module, name_b, dims=2)
    if a.shape[0] != b.shape[1]:
        problem = f"{tuple(b.shape)} does not fit {name_a} {tuple(a.shape)}"
        raise checkpoint.error(module, name_b, problem, "save both from one checkpoint")
    rank = a.shape[0]
    if rank != (expected := lookup(checkpoint.adapter, "rank_pattern", config.rank_pattern, module, config.r)):
        # The scale is alpha / r: with two candidates for r it is not known.
        problem = f"has rank {rank}, but the config says {expected}"
        raise checkpoint.error(module, name_a, problem, "correct r or rank_pattern in adapter_config.json")

    alpha = lookup(checkpoint.adapter, "alpha_pattern", config.alpha_pattern, module, config.lora_alpha)
    scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    pair = balanced(Pair(a, checkpoint.converted(module, name_b, b.T * scale)))
    magnitude = take_magnitude(checkpoint, module)
    _check_magnitude(checkpoint, config, module, magnitude, features=b.shape[0])
    add = None
    if checkpoint.has(module, "lora_B.bias"):
        add = checkpoint.take(module, "lora_B.bias", dims=1) * scale
        add = checkpoint.converted(module, "lora_B.bias", add)
    elif config.lora_bias and not embedding:
        raise checkpoint.error(module, "lora_B.bias", "is missing, with lora_bias=true", "save the adapter again")
    return NormalForm(
        in_features=a.shape[1],
        out_features=b.shape[0],
        pair=pair,
        bias=Bias(add=add),
        deferred=None if magnitude is None else DoraScale(magnitude, checkpoint.adapter, module),
    )


def _check_magnitude(
    checkpoint: Checkpoint, config: LoraConfig, module: str, magnitude: torch.Tensor | None, features: int
) -> None:
    if magnitude is None and config.use_dora:
        problem = "is missing, with use_dora=true"
        raise checkpoint.error(module, MAGNITUDE, problem, "use a converter that keeps the magnitudes")
    if magnitude is not None and magnitude.shape[0] != features:
        problem = f"has {magnitude.shape[0]} elements for {features} output features"
        raise checkpoint.error(module, MAGNITUDE, problem, "save the adapter again")


def _check_initialisation(adapter: str, config: LoraConfig) -> list[str]:
    """Refuse an adapter that is relative to base weights which its initialisation changed; notes on doubtful ones."""
    init = config.init_lora_weights
    if init in _PLAIN_INITS:
        return []
    if init == "loftq":
        return ["LoftQ: exact only on the quantised base that LoftQ prepared for this adapter"]
    if init == "lora_ga":
        return ["LoRA-GA: exact only if the adapter was converted when it was saved"]
    where = "field init_lora_weights of adapter_config.json"
    if init in ("olora", "corda") or str(init).startswith("pissa"):
        problem = f"{init!r} changed the base weights in training"
        remedy = "save the adapter with PEFT's path_initial_model_for_weight_conversion"
    else:
        problem = f"{init!r} is not known"
        remedy = "set it to true if this initialisation leaves the base weights as they are"
    raise AdapterError(adapter, where, problem, remedy)
