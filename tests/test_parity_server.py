"""The real server against PEFT: every method and the base model in one mixed batch, fp32, log-probability by token."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from adapters import Oracle
from scute_converter import load
from scute_converter.registry import METHODS
from scute_sglang.base_folder import BaseFolder
from serving import Server

EXACT = 1e-4  # of a log-probability, fp32
CLEAR = 100 * EXACT  # least effect of an adapter, so that a wrong answer could not pass


def prompts(count: int, seed: int, vocabulary: int = 311) -> list[list[int]]:
    """Random prompts of different lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(6, vocabulary) for _ in range(draw.randrange(5, 23))] for _ in range(count)]


def compare(base: Path, folder: Path | None, answers) -> tuple[float, float]:
    """Largest difference from PEFT, and the adapter's largest effect, over the tokens of ``answers``."""
    adapted, plain = Oracle(base, folder), Oracle(base, None)
    error = effect = 0.0
    for answer in answers:
        expected = adapted.log_probabilities(answer.tokens)
        error = max(error, (answer.log_probabilities - expected).abs().max().item())
        effect = max(effect, (expected - plain.log_probabilities(answer.tokens)).abs().max().item())
    return error, effect


def assert_exact(base: Path, folders: Mapping[str, Path], names: Sequence[str | None], answers: Sequence) -> None:
    """``answers``: one of each adapter in ``names``, or of the base model (``None``); ``folders``: of the adapters."""
    errors = {}
    for name, answer in zip(names, answers, strict=True):
        errors[name], effect = compare(base, None if name is None else folders[name], [answer])
        assert name is None or effect > CLEAR, f"{name} changes log-probabilities by {effect:.2g} only"
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) <= EXACT, errors


def test_one_mixed_batch_equals_peft(server: Server, llama: Path, adapters: dict[str, Path]) -> None:
    """One adapter or more of every variant that is served. PEFT writes no Bone any more, and QALoRA on GPTQ bases only:
    their oracles are a MiSS and a LoRA that compute the same."""
    names: list[str | None] = [None, *adapters, None, *reversed(adapters)]
    answers = server.generate(prompts(len(names), seed=1), names)
    errors, effects = {}, {}
    for name in [None, *adapters]:
        mine = [answer for answer, owner in zip(answers, names, strict=True) if owner == name]
        errors[name], effects[name] = compare(llama, None if name is None else adapters[name], mine)
    print({name: f"error {error:.1e}, effect {effects[name]:.2g}" for name, error in errors.items()})
    wrong = {name: error for name, error in errors.items() if error > EXACT}
    assert not wrong, f"off by more than {EXACT}: {wrong}"
    faint = {name: effect for name, effect in effects.items() if name is not None and effect < CLEAR}
    assert not faint, f"changes of log-probabilities below {CLEAR}: {faint}"


def test_no_variant_is_missing_in_the_batch(llama: Path, adapters: dict[str, Path]) -> None:
    base = BaseFolder.open(str(llama))
    methods = {load(folder, base=base.shapes, base_dtype=base.dtype).method for folder in adapters.values()}
    assert methods == {variant.name for method in METHODS.values() for variant in method.variants}


@pytest.mark.parametrize("name", ["dora", "ia3", "vera", "oft", "lora"])
def test_alone_equals_in_a_mixed_batch(server: Server, adapters: dict[str, Path], name: str) -> None:
    prompt = prompts(1, seed=3)[0]
    alone = server.generate([prompt], [name])[0]
    mixed = server.generate([prompt] * 4, ["lora_rs", name, None, "oft_cayley"])[1]
    assert torch.allclose(alone.log_probabilities, mixed.log_probabilities, atol=EXACT, rtol=0)
