"""Methods that are folded with the base weight, and variants of LoRA: what the parity matrix does not show."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lora.gptq import GPTQLoraLinear
from torch import nn
from transformers.activations import ACT2FN

import scute_converter
from scute_converter import Pair, load_tensors, reference
from scute_converter.methods.peanut import ACTIVATIONS
from scute_converter.methods.pissa import leading_columns, singular_components
from test_converter import Q, Tensors, refused, served_or_refused
from test_parity import TOLERANCE, assert_parity, language_model, redraw, toy

MODULE = "model.layers.0.self_attn.q_proj"


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def sound(peft_type: str, shapes: dict[str, tuple[int, ...]], **fields: Any) -> tuple[dict[str, Any], Tensors]:
    """A config and tensors of one layer with 30 input and 42 output features."""
    config = {"peft_type": peft_type, "target_modules": ["q_proj"], **fields}
    return config, {Q + name: draw(*shape) for name, shape in shapes.items()}


LORA = sound("LORA", {"lora_A.weight": (3, 30), "lora_B.weight": (42, 3)}, r=3, lora_alpha=5)
PISSA = (LORA[0] | {"init_lora_weights": "pissa"}, LORA[1])
OLORA = (LORA[0] | {"init_lora_weights": "olora", "fan_in_fan_out": False}, LORA[1])
KASA = (LORA[0] | {"kasa_config": {"beta": 0.1, "gamma": 0}}, LORA[1] | {f"{Q}lora_diag": draw(3)})
QALORA = (LORA[0] | {"use_qalora": True, "qalora_group_size": 6}, LORA[1] | {f"{Q}lora_A.weight": draw(3, 5)})
BDLORA = (
    LORA[0] | {"use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 3, "match_strict": True}},
    LORA[1] | {f"{Q}lora_A.weight": draw(3, 10)},
)
VELORA = (
    LORA[0] | {"velora_config": {"num_groups": 4, "scale": 1.0, "init_type": "random"}},
    LORA[1] | {f"{Q}lora_velora_embed": draw(8)},
)
MONTECLORA = (
    LORA[0] | {"monteclora_config": {"num_samples": 4, "use_entropy": True, "sample_scaler": 1e-4}},
    LORA[1] | {f"{Q}lora_monteclora_sampler.std_prior": draw(3)},
)
HRA = sound("HRA", {"hra_u": (30, 4)}, apply_GS=True)
DEFT = sound("DEFT", {"deft_P": (42, 3), "deft_R": (3, 30)}, r=3, alpha=7, decomposition_method="relu", para=False)
PEANUT = sound(
    "PEANUT",
    {
        "peanut_A.weight": (3, 42),
        "peanut_B.weight": (42, 3),
        "peanut_encoders.0.weight": (3, 3),
        "peanut_decoders.0.weight": (3, 3),
    },
    depth=1,
    act_fn="relu",
    scaling=0.5,
)
ALL = [PISSA, OLORA, KASA, QALORA, BDLORA, VELORA, MONTECLORA, HRA, DEFT, PEANUT]


def with_tensor(case: tuple[dict[str, Any], Tensors], name: str, tensor: torch.Tensor | None) -> Tensors:
    tensors = case[1] | ({} if tensor is None else {Q + name: tensor})
    return {key: value for key, value in tensors.items() if tensor is not None or key != Q + name}


@pytest.mark.parametrize(
    ("case", "fields", "name", "tensor", "parts"),
    [
        (PISSA, {"init_lora_weights": "pissa_niter_4"}, "", None, ["'pissa_niter_4' changed the base weights"]),
        (PISSA, {"init_lora_weights": "corda"}, "", None, ["'corda' changed the base weights"]),
        (PISSA, {"lora_alpha": 0}, "", None, ["q_proj.lora_A.weight", "scale 0 ", "correct lora_alpha"]),
        (PISSA, {"kasa_config": {}}, "", None, ["field kasa_config", "together with init_lora_weights='pissa'"]),
        (OLORA, {"use_bdlora": {}}, "", None, ["field use_bdlora", "together with init_lora_weights='olora'"]),
        (OLORA, {"fan_in_fan_out": True}, "", None, ["'olora' changed the base weights"]),
        (KASA, {}, "lora_diag", None, ["q_proj.lora_diag", "is missing"]),
        (KASA, {}, "lora_diag", torch.ones(4), ["q_proj.lora_diag", "4 elements for rank 3"]),
        (KASA, {"use_dora": True}, "", None, ["field use_dora", "together with kasa_config"]),
        (KASA, {"kasa_config": {"delta": 1}}, "", None, ["field kasa_config.delta", "is not understood"]),
        (LORA, {}, "lora_diag", torch.ones(3), ["q_proj.lora_diag", "is no tensor that LORA"]),
        (LORA, {}, "lora_velora_embed", torch.ones(3), ["q_proj.lora_velora_embed", "is no tensor that LORA"]),
        (QALORA, {"qalora_group_size": 0}, "", None, ["field qalora_group_size", "not within 1 and 4096"]),
        (QALORA, {"use_bdlora": {}}, "", None, ["field use_qalora", "together with use_bdlora"]),
        (BDLORA, {"use_bdlora": {"nblocks": 2}}, "", None, ["q_proj.lora_A.weight", "by neither", "match_strict"]),
        (
            BDLORA,
            {"use_bdlora": {"target_modules_bd_a": ["q"], "target_modules_bd_b": ["proj"]}},
            "",
            None,
            ["q_proj.lora_A.weight", "by both", "correct use_bdlora"],
        ),
        (BDLORA, {"use_bdlora": {"target_modules_bd_a": ["q"], "nblocks": 2}}, "", None, ["3 rows are no 2 blocks"]),
        (BDLORA, {"use_bdlora": {"target_modules_bd_b": ["q"], "nblocks": 0}}, "", None, ["42 rows are no 0 blocks"]),
        (BDLORA, {"use_bdlora": {"blocks": 2}}, "", None, ["field use_bdlora.blocks", "is not understood"]),
        (VELORA, {"velora_config": {"groups": 2}}, "", None, ["field velora_config.groups", "is not understood"]),
        (MONTECLORA, {}, "lora_monteclora_sampler.x", torch.ones(3), ["sampler.x", "is no tensor that LORA"]),
        (HRA, {}, "hra_u", torch.eye(30, 4) * torch.tensor([1, 1, 0, 1]), ["q_proj.hra_u", "column of length 0"]),
        (HRA, {}, "hra_u", torch.ones(30, 4), ["q_proj.hra_u", "linearly dependent", "apply_GS"]),
        (HRA, {}, "hra_u", draw(3, 4), ["q_proj.hra_u", "linearly dependent", "apply_GS"]),
        (HRA, {}, "hra_u", draw(30, 4, 1, 1), ["4 dimensions"]),
        (DEFT, {"decomposition_method": "svd"}, "", None, ["decomposition_method", "only 'relu', 'qr'; correct it"]),
        (DEFT, {"decomposition_method": "Relu"}, "", None, ["'Relu' is not known", "(did you mean 'relu'?)"]),
        (DEFT, {"r": 4}, "", None, ["q_proj.deft_P", "has rank 3, but the config says 4"]),
        (DEFT, {"alpha": 1e39}, "", None, ["q_proj.deft_R", "overflows"]),
        (DEFT, {"para": True}, "", None, ["q_proj.deft_R", "is no tensor that DEFT"]),
        (DEFT, {}, "deft_R", None, ["q_proj.deft_R", "is missing"]),
        (DEFT, {}, "deft_R", torch.ones(4, 30), ["q_proj.deft_R", "(4, 30) does not fit", "(42, 3)"]),
        (PEANUT, {"act_fn": "xielu"}, "", None, ["field act_fn", "'xielu' is not served", "served are gelu, "]),
        (PEANUT, {"act_fn": "sigmiod"}, "", None, ["field act_fn", "(did you mean 'sigmoid'?)"]),
        (PEANUT, {"depth": 2}, "", None, ["q_proj.peanut_encoders.1.weight", "is missing"]),
        (PEANUT, {"depth": 0}, "", None, ["q_proj.peanut_encoders.0.weight", "is no tensor that PEANUT"]),
        (PEANUT, {}, "peanut_B.weight", torch.ones(41, 3), ["q_proj.peanut_B.weight", "(41, 3) does not fit"]),
        (PEANUT, {}, "peanut_decoders.0.weight", torch.ones(3, 4), ["peanut_decoders.0.weight", "(3, 4)", "rank 3"]),
        (PEANUT, {"scaling": 1e39}, "", None, ["q_proj.peanut_B.weight", "overflows"]),
    ],
)
def test_refused(
    case: tuple[dict[str, Any], Tensors],
    fields: dict[str, Any],
    name: str,
    tensor: torch.Tensor | None,
    parts: list[str],
) -> None:
    tensors = with_tensor(case, name, tensor)
    refused(lambda: load_tensors(tensors, case[0] | fields, "bad"), *parts)


def test_refused_output_head_and_ranks() -> None:
    """An initialisation that changes the weight of a tied output head changes the embedding as well."""
    head = {key.replace(f"{MODULE}.", "lm_head."): tensor for key, tensor in PISSA[1].items()}
    config = {"target_modules": ["lm_head"]}
    refused(lambda: load_tensors(head, PISSA[0] | config, "bad"), "lm_head.lora_A.weight", "changed the output head")
    assert load_tensors(head, LORA[0] | config, "plain").forms
    tensors = {f"{Q}lora_A.weight": draw(30, 30), f"{Q}lora_B.weight": draw(42, 30), f"{Q}lora_diag": draw(30)}
    refused(lambda: load_tensors(tensors, KASA[0] | {"r": 30}, "bad"), "rank 30 takes all 30 singular components")


def test_refused_base_weight() -> None:
    """A fold that overflows on the weight it meets."""
    adapter = load_tensors(DEFT[1], DEFT[0], "bad")
    form = adapter.forms[MODULE]
    assert form.fold is not None
    fold = form.fold
    refused(lambda: fold.fold(form, torch.full((42, 30), 1e38)) and adapter, f"module {MODULE}", "is not finite")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_anything_is_served_or_refused(data: st.DataObject) -> None:
    served_or_refused(data, ALL)


@pytest.mark.parametrize("case", [PISSA, KASA, HRA, DEFT, PEANUT], ids=lambda case: case[0]["peft_type"])
def test_digest_and_parameters(case: tuple[dict[str, Any], Tensors]) -> None:
    config, tensors = case
    adapter = load_tensors(tensors, config, "one")
    assert adapter.digest == load_tensors(tensors, config, "two").digest
    assert adapter.parameters == sum(tensor.numel() for tensor in tensors.values())
    for key in tensors:
        changed = tensors | {key: tensors[key] + 1e-3}
        assert load_tensors(changed, config, "one").digest != adapter.digest, key


def test_digest_of_configs() -> None:
    digests = {
        load_tensors(tensors, config | fields, "one").digest
        for config, tensors, fields in (
            (*LORA, {}),
            (*PISSA, {}),
            (*OLORA, {}),
            (*OLORA, {"lora_alpha": 6}),
            (*HRA, {}),
            (*HRA, {"apply_GS": False}),
            (*DEFT, {}),
            (*DEFT, {"decomposition_method": "qr"}),
            (*PEANUT, {}),
            (*PEANUT, {"act_fn": "gelu"}),
        )
    }
    assert len(digests) == 10


@pytest.mark.parametrize("case", [PISSA, OLORA, KASA, HRA, DEFT, PEANUT], ids=lambda case: case[0]["peft_type"])
def test_types_of_the_weight(case: tuple[dict[str, Any], Tensors]) -> None:
    """A weight of any type gives what its exact values give; the pair is fp32, contiguous, of the rank it said."""
    form = load_tensors(case[1], case[0], "any").forms[MODULE]
    weight = (draw(42, 30) / 6).bfloat16()
    assert form.fold is not None
    folded = form.fold.fold(form, weight)
    assert folded.fold is None and (folded.in_features, folded.out_features) == (30, 42)
    assert folded.pair is not None and folded.pair.rank == form.fold.rank
    assert folded.pair.a.dtype == folded.pair.b.dtype == torch.float32
    assert folded.pair.a.is_contiguous() and folded.pair.b.is_contiguous()
    for same in (weight.float(), weight.double(), weight.T.contiguous().T):
        other = form.fold.fold(form, same).pair
        torch.testing.assert_close(other.b.T @ other.a, folded.pair.b.T @ folded.pair.a, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_psoft_is_refused() -> None:
    """PEFT computes its singular vectors when it loads the adapter, and another sign of one changes the result."""
    refused(lambda: load_tensors({f"{Q}psoft_R.weight": draw(3)}, {"peft_type": "PSOFT"}, "bad"), "'PSOFT'", "signs")
    config = peft.PsoftConfig(target_modules=["q_proj"], r=3)
    layer = peft.get_peft_model(toy().layers[0], config).eval().base_model.model.q_proj
    layer.psoft_R["default"].weight.copy_(draw(3))
    x = draw(5, 30)
    before = layer(x)
    for cache in (layer._psoft_A_cache["default"][1], layer._psoft_B_cache["default"][:, 1]):
        cache.mul_(-1)
    assert (layer(x) - before).abs().max() > 0.1 * before.abs().max()


# Parts of the base weight


DECAYS = {
    "fast": lambda i: 2.0**-i,
    "slow": lambda i: (1 + i) ** -0.1,
    "plateau": lambda i: 1 - 1e-4 * i,
    "deficient": lambda i: (i < 20).double() * (20 - i),
}


@pytest.mark.parametrize("shape", [(42, 30), (30, 42), (37, 37)])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("largest", [True, False])
def test_singular_components(decay: str, shape: tuple[int, int], largest: bool) -> None:
    """The eigenvectors of a Gram matrix give the parts that a full SVD gives, to more than fp32."""
    size = min(shape)
    u, v = (torch.linalg.qr(draw(n, size).double()).Q for n in shape)
    sigma = DECAYS[decay](torch.arange(size).double())
    weight = (u * sigma) @ v.T
    a, b = singular_components(weight, 5, largest=largest)
    kept = slice(None, 5) if largest else slice(-5, None)
    expected = (u[:, kept] * sigma[kept]) @ v[:, kept].T
    # What a rounding of 2^-53 in the Gram matrix hides is below 2^-26 of the weight; where a gap of the squares of 1e-4
    # separates the parts, as in all but the fast decay, it turns the vectors by 1e-12.
    assert (b.T @ a - expected).norm() < (2**-26 if decay == "fast" else 1e-11) * weight.norm()
    # An SVD in fp32, as PEFT computes it, is further off.
    u, sigma, v = torch.linalg.svd(weight.float(), full_matrices=False)
    peft_part = (u[:, kept] * sigma[kept]) @ v[kept]
    assert (b.T @ a - expected).norm() < (peft_part - expected).norm()


def test_leading_columns() -> None:
    weight = draw(42, 30)
    q, r = torch.linalg.qr(weight.double())
    a, b = leading_columns(weight, 7)
    torch.testing.assert_close(b.T @ a, q[:, :7] @ r[:7])


# Small changes


def saved(config: peft.PeftConfig) -> dict[str, Any]:
    """As ``adapter_config.json`` holds it."""
    return json.loads(json.dumps(config.to_dict(), default=list)) | {"peft_type": config.peft_type.value}


def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of the factors rounded to bf16: ``(out, in)`` fp64."""
    return b.bfloat16().double().T @ a.bfloat16().double()


def folded_on(adapter: scute_converter.Adapter, weight: torch.Tensor) -> Pair:
    form = adapter.forms["q_proj"]
    assert form.fold is not None
    pair = form.fold.fold(form, weight).pair
    assert pair is not None
    return pair


def one_layer(config: peft.PeftConfig) -> tuple[torch.Tensor, Any]:
    """A base weight of 192 inputs and 256 outputs, and PEFT's layer as it is initialised."""
    torch.manual_seed(0)
    base = nn.Module()
    base.q_proj = nn.Linear(192, 256)
    weight = base.q_proj.weight.detach().clone()
    return weight, peft.get_peft_model(base, config).base_model.model.q_proj


@torch.no_grad()
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_small_drift_of_pissa(init: str) -> None:
    """A trained adapter is near its initialisation: bf16 factors of the naive fold lose it, those of ours do not."""
    config = peft.LoraConfig(target_modules=["q_proj"], r=8, lora_alpha=16, init_lora_weights=init)
    weight, layer = one_layer(config)
    a0, b0 = layer.lora_A["default"].weight.clone(), layer.lora_B["default"].weight.clone()
    a, b = (p + 0.01 * p.square().mean().sqrt() * torch.randn_like(p) for p in (a0, b0))
    effect = 2 * (b.double() @ a.double() - b0.double() @ a0.double())

    adapter = load_tensors({"q_proj.lora_A.weight": a, "q_proj.lora_B.weight": b}, saved(config), "drift")
    pair = folded_on(adapter, weight)
    naive = rounded(torch.cat([a, a0]), torch.cat([2 * b.T, -2 * b0.T]))
    assert (rounded(pair.a, pair.b) - effect).norm() < 0.01 * effect.norm()
    assert (naive - effect).norm() > 0.1 * effect.norm()


@torch.no_grad()
def test_small_drift_of_hra() -> None:
    """PEFT starts with pairs of equal reflections, which cancel each other."""
    config = peft.HRAConfig(target_modules=["q_proj"], r=8)
    weight, layer = one_layer(config)
    u = layer.hra_u["default"]
    u = u + 0.01 * u.square().mean().sqrt() * torch.randn_like(u)
    unit = (u / u.norm(dim=0)).double()
    reflected = weight.double()
    terms = []
    for direction in unit.T:
        terms.append(-2 * reflected @ direction)
        reflected = reflected + torch.outer(terms[-1], direction)
    effect = reflected - weight.double()

    pair = folded_on(load_tensors({"q_proj.hra_u": u}, saved(config), "drift"), weight)
    naive = rounded(unit.T, torch.stack(terms))
    assert (rounded(pair.a, pair.b) - effect).norm() < 0.01 * effect.norm()
    assert (naive - effect).norm() > 0.1 * effect.norm()


@torch.no_grad()
@pytest.mark.parametrize("method", ["relu", "qr"])
def test_small_drift_of_deft(method: str) -> None:
    """PEFT starts with an injection that equals what is projected out; the difference is taken before rounding."""
    config = peft.DeftConfig(target_modules=["q_proj"], r=8, alpha=20, decomposition_method=method)
    weight, layer = one_layer(config)
    p, r0 = layer.deft_P["default"], layer.deft_R["default"]
    drift = 0.01 * r0.square().mean().sqrt() * torch.randn_like(r0)
    adapter = load_tensors({"q_proj.deft_P": p, "q_proj.deft_R": r0 + drift}, saved(config), "drift")
    pair = folded_on(adapter, weight)
    left = torch.linalg.qr(p).Q if method == "qr" else p
    effect = 20 / 8 * left.double() @ drift.double()
    assert (rounded(pair.a, pair.b) - effect).norm() < 0.01 * effect.norm()

    # A direction with the other sign, as another library may choose it.
    r0[3] *= -1
    reversed_one = load_tensors({"q_proj.deft_P": p, "q_proj.deft_R": r0 + drift}, saved(config), "bad")
    if method == "qr":
        refused(lambda: folded_on(reversed_one, weight) and reversed_one, "q_proj.deft_R", "other signs", "'relu'")
    else:
        folded_on(reversed_one, weight)


# Variants of LoRA


@torch.no_grad()
@pytest.mark.parametrize("rslora", [False, True])
def test_qalora(rslora: bool) -> None:
    """PEFT has QALoRA for GPTQ layers only, which need a GPU: their adapter class, around a plain linear layer."""
    config = peft.LoraConfig(
        target_modules=["q_proj"], r=4, lora_alpha=7, use_qalora=True, qalora_group_size=6, use_rslora=rslora
    )
    base = toy().layers[0].q_proj
    layer = GPTQLoraLinear(base, "default", config, r=4, lora_alpha=7).eval()
    redraw(layer, config)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape == (4, 5)
    adapter = load_tensors({"q_proj.lora_A.weight": a, "q_proj.lora_B.weight": b}, saved(config), "qalora")
    x = draw(5, 30)
    expected = layer(x)
    actual = reference.apply(adapter.forms["q_proj"], {}, x, base.weight, base.bias)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    assert (base(x) - expected).abs().max() > 0.1 * expected.abs().max()
    assert adapter.method == "QALoRA" and adapter.parameters == a.numel() + b.numel()


def test_training_only_tensors_do_not_count(tmp_path: Path) -> None:
    plain = load_tensors(LORA[1], LORA[0], "plain")
    for config, tensors in (VELORA, MONTECLORA):
        adapter = load_tensors(tensors, config, "more")
        assert adapter.digest == plain.digest and adapter.parameters == plain.parameters


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_embeddings_beside_pissa(init: str, tmp_path: Path) -> None:
    """PEFT changes the weights of linear layers only; an embedding gets a plain LoRA."""
    base = language_model("llama")
    config = peft.LoraConfig(target_modules=["embed_tokens", "v_proj"], r=5, init_lora_weights=init)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    redraw(model, config)
    model.save_pretrained(tmp_path)
    reloaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    adapter = scute_converter.load(tmp_path)
    assert_parity(adapter, base, reloaded.base_model.model)
    assert adapter.forms["model.embed_tokens"].fold is None


def test_activations_of_peanut() -> None:
    x = torch.linspace(-9, 9, 301)
    for name, activation in ACTIVATIONS.items():
        torch.testing.assert_close(activation(x), ACT2FN[name](x), msg=name)
