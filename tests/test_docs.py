"""The pages say what the registry serves, and the bytes in them are those of real adapters."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch

from adapters import load_base, redraw, rewrite_as_qalora
from scute_converter import load
from scute_converter.registry import METHODS, UNSERVED
from scute_sglang.cli import SERVED_BYTES, served_elements
from test_parity import shapes

ROOT = Path(__file__).parents[1]
VARIANTS = [variant.name for method in METHODS.values() for variant in method.variants]
# What PEFT's defaults need of a layer, this model of 72 features does not have.
FIELDS: dict[str, dict[str, Any]] = {
    "LoKr": {"r": 2},
    "PEANuT": {"r": 7},
    "VB-LoRA": {"vector_length": 8},
    "FourierFT": {"n_frequency": 100},
}


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """docs/make_methods.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("make_methods", ROOT / "docs" / "make_methods.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_tables_are_up_to_date(made: ModuleType) -> None:
    """All but the measured numbers, which are taken from the page itself."""
    page = made.PAGE.read_text(encoding="utf-8")
    sizes = made.read_sizes(page)
    assert sizes.keys() == set(VARIANTS)
    assert made.remade(page, sizes) == page, "run make docs"


def test_sections_of_the_methods() -> None:
    """Every variant has a heading, and every type that is refused a reason in the page."""
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    headings = " ".join(re.findall(r"^## (.*)$", page, re.MULTILINE)).replace("³", "3")
    in_the_section_of_lora = {"rsLoRA"}
    missing = [name for name in VARIANTS if name not in headings and name not in in_the_section_of_lora]
    assert not missing
    assert all(f"| `{peft_type}` | {reason} |" in page for peft_type, reason in UNSERVED.items())


def test_families_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| family | methods |") :].split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in row.split("|")[2].strip().split(", ")]
    assert sorted(named) == sorted(VARIANTS)
    assert f"PEFT adapters of {len(VARIANTS)} methods and variants" in readme


@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_are_those_of_a_real_adapter(name: str, made: ModuleType, llama: Path, tmp_path: Path) -> None:
    """The numbers of the page come from shapes; here the adapter is written by PEFT for real weights, loaded, folded
    and resolved with them."""
    example = made.EXAMPLES[name]
    example = replace(example, fields={**example.fields, **FIELDS.get(name, {})})
    if name == "QALoRA":
        example = replace(example, rewrite=partial(rewrite_as_qalora, group=12))
    base = load_base(llama)
    layers = shapes(base)
    sizes = made.measure(example, **{field: getattr(base.config, field) for field in made.LLAMA_8B})

    fields = {**example.fields, **example.said}
    model = peft.get_peft_model(load_base(llama, torch.bfloat16), replace(example, fields=fields).make())
    redraw(model, torch.Generator().manual_seed(0))
    written = tmp_path if example.rewrite is None else tmp_path / "written"
    model.save_pretrained(str(written))
    if example.rewrite is not None:
        example.rewrite(written, tmp_path)

    stored, _, basis = made.count(tmp_path, layers, torch.float32)
    assert (stored, basis) == (2 * sizes.stored_layer + sizes.stored_once, sizes.basis)
    adapter = load(tmp_path, base=layers, base_dtype=torch.float32)
    served = 0
    for path, form in adapter.forms.items():
        weight = base.get_submodule(path).weight.detach()
        folded = form if form.fold is None else form.fold.fold(form, weight)
        waiting = folded.deferred
        final = folded if waiting is None else waiting.resolve(folded, waiting.measure(weight, folded))
        served += served_elements(final) * SERVED_BYTES
    assert served == 2 * sizes.served_layer > 0
