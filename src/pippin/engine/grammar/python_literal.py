r"""Literals of Python, as models write them in calls of tools: read without evaluating anything.

Notable here:
- strings in single or double quotes, numbers, lists, tuples (as lists), dictionaries with strings as names, and the
  constants of Python and of JSON; nothing else, so no name, call or operator has an effect
- escapes are Python's; two surrogates, which JSON writes for one character, are that character
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"""
    r"""|(?P<word>\w+)|(?P<mark>[\[\]{}(),:]))\s*""",
    re.DOTALL,
)
_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(\n)|(.))", re.DOTALL
)
_ESCAPED: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\", "'": "'", '"': '"',
    "/": "/",  # as JSON has it; Python itself would keep the backslash
}  # fmt: skip
_CONSTANTS: Final[dict[str, Any]] = {
    "None": None, "True": True, "False": False, "null": None, "true": True, "false": False,
}  # fmt: skip
_CLOSERS: Final = {"[": "]", "(": ")", "{": "}"}


def read_literal(text: str) -> Any:
    r"""The value of a literal.

    Args:
        text: one literal, with white space around and inside it.

    Raises:
        ValueError: the text is none, or has a number that is not finite. RecursionError: it is nested too deeply.

    >>> read_literal("{'name': 'O\\'Hara', 'tags': ['a', \"b\"], 'old': True, 'more': null}")
    {'name': "O'Hara", 'tags': ['a', 'b'], 'old': True, 'more': None}
    """
    reader = _Reader(text)
    value = reader.value()
    if reader.at != len(text):
        raise ValueError(f"{text[reader.at :][:40]!r} follows the value in {text[:80]!r}")
    return value


class _Reader:
    """Reads one value after another from a text."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def value(self) -> Any:
        match = self._next()
        if match["string"] is not None:
            return _string(match["string"])
        if match["number"] is not None:
            return _number(match["number"])
        if match["word"] is not None:
            if match["word"] not in _CONSTANTS:
                raise ValueError(f"{match['word']!r} is no constant; strings have quotation marks")
            return _CONSTANTS[match["word"]]
        if match["mark"] not in _CLOSERS:
            raise ValueError(f"{match['mark']!r} begins no value in {self.text[:80]!r}")
        return self._entries(match["mark"], _CLOSERS[match["mark"]])

    def _entries(self, begin: str, close: str) -> Any:
        """The items of a list or tuple, or the entries of a dictionary; a comma may follow the last."""
        named: dict[str, Any] = {}
        items: list[Any] = []
        while not self._takes(close):
            value = self.value()
            if begin == "{":
                if not isinstance(value, str) or not self._takes(":"):
                    raise ValueError(f"{value!r:.40} is no name of an entry in {self.text[:80]!r}")
                named[value] = self.value()
            else:
                items.append(value)
            if not self._takes(","):
                if not self._takes(close):
                    raise ValueError(f"{close!r} is missing in {self.text[:80]!r}")
                if begin == "(" and len(items) == 1:
                    return items[0]  # only in parentheses
                break
        return named if begin == "{" else items

    def _next(self) -> re.Match[str]:
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            raise ValueError(f"a value is missing at {self.text[self.at :][:40]!r}")
        self.at = match.end()
        return match

    def _takes(self, mark: str) -> bool:
        """Whether this comes next, which is then read."""
        match = _TOKEN.match(self.text, self.at)
        if match is None or match["mark"] != mark:
            return False
        self.at = match.end()
        return True


def _number(text: str) -> int | float:
    if re.fullmatch(r"[+-]?[\d_]+", text):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _string(text: str) -> str:
    found = _ESCAPE.sub(_unescaped, text[1:-1])
    if any("\ud800" <= character <= "\udfff" for character in found):
        found = found.encode("utf-16-le", "surrogatepass").decode("utf-16-le")  # refuses half a pair
    return found


def _unescaped(match: re.Match[str]) -> str:
    byte, short, long, octal, newline, other = match.groups()
    if newline:
        return ""
    if other is not None:
        return _ESCAPED.get(other, match.group())
    return chr(int(octal, 8) if octal else int(byte or short or long, 16))
