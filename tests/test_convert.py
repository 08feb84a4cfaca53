"""``scute convert`` and its format: the bytes served are those of the source, and a folder written by hand works."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from typer.testing import CliRunner

from adapters import EVERY_METHOD, RECIPES, Oracle, Recipe, load_base, lora
from models import write_model
from scute_converter import Adapter, AdapterError, Bias, NormalForm, load, native, reference
from scute_sglang.cli import app
from scute_sglang.packing import pack_adapter, pack_basis
from serving import Server
from test_parity_server import CLEAR, EXACT, compare, prompts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scute(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("refused: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(scope="module")
def model(llama: Path) -> PreTrainedModel:
    return load_base(llama)


@pytest.fixture(scope="module")
def converted(
    llama: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder of a recipe after conversion."""
    folder, done = tmp_path_factory.mktemp("converted"), set()

    def convert(name: str) -> Path:
        if name not in done:
            scute("convert", adapters[name], folder / name, "--base", llama)
            done.add(name)
        return folder / name

    return convert


def resolved(adapter: Adapter, model: PreTrainedModel) -> dict[str, NormalForm]:
    """The forms as the engine works them out with the weights of the model."""

    def resolve(form: NormalForm, weight: torch.Tensor) -> NormalForm:
        if form.fold is not None:
            form = form.fold.fold(form, weight)
        return form if form.deferred is None else form.deferred.resolve(form, form.deferred.measure(weight, form))

    return {path: resolve(form, model.get_submodule(path).weight.detach()) for path, form in adapter.forms.items()}


def packed(forms: Mapping[str, NormalForm], adapter: Adapter, dtype: torch.dtype) -> list[torch.Tensor]:
    """Everything that the kernels read, as bytes and table rows; biases as shifts of their own."""
    sites = {index: form for index, form in enumerate(forms.values())}
    shifts = {index: form.bias.add for index, form in sites.items() if form.bias.add is not None}
    pack = pack_adapter("any", sites, shifts, list(forms), dtype)
    assert set(pack.bases) <= adapter.bases.keys()
    bases = [pack_basis(key, adapter.bases[key], dtype) for key in pack.bases]
    blocks = [block.view(torch.uint8) for block in [pack.block, *(basis.block for basis in bases)] if block.numel()]
    return [*blocks, pack.rows, *(basis.row for basis in bases)]


@pytest.mark.parametrize("name", [*RECIPES, *EVERY_METHOD])
def test_the_same_bytes_are_served(
    name: str, model: PreTrainedModel, adapters: dict[str, Path], converted: Callable[[str], Path]
) -> None:
    shapes = {path: tuple(m.weight.shape) for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    source, native_adapter = load(adapters[name], "x", shapes, torch.float32), load(converted(name))
    expected = resolved(source, model)
    assert native_adapter.forms.keys() == expected.keys() and native_adapter.bases.keys() == source.bases.keys()
    for dtype in DTYPES:
        before = packed(expected, source, dtype)
        after = packed(native_adapter.forms, native_adapter, dtype)
        assert len(before) == len(after)
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), dtype
    for path, form in native_adapter.forms.items():
        assert form.deferred is None and form.fold is None
        assert (form.out_features, form.in_features) == shapes[path]
        assert form.bias.scaled == expected[path].bias.scaled
        needed_weight = source.forms[path].deferred is not None or source.forms[path].fold is not None
        assert (form.base_sample is not None) == needed_weight
        if form.base_sample is not None:
            assert torch.equal(form.base_sample, model.get_submodule(path).weight[0, :8])
    assert (native_adapter.method, native_adapter.parameters) == (source.method, source.parameters)
    assert native_adapter.notes == source.notes
    assert load(converted(name), "other name").digest == native_adapter.digest


def test_a_converted_folder_can_be_inspected_and_converted_again(
    llama: Path, converted: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = converted("dora_part")
    output = scute("inspect", folder, "--base", llama)
    assert output.startswith("DoRA, ") and native.WEIGHTS in output and f"fits {llama}: all 6 modules" in output
    assert "s A B" in next(line for line in output.splitlines() if "o_proj" in line)
    scute("convert", folder, tmp_path / "again", "--base", llama)
    files = [(path / native.WEIGHTS).read_bytes() for path in (folder, tmp_path / "again")]
    assert files[0] == files[1]


def test_it_is_refused_on_another_base_of_the_same_shape(
    adapters: dict[str, Path], converted: Callable[[str], Path], tmp_path: Path
) -> None:
    write_model(tmp_path / "other", "llama", tied=False, seed=1)
    for message in (
        refused("inspect", converted("dora"), "--base", tmp_path / "other"),
        refused("convert", converted("dora"), tmp_path / "new", "--base", tmp_path / "other"),
    ):
        assert "module model.layers.0." in message and "was converted for another base model" in message
    assert not (tmp_path / "new").exists()
    scute("inspect", converted("lora"), "--base", tmp_path / "other")  # needs nothing of the weights


@pytest.mark.parametrize("same", [True, False])
def test_whole_embeddings_beside_an_adapter(same: bool, llama: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "adapter_config.json").write_bytes((adapters["lora_r1"] / "adapter_config.json").read_bytes())
    head = load_file(llama / "model.safetensors")["lm_head.weight"].clone()
    head[-1, -1] += 0 if same else 1e-3
    tensors = load_file(adapters["lora_r1"] / "adapter_model.safetensors")
    save_file(tensors | {"base_model.model.lm_head.weight": head}, source / "adapter_model.safetensors")
    if same:
        scute("convert", source, tmp_path / "new", "--base", llama)
        assert load(tmp_path / "new").payloads == {}
        assert load(tmp_path / "new").digest == load(adapters["lora_r1"]).digest
    else:
        assert "module lm_head: the file holds" in refused("convert", source, tmp_path / "new", "--base", llama)
        assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten_or_left_half_written(
    llama: Path, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    arguments = ["convert", str(adapters["ia3"]), str(tmp_path / "full"), "--base", str(llama)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and os.listdir(tmp_path / "full") == ["notes.txt"]

    def full_disk(*_: Any) -> None:
        raise OSError("no space left on device")

    (tmp_path / "empty").mkdir()
    scute("convert", adapters["ia3"], tmp_path / "empty", "--base", llama)  # an empty folder is taken
    with monkeypatch.context() as patch:
        patch.setattr(native, "save_file", full_disk)
        result = CliRunner().invoke(app, [*arguments[:2], str(tmp_path / "new"), *arguments[3:]])
    assert result.exit_code == 1 and "no space left" in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["empty", "full"]


# The format, written by hand

PATH = "model.layers.0.self_attn.q_proj"
OTHER = "model.layers.1.mlp.up_proj"
INPUTS, OUTPUTS, RANK = 30, 42, 3


def header(**fields: Any) -> dict[str, Any]:
    module = {"in_features": INPUTS, "out_features": OUTPUTS}
    modules = {PATH: module, OTHER: {**module, "basis": "pair", "bias_scaled": True}}
    return {"format": "scute-adapter", "version": 1, "method": "Mine", "modules": modules, **fields}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        f"{PATH}/a": (RANK, INPUTS),
        f"{PATH}/b": (RANK, OUTPUTS),
        f"{PATH}/rotation_delta": (5, 6, 6),
        f"{PATH}/bias_replace": (OUTPUTS,),
        f"{PATH}/bias_scale_delta": (OUTPUTS,),
        f"{PATH}/base_sample": (8,),
        f"{OTHER}/d": (7,),
        f"{OTHER}/e": (OUTPUTS,),
        f"{OTHER}/scale_delta": (OUTPUTS,),
        f"{OTHER}/bias_add": (OUTPUTS,),
        "bases/pair/a": (7, INPUTS + 2),
        "bases/pair/b": (7, OUTPUTS + 5),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, content: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "scute_adapter.json").write_text(json.dumps(content))
    save_file(dict(weights), folder / "scute_adapter.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_slot_is_where_the_format_says(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    adapter = load(write(tmp_path / "mine", header(notes=["careful"]), stored))
    values = {name: tensor.float() for name, tensor in stored.items()}
    one, two = adapter.forms[PATH], adapter.forms[OTHER]
    x, weight, bias = torch.randn(4, INPUTS), torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)

    rotated = x + torch.cat([x[:, 6 * j : 6 * j + 6] @ values[f"{PATH}/rotation_delta"][j] for j in range(5)], dim=1)
    expected = rotated @ weight.T + values[f"{PATH}/bias_replace"] * (1 + values[f"{PATH}/bias_scale_delta"])
    expected += x @ values[f"{PATH}/a"].T @ values[f"{PATH}/b"]
    # Sums of at most 42 products in another order: a few times 42 * 2^-24 of the largest.
    close = {"rtol": 0, "atol": 2e-5 * expected.abs().max().item()}
    torch.testing.assert_close(reference.apply(one, adapter.bases, x, weight, bias), expected, **close)

    a, b = values["bases/pair/a"][:, :INPUTS], values["bases/pair/b"][:, :OUTPUTS]
    expected = (x @ weight.T + bias) * (1 + values[f"{OTHER}/scale_delta"]) + values[f"{OTHER}/bias_add"]
    expected += x @ a.T * values[f"{OTHER}/d"] @ b * values[f"{OTHER}/e"]
    close = {"rtol": 0, "atol": 2e-5 * expected.abs().max().item()}
    torch.testing.assert_close(reference.apply(two, adapter.bases, x, weight, bias), expected, **close)

    assert torch.equal(one.base_sample, values[f"{PATH}/base_sample"])
    own = sum(tensor.numel() for name, tensor in stored.items() if "bases/" not in name and "sample" not in name)
    assert (adapter.method, adapter.parameters, adapter.notes) == ("Mine", own, ("careful",))


def test_equal_keys_of_two_files_are_not_one_basis(tmp_path: Path) -> None:
    other = tensors()
    other["bases/pair/a"] = other["bases/pair/a"] + 1
    first = load(write(tmp_path / "first", header(), tensors()))
    second = load(write(tmp_path / "second", header(), other))
    assert first.bases.keys().isdisjoint(second.bases)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, t: h.update(version=2), "version 2"),
        (lambda h, t: h.update(format="other"), "format 'other'"),
        (lambda h, t: h.pop("method"), "field method is missing"),
        (lambda h, t: h.update(extra=1), "field extra is not known"),
        (lambda h, t: h.update(modules={}), "has no modules"),
        (lambda h, t: h["modules"].update({PATH: 3}), "is no object"),
        (lambda h, t: h["modules"][PATH].pop("in_features"), "field in_features is missing"),
        (lambda h, t: h["modules"][PATH].update(in_features=0), "field in_features: 0 is not of type int"),
        (lambda h, t: h["modules"][PATH].update(in_features="30"), "field in_features: '30' is not of type int"),
        (lambda h, t: h["modules"][PATH].update(scaled=True), "field scaled is not known"),
        (lambda h, t: h["modules"].update({"new": h["modules"][PATH]}), "module new: has no tensors"),
        (lambda h, t: h["modules"].pop(PATH), f"tensor {PATH}/a: belongs to no module"),
        (lambda h, t: h["modules"][OTHER].pop("basis"), "belongs to no module"),
        (
            lambda h, t: (h["modules"][OTHER].pop("basis"), t.pop("bases/pair/a"), t.pop("bases/pair/b")),
            "no shared basis",
        ),
        (lambda h, t: h["modules"][OTHER].update(basis="lost"), "tensor bases/lost/a: is missing"),
        (lambda h, t: t.update({f"{PATH}/c": torch.ones(3)}), f"tensor {PATH}/c: is no slot"),
        (lambda h, t: t.update({"bases/new/a": torch.ones(3, 3)}), "tensor bases/new/a: belongs to no module"),
        (lambda h, t: t.pop(f"{PATH}/a"), f"tensor {PATH}/a: is missing"),
        (lambda h, t: t.pop(f"{PATH}/b"), f"tensor {PATH}/b: is missing"),
        (lambda h, t: t.pop(f"{OTHER}/d"), f"tensor {OTHER}/d: is missing"),
        (lambda h, t: t.pop(f"{OTHER}/e"), f"tensor {OTHER}/e: is missing"),
        (lambda h, t: t.pop("bases/pair/b"), "tensor bases/pair/b: is missing"),
        (lambda h, t: t.update({f"{PATH}/a": torch.ones(INPUTS, RANK)}), "has shape (30, 3), expected (any, 30)"),
        (lambda h, t: t.update({f"{PATH}/b": torch.ones(4, OUTPUTS)}), "has shape (4, 42), expected (3, 42)"),
        (lambda h, t: t.update({f"{PATH}/a": torch.ones(0, INPUTS)}), "has shape (0, 30)"),
        (lambda h, t: t.update({f"{OTHER}/scale_delta": torch.ones(1, OUTPUTS)}), "has shape (1, 42), expected (42)"),
        (lambda h, t: t.update({f"{PATH}/rotation_delta": torch.ones(5, 4, 4)}), "expected (blocks, k, k)"),
        (lambda h, t: t.update({f"{PATH}/rotation_delta": torch.ones(5, 6, 5)}), "expected (blocks, k, k)"),
        (lambda h, t: t.update({f"{PATH}/rotation_delta": torch.ones(4, 6, 6)}), "expected (blocks, k, k)"),
        (lambda h, t: t.update({f"{PATH}/base_sample": torch.ones(9)}), "has shape (9,), expected (8)"),
        (lambda h, t: t.update({"bases/pair/a": torch.ones(7, 29)}), "at most 29 input"),
        (lambda h, t: t[f"{PATH}/b"].view(-1)[5:].fill_(torch.nan), f"tensor {PATH}/b: holds NaN"),
        (lambda h, t: t.update({f"{PATH}/b": torch.full((RANK, OUTPUTS), 1e300, dtype=torch.float64)}), "beyond fp32"),
        (lambda h, t: t.update({f"{PATH}/b": torch.ones(RANK, OUTPUTS, dtype=torch.int32)}), "torch.int32"),
    ],
)
def test_what_is_refused(
    change: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], message: str, tmp_path: Path
) -> None:
    content, weights = header(), tensors()
    load(write(tmp_path / "sound", content, weights))
    change(content, weights)
    with pytest.raises(AdapterError) as caught:
        load(write(tmp_path / "bad", content, weights))
    assert str(caught.value).startswith("adapter 'bad': ") and message in str(caught.value)


def test_files_that_do_not_belong(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", header(), tensors())
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="holds both"):
        load(folder)
    (folder / "adapter_config.json").unlink()
    weights = folder / "scute_adapter.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(AdapterError, match=r"scute_adapter\.safetensors"):
        load(folder)
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(AdapterError, match="link out of the folder"):
        load(folder)


def test_slots_survive_the_way_through_the_format(tmp_path: Path) -> None:
    adapter = load(write(tmp_path / "mine", header(), tensors()))
    native.write(adapter, tmp_path / "again", "mine")
    again = load(tmp_path / "again")
    assert again.digest == adapter.digest and again.parameters == adapter.parameters
    assert torch.equal(again.forms[PATH].base_sample, adapter.forms[PATH].base_sample)
    empty = replace(adapter, forms={PATH: NormalForm(INPUTS, OUTPUTS, bias=Bias(scaled=True))}, bases={})
    with pytest.raises(AdapterError, match="no effect"):
        native.write(empty, tmp_path / "empty", "mine")


# The real server

SSF = ("self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def write_ssf(folder: Path, model: PreTrainedModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """SSF, which PEFT does not have, as docs/format.md has it: ``y = (x W + b0) * s + t``; returns ``s`` and ``t``."""
    generator = torch.Generator().manual_seed(5)
    modules: dict[str, dict[str, Any]] = {}
    weights: dict[str, torch.Tensor] = {}
    scales = {}
    for layer in range(model.config.num_hidden_layers):
        for name in SSF:
            path = f"model.layers.{layer}.{name}"
            outputs, inputs = model.get_submodule(path).weight.shape
            scale = 1 + 0.3 * torch.randn(outputs, generator=generator)
            shift = 0.3 * torch.randn(outputs, generator=generator)
            modules[path] = {"in_features": inputs, "out_features": outputs, "bias_scaled": True}
            weights |= {f"{path}/scale_delta": scale - 1, f"{path}/bias_add": shift}
            scales[path] = (scale, shift)
    content = {"format": "scute-adapter", "version": 1, "method": "SSF", "modules": modules}
    write(folder, content, weights)
    return scales


def test_the_server_loads_converted_and_hand_written_folders(
    server: Server, llama: Path, adapters: dict[str, Path], converted: Callable[[str], Path], tmp_path: Path
) -> None:
    oracle = Oracle(llama, None)
    plain = Oracle(llama, None)
    for path, (scale, shift) in write_ssf(tmp_path / "ssf", oracle.model).items():
        oracle.model.get_submodule(path).register_forward_hook(
            lambda _, __, output, scale=scale, shift=shift: output * scale + shift
        )
    folders = {f"native_{name}": converted(name) for name in ("dora", "vera_regenerated", "ia3_more")}
    for name, folder in {"ssf": tmp_path / "ssf", **folders}.items():
        response = server.load(name, folder)
        assert response.ok, response.text
    names = [None, "ssf", *folders, "dora"]
    answers = dict(zip(names, server.generate(prompts(len(names), seed=21), names), strict=True))
    for name in ("ssf", *folders):
        assert server.unload(name).ok

    expected = oracle.log_probabilities(answers["ssf"].tokens)
    assert (answers["ssf"].log_probabilities - expected).abs().max() <= EXACT
    assert (plain.log_probabilities(answers["ssf"].tokens) - expected).abs().max() > CLEAR
    for name in folders:
        error, effect = compare(llama, adapters[name.removeprefix("native_")], [answers[name]])
        assert error <= EXACT < CLEAR < effect, name
    error, _ = compare(llama, None, [answers[None]])
    assert error <= EXACT


def test_the_server_refuses_what_was_converted_for_another_base(server: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_model(other, "llama", tied=False, seed=1)
    Recipe(lora(use_dora=True, target_modules=["q_proj", "down_proj"])).write(tmp_path / "source", other)
    scute("convert", tmp_path / "source", tmp_path / "foreign", "--base", other)
    response = server.load("foreign", tmp_path / "foreign")
    assert response.status_code == 400
    message = response.json()["error_message"]
    assert message.startswith("adapter 'foreign': module model.layers.0.") and "another base model" in message
