"""A model whose q, k and v (and gate and up) are one module already, as adapters name it: Phi-3."""

from __future__ import annotations

from pathlib import Path

import peft

from adapters import Recipe, ia3, lora, of, oft, vera, write_all
from models import write_model
from serving import cpu_arguments, cpu_environment, serve
from test_parity_server import assert_exact, prompts

FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
RECIPES = {
    "lora": Recipe(lora(target_modules=FUSED), 1),
    "lora_rs": Recipe(lora(r=13, use_rslora=True, target_modules=["qkv_proj"]), 2),
    "dora": Recipe(lora(use_dora=True, target_modules=FUSED), 3),  # one norm over each row of the whole module
    "ia3": Recipe(ia3(target_modules=["qkv_proj", "gate_up_proj", "down_proj"]), 4),
    "ia3_inputs": Recipe(ia3(target_modules=["qkv_proj", "gate_up_proj"], feedforward_modules=["gate_up_proj"]), 5),
    "vera": Recipe(vera(target_modules=FUSED), 6),
    "vera_part": Recipe(vera(r=10, target_modules=["gate_up_proj", "o_proj"]), 7),
    "oft": Recipe(oft(target_modules=FUSED), 8),
    "hra": Recipe(of(peft.HRAConfig, r=6, target_modules=FUSED), 9),
    "pissa": Recipe(lora(r=6, init_lora_weights="pissa", target_modules=["qkv_proj", "down_proj"]), 10),
    "boft": Recipe(of(peft.BOFTConfig, boft_block_size=4, target_modules=["qkv_proj"]), 12),
    "head": Recipe(lora(target_modules=["lm_head", "qkv_proj"]), 13),
}


def test_adapters_of_whole_fused_modules(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_model(base, "phi3")
    folders = write_all(RECIPES, tmp_path, base)
    names: list[str | None] = [None, *folders]
    slots = ("--max-loras-per-batch", str(len(folders)))
    with serve(
        base, tmp_path / "log", *cpu_arguments(), *slots, adapters=folders, environment=cpu_environment()
    ) as server:
        answers = server.generate(prompts(len(names), seed=41), names)
    assert_exact(base, folders, names, answers)
