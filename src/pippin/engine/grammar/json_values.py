"""Sets of JSON values, one shape for each kind of value, and their intersection.

Notable here:
- an assertion of JSON Schema constrains one type of value, so every schema is a union of shapes, one type each, and
  `allOf` is their intersection (`meet`)
- items and properties are `Key`s, lists of all subschemas that apply there, resolved only when needed; intersecting
  recursive schemas then only joins keys, of which there are finitely many
- additional and pattern properties are disjoint classes of names, so overlapping patterns need no special case
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Final

from pippin.core.errors import SchemaError, UnsupportedGuide
from pippin.engine.grammar import regex

Part = tuple[str, str]
"""("schema" | "not", JSON pointer), ("value" | "unlike", JSON text) or ("never", "")."""
Key = tuple[Part, ...]
"""All of these hold; the empty key is any value."""
NEVER: Final[Key] = (("never", ""),)


def join(a: Key, b: Key) -> Key:
    """The key under which both hold: their parts in order, each once."""
    if a == b or not b:
        return a
    if not a:
        return b
    return NEVER if NEVER[0] in (*a, *b) else tuple(dict.fromkeys((*a, *b)))


@dataclass(frozen=True)
class Null:
    """null"""


@dataclass(frozen=True)
class Boolean:
    """true, false, or both."""

    values: frozenset[bool] = frozenset({True, False})


@dataclass(frozen=True)
class Number:
    """Numbers between bounds, multiples of a step, integers or not; or, with ``values``, those of a list."""

    integer: bool = False
    fractional: bool = False
    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    step: Fraction | None = None
    values: tuple[int | float, ...] | None = None

    def holds(self, value: int | float) -> bool:
        """Whether a number is within the bounds, a multiple of the step and an integer where it must be."""
        exact = fraction(value)
        return (
            (not self.integer or exact.denominator == 1)
            and (not self.fractional or exact.denominator != 1)
            and (self.low is None or exact > self.low or (exact == self.low and not self.low_open))
            and (self.high is None or exact < self.high or (exact == self.high and not self.high_open))
            and (self.step is None or (exact / self.step).denominator == 1)
        )

    @property
    def is_empty(self) -> bool:
        """Whether no number is within the bounds and a multiple of the step."""
        if self.integer and self.fractional:
            return True
        if self.values is not None or self.low is None or self.high is None:
            return self.values == ()
        step = Fraction(self.step.numerator if self.step else 1) if self.integer else self.step
        if step is None:
            return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))
        return not self.factors(step)

    def factors(self, step: Fraction) -> range:
        """The integers k with ``k * step`` within both bounds, which there must be."""
        assert self.low is not None
        assert self.high is not None
        first, last = -(-self.low // step), self.high // step
        first += self.low_open and first * step == self.low
        last -= self.high_open and last * step == self.high
        return range(int(first), int(last) + 1)


@dataclass(frozen=True)
class String:
    """Strings by length and by terminals that they match or do not; or, with ``values``, those of a list."""

    low: int = 0
    high: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no string fits."""
        if self.values is not None:
            return not self.values
        if self.high is not None and self.low > self.high:
            return True
        return regex.begin_differently(self.include) or regex.is_empty(self.terminal)

    @cached_property
    def terminal(self) -> str:
        """The JSON texts of these strings, as a terminal."""
        if self.values is not None:
            return "/" + regex.alternatives(rf"\x{{22}}{regex.quoted(value)}\x{{22}}" for value in self.values) + "/"
        parts = [f"({terminal})" for terminal in self.include] + [f"~({terminal})" for terminal in self.exclude]
        if (self.low, self.high) != (0, None) or not self.include:
            parts.insert(0, f"/{regex.of_length(self.low, self.high)}/")
        return " & ".join(parts)


@dataclass(frozen=True)
class Array:
    """Arrays: a key for each of the first items and one for the rest; ``contains`` has keys with minimum counts."""

    prefix: tuple[Key, ...] = ()
    rest: Key = ()
    low: int = 0
    high: int | None = None
    unique: bool = False
    contains: tuple[tuple[Key, int], ...] = ()

    def at(self, index: int) -> Key:
        """The key of the item at an index."""
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True)
class Names:
    """A class of property names, by terminals that they match or do not, and the key of such properties."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    key: Key = ()

    @cached_property
    def terminal(self) -> str:
        """The JSON texts of these names, as a terminal."""
        return String(include=self.include, exclude=self.exclude).terminal

    def holds(self, name: str) -> bool:
        """Whether a name is in the class."""
        return not (self.include or self.exclude) or regex.matches(self.terminal, as_json(name))


@dataclass(frozen=True)
class Object:
    """Objects: named properties in order, then disjoint classes of other names; all other names are forbidden.

    Of each class in ``contains`` there is at least one property, whose value satisfies the key of the class.
    """

    properties: tuple[tuple[str, Key], ...] = ()
    others: tuple[Names, ...] = (Names(),)
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    contains: tuple[Names, ...] = ()
    _keys: dict[str, Key] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._keys.update(self.properties)

    def key(self, name: str) -> Key:
        """The key of the property of this name."""
        if name not in self._keys:
            found = (names.key for names in self.others if names.holds(name))
            self._keys[name] = next(found, NEVER)
        return self._keys[name]

    def with_names(self, names: tuple[str, ...]) -> Object:
        """The same set of objects, with these names moved to the named properties."""
        return replace(self, properties=tuple((name, self.key(name)) for name in dict.fromkeys((*self._named, *names))))

    def named_contained(self) -> Shapes:
        """The same set of objects as a union in which ``contains`` is about unnamed properties alone."""
        if not self.contains:
            return (self,)
        named = tuple(dict.fromkeys((*self._named, *self.required)))
        for i, names in enumerate(self.contains):
            held = [name for name in named if names.holds(name)]
            if not held:
                continue
            rest = (*self.contains[:i], *self.contains[i + 1 :])
            outside = Names(names.include, (*names.exclude, String(values=tuple(held)).terminal), names.key)
            every = self.with_names(named)
            branches = [
                replace(
                    every,
                    properties=tuple((n, join(key, names.key) if n == name else key) for n, key in every.properties),
                    required=tuple(dict.fromkeys((*self.required, name))),
                    contains=rest,
                )
                for name in held
            ]
            if any(not is_void(both(others, outside)) for others in self.others):
                branches.append(replace(every, contains=(*self.contains[:i], outside, *self.contains[i + 1 :])))
            return tuple(shape for branch in branches for shape in branch.named_contained())
        return (self,)

    @cached_property
    def needed(self) -> frozenset[str]:
        """The required names."""
        return frozenset(self.required)

    @cached_property
    def _named(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.properties)


Shape = Null | Boolean | Number | String | Array | Object
Shapes = tuple[Shape, ...]
ANYTHING: Final[Shapes] = (Null(), Boolean(), Number(), String(), Array(), Object())
MAX_SHAPES: Final = 512
# Sizes of unions that are searched for members within others: fewer are not worth it, more would take seconds.
PRUNED: Final = range(16, 129)


def fraction(value: int | float) -> Fraction:
    """The number in its decimal notation: 0.1 is a tenth, not the float nearest to it.

    A float beyond 2^53 is an integer, whose shortest notation may not give all digits.

    Raises:
        SchemaError: infinity or NaN, which JSON cannot write.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise SchemaError(f"{value} is not a JSON number")
    return Fraction(value) if abs(value) >= 2**53 else Fraction(str(value))


def of_value(value: Any) -> Shape:
    """The shape of one constant."""
    if value is None:
        return Null()
    if isinstance(value, bool):
        return Boolean(frozenset({value}))
    if isinstance(value, int | float):
        fraction(value)
        return Number(values=(value,))
    if isinstance(value, str):
        return String(values=(value,))
    if isinstance(value, list):
        keys = tuple((("value", json.dumps(item)),) for item in value)
        return Array(prefix=keys, rest=NEVER, low=len(keys), high=len(keys))
    if isinstance(value, dict):
        properties = tuple((name, (("value", json.dumps(item)),)) for name, item in value.items())
        return Object(properties=properties, others=(), required=tuple(value))
    raise SchemaError(f"{value!r} is not a JSON value")


def one_of_values(values: list[Any]) -> Shapes:
    """The shapes of a list of constants; scalars of a kind are one shape."""
    shapes = list(dict.fromkeys(map(of_value, values)))
    strings = tuple(v for s in shapes if isinstance(s, String) for v in s.values or ())
    numbers = tuple(v for s in shapes if isinstance(s, Number) for v in s.values or ())
    booleans = frozenset(v for s in shapes if isinstance(s, Boolean) for v in s.values)
    merged: list[Shape] = [s for s in shapes if not isinstance(s, String | Number | Boolean)]
    merged += [String(values=strings)] if strings else []
    merged += [Number(values=numbers)] if numbers else []
    merged += [Boolean(booleans)] if booleans else []
    return tuple(merged)


def meet_all(a: Shapes, b: Shapes) -> Shapes:
    """The intersection of two unions.

    Raises:
        UnsupportedGuide: the union would have too many members to be a usable grammar.
    """
    if a == ANYTHING or b == ANYTHING:
        return b if a == ANYTHING else a
    met = (shape for x in a for shape in _met_with(x, b))
    found = dict.fromkeys(
        part for shape in met for part in (shape.named_contained() if isinstance(shape, Object) else (shape,))
    )
    if len(found) in PRUNED:
        found = dict.fromkeys(_largest(tuple(found)))
    if len(found) > MAX_SHAPES:
        raise UnsupportedGuide(f"combining these subschemas gives more than {MAX_SHAPES} alternatives", guide="anyOf")
    return tuple(found)


def _met_with(shape: Shape, union: Shapes) -> Iterator[Shape]:
    """The intersection of a shape with each member of a union; the shape alone where it is part of a member."""
    found = [met for other in union if (met := meet(shape, other)) is not None]
    yield from (shape,) if shape in found else found


def _largest(shapes: Shapes) -> Iterator[Shape]:
    """The shapes that are not plainly part of another one; `shapes` are all different."""
    kept: list[Shape] = []
    for shape in shapes:
        if not any(_is_part(shape, other) for other in kept):
            kept = [other for other in kept if not _is_part(other, shape)]
            kept.append(shape)
    return iter(kept)


def _is_part(a: Shape, b: Shape) -> bool:
    """Whether all values of one shape are plainly in another one."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Object) and isinstance(b, Object):  # most pairs are told apart at once, and there are many
        if a.low < b.low or not a.needed >= b.needed:
            return False
        if any(name not in a._keys or join(a._keys[name], key) != a._keys[name] for name, key in b.properties):
            return False
    return meet(a, b) == a


def meet(a: Shape, b: Shape) -> Shape | None:
    """The intersection of two shapes; None if it is trivially empty."""
    match a, b:
        case Null(), Null():
            return a
        case Boolean(), Boolean():
            return Boolean(a.values & b.values) if a.values & b.values else None
        case Number(), Number():
            return _meet_numbers(a, b)
        case String(), String():
            return _meet_strings(a, b)
        case Array(), Array():
            length = max(len(a.prefix), len(b.prefix))
            return Array(
                tuple(join(a.at(i), b.at(i)) for i in range(length)),
                join(a.rest, b.rest),
                max(a.low, b.low),
                _least(a.high, b.high),
                a.unique or b.unique,
                tuple(dict.fromkeys((*a.contains, *b.contains))),
            )
        case Object(), Object():
            return _meet_objects(a, b)
    return None


def _meet_numbers(a: Number, b: Number) -> Number | None:
    if a.values is not None or b.values is not None:
        first, second = (a, b) if a.values is not None else (b, a)
        allowed = None if second.values is None else {fraction(v) for v in second.values}
        common = (v for v in first.values or () if second.holds(v) and (allowed is None or fraction(v) in allowed))
        values = tuple(int(v) if second.integer else v for v in common)
        return Number(values=values) if values else None
    low, low_open = max(_bound(a.low, a.low_open), _bound(b.low, b.low_open))
    high, high_open = max(_bound(a.high, a.high_open, -1), _bound(b.high, b.high_open, -1))
    step = a.step if b.step is None else b.step if a.step is None else _common(a.step, b.step)
    return Number(
        a.integer or b.integer,
        a.fractional or b.fractional,
        None if low == -math.inf else Fraction(low),
        low_open,
        None if high == -math.inf else -Fraction(high),
        high_open,
        step,
    )


def _bound(value: Fraction | None, is_open: bool, sign: int = 1) -> tuple[Fraction | float, bool]:
    """A bound such that the tighter of two is the greater."""
    return (-math.inf, False) if value is None else (sign * value, is_open)


def _common(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(math.lcm(a.numerator, b.numerator), math.gcd(a.denominator, b.denominator))


def _meet_strings(a: String, b: String) -> String | None:
    if a.values is not None or b.values is not None:
        first, second = (a, b) if a.values is not None else (b, a)
        common = tuple(v for v in first.values or () if second.values is None or v in second.values)
        if second.values is None and second != String():
            common = tuple(v for v in common if regex.matches(second.terminal, as_json(v)))
        return String(values=common) if common else None
    return String(
        max(a.low, b.low),
        _least(a.high, b.high),
        tuple(dict.fromkeys((*a.include, *b.include))),
        tuple(dict.fromkeys((*a.exclude, *b.exclude))),
    )


def _meet_objects(a: Object, b: Object) -> Object:
    names = dict.fromkeys((*a._named, *b._named))
    others = (both(x, y) for x in a.others for y in b.others)
    return Object(
        tuple((name, join(a.key(name), b.key(name))) for name in names),
        tuple(o for o in others if o.key != NEVER and not is_void(o)),
        tuple(dict.fromkeys((*a.required, *b.required))),
        max(a.low, b.low),
        _least(a.high, b.high),
        tuple(dict.fromkeys((*a.contains, *b.contains))),
    )


def both(a: Names, b: Names) -> Names:
    """The names in both classes, under both keys."""
    if not (a.include or a.exclude or a.key):
        return b
    if not (b.include or b.exclude or b.key):
        return a
    include, exclude = dict.fromkeys((*a.include, *b.include)), dict.fromkeys((*a.exclude, *b.exclude))
    return Names(tuple(include), tuple(exclude), join(a.key, b.key))


def is_void(names: Names) -> bool:
    """Whether a class of names has no member."""
    return bool(names.include) and (regex.begin_differently(names.include) or regex.is_empty(names.terminal))


def as_json(text: str) -> str:
    """A string as JSON, in the spelling that the grammar uses."""
    return json.dumps(text, ensure_ascii=False)


def _least(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)
