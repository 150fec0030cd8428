"""What the parts of a long text say, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pippin.session.extraction.form import referenced
from pippin.session.extraction.slots import (
    AlternativesSlot,
    ChoiceSlot,
    DictSlot,
    ListSlot,
    ObjectSlot,
    ReferenceSlot,
    Slot,
)

if TYPE_CHECKING:
    from pippin.session.extraction.extract import SourceSpan

Reading = tuple[Any, Sequence["SourceSpan"]]
"""A value, and the spans of everything in it; None for a value that was not found."""


def merged(slot: Slot, readings: Sequence[Reading], path: tuple[str | int, ...] = ()) -> tuple[Any, list[SourceSpan]]:
    """The readings of several parts as one: lists are joined, and of other values the most confident is kept.

    Args:
        slot: what was read.
        readings: of each part, in order.
        path: where it stands.
    """
    readings = [(value, list(spans)) for value, spans in readings if value is not None]
    if not readings:
        return None, []
    kinds = _kinds(slot)
    if isinstance(readings[0][0], dict):
        return _objects(kinds, readings, path)
    plain = next((kind for kind in kinds if isinstance(kind, ListSlot) and not kind.first), None)
    if plain is not None and isinstance(readings[0][0], list):
        return _lists(plain, readings, path)
    return _best(readings)


def _kinds(slot: Slot) -> Sequence[Slot]:
    while isinstance(slot, ReferenceSlot) and slot.slot is not None:
        slot = slot.slot
    return slot.slots if isinstance(slot, AlternativesSlot) else (slot,)


def ordered(slot: Slot, value: Any) -> Any:
    """The value with the properties of its objects in the order of the form, as answers have them."""
    record = next((kind for kind in _kinds(slot) if isinstance(kind, ObjectSlot)), None)
    if record is None or not isinstance(value, dict):
        return value
    known = {each.name: ordered(each.slot, value[each.name]) for each in record.properties if each.name in value}
    return known | {name: inner for name, inner in value.items() if name not in known}


def _objects(kinds: Sequence[Slot], readings: Sequence[Reading], path: Any) -> tuple[Any, list[SourceSpan]]:
    record = next((kind for kind in kinds if isinstance(kind, ObjectSlot)), None)
    names = next((kind for kind in kinds if isinstance(kind, DictSlot)), None)
    slots = {each.name: each.slot for each in record.properties} if record else {}
    value, spans = {}, []
    for name in dict.fromkeys(name for found, _ in readings for name in found):
        slot = slots.get(name) or (names.value if names else ChoiceSlot(()))
        below = [(found[name], _within(known, (*path, name))) for found, known in readings if name in found]
        value[name], inner = merged(slot, below, (*path, name))
        spans += inner
    return value, spans


def _lists(items: ListSlot, readings: Sequence[Reading], path: Any) -> tuple[Any, list[SourceSpan]]:
    value: list[Any] = []
    spans: list[SourceSpan] = []
    for found, known in readings:
        for span in known:
            index = span.path[len(path)]
            if isinstance(index, int) and len(value) + index < items.high:
                moved = (*path, len(value) + index, *span.path[len(path) + 1 :])
                spans.append(replace(span, path=moved))
        value += found[: items.high - len(value)]
    return value, spans


def _best(readings: Sequence[Reading]) -> tuple[Any, list[SourceSpan]]:
    """The most confident reading; one without any span, as of a flag that nothing shows, where there is no other."""

    def confidence(reading: Reading) -> float:
        return min((0.0 if span.confidence is None else span.confidence for span in reading[1]), default=-1.0)

    value, spans = max(readings, key=confidence)
    return value, list(spans)


def _within(spans: Sequence[SourceSpan], path: tuple[Any, ...]) -> list[SourceSpan]:
    return [span for span in spans if span.path[: len(path)] == path]


def missing(schema: dict[str, Any], value: Any) -> list[tuple[str, ...]]:
    """The paths of the properties that must be there and are not; items of lists are whole."""
    return _missing(schema, value, schema, ())


def _missing(schema: Any, value: Any, document: dict[str, Any], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if not isinstance(schema, dict) or not isinstance(value, dict):
        return []
    if "$ref" in schema:
        return _missing(referenced(document, schema["$ref"], "/".join(path)), value, document, path)
    found = [(*path, name) for name in schema.get("required", []) if name not in value]
    for name, inner in schema.get("properties", {}).items():
        found += _missing(inner, value.get(name), document, (*path, name))
    for each in schema.get("allOf", []):
        found += _missing(each, value, document, path)
    # the alternative that lacks least; one that is no object, such as null, lacks nothing and is not what was found
    alternatives = schema.get("anyOf") or schema.get("oneOf") or []
    objects = [each for each in alternatives if each.get("type", "object") == "object"]
    if objects:
        fewest = min((_missing(each, value, document, path) for each in objects), key=len)
        found += fewest
    return found


def completed(
    value: Any, spans: list[SourceSpan], other: Any, other_spans: Sequence[SourceSpan], paths: Sequence[tuple[str, ...]]
) -> tuple[Any, list[SourceSpan]]:
    """The value with what is at some paths of another reading."""
    for path in paths:
        source, target = other, value
        for name in path[:-1]:
            source, target = source.get(name) or {}, target[name]
        if path[-1] in source:
            target[path[-1]] = source[path[-1]]
            spans = spans + _within(other_spans, path)
    return value, spans
