"""Schemas made to hurt: each is refused by a typed error, or written, within seconds."""

import json
import random
import time

import jsonschema
import pytest
from tests.machine import slowness

from pippin.core.errors import SchemaError
from pippin.engine.grammar import json_keywords
from pippin.engine.grammar.constraint import Grammar


def nested(depth, wrap):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


def chain(length, last="null", **more):
    """Types that each hold the next."""
    links = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": last}}, **more}


def shortcuts(order):
    return {
        "type": "object",
        "properties": {f"q{i}": {"$ref": f"#/$defs/a{i}"} for i in order},
        "$defs": chain(700)["$defs"],
    }


BOMBS = {
    "anyOf in anyOf": nested(3000, lambda inner: {"anyOf": [inner]}),
    "lists of lists": nested(3000, lambda inner: {"type": "array", "items": inner}),
    "objects in objects": nested(900, lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]}),
    "a chain of nothing but references": {
        "$ref": "#/$defs/a0",
        "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)} | {"a5000": {"type": "null"}},
    },
    "a chain of types": chain(1000),
    "a chain with ways in, from its end": shortcuts(reversed(range(700))),
    "a chain with ways in, from its beginning": shortcuts(range(700)),
    "ten megabytes of choices": {"enum": [f"{i:0100d}" for i in range(100_000)]},
    "one long choice": {"enum": ["a" * 10_000_000]},
    "too many properties": {"type": "object", "properties": {f"p{i}": {} for i in range(20_000)}},
    "products of choices": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(12)]
    },
    "itself": {"$ref": "#"},
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name):
    began = time.process_time()
    with pytest.raises(SchemaError) as caught:
        Grammar.json_schema(BOMBS[name])
    assert time.process_time() - began < 10 * slowness()
    assert len(str(caught.value)) < 1000


def test_what_looks_like_one_and_is_none():
    laughs = {
        f"l{i}": {"type": "object", "properties": {f"k{j}": {"$ref": f"#/$defs/l{i + 1}"} for j in range(10)}}
        for i in range(30)
    }
    grammar = Grammar.json_schema({"$ref": "#/$defs/l0", "$defs": {**laughs, "l30": {"type": "null"}}})
    assert grammar.allows('{"k3": {"k0": {}}}')
    deep = Grammar.json_schema(nested(250, lambda inner: {"type": "array", "items": inner}))
    assert deep.allows("[" * 250 + "1" + "]" * 250)
    assert Grammar.json_schema(chain(480)).allows('{"x": {"x": {}}}')
    recursive = Grammar.json_schema({"type": "array", "items": {"$ref": "#"}}, max_items=None)
    assert recursive.allows("[" * 1000 + "]" * 1000)


def test_sizes_are_counted_without_recursion():
    schema = nested(100_000, lambda inner: [inner])
    with pytest.raises(SchemaError, match="256 levels"):
        json_keywords.check_size(schema)


def long_object(count):
    properties = {"first": {"type": "null"}, **{f"n{i}": {"type": "integer"} for i in range(count)}}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def test_objects_that_end_alike_share_their_rules():
    one, many = (
        Grammar.json_schema(long_object(100) | {"anyOf": [{"required": [f"n{i}"]} for i in range(alternatives)]})
        for alternatives in (1, 8)
    )
    assert len(many.source) < 2 * len(one.source)
    assert many.allows('{"first": null, "n7": 1, "n99": 1}')
    assert many.allows('{"n3": 2, "n8": 1}')
    assert not many.allows('{"n8": 1}')


@pytest.mark.parametrize("required", [[], ["n20"], ["n0", "n45"], ["first"]])
@pytest.mark.parametrize("others", [False, {"type": "boolean"}])
def test_long_objects_hold_what_short_ones_do(required, others):
    schema = long_object(50) | {"required": required, "additionalProperties": others}
    grammar, chance = Grammar.json_schema(schema), random.Random(0)
    names = list(schema["properties"])
    allowed = []
    for _ in range(150):
        written = [name for name in names if chance.random() < 0.05 or (name in required and chance.random() < 0.8)]
        value = {name: None if name == "first" else 1 for name in written}
        if chance.random() < 0.3:
            value["other"] = True
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert grammar.allows(json.dumps(value)) is valid, value
        allowed.append(valid)
        if len(written) > 1:
            assert not grammar.allows(json.dumps(dict(reversed(value.items())))), "another order"
    assert set(allowed) == ({True, False} if required or others is False else {True})
