"""Lets a step of loading fail on one rank of a running server: a plugin of SGLang, for the tests of faults only.

``install`` writes the plugin into a folder for ``PYTHONPATH``. A file that names a step and a rank makes the functions
of Scute that do this step raise there, as long as the file is there.
"""

from __future__ import annotations

import errno
import json
import os
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
    """While this is open, the step fails on the rank (or on all of them)."""
    file = Path(environment[VARIABLE])
    file.write_text(json.dumps({"step": step, "rank": rank, **more}))
    try:
        yield
    finally:
        file.unlink()


def register() -> None:
    """Called by SGLang in each of its processes."""
    import torch

    from scute_converter import files
    from scute_converter.methods.dora import DoraScale
    from scute_converter.methods.hra import Reflections
    from scute_sglang.packing import _Packer

    def failing(owner: Any, name: str, step: str, error: Callable[[], Exception]) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if _is_asked(step):
                raise error()
            return original(*args, **kwargs)

        setattr(owner, name, wrapper)

    failing(files, "_read_into", "disk", lambda: OSError(errno.EIO, os.strerror(errno.EIO)))
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


def _is_asked(step: str) -> bool:
    from sglang.srt.runtime_context import get_parallel

    file = Path(os.environ[VARIABLE])
    if not file.exists():
        return False
    asked = json.loads(file.read_text())
    return asked["step"] == step and asked["rank"] in (RANKS, get_parallel().tp_rank)
