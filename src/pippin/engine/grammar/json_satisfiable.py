"""Which parts of a schema have values, how many, and where items or names may run out.

Notable here:
- satisfiable is what a least fixed point reaches, so that recursion needs a base case
- counts are exact where that is easy and lower bounds elsewhere: a list of distinct items is refused if its items may
  run out before it is long enough
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Final

from pippin.core.errors import EmptySchema, SchemaError, UnsupportedGuide
from pippin.engine.grammar import numbers as numerals, regex
from pippin.engine.grammar.json_keywords import field_name
from pippin.engine.grammar.json_schema import SchemaReader
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
    both,
    fraction,
    is_void,
    join,
)

MAX_LISTED: Final = 2000
MAX_NESTED: Final = (
    500  # values inside each other; the grammar's compiler goes as deep, on a stack of 8 MB to about 1,500
)


@contextmanager
def about(key: Key) -> Iterator[None]:
    """Add the name of the field to an `UnsupportedGuide`."""
    try:
        yield
    except UnsupportedGuide as error:
        if error.field or not key:
            raise
        where = key[-1][1]
        raise UnsupportedGuide(f"{where}: {error}", field=field_name(where), guide=error.guide) from error


class Satisfiable:
    """Which keys are satisfiable: a least fixed point over all reachable keys, so that recursion needs a base case.

    Attributes:
        reached: the shapes of every key that can be reached.
        rounds: in which round of the fixed point a key was found to be satisfiable.
        keys: those that count as satisfiable; see `below`.
    """

    def __init__(self, reader: SchemaReader, root: Key) -> None:
        self.reader = reader
        self.reached: dict[Key, Shapes] = {}
        waiting = [root]
        while waiting:
            key = waiting.pop()
            if key not in self.reached:
                self.reached[key] = reader.shapes(key)
                waiting.extend(child for shape in self.reached[key] for child in children(shape))
        self.rounds: dict[Key, int] = {}
        self.keys: Container[Key] = self.rounds.keys()
        grew = True
        while grew:
            found = [key for key in self.reached if key not in self.rounds and self.any_has_values(key)]
            grew = bool(found)
            self.rounds |= dict.fromkeys(found, max(self.rounds.values(), default=0) + 1)

    @contextmanager
    def below(self, key: Key, leading: Container[Key]) -> Iterator[None]:
        """Within it, the keys among ``leading`` count as satisfiable only if the fixed point reaches them before this.

        A key still has values then, and none of them leads back to it.
        """
        before, most = self.keys, self.rounds[key]
        self.keys = {each for each, at in self.rounds.items() if at < most or each not in leading}
        try:
            yield
        finally:
            self.keys = before

    def check_depth(self, root: Key) -> None:
        """Refuse values that are nested too deep, directly or by reference; recursion does not count as depth.

        Raises:
            SchemaError: more than `MAX_NESTED` levels.
        """
        # in the order of the compiler: it descends into each value once, forward or backward
        for order in (list, lambda keys: list(keys)[::-1]):
            path, seen = [iter([root])], set[Key]()
            while path:
                key = next((key for key in path[-1] if key not in seen), None)
                if key is None:
                    path.pop()
                    continue
                inner = order(child for shape in self.reached[key] for child in children(shape))
                path.append(iter(inner))
                seen.add(key)
                if len(path) > MAX_NESTED:
                    raise SchemaError(f"values of the schema lie more than {MAX_NESTED} levels inside each other")

    def any_has_values(self, key: Key) -> bool:
        """Whether a key is satisfiable, given the keys that are known to be."""
        with about(key):
            return any(map(self.has_values, self.reached[key]))

    def has_values(self, shape: Shape) -> bool:
        """Whether a shape is satisfiable, given the keys that are known to be."""
        match shape:
            case Number(values=None):
                return not shape.is_empty and number_terminal(shape) is not None
            case String():
                return not shape.is_empty
            case Array():
                high = self.max_length(shape)
                fits = all(self.fits(shape, key) for key, _ in shape.contains)
                return fits and (high is None or max([shape.low, *(n for _, n in shape.contains)]) <= high)
            case Object():
                usable = [name for name, key in shape.properties if key in self.keys]
                required = all(shape.key(name) in self.keys for name in shape.required)
                missing = shape.low - len({*usable, *shape.required})
                enough = missing <= 0 or self.count_names(shape, missing) >= missing
                contained = all(self.contained(shape, names) for names in shape.contains)
                return (
                    required
                    and enough
                    and contained
                    and (shape.high is None or max(shape.low, len(shape.required)) <= shape.high)
                )
        return True

    def contained(self, shape: Object, wanted: Names) -> list[Names]:
        """The classes of unnamed properties that are among those wanted."""
        found = (both(names, wanted) for names in shape.others)
        return [names for names in found if names.key in self.keys and not is_void(names)]

    def fits(self, shape: Array, key: Key) -> bool:
        return any(join(k, key) in self.keys for k in (*shape.prefix, shape.rest))

    def max_length(self, shape: Array) -> int | None:
        """Maximum number of items of an array, given the keys that are known to be satisfiable."""
        dead = next((i for i, key in enumerate(shape.prefix) if key not in self.keys), None)
        if dead is None and shape.rest not in self.keys:
            dead = len(shape.prefix)
        if shape.unique and dead is None and not shape.prefix and (found := scalars(self.reached[shape.rest])):
            dead = len(found)
        return shape.high if dead is None else dead if shape.high is None else min(dead, shape.high)

    # --- how many ---------------------------------------------------------------------------------------------------

    def count(self, key: Key, enough: int, depth: int = 8) -> int:
        """How many values a key has, or fewer than that where they are hard to count; at most ``enough``."""
        if key not in self.keys or depth == 0:
            return int(key in self.keys)
        if (listed := scalars(self.reached[key])) is not None:
            return min(len(listed), enough)
        most: dict[type, int] = {}  # values of one type may be in several shapes
        for shape in self.reached[key]:
            if self.has_values(shape):
                most[type(shape)] = max(most.get(type(shape), 0), self._count(shape, enough, depth - 1))
        return min(sum(most.values()), enough)

    def _count(self, shape: Shape, enough: int, depth: int) -> int:
        match shape:
            case Null() | Boolean() | Number() if (listed := scalars((shape,))) is not None:
                return len(listed)
            case Number():
                step = Fraction(shape.step.numerator if shape.step else 1) if shape.integer else shape.step
                if shape.low is None or shape.high is None or (step is None and shape.low < shape.high):
                    return enough
                return 1 if step is None else len(shape.factors(step))
            case String():
                plain = shape.values is None and not shape.include and not shape.exclude and shape.high != 0
                return enough if plain else regex.count_texts(shape.terminal, enough)
            case Array():
                high = self.max_length(shape)
                lengths = min(enough if high is None else high - shape.low + 1, enough)
                first = self.count(shape.at(0), enough, depth) if high != 0 else 1
                return lengths if shape.low == 0 else max(first, 1 if shape.unique else lengths)
            case Object():
                return self._count_objects(shape, enough, depth)
        return 1

    def _count_objects(self, shape: Object, enough: int, depth: int) -> int:
        if shape.high is None and any(not _narrow(names, shape) for names in shape.others if names.key in self.keys):
            return enough
        found = 1
        for name, key in shape.properties:
            must = name in shape.required
            if key in self.keys and (must or (shape.high is None and shape.low <= len(shape.required))):
                found *= self.count(key, enough, depth) + (not must)
            if found >= enough:
                return enough
        return found

    def count_names(self, shape: Object, enough: int) -> int:
        """How many free names an object can have, at most ``enough``."""
        classes = [names for names in shape.others if names.key in self.keys]
        if not all(_narrow(names, shape) for names in classes):
            return enough
        taken = tuple(String(values=(name,)).terminal for name, _ in shape.properties)
        terminals = (String(include=names.include, exclude=(*names.exclude, *taken)).terminal for names in classes)
        return min(sum(regex.count_texts(terminal, enough) for terminal in terminals), enough)

    # --- what must differ -------------------------------------------------------------------------------------------

    def is_plain(self, shape: Array) -> bool:
        """Whether each beginning of an item goes on in any number of ways."""
        shapes = [shape for key in (*shape.prefix, shape.rest) for shape in self.reached[key]]
        return all(each == String() for each in shapes)

    def names_are_scarce(self, shape: Object) -> bool:
        """Whether the beginning of a free name may go on in a few ways only."""
        return any(_narrow(names, shape) for names in shape.others if names.key in self.keys)

    def check_distinct(self, shape: Array) -> None:
        """Refuse a list whose first items could be chosen such that no other item is left.

        Raises:
            UnsupportedGuide: there may be fewer different items than the list needs.
        """
        for at in range(min(shape.low, len(shape.prefix))):
            if at and self.count(shape.prefix[at], at + 1) <= at:
                raise UnsupportedGuide(f"uniqueItems leaves too little choice for item {at}", guide="uniqueItems")
        if shape.low > max(len(shape.prefix), 1) and self.count(shape.rest, shape.low) < shape.low:
            raise UnsupportedGuide(
                f"uniqueItems needs {shape.low} different items, and there may be fewer", guide="uniqueItems"
            )
        for key, least in shape.contains:
            if least > 1 and self.count(join(shape.rest, key), least) < least:
                raise UnsupportedGuide(
                    f"uniqueItems needs {least} different items that fit contains, and there may be fewer",
                    guide="uniqueItems",
                )

    def compares_fractions(self) -> bool:
        """Whether items that must differ may hold numbers with several spellings."""
        lists = (s for shapes in self.reached.values() for s in shapes if isinstance(s, Array) and s.unique)
        waiting = [key for shape in lists for key in (*shape.prefix, shape.rest)]
        seen: set[Key] = set()
        while waiting:
            key = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            for shape in self.reached[key]:
                numbers = isinstance(shape, Number) and not shape.integer and (shape.values or (0.5,))
                if numbers and any(isinstance(value, float) for value in numbers):
                    return True
                waiting.extend(children(shape))
        return False

    def check_all(self) -> None:
        for key in self.reached:
            if key not in self.keys and key != NEVER:
                raise EmptySchema(f"no value is possible for {field_name(key[-1][1])!r}: {self.reason(key)}")

    def reason(self, key: Key) -> str:
        """Why a key has no values, for an error message."""
        where = " and ".join(pointer for _, pointer in key) or "the schema"
        shapes = self.reached.get(key, ())
        if not shapes:
            return f"the constraints at {where} contradict each other"
        return f"at {where}, " + "; ".join(map(self._why, shapes))

    def _why(self, shape: Shape) -> str:
        match shape:
            case Number():
                low, high = shown(shape.low), shown(shape.high)
                step = f" that is a multiple of {shown(shape.step)}" if shape.step else ""
                kind = "integer" if shape.integer else "number"
                above, below = ">" if shape.low_open else ">=", "<" if shape.high_open else "<="
                return f"there is no {kind} {above} {low} and {below} {high}{step}"
            case String():
                most = "any" if shape.high is None else shape.high
                return f"no string of {shape.low} to {most} characters fits the pattern or format"
            case Array():
                return f"an array needs at least {shape.low} items, but can have at most {self.max_length(shape)}"
            case Object():
                dead = [name for name in shape.required if shape.key(name) not in self.keys]
                if dead:
                    return f"the required property {dead[0]!r} can have no value (does the recursion end?)"
                return (
                    f"an object needs at least {max(shape.low, len(shape.required))} properties, which it cannot have"
                )
        return "nothing fits"


def _narrow(names: Names, shape: Object) -> bool:
    """Whether a class of free names is not all names but those of the object."""
    listed = String(values=tuple(name for name, _ in shape.properties)).terminal if shape.properties else ""
    return bool(names.include) or any(terminal != listed for terminal in names.exclude)


def shown(value: Fraction | None) -> str:
    """A bound in an error message."""
    return "any" if value is None else str(int(value)) if value.denominator == 1 else str(float(value))


def children(shape: Shape) -> Iterator[Key]:
    """The keys of what lies in a value of this shape."""
    if isinstance(shape, Array):
        yield from (*shape.prefix, shape.rest)
        yield from (join(item, key) for key, _ in shape.contains for item in (*shape.prefix, shape.rest))
    if isinstance(shape, Object):
        yield from (key for _, key in shape.properties)
        yield from (shape.key(name) for name in shape.required)
        yield from (names.key for names in shape.others)
        yield from (both(names, contained).key for names in shape.others for contained in shape.contains)


def scalars(shapes: Shapes) -> set[Any] | None:
    """A finite set of scalars; None for any other set."""
    found: set[Any] = set()
    for shape in shapes:
        match shape:
            case Null():
                found.add(None)
            case Boolean(values):
                found.update(str(value) for value in values)
            case Number(values=tuple(numbers)):
                found.update(map(fraction, numbers))
            case String(values=tuple(strings)):
                found.update(f'"{value}"' for value in strings)
            case _:
                return None
    return found


def number_terminal(number: Number, *, plain: bool = False) -> str | None:
    """The terminal of a set of numbers; None if it is empty, "" if it needs a rule; ``plain``: in one spelling each."""
    if number.values is not None:
        texts = [decimal(fraction(value)) if plain else json.dumps(value) for value in number.values]
        return f"/{regex.alternatives(map(regex.literal, dict.fromkeys(texts)))}/"
    step = number.step
    if number.fractional and step:
        raise UnsupportedGuide("multipleOf cannot be enforced beside numbers that are no integers", guide="multipleOf")
    if number.integer:
        step = Fraction(step.numerator) if step else None
    ending = numerals.multiples(step, integer=number.integer) if step else ""
    if step and ending is None:
        if number.low is None or number.high is None:
            return ""
        factors = number.factors(step)
        if factors.stop - factors.start > MAX_LISTED:
            return ""
        listed = (decimal(factor * step) for factor in factors)
        return f"/{regex.alternatives(map(regex.literal, listed))}/" if factors else None
    bounds = []
    for bound, below, is_open, write_bound in (
        (number.low, False, number.low_open, numerals.at_least),
        (number.high, True, number.high_open, numerals.at_most),
    ):
        if bound is not None:
            if (length := max(numerals.digits_needed(bound))) > numerals.MAX_DIGITS:
                guide = "maximum" if below else "minimum"
                raise UnsupportedGuide(
                    f"{guide} has {length:,} digits and may have {numerals.MAX_DIGITS}; take a bound that fits a float",
                    guide=guide,
                )
            inner = numerals.inner(bound, below=below, exclusive=is_open, integer=number.integer)
            if inner is None:
                return None
            bounds.append((inner, write_bound))
    digits = [numerals.digits_needed(bound) for bound in (number.low, number.high, Fraction(0)) if bound is not None]
    before, after = (max(sizes) for sizes in zip(*digits, strict=True))
    scientific = not (bounds or step or plain)
    parts = [f"/{numerals.notation(before, after, integer=number.integer, scientific=scientific)}/"]
    if plain and not number.integer:
        parts.append(f"/{numerals.SHORTEST}/")
        if max(before, after) == numerals.DIGITS:
            parts.append(f"/{numerals.FEW_DIGITS}/")
    parts += [f"/{write_bound(bound)}/" for bound, write_bound in bounds]
    if number.fractional:
        parts.append(f"/{numerals.FRACTIONAL}/")
    terminal = " & ".join([*parts, *([f"/{ending}/"] if ending else [])])
    return None if regex.is_empty(terminal) else terminal


def decimal(value: Fraction) -> str:
    """A number with finitely many decimals, written out."""
    places = next(k for k in range(400) if 10**k % value.denominator == 0)
    digits = str(abs(int(value * 10**places))).zfill(places + 1)
    text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return f"-{text}" if value < 0 else text
