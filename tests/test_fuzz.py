"""A few hundred broken adapters, refused or loaded exactly; ``fuzz.py`` on demand does as many as one asks for."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fuzz
from scute_converter import Adapter, load
from test_converter import lora_tensors, write
from test_parity import CASES, save, shapes, toy

MUTANTS = 250


@pytest.mark.timeout(300)
def test_broken_adapters() -> None:
    reports = list(fuzz.run(seed=0, first=0, count=MUTANTS))
    assert [report.number for report in reports] == list(range(MUTANTS))
    findings = [report for report in reports if report.outcome == fuzz.FINDING]
    assert not findings, findings
    outcomes = Counter(report.outcome for report in reports)
    assert outcomes[fuzz.REFUSED] > MUTANTS / 2 and outcomes[fuzz.EXACT] > MUTANTS / 10, outcomes


@pytest.fixture
def sound(tmp_path: Path) -> tuple[Path, Adapter]:
    save(CASES["lora-r3"], tmp_path)
    return tmp_path, load(tmp_path, base=shapes(toy()))


# What the run above must notice


def test_a_wrong_number_is_noticed(sound: tuple[Path, Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, adapter = sound
    adapter.forms["layers.1.v_proj"].pair.b[1, 4] *= 1.1  # type: ignore[union-attr]
    monkeypatch.setattr(fuzz, "load", lambda *_: adapter)
    outcome, detail = fuzz.try_mutant(folder, adapter, toy())
    assert outcome == fuzz.FINDING and "layers.1.v_proj differs from PEFT" in detail


def test_the_network_is_noticed(sound: tuple[Path, Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, adapter = sound

    def look_up(*_: Any) -> Adapter:
        try:
            socket.getaddrinfo("localhost", 80)
        except Exception:
            return adapter
        return adapter

    monkeypatch.setattr(fuzz, "load", look_up)
    with pytest.raises(fuzz.NetworkUsed):
        fuzz.try_mutant(folder, adapter, toy())


def test_a_message_that_names_nobody_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, {"a": torch.ones(3)})
    adapter = load(write(tmp_path / "sound", lora_tensors()))
    monkeypatch.setattr(fuzz, "load", lambda folder, name, *_: load(folder, "other"))
    outcome, detail = fuzz.try_mutant(folder, adapter, toy())
    assert outcome == fuzz.FINDING and "message" in detail
