"""A form: what a schema asks for, to be filled in with texts of a source.

Notable here:
- a schema is read into slots (see `slots`); what cannot be filled in from a text is refused by name
- the form has names and descriptions where the model needs them, beside each value; no schema is in the prompt
- a form that was filled in is read into a value of the schema and the texts that each part of it was read from
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from pippin.core.errors import EmptySchema, InvalidInput, SchemaError, UndefinedReference, UnsupportedGuide
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.json_schema import SchemaReader
from pippin.engine.grammar.json_values import Number, String
from pippin.engine.grammar.string_formats import VERBATIM
from pippin.session.extraction.slots import (
    MISSING,
    AlternativesSlot,
    ChoiceSlot,
    ConstantSlot,
    DictSlot,
    ListSlot,
    Mark,
    NullSlot,
    ObjectSlot,
    ReferenceSlot,
    Rules,
    Slot,
    SlotProperty,
    TextSlot,
    ValueSlot,
    in_order,
    leaves,
    number_value,
)
from pippin.session.extraction.source import SourceText

MAX_ITEMS: Final = 50
"""Items of a list without `maxItems`."""
READINGS: Final = ("date", "date-time", "time", "duration")
"""Formats of strings that are read from a text, whatever their spelling in it."""
_REFUSED: Final = ("not", "if", "patternProperties", "dependentSchemas", "contains", "unevaluatedProperties")
_MAX_SHOWN: Final = 12  # choices that are listed beside a name


@dataclass(frozen=True)
class Filled:
    """A form that was filled in.

    Attributes:
        value: as JSON values, to be validated under the schema.
        marks: the texts that its parts were read from.
    """

    value: Any
    marks: tuple[Mark, ...]


class Form:
    """A form for a schema, to be filled in from a source.

    Args:
        schema: a JSON Schema, such as `Schema.json_schema`.
        source: the text.
        partial: every value may be missing, as when the text is a part of a longer one; an item of a list that is there
            is whole.

    Raises:
        UnsupportedGuide: the schema has something that cannot be read from a text; the error names it.
        EmptySchema: the text has no value that the schema would take where it must have one, such as a date.

    >>> form = Form({"type": "object", "properties": {"order": {"type": "integer"}}}, SourceText("Order 4711 of 2024"))
    >>> form.read('{"order": "4711"}').value
    {'order': 4711}
    >>> form.grammar.allows('{"order": "47"}')
    False
    """

    def __init__(self, schema: dict[str, Any] | bool, source: SourceText, *, partial: bool = False) -> None:
        self.source, self.partial = source, partial
        self._document = schema if isinstance(schema, dict) else {}
        self._types: dict[str, ReferenceSlot] = {}
        self.slot = self._slot(schema, "#")
        rules = Rules(source.grammar)
        start = self.slot.rule(rules)
        self.grammar = Grammar("\n".join([f"start: {start}", *rules.lines]), item_limit=self._most)

    def read(self, text: str) -> Filled:
        """Read a form that was filled in under `grammar`.

        Raises:
            InvalidInput: the text is something else.
        """
        marks: list[Mark] = []
        value, end = self.slot.read(text, 0, (), marks)
        if text[end:].strip():
            raise InvalidInput(f"the form goes on after its end: {text[end : end + 40]!r}")
        return Filled(value, tuple(marks))

    def _most(self, item: str) -> int:
        """How often an item may come in a list: as often as the text has the rarest part of it."""
        try:
            texts = [each for each in leaves(json.loads(item)) if isinstance(each, str)]
        except ValueError:
            return 1
        return max(1, min((len(self.source.find(text)) for text in texts if self.source.find(text)), default=1))

    # --- schema to slots ----------------------------------------------------------------------------------------------

    def _slot(self, schema: Any, where: str) -> Slot:
        """The slot of a schema.

        Raises:
            UnsupportedGuide, EmptySchema, UndefinedReference: see the class.
        """
        if schema is True or schema == {}:
            return TextSlot()
        if not isinstance(schema, dict):
            raise EmptySchema(f"{where}: nothing is valid under {schema!r}")
        for keyword in _REFUSED:
            if keyword in schema:
                raise UnsupportedGuide(f"{where}: {keyword} cannot be held in a form", field=where, guide=keyword)
        if "$ref" in schema:
            return self._reference(schema["$ref"], where)
        if "allOf" in schema:
            return self._slot(self._merged(schema, where), where)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._alternatives(schema[keyword], where)
        if "const" in schema or "enum" in schema:
            return self._choice(schema.get("enum", [schema.get("const")]), where)
        kinds = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else "string")
        if isinstance(kinds, list):
            return self._alternatives([{**schema, "type": kind} for kind in kinds], where)
        return self._of_type(kinds, schema, where)

    def _whole(self, schema: Any, where: str) -> Slot:
        """The slot of an item: a part of a longer text has all of it or does not have it."""
        partial, self.partial = self.partial, False
        try:
            return self._slot(schema, where)
        finally:
            self.partial = partial

    def _of_type(self, kind: str, schema: dict[str, Any], where: str) -> Slot:
        match kind:
            case "null":
                return NullSlot()
            case "boolean":
                return ChoiceSlot((True, False), unsaid=False)
            case "integer" | "number":
                return self._number(schema, where, integer=kind == "integer")
            case "string":
                return self._string(schema, where)
            case "array":
                return self._items(schema, where)
            case "object":
                return self._record(schema, where)
        raise SchemaError(f"{where}: {kind!r} is no type of JSON Schema")

    def _reference(self, pointer: str, where: str) -> Slot:
        key = f"{pointer} of a part" if self.partial else pointer
        if key not in self._types:
            self._types[key] = ReferenceSlot(key)
            self._types[key].slot = self._slot(referenced(self._document, pointer, where), pointer)
        again = self._types[key]
        return again if again.slot is None else again.slot  # a type inside itself stays a reference

    def _merged(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        """``allOf`` as one schema, where its members say different things."""
        merged = {key: value for key, value in schema.items() if key != "allOf"}
        for each in schema["allOf"]:
            while isinstance(each, dict) and set(each) == {"$ref"}:
                each = self._document.get("$defs", {}).get(each["$ref"].rpartition("/")[2], {})
            for key, value in each.items():
                if key == "properties":
                    merged[key] = {**merged.get(key, {}), **value}
                elif key == "required":
                    merged[key] = [*merged.get(key, []), *value]
                elif merged.get(key, value) != value and key not in ("title", "description", "x-order"):
                    raise UnsupportedGuide(f"{where}: allOf says two things of {key}", field=where, guide="allOf")
                else:
                    merged.setdefault(key, value)
        return merged

    def _alternatives(self, schemas: list[Any], where: str) -> Slot:
        """The alternatives that the source can fill; null last, numbers and dates before texts."""
        slots, reason = [], None
        for index, each in enumerate(schemas):
            try:
                slots.append(self._slot(each, f"{where}/{index}"))
            except EmptySchema as error:
                reason = error
        if not slots:
            raise reason or EmptySchema(f"{where}: there are no alternatives")
        return in_order(sorted(slots, key=lambda slot: (isinstance(slot, NullSlot), isinstance(slot, TextSlot))))

    def _choice(self, values: list[Any], where: str) -> Slot:
        if not values:
            raise EmptySchema(f"{where}: a choice has no values")
        nothing = [NullSlot()] if None in values else []
        others = tuple(value for value in values if value is not None)
        if any(isinstance(value, dict | list) for value in others):
            raise UnsupportedGuide(f"{where}: a choice of objects cannot be held in a form", field=where, guide="enum")
        return in_order([*([ChoiceSlot(others)] if others else []), *nothing])

    def _number(self, schema: dict[str, Any], where: str, *, integer: bool) -> Slot:
        shapes = [shape for shape in _shapes(schema) if isinstance(shape, Number)]
        values: dict[str, tuple[Any, tuple[tuple[int, int], ...], bool]] = {}
        for found in self.source.candidates("number"):
            value = number_value(found.value, integer=integer)
            if value is None or not any(shape.holds(value) for shape in shapes):
                continue
            self._add(values, found, value)
        if not values:
            raise EmptySchema(f"{where}: the text has no such number; let the field be optional")
        return ValueSlot(values)

    def _add(self, values: dict[str, Any], found: Any, value: Any) -> None:
        text = self.source.written(found.start, found.end)
        _, places, ambiguous = values.get(text, (value, (), False))
        values[text] = value, (*places, (found.start, found.end)), ambiguous or found.ambiguous

    def _string(self, schema: dict[str, Any], where: str) -> Slot:
        kind = schema.get("format")
        if kind in READINGS:
            values: dict[str, tuple[Any, tuple[tuple[int, int], ...], bool]] = {}
            for found in self.source.candidates(kind):
                self._add(values, found, found.value)
            if not values:
                raise EmptySchema(f"{where}: the text has no {kind}; let the field be optional")
            return ValueSlot(values)
        if not schema.keys() & {"minLength", "maxLength", "pattern"} and kind in (None, VERBATIM):
            return TextSlot()
        shapes = [shape for shape in _shapes(schema) if isinstance(shape, String)]
        return TextSlot(tuple(shape.terminal for shape in shapes))

    def _items(self, schema: dict[str, Any], where: str) -> Slot:
        prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
        low = 0 if self.partial else schema.get("minItems", 0)
        high = schema.get("maxItems", max(MAX_ITEMS, low))
        first = tuple(self._slot(each, f"{where}/prefixItems/{i}") for i, each in enumerate(prefix))
        others = None
        if rest is not False and high > len(first):
            try:
                others = self._whole(rest, f"{where}/items")
            except EmptySchema:
                if low > len(first):
                    raise
        return ListSlot(first, others, low, high if others is not None else min(high, len(first)), self._most)

    def _record(self, schema: dict[str, Any], where: str) -> Slot:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not properties:
            return self._names(schema, where)
        names = [*schema.get("x-order", []), *properties]
        found = []
        for name in dict.fromkeys(name for name in names if name in properties):
            each = properties[name]
            found.append(
                SlotProperty(name, self._label(name, each), self._property(each, where, name, name in required))
            )
        return ObjectSlot(tuple(found))

    def _property(self, schema: Any, where: str, name: str, required: bool) -> Slot:
        """The slot of a property; one that need not be there may be nothing."""
        fixed = _constant(schema)
        if fixed is not MISSING:
            return ConstantSlot(fixed)
        optional = self.partial or not required
        try:
            slot = self._slot(schema, f"{where}/properties/{name}")
        except EmptySchema:
            if not optional:
                raise
            return NullSlot(MISSING)
        if not optional or isinstance(slot, ListSlot | DictSlot) or _may_be_nothing(slot):
            return slot
        if required:  # of a part: a flag that no part mentions is still false
            return AlternativesSlot((slot, NullSlot(MISSING)))
        return in_order([slot, NullSlot(MISSING)])

    def _names(self, schema: dict[str, Any], where: str) -> Slot:
        value = schema.get("additionalProperties", True)
        if value is False or schema.get("maxProperties") == 0:
            return ObjectSlot(())
        conditions: tuple[str, ...] = ()
        if "propertyNames" in schema:
            shapes = _shapes({"type": "string", **schema["propertyNames"]})
            conditions = tuple(shape.terminal for shape in shapes if isinstance(shape, String))
        low = 0 if self.partial else schema.get("minProperties", 0)
        try:
            slot = self._whole(value, f"{where}/additionalProperties")
        except EmptySchema:
            if low:
                raise
            return ObjectSlot(())
        return DictSlot(TextSlot(conditions), slot, low, schema.get("maxProperties", max(MAX_ITEMS, low)))

    def _label(self, name: str, schema: Any) -> str:
        """What the form calls a property: its name, its description, and the choices that it has."""
        schema = schema if isinstance(schema, dict) else {}
        said = " ".join(str(schema.get("description", "")).split())
        choices = self._choices(schema)
        shown = " | ".join(str(each) for each in choices[:_MAX_SHOWN])
        return name + (f" ({said})" if said else "") + (f" [{shown}]" if len(choices) > 1 else "")

    def _choices(self, schema: dict[str, Any]) -> list[Any]:
        while "$ref" in schema:
            schema = self._document.get("$defs", {}).get(str(schema["$ref"]).rpartition("/")[2], {})
        nested = [each for each in schema.get("anyOf", []) if isinstance(each, dict)]
        found = [value for value in schema.get("enum", []) if value is not None]
        return found or [value for each in nested for value in self._choices(each)]


def referenced(document: dict[str, Any], pointer: str, where: str) -> Any:
    """What a ``$ref`` inside a schema points at.

    Raises:
        UndefinedReference: nothing.
    """
    target: Any = document
    for name in pointer.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or name not in target:
            raise UndefinedReference(f"{where}: $ref {pointer!r} points at nothing")
        target = target[name]
    return target


def _shapes(schema: dict[str, Any]) -> tuple[Any, ...]:
    """The values of a schema of one type."""
    return SchemaReader(schema).shapes((("schema", "#"),))


def _constant(schema: Any) -> Any:
    """The only value of a schema; MISSING if there may be several."""
    if isinstance(schema, dict):
        if "const" in schema:
            return schema["const"]
        if len(schema.get("enum", [])) == 1:
            return schema["enum"][0]
    return MISSING


def _may_be_nothing(slot: Slot) -> bool:
    return isinstance(slot, NullSlot) or (isinstance(slot, AlternativesSlot) and any(map(_may_be_nothing, slot.slots)))
