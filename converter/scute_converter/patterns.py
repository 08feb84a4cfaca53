"""Regular expressions of a config, matched in bounded time whatever they are.

``re`` backtracks: ``(a|a)*b`` takes 2^n steps on a name of n letters, and holds the whole process meanwhile. Here all
places that a part of the expression can have reached are followed at once, as the bits of one integer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from re import _constants as op  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, TypeVar

from scute_converter.errors import AdapterError

Value = TypeVar("Value")

# PEFT's own patterns name one module or a kind of modules, and the largest models have 900.
_MOST_PATTERNS = 4096
_MOST_EXPRESSIONS = 64  # of them with more than letters and dots
_MOST_LETTERS = 4096
_MOST_STEPS = 2000  # of one match; those of fine-tuning tools take up to 200

_PLAIN = re.compile(r"[\w.-]+")
_CATEGORIES = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
    op.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdecimal(),
    op.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    op.CATEGORY_NOT_WORD: lambda letter: not (letter.isalnum() or letter == "_"),
}


def lookup(adapter: str, field: str, pattern: Mapping[str, Value], module: str, default: Value) -> Value:
    """The value of the first pattern that matches the end of the module path (PEFT: ``get_pattern_key``, for the
    fields ``rank_pattern`` and ``alpha_pattern``).

    ``field``: of the config, for messages. Raises AdapterError for a key that is no regular expression.
    """
    where = f"field {field} of adapter_config.json"
    expressions = sum(not is_plain(key) for key in pattern)
    if len(pattern) > _MOST_PATTERNS or expressions > _MOST_EXPRESSIONS:
        problem = f"has {len(pattern)} patterns, {expressions} of them regular expressions; "
        problem += f"{_MOST_PATTERNS} and {_MOST_EXPRESSIONS} at most are served"
        raise AdapterError(adapter, where, problem, "name the modules in full, or say it in fewer expressions")
    for key, value in pattern.items():
        try:
            if match(rf"(.*\.)?({key})$", module) if not is_plain(key) else _at_end(key).match(module):
                return value
        except re.error as error:
            raise AdapterError(adapter, where, f"{key!r} is no regular expression ({error})", "correct it") from error
    return default


def is_plain(pattern: str) -> bool:
    """Whether it has letters, digits, dots and dashes only, which ``re`` matches without going back."""
    return _PLAIN.fullmatch(pattern) is not None


@lru_cache(maxsize=2 * _MOST_PATTERNS)  # re itself keeps 512
def _at_end(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


def match(pattern: str, text: str, *, whole: bool = False) -> bool:
    """Whether ``re.match``, or with ``whole`` ``re.fullmatch``, finds the pattern in ``text``.

    Raises ``re.error`` for what is no regular expression, refers back to a group, has flags, atomic groups or
    possessive repeats, or takes too many steps.
    """
    reached = _Places(text).after(_parsed(pattern), 1)
    return bool(reached >> len(text) if whole else reached)


@lru_cache(maxsize=4 * _MOST_EXPRESSIONS)
def _parsed(pattern: str) -> Sequence[tuple[Any, Any]]:
    if len(pattern) > _MOST_LETTERS:
        raise re.error(f"it has {len(pattern)} letters, and {_MOST_LETTERS} at most are read")
    try:
        parsed = _parser.parse(pattern)
    except (RecursionError, OverflowError) as error:
        raise re.error(f"it is nested too deep, or repeats too often ({error})") from error
    if parsed.state.flags != re.UNICODE:
        raise re.error("flags are not served")
    return parsed


class _Places:
    """Bit ``i`` of an integer: the place before letter ``i`` of ``text``; the last one is its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = 1 << len(text)
        self._steps = 0

    def after(self, items: Sequence[tuple[Any, Any]], places: int) -> int:
        """Where the items of a parsed expression, one after the other, can end that begin at ``places``."""
        for kind, argument in items:
            if not places:
                break
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise re.error(f"it takes more than {_MOST_STEPS} steps on {self._text!r}")
            places = self._after_one(kind, argument, places)
        return places

    def _after_one(self, kind: Any, argument: Any, places: int) -> int:
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return (places & self._where(lambda letter: _is(kind, argument, letter))) << 1
        if kind is op.BRANCH:
            ends = 0
            for items in argument[1]:
                ends |= self.after(items, places)
            return ends
        if kind is op.SUBPATTERN:
            _, added, removed, items = argument
            if added or removed:
                raise re.error("flags are not served")
            return self.after(items, places)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, items = argument
            return self._repeated(least, most, items, places)
        if kind is op.AT:
            return places & self._at(argument)
        if kind in (op.ASSERT, op.ASSERT_NOT):
            direction, items = argument
            seen = self._seen(direction, items, places)
            return seen if kind is op.ASSERT else places & ~seen
        if kind is op.FAILURE:
            return 0
        raise re.error(f"{str(kind).lower()} is not served")

    def _where(self, fits) -> int:
        return sum(1 << i for i, letter in enumerate(self._text) if fits(letter))

    def _repeated(self, least: int, most: int, items: Sequence[tuple[Any, Any]], places: int) -> int:
        # With more rounds than letters some round is empty, and may as well be left out or done again.
        for _ in range(min(least, len(self._text) + 1)):
            places = self.after(items, places)
        reached, rounds = places, least
        while places and rounds < most:
            places = self.after(items, places) & ~reached
            reached |= places
            rounds += 1
        return reached

    def _at(self, where: Any) -> int:
        if where in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return 1
        if where is op.AT_END_STRING:
            return self._end
        if where is op.AT_END:
            return self._end | (self._end >> 1 if self._text.endswith("\n") else 0)
        word = self._where(_CATEGORIES[op.CATEGORY_WORD])
        boundaries = word ^ (word << 1)
        if where is op.AT_BOUNDARY:
            return boundaries
        # Python finds \B nowhere in an empty text.
        return ((self._end << 1) - 1) & ~boundaries if self._text else 0

    def _seen(self, direction: int, items: Any, places: int) -> int:
        """Those of the places that the items follow, or precede if ``direction`` is negative."""
        width = items.getwidth()[0] if direction < 0 else 0
        seen = 0
        for i in range(width, len(self._text) + 1):
            if places >> i & 1:
                ends = self.after(items, 1 << (i - width))
                if ends if direction > 0 else ends >> i & 1:
                    seen |= 1 << i
        return seen


def _is(kind: Any, argument: Any, letter: str) -> bool:
    if kind is op.LITERAL:
        return ord(letter) == argument
    if kind is op.NOT_LITERAL:
        return ord(letter) != argument
    if kind is op.ANY:
        return letter != "\n"
    if kind is op.RANGE:
        return argument[0] <= ord(letter) <= argument[1]
    if kind is op.CATEGORY:
        return _CATEGORIES[argument](letter)
    negated = argument[0][0] is op.NEGATE
    return any(_is(kind, argument, letter) for kind, argument in argument[negated:]) != negated
