"""AdaLoRA: a LoRA with a trained factor for every rank, pruned in training to a rank of its own for every layer."""

from __future__ import annotations

from dataclasses import dataclass

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.methods.lora import LoraConfig
from scute_converter.normal_form import NormalForm, Pair
from scute_converter.registry import Conversion, Variant, register


@dataclass(frozen=True, kw_only=True)
class AdaLoraConfig(MethodConfig):
    """PEFT's ``AdaLoraConfig``. It has all fields of ``LoraConfig``, of which AdaLoRA reads few. The ranks are those of
    the tensors, which PEFT prunes by ``rank_pattern`` when it saves."""

    irrelevant = frozenset(
        {
            "alpha_pattern",
            "beta1",
            "beta2",
            "corda_config",
            "deltaT",
            "eva_config",
            "init_lora_weights",
            "loftq_config",
            "lora_bias",
            "lora_dropout",
            "lora_ga_config",
            "megatron_config",
            "megatron_core",
            "orth_reg_weight",
            "qalora_group_size",
            "r",
            "rank_pattern",
            "target_r",
            "tfinal",
            "tinit",
            "total_step",
            "use_rslora",
        }
    )
    refused = LoraConfig.refused

    init_r: int = 12
    lora_alpha: float = 8


@register("ADALORA", prefix="lora_", config=AdaLoraConfig, variants=(Variant("AdaLoRA", "0.3", "A B"),))
def convert(checkpoint: Checkpoint, config: AdaLoraConfig, base: Base) -> Conversion:
    """``y = x W + b0 + c * ((x lora_A^T) * lora_E) lora_B^T`` with ``c = lora_alpha / (init_r + 1e-5)``
    (``peft.tuners.adalora.layer.SVDLinear``). A layer that was pruned to rank 0 is not adapted.
    """
    forms = {}
    for module in checkpoint.modules("lora_A", "lora_B", "lora_E"):
        if form := _convert_module(checkpoint, config, module):
            forms[module] = form
    return Conversion("AdaLoRA", forms)


def _convert_module(checkpoint: Checkpoint, config: AdaLoraConfig, module: str) -> NormalForm | None:
    a = checkpoint.take(module, "lora_A", dims=2, maybe_empty=True)
    b = checkpoint.take(module, "lora_B", dims=2, maybe_empty=True)
    e = checkpoint.take(module, "lora_E", dims=2, maybe_empty=True)
    rank = a.shape[0]
    if b.shape[1] != rank or e.shape != (rank, 1) or 0 in (a.shape[1], b.shape[0]):
        problem = f"{tuple(e.shape)} does not fit lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}"
        raise checkpoint.error(module, "lora_E", problem, "save all three from one checkpoint")
    if rank > config.init_r:
        problem = f"has rank {rank}, more than the init_r={config.init_r} of the config"
        raise checkpoint.error(module, "lora_A", problem, "correct init_r in adapter_config.json")
    if config.lora_alpha <= 0 and rank < config.init_r:
        # PEFT then scales by the rank that the layer has: init_r in training, the pruned one after loading.
        problem = f"was pruned to rank {rank}, and lora_alpha={config.lora_alpha} scales with the rank"
        raise checkpoint.error(module, "lora_A", problem, "set lora_alpha to init_r, which it was trained with")
    if rank == 0:
        return None
    scale = (config.lora_alpha if config.lora_alpha > 0 else config.init_r) / (config.init_r + 1e-5)
    b = checkpoint.converted(module, "lora_B", (b.double() * e.double().T * scale).T)
    return NormalForm(a.shape[1], b.shape[1], pair=Pair(a, b))
