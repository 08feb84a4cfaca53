"""What one user's requests can tell of another's adapter: the prefix cache, and the keys that requests bring."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import requests

from adapters import Oracle
from scute_patches import sgl_kernel
from serving import Answer, Server, answer_of
from test_parity_server import CLEAR, EXACT, compare

sgl_kernel.install()  # before SGLang is imported on a CPU

from sglang.srt.lora.lora_registry import LoRARef  # noqa: E402
from sglang.srt.utils.auth import AuthLevel, decide_request_auth  # noqa: E402

A, B = "dora", "lora"


def long_prompt(seed: int) -> list[int]:
    return [random.Random(seed).randrange(6, 311) for _ in range(60)]


def ask(server: Server, prompt: list[int], adapter: str | None, **fields: Any) -> Answer:
    """Log-probabilities of the output only: those of the prompt would be computed anew whatever is cached."""
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}, "return_logprob": True}
    response = server.post("generate", input_ids=prompt, lora_path=adapter, **body, **fields)
    response.raise_for_status()
    item = response.json()
    item["meta_info"].setdefault("input_token_logprobs", [None])
    return answer_of(item, prompt)


def check(base: Path, folder: Path | None, answer: Answer) -> None:
    """The outputs follow from the prompt as PEFT says."""
    expected = Oracle(base, folder).log_probabilities(answer.tokens)[-len(answer.output) :]
    found = answer.log_probabilities[-len(answer.output) :]
    assert (found - expected).abs().max() <= EXACT


def test_prefixes_of_the_base_and_of_adapters_are_apart(server: Server, llama: Path, adapters: dict[str, Path]) -> None:
    prompt = long_prompt(1)
    cached: dict[str | None, list[int]] = {None: [], A: [], B: []}
    for name in (None, A, B, None, A, B):
        answer = ask(server, prompt, name)
        check(llama, None if name is None else adapters[name], answer)
        cached[name].append(answer.cached_tokens)
    for first, second in cached.values():
        assert first == 0 and second >= len(prompt) - 1


def test_keys_of_requests_reach_no_other_adapter(server: Server, llama: Path, adapters: dict[str, Path]) -> None:
    """The id of an adapter given at start follows from its name and path, and is what its prefixes are kept by."""
    secret = LoRARef.deterministic_id(A, str(adapters[A]))
    for seed, key in enumerate((secret, A, str(adapters[A])), start=2):
        prompt = long_prompt(seed)
        # The base model is not answered from what the adapter has computed...
        ask(server, prompt, A)
        answer = ask(server, prompt, None, extra_key=key)
        assert answer.cached_tokens == 0
        check(llama, None, answer)
        # ...nor another adapter...
        answer = ask(server, prompt, B, extra_key=key)
        assert answer.cached_tokens == 0
        check(llama, adapters[B], answer)
        # ...and the adapter not from what they leave.
        prompt = long_prompt(seed + 50)
        ask(server, prompt, None, extra_key=key)
        ask(server, prompt, B, extra_key=key)
        answer = ask(server, prompt, A)
        assert answer.cached_tokens == 0
        check(llama, adapters[A], answer)


def test_keys_of_requests_keep_apart_what_they_name(server: Server) -> None:
    prompt = long_prompt(100)
    for name in (None, A):
        counts = [ask(server, prompt, name, extra_key=key).cached_tokens > 0 for key in ("one", "two", "one", "two")]
        assert counts == [False, False, True, True]


def test_names_are_no_secrets(server: Server, adapters: dict[str, Path]) -> None:
    """What ``docs/security.md`` says of them."""
    response = server.post("generate", input_ids=[7, 8], lora_path="nobody")
    assert response.status_code == 400
    assert all(name in response.text for name in adapters)
    assert str(adapters[A]) in requests.get(f"{server.url}/server_info", timeout=30).text


def test_the_answers_tell_adapters_apart(llama: Path, server: Server, adapters: dict[str, Path]) -> None:
    """An answer from another one's prefix would not pass above."""
    for name in (A, B):
        _, effect = compare(llama, adapters[name], server.generate([long_prompt(1)], [name]))
        assert effect > CLEAR


@pytest.mark.parametrize(
    ("api_key", "admin_api_key", "given", "allowed"),
    [
        (None, None, None, True),
        ("user", None, "user", True),
        ("user", None, None, False),
        (None, "admin", None, False),
        (None, "admin", "admin", True),
        ("user", "admin", "user", False),
        ("user", "admin", "admin", True),
    ],
)
def test_who_may_load_adapters(
    api_key: str | None, admin_api_key: str | None, given: str | None, allowed: bool
) -> None:
    """SGLang's rule for the routes that load and unload; ``docs/security.md`` states it."""
    from sglang.srt.entrypoints import http_server

    header = None if given is None else f"Bearer {given}"
    for route in ("load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter"):
        level = getattr(http_server, route)._auth_level
        assert level is AuthLevel.ADMIN_OPTIONAL
        decision = decide_request_auth(
            method="POST",
            path=f"/{route}",
            authorization_header=header,
            api_key=api_key,
            admin_api_key=admin_api_key,
            auth_level=level,
        )
        assert decision.allowed is allowed
