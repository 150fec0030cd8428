"""The values of JSON Schema's keywords, checked: numbers, counts, texts, names and pointers."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

from pippin.core.errors import SchemaError
from pippin.engine.json_values import Number, fraction, meet

_NUMERIC: Final = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"}


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
    for keyword in _NUMERIC & schema.keys():
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SchemaError(f"{where}: {keyword} must be a number, got {value!r}")
        if keyword == "multipleOf" and value <= 0:
            raise SchemaError(f"{where}: multipleOf must be greater than 0, got {value!r}")
        for exact in {fraction(value), Fraction(str(value))}:  # a large float may be read either way; hold to both
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
    """A text."""
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


def escape(name: str) -> str:
    """A name as one step of a pointer."""
    return name.replace("~", "~0").replace("/", "~1").replace("%", "%25")


def anchors(schema: Any, where: str, name: str) -> Iterable[str]:
    """The pointers of the schemas that carry an anchor; enum and const are values, not schemas."""
    if isinstance(schema, dict):
        if schema.get("$anchor") == name:
            yield where
        for keyword, value in schema.items():
            if keyword not in ("enum", "const", "default", "examples"):
                yield from anchors(value, f"{where}/{escape(keyword)}", name)
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from anchors(value, f"{where}/{i}", name)
