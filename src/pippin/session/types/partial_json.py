r"""Partial JSON: parsing of JSON that is still being streamed.

Notable here:
- an unfinished text is closed in the shortest way and parsed by the standard parser: one pass of a regular expression
  finds what is open, so ten thousand characters take about a millisecond
- a string may grow; a number, a literal, half an escape or half a surrogate pair is left out until it is complete, so a
  shown value is never taken back
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence, Set as AbstractSet
from typing import Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, RootModel, TypeAdapter, ValidationError, create_model
from pydantic.dataclasses import is_pydantic_dataclass

from pippin.core.errors import SchemaError
from pippin.session.generation_id import GenerationID

_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*(?P<closed>")?|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)
_BROKEN_ESCAPE: Final = re.compile(
    r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)\Z"
)
_OPEN_TYPES: Final = (str, Any, object)
_CLOSERS: Final = {"{": "}", "[": "]"}


class Growing(str):
    """A string that is not complete yet."""


def parse_partial(text: str) -> tuple[Any, bool]:
    r"""The value of the beginning of a JSON text, and whether the text is complete.

    A number by itself is never known to be complete: more digits may follow.

    Args:
        text: the beginning of a valid JSON text, cut anywhere.

    Returns:
        The value so far (None where nothing is known yet) and whether it is complete. A string that is still open is a
        `Growing`.

    Raises:
        ValueError: no continuation makes this JSON.

    >>> parse_partial('{"name": "Ann", "tags": ["a", "b\\u00e')
    ({'name': 'Ann', 'tags': ['a', 'b']}, False)
    """
    reader = _Reader(text)
    closed = reader.close()
    if closed is None:
        return None, False
    value = json.loads(closed)
    return (_mark(value, reader.path) if reader.grows else value), reader.whole


class _Reader:
    """One pass over the tokens: the open containers, and how much of the text can be kept."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.open: list[str] = []
        self.path: list[str | int] = []  # the current key or index of each open container
        self.grows = self.whole = False

    def close(self) -> str | None:
        """The longest part of the text that can be closed to valid JSON, closed; None if there is none."""
        keep, key_next, ending = 0, False, ""
        for match in _TOKEN.finditer(self.text):
            token = match.group()
            at_end = match.end() == len(self.text)
            if token in _CLOSERS:
                self.open.append(token)
                self.path.append("" if token == "{" else 0)
                key_next, keep, ending = token == "{", match.end(), self._closers()
            elif token in ("}", "]"):
                self._pop(token)
                key_next, keep, ending = False, match.end(), self._closers()
            elif token == ",":
                key_next = bool(self.open) and self.open[-1] == "{"
                if self.open and isinstance(self.path[-1], int):
                    self.path[-1] += 1
            elif token == ":":
                key_next = False
            elif key_next:
                if match.group("closed"):
                    self.path[-1] = json.loads(token)
            elif token[0] == '"' and not match.group("closed"):
                self.grows = True
                return self.text[: match.start()] + _BROKEN_ESCAPE.sub(_drop_escape, token) + '"' + self._closers()
            elif not at_end or token[0] == '"' or token in ("true", "false", "null"):
                keep, ending = match.end(), self._closers()
        self.whole = bool(keep) and not ending and not self.text[keep:].strip()
        return self.text[:keep] + ending if keep else None

    def _closers(self) -> str:
        return "".join(_CLOSERS[token] for token in reversed(self.open))

    def _pop(self, token: str) -> None:
        if not self.open or _CLOSERS[self.open.pop()] != token:
            raise ValueError(f"{token!r} closes nothing in {self.text[:200]!r}")
        self.path.pop()


def _drop_escape(match: re.Match[str]) -> str:
    return match.group()[: match.start(1) - match.start()]


def _mark(value: Any, path: list[str | int]) -> Any:
    """The same value, with its open string marked as growing."""
    if not path:
        return Growing(value)
    step = path[0]
    value[step] = _mark(value[step], path[1:])
    return value


# --- partial types ----------------------------------------------------------------------------------------------------


@functools.cache
def partial_type(target: Any) -> Any:
    """The type with every field optional, recursively; a field that has not started is None.

    >>> class Person(BaseModel):
    ...     name: str
    ...     age: int
    >>> partial_type(Person)()
    PartialPerson(name=None, age=None)
    """
    names = _fields(target)
    if names is None:
        return target
    if issubclass(target, BaseModel):
        definitions: Any = {name: (Any, None) for name in names}
        return create_model(f"Partial{target.__name__}", **definitions)
    if _is_typed_dict(target):
        return dict
    return dataclasses.make_dataclass(f"Partial{target.__name__}", [(name, Any, None) for name in names])


def fill(target: Any, value: Any) -> Any:
    """The partial value of a type from partial JSON; values that cannot be used in part are None.

    Args:
        target: the type of the whole answer.
        value: a result of `parse_partial`, for a text that was generated under the type's grammar.
    """
    target = _plain(target)
    origin = get_origin(target) or target
    if value is None:
        return None
    if origin in (Union, types.UnionType):
        return _fill_union(get_args(target), value)
    if isinstance(value, Growing):
        return str(value) if target in _OPEN_TYPES else None
    if target in (Any, object):
        return value
    if isinstance(value, dict) and (fields := _fields(target)) is not None:
        return _fill_fields(target, fields, value)
    if isinstance(value, dict) and _is_kind(origin, Mapping):
        kind = (get_args(target) or (str, Any))[-1]
        return {
            name: filled for name, item in value.items() if (filled := fill(kind, item)) is not None or item is None
        }
    if isinstance(value, list) and _is_kind(origin, Sequence | AbstractSet):
        return _fill_items(get_args(target), value)
    if _is_kind(target, RootModel):
        root = fill(target.model_fields["root"].annotation, value)
        return None if root is None else target.model_construct(root)
    return _validated(target, value)


def _fill_fields(target: Any, fields: dict[str, tuple[str, Any]], value: dict[str, Any]) -> Any:
    """A partial model, dataclass or TypedDict; a TypedDict has only the keys that have a value."""
    found = {name: fill(kind, value.get(alias)) for name, (alias, kind) in fields.items()}
    if _is_typed_dict(target):
        return {name: item for name, item in found.items() if item is not None}
    partial = partial_type(target)
    return partial.model_construct(**found) if issubclass(target, BaseModel) else partial(**found)


def _fill_items(kinds: tuple[Any, ...], value: list[Any]) -> list[Any]:
    """Items of a list, set or tuple; the last is left out while it cannot be used in part."""
    fixed = kinds and kinds[-1] is not Ellipsis and len(kinds) > 1
    each = [kinds[i] if fixed and i < len(kinds) else kinds[0] if kinds else Any for i in range(len(value))]
    items = [(fill(kind, item), item) for kind, item in zip(each, value, strict=True)]
    if items and items[-1][0] is None and items[-1][1] is not None:
        items.pop()
    return [item for item, _ in items]


def _fill_union(members: tuple[Any, ...], value: Any) -> Any:
    """The first member that the value so far can become."""
    if isinstance(value, Growing):
        return str(value) if str in map(_plain, members) else None
    for member in members:
        plain = _plain(member)
        fields = _fields(plain)
        if isinstance(value, dict) and fields is not None:
            aliases = {alias: kind for alias, kind in fields.values()}
            if set(value) <= set(aliases) and all(_may_be(aliases[key], item) for key, item in value.items()):
                return fill(member, value)
        elif _may_be(plain, value):
            return fill(member, value)
    return None


def _may_be(kind: Any, value: Any) -> bool:
    """Whether a value may be the beginning of one of this type; lenient for containers, exact for scalars."""
    plain = _plain(kind)
    origin = get_origin(plain) or plain
    if isinstance(value, Growing) or plain is Any or origin in (Union, types.UnionType):
        return True
    if isinstance(value, dict):
        return _fields(plain) is not None or _is_kind(origin, Mapping | RootModel)
    if isinstance(value, list):
        return _is_kind(origin, Sequence | AbstractSet | RootModel) and origin is not str
    return _validated(plain, value, strict=True) is not None or (value is None and plain in (None, types.NoneType))


@functools.cache
def _adapter(target: Any) -> TypeAdapter[Any]:
    return TypeAdapter(target)


def _validated(target: Any, value: Any, *, strict: bool = False) -> Any:
    """A complete value as its type; None if it does not fit (another member of the union does)."""
    try:
        return _adapter(target).validate_json(json.dumps(value), strict=strict)
    except ValidationError:
        return None


# --- ids --------------------------------------------------------------------------------------------------------------


def has_ids(target: Any) -> bool:
    """Whether a type has fields of type `GenerationID`.

    Raises:
        SchemaError: one is in a set, whose items have no index.
    """
    return _has_ids(target, [])


def _has_ids(target: Any, seen: list[Any]) -> bool:
    target = _plain(target)
    if target is GenerationID:
        return True
    if any(target is other for other in seen):
        return False
    seen.append(target)
    fields = _fields(target)
    if _is_kind(target, RootModel):
        kinds: list[Any] = [target.model_fields["root"].annotation]
    else:
        kinds = [kind for _, kind in fields.values()] if fields is not None else list(get_args(target))
    found = [_has_ids(kind, seen) for kind in kinds]
    if any(found) and _is_kind(get_origin(target), AbstractSet):
        raise SchemaError(f"items of a set have no order that a GenerationID could go by: {target!r}; use a list")
    return any(found)


def set_ids(target: Any, value: Any, identity: str, path: tuple[str | int, ...] = ()) -> None:
    """Fill in each `GenerationID` of a value, complete or partial, from the answer's identity and its path.

    Args:
        target: the type of the whole answer.
        value: a result of `fill` or Pydantic; changed in place.
        identity: identifies the answer.
        path: path of the value.
    """
    target = _plain(target)
    origin = get_origin(target) or target
    if origin in (Union, types.UnionType):
        target = _plain(next((member for member in get_args(target) if _is_of(member, value)), None))
        origin = get_origin(target) or target
    fields = _fields(target)
    if value is None:
        return
    if fields is not None:
        for name, (alias, kind) in fields.items():
            if _plain(kind) is GenerationID:
                _set_field(value, name, GenerationID.at(identity, path))
            else:
                inner = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
                set_ids(kind, inner, identity, (*path, alias))
    elif _is_kind(target, RootModel):
        set_ids(target.model_fields["root"].annotation, value.root, identity, path)
    elif isinstance(value, Mapping) and _is_kind(origin, Mapping):
        for index, item in enumerate(value.values()):
            set_ids((get_args(target) or (str, Any))[-1], item, identity, (*path, index))
    elif isinstance(value, Sequence) and not isinstance(value, str) and (kinds := get_args(target)):
        fixed = kinds[-1] is not Ellipsis and len(kinds) > 1
        for index, item in enumerate(value):
            set_ids(kinds[index] if fixed else kinds[0], item, identity, (*path, index))


def _set_field(value: Any, name: str, item: GenerationID) -> None:
    if isinstance(value, dict):
        value[name] = item
    elif isinstance(value, BaseModel):
        value.__dict__[name] = item  # frozen models too
    else:
        object.__setattr__(value, name, item)


def _is_of(member: Any, value: Any) -> bool:
    """Whether a value, complete or partial, belongs to this member of a union; only types with ids matter."""
    plain = _plain(member)
    fields = _fields(plain)
    if fields is None:
        origin = get_origin(plain) or plain
        in_part = isinstance(value, list) and _is_kind(origin, Sequence)  # a partial tuple is a list
        return in_part or (isinstance(origin, type) and isinstance(value, origin))
    if _is_typed_dict(plain):
        return isinstance(value, dict) and set(value) <= set(fields)
    return isinstance(value, (plain, partial_type(plain)))


def _is_typed_dict(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, dict) and hasattr(target, "__required_keys__")


def _is_kind(target: Any, kinds: Any) -> bool:
    return isinstance(target, type) and issubclass(target, kinds)


def _plain(target: Any) -> Any:
    """A type without its annotations and aliases."""
    while True:
        if get_origin(target) in (typing.Annotated, typing.Required, typing.NotRequired):
            target = get_args(target)[0]
        elif hasattr(target, "__value__"):
            target = target.__value__
        else:
            return target


@functools.cache
def _fields(target: Any) -> dict[str, tuple[str, Any]] | None:
    """For a type with named fields: by name, the key in JSON and the type; None for any other."""
    if not isinstance(target, type):
        return None
    if issubclass(target, BaseModel) and not issubclass(target, RootModel):
        return {name: (_alias(name, info), info.annotation) for name, info in target.model_fields.items()}
    if is_pydantic_dataclass(target):
        found = target.__pydantic_fields__
        return {name: (_alias(name, info), info.annotation) for name, info in found.items()}
    if dataclasses.is_dataclass(target):
        hints = typing.get_type_hints(target)
        return {field.name: (field.name, hints[field.name]) for field in dataclasses.fields(target) if field.init}
    if _is_typed_dict(target):
        return {name: (name, kind) for name, kind in typing.get_type_hints(target).items()}
    return None


def _alias(name: str, info: Any) -> str:
    alias = info.validation_alias or info.alias or name
    choices = getattr(alias, "choices", None)
    return str(choices[0] if choices else alias)
