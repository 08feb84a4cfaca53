"""Writes adapters with PEFT itself, their vectors redrawn far from the identity, and answers for them with PEFT."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft import IA3Config, LoraConfig, OFTConfig, PeftConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# In the folder of an adapter that PEFT cannot write: one that it can, and that computes the same.
EQUIVALENT = "equivalent"


@dataclass(frozen=True)
class Recipe:
    """How to make one adapter: PEFT's config, the seed of its numbers, and how far from the identity they are drawn
    (1: far; 0.007 puts DoRA's and (IA)3's scales within 0.2 % of 1).

    ``rewrite``: for a file that PEFT cannot write, makes it in its second argument out of the folder that PEFT wrote,
    which it may change so that both compute the same.
    """

    config: Callable[[], PeftConfig]
    seed: int = 0
    distance: float = 1.0
    rewrite: Callable[[Path, Path], None] | None = None

    def write(self, path: Path, base: Path) -> None:
        """Save the adapter for the base model in ``base`` into ``path``, as PEFT saves it."""
        model = get_peft_model(load_base(base), self.config())
        redraw(model, torch.Generator().manual_seed(self.seed), self.distance)
        if self.rewrite is None:
            model.save_pretrained(str(path))
        else:
            model.save_pretrained(str(path / EQUIVALENT))
            self.rewrite(path / EQUIVALENT, path)


def write_all(recipes: Mapping[str, Recipe], folder: Path, base: Path) -> dict[str, Path]:
    """Save an adapter of every recipe into a folder of its name in ``folder``; returns those by name."""
    for name, recipe in recipes.items():
        recipe.write(folder / name, base)
    return {name: folder / name for name in recipes}


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


def of(config: Callable[..., PeftConfig], **fields: Any) -> Callable[[], PeftConfig]:
    """The config of any other method, on all projections if no others are named."""
    return lambda: config(task_type="CAUSAL_LM", **{"target_modules": ALL, **fields})


# Two or more of each method that has live slots of its own: other seeds, ranks, targets and everything that changes
# their maths.
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


def rewrite_as_bone(miss: Path, bone: Path) -> None:
    """The file of PEFT 0.14 to 0.18 for what is called MiSS since then."""
    config = json.loads((miss / CONFIG).read_text())
    fields = {"peft_type": "BONE", "init_weights": True, "r": config["r"], "target_modules": config["target_modules"]}
    (bone / CONFIG).write_text(json.dumps(fields))
    tensors = load_file(miss / WEIGHTS)
    save_file({key.replace("miss_block", "bone_block"): tensor for key, tensor in tensors.items()}, bone / WEIGHTS)


def rewrite_as_qalora(lora: Path, qalora: Path, group: int = 12) -> None:
    """PEFT has QALoRA on GPTQ bases only. Its ``lora_A`` has one column for the sum of ``group`` neighbouring inputs;
    the LoRA gets this column for each of them, with the factor ``in / group ** 2`` of ``QALoraLinearVariant``."""
    config = json.loads((lora / CONFIG).read_text())
    (qalora / CONFIG).write_text(json.dumps({**config, "use_qalora": True, "qalora_group_size": group}))
    plain = load_file(lora / WEIGHTS)
    pooled = {key: tensor[:, ::group].contiguous() if "lora_A" in key else tensor for key, tensor in plain.items()}
    save_file(pooled, qalora / WEIGHTS)
    for key, tensor in pooled.items():
        if "lora_A" in key:
            plain[key] = tensor.repeat_interleave(group, dim=1) * (tensor.shape[1] / group)
    save_file(plain, lora / WEIGHTS, metadata={"format": "pt"})


_BDLORA = peft.BdLoraConfig(
    target_modules_bd_a=["o_proj", "down_proj"], target_modules_bd_b=["q_proj", "up_proj"], nblocks=4
)

# One of each method and variant that ``RECIPES`` does not have.
EVERY_METHOD: dict[str, Recipe] = {
    # PEFT's own singular vectors are rounded to fp32, the more so the closer two singular values lie. Those of k_proj
    # and gate_proj cost a log-probability 7e-5.
    "pissa": Recipe(
        lora(r=6, init_lora_weights="pissa", target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]), 20
    ),
    "olora": Recipe(lora(r=5, init_lora_weights="olora", target_modules=["q_proj", "o_proj", "gate_proj"]), 21),
    "kasa": Recipe(lora(r=7, kasa_config=peft.KasaConfig()), 22),
    "bdlora": Recipe(lora(use_bdlora=_BDLORA, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"]), 23),
    "velora": Recipe(lora(r=3, velora_config=peft.VeloraConfig(num_groups=4, init_type="random")), 24),
    "monteclora": Recipe(lora(r=5, monteclora_config=peft.MontecloraConfig(num_samples=3, buffer_size=2)), 25),
    "qalora": Recipe(lora(r=5), 26, rewrite=rewrite_as_qalora),
    "adalora": Recipe(of(peft.AdaLoraConfig, init_r=5, lora_alpha=7, total_step=1), 27),
    "loha": Recipe(of(peft.LoHaConfig, r=4, alpha=5), 28),
    "lokr": Recipe(of(peft.LoKrConfig, r=3, alpha=5, target_modules=["k_proj", "o_proj", "down_proj"]), 29),
    "miss": Recipe(of(peft.MissConfig, r=7), 30),
    "bone": Recipe(of(peft.MissConfig, r=11, target_modules=["v_proj", "up_proj"]), 31, rewrite=rewrite_as_bone),
    "delora": Recipe(of(peft.DeloraConfig, r=5), 32),
    "gralora": Recipe(of(peft.GraloraConfig, r=6, alpha=7, hybrid_r=3), 33),
    "poly": Recipe(of(peft.PolyConfig, r=5, n_splits=2, n_skills=3), 34),
    "hra": Recipe(of(peft.HRAConfig, r=6), 35),
    "deft": Recipe(of(peft.DeftConfig, r=3, alpha=5), 36),
    "para": Recipe(of(peft.DeftConfig, r=3, para=True, target_modules=["q_proj", "gate_proj", "down_proj"]), 37),
    "peanut": Recipe(of(peft.PeanutConfig, r=5, depth=1), 38),
    "vblora": Recipe(of(peft.VBLoRAConfig, vector_length=8, num_vectors=50, save_only_topk_weights=True), 39),
    "tinylora": Recipe(of(peft.TinyLoraConfig, r=3, u=13, weight_tying=0.4), 40),
    "unilora": Recipe(of(peft.UniLoraConfig, theta_d_length=500), 41),
    "fourierft": Recipe(of(peft.FourierFTConfig, n_frequency=100), 42),
    "boft": Recipe(of(peft.BOFTConfig, boft_block_size=4), 43),
    "glora": Recipe(of(peft.GloraConfig, config_A_B="vector"), 44),
    "beft": Recipe(of(peft.BeftConfig, target_modules=["v_proj", "o_proj", "down_proj"]), 45),
    "pvera": Recipe(of(peft.PveraConfig, r=24), 46),
}


def load_base(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype).eval()


# Mean and spread of the parameters that are drawn, by a part of their names; the first that matches counts.
_DRAWN = {
    "lora_embedding": (0, 0.3),
    "poly_lora": (0, 0.3),
    "module_logits": (0, 2),
    "lora_B": (0, 0.15),
    "lora_E": (0, 1),
    "lora_diag": (1, 0.3),
    "monteclora_sampler": (1, 0.3),
    "ia3_l": (1, 0.3),
    "vera_lambda_b": (0, 0.3),  # and PVeRA's
    "oft_R": (0, 0.15),
    "boft_R": (0, 0.3),
    "boft_s": (1, 0.3),
    "hada_": (0, 0.3),
    "lokr_": (0, 0.3),
    "miss_block": (0, 0.05),
    "delora_lambda": (8, 1),
    "delora_": (0, 1),  # its length is divided out
    "gralora_A": (0, 0.15),
    "gralora_B": (0, 0.15),
    "hra_u": (0, 1),
    "deft_": (0, 0.15),
    "peanut_A": (0, 1),
    "peanut_B": (0, 0.03),
    "peanut_": (0, 0.5),
    "vblora_logits": (0, 2),
    "vblora_vector_bank": (0, 0.2),
    "tinylora_v": (0, 0.3),
    "unilora_theta_d": (0, 0.7),
    "fourierft_spectrum": (0, 0.3),
    "glora_": (0, 0.1),
    "beft_bias": (0, 0.3),
}


@torch.no_grad()
def redraw(model: torch.nn.Module, generator: torch.Generator, distance: float = 1.0) -> None:
    """Draw every trained parameter anew, so that the adapter changes its layers by about a third of their output
    times ``distance``."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or "ranknum" in name:  # AdaLoRA's is a count
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        drawn = next((drawn for part, drawn in _DRAWN.items() if part in name), None)
        if "magnitude" in name:
            parameter.mul_(1 + 0.3 * distance * noise)
        elif name.endswith(".bias"):
            parameter.add_(0.3 * distance * noise)
        elif drawn is not None:
            mean, spread = drawn
            parameter.copy_(mean + spread * distance * noise)
        elif "lora_A" in name:  # what is inside of another factor keeps its size
            parameter.copy_(noise / math.sqrt(parameter.shape[1]))
        elif "vera_lambda_d" in name:
            parameter.copy_(1 + 0.3 * noise)
        else:
            raise ValueError(f"{name}: say how to draw it")


class Oracle:
    """PEFT's unmerged forward of one adapter (``None``: the base model), fp32 unless another dtype is asked for.

    The adapter is loaded for a fresh base model, since some methods change its weights when an adapter is made.
    """

    def __init__(
        self, base: Path, adapter: Path | None, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        self.device = device
        self.model = load_base(base, dtype).to(device)
        self.options: dict[str, Any] = {}
        if adapter is None:
            return
        folder = adapter / EQUIVALENT if (adapter / EQUIVALENT).exists() else adapter
        self.model = PeftModel.from_pretrained(self.model, str(folder)).eval().to(device)
        if self.model.peft_config["default"].peft_type == peft.PeftType.POLY:
            self.options["task_ids"] = torch.tensor(
                [0], device=device
            )  # it mixes its skills by task, and the adapter has one

    @torch.no_grad()
    def log_probabilities(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of each token after the first, given those before it: ``(len(tokens) - 1,)`` fp64."""
        inputs = torch.tensor([list(tokens)], device=self.device)
        logits = self.model(input_ids=inputs, **self.options).logits[0, :-1].double().cpu()
        chosen = torch.tensor(list(tokens[1:]))
        return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
