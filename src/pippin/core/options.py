"""Descriptions of settings: the help text that the command line, the documentation and editors show.

Notable here:
- an `Option` is part of the annotation of a dataclass field, beside its type and its range; `pippin.cli` builds the
  options of a command from these
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from pippin.core.errors import InvalidArgument

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


@dataclass(frozen=True)
class Option:
    """The description of one setting and its form on the command line.

    Attributes:
        help: one sentence, which may name the default.
        group: the heading of the option in the command's help.
        metavar: the placeholder for its value in that help.
        flag: the option's name, where it differs from the field's.
        positional: whether it is a positional argument of the command.
        parse: converts the command line's text to the value, where the type alone does not determine how.
        variable: the environment variable that is read where the option is not given.
        parse_variable: converts the text of that variable to the value.
    """

    help: str
    group: str | None = None
    metavar: str | None = None
    flag: str | None = None
    positional: bool = False
    parse: Callable[[str], Any] | None = None
    variable: str | None = None
    parse_variable: Callable[[str], Any] | None = None


def parse_bytes(text: str) -> int:
    """Parse a size with a unit and return it in bytes.

    Raises:
        InvalidArgument: the text is not a size.

    >>> parse_bytes("8GB"), parse_bytes("1.5 MiB"), parse_bytes("100")
    (8000000000, 1572864, 100)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise InvalidArgument(f"{text!r} is not a size; write it like 500MB or 8GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_memory(text: str) -> int | Literal["auto"]:
    """Parse a size, or "auto" for what is free.

    Raises:
        InvalidArgument: the text is neither.

    >>> parse_memory("8GB"), parse_memory("auto")
    (8000000000, 'auto')
    """
    return "auto" if text.strip().lower() == "auto" else parse_bytes(text)
