"""Every way of naming an adapter over HTTP: native, OpenAI completions and chat, streaming, unknown names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import requests

from adapters import Oracle
from serving import Server
from test_parity_server import EXACT


def model_name(server: Server) -> str:
    return requests.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]


def native_text(server: Server, adapter: str | None, prompt: str = "Adapters share") -> str:
    response = server.post(
        "generate", text=prompt, lora_path=adapter, sampling_params={"temperature": 0, "max_new_tokens": 8}
    )
    response.raise_for_status()
    return response.json()["text"]


@pytest.mark.parametrize("adapter", ["lora", "dora", "ia3", "vera", "oft"])
def test_completions_by_model_name(server: Server, adapter: str) -> None:
    response = server.post(
        "v1/completions",
        model=f"{model_name(server)}:{adapter}",
        prompt="Adapters share",
        temperature=0,
        max_tokens=8,
    )
    assert response.ok, response.text
    text = response.json()["choices"][0]["text"]
    assert text == native_text(server, adapter) != native_text(server, None)


def test_chat_by_model_name_streamed_and_not(server: Server) -> None:
    request = {
        "model": f"{model_name(server)}:dora",
        "messages": [{"role": "user", "content": "Say something."}],
        "temperature": 0,
        "max_tokens": 8,
    }
    whole = server.post("v1/chat/completions", **request)
    assert whole.ok, whole.text
    content = whole.json()["choices"][0]["message"]["content"]
    streamed = requests.post(f"{server.url}/v1/chat/completions", json={**request, "stream": True}, timeout=300)
    pieces = [
        json.loads(line[len("data: ") :])["choices"][0]["delta"].get("content") or ""
        for line in streamed.text.splitlines()
        if line.startswith("data: {")
    ]
    assert "".join(pieces) == content
    base = server.post("v1/chat/completions", **{**request, "model": model_name(server)})
    assert base.json()["choices"][0]["message"]["content"] != content


def test_unknown_names_are_never_answered_by_the_base(server: Server) -> None:
    known = model_name(server)
    assert server.post("generate", text="hello", lora_path="nobody").status_code == 400
    for route, body in (
        ("v1/completions", {"prompt": "hello"}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ):
        response = server.post(route, model=f"{known}:nobody", max_tokens=2, **body)
        assert response.status_code in (400, 404), f"{route}: {response.status_code}"


def test_loaded_adapters_are_listed(server: Server, adapters: dict[str, Path]) -> None:
    listed = {model["id"] for model in requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]}
    assert set(adapters) <= listed


def test_streamed_tokens_are_exact(server: Server, llama: Path, adapters: dict[str, Path]) -> None:
    prompt = [11, 45, 90, 200, 17]
    response = requests.post(
        f"{server.url}/generate",
        json={
            "input_ids": prompt,
            "lora_path": "vera",
            "sampling_params": {"temperature": 0, "max_new_tokens": 7, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        },
        timeout=300,
    )
    last = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")][-1]
    produced = last["meta_info"]["output_token_logprobs"]
    tokens = [token for _, token, *_ in produced]
    assert len(tokens) == 7
    expected = Oracle(llama, adapters["vera"]).log_probabilities([*prompt, *tokens])[-7:]
    for (value, *_), wanted in zip(produced, expected.tolist(), strict=True):
        assert abs(value - wanted) <= EXACT


def test_parallel_samples_of_an_adapter(server: Server) -> None:
    response = server.post(
        "generate",
        text="Adapters share",
        lora_path="oft",
        sampling_params={"temperature": 0, "max_new_tokens": 8, "n": 3},
    )
    assert response.ok, response.text
    assert {item["text"] for item in response.json()} == {native_text(server, "oft")}
