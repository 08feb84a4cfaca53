"""Lets a step of loading fail on one rank of a running server, and tells what the ranks hold before and after each
load: a plugin of SGLang, for tests only. When the server starts it rehearses its graphs, as one on a GPU does.

``install`` writes the plugin into a folder for ``PYTHONPATH``. A file that names a step and a rank makes the functions
of Scute that do this step raise there, as long as the file is there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "SCUTE_TEST_FAULT"
RANKS = "all"


def install(folder: Path) -> dict[str, str]:
    """Write the plugin, and return what a server needs in its environment. ``folder``: of the test."""
    info = folder / "faulty_plugin-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaulty = faulty_plugin:register\n")
    path = os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path.rstrip(os.pathsep), VARIABLE: str(folder / "fault.json")}


@contextmanager
def fault(environment: dict[str, str], step: str, rank: int | str, **more: Any) -> Iterator[None]:
    """While this is open, the step fails on the rank (or on all of them). What ranks told before is forgotten."""
    file = Path(environment[VARIABLE])
    for told in file.parent.glob("held-*.json"):
        told.unlink()
    file.write_text(json.dumps({"step": step, "rank": rank, **more}))
    try:
        yield
    finally:
        file.unlink()


def held(environment: dict[str, str], rank: int, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank held before and after its last load, which was of the adapter ``name``. Ranks tell it on their own,
    maybe after the first of them has answered."""
    for _ in range(200):
        file = _told(Path(environment[VARIABLE]), rank)
        if file.exists() and (told := json.loads(file.read_text()))["name"] == name:
            return told["before"], told["after"]
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} has not told of a load of {name}")


def _told(fault_file: Path, rank: int) -> Path:
    return fault_file.with_name(f"held-{rank}.json")


def register() -> None:
    """Called by SGLang in each of its processes."""
    import torch

    from scute_converter import files
    from scute_converter.methods.dora import DoraScale
    from scute_converter.methods.hra import Reflections
    from scute_patches import sgl_kernel
    from scute_sglang.packing import _Packer

    sgl_kernel.install()  # as Scute does before it imports any other patch
    from scute_patches import model_runner

    def failing(owner: Any, name: str, step: str, error: Callable[[], Exception]) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if _is_asked(step):
                raise error()
            return original(*args, **kwargs)

        setattr(owner, name, wrapper)

    failing(files, "_read_all", "disk", lambda: OSError(errno.EIO, os.strerror(errno.EIO)))
    failing(_Packer, "block", "host memory", MemoryError)
    failing(DoraScale, "measure", "device memory", lambda: torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"))
    failing(DoraScale, "resolve", "resolve", lambda: RuntimeError("resolve\nfails"))
    failing(Reflections, "fold", "fold", lambda: ArithmeticError("fold fails"))

    read_json = files.read_json

    def reading(adapter: str, folder: Path, name: str, most: int) -> Any:
        content = read_json(adapter, folder, name, most)
        for step, change in (("vanish", os.unlink), ("shorten", lambda path: os.truncate(path, 100))):
            if _is_asked(step) and (folder / files.SAFETENSORS).exists():
                change(folder / files.SAFETENSORS)
        return content

    files.read_json = reading

    # This plugin comes first. The manager's module can be imported when Scute itself asks for it, not before.
    install = model_runner.install
    model_runner.install = lambda manager_class: install(lambda: _telling(manager_class()))


def _telling(manager: Any) -> Any:
    """The class of managers, which now tell what they hold, and rehearse."""
    from sglang.srt.runtime_context import get_parallel

    from scute_patches.decode_cuda_graph_runner import DECODE_VARIANTS

    load, init_state = manager._load, manager.init_state

    def rehearsing(self: Any, *args: Any, **kwargs: Any) -> None:
        init_state(self, *args, **kwargs)
        self.lora_backend.rehearse(100, [None])
        self.lora_backend.rehearse(20, DECODE_VARIANTS)

    def wrapper(self: Any, lora_ref: Any, read: Any) -> Any:
        before = _holds(self)
        result = load(self, lora_ref, read)
        told = {"name": lora_ref.lora_name, "before": before, "after": _holds(self)}
        file = _told(Path(os.environ[VARIABLE]), get_parallel().tp_rank)
        file.with_suffix(".new").write_text(json.dumps(told))
        file.with_suffix(".new").replace(file)  # at once
        return result

    manager._load, manager.init_state = wrapper, rehearsing
    return manager


def _holds(manager: Any) -> dict[str, Any]:
    """The adapters that a rank has loaded, and all that its device memory holds of them."""
    pool = manager.memory_pool

    def digest(tensor: Any) -> str:
        return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()

    return {
        "loaded": {str(ref.lora_name): manager.loras[uid].content for uid, ref in manager.lora_refs.items()},
        "blocks": len(manager.loras),
        "pinned": manager.num_pinned_loras,
        "slots": pool.uid_to_buffer_id,
        "arena": [pool.arena.used, sorted(pool.arena.keys()), digest(pool.arena.tensor)],
        "tables": [digest(pool.table), digest(pool.bases)],
    }


def _is_asked(step: str) -> bool:
    from sglang.srt.runtime_context import get_parallel

    file = Path(os.environ[VARIABLE])
    if not file.exists():
        return False
    asked = json.loads(file.read_text())
    return asked["step"] == step and asked["rank"] in (RANKS, get_parallel().tp_rank)
