"""Starts the real SGLang server with Scute and talks HTTP to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch

START_SECONDS = 600  # a cold start on two busy cores takes one to three minutes


class ServerDied(RuntimeError):
    """The server ended before it was ready; the message ends with what it said last."""


@dataclass(frozen=True)
class Answer:
    """One answer: the tokens of prompt and output, and the log-probability of each token after the first."""

    prompt: list[int]
    output: list[int]
    log_probabilities: torch.Tensor
    text: str
    cached_tokens: int

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


@dataclass(frozen=True)
class Server:
    """A running server. ``url``: without a trailing slash. ``log``: its output."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, route: str, **body: Any) -> requests.Response:
        return requests.post(f"{self.url}/{route}", json=body, timeout=300)

    def load(self, name: str, path: Path | str, **fields: Any) -> requests.Response:
        return self.post("load_lora_adapter", lora_name=name, lora_path=str(path), **fields)

    def unload(self, name: str) -> requests.Response:
        return self.post("unload_lora_adapter", lora_name=name)

    def generate(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None] | None = None, new_tokens: int = 6
    ) -> list[Answer]:
        """One request for all prompts (one mixed batch), greedy, with log-probabilities of every token.

        ``adapters``: of each prompt; ``None`` names none at all, as a server without adapters wants it.
        """
        response = self.post(
            "generate",
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            **({} if adapters is None else {"lora_path": list(adapters)}),
        )
        response.raise_for_status()
        return [answer_of(item, prompt) for item, prompt in zip(response.json(), prompts, strict=True)]


def answer_of(item: Mapping[str, Any], prompt: Sequence[int]) -> Answer:
    """An item of ``/generate`` with log-probabilities from the start of the prompt."""
    meta = item["meta_info"]
    inputs = [value for value, *_ in meta["input_token_logprobs"][1:]]  # the first token has none
    outputs = meta["output_token_logprobs"]
    return Answer(
        prompt=list(prompt),
        output=[token for _, token, *_ in outputs],
        log_probabilities=torch.tensor(inputs + [value for value, *_ in outputs], dtype=torch.float64),
        text=item["text"],
        cached_tokens=meta["cached_tokens"],
    )


def cpu_environment() -> dict[str, str]:
    """What a server on a machine without a GPU needs before Python starts."""
    return {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def cpu_arguments(dtype: str = "float32") -> list[str]:
    return [
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", dtype),
        *("--mem-fraction-static", "0.3", "--max-total-tokens", "8192"),
        "--sleep-on-idle",  # an idle scheduler would keep a core busy
    ]


@contextmanager
def serve(
    model: Path,
    log: Path,
    *arguments: str,
    adapters: Mapping[str, Path] | None = None,
    environment: Mapping[str, str] | None = None,
    lora: bool = True,
    start_seconds: float = START_SECONDS,
) -> Iterator[Server]:
    """Start a server with ``--lora-backend scute`` unless ``arguments`` name another; stop it at the end.

    ``adapters``: loaded at start. ``environment``: added to this process's. ``lora``: without it the server cannot
    serve adapters at all. Raises ``ServerDied`` if it ends, or is not ready after ``start_seconds``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--skip-server-warmup", "--log-level", "info", *arguments]
    if lora and "--lora-backend" not in arguments:
        command += ["--enable-lora", "--lora-backend", "scute"]
    if adapters:
        command += ["--lora-paths", *(f"{name}={path}" for name, path in adapters.items())]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that its worker processes can be ended with it
        )
        server = Server(f"http://127.0.0.1:{port}", log, process)
        try:
            _wait(server, start_seconds)
            yield server
        finally:
            _stop(process)


def _wait(server: Server, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerDied(f"exit code {server.process.returncode}\n{_tail(server.log)}")
        try:
            if requests.get(f"{server.url}/health", timeout=5).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(0.5)
    raise ServerDied(f"not ready after {seconds:.0f} s\n{_tail(server.log)}")


def _tail(log: Path) -> str:
    lines = [line[:400] for line in log.read_text(errors="replace").splitlines() if "server_args=" not in line]
    return "\n".join(lines[-40:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            continue
