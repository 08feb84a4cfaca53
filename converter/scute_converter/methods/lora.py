"""LoRA: rsLoRA, per-module ranks and alphas, LoRA bias, embeddings. Variants with maths of their own have files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.errors import AdapterError, did_you_mean
from scute_converter.files import CONFIG
from scute_converter.methods import bdlora, kasa, pissa, qalora
from scute_converter.methods.dora import MAGNITUDE, DoraScale, take_magnitude
from scute_converter.normal_form import Bias, NormalForm, Pair
from scute_converter.patterns import lookup
from scute_converter.refactor import balanced
from scute_converter.registry import Conversion, Variant, register

# Initialisations that leave the base weights as they are, and those that take a known part out of them.
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")
_RESIDUAL_INITS = {pissa.PISSA: "PiSSA", pissa.OLORA: "OLoRA"}

# The fields that turn a variant on, and its name. PEFT knows no two of them together.
_VARIANTS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}

# Variants that replace tensors which the initialisation has made.
_NOT_ON_RESIDUAL = ("use_qalora", "use_bdlora", "kasa_config")

# What the configs of variants hold; whatever else stands there is not understood.
_OPTIONS = {
    "use_bdlora": {"target_modules_bd_a", "target_modules_bd_b", "nblocks", "match_strict"},
    "kasa_config": {"beta", "gamma"},
    "velora_config": {"num_groups", "scale", "init_type"},
    "monteclora_config": {
        "num_samples",
        "use_entropy",
        "dirichlet_prior",
        "sample_scaler",
        "kl_loss_weight",
        "buffer_size",
    },
}

# Tensors of variants that count in training only.
_TRAINING_ONLY = {
    "velora_config": ("lora_velora_embed",),
    "monteclora_config": tuple(
        f"lora_monteclora_sampler.{name}"
        for name in ("std_prior", "expert_weights_prior", "gaussian_var_prior", "expert_weights")
    ),
}


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
        }
    )
    refused: ClassVar[Mapping[str, str]] = {
        "alora_invocation_tokens": "the adapter is active from a token of the prompt on (aLoRA), which is not served",
        "arrow_config": "Arrow chooses among adapters per token, which is not served",
        "layer_replication": "the adapter is for a model with repeated layers",
        "target_parameters": "adapters of expert parameters are not served",
        "trainable_token_indices": "retrained tokens are not served",
    }

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_dora: bool = False
    lora_bias: bool = False
    init_lora_weights: bool | str = True
    fan_in_fan_out: bool = False
    use_qalora: bool = False
    qalora_group_size: int = 16
    use_bdlora: dict[str, list[str] | int | bool | None] | None = None
    kasa_config: dict[str, float] | None = None
    velora_config: dict[str, float | str] | None = None
    monteclora_config: dict[str, float | bool] | None = None


VARIANTS = (
    Variant("LoRA", "0.1", "A B", limits="no expert parameters, retrained tokens, aLoRA, Arrow or layer replication"),
    Variant("rsLoRA", "0.7", "A B"),
    Variant("DoRA", "0.9", "A B, s", base_weight=True, limits="not on embeddings"),
    Variant("PiSSA", "0.11", "A B", base_weight=True, limits="not pissa_niter_*, and not on the output head"),
    Variant("OLoRA", "0.12", "A B", base_weight=True, limits="not on the output head"),
    Variant("QALoRA", "0.16", "A B"),
    Variant("BD-LoRA", "0.19", "A B"),
    Variant("VeLoRA", "0.20", "A B"),
    Variant("MonteCLoRA", "0.20", "A B"),
    Variant("KaSA", "0.21", "A B", base_weight=True, limits="not on the output head"),
)


@register("LORA", prefix="lora_", config=LoraConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: LoraConfig, base: Base) -> Conversion:
    """``y = x W + b0 + scale * ((x lora_A^T) lora_B^T + bias_B)``; with a magnitude ``m`` (DoRA) and its ``s = m / n``:
    ``y = (x W) * s + b0 + scale * ((x lora_A^T) lora_B^T) * s``. The scale is folded into ``B`` in fp32.

    QALoRA and BD-LoRA store other shapes of ``lora_A`` and ``lora_B``; KaSA has a diagonal between them and, as PiSSA
    and OLoRA, another ``W``. VeLoRA and MonteCLoRA differ in training only.

    PEFT: ``peft.tuners.lora.layer.Linear``, ``Embedding``, ``peft.tuners.lora.variants``.
    """
    notes = _check_initialisation(checkpoint.adapter, config)
    variant = _check_variant(checkpoint.adapter, config)
    modules = checkpoint.modules("lora_A.weight", "lora_embedding_A")
    forms = checkpoint.each(modules, lambda module: _convert_module(checkpoint, config, module))
    for module in modules:
        for suffix in _TRAINING_ONLY.get(variant, ()):
            if checkpoint.has(module, suffix):
                checkpoint.take_stored(module, suffix)
    dora = [form for form in forms.values() if form.deferred]
    if dora and not config.use_dora:
        notes.append(f"the config says use_dora=false, but the file has {MAGNITUDE} tensors: served as DoRA")
    plain = _RESIDUAL_INITS.get(str(config.init_lora_weights), "rsLoRA" if config.use_rslora else "LoRA")
    method = "DoRA" if dora else _VARIANTS.get(variant, plain)
    return Conversion(method, forms, notes=tuple(notes))


def _convert_module(checkpoint: Checkpoint, config: LoraConfig, module: str) -> NormalForm:
    embedding = checkpoint.has(module, "lora_embedding_A")
    name_a, name_b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
    a = checkpoint.take(module, name_a, dims=2)
    b = checkpoint.take_transposed(module, name_b)
    if config.use_bdlora is not None:
        a, b = bdlora.dense(checkpoint, config.use_bdlora, module, a, b)
    rank, out_features = b.shape
    if a.shape[0] != rank:
        problem = f"{(out_features, rank)} does not fit {name_a} {tuple(a.shape)}"
        raise checkpoint.error(module, name_b, problem, "save both from one checkpoint")
    if rank != (expected := lookup(checkpoint.adapter, "rank_pattern", config.rank_pattern, module, config.r)):
        # The scale is alpha / r: with two candidates for r it is not known.
        problem = f"has rank {rank}, but the config says {expected}"
        raise checkpoint.error(module, name_a, problem, "correct r or rank_pattern in adapter_config.json")

    alpha = lookup(checkpoint.adapter, "alpha_pattern", config.alpha_pattern, module, config.lora_alpha)
    scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    factor: float | torch.Tensor = scale
    if config.use_qalora and not embedding:
        a, pooling = qalora.spread(checkpoint, module, a, config.qalora_group_size)
        factor = scale * pooling
    if config.kasa_config is not None:
        diagonal = kasa.take_diagonal(checkpoint, module, rank, min(a.shape[1], out_features))
        factor = scale * diagonal.double()[:, None]
    pair = balanced(Pair(a, checkpoint.converted(module, name_b, b.mul_(factor))))
    magnitude = take_magnitude(checkpoint, module)
    _check_magnitude(checkpoint, config, module, magnitude, out_features)
    add = None
    if checkpoint.has(module, "lora_B.bias"):
        add = checkpoint.take(module, "lora_B.bias", dims=1) * scale
        add = checkpoint.converted(module, "lora_B.bias", add)
    elif config.lora_bias and not embedding:
        raise checkpoint.error(module, "lora_B.bias", "is missing, with lora_bias=true", "save the adapter again")
    return NormalForm(
        in_features=a.shape[1],
        out_features=out_features,
        pair=pair,
        bias=Bias(add=add),
        deferred=None if magnitude is None else DoraScale(magnitude, checkpoint.adapter, module),
        fold=None if embedding else _residual(checkpoint, config, module, rank, scale),
    )


def _residual(
    checkpoint: Checkpoint, config: LoraConfig, module: str, rank: int, scale: float
) -> pissa.Residual | None:
    """What takes the part out of the base weight that was missing in training. PEFT leaves embeddings alone."""
    part = pissa.KASA if config.kasa_config is not None else config.init_lora_weights
    if part not in (pissa.PISSA, pissa.OLORA, pissa.KASA):
        return None
    if module.rpartition(".")[2] == "lm_head":
        problem = "the initialisation changed the output head, and with it an embedding that shares its weight"
        raise checkpoint.error(module, "lora_A.weight", problem, "train without the output head as target")
    if part == pissa.PISSA and scale <= 0:
        problem = f"PiSSA with the scale {scale:g} has no square root"
        raise checkpoint.error(module, "lora_A.weight", problem, "correct lora_alpha in adapter_config.json")
    factor = scale if part == pissa.OLORA else 1.0
    return pissa.Residual(str(part), rank, factor, checkpoint.adapter, module)


def _check_variant(adapter: str, config: LoraConfig) -> str:
    """The field of the variant that is on, or ``""``."""
    active = [name for name in _VARIANTS if getattr(config, name) not in (None, False)]
    for name in active:
        unknown = sorted(set(getattr(config, name)) - _OPTIONS[name]) if name in _OPTIONS else []
        if unknown:
            where = f"field {name}.{unknown[0]} of {CONFIG}"
            problem = f"is not understood{did_you_mean(unknown[0], _OPTIONS[name])}"
            raise AdapterError(adapter, where, problem, "remove the field if it does not matter")
    if config.init_lora_weights in _RESIDUAL_INITS and active and active[0] in _NOT_ON_RESIDUAL:
        active.append(f"init_lora_weights={config.init_lora_weights!r}")
    if len(active) > 1:
        problem = f"together with {active[1]} is not served"
        raise AdapterError(adapter, f"field {active[0]} of {CONFIG}", problem, "train with one of them")
    return active[0] if active else ""


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
    if init in _PLAIN_INITS or (init in _RESIDUAL_INITS and not (init == pissa.OLORA and config.fan_in_fan_out)):
        return []
    if init == "loftq":
        return ["LoftQ: exact only on the quantised base that LoftQ prepared for this adapter"]
    if init == "lora_ga":
        return ["LoRA-GA: exact only if the adapter was converted when it was saved"]
    where = "field init_lora_weights of adapter_config.json"
    if init in ("olora", "corda") or str(init).startswith("pissa"):
        problem = f"{init!r} changed the base weights in training, and not by what can be found again"
        remedy = "save the adapter with PEFT's path_initial_model_for_weight_conversion"
    else:
        known = (*_PLAIN_INITS, *_RESIDUAL_INITS, "loftq", "lora_ga")
        problem = f"{init!r} is not known{did_you_mean(str(init), known)}"
        remedy = "set it to true if this initialisation leaves the base weights as they are"
    raise AdapterError(adapter, where, problem, remedy)
