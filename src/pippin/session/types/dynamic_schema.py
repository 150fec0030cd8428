"""Run-time schemas, built from parts; the public interface is `Schema.object`, `Schema.array` and similar methods.

Notable here:
- a part is JSON Schema plus the named types that it refers to; combining parts merges their types, so one name is one
  type and is written once
- a part is complete when each of its references is among its types; only then is there a grammar
- Python types and JSON Schemas can be parts too: their definitions are moved to the types, their pointers rewritten
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, unquote

from pippin.core.errors import (
    DuplicateProperty,
    DuplicateType,
    EmptySchema,
    SchemaError,
    UndefinedReference,
    UnsupportedGuide,
)
from pippin.engine.grammar.json_keywords import check_size

_TYPES: Final = "#/$defs/"
_LITERALS: Final = ("enum", "const", "default", "examples", "example", "required", "x-order")
_MAPS: Final = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_NUMBER_GUIDES: Final = ("minimum", "maximum", "exclusive_minimum", "exclusive_maximum", "multiple_of")
GUIDES: Final = {
    "string": ("choices", "const", "pattern", "min_length", "max_length", "format"),
    "integer": ("choices", "const", *_NUMBER_GUIDES),
    "number": ("choices", "const", *_NUMBER_GUIDES),
    "boolean": ("const",),
    "null": (),
}
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@dataclass(frozen=True)
class SchemaPart:
    """A part of a schema.

    Args:
        schema: JSON Schema whose references are ``#/$defs/NAME``.
        types: definitions of named types by name.
    """

    schema: dict[str, Any]
    types: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return json.dumps(self.schema, ensure_ascii=False)

    @property
    def missing(self) -> list[str]:
        """Names that it refers to and does not define."""
        named = _references(self.schema).union(*map(_references, self.types.values()))
        return sorted(named - set(self.types))

    def with_types(self, parts: Iterable[SchemaPart]) -> SchemaPart:
        """The same part with the types of other parts added.

        Raises:
            DuplicateType: two different types have one name.
        """
        return SchemaPart(self.schema, merge([self.types, *(part.types for part in parts)]))

    def document(self) -> dict[str, Any]:
        """The whole as one JSON Schema; a type that only the root refers to becomes the root.

        Raises:
            UndefinedReference: an unresolved reference.
        """
        if self.missing:
            names = ", ".join(map(repr, self.missing))
            raise UndefinedReference(f"no type is named {names}; give it with schema.resolve(…), or correct the name")
        wanted: dict[str, dict[str, Any]] = {}
        waiting = [*_references(self.schema)]
        while waiting:
            name = waiting.pop()
            if name not in wanted:
                wanted[name] = self.types[name]
                waiting.extend(_references(self.types[name]))
        used = {name: wanted[name] for name in self.types if name in wanted}
        root = next(iter(_references(self.schema)), "")
        if self.schema == reference(root).schema and not any(root in _references(type_) for type_ in used.values()):
            return {**used.pop(root), **({"$defs": used} if used else {})}
        return {**self.schema, **({"$defs": used} if used else {})}


# --- parts ------------------------------------------------------------------------------------------------------------


def primitive(kind: str, description: str = "", **guides: Any) -> SchemaPart:
    """A string, number, boolean or null with its constraints; a constraint that is None is absent.

    Raises:
        UnsupportedGuide: a constraint that this kind does not have. EmptySchema: no choices. SchemaError: an unknown
            kind, or a choice of another kind.
    """
    if kind not in GUIDES:
        raise SchemaError(f"a primitive is one of {', '.join(GUIDES)}, got {kind!r}")
    found: dict[str, Any] = {"type": kind}
    for guide, value in guides.items():
        if guide not in GUIDES[kind]:
            known = ", ".join(GUIDES[kind]) or "no guide"
            raise UnsupportedGuide(f"{guide} does not apply to {kind}, which takes {known}", guide=guide)
        if value is None:
            continue
        if guide in ("choices", "const"):
            values = [value] if guide == "const" else _choices(value)
            for each in values:
                if not isinstance(each, _KINDS[kind]) or (isinstance(each, bool) and kind != "boolean"):
                    raise SchemaError(f"{guide} of {kind} holds {each!r}, which is of another kind")
            found["enum"] = values if "enum" not in found else [each for each in values if each in found["enum"]]
            if not found["enum"]:
                raise EmptySchema(f"const {value!r} is none of the choices")
        elif guide == "pattern":
            found["pattern"] = f"^(?:{value})$"
        else:
            head, *rest = guide.split("_")
            found[head + "".join(word.title() for word in rest)] = value
    return SchemaPart({**found, **_described(description)})


def object_of(
    name: str, properties: Sequence[tuple[str, SchemaPart]], optional: Iterable[str], description: str
) -> SchemaPart:
    """An object, as a named type.

    Raises:
        DuplicateProperty: a property is named twice. DuplicateType: two types with one name. SchemaError: an invalid
            name, or an optional property that does not exist.
    """
    names = [each for each, _ in properties]
    for each in names:
        if not isinstance(each, str):
            raise SchemaError(f"a property of {name!r} is named {each!r}; a name is a text")
        if names.count(each) > 1:
            raise DuplicateProperty(f"{name!r} has two properties {each!r}; give one another name")
    left_out = [optional] if isinstance(optional, str) else list(optional)
    if unknown := sorted(set(left_out) - set(names)):
        raise SchemaError(f"{name!r} has no property {unknown[0]!r} that could be optional")
    found = {
        "title": name,
        **_described(description),
        "type": "object",
        "properties": {each: part.schema for each, part in properties},
        "required": [each for each in names if each not in left_out],
        "x-order": names,
        "additionalProperties": False,
    }
    return _named(name, found, [part for _, part in properties])


def array_of(items: SchemaPart, min_items: int | None, max_items: int | None, description: str) -> SchemaPart:
    """An array of items of one schema."""
    counts = {key: value for key, value in (("minItems", min_items), ("maxItems", max_items)) if value is not None}
    return SchemaPart({"type": "array", "items": items.schema, **counts, **_described(description)}, items.types)


def any_of(parts: Sequence[SchemaPart], constants: Sequence[Any], name: str, description: str) -> SchemaPart:
    """One of several parts and constants.

    Raises:
        EmptySchema: there are none. DuplicateType: two types with one name. SchemaError: a constant without JSON form.
    """
    if not parts and not constants:
        raise EmptySchema(f"any_of{f' {name!r}' if name else ''} needs at least one choice")
    values = _choices(constants) if constants else []
    listed: dict[str, Any] = {"enum": values} if values else {}
    if values and all(isinstance(each, str) for each in values):
        listed = {"type": "string", **listed}
    schemas = [part.schema for part in parts] + ([listed] if listed else [])
    found = {**(schemas[0] if len(schemas) == 1 else {"anyOf": schemas}), **_described(description)}
    if name:
        return _named(name, {"title": name, **found}, parts)
    return SchemaPart(found, merge(part.types for part in parts))


def reference(name: str) -> SchemaPart:
    """The type of that name, wherever it is defined."""
    return SchemaPart({"$ref": _TYPES + quote(name.replace("~", "~0").replace("/", "~1"))})


# --- existing types and schemas ---------------------------------------------------------------------------------------


def of_type(schema: dict[str, Any]) -> SchemaPart:
    """A Python type, from the JSON Schema that `json_schema.describe` wrote: its models are named types."""
    types = dict(schema.get("$defs", {}))
    rest = {key: value for key, value in schema.items() if key != "$defs"}
    if "title" in rest and "properties" in rest:
        return _named(rest["title"], rest, [SchemaPart({}, types)])
    return SchemaPart(rest, types)


def of_json_schema(schema: dict[str, Any]) -> SchemaPart:
    """A JSON Schema written by hand; one with pointers becomes a named type, and they are rewritten to point into it.

    Raises:
        UnsupportedGuide: an older draft, or an identifier that pointers may refer to.
    """
    check_size(schema)
    draft = str(schema.get("$schema", "")).rstrip("#")
    if draft and not draft.endswith("/2020-12/schema"):
        raise UnsupportedGuide(f"a part of a schema cannot be of another draft: {draft}", guide="$schema")
    for guide in ("$id", "$dynamicRef"):
        if guide in schema:
            raise UnsupportedGuide(f"{guide} cannot stand in a part of a schema", guide=guide)
    rest = {key: value for key, value in schema.items() if key != "$schema"}
    if not _pointers(rest):
        return SchemaPart(rest)
    spelled = json.dumps(rest, ensure_ascii=False)
    name = f"{rest.get('title', 'Schema')}-{hashlib.sha256(spelled.encode()).hexdigest()[:8]}"
    here = reference(name)
    bent = _rewrite(rest, lambda pointer: here.schema["$ref"] + pointer[1:] if pointer[:1] == "#" else pointer)
    return SchemaPart(here.schema, {name: bent})


def merge(types: Iterable[Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """All types of several parts.

    Raises:
        DuplicateType: two different types have one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for each in types:
        for name, schema in each.items():
            # As texts: the order of properties is part of a type, and 1 is not True.
            if name in found and json.dumps(found[name]) != json.dumps(schema):
                raise DuplicateType(f"two different types are named {name!r}; give one another name")
            found[name] = schema
    return found


def _named(name: str, schema: dict[str, Any], parts: Iterable[SchemaPart]) -> SchemaPart:
    if not isinstance(name, str) or not name:
        raise SchemaError(f"a type needs a name, got {name!r}")
    return SchemaPart(reference(name).schema, merge([{name: schema}, *(part.types for part in parts)]))


def _choices(values: Any) -> list[Any]:
    """Values without duplicates."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise SchemaError(f"choices are a list of values, got {values!r}")
    found: dict[str, Any] = {}
    for value in values:
        try:
            found[json.dumps(value, allow_nan=False)] = value
        except (TypeError, ValueError) as error:
            raise SchemaError(f"a constant must have a JSON form, got {value!r}: {error}") from error
    if not found:
        raise EmptySchema("choices need at least one value")
    return list(found.values())


def _described(description: str) -> dict[str, str]:
    return {"description": description} if description else {}


def _rewrite(schema: Any, change: Callable[[str], str]) -> Any:
    """The schema with each ``$ref`` changed; values that only look like schemas are not changed."""
    if isinstance(schema, list):
        return [_rewrite(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            found[key] = change(value)
        elif key in _MAPS and isinstance(value, dict):
            found[key] = {name: _rewrite(item, change) for name, item in value.items()}
        else:
            found[key] = value if key in _LITERALS else _rewrite(value, change)
    return found


def _pointers(schema: Any) -> list[str]:
    found: list[str] = []

    def note(pointer: str) -> str:
        found.append(pointer)
        return pointer

    _rewrite(schema, note)
    return found


def _references(schema: Any) -> set[str]:
    """Names of the types that a schema refers to."""
    heads = (p[len(_TYPES) :].split("/")[0] for p in _pointers(schema) if p.startswith(_TYPES))
    return {unquote(head).replace("~1", "/").replace("~0", "~") for head in heads}
