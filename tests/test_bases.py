"""Methods with shared bases, rotations, scales and shifts: other spellings of their files, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scute_converter import load_tensors
from test_converter import Tensors, refused

Q = "base_model.model.model.layers.0.self_attn.q_proj."
V = "base_model.model.model.layers.0.self_attn.v_proj."
BASE = {"model.layers.0.self_attn.q_proj": (42, 30), "model.layers.0.self_attn.v_proj": (18, 30)}
FP32 = torch.float32


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


PVERA = {"peft_type": "PVERA", "target_modules": ["q_proj"], "r": 3}
PVERA_TENSORS = {
    "base_model.pvera_A": draw(6, 30),
    "base_model.pvera_B": draw(42, 3),
    f"{Q}pvera_lambda_d": draw(6),
    f"{Q}pvera_lambda_b": draw(42),
}


@pytest.mark.parametrize(
    ("config", "tensors", "parts"),
    [
        (PVERA | {"sample_at_inference": True}, PVERA_TENSORS, ["field sample_at_inference", "random sample"]),
        (PVERA, PVERA_TENSORS | {f"{Q}pvera_lambda_d": draw(5)}, ["pvera_lambda_d", "odd number of elements (5)"]),
        (PVERA, PVERA_TENSORS | {f"{Q}pvera_lambda_d": draw(8)}, ["vectors of 8 and 42", "projections of rank 6"]),
        (
            PVERA,
            PVERA_TENSORS | {"base_model.pvera_A": draw(3, 30)},
            ["pvera_B", "(42, 3) does not fit pvera_A (3, 30)"],
        ),
        (
            PVERA | {"save_projection": False},
            {key: PVERA_TENSORS[key] for key in PVERA_TENSORS if "lambda" in key},
            ["field save_projection", "shapes and the type of the base model", "save_projection=true"],
        ),
    ],
)
def test_refused(config: dict[str, Any], tensors: Tensors, parts: list[str]) -> None:
    refused(lambda: load_tensors(tensors, config, "bad"), *parts)


def test_pvera_serves_the_mean() -> None:
    """What says how much the samples vary changes nothing, and the seed of the samples is no reason to refuse."""
    served = load_tensors(PVERA_TENSORS, PVERA | {"generator_seed": 3, "sample_at_inference": False}, "mean")
    other = {
        "base_model.pvera_A": torch.cat([PVERA_TENSORS["base_model.pvera_A"][:3], draw(3, 30) + 1]),
        f"{Q}pvera_lambda_d": torch.cat([PVERA_TENSORS[f"{Q}pvera_lambda_d"][:3], draw(3) + 1]),
    }
    assert load_tensors(PVERA_TENSORS | other, PVERA, "other").digest == served.digest
    assert served.parameters == 6 + 42
