"""Scute's own options: what the command line takes, carried to the server's processes by the environment."""

from __future__ import annotations

import os
import re

MEMORY_FLAG = "--scute-adapter-memory"
MEMORY_VARIABLE = "SCUTE_ADAPTER_MEMORY"
DEFAULT_MEMORY = "4GiB"
MEMORY_HELP = (
    "Device memory for adapters under --lora-backend scute, per GPU, e.g. 512MiB or 8GiB. All adapters of one batch "
    f"(and the pinned ones) must fit; others wait on the host. Default: {DEFAULT_MEMORY}. "
    f"For sglang.Engine, set the environment variable {MEMORY_VARIABLE}."
)

DEFAULT_MAX_RANK = 1024  # of one low-rank pair; bounds scratch memory, not the adapters' own

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(text: str) -> int:
    """``"512MiB"`` to bytes. Raises ``ValueError`` with what is accepted."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)?\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no amount of memory: write for example 512MiB or 8GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def adapter_memory() -> int:
    """The arena's bytes, as the command line or the environment gave them."""
    return parse_bytes(os.environ.get(MEMORY_VARIABLE, DEFAULT_MEMORY))
