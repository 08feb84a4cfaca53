"""Every method, as PEFT saves it, gives what PEFT's own unmerged layers compute (fp32, eval mode)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import scute_converter
from scute_converter import reference

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


def transposed(model: nn.Module) -> nn.Module:
    """The same model with layers that store their weight as ``(in, out)``, as GPT-2 has them (``fan_in_fan_out``)."""
    for path, layer in [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]:
        conv = Conv1D(layer.out_features, layer.in_features)
        conv.weight.data = layer.weight.data.T.contiguous()
        conv.bias.data = torch.zeros(layer.out_features) if layer.bias is None else layer.bias.data
        model.set_submodule(path, conv)
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
        elif "delora_lambda" in name:
            parameter.copy_(10 * (1 + noise.abs()))
        elif "ia3_l" in name or "boft_s" in name:
            parameter.copy_(1 + 0.5 * noise)
        elif any(part in name for part in ("beft_bias", "boft_R", "fourierft_spectrum", "unilora_theta_d")):
            parameter.copy_(noise)
        elif "vblora_logits" in name:
            parameter.copy_(2 * noise)
        elif "oft_R" in name:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif any(
            prefix in name for prefix in ("lora_", "vera_", "hada_", "lokr_", "miss_", "hra_", "deft_", "peanut_")
        ):
            parameter.copy_(0.5 * noise)
        elif name.endswith(".bias"):
            bias = getattr(config, "bias", "none")
            if bias == "all" or (bias != "none" and name.endswith("base_layer.bias")):
                parameter.copy_(noise)


@dataclass(frozen=True)
class Case:
    """``method`` and ``notes``: the name shown and the number of notes of the loaded adapter. ``dtype``: of the base
    model, on which PEFT rounds the projections that it draws. ``reloaded``: PEFT changes the base weights when it
    makes the adapter, and the oracle is the saved adapter on a clean base."""

    config: Callable[[], peft.PeftConfig]
    method: str
    notes: int = 0
    dtype: torch.dtype = torch.float32
    reloaded: bool = False


QV = ["q_proj", "v_proj"]
ALL = ["q_proj", "v_proj", "down_proj", "o_proj"]


def of(kind: Callable[..., peft.PeftConfig], **defaults: Any) -> Callable[..., Callable[[], peft.PeftConfig]]:
    """What makes configs of a method: ``of(Config, r=3)(alpha=5)()``, on all layers if no others are named."""

    def of_fields(**fields: Any) -> Callable[[], peft.PeftConfig]:
        return lambda: kind(**{"target_modules": ALL, **defaults, **fields})

    return of_fields


lora = of(peft.LoraConfig, r=3, lora_alpha=5)
ia3 = of(peft.IA3Config, feedforward_modules=["down_proj"])
vera = of(peft.VeraConfig, r=11)
oft = of(peft.OFTConfig, oft_block_size=6)
vblora = of(peft.VBLoRAConfig, vector_length=6, num_vectors=13, init_vector_bank_bound=1)
tinylora = of(peft.TinyLoraConfig, r=3, u=13)
unilora = of(peft.UniLoraConfig, theta_d_length=101)
fourierft = of(peft.FourierFTConfig, n_frequency=50)
boft = of(peft.BOFTConfig, boft_block_size=6)
beft = of(peft.BeftConfig)
glora = of(peft.GloraConfig, r=3, config_A_B="vector")
pvera = of(peft.PveraConfig, r=11)
adalora = of(peft.AdaLoraConfig, init_r=5, lora_alpha=7, total_step=1)
loha = of(peft.LoHaConfig, r=3, alpha=5)
lokr = of(peft.LoKrConfig, r=2, alpha=5)
miss = of(peft.MissConfig, r=7)
delora = of(peft.DeloraConfig, r=5)
gralora = of(peft.GraloraConfig, r=6, alpha=7)
hra = of(peft.HRAConfig, r=6)
deft = of(peft.DeftConfig, r=3)
peanut = of(peft.PeanutConfig, r=5)

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
    "vera-drawn-bfloat16": Case(vera(save_projection=False), "VeRA", notes=1, dtype=torch.bfloat16),
    "vera-drawn-regex": Case(vera(save_projection=False, target_modules=r".*\.(v|o)_proj"), "VeRA", notes=1),
    "oft-cayley": Case(oft(use_cayley_neumann=False), "OFT"),
    **{f"oft-neumann-{n}": Case(oft(num_cayley_neumann_terms=n), "OFT") for n in (2, 3, 4, 5, 6, 8)},
    "oft-adjusted-block": Case(oft(oft_block_size=8), "OFT"),
    "oft-blocks": Case(oft(oft_block_size=0, r=3, use_cayley_neumann=False), "OFT"),
    "oft-shared": Case(oft(block_share=True), "OFT"),
    "oft-constrained": Case(oft(coft=True, eps=1.3), "OFT"),
    "oft-constrained-shared": Case(oft(coft=True, eps=1.3, block_share=True, use_cayley_neumann=False), "OFT"),
    # Folded into a low-rank pair, without the base weight.
    "bdlora-a": Case(lora(use_bdlora=peft.BdLoraConfig(target_modules_bd_a=["_proj"], nblocks=3)), "BD-LoRA"),
    "bdlora-b": Case(
        lora(r=4, use_bdlora=peft.BdLoraConfig(target_modules_bd_b=["layers"], nblocks=2), use_rslora=True), "BD-LoRA"
    ),
    "bdlora-both-and-plain": Case(
        lora(
            r=6,
            rank_pattern={"q_proj": 9},
            alpha_pattern={"down_proj": 2},
            use_bdlora=peft.BdLoraConfig(
                target_modules_bd_a=["0.q", "down_proj"], target_modules_bd_b=["v_proj"], nblocks=3, match_strict=False
            ),
        ),
        "BD-LoRA",
    ),
    "bdlora-bias": Case(
        lora(
            lora_bias=True,
            use_bdlora=peft.BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=3),
            target_modules=["q_proj"],
        ),
        "BD-LoRA",
    ),
    "velora": Case(lora(velora_config=peft.VeloraConfig(num_groups=4, init_type="random")), "VeLoRA"),
    "velora-of-pissa": Case(
        lora(velora_config=peft.VeloraConfig(num_groups=4), init_lora_weights="pissa"), "VeLoRA", reloaded=True
    ),
    "monteclora": Case(lora(monteclora_config=peft.MontecloraConfig(num_samples=3, buffer_size=2)), "MonteCLoRA"),
    "adalora": Case(adalora(), "AdaLoRA"),
    "adalora-scaled-by-rank": Case(adalora(lora_alpha=-1, init_r=12), "AdaLoRA"),
    "adalora-ignores": Case(adalora(use_rslora=True, alpha_pattern={"q_proj": 70}, lora_bias=True), "AdaLoRA"),
    "adalora-all-biases": Case(adalora(bias="all", target_modules=["q_proj"]), "AdaLoRA"),
    "adalora-own-biases": Case(adalora(bias="lora_only"), "AdaLoRA"),
    "adalora-one-layer": Case(adalora(layers_to_transform=[1], layers_pattern="layers"), "AdaLoRA"),
    "loha": Case(loha(), "LoHa"),
    "loha-more-than-full-rank": Case(loha(r=8), "LoHa"),
    "loha-patterns": Case(
        loha(rank_pattern={"q_proj": 1}, alpha_pattern={"v_proj": 2, r"layers\.1\.down_proj": 31}), "LoHa"
    ),
    "loha-one-layer": Case(loha(layers_to_transform=[0], layers_pattern="layers", target_modules=QV), "LoHa"),
    "lokr-right-factored": Case(lokr(), "LoKr"),
    "lokr-both-factored": Case(lokr(decompose_both=True), "LoKr"),
    "lokr-left-factored": Case(lokr(decompose_both=True, decompose_factor=15, r=4, target_modules=["v_proj"]), "LoKr"),
    "lokr-factor": Case(lokr(decompose_factor=2, r=4, alpha=1), "LoKr"),
    "lokr-patterns": Case(
        lokr(rank_pattern={"q_proj": 3, "down_proj": 1}, alpha_pattern={"o_proj": 2, r"layers\.1\.v_proj": 11}), "LoKr"
    ),
    "miss": Case(miss(), "MiSS"),
    "miss-divisor": Case(miss(r=6, init_weights=False), "MiSS"),
    "miss-mini": Case(miss(init_weights="mini", mini_r=6), "MiSS"),
    "miss-mini-one": Case(miss(init_weights="mini", r=18, target_modules=QV), "MiSS"),
    "miss-own-biases": Case(miss(bias="MiSS_only"), "MiSS"),
    "miss-one-layer": Case(miss(layers_to_transform=[1], layers_pattern="layers"), "MiSS"),
    "delora": Case(delora(), "DeLoRA"),
    "delora-patterns": Case(delora(rank_pattern={"q_proj": 2, r"layers\.1\.v_proj": 11}), "DeLoRA"),
    "delora-own-biases": Case(delora(bias="delora_only"), "DeLoRA"),
    "delora-one-layer": Case(delora(layers_to_transform=[1], layers_pattern="layers"), "DeLoRA"),
    "gralora": Case(gralora(), "GraLoRA"),
    "gralora-3": Case(gralora(gralora_k=3, r=9), "GraLoRA"),
    "gralora-one-block": Case(gralora(gralora_k=1), "GraLoRA"),
    "gralora-hybrid": Case(gralora(gralora_k=6, hybrid_r=5), "GraLoRA"),
    "gralora-own-biases": Case(gralora(bias="gralora_only"), "GraLoRA"),
    "gralora-one-layer": Case(gralora(layers_to_transform=[1], layers_pattern="layers"), "GraLoRA"),
    # Folded into a low-rank pair with the base weight.
    "pissa": Case(lora(init_lora_weights="pissa"), "PiSSA", reloaded=True),
    "pissa-rslora-patterns": Case(
        lora(init_lora_weights="pissa", use_rslora=True, rank_pattern={"q_proj": 7}, alpha_pattern={"v_proj": 2}),
        "PiSSA",
        reloaded=True,
    ),
    "pissa-full-rank": Case(lora(init_lora_weights="pissa", r=18, target_modules=QV), "PiSSA", reloaded=True),
    "pissa-all-biases": Case(
        lora(init_lora_weights="pissa", bias="all", target_modules=["q_proj"]), "PiSSA", reloaded=True
    ),
    "pissa-dora": Case(lora(init_lora_weights="pissa", use_dora=True), "DoRA", reloaded=True),
    "olora": Case(lora(init_lora_weights="olora"), "OLoRA", reloaded=True),
    "olora-rslora-patterns": Case(
        lora(
            init_lora_weights="olora",
            use_rslora=True,
            rank_pattern={r"layers\.1\.q_proj": 7},
            alpha_pattern={"v_proj": 2},
            layers_to_transform=[1],
            layers_pattern="layers",
        ),
        "OLoRA",
        reloaded=True,
    ),
    "olora-negative": Case(lora(init_lora_weights="olora", lora_alpha=-4), "OLoRA", reloaded=True),
    "olora-dora": Case(lora(init_lora_weights="olora", use_dora=True), "DoRA", reloaded=True),
    "kasa": Case(lora(kasa_config=peft.KasaConfig()), "KaSA", reloaded=True),
    "kasa-patterns": Case(
        lora(
            kasa_config=peft.KasaConfig(beta=0.1, gamma=0),
            use_rslora=True,
            rank_pattern={"q_proj": 7, "v_proj": 17},
            alpha_pattern={"v_proj": 2},
        ),
        "KaSA",
        reloaded=True,
    ),
    "kasa-own-biases": Case(lora(kasa_config=peft.KasaConfig(), bias="lora_only"), "KaSA", reloaded=True),
    "hra": Case(hra(), "HRA"),
    "hra-odd-rank": Case(hra(r=5, target_modules=QV), "HRA"),
    "hra-one": Case(hra(r=1), "HRA"),
    "hra-orthogonal": Case(hra(apply_GS=True, r=7), "HRA"),
    "hra-all-biases": Case(hra(bias="all", target_modules=["q_proj"]), "HRA"),
    "hra-own-biases": Case(hra(bias="hra_only"), "HRA"),
    "hra-one-layer": Case(hra(layers_to_transform=[1], layers_pattern="layers"), "HRA"),
    "deft": Case(deft(), "DEFT"),
    "deft-alpha": Case(deft(alpha=7, r=5), "DEFT"),
    "deft-qr": Case(deft(decomposition_method="qr", alpha=20), "DEFT"),
    "deft-rank-over-outputs": Case(deft(r=25, target_modules=["v_proj"]), "DEFT"),
    "deft-own-biases": Case(deft(bias="deft_only", target_modules=QV), "DEFT"),
    "para": Case(deft(para=True), "PaRa"),
    "para-qr": Case(deft(para=True, decomposition_method="qr", r=6, alpha=3), "PaRa"),
    "peanut": Case(peanut(), "PEANuT"),
    **{
        f"peanut-{act_fn}-{depth}": Case(peanut(act_fn=act_fn, depth=depth, scaling=0.7), "PEANuT")
        for act_fn, depth in (("relu", 3), ("gelu", 1), ("silu", 2), ("tanh", 1))
    },
    # Shared bases, rotations, scales and shifts.
    "vblora": Case(vblora(), "VB-LoRA"),
    "vblora-topk-saved": Case(vblora(save_only_topk_weights=True, topk=3, r=5, bias="vblora_only"), "VB-LoRA"),
    "vblora-many-vectors": Case(vblora(save_only_topk_weights=True, num_vectors=300, vector_length=3), "VB-LoRA"),
    "vblora-one-of-the-bank": Case(vblora(save_only_topk_weights=True, topk=1, target_modules=QV), "VB-LoRA"),
    "vblora-whole-bank": Case(vblora(topk=13, r=2, bias="all"), "VB-LoRA"),
    "tinylora": Case(tinylora(), "TinyLoRA"),
    "tinylora-one-layer": Case(tinylora(layers_to_transform=[1], layers_pattern="layers"), "TinyLoRA"),
    "tinylora-some-tied": Case(tinylora(weight_tying=0.6, r=20, u=3, bias="all"), "TinyLoRA"),
    "tinylora-all-tied": Case(tinylora(weight_tying=1.0, r=2, u=7, target_modules=QV), "TinyLoRA"),
    "tinylora-drawn": Case(tinylora(save_projection=False, weight_tying=0.3), "TinyLoRA", notes=1),
    "tinylora-drawn-bfloat16": Case(
        tinylora(save_projection=False, projection_seed=-7, target_modules=r".*\.(q|o)_proj"),
        "TinyLoRA",
        notes=1,
        dtype=torch.bfloat16,
    ),
    "unilora": Case(unilora(), "UniLoRA", notes=1),
    "unilora-own-biases": Case(unilora(r=3, proj_seed=5, bias="unilora_only"), "UniLoRA", notes=1),
    "unilora-bfloat16": Case(
        unilora(layers_to_transform=1, layers_pattern="layers"), "UniLoRA", notes=1, dtype=torch.bfloat16
    ),
    "unilora-more-than-places": Case(unilora(theta_d_length=3000, r=1, target_modules=QV), "UniLoRA", notes=1),
    "unilora-even": Case(unilora(theta_d_length=16, target_modules=r".*v_proj"), "UniLoRA", notes=1),
    "unilora-saved": Case(unilora(save_indices=True, r=7), "UniLoRA"),
    "unilora-saved-bfloat16": Case(unilora(save_indices=True), "UniLoRA", dtype=torch.bfloat16),
    "fourierft": Case(fourierft(), "FourierFT"),
    "fourierft-patterns": Case(
        fourierft(n_frequency_pattern={"q_proj": 7, r"0\.o_proj": 311}, scaling=70, random_loc_seed=3), "FourierFT"
    ),
    "fourierft-every-wave": Case(fourierft(n_frequency=540, scaling=20, target_modules=["v_proj"]), "FourierFT"),
    "fourierft-all-biases": Case(fourierft(bias="all", layers_to_transform=[0], layers_pattern="layers"), "FourierFT"),
    "boft": Case(boft(), "BOFT"),
    "boft-blocks": Case(boft(boft_block_size=0, boft_block_num=3, boft_dropout=0.4), "BOFT"),
    "boft-one-factor-anyway": Case(boft(boft_block_size=3, boft_n_butterfly_factor=2), "BOFT"),
    "boft-own-biases": Case(boft(bias="boft_only", target_modules=QV), "BOFT"),
    "boft-all-biases": Case(boft(bias="all", target_modules=["q_proj"]), "BOFT"),
    "glora": Case(glora(), "GLoRA"),
    "glora-vectors": Case(glora(config_C="vector", config_D_E="vector"), "GLoRA"),
    "glora-constants": Case(glora(config_A_B="constant", config_C="none"), "GLoRA"),
    "glora-biases-only": Case(glora(config_A_B="none", target_modules=["q_proj", "down_proj"]), "GLoRA"),
    "glora-weights-only": Case(glora(config_C="none", config_D_E="none"), "GLoRA"),
    "glora-all-biases": Case(glora(bias="all", config_D_E="vector", target_modules=QV), "GLoRA"),
    "glora-own-biases": Case(glora(bias="glora_only", config_A_B="constant"), "GLoRA"),
    "beft": Case(beft(), "BEFT"),
    "beft-one-layer": Case(beft(target_modules=r"layers\.1\.(q|o)_proj"), "BEFT"),
    "pvera": Case(pvera(bias="pvera_only"), "PVeRA"),
    "pvera-high-rank": Case(pvera(r=70, target_modules=QV), "PVeRA"),
    "pvera-drawn": Case(pvera(save_projection=False, projection_prng_key=5), "PVeRA", notes=1),
    "pvera-drawn-bfloat16": Case(
        pvera(save_projection=False, target_modules=r".*\.(q|o)_proj"), "PVeRA", notes=1, dtype=torch.bfloat16
    ),
}


def save(case: Case, folder: Path, base: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
    """Write the adapter of ``base``, the toy if None; returns the base model and PEFT's model."""
    base = (toy() if base is None else base).to(case.dtype)
    config = case.config()
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    redraw(model, config)
    model.save_pretrained(folder)
    if case.reloaded:
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    return base.float(), model.base_model.model.float()


@torch.no_grad()
def assert_parity(adapter: scute_converter.Adapter, base: nn.Module, model: nn.Module) -> None:
    """Every linear layer and embedding of PEFT's model against the form (or no form) of the adapter."""
    generator = torch.Generator().manual_seed(2)
    adapted = 0
    for path, layer in base.named_modules():
        if isinstance(layer, nn.Linear):
            x = inputs = torch.randn(5, layer.in_features, generator=generator)
            weight, bias = layer.weight, layer.bias
        elif isinstance(layer, Conv1D):
            x = inputs = torch.randn(5, layer.nx, generator=generator)
            weight, bias = layer.weight.T, layer.bias
        elif isinstance(layer, nn.Embedding):
            inputs = torch.randint(layer.num_embeddings, (5,), generator=generator)
            x = nn.functional.one_hot(inputs, layer.num_embeddings).float()
            weight, bias = layer.weight.T, None
        else:
            continue
        expected, plain = model.get_submodule(path)(inputs), layer(inputs)
        if path not in adapter.forms:
            assert torch.equal(expected, plain), f"{path} is adapted by PEFT only"
            continue
        adapted += 1
        actual = reference.apply(adapter.forms[path], adapter.bases, x, weight, bias)
        largest = expected.abs().max()
        assert (actual - expected).abs().max() < TOLERANCE * largest, path
        assert (plain - expected).abs().max() > EFFECT * largest, f"{path} is hardly adapted"
    assert adapted == len(adapter.forms) > 0


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    base, model = save(case, tmp_path)
    adapter = scute_converter.load(tmp_path, base=shapes(base), base_dtype=case.dtype)
    assert_parity(adapter, base, model)
    assert adapter.method == case.method
    assert len(adapter.notes) == case.notes


# Every method that PEFT has for such layers.
TRANSPOSED = {
    "lora": Case(lora(fan_in_fan_out=True), "LoRA"),
    "dora": Case(lora(fan_in_fan_out=True, use_dora=True), "DoRA"),
    "pissa": Case(lora(fan_in_fan_out=True, init_lora_weights="pissa"), "PiSSA", reloaded=True),
    "adalora": Case(adalora(fan_in_fan_out=True), "AdaLoRA"),
    "ia3": Case(ia3(fan_in_fan_out=True), "(IA)3"),
    "vera": Case(vera(fan_in_fan_out=True), "VeRA"),
    "pvera": Case(pvera(fan_in_fan_out=True), "PVeRA"),
    "vblora": Case(vblora(fan_in_fan_out=True), "VB-LoRA"),
    "unilora": Case(unilora(fan_in_fan_out=True, save_indices=True), "UniLoRA"),
    "tinylora": Case(tinylora(fan_in_fan_out=True), "TinyLoRA"),
    "fourierft": Case(fourierft(fan_in_fan_out=True), "FourierFT"),
    "gralora": Case(gralora(fan_in_fan_out=True), "GraLoRA"),
    "deft": Case(deft(fan_in_fan_out=True), "DEFT"),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_layers(name: str, tmp_path: Path) -> None:
    case, known = TRANSPOSED[name], shapes(toy())
    base, model = save(case, tmp_path, transposed(toy()))
    adapter = scute_converter.load(tmp_path, base=known, base_dtype=case.dtype)
    assert_parity(adapter, base, model)
    assert adapter.method == case.method


def language_model(family: str, tied: bool = False) -> nn.Module:
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=93,
        hidden_size=36,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model.eval()


@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("dora", [False, True])
def test_trained_biases_of_qwen2(bias: str, dora: bool, tmp_path: Path) -> None:
    """``all`` also retrains the biases of k_proj and v_proj, which have no adapter."""
    base = language_model("qwen2")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], bias=bias, use_dora=dora, r=3)
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    redraw(model, config)
    model.save_pretrained(tmp_path)
    adapter = scute_converter.load(tmp_path)
    assert_parity(adapter, base, model.base_model.model)
    assert ("model.layers.1.self_attn.k_proj" in adapter.forms) == (bias == "all")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "v_proj"]], ids="+".join
)
def test_embedding_and_head(targets: list[str], dora: bool, tied: bool, tmp_path: Path) -> None:
    base = language_model("llama", tied)
    config = peft.LoraConfig(target_modules=targets, use_dora=dora, r=5, use_rslora=True)
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    redraw(model, config)
    model.save_pretrained(tmp_path)
    adapter = scute_converter.load(tmp_path)
    assert_parity(adapter, base, model.base_model.model)
    for module, payload in adapter.payloads.items():
        assert torch.equal(payload, base.get_submodule(module).weight)
    assert {module.rpartition(".")[2] for module in adapter.payloads} >= {t for t in targets if t != "v_proj"}


def test_tied_adapters_of_embedding_and_head(tmp_path: Path) -> None:
    base = language_model("llama", tied=True)
    config = peft.LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True, r=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    redraw(model, config)
    model.save_pretrained(tmp_path)
    adapter = scute_converter.load(tmp_path)
    assert_parity(adapter, base, model.base_model.model)
    assert set(adapter.forms) == {"model.embed_tokens", "lm_head"}


@torch.no_grad()
def test_converted_pissa(tmp_path: Path) -> None:
    """PEFT doubles the rank when it converts; the terms cancel, so that bf16 factors of the file lose the adapter."""
    base = toy()
    config = peft.LoraConfig(target_modules=QV, r=3, rank_pattern={"v_proj": 5}, init_lora_weights="pissa")
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    config.init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    config.init_lora_weights = "pissa"
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "out", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))

    stored = safetensors.torch.load_file(tmp_path / "out" / "adapter_model.safetensors")
    adapter = scute_converter.load(tmp_path / "out")
    for path, form in adapter.forms.items():
        weight = base.get_submodule(path).weight
        layer = model.base_model.model.get_submodule(path)
        delta = layer.base_layer.weight + layer.get_delta_weight("default") - weight
        key = f"base_model.model.{path}.lora_"
        scale = config.lora_alpha / config.r if path.endswith("q_proj") else config.lora_alpha / 5
        naive = scale * stored[key + "B.weight"].bfloat16().float() @ stored[key + "A.weight"].bfloat16().float()
        ours = form.pair.b.bfloat16().float().T @ form.pair.a.bfloat16().float()
        # Each factor is rounded to 2^-9 of itself; balanced factors carry that over to their product.
        assert (ours - delta).norm() < 2 * 2**-9 * delta.norm()
        assert (naive - delta).norm() > 10 * (ours - delta).norm()
        assert form.pair.rank == stored[key + "A.weight"].shape[0]


def series(q: torch.Tensor, weights: list[int]) -> torch.Tensor:
    return torch.eye(len(q)) + sum(weight * torch.linalg.matrix_power(q, i + 1) for i, weight in enumerate(weights))


def test_oft_before_0_18() -> None:
    """Without peft_version the series is that of PEFT 0.16 and 0.17: every power has the weight 2."""
    base = toy().layers[0].q_proj
    vector = 0.3 * torch.randn(1, 15, generator=torch.Generator().manual_seed(3))
    config = {"peft_type": "OFT", "use_cayley_neumann": True, "block_share": True, "target_modules": ["q_proj"]}
    q = torch.zeros(6, 6)
    q[tuple(torch.triu_indices(6, 6, 1))] = vector[0]
    q = q - q.T
    for terms, weights in {1: [], 2: [2], 3: [2, 2], 5: [2, 2, 2, 2]}.items():
        adapter = scute_converter.load_tensors(
            {"base_model.model.q_proj.oft_R.weight": vector}, config | {"num_cayley_neumann_terms": terms}, "old"
        )
        x = torch.randn(4, 30)
        expected = base(x @ torch.block_diag(*5 * [series(q, weights)]))
        actual = reference.apply(adapter.forms["q_proj"], {}, x, base.weight, base.bias)
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
        assert len(adapter.notes) == (1 if terms > 1 else 2)  # one term is the identity, and said to be
        newer = scute_converter.load_tensors(
            {"base_model.model.q_proj.oft_R.weight": vector},
            config | {"num_cayley_neumann_terms": terms, "peft_version": "0.18.0"},
            "new",
        )
        assert (newer.digest == adapter.digest) == (terms < 3)


def test_oft_of_0_14() -> None:
    """``oft_r`` rotates the input and ``oft_s`` scales the product, not the bias (PEFT 0.14 and 0.15)."""
    base = toy().layers[0].q_proj
    generator = torch.Generator().manual_seed(3)
    parameter, scale = torch.randn(5, 6, 6, generator=generator), torch.randn(42, 1, generator=generator)
    adapter = scute_converter.load_tensors(
        {"base_model.model.q_proj.oft_r": parameter, "base_model.model.q_proj.oft_s": scale},
        {"peft_type": "OFT", "oft_block_size": 6, "r": 0, "target_modules": ["q_proj"]},
        "old",
    )
    skew = (parameter - parameter.transpose(1, 2)) / 2
    rotation = torch.block_diag(*[(torch.eye(6) - k) @ torch.linalg.inv(torch.eye(6) + k) for k in skew])
    x = torch.randn(4, 30, generator=generator)
    expected = x @ (rotation @ base.weight.T) * scale.T + base.bias
    actual = reference.apply(adapter.forms["q_proj"], {}, x, base.weight, base.bias)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
