"""The files of an adapter, which anybody may have written: they are copied before anything reads them, and nothing in
them is executed, followed out of the folder, or believed about how much memory it takes."""

from __future__ import annotations

import json
import math
import os
import pickletools
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import safetensors
import torch

from scute_converter import parallel
from scute_converter.errors import AdapterError

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
BIN = "adapter_model.bin"
ADDED_TOKENS = "added_tokens.json"

# Bytes of JSON, and of the pickle beside the tensors of a .bin. A config of PEFT takes a few kB, 200 kB if it names
# every layer of the largest models three times.
MOST_CONFIG = 1 << 20
MOST_HEADER = 1 << 24

_PIECE = 1 << 23  # bytes of a file that one thread reads at a time

# The names that safetensors.torch knows.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_COPY_AGAIN = "download or copy the file again"
_OTHER_TYPE = "save the adapter in fp32, fp16 or bf16"
_AS_SAFETENSORS = f"save the adapter as {SAFETENSORS}"

# What the pickle of a state dict refers to, besides storages and dtypes. weights_only=True knows more, some of which
# take any amount of memory or give tensors that are not plain.
_GLOBALS = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_parameter",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor_v3",
        "torch.storage UntypedStorage",
    }
)
# How many times the bytes of a .bin its tensors may take together: tied ones share their storage in the file.
_MOST_SHARING = 16


def open_folder(adapter: str, path: str | Path) -> Path:
    """The folder, resolved. It is a local one, whatever its name looks like: nothing is looked up elsewhere."""
    try:
        if not Path(path).is_dir():
            raise NotADirectoryError("no such folder here")
        return Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # also a NUL in the path, and links in a circle
        problem = f"cannot be read as a folder ({error})"
        remedy = "give the path of a folder saved by PEFT; one on the Hub must be downloaded first"
        raise AdapterError(adapter, str(path), problem, remedy) from error


def read_folder(adapter: str, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the tensors of a folder that PEFT's ``save_pretrained`` wrote."""
    if not os.path.exists(folder / CONFIG):
        inner = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG}"))
        remedy = f"give the path of the folder {inner[0]} in it" if inner else "give a folder saved by PEFT"
        raise AdapterError(adapter, str(folder), f"has no {CONFIG}", remedy)
    config = read_json(adapter, folder, CONFIG, MOST_CONFIG)
    if os.path.lexists(folder / SAFETENSORS):
        return config, read_safetensors(adapter, folder, SAFETENSORS)
    if os.path.lexists(folder / BIN):
        return config, _read_bin(adapter, folder)
    raise AdapterError(adapter, str(folder), f"has neither {SAFETENSORS} nor {BIN}", "copy the weights into it")


def read_json(adapter: str, folder: Path, name: str, most: int) -> dict[str, Any]:
    """The JSON object in a file of the folder, of at most ``most`` bytes. A key that stands twice is refused."""
    with _opened(adapter, folder, name) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise AdapterError(adapter, name, f"has {size} bytes, and {most} at most are read", "shorten it")
        try:
            content = json.loads(file.read(most).decode(), object_pairs_hook=_without_duplicates)
        except (OSError, ValueError, RecursionError) as error:
            raise AdapterError(adapter, name, f"is not JSON ({error})", "copy the file again") from error
    if not isinstance(content, dict):
        raise AdapterError(adapter, name, "is not a JSON object", "copy the file again")
    return content


def read_added_tokens(adapter: str, folder: Path) -> tuple[dict[str, int], list[str]]:
    """Tokens and their ids in ``added_tokens.json``, which trainers copy beside the adapter from the tokenizer of the
    base model, and a note if the file cannot be read: it is none of PEFT's own."""
    if not os.path.lexists(folder / ADDED_TOKENS):
        return {}, []
    try:
        tokens = read_json(adapter, folder, ADDED_TOKENS, MOST_HEADER)
    except AdapterError as error:
        return {}, [f"tokens that were added are not known: {error}"]
    if not all(type(number) is int for number in tokens.values()):
        return {}, [f"tokens that were added are not known: {ADDED_TOKENS} is no table of token ids"]
    return tokens, []


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in content if keys.count(key) > 1)!r} stands twice in one object")
    return content


def read_safetensors(adapter: str, folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors in a file of the folder, in the order of their names."""
    content = _read(adapter, folder, name)
    try:
        tensors = _views(adapter, name, content)
    except AdapterError:
        raise
    except (KeyError, OverflowError, RuntimeError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise AdapterError(adapter, name, f"is broken or cut off ({error})", _COPY_AGAIN) from error
    return {key: tensors[key] for key in sorted(tensors)}


def _views(adapter: str, name: str, content: memoryview) -> dict[str, torch.Tensor]:
    """The tensors in the bytes of a safetensors file, which they keep.

    safetensors itself reads the header, from a file in memory of the same length that has nothing behind it: from the
    whole bytes it would copy all tensors, one after the other.
    """
    start = 8 + int.from_bytes(content[:8], "little")
    with _in_memory(content[:start], len(content)) as file, safetensors.safe_open(file, "np") as header:
        # In safetensors 0.8.0 get_tensor keeps an integer or two for ever, of every tensor; get_slice does not.
        slices = {key: header.get_slice(key) for key in header.offset_keys()}
        for key, part in slices.items():
            if (dtype := part.get_dtype()) not in _DTYPES:
                raise AdapterError(adapter, f"{name}, tensor {key}", f"has type {dtype}", _OTHER_TYPE)
        kinds = {key: (_DTYPES[part.get_dtype()], part.get_shape()) for key, part in slices.items()}
    tensors = {}
    for key, (dtype, shape) in kinds.items():
        if count := math.prod(shape):
            tensors[key] = torch.frombuffer(content, dtype=dtype, count=count, offset=start).reshape(shape)
        else:
            tensors[key] = torch.empty(shape, dtype=dtype)
        start += count * dtype.itemsize
    if start != len(content):
        raise ValueError("the tensors do not lie one after the other")
    return tensors


def _read_bin(adapter: str, folder: Path) -> dict[str, torch.Tensor]:
    """The same for what ``torch.save`` wrote since torch 1.6."""
    content = _read(adapter, folder, BIN)
    with _in_memory(content, len(content)) as file:
        try:
            _check_archive(file)
            # Mapped, the storages end where the file does, whatever the pickle says of them.
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a broken pickle raises whatever it likes
            problem = f"is broken, cut off, or more than tensors ({error})"
            raise AdapterError(adapter, BIN, problem, _AS_SAFETENSORS) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(tensor, torch.Tensor) for key, tensor in tensors.items()
    ):
        raise AdapterError(adapter, BIN, "is not a dict of tensors", _AS_SAFETENSORS)
    for key, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            problem = f"{tuple(tensor.shape)} is larger than what is stored of it"
            raise AdapterError(adapter, f"tensor {key}", problem, "save a contiguous copy of it")
    if (total := sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())) > _MOST_SHARING * len(
        content
    ):
        problem = f"its tensors share storages: they take {total} bytes, and the file has {len(content)}"
        raise AdapterError(adapter, BIN, problem, _AS_SAFETENSORS)
    return tensors


def _check_archive(path: str) -> None:
    """Raises unless the archive holds plain tensors only, not compressed."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed")
        pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MOST_HEADER:
            raise ValueError(f"it has {len(pickles)} pickles, or one of more than {MOST_HEADER} bytes")
        for opcode, argument, _ in pickletools.genops(archive.read(pickles[0])):
            if opcode.name == "STACK_GLOBAL" or (opcode.name == "GLOBAL" and not _is_plain(str(argument))):
                raise ValueError(f"its pickle refers to {argument or 'a name that it makes up'}")


def _is_plain(reference: str) -> bool:
    """``reference``: module and name, as pickle has them."""
    module, _, name = reference.partition(" ")
    if module == "torch" and (name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)):
        return True
    return reference in _GLOBALS


def _inside(adapter: str, folder: Path, name: str) -> Path:
    """The path of a file of the folder. A link may lead out of it only into the blobs of a Hugging Face cache, whose
    layout is ``models--x/snapshots/<revision>`` beside ``models--x/blobs``."""
    try:
        target, folder = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise AdapterError(adapter, name, f"cannot be read ({error})", "copy the file into the folder") from error
    homes = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if not any(target.is_relative_to(home) for home in homes):
        raise AdapterError(adapter, name, f"is a link out of the folder, to {target}", "copy the file into the folder")
    return target


@contextmanager
def _opened(adapter: str, folder: Path, name: str) -> Iterator[FileIO]:
    target = _inside(adapter, folder, name)
    try:
        # Without O_NONBLOCK a named pipe would wait for somebody to write.
        file = FileIO(target, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    except OSError as error:
        raise AdapterError(adapter, name, f"cannot be read ({error})", _COPY_AGAIN) from error
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise AdapterError(adapter, name, "is no regular file", "copy the file into the folder")
        yield file


def _read(adapter: str, folder: Path, name: str) -> memoryview:
    """The content of a file of the folder.

    A tensor mapped from the file itself would end the process (SIGBUS) if the disk fails, or somebody writes a shorter
    file, before it is read.
    """
    with _opened(adapter, folder, name) as file:
        try:
            return _read_all(file)
        except OSError as error:
            raise AdapterError(adapter, name, f"is broken or cut off ({error})", _COPY_AGAIN) from error


def _read_all(file: FileIO) -> memoryview:
    size = os.fstat(file.fileno()).st_size
    # Not memory of NumPy, which asks for pages of 2 MiB: finding them may take the kernel longer than reading the file.
    content = torch.empty(size, dtype=torch.uint8).numpy().data

    def fill(first: int) -> int:
        end, last = first, min(first + _PIECE, size)
        while end < last and (count := os.preadv(file.fileno(), [content[end:last]], end)):
            end += count
        return end - first

    read = sum(parallel.each(fill, range(0, size, _PIECE)))
    if read < size:
        raise OSError(f"it ended after {read} of {size} bytes")
    return content


@contextmanager
def _in_memory(content: memoryview, size: int) -> Iterator[str]:
    """The path of a file in memory of ``size`` bytes that begins with ``content``. Tensors may be mapped from it: they
    keep it after this."""
    with open(os.memfd_create("content"), "wb") as file:
        file.write(content)
        file.truncate(size)
        yield f"/proc/self/fd/{file.fileno()}"
