"""Schemas made to hurt: each is refused by a typed error, or written, within seconds."""

import time

import pytest

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
    assert time.process_time() - began < 10
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
    recursive = Grammar.json_schema({"type": "array", "items": {"$ref": "#"}})
    assert recursive.allows("[" * 1000 + "]" * 1000)


def test_sizes_are_counted_without_recursion():
    schema = nested(100_000, lambda inner: [inner])
    with pytest.raises(SchemaError, match="256 levels"):
        json_keywords.check_size(schema)
