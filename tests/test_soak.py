"""Life cycle under load: adapters of every method come and go on the real server while clients use, leave and abort.

A minute and a half by default; ``SCUTE_SOAK_SECONDS=3600 pytest tests/test_soak.py`` is an hour of the same.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch

from adapters import Oracle
from serving import Server, cpu_arguments, cpu_environment, serve
from test_lifecycle import listed
from test_parity_server import EXACT

SECONDS = float(os.environ.get("SCUTE_SOAK_SECONDS", "90"))
SLOTS = 3
ARENA_KIB = 280  # a few adapters: most batches must evict some, and blocks are moved together
CHUNK = 7  # tokens of a prompt per step, beside the decoded ones of other requests: chunks end anywhere
UNLOAD_SECONDS = 20  # of an unload among running requests, on a machine that does other things too
CLIENTS = 5
# Of all processes after the warm-up. Measured are 2 to 5 KiB per cycle with its requests, and less the longer it runs:
# loads alone are flat, requests alone take 0.4 KiB each at first and next to nothing after 4000. A block that each
# cycle lost would be 50 KiB.
GROWTH_KIB_PER_CYCLE = 8
GROWTH_KIB = 4 * 1024
# Of loads that clients have overtaken.
REFUSALS = ("already loaded", "no room", "cannot be pinned")
# PEFT takes their singular vectors in fp32: by a token in thousands it is off by more than ``EXACT``.
SINGULAR = ("pissa", "kasa")
# One name whose content changes: every load takes the other folder.
CHANGING = "changing"


@dataclass(frozen=True)
class Served:
    """An answer under load; ``log_probabilities`` are those of ``tokens`` from ``start`` on."""

    name: str | None
    tokens: tuple[int, ...]
    start: int
    log_probabilities: tuple[float, ...]


@dataclass
class Record:
    """What the clients have seen. Appending to a list and counting under the lock are all that threads share."""

    served: list[Served] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, event: str) -> None:
        with self.lock:
            self.events[event] += 1


@pytest.fixture(scope="module")
def soaked(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("soak") / "server.log"
    options = (
        *("--max-loras-per-batch", str(SLOTS), "--scute-adapter-memory", f"{ARENA_KIB}KiB"),
        *("--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk", "--max-running-requests", "24"),
    )
    with serve(llama, log, *cpu_arguments(), *options, environment=cpu_environment()) as running:
        yield running


@pytest.mark.timeout(1200 + 2 * SECONDS)
def test_adapters_come_and_go_under_load(soaked: Server, llama: Path, adapters: dict[str, Path]) -> None:
    folders = loadable(soaked, adapters)
    assert len(folders) >= 0.8 * len(adapters)
    folders[CHANGING] = [adapters["lora_rs"], adapters["ia3"]]
    record = Record()
    warm_up, end = time.monotonic() + SECONDS / 3, time.monotonic() + SECONDS
    stop = threading.Event()
    workers = [
        threading.Thread(target=client, args=(seed, soaked, list(folders), record, stop), daemon=True)
        for seed in range(CLIENTS)
    ]
    workers.append(threading.Thread(target=operator, args=(soaked, folders, record, stop), daemon=True))
    for worker in workers:
        worker.start()
    time.sleep(max(0.0, warm_up - time.monotonic()))
    before, cycles_before = memory_kib(soaked), record.events["unload"]
    time.sleep(max(0.0, end - time.monotonic()))
    stop.set()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive(), "a request hangs"
    after, cycles = memory_kib(soaked), record.events["unload"] - cycles_before
    print(dict(record.events), f"scheduler: {before} KiB, {after} KiB after {cycles} more cycles")
    assert not record.problems, record.problems[:5]
    for event in ("load", "unload", "answer", "samples", "left", "aborted", "refused"):
        assert record.events[event] >= 5, f"{event}: {record.events[event]}"
    assert after - before <= GROWTH_KIB + GROWTH_KIB_PER_CYCLE * cycles

    # Everything goes within seconds, so nothing is counted as in use.
    for name in listed(soaked):
        started = time.monotonic()
        assert soaked.unload(name).ok
        assert time.monotonic() - started < UNLOAD_SECONDS, f"{name} is still in use"
    assert listed(soaked) == set()
    check(soaked, llama, folders, record.served)
    # Nothing is left in the arena: an adapter that needs most of it can be pinned, and is served as before.
    largest = max((names[0] for names in folders.values()), key=weight_bytes)
    assert soaked.load("last", largest, pinned=True).ok
    prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    answers = soaked.generate([prompt, prompt], ["last", None])
    for answer, folder in zip(answers, (largest, None), strict=True):
        expected = Oracle(llama, folder).log_probabilities(answer.tokens)
        assert torch.allclose(answer.log_probabilities, expected, atol=EXACT, rtol=0)
    assert soaked.unload("last").ok


def weight_bytes(folder: Path) -> int:
    return (folder / "adapter_model.safetensors").stat().st_size


def loadable(server: Server, adapters: dict[str, Path]) -> dict[str, list[Path]]:
    """Every adapter that fits into the arena at all; the others are refused for that reason and no other."""
    folders = {}
    for name, folder in adapters.items():
        response = server.load(name, folder)
        if response.ok:
            folders[name] = [folder]
        else:
            assert "no room" in response.json()["error_message"], response.text
    for name in folders:
        assert server.unload(name).ok
    return folders


def memory_kib(server: Server) -> int:
    """Resident memory of the server's processes."""
    launcher = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in [launcher, *launcher.children(recursive=True)]) // 1024


def operator(server: Server, folders: dict[str, list[Path]], record: Record, stop: threading.Event) -> None:
    """Loads and unloads at random; now and then something that must be refused."""
    draw = random.Random(99)
    pinned: str | None = None
    while not stop.is_set():
        name = draw.choice([*folders, CHANGING, CHANGING])
        if name in listed(server):
            started = time.monotonic()
            response = server.unload(name)
            took = time.monotonic() - started
            if took > UNLOAD_SECONDS:
                record.problems.append(f"unloading {name} took {took:.0f} s")
            pinned = None if name == pinned else pinned
            record.count("unload")
        else:
            pin = pinned is None and draw.random() < 0.1
            response = server.load(name, draw.choice(folders[name]), pinned=pin)
            pinned = name if pin and response.ok else pinned
            record.count("load")
        # A request that names an unloaded adapter makes SGLang load it again, as it was: pinned, too.
        if not response.ok and not any(part in response.text for part in REFUSALS):
            record.problems.append(response.text)
        if draw.random() < 0.1:
            refused = server.load("nothing", "/nonexistent")
            if refused.status_code != 400:
                record.problems.append(f"a folder that is not there: {refused.text}")
        stop.wait(draw.random() * 0.1)


def client(seed: int, server: Server, names: list[str], record: Record, stop: threading.Event) -> None:
    """Sends requests of every kind until told to stop."""
    draw = random.Random(seed)
    kinds: list[Callable[..., None]] = [ask, ask, ask_mixed, ask_samples, leave, abort, ask_wrongly]
    while not stop.is_set():
        try:
            draw.choice(kinds)(server, names, record, draw)
        except requests.RequestException as error:
            record.problems.append(repr(error))
            return


def some_prompt(draw: random.Random) -> list[int]:
    """One of a few beginnings, so that the prefix cache is hit, and an end of its own."""
    start = random.Random(draw.randrange(4))
    return [start.randrange(6, 311) for _ in range(draw.choice([5, 13, 40]))] + [draw.randrange(6, 311)]


def some_name(names: list[str], draw: random.Random) -> str | None:
    return draw.choice([None, *names, CHANGING])


def post(server: Server, record: Record, **body: Any) -> list[dict[str, Any]]:
    """The items of an answer; none if an adapter was unloaded meanwhile, which is the only reason not to answer."""
    response = server.post("generate", **body)
    if response.ok:
        items = response.json()
        return items if isinstance(items, list) else [items]
    text = response.text
    if response.status_code == 400 and ("never been loaded" in text or "not loaded" in text or "implicitly" in text):
        record.count("not loaded")
    else:
        record.problems.append(f"{response.status_code}: {text[:300]}")
    return []


def keep(record: Record, event: str, name: str | None, prompt: list[int], item: dict[str, Any]) -> None:
    meta = item["meta_info"]
    inputs = [value for value, *_ in meta.get("input_token_logprobs", [])[1:]]
    outputs = meta["output_token_logprobs"]
    tokens = (*prompt, *(token for _, token, *_ in outputs))
    values = (*inputs, *(value for value, *_ in outputs))
    record.served.append(Served(name, tokens, len(tokens) - len(values), values))
    record.count(event)


def ask(server: Server, names: list[str], record: Record, draw: random.Random) -> None:
    """One request; every other one asks for log-probabilities of the prompt too, and so computes all of it."""
    name, prompt = some_name(names, draw), some_prompt(draw)
    whole = {"logprob_start_len": 0} if draw.random() < 0.5 else {}
    sampling = {"temperature": 0, "max_new_tokens": draw.choice([1, 4, 9]), "ignore_eos": True}
    for item in post(
        server, record, input_ids=prompt, lora_path=name, sampling_params=sampling, return_logprob=True, **whole
    ):
        keep(record, "answer", name, prompt, item)


def ask_mixed(server: Server, names: list[str], record: Record, draw: random.Random) -> None:
    """As many adapters as there are slots, and the base model, in one request."""
    owners = [*draw.sample(names, SLOTS), None]
    asked = [some_prompt(draw) for _ in owners]
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    items = post(server, record, input_ids=asked, lora_path=owners, sampling_params=sampling, return_logprob=True)
    for name, prompt, item in zip(owners, asked, items, strict=False):
        keep(record, "mixed", name, prompt, item)


def ask_samples(server: Server, names: list[str], record: Record, draw: random.Random) -> None:
    name, prompt = some_name(names, draw), some_prompt(draw)
    sampling = {"temperature": 1, "max_new_tokens": 5, "ignore_eos": True, "n": 4}
    for item in post(server, record, input_ids=prompt, lora_path=name, sampling_params=sampling, return_logprob=True):
        keep(record, "samples", name, prompt, item)


def leave(server: Server, names: list[str], record: Record, draw: random.Random) -> None:
    """The client goes away in the middle of a stream."""
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, "n": draw.choice([1, 1, 3])}
    body = {"input_ids": some_prompt(draw), "lora_path": some_name(names, draw), "sampling_params": sampling}
    with requests.post(f"{server.url}/generate", json={**body, "stream": True}, stream=True, timeout=300) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number >= draw.randrange(6):
                break
    record.count("left")


def abort(server: Server, names: list[str], record: Record, draw: random.Random) -> None:
    """Another client aborts the request, before, while or after it runs."""
    rid = f"{draw.random()}"
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    body = {"input_ids": some_prompt(draw), "lora_path": some_name(names, draw), "sampling_params": sampling}
    running = threading.Thread(target=lambda: server.post("generate", rid=rid, **body), daemon=True)
    running.start()
    time.sleep(draw.random() * 0.3)
    server.post("abort_request", rid=rid)
    running.join(timeout=120)
    if running.is_alive():
        record.problems.append("an aborted request does not end")
    record.count("aborted")


def ask_wrongly(server: Server, names: list[str], record: Record, draw: random.Random) -> None:
    """Requests that are refused after their adapter was looked up."""
    name = draw.choice(names)
    wrong: list[dict[str, Any]] = [
        {"input_ids": [7] * 3000, "lora_path": name},
        {"input_ids": [7, 8], "lora_path": name, "sampling_params": {"temperature": -1}},
        {"input_ids": [[7, 8], [9] * 3000], "lora_path": [name, None]},
        {"input_ids": [7, 8], "lora_path": "nobody"},
    ]
    response = server.post("generate", **draw.choice(wrong))
    if response.status_code != 400:
        record.problems.append(f"{response.status_code} for a wrong request: {response.text[:300]}")
    record.count("refused")


def check(server: Server, base: Path, folders: dict[str, list[Path]], served: list[Served]) -> None:
    """Every answer equals PEFT's, of one of the contents that the name had; of those where PEFT itself is not exact,
    that of the server when it has nothing else to do."""
    wrong = []
    for name in {answer.name for answer in served}:
        answers = [answer for answer in served if answer.name == name]
        asked = list({answer.tokens for answer in answers})
        if name in SINGULAR:
            each = [alone(server, folder, asked) for folder in folders[name]]
        else:
            oracles = [Oracle(base, folder) for folder in (folders[name] if name is not None else [None])]
            each = [{tokens: oracle.log_probabilities(tokens) for tokens in asked} for oracle in oracles]
        for answer in answers:
            found = torch.tensor(answer.log_probabilities, dtype=torch.float64)
            errors = [(found - of_one[answer.tokens][answer.start - 1 :]).abs().max().item() for of_one in each]
            if not min(errors) <= EXACT:
                wrong.append(f"{name}: {min(errors):.2g} after {json.dumps(answer.tokens)}")
    assert not wrong, f"{len(wrong)} of {len(served)} answers: {wrong[:5]}"


def alone(server: Server, folder: Path, asked: list[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
    """Log-probabilities of each token after the first."""
    assert server.load("alone", folder).ok
    answers = server.generate(asked, ["alone"] * len(asked), 1)
    assert server.unload("alone").ok
    return {tokens: answer.log_probabilities[:-1] for tokens, answer in zip(asked, answers, strict=True)}
