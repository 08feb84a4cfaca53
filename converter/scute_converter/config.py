"""``adapter_config.json`` as a typed record: every field is understood, known to be irrelevant, or refused."""

from __future__ import annotations

import reprlib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar

from scute_converter.errors import AdapterError, did_you_mean

# Fields of PEFT's PeftConfig that say where the adapter comes from and how it was trained.
_IRRELEVANT = frozenset(
    {"auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "revision", "task_type"}
)


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """The fields that all methods share; a method adds the fields that its formula reads.

    ``irrelevant``: fields that do not change inference. ``refused``: fields that do, and are not served, with the
    reason; they are accepted when null, false or empty.
    """

    irrelevant: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, str]] = {}

    peft_type: str
    peft_version: str | None = None
    bias: str = "none"
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    ensure_weight_tying: bool = False


Config = TypeVar("Config", bound=MethodConfig)


def parse(adapter: str, raw: Mapping[str, Any], record: type[Config]) -> Config:
    """Read the fields of ``record`` from ``raw``; AdapterError names the field that is wrong or unknown."""
    hints = typing.get_type_hints(record)
    irrelevant = record.irrelevant | _IRRELEVANT
    known = {field.name: field for field in fields(record)}
    values = {}
    for name, value in raw.items():
        where, shown = f"field {name} of adapter_config.json", reprlib.repr(value)
        if name in known:
            if not has_type(value, hints[name]):
                raise _wrong_value(adapter, where, value, hints[name], str(known[name].type))
            values[name] = value
        elif name in record.refused and value:
            raise AdapterError(adapter, where, record.refused[name], "train the adapter without it")
        elif value and name not in irrelevant:
            problem = f"{shown} is not understood, and it may change what the adapter computes"
            problem += did_you_mean(name, [*known, *record.refused, *irrelevant])
            raise AdapterError(adapter, where, problem, "remove the field if it does not matter")
    config = record(**values)
    _check_bias(adapter, config)
    return config


def _wrong_value(adapter: str, where: str, value: Any, hint: Any, annotation: str) -> AdapterError:
    shown = reprlib.repr(value)
    if typing.get_origin(hint) is Literal and isinstance(value, str):
        known = typing.get_args(hint)
        problem = f"{shown} is not known, only {', '.join(map(repr, known))}{did_you_mean(value, known)}"
        return AdapterError(adapter, where, problem, "correct it")
    return AdapterError(adapter, where, f"{shown} is not of type {annotation}", "save the adapter again with PEFT")


def _check_bias(adapter: str, config: MethodConfig) -> None:
    """PEFT takes ``none``, ``all`` and whatever ends in ``_only`` (``BaseTuner._mark_only_adapters_as_trainable``)."""
    if config.bias in ("none", "all") or config.bias.endswith("_only"):
        return
    known = ("none", "all", f"{config.peft_type.lower()}_only")
    problem = f"{config.bias!r} is not known, only {', '.join(map(repr, known))}{did_you_mean(config.bias, known)}"
    raise AdapterError(adapter, "field bias of adapter_config.json", problem, "correct it")


def has_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of an annotated type; an integer is a float, a boolean is neither, and numbers are finite
    and of a size that torch can take."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, argument) for argument in arguments)
    if origin is list:
        return isinstance(value, list) and all(has_type(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(has_type(item, arguments[1]) for item in value.values())
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if hint is float:
        return type(value) in (int, float) and abs(value) < float("inf") and abs(value) < 2**1023
    if hint is int:
        return type(value) is int and abs(value) < 2**63
    return type(value) is hint
