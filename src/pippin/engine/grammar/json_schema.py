"""JSON Schema (drafts 3 to 2020-12) converted to sets of JSON values.

Notable here:
- a keyword is converted exactly or refused by name; what is no keyword of JSON Schema, and formats that have no
  definition, are annotations: ignored with a note, or refused where the caller is strict
- `oneOf` is `anyOf` if its members provably exclude each other; `if`, `not` and other `oneOf` use complements if they
  are unions of shapes, and are refused otherwise
- `format` is an assertion, not an annotation
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import combinations
from typing import Any, Final

from pippin.core.errors import SchemaError, UnsupportedGuide
from pippin.engine.grammar import json_keywords as keywords, regex, string_formats
from pippin.engine.grammar.json_negation import complement
from pippin.engine.grammar.json_references import References, escape
from pippin.engine.grammar.json_values import (
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

ANNOTATIONS: Final = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "id", "$vocabulary", "$defs", "definitions", "$anchor", "$dynamicAnchor", "$recursiveAnchor",
    "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "then", "else",
})  # fmt: skip
ASSERTIONS: Final = frozenset({
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format", "prefixItems", "items", "additionalItems", "minItems",
    "maxItems", "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "properties",
    "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties", "propertyNames",
    "unevaluatedProperties", "divisibleBy",
})  # fmt: skip
KINDS: Final[dict[str, type]] = {
    "null": Null,
    "boolean": Boolean,
    "number": Number,
    "integer": Number,
    "string": String,
    "array": Array,
    "object": Object,
}  # fmt: skip
_CONTENT: Final = frozenset({"contentEncoding", "contentMediaType"})
_MAX_CLASSES: Final = 64
_MAX_PAIRS: Final = 100_000  # a few seconds


class SchemaReader:
    """One schema document.

    Args:
        document: the schema.
        strict: refuse what is no keyword of JSON Schema, and formats without a definition.

    Attributes:
        notes: what was ignored, a sentence each, in the order of reading.

    Raises:
        SchemaError, UnsupportedGuide, UndefinedReference: (also by every method) a part of the schema is malformed,
            cannot be enforced, or refers to nothing.
    """

    def __init__(self, document: Any, *, strict: bool = False) -> None:
        self.references = References(document)
        self.strict = strict
        self.notes: dict[str, None] = {}
        self._wide = False  # whether patterns and formats are read as widely as any validator may; see `part`
        self._read: dict[tuple[Part, bool], Shapes] = {}
        self._expanded: dict[tuple[Key, bool], Shapes] = {}
        self._open: list[tuple[Part, bool]] = []
        self._pairs = 0  # of shapes that were intersected

    # --- what a key stands for ----------------------------------------------------------------------------------------

    def shapes(self, key: Key) -> Shapes:
        """The values that satisfy every part of a key, as a union of shapes."""
        if (key, self._wide) not in self._expanded:
            found = ANYTHING
            for part in key:
                found = self._meet_all(found, self.part(part))
            self._expanded[key, self._wide] = found
        return self._expanded[key, self._wide]

    def part(self, part: Part, *, wide: bool | None = None) -> Shapes:
        """The values that satisfy one part of a key.

        Args:
            part: a subschema, its negation, a constant, or nothing.
            wide: interpret `pattern` and `format` as broadly as any validator may, so that the result is a superset;
                None for the present mode. Complements are taken of broad interpretations.
        """
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
        if kind == "unlike":
            return self._complement((of_value(json.loads(where)),), where)
        if kind == "not":
            schema = self.references.at(where)
            if isinstance(schema, dict) and "not" in schema and schema.keys() <= ANNOTATIONS | {"not"}:
                return self.part(("schema", f"{where}/not"))
            return self._complement(self.part(("schema", where), wide=not self._wide), where)
        return self._schema(self.references.at(where), where)

    # --- one schema ---------------------------------------------------------------------------------------------------

    def _schema(self, schema: Any, where: str) -> Shapes:
        """The values that are valid under one schema."""
        if isinstance(schema, bool):
            return ANYTHING if schema else ()
        if not isinstance(schema, dict):
            raise SchemaError(f"{where}: a schema is an object or a boolean, got {schema!r}")
        draft = self._draft(where)
        if draft <= 7 and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        found = ANYTHING
        asserted = False
        for keyword, value in schema.items():
            if keyword in _APPLICATORS or (draft == 3 and keyword in _DRAFT_3):
                applicator = _DRAFT_3[keyword] if draft == 3 and keyword in _DRAFT_3 else _APPLICATORS[keyword]
                found = self._meet_all(found, applicator(self, value, schema, f"{where}/{keyword}"))
            if keyword in ASSERTIONS:
                found, asserted = found if asserted else self._meet_all(found, self._assertions(schema, where)), True
            elif keyword not in _APPLICATORS and keyword not in ANNOTATIONS and not keyword.startswith("x-"):
                self._ignore(where, keyword)
            elif draft == 7 and keyword in _CONTENT:
                self.notes[f"{where}: {keyword!r} is not enforced, as in later drafts"] = None
        return found

    def _draft(self, where: str) -> int:
        return self.references.resource(where).draft

    def _ignore(self, where: str, keyword: str) -> None:
        """Note what is no keyword, or refuse it.

        Raises:
            UnsupportedGuide: the caller is strict.
        """
        meant = _meant(keyword)
        if self.strict:
            raise self._refused(where, keyword, f"is not a keyword of JSON Schema{meant}")
        self.notes[f"{where}: {keyword!r} is not a keyword of JSON Schema and is ignored{meant}"] = None

    def _refused(self, where: str, keyword: str, reason: str) -> UnsupportedGuide:
        return UnsupportedGuide(f"{where}: {keyword} {reason}", field=keywords.field_name(where), guide=keyword)

    def _assertions(self, schema: dict[str, Any], where: str) -> Shapes:
        """The values allowed by the assertions on single types (minLength, items, ...), by enum and by const."""
        shapes: Shapes = tuple(self._of_kind(kind, schema, where) for kind in self._kinds(schema, where))
        if "const" in schema:
            shapes = self._meet_all(shapes, (of_value(schema["const"]),))
        if "enum" in schema:
            if not isinstance(schema["enum"], list):
                raise SchemaError(f"{where}: enum must be a list, got {schema['enum']!r}")
            shapes = self._meet_all(shapes, one_of_values(schema["enum"]))
        return shapes

    def _kinds(self, schema: dict[str, Any], where: str) -> list[str]:
        every = ["null", "boolean", "number", "string", "array", "object"]
        names = schema.get("type", every)
        names = [names] if isinstance(names, str) else names
        if self._draft(where) == 3 and isinstance(names, list):
            names = every if "any" in names or any(isinstance(name, dict) for name in names) else names
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
        """The strings of a schema; those of a pattern with one text are that text, which costs the least to compare."""
        include: list[str] = []
        exclude: tuple[str, ...] = ()
        try:
            low, high = keywords.count(schema, "minLength", where) or 0, keywords.count(schema, "maxLength", where)
            if "pattern" in schema:
                pattern = keywords.text(schema, "pattern", where)
                found, unwanted = regex.conditions(pattern, narrow=not self._wide, max_length=high)
                include += [f"/{each}/" for each in found]
                exclude = tuple(f"/{each}/" for each in unwanted)
            if "format" in schema and (terminal := self._format(keywords.text(schema, "format", where), where)):
                include.append(terminal)
            shape = String(low, high, tuple(include), exclude)
            if "pattern" in schema and (only := regex.constant(pattern)) is not None:
                return self._one_string(only, String(low, high, tuple(include[1:])))
            if "pattern" in schema and not self._wide:
                regex.check_cost(shape.terminal)
        except UnsupportedGuide as error:
            raise UnsupportedGuide(f"{where}: {error}", field=keywords.field_name(where), guide=error.guide) from error
        return shape

    @staticmethod
    def _one_string(text: str, others: String) -> String:
        """The text alone if it is one of the others, else nothing."""
        found = meet(String(values=(text,)), others)
        return found if isinstance(found, String) else String(values=())

    def _format(self, name: str, where: str) -> str | None:
        """The terminal of a format; None where it has no definition, or where everything is read widely.

        Raises:
            UnsupportedGuide: it has none, and the caller is strict.
        """
        if name not in string_formats.STANDARD and not self.strict:
            self.notes[f"{where}: the format {name!r} has no definition here and is ignored"] = None
            return None
        return None if self._wide else string_formats.terminal(name, parsed=self.strict)

    def _array(self, schema: dict[str, Any], where: str) -> Array:
        listed = isinstance(schema.get("items"), list)  # as drafts 3 to 2019-09 spell prefixItems
        items, prefix = ("additionalItems", "items") if listed else ("items", "prefixItems")
        if schema.get("unevaluatedItems", True) is not True:
            if items in schema or "contains" in schema or _has_applicators(schema):
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
            if _has_applicators(schema):
                raise self._refused(where, "unevaluatedProperties", "is supported only without other subschemas")
            rest = "unevaluatedProperties"
        named, patterns, required = (
            schema.get("properties", {}),
            schema.get("patternProperties", {}),
            () if self._draft(where) == 3 else keywords.names(schema, where),
        )
        for keyword, value in (("properties", named), ("patternProperties", patterns)):
            if not isinstance(value, dict):
                raise SchemaError(f"{where}: {keyword} must be an object, got {value!r}")
        if self._draft(where) == 3:
            children = ((name, child) for name, child in named.items() if isinstance(child, dict))
            required = tuple(name for name, child in children if child.get("required") is True)
        others = self._name_classes(patterns, self._child(f"{where}/{rest}") if rest in schema else (), where)
        found = Object(
            tuple((name, self._child(f"{where}/properties/{escape(name)}")) for name in named),
            others,
            required,
            keywords.count(schema, "minProperties", where) or 0,
            keywords.count(schema, "maxProperties", where),
        )
        if patterns:  # a named property must also satisfy every pattern that it matches
            hidden = replace(found, properties=(), others=self._name_classes(patterns, (), where))
            found = replace(found, properties=tuple((n, join(k, hidden.key(n))) for n, k in found.properties))
        return self._with_property_names(found, f"{where}/propertyNames") if "propertyNames" in schema else found

    def _name_classes(self, patterns: dict[str, Any], rest: Key, where: str) -> tuple[Names, ...]:
        """Disjoint classes of property names: one for each set of patterns that a name can match, with its schemas.

        With the patterns a and b there are four: names that match both (schemas of a and of b hold), a but not b, b but
        not a, and neither (``rest`` holds). Classes without a member, and those that forbid every value, are left out.

        Args:
            patterns: the value of `patternProperties`.
            rest: key of what a name that matches no pattern must satisfy.
            where: pointer of the schema.
        """
        classes = [Names()]
        for pattern in patterns:
            include, exclude = regex.conditions(pattern, narrow=False, exclude_narrow=False)
            terminal = " & ".join([f"(/{each}/)" for each in include] + [f"~(/{each}/)" for each in exclude])
            key = self._child(f"{where}/patternProperties/{escape(pattern)}")
            matched = [Names((*c.include, terminal), c.exclude, join(c.key, key)) for c in classes]
            unmatched = [Names(c.include, (*c.exclude, terminal), c.key) for c in classes]
            classes = [names for names in (*matched, *unmatched) if not is_void(names)]
            if len(classes) > _MAX_CLASSES:
                raise self._refused(where, "patternProperties", f"makes more than {_MAX_CLASSES} classes of names")
        classes = [names if names.include else replace(names, key=rest) for names in classes]
        return tuple(names for names in classes if names.key != NEVER)

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
            (n, k if regex.matches(terminal, json.dumps(n, ensure_ascii=False)) else NEVER) for n, k in found.properties
        )
        return replace(found, properties=keys, others=tuple(o for o in others if not is_void(o)))

    def _child(self, where: str) -> Key:
        """The key of a subschema; `true` is the empty key, `false` is NEVER."""
        schema = self.references.at(where)
        return () if schema is True or schema == {} else NEVER if schema is False else (("schema", where),)

    # --- subschemas of the same value ---------------------------------------------------------------------------------

    def _each(self, value: Any, where: str) -> list[Shapes]:
        if not isinstance(value, list) or not value:
            raise SchemaError(f"{where} must be a list of at least one schema, got {value!r}")
        return [self.part(("schema", f"{where}/{i}")) for i in range(len(value))]

    def _reference(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return self.part(("schema", self.references.resolve(value, where)))

    def _dynamic_reference(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return self.part(("schema", self.references.resolve_dynamic(value, where)))

    def _all_of(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        found = ANYTHING
        for shapes in self._each(value, where):
            found = self._meet_all(found, shapes)
        return found

    def _any_of(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return tuple(dict.fromkeys(shape for shapes in self._each(value, where) for shape in shapes))

    def _one_of(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        """Values of one member alone, among those that the assertions beside `oneOf` allow.

        The caller intersects the result with these assertions in any case, so members need to exclude each other only
        where they hold: `required` beside `oneOf` is what makes a property whose constants differ tell members apart.
        """
        members = self._each(value, where)
        parent = where.rpartition("/")[0]
        widely = [
            self._meet_all(self._beside(schema, parent, wide=True), self.part(("schema", f"{where}/{i}"), wide=True))
            for i in range(len(members))
        ]
        overlapping = {
            pair for pair in combinations(range(len(members)), 2) if not self._disjoint(*(widely[at] for at in pair))
        }
        found: list[Shape] = []
        for i, only in enumerate(members):
            others = [j for j in range(len(members)) if (min(i, j), max(i, j)) in overlapping]
            if others:
                only = self._possible(self._meet_all(only, self._beside(schema, parent)))
            for j in others:
                try:
                    only = self._possible(self._meet_all(only, self.part(("not", f"{where}/{j}"))))
                except UnsupportedGuide as error:
                    reason = f"needs members that exclude each other, but {i} and {j} may not; use anyOf"
                    raise self._refused(parent, "oneOf", reason) from error
            found.extend(only)
        return tuple(dict.fromkeys(found))

    def _beside(self, schema: dict[str, Any], where: str, *, wide: bool | None = None) -> Shapes:
        """The values that the assertions of a schema allow, whatever its subschemas of the same value say."""
        if ASSERTIONS.isdisjoint(schema):
            return ANYTHING
        before, self._wide = self._wide, self._wide if wide is None else wide
        try:
            return self._assertions(schema, where)
        finally:
            self._wide = before

    def _possible(self, shapes: Shapes) -> Shapes:
        """The shapes without those that plainly have no values, which complements produce in great number."""
        return tuple(shape for shape in shapes if not self._plainly_empty(shape))

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
        yes = self._meet_all(self.part(("schema", where)), met)
        return tuple(dict.fromkeys((*yes, *self._meet_all(self.part(("not", where)), unmet))))

    def _dependent_required(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return self._dependent(
            value, where, lambda names, _: Object(required=keywords.names({"required": names}, where))
        )

    def _dependent_schemas(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return self._dependent(value, where, lambda _, at: self.part(("schema", at)))

    def _dependencies(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        def then(needs: Any, at: str) -> Shape | Shapes:
            needs = [needs] if isinstance(needs, str) else needs  # draft 3
            return (
                Object(required=keywords.names({"required": needs}, at))
                if isinstance(needs, list)
                else self.part(("schema", at))
            )

        return self._dependent(value, where, then)

    def _dependent(self, value: Any, where: str, then: Callable[[Any, str], Shape | Shapes]) -> Shapes:
        """For each property: it is absent, or it is present and the result of ``then`` holds."""
        if not isinstance(value, dict):
            raise SchemaError(f"{where} must be an object, got {value!r}")
        found = ANYTHING
        for name, needs in value.items():
            follows = then(needs, f"{where}/{escape(name)}")
            present = self._meet_all((Object(required=(name,)),), follows if isinstance(follows, tuple) else (follows,))
            absent = Object(properties=((name, NEVER),))
            found = self._meet_all(found, (*(s for s in ANYTHING if not isinstance(s, Object)), absent, *present))
        return found

    # --- draft 3 ------------------------------------------------------------------------------------------------------

    def _extends(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return self._all_of(value, schema, where) if isinstance(value, list) else self.part(("schema", where))

    def _types(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        """The values of any of the listed types, some of which are schemas; all where none is."""
        members = value if isinstance(value, list) else [value]
        if "any" in members or not any(isinstance(member, dict) for member in members):
            return ANYTHING
        return tuple(
            dict.fromkeys(
                shape
                for i, member in enumerate(members)
                for shape in (
                    self.part(("schema", f"{where}/{i}"))
                    if isinstance(member, dict)
                    else self._assertions({"type": member}, where)
                )
            )
        )

    def _disallow(self, value: Any, schema: dict[str, Any], where: str) -> Shapes:
        return self._complement(self._types_or_kinds(value, where), where)

    def _types_or_kinds(self, value: Any, where: str) -> Shapes:
        members = value if isinstance(value, list) else [value]
        if any(isinstance(member, dict) for member in members):
            return self._types(members, {}, where)
        return self._assertions({"type": members}, where)

    # --- intersections, complements and overlaps ----------------------------------------------------------------------

    def _meet_all(self, a: Shapes, b: Shapes) -> Shapes:
        """The intersection of two unions; refused where the document as a whole needs too many of them."""
        self._pairs += len(a) * len(b)
        if self._pairs > _MAX_PAIRS:
            reason = f"combines too many alternatives (more than {_MAX_PAIRS:,} pairs); use anyOf, or fewer of them"
            raise UnsupportedGuide(f"the schema {reason}", guide="anyOf")
        return meet_all(a, b)

    def _complement(self, shapes: Shapes, where: str) -> Shapes:
        """All values that are in none of these shapes."""
        found = ANYTHING
        for shape in shapes:
            same_kind = complement(shape)
            if same_kind is None:
                raise self._refused(where, "not", "or oneOf or if needs the opposite of a schema that has none")
            others = tuple(s for s in ANYTHING if type(s) is not type(shape))
            found = self._meet_all(found, (*others, *same_kind))
        return found

    def _disjoint(self, a: Shapes, b: Shapes) -> bool:
        """Whether no value is in both, even in the broad interpretation; False if that cannot be shown."""
        before, self._wide = self._wide, True
        try:
            return all((both := meet(x, y)) is None or self._plainly_empty(both) for x in a for y in b)
        finally:
            self._wide = before

    def _plainly_empty(self, shape: Shape, depth: int = 4) -> bool:
        """Whether a shape has no values, checked to ``depth`` levels; False if that does not decide it."""
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
        try:
            return all(self._plainly_empty(shape, depth - 1) for shape in self.shapes(key))
        except SchemaError:  # of a part that is being read, or that is refused where it is needed
            return False


_APPLICATORS: Final[dict[str, Callable[[SchemaReader, Any, dict[str, Any], str], Shapes]]] = {
    "$ref": SchemaReader._reference,
    "$recursiveRef": SchemaReader._dynamic_reference,
    "$dynamicRef": SchemaReader._dynamic_reference,
    "allOf": SchemaReader._all_of,
    "anyOf": SchemaReader._any_of,
    "oneOf": SchemaReader._one_of,
    "not": SchemaReader._negation,
    "if": SchemaReader._condition,
    "dependentRequired": SchemaReader._dependent_required,
    "dependentSchemas": SchemaReader._dependent_schemas,
    "dependencies": SchemaReader._dependencies,
}

_DRAFT_3: Final[dict[str, Callable[[SchemaReader, Any, dict[str, Any], str], Shapes]]] = {
    "extends": SchemaReader._extends,
    "disallow": SchemaReader._disallow,
    "type": SchemaReader._types,
}


@lru_cache(maxsize=1024)
def _meant(keyword: str) -> str:
    """The question after a keyword that is probably misspelled."""
    near = get_close_matches(keyword, ASSERTIONS | _APPLICATORS.keys(), n=1, cutoff=0.8)
    return f"; did you mean {near[0]!r}?" if near else ""


def _has_applicators(schema: dict[str, Any]) -> bool:
    return any(keyword in _APPLICATORS for keyword in schema)
