"""Validated values of JSON Schema keywords (numbers, counts, strings, names), and JSON pointers into a schema."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

from pippin.core.errors import SchemaError
from pippin.engine.grammar.json_values import Number, fraction, meet

MAX_CHARACTERS: Final = 2_000_000
MAX_VALUES: Final = 100_000
MAX_LEVELS: Final = 256
MAX_PROPERTIES: Final = 2_000

_NUMERIC: Final = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf", "divisibleBy"}


def field_name(where: str) -> str:
    """The property that a pointer is about: ``#/properties/age/minimum`` is about ``age``.

    >>> field_name("#/$defs/Person/properties/age")
    'age'
    """
    steps = where.split("/")
    named = [b for a, b in pairwise(steps) if a == "properties"]
    return named[-1].replace("~1", "/").replace("~0", "~") if named else where


def number(schema: dict[str, Any], where: str, *, integer: bool) -> Number:
    """The numbers that the bounds and the step of a schema allow."""
    found = Number(integer=integer)
    for keyword in sorted(_NUMERIC & schema.keys()):
        value = schema[keyword]
        if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            bound = keyword.removeprefix("exclusive").lower()  # drafts 3 and 4: it is about the other keyword
            if not value or bound not in schema:
                continue
            value = schema[bound]
        keyword = "multipleOf" if keyword == "divisibleBy" else keyword
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SchemaError(f"{where}: {keyword} must be a number, got {value!r}")
        if keyword == "multipleOf" and value <= 0:
            raise SchemaError(f"{where}: multipleOf must be greater than 0, got {value!r}")
        for exact in {fraction(value), Fraction(str(value))}:  # parsers read a large float in either way; enforce both
            if keyword == "multipleOf":
                change = Number(step=exact)
            elif "inimum" in keyword:
                change = Number(low=exact, low_open=keyword == "exclusiveMinimum")
            else:
                change = Number(high=exact, high_open=keyword == "exclusiveMaximum")
            narrowed = meet(found, change)
            assert isinstance(narrowed, Number)
            found = narrowed
    return found


def count(schema: dict[str, Any], keyword: str, where: str) -> int | None:
    """An integer of at least 0, or None where the keyword is absent."""
    if keyword not in schema:
        return None
    value = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise SchemaError(f"{where}: {keyword} must be an integer of at least 0, got {value!r}")
    return int(value)


def text(schema: dict[str, Any], keyword: str, where: str) -> str:
    """A string."""
    value = schema[keyword]
    if not isinstance(value, str):
        raise SchemaError(f"{where}: {keyword} must be a text, got {value!r}")
    return value


def names(schema: dict[str, Any], where: str) -> tuple[str, ...]:
    """The names that `required` lists, each once."""
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SchemaError(f"{where}: required must be a list of names, got {names!r}")
    return tuple(dict.fromkeys(names))


def check_size(document: Any) -> None:
    """Refuse a schema whose grammar would take too long to generate or nest too deep to compile; without recursion.

    Raises:
        SchemaError: more than 2 million characters, 100,000 values, 256 levels, or 2,000 properties of one object.

    >>> check_size({"enum": ["a" * 3_000_000]})
    Traceback (most recent call last):
        ...
    pippin.core.errors.SchemaError: the schema has more than 2,000,000 characters
    """
    characters = values = 0
    waiting: list[tuple[Any, int]] = [(document, 0)]
    while waiting:
        value, depth = waiting.pop()
        inner: list[Any] = []
        if isinstance(value, dict):
            inner = [item for pair in value.items() for item in pair]
            named = value.get("properties")
            if isinstance(named, dict) and len(named) > MAX_PROPERTIES:
                raise SchemaError(f"an object of the schema has more than {MAX_PROPERTIES:,} properties")
        elif isinstance(value, list):
            inner = value
        characters += len(value) if isinstance(value, str) else 1
        values += len(inner)
        if characters > MAX_CHARACTERS:
            raise SchemaError(f"the schema has more than {MAX_CHARACTERS:,} characters")
        if values > MAX_VALUES:
            raise SchemaError(f"the schema has more than {MAX_VALUES:,} values")
        if inner and depth == MAX_LEVELS:
            raise SchemaError(f"the schema is nested more than {MAX_LEVELS} levels deep; name its parts with $defs")
        waiting.extend((item, depth + 1) for item in inner)
