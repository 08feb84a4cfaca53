"""Values that differ between modules: PEFT's ``rank_pattern`` and ``alpha_pattern``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from scute_converter.errors import AdapterError

Value = TypeVar("Value")


def lookup(adapter: str, field: str, pattern: Mapping[str, Value], module: str, default: Value) -> Value:
    """The value of the first pattern that matches the end of the module path (PEFT: ``get_pattern_key``).

    ``field``: of the config, for messages. Raises AdapterError for a key that is no regular expression.
    """
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            where = f"field {field} of adapter_config.json"
            raise AdapterError(adapter, where, f"{key!r} is no regular expression ({error})", "correct it") from error
    return default
