"""Negation (`not`): the complement of a shape within its type, where it is a union of shapes."""

from __future__ import annotations

from itertools import pairwise

from pippin.engine.grammar.json_values import (
    NEVER,
    Array,
    Boolean,
    Key,
    Names,
    Null,
    Number,
    Object,
    Shape,
    Shapes,
    String,
    fraction,
)


def complement(shape: Shape) -> Shapes | None:
    """The values of the same type outside this shape; None if they are not a union of shapes.

    >>> complement(Array(low=2, high=3))
    (Array(..., low=0, high=1, ...), Array(..., low=4, high=None, ...))
    """
    match shape:
        case Null():
            return ()
        case Boolean(values):
            return (Boolean(frozenset({True, False}) - values),) if len(values) == 1 else ()
        case Number(fractional=False, step=None, values=None):
            below = () if shape.low is None else (Number(high=shape.low, high_open=not shape.low_open),)
            above = () if shape.high is None else (Number(low=shape.high, low_open=not shape.high_open),)
            return (*below, *above, *((Number(fractional=True),) if shape.integer else ()))
        case Number(integer=False, fractional=True, step=None, low=None, high=None, values=None):
            return (Number(integer=True),)
        case Number(values=tuple(values)):
            ends = sorted(map(fraction, values))
            between = (Number(low=a, low_open=True, high=b, high_open=True) for a, b in pairwise(ends))
            return (Number(high=ends[0], high_open=True), *between, Number(low=ends[-1], low_open=True))
        case String(values=None):
            without = (String(exclude=(terminal,)) for terminal in shape.include)
            within = (String(include=(terminal,)) for terminal in shape.exclude)
            return (*_other_lengths(shape), *without, *within)
        case String():
            return (String(exclude=(shape.terminal,)),)
        case Array(unique=False, contains=()):
            return _other_arrays(shape)
        case Object(contains=()):
            return _other_objects(shape)
    return None


def _other_lengths(shape: String | Array | Object) -> Shapes:
    kind = type(shape)
    fewer = (kind(high=shape.low - 1),) if shape.low else ()
    return fewer + ((kind(low=shape.high + 1),) if shape.high is not None else ())


def _other_arrays(shape: Array) -> Shapes | None:
    """Arrays of another length, or with an item that is not allowed."""
    found: list[Shape] = list(_other_lengths(shape))
    for index, key in enumerate(shape.prefix):
        parts = _negated(key)
        if parts is None:
            return None
        found += [Array(prefix=(*[()] * index, part), low=index + 1) for part in parts]
    if shape.rest == NEVER:
        return (*found, Array(low=len(shape.prefix) + 1))
    parts = _negated(shape.rest)
    if parts is None or (parts and shape.prefix):
        return None
    return (*found, *(Array(contains=((part, 1),)) for part in parts))


def _other_objects(shape: Object) -> Shapes | None:
    """Objects that lack a required property, or have a property whose name or value is not allowed."""
    found: list[Shape] = [Object(properties=((name, NEVER),)) for name in shape.required]
    for name, key in shape.properties:
        parts = _negated(key)
        if parts is None:
            return None
        found += [Object(properties=((name, part),), required=(name,)) for part in parts]
    named = tuple(String(values=tuple(name for name, _ in shape.properties)).terminal for _ in (1,) if shape.properties)
    for names in shape.others:
        parts = _negated(names.key)
        if parts is None:
            return None
        found += [Object(contains=(Names(names.include, (*names.exclude, *named), part),)) for part in parts]
    if Names() not in [Names(names.include, names.exclude) for names in shape.others]:
        known = tuple(names.terminal for names in shape.others)
        found.append(Object(contains=(Names(exclude=(*known, *named)),)))
    return (*found, *_other_lengths(shape))


def _negated(key: Key) -> list[Key] | None:
    """The keys of what violates a key, one for each of its parts; None where a part has no opposite."""
    if NEVER[0] in key:
        return [()]
    other = {"schema": "not", "not": "schema", "value": "unlike", "unlike": "value"}
    return None if any(kind not in other for kind, _ in key) else [((other[kind], where),) for kind, where in key]
