"""Drafts and references of a JSON Schema document: what `$schema`, `$id`, `$anchor` and `$ref` mean where they stand.

Notable here:
- a subschema is named by its JSON pointer from the root; each has a base URI and a draft, those of the nearest `$id`
  above it
- only places where the standard has schemas are searched for `$id` and anchors: a property that is called "id" and the
  values of `enum` are none
- nothing is fetched: a reference out of the document is an error

Source: JSON Schema Core, draft 2020-12, sections 8 and 9; older drafts by their own texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urljoin

from pippin.core.errors import SchemaError, UndefinedReference, UnsupportedGuide

LATEST: Final = 2020
DRAFTS: Final = {
    "json-schema.org/draft/2020-12/schema": 2020,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-05/schema": 4,  # which changed nothing but the text
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-03/schema": 3,
    "json-schema.org/schema": LATEST,
}
"""The year or the number of each draft, by its URI without the scheme."""

ONE_SCHEMA: Final = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "extends",
})  # fmt: skip
LISTED_SCHEMAS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items", "extends", "type", "disallow"})
NAMED_SCHEMAS: Final = frozenset({
    "$defs", "definitions", "dependentSchemas", "patternProperties", "properties", "dependencies",
})  # fmt: skip


def draft_of(schema: Any, default: int = LATEST) -> int:
    """The draft that a schema's `$schema` names; the default where there is none or it is somebody's own dialect.

    >>> draft_of({"$schema": "http://json-schema.org/draft-04/schema#"}), draft_of(True)
    (4, 2020)
    """
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    return DRAFTS.get(str(uri).partition("://")[2].rstrip("#/"), default)


def escape(name: str) -> str:
    """A name as one step of a pointer.

    >>> escape("a/b~c")
    'a~1b~0c'
    """
    return name.replace("~", "~0").replace("/", "~1").replace("%", "%25")


def steps(pointer: str) -> list[str]:
    """The names that a pointer goes through.

    >>> steps("#/properties/a~1b")
    ['properties', 'a/b']
    """
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


@dataclass(frozen=True)
class Resource:
    """A schema with a URI of its own.

    Attributes:
        pointer: where it stands in the document.
        uri: absolute, without a fragment; "" for a root that has none.
        draft: what its keywords mean.
    """

    pointer: str
    uri: str
    draft: int


class References:
    """The identifiers of one document.

    Args:
        document: the schema.

    Raises:
        SchemaError: an identifier or an anchor that is given twice.
    """

    def __init__(self, document: Any) -> None:
        self.document = document
        self._resources: dict[str, Resource] = {}  # by pointer
        self._pointers: dict[str, str] = {}  # of each resource, by URI
        self._anchors: dict[tuple[str, str], str] = {}  # pointers, by URI and name
        self._dynamic: dict[str, list[str]] = {}  # pointers of dynamic anchors, by name
        self._index()

    def _index(self) -> None:
        root = Resource("#", "", draft_of(self.document))
        self._resources["#"], self._pointers[""] = root, "#"
        waiting = [("#", self.document, root)]
        while waiting:
            pointer, schema, resource = waiting.pop()
            if not isinstance(schema, dict):
                continue
            resource = self._identify(pointer, schema, resource)
            waiting += [(f"{pointer}/{path}", child, resource) for path, child in subschemas(schema)]

    def _identify(self, pointer: str, schema: dict[str, Any], outer: Resource) -> Resource:
        """Note what a schema calls itself; return the resource that it belongs to."""
        found = outer
        draft = draft_of(schema, outer.draft)
        alone = draft > 7 or "$ref" not in schema  # beside a reference, older drafts ignore everything
        own = schema.get("id" if draft <= 4 else "$id")
        if isinstance(own, str) and alone:
            uri, _, fragment = _absolute(outer.uri, own).partition("#")
            if fragment and draft <= 7 and not fragment.startswith("/"):
                self._anchors.setdefault((uri, fragment), pointer)
            if uri != outer.uri or pointer == "#":
                found = Resource(pointer, uri, draft)
        if found is not outer:
            self._resources[pointer] = found
            self._pointers.setdefault(found.uri, pointer)
        if schema.get("$recursiveAnchor") is True and draft > 7:
            self._dynamic.setdefault("", []).append(pointer)
        for keyword in ("$anchor", "$dynamicAnchor") if draft > 7 else ():
            name = schema.get(keyword)
            if isinstance(name, str):
                if self._anchors.setdefault((found.uri, name), pointer) != pointer:
                    raise SchemaError(f"{pointer}: the anchor {name!r} is given twice")
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(name, []).append(pointer)
        return found

    def at(self, pointer: str) -> Any:
        """The part of the document at a JSON pointer (``#/a/b``).

        Raises:
            UndefinedReference: there is none.
        """
        here = self.document
        for name in steps(pointer):
            if isinstance(here, dict) and name in here:
                here = here[name]
            elif isinstance(here, list) and name.isdecimal() and int(name) < len(here):
                here = here[int(name)]
            else:
                raise UndefinedReference(f"the reference {pointer!r} points at nothing: there is no {name!r}")
        return here

    def resource(self, pointer: str) -> Resource:
        """The resource that a place belongs to: the nearest one above it."""
        while pointer not in self._resources:
            pointer = pointer.rpartition("/")[0]
        return self._resources[pointer]

    def resolve(self, reference: Any, where: str) -> str:
        """The pointer that a reference at a place points at.

        Raises:
            SchemaError: it is not a text.
            UndefinedReference: it points at nothing, or out of the document.
        """
        if not isinstance(reference, str):
            raise SchemaError(f"{where}: a reference must be a text, got {reference!r}")
        uri, _, fragment = _absolute(self.resource(where).uri, reference).partition("#")
        if uri not in self._pointers:
            raise UndefinedReference(f"{where}: {reference!r} is outside this schema; write it under $defs")
        root = self._pointers[uri]
        if not fragment:
            return root
        if fragment.startswith("/"):
            found = root + fragment
            self.at(found)
            # one name for one place, however the reference spells it
            return "/".join([found.partition("/")[0], *map(escape, steps(found))])
        if (uri, unquote(fragment)) not in self._anchors:
            raise UndefinedReference(f"{where}: there is no anchor {fragment!r}")
        return self._anchors[uri, unquote(fragment)]

    def resolve_dynamic(self, reference: Any, where: str) -> str:
        """The pointer that a `$dynamicRef` or a `$recursiveRef` points at, where only one place can be meant.

        Raises:
            UnsupportedGuide: which one is meant depends on the way that led there.
        """
        found = self.resolve(reference, where)
        name = reference.rpartition("#")[2]
        if len(self._dynamic.get(name, ())) > 1 and found in self._dynamic[name]:
            raise UnsupportedGuide(
                f"{where}: {reference!r} has several targets; use $ref", guide=where.rpartition("/")[2]
            )
        return found


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, each with its path from there."""
    for keyword, value in schema.items():
        if keyword in ONE_SCHEMA and isinstance(value, dict):
            yield keyword, value
        elif keyword in LISTED_SCHEMAS and isinstance(value, list):
            yield from ((f"{keyword}/{i}", member) for i, member in enumerate(value))
        elif keyword in NAMED_SCHEMAS and isinstance(value, dict):
            yield from ((f"{keyword}/{escape(name)}", member) for name, member in value.items())


def _absolute(base: str, reference: str) -> str:
    """A reference against a base; `urljoin` knows no schemes but those of the web."""
    if reference.startswith("#"):
        return base + reference
    return urljoin(base, reference)
