"""Checks, before anything is changed, that SGLang's symbols are the ones that Scute was written for."""

from __future__ import annotations

import inspect
import pkgutil
from importlib.metadata import version

SGLANG_VERSION = "0.5.23"


class IncompatibleSGLangError(RuntimeError):
    """A symbol of SGLang that Scute changes or overrides is missing or takes other parameters."""


def require(target: str, parameters: tuple[str, ...]) -> None:
    """Raise ``IncompatibleSGLangError``, in one line, unless ``target`` takes exactly ``parameters``.

    ``target``: dotted path of a function, method or class (``sglang.lang.interpreter.StreamExecutor.fork``); a class
    stands for its constructor, without ``self``. ``parameters``: their names in order, ``self`` included for a method,
    without the stars of ``*args`` and ``**kwargs``.
    """
    try:
        found = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
    except (ImportError, AttributeError):
        problem = f"has no {target}"
    else:
        if found == parameters:
            return
        problem = f"has {target}({', '.join(found)})"
    raise IncompatibleSGLangError(
        f"SGLang {version('sglang')} {problem}, but Scute was written for "
        f"{target.rpartition('.')[2]}({', '.join(parameters)}) of SGLang {SGLANG_VERSION}: "
        f"install sglang=={SGLANG_VERSION}, or a Scute release made for this SGLang"
    )
