r"""Sets of JSON values written as a Lark grammar for llguidance.

Notable here:
- every scalar is one terminal, so the engine's lexer runs it as one automaton; objects and arrays are rules
- rules are written only for satisfiable keys: an optional property without possible values is left out
- in a list of distinct items, the rule's parameter is the set of items that were already used
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Final, NamedTuple

from pippin.core.errors import EmptySchema, InvalidArgument, SchemaError, UnsupportedGuide
from pippin.engine.grammar import numbers as numerals, regex
from pippin.engine.grammar.json_keywords import check_size, field_name
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

MAX_ITEMS: Final = 50
"""Maximum items of a list without `maxItems`, and free names of an object without `maxProperties`."""
MAX_LISTED: Final = 2000
MAX_DISTINCT: Final = 64
MAX_COUNTED: Final = 4000
MAX_REMAINDERS: Final = 1000
MAX_PLACES: Final = 64
MAX_NESTED: Final = (
    500  # values inside each other; the grammar's compiler goes as deep, on a stack of 8 MB to about 1,500
)


class WrittenGrammar(NamedTuple):
    """A grammar, and what of the schema it leaves out.

    Attributes:
        source: in Lark's notation.
        notes: what was ignored, a sentence each.
    """

    source: str
    notes: tuple[str, ...] = ()


def write(
    schema: Any,
    *,
    separators: tuple[str, str] = (", ", ": "),
    strict: bool = False,
    max_items: int | None = MAX_ITEMS,
) -> WrittenGrammar:
    """The Lark grammar of the JSON texts that are valid under a schema.

    Args:
        schema: JSON Schema, a dict or a boolean.
        separators: between items and after keys.
        strict: refuse unknown keywords and formats, and a property or item without any possible value even if it is
            optional: in a declared type these are mistakes.
        max_items: see `Grammar.json_schema`.

    Raises:
        SchemaError, UnsupportedGuide, UndefinedReference, EmptySchema: see `Grammar.json_schema`.

    >>> print(write({"type": "boolean"}).source)
    start: v0
    v0: T0
    T0: /(?:false|true)/
    """
    for text, mark in zip(separators, ",:", strict=True):
        if text.strip(" ") != mark:
            raise InvalidArgument(f"a separator is {mark!r} with blanks beside it, got {text!r}")
    if max_items is not None and max_items < 1:
        raise InvalidArgument(f"max_items is at least 1, or None for any number, got {max_items}")
    check_size(schema)
    root: Key = (("schema", "#"),)
    try:
        reader = SchemaReader(schema, strict=strict)
        satisfiable = _Satisfiable(reader, root)
    except RecursionError:
        raise SchemaError("the schema is nested too deep to be read, or its references are") from None
    satisfiable.check_depth(root)
    if strict:
        satisfiable.check_all()
    if root not in satisfiable.keys:
        raise EmptySchema(f"no value is valid under the schema: {satisfiable.reason(root)}")
    writer = _Writer(reader, satisfiable, separators, max_items)
    source = writer.write(root)
    return WrittenGrammar(source, (*reader.notes, *writer.shortened))


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


class _Satisfiable:
    """Which keys are satisfiable: a least fixed point over all reachable keys, so that recursion needs a base case."""

    def __init__(self, reader: SchemaReader, root: Key) -> None:
        self.reader = reader
        self.reached: dict[Key, Shapes] = {}
        waiting = [root]
        while waiting:
            key = waiting.pop()
            if key not in self.reached:
                self.reached[key] = reader.shapes(key)
                waiting.extend(child for shape in self.reached[key] for child in _children(shape))
        self.keys: set[Key] = set()
        grew = True
        while grew:
            found = {key for key in self.reached if key not in self.keys and self.any_has_values(key)}
            grew = bool(found)
            self.keys |= found

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
                inner = order(child for shape in self.reached[key] for child in _children(shape))
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
                return not shape.is_empty and _number(shape) is not None
            case String():
                return not shape.is_empty
            case Array():
                high = self.max_length(shape)
                fits = all(self.fits(shape, key) for key, _ in shape.contains)
                return fits and (high is None or max([shape.low, *(n for _, n in shape.contains)]) <= high)
            case Object():
                usable = [name for name, key in shape.properties if key in self.keys]
                required = all(shape.key(name) in self.keys for name in shape.required)
                enough = any(o.key in self.keys for o in shape.others) or shape.low <= len({*usable, *shape.required})
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
        if shape.unique and dead is None and not shape.prefix and (texts := distinct_texts(self.reached[shape.rest])):
            dead = len(texts)
        return shape.high if dead is None else dead if shape.high is None else min(dead, shape.high)

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
                low, high = _show(shape.low), _show(shape.high)
                step = f" that is a multiple of {_show(shape.step)}" if shape.step else ""
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


def _show(value: Fraction | None) -> str:
    return "any" if value is None else str(int(value)) if value.denominator == 1 else str(float(value))


def _children(shape: Shape) -> Iterator[Key]:
    if isinstance(shape, Array):
        yield from (*shape.prefix, shape.rest)
        yield from (join(item, key) for key, _ in shape.contains for item in (*shape.prefix, shape.rest))
    if isinstance(shape, Object):
        yield from (key for _, key in shape.properties)
        yield from (shape.key(name) for name in shape.required)
        yield from (names.key for names in shape.others)
        yield from (both(names, contained).key for names in shape.others for contained in shape.contains)


def distinct_texts(shapes: Shapes) -> list[str] | None:
    """The JSON texts of a finite set of scalars, one for each value; None for any other set."""
    texts: dict[Any, str] = {}
    for shape in shapes:
        match shape:
            case Null():
                texts["null"] = "null"
            case Boolean(values):
                texts.update((str(value).lower(), str(value).lower()) for value in values)
            case Number(values=tuple(numbers)):
                texts.update((fraction(value), json.dumps(value)) for value in numbers)
            case String(values=tuple(strings)):
                texts.update((f'"{value}"', json.dumps(value, ensure_ascii=False)) for value in strings)
            case _:
                return None
    return list(texts.values())


def _number(number: Number) -> str | None:
    """The terminal of a set of numbers; None if it is empty, "" if it needs a rule."""
    if number.values is not None:
        return f"/{regex.alternatives(regex.literal(json.dumps(value)) for value in number.values)}/"
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
        listed = (_decimal(factor * step) for factor in factors)
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
    parts = [f"/{numerals.notation(before, after, integer=number.integer, scientific=not (bounds or step))}/"]
    parts += [f"/{write_bound(bound)}/" for bound, write_bound in bounds]
    if number.fractional:
        parts.append(f"/{numerals.FRACTIONAL}/")
    terminal = " & ".join([*parts, *([f"/{ending}/"] if ending else [])])
    return None if regex.is_empty(terminal) else terminal


def _decimal(value: Fraction) -> str:
    """A number with finitely many decimals, written out."""
    places = next(k for k in range(400) if 10**k % value.denominator == 0)
    digits = str(abs(int(value * 10**places))).zfill(places + 1)
    text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return f"-{text}" if value < 0 else text


class _Writer:
    """Collects rules and terminals, each once."""

    def __init__(
        self, reader: SchemaReader, satisfiable: _Satisfiable, separators: tuple[str, str], max_items: int | None
    ) -> None:
        self.reader, self.satisfiable, self.max_items = reader, satisfiable, max_items
        self.shortened: dict[str, None] = {}  # notes on what is held to `max_items`
        self.comma, self.colon = map(json.dumps, separators)
        self.rules: list[str] = []
        self.terminals: dict[str, str] = {}
        self.names: dict[Key, str] = {}
        self.waiting: list[Key] = []

    def write(self, root: Key) -> str:
        return self.finish(self.value(root))

    def finish(self, first: str) -> str:
        """The grammar whose rule ``start`` is ``first``, with all rules that it refers to."""
        while self.waiting:
            key = self.waiting.pop()
            with about(key):
                choices = [
                    self.shape(shape) for shape in self.satisfiable.reached[key] if self.satisfiable.has_values(shape)
                ]
            self.rules.append(f"{self.names[key]}: {' | '.join(choices)}")
        terminals = (f"{name}: {text}" for text, name in self.terminals.items())
        return "\n".join([f"start: {first}", *self.rules, *terminals])

    def value(self, key: Key) -> str:
        """The rule of a key."""
        if key not in self.names:
            self.names[key] = f"v{len(self.names)}"
            self.waiting.append(key)
        return self.names[key]

    def terminal(self, text: str) -> str:
        return self.terminals.setdefault(text, f"T{len(self.terminals)}")

    def rule(self, body: str, name: str = "") -> str:
        name = name or f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def shape(self, shape: Shape) -> str:
        match shape:
            case Null():
                return self.terminal("/null/")
            case Boolean(values):
                return self.terminal(f"/{regex.alternatives(sorted(str(value).lower() for value in values))}/")
            case Number():
                return self.terminal(text) if (text := _number(shape)) else self.multiple(shape)
            case String():
                return self.terminal(shape.terminal)
            case Array():
                return self.array(shape)
            case Object():
                return self.object(shape)

    def multiple(self, number: Number) -> str:
        """A rule for multiples that neither last digits nor a list express: llguidance counts remainders, if few."""
        step = number.step
        assert step is not None
        places = next((k for k in range(4) if 10**k % step.denominator == 0), None)
        bounds = [abs(bound) for bound in (number.low, number.high) if bound is not None]
        simple = number.integer or step.denominator == 1 or not bounds
        if places is None or not simple or step * 10**places > MAX_REMAINDERS or max(bounds, default=0) > 2**53:
            raise UnsupportedGuide(
                f"multipleOf {_show(step)} cannot be enforced within these bounds", guide="multipleOf"
            )
        whole = number.integer or step.denominator == 1
        schema: dict[str, Any] = {
            "type": "integer" if whole else "number",
            "multipleOf": step.numerator if whole else float(step),
        }
        for keyword, bound, below, is_open in (
            ("minimum", number.low, False, number.low_open),
            ("maximum", number.high, True, number.high_open),
        ):
            if bound is not None:
                schema[keyword] = numerals.inner_integer(bound, below=below, exclusive=is_open)
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}")

    # --- arrays -------------------------------------------------------------------------------------------------------

    def array(self, shape: Array) -> str:
        high = self.satisfiable.max_length(shape)
        if shape.contains and not (shape.unique and high is not None and high <= 1):
            return self.containing(shape)
        if shape.unique and (high is None or high > 1):
            return self.distinct(shape)
        if high == 0:
            return '"[" "]"'
        if high is None and self.max_items is not None:
            high = max(self.max_items, shape.low, len(shape.prefix))
            self.shortened[f"a list without maxItems has at most {self.max_items} items"] = None
        heads = [self.value(key) for key in shape.prefix[:high]]
        body = ""
        if high is None or high > len(heads):
            # the remaining items, each after a comma; then the prefix items before them, from the last to the first
            rest, least = self.value(shape.rest), max(shape.low - len(heads), 0)
            if not heads:
                more = self.again(rest, max(least - 1, 0), None if high is None else high - 1)
                body = f"{rest} {more}".strip()
                return f'"[" {body} "]"' if shape.low else f'"[" ({body})? "]"'
            body = self.again(rest, least, None if high is None else high - len(heads))
        for index in reversed(range(len(heads))):
            body = f"{self.comma if index else ''} {heads[index]} {body}".strip()
            if index >= shape.low:
                body = f"({body})?"
        return f'"[" {body} "]"'

    def distinct(self, shape: Array) -> str:
        texts = distinct_texts(self.satisfiable.reached[shape.rest])
        if shape.prefix or shape.contains or texts is None or len(texts) > MAX_DISTINCT:
            reason = f"uniqueItems needs items from a list of at most {MAX_DISTINCT} scalars (enum, const, boolean)"
            raise UnsupportedGuide(reason, guide="uniqueItems")
        bits = f"[0:{len(texts)}]"
        first, more = f"u{len(self.rules)}", f"w{len(self.rules)}"
        most = len(texts) if shape.high is None else shape.high
        items = [self.terminal(f"/{regex.literal(text)}/") for text in texts]
        choices = (f"{item} {more}::set_bit({i}) %if bit_clear({i})" for i, item in enumerate(items))
        self.rule(" | ".join(choices), f"{first}::_")
        again = f"{self.comma} {first}::_ %if bit_count_lt({bits}, {most})"
        self.rule(f'"" %if bit_count_ge({bits}, {shape.low}) | {again}', f"{more}::_")
        return f'"[" {first}::0x0 "]"' if shape.low else f'"[" ({first}::0x0)? "]"'

    def containing(self, shape: Array) -> str:
        (key, least), *more = shape.contains
        high = self.satisfiable.max_length(shape)
        bounded = high is not None or shape.low > least
        if more or shape.unique or shape.prefix or (bounded and (least > 1 or (high or shape.low) > MAX_PLACES)):
            raise UnsupportedGuide(
                "contains cannot be enforced beside other keywords about the number of items", guide="contains"
            )
        item, fits = self.value(shape.rest), self.value(join(shape.rest, key))
        if bounded:
            return self.containing_one(item, fits, shape.low, high)
        again = f"(({self.comma} {item})* {self.comma} {fits}){{{least - 1}}}" if least > 1 else ""
        return f'"[" ({item} {self.comma})* {fits} {again} ({self.comma} {item})* "]"'

    def containing_one(self, item: str, fits: str, low: int, high: int | None) -> str:
        """``low`` to ``high`` items of which at least one fits: one choice for each number of items before it."""
        choices = []
        for before in range(low if high is None else high):
            after = self.again(item, max(low - 1 - before, 0), None if high is None else high - 1 - before)
            last = before == low - 1 and high is None
            earlier = f"({item} {self.comma}){{{before}{',' if last else f',{before}'}}}" if before or last else ""
            choices.append(f"{earlier} {fits} {after}".strip())
        return f'"[" ({" | ".join(choices)}) "]"'

    def again(self, item: str, low: int, high: int | None) -> str:
        """``low`` to ``high`` more items, each after a comma."""
        return "" if high == 0 else f"({self.comma} {item}){{{low},{'' if high is None else high}}}"

    # --- objects ------------------------------------------------------------------------------------------------------

    def object(self, shape: Object) -> str:
        return f'"{{" {self.entries(shape)} "}}"'

    def entry(self, name: str, key: Key) -> str:
        """A named property."""
        return f"{self.terminal(String(values=(name,)).terminal)} {self.colon} {self.value(key)}"

    def entries(self, shape: Object) -> str:
        """The properties of an object, without the braces."""
        shape = shape.with_names(shape.required)
        satisfiable = [(name, key) for name, key in shape.properties if key in self.satisfiable.keys]
        entries = [self.entry(name, key) for name, key in satisfiable]
        needed = [name in shape.required for name, _ in satisfiable]
        taken = tuple(String(values=tuple(n for n, _ in shape.properties)).terminal for _ in (1,) if shape.properties)
        others = [self.other(names, taken) for names in shape.others if names.key in self.satisfiable.keys]
        other = self.rule(" | ".join(others)) if len(others) > 1 else "".join(others)
        if shape.contains:
            return self.containing_object(shape, entries, needed, other, taken)
        if shape.high is None and shape.low <= max(sum(needed), int(not entries and bool(other))):
            least_others = 1 if shape.low > sum(needed) else 0
            return self.uncounted(entries, needed, other, least_others)
        return self.counted(entries, needed, other, shape.low, shape.high)

    def containing_object(
        self, shape: Object, entries: list[str], needed: list[bool], other: str, taken: tuple[str, ...]
    ) -> str:
        """Entries in order, then others of which at least one is of a class."""
        if len(shape.contains) > 1 or shape.high is not None or shape.low > sum(needed) + 1:
            raise UnsupportedGuide(
                "not cannot be enforced for an object beside other keywords about the number of properties", guide="not"
            )
        wanted = self.satisfiable.contained(shape, shape.contains[0])
        must = self.rule(" | ".join(self.other(names, taken) for names in wanted))
        after = f"({self.comma} {other})* {self.comma} {must} ({self.comma} {other})*"
        first = f"({other} {self.comma})* {must} ({self.comma} {other})*"
        tails = [after]
        for entry, is_needed in zip(reversed(entries), reversed(needed), strict=True):
            tails.append(self.rule(f"{self.comma} {entry} {tails[-1]}" + ("" if is_needed else f" | {tails[-1]}")))
        tails.reverse()
        choices = []
        for index, (entry, is_needed) in enumerate(zip(entries, needed, strict=True)):
            choices.append(f"{entry} {tails[index + 1]}")
            if is_needed:
                break
        else:
            choices.append(first)
        return f"({' | '.join(choices)})"

    def other(self, names: Names, taken: tuple[str, ...]) -> str:
        key = String(include=names.include, exclude=(*names.exclude, *taken)).terminal
        return f"{self.terminal(key)} {self.colon} {self.value(names.key)}"

    def uncounted(self, entries: list[str], needed: list[bool], other: str, least_others: int) -> str:
        """Entries in order; each after the first begins with a comma."""
        more = self.again(other, 0, None if self.max_items is None else self.max_items - 1) if other else ""
        if more and self.max_items is not None:
            self.shortened[f"an object without maxProperties has at most {self.max_items} free names"] = None
        if not entries:
            return f"{other} {more}" if least_others else f"({other} {more})?" if other else ""
        tails = [more]
        for entry, must in zip(reversed(entries), reversed(needed), strict=True):
            body = f"{self.comma} {entry}" if must else f"({self.comma} {entry})?"
            tails.append(self.rule(f"{body} {tails[-1]}") if tails[-1] or not must else body)
        tails.reverse()
        choices = []
        for index, (entry, must) in enumerate(zip(entries, needed, strict=True)):
            choices.append(f"{entry} {tails[index + 1]}")
            if must:
                return f"({' | '.join(choices)})"
        return f"({' | '.join([*choices, *([f'{other} {more}'] if other else [])])})?"

    def counted(self, entries: list[str], needed: list[bool], other: str, low: int, high: int | None) -> str:
        """Entries in order, with their count as part of the state; other names may repeat, so they count once."""
        if low > len(entries) + bool(other):
            reason = "needs distinct free names, which cannot be enforced; give the names with properties or an enum"
            raise UnsupportedGuide(f"minProperties {low} {reason}", guide="minProperties")
        most = len(entries) + 1 if high is None else min(high, MAX_COUNTED)
        if (len(entries) + 1) * (most + 1) > MAX_COUNTED:
            raise UnsupportedGuide(
                f"counting {len(entries)} properties up to {most} makes too large a grammar", guide="maxProperties"
            )
        states: dict[tuple[int, int], str | None] = {}
        for index in range(len(entries), -1, -1):
            for count in range(min(index, most) + 1):
                states[index, count] = self.count(index, count, states, entries, needed, other, low, high)
        found = states[0, 0]
        if found is None:
            raise UnsupportedGuide("minProperties cannot be enforced beside free names", guide="minProperties")
        return found

    def count(self, index: int, count: int, states: dict[tuple[int, int], str | None], entries: list[str],
              needed: list[bool], other: str, low: int, high: int | None) -> str | None:  # fmt: skip
        """The rule after ``count`` of the first ``index`` entries; None if nothing can follow."""
        comma = f"{self.comma} " if count else ""
        if index == len(entries):
            return self.last_entries(comma, low - count, None if high is None else high - count, other)
        taken = None if high is not None and count >= high else states[index + 1, count + 1]
        skipped = None if needed[index] else states[index + 1, count]
        choices = [f"{comma}{entries[index]} {taken}"] if taken is not None else []
        choices += [skipped] if skipped is not None else []
        return self.rule(" | ".join(choices)) if choices else None

    def last_entries(self, comma: str, low: int, high: int | None, other: str) -> str | None:
        if low > (1 if other else 0) or (low == 1 and high == 0):
            return None
        if not other or high == 0:
            return '""'
        body = f"{comma}{other} {self.again(other, 0, None if high is None else high - 1)}".strip()
        return self.rule(body if low == 1 else f"({body})?")
