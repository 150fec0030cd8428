"""Forms filled in from known facts: the answers that adapters are trained on and measured against."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pippin.core.errors import InvalidArgument
from pippin.session.extraction.form import Form
from pippin.session.extraction.slots import (
    AlternativesSlot,
    ChoiceSlot,
    ConstantSlot,
    DictSlot,
    ListSlot,
    NullSlot,
    ObjectSlot,
    ReferenceSlot,
    Slot,
    TextSlot,
    ValueSlot,
)
from pippin.session.extraction.source import SourceText


@dataclass(frozen=True)
class KnownValue:
    """What is true of a value: where the source says it, and for a choice or a flag what follows.

    Attributes:
        start: offset in the source.
        end: offset in the source.
        value: of a choice or a flag; else it is read from the text.
    """

    start: int
    end: int
    value: Any = None


def write(form: Form, answers: Any) -> str:
    """The text of a form filled in as it should be.

    Args:
        form: the form.
        answers: nested as the schema is: mappings by property, sequences, `KnownValue` for a value, None for nothing. A
            property that is not mentioned is nothing.

    Raises:
        InvalidArgument: the form does not allow that; the message says where.

    >>> form = Form({"type": "object", "properties": {"order": {"type": "integer"}}}, SourceText("Order 4711 of 2024"))
    >>> write(form, {"order": KnownValue(6, 10)})
    '{"order": "4711"}'
    """
    return _write(form.slot, answers, form.source, ())


def _write(slot: Slot, answer: Any, source: SourceText, path: tuple[Any, ...]) -> str:
    match slot:
        case ReferenceSlot() if slot.slot is not None:
            return _write(slot.slot, answer, source, path)
        case AlternativesSlot():
            return _either(slot, answer, source, path)
        case ConstantSlot():
            return json.dumps(slot.value, ensure_ascii=False)
        case NullSlot() if answer is None:
            return "null"
        case TextSlot() if isinstance(answer, KnownValue):
            return _quoted(_text(answer, source, path))
        case ValueSlot() if isinstance(answer, KnownValue):
            return _quoted(_reading(slot, answer, path))
        case ChoiceSlot():
            return _choice(slot, answer, source, path)
        case ListSlot() if isinstance(answer, Sequence):
            slots = [slot.first[i] if i < len(slot.first) else slot.rest for i in range(len(answer))]
            if None not in slots and slot.low <= len(answer) <= slot.high:
                parts = (_write(s, a, source, (*path, i)) for i, (s, a) in enumerate(zip(slots, answer, strict=True)))  # type: ignore[arg-type]
                return f"[{', '.join(parts)}]"
        case ObjectSlot() if isinstance(answer, Mapping):
            entries = (
                f"{_quoted(each.label)}: {_write(each.slot, answer.get(each.name), source, (*path, each.name))}"
                for each in slot.properties
            )
            return f"{{{', '.join(entries)}}}"
        case DictSlot() if isinstance(answer, Mapping):
            entries = (f"{_quoted(name)}: {_write(slot.value, a, source, (*path, name))}" for name, a in answer.items())
            return f"{{{', '.join(entries)}}}"
    raise InvalidArgument(f"{'.'.join(map(str, path)) or 'the form'} cannot be filled in with {answer!r:.100}")


def _either(slot: AlternativesSlot, answer: Any, source: SourceText, path: tuple[Any, ...]) -> str:
    for each in slot.slots:
        try:
            return _write(each, answer, source, path)
        except InvalidArgument as error:
            last = error
    raise last


def _choice(slot: ChoiceSlot, answer: Any, source: SourceText, path: tuple[Any, ...]) -> str:
    if answer is None and isinstance(slot.unsaid, bool):
        return f"[null, {json.dumps(slot.unsaid)}]"
    if isinstance(answer, KnownValue) and answer.value in slot.values:
        return f"[{_quoted(_text(answer, source, path))}, {json.dumps(answer.value, ensure_ascii=False)}]"
    raise InvalidArgument(f"{'.'.join(map(str, path))} is one of {slot.values!r}, got {answer!r}")


def _text(answer: KnownValue, source: SourceText, path: tuple[Any, ...]) -> str:
    text = source.written(answer.start, answer.end)
    if (answer.start, answer.end) not in source.find(text):
        raise InvalidArgument(f"{'.'.join(map(str, path))}: {text!r} is no run of whole words of the source")
    return text


def _reading(slot: ValueSlot, answer: KnownValue, path: tuple[Any, ...]) -> str:
    """The longest text of a reading that stands within the answer, else one that has the answer in it."""
    places = [(start, end, text) for text, (_, places, _) in slot.values.items() for start, end in places]
    within = [(end - start, text) for start, end, text in places if answer.start <= start and end <= answer.end]
    within = within or [
        (start - end, text) for start, end, text in places if start <= answer.start and answer.end <= end
    ]
    if not within:
        raise InvalidArgument(f"{'.'.join(map(str, path))}: there is no such value from {answer.start} to {answer.end}")
    return max(within)[1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
