"""Which values a schema's grammar generates, beside the jsonschema library: negation, drafts, references, notes."""

import time

import jsonschema
import pytest
from tests.machine import slowness

from pippin.core.errors import EmptySchema, UndefinedReference, UnsupportedGuide
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.membership import can_generate

OBJECTS = [
    {},
    {"a": 1},
    {"a": "x"},
    {"b": 2},
    {"a": 1, "b": 2},
    {"z": 3, "a": 1},
    {"z": "q"},
    {"y": 2, "z": 1, "a": "x"},
]
VALUES = [None, True, 0, 1, 2.5, -3, 4.0, "", "a", "abc", [], [1], ["a", 1], [2.5, 1], [1, 1, "a"], *OBJECTS]
CLOSED = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "integer"}},
        {"not": {"not": {"type": "integer"}}},
        {"not": {"type": "integer", "minimum": 1}},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
        {"not": {"type": "array", "items": {"type": "integer"}}},
        {"not": {"prefixItems": [{"type": "string"}, {"type": "integer"}]}},
        {"not": {"prefixItems": [{"type": "string"}], "items": False}},
        {"type": "array", "not": {"items": {"type": "string"}}, "maxItems": 2},
        {"type": "array", "not": {"items": {"type": "string"}}, "minItems": 2},
        {"type": "array", "contains": {"type": "string"}, "minItems": 1, "maxItems": 3},
        {"not": CLOSED},
        {"oneOf": [CLOSED, {**CLOSED, "properties": {"a": {}, "b": {}}}]},
        {"oneOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}]},
        {"required": ["a"], "oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": "x"}}}]},
        {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": "x"}}}], "required": ["a"]},
        {"properties": {"a": {"type": "integer"}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"type": ["integer", "object"], "oneOf": [{"type": "integer", "minimum": 0}, {"maxProperties": 1}]},
        {"type": ["string", "object"], "oneOf": [{"minLength": 1}, {"type": "object"}, {"required": ["z"]}]},
        {"oneOf": [{"enum": [1, "a", None]}, {"enum": ["a", 2.5, None]}, {"enum": [None, "abc"]}]},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "not": CLOSED},
        {"type": "object", "not": {"additionalProperties": {"type": "integer"}}},
        {"required": ["a"], "not": {"patternProperties": {"^z": {"type": "integer"}}, "additionalProperties": False}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True},
        {"$schema": "http://json-schema.org/draft-04/schema#", "items": [{"type": "string"}], "additionalItems": False},
        {"$schema": "http://json-schema.org/draft-03/schema#", "properties": {"a": {"required": True, "type": "any"}}},
        {"$schema": "http://json-schema.org/draft-03/schema#", "disallow": ["string", "array"]},
        {"$schema": "http://json-schema.org/draft-03/schema#", "type": ["string", {"type": "object"}]},
        {"$schema": "http://json-schema.org/draft-03/schema#", "extends": {"type": "integer"}, "divisibleBy": 2},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/i", "minimum": 9,
         "definitions": {"i": {"type": "integer"}}},
        {"$id": "http://x/r", "properties": {"a": {"$ref": "int"}}, "$defs": {"i": {"$id": "int", "type": "integer"}}},
        {"$id": "http://x/root", "properties": {"a": {"$ref": "int#in"}},
         "$defs": {"i": {"$id": "int", "$defs": {"j": {"$anchor": "in", "type": "integer"}}}}},
        {"properties": {"$id": {"type": "string"}, "a": {"$ref": "#/properties/$id"}}},
    ],
)  # fmt: skip
def test_the_values_are_those_of_the_jsonschema_library(schema):
    validator = jsonschema.validators.validator_for(schema)(schema)
    grammar = Grammar.json_schema(schema)
    for value in VALUES:
        assert can_generate(schema, value, grammar=grammar) is validator.is_valid(value), value


def test_overlapping_members_of_one_of_are_told_apart_without_a_product_of_all_their_opposites():
    names = ["a", "b", "y", "z", *"cd"]
    members = [
        {"type": "object", "properties": {n: {"type": "integer"} for n in names}, "required": [n]} for n in names
    ]
    schema = {"oneOf": members}
    validator, grammar = jsonschema.Draft202012Validator(schema), Grammar.json_schema(schema)
    for value in VALUES:
        assert can_generate(schema, value, grammar=grammar) is validator.is_valid(value), value


def test_alternatives_that_would_take_minutes_to_combine_are_refused_in_seconds():
    several = [{"properties": {f"p{i}{j}": {"type": "string", "maxLength": i} for j in range(6)}} for i in range(40)]
    began = time.process_time()
    with pytest.raises(UnsupportedGuide, match=r"oneOf needs members that exclude each other, but \d+ and \d+ may not"):
        Grammar.json_schema({"oneOf": several})
    assert time.process_time() - began < 30 * slowness()


@pytest.mark.parametrize("schema", [True, {}, {"$id": "urn:x", "properties": {"a": {"$ref": "#"}}}])
def test_documents_without_identifiers_inside(schema):
    assert can_generate(schema, {"a": {"a": {}}})


def test_what_is_no_keyword_is_noted_and_refused_where_the_caller_is_strict():
    schema = {"type": "string", "minLenght": 3, "x-order": 1, "format": "color", "title": "a"}
    grammar = Grammar.json_schema(schema)
    assert grammar.allows('"a"')
    color, keyword = grammar.notes
    assert "'minLenght' is not a keyword of JSON Schema and is ignored; did you mean 'minLength'?" in keyword
    assert "the format 'color' has no definition here and is ignored" in color
    with pytest.raises(UnsupportedGuide, match="minLenght is not a keyword of JSON Schema; did you mean 'minLength'"):
        Grammar.json_schema({"minLenght": 3}, strict=True)
    with pytest.raises(UnsupportedGuide, match="'color' cannot be enforced"):
        Grammar.json_schema({"format": "color"}, strict=True)


def test_references_that_lead_nowhere_or_anywhere():
    with pytest.raises(UndefinedReference, match="outside this schema"):
        Grammar.json_schema({"$ref": "http://json-schema.org/draft-07/schema#"})
    two = {"$id": "u:a", "$dynamicAnchor": "t", "$defs": {"b": {"$id": "u:b", "$dynamicAnchor": "t"}}}
    with pytest.raises(UnsupportedGuide, match="several targets"):
        Grammar.json_schema({**two, "properties": {"a": {"$dynamicRef": "#t"}}})
    with pytest.raises(EmptySchema):
        Grammar.json_schema({"allOf": [{"type": "integer"}, {"not": {"type": "integer"}}]})
