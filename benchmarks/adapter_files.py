"""Writes adapters of random numbers as PEFT saves them, without PEFT: a LoRA of 1.3 GB takes a second or two."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shapes import ModelShape

PROJECTIONS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
ALL = [path.rpartition(".")[2] for paths in PROJECTIONS.values() for path in paths]
IA3_TARGETS = ["k_proj", "v_proj", "down_proj"]
SPREAD = 0.02  # standard deviation of every number: small, so that nothing overflows in fp16


@dataclass(frozen=True)
class Family:
    """Adapters that differ only in their numbers. ``method``: lora, dora, ia3, vera or oft. ``size``: the rank, or
    OFT's block size. ``count``: how many are written."""

    name: str
    method: str
    size: int
    count: int

    def adapters(self, first: int, last: int) -> list[str]:
        """Names of the adapters from ``first`` to before ``last``."""
        return [f"{self.name}-{i}" for i in range(first, last)]


@dataclass(frozen=True)
class _Tensor:
    """``mean``: what the numbers are drawn around. ``shared``: the same in all adapters of the family."""

    shape: tuple[int, ...]
    mean: float = 0.0
    shared: bool = False


def write_family(folder: Path, family: Family, shape: ModelShape, device: str) -> None:
    """One folder per adapter, with an ``adapter_config.json`` and fp16 safetensors; numbers drawn on ``device``."""
    tensors, config = _tensors(family, shape), _config(family)
    for number, name in enumerate(family.adapters(0, family.count)):
        path = folder / name
        path.mkdir(parents=True)
        own = torch.Generator(device).manual_seed(1 + number)
        shared = torch.Generator(device).manual_seed(0)
        content = {}
        for group, generator in ((False, own), (True, shared)):
            named = {key: tensor for key, tensor in tensors.items() if tensor.shared == group}
            content.update(_draw(named, generator))
        save_file(content, path / "adapter_model.safetensors", metadata={"format": "pt"})
        (path / "adapter_config.json").write_text(json.dumps(config))


def lora_bytes(rank: int, shape: ModelShape) -> int:
    """Bytes in fp16 of the pairs of one LoRA over all projections."""
    features = sum(module.in_features + width for module in shape.modules for width in module.widths)
    return 2 * rank * features * shape.layers


def vera_basis_bytes(rank: int, shape: ModelShape) -> int:
    """Bytes in fp16 of the pair that all VeRA adapters share."""
    return 2 * rank * sum(_widest(shape))


def _draw(tensors: dict[str, _Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """All at once: tens of thousands of small draws and copies would take longer than writing the file."""
    total = sum(prod(tensor.shape) for tensor in tensors.values())
    numbers = torch.empty(total, dtype=torch.float16, device=generator.device)
    numbers = numbers.normal_(0, SPREAD, generator=generator).cpu()
    parts = numbers.split([prod(tensor.shape) for tensor in tensors.values()])
    return {
        key: part.add_(tensor.mean).view(tensor.shape) if tensor.mean else part.view(tensor.shape)
        for (key, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def _widest(shape: ModelShape) -> tuple[int, int]:
    """The most input and output features of a projection: PEFT's VeRA draws its pair for those."""
    inputs = max(module.in_features for module in shape.modules)
    return inputs, max(width for module in shape.modules for width in module.widths)


def _tensors(family: Family, shape: ModelShape) -> dict[str, _Tensor]:
    """Keys as PEFT saves them."""
    tensors: dict[str, _Tensor] = {}
    for layer in range(shape.layers):
        for module in shape.modules:
            for path, width in zip(PROJECTIONS[module.name], module.widths, strict=True):
                key = f"base_model.model.model.layers.{layer}.{path}"
                tensors |= _of_projection(family, key, module.in_features, width)
    if family.method == "vera":
        inputs, outputs = _widest(shape)
        tensors["base_model.vera_A"] = _Tensor((family.size, inputs), shared=True)
        tensors["base_model.vera_B"] = _Tensor((outputs, family.size), shared=True)
    return tensors


def _of_projection(family: Family, key: str, inputs: int, outputs: int) -> dict[str, _Tensor]:
    size = family.size
    match family.method:
        case "lora" | "dora":
            tensors = {
                f"{key}.lora_A.weight": _Tensor((size, inputs)),
                f"{key}.lora_B.weight": _Tensor((outputs, size)),
            }
            if family.method == "dora":  # the base weight has rows of norm 1
                tensors[f"{key}.lora_magnitude_vector"] = _Tensor((outputs,), mean=1)
            return tensors
        case "ia3":
            if key.rpartition(".")[2] not in IA3_TARGETS:
                return {}
            return {f"{key}.ia3_l": _Tensor((1, inputs) if key.endswith("down_proj") else (outputs, 1), mean=1)}
        case "vera":
            return {
                f"{key}.vera_lambda_d": _Tensor((size,), mean=0.1),
                f"{key}.vera_lambda_b": _Tensor((outputs,)),
            }
        case "oft":
            return {f"{key}.oft_R.weight": _Tensor((inputs // size, size * (size - 1) // 2))}
    raise ValueError(f"no files are written for {family.method}")


def _config(family: Family) -> dict[str, Any]:
    common = {"task_type": "CAUSAL_LM", "target_modules": ALL, "peft_version": "0.18.0"}
    match family.method:
        case "lora" | "dora":
            fields = {"peft_type": "LORA", "r": family.size, "lora_alpha": family.size, "bias": "none"}
            fields["use_dora"] = family.method == "dora"
        case "ia3":
            fields = {"peft_type": "IA3", "target_modules": IA3_TARGETS, "feedforward_modules": ["down_proj"]}
        case "vera":
            fields = {"peft_type": "VERA", "r": family.size, "projection_prng_key": 0, "save_projection": True}
        case "oft":
            fields = {"peft_type": "OFT", "r": 0, "oft_block_size": family.size, "use_cayley_neumann": True}
            fields |= {"num_cayley_neumann_terms": 5, "coft": False, "block_share": False}
        case _:
            raise ValueError(f"no files are written for {family.method}")
    return common | fields
