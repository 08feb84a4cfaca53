"""rotate: the Triton kernel."""

from __future__ import annotations


def rotate(*_: object) -> None:
    raise NotImplementedError("rotate has no kernel yet")
