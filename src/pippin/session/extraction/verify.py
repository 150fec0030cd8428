"""Values of a model that no grammar can hold to the source, such as one behind a network: checked afterwards.

Notable here:
- a value that the text does not have is left out where the type allows it, and is a problem to tell the model elsewhere
"""

from __future__ import annotations

from typing import Any, Final

from pippin.session.extraction.form import Filled, Form
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
    Slot,
    TextSlot,
    ValueSlot,
)

_WRONG: Final = object()


def verified(form: Form, value: Any) -> tuple[Filled, list[str]]:
    """What of a value the source has, and the names of what must be there and is not.

    Args:
        form: the form of the schema.
        value: JSON values, as the schema has them.
    """
    check = _Check(form)
    found = check.of(form.slot, value, ())
    return Filled(None if found is _WRONG else found, tuple(check.marks)), check.problems


class _Check:
    def __init__(self, form: Form) -> None:
        self.source = form.source
        self.marks: list[Mark] = []
        self.problems: list[str] = []

    def of(self, slot: Slot, value: Any, path: tuple[str | int, ...]) -> Any:
        """The value as far as the source has it; `_WRONG` if it does not."""
        match slot:
            case ReferenceSlot() if slot.slot is not None:
                return self.of(slot.slot, value, path)
            case AlternativesSlot():
                return self._either(slot, value, path)
            case ConstantSlot():
                return slot.value  # which has no other
            case NullSlot():
                return slot.value if value is None else _WRONG
            case ChoiceSlot():
                return value if any(value == each and type(value) is type(each) for each in slot.values) else _WRONG
            case TextSlot():
                return self._text(value, path)
            case ValueSlot():
                return self._reading(slot, value, path)
            case ListSlot() if isinstance(value, list):
                slots = (slot.first[i] if i < len(slot.first) else slot.rest for i in range(len(value)))
                found: list[Any] = []
                for each, item in zip(slots, value, strict=True):
                    checked = _WRONG if each is None else self.of(each, item, (*path, len(found)))
                    found += [] if checked is _WRONG else [checked]
                return found[: slot.high]
            case ObjectSlot() if isinstance(value, dict):
                return self._record(slot, value, path)
            case DictSlot() if isinstance(value, dict):
                pairs = {name: self.of(slot.value, each, (*path, name)) for name, each in value.items()}
                return {name: each for name, each in pairs.items() if each is not _WRONG and self.source.find(name)}
        return _WRONG

    def _either(self, slot: AlternativesSlot, value: Any, path: tuple[str | int, ...]) -> Any:
        nothing = next((each for each in slot.slots if isinstance(each, NullSlot)), None)
        known = len(self.marks), len(self.problems)
        for each in slot.slots:
            found = self.of(each, value, path)
            if found is not _WRONG:
                return found
            del self.marks[known[0] :], self.problems[known[1] :]
        return _WRONG if nothing is None else nothing.value

    def _text(self, value: Any, path: tuple[str | int, ...]) -> Any:
        if not isinstance(value, str) or not (places := self.source.find(" ".join(value.split()))):
            return _WRONG
        self.marks.append(Mark(path, value, 0, 0, value, tuple(places)))
        return value

    def _reading(self, slot: ValueSlot, value: Any, path: tuple[str | int, ...]) -> Any:
        for text, (read, places, ambiguous) in slot.values.items():
            if read == value and not isinstance(value, bool):
                self.marks.append(Mark(path, text, 0, 0, read, places, ambiguous))
                return read
        return _WRONG

    def _record(self, slot: ObjectSlot, value: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in slot.properties:
            inner = self.of(each.slot, value.get(each.name), (*path, each.name))
            if inner is _WRONG:
                self.problems.append(".".join(map(str, (*path, each.name))))
            elif inner is not MISSING:
                found[each.name] = inner
        return found
