"""Lets SGLang start on a machine without CUDA, where its compiled ``sgl_kernel`` cannot be loaded.

The ``sgl_kernel`` wheel on PyPI links against ``libcuda.so.1``. SGLang imports it everywhere, also where no function
of it is ever called, as for a dense model with ``--device cpu --attention-backend torch_native``.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch

STAND_IN = Path(__file__).parent / "cpu_stand_in"


def install() -> bool:
    """Put the stand-in first on the import path, for this process and its children, where it is needed.

    It is needed when ``SGLANG_USE_CPU_ENGINE=1`` asks for the CPU, there is no CUDA, and the installed ``sgl_kernel``
    raises ``ImportError``. Call it before SGLang's first import of ``sgl_kernel``; more than once does no harm. A
    server loads the plugin, which calls it, early enough; ``sglang.Engine`` loads plugins too late, so a program that
    uses it calls ``install()`` itself. Returns whether the stand-in is in use.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1" or torch.cuda.is_available():
        return False
    try:
        module = importlib.import_module("sgl_kernel")
    except ImportError:
        # What the failed import leaves behind would shadow the submodules of the stand-in.
        for name in [name for name in sys.modules if name.startswith("sgl_kernel.")]:
            del sys.modules[name]
    else:
        return Path(module.__file__ or "").is_relative_to(STAND_IN)
    sys.path.insert(0, str(STAND_IN))
    importlib.invalidate_caches()
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), *([inherited] if inherited else [])])
    return True
