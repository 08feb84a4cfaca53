"""Which modules a config selects: PEFT's ``check_target_module_exists``."""

from __future__ import annotations

import re
from collections.abc import Collection

from scute_converter.base import Base
from scute_converter.config import MethodConfig
from scute_converter.errors import AdapterError, did_you_mean
from scute_converter.patterns import is_plain, match


def selects(config: MethodConfig, module: str) -> bool:
    """Whether PEFT would adapt ``module`` (its Hugging Face path). Raises ``re.error`` for a pattern that is broken or
    not served.

    A missing ``target_modules`` and ``"all-linear"`` select everything but the output head: PEFT replaces both by
    names when it saves.
    """
    if config.exclude_modules and _matches(config.exclude_modules, module):
        return False
    if config.target_modules in (None, "all-linear"):
        return module.rpartition(".")[2] != "lm_head"
    if not _matches(config.target_modules, module):
        return False
    layers = config.layers_to_transform
    if isinstance(config.target_modules, str) or module in config.target_modules or layers in (None, []):
        return True
    layer = _layer(config, module)
    return layer == layers if isinstance(layers, int) else layer in layers


def selected_layers(adapter: str, config: MethodConfig, base: Base, remedy: str) -> dict[str, tuple[int, int]]:
    """The linear layers of the base model that the config selects: ``(out, in)`` by path, in the order of the model."""
    where = "field target_modules of adapter_config.json"
    try:
        layers = {module: shape for module, shape in base.shapes.items() if selects(config, module)}
    except re.error as error:
        raise AdapterError(adapter, where, f"is no regular expression ({error})", remedy) from error
    if not layers:
        problem = "selects no linear layer of the base model"
        if unused := unused_names(config, base.shapes):
            problem += f": none is called {unused[0]!r}"
            problem += did_you_mean(unused[0], {module.rpartition(".")[2] for module in base.shapes})
        raise AdapterError(adapter, where, problem, remedy)
    return layers


def unused_names(config: MethodConfig, modules: Collection[str]) -> list[str]:
    """The names in ``target_modules`` that none of the modules has. A regular expression has no names."""
    names = config.target_modules if isinstance(config.target_modules, list) else []
    return [name for name in names if name not in modules and not any(_matches([name], module) for module in modules)]


def _matches(names: list[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return match(names, module, whole=True)
    return any(module == name or module.endswith("." + name) for name in names)


def _layer(config: MethodConfig, module: str) -> int | None:
    """The index of the layer that holds ``module``: the first number in its path, or the one after the pattern."""
    if not config.layers_pattern:
        patterns = [r".*?\.[^.]*"]
    else:
        names = [config.layers_pattern] if isinstance(config.layers_pattern, str) else config.layers_pattern
        if odd := next((name for name in names if not is_plain(name)), None):
            raise re.error(f"layers_pattern {odd!r} is no plain name")
        patterns = [rf"(?:^|.*?\.){name}" for name in names]
    for pattern in patterns:
        if found := re.match(rf"{pattern}\.(?P<layer>\d+)\.", module):
            return int(found["layer"])
    return None
