"""Tiny base models for the tests: every family, random weights, a tokenizer with a chat template.

Sizes are odd on purpose (nothing is square or a power of two, and little is a multiple of 16), and the weights are
scaled so that the distribution over the next token is far from uniform: an adapter then has a clear effect on
log-probabilities. Heads, key/value heads and MLP divide by 2, for tensor parallel.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")

# Families whose checkpoints come with the output embedding tied to the input embedding, and without.
TIED = {
    "llama": (False, True),
    "mistral": (False, True),
    "qwen2": (False, True),
    "qwen3": (False, True),
    "gemma": (True,),
    "gemma2": (True,),
    "gemma3": (True,),
    "phi3": (False,),
    "qwen3_moe": (False,),
}

_SPECIAL = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = (
    "The quick brown fox jumps over the lazy dog.",
    "Adapters share one base model; each request names the adapter that answers it.",
    "0123456789 + - * / = ( ) [ ] { } : , . ; ! ? yes no true false",
)

_COMMON = {
    "hidden_size": 72,
    "intermediate_size": 192,  # on the CPU SGLang pads the MLP to a multiple of 32 on every rank
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": _SPECIAL.index("<s>"),
    "eos_token_id": _SPECIAL.index("</s>"),
    "pad_token_id": _SPECIAL.index("<pad>"),
}
# Sliding windows are shorter than the test prompts, so that they are exercised.
_FAMILY: dict[str, dict[str, object]] = {
    "llama": {"head_dim": 20},
    "mistral": {"head_dim": 20, "sliding_window": None},
    "qwen2": {},  # head_dim is hidden_size / num_attention_heads; q, k and v have biases
    "qwen3": {"head_dim": 20},
    # SGLang's Gemma has the exact GELU whatever the config says; "gelu" would mean the tanh approximation here.
    "gemma": {"head_dim": 20, "hidden_act": "gelu_python"},
    "gemma2": {
        "head_dim": 20,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "attn_logit_softcapping": None,  # SGLang's torch_native attention has none
        "hidden_act": "gelu_pytorch_tanh",  # read by SGLang only; published checkpoints have it
    },
    "gemma3": {
        "head_dim": 20,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Not in FAMILIES, whose linear layers are known to be the seven split projections: q, k and v are one module here,
    # and gate and up another.
    "phi3": {"sliding_window": None},
    "qwen3_moe": {"head_dim": 20, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
}
_MODEL_TYPE = {"gemma3": "gemma3_text"}


def write_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Write a byte-level BPE tokenizer (any text round-trips) of 311 tokens with a chat template into ``path``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=311,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=1024
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(path)
    return fast


def write_model(
    path: Path, family: str = "llama", *, tied: bool | None = None, seed: int = 0, **overrides: object
) -> PreTrainedModel:
    """Write a tiny fp32 checkpoint of ``family`` with its tokenizer into ``path``, and return the model in eval mode.

    ``tied``: share input and output embedding; ``None`` is the family's first choice in ``TIED``. ``overrides``:
    fields of the Hugging Face config (``num_hidden_layers=3``).
    """
    tied = TIED[family][0] if tied is None else tied
    if tied not in TIED[family]:
        raise ValueError(f"{family} has no tie_word_embeddings={tied}")
    tokenizer = write_tokenizer(path)
    fields = {**_COMMON, **_FAMILY[family], "vocab_size": len(tokenizer), "tie_word_embeddings": tied, **overrides}
    config = AutoConfig.for_model(_MODEL_TYPE.get(family, family), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _initialise(model, torch.Generator().manual_seed(seed))
    # Without it the end-of-text token of the model's defaults could differ from the tokenizer's.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(path)
    return model


@torch.no_grad()
def _initialise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Unit-gain linear layers, norms and biases far from their defaults, logits with a standard deviation near 2."""
    embedding = model.get_input_embeddings().weight
    # Gemma multiplies the embedding by sqrt(hidden_size) and norm weights by 1 + w. A small embedding with a large
    # final norm keeps the token that was read from drowning out what the layers add.
    gemma = model.config.model_type.startswith("gemma")
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter is embedding:
            parameter.copy_((0.5 if gemma else 2) * noise / parameter.shape[1] ** 0.5)
        elif "lm_head" in name:
            parameter.copy_(2 * noise / parameter.shape[1] ** 0.5)
        elif parameter.ndim >= 2:  # experts have a dimension in front
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif name.endswith("norm.weight"):
            parameter.add_(0.2 * noise + (3 if gemma and name == "model.norm.weight" else 0))
        else:
            parameter.copy_(0.5 * noise)
