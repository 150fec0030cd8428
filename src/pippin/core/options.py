"""What a setting is, for people: the text that the command line, the documentation and an editor show of it.

Notable here:
- the description stands in the annotation of a dataclass's field, beside its type and its range; `pippin.cli` makes the
  options of a command from it
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pippin.core.errors import InvalidArgument

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


@dataclass(frozen=True)
class Option:
    """What a setting is, for people.

    Attributes:
        help: one sentence, which may name the default.
        group: the heading that it stands under in the help of a command.
        metavar: what stands for its value in that help.
        flag: the option's name, where it is not the field's.
        positional: whether the command takes it without a name.
        parse: from the text of a command line, where the type alone does not say how.
        variable: the environment variable that is read where the option is not given.
        parse_variable: from the text of that variable.
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
    """A size with a unit, in bytes.

    Raises:
        InvalidArgument: it is none.

    >>> parse_bytes("8GB"), parse_bytes("1.5 MiB"), parse_bytes("100")
    (8000000000, 1572864, 100)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise InvalidArgument(f"{text!r} is no size; write it as in 500MB or 8GiB")
    return int(float(match[1]) * _UNITS[match[2]])
