"""Writes adapters with PEFT itself, their vectors redrawn far from the identity, and answers for them with PEFT."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, OFTConfig, PeftConfig, PeftModel, VeraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Recipe:
    """How to make one adapter: PEFT's config, the seed of its numbers, and how far from the identity they are drawn
    (1: far; 0.007 puts DoRA's and (IA)3's scales within 0.2 % of 1)."""

    config: Callable[[], PeftConfig]
    seed: int = 0
    distance: float = 1.0

    def write(self, path: Path, base: Path) -> None:
        """Save the adapter for the base model in ``base`` into ``path``, as PEFT saves it."""
        model = get_peft_model(load_base(base), self.config())
        redraw(model, torch.Generator().manual_seed(self.seed), self.distance)
        model.save_pretrained(str(path))


def lora(**fields: Any) -> Callable[[], PeftConfig]:
    return lambda: LoraConfig(task_type="CAUSAL_LM", **{"r": 8, "lora_alpha": 16, "target_modules": ALL, **fields})


def vera(**fields: Any) -> Callable[[], PeftConfig]:
    return lambda: VeraConfig(task_type="CAUSAL_LM", **{"r": 24, "target_modules": ALL, **fields})


def ia3(**fields: Any) -> Callable[[], PeftConfig]:
    defaults = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return lambda: IA3Config(task_type="CAUSAL_LM", **{**defaults, **fields})


def oft(**fields: Any) -> Callable[[], PeftConfig]:
    defaults = {"oft_block_size": 4, "r": 0, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
    return lambda: OFTConfig(task_type="CAUSAL_LM", **{**defaults, **fields})


# Two or more of every method: other seeds, ranks, targets and everything that changes their maths.
RECIPES: dict[str, Recipe] = {
    "lora": Recipe(lora(), 1),
    "lora_r1": Recipe(lora(r=1, target_modules=["v_proj", "down_proj"]), 2),
    "lora_rs": Recipe(lora(r=12, use_rslora=True, target_modules=["q_proj", "o_proj", "up_proj"]), 3),
    "lora_patterns": Recipe(
        lora(
            r=5,
            rank_pattern={"q_proj": 3, r"layers\.1\.mlp\.up_proj": 20},
            alpha_pattern={"v_proj": 40, r"layers\.0\.self_attn\.o_proj": 2},
        ),
        4,
    ),
    "lora_wide": Recipe(lora(r=70, lora_alpha=20, layers_to_transform=[1]), 5),
    "lora_bias": Recipe(lora(r=4, lora_bias=True, target_modules=["k_proj", "gate_proj"]), 6),
    "dora": Recipe(lora(r=8, use_dora=True), 7),
    "dora_part": Recipe(lora(r=3, use_dora=True, target_modules=["k_proj", "o_proj", "gate_proj"]), 8),
    "ia3": Recipe(ia3(), 9),
    "ia3_more": Recipe(
        ia3(target_modules=["q_proj", "v_proj", "o_proj", "up_proj"], feedforward_modules=["o_proj"]), 10
    ),
    "vera": Recipe(vera(), 11),
    "vera_same_key": Recipe(vera(), 12),
    "vera_other_key": Recipe(vera(r=10, projection_prng_key=7, target_modules=["q_proj", "v_proj"]), 13),
    "vera_regenerated": Recipe(vera(r=16, save_projection=False, target_modules=["q_proj", "down_proj"]), 14),
    "oft": Recipe(oft(), 15),
    "oft_cayley": Recipe(oft(oft_block_size=12, use_cayley_neumann=False, target_modules=ALL), 16),
    "oft_shared": Recipe(oft(block_share=True, target_modules=["k_proj", "gate_proj"]), 17),
}


def load_base(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype).eval()


@torch.no_grad()
def redraw(model: torch.nn.Module, generator: torch.Generator, distance: float = 1.0) -> None:
    """Draw every trained parameter anew, so that the adapter changes its layers by about a third of their output
    times ``distance``."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "magnitude" in name:
            parameter.mul_(1 + 0.3 * distance * noise)
        elif "lora_embedding_A" in name or "lora_embedding_B" in name:
            parameter.copy_(0.3 * distance * noise)
        elif "lora_A" in name:
            parameter.copy_(noise / math.sqrt(parameter.shape[1]))
        elif name.endswith(".bias"):
            parameter.add_(0.3 * distance * noise)
        elif "lora_B" in name:
            parameter.copy_(0.15 * distance * noise)
        elif "ia3_l" in name:
            parameter.copy_(1 + 0.3 * distance * noise)
        elif "vera_lambda_b" in name:
            parameter.copy_(0.3 * distance * noise)
        elif "vera_lambda_d" in name:
            parameter.copy_(1 + 0.3 * noise)
        elif "oft_R" in name:
            parameter.copy_(0.15 * distance * noise)
        else:
            raise ValueError(f"{name}: say how to draw it")


class Oracle:
    """PEFT's unmerged forward of one adapter (``None``: the base model), fp32 unless another dtype is asked for."""

    def __init__(self, base: Path, adapter: Path | None, dtype: torch.dtype = torch.float32) -> None:
        model = load_base(base, dtype)
        self.model = model if adapter is None else PeftModel.from_pretrained(model, str(adapter)).eval()

    @torch.no_grad()
    def log_probabilities(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of each token after the first, given those before it: ``(len(tokens) - 1,)`` fp64."""
        logits = self.model(input_ids=torch.tensor([list(tokens)])).logits[0, :-1].double()
        chosen = torch.tensor(list(tokens[1:]))
        return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
