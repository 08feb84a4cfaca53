"""Plots are drawn from the CSV files that there are, and from the right numbers in them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import plots
from scute_sglang.plan import GPUS, IN_LINE, Gpu
from shapes import MODELS

TINY = MODELS["tiny"]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def bursts(server: str, case: str, *times: float) -> list[dict[str, Any]]:
    """The first is the warm-up."""
    common = {"server": server, "event": "burst", "case": case}
    return [{**common, "burst": i, "ms_per_token": time} for i, time in enumerate(times)]


SERVER = [
    {"server": "scute", "event": "start", "case": "", "burst": "", "ms_per_token": ""},
    *bursts("no-lora", "16 base", 99, 5, 4, 6),
    *bursts("triton_v2-r16", "16 LoRA r16", 99, 7, 8, 9),
    *bursts("triton_v2-r64", "16 LoRA r64", 99, 12),
    *bursts("scute", "16 LoRA r16", 99, 6, 7, 6.5),
    *bursts("scute", "4 LoRA r16", 99, 5.5),
    *bursts("scute", "16 requests, one VeRA r256", 99, 6),
    *bursts("scute", "16 VeRA r256", 99, 6.25),
    *bursts("scute", "20 of five methods", 99, 8),
    *bursts("scute", "prefill, 4 LoRA r16", "", ""),
]


def test_points_are_medians_of_bursts() -> None:
    read = [{name: str(value) for name, value in row.items()} for row in SERVER]
    points = plots.server_points(read)
    each, fixed = plots.over_tenants(points)
    assert each == {"scute LoRA r16": [(4, 5.5), (16, 6.5)]}
    assert fixed == {"scute 16 requests, VeRA r256": [(1, 6), (16, 6.25)]}
    assert plots.over_rank(points) == {"triton_v2 16 LoRA": [(16, 8), (64, 12)]}
    added = {(p.server, p.tenants, p.adapters): p.time for p in plots.added(points)}
    assert added == {
        ("triton_v2", 16, "LoRA r16"): 3,
        ("triton_v2", 16, "LoRA r64"): 7,
        ("scute", 16, "LoRA r16"): 1.5,
        ("scute", 1, "VeRA r256"): 1,
        ("scute", 16, "VeRA r256"): 1.25,
    }


@pytest.mark.parametrize(("tenants", "requests"), [(1, 1), (3, 3), (3, 7)])
def test_prediction(tenants: int, requests: int) -> None:
    """On a GPU so slow that everything takes its bytes: 768 inputs and 736 outputs of a layer, 32 of v begin those of
    q. With its vectors a VeRA has 736 + 7 * rank elements, and the pair 480 inputs and 96 + 96 + 192 + 96 outputs; and
    at each of the four modules an expand adds what was made beside the base layer."""
    predictor = plots.Predictor(TINY, Gpu("slow", 1e5, copied=1e5), layers=1, ends=False)
    batch = plots.Point("", requests, tenants, "LoRA", 3, time=0)
    assert predictor.seconds(batch) == pytest.approx(tenants * 2 * 3 * (768 + 736) / 1e5)
    batch = plots.Point("", requests, tenants, "VeRA", 11, time=0)
    elements = tenants * (736 + 7 * 11) + 11 * (480 + 480)
    assert predictor.seconds(batch) == pytest.approx(2 * elements / 1e5 + 4 * IN_LINE)


def test_prediction_of_the_whole_model_has_its_ends() -> None:
    """Embedding and head cost launches only."""
    layers = plots.Predictor(TINY, GPUS["h200"], TINY.layers, ends=False)
    whole = plots.Predictor(TINY, GPUS["h200"], TINY.layers, ends=True)
    batch = plots.Point("", 2, 2, "DoRA", 4, time=0)
    assert 0 < whole.seconds(batch) - layers.seconds(batch) < IN_LINE


def test_plots_are_drawn_from_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "server.csv", SERVER)
    operator = {"phase": "decode", "operator": "shrink", "microseconds": 4.5}
    operator |= {"microseconds_by_moving": 2.25, "microseconds_latency": 0.5}
    write(tmp_path / "operators.csv", [operator, {**operator, "operator": "expand", "microseconds": 3.5}])
    plots.draw_all(tmp_path, TINY, GPUS["h200"])
    lines = capsys.readouterr().out.splitlines()
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn == {"server-tenants.svg", "server-rank.svg", "server-predicted.svg", "operators-predicted.svg"}
    assert sum(line.endswith(": drawn") for line in lines) == 4
    skipped = [line for line in lines if "tune.csv is absent or has no rows for it" in line]
    assert len(skipped) == 3 and len(lines) == 7
    before = (tmp_path / "server-predicted.svg").read_bytes()
    plots.draw_all(tmp_path, TINY, GPUS["h200"])
    assert (tmp_path / "server-predicted.svg").read_bytes() == before


def test_final_rows_of_tune_are_drawn(tmp_path: Path) -> None:
    rows = [
        {"stage": "expand", "batch": "1 LoRA r3", "us": 99},
        {"stage": "final", "batch": "1 LoRA r3", "us": 12},
        {"stage": "final", "batch": "4 LoRA r3", "us": 15},
        {"stage": "final", "batch": "4 LoRA r12", "us": 17},
        {"stage": "final", "batch": "4: LoRA DoRA (IA)3 VeRA", "us": 30},
        {"stage": "final", "batch": "4 rows of one LoRA r3", "us": 13},
    ]
    write(tmp_path / "tune.csv", rows)
    plots.draw_all(tmp_path, TINY, GPUS["h200"])
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        *("tune-tenants.svg", "tune-rank.svg", "tune-predicted.svg")
    }
    points = plots.tune_points([{name: str(value) for name, value in row.items()} for row in rows])
    assert plots.over_rank(points) == {"4 LoRA": [(3, 15), (12, 17)]}
