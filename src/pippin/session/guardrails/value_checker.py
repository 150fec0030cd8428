"""Guardrails for typed values: every string in them, at any depth, with the same thresholds as free text.

Notable here:
- the keys of mappings are checked too: a model writes them as it writes values
- while a value is streamed, each string in it is held back like a stream of its own; all but the last are complete
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from pydantic import BaseModel

from pippin.session.guardrails.stream import StreamChecker

Visit = Callable[[str, str], str]


def visit(value: Any, see: Visit, path: str = "") -> Any:
    """Call ``see(path, text)`` for every string of a value, and replace the string by the result.

    Args:
        value: a model, dataclass, mapping, list, tuple, set or plain value, nested in any way.
        see: returns the replacement, or the same text.
        path: path of the value.

    Returns:
        The value with the replacements; unchanged parts are the same objects.

    >>> seen = []
    >>> visit({"days": [{"title": "Rome"}]}, lambda path, text: seen.append((path, text)) or text.upper())
    {'DAYS': [{'TITLE': 'ROME'}]}
    >>> seen
    [('days', 'days'), ('days[0].title', 'title'), ('days[0].title', 'Rome')]
    """
    if isinstance(value, Enum):
        see(path, value.value) if isinstance(value.value, str) else None
        return value
    if isinstance(value, str):
        new = see(path, value)
        return value if new == value else new
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields} | (value.model_extra or {})
        changed = _changed(fields, see, path)
        return value.model_copy(update=changed) if changed else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = _changed({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, see, path)
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        items = {
            (see(_below(path, key), key) if isinstance(key, str) else key): visit(item, see, _below(path, key))
            for key, item in value.items()
        }
        return value if items == value else items
    if isinstance(value, list | tuple | set | frozenset):
        new_items = [visit(item, see, f"{path}[{number}]") for number, item in enumerate(value)]
        if all(new is old for new, old in zip(new_items, value, strict=True)):
            return value
        return type(value)(*new_items) if hasattr(value, "_fields") else type(value)(new_items)
    return value


def _changed(fields: Mapping[str, Any], see: Visit, path: str) -> dict[str, Any]:
    """The fields whose value changed."""
    new = {name: visit(value, see, _below(path, name)) for name, value in fields.items()}
    return {name: value for name, value in new.items() if value is not fields[name]}


def _below(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


class ValueChecker:
    """Holds back the strings of a typed value while it is streamed.

    ``push`` takes a snapshot's content and returns it with the released text of each string.
    """

    def __init__(self, checker: Callable[[str], StreamChecker]) -> None:
        self._checker = checker
        self._open: dict[
            str, tuple[StreamChecker, str, str]
        ] = {}  # by path: the checker, the text read, the text released

    def push(self, value: Any, *, complete: bool = False) -> Any:
        """The released part of a snapshot.

        Args:
            value: the whole value so far, as `Snapshot.content` has it.
            complete: whether it is the final value, which is returned whole.

        Raises:
            GuardrailViolation: a string in it is blocked; ``verdict.path`` names the field.
        """
        order: list[tuple[str, str]] = []
        visit(value, lambda path, text: order.append((path, text)) or text)  # type: ignore[func-returns-value]
        last = len(order) - 1
        shown = iter([self._show(n, *item, whole=complete or n < last) for n, item in enumerate(order)])
        return visit(value, lambda path, text: next(shown))

    def _show(self, number: int, path: str, text: str, *, whole: bool) -> str:
        key = f"{number} {path}"
        checker, read, out = self._open.get(key, (None, "", ""))
        if checker is None or not text.startswith(read) or (checker.finished and text != read):
            checker, read, out = self._checker(path), "", ""
        if len(text) > len(read):
            out += checker.push(text[len(read) :])
        if whole and checker.held:
            out += checker.finish()
        self._open[key] = (checker, text, out)
        return out
