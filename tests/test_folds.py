"""Methods that are folded into a low-rank pair without the base weight: what the parity matrix does not show."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.delora.layer import DeloraLayer

import scute_converter
from scute_converter import load_tensors, reference
from test_converter import BASE, Tensors, refused, served_or_refused
from test_parity import TOLERANCE, assert_parity, redraw, toy

MODULE = "model.layers.0.self_attn.q_proj"
Q = f"base_model.model.{MODULE}."


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def sound(peft_type: str, prefix: str, shapes: dict[str, tuple[int, ...]], **fields: Any) -> tuple[Any, Tensors]:
    """A config and tensors of one layer with 30 input and 42 output features."""
    config = {"peft_type": peft_type, "target_modules": ["q_proj"], **fields}
    return config, {f"{Q}{prefix}{name}": draw(*shape) for name, shape in shapes.items()}


ADALORA = sound("ADALORA", "lora_", {"A": (3, 30), "B": (42, 3), "E": (3, 1)}, init_r=5, lora_alpha=7)
LOHA = sound(
    "LOHA",
    "hada_",
    {"w1_a": (42, 3), "w1_b": (3, 30), "w2_a": (42, 3), "w2_b": (3, 30)},
    r=3,
    alpha=5,
    rank_pattern={},
    alpha_pattern={"v_proj": 2},
)
LOKR = sound("LOKR", "lokr_", {"w1": (6, 5), "w2_a": (7, 2), "w2_b": (2, 6)}, r=2, alpha=2)
LOKR_BOTH = sound(
    "LOKR",
    "lokr_",
    {"w1_a": (6, 2), "w1_b": (2, 5), "w2_a": (7, 2), "w2_b": (2, 6)},
    r=2,
    alpha=5,
    peft_version="0.18.0",
)
MISS = sound("MISS", "miss_", {"block": (7, 42)}, r=7, init_weights=True)
MINI = sound("MISS", "miss_", {"block": (7, 6)}, r=7, mini_r=6, init_weights="mini")
BONE = sound("BONE", "bone_", {"block": (7, 42)}, r=7, init_weights=True)
DELORA = sound("DELORA", "delora_", {"A": (5, 30), "B": (42, 5), "lambda": (1,), "w_norm": (30,)}, r=5)
GRALORA = sound(
    "GRALORA",
    "gralora_",
    {"A": (3, 10, 6), "B": (3, 6, 14), "A_general.weight": (2, 30), "B_general.weight": (42, 2)},
    r=6,
    alpha=7,
    hybrid_r=2,
    gralora_k=3,
)
POLY = sound(
    "POLY",
    "poly_",
    {"lora_A": (2, 4, 15, 3), "lora_B": (2, 4, 3, 21), "router.module_logits": (1, 8)},
    poly_type="poly",
)
SOUND = [ADALORA, LOHA, LOKR, LOKR_BOTH, MISS, MINI, BONE, DELORA, GRALORA, POLY]


@torch.no_grad()
def test_pruned_adalora(tmp_path: Path) -> None:
    """PEFT leaves the pruned ranks out of the file; the scale stays that of ``init_r``."""
    base = toy()
    config = peft.AdaLoraConfig(target_modules=["q_proj", "v_proj"], init_r=5, lora_alpha=7, total_step=1)
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    redraw(model, config)
    masks = {"layers.0.q_proj": "10110", "layers.0.v_proj": "00000", "layers.1.v_proj": "00001"}
    config.rank_pattern = {f"{path}.lora_E.default": [bit == "1" for bit in mask] for path, mask in masks.items()}
    model.save_pretrained(tmp_path)

    adapter = scute_converter.load(tmp_path)
    ranks = {path: form.pair.rank for path, form in adapter.forms.items()}
    assert ranks == {"layers.0.q_proj": 3, "layers.1.q_proj": 5, "layers.1.v_proj": 1}
    reloaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()
    assert_parity(adapter, base, reloaded.base_model.model)


@pytest.mark.parametrize("splits", [1, 3])
@torch.no_grad()
def test_poly(splits: int, tmp_path: Path) -> None:
    base = toy()
    config = peft.PolyConfig(target_modules=["q_proj", "v_proj", "o_proj"], r=5, n_splits=splits, n_skills=4)
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    redraw(model, config)
    for name, parameter in model.named_parameters():
        if "module_logits" in name:
            parameter.copy_(3 * draw(*parameter.shape))
        elif "poly_" in name:
            parameter.mul_(2)  # the mixture is an average over skills
    model.save_pretrained(tmp_path)
    adapter = scute_converter.load(tmp_path)
    assert adapter.method == "Poly" and len(adapter.forms) == 6
    for path, form in adapter.forms.items():
        layer = base.get_submodule(path)
        x = draw(4, layer.in_features)
        expected = model.base_model.model.get_submodule(path)(x[None], task_ids=torch.tensor([0]))[0]
        actual = reference.apply(form, {}, x, layer.weight, layer.bias)
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
        assert (layer(x) - expected).abs().max() > 0.1 * expected.abs().max()


def test_short_terms_of_delora() -> None:
    """PEFT clamps the lengths by which it divides."""
    config, tensors = DELORA
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    tensors[f"{Q}delora_A"][1] *= 1e-6
    tensors[f"{Q}delora_B"][:, 3] *= 1e-7
    a, b, strength, w_norm = (tensors[f"{Q}delora_{name}"] for name in ("A", "B", "lambda", "w_norm"))
    expected = DeloraLayer._compute_delta(a, b, strength, 5, w_norm)
    pair = load_tensors(tensors, config, "short").forms[MODULE].pair
    torch.testing.assert_close(pair.b.T @ pair.a, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    # Terms 1 and 3 are short by the lengths that are clamped, the others are as long as lambda makes them.
    lengths = pair.a.div(w_norm).norm(dim=1) * pair.b.norm(dim=1) * 5 / strength.abs()
    assert lengths[[1, 3]].max() < 0.1
    torch.testing.assert_close(lengths[[0, 2, 4]], torch.ones(3))


def test_bone_is_miss_with_another_name() -> None:
    config, tensors = MISS
    miss = load_tensors(tensors, config, "miss", BASE)
    bone_tensors = {key.replace("miss", "bone"): tensor for key, tensor in tensors.items()}
    bone = load_tensors(bone_tensors, config | {"peft_type": "BONE"}, "bone", BASE)
    assert (miss.method, bone.method) == ("MiSS", "Bone")
    assert bone.digest == miss.digest


def test_scale_of_old_lokr() -> None:
    """PEFT up to 0.13 left the scale out: with a file of unknown version that is said, unless the scale is 1."""
    config, tensors = LOKR
    plain = load_tensors(tensors, config, "plain")
    assert plain.notes == ()
    scaled = load_tensors(tensors, config | {"alpha": 6}, "scaled")
    assert len(scaled.notes) == 1 and "PEFT up to 0.13 left out" in scaled.notes[0]
    torch.testing.assert_close(scaled.forms[MODULE].pair.b, 3 * plain.forms[MODULE].pair.b, rtol=1e-6, atol=0)
    known = load_tensors(tensors, config | {"alpha": 6, "peft_version": "0.18.0"}, "known")
    assert known.notes == () and known.digest == scaled.digest


@pytest.mark.parametrize(
    ("shapes", "rank"),
    [
        ({"w1": (6, 5), "w2_a": (7, 2), "w2_b": (2, 6)}, 10),
        ({"w1": (3, 10), "w2_a": (14, 2), "w2_b": (2, 3)}, 6),
        ({"w1_a": (6, 2), "w1_b": (2, 5), "w2_a": (7, 2), "w2_b": (2, 6)}, 4),
        ({"w1_a": (6, 2), "w1_b": (2, 15), "w2": (7, 2)}, 4),
        ({"w1_a": (21, 2), "w1_b": (2, 1), "w2_a": (2, 2), "w2_b": (2, 30)}, 2),
    ],
)
def test_lokr_takes_the_smallest_rank(shapes: dict[str, tuple[int, ...]], rank: int) -> None:
    config, tensors = sound("LOKR", "lokr_", shapes, r=2, alpha=2)
    pair = load_tensors(tensors, config, "lokr").forms[MODULE].pair
    assert pair.rank == rank
    w = {name: tensors[f"{Q}lokr_{name}"] for name in shapes}
    w1 = w["w1"] if "w1" in w else w["w1_a"] @ w["w1_b"]
    w2 = w["w2"] if "w2" in w else w["w2_a"] @ w["w2_b"]
    torch.testing.assert_close(pair.b.T @ pair.a, torch.kron(w1, w2), rtol=0, atol=1e-5)


def changed(adapter: tuple[Any, Tensors], name: str = "", shape: Any = (), **fields: Any) -> tuple[Any, Tensors]:
    """The adapter with other fields, and with one tensor of another shape, or without it if ``shape`` is None."""
    config, tensors = adapter
    tensors = dict(tensors)
    if name and shape is None:
        del tensors[Q + name]
    elif name:
        tensors[Q + name] = draw(*shape)
    return config | fields, tensors


@pytest.mark.parametrize(
    ("adapter", "parts"),
    [
        (changed(ADALORA, "lora_E", (4, 1)), ["q_proj.lora_E", "(4, 1) does not fit lora_A (3, 30)", "all three"]),
        (changed(ADALORA, "lora_E", (3, 2)), ["q_proj.lora_E", "(3, 2) does not fit"]),
        (changed(ADALORA, "lora_B", (42, 2)), ["lora_B (42, 2)"]),
        (changed(ADALORA, "lora_B", (0, 3)), ["lora_B (0, 3)"]),
        (changed(ADALORA, "lora_A", (0,)), ["q_proj.lora_A", "is empty (0,)", "ZeRO-3"]),
        (changed(ADALORA, "lora_E", None), ["q_proj.lora_E", "is missing"]),
        (changed(ADALORA, init_r=2), ["q_proj.lora_A", "rank 3, more than the init_r=2", "correct init_r"]),
        (changed(ADALORA, lora_alpha=0), ["was pruned to rank 3", "lora_alpha=0 scales with the rank"]),
        (changed(ADALORA, use_dora=True), ["field use_dora", "is not understood"]),
        (changed(ADALORA, layer_replication=[[0, 1]]), ["field layer_replication", "repeated layers"]),
        (changed(ADALORA, "lora_embedding_A", (3, 30)), ["lora_embedding_A", "is no tensor that ADALORA"]),
        (changed(LOHA, "hada_w1_b", (2, 30)), ["q_proj.hada_w1_a", "(42, 3), (2, 30), (42, 3), (3, 30) do not fit"]),
        (changed(LOHA, "hada_w2_a", (41, 3)), ["(41, 3)", "do not fit each other"]),
        (changed(LOHA, "hada_w2_b", None), ["q_proj.hada_w2_b", "is missing"]),
        (changed(LOHA, "hada_t1", (3, 3, 2, 2)), ["q_proj.hada_t1", "is no tensor that LOHA"]),
        (changed(LOHA, r=4), ["q_proj.hada_w1_b", "has rank 3, but the config says 4"]),
        (changed(LOHA, rank_pattern={"q_proj": 2}), ["but the config says 2"]),
        (changed(LOHA, alpha=1e39), ["q_proj.hada_w1_a", "overflows with the scales"]),
        (changed(LOKR_BOTH, "lokr_w1", (6, 5)), ["q_proj.lokr_w1_a", "is left over: LOKR"]),
        (sound("LOKR", "lokr_", {"w1": (6, 5), "w2": (7, 6)}), ["q_proj.lokr_w1", "full rank", "a smaller r"]),
        (changed(LOKR, "lokr_w2_b", (3, 6)), ["q_proj.lokr_w2_a", "(7, 2) does not fit lokr_w2_b (3, 6)"]),
        (changed(LOKR, "lokr_w1", None), ["q_proj.lokr_w1_a", "is missing"]),
        (changed(LOKR, "lokr_w1", (6, 5, 3)), ["3 dimensions"]),
        (changed(LOKR, "lokr_t2", (2, 2, 3, 3)), ["q_proj.lokr_t2", "is no tensor that LOKR"]),
        (changed(LOKR, r=3), ["q_proj.lokr_w2_b", "has rank 2, but the config says 3"]),
        (changed(MISS, init_weights="mnii"), ["field init_weights", "(did you mean 'mini'?)"]),
        (changed(MISS, init_weights="bat"), ["field init_weights", "'bat' multiplies the base weight"]),
        (changed(MISS, init_weights="max"), ["field init_weights", "'max' is not known", "chooses the formula"]),
        (changed(MISS, "miss_block", (6, 7, 7)), ["q_proj.miss_block", "3 dimensions"]),
        (changed(MISS, "miss_block", (7, 21)), ["21 columns instead of 42 for 42 output features"]),
        (changed(MINI, mini_r=7), ["6 columns instead of 7 for 42 output features", "mini_r"]),
        (changed(MINI, "miss_block", (7, 5), mini_r=5), ["5 columns instead of 5 for 42 output features"]),
        (changed(MINI, init_weights=True), ["6 columns instead of 42"]),
        (changed(BONE, init_weights="bat"), ["field init_weights", "'bat'"]),
        (changed(BONE, init_weights="mini"), ["field init_weights", "'mini' is not known"]),
        (changed(DELORA, "delora_B", (42, 4)), ["q_proj.delora_B", "(42, 4) does not fit delora_A (5, 30)"]),
        (changed(DELORA, "delora_w_norm", (31,)), ["q_proj.delora_w_norm", "(31,)", "do not fit"]),
        (changed(DELORA, "delora_lambda", (2,)), ["delora_lambda (2,)"]),
        (changed(DELORA, "delora_w_norm", None), ["q_proj.delora_w_norm", "is missing"]),
        (changed(DELORA, r=4), ["q_proj.delora_A", "has rank 5, but the config says 4"]),
        (
            changed(GRALORA, "gralora_B", (3, 5, 14)),
            ["q_proj.gralora_B", "(3, 5, 14) does not fit gralora_A (3, 10, 6)"],
        ),
        (changed(GRALORA, "gralora_B", (2, 6, 21)), ["(2, 6, 21) does not fit"]),
        (changed(GRALORA, "gralora_A_general.weight", None), ["gralora_A_general.weight", "is missing"]),
        (changed(GRALORA, hybrid_r=3), ["gralora_A_general.weight", "do not fit hybrid_r=3"]),
        (changed(GRALORA, hybrid_r=0), ["is no tensor that GRALORA"]),
        (changed(GRALORA, r=9), ["q_proj.gralora_A", "has rank 6, but the config says 9"]),
        (changed(POLY, "poly_lora_B", (2, 4, 2, 21)), ["q_proj.poly_lora_B", "does not fit poly_lora_A (2, 4, 15, 3)"]),
        (changed(POLY, "poly_router.module_logits", (1, 6)), ["(1, 6) does not fit poly_lora_A"]),
        (changed(POLY, "poly_router.module_logits", (5, 8)), ["is for 5 tasks", "keep the row of one task"]),
        (changed(POLY, poly_type="mono"), ["field poly_type", "'mono' is not known"]),
    ],
)
def test_refused(adapter: tuple[Any, Tensors], parts: list[str]) -> None:
    config, tensors = adapter
    refused(lambda: load_tensors(tensors, config, "bad", BASE), *parts)


@pytest.mark.parametrize("adapter", [MISS, MINI, BONE])
def test_miss_needs_the_shape_of_the_layer(adapter: tuple[Any, Tensors]) -> None:
    config, tensors = adapter
    refused(lambda: load_tensors(tensors, config, "bad"), "_block", "needs the shape of the base layer")


@pytest.mark.parametrize(
    ("peft_type", "reason"),
    [
        ("ADAMSS", "clustering of the base weight"),
        ("C3A", "block-circulant"),
        ("FROD", "between two square bases"),
        ("HIRA", "element by element"),
        ("LILY", "all tokens of a batch"),
        ("LN_TUNING", "normalisation layers"),
        ("OSF", "singular"),
        ("RANDLORA", "random matrices"),
        ("ROAD", "rotates pairs of output features"),
        ("SHADOW", "second network"),
        ("SHIRA", "sparse matrix"),
        ("SUPERTUNING", "single elements of the base weight"),
        ("TRAINABLE_TOKENS", "embeddings of single tokens"),
        ("WAVEFT", "wavelets"),
    ],
)
def test_unserved_methods_have_a_reason(peft_type: str, reason: str) -> None:
    assert peft_type in peft.PeftType.__members__
    refused(lambda: load_tensors({}, {"peft_type": peft_type}, "bad"), f"{peft_type!r} ", reason, "served are")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_anything_is_served_or_refused(data: st.DataObject) -> None:
    served_or_refused(data, SOUND)
