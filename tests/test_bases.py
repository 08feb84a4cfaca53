"""Methods with shared bases, rotations, scales and shifts: other spellings of their files, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_converter import AdapterError, load_tensors, reference
from test_converter import TENSORS as ANY_TENSOR
from test_converter import VALUES, Tensors, refused
from test_parity import TOLERANCE

Q = "base_model.model.model.layers.0.self_attn.q_proj."
V = "base_model.model.model.layers.0.self_attn.v_proj."
BASE = {"model.layers.0.self_attn.q_proj": (42, 30), "model.layers.0.self_attn.v_proj": (18, 30)}
FP32 = torch.float32


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


PVERA = {"peft_type": "PVERA", "target_modules": ["q_proj"], "r": 3}
PVERA_TENSORS = {
    "base_model.pvera_A": draw(6, 30),
    "base_model.pvera_B": draw(42, 3),
    f"{Q}pvera_lambda_d": draw(6),
    f"{Q}pvera_lambda_b": draw(42),
}


VBLORA = {"peft_type": "VBLORA", "target_modules": ["q_proj"], "topk": 2}
VBLORA_TENSORS = {
    "base_model.vblora_vector_bank": draw(13, 6),
    f"{Q}vblora_logits_A": draw(3, 5, 13),
    f"{Q}vblora_logits_B": draw(7, 3, 13),
}
INDICES = draw(3, 5, 13).topk(2).indices
VBLORA_TOPK = {
    "base_model.vblora_vector_bank": draw(13, 6),
    f"{Q}vblora_logits_A_topk_indices": INDICES.to(torch.uint8),
    f"{Q}vblora_logits_A_topk_weights": torch.full((3, 5, 1), 0.75),
    f"{Q}vblora_logits_B_topk_indices": draw(7, 3, 13).topk(2).indices,
    f"{Q}vblora_logits_B_topk_weights": torch.full((7, 3, 1), 0.5),
}
TINYLORA = {"peft_type": "TINYLORA", "target_modules": ["q_proj", "v_proj"], "weight_tying": 0}
TINYLORA_TENSORS = {
    "base_model.tinylora_v.0": draw(7),
    "base_model.tinylora_v.1": draw(7) + 1,
    f"{Q}tinylora_A": draw(3, 30),
    f"{Q}tinylora_B": draw(42, 3),
    f"{Q}tinylora_P": draw(7, 3, 3),
    f"{V}tinylora_A": draw(3, 30),
    f"{V}tinylora_B": draw(18, 3),
    f"{V}tinylora_P": draw(7, 3, 3),
}
TIED = {key: tensor for key, tensor in TINYLORA_TENSORS.items() if key != "base_model.tinylora_v.1"}
DRAWN = {key: tensor for key, tensor in TINYLORA_TENSORS.items() if "tinylora_P" not in key}
UNILORA = {"peft_type": "UNILORA", "target_modules": ["q_proj", "v_proj"], "theta_d_length": 11, "r": 3}
THETA = {"base_model.unilora_theta_d": draw(11)}
UNILORA_TENSORS = THETA | {
    f"{Q}unilora_indices_A": torch.arange(90).view(3, 30) % 11,
    f"{Q}unilora_scales_A": draw(3, 30),
    f"{Q}unilora_indices_B": torch.arange(126).view(42, 3) % 7,
    f"{Q}unilora_scales_B": draw(42, 3),
}
FOURIERFT = {"peft_type": "FOURIERFT", "target_modules": ["q_proj"], "scaling": 90}
FOURIERFT_TENSORS = {f"{Q}fourierft_spectrum": draw(17)}
BOFT = {"peft_type": "BOFT", "target_modules": ["q_proj"]}
BOFT_TENSORS = {f"{Q}boft_R": draw(1, 5, 6, 6), f"{Q}boft_s": draw(42, 1)}
GLORA = {"peft_type": "GLORA", "target_modules": ["q_proj"], "config_A_B": "vector", "config_D_E": "vector"}
GLORA_TENSORS = {
    f"{Q}glora_A.X": draw(42, 1),
    f"{Q}glora_B.X": draw(42, 1) + 1,
    f"{Q}glora_C.Xd": draw(30, 3),
    f"{Q}glora_C.Xu": draw(3, 1),
    f"{Q}glora_D.X": draw(42),
    f"{Q}glora_E.X": draw(42) - 1,
}
LOW_RANK = {key: GLORA_TENSORS[key] for key in GLORA_TENSORS if key.partition("glora_")[2][0] in "CDE"} | {
    f"{Q}glora_A.Xd": torch.zeros(42, 3),
    f"{Q}glora_A.Xu": draw(3, 30),
    f"{Q}glora_B.Xd": draw(42, 3),
    f"{Q}glora_B.Xu": draw(3, 30),
}
CONSTANT = {f"{Q}glora_{path}.X": draw(1) for path in "ABDE"} | {f"{Q}glora_C.zeros": torch.zeros(30, 1)}
BEFT = {"peft_type": "BEFT", "target_modules": ["q_proj"]}
BEFT_TENSORS = {f"{Q}beft_bias": draw(1, 42)}


@pytest.mark.parametrize(
    ("config", "tensors", "parts"),
    [
        (PVERA | {"sample_at_inference": True}, PVERA_TENSORS, ["field sample_at_inference", "random sample"]),
        (PVERA, PVERA_TENSORS | {f"{Q}pvera_lambda_d": draw(5)}, ["pvera_lambda_d", "odd number of elements (5)"]),
        (PVERA, PVERA_TENSORS | {f"{Q}pvera_lambda_d": draw(8)}, ["vectors of 8 and 42", "projections of rank 6"]),
        (
            PVERA,
            PVERA_TENSORS | {"base_model.pvera_A": draw(3, 30)},
            ["pvera_B", "(42, 3) does not fit pvera_A (3, 30)"],
        ),
        (
            PVERA | {"save_projection": False},
            {key: PVERA_TENSORS[key] for key in PVERA_TENSORS if "lambda" in key},
            ["field save_projection", "shapes and the type of the base model", "save_projection=true"],
        ),
        (VBLORA | {"topk": 0}, VBLORA_TENSORS, ["field topk", "0 is not within 1 and the 13 vectors"]),
        (VBLORA | {"topk": 14}, VBLORA_TENSORS, ["field topk", "14 is not within"]),
        (VBLORA, VBLORA_TENSORS | {f"{Q}vblora_logits_A": draw(3, 5, 12)}, ["(3, 5, 12) does not fit a bank of 13"]),
        (VBLORA, VBLORA_TENSORS | {f"{Q}vblora_logits_B": draw(7, 2, 13)}, ["vblora_logits_B", "has rank 2", "A 3"]),
        (VBLORA, {f"{Q}vblora_logits_A": draw(3, 5, 13)}, ["tensor vblora_vector_bank: is missing"]),
        (VBLORA | {"topk": 3}, VBLORA_TOPK, ["logits_A_topk_weights", "(3, 5, 1) does not fit", "topk=3"]),
        (
            VBLORA,
            VBLORA_TOPK | {f"{Q}vblora_logits_A_topk_indices": INDICES + 9},
            ["logits_A_topk_indices", "not within a bank of 13"],
        ),
        (
            VBLORA,
            VBLORA_TOPK | {f"{Q}vblora_logits_A_topk_indices": INDICES.float()},
            ["logits_A_topk_indices", "torch.float32", "should hold integers"],
        ),
        (
            VBLORA,
            VBLORA_TOPK | {f"{Q}vblora_logits_A_topk_indices": torch.ones(3, 5, 2, dtype=torch.int16)},
            ["names a vector twice"],
        ),
        (
            VBLORA,
            VBLORA_TOPK | {f"{Q}vblora_logits_A_topk_weights": torch.full((3, 5, 1), 1.25)},
            ["logits_A_topk_weights", "negative or sum up to more than 1"],
        ),
        (TINYLORA, TINYLORA_TENSORS, ["layers must be counted", "weight_tying=1"]),
        (TINYLORA | {"weight_tying": 1.5}, TINYLORA_TENSORS, ["field weight_tying", "1.5 is not within 0 and 1"]),
        (TINYLORA | {"weight_tying": 1}, DRAWN, ["tensor model.layers.0.self_attn.q_proj.tinylora_P: is missing"]),
        (TINYLORA | {"weight_tying": 1, "save_projection": False}, DRAWN, ["layers must be counted"]),
        (TINYLORA | {"weight_tying": 1}, TIED | {f"{Q}tinylora_P": draw(7, 3, 2)}, ["(7, 3, 2) does not fit"]),
        (TINYLORA | {"weight_tying": 1}, TIED | {f"{Q}tinylora_B": draw(42, 2)}, ["(42, 2) does not fit"]),
        (UNILORA, THETA, ["field save_indices", "layers and the type of the base model", "save_indices=true"]),
        (UNILORA | {"save_indices": True}, THETA, ["field save_indices", "holds no indices"]),
        (UNILORA | {"theta_d_length": 12}, UNILORA_TENSORS, ["has 11 elements, but the config says 12"]),
        (UNILORA, UNILORA_TENSORS | {f"{Q}unilora_scales_A": draw(2, 30)}, ["(3, 30) does not fit", "(2, 30)"]),
        (
            UNILORA,
            UNILORA_TENSORS | {f"{Q}unilora_indices_B": torch.full((42, 3), -1)},
            ["unilora_indices_B", "not within the 11 elements"],
        ),
        (
            UNILORA,
            UNILORA_TENSORS
            | {f"{Q}unilora_indices_B": torch.ones(42, 2, dtype=torch.int32)}
            | {f"{Q}unilora_scales_B": draw(42, 2)},
            ["unilora_indices_B", "has rank 2, and unilora_indices_A 3"],
        ),
        (FOURIERFT, FOURIERFT_TENSORS, ["fourierft_spectrum", "shape, which is not known", "linear layers are known"]),
        (BOFT, BOFT_TENSORS | {f"{Q}boft_R": draw(2, 5, 6, 6)}, ["2 butterfly factors", "boft_n_butterfly_factor=1"]),
        (BOFT, BOFT_TENSORS | {f"{Q}boft_R": draw(1, 5, 6, 5)}, ["not square"]),
        (BOFT, BOFT_TENSORS | {f"{Q}boft_s": draw(1, 42)}, ["boft_s", "(1, 42), not (out, 1)"]),
        (BOFT, BOFT_TENSORS | {f"{Q}boft_P": torch.eye(30).flip(0)[None]}, ["boft_P", "reorders the features"]),
        (BEFT, {f"{Q}beft_bias": draw(42, 1)}, ["beft_bias", "(42, 1), not (1, out)"]),
        (GLORA | {"config_A_B": "lora"}, LOW_RANK | {f"{Q}glora_A.Xd": draw(42, 3)}, ["glora_A.Xd", "is of low rank"]),
        (GLORA | {"config_A_B": "matrix"}, GLORA_TENSORS, ["field config_A_B", "'matrix' is not known, only 'lora'"]),
        (GLORA | {"config_C": "matrix"}, GLORA_TENSORS, ["field config_C", "'matrix' is not known, only 'lora'"]),
        (GLORA | {"config_A_B": "vectors"}, GLORA_TENSORS, ["field config_A_B", "(did you mean 'vector'?)"]),
        (GLORA | {"config_D_E": "lora"}, GLORA_TENSORS, ["field config_D_E", "'lora' is not known, only 'vector'"]),
        (GLORA | {"config_D_E": "constant"}, GLORA_TENSORS, ["glora_D.X", "(42,), which is no constant"]),
        (GLORA, GLORA_TENSORS | {f"{Q}glora_A.X": draw(42, 2)}, ["glora_A.X", "(42, 2), which is no vector"]),
        (GLORA, GLORA_TENSORS | {f"{Q}glora_D.X": draw(41)}, ["for 41 and for 42 output features"]),
        (GLORA, GLORA_TENSORS | {f"{Q}glora_C.Xu": draw(2, 1)}, ["glora_C.Xu", "(2, 1) does not fit"]),
        (GLORA, GLORA_TENSORS | {f"{Q}glora_C.Xu": draw(3, 2)}, ["glora_C.Xu", "(3, 2) does not fit"]),
        (GLORA, GLORA_TENSORS | {f"{Q}glora_E.zeros": torch.ones(42)}, ["glora_E.zeros", "is not zero"]),
        (GLORA, GLORA_TENSORS | {f"{Q}glora_E.zeros": torch.zeros(42)}, ["glora_E.X: is no tensor that GLORA"]),
        (GLORA | {"config_A_B": "constant", "config_D_E": "constant"}, CONSTANT, ["number of output features"]),
    ],
)
def test_refused(config: dict[str, Any], tensors: Tensors, parts: list[str]) -> None:
    """Without a base model."""
    refused(lambda: load_tensors(tensors, config, "bad"), *parts)


@pytest.mark.parametrize(
    ("config", "tensors", "parts"),
    [
        (
            TINYLORA | {"save_projection": False},
            {key: DRAWN[key] for key in DRAWN if V not in key and "_v.1" not in key},
            ["v_proj has no tensors, but the config selects it", "use the base model"],
        ),
        (
            TINYLORA | {"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
            TINYLORA_TENSORS
            | {f"base_model.model.model.embed_tokens.tinylora_{side}": draw(3, 3) for side in "AB"}
            | {"base_model.model.model.embed_tokens.tinylora_P": draw(7, 3, 3), "base_model.tinylora_v.2": draw(7)},
            ["model.embed_tokens has tensors, but is no linear layer"],
        ),
        (TINYLORA | {"weight_tying": 0.5}, TINYLORA_TENSORS, ["tinylora_v.1", "belongs to none of the 2 layers"]),
        (TINYLORA, TIED, ["tensor tinylora_v.1: is missing"]),
        (TINYLORA | {"target_modules": "("}, TINYLORA_TENSORS, ["target_modules", "no regular expression"]),
        (
            TINYLORA,
            TINYLORA_TENSORS | {f"{V}tinylora_B": draw(19, 3)},
            ["30 inputs and 19 outputs do not fit the base"],
        ),
        (UNILORA | {"proj_seed": -1}, THETA, ["field proj_seed", "is negative"]),
        (UNILORA | {"r": 0}, THETA, ["field r", "0 is not within 1 and 42"]),
        (UNILORA | {"r": 10**9}, THETA, ["field r", "1000000000 is not within 1 and 42"]),
        (
            UNILORA | {"target_modules": ["qproj"]},
            THETA,
            ["target_modules", "selects no linear layer", "none is called 'qproj' (did you mean 'q_proj'?)"],
        ),
        (FOURIERFT, {f"{Q}fourierft_spectrum": draw(42 * 30 + 1)}, ["1261 elements for a weight of shape (42, 30)"]),
        (FOURIERFT | {"scaling": 1e300}, FOURIERFT_TENSORS, ["fourierft_spectrum", "overflows"]),
        (FOURIERFT | {"random_loc_seed": None}, FOURIERFT_TENSORS, ["field random_loc_seed", "not of type int"]),
    ],
)
def test_refused_with_a_base(config: dict[str, Any], tensors: Tensors, parts: list[str]) -> None:
    refused(lambda: load_tensors(tensors, config, "bad", BASE, FP32), *parts)


def test_pvera_serves_the_mean() -> None:
    """What says how much the samples vary changes nothing, and the seed of the samples is no reason to refuse."""
    served = load_tensors(PVERA_TENSORS, PVERA | {"generator_seed": 3, "sample_at_inference": False}, "mean")
    other = {
        "base_model.pvera_A": torch.cat([PVERA_TENSORS["base_model.pvera_A"][:3], draw(3, 30) + 1]),
        f"{Q}pvera_lambda_d": torch.cat([PVERA_TENSORS[f"{Q}pvera_lambda_d"][:3], draw(3) + 1]),
    }
    assert load_tensors(PVERA_TENSORS | other, PVERA, "other").digest == served.digest
    assert served.parameters == 6 + 42


def test_vblora_saved_weights() -> None:
    """The last weight of a tile is what is missing to 1; rounding may have left it a little below 0."""
    weights = torch.tensor([0.75, 0.25, 1.004, 1.0, 0.5]).expand(3, 5)[..., None]
    form = load_tensors(VBLORA_TOPK | {f"{Q}vblora_logits_A_topk_weights": weights}, VBLORA, "saved").forms
    a = form["model.layers.0.self_attn.q_proj"].pair.a
    bank = VBLORA_TOPK["base_model.vblora_vector_bank"]
    last = (1 - weights).clamp(min=0)
    tiles = weights * bank[INDICES[..., 0]] + last * bank[INDICES[..., 1]]
    torch.testing.assert_close(a, tiles.reshape(3, 30), rtol=0, atol=1e-6)


def test_tinylora_without_a_base() -> None:
    """One vector for all layers, and saved projections: nothing depends on the order of the layers."""
    tied = TINYLORA | {"weight_tying": 1}
    alone = load_tensors(TIED, tied, "alone")
    assert alone.digest == load_tensors(TIED, tied, "known", dict(reversed(BASE.items())), FP32).digest
    both = load_tensors(TINYLORA_TENSORS, TINYLORA, "both", BASE, FP32)
    swapped = load_tensors(TINYLORA_TENSORS, TINYLORA, "swapped", dict(reversed(BASE.items())), FP32)
    assert len({alone.digest, both.digest, swapped.digest}) == 3
    assert alone.parameters == 7 and both.parameters == 14


def test_fourierft_bases_are_shared() -> None:
    """By layers of one shape with as many frequencies, and by adapters with the same seed."""
    base = {"a": (42, 30), "b": (42, 30), "c": (42, 30), "d": (18, 30)}
    sizes = {"a": 17, "b": 17, "c": 9, "d": 17}
    tensors = {f"base_model.model.{name}.fourierft_spectrum": draw(n) for name, n in sizes.items()}
    config = FOURIERFT | {"target_modules": list(base)}
    one = load_tensors(tensors, config, "one", base)
    assert one.forms["a"].shared.basis == one.forms["b"].shared.basis
    assert {basis.a.shape[0] for basis in one.bases.values()} == {34, 18} and len(one.bases) == 3
    other = load_tensors({key: tensor + 1 for key, tensor in tensors.items()}, config | {"scaling": 7}, "other", base)
    assert other.bases.keys() == one.bases.keys() and other.digest != one.digest
    assert not load_tensors(tensors, config | {"random_loc_seed": 1}, "seed", base).bases.keys() & one.bases.keys()
    assert one.parameters == 60


def test_fourierft_of_a_real_layer() -> None:
    """2048 by 1536 with the defaults, against the inverse Fourier transform; angles stay small and exact."""
    base = {"q_proj": (2048, 1536)}
    spectrum = draw(1000)
    tensors = {"base_model.model.q_proj.fourierft_spectrum": spectrum}
    config = {"peft_type": "FOURIERFT", "target_modules": ["q_proj"]}
    adapter = load_tensors(tensors, config, "real", base)
    places = torch.randperm(2048 * 1536, generator=torch.Generator().manual_seed(777))[:1000]
    dense = torch.zeros(2048 * 1536).index_put((places,), spectrum).view(2048, 1536)
    x = torch.randn(3, 1536, generator=torch.Generator().manual_seed(0))
    expected = x @ (torch.fft.ifft2(dense).real * 150).T
    actual = reference.apply(adapter.forms["q_proj"], adapter.bases, x, torch.zeros(1, 1).expand(2048, 1536), None)
    assert (actual - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_boft_of_0_12() -> None:
    """PEFT 0.11 and 0.12 saved the order of the features, which is the identity for one factor."""
    plain = load_tensors(BOFT_TENSORS, BOFT, "plain")
    old = load_tensors(BOFT_TENSORS | {f"{Q}boft_P": torch.eye(30)[None]}, BOFT, "old")
    assert old.digest == plain.digest and old.parameters == plain.parameters == 5 * 36 + 42


def test_glora_of_low_rank() -> None:
    """The default of PEFT, as far as it can be served: a low-rank ``B`` beside an ``A`` that stayed zero."""
    form = load_tensors(LOW_RANK, GLORA | {"config_A_B": "lora"}, "low").forms["model.layers.0.self_attn.q_proj"]
    x, weight, bias = draw(5, 30), draw(42, 30), draw(42) + 2
    changed = weight + LOW_RANK[f"{Q}glora_B.Xd"] @ LOW_RANK[f"{Q}glora_B.Xu"]
    shift = bias * (1 + LOW_RANK[f"{Q}glora_D.X"]) + LOW_RANK[f"{Q}glora_E.X"]
    shift = shift + (weight @ LOW_RANK[f"{Q}glora_C.Xd"] @ LOW_RANK[f"{Q}glora_C.Xu"]).flatten()
    expected = x @ changed.T + shift
    actual = reference.apply(form, {}, x, weight, bias)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    assert form.scale_delta is None and form.fold.rank == 3


def test_glora_of_a_bad_base() -> None:
    form = load_tensors(GLORA_TENSORS, GLORA, "bad").forms["model.layers.0.self_attn.q_proj"]
    weight = draw(42, 30).index_fill(0, torch.tensor([7]), torch.inf)
    with pytest.raises(AdapterError, match=r"adapter 'bad': tensor model.*glora_C: .* not finite"):
        form.fold.fold(form, weight)


def test_an_untrained_adapter_is_said_to_have_no_effect() -> None:
    silent = {key: torch.zeros_like(tensor) for key, tensor in FOURIERFT_TENSORS.items()}
    assert "no effect" in load_tensors(silent, FOURIERFT, "silent", BASE).notes[0]
    assert load_tensors(FOURIERFT_TENSORS, FOURIERFT, "trained", BASE).notes == ()


SOUND: list[tuple[dict[str, Any], Tensors]] = [
    (PVERA, PVERA_TENSORS),
    (VBLORA, VBLORA_TENSORS),
    (VBLORA, VBLORA_TOPK),
    (TINYLORA | {"projection_seed": 2}, TINYLORA_TENSORS),
    (TINYLORA | {"projection_seed": 2, "save_projection": False}, DRAWN),
    (UNILORA | {"proj_seed": 3}, THETA),
    (UNILORA | {"save_indices": True}, UNILORA_TENSORS),
    (FOURIERFT | {"random_loc_seed": 4}, FOURIERFT_TENSORS),
    (BOFT, BOFT_TENSORS),
    (GLORA | {"config_C": "lora"}, GLORA_TENSORS),
    (GLORA | {"config_A_B": "lora"}, LOW_RANK),
    (GLORA | {"config_A_B": "constant", "config_D_E": "constant"}, CONSTANT),
    (BEFT, BEFT_TENSORS),
]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_anything_is_served_or_refused(data: st.DataObject) -> None:
    """Whatever stands in a field or a tensor, the outcome is an adapter or an AdapterError, and no other exception."""
    config, tensors = map(dict, data.draw(st.sampled_from(SOUND)))
    load_tensors(tensors, config, "sound", BASE, FP32)
    if data.draw(st.booleans()):
        config[data.draw(st.sampled_from(sorted(config)))] = data.draw(VALUES)
    else:
        tensors[data.draw(st.sampled_from(sorted(tensors)))] = data.draw(ANY_TENSOR)
    try:
        adapter = load_tensors(tensors, config, "any", BASE, FP32)
    except AdapterError as error:
        assert str(error).startswith("adapter 'any': ") and "\n" not in str(error)
    else:
        assert adapter.forms
