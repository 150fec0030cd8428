"""Opposites: the values of the same kind that are not in a shape, where they are a union of shapes again."""

from __future__ import annotations

from pippin.engine.json_values import NEVER, Array, Boolean, Names, Null, Number, Object, Shape, Shapes, String


def opposite(shape: Shape) -> Shapes | None:
    """The values of this kind that are not in this shape; None where they cannot be written as shapes.

    >>> opposite(Array(low=2, high=3))
    (Array(..., low=0, high=1, ...), Array(..., low=4, high=None, ...))
    """
    match shape:
        case Null():
            return ()
        case Boolean(values):
            return (Boolean(frozenset({True, False}) - values),) if len(values) == 1 else ()
        case Number(integer=False, step=None, values=None):
            below = () if shape.low is None else (Number(high=shape.low, high_open=not shape.low_open),)
            above = () if shape.high is None else (Number(low=shape.high, low_open=not shape.high_open),)
            return below + above
        case String(values=None):
            without = (String(exclude=(terminal,)) for terminal in shape.include)
            within = (String(include=(terminal,)) for terminal in shape.exclude)
            return (*_other_lengths(shape), *without, *within)
        case String():
            return (String(exclude=(shape.terminal,)),)
        case Array(rest=(), unique=False, contains=()) if not any(shape.prefix):
            return _other_lengths(shape)
        case Object(others=(Names((), (), ()),)):
            return _other_objects(shape)
    return None


def _other_lengths(shape: String | Array | Object) -> Shapes:
    kind = type(shape)
    fewer = (kind(high=shape.low - 1),) if shape.low else ()
    return fewer + ((kind(low=shape.high + 1),) if shape.high is not None else ())


def _other_objects(shape: Object) -> Shapes | None:
    """Objects that lack something required, or where a property is there and not as it must be."""
    found: list[Shape] = [Object(properties=((name, NEVER),)) for name in shape.required]
    for name, key in shape.properties:
        for kind, where in key:
            other = {"schema": "not", "not": "schema"}.get(kind)
            if kind == "never":
                found.append(Object(required=(name,)))
            elif other is None:
                return None
            else:
                found.append(Object(properties=((name, ((other, where),)),), required=(name,)))
    return (*found, *_other_lengths(shape))
