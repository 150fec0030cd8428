"""What a synthetic document is: its text, the fields that a user could ask for, and the facts that the text states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FieldKind = Literal["text", "date", "time", "amount", "number", "integer", "flag", "choice", "list", "record"]


@dataclass(frozen=True)
class Fact:
    """One fact and the place in the document that states it.

    Attributes:
        text: the words of the document, exactly `document.text[start:end]`.
        start: position of the first character.
        end: position after the last character.
        value: the normalized value: text as it is written; a date as "2024-03-12"; a time as "14:30"; an amount of
            money as a decimal number with two places, "1234.50"; an int, a float or a bool; for a choice one of
            `FieldSpec.choices`.
    """

    text: str
    start: int
    end: int
    value: str | int | float | bool


@dataclass(frozen=True)
class FieldSpec:
    """A field that documents of one kind may state.

    Attributes:
        name: the canonical name in English, "invoice_number"; "" for the items of a list of plain values.
        kind: what the value is.
        description: a short phrase for it.
        aliases: other names that a user might give the field, by language.
        choices: the values of kind "choice".
        fields: of kind "record", and of the items of kind "list".
    """

    name: str
    kind: FieldKind
    description: str
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    choices: tuple[str, ...] = ()
    fields: tuple[FieldSpec, ...] = ()


@dataclass(frozen=True)
class Document:
    """A synthetic document.

    Attributes:
        text: what a reader sees.
        kind: what the document is, one of `KINDS`.
        language: of the text, one of `LANGUAGES`.
        layout: how the text is laid out, one of `layouts(kind)`.
        fields: everything a user could ask of this kind.
        values: the facts by the name of the field. None where the document does not say it; a list of dicts (of plain
            facts where the items have no names) for kind "list"; a dict for kind "record".
    """

    text: str
    kind: str
    language: str
    layout: str
    fields: tuple[FieldSpec, ...]
    values: dict[str, Fact | list[Any] | dict[str, Any] | None]
