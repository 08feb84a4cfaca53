"""Breaks sound adapters of every method in thousands of ways, and loads what comes out.

    python tests/fuzz.py --mutations 10000

Each mutant must be refused with an ``AdapterError`` that names it, or be loaded; what PEFT can load too must compute
the same. Loading happens in a process of its own, where memory is limited, the network fails, time is measured, and the
file that the pickles among the mutants would write must not appear. Everything else is a finding, and the command ends
with exit code 1. A mutant is made from ``--seed`` and its number alone: ``--first 123 --mutations 1`` makes it again.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import peft
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

from scute_converter import Adapter, AdapterError, load, native, reference
from scute_converter.files import BIN, CONFIG, SAFETENSORS
from scute_converter.registry import METHODS
from test_parity import CASES, toy
from test_parity import save as save_case
from test_parity import shapes as shapes_of

SECONDS = 5  # of one load; a sound one takes a few hundredths
ADDRESS_SPACE = 2 << 30  # more than the process has before its first load
GROWTH = 512 << 20  # of resident memory, by one load
# PEFT and the reference add up other terms in fp32, and mutated values may be far apart.
TOLERANCE = 1e-3
NAME = "mutant"
TRACE = "trace"  # what the pickles write

# Outcomes of a mutant
REFUSED = "refused"
EXACT = "as PEFT"  # loaded, and PEFT computes the same
SAME = "as before"  # loaded with the content of the sound adapter; PEFT cannot load it
NATIVE = "own format"  # loaded; nothing to compare with
UNCHECKED = "PEFT fails"  # loaded; PEFT cannot load or run it
DRAWN = "PEFT drops"  # loaded; PEFT ignores tensors, or draws missing ones at random
OVERFLOW = "overflow"  # loaded; in PEFT's fp32 the results are not finite
FINDING = "FINDING"
OUTCOMES = (REFUSED, EXACT, SAME, NATIVE, UNCHECKED, DRAWN, OVERFLOW, FINDING)


@dataclass(frozen=True)
class Report:
    number: int
    outcome: str
    kind: str
    detail: str
    seconds: float
    growth: int


# --- Sound adapters -------------------------------------------------------------------------------------------------


def write_sound(folder: Path) -> list[str]:
    """One adapter of every variant that is served, as PEFT writes it; some also as ``.bin``, and in Scute's format."""
    names = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in CASES.values():
            if case.method not in names and case.dtype == torch.float32:
                save_case(case, folder / case.method)
                names.append(case.method)
        model = peft.get_peft_model(toy(), peft.PolyConfig(target_modules=["q_proj", "o_proj"], r=6, n_skills=2))
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
        model.save_pretrained(folder / "Poly")
        names.append("Poly")
    bone = folder / "Bone"  # PEFT writes MiSS in its place
    tensors = {key.replace("miss_", "bone_"): value for key, value in load_file(folder / "MiSS" / SAFETENSORS).items()}
    config = json.loads((folder / "MiSS" / CONFIG).read_text())
    config = {key: config[key] for key in ("base_model_name_or_path", "r", "target_modules", "bias", "task_type")}
    bone.mkdir()
    save_file(tensors, bone / SAFETENSORS)
    (bone / CONFIG).write_text(json.dumps(config | {"peft_type": "BONE", "init_weights": True}))
    names.append("Bone")
    for name in ("LoRA", "DoRA", "VeRA", "OFT"):
        copied = folder / f"{name}.bin"
        shutil.copytree(folder / name, copied)
        torch.save(load_file(copied / SAFETENSORS), copied / BIN)
        (copied / SAFETENSORS).unlink()
        names.append(copied.name)
    shapes = shapes_of(toy())
    for name in ("LoRA", "(IA)3", "VeRA", "OFT", "LoHa"):
        adapter = load(folder / name, base=shapes)
        sizes = {path: dict(zip(("out_features", "in_features"), shapes[path], strict=True)) for path in adapter.forms}
        forms = {path: replace(form, **sizes[path]) for path, form in adapter.forms.items()}
        native.write(replace(adapter, forms=forms), folder / f"{name}.scute", name)
        names.append(f"{name}.scute")
    found = {json.loads((folder / name / CONFIG).read_text())["peft_type"] for name in names if ".scute" not in name}
    assert found == set(METHODS), set(METHODS) ^ found
    return names


# --- Mutations of a file's bytes --------------------------------------------------------------------------------------


def changed_bytes(draw: random.Random, content: bytes) -> bytes:
    """Cut off, flipped, overwritten, doubled, left out: anywhere, but often near the start, where headers are."""
    size = len(content)
    at = draw.randrange(size) if draw.random() < 0.5 else min(size - 1, int(draw.expovariate(1 / 200)))
    length = min(size - at, draw.choice([1, 1, 2, 8, 64, 1000]))
    return draw.choice(
        [
            lambda: content[:at],
            lambda: content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
            lambda: content[:at] + draw.randbytes(length) + content[at + length :],
            lambda: content[:at] + bytes(length) + content[at + length :],
            lambda: content[:at] + content[at : at + length] * 2 + content[at + length :],
            lambda: content[:at] + content[at + length :],
            lambda: content + draw.randbytes(length),
            lambda: b"",
            lambda: draw.randbytes(length),
        ]
    )()


def mutate_bytes(draw: random.Random, folder: Path) -> str:
    file = draw.choice(files_of(folder))
    content = file.read_bytes()
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        content = changed_bytes(draw, content) or b"\0"
    file.write_bytes(content)
    return file.name


def files_of(folder: Path) -> list[Path]:
    known = (CONFIG, SAFETENSORS, BIN, native.HEADER, native.WEIGHTS)
    return [folder / name for name in known if (folder / name).exists()]


# --- Mutations of JSON ------------------------------------------------------------------------------------------------

ODD_NAMES = ["", "..", "../../etc", "/", "a\0b", "\n", "\x1b[2J", "\u202e", "\udcff", "😀", "x" * 3000, ".", "default"]
ODD_NAMES += ["module", "base_model.model", "_orig_mod", "lora_A", "weight", "q_proj", "__proto__", "a/b", " "]
PATTERNS = [
    "(a|a)*b",
    "(.*)*x",
    ".*.*.*.*.*.*.*.*q",
    "(",
    "[",
    "(?i)Q",
    r"(.)\1",
    ".*",
    "q_proj|v_proj",
    "(a?){60}b",
    "*",
]
NUMBERS = [0, 1, -1, 2, 3, 7, 64, 4096, 10**6, 2**31, 2**63 - 1, 2**63, 10**30, 10**400, 0.5, -0.5, 1e-9, 1e30, 1e300]
NUMBERS += [float("nan"), float("inf"), float("-inf")]


def any_value(draw: random.Random, depth: int = 0) -> Any:
    choices: list[Callable[[], Any]] = [
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice([None, True, False, "", [], {}]),
        lambda: draw.choice(ODD_NAMES),
        lambda: draw.choice(PATTERNS),
        lambda: draw.choice(["all", "none", "lora_only", "LORA", "vector", "0.17.0", "pissa", "mini", "relu"]),
    ]
    if depth < 3:
        choices += [
            lambda: [any_value(draw, depth + 1) for _ in range(draw.choice([1, 2, 300]))],
            lambda: {draw.choice([*ODD_NAMES, *PATTERNS]): any_value(draw, depth + 1) for _ in range(3)},
        ]
    return draw.choice(choices)()


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in JSON."""
    found = [path] if path else []
    if isinstance(content, dict):
        return found + [place for key in content for place in places(content[key], (*path, key))]
    if isinstance(content, list):
        return found + [place for key, item in enumerate(content) for place in places(item, (*path, key))]
    return found


def changed_json(draw: random.Random, content: Any) -> None:
    """In place: one value replaced, removed, or added."""
    path = draw.choice(places(content) or [("added",)])
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    how = draw.random()
    if how < 0.15:
        del parent[path[-1]]
    elif how < 0.3 and isinstance(parent, dict):
        parent[draw.choice([*ODD_NAMES, "r", "alpha", "bias", "use_dora", "target_parameters"])] = any_value(draw)
    elif how < 0.5 and isinstance(parent[path[-1]], (int, float)):
        parent[path[-1]] = draw.choice([*NUMBERS, parent[path[-1]] + 1, parent[path[-1]] * 2])
    else:
        parent[path[-1]] = any_value(draw)


def odd_text(draw: random.Random, text: str) -> bytes:
    """JSON that is none, or hardly."""
    body = text.strip()[1:-1]
    plain = text.encode("utf-8", "surrogatepass")
    return draw.choice(
        [
            lambda: ("{" + body + "," + body + "}").encode("utf-8", "surrogatepass"),  # every key twice
            lambda: b"\xef\xbb\xbf" + plain,
            lambda: text.encode("utf-16", "surrogatepass"),
            lambda: plain + b" trailing",
            lambda: b'{"a":' * 100_000,
            lambda: b"[" * 100_000 + b"]" * 100_000,
            lambda: b'{"a":' * 500 + b"1" + b"}" * 500,
            lambda: plain + b" " * (2 << 20),
            lambda: b'{"r": ' + b"9" * 10_000 + b"}",
            lambda: b"[1]",
            lambda: b"null",
            lambda: plain.replace(b'"', b"'"),
        ]
    )()


def mutate_config(draw: random.Random, folder: Path) -> str:
    name = native.HEADER if (folder / native.HEADER).exists() else CONFIG
    content = json.loads((folder / name).read_text())
    if draw.random() < 0.1 and name == CONFIG:
        content["peft_type"] = draw.choice(sorted(METHODS))
    else:
        for _ in range(draw.choice([1, 1, 1, 2, 4])):
            changed_json(draw, content)
    (folder / name).write_text(json.dumps(content))
    return name


def mutate_config_text(draw: random.Random, folder: Path) -> str:
    name = native.HEADER if (folder / native.HEADER).exists() else CONFIG
    (folder / name).write_bytes(odd_text(draw, (folder / name).read_text()))
    return name


def mutate_scale(draw: random.Random, folder: Path) -> str:
    """Sound changes of numbers that PEFT reads as well."""
    content = json.loads((folder / CONFIG).read_text())
    numbers = [key for key in content if type(content[key]) in (int, float)]
    key = draw.choice(numbers or ["lora_alpha"])
    content[key] = draw.choice([content.get(key, 1) * 2, content.get(key, 1) + 1, 0.25, 3, 1, 17])
    if draw.random() < 0.5:
        modules = ["q_proj", "layers.0.v_proj", r"layers\.1\..*_proj", ".*"]
        content["alpha_pattern"] = {module: draw.choice([1, 3, 0.5]) for module in draw.sample(modules, 2)}
    (folder / CONFIG).write_text(json.dumps(content))
    return key


# --- Mutations of tensors ---------------------------------------------------------------------------------------------


def any_tensor(draw: random.Random) -> torch.Tensor:
    shape = [draw.choice([0, 1, 2, 3, 6, 18, 30, 42]) for _ in range(draw.randrange(5))]
    return torch.full(shape, draw.choice([0.0, 1.0, -2.0, 1e-30]))


def changed_tensor(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.float8_e4m3fn:  # made so by a mutation before this one; torch does not compute with it
        tensor = tensor.float()
    index = draw.randrange(max(1, tensor.numel()))
    bad = draw.choice([float("nan"), float("inf"), -float("inf"), 3e38, 1e-40, 0.0])
    types = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn]

    def with_one() -> torch.Tensor:
        flat = tensor.reshape(-1).clone()
        if flat.numel():
            flat[index] = torch.tensor(bad).to(tensor.dtype)
        return flat.view(tensor.shape)

    return draw.choice(
        [
            with_one,
            lambda: torch.full_like(tensor, 0),
            lambda: tensor * draw.choice([2, -1, 1e-3, 1e3]) if tensor.is_floating_point() else tensor + 1,
            lambda: tensor[torch.arange(len(tensor) - 1, -1, -1)] if tensor.dim() else tensor,
            lambda: tensor.transpose(0, -1).contiguous() if tensor.dim() else tensor,
            tensor.flatten,
            lambda: tensor[None],
            lambda: tensor[..., :-1].contiguous() if tensor.dim() else tensor,
            lambda: tensor[1:].contiguous() if tensor.dim() else tensor,
            lambda: torch.cat([tensor, tensor]) if tensor.dim() else tensor,
            lambda: tensor.to(draw.choice(types)),
            lambda: any_tensor(draw),
        ]
    )()


def mutate_tensors(draw: random.Random, folder: Path) -> str:
    tensors, write = tensors_of(folder)
    keys = list(tensors)
    what = []
    for _ in range(draw.choice([1, 1, 1, 2, 6])):
        key = draw.choice(keys)
        if key not in tensors:
            continue
        how = draw.choice(["value", "value", "value", "remove", "rename", "double", "add", "order", "swap", "parts"])
        what.append(how)
        if how == "value":
            tensors[key] = changed_tensor(draw, tensors[key])
        elif how == "remove":
            del tensors[key]
        elif how == "rename":
            tensors[renamed(draw, key)] = tensors.pop(key)
        elif how == "double":
            tensors[renamed(draw, key)] = tensors[key].clone()
        elif how == "add":
            tensors[draw.choice(ODD_NAMES) + draw.choice(["", ".weight", "." + key])] = any_tensor(draw)
        elif how == "order":
            shuffled = draw.sample(list(tensors), len(tensors))
            tensors = {name: tensors[name] for name in shuffled}
        elif how == "swap":
            other = draw.choice(list(tensors))
            tensors[key], tensors[other] = tensors[other], tensors[key].clone()
        else:  # every tensor of one module
            module = key.rpartition(".layers.")[2].split(".")[:2]
            for name in [name for name in tensors if ".".join(module) in name]:
                tensors[name] = changed_tensor(draw, tensors[name])
    write(tensors)
    return ", ".join(what)


def renamed(draw: random.Random, key: str) -> str:
    parts = key.split(".")
    at = draw.randrange(len(parts))
    return draw.choice(
        [
            lambda: ".".join([*parts[:at], draw.choice(ODD_NAMES), *parts[at + 1 :]]),
            lambda: ".".join([*parts[:at], draw.choice(ODD_NAMES), *parts[at:]]),
            lambda: ".".join([*parts[:at], draw.choice(["_orig_mod", "module", "default"]), *parts[at:]]),
            lambda: key.replace("layers.0", "layers.9"),
            lambda: key.removeprefix("base_model.model."),
            lambda: key + ".weight",
            key.upper,
        ]
    )()


def tensors_of(folder: Path) -> tuple[dict[str, torch.Tensor], Callable[[dict[str, torch.Tensor]], None]]:
    """The tensors of a folder, and how to write them back."""
    if (folder / BIN).exists():
        return torch.load(folder / BIN, weights_only=True), lambda tensors: torch.save(tensors, folder / BIN)
    file = next(folder / name for name in (native.WEIGHTS, SAFETENSORS) if (folder / name).exists())

    def write(tensors: dict[str, torch.Tensor]) -> None:
        kept = {key.encode("utf-8", "replace").decode(): value.clone() for key, value in tensors.items()}
        save_file(kept, file, metadata={"format": "pt"})

    return load_file(file), write


# --- Mutations of the safetensors header ------------------------------------------------------------------------------


def mutate_header(draw: random.Random, folder: Path) -> str:
    """What the header promises: shapes of gigabytes, types, places in the file, the same name twice."""
    file = next((folder / name for name in (native.WEIGHTS, SAFETENSORS) if (folder / name).exists()), None)
    if file is None:
        return mutate_archive(draw, folder)
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    key = draw.choice([key for key in header if key != "__metadata__"])
    entry = header[key]
    how = draw.choice(["shape", "dtype", "offsets", "size", "any", "twice", "metadata", "rename", "long", "share"])
    text: str | None = None
    if how == "shape":
        place = draw.randrange(max(1, len(entry["shape"])))
        entry["shape"][place : place + 1] = [draw.choice([0, 1, -1, 2**20, 2**31, 2**40, 2**62, 2**64, 1.5, "3", None])]
    elif how == "dtype":
        entry["dtype"] = draw.choice(
            ["F64", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "F4", "C64", "F32 ", "", None, "I64"]
        )
    elif how == "offsets":
        entry["data_offsets"] = [draw.choice([0, -1, 7, len(body), 2**40, 2**64, *entry["data_offsets"]]) for _ in "ab"]
    elif how == "share":
        entry["data_offsets"] = header[draw.choice([key for key in header if key != "__metadata__"])]["data_offsets"]
    elif how == "any":
        changed_json(draw, header)
    elif how == "twice":
        text = json.dumps(header)[:-1] + "," + json.dumps({key: entry})[1:]
    elif how == "metadata":
        header["__metadata__"] = draw.choice([{"a": "x" * 10**5}, {"a": 1}, [], {"a": {"b": "c"}}, None, {"\0": ""}])
    elif how == "rename":
        header[renamed(draw, key)] = header.pop(key)
    elif how == "long":
        header["x" * 10**6] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    encoded = (json.dumps(header) if text is None else text).encode("utf-8", "surrogatepass")
    length = len(encoded)
    if how == "size":
        length = draw.choice([0, 1, length - 1, length + 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
    file.write_bytes(struct.pack("<Q", length) + encoded + body)
    return how


# --- Mutations of archives and folders --------------------------------------------------------------------------------


class Call:
    """Is unpickled as the result of a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def mutate_archive(draw: random.Random, folder: Path) -> str:
    """A ``.bin``, also in place of safetensors: code, compressed, of another format, more than it holds."""
    tensors, _ = tensors_of(folder)
    trace = str(folder / TRACE)
    how = draw.choice(
        ["code", "code", "code as safetensors", "compressed", "old", "strides", "bytearray", "views", "pkl"]
    )
    out = io.BytesIO()
    if how in ("code", "code as safetensors"):
        call = draw.choice(
            [
                Call(open, trace, "w"),
                Call(os.system, f"touch '{trace}'"),
                Call(exec, f"open({trace!r}, 'w')"),
                Call(os.makedirs, trace),
                Call(torch.save, {}, trace),
            ]
        )
        content: Any = draw.choice([{"a": call}, call, [call], {**tensors, "a": call}])
        torch.save(content, out, _use_new_zipfile_serialization=draw.random() < 0.7)
    elif how == "old":
        torch.save(tensors, out, _use_new_zipfile_serialization=False)
    elif how == "strides":
        torch.save({**tensors, next(iter(tensors)): torch.ones(1).expand(10**6, 10**6)}, out)
    elif how == "bytearray":
        torch.save({**tensors, "a": Call(bytearray, 1 << 36)}, out)
    elif how == "views":
        many = torch.ones(10**5)
        torch.save({**tensors, **{f"a{i}": many for i in range(50)}}, out)
    else:
        torch.save(tensors, out)
        with zipfile.ZipFile(out) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        if how == "pkl":
            pickled = next(name for name in entries if name.endswith("data.pkl"))
            for _ in range(draw.choice([1, 2, 5])):
                entries[pickled] = changed_bytes(draw, entries[pickled]) or b"\0"
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
    for file in (folder / native.HEADER, folder / native.WEIGHTS, folder / SAFETENSORS):
        file.unlink(missing_ok=True)
    (folder / (SAFETENSORS if how == "code as safetensors" else BIN)).write_bytes(out.getvalue())
    if not (folder / CONFIG).exists():
        (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA"}))
    return how


def mutate_folder(draw: random.Random, folder: Path) -> str:
    file = draw.choice(files_of(folder))
    how = draw.choice(["missing", "link out", "link in", "device", "pipe", "folder", "circle", "both", "empty"])
    content = file.read_bytes()
    if how == "both":
        (folder / CONFIG).write_text('{"peft_type": "LORA"}')
        (folder / native.HEADER).write_text(draw.choice(["{}", '{"format": "scute-adapter", "version": 1}']))
        return how
    file.unlink()
    if how == "link out":
        outside = folder.parent / "outside"
        outside.write_bytes(content)
        file.symlink_to(draw.choice([outside, "../outside", Path("/etc/passwd")]))
    elif how == "link in":
        (folder / "inside").write_bytes(content)
        file.symlink_to("inside")
    elif how == "device":
        file.symlink_to(draw.choice(["/dev/zero", "/proc/self/mem", "/dev/stdin"]))
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "circle":
        file.symlink_to(file.name)
    elif how == "empty":
        file.write_bytes(b"")
    return how


def mutate_nothing(draw: random.Random, folder: Path) -> str:
    return "the sound adapter"


MUTATIONS: list[tuple[int, Callable[[random.Random, Path], str]]] = [
    (22, mutate_bytes),
    (22, mutate_config),
    (3, mutate_config_text),
    (8, mutate_scale),
    (25, mutate_tensors),
    (10, mutate_header),
    (6, mutate_archive),
    (3, mutate_folder),
    (1, mutate_nothing),
]

# Folder names that a path may have.
FOLDERS = [NAME, "with space", "line\nbreak", "\x1b[2J", "ü😀", "..x", "-rf", "$(touch x)", "a'\"b", "x" * 200, "*"]


def mutate(draw: random.Random, sound: Path, target: Path) -> tuple[Path, str]:
    """A mutant of the sound adapter in a folder of its own within ``target``, and what was done to it."""
    folder = target / (NAME if draw.random() < 0.9 else draw.choice(FOLDERS))
    shutil.copytree(sound, folder)
    weights, functions = zip(*MUTATIONS, strict=True)
    function = draw.choices(functions, weights)[0]
    if function is mutate_scale and not (folder / CONFIG).exists():
        function = mutate_config
    return folder, f"{function.__name__.removeprefix('mutate_')}: {function(draw, folder)}"


# --- Loading them -------------------------------------------------------------------------------------------------


class NetworkUsed(Exception):
    """Loading an adapter tried to connect, or to resolve a name."""


@contextmanager
def without_network() -> Iterator[None]:
    """A connection or a look-up of a name raises, and is a finding whoever catches it."""
    used = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        used.append(arguments)
        raise NetworkUsed(arguments)

    originals = socket.socket.connect, socket.getaddrinfo
    socket.socket.connect, socket.getaddrinfo = refuse, refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        socket.socket.connect, socket.getaddrinfo = originals  # type: ignore[method-assign]
    if used:
        raise NetworkUsed(used)


def try_mutant(folder: Path, sound: Adapter, base: nn.Module) -> tuple[str, str]:
    """The outcome, and its message or what is wrong."""
    try:
        with without_network():
            adapter = load(folder, NAME, shapes_of(base), torch.float32)
    except AdapterError as error:
        message = str(error)
        if not message.startswith(f"adapter {NAME!r}: ") or not message.isprintable() or len(message) > 3000:
            return FINDING, f"message: {message[:300]!r}"
        return REFUSED, message
    same = adapter.digest == sound.digest
    if (folder / native.HEADER).exists():
        return (SAME, "") if same else check_forms(adapter, base)
    outcome, detail = compare(adapter, folder, base)
    return (SAME if same and outcome in (UNCHECKED, DRAWN) else outcome), detail


def check_forms(adapter: Adapter, base: nn.Module) -> tuple[str, str]:
    """What fits the model gives numbers of the right shape."""
    for path, form in adapter.forms.items():
        layer = dict(base.named_modules()).get(path)
        if isinstance(layer, nn.Linear) and (form.in_features, form.out_features) == tuple(layer.weight.shape[::-1]):
            x = torch.randn(2, layer.in_features)
            y = reference.apply(form, adapter.bases, x, layer.weight, layer.bias)
            if y.shape != (2, layer.out_features):
                return FINDING, f"{path} gives {tuple(y.shape)}"
    return NATIVE, ""


@torch.no_grad()
def compare(adapter: Adapter, folder: Path, base: nn.Module) -> tuple[str, str]:
    """Every linear layer against PEFT's, where PEFT loads the mutant too and keeps all that is stored."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval()
            unread = peft.set_peft_model_state_dict(loaded, peft.load_peft_weights(str(folder), "cpu")).unexpected_keys
        except Exception as error:
            return UNCHECKED, f"{type(error).__name__}: {error}"
    if unread:  # of these it does not warn
        return DRAWN, f"does not read {unread[0]}"
    drops = ("missing adapter keys", "unexpected adapter keys", "not found in")
    if warning := next((str(w.message) for w in said if any(text in str(w.message) for text in drops)), None):
        return DRAWN, warning
    model = loaded.base_model.model.float()
    for path, layer in base.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(2))
        adapted: Any = model.get_submodule(path)
        try:
            expected = adapted(x[None], task_ids=torch.tensor([0]))[0] if is_poly(adapted) else adapted(x)
        except Exception as error:
            return UNCHECKED, f"{type(error).__name__}: {error}"
        if not expected.isfinite().all():
            return OVERFLOW, path
        actual = layer(x)
        if (form := adapter.forms.get(path)) is not None:
            if form.in_features not in (0, layer.in_features) or form.out_features not in (0, layer.out_features):
                return REFUSED, f"against the model: {path} has other shapes"  # scute_sglang.fit
            try:
                actual = reference.apply(form, adapter.bases, x, layer.weight, layer.bias)
            except AdapterError as error:  # the server folds when it loads
                return REFUSED, f"against the model: {error}"
        if not (actual - expected).abs().max() <= TOLERANCE * expected.abs().max():
            return FINDING, f"{path} differs from PEFT by {(actual - expected).abs().max():.3g}"
    return EXACT, ""


def is_poly(layer: nn.Module) -> bool:
    return isinstance(layer, peft.tuners.poly.layer.PolyLayer)


# --- The process that loads -------------------------------------------------------------------------------------------


class TooSlow(Exception):
    """A load took longer than ``SECONDS``."""


def _too_slow(*_: Any) -> None:
    raise TooSlow(f"more than {SECONDS} s")


def work(connection: Any, sound: Path, names: list[str], seed: int, first: int, count: int) -> None:
    """Loads the mutants of these numbers and sends a ``Report`` of each. Runs in a process of its own."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_slow)
    base = toy()
    originals = {name: load(sound / name, base=shapes_of(base), base_dtype=torch.float32) for name in names}
    with Path("/proc/self/statm").open() as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESS_SPACE, now + ADDRESS_SPACE))
    connection.send("ready")
    os.chdir(sound)  # a mutant whose path is relative must not find the sources of the project
    for number in range(first, first + count):
        draw = random.Random(f"{seed}/{number}")
        name = draw.choice(names)
        with tempfile.TemporaryDirectory(dir=sound.parent) as target:
            connection.send(number)
            folder, kind = mutate(draw, sound / name, Path(target))
            before, started = peak(), time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                outcome, detail = try_mutant(folder, originals[name], base)
            except Exception as error:
                outcome, detail = FINDING, f"{type(error).__name__}: {str(error)[:500]}"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            seconds, growth = time.monotonic() - started, peak() - before
            if growth > GROWTH:
                outcome, detail = FINDING, f"{growth >> 20} MiB more of memory"
            if os.path.lexists(folder / TRACE):
                outcome, detail = FINDING, "the code in the file was executed"
        connection.send(Report(number, outcome, f"{name}, {kind}", detail, seconds, growth))
    connection.close()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(seed: int, first: int, count: int) -> Iterator[Report]:
    """The mutants ``first`` to ``first + count - 1``. One that kills or blocks its process is a finding; a new process
    goes on behind it."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        sound = Path(scratch) / "sound"
        names = write_sound(sound)
        number, end = first, first + count
        while number < end:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(sender, sound, names, seed, number, end - number))
            process.start()
            sender.close()
            receiver.recv()  # it is ready
            try:
                while number < end:
                    if not receiver.poll(60 + 3 * SECONDS):
                        raise EOFError("it blocks its process")
                    message = receiver.recv()
                    if isinstance(message, Report):
                        yield message
                        number = message.number + 1
            except EOFError as error:
                process.kill()
                process.join()
                yield Report(number, FINDING, "", f"{error or 'its process died'} (exit code {process.exitcode})", 0, 0)
                number += 1
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000, metavar="N", help="how many mutants (10000)")
    parser.add_argument("--seed", type=int, default=0, help="of all of them (0)")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="number of the first mutant (0)")
    parser.add_argument("--verbose", action="store_true", help="a line for every mutant")
    options = parser.parse_args()
    console = Console()
    outcomes: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {}
    slowest, largest = 0.0, 0
    reports = run(options.seed, options.first, options.mutations)
    for report in track(reports, "mutants", total=options.mutations, console=Console(stderr=True), transient=True):
        outcomes[report.outcome] += 1
        by_kind.setdefault(report.kind.partition(", ")[2].partition(":")[0], Counter())[report.outcome] += 1
        slowest, largest = max(slowest, report.seconds), max(largest, report.growth)
        if options.verbose or report.outcome == FINDING:
            line = f"{report.number} {report.kind!r}: {report.outcome} {report.detail}"
            console.print(line, markup=False, soft_wrap=True)
    table = Table("mutation", *OUTCOMES)
    for kind, counts in sorted(by_kind.items()):
        table.add_row(kind or "died", *(str(counts[outcome] or "") for outcome in OUTCOMES))
    table.add_section()
    table.add_row("all", *(str(outcomes[outcome]) for outcome in OUTCOMES))
    console.print(table)
    console.print(f"slowest load {slowest:.2f} s, largest growth of memory {largest >> 20} MiB")
    sys.exit(1 if outcomes[FINDING] else 0)


if __name__ == "__main__":
    main()
