"""Reading adapters: the same content from any spelling of the file, and a readable refusal of everything else."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from scute_converter import Adapter, AdapterError, checkpoint, files, load, load_tensors
from scute_converter.keys import split_key
from scute_converter.methods.lora import LoraConfig
from scute_converter.targets import selects

PREFIX = "base_model.model.model.layers.0.self_attn."
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "some/base",
    "r": 3,
    "lora_alpha": 5,
    "lora_dropout": 0.1,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}

Tensors = dict[str, torch.Tensor]


def lora_tensors(dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj": (30, 42), "v_proj": (30, 18)}
    tensors = {}
    for name, (columns, rows) in shapes.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(3, columns, generator=generator).to(dtype)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(rows, 3, generator=generator).to(dtype)
    return tensors


def dora_tensors() -> Tensors:
    magnitudes = {f"{PREFIX}q_proj.lora_magnitude_vector": 42, f"{PREFIX}v_proj.lora_magnitude_vector": 18}
    return lora_tensors() | {name: torch.linspace(0.5, 2, size) for name, size in magnitudes.items()}


def write(folder: Path, tensors: Tensors, config: dict[str, Any] = CONFIG, *, binary: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def refused(load_it: Callable[[], Adapter], *parts: str) -> None:
    """The message is one line that names the adapter and holds ``parts``."""
    with pytest.raises(AdapterError) as caught:
        load_it()
    message = str(caught.value)
    assert message.startswith("adapter 'bad': ") and "\n" not in message
    for part in parts:
        assert part in message


# The same content, spelled in many ways


def test_normal_form_of_a_folder(tmp_path: Path) -> None:
    tensors = lora_tensors()
    adapter = load(write(tmp_path / "mine", tensors))
    assert adapter.method == "LoRA" and adapter.notes == () and adapter.payloads == {}
    assert adapter.parameters == sum(tensor.numel() for tensor in tensors.values())
    form = adapter.forms["model.layers.0.self_attn.v_proj"]
    assert (form.in_features, form.out_features) == (30, 18)
    assert torch.equal(form.pair.a, tensors[f"{PREFIX}v_proj.lora_A.weight"])
    assert torch.equal(form.pair.b, tensors[f"{PREFIX}v_proj.lora_B.weight"].T * (5 / 3))
    assert form.pair.a.is_contiguous() and form.pair.b.is_contiguous()


def test_the_file_may_change_after_loading(tmp_path: Path) -> None:
    adapter = load(write(tmp_path, lora_tensors()))
    pair = adapter.forms["model.layers.0.self_attn.q_proj"].pair
    before = pair.a.clone()
    with open(tmp_path / "adapter_model.safetensors", "r+b") as file:
        size = os.path.getsize(tmp_path / "adapter_model.safetensors")
        file.seek(size // 2)
        file.write(b"\0" * (size - size // 2))
    assert torch.equal(pair.a, before)


@pytest.mark.parametrize("binary", [False, True])
def test_large_files_and_tensors(binary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in pieces, and matrices transposed in tiles."""
    exact = load_tensors(lora_tensors(), CONFIG, "exact")
    monkeypatch.setattr(files, "_PIECE", 7)
    monkeypatch.setattr(checkpoint, "_TILE", 50)
    assert load(write(tmp_path, lora_tensors(), binary=binary)).digest == exact.digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [1, 2, 4])
def test_tensors_at_odd_addresses(dtype: torch.dtype, padding: int, tmp_path: Path) -> None:
    """safetensors pads its header so that tensors are aligned, but others may not."""
    tensors = lora_tensors(dtype)
    exact = load_tensors(tensors, CONFIG, "exact")
    file = write(tmp_path, tensors) / "adapter_model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    longer = (length + padding).to_bytes(8, "little")
    file.write_bytes(longer + content[8 : 8 + length] + b" " * padding + content[8 + length :])
    assert load(tmp_path).digest == exact.digest


def test_a_type_without_exact_numbers_in_fp32_is_named(tmp_path: Path) -> None:
    """safetensors knows types that its reader for torch does not."""
    file = write(tmp_path, lora_tensors()) / "adapter_model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    key = f"{PREFIX}q_proj.lora_A.weight"
    header[key]["dtype"], header[key]["shape"] = "F8_E8M0", [3, 4 * 30]
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    refused(lambda: load(tmp_path, "bad"), key, "has type F8_E8M0", "fp32, fp16 or bf16")


def test_what_torch_makes_by_default_does_not_count(tmp_path: Path) -> None:
    """SGLang sets the default type and inference mode around much of what it does."""
    exact = load(write(tmp_path, lora_tensors())).digest
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.inference_mode():
            assert load(tmp_path).digest == exact
    finally:
        torch.set_default_dtype(before)


def test_a_load_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """safe_open's get_tensor, of safetensors 0.8.0, keeps a Python object or two for every tensor."""
    shapes = {
        f"base_model.model.model.layers.{i}.q_proj.lora_{side}.weight": (3, 3) for i in range(50) for side in "AB"
    }
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    folder = write(tmp_path, tensors, {"peft_type": "LORA", "r": 3})
    for _ in range(3):
        load(folder)
    gc.collect()
    before, loads = sys.getallocatedblocks(), 20
    for _ in range(loads):
        load(folder)
    gc.collect()
    assert sys.getallocatedblocks() - before < loads * len(tensors) / 2


def test_modules_are_in_the_same_order_every_time(tmp_path: Path) -> None:
    """Tensor-parallel ranks work through them together."""
    tensors = {f"{PREFIX}{module}.lora_{side}.weight": torch.ones(3, 3) for module in "hcfabged" for side in "AB"}
    folder = write(tmp_path, tensors, {"peft_type": "LORA", "r": 3})
    assert len({tuple(load(folder).forms) for _ in range(5)}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("binary", [False, True])
def test_types_of_the_file(dtype: torch.dtype, binary: bool, tmp_path: Path) -> None:
    tensors = lora_tensors(dtype)
    exact = load_tensors({key: tensor.float() for key, tensor in tensors.items()}, CONFIG, "exact")
    assert load(write(tmp_path, tensors, binary=binary)).digest == exact.digest


@pytest.mark.parametrize(
    ("rename", "note"),
    [
        (lambda key: "_orig_mod." + key, "_orig_mod"),
        (lambda key: key.replace("model.layers", "_orig_mod.model.layers"), "_orig_mod"),
        (lambda key: key.replace("q_proj", "q_proj._orig_mod"), "_orig_mod"),
        (lambda key: key.replace("layers.0", "layers.0._fsdp_wrapped_module"), "_fsdp_wrapped_module"),
        (lambda key: key.replace("layers.0", "layers.0._checkpoint_wrapped_module"), "_checkpoint_wrapped_module"),
        (lambda key: "module." + key, "module"),
        (lambda key: key.replace("base_model.model.", "base_model.model.module."), "module"),
        (lambda key: re.sub(r"(lora_[AB])", r"\1.default", key), None),
        (lambda key: key.removeprefix("base_model.model."), None),
    ],
)
def test_spellings_of_keys(rename: Callable[[str], str], note: str | None) -> None:
    plain = load_tensors(lora_tensors(), CONFIG, "plain")
    adapter = load_tensors({rename(key): tensor for key, tensor in lora_tensors().items()}, CONFIG, "renamed")
    assert adapter.forms.keys() == plain.forms.keys()
    assert adapter.digest == plain.digest
    assert [n.endswith(f": {note}") for n in adapter.notes] == ([True] if note else [])


@pytest.mark.parametrize("suffix", [".weight", ".default", ".default.weight"])
@pytest.mark.parametrize("flag", [True, False])
def test_spellings_of_the_magnitude(suffix: str, flag: bool) -> None:
    """The magnitude makes a DoRA, whatever ``use_dora`` says."""
    plain = load_tensors(dora_tensors(), CONFIG | {"use_dora": True}, "plain")
    renamed = {
        key + suffix if key.endswith("magnitude_vector") else key: tensor for key, tensor in dora_tensors().items()
    }
    adapter = load_tensors(renamed, CONFIG | {"use_dora": flag}, "renamed")
    assert adapter.digest == plain.digest and adapter.method == "DoRA"
    assert len(adapter.notes) == (0 if flag else 1)


def test_keys() -> None:
    key = split_key("base_model.vera_A", "vera_")
    assert (key.module, key.suffix) == ("", "vera_A")
    key = split_key("base_model.model.encoder.module.0.ia3_l.default", "ia3_")
    assert (key.module, key.suffix) == ("encoder.module.0", "ia3_l")
    key = split_key("base_model.model.model.embed_tokens.base_layer.weight", "lora_")
    assert (key.module, key.suffix, str(key)) == (
        "model.embed_tokens",
        "base_layer.weight",
        "model.embed_tokens.base_layer.weight",
    )


@pytest.mark.parametrize("key", ["base_model", "base_model.model", "_orig_mod", "module", "model._orig_mod", ""])
def test_keys_of_nothing_but_wrappers(key: str) -> None:
    refused(lambda: load_tensors(lora_tensors() | {key: torch.ones(3)}, CONFIG, "bad"), "tensor")


def test_digest_is_of_the_content() -> None:
    adapter = load_tensors(lora_tensors(), CONFIG, "one")
    assert load_tensors(dict(reversed(lora_tensors().items())), CONFIG, "two").digest == adapter.digest
    # The scale is part of the content; the way to write it is not.
    assert load_tensors(lora_tensors(), CONFIG | {"lora_alpha": 6}, "one").digest != adapter.digest
    assert load_tensors(lora_tensors(), CONFIG | {"alpha_pattern": {"v_proj": 7}}, "one").digest != adapter.digest
    by_pattern = CONFIG | {"lora_alpha": 1, "alpha_pattern": {"q_proj|v_proj": 5}}
    assert load_tensors(lora_tensors(), by_pattern, "one").digest == adapter.digest
    moved = {key.replace("layers.0", "layers.1"): tensor for key, tensor in lora_tensors().items()}
    assert load_tensors(moved, CONFIG, "one").digest != adapter.digest
    changed = lora_tensors()
    changed[f"{PREFIX}v_proj.lora_A.weight"][2, 29] += 1e-6
    assert load_tensors(changed, CONFIG, "one").digest != adapter.digest

    dora = CONFIG | {"use_dora": True}
    other = dora_tensors()
    other[f"{PREFIX}v_proj.lora_magnitude_vector"][3] += 1e-6
    assert load_tensors(other, dora, "one").digest != load_tensors(dora_tensors(), dora, "one").digest
    assert load_tensors(dora_tensors(), dora, "one").digest == load_tensors(dora_tensors(), dora, "two").digest


def test_notes() -> None:
    silent = {key: tensor * (0 if "lora_B" in key else 1) for key, tensor in lora_tensors().items()}
    assert "no effect" in load_tensors(silent, CONFIG, "silent").notes[0]
    assert "LoftQ" in load_tensors(lora_tensors(), CONFIG | {"init_lora_weights": "loftq"}, "loftq").notes[0]
    assert "LoRA-GA" in load_tensors(lora_tensors(), CONFIG | {"init_lora_weights": "lora_ga"}, "ga").notes[0]
    lost = load_tensors(lora_tensors(), CONFIG | {"bias": "lora_only"}, "lost")
    assert "holds no biases" in lost.notes[0]
    for init in (True, False, "gaussian", "eva", "orthogonal"):
        assert load_tensors(lora_tensors(), CONFIG | {"init_lora_weights": init}, "plain").notes == ()


@pytest.mark.parametrize("spelling", ["base_layer.bias", "bias"])
def test_replaced_bias(spelling: str) -> None:
    """PEFT before 0.6 saved the bias of an adapted layer under its plain name."""
    bias = torch.linspace(-1, 1, 42)
    adapter = load_tensors(lora_tensors() | {f"{PREFIX}q_proj.{spelling}": bias}, CONFIG | {"bias": "all"}, "biased")
    assert torch.equal(adapter.forms["model.layers.0.self_attn.q_proj"].bias.replace, bias)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.base_layer.weight"])
def test_payloads_are_kept_for_comparison(name: str) -> None:
    payload = torch.randn(93, 36).bfloat16()
    adapter = load_tensors(lora_tensors() | {f"base_model.model.{name}": payload}, CONFIG, "payload")
    (kept,) = adapter.payloads.values()
    assert torch.equal(kept, payload) and kept.dtype == torch.bfloat16
    assert adapter.digest == load_tensors(lora_tensors(), CONFIG, "plain").digest
    assert adapter.parameters == sum(tensor.numel() for tensor in lora_tensors().values())


def test_selection_follows_peft() -> None:
    """Lists match whole names from the right, a string the whole path, and layers by the first number or a pattern."""

    def select(module: str, **fields: Any) -> bool:
        return selects(LoraConfig(peft_type="LORA", **fields), module)

    path = "model.layers.1.mlp.experts.3.up_proj"
    assert select(path, target_modules=["up_proj"]) and select(path, target_modules=["3.up_proj"])
    assert not select(path, target_modules=["p_proj"])
    assert select(path, target_modules=r"model\..*up_proj") and not select(path, target_modules="up_proj")
    assert select(path, target_modules=["up_proj"], layers_to_transform=[0, 1])
    assert not select(path, target_modules=["up_proj"], layers_to_transform=3)
    assert select(path, target_modules=["up_proj"], layers_to_transform=3, layers_pattern="experts")
    assert not select(path, target_modules=["up_proj"], layers_to_transform=3, layers_pattern=["layers", "experts"])
    assert not select(path, target_modules=["up_proj"], layers_to_transform=[3], layers_pattern="blocks")
    assert select(path, target_modules=[path], layers_to_transform=[7])
    assert not select(path, target_modules=["up_proj"], exclude_modules=["experts.3.up_proj"])
    assert not select(path, target_modules=["up_proj"], exclude_modules=r".*experts.*")
    assert select(path, target_modules="all-linear") and not select("lm_head", target_modules="all-linear")


# Refusals


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("peft_type", "LOREM", ["'LOREM' is no method that is served", "served are ", ", LORA, "]),
        ("peft_type", None, ["peft_type", "None"]),
        ("peft_type", ["LORA"], ["peft_type"]),
        ("peft_type", "PREFIX_TUNING", ["key-value prefix"]),
        ("r", "3", ["field r", "'3' is not of type int"]),
        ("r", True, ["field r"]),
        ("r", 4, ["lora_A.weight", "has rank 3, but the config says 4", "correct r or rank_pattern"]),
        ("rank_pattern", {"v_proj": 2}, ["v_proj.lora_A.weight", "rank 3, but the config says 2"]),
        ("rank_pattern", {"v_proj": "2"}, ["field rank_pattern"]),
        ("alpha_pattern", {"(": 2}, ["field alpha_pattern", "'(' is no regular expression"]),
        ("alpha_pattern", [2], ["field alpha_pattern"]),
        ("lora_alpha", None, ["field lora_alpha", "None is not of type float"]),
        ("lora_alpha", 1e39, ["lora_B.weight", "overflows with the scales", "adapter_config.json"]),
        ("lora_alpha", float("nan"), ["field lora_alpha", "nan is not of type float"]),
        ("lora_alpha", 10**400, ["field lora_alpha", "is not of type float"]),
        ("lora_bias", True, ["lora_B.bias", "missing, with lora_bias=true"]),
        ("use_dora", True, ["lora_magnitude_vector", "is missing", "keeps the magnitudes"]),
        ("bias", 1, ["field bias"]),
        ("modules_to_save", ["lm_head", "norm"], ["modules_to_save", "(lm_head, norm)"]),
        ("target_modules", ["q_proj"], ["target_modules", "does not select model.layers.0.self_attn.v_proj"]),
        ("target_modules", "(", ["target_modules", "is no regular expression"]),
        ("layers_to_transform", [1], ["does not select model.layers.0.self_attn.q_proj"]),
        ("target_parameters", ["experts.up"], ["field target_parameters", "expert"]),
        ("alora_invocation_tokens", [1, 2], ["field alora_invocation_tokens", "aLoRA"]),
        ("trainable_token_indices", [1], ["field trainable_token_indices", "retrained tokens"]),
        ("arrow_config", {"top_k": 1}, ["field arrow_config"]),
        ("layer_replication", [[0, 1]], ["field layer_replication"]),
        ("init_lora_weights", "pissa_niter_4", ["changed the base", "path_initial_model_for_weight_conversion"]),
        ("init_lora_weights", "corda", ["'corda' changed the base"]),
        ("init_lora_weights", "lorem", ["'lorem' is not known"]),
        ("lorem", {"ipsum": 1}, ["field lorem", "is not understood", "remove the field"]),
    ],
)
def test_refused_configs(field: str, value: Any, parts: list[str]) -> None:
    refused(lambda: load_tensors(lora_tensors(), CONFIG | {field: value}, "bad"), *parts)


# What somebody wrote, and what they meant.
MISSPELT = {
    "peft_type": [("LORAA", "LORA"), ("lora", "LORA"), ("Vera2", "VERA"), ("OTF", "OFT")],
    "rank_patern": [({"v_proj": 2}, "rank_pattern")],
    "alphapattern": [({"v_proj": 2}, "alpha_pattern")],
    "use_dorra": [(True, "use_dora")],
    "lora_droput": [(0.1, "lora_dropout")],
    "arow_config": [({"top_k": 1}, "arrow_config")],
    "bias": [("lora_onyl", "lora_only"), ("al", "all"), ("None", "none")],
    "init_lora_weights": [("gausian", "gaussian"), ("Pissa", "pissa"), ("loraga", "lora_ga")],
    "target_modules": [(["q_proj", "v_porj"], "v_proj"), (["q-proj", "v_proj"], "q_proj")],
    "velora_config": [({"num_grups": 2}, "num_groups")],
}


@pytest.mark.parametrize(("field", "value", "meant"), [(f, *pair) for f, pairs in MISSPELT.items() for pair in pairs])
def test_the_nearest_of_what_is_known_is_named(field: str, value: Any, meant: str) -> None:
    where = f"field {field}" + (".num_grups" if field == "velora_config" else "")
    config = CONFIG | {field: value}
    refused(lambda: load_tensors(lora_tensors(), config, "bad"), where, f"(did you mean {meant!r}?)")


@pytest.mark.parametrize("field", ["peft_type", "bias", "init_lora_weights", "zzzz"])
def test_nothing_is_named_that_is_not_near(field: str) -> None:
    with pytest.raises(AdapterError) as caught:
        load_tensors(lora_tensors(), CONFIG | {field: "zzzz"}, "bad")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("value", ["none", "all", "lora_only", "MiSS_only"])
def test_values_of_bias_that_peft_writes(value: str) -> None:
    assert load_tensors(lora_tensors(), CONFIG | {"bias": value}, "some").forms


def test_unknown_fields_without_a_value_are_accepted() -> None:
    empty = {"lorem": None, "ipsum": False, "dolor": [], "sit": {}, "kasa_config": None, "use_qalora": False}
    plain = load_tensors(lora_tensors(), CONFIG, "plain")
    assert load_tensors(lora_tensors(), CONFIG | empty, "more").digest == plain.digest


Q = f"{PREFIX}q_proj."


@pytest.mark.parametrize(
    ("name", "tensor", "parts"),
    [
        (f"{Q}lora_A.weight", torch.full((3, 30), torch.nan), ["q_proj.lora_A.weight", "NaN"]),
        (f"{Q}lora_A.weight", torch.full((3, 30), torch.inf).bfloat16(), ["q_proj.lora_A.weight", "infinity"]),
        (f"{Q}lora_A.weight", torch.full((3, 30), torch.nan).to(torch.float8_e5m2), ["NaN"]),
        (f"{Q}lora_A.weight", torch.empty(3, 0), ["q_proj.lora_A.weight", "is empty (3, 0)", "ZeRO-3"]),
        (f"{Q}lora_A.weight", torch.ones(3, 30, dtype=torch.int8), ["torch.int8"]),
        (f"{Q}lora_A.weight", torch.ones(3, 30).to_sparse(), ["torch.sparse_coo", "dense floating-point"]),
        (f"{Q}lora_A.weight", torch.ones(3, 30, 1, 1), ["has 4 dimensions (3, 30, 1, 1), 2 are served"]),
        (f"{Q}lora_B.weight", torch.ones(42, 4), ["q_proj.lora_B.weight", "(42, 4) does not fit", "(3, 30)"]),
        (f"{Q}lora_B.weight", None, ["q_proj.lora_B.weight", "is missing"]),
        (
            f"{Q}lora_A.weight",
            None,
            ["q_proj.lora_B.weight", "is left over: LORA has no use", "save the whole adapter again"],
        ),
        (f"{Q}lora_C.weight", torch.ones(3), ["q_proj.lora_C.weight", "is no tensor that LORA is known to have"]),
        (
            f"{Q}lora_magnitud_vector",
            torch.ones(42),
            ["q_proj.lora_magnitud_vector", "(did you mean 'lora_magnitude_vector'?)"],
        ),
        (f"{Q}lora_A.default.weight", torch.ones(3, 30), ["is stored twice", "q_proj.lora_A.weight"]),
        (f"{Q}lora_magnitude_vector", torch.ones(41), ["41 elements for 42 output features"]),
        (f"{Q}lora_magnitude_vector.weight", torch.zeros(42, 1), ["2 dimensions"]),
        (f"{Q}lora_B.bias", torch.ones(42, 1), ["q_proj.lora_B.bias", "2 dimensions"]),
        (f"{Q}base_layer.bias", torch.ones(42), ["q_proj.base_layer.bias", "bias='none'"]),
        (f"{Q}base_layer.weight", torch.ones(42, 30), ["weight of the base model"]),
        ("base_model.model.score.weight", torch.ones(2, 30), ["score.weight", "modules_to_save"]),
        ("base_model.model.lm_head.modules_to_save.weight", torch.ones(2, 30), ["modules_to_save"]),
        ("base_model.model.model.norm.weight", torch.ones(30), ["model.norm.weight", "modules_to_save"]),
        (f"{PREFIX}experts.base_layer.lora_A.weight", torch.ones(3, 3), ["expert parameters (target_parameters)"]),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            torch.ones(2, 30),
            ["retrained tokens", "trainable_token_indices"],
        ),
        (f"{PREFIX}_new_wrapper.q_proj.lora_A.weight", torch.ones(3, 30), ["_new_wrapper", "training wrapper"]),
        ("prompt_embeddings", torch.ones(3, 30), ["prompt_embeddings", "is no tensor that LORA"]),
    ],
)
def test_refused_tensors(name: str, tensor: torch.Tensor | None, parts: list[str]) -> None:
    tensors: dict[str, Any] = lora_tensors() | {name: tensor}
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    refused(lambda: load_tensors(tensors, CONFIG, "bad"), *parts)


def test_refused_biases() -> None:
    config = CONFIG | {"bias": "all"}
    bias = {f"{Q}base_layer.bias": torch.ones(42)}
    refused(lambda: load_tensors(lora_tensors() | {f"{Q}bias": torch.ones(41)}, config, "bad"), "41 elements for 42")
    twice = lora_tensors() | bias | {f"{Q}bias": torch.ones(42)}
    refused(lambda: load_tensors(twice, config, "bad"), "stored twice")


def test_refused_payloads() -> None:
    payload = {"base_model.model.lm_head.weight": torch.ones(9, 3)}
    twice = lora_tensors() | payload | {"base_model.model.lm_head.base_layer.weight": torch.ones(9, 3)}
    refused(lambda: load_tensors(twice, CONFIG, "bad"), "lm_head.base_layer.weight", "stored twice")


IA3 = {"peft_type": "IA3", "target_modules": ["q_proj"]}
VERA = {"peft_type": "VERA", "target_modules": ["q_proj"], "r": 3, "save_projection": True}
OFT = {"peft_type": "OFT", "target_modules": ["q_proj"], "use_cayley_neumann": True, "peft_version": "0.21.2"}
VERA_TENSORS = {
    "base_model.vera_A": torch.ones(3, 30),
    "base_model.vera_B": torch.ones(42, 3),
    f"{Q}vera_lambda_d": torch.ones(3),
    f"{Q}vera_lambda_b": torch.ones(42),
}


@pytest.mark.parametrize(
    ("config", "tensors", "parts"),
    [
        (IA3, {f"{Q}ia3_l": torch.ones(1, 1)}, ["q_proj.ia3_l", "(1, 1), neither (out, 1) nor (1, in)"]),
        (IA3, {f"{Q}ia3_l": torch.ones(3, 4)}, ["neither"]),
        (IA3, {f"{Q}ia3_l": torch.ones(1, 30, 1, 1)}, ["4 dimensions"]),
        (IA3, {f"{Q}lora_A.weight": torch.ones(1, 30)}, ["is no tensor that IA3"]),
        (IA3, {}, ["weights: there are no tensors"]),
        (IA3, {"base_model.model.lm_head.weight": torch.ones(9, 3)}, ["no tensor of (IA)3 was found"]),
        (VERA, VERA_TENSORS | {f"{Q}vera_lambda_d": torch.ones(4)}, ["vectors of 4 and 42 do not fit", "rank 3"]),
        (VERA, VERA_TENSORS | {f"{Q}vera_lambda_b": torch.ones(43)}, ["vectors of 3 and 43 do not fit"]),
        (VERA, VERA_TENSORS | {"base_model.vera_B": torch.ones(42, 2)}, ["vera_B", "(42, 2) does not fit"]),
        (VERA, {f"{Q}vera_lambda_d": torch.ones(3)}, ["q_proj.vera_lambda_b: is missing"]),
        (VERA, {key: VERA_TENSORS[key] for key in VERA_TENSORS if "lambda" in key}, ["tensor vera_A: is missing"]),
        (VERA, {"base_model.vera_A": torch.ones(3, 30)}, ["tensor vera_A: is no tensor"]),
        (
            VERA | {"save_projection": False},
            {key: VERA_TENSORS[key] for key in VERA_TENSORS if "lambda" in key},
            ["field save_projection", "shapes and the type of the base model", "save_projection=true"],
        ),
        (OFT | {"use_cayley_neumann": None}, {f"{Q}oft_R.weight": torch.ones(5, 15)}, ["use_cayley_neumann"]),
        (OFT | {"peft_version": "0.18.0.dev0@abc"}, {f"{Q}oft_R.weight": torch.ones(5, 15)}, ["development build"]),
        (OFT | {"peft_version": "new"}, {f"{Q}oft_R.weight": torch.ones(5, 15)}, ["'new' is no version"]),
        (OFT | {"num_cayley_neumann_terms": 10**9}, {f"{Q}oft_R.weight": torch.ones(5, 15)}, ["not within 1 and 64"]),
        (OFT, {f"{Q}oft_R.weight": torch.full((5, 15), 1e20)}, ["q_proj.oft_R.weight", "overflows"]),
        (
            OFT | {"use_cayley_neumann": False},
            {f"{Q}oft_R.weight": torch.arange(60.0).view(6, 10).sin() * 1e12},
            ["q_proj.oft_R.weight", "elements of up to", "no rotation can be computed"],
        ),
        (  # rows and columns of what is computed have length 1
            OFT | {"use_cayley_neumann": False},
            {f"{Q}oft_R.weight": torch.tensor([[-39999999311872.0, -4999999913984.0, -4.999999921533747e17]] * 10)},
            ["q_proj.oft_R.weight", "no rotation can be computed"],
        ),
        (OFT, {f"{Q}oft_R.weight": torch.ones(5, 14)}, ["14 elements are no upper triangle"]),
        (OFT | {"block_share": True}, {f"{Q}oft_R.weight": torch.ones(5, 15)}, ["5 blocks, with block_share=true"]),
        (OFT, {f"{Q}oft_r": torch.ones(5, 6, 6)}, ["without oft_s", "before 0.14", "rotated the output"]),
        (OFT, {f"{Q}oft_r": torch.ones(5, 6, 5), f"{Q}oft_s": torch.ones(42, 1)}, ["not square"]),
        (
            OFT | {"coft": True},
            {f"{Q}oft_r": torch.ones(5, 6, 6), f"{Q}oft_s": torch.ones(42, 1)},
            ["coft=true in an adapter of PEFT 0.14 or 0.15"],
        ),
        (OFT, {f"{Q}oft_embedding_R.weight": torch.ones(5, 15)}, ["oft_embedding_R.weight", "is no tensor that OFT"]),
    ],
)
def test_refused_methods(config: dict[str, Any], tensors: Tensors, parts: list[str]) -> None:
    refused(lambda: load_tensors(tensors, config, "bad"), *parts)


def test_vera_and_its_base() -> None:
    module = "model.layers.0.self_attn.q_proj"
    drawn = VERA | {"save_projection": False}
    vectors = {key: tensor for key, tensor in VERA_TENSORS.items() if "lambda" in key}
    kind = torch.float32
    refused(lambda: load_tensors(VERA_TENSORS, VERA, "bad", {module: (42, 31)}), "the base layer has 31")
    refused(lambda: load_tensors(vectors, drawn, "bad", {"k_proj": (42, 30)}, kind), "selects no linear layer")
    bad = drawn | {"target_modules": "("}
    refused(lambda: load_tensors(vectors, bad, "bad", {module: (42, 30)}, kind), "no regular expression")
    # Stored projections are the truth even if the config says that they are not stored.
    stored = load_tensors(VERA_TENSORS, drawn, "stored", {module: (42, 30)}, kind)
    assert stored.digest == load_tensors(VERA_TENSORS, VERA, "stored").digest
    # Two adapters with the same projections share them.
    other = load_tensors(VERA_TENSORS | {f"{Q}vera_lambda_d": torch.zeros(3)}, VERA, "other")
    assert other.bases.keys() == stored.bases.keys() and other.digest != stored.digest
    assert stored.parameters == 45


# Files


def test_missing_files(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    refused(lambda: load(folder), str(folder), "no such folder", "one on the Hub must be downloaded")
    folder.mkdir()
    refused(lambda: load(folder), str(folder), "has no adapter_config.json")
    write(folder / "inner", lora_tensors())
    refused(lambda: load(folder), "the folder inner in it")
    write(folder, lora_tensors())
    (folder / "adapter_model.safetensors").unlink()
    refused(lambda: load(folder), "has neither adapter_model.safetensors nor adapter_model.bin")


@pytest.mark.parametrize("content", ["", "{", "[1]", "[" * 100_000, "\udcff", '{"r": 3'])
def test_broken_config(content: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "bad", lora_tensors())
    (folder / "adapter_config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    refused(lambda: load(folder), "adapter_config.json", "is not")


def test_truncated_safetensors(tmp_path: Path) -> None:
    folder = write(tmp_path / "bad", lora_tensors())
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for tenth in range(10):
        file.write_bytes(whole[: len(whole) * tenth // 10])
        refused(lambda: load(folder), "adapter_model.safetensors", "broken or cut off", "copy the file again")


def test_flipped_header_bytes(tmp_path: Path) -> None:
    """A damaged header is refused, or the damage is in something that does not count, such as the metadata."""
    folder = write(tmp_path / "bad", lora_tensors())
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    digest = load(folder).digest
    outcomes = []
    for position in range(8 + int.from_bytes(whole[:8], "little")):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        try:
            outcomes.append(load(folder).digest == digest)
        except AdapterError:
            outcomes.append(True)
    assert all(outcomes)


def test_truncated_bin(tmp_path: Path) -> None:
    folder = write(tmp_path / "bad", lora_tensors(), binary=True)
    file = folder / "adapter_model.bin"
    whole = file.read_bytes()
    for tenth in range(10):
        file.write_bytes(whole[: len(whole) * tenth // 10])
        refused(lambda: load(folder), "adapter_model.bin", "save the adapter as adapter_model.safetensors")


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


def test_bin_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    folder = write(tmp_path / "bad", {"a": Payload(trace)}, binary=True)  # type: ignore[dict-item]
    refused(lambda: load(folder), "adapter_model.bin", "more than tensors")
    assert not trace.exists()


@pytest.mark.parametrize("content", [torch.ones(3), {"a": 1}, [torch.ones(3)], {1: torch.ones(3)}])
def test_bin_of_something_else(content: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "bad", lora_tensors(), binary=True)
    torch.save(content, folder / "adapter_model.bin")
    refused(lambda: load(folder), "adapter_model.bin", "is not a dict of tensors")


def test_bin_of_parameters(tmp_path: Path) -> None:
    """A whole module was saved: the tensors want gradients."""
    parameters = {key: torch.nn.Parameter(tensor) for key, tensor in lora_tensors().items()}
    adapter = load(write(tmp_path, parameters, binary=True))  # type: ignore[arg-type]
    assert adapter.digest == load_tensors(lora_tensors(), CONFIG, "plain").digest
    assert not any(form.pair.a.requires_grad for form in adapter.forms.values())


def test_safetensors_without_tensors(tmp_path: Path) -> None:
    folder = write(tmp_path / "bad", lora_tensors())
    (folder / "adapter_model.safetensors").write_bytes(save({}))
    refused(lambda: load(folder), "weights", "there are no tensors")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_links(name: str, tmp_path: Path) -> None:
    """A link out of the folder is refused; one within it, and the layout of a Hugging Face cache, are not."""
    binary = name.endswith(".bin")
    folder = write(tmp_path / "bad", lora_tensors(), binary=binary)
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    refused(lambda: load(folder), name, "is a link out of the folder")

    (folder / name).unlink()
    outside.rename(folder / "other")
    (folder / name).symlink_to("other")
    digest = load(folder).digest

    snapshot = write(tmp_path / "models--a--b" / "snapshots" / "main", lora_tensors(), binary=binary)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (snapshot / name).rename(blobs / "123")
    (snapshot / name).symlink_to("../../blobs/123")
    assert load(snapshot).digest == digest


# Anything at all

DORA = CONFIG | {"use_dora": True, "rank_pattern": {}, "alpha_pattern": {"v_proj": 7}, "bias": "none"}
BASE = {"model.layers.0.self_attn.q_proj": (42, 30), "model.layers.0.self_attn.v_proj": (18, 30)}
SOUND: list[tuple[dict[str, Any], Tensors]] = [
    (DORA, dora_tensors()),
    (IA3, {f"{Q}ia3_l": torch.full((42, 1), 2.0)}),
    (VERA | {"projection_prng_key": 0}, VERA_TENSORS),
    (VERA | {"save_projection": False}, {key: VERA_TENSORS[key] for key in VERA_TENSORS if "lambda" in key}),
    (OFT | {"coft": False, "eps": 1e-3, "num_cayley_neumann_terms": 5}, {f"{Q}oft_R.weight": torch.ones(5, 15)}),
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
TENSORS = st.builds(
    lambda shape, dtype, fill: torch.full(shape, fill).to(dtype),
    st.lists(st.sampled_from([0, 1, 3, 30, 42]), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]),
    st.floats(width=32),
)


def served_or_refused(data: st.DataObject, sound: list[tuple[dict[str, Any], Tensors]]) -> None:
    """Whatever stands in a field or a tensor, the outcome is an adapter or an AdapterError, and no other exception."""
    config, tensors = data.draw(st.sampled_from(sound))
    config, tensors = dict(config), dict(tensors)
    load_tensors(tensors, config, "sound", BASE, torch.float32)
    if data.draw(st.booleans()):
        config[data.draw(st.sampled_from(sorted(config)))] = data.draw(VALUES)
    else:
        key = data.draw(st.sampled_from(sorted(tensors)))
        tensor = tensors.pop(key)
        tensors[data.draw(st.sampled_from([key, key + ".weight", "module"]) | st.text())] = data.draw(
            st.just(tensor) | TENSORS
        )
    try:
        adapter = load_tensors(tensors, config, "any", BASE, torch.float32)
    except AdapterError as error:
        assert str(error).startswith("adapter 'any': ") and "\n" not in str(error)
    else:
        assert adapter.forms


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_anything_is_served_or_refused(data: st.DataObject) -> None:
    served_or_refused(data, SOUND)
