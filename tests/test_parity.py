"""Every method, as PEFT saves it, gives what PEFT's own unmerged layers compute (fp32, eval mode)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import scute_converter
import torch
from scute_converter import reference
from torch import nn

# Both sides are sums of at most 64 fp32 products in another order: the rounding is within a few times
# 64 * 2^-24 = 4e-6 of the largest output. An adapter changes the output by more than a tenth of it.
TOLERANCE = 2e-5
EFFECT = 0.1


class Block(nn.Module):
    """Shapes that are not square and no powers of two; with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(30, 42)
        self.v_proj = nn.Linear(30, 18, bias=False)
        self.down_proj = nn.Linear(42, 30)
        self.o_proj = nn.Linear(18, 30, bias=False)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(30, 50, bias=False)


def toy() -> Toy:
    torch.manual_seed(0)
    model = Toy()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1)
    return model


def shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, nn.Linear)}


@torch.no_grad()
def redraw(model: nn.Module, config: peft.PeftConfig) -> None:
    """Every parameter that is saved, far from the identity."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "magnitude" in name:
            parameter.mul_(0.5 + noise.abs())
        elif "ia3_l" in name:
            parameter.copy_(1 + 0.5 * noise)
        elif "oft_R" in name:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif any(prefix in name for prefix in ("lora_", "vera_")):
            parameter.copy_(0.5 * noise)
        elif name.endswith(".bias") and (
            config.bias == "all" if not name.endswith("base_layer.bias") else getattr(config, "bias", "none") != "none"
        ):
            parameter.copy_(noise)


@dataclass(frozen=True)
class Case:
    """``edit``: a change of the saved config. ``oracle``: a change of the PEFT model that this edit stands for."""

    config: Callable[[], peft.PeftConfig]
    method: str
    edit: dict[str, Any] = field(default_factory=dict)
    notes: int = 0
    base_dtype: torch.dtype = torch.float32


QV = ["q_proj", "v_proj"]
ALL = ["q_proj", "v_proj", "down_proj", "o_proj"]


def lora(**fields: Any) -> Callable[[], peft.PeftConfig]:
    return lambda: peft.LoraConfig(**{"target_modules": ALL, "r": 3, "lora_alpha": 5, **fields})


def ia3(**fields: Any) -> Callable[[], peft.PeftConfig]:
    return lambda: peft.IA3Config(**{"target_modules": ALL, "feedforward_modules": ["down_proj"], **fields})


def vera(**fields: Any) -> Callable[[], peft.PeftConfig]:
    return lambda: peft.VeraConfig(**{"target_modules": ALL, "r": 11, **fields})


def oft(**fields: Any) -> Callable[[], peft.PeftConfig]:
    return lambda: peft.OFTConfig(**{"target_modules": ALL, "oft_block_size": 6, **fields})


CASES = {
    **{f"lora-r{r}": Case(lora(r=r), "LoRA") for r in (1, 3, 12, 16, 64)},
    **{f"rslora-r{r}": Case(lora(r=r, use_rslora=True), "rsLoRA") for r in (1, 16, 64)},
    "lora-patterns": Case(
        lora(rank_pattern={"q_proj": 7}, alpha_pattern={"v_proj": 2, r"layers\.1\.down_proj": 31}), "LoRA"
    ),
    "lora-patterns-rslora": Case(
        lora(
            use_rslora=True,
            rank_pattern={r"layers\.0\.(q|v)_proj": 2, "layers.1.v_proj": 16},
            alpha_pattern={"q_proj": 9, r".*\.1\.o_proj": 1},
        ),
        "rsLoRA",
    ),
    "lora-first-pattern-wins": Case(lora(alpha_pattern={"[qd].*_proj": 2, "_proj": 1, "q_proj": 40}), "LoRA"),
    "lora-bias": Case(lora(lora_bias=True, target_modules=QV), "LoRA"),
    "lora-all-biases": Case(lora(bias="all", target_modules=["q_proj"]), "LoRA"),
    "lora-own-biases": Case(lora(bias="lora_only"), "LoRA"),
    "lora-one-layer": Case(lora(layers_to_transform=[1], layers_pattern="layers"), "LoRA"),
    "lora-regex": Case(lora(target_modules=r"layers\.0\.q_proj|layers\.1\.(v|o)_proj"), "LoRA"),
    "lora-full-paths": Case(lora(target_modules=["layers.0.v_proj", "down_proj"]), "LoRA"),
    "lora-all-linear": Case(lora(target_modules="all-linear", exclude_modules=["o_proj"]), "LoRA"),
    "lora-head": Case(lora(target_modules=["lm_head"]), "LoRA"),
    "dora": Case(lora(use_dora=True, r=5), "DoRA"),
    "dora-rslora": Case(lora(use_dora=True, use_rslora=True, alpha_pattern={"q_proj": 2}), "DoRA"),
    "dora-own-biases": Case(lora(use_dora=True, bias="lora_only"), "DoRA"),
    "ia3-list": Case(ia3(), "(IA)3"),
    "ia3-suffix": Case(ia3(feedforward_modules=r".*(q|down)_proj"), "(IA)3"),
    "ia3-outputs": Case(ia3(feedforward_modules=[], target_modules=["q_proj", "down_proj"]), "(IA)3"),
    "vera": Case(vera(), "VeRA"),
    "vera-high-rank": Case(vera(r=70, target_modules=QV), "VeRA"),
    "vera-drawn": Case(vera(save_projection=False), "VeRA", notes=1),
    "vera-drawn-key": Case(vera(save_projection=False, projection_prng_key=7, r=4), "VeRA", notes=1),
    "vera-drawn-one-layer": Case(
        vera(save_projection=False, target_modules=["o_proj"], layers_to_transform=1, layers_pattern="layers"),
        "VeRA",
        notes=1,
    ),
    "vera-drawn-regex": Case(vera(save_projection=False, target_modules=r".*\.(v|o)_proj"), "VeRA", notes=1),
    "oft-cayley": Case(oft(use_cayley_neumann=False), "OFT"),
    **{f"oft-neumann-{n}": Case(oft(num_cayley_neumann_terms=n), "OFT") for n in (2, 3, 4, 5, 6, 8)},
    "oft-adjusted-block": Case(oft(oft_block_size=8), "OFT"),
    "oft-blocks": Case(oft(oft_block_size=0, r=3, use_cayley_neumann=False), "OFT"),
    "oft-shared": Case(oft(block_share=True), "OFT"),
    "oft-constrained": Case(oft(coft=True, eps=1.3), "OFT"),
    "oft-constrained-shared": Case(oft(coft=True, eps=1.3, block_share=True, use_cayley_neumann=False), "OFT"),
}


def save(case: Case, folder: Path) -> tuple[nn.Module, nn.Module]:
    """Write the adapter; returns the base model and PEFT's model."""
    base = toy()
    config = case.config()
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    redraw(model, config)
    model.save_pretrained(folder)
    if case.edit:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | case.edit))
    return base, model.base_model.model


@torch.no_grad()
def assert_parity(adapter: scute_converter.Adapter, base: nn.Module, model: nn.Module) -> None:
    """Every linear layer of PEFT's model against the form (or no form) of the adapter."""
    generator = torch.Generator().manual_seed(2)
    adapted = 0
    for path, linear in base.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        x = torch.randn(5, linear.in_features, generator=generator)
        expected, plain = model.get_submodule(path)(x), linear(x)
        if path not in adapter.forms:
            assert torch.equal(expected, plain), f"{path} is adapted by PEFT only"
            continue
        adapted += 1
        actual = reference.apply(adapter.forms[path], adapter.bases, x, linear.weight, linear.bias)
        largest = expected.abs().max()
        assert (actual - expected).abs().max() < TOLERANCE * largest, path
        assert (plain - expected).abs().max() > EFFECT * largest, f"{path} is hardly adapted"
    assert adapted == len(adapter.forms) > 0


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    base, model = save(case, tmp_path)
    adapter = scute_converter.load(tmp_path, base=shapes(base), base_dtype=case.base_dtype)
    assert_parity(adapter, base, model)
    assert adapter.method == case.method
    assert len(adapter.notes) == case.notes
