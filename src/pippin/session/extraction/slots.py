"""The parts of a form: how each is written in a grammar, and how its value is read from what was written.

Notable here:
- a form is JSON in which every value is a text of the source: a string is that text itself, a number or a date is read
  from it, and a choice or a flag comes with the text that shows it
- a property may be nothing where its type, or a default, allows it; every property is written, so that the model
  decides about each
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final, Protocol

from pippin.core.errors import InvalidInput
from pippin.engine.grammar import regex
from pippin.engine.grammar.item_limits import Limit

MISSING: Final = object()
"""The value of a property that was not found and is left to its default."""
# neither blanks nor marks that belong to what is around it; a backslash escapes a quotation mark
_NOT_CUT: Final = (
    r'/"(>[ =]{0,2}[0-9]|[^\x00- ,.;:!?)\]}|=>*_~%\/\x{2014}\x{2013}\x{2026}])'
    r'([^\x00-\x1f]*[^\x00- ,;:(\[{|=<*_~#\x{2014}\x{2013}])?"/'
)
_HAS_LETTERS: Final = r'/"[^\x00-\x1f]*[\p{L}\p{N}][^\x00-\x1f]*"/'
_UNIT: Final = r'/"[%\x{2030}\x{B0}\p{Sc}]"/'  # a mark that is a value by itself, such as that of a currency
_DECODER: Final = json.JSONDecoder()


class NotThis(InvalidInput):
    """What is written is not of this slot."""


@dataclass(frozen=True)
class Mark:
    """A text of the source that was written for a value.

    Attributes:
        path: names and indices that lead to the value.
        text: what was written, as it stands in the source except for line breaks.
        start: where it begins in the written form, with its quotation mark.
        end: where it ends there.
        value: what was read from it.
        places: offsets in the source where this value stands; empty for all places of the text.
        ambiguous: whether another reading of the text is possible.
    """

    path: tuple[str | int, ...]
    text: str
    start: int
    end: int
    value: Any
    places: tuple[tuple[int, int], ...] = ()
    ambiguous: bool = False


class Rules:
    """Collects the rules and terminals of a grammar, each once."""

    def __init__(self, span: str) -> None:
        self.lines = [f"SPAN: {span}"]
        self._names: dict[str, str] = {}

    def add(self, body: str, prefix: str = "r") -> str:
        """The name of a rule or, with an upper-case prefix, of a terminal with this body."""
        if body not in self._names:
            self._names[body] = f"{prefix}{len(self._names)}"
            self.lines.append(f"{self._names[body]}: {body}")
        return self._names[body]

    def reserve(self, key: str) -> tuple[str, bool]:
        """The name of a rule that is defined later by `define`, and whether it is new."""
        new = key not in self._names
        if new:
            self._names[key] = f"r{len(self._names)}"
        return self._names[key], new

    def define(self, name: str, body: str) -> None:
        """Give a reserved rule its body."""
        self.lines.append(f"{name}: {body}")


class Slot(Protocol):
    """A part of a form."""

    def rule(self, rules: Rules) -> str:
        """An expression of the grammar for what may be written."""

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        """The value of what is written from ``at`` on, and where it ends; what it was read from is added to ``marks``.

        Raises:
            NotThis: something else is written there.
        """


def quoted(text: str) -> str:
    """A literal of Lark for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def _string(text: str, at: int) -> tuple[str, int]:
    value, end = _value(text, at)
    if not isinstance(value, str):
        raise NotThis(f"{text[at : at + 40]!r} is not a text")
    return value, end


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except ValueError as error:
        raise NotThis(f"{text[at : at + 40]!r} is not JSON") from error


def _expect(text: str, at: int, wanted: str) -> int:
    if not text.startswith(wanted, at):
        raise NotThis(f"{text[at : at + 40]!r} does not begin with {wanted!r}")
    return at + len(wanted)


@dataclass(frozen=True)
class TextSlot:
    """A text of the source as it is; ``conditions`` are terminals of JSON strings of which it fits one."""

    conditions: tuple[str, ...] = ()

    def rule(self, rules: Rules) -> str:
        fits = f" & ({' | '.join(f'({each})' for each in self.conditions)})" if self.conditions else ""
        return rules.add(rf'(/"/ SPAN /"/) & (({_NOT_CUT} & {_HAS_LETTERS}) | {_UNIT}){fits}', "T")

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        value, end = _string(text, at)
        marks.append(Mark(path, value, at, end, value))
        return value, end


@dataclass(frozen=True)
class ValueSlot:
    """A number or a date: one of the texts from which a value that fits can be read.

    Args:
        values: by text: the value, its places, and whether another reading is possible.
    """

    values: dict[str, tuple[Any, tuple[tuple[int, int], ...], bool]] = field(hash=False)

    def rule(self, rules: Rules) -> str:
        texts = regex.alternatives(regex.quoted(text) for text in self.values)
        return rules.add(rf"/\x{{22}}{texts}\x{{22}}/", "T")

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        written, end = _string(text, at)
        if written not in self.values:
            raise NotThis(f"no value can be read from {written!r}")
        value, places, ambiguous = self.values[written]
        marks.append(Mark(path, written, at, end, value, places, ambiguous))
        return value, end


@dataclass(frozen=True)
class ChoiceSlot:
    """One of several constants, after the text that shows it: ``["already paid", true]``.

    Args:
        values: JSON values.
        unsaid: the one that needs no text, as false for a flag: ``[null, false]``; MISSING for none.
    """

    values: tuple[Any, ...]
    unsaid: Any = MISSING

    def rule(self, rules: Rules) -> str:
        listed = " | ".join(quoted(json.dumps(each, ensure_ascii=False)) for each in self.values)
        shown = f'{TextSlot().rule(rules)} ", " {rules.add(listed)}'
        if self.unsaid is MISSING:
            return f'"[" {shown} "]"'
        return f'"[" ({shown} | "null, {json.dumps(self.unsaid)}") "]"'

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        at = _expect(text, at, "[")
        start = at
        shown, at = _value(text, at)
        middle = at
        value, end = _value(text, _expect(text, at, ", "))
        end = _expect(text, end, "]")
        if not any(value == each and type(value) is type(each) for each in self.values) or isinstance(
            shown, list | dict
        ):
            raise NotThis(f"{text[start:end]!r} is no choice of {self.values!r}")
        if shown is not None:
            marks.append(Mark(path, shown, start, middle, value))
        return value, end


@dataclass(frozen=True)
class ConstantSlot:
    """The only value of a property: it is written without a choice, and tells alternatives of objects apart."""

    value: Any

    def rule(self, rules: Rules) -> str:
        return quoted(json.dumps(self.value, ensure_ascii=False))

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        return self.value, _expect(text, at, json.dumps(self.value, ensure_ascii=False))


@dataclass(frozen=True)
class NullSlot:
    """Nothing was found: null."""

    value: Any = None

    def rule(self, rules: Rules) -> str:
        return '"null"'

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        return self.value, _expect(text, at, "null")


@dataclass(frozen=True)
class AlternativesSlot:
    """One of several slots, the first that fits what is written."""

    slots: tuple[Slot, ...]

    def rule(self, rules: Rules) -> str:
        return f"({' | '.join(dict.fromkeys(slot.rule(rules) for slot in self.slots))})"

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        for slot in self.slots:
            known = len(marks)
            try:
                return slot.read(text, at, path, marks)
            except NotThis:
                del marks[known:]
        raise NotThis(f"{text[at : at + 40]!r} fits none of the alternatives")


@dataclass(frozen=True)
class ListSlot:
    """A list: slots of the first items and one of the others, ``low`` to ``high`` in all.

    ``limit`` is how often an item may come, by its text; the last one is left out if it came more often.
    """

    first: tuple[Slot, ...]
    rest: Slot | None
    low: int
    high: int
    limit: Limit = field(default=lambda _: 1, compare=False)

    def rule(self, rules: Rules) -> str:
        body = ""
        if self.rest is not None and self.high > len(self.first):
            again = rules.add(self.rest.rule(rules))
            least, most = max(self.low - len(self.first), 0), self.high - len(self.first)
            if not self.first:
                more = f'(", " {again}){{{max(least - 1, 0)},{most - 1}}}'
                return f'"[" {again} {more} "]"' if self.low else f'"[" ({again} {more})? "]"'
            body = f'(", " {again}){{{least},{most}}}'
        for index in reversed(range(min(len(self.first), self.high))):
            body = f"{quoted(', ') if index else ''} {self.first[index].rule(rules)} {body}".strip()
            body = body if index < self.low else f"({body})?"
        return f'"[" {body} "]"'

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        at = _expect(text, at, "[")
        found: list[Any] = []
        written: list[str] = []
        known = len(marks)
        while not text.startswith("]", at):
            at = _expect(text, at, ", ") if found else at
            slot = self.first[len(found)] if len(found) < len(self.first) else self.rest
            if slot is None:
                raise NotThis("the list has too many items")
            known = len(marks)
            value, end = slot.read(text, at, (*path, len(found)), marks)
            found.append(value)
            written.append(text[at:end])
            at = end
        repeats = written.count(written[-1]) if written else 0
        if repeats > 1 and len(found) > self.low and repeats > self.limit(written[-1]):
            found.pop()
            del marks[known:]
        if not self.low <= len(found) <= self.high:
            raise NotThis(f"the list has {len(found)} items")
        return found, at + 1


@dataclass(frozen=True)
class SlotProperty:
    """A property of a record: its name, what the form calls it, and its slot."""

    name: str
    label: str
    slot: Slot


@dataclass(frozen=True)
class ObjectSlot:
    """An object with named properties, all written in their order."""

    properties: tuple[SlotProperty, ...]

    def rule(self, rules: Rules) -> str:
        parts = []
        for index, each in enumerate(self.properties):
            key = f"{'{' if index == 0 else ', '}{json.dumps(each.label, ensure_ascii=False)}: "
            parts.append(f"{quoted(key)} {each.slot.rule(rules)}")
        return f'{" ".join(parts)} "}}"' if parts else '"{}"'

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        at = _expect(text, at, "{")
        found: dict[str, Any] = {}
        for index, each in enumerate(self.properties):
            at = _expect(text, at, f"{', ' if index else ''}{json.dumps(each.label, ensure_ascii=False)}: ")
            value, at = each.slot.read(text, at, (*path, each.name), marks)
            if value is not MISSING:
                found[each.name] = value
        return found, _expect(text, at, "}")


@dataclass(frozen=True)
class DictSlot:
    """An object whose names are texts of the source too."""

    name: TextSlot
    value: Slot
    low: int
    high: int

    def rule(self, rules: Rules) -> str:
        entry = rules.add(f'{self.name.rule(rules)} ": " {self.value.rule(rules)}')
        more = f'(", " {entry}){{{max(self.low - 1, 0)},{self.high - 1}}}'
        return f'"{{" {entry} {more} "}}"' if self.low else f'"{{" ({entry} {more})? "}}"'

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        at = _expect(text, at, "{")
        found: dict[str, Any] = {}
        first = True
        while not text.startswith("}", at):
            at = at if first else _expect(text, at, ", ")
            name, at = _string(text, at)
            value, at = self.value.read(text, _expect(text, at, ": "), (*path, name), marks)
            found.setdefault(name, value)
            first = False
        return found, at + 1


@dataclass
class ReferenceSlot:
    """A type inside itself; ``slot`` is set once the type is read."""

    key: str
    slot: Slot | None = None

    def rule(self, rules: Rules) -> str:
        assert self.slot is not None
        name, new = rules.reserve(f"type {self.key}")
        if new:
            rules.define(name, self.slot.rule(rules))
        return name

    def read(self, text: str, at: int, path: tuple[str | int, ...], marks: list[Mark]) -> tuple[Any, int]:
        assert self.slot is not None
        return self.slot.read(text, at, path, marks)


def number_value(value: str, *, integer: bool) -> int | float | None:
    """A number in plain notation as a JSON value; None where an integer is wanted and it is none."""
    exact = Decimal(value)
    if exact == exact.to_integral_value():
        return int(exact)
    return None if integer else float(exact)


def leaves(value: Any) -> Iterator[Any]:
    """The values in nested lists and objects that are neither."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


def in_order(slots: Sequence[Slot]) -> Slot:
    """Alternatives as one slot; where null is one of them, it alone says that the text does not mention a flag."""
    found = [each for slot in slots for each in (slot.slots if isinstance(slot, AlternativesSlot) else (slot,))]
    if any(isinstance(each, NullSlot) for each in found):
        found = [replace(each, unsaid=MISSING) if isinstance(each, ChoiceSlot) else each for each in found]
    return found[0] if len(found) == 1 else AlternativesSlot(tuple(found))
