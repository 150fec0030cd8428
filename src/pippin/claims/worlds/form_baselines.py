"""Forms filled in without a model, as controls of claims and benchmarks: labels by their words, and majorities.

Notable here:
- dates, times and numbers are read by Pippin's own finders, so that only the choice of the place is compared
- both fill in what a schema asks for, in its types
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from pippin.session.extraction.source import SourceText

YES = {"yes", "y", "true", "x", "ja", "oui", "si", "sí", "sì", "included", "✓"}
BULLET = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s+")
CELLS = re.compile(r"\s*(?:[|;=\t]|:(?=\s|$)|\s{2,}|\s[—–]\s)\s*")
KINDS = {"number": "number", "integer": "number", "date": "date", "time": "time"}
EMAIL, PHONE = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), re.compile(r"\+?\(?\d[\d ()./-]{6,}\d")


def inner(schema: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A schema without the alternative of null, and whether there was one."""
    others = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return (others[0], True) if others else (schema, False)


def type_of(schema: dict[str, Any]) -> str:
    """What a value is: "object", "array", "enum", "boolean", "number", "integer", "date", "time" or "text"."""
    if "enum" in schema:
        return "enum"
    kind = schema.get("type", "string")
    return schema.get("format", "text") if kind == "string" else str(kind)


def typed_values(text: str, kind: str) -> list[Any]:
    """All values of a type in a text, in its order."""
    if not text.strip():
        return []
    found = [each for each in SourceText(text).candidates(KINDS[kind]) if not each.inner]
    if kind in ("date", "time"):
        return [each.value for each in found]
    numbers = [float(each.value) for each in found]
    return [int(each) if each.is_integer() else each for each in numbers if kind == "number" or each.is_integer()]


def words_of(name: str) -> list[str]:
    """The words of a field's name, whatever its style: dueDate, due_date and DUE-DATE are "due", "date"."""
    parted = re.sub(r"(?<=[a-zà-ÿ\d])(?=[A-ZÀ-Ý])", " ", name)
    return re.findall(r"[^\W_]+", parted.lower())


def stems(name: str) -> frozenset[str]:
    """The beginnings of the words of a name or label, without short ones where there are others."""
    words = words_of(name)
    return frozenset(each[:4] for each in [word for word in words if len(word) > 2] or words)


def read_as(text: str, schema: dict[str, Any]) -> Any:
    """A piece of text as a value of a schema's type; None if it is none."""
    kind = type_of(schema)
    if kind in KINDS:
        return next(iter(typed_values(text, kind)), None)
    plain = text.strip()
    if kind == "enum":
        options = [each for each in schema["enum"] if isinstance(each, str)]
        said = [(plain.lower().find(each.lower().replace("_", " ")), each) for each in options]
        return min(((at, each) for at, each in said if at >= 0), default=(0, None))[1]
    if kind == "boolean":
        return bool(set(words_of(plain)) & YES or plain in YES) if plain else None
    return plain or None


class Baseline(ABC):
    """Walks through a schema; what a value is, its subclasses say."""

    def fill(self, text: str, schema: dict[str, Any]) -> Any:
        """The value for a document."""
        return self._object(text, schema)

    def _object(self, text: str, schema: dict[str, Any]) -> dict[str, Any]:
        required = schema.get("required", ())
        return {name: self._field(text, name, each, name in required) for name, each in schema["properties"].items()}

    def _field(self, text: str, name: str, schema: dict[str, Any], required: bool) -> Any:
        said, (schema, nullable) = schema.get("description", ""), inner(schema)
        schema = {"description": said, **schema}
        match type_of(schema):
            case "object":
                return self._object(text, schema)
            case "array":
                return self.listed(text, name, schema)
        return self.value(text, name, schema, required and not nullable)

    @abstractmethod
    def listed(self, text: str, name: str, schema: dict[str, Any]) -> list[Any]:
        """The items of a list."""

    @abstractmethod
    def value(self, text: str, name: str, schema: dict[str, Any], required: bool) -> Any:
        """A single value; None for nothing."""


class LabelPatterns(Baseline):
    """The value beside the label that is most like a field's name; else, where something must be there, the first one.

    Labels are what stands before a colon, a cell's border or a gap. They are like a name by the words they share, of
    which four letters have to agree, and like a description that has all their words.
    """

    def fill(self, text: str, schema: dict[str, Any]) -> Any:
        """See `Baseline.fill`."""
        self.lines = text.splitlines()
        parted = [[each.strip(" *#>-") for each in CELLS.split(line)] for line in self.lines]
        self.pairs = [
            (row, stems(label), value)
            for row, cells in enumerate(parted)
            for label, value in zip(cells, [*cells[1:], ""], strict=True)
            if stems(label) and len(label) < 60
        ]
        return super().fill(text, schema)

    def value(self, text: str, name: str, schema: dict[str, Any], required: bool) -> Any:
        """See `Baseline.value`."""
        for _, beside in self._beside(name, schema):
            if (found := read_as(beside, schema)) is not None:
                return found
        if not required:
            return None
        kind, lowered = type_of(schema), name.lower()
        if kind == "boolean":
            return False
        if kind == "enum":
            return read_as(text, schema) or schema["enum"][0]
        if kind in KINDS:
            return read_as(text, schema)
        pattern = EMAIL if "mail" in lowered else PHONE if re.search("phone|tel", lowered) else None
        found = pattern.search(text) if pattern else None
        return found[0] if found else None

    def listed(self, text: str, name: str, schema: dict[str, Any]) -> list[Any]:
        """What is parted by commas beside the label, or the lines below it; nothing for a list of records."""
        items = schema["items"]
        if type_of(items) == "object":
            return []
        for row, beside in self._beside(name, schema):
            parts = re.split(r"\s*[,;]\s*", beside) if beside else []
            for line in self.lines[row + 1 :] if not parts else ():
                if not line.strip():
                    break
                parts.append(BULLET.sub("", line).strip())
            if parts:
                return [value for part in parts if (value := read_as(part, items)) is not None]
        return []

    def _beside(self, name: str, schema: dict[str, Any]) -> list[tuple[int, str]]:
        """Lines and values of the labels that are like a name, the likest first."""
        wanted, described = stems(name), stems(schema.get("description", ""))
        scored = [
            (max(2 * len(label & wanted) / (len(label) + len(wanted)), 0.6 * (label <= described)), row, value)
            for row, label, value in self.pairs
        ]
        return [(row, value) for likeness, row, value in sorted(scored, key=lambda each: -each[0]) if likeness >= 0.5]


class Majority(Baseline):
    """Nothing where that is allowed, the most frequent choice, the first value of a type, the first words of the text.

    Args:
        answers: schemas with their right values, of other documents, that say which choice is frequent.
    """

    def __init__(self, answers: list[tuple[dict[str, Any], Any]]) -> None:
        self.counts: dict[Any, Counter[Any]] = {}
        for schema, value in answers:
            self._count(schema, value)

    def _count(self, schema: dict[str, Any], value: Any) -> None:
        schema, _ = inner(schema)
        match type_of(schema):
            case "object":
                for name, each in schema["properties"].items():
                    self._count(each, (value or {}).get(name))
            case "array":
                for each in value or ():
                    self._count(schema["items"], each)
            case "enum" | "boolean" if value is not None:
                self.counts.setdefault(self._key(schema), Counter())[value] += 1

    def _key(self, schema: dict[str, Any]) -> frozenset[Any]:
        return frozenset(schema.get("enum", (True, False)))

    def value(self, text: str, name: str, schema: dict[str, Any], required: bool) -> Any:
        """See `Baseline.value`."""
        if not required:
            return None
        kind = type_of(schema)
        if kind in ("enum", "boolean"):
            seen = self.counts.get(self._key(schema))
            return seen.most_common(1)[0][0] if seen else schema.get("enum", [False])[0]
        return read_as(text, schema) if kind in KINDS else " ".join(text.split()[:3])

    def listed(self, text: str, name: str, schema: dict[str, Any]) -> list[Any]:
        """Nothing."""
        return []
