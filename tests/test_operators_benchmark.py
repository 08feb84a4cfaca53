"""The parts of benchmarks/operators.py that need no GPU: bytes by hand, bars and regressions from rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import operators
from operators import CHUNK, DECODE, DORA, IA3, LORA, PREFILL, Batch, Case
from shapes import Module
from sites import Method

QKV, DOWN = Module("qkv_proj", 96, (112, 48, 32)), Module("down_proj", 8192, (80,))


def row(
    operator: str, microseconds: float, by_bytes: float = 1.0, latency: float = 0.0, **place: Any
) -> dict[str, Any]:
    defaults = {"phase": DECODE, "rows": 16, "adapters": 16, "method": LORA.name, "module": "o_proj"}
    return {
        "operator": operator,
        **defaults,
        **place,
        "microseconds": microseconds,
        "microseconds_by_bytes": by_bytes,
        "microseconds_by_moving": 1.1 * by_bytes,
        "microseconds_latency": latency,
    }


def expand(microseconds: float, method: Method, **place: Any) -> dict[str, Any]:
    return row("expand", microseconds, method=method.name, phase=CHUNK, **place)


def bar(rows: list[dict[str, Any]], number: int, launch_us: float = 0.8) -> operators.Bar:
    return next(found for found in operators.bars(rows, launch_us) if found.number == number)


@pytest.mark.parametrize(("adapters", "counts"), [(1, [1024]), (3, [342, 341, 341]), (4, [256] * 4)])
def test_rows_are_divided_among_adapters(adapters: int, counts: list[int]) -> None:
    assert Batch(CHUNK, 1024, adapters).counts == counts


def test_bytes_of_a_low_rank_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows of two adapters in fp16; with two planes of v, each is written and read."""
    batch = Batch(DECODE, 5, 2)
    monkeypatch.setattr(operators.launch, "shrink_split", lambda *_: 2)
    case = Case(batch, Method("DoRA r3", rank=3, scale=True), QKV, torch.float16)
    v = 2 * 5 * 3 * 3 * 4
    assert case.operators == ("shrink", "expand")
    assert case.moved("shrink") == 2 * (2 * 3 * 3 * 96 + 5 * 96) + v
    assert case.moved("expand") == 2 * (2 * (3 * 192 + 192) + 2 * 5 * 192) + v


def test_bytes_of_a_shared_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a and one b, the longest prefix, for all adapters and slices; a u, a d and an e for each slice. In decode
    shared_expand writes an addend in fp32, which expand adds; in prefill it adds to h, and expand has nothing to do."""
    monkeypatch.setattr(operators.launch, "shrink_split", lambda *_: 3)
    method = Method("VeRA r7", basis_rank=7)
    decode, prefill = (Case(Batch(phase, 5, 2), method, QKV, torch.float16) for phase in (DECODE, PREFILL))
    u, addend = 3 * 5 * 3 * 7 * 4, 5 * 192 * 4
    assert set(decode.operators) == {"shared_shrink", "shared_expand", "expand"}
    assert set(prefill.operators) == {"shared_shrink", "shared_expand"}
    for case in (decode, prefill):
        assert case.moved("shared_shrink") == 2 * (7 * 96 + 2 * 3 * 7 + 5 * 96) + u
    assert decode.moved("shared_expand") == 2 * (7 * 112 + 2 * 192) + u + addend
    assert decode.moved("expand") == addend + 2 * 2 * 5 * 192
    assert prefill.moved("shared_expand") == 2 * (7 * 112 + 2 * 192 + 2 * 5 * 192) + u


def test_bytes_of_outputs_are_moved_in_place() -> None:
    """Of ``h`` only what a call touches; what is written elsewhere is a copy."""
    low_rank, vera = Method("LoRA r7", rank=7), Method("VeRA r7", basis_rank=7)
    decode, prefill = (Case(Batch(phase, 5, 2), vera, QKV, torch.float16) for phase in (DECODE, PREFILL))
    touched = 2 * 2 * 5 * 192
    assert Case(Batch(PREFILL, 5, 2), low_rank, QKV, torch.float16).in_place("expand") == touched
    assert decode.in_place("expand") == prefill.in_place("shared_expand") == touched
    assert decode.in_place("shared_expand") == prefill.in_place("shared_shrink") == 0
    scales = Case(Batch(PREFILL, 5, 2), IA3, QKV, torch.float16)
    assert scales.in_place("expand") == 2 * 2 * 5 * 80


def test_bytes_of_scales_and_rotations() -> None:
    """(IA)3 leaves the columns of q alone, and scales the input of down_proj only."""
    batch = Batch(DECODE, 5, 2)
    qkv, down = (Case(batch, IA3, module, torch.float16) for module in (QKV, DOWN))
    assert (qkv.operators, down.operators) == (("expand",), ("rotate",))
    assert qkv.moved("expand") == 2 * (2 * 80 + 2 * 5 * 80)
    assert down.moved("rotate") == 2 * (2 * 8192 + 2 * 5 * 8192)
    rotation = Case(batch, Method("OFT b32", block=32), QKV, torch.float16)
    assert rotation.operators == ("rotate", "expand")
    assert rotation.moved("rotate") == 2 * (2 * 3 * 96 * 32 + 5 * 96 + 3 * 5 * 96)
    assert rotation.moved("expand") == 2 * 2 * 5 * (48 + 32)  # k and v from rows of their own


def test_bar_of_the_scale_is_the_median_of_pairs() -> None:
    places = [{"rows": rows, "adapters": 3, "module": module} for rows in (1024, 4096) for module in ("a", "b")]
    ratios = [1.01, 0.99, 1.05, 1.03]
    rows = [expand(10.0, LORA, **place) for place in places]
    rows += [expand(10.0 * ratio, DORA, **place) for place, ratio in zip(places, ratios, strict=True)]
    rows.append(row("expand", 99.0, method=DORA.name, phase=PREFILL))  # another batch
    rows.append(expand(99.0, DORA, rows=1024, adapters=1, module="a"))  # of no pair
    found = bar(rows, 12)
    assert found.figure == pytest.approx(1.02)
    assert found.met == "yes"
    assert found.remark == "4 pairs, 0.990 to 1.050"
    assert (
        bar([*rows, *(expand(t, m, rows=9, adapters=1, module="a") for m, t in ((LORA, 1), (DORA, 2)))], 12).met == "no"
    )


def test_bar_of_the_byte_model_counts_what_outweighs_a_launch() -> None:
    """Copies take a tenth more than bytes. Errors 10, 20 and 25 %, and 20, 10 and 50 % by bytes alone; the row of 0.7
    us would be wrong by 92 %."""
    rows = [
        row("shrink", 10.0, 8.0, latency=0.2),
        row("expand", 2.0, 1.8, latency=0.42),
        row("expand", 2.0, 1.0, latency=0.4),
        row("expand", 10.0, 0.7),
    ]
    found = bar(rows, 13)
    assert found.figure == pytest.approx(0.2)
    assert found.met == "no"
    assert found.remark == "3 of 4 rows; by bytes alone 0.200"
    assert bar(rows[:2], 13, launch_us=3.0).figure == pytest.approx(0.1)
    assert bar(rows[:1], 13).met == "yes"
    assert operators.error_table(rows, 0.8) == [
        "| decode | shrink | 1 | 0.100 | 0.100 |",
        "| decode | expand | 2 | 0.225 | 0.250 |",
    ]


def test_bars_without_rows_are_not_measured() -> None:
    assert [found.met for found in operators.bars([], 0.8)] == ["not measured"] * 2


def test_regressions_are_named() -> None:
    earlier = [
        row("shrink", 10.0),
        row("expand", 10.0),
        row("expand", 10.0, module="down_proj"),
        row("rotate", 10.0, rows=8192, adapters=4),
    ]
    as_read = [{name: str(value) for name, value in was.items()} for was in earlier]
    now = [row("shrink", 11.0), row("expand", 11.1), row("expand", 5.0, module="down_proj"), row("shared_expand", 9.0)]
    assert operators.regressions(now, as_read) == [
        "expand: decode, 16 rows of 16 LoRA r16, o_proj: 11.10 us, 10.00 us before, 1.11 times",
        "rotate: decode, 8192 rows of 4 LoRA r16, o_proj: not measured, 10.00 us before",
    ]
    assert operators.regressions(earlier, as_read) == []


def test_moves_between_the_measured_ones() -> None:
    moves = operators.Moves(moved=[1000, 4000], taken=[2e-6, 5e-6])
    assert moves.bandwidth == pytest.approx(8e8)
    assert moves.seconds(1000, launch=0.5e-6) == pytest.approx(1.5e-6)
    assert moves.seconds(2000, launch=0.5e-6) == pytest.approx(2.5e-6)
    assert moves.seconds(500, launch=0.5e-6) == pytest.approx(0.75e-6)  # nothing is moved in a launch
    assert moves.seconds(500, launch=3e-6) == 0
    assert moves.seconds(8000, launch=0.5e-6) == pytest.approx(1e-5)
