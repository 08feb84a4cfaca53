"""Stands in for SGLang's compiled ``sgl_kernel`` on a machine without CUDA.

SGLang imports names from ``sgl_kernel`` on every platform, but a dense model on the CPU calls none of them. Every name,
in every submodule, exists here as an object that raises ``NotImplementedError`` with its own name when it is called.
No ``torch.ops.sgl_kernel`` operator is registered, so SGLang takes its plain torch paths.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.0.0+cpu-stand-in"


class _Missing:
    """A name of ``sgl_kernel``, or an attribute of one, that is not there; calling it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> _Missing:
        return _missing(self._name, attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} is compiled code, and sgl_kernel cannot be loaded on this machine (no CUDA). "
            "Scute's stand-in serves dense models with --attention-backend torch_native only."
        )


def _missing(parent: str, name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(f"{parent!r} has no attribute {name!r}")
    return _Missing(f"{parent}.{name}")


def __getattr__(name: str) -> _Missing:
    return _missing(__name__, name)


class _Submodules(MetaPathFinder, Loader):
    """Makes every ``sgl_kernel.<name>`` importable."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: _missing(module.__name__, name)


sys.meta_path.append(_Submodules())
