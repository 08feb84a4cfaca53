"""Writes a random base model of given shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from models import write_tokenizer
from shapes import ModelShape

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@torch.no_grad()
def write_base(path: Path, shape: ModelShape, device: str = "cuda", family: str = "llama") -> None:
    """A random model in fp16 with unit-gain layers and clearly peaked predictions, made on ``device``."""
    tokenizer = write_tokenizer(path)
    special: dict[str, Any] = {
        f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")
    }
    make_config, make_model = FAMILIES[family]
    config = make_config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        **special,
        dtype="float16",
    )
    torch.set_default_dtype(torch.float16)
    with torch.device(device):
        model = make_model(config)
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.normal_(1, 0.1, generator=generator)
        elif "embed_tokens" in name:
            parameter.normal_(0, 1, generator=generator)
        else:
            gain = 3.0 if "lm_head" in name else 1.0
            parameter.normal_(0, gain / parameter.shape[1] ** 0.5, generator=generator)
    model.save_pretrained(str(path))
