"""Scute's server against stock SGLang: time per output token, time to first token, memory and load time.

    PYTHONPATH=tests python benchmarks/server.py --out benchmarks/results/h200 --deadline 530

Needs a GPU of 140 GB and 110 GB of host memory, 45 of it for files in ``--work``. Writes a random base model and
adapters of random numbers, and starts servers with equal settings: one without LoRA, stock SGLang's ``triton_v2`` once
per rank (it pads every adapter to one rank), and one of Scute for everything. Several servers share the GPU, since
starts take longer than measurements, but only one works at a time: the others are idle, and asleep.

Every figure goes into ``server.csv`` when it is measured, and ``server.md`` is written anew after each group of
servers, with what there is. A server, adapter or case that fails becomes a row with its error.

How times are measured. A case is a warm-up burst, then ``bursts`` more. A burst is one streamed ``/generate`` request
that holds all prompts, of random tokens; ``stream_interval`` lets the server answer for each prompt at its first token
and then only a few times, with the number of tokens so far, so that the client costs it little.

- Milliseconds per token: of each prompt, between its first answer after all prompts have begun (so no prefill is
  counted) and its last; the median of the prompts.
- Time to first token: from sending the request until every prompt has its first token.

Figures are medians over the bursts. Not measured here: the time to swap an adapter in, which a client cannot see.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

import requests
import torch

from adapter_files import ALL, Family, lora_bytes, vera_basis_bytes, write_family
from base_model import write_base
from serving import START_SECONDS, Server, ServerDied, cpu_arguments, cpu_environment, serve
from shapes import MODELS, ModelShape

PROMPT_TOKENS = 128
PREFILL_TOKENS = 2048
ANSWERS = 8  # about as many per prompt as a burst is streamed in
BURST_SECONDS = 90  # without a byte from the server: the first burst of a kind may have to compile kernels
BANDWIDTH = 4.3e12  # bytes per second of an H200, measured with a copy; for the aims of bars 3a and 3b
RESIDENT_BYTES = 2 << 30

# One more than the cases use of each family that has a fresh adapter loaded (bar 18). Written in this order.
FAMILIES = {
    family.name: family
    for family in (
        Family("lora-r16", "lora", 16, 21),
        Family("dora-r16", "dora", 16, 5),
        Family("ia3", "ia3", 0, 33),
        Family("vera-r256", "vera", 256, 33),
        Family("oft-b32", "oft", 32, 5),
        Family("lora-r64", "lora", 64, 16),
        Family("lora-r256", "lora", 256, 16),
    )
}
METHODS = ("lora-r16", "dora-r16", "ia3", "vera-r256", "oft-b32")  # one family of each


def some(family: str, count: int, first: int = 0) -> list[str]:
    return FAMILIES[family].adapters(first, first + count)


@dataclass(frozen=True)
class Case:
    """Requests sent together. ``adapters``: of each request. ``new_tokens``: 0 for as many as the command line says."""

    name: str
    adapters: Sequence[str | None]
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = 0
    bursts: int = 5


def prefill(name: str, adapters: Sequence[str | None]) -> Case:
    return Case(name, adapters, PREFILL_TOKENS, new_tokens=1)


BASE_16 = Case("16 base", [None] * 16)
BASE_20 = Case("20 base", [None] * 20)
BASE_64 = Case("64 base", [None] * 64)
R16_16 = Case("16 LoRA r16", some("lora-r16", 16))
R16_20 = Case("20 LoRA r16", some("lora-r16", 20))
R64_16 = Case("16 LoRA r64", some("lora-r64", 16))
R256_16 = Case("16 LoRA r256", some("lora-r256", 16))
FIVE_METHODS = Case("20 of five methods", [name for family in METHODS for name in some(family, 4)])
FOUR_METHODS = Case("16 of four methods, no VeRA", [name for name in FIVE_METHODS.adapters if "vera" not in str(name)])
DORA_4 = Case("4 DoRA r16", some("dora-r16", 4))
R16_4 = Case("4 LoRA r16", some("lora-r16", 4))
VERA_16 = Case("16 VeRA r256", some("vera-r256", 16))
VERA_ONE = Case("16 requests, one VeRA r256", some("vera-r256", 1) * 16)
DISTINCT_64 = Case("64 distinct, (IA)3 and VeRA", some("ia3", 32) + some("vera-r256", 32))
SWEEP = (
    Case("1 base", [None], bursts=3),
    Case("4 base", [None] * 4, bursts=3),
    Case("1 LoRA r16", some("lora-r16", 1), bursts=3),
    Case("4 requests, one LoRA r16", some("lora-r16", 1) * 4, bursts=3),
    Case("64 requests, one LoRA r16", some("lora-r16", 1) * 64, bursts=3),
    Case("64 requests, 20 LoRA r16", [*itertools.islice(itertools.cycle(some("lora-r16", 20)), 64)], bursts=3),
    R16_4,
    BASE_64,
)
PREFILL_BASE = prefill("prefill, 4 base", [None] * 4)
PREFILL_R16 = prefill("prefill, 4 LoRA r16", some("lora-r16", 4))
PREFILL_MIX = prefill(
    "prefill, LoRA DoRA (IA)3 VeRA", [some(family, 1)[0] for family in ("lora-r16", "dora-r16", "ia3", "vera-r256")]
)
PREFILL_OFT = prefill(
    "prefill, DoRA (IA)3 VeRA OFT", [some(family, 1)[0] for family in ("dora-r16", "ia3", "vera-r256", "oft-b32")]
)


@dataclass(frozen=True)
class Setup:
    """How a server is started. ``rank``: a stock server's, for adapters of one rank; 0 without LoRA and for Scute."""

    name: str
    backend: str | None = None
    rank: int = 0
    slots: int = 0

    def arguments(self) -> list[str]:
        if self.backend is None:
            return []
        slots = ["--enable-lora", "--lora-backend", self.backend, "--max-loras-per-batch", str(self.slots)]
        if not self.rank:
            return slots
        # Not "all": stock would adapt embedding and output head too, which costs it time that no adapter here asks for.
        return [*slots, "--max-lora-rank", str(self.rank), "--lora-target-modules", *ALL]


NO_LORA = Setup("no-lora")
SCUTE = Setup("scute", "scute", slots=64)
STOCK_16, STOCK_64, STOCK_256 = (
    Setup(f"triton_v2-r{rank}", "triton_v2", rank, slots) for rank, slots in ((16, 20), (64, 16), (256, 16))
)
CSGMV_16, CSGMV_64, CSGMV_256 = (
    Setup(f"csgmv-r{rank}", "csgmv", rank, slots) for rank, slots in ((16, 20), (64, 16), (256, 16))
)


@dataclass(frozen=True)
class Job:
    """A server's part in a group: start it unless it runs, load adapters, measure cases, then load the last adapter of
    each family in ``fresh``. Servers of a group start and load side by side, and are measured one after the other."""

    setup: Setup
    load: Sequence[str] = ()
    cases: Sequence[Case] = ()
    fresh: Sequence[str] = ()

    def families(self) -> set[str]:
        """Whose adapters it loads."""
        return {adapter.rpartition("-")[0] for adapter in self.load} | set(self.fresh)


SMALL = [*some("lora-r16", 20), *some("dora-r16", 4), *some("ia3", 32), *some("vera-r256", 32), *some("oft-b32", 4)]
STOCK_CASES = (BASE_16, R16_16, R16_20, PREFILL_R16, PREFILL_BASE, *SWEEP)
# The most important servers and cases come first, in case time runs out. What limits a group is memory: Scute's host
# copies of the widest adapters and those of a stock server must not be held at once.
GROUPS = (
    (
        Job(NO_LORA, (), (BASE_16, BASE_20, BASE_64, PREFILL_BASE)),
        Job(STOCK_16, some("lora-r16", 20), STOCK_CASES),
        Job(
            SCUTE,
            SMALL,
            (
                *(BASE_16, R16_16, FIVE_METHODS, R16_20, FOUR_METHODS, DORA_4, R16_4, VERA_16, VERA_ONE, DISTINCT_64),
                *(PREFILL_R16, PREFILL_MIX, PREFILL_OFT, PREFILL_BASE),
                *(case for case in SWEEP if case is not R16_4),
            ),
            METHODS,
        ),
        Job(STOCK_64, some("lora-r64", 16), (R64_16,)),
    ),
    (
        Job(STOCK_256),
        Job(SCUTE, [*some("lora-r64", 16), *some("lora-r256", 16)], (R64_16, R256_16)),
    ),
    (Job(STOCK_256, some("lora-r256", 16), (R256_16,)),),
    (Job(CSGMV_16, some("lora-r16", 20), STOCK_CASES), Job(CSGMV_64, some("lora-r64", 16), (R64_16,))),
    (Job(CSGMV_256, some("lora-r256", 16), (R256_16,)),),
)
SERVERS = {job.setup.name: job.setup for group in GROUPS for job in group}
ON_BY_DEFAULT = [name for name, setup in SERVERS.items() if setup.backend != "csgmv"]

COLUMNS = (
    *("seconds", "server", "event", "case", "burst", "requests", "prompt_tokens", "new_tokens"),
    *("ms_first", "ms_per_token", "load_s", "first_token_s", "bytes", "error"),
)


class Records:
    """Rows of ``server.csv``, on disk as soon as they are known. ``seconds``: since the start of the script.

    Events: ``start`` of a server and ``load`` of an adapter (``load_s``), ``burst`` (0 is the warm-up), ``fresh``
    adapter loaded and asked for one token, ``bytes`` of an adapter; ``case``, ``files`` and ``server`` for errors.
    """

    def __init__(self, path: Path) -> None:
        self.began = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()
        self._lock = Lock()

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def add(self, server: str, event: str, **fields: Any) -> None:
        row = {"seconds": round(self.seconds(), 2), "server": server, "event": event, **fields}
        with self._lock:
            self.rows.append(row)
            self._writer.writerow(row)
            self._file.flush()

    def say(self, text: str) -> None:
        print(f"{self.seconds():6.1f} s  {text}", flush=True)

    def failed(self, server: str, event: str, error: Exception, **fields: Any) -> None:
        row = {"error": f"{type(error).__name__}: {error}", **fields}
        self.add(server, event, **row)
        self.say(f"{server}: {event} {fields.get('case', '')} failed: {brief(row)}")

    def values(self, server: str, event: str, case: str, column: str) -> list[float]:
        """Of the rows that have one, in order, without warm-up bursts."""
        chosen = [r for r in self.rows if (r["server"], r["event"], r.get("case")) == (server, event, case)]
        return [r[column] for r in chosen if column in r and r.get("burst") != 0]

    def error(self, server: str, case: str) -> str | None:
        """Why a case has no figure: its own error, else that of the server's start."""
        for chosen in (case, None):
            for row in self.rows:
                if row["server"] == server and row.get("case") == chosen and "error" in row:
                    return brief(row)
        return None


def brief(row: dict[str, Any]) -> str:
    """The error of a row in one line: of a server that died, the last exception in its log."""
    first, *more = row["error"].splitlines()
    exceptions = [line for line in more if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return ": ".join([first, *exceptions[-1:]]).replace("|", "/")


class DeadlinePassed(RuntimeError):
    """There is no time for it."""


@dataclass
class Running:
    """A started server. ``loaded``: names of its adapters."""

    server: Server
    stop: ExitStack
    loaded: set[str] = field(default_factory=set)


class Bench:
    """Runs the groups. ``work``: for model and adapters. ``files``: the writing of each family's adapters."""

    def __init__(self, args: argparse.Namespace, records: Records, work: Path) -> None:
        self.args, self.records = args, records
        self.shape: ModelShape = MODELS[args.model_shape]
        self.base, self.adapters = work / "base", work / "adapters"
        self.running: dict[str, Running] = {}
        self.files: dict[str, Future[None]] = {}

    def run(self) -> None:
        wanted = [[job for job in group if job.setup.name in self.args.servers] for group in GROUPS]
        wanted = [jobs for jobs in wanted if jobs]
        write_base(self.base, self.shape, self.args.device)
        self._free_device_memory()
        self.records.say(f"base model written: {self.shape.name}")
        needed = set().union(*(job.families() for jobs in wanted for job in jobs))
        with ThreadPoolExecutor(1) as writer:  # while servers start
            self.files = {name: writer.submit(self._write, name) for name in FAMILIES if name in needed}
            try:
                for number, jobs in enumerate(wanted):
                    self._run_group(jobs, {job.setup.name for group in wanted[number + 1 :] for job in group})
            finally:
                for name in list(self.running):
                    self._stop(name)

    def _write(self, name: str) -> None:
        self._check_deadline()
        try:
            write_family(self.adapters, FAMILIES[name], self.shape, self.args.device)
        except Exception as error:
            self.records.failed("", "files", error, case=name)
            raise
        finally:
            self._free_device_memory()
        self.records.say(f"adapters written: {name}")

    def _free_device_memory(self) -> None:
        if self.args.device == "cuda":
            torch.cuda.empty_cache()

    def _run_group(self, jobs: Sequence[Job], later: set[str]) -> None:
        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(self._prepare, jobs))
        for writing in self.files.values():  # nothing else may work while a server is measured
            writing.exception()
        for job in jobs:
            if job.setup.name in self.running:
                self._measure(job)
                if job.setup.name not in later:
                    self._stop(job.setup.name)
        write_report(self.args, self.records)

    def _prepare(self, job: Job) -> None:
        """Start and load. Adapters that do not load leave the cases that name them without figures."""
        name = job.setup.name
        try:
            if name not in self.running:
                self._start(job.setup)
        except Exception as error:
            self.records.failed(name, "start", error)
            return
        began = time.monotonic()
        for adapter in job.load:
            if not self._try(name, "load", adapter, lambda adapter=adapter: self._load(name, adapter)):
                break
        if job.load:
            self.records.say(f"{name}: adapters loaded in {time.monotonic() - began:.1f} s")

    def _try(self, name: str, event: str, case: str, work: Callable[[], object]) -> bool:
        """Do it and record its failure; returns whether there is time and a server for more."""
        try:
            self._check_deadline()
            work()
        except DeadlinePassed as error:
            self.records.failed(name, event, error, case=case)
            return False
        except Exception as error:
            self.records.failed(name, event, error, case=case)
            return not self._died(name, error)
        return True

    def _died(self, name: str, error: Exception) -> bool:
        """Whether the server ended, which may take a while after the connection broke. One that hangs is ended."""
        if not isinstance(error, requests.RequestException):
            return False
        try:
            end = f"exit code {self.running[name].server.process.wait(timeout=10)}"
        except subprocess.TimeoutExpired:
            if not isinstance(error, requests.Timeout):
                return False
            end = "it hung"
        self.records.failed(name, "server", ServerDied(f"{end}; see its log"))
        self._stop(name)
        return True

    def _start(self, setup: Setup) -> None:
        self._check_deadline()
        began = time.monotonic()
        stop = ExitStack()
        server = stop.enter_context(
            serve(
                self.base,
                self._log(setup.name),
                *(cpu_arguments() if self.args.device == "cpu" else gpu_arguments()),
                *("--disable-radix-cache", "--max-total-tokens", "32768", "--max-running-requests", "64"),
                *setup.arguments(),
                *(["--scute-adapter-memory", self.args.adapter_memory] if setup == SCUTE else []),
                environment=self._environment(setup),
                lora=setup.backend is not None,
                start_seconds=min(START_SECONDS, self._left()),
            )
        )
        self.running[setup.name] = Running(server, stop)
        self.records.add(setup.name, "start", load_s=round(time.monotonic() - began, 2))
        self.records.say(f"{setup.name}: ready after {time.monotonic() - began:.0f} s")

    def _log(self, name: str) -> Path:
        """Of the next start of a server."""
        starts = sum((row["server"], row["event"]) == (name, "start") for row in self.records.rows)
        return self.args.out / f"server-{name}{f'-{starts + 1}' if starts else ''}.log"

    def _environment(self, setup: Setup) -> dict[str, str]:
        """On a GPU, servers without Scute do not load its plugin at all. On the CPU SGLang does not run without it."""
        if self.args.device == "cpu":
            return cpu_environment()
        return {} if setup == SCUTE else {"SGLANG_PLUGINS": "none"}

    def _stop(self, name: str) -> None:
        """At once: there is nothing to save, and a server that ends by itself may take 15 s."""
        running = self.running.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(running.server.process.pid, signal.SIGKILL)
        running.stop.close()

    def _load(self, name: str, adapter: str) -> float:
        """Seconds that loading took."""
        self.files[adapter.rpartition("-")[0]].result()
        began = time.monotonic()
        response = self.running[name].server.load(adapter, self.adapters / adapter)
        took = time.monotonic() - began
        if not response.ok:
            raise RuntimeError(response.text)
        self.running[name].loaded.add(adapter)
        self.records.add(name, "load", case=adapter, load_s=round(took, 3))
        return took

    def _measure(self, job: Job) -> None:
        """All cases. A server that dies in one is started once more for those that follow."""
        name = job.setup.name
        tasks = [("case", case.name, lambda case=case: self._run_case(name, case)) for case in job.cases]
        tasks += [("fresh", family, lambda family=family: self._fresh(name, family)) for family in job.fresh]
        restarted = False
        for task in tasks:
            if self._try(name, *task):
                continue
            if self._left() <= 0 or restarted:
                return
            restarted = True
            self._prepare(job)
            if name not in self.running:
                return
        if job.setup == SCUTE:
            self._adapter_bytes()

    def _run_case(self, name: str, case: Case) -> None:
        running = self.running[name]
        if missing := {adapter for adapter in case.adapters if adapter} - running.loaded:
            raise RuntimeError(f"not loaded: {', '.join(sorted(missing))}")
        tokens = case.new_tokens or self.args.tokens
        adapters = None if name == NO_LORA.name else case.adapters
        sizes = {"requests": len(case.adapters), "prompt_tokens": case.prompt_tokens, "new_tokens": tokens}
        for burst in range(1 + case.bursts):
            # The same prompts for every server.
            draw = random.Random(f"{case.name} {burst}")
            ids = range(10, self.shape.vocabulary)
            prompts = [draw.choices(ids, k=case.prompt_tokens) for _ in case.adapters]
            first, per_token = send(running.server, prompts, adapters, tokens)
            figures = {"ms_first": round(1e3 * first, 3)}
            if per_token is not None:
                figures["ms_per_token"] = round(1e3 * per_token, 4)
            self.records.add(name, "burst", case=case.name, burst=burst, **sizes, **figures)
        per_token = self.records.values(name, "burst", case.name, "ms_per_token")
        first = statistics.median(self.records.values(name, "burst", case.name, "ms_first"))
        shown = f"{statistics.median(per_token):.3f} ms per token, " if per_token else ""
        self.records.say(f"{name}: {case.name}: {shown}{first:.1f} ms to first token")

    def _fresh(self, name: str, family: str) -> None:
        """Load an adapter that the server has never seen, and ask it for one token."""
        (adapter,) = some(family, 1, first=FAMILIES[family].count - 1)
        load = self._load(name, adapter)
        prompts = [[10 + i % (self.shape.vocabulary - 10) for i in range(PROMPT_TOKENS)]]
        first, _ = send(self.running[name].server, prompts, [adapter], 1)
        self.records.add(name, "fresh", case=family, load_s=round(load, 3), first_token_s=round(first, 3))
        self.records.say(f"{name}: fresh {family}: loaded in {load:.3f} s, first token after {first:.3f} s more")

    def _adapter_bytes(self) -> None:
        """What Scute says in its log that one adapter of each family takes in the arena."""
        log = self.running[SCUTE.name].server.log.read_text(errors="replace")
        for adapter, count in re.findall(r"adapter (\S+): .+, (\d+) bytes on this rank", log):
            family, _, number = adapter.rpartition("-")
            if number == "0" and not self.records.values(SCUTE.name, "bytes", family, "bytes"):
                self.records.add(SCUTE.name, "bytes", case=family, bytes=int(count))

    def _left(self) -> float:
        return self.args.deadline - self.records.seconds()

    def _check_deadline(self) -> None:
        if self._left() <= 0:
            raise DeadlinePassed(f"the deadline of {self.args.deadline:.0f} s had passed")


def gpu_arguments() -> list[str]:
    return [
        *("--dtype", "float16", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
        # Of the memory that other servers leave free. --max-total-tokens is what bounds the cache of each.
        *("--mem-fraction-static", "0.95", "--sleep-on-idle"),
        # Graphs of the sizes that the cases need: all of the usual ones would only make the starts longer.
        *("--cuda-graph-bs-decode", "1", "4", "16", "20", "64"),
        *("--cuda-graph-bs-prefill", "128", "512", "1024", "1536", "2048", "3072", "4096", "6144", "8192"),
    ]


def send(
    server: Server, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None] | None, tokens: int
) -> tuple[float, float | None]:
    """Send one burst; returns seconds until every prompt has its first token, and seconds per token from then on.

    ``adapters``: of each prompt; ``None`` for a server without LoRA. The second is ``None`` for one token.
    """
    body = {
        "input_ids": prompts,
        "stream": True,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": tokens,
            "ignore_eos": True,
            "stream_interval": max(1, tokens // ANSWERS),
        },
        **({} if adapters is None else {"lora_path": list(adapters)}),
    }
    began = time.perf_counter()
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=BURST_SECONDS) as response:
        response.raise_for_status()
        arrived = [(time.perf_counter(), line) for line in response.iter_lines() if line]
    answers: dict[int, list[tuple[float, int]]] = {i: [] for i in range(len(prompts))}  # when, tokens so far
    for at, line in arrived:
        content = line.removeprefix(b"data: ")
        if content == b"[DONE]":
            continue
        item = json.loads(content)
        if "error" in item:
            raise RuntimeError(item["error"])
        answers[item["index"]].append((at, item["meta_info"]["completion_tokens"]))
    if any(not given or given[-1][1] != tokens for given in answers.values()):
        raise RuntimeError(f"asked for {tokens} tokens of {len(prompts)} prompts, got {answers}")
    all_begun = max(given[0][0] for given in answers.values())
    if tokens == 1:
        return all_begun - began, None
    speeds = []
    for given in answers.values():
        # One that was answered in full before all had begun has none.
        later = [answer for answer in given if answer[0] >= all_begun]
        if later and later[0][1] < tokens:
            (start, tokens_then), (end, _) = later[0], later[-1]
            speeds.append((end - start) / (tokens - tokens_then))
    if not speeds:
        raise RuntimeError("no prompt was answered twice after all had begun: ask for more tokens")
    return all_begun - began, statistics.median(speeds)


class NotMeasured(LookupError):
    """A figure that a bar needs is missing; says which, and why."""


class Figures:
    """Medians of what was measured. Milliseconds and bytes."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def _median(self, setup: Setup, event: str, case: str, column: str) -> float:
        values = self.records.values(setup.name, event, case, column)
        if not values:
            raise NotMeasured(f"{setup.name}, {case}: {self.records.error(setup.name, case) or 'not run'}")
        return statistics.median(values)

    def token(self, setup: Setup, case: Case) -> float:
        return self._median(setup, "burst", case.name, "ms_per_token")

    def first(self, setup: Setup, case: Case) -> float:
        return self._median(setup, "burst", case.name, "ms_first")

    def added(self, setup: Setup, case: Case) -> float:
        """Milliseconds per token over a server without LoRA that answers 16 base requests."""
        return self.token(setup, case) - self.token(NO_LORA, BASE_16)

    def bytes(self, family: str) -> int:
        return int(self._median(SCUTE, "bytes", family, "bytes"))

    def fresh(self, family: str) -> float:
        """Seconds from asking for a fresh adapter to its first token."""
        parts = ("load_s", "first_token_s")
        return sum(self._median(SCUTE, "fresh", family, part) for part in parts)

    def sweep(self) -> dict[str, float]:
        """Scute over stock for each case of the sweep."""
        return {case.name: self.token(SCUTE, case) / self.token(STOCK_16, case) for case in SWEEP}


@dataclass(frozen=True)
class Bar:
    """``figure`` must be at most ``limit``, or at least if ``at_least``. ``remark``: shown beside it if it is known."""

    number: str
    what: str
    figure: Callable[[], float]
    limit: float
    aim: str
    at_least: bool = False
    remark: Callable[[], str] = lambda: ""

    def row(self) -> str:
        sign = "≥" if self.at_least else "≤"
        try:
            figure, remark = self.figure(), self.remark()
            shown = f"{figure:.4g}" if figure < 1e4 else f"{figure:.0f}"
            verdict = "yes" if (figure >= self.limit if self.at_least else figure <= self.limit) else "no"
        except NotMeasured as reason:
            shown, verdict, remark = "–", "not measured", str(reason)
        return f"| {self.number} | {self.what} | {shown} | {sign} {self.limit:g} | {self.aim} | {verdict} | {remark} |"


def bars(figures: Figures, shape: ModelShape) -> list[Bar]:
    token, first, added = figures.token, figures.first, figures.added
    sets = ((R16_16, STOCK_16, 16), (R64_16, STOCK_64, 64), (R256_16, STOCK_256, 256))

    def compare(case: Case, stock: Setup) -> Callable[[], float]:
        return lambda: added(SCUTE, case) / added(stock, case)

    def cost(case: Case, stock: Setup, rank: int) -> Callable[[], str]:
        moved = 16 * lora_bytes(rank, shape)
        floor = 1e3 * moved / BANDWIDTH
        return lambda: (
            f"adds {added(SCUTE, case):.2f} ms, stock {added(stock, case):.2f}; {moved / 1e9:.2f} GB, "
            f"{floor:.2f} ms at {BANDWIDTH / 1e12:g} TB/s, times 1.25: {1.25 * floor:.2f}"
        )

    (r16, r64, r256), costs = [compare(case, stock) for case, stock, _ in sets], [cost(*each) for each in sets]

    def largest() -> str:
        ratios = figures.sweep()
        return max(ratios, key=ratios.__getitem__)

    def resident() -> float:
        pair = (figures.bytes("ia3") + figures.bytes("vera-r256")) / 2
        return (RESIDENT_BYTES - vera_basis_bytes(256, shape)) // pair

    def each_fresh() -> str:
        return ", ".join(f"{family} {figures.fresh(family):.2f}" for family in METHODS)

    return [
        Bar(
            "1",
            "decode, 16 base requests: Scute / no LoRA",
            lambda: token(SCUTE, BASE_16) / token(NO_LORA, BASE_16),
            1.01,
            "1.00",
        ),
        Bar("2", "16 LoRA r16, added time: Scute / stock", r16, 1.0, "0.75", remark=costs[0]),
        Bar("3a", "16 LoRA r64, added time: Scute / stock", r64, 1.0, "1.25 × bytes", remark=costs[1]),
        Bar("3b", "16 LoRA r256, added time: Scute / stock", r256, 1.0, "1.25 × bytes", remark=costs[2]),
        Bar(
            "4",
            "20 tenants of five methods on Scute / 20 LoRA r16 on stock",
            lambda: token(SCUTE, FIVE_METHODS) / token(STOCK_16, R16_20),
            1.1,
            "1.00",
        ),
        Bar(
            "5",
            "the same on Scute / 20 LoRA r16 on Scute",
            lambda: token(SCUTE, FIVE_METHODS) / token(SCUTE, R16_20),
            1.1,
            "1.03",
        ),
        Bar(
            "6",
            "16 tenants of four methods, no VeRA / 16 LoRA r16, both on Scute",
            lambda: token(SCUTE, FOUR_METHODS) / token(SCUTE, R16_16),
            1.05,
            "1.00",
        ),
        Bar(
            "7",
            "4 DoRA r16 / 4 LoRA r16, both on Scute",
            lambda: token(SCUTE, DORA_4) / token(SCUTE, R16_4),
            1.01,
            "1.00",
        ),
        Bar(
            "8",
            "16 requests, VeRA r256: 16 tenants / 1 tenant, both on Scute",
            lambda: token(SCUTE, VERA_16) / token(SCUTE, VERA_ONE),
            1.02,
            "1.01",
        ),
        Bar(
            "9a",
            "16 VeRA r256 on Scute / 16 LoRA r256 on stock",
            lambda: token(SCUTE, VERA_16) / token(STOCK_256, R256_16),
            0.6,
            "0.48",
        ),
        Bar(
            "9b",
            "16 VeRA r256 on Scute / 16 LoRA r64 on stock",
            lambda: token(SCUTE, VERA_16) / token(STOCK_64, R64_16),
            0.9,
            "0.76",
        ),
        Bar(
            "10",
            "prefill 4 × 2048, time to first token, LoRA r16: Scute / stock",
            lambda: first(SCUTE, PREFILL_R16) / first(STOCK_16, PREFILL_R16),
            1.0,
            "0.95",
        ),
        Bar(
            "11a",
            "prefill, LoRA DoRA (IA)3 VeRA on Scute / LoRA r16 on stock",
            lambda: first(SCUTE, PREFILL_MIX) / first(STOCK_16, PREFILL_R16),
            1.1,
            "1.00",
        ),
        Bar(
            "11b",
            "prefill, DoRA (IA)3 VeRA OFT on Scute / LoRA r16 on stock",
            lambda: first(SCUTE, PREFILL_OFT) / first(STOCK_16, PREFILL_R16),
            1.1,
            "1.00",
        ),
        Bar(
            "14",
            "batches of 1, 4, 64; base, one adapter, distinct: largest Scute / stock r16",
            lambda: figures.sweep()[largest()],
            1.03,
            "",
            remark=largest,
        ),
        Bar(
            "15",
            "adapters resident in 2 GiB, half (IA)3, half VeRA r256",
            resident,
            1024,
            "",
            at_least=True,
            remark=lambda: f"bytes: (IA)3 {figures.bytes('ia3')}, VeRA {figures.bytes('vera-r256')}, and its pair once",
        ),
        Bar(
            "16",
            "64 requests, 64 adapters, half (IA)3, half VeRA, on Scute / 64 base, no LoRA",
            lambda: token(SCUTE, DISTINCT_64) / token(NO_LORA, BASE_64),
            1.15,
            "1.05",
        ),
        Bar(
            "18",
            "slowest load from disk to first token, s",
            lambda: max(figures.fresh(family) for family in METHODS),
            1.0,
            "0.3",
            remark=each_fresh,
        ),
    ]


def write_report(args: argparse.Namespace, records: Records) -> None:
    shape = MODELS[args.model_shape]
    commit = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("sglang", "torch", "triton"))
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    lines = [
        "# The server against stock SGLang",
        "",
        f"{time.strftime('%Y-%m-%d')}, {device}, commit {commit}, {versions}.",
        f"{shape.name} shapes, {shape.layers} layers, random weights. Decode: {PROMPT_TOKENS} tokens in, {args.tokens}",
        f"out; prefill: {PREFILL_TOKENS} in, 1 out. Medians of bursts after one to warm up. Stock is `triton_v2`.",
        "Made by `benchmarks/server.py`, which says how times are measured; all figures are in `server.csv`.",
        "It does not measure bars 12, 13 and 17.",
        "",
        "| # | what | figure | bar | aim | passed | remark |",
        "|---|---|---|---|---|---|---|",
        *(bar.row() for bar in bars(Figures(records), shape)),
        "",
        "| server | case | bursts | ms per token | least – most | ms to first token | least – most |",
        "|---|---|---|---|---|---|---|",
        *_case_rows(records, args.servers),
        "",
        "| server | start, s | adapters | adapters loaded | load, s: median | most |",
        "|---|---|---|---|---|---|",
        *_load_rows(records, args.servers),
        "",
        "Errors:",
        *(f"- {line}" for line in _errors(records)),
    ]
    (args.out / "server.md").write_text("\n".join(lines) + "\n")


def _case_rows(records: Records, servers: Sequence[str]) -> list[str]:
    rows = []
    for server in servers:
        for case in dict.fromkeys(r["case"] for r in records.rows if (r["server"], r["event"]) == (server, "burst")):
            cells = []
            for column in ("ms_per_token", "ms_first"):
                if values := records.values(server, "burst", case, column):
                    cells += [f"{statistics.median(values):.3f}", f"{min(values):.3f} – {max(values):.3f}"]
                else:
                    cells += ["", ""]
            bursts = len(records.values(server, "burst", case, "ms_first"))
            rows.append(f"| {server} | {case} | {bursts} | {' | '.join(cells)} |")
    return rows


def _load_rows(records: Records, servers: Sequence[str]) -> list[str]:
    rows = []
    for server in servers:
        for row in records.rows:
            if (row["server"], row["event"]) == (server, "start") and "load_s" in row:
                rows.append(f"| {server} | {row['load_s']:.0f} | | | | |")
        for family in FAMILIES.values():
            loads = [
                r for name in family.adapters(0, family.count) for r in records.values(server, "load", name, "load_s")
            ]
            if loads:
                median, most = statistics.median(loads), max(loads)
                rows.append(f"| {server} | | {family.name} | {len(loads)} | {median:.2f} | {most:.2f} |")
    return rows


def _errors(records: Records) -> list[str]:
    return [
        f"{row['server']} {row['event']} {row.get('case', '')}: {brief(row)}" for row in records.rows if "error" in row
    ] or ["none"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="where model and adapters lie meanwhile")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for results and logs")
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=ON_BY_DEFAULT, metavar="NAME")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a decode request")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which nothing new begins")
    parser.add_argument("--adapter-memory", default="24GiB", help="of Scute's server, which shares the GPU with others")
    parser.add_argument("--model-shape", choices=list(MODELS), default="Llama-3.1-8B")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the script out")
    parser.add_argument("--commit", help="shown in the report; asked from git if not given")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    records = Records(args.out / "server.csv")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers and files do not stay behind
    with tempfile.TemporaryDirectory(prefix="scute-", dir=args.work) as work:
        try:
            Bench(args, records, Path(work)).run()
        finally:
            write_report(args, records)
    print((args.out / "server.md").read_text())


if __name__ == "__main__":
    main()
