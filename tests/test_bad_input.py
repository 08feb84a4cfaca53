"""Files that nobody should have to trust: what they promise is not allocated, what they ask for is not done."""

from __future__ import annotations

import collections
import io
import json
import os
import re
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_converter import load, load_tensors
from scute_converter.files import BIN, CONFIG, MOST_CONFIG, SAFETENSORS, read_safetensors
from scute_converter.normal_form import NormalForm
from scute_converter.patterns import match
from test_converter import CONFIG as LORA
from test_converter import PREFIX, Tensors, lora_tensors, refused, write

Q = f"{PREFIX}q_proj."
BASE = {"model.layers.0.self_attn.q_proj": (42, 30)}


# Regular expressions

PARTS = ["a", "b", ".", "[ab]", "[^a]", "a*", "b+?", ".*", "(a|ab)", "(?:a|b)*", "(a*)*", "(?:ab?){2,3}", "^", "$", "|"]
PARTS += [r"\b", r"\B", r"\w+", r"\.", r"\d", "(?=a)", "(?!b)", "(?<=a)", "(?<!ab)", "a{0,2}", "(a|)", "x??", r"\Z"]
PARTS += ["(?:a*b*){2}", r"(.*\.)?", "(?=.*b$)", "[a-x]{3,}", "(?!)"]


@given(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), st.text("ab.x_1\n", max_size=8), st.booleans())
@settings(max_examples=500, deadline=None)
def test_regular_expressions_match_as_in_python(pattern: str, text: str, whole: bool) -> None:
    expected = re.fullmatch(pattern, text) if whole else re.match(pattern, text)
    assert match(pattern, text, whole=whole) == (expected is not None)


@pytest.mark.parametrize(
    "pattern", ["(a|a)*b", "(.*)*x", ".*" * 20 + "x", "((((a*)*)*)*)*b", "(a?){50}b", "(a|a)" * 50]
)
@pytest.mark.parametrize("field", ["target_modules", "rank_pattern"])
def test_regular_expressions_that_would_go_back_for_ever(pattern: str, field: str) -> None:
    """``re`` would take 2^60 steps for the first."""
    path = "a" * 60 + ".q_proj"
    tensors = {f"{path}.lora_A.weight": torch.ones(3, 30), f"{path}.lora_B.weight": torch.ones(42, 3)}
    value: Any = pattern if field == "target_modules" else {pattern: 5}
    started = time.process_time()
    try:
        load_tensors(tensors, LORA | {field: value}, "bad")
    except ValueError as error:
        assert field in str(error)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        (r"(.)\1*_proj", "groupref is not served"),
        ("(?i)Q_PROJ", "flags are not served"),
        ("(" * 4000, "nested too deep"),
        ("a{99999999999999999999}", "repeats too often"),
        ("x" * 5000 + "*", "5001 letters"),
    ],
)
def test_regular_expressions_that_are_not_served(pattern: str, part: str) -> None:
    refused(lambda: load_tensors(lora_tensors(), LORA | {"target_modules": pattern}, "bad"), "target_modules")
    refused(lambda: load_tensors(lora_tensors(), LORA | {"alpha_pattern": {pattern: 1}}, "bad"), "alpha_pattern")
    with pytest.raises(re.error, match=part):
        match(pattern, "q_proj")


def test_too_many_patterns() -> None:
    many = {f"layer{i}": 1 for i in range(5000)}
    refused(lambda: load_tensors(lora_tensors(), LORA | {"rank_pattern": many}, "bad"), "rank_pattern", "5000 patterns")
    many = {f"(layer){i}": 1 for i in range(70)}
    refused(lambda: load_tensors(lora_tensors(), LORA | {"alpha_pattern": many}, "bad"), "70 of them regular")


# Small tensors that stand for large ones


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


LARGE: dict[str, tuple[dict[str, Any], Tensors]] = {
    "LoKr": (
        {"peft_type": "LOKR", "r": 2},
        {
            f"{Q}lokr_w1_a": ones(9000, 2),
            f"{Q}lokr_w1_b": ones(2, 9000),
            f"{Q}lokr_w2_a": ones(9000, 2),
            f"{Q}lokr_w2_b": ones(2, 9000),
        },
    ),
    "LoHa": (
        {"peft_type": "LOHA", "r": 999},
        {f"{Q}hada_w{i}_{s}": ones(999, 999) for i in (1, 2) for s in "ab"},
    ),
    "GraLoRA": (
        {"peft_type": "GRALORA", "r": 999},
        {f"{Q}gralora_A": ones(999, 1, 999), f"{Q}gralora_B": ones(999, 999, 1)},
    ),
    "VB-LoRA": (
        {"peft_type": "VBLORA", "topk": 1},
        {
            "base_model.vblora_vector_bank": ones(1, 70_000),
            f"{Q}vblora_logits_A": ones(50, 50, 1),
            f"{Q}vblora_logits_B": ones(50, 50, 1),
        },
    ),
    "QALoRA": (
        LORA | {"use_qalora": True, "qalora_group_size": 4096},
        {f"{Q}lora_A.weight": ones(3, 20_000), f"{Q}lora_B.weight": ones(42, 3)},
    ),
    "BD-LoRA": (
        LORA | {"r": 12_000, "use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 12_000}},
        {f"{Q}lora_A.weight": ones(12_000, 1), f"{Q}lora_B.weight": ones(42, 12_000)},
    ),
    "MiSS": (
        {"peft_type": "MISS", "init_weights": "mini", "mini_r": 1},
        {f"{Q}miss_block": ones(5_000_000, 1)},
    ),
    "TinyLoRA": (
        {"peft_type": "TINYLORA", "save_projection": False, "weight_tying": 1},
        {"base_model.tinylora_v.0": ones(200), f"{Q}tinylora_A": ones(999, 30), f"{Q}tinylora_B": ones(42, 999)},
    ),
    "UniLoRA": (
        {"peft_type": "UNILORA", "theta_d_length": 3, "r": 5000, "target_modules": ["k_proj"]},
        {"base_model.unilora_theta_d": ones(3)},
    ),
    "VeRA": (
        {"peft_type": "VERA", "save_projection": False},
        {f"{Q}vera_lambda_d": ones(5_000_000), f"{Q}vera_lambda_b": ones(42)},
    ),
    "FourierFT": (
        {"peft_type": "FOURIERFT", "target_modules": ["k_proj"]},
        {"base_model.model.model.layers.0.self_attn.k_proj.fourierft_spectrum": ones(20_000)},
    ),
}


@pytest.mark.parametrize("method", LARGE)
def test_small_tensors_that_stand_for_large_ones(method: str) -> None:
    """From half a megabyte to 20, for gigabytes: refused before they are made."""
    config, tensors = LARGE[method]
    config = {"target_modules": ["q_proj"]} | config
    shapes = BASE | {"model.layers.0.self_attn.k_proj": (20_000, 20_000)}
    shapes = {path: shapes[path] for path in shapes if path.endswith(str(config["target_modules"][0]))}
    refused(lambda: load_tensors(tensors, config, "bad", shapes, torch.float32), "stands for a tensor of shape")


def test_boft_with_an_order_of_another_shape() -> None:
    tensors = {f"{Q}boft_R": ones(1, 500_000, 1, 1), f"{Q}boft_s": ones(42, 1), f"{Q}boft_P": ones(1, 3, 3)}
    refused(lambda: load_tensors(tensors, {"peft_type": "BOFT"}, "bad"), "boft_P", "reorders")


def test_lengths_that_fp32_cannot_square() -> None:
    """PEFT divides by them, which gives zero: finite, and not what the tensors say."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    config = {"target_modules": ["q_proj"]}
    hra = {f"{Q}hra_u": draw(30, 2) * torch.tensor([1, 1e25])}
    refused(lambda: load_tensors(hra, config | {"peft_type": "HRA"}, "bad"), "q_proj.hra_u", "fp32")
    delora = {f"{Q}delora_A": draw(2, 30) * 1e25, f"{Q}delora_B": draw(42, 2), f"{Q}delora_lambda": draw(1).abs()}
    delora[f"{Q}delora_w_norm"] = draw(30).abs()
    refused(lambda: load_tensors(delora, config | {"peft_type": "DELORA", "r": 2}, "bad"), "delora_A", "fp32")
    dora = {f"{Q}lora_A.weight": draw(3, 30), f"{Q}lora_B.weight": draw(42, 3), f"{Q}lora_magnitude_vector": draw(42)}
    dora[f"{Q}lora_B.weight"][7] *= 1e25
    adapter = load_tensors(dora, LORA | config, "bad")
    form = adapter.forms["model.layers.0.self_attn.q_proj"]
    refused(lambda: resolved(form, draw(42, 30)), "lora_magnitude_vector", "not finite")  # type: ignore[arg-type,return-value]


def resolved(form: NormalForm, weight: torch.Tensor) -> NormalForm:
    assert form.deferred is not None
    return form.deferred.resolve(form, form.deferred.measure(weight, form))


# Archives of torch


class Reduce:
    """Is unpickled as the result of a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def bin_folder(folder: Path, content: Any, change: Callable[[bytes], bytes] | None = None, **options: Any) -> Path:
    write(folder, lora_tensors(), binary=True)
    torch.save(content, folder / BIN, **options)
    if change is not None:
        (folder / BIN).write_bytes(change((folder / BIN).read_bytes()))
    return folder


def rewritten(compression: int, *more: str) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", compression) as new:
            for entry in old.namelist():
                new.writestr(entry, old.read(entry))
            for name in more:
                new.writestr(name, b"\x80\x02}.")
        return out.getvalue()

    return change


@pytest.mark.parametrize(
    ("content", "change", "part"),
    [
        (lora_tensors(), rewritten(zipfile.ZIP_DEFLATED), "compressed"),
        (lora_tensors(), rewritten(zipfile.ZIP_STORED, "x/data.pkl"), "2 pickles"),
        (lora_tensors() | {"a": ones(1).expand(10**6, 10**6)}, None, "larger than what is stored"),
        ({f"{i}": tensor for tensor in [ones(10**5)] for i in range(99)}, None, "share storages"),
        ({"a": Reduce(bytearray, 1 << 40)}, None, "refers to __builtin__ bytearray"),
        ({"a": Reduce(collections.Counter, "aaa")}, None, "refers to collections Counter"),
        ({"a": torch.empty(10**6, 10**6, device="meta")}, None, "refers to torch._utils _rebuild_meta"),
        ({"a": ones(3, 3).to_sparse()}, None, "refers to torch._utils _rebuild_sparse"),
        ({"a": Reduce(os.system, "true")}, None, "refers to posix system"),
    ],
)
def test_archives(content: Any, change: Callable[[bytes], bytes] | None, part: str, tmp_path: Path) -> None:
    folder = bin_folder(tmp_path / "bad", content, change)
    assert os.path.getsize(folder / BIN) < 1 << 20
    refused(lambda: load(folder), part)


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """In the pickle."""

    def change(content: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(out, "w") as target:
            for entry in source.namelist():
                data = source.read(entry)
                assert not entry.endswith("data.pkl") or old in data
                target.writestr(entry, data.replace(old, new) if entry.endswith("data.pkl") else data)
        return out.getvalue()

    return change


def test_archives_that_promise_a_gigabyte(tmp_path: Path) -> None:
    large = b"J" + struct.pack("<i", 1 << 28)
    # Two storages of 90 numbers. How long they say they are does not count, as long as the tensors are within them.
    longer = bin_folder(tmp_path / "longer", lora_tensors(), replaced(b"K\x5a", large))
    assert load(longer).digest == load_tensors(lora_tensors(), LORA, "plain").digest
    # A shape of (3, 30).
    folder = bin_folder(tmp_path / "bad", lora_tensors(), replaced(b"K\x03K\x1e", b"K\x03" + large))
    refused(lambda: load(folder), BIN, "resize")


def test_archive_of_before_torch_1_6(tmp_path: Path) -> None:
    folder = bin_folder(tmp_path / "bad", lora_tensors(), _use_new_zipfile_serialization=False)
    refused(lambda: load(folder), BIN, "not a zip file")


def test_archive_with_tied_tensors(tmp_path: Path) -> None:
    """Tensors that share a storage are sound, as those of tied layers are."""
    tensors = lora_tensors()
    shared = {key.replace("q_proj", "o_proj"): tensor for key, tensor in tensors.items() if "q_proj" in key}
    config = LORA | {"target_modules": ["q_proj", "v_proj", "o_proj"]}
    folder = write(tmp_path / "tied", tensors | shared, config, binary=True)
    assert load(folder).digest == load_tensors(tensors | shared, config, "plain").digest


# Files and folders


def test_a_file_that_becomes_shorter_after_it_was_opened(tmp_path: Path) -> None:
    """Reading a mapped file past its new end would kill the process."""
    folder = write(tmp_path, lora_tensors())
    tensors = read_safetensors("bad", folder, SAFETENSORS)
    os.truncate(folder / SAFETENSORS, 20)
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in lora_tensors().items())


def test_a_file_that_is_shorter_than_its_size() -> None:
    """The kernel says 4096 bytes of such a file, and gives fewer."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    if not (folder / "enabled").exists():
        pytest.skip("no sysfs here")
    refused(lambda: read_safetensors("bad", folder, "enabled"), "enabled", "it ended after", "of 4096 bytes")  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("name", [CONFIG, SAFETENSORS, BIN])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link in a circle", "link to nothing", "link to a device"])
def test_what_is_no_file(name: str, kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "bad", lora_tensors(), binary=name == BIN)
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        target = {"link in a circle": name, "link to nothing": "nothing", "link to a device": "/dev/zero"}[kind]
        (folder / name).symlink_to(target)
    refused(lambda: load(folder), name)


@pytest.mark.parametrize(
    "path", ["", "\0", "a\0b", "x" * 5000, "some-org/some-adapter", "https://hub/x", "~", "/dev/null"]
)
def test_paths_that_are_no_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(lambda: load(path, "bad"), "folder")


def test_folder_that_is_a_link_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "bad").symlink_to("bad")
    refused(lambda: load(tmp_path / "bad"), "cannot be read as a folder")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('{"r": 3, "r": 4}', "'r' stands twice"),
        ('{"alpha_pattern": {"q": 3, "q": 3}}', "'q' stands twice"),
        ('{"a":' * 900 + "1" + "}" * 900, "peft_type"),
        ('{"a":' * 50_000, "is not JSON"),
        ('{"r": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"r": 3' + " " * MOST_CONFIG + "}", "bytes"),
        ("\ufeff{}", "is not JSON"),
    ],
)
def test_json(content: str, part: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "bad", lora_tensors())
    (folder / CONFIG).write_text(content)
    refused(lambda: load(folder), part)


def test_messages_hold_no_commands_for_a_terminal() -> None:
    for name in ("\x1b[2J", "\u202egnp", "\x00", "a\r\nb", "\udcff", "\u2028"):
        tensors = lora_tensors() | {f"{Q}{name}": ones(3)}
        for message in (message_of(tensors, LORA), message_of(lora_tensors(), LORA | {name: 1})):
            assert message.isprintable() and message.encode()


def message_of(tensors: Tensors, config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        load_tensors(tensors, config, "bad")
    return str(caught.value)


def test_messages_are_short() -> None:
    long = "x" * 10**6
    messages = [
        message_of(lora_tensors() | {long: ones(3)}, LORA),
        message_of(lora_tensors(), LORA | {long: 1}),
        message_of(lora_tensors(), LORA | {"peft_type": long}),
        message_of(lora_tensors(), LORA | {"modules_to_save": [long]}),
        message_of(lora_tensors(), json.loads(json.dumps(LORA | {"target_modules": long}))),
    ]
    assert max(map(len, messages)) < 3000
