"""Oracle: the jsonschema library, on negated constants, lists and objects; and on classes of property names."""

import itertools
import json

import jsonschema
import pytest

from pippin.core.errors import UnsupportedGuide
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.membership import can_generate

SCALARS = [None, True, False, 0, 1, 2, 2.5, -1, 3, "", "a", "ab", "b"]
VALUES = [
    *SCALARS, *([a] for a in SCALARS), *([a, b] for a, b in itertools.product(SCALARS[3:6], repeat=2)), [], {},
    *({"a": a} for a in SCALARS), *({"a": a, "ab": b} for a, b in itertools.product(SCALARS[4:7], repeat=2)),
    {"b": 1}, {"xa": "a"}, {"b": 1, "c": 2},
]  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"enum": [1, 2.5, 2]}},
        {"type": "integer", "minimum": 0, "not": {"enum": [1, 2]}},
        {"not": {"const": [1, 2]}},
        {"type": "array", "maxItems": 2, "not": {"enum": [[], [0, 1]]}},
        {"type": "object", "not": {"const": {"a": 1}}},
        {"not": {"not": {"const": {"a": 1, "ab": 2}}}},
        {"not": {"not": {"multipleOf": 2, "type": "integer"}}},
        {"not": {"description": "twice", "not": {"items": {"type": "integer"}, "type": "array"}}},
    ],
)
def test_negated_constants_are_what_is_outside(schema):
    validator = jsonschema.Draft202012Validator(schema)
    grammar = Grammar.json_schema(schema)
    for value in VALUES:
        assert can_generate(schema, value, grammar=grammar) is validator.is_valid(value), value


@pytest.mark.parametrize(
    "patterns",
    [
        {
            "^a": "integer",
            "b$": "number",
            "^ab$": "integer",
            "^x": "string",
            "^y": "null",
            "z": "null",
            "^c$": "integer",
        },
        {"^(?!a)": "integer", "^a(b?)$": "integer"},
    ],
)
def test_classes_of_names_by_any_number_of_patterns(patterns):
    schema = {
        "type": "object",
        "patternProperties": {pattern: {"type": kind} for pattern, kind in patterns.items()},
        "additionalProperties": False,
    }
    validator = jsonschema.Draft202012Validator(schema)
    grammar = Grammar.json_schema(schema)
    accepted = [value for value in VALUES if can_generate(schema, value, grammar=grammar)]
    assert accepted == [value for value in VALUES if validator.is_valid(value)]
    assert json.loads("{}") in accepted
    assert len(accepted) > 3


def test_patterns_that_make_too_many_classes_are_refused():
    patterns = {f"[{chr(97 + i)}]": {"minLength": i} for i in range(7)}
    with pytest.raises(UnsupportedGuide, match="more than 64 classes of names") as caught:
        Grammar.json_schema({"type": "object", "patternProperties": patterns})
    assert caught.value.guide == "patternProperties"
