"""JSON Schema (draft 2020-12, and what older drafts say otherwise) read as sets of JSON values.

Notable here:
- a keyword is read exactly or refused by name; none is skipped, save what the standard calls annotations and `x-...`
- `oneOf` is `anyOf` where its members are shown to exclude each other; `if`, `not` and `dependentSchemas` are rewritten
  through complements where there are such; all else is refused
- `format` is an assertion here, as its reader expects
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any, Final
from urllib.parse import unquote

from pippin.core.errors import SchemaError, UndefinedReference, UnsupportedGuide
from pippin.engine import formats, json_keywords as keywords, regular
from pippin.engine.json_opposites import opposite
from pippin.engine.json_values import (
    ANYTHING,
    NEVER,
    Array,
    Boolean,
    Key,
    Names,
    Null,
    Number,
    Object,
    Part,
    Shape,
    Shapes,
    String,
    is_void,
    join,
    meet,
    meet_all,
    of_value,
    one_of_values,
)

# fmt: off
ANNOTATIONS: Final = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$defs", "definitions", "$anchor", "contentEncoding", "contentMediaType", "contentSchema",
    "discriminator",
})
# fmt: on
# fmt: off
ASSERTIONS: Final = frozenset({
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format", "prefixItems", "items", "additionalItems", "minItems",
    "maxItems", "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "properties",
    "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties", "propertyNames",
    "unevaluatedProperties",
})
# fmt: on
KINDS: Final[dict[str, type]] = {
    "null": Null,
    "boolean": Boolean,
    "number": Number,
    "integer": Number,
    "string": String,
    "array": Array,
    "object": Object,
}  # fmt: skip
_LATEST: Final = "https://json-schema.org/draft/2020-12/schema"
_OLD: Final = ("http://json-schema.org/draft-07/schema", "http://json-schema.org/draft-06/schema")
_DRAFTS: Final = (_LATEST, "https://json-schema.org/draft/2019-09/schema", *_OLD)
_CONTENT: Final = ("contentEncoding", "contentMediaType")
_MOST_PATTERNS: Final = 5


class Reader:
    """One schema document.

    Args:
        document: the schema.

    Raises:
        SchemaError, UnsupportedGuide, UndefinedReference: here and by every method, where something is read that is
            wrong, cannot be enforced, or points at nothing.
    """

    def __init__(self, document: Any) -> None:
        self.document = document
        draft = document.get("$schema", _LATEST) if isinstance(document, dict) else _LATEST
        if str(draft).removesuffix("#") not in _DRAFTS:
            raise UnsupportedGuide(f"the $schema {draft!r} is not known; use {_LATEST}", guide="$schema")
        self.is_old = str(draft).removesuffix("#") in _OLD
        self.items_may_be_list = draft != _LATEST
        self._wide = False  # what must not be missed is read as widely as the standard lets any validator read it
        self._read: dict[tuple[Part, bool], Shapes] = {}
        self._expanded: dict[tuple[Key, bool], Shapes] = {}
        self._open: list[tuple[Part, bool]] = []

    # --- what a key stands for ----------------------------------------------------------------------------------------

    def shapes(self, key: Key) -> Shapes:
        """The values that satisfy every part of a key."""
        if (key, self._wide) not in self._expanded:
            found = ANYTHING
            for part in key:
                found = meet_all(found, self.part(part))
            self._expanded[key, self._wide] = found
        return self._expanded[key, self._wide]

    def part(self, part: Part, *, wide: bool | None = None) -> Shapes:
        """The values that satisfy one part of a key; with ``wide``, at least all that any validator would let pass."""
        before, self._wide = self._wide, self._wide if wide is None else wide
        name = (part, self._wide)
        try:
            if name not in self._read:
                if name in self._open:
                    raise SchemaError(f"the schema at {part[1]!r} refers to itself and says nothing else")
                self._open.append(name)
                try:
                    self._read[name] = self._read_part(*part)
                finally:
                    self._open.pop()
            return self._read[name]
        finally:
            self._wide = before

    def _read_part(self, kind: str, where: str) -> Shapes:
        if kind == "never":
            return ()
        if kind == "value":
            return (of_value(json.loads(where)),)
        if kind == "not":
            return self._complement(self.part(("schema", where), wide=not self._wide), where)
        return self._schema(self._lookup(where), where)

    def _lookup(self, pointer: str) -> Any:
        """The part of the document at a JSON pointer (``#/a/b``)."""
        here = self.document
        for step in pointer.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and name in here:
                here = here[name]
            elif isinstance(here, list) and name.isdecimal() and int(name) < len(here):
                here = here[int(name)]
            else:
                raise UndefinedReference(f"the reference {pointer!r} points at nothing: there is no {name!r}")
            if isinstance(here, dict) and isinstance(here.get("$id"), str):
                raise UnsupportedGuide(f"{pointer!r}: a schema with its own $id inside another", guide="$id")
        return here

    def _resolve(self, reference: Any, where: str) -> str:
        """The pointer that a ``$ref`` means."""
        if not isinstance(reference, str):
            raise SchemaError(f"{where}: $ref must be a text, got {reference!r}")
        base, _, fragment = reference.partition("#")
        own = self.document.get("$id", "") if isinstance(self.document, dict) else ""
        if base and base != own:
            raise UndefinedReference(f"{where}: {reference!r} is outside this schema; write it under $defs")
        if not fragment or fragment.startswith("/"):
            return f"#{fragment}"
        anchors = list(keywords.anchors(self.document, "#", fragment))
        if len(anchors) != 1:
            raise UndefinedReference(f"{where}: there is no anchor {fragment!r}")
        return anchors[0]

    # --- one schema ---------------------------------------------------------------------------------------------------

    def _schema(self, schema: Any, where: str) -> Shapes:
        """The values that are valid under one schema."""
        if isinstance(schema, bool):
            return ANYTHING if schema else ()
        if not isinstance(schema, dict):
            raise SchemaError(f"{where}: a schema is an object or a boolean, got {schema!r}")
        if self.is_old and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        found = ANYTHING
        asserted = False
        for keyword, value in schema.items():
            if keyword in _APPLICATORS:
                found = meet_all(found, _APPLICATORS[keyword](self, value, schema, f"{where}/{keyword}"))
            elif keyword in ASSERTIONS or (keyword == "additionalItems" and self.items_may_be_list):
                found, asserted = found if asserted else meet_all(found, self._assertions(schema, where)), True
            elif keyword in ("then", "else") or (keyword == "$id" and where == "#"):
                continue
            elif (keyword not in ANNOTATIONS and not keyword.startswith("x-")) or (self.is_old and keyword in _CONTENT):
                raise self._refused(where, keyword, "is not known or not supported")
        return found

    def _refused(self, where: str, keyword: str, reason: str) -> UnsupportedGuide:
        return UnsupportedGuide(f"{where}: {keyword} {reason}", field=keywords.field_name(where), guide=keyword)

    def _assertions(self, schema: dict[str, Any], where: str) -> Shapes:
        """The values allowed by the keywords that bind one kind of value each, and by enum and const."""
        shapes: Shapes = tuple(self._of_kind(kind, schema, where) for kind in self._kinds(schema, where))
        if "const" in schema:
            shapes = meet_all(shapes, (of_value(schema["const"]),))
        if "enum" in schema:
            if not isinstance(schema["enum"], list):
                raise SchemaError(f"{where}: enum must be a list, got {schema['enum']!r}")
            shapes = meet_all(shapes, one_of_values(schema["enum"]))
        return shapes

    def _kinds(self, schema: dict[str, Any], where: str) -> list[str]:
        names = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or any(name not in KINDS for name in names):
            raise SchemaError(f"{where}: type must be one or several of {', '.join(KINDS)}, got {schema['type']!r}")
        return [name for name in dict.fromkeys(names) if not (name == "integer" and "number" in names)]

    def _of_kind(self, kind: str, schema: dict[str, Any], where: str) -> Shape:
        if kind in ("number", "integer"):
            return keywords.number(schema, where, integer=kind == "integer")
        if kind == "string":
            return self._string(schema, where)
        if kind == "array":
            return self._array(schema, where)
        if kind == "object":
            return self._object(schema, where)
        return Null() if kind == "null" else Boolean()

    def _string(self, schema: dict[str, Any], where: str) -> String:
        include = []
        try:
            if "pattern" in schema:
                pattern = keywords.text(schema, "pattern", where)
                include.append(f"/{regular.search(pattern, narrow=not self._wide)}/")
            if (
                "format" in schema
                and (terminal := formats.terminal(keywords.text(schema, "format", where)))
                and not self._wide
            ):
                include.append(terminal)
        except UnsupportedGuide as error:
            raise UnsupportedGuide(f"{where}: {error}", field=keywords.field_name(where), guide=error.guide) from error
        return String(
            keywords.count(schema, "minLength", where) or 0, keywords.count(schema, "maxLength", where), tuple(include)
        )

    def _array(self, schema: dict[str, Any], where: str) -> Array:
        items, prefix = "items", "prefixItems"
        if self.items_may_be_list:
            items, prefix = ("additionalItems", "items") if isinstance(schema.get("items"), list) else ("items", "")
        elif "additionalItems" in schema:
            raise self._refused(where, "additionalItems", "belongs to older drafts; use prefixItems and items")
        if schema.get("unevaluatedItems", True) is not True:
            if items in schema or "contains" in schema or _looks_elsewhere(schema):
                raise self._refused(where, "unevaluatedItems", "is supported only beside prefixItems")
            items = "unevaluatedItems"
        heads = schema.get(prefix, [])
        if not isinstance(heads, list):
            raise SchemaError(f"{where}: {prefix} must be a list, got {heads!r}")
        contains = self._contains(schema, where)
        unique = schema.get("uniqueItems", False)
        if not isinstance(unique, bool):
            raise SchemaError(f"{where}: uniqueItems must be true or false, got {unique!r}")
        return Array(
            tuple(self._child(f"{where}/{prefix}/{i}") for i in range(len(heads))),
            self._child(f"{where}/{items}") if items in schema else (),
            keywords.count(schema, "minItems", where) or 0,
            keywords.count(schema, "maxItems", where),
            unique,
            contains,
        )

    def _contains(self, schema: dict[str, Any], where: str) -> tuple[tuple[Key, int], ...]:
        if "contains" not in schema:
            return ()
        if "maxContains" in schema:
            raise self._refused(where, "maxContains", "cannot be enforced")
        least = keywords.count(schema, "minContains", where)
        least = 1 if least is None else least
        return ((self._child(f"{where}/contains"), least),) if least else ()

    def _object(self, schema: dict[str, Any], where: str) -> Object:
        rest = "additionalProperties"
        if schema.get("unevaluatedProperties", True) is not True and rest not in schema:
            if _looks_elsewhere(schema):
                raise self._refused(where, "unevaluatedProperties", "is supported only without other subschemas")
            rest = "unevaluatedProperties"
        named, patterns, required = (
            schema.get("properties", {}),
            schema.get("patternProperties", {}),
            keywords.names(schema, where),
        )
        for keyword, value in (("properties", named), ("patternProperties", patterns)):
            if not isinstance(value, dict):
                raise SchemaError(f"{where}: {keyword} must be an object, got {value!r}")
        others = self._others(patterns, self._child(f"{where}/{rest}") if rest in schema else (), where)
        found = Object(
            tuple((name, self._child(f"{where}/properties/{keywords.escape(name)}")) for name in named),
            others,
            required,
            keywords.count(schema, "minProperties", where) or 0,
            keywords.count(schema, "maxProperties", where),
        )
        if patterns:  # a named property must also satisfy every pattern that it matches
            hidden = replace(found, properties=(), others=self._others(patterns, (), where))
            found = replace(found, properties=tuple((n, join(k, hidden.key(n))) for n, k in found.properties))
        return self._with_property_names(found, f"{where}/propertyNames") if "propertyNames" in schema else found

    def _others(self, patterns: dict[str, Any], rest: Key, where: str) -> tuple[Names, ...]:
        """The classes of names that the pattern properties make, and the rest."""
        if len(patterns) > _MOST_PATTERNS:
            raise self._refused(where, "patternProperties", f"has more than {_MOST_PATTERNS} patterns")
        terminals = {
            f"/{regular.search(p, narrow=False)}/": self._child(f"{where}/patternProperties/{keywords.escape(p)}")
            for p in patterns
        }
        found = []
        for chosen in (c for n in range(len(terminals), -1, -1) for c in combinations(terminals, n)):
            key: Key = () if chosen else rest
            for terminal in chosen:
                key = join(key, terminals[terminal])
            names = Names(chosen, tuple(t for t in terminals if t not in chosen), key)
            if key != NEVER and not is_void(names):
                found.append(names)
        return tuple(found)

    def _with_property_names(self, found: Object, where: str) -> Object:
        strings = [shape for shape in self.part(("schema", where)) if isinstance(shape, String)]
        strings = [s for s in strings if not s.is_empty]
        if String() in strings:
            return found
        if all(s.values is not None for s in strings):
            names = tuple(v for s in strings for v in s.values or ())
            named = found.with_names(names)
            keys = tuple((n, k if n in names else NEVER) for n, k in named.properties)
            return replace(named, properties=keys, others=())
        terminal = " | ".join(f"({s.terminal})" for s in strings)
        others = tuple(replace(o, include=(*o.include, terminal)) for o in found.others)
        keys = tuple(
            (n, k if regular.matches(terminal, json.dumps(n, ensure_ascii=False)) else NEVER)
            for n, k in found.properties
        )
        return replace(found, properties=keys, others=tuple(o for o in others if not is_void(o)))

    def _child(self, where: str) -> Key:
        """The key of a subschema; `true` and `false` are told at once."""
        schema = self._lookup(where)
        return () if schema is True or schema == {} else NEVER if schema is False else (("schema", where),)

    # --- subschemas of the same value ---------------------------------------------------------------------------------

    def _each(self, value: Any, where: str) -> list[Shapes]:
        if not isinstance(value, list) or not value:
            raise SchemaError(f"{where} must be a list of at least one schema, got {value!r}")
        return [self.part(("schema", f"{where}/{i}")) for i in range(len(value))]

    def _reference(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        pointer = self._resolve(value, where)
        self._lookup(pointer)
        return self.part(("schema", pointer))

    def _all_of(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        found = ANYTHING
        for shapes in self._each(value, where):
            found = meet_all(found, shapes)
        return found

    def _any_of(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return tuple(dict.fromkeys(shape for shapes in self._each(value, where) for shape in shapes))

    def _one_of(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        members = self._each(value, where)
        widely = [self.part(("schema", f"{where}/{i}"), wide=True) for i in range(len(members))]
        found: list[Shape] = []
        for i, only in enumerate(members):
            for j, other in enumerate(widely):
                if i != j and not self._disjoint(widely[i], other):
                    try:
                        only = meet_all(only, self.part(("not", f"{where}/{j}")))
                    except UnsupportedGuide as error:
                        reason = f"needs members that exclude each other, but {i} and {j} may not; use anyOf"
                        raise self._refused(where.rpartition("/")[0], "oneOf", reason) from error
            found.extend(only)
        return tuple(dict.fromkeys(found))

    def _negation(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return self.part(("not", where))

    def _condition(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        parent = where.rpartition("/")[0]
        met, unmet = ANYTHING, ANYTHING
        if "then" in schema:
            met = self.part(("schema", f"{parent}/then"))
        if "else" in schema:
            unmet = self.part(("schema", f"{parent}/else"))
        if met == unmet == ANYTHING:
            return ANYTHING
        yes = meet_all(self.part(("schema", where)), met)
        return tuple(dict.fromkeys((*yes, *meet_all(self.part(("not", where)), unmet))))

    def _dependent_required(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return self._dependent(
            value, where, lambda names, _: Object(required=keywords.names({"required": names}, where))
        )

    def _dependent_schemas(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return self._dependent(value, where, lambda _, at: self.part(("schema", at)))

    def _dependencies(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        def then(needs: Any, at: str) -> Shape | Shapes:
            return (
                Object(required=keywords.names({"required": needs}, at))
                if isinstance(needs, list)
                else self.part(("schema", at))
            )

        return self._dependent(value, where, then)

    def _dependent(self, value: Any, where: str, then: Callable[[Any, str], Shape | Shapes]) -> Shapes:
        """Either a property is absent, or it is there and something follows."""
        if not isinstance(value, dict):
            raise SchemaError(f"{where} must be an object, got {value!r}")
        found = ANYTHING
        for name, needs in value.items():
            follows = then(needs, f"{where}/{keywords.escape(name)}")
            present = meet_all((Object(required=(name,)),), follows if isinstance(follows, tuple) else (follows,))
            absent = Object(properties=((name, NEVER),))
            found = meet_all(found, (*(s for s in ANYTHING if not isinstance(s, Object)), absent, *present))
        return found

    # --- complements and overlaps -------------------------------------------------------------------------------------

    def _complement(self, shapes: Shapes, where: str) -> Shapes:
        """All values in none of these shapes."""
        found = ANYTHING
        for shape in shapes:
            same_kind = opposite(shape)
            if same_kind is None:
                raise self._refused(where, "not", "or oneOf or if needs the opposite of a schema that has none")
            others = tuple(s for s in ANYTHING if type(s) is not type(shape))
            found = meet_all(found, (*others, *same_kind))
        return found

    def _disjoint(self, a: Shapes, b: Shapes) -> bool:
        """Whether it can be shown that no value is in both, however widely they are read."""
        before, self._wide = self._wide, True
        try:
            return all((both := meet(x, y)) is None or self._plainly_empty(both) for x in a for y in b)
        finally:
            self._wide = before

    def _plainly_empty(self, shape: Shape, depth: int = 4) -> bool:
        """Whether a shape has no values, seen without following recursion far."""
        match shape:
            case Number(values=None):
                return shape.is_empty
            case String():
                return shape.is_empty
            case Array():
                needed = [shape.at(i) for i in range(min(shape.low, len(shape.prefix) + 1))]
                return (shape.high is not None and shape.low > shape.high) or any(
                    self._hopeless(k, depth) for k in needed
                )
            case Object():
                return any(self._hopeless(shape.key(name), depth) for name in shape.required)
        return False

    def _hopeless(self, key: Key, depth: int) -> bool:
        if depth == 0 or any((part, self._wide) in self._open for part in key):
            return False
        return all(self._plainly_empty(shape, depth - 1) for shape in self.shapes(key))


_APPLICATORS: Final[dict[str, Callable[[Reader, Any, dict[str, Any], str], Shapes]]] = {
    "$ref": Reader._reference,
    "allOf": Reader._all_of,
    "anyOf": Reader._any_of,
    "oneOf": Reader._one_of,
    "not": Reader._negation,
    "if": Reader._condition,
    "dependentRequired": Reader._dependent_required,
    "dependentSchemas": Reader._dependent_schemas,
    "dependencies": Reader._dependencies,
}


def _looks_elsewhere(schema: dict[str, Any]) -> bool:
    return any(keyword in _APPLICATORS for keyword in schema)
