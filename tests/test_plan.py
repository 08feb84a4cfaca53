"""The command ``scute plan``: bytes worked out by hand for odd shapes, the bytes of the server, and refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from adapters import EVERY_METHOD, RECIPES, Recipe, ia3, load_base, lora, of, oft, vera, write_all
from models import write_model
from scute_converter import load
from scute_sglang.arena import Arena
from scute_sglang.base_folder import BaseFolder
from scute_sglang.cli import app
from scute_sglang.packing import pack_adapter
from scute_sglang.plan import (
    COPY_SHARE,
    GPUS,
    IN_LINE,
    LAUNCH,
    Gpu,
    Model,
    Tenant,
    arena_bytes,
    decode_step,
    slot_bytes,
    stock_slot_bytes,
)

# In every one of the 3 layers: qkv_proj from 30 to 42 + 14 + 14, o_proj from 42 to 30, gate_up_proj from 30 to 52 + 52,
# down_proj from 52 to 30. With the embedding (311, 30) and the head 14 wrapped modules.
SIZES = {
    "hidden_size": 30,
    "intermediate_size": 52,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 14,
    "num_hidden_layers": 3,
}
ODD = {
    "lora": Recipe(
        lora(r=3, rank_pattern={"v_proj": 5}, target_modules=["q_proj", "v_proj"], layers_to_transform=[0, 2]), 1
    ),
    "dora": Recipe(lora(r=4, use_dora=True, target_modules=["k_proj", "down_proj"]), 2),
    "vera": Recipe(vera(r=7, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"]), 3),
    "vera_too": Recipe(vera(r=7, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"]), 4),
    "vera_other": Recipe(vera(r=9, target_modules=["v_proj", "down_proj"]), 5),
    "ia3": Recipe(ia3(), 6),
    "oft": Recipe(oft(oft_block_size=6, target_modules=["q_proj", "v_proj"]), 7),
    "one": Recipe(lora(r=2, target_modules=["o_proj"], layers_to_transform=[1]), 9),
    "ends": Recipe(lora(r=2, target_modules=["embed_tokens", "lm_head"]), 8),
}
H200 = GPUS["h200"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("odd")
    write_model(path, "llama", tied=False, **SIZES)
    return path


@pytest.fixture(scope="module")
def folders(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(ODD, tmp_path_factory.mktemp("odd adapters"), weights)


@pytest.fixture(scope="module")
def config(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of the model without its weights."""
    return Path(shutil.copy(weights / "config.json", tmp_path_factory.mktemp("config")))


@pytest.fixture(scope="module")
def base(config: Path) -> BaseFolder:
    return BaseFolder.open(str(config))


@pytest.fixture(scope="module")
def model(base: BaseFolder) -> Model:
    return Model.of(base.projections)


def tenant(folder: Path, base: BaseFolder) -> Tenant:
    adapter = load(folder, folder.name, base.shapes, base.dtype)
    return Tenant.of(folder.name, adapter, Model.of(base.projections))


@pytest.fixture(scope="module")
def tenants(folders: dict[str, Path], base: BaseFolder) -> dict[str, Tenant]:
    return {name: tenant(folder, base) for name, folder in folders.items()}


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_narrow_terminal_cuts_no_number_off(config: Path, folders: dict[str, Path]) -> None:
    arguments = ["plan", str(config), str(folders["lora"])]
    narrow, wide = (CliRunner().invoke(app, arguments, env={"COLUMNS": columns}) for columns in ("60", "120"))
    assert narrow.exit_code == 0 and narrow.output == wide.output


def rows(output: str, first: str) -> list[list[str]]:
    lines = [line for line in output.splitlines() if line.startswith(f"│ {first} ")]
    return [[cell.strip() for cell in line.strip("│\n").split("│")] for line in lines]


def test_lora_on_some_projections_of_some_layers(model: Model, tenants: dict[str, Tenant]) -> None:
    step = decode_step(model, [tenants["lora"]], H200)
    shrink, expand = 2 * (3 * 30 + 5 * 30), 2 * (3 * 42 + 5 * 14)  # in each of two layers
    assert step.moved == 2 * (shrink + expand)
    assert step.launches == 2 * 14
    # The head and the modules without parts cost the launch of expand, and the embedding that of lookup too.
    assert step.seconds == pytest.approx(2 * (shrink / 4.3e12 + IN_LINE) + 12 * LAUNCH + LAUNCH)
    # 90 + 126 + 150 + 70 elements per layer, each part beginning on 16 bytes; a block is a multiple of 256 bytes
    assert tenants["lora"].resident == 2 * 2 * (96 + 128 + 152 + 72)
    assert tenants["lora"].ranks == (3, 5)


def test_time_is_that_of_the_bytes_where_they_outweigh_the_floor(model: Model, tenants: dict[str, Tenant]) -> None:
    """On a GPU so slow that the two adapted expands, and nothing else, take longer than their floor."""
    step = decode_step(model, [tenants["lora"]], Gpu("slow", sheet=1e6))
    assert step.seconds == pytest.approx(2 * 2 * 436 / (COPY_SHARE * 1e6) + 13 * LAUNCH)


def test_dora_reads_its_scale_too(model: Model, tenants: dict[str, Tenant]) -> None:
    dora = tenants["dora"]
    elements = 4 * (30 + 14) + 14 + 4 * (52 + 30) + 30
    assert decode_step(model, [dora], H200).moved == 3 * 2 * elements
    assert dora.full_rank and set(dora.lora_ranks.values()) == {14, 30}
    assert dora.lora == 3 * 2 * (14 * (30 + 14) + 30 * (52 + 30))


def test_a_shared_basis_counts_once(model: Model, tenants: dict[str, Tenant]) -> None:
    one, two, other = tenants["vera"], tenants["vera_too"], tenants["vera_other"]
    own = 3 * (7 + 42 + 7 + 14 + 7 + 14 + 7 + 30)  # d and e of q, k, v and down
    basis = 3 * (7 * 30 + 7 * 42 + 7 * 52 + 7 * 30)  # a of qkv once, and of b the 42 rows of q, which k and v begin
    assert decode_step(model, [one], H200).moved == 2 * (own + basis)
    assert decode_step(model, [one, two], H200).moved == 2 * (2 * own + basis)
    assert decode_step(model, [one, two, one, two, two], H200).moved == 2 * (2 * own + basis)
    # The graph with shared bases has two more launches at every module but the embedding, beside the base layer; expand
    # adds what they make at six modules.
    step = decode_step(model, [one], H200)
    assert step.launches == 2 * 14 + 2 * 13
    assert step.seconds == pytest.approx(2 * (own + basis) / 4.3e12 + 6 * IN_LINE + 9 * LAUNCH)
    elsewhere = 3 * (9 + 14 + 9 + 30 + 9 * 30 + 9 * 14 + 9 * 52 + 9 * 30)
    assert decode_step(model, [one, other], H200).moved == 2 * (own + basis + elsewhere)

    assert (one.ranks, one.shared_ranks, other.shared_ranks) == ((), (7,), (9,))
    assert one.bases == two.bases and one.bases.keys().isdisjoint(other.bases)
    held = -(-2 * (368 + 7 * 42) // 256) * 256  # a (7, 52) on 16 bytes, then b (7, 42)
    assert list(one.bases.values()) == [held]
    block = -(-2 * 3 * (8 + 48 + 8 + 16 + 8 + 16 + 8 + 32) // 256) * 256
    assert one.resident == two.resident == block
    assert arena_bytes([one, two]) == 2 * block + held
    assert arena_bytes([one] * 1000) == 1000 * block + held
    assert set(one.lora_ranks.values()) == {7} and not one.full_rank
    assert one.lora == 3 * 2 * 7 * (30 + 42 + 2 * (30 + 14) + 52 + 30)


def test_input_transforms_are_in_a_graph_of_their_own(model: Model, tenants: dict[str, Tenant]) -> None:
    """(IA)3 scales 14 outputs of k and of v, and 52 inputs of down. Inputs are copied at o, down and the head, the
    modules of one projection."""
    parts = 3 * (14 + 14 + 52)
    inputs = 3 * (42 * 2 + 52 * 2) + 30 * 2
    step = decode_step(model, [tenants["ia3"]], H200)
    assert step.moved == 2 * (parts + inputs)
    assert step.launches == 2 * 14 + 7
    own, rotate = 3 * IN_LINE + 12 * LAUNCH, 3 * IN_LINE + 4 * LAUNCH
    assert step.seconds == pytest.approx(own + rotate)
    # Rows of adapters without one go through it too.
    mixed = decode_step(model, [tenants["ia3"], tenants["lora"]], H200)
    lora_moved = decode_step(model, [tenants["lora"]], H200).moved
    assert (mixed.moved, mixed.launches) == (2 * (parts + 2 * inputs) + lora_moved, step.launches)
    # With a shared basis in the batch there are two more at every module but the embedding.
    assert decode_step(model, [tenants["ia3"], tenants["vera"]], H200).launches == step.launches + 2 * 13


def test_rotations_of_fused_projections_copy_the_inputs_of_each_slice(model: Model, tenants: dict[str, Tenant]) -> None:
    inputs = 3 * (30 * 4 + 42 * 2 + 30 * 3 + 52 * 2) + 30 * 2
    step = decode_step(model, [tenants["oft"]], H200)
    assert step.moved == 2 * (inputs + 3 * 2 * (5 * 6 * 6))
    assert step.launches == 2 * 14 + 13
    # rotate works at qkv, and so does expand, which takes the columns of q, k and v from rows of their own.
    assert step.seconds == pytest.approx(2 * 3 * IN_LINE + (12 + 10) * LAUNCH)
    # One adapter that rotates fused projections brings the whole batch into that graph.
    assert decode_step(model, [tenants["ia3"], tenants["oft"]], H200).launches == step.launches
    # The graph for up to two such requests of five has room for two at k, v and up, the other for all five.
    few, every = (
        decode_step(model, [tenants["oft"]] * count + [tenants["lora"]] * (5 - count), H200).moved for count in (2, 3)
    )
    assert every - few == 2 * (5 - 2) * 3 * (30 * 2 + 30)
    assert set(tenants["oft"].lora_ranks.values()) == {30, 14}


def test_embedding_and_head(model: Model, tenants: dict[str, Tenant]) -> None:
    """A row reads two numbers of ``a (2, 311)``, each in 32 bytes of its own."""
    ends = tenants["ends"]
    shared = 2 * (2 * 30 + 2 * (30 + 311))
    assert decode_step(model, [ends], H200).moved == 2 * 32 + shared
    step = decode_step(model, [ends, ends, ends], H200)
    assert step.moved == 3 * 2 * 32 + shared
    assert step.seconds == pytest.approx(3 * IN_LINE + 12 * LAUNCH + 2 * 2 * 30 / 4.3e12)


def test_an_adapter_of_a_whole_fused_module_reads_its_a_once(model: Model, base: BaseFolder, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.1.self_attn.qkv_proj"
    save_file(
        {f"{name}.lora_A.weight": torch.randn(5, 30), f"{name}.lora_B.weight": torch.randn(70, 5)},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 5}))
    fused = tenant(tmp_path, base)
    assert decode_step(model, [fused], H200).moved == 2 * 5 * (30 + 70)
    assert fused.resident == -(-2 * (152 + 216 + 72 + 70) // 256) * 256  # a, and b of q, k and v
    assert fused.lora == 2 * 5 * (30 + 70)


def test_output_shift_of_an_unscaled_base_bias(tmp_path: Path) -> None:
    """DoRA leaves the bias of the base layer as it is, which then has to be served; (IA)3 scales it; GLoRA adds a
    product of the base weight to it."""
    write_model(tmp_path / "base", "qwen2")  # from 72 to 24 with a bias, and from 72 to 72 without
    recipes = {
        "dora": Recipe(lora(r=3, use_dora=True, target_modules=["k_proj", "o_proj"]), 1),
        "ia3": Recipe(ia3(target_modules=["k_proj", "o_proj"], feedforward_modules=[]), 2),
        "glora": Recipe(of(peft.GloraConfig, config_A_B="vector", target_modules=["k_proj"]), 3),
    }
    folders = write_all(recipes, tmp_path, tmp_path / "base")
    base = BaseFolder.open(str(tmp_path / "base"))
    model = Model.of(base.projections)
    moved = {name: decode_step(model, [tenant(path, base)], H200).moved for name, path in folders.items()}
    assert moved["dora"] == 2 * 2 * (3 * (72 + 24) + 24 + 24 + 3 * (72 + 72) + 72)
    assert moved["ia3"] == 2 * 2 * (24 + 72)
    assert moved["glora"] == 2 * 2 * (24 + 72 + 24 + 24)  # a scale, a pair of rank 1 and a shift
    assert "made with the base weight" not in run(tmp_path / "base", folders["glora"])


def test_stock_pads_everything_to_the_largest_rank(model: Model, tenants: dict[str, Tenant]) -> None:
    """Both kinds of module of the two adapters, in all layers, with three ``a`` for qkv."""
    features = 3 * (3 * 30 + 42 + 14 + 14 + 52 + 30)
    assert stock_slot_bytes(model, [tenants["lora"], tenants["vera"]]) == 2 * 7 * features
    assert stock_slot_bytes(model, [tenants["lora"]]) == 2 * 5 * 3 * (3 * 30 + 70)
    assert slot_bytes(model) == (3 * 7 + 2) * 12 * 8


def test_a_module_that_hugging_face_fuses_has_the_slices_of_sglang(tmp_path: Path) -> None:
    """Phi-3, in two layers from 72 to 72 + 24 + 24, 72 to 72, 72 to 192 + 192 and 192 to 72."""
    write_model(tmp_path / "base", "phi3")
    recipe = Recipe(oft(oft_block_size=6, target_modules=["qkv_proj"]), 1)
    recipe.write(tmp_path / "oft", tmp_path / "base")
    base = BaseFolder.open(str(tmp_path / "base"))
    model, rotated = Model.of(base.projections), tenant(tmp_path / "oft", base)
    inputs = 2 * (72 * 4 + 72 * 2 + 72 * 3 + 192 * 2) + 72 * 2
    step = decode_step(model, [rotated], H200)
    assert (step.moved, step.launches) == (2 * (2 * 12 * 6 * 6 + inputs), 2 * 10 + 9)
    assert stock_slot_bytes(model, [rotated]) == 2 * 72 * 2 * (3 * 72 + 120)


@pytest.mark.parametrize("name", [*RECIPES, *EVERY_METHOD])
def test_bytes_are_those_that_the_server_packs(name: str, llama: Path, adapters: dict[str, Path]) -> None:
    """The same adapter with everything worked out from the real weights, and packed as a server does."""
    base, weights = BaseFolder.open(str(llama)), load_base(llama)
    adapter = load(adapters[name], name, base.shapes, base.dtype)
    sites = [path for path, projection in base.projections.items() if not projection.slices]
    forms, shifts = {}, {}
    for path, stored in adapter.forms.items():
        weight = weights.get_submodule(path).weight.detach()
        form = stored if stored.fold is None else stored.fold.fold(stored, weight)
        if form.deferred is not None:
            form = form.deferred.resolve(form, form.deferred.measure(weight, form))
        site = sites.index(path)
        out_features, in_features = weight.shape
        forms[site] = replace(form, in_features=in_features, out_features=out_features)
        if form.bias.add is not None:  # this model has no biases of its own
            shifts[site] = form.bias.add
    packed = pack_adapter(name, forms, shifts, sites, torch.bfloat16)
    planned = tenant(adapters[name], base)
    assert planned.resident == Arena(0, torch.bfloat16, "cpu").footprint(packed.block.numel())


def test_table(config: Path, folders: dict[str, Path], model: Model, tenants: dict[str, Tenant]) -> None:
    chosen = [tenants[name] for name in ("lora", "vera", "vera_too")]
    output = run(config, *(folders[one.name] for one in chosen), "--gpu", "a6000", "--requests", 4, "--tenants", 500)
    assert "RTX A6000: 0.68 TB/s (measured)" in output
    step, memory = rows(output, "lora")
    stock, mixed_stock = 5 * 3 * (3 * 30 + 70), 7 * 3 * (3 * 30 + 70 + 52 + 30)
    assert step[:4] == ["lora", "LoRA", "3, 5", "1,792"] and step[4:6] == [f"{2 * 2 * 436:,}", "28"]
    assert memory == ["lora", "3, 5", "500", "896 KB", "872 KB", f"{2 * stock * 500 / 1e6:.3g} MB"]
    (memory,) = rows(output, "all, in turn")  # 167 like each of the first two, 166 like the third
    arena = 167 * (1792 + 1024) + 166 * 1024 + 1536
    loras = 167 * 1744 + 333 * tenants["vera"].lora
    assert memory[1:4] == ["3, 5, 7", "500", f"{arena / 1e3:.3g} KB"]
    assert memory[4:] == [f"{loras / 1e6:.3g} MB", f"{2 * mixed_stock * 500 / 1e6:.3g} MB"]
    assert rows(output, "vera")[0][1:4] == ["VeRA", "7 shared", "1,024"]
    mixed = rows(output, "all ")[0]
    expected = decode_step(model, [*chosen, chosen[0]], GPUS["a6000"])
    assert mixed[1:] == [
        *("4 requests", "", f"{1792 + 2 * 1024 + 1536:,}"),
        *(f"{expected.moved:,}", "54", f"{expected.seconds * 1e3:.3f}"),
    ]
    assert output.count("shared:") == 1 and "shared: 1,536 bytes, once for vera, vera_too" in output


def test_one_request_of_each_and_three_numbers_of_tenants(config: Path, folders: dict[str, Path]) -> None:
    output = run(config, folders["ia3"], folders["lora"])
    assert rows(output, "all")[0][1] == "2 requests"
    assert rows(output, "ia3")[1][1] == "min(in, out): 14, 30"
    assert all(f" {count} │" in output for count in ("16", "128", "1,024"))


def test_what_is_made_with_the_base_weight_is_noted(llama: Path, adapters: dict[str, Path]) -> None:
    assert "note: hra: pairs are made with the base weight" in run(llama, adapters["hra"])


@pytest.mark.parametrize("case", ["wrong shape", "rotation", "no adapter", "no model"])
def test_what_does_not_fit_is_refused_as_by_inspect(
    case: str, config: Path, folders: dict[str, Path], llama: Path, tmp_path: Path
) -> None:
    base, adapter = config, tmp_path / "adapter"
    adapter.mkdir()
    match case:
        case "wrong shape":
            base, adapter, reason = llama, folders["one"], "made for 42 input features, but the model has 120"
        case "rotation":
            fields = {"peft_type": "OFT", "block_share": True, "use_cayley_neumann": False, "oft_block_size": 7}
            (adapter / "adapter_config.json").write_text(json.dumps(fields))
            key = "base_model.model.model.layers.0.self_attn.q_proj.oft_R.weight"
            save_file({key: torch.randn(1, 21)}, adapter / "adapter_model.safetensors")
            reason = "rotates blocks of 7 input features, which do not divide the model's 30"
        case "no adapter":
            reason = "adapter_config.json"
        case "no model":
            base, adapter, reason = tmp_path, folders["lora"], "has no config.json"
    planned = CliRunner().invoke(app, ["plan", str(base), str(adapter)])
    inspected = CliRunner().invoke(app, ["inspect", str(adapter), "--base", str(base)])
    assert planned.exit_code == inspected.exit_code == 1
    assert planned.stdout == "" and reason in planned.stderr
    assert planned.stderr == inspected.stderr and planned.stderr.startswith("refused: ")


def test_unknown_gpu(config: Path, folders: dict[str, Path]) -> None:
    result = CliRunner().invoke(app, ["plan", str(config), str(folders["lora"]), "--gpu", "h2000"])
    assert result.exit_code == 2 and "h200" in result.stderr


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "160"})
    assert result.exit_code == 0 and "scute plan ./my-model/config.json" in result.output
