"""The one error of the package: an adapter that is not served exactly is refused with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Letters of one part of a message. Names and values in it may come from the adapter, and have any length.
_MOST_NAME = 200
_MOST_PART = 800


class AdapterError(ValueError):
    """An adapter that cannot be served exactly; the message is one line.

    ``adapter``: its name. ``where``: the tensor, config field or file. ``problem``: what is wrong with it.
    ``remedy``: what its owner can do. All may hold what stands in the adapter: whitespace is joined, what a terminal
    could take for a command is escaped, and what is too long is cut in the middle.
    """

    def __init__(self, adapter: str, where: str, problem: str, remedy: str) -> None:
        name = _short(repr(adapter), _MOST_NAME)
        where, problem, remedy = (_short(_printable(part), _MOST_PART) for part in (where, problem, remedy))
        super().__init__(f"adapter {name}: {where}: {problem}; {remedy}")


def did_you_mean(word: str, known: Iterable[str | bool]) -> str:
    """What the problem of a misspelt word ends with, ``" (did you mean 'rank_pattern'?)"``; ``""`` if none is near."""
    spelled = {other.casefold(): other for other in known if isinstance(other, str)}
    near = difflib.get_close_matches(word.casefold(), spelled, n=1)
    return f" (did you mean {spelled[near[0]]!r}?)" if near else ""


def _printable(text: str) -> str:
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
