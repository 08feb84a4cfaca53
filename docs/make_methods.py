"""Writes the tables of docs/methods.md from the registry of methods (``make docs``).

The bytes are those of real files: PEFT makes the layers of Llama-3.1-8B, without their weights, and the adapter with
its tensors, whose shapes and types are saved with random numbers, loaded as a server loads them, and counted.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from adapters import ALL, WEIGHTS, rewrite_as_bone, rewrite_as_qalora
from scute_converter import load
from scute_converter.registry import METHODS, UNSERVED, Variant
from scute_sglang.cli import SERVED_BYTES, basis_elements, served_elements

PAGE = Path(__file__).with_name("methods.md")
BEGIN = "<!-- Made by docs/make_methods.py (make docs) from the registry. Do not edit by hand. -->"
END = "<!-- End of what is made. -->"
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128,  # neither embedding nor head is adapted
}


@dataclass(frozen=True)
class Example:
    """The adapter whose bytes are shown: PEFT's defaults but for ``fields``. ``shown``: fields that say how large it
    is. ``said``: fields that are set when it is saved only: PEFT can decompose no weights where there are none.
    ``device``: "meta", except where PEFT leaves something out that it cannot draw there.
    ``rewrite``: makes a file that PEFT does not write out of one that it does (``adapters.Recipe``)."""

    config: Callable[..., peft.PeftConfig]
    shown: tuple[str, ...] = ("r",)
    fields: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    said: Mapping[str, Any] = field(default_factory=dict)
    device: str = "meta"
    rewrite: Callable[[Path, Path], None] | None = None

    def make(self) -> peft.PeftConfig:
        return self.config(task_type="CAUSAL_LM", **{"target_modules": ALL, **self.fields})

    def describe(self) -> str:
        config = self.make()
        values = [f"`{name}={getattr(config, name)}`" for name in self.shown]
        return ", ".join([*values, *([self.note] if self.note else [])]) or "–"


_BLOCKS = peft.BdLoraConfig(
    target_modules_bd_a=["o_proj", "down_proj"],
    target_modules_bd_b=[name for name in ALL if name not in ("o_proj", "down_proj")],
    nblocks=8,
)
_IA3_TARGETS = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
EXAMPLES = {
    "LoRA": Example(peft.LoraConfig),
    "rsLoRA": Example(peft.LoraConfig, fields={"use_rslora": True}),
    "DoRA": Example(peft.LoraConfig, fields={"use_dora": True}),
    "PiSSA": Example(peft.LoraConfig, said={"init_lora_weights": "pissa"}),
    "OLoRA": Example(peft.LoraConfig, said={"init_lora_weights": "olora"}),
    "QALoRA": Example(peft.LoraConfig, ("r", "qalora_group_size"), rewrite=partial(rewrite_as_qalora, group=16)),
    "BD-LoRA": Example(peft.LoraConfig, fields={"use_bdlora": _BLOCKS}, note="8 blocks"),
    "VeLoRA": Example(peft.LoraConfig, fields={"velora_config": peft.VeloraConfig()}),
    "MonteCLoRA": Example(peft.LoraConfig, fields={"monteclora_config": peft.MontecloraConfig()}, device="cpu"),
    "KaSA": Example(peft.LoraConfig, fields={"kasa_config": peft.KasaConfig()}),
    "AdaLoRA": Example(peft.AdaLoraConfig, ("init_r",), {"total_step": 1}, note="not pruned"),
    "BEFT": Example(peft.BeftConfig, ()),
    "OFT": Example(peft.OFTConfig, ("oft_block_size",)),
    "BOFT": Example(peft.BOFTConfig, ("boft_block_size",)),
    "DEFT": Example(peft.DeftConfig),
    "PaRa": Example(peft.DeftConfig, fields={"para": True}),
    "DeLoRA": Example(peft.DeloraConfig),
    "FourierFT": Example(peft.FourierFTConfig, ("n_frequency",)),
    "GLoRA": Example(peft.GloraConfig, ("config_A_B",), {"config_A_B": "vector"}, note="not the default"),
    "GraLoRA": Example(peft.GraloraConfig, ("r", "gralora_k")),
    "HRA": Example(peft.HRAConfig),
    "(IA)3": Example(peft.IA3Config, (), _IA3_TARGETS, note="PEFT's targets: `k_proj`, `v_proj`, `down_proj`"),
    "LoHa": Example(peft.LoHaConfig),
    "LoKr": Example(peft.LoKrConfig),
    "MiSS": Example(peft.MissConfig),
    "Bone": Example(peft.MissConfig, rewrite=rewrite_as_bone),
    "PEANuT": Example(peft.PeanutConfig, ("r", "depth")),
    "Poly": Example(peft.PolyConfig, ("r", "n_skills")),
    "VeRA": Example(peft.VeraConfig),
    "PVeRA": Example(peft.PveraConfig),
    "TinyLoRA": Example(peft.TinyLoraConfig, ("r", "u")),
    "UniLoRA": Example(peft.UniLoraConfig, ("r", "theta_d_length")),
    "VB-LoRA": Example(peft.VBLoRAConfig, ("r", "num_vectors", "vector_length")),
}


@dataclass(frozen=True)
class Bytes:
    """Of the tensors as PEFT stores them (fp32) and as they are served in fp16 or bf16, for each layer of the model and
    once for all layers. ``basis``: shared with other adapters."""

    stored_layer: int
    stored_once: int
    served_layer: int
    basis: int


def llama(layers: int, device: str, **sizes: int) -> nn.Module:
    """A Llama in bf16, on "meta" of shapes only."""
    config = AutoConfig.for_model("llama", num_hidden_layers=layers, tie_word_embeddings=False, **sizes)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def measure(example: Example, **sizes: int) -> Bytes:
    """``sizes``: of the Llama, as its config has them. What models of one and two layers differ by is one layer's."""
    one, two = (_measure(example, llama(layers, example.device, **sizes)) for layers in (1, 2))
    stored_layer, served_layer, basis_layer = (b - a for a, b in zip(one, two, strict=True))
    assert basis_layer == 0 and one[1] == served_layer
    return Bytes(stored_layer, one[0] - stored_layer, served_layer, one[2])


def _measure(example: Example, model: nn.Module) -> tuple[int, int, int]:
    """Bytes stored, served, and of shared bases."""
    shapes = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    adapted = peft.get_peft_model(model, example.make())
    config = adapted.peft_config["default"]
    for name, value in example.said.items():
        setattr(config, name, value)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.zeros_like(tensor, device="cpu")
        if name.endswith("zeros")
        else torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        for name, tensor in peft.get_peft_model_state_dict(adapted).items()
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        written = folder if example.rewrite is None else folder / "written"
        config.save_pretrained(str(written))
        save_file(tensors, written / WEIGHTS)
        if example.rewrite is not None:
            example.rewrite(written, folder)
        return count(folder, shapes, torch.bfloat16)


def count(folder: Path, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes stored, served, and of shared bases of the adapter in ``folder``, for linear layers of these shapes."""
    stored = sum(tensor.nbytes for tensor in load_file(folder / WEIGHTS).values())
    adapter = load(folder, "example", shapes, dtype)
    sizes = {path: dict(zip(("out_features", "in_features"), shapes[path], strict=True)) for path in adapter.forms}
    served = sum(served_elements(replace(form, **sizes[path])) for path, form in adapter.forms.items())
    return stored, served * SERVED_BYTES, sum(basis_elements(adapter)) * SERVED_BYTES


def verdict(variant: Variant) -> str:
    if variant.slots == "A B":
        return "folds into a pair, with the base weight" if variant.base_weight else "folds into a pair"
    return "live slots, made with the base weight" if variant.base_weight else "live slots"


_TABLES = """\
| method | `peft_type` | PEFT | verdict | live slots | base weight | shared basis | limits |
|---|---|---|---|---|---|---|---|
{served}

Live slots are applied to every token. A B: a pair of low rank. s: output scale. R: input rotation or scale. b: output
shift. d e: vectors around a shared pair. Base weight: whether it is needed to load the adapter; a server has it, and
`scute convert` takes it with `--base`. PEFT: the versions that write these files.

Refused, whatever the file holds:

| `peft_type` | because it |
|---|---|
{refused}

Bytes for one layer of Llama-3.1-8B, at PEFT's default config, of all seven projections if nothing else is said. Stored
is what PEFT writes, in fp32. Served is fp16 or bf16, with folded pairs at the largest rank that they can have. What all
layers of an adapter share is stored once, and a shared basis is served once for all adapters that have the same one.

| method | config | stored | and once | served | shared basis |
|---|---|---|---|---|---|
{counted}"""


def tables(sizes: Mapping[str, Bytes]) -> str:
    """All tables of the page. ``sizes``: by the name of the variant."""
    served, counted = [], []
    for peft_type, method in sorted(METHODS.items()):
        for variant in method.variants:
            served.append(
                f"| {variant.name} | `{peft_type}` | {versions(variant)} | {verdict(variant)} | {variant.slots} "
                f"| {'yes' if variant.base_weight else 'no'} | {'yes' if variant.slots == 'd e' else 'no'} "
                f"| {variant.limits or '–'} |"
            )
            size = sizes[variant.name]
            once = size.stored_once, size.basis
            stored_once, basis = (f"{number:,}" if number else "–" for number in once)
            counted.append(
                f"| {variant.name} | {EXAMPLES[variant.name].describe()} | {size.stored_layer:,} | {stored_once} "
                f"| {size.served_layer:,} | {basis} |"
            )
    refused = [f"| `{peft_type}` | {reason} |" for peft_type, reason in sorted(UNSERVED.items())]
    return _TABLES.format(served="\n".join(served), refused="\n".join(refused), counted="\n".join(counted))


def versions(variant: Variant) -> str:
    return variant.versions if "to" in variant.versions else f"{variant.versions} and later"


def read_sizes(page: str) -> dict[str, Bytes]:
    """The numbers that the page has now."""
    row = re.compile(r"\| (.+?) \| .* \| ([\d,]+) \| ([\d,]+|–) \| ([\d,]+) \| ([\d,]+|–) \|")
    found = (row.fullmatch(line) for line in page.splitlines())
    return {
        match[1]: Bytes(*(0 if cell == "–" else int(cell.replace(",", "")) for cell in match.groups()[1:]))
        for match in found
        if match
    }


def remade(page: str, sizes: Mapping[str, Bytes]) -> str:
    """The page with new tables."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables(sizes)}\n\n{END}{after}"


def main() -> None:
    names = [variant.name for variant in itertools.chain.from_iterable(m.variants for m in METHODS.values())]
    sizes = {name: measure(EXAMPLES[name], **LLAMA_8B) for name in names}
    PAGE.write_text(remade(PAGE.read_text(encoding="utf-8"), sizes), encoding="utf-8")


if __name__ == "__main__":
    main()
