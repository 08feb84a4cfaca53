"""Every type that PEFT has is served, and then tested, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

import test_base_weight
import test_folds
from scute_converter import load, load_tensors
from scute_converter.registry import METHODS, UNSERVED
from test_converter import refused
from test_parity import CASES, language_model

CONFIGS = {peft.PeftType(key).value: config for key, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
TYPES = sorted({member.value for member in peft.PeftType} | CONFIGS.keys())
VARIANTS = {peft_type: {variant.name for variant in method.variants} for peft_type, method in METHODS.items()}

# What is needed beside the defaults for a model of 36 features.
FIELDS: dict[str, dict[str, Any]] = {
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 1},
    "C3A": {"block_size": 12},
    "CARTRIDGE": {"num_virtual_tokens": 3},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 3, "num_tasks": 2},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "PSOFT": {"r": 4},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [1, 5]},
    "WAVEFT": {"n_frequency": 50},
}
# PEFT makes AdaMSS with scikit-learn only.
NOT_BUILT = {"ADAMSS"}

# Variants that PEFT cannot write, or not call, as the parity matrix does.
ELSEWHERE = {
    "Bone": test_folds.test_bone_is_miss_with_another_name,
    "Poly": test_folds.test_poly,
    "QALoRA": test_base_weight.test_qalora,
}


@pytest.mark.parametrize("peft_type", TYPES)
def test_each_type_is_served_or_refused(peft_type: str) -> None:
    assert (peft_type in METHODS) != (peft_type in UNSERVED)
    assert VARIANTS[peft_type] if peft_type in METHODS else UNSERVED[peft_type]


def test_nothing_else_is_listed() -> None:
    assert (METHODS.keys() | UNSERVED.keys()) - set(TYPES) == {"BONE"}  # PEFT 0.19 removed it


def test_each_variant_is_in_the_parity_matrix() -> None:
    """``test_parity`` asserts that ``Case.method`` is what the converter calls the adapter."""
    names = [name for variants in VARIANTS.values() for name in variants]
    assert len(names) == len(set(names))
    assert {case.method for case in CASES.values()} | ELSEWHERE.keys() == set(names)


@pytest.mark.parametrize("name", CASES)
def test_methods_of_the_matrix_are_variants_of_their_type(name: str) -> None:
    peft_type = CASES[name].config().peft_type
    assert CASES[name].method in VARIANTS[peft.PeftType(peft_type).value]


@pytest.mark.parametrize("peft_type", sorted(UNSERVED))
def test_refused_by_name(peft_type: str) -> None:
    config = {"peft_type": peft_type, "target_modules": ["q_proj"]}
    refused(lambda: load_tensors({}, config, "bad"), f"'{peft_type}' {UNSERVED[peft_type]}", "served are ADALORA, ")


@pytest.mark.parametrize("peft_type", ["NEW_TUNER", "lora", None, 3, ["LORA"]])
def test_a_type_that_nobody_knows(peft_type: object) -> None:
    refused(lambda: load_tensors({}, {"peft_type": peft_type}, "bad"), "field peft_type", repr(peft_type), "no method")


@pytest.mark.parametrize("peft_type", sorted(UNSERVED.keys() - NOT_BUILT))
def test_what_peft_writes_is_refused(peft_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = language_model("llama")
    fields = FIELDS.get(peft_type, {})
    if peft_type == "XLORA":  # it mixes adapters that are there already
        base.config.use_cache = False
        peft.get_peft_model(language_model("llama"), peft.LoraConfig()).save_pretrained(str(tmp_path / "lora"))
        fields = {"hidden_size": 36, "adapters": {"0": str(tmp_path / "lora")}}
    model = peft.get_peft_model(base, CONFIGS[peft_type](task_type="CAUSAL_LM", **fields))
    model.save_pretrained(str(tmp_path / "bad"))
    assert any(file.suffix == ".safetensors" for file in (tmp_path / "bad").iterdir())
    refused(lambda: load(tmp_path / "bad"), f"'{peft_type}' {UNSERVED[peft_type]}")
