"""A mixture of experts: adapters of its attention are served, and no adapter of its experts is served in part."""

from __future__ import annotations

from pathlib import Path

from adapters import Recipe, ia3, lora, oft, vera, write_all
from models import write_model
from serving import cpu_arguments, cpu_environment, serve
from test_parity_server import assert_exact, prompts

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SERVED = {
    "lora": Recipe(lora(target_modules=ATTENTION), 1),
    "dora": Recipe(lora(use_dora=True, target_modules=["q_proj", "v_proj", "o_proj"]), 2),
    "ia3": Recipe(ia3(target_modules=["k_proj", "v_proj"], feedforward_modules=[]), 3),
    "vera": Recipe(vera(target_modules=ATTENTION), 4),
    "oft": Recipe(oft(target_modules=ATTENTION), 5),
    "head": Recipe(lora(target_modules=["lm_head", "k_proj"]), 6),
}
# What the message must name beside the adapter.
REFUSED = {
    "experts": (Recipe(lora(r=3, target_modules=[], target_parameters=EXPERTS), 7), "expert"),
    "both": (Recipe(lora(r=3, target_modules=ATTENTION, target_parameters=EXPERTS), 8), "expert"),
    "router": (Recipe(lora(r=3, target_modules=["q_proj", "mlp.gate"]), 9), "target_parameters"),
}


def test_attention_is_served_and_experts_are_refused_as_a_whole(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_model(base, "qwen3_moe")
    folders = write_all(SERVED, tmp_path, base)
    write_all({name: recipe for name, (recipe, _) in REFUSED.items()}, tmp_path, base)
    names: list[str | None] = [None, *folders]
    with serve(base, tmp_path / "log", *cpu_arguments(), adapters=folders, environment=cpu_environment()) as server:
        for name, (_, part) in REFUSED.items():
            response = server.load(name, tmp_path / name)
            assert response.status_code == 400, name
            message = response.json()["error_message"]
            assert name in message and part in message and "\n" not in message, message
            assert set(response.json()["loaded_adapters"]) == set(SERVED)
            assert server.post("generate", input_ids=[7, 8], lora_path=name).status_code == 400
        answers = server.generate(prompts(len(names), seed=42), names)
    assert_exact(base, folders, names, answers)
