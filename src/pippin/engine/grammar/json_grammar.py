r"""Sets of JSON values written as a Lark grammar for llguidance.

Notable here:
- every scalar is one terminal, so the engine's lexer runs it as one automaton; objects and arrays are rules
- rules are written only for satisfiable keys: an optional property without possible values is left out
- brackets of lists of distinct items, and of objects with free names, have rules of their own, which `repeats` knows
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from pippin.core.errors import EmptySchema, InvalidArgument, SchemaError, UnsupportedGuide
from pippin.engine.grammar import numbers as numerals, regex
from pippin.engine.grammar.json_keywords import check_size
from pippin.engine.grammar.json_recursion import (
    ITEM,
    LEVEL,
    MAX_NESTED_LISTS,
    MOST_LEVELS,
    NEVER,
    PROPERTY,
    Recursion,
)
from pippin.engine.grammar.json_satisfiable import Satisfiable, about, number_terminal, shown
from pippin.engine.grammar.json_schema import SchemaReader
from pippin.engine.grammar.json_values import (
    Array,
    Boolean,
    Key,
    Names,
    Null,
    Number,
    Object,
    Shape,
    String,
    join,
)
from pippin.engine.grammar.repeats import COMMA, ITEMS, NAMES, SCARCE_ITEMS, SCARCE_NAMES

MAX_ITEMS: Final = 50
"""Maximum items of a list without `maxItems`, and free names of an object without `maxProperties`."""
MAX_COUNTED: Final = 4000
MAX_REMAINDERS: Final = 1000
MAX_PLACES: Final = 64
MAX_FLAT: Final = 32


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
        satisfiable = Satisfiable(reader, root)
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


class _Writer:
    """Collects rules and terminals, each once."""

    def __init__(
        self, reader: SchemaReader, satisfiable: Satisfiable, separators: tuple[str, str], max_items: int | None
    ) -> None:
        self.reader, self.satisfiable, self.max_items = reader, satisfiable, max_items
        self.shortened: dict[str, None] = {}  # notes on what is held to `max_items`
        self.plain_numbers = satisfiable.compares_fractions()
        self.watched_rules: set[str] = set()
        self.comma, self.colon = map(json.dumps, separators)
        self.rules: list[str] = []
        self.bodies: dict[str, str] = {}  # of rules, with their names
        self.terminals: dict[str, str] = {}
        self.names: dict[tuple[Key, bool], str] = {}  # of the rules of keys, at any level and at the last one
        self.waiting: list[tuple[Key, bool]] = []
        self.recursion = None if max_items is None else Recursion(satisfiable)
        self.present: Key | None = None  # whose values are being written
        self.is_last_level = False

    def write(self, root: Key) -> str:
        return self.finish(self.value(root))

    def finish(self, first: str) -> str:
        """The grammar whose rule ``start`` is ``first``, with all rules that it refers to."""
        while self.waiting:
            key, is_last_level = self.waiting.pop()
            body = self.last_level(key) if is_last_level else self.levels(key)
            self.rules.append(f"{self.names[key, is_last_level]}: {body}")
        terminals = (f"{name}: {text}" for text, name in self.terminals.items())
        return "\n".join([f"start: {first.replace('::_', '::0x0')}", *self.rules, *terminals])

    def value(self, key: Key, level: str = PROPERTY) -> str:
        """The rule of a key; ``level`` is where a value inside one of its own kind is counted."""
        if self.recursion is None or key not in self.recursion.leading:
            return self.rule_of(key)
        if self.is_last_level:
            return self.rule_of(key, is_last_level=True)
        name = self.rule_of(key)
        if self.present not in self.recursion.inside or key not in self.recursion.inside:
            return name
        if LEVEL not in self.bodies:
            self.bodies[LEVEL] = "level::_"
            self.rules.append(LEVEL)
        return self.rule(f"level::_ {name.removesuffix('_')}incr({level}) | {NEVER}")

    def rule_of(self, key: Key, *, is_last_level: bool = False) -> str:
        """The name of the rule of a key, which is written later, with its parameter."""
        if (key, is_last_level) not in self.names:
            counted = self.recursion is not None and key in self.recursion.leading and not is_last_level
            self.names[key, is_last_level] = f"v{len(self.names)}{'::_' if counted else ''}"
            self.waiting.append((key, is_last_level))
        return self.names[key, is_last_level]

    def levels(self, key: Key) -> str:
        """The body of the rule of a key, for any number of levels above it."""
        with about(key):
            self.present = key
            choices = " | ".join(self.choices(key))
            self.present = None
        if self.recursion is None or key not in self.recursion.leading:
            return choices
        if key not in self.recursion.inside:
            return f"{self.rule(choices)} | {NEVER}"
        assert self.max_items is not None
        self.shortened[
            f"a value inside values of its own kind lies at most {self.max_items} levels deep, and at most "
            f"{MAX_NESTED_LISTS} as items or under free names"
        ] = None
        room = f"and(lt({ITEM}, {MAX_NESTED_LISTS}), lt({PROPERTY}, {min(self.max_items, MOST_LEVELS)}))"
        return f"{self.rule(choices)} %if {room} | {self.rule_of(key, is_last_level=True)} %if not({room})"

    def last_level(self, key: Key) -> str:
        """The body of the rule of a key that does not lead back to it."""
        assert self.recursion is not None
        self.is_last_level = True
        try:
            with self.satisfiable.below(key, self.recursion.leading):
                return " | ".join(self.choices(key))
        except UnsupportedGuide:  # too few values are left for distinct items: then it goes on
            return self.rule_of(key).replace("::_", "::0x0")
        finally:
            self.is_last_level = False

    def choices(self, key: Key) -> list[str]:
        return [self.shape(shape) for shape in self.satisfiable.reached[key] if self.satisfiable.has_values(shape)]

    def terminal(self, text: str) -> str:
        return self.terminals.setdefault(text, f"T{len(self.terminals)}")

    def rule(self, body: str, name: str = "") -> str:
        """A rule of this body: the one that has it already, unless the new one has a name of its own."""
        if not name and body in self.bodies:
            return self.bodies[body]
        name = (name or f"r{len(self.rules)}") + ("::_" if "::_" in body else "")
        self.rules.append(f"{name}: {body}")
        return self.bodies.setdefault(body, name)

    def shape(self, shape: Shape) -> str:
        match shape:
            case Null():
                return self.terminal("/null/")
            case Boolean(values):
                return self.terminal(f"/{regex.alternatives(sorted(str(value).lower() for value in values))}/")
            case Number():
                text = number_terminal(shape, plain=self.plain_numbers)
                return self.terminal(text) if text else self.multiple(shape)
            case String():
                return self.terminal(shape.terminal)
            case Array():
                return self.array(shape)
            case Object():
                return self.object(shape)

    def watched(self, text: str, name: str) -> str:
        """The rule of a bracket or comma after which something must not repeat; `repeats` knows it by its name."""
        if name not in self.watched_rules:
            self.watched_rules.add(name)
            self.rule(text, name)
        return name

    def multiple(self, number: Number) -> str:
        """A rule for multiples that neither last digits nor a list express: llguidance counts remainders, if few."""
        step = number.step
        assert step is not None
        places = next((k for k in range(4) if 10**k % step.denominator == 0), None)
        bounds = [abs(bound) for bound in (number.low, number.high) if bound is not None]
        simple = number.integer or step.denominator == 1 or not bounds
        if places is None or not simple or step * 10**places > MAX_REMAINDERS or max(bounds, default=0) > 2**53:
            raise UnsupportedGuide(
                f"multipleOf {shown(step)} cannot be enforced within these bounds", guide="multipleOf"
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
        if high == 0:
            return '"[" "]"'
        begin, comma = '"["', self.comma
        if shape.unique and (high is None or high > 1):
            self.satisfiable.check_distinct(shape)
            begin = self.watched('"["', ITEMS if self.satisfiable.is_plain(shape) else SCARCE_ITEMS)
            comma = self.watched(self.comma, COMMA)
        if shape.contains and not (shape.unique and high is not None and high <= 1):
            return self.containing(shape, begin, comma)
        if high is None and self.max_items is not None:
            high = max(self.max_items, shape.low, len(shape.prefix))
            self.shortened[f"a list without maxItems has at most {self.max_items} items"] = None
        heads = [self.value(key, ITEM) for key in shape.prefix[:high]]
        body = ""
        if high is None or high > len(heads):
            # the remaining items, each after a comma; then the prefix items before them, from the last to the first
            rest, least = self.value(shape.rest, ITEM), max(shape.low - len(heads), 0)
            if not heads:
                more = self.again(rest, max(least - 1, 0), None if high is None else high - 1, comma)
                body = f"{rest} {more}".strip()
                return f'{begin} {body} "]"' if shape.low else f'{begin} ({body})? "]"'
            body = self.again(rest, least, None if high is None else high - len(heads), comma)
        for index in reversed(range(len(heads))):
            body = f"{comma if index else ''} {heads[index]} {body}".strip()
            if index >= shape.low:
                body = f"({body})?"
        return f'{begin} {body} "]"'

    def containing(self, shape: Array, begin: str, comma: str) -> str:
        (key, least), *more = shape.contains
        high = self.satisfiable.max_length(shape)
        bounded = high is not None or shape.low > least
        if more or shape.prefix or (bounded and (least > 1 or (high or shape.low) > MAX_PLACES)):
            raise UnsupportedGuide(
                "contains cannot be enforced beside other keywords about the number of items", guide="contains"
            )
        item, fits = self.value(shape.rest, ITEM), self.value(join(shape.rest, key), ITEM)
        if bounded:
            return self.containing_one(begin, comma, item, fits, shape.low, high)
        again = f"(({comma} {item})* {comma} {fits}){{{least - 1}}}" if least > 1 else ""
        return f'{begin} ({item} {comma})* {fits} {again} ({comma} {item})* "]"'

    def containing_one(self, begin: str, comma: str, item: str, fits: str, low: int, high: int | None) -> str:
        """``low`` to ``high`` items of which at least one fits: one choice for each number of items before it."""
        choices = []
        for before in range(low if high is None else high):
            after = self.again(item, max(low - 1 - before, 0), None if high is None else high - 1 - before, comma)
            last = before == low - 1 and high is None
            earlier = f"({item} {comma}){{{before}{',' if last else f',{before}'}}}" if before or last else ""
            choices.append(f"{earlier} {fits} {after}".strip())
        return f'{begin} ({" | ".join(choices)}) "]"'

    def again(self, item: str, low: int, high: int | None, comma: str = "") -> str:
        """``low`` to ``high`` more items, each after a comma."""
        return "" if high == 0 else f"({comma or self.comma} {item}){{{low},{'' if high is None else high}}}"

    # --- objects ------------------------------------------------------------------------------------------------------

    def object(self, shape: Object) -> str:
        begin, entries = self.properties(shape)
        return f'{begin} {entries} "}}"'

    def entry(self, name: str, key: Key) -> str:
        """A named property."""
        return f"{self.terminal(String(values=(name,)).terminal)} {self.colon} {self.value(key)}"

    def entries(self, shape: Object) -> str:
        """The properties of an object, without the braces."""
        return self.properties(shape)[1]

    def properties(self, shape: Object) -> tuple[str, str]:
        """The opening brace of an object, and its properties."""
        shape = shape.with_names(shape.required)
        satisfiable = [(name, key) for name, key in shape.properties if key in self.satisfiable.keys]
        entries = [self.entry(name, key) for name, key in satisfiable]
        needed = [name in shape.required for name, _ in satisfiable]
        taken = tuple(String(values=tuple(n for n, _ in shape.properties)).terminal for _ in (1,) if shape.properties)
        others = [self.other(names, taken) for names in shape.others if names.key in self.satisfiable.keys]
        other = self.rule(" | ".join(others)) if len(others) > 1 else "".join(others)
        begin = '"{"'
        if other:
            begin = self.watched('"{"', SCARCE_NAMES if self.satisfiable.names_are_scarce(shape) else NAMES)
        if shape.contains:
            return begin, self.containing_object(shape, entries, needed, other, taken)
        if shape.high is None and shape.low <= max(sum(needed), int(not entries and bool(other))):
            least_others = 1 if shape.low > sum(needed) else 0
            return begin, self.uncounted(entries, needed, other, least_others)
        return begin, self.counted(entries, needed, other, shape.low, shape.high)

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
        return f"{self.terminal(key)} {self.colon} {self.value(names.key, ITEM)}"

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
                return f"({self.any_of(choices)})"
        return f"({self.any_of([*choices, *([f'{other} {more}'] if other else [])])})?"

    def any_of(self, choices: list[str]) -> str:
        """One of these; many are a chain of rules, whose end is shared with objects that end alike."""
        if len(choices) <= MAX_FLAT:
            return " | ".join(choices)
        *earlier, found = choices
        for choice in reversed(earlier):
            found = self.rule(f"{choice} | {found}")
        return found

    def counted(self, entries: list[str], needed: list[bool], other: str, low: int, high: int | None) -> str:
        """Entries in order, with their count as part of the state."""
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
        if low > 0 and (not other or (high is not None and high < low)):
            return None
        if not other or high == 0:
            return '""'
        body = f"{comma}{other} {self.again(other, max(low - 1, 0), None if high is None else high - 1)}".strip()
        return self.rule(body if low > 0 else f"({body})?")
