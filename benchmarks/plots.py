"""Redraws every plot from the CSV files of one folder of results.

    python benchmarks/plots.py benchmarks/results/h200

Reads ``server.csv`` (``server.py``), ``tune.csv`` (``tune.py``) and ``operators.csv`` (``operators.py``), and writes
SVG files beside them. A plot without rows is skipped, with a line that says so; so are cases whose names say neither
how many requests and adapters there are nor their method.

- ``*-tenants``: time over the number of adapters in a batch, with one request each and with a fixed number of requests.
- ``*-rank``: time over the rank of LoRA.
- ``*-predicted``: time measured over that of the byte model. Of server and tune it is the model of ``scute plan`` for
  the shapes and the GPU of the command line, of single operators that of ``operators.py``.

Points of ``server.csv`` are medians of bursts without the first. Its *added* time is that beyond as many base requests
on a server without LoRA; cases for which those were not measured are left out.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import matplotlib as mpl
import torch

mpl.use("Agg")
mpl.rcParams.update({"svg.hashsalt": "scute", "axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": "small"})

from matplotlib import pyplot as plt  # noqa: E402 - after the choice of what draws
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

from adapter_files import IA3_TARGETS, PROJECTIONS  # noqa: E402
from scute_converter import Adapter, Basis, NormalForm, Pair, Rotation, SharedPair  # noqa: E402
from scute_sglang.base_folder import BaseProjection  # noqa: E402
from scute_sglang.plan import GPUS, Gpu, Model, Tenant, decode_step  # noqa: E402
from shapes import MODELS, ModelShape  # noqa: E402

Row = Mapping[str, str]
Lines = Mapping[str, Sequence[tuple[float, float]]]

# "16 LoRA r16", "16 requests, one VeRA r256", "64 rows of 20 LoRA r16", "16 base"
_BATCH = re.compile(
    r"(?P<requests>\d+) (?:(?:requests,|rows of) (?P<tenants>one|\d+) )?"
    r"(?P<method>base|LoRA|DoRA|VeRA|OFT|\(IA\)3)(?: [rb](?P<size>\d+))?"
)
_STOCK_RANK = re.compile(r"-r\d+$")  # a stock server is started once per rank


@dataclass(frozen=True)
class Point:
    """A batch of one method. ``server``: as the CSV names it, without the rank. ``size``: rank, or block of OFT.
    ``time``: in the unit of its CSV."""

    server: str
    requests: int
    tenants: int
    method: str
    size: int
    time: float

    @property
    def adapters(self) -> str:
        return f"{self.method} r{self.size}" if self.size else self.method


def point(server: str, batch: str, time: float) -> Point | None:
    """``None`` if the name of the batch does not say what it is."""
    match = _BATCH.fullmatch(batch)
    if match is None:
        return None
    requests = int(match["requests"])
    tenants = {None: requests, "one": 1}.get(match["tenants"]) or int(match["tenants"])
    return Point(_STOCK_RANK.sub("", server), requests, tenants, match["method"], int(match["size"] or 0), time)


def server_points(rows: Iterable[Row]) -> list[Point]:
    """Milliseconds per token."""
    bursts: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row["event"] == "burst" and row["burst"] != "0" and row["ms_per_token"]:
            bursts[row["server"], row["case"]].append(float(row["ms_per_token"]))
    points = (point(server, case, statistics.median(times)) for (server, case), times in bursts.items())
    return [found for found in points if found is not None]


def tune_points(rows: Iterable[Row]) -> list[Point]:
    """Microseconds added per layer, with the parameters that were chosen."""
    points = (point("", row["batch"], float(row["us"])) for row in rows if row["stage"] == "final" and row["us"])
    return [found for found in points if found is not None]


# --- what the byte model predicts ------------------------------------------------------------------------------------


def added(points: Sequence[Point]) -> list[Point]:
    """Of the points with adapters, the time beyond that of as many base requests without LoRA."""
    base = {p.requests: p.time for p in points if p.server == "no-lora" and p.method == "base"}
    with_adapters = [p for p in points if p.method != "base" and p.requests in base]
    return [replace(p, time=p.time - base[p.requests]) for p in with_adapters]


@dataclass(frozen=True)
class Predictor:
    """The byte model for one shape and GPU. ``layers``: of the model, so many; with ``ends`` embedding and head."""

    shape: ModelShape
    gpu: Gpu
    layers: int
    ends: bool

    def seconds(self, batch: Point) -> float:
        """What a decode step of the batch takes beyond the base model."""
        model, tenant = _tenant(self, batch.method, batch.size)
        different = [replace(tenant, digest=str(i % batch.tenants)) for i in range(batch.requests)]
        return decode_step(model, different, self.gpu).seconds

    def model(self) -> Model:
        projections: dict[str, BaseProjection] = {}
        if self.ends:
            vocabulary, hidden = self.shape.vocabulary, self.shape.hidden
            name = "model.embed_tokens"
            projections[name] = BaseProjection(name, vocabulary, hidden, has_bias=False, embedding=True)
            projections["lm_head"] = BaseProjection("lm_head", hidden, vocabulary, has_bias=False)
        for layer in range(self.layers):
            for module in self.shape.modules:
                names = [f"model.layers.{layer}.{path}" for path in PROJECTIONS[module.name]]
                for name, width in zip(names, module.widths, strict=True):
                    projections[name] = BaseProjection(name, module.in_features, width, has_bias=False)
                if len(names) > 1:
                    fused = f"{names[0].rpartition('.')[0]}.{module.name}"
                    total = sum(module.widths)
                    projections[fused] = BaseProjection(
                        fused, module.in_features, total, has_bias=False, slices=tuple(names)
                    )
        return Model.of(projections)


@cache
def _tenant(predictor: Predictor, method: str, size: int) -> tuple[Model, Tenant]:
    """An adapter of the shapes that ``adapter_files.py`` writes; its numbers are undefined."""
    model = predictor.model()
    linear = [p for p in model.projections.values() if ".layers." in p.name and not p.slices]
    forms = {p.name: form for p in linear if (form := _form(p, method, size)) is not None}
    bases = {}
    if method == "VeRA":
        widest = max(p.in_features for p in linear), max(p.out_features for p in linear)
        bases["basis"] = Basis(torch.zeros(size, widest[0]), torch.zeros(size, widest[1]))
    return model, Tenant.of(method, Adapter(method, forms, bases, digest="", parameters=0), model)


def _form(projection: BaseProjection, method: str, size: int) -> NormalForm | None:
    inputs, outputs = projection.in_features, projection.out_features
    form = NormalForm(inputs, outputs)
    match method:
        case "LoRA" | "DoRA":
            form = replace(form, pair=Pair(torch.empty(size, inputs), torch.empty(size, outputs)))
            return form if method == "LoRA" else replace(form, scale_delta=torch.empty(outputs))
        case "VeRA":
            return replace(form, shared=SharedPair("basis", torch.empty(size), torch.empty(outputs)))
        case "OFT":
            return replace(form, rotation=Rotation(torch.empty(inputs // size, size, size)))
    leaf = projection.name.rpartition(".")[2]
    if leaf not in IA3_TARGETS:
        return None
    if leaf == "down_proj":
        return replace(form, rotation=Rotation(torch.empty(inputs, 1, 1)))
    return replace(form, scale_delta=torch.empty(outputs))


# --- what is drawn ---------------------------------------------------------------------------------------------------


def over_tenants(points: Iterable[Point]) -> tuple[Lines, Lines]:
    """Lines with one request for each adapter, and with a fixed number of requests; those of one point are left out."""
    each: dict[str, list[tuple[float, float]]] = defaultdict(list)
    fixed: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for p in points:
        if p.requests == p.tenants:
            each[f"{p.server} {p.adapters}".strip()].append((p.tenants, p.time))
        if p.method != "base":
            fixed[f"{p.server} {p.requests} requests, {p.adapters}".strip()].append((p.tenants, p.time))
    return _lines(each), _lines(fixed)


def over_rank(points: Iterable[Point]) -> Lines:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for p in points:
        if p.method == "LoRA" and p.requests == p.tenants:
            found[f"{p.server} {p.requests} LoRA".strip()].append((p.size, p.time))
    return _lines(found)


def _lines(found: Mapping[str, list[tuple[float, float]]]) -> Lines:
    """Sorted, and those with at least two places on the x axis."""
    return {name: sorted(places) for name, places in found.items() if len(dict(places)) > 1}


def predicted(points: Iterable[Point], predictor: Predictor, unit: float) -> Lines:
    """Predicted and measured time of each batch. ``unit``: seconds of the points' unit."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for p in points:
        if p.method != "base" and p.server in ("", "scute"):
            found[p.adapters].append((predictor.seconds(p) / unit, p.time))
    return found


def predicted_operators(rows: Iterable[Row]) -> Lines:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        predicted = float(row["microseconds_by_moving"]) + float(row["microseconds_latency"])
        place = predicted, float(row["microseconds"])
        found[f"{row['phase']}, {row['operator']}"].append(place)
    return found


def draw_lines(axes: Axes, lines: Lines, x: str, y: str) -> None:
    for name, places in lines.items():
        axes.plot(*zip(*places, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend()


def draw_predicted(axes: Axes, lines: Lines, unit: str) -> None:
    """Both axes alike, with the line on which prediction and measurement are equal."""
    for name, places in lines.items():
        axes.scatter(*zip(*places, strict=True), label=name)
    values = [value for places in lines.values() for place in places for value in place if value > 0]
    ends = min(values) / 1.5, max(values) * 1.5
    axes.plot(ends, ends, color="grey", linewidth=1, label="equal")
    axes.set(xscale="log", yscale="log", xlabel=f"{unit} by the byte model", ylabel=f"{unit} measured")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.legend()


def save(path: Path, title: str, panels: Sequence[Callable[[Axes], None]]) -> None:
    """One figure, the same file for the same numbers."""
    figure, axes = plt.subplots(1, len(panels), figsize=(6.4 * len(panels), 4.8), squeeze=False, layout="constrained")
    for draw, place in zip(panels, axes[0], strict=True):
        draw(place)
    figure.suptitle(title)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(f"{path}: drawn")


def draw_all(folder: Path, shape: ModelShape, gpu: Gpu) -> None:
    """Every plot for which ``folder`` has the rows."""
    server, tune, operators = (_read(folder / f"{name}.csv") for name in ("server", "tune", "operators"))
    measured, tuned = server_points(server), tune_points(tune)
    milliseconds, microseconds = "added ms per token", "added µs per layer"
    whole = Predictor(shape, gpu, shape.layers, ends=True)
    one_layer = Predictor(shape, gpu, 1, ends=False)

    for name, points, y in (("server", measured, "ms per token"), ("tune", tuned, microseconds)):
        each, fixed = over_tenants(points)
        panels = []
        if each:
            panels.append(partial(draw_lines, lines=each, x="adapters, one request each", y=y))
        if fixed:
            panels.append(partial(draw_lines, lines=fixed, x="adapters of all requests", y=y))
        _save_or_skip(folder / f"{name}-tenants.svg", f"{name}.csv: time over tenants", panels)
        ranks = over_rank(points)
        panels = [partial(draw_lines, lines=ranks, x="rank", y=y)] if ranks else []
        _save_or_skip(folder / f"{name}-rank.svg", f"{name}.csv: time over rank", panels)

    for name, lines, unit in (
        ("server", predicted(added(measured), whole, 1e-3), milliseconds),
        ("tune", predicted(tuned, one_layer, 1e-6), microseconds),
        ("operators", predicted_operators(operators), "µs"),
    ):
        panels = [partial(draw_predicted, lines=lines, unit=unit)] if lines else []
        title = f"{name}.csv: predicted and measured"
        _save_or_skip(folder / f"{name}-predicted.svg", title, panels)


def _save_or_skip(path: Path, title: str, panels: Sequence[Callable[[Axes], None]]) -> None:
    if panels:
        save(path, title, panels)
    else:
        print(f"{path}: skipped, {title.partition(':')[0]} is absent or has no rows for it")


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("benchmarks/results/h200"))
    parser.add_argument("--model-shape", choices=list(MODELS), default="Llama-3.1-8B", help="what was measured")
    parser.add_argument("--gpu", choices=list(GPUS), default="h200", help="on which GPU")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"there is no folder {arguments.folder}")
    draw_all(arguments.folder, MODELS[arguments.model_shape], GPUS[arguments.gpu])


if __name__ == "__main__":
    main()
