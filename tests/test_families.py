"""Every model family through a real server of its own: all methods and the base in one mixed batch, fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters import ALL, Recipe, ia3, lora, oft, vera, write_all
from models import write_model
from serving import cpu_arguments, cpu_environment, serve
from test_parity_server import assert_exact, prompts

VOCABULARY = ["embed_tokens", "lm_head"]
RECIPES = {
    "lora": Recipe(lora(), 1),
    "dora": Recipe(lora(use_dora=True, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]), 2),
    "ia3": Recipe(ia3(), 3),
    "ia3_outputs": Recipe(ia3(target_modules=["q_proj", "k_proj", "o_proj"], feedforward_modules=[]), 4),
    "vera": Recipe(vera(), 5),
    "oft": Recipe(oft(target_modules=ALL), 6),
    "lora_head": Recipe(lora(target_modules=["lm_head", "q_proj"]), 7),
    "lora_embedding": Recipe(lora(target_modules=["embed_tokens", "k_proj"]), 8),
}
# The base has biases: some adapters retrain them, and DoRA must leave them unscaled where (IA)3 scales them.
WITH_BIASES = {
    "lora_bias_all": Recipe(lora(bias="all", target_modules=["q_proj", "v_proj"]), 9),
    "lora_bias_only": Recipe(lora(bias="lora_only", target_modules=["k_proj", "v_proj"]), 10),
    "lora_with_bias": Recipe(lora(lora_bias=True, target_modules=["q_proj", "o_proj"]), 11),
    "dora_bias_all": Recipe(lora(use_dora=True, bias="all", target_modules=["q_proj", "k_proj"]), 12),
}
# SGLang computes their embedding by a layer of torch's, which none of its LoRA wrappers (nor Scute's) knows.
PLAIN_EMBEDDING = ("gemma3",)
FAMILIES = [
    ("mistral", False),
    ("qwen2", False),
    ("qwen3", True),
    ("gemma", True),
    ("gemma2", True),
    ("gemma3", True),
]


@pytest.mark.parametrize(("family", "tied"), FAMILIES, ids=[family for family, _ in FAMILIES])
def test_one_mixed_batch_equals_peft(family: str, tied: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_model(base, family, tied=tied)
    recipes = {**RECIPES, **(WITH_BIASES if family == "qwen2" else {})}
    vocabulary = ("lora_head", "lora_embedding") if family in PLAIN_EMBEDDING else ()
    written = write_all(recipes, tmp_path, base)
    slots = ("--max-loras-per-batch", str(len(recipes)))
    folders = {name: folder for name, folder in written.items() if name not in vocabulary}
    names: list[str | None] = [None, *folders]
    with serve(
        base, tmp_path / "log", *cpu_arguments(), *slots, adapters=folders, environment=cpu_environment()
    ) as server:
        for name in vocabulary:
            response = server.load(name, tmp_path / name)
            assert response.status_code == 400 and "no module of this model" in response.json()["error_message"]
        answers = server.generate(prompts(len(names), seed=2), names)

    assert_exact(base, folders, names, answers)
