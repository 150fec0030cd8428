"""What a schema leaves open ends by itself (digits, lists, free names, recursion), and given bounds are obeyed."""

import json
import string

import jsonschema
import pytest

from pippin.core.errors import InvalidArgument
from pippin.engine.grammar.arguments import Notation, argument_grammar
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.json_grammar import MAX_ITEMS
from pippin.engine.grammar.json_recursion import MAX_NESTED_LISTS
from pippin.engine.grammar.lark import compose
from pippin.engine.grammar.numbers import DIGITS
from pippin.engine.grammar.regex import byte_tokenizer

RECURSION = (
    f"a value inside values of its own kind lies at most {MAX_ITEMS} levels deep, and at most "
    f"{MAX_NESTED_LISTS} as items or under free names"
)


def test_an_integer_without_bounds_fits_64_bits():
    grammar = Grammar.json_schema({"type": "integer"})
    largest = int("9" * DIGITS)
    assert grammar.allows(str(largest))
    assert grammar.allows(str(-largest))
    assert -(2**63) <= -largest < largest < 2**63
    assert not grammar.allows("1" + "0" * DIGITS)
    wide = Grammar.json_schema({"type": "integer", "minimum": 0, "maximum": 10**30})
    assert wide.allows(str(10**30))


@pytest.mark.parametrize("items", [{"type": "integer"}, {}, True])
def test_a_list_without_a_maximum_ends(items):
    grammar = Grammar.json_schema({"type": "array", "items": items})
    assert grammar.allows(json.dumps([1] * MAX_ITEMS))
    assert not grammar.allows(json.dumps([1] * (MAX_ITEMS + 1)))
    assert grammar.notes == (
        f"a list without maxItems has at most {MAX_ITEMS} items",
        *([] if items != {} and items is not True else [
            f"an object without maxProperties has at most {MAX_ITEMS} free names",
            RECURSION,
        ]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bounds", "count"), [({"maxItems": 90}, 90), ({"minItems": 70}, 70), ({"minItems": 2, "maxItems": 51}, 51)]
)
def test_a_bound_that_is_given_is_obeyed(bounds, count):
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "null"}, **bounds})
    assert grammar.allows(json.dumps([None] * count))
    assert not grammar.allows(json.dumps([None] * (count + 1)))
    assert bool(grammar.notes) == ("maxItems" not in bounds)


def test_free_names_end_and_named_properties_do_not_count():
    grammar = Grammar.json_schema({"properties": {"a": {}}, "type": "object", "additionalProperties": {"type": "null"}})
    names = {f"n{i}": None for i in range(MAX_ITEMS)}
    assert grammar.allows(json.dumps(names))
    assert not grammar.allows(json.dumps({**names, "more": None}))


def test_the_defaults_can_be_raised_or_left_out():
    schema = {"type": "array", "items": {"type": "null"}}
    assert not Grammar.json_schema(schema, max_items=3).allows(json.dumps([None] * 4))
    endless = Grammar.json_schema(schema, max_items=None)
    assert endless.allows(json.dumps([None] * 1000))
    assert endless.notes == ()
    with pytest.raises(InvalidArgument, match="max_items is at least 1, or None for any number, got 0"):
        Grammar.json_schema(schema, max_items=0)


def _object(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_TREE = _object(children={"type": "array", "items": {"$ref": "#"}})
_CHAIN = _object(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]})
_TERM = {
    "$defs": {
        "sum": _object(kind={"const": "sum"}, terms={"type": "array", "items": {"$ref": "#"}, "minItems": 2}),
        "negative": _object(kind={"const": "negative"}, of={"$ref": "#"}),
        "number": _object(kind={"const": "number"}, value={"type": "integer"}),
    },
    "anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("sum", "negative", "number")],
}
_EVEN = {"type": "array", "prefixItems": [{"$ref": "#/$defs/odd"}], "items": False}
_ODD = {"type": "object", "additionalProperties": {"$ref": "#"}, "maxProperties": 1}


def _tree(depth, width=1):
    return {"children": [_tree(depth - 1, width)] * width if depth else []}


def _chain(length):
    return {"next": _chain(length - 1) if length else None}


def _sum(depth):
    number = {"kind": "number", "value": 1}
    return {"kind": "sum", "terms": [number, _sum(depth - 1)]} if depth else number


def _negative(depth):
    return {"kind": "negative", "of": _negative(depth - 1)} if depth else {"kind": "number", "value": 1}


def _turns(depth):
    return [{"a": _turns(depth - 1)}] if depth else []


@pytest.mark.parametrize(
    ("schema", "value", "most"),
    [
        (_TREE, _tree, MAX_NESTED_LISTS),
        (_CHAIN, _chain, MAX_ITEMS),
        (_TERM, _sum, MAX_NESTED_LISTS),
        (_TERM, _negative, MAX_ITEMS),
        ({**_EVEN, "$defs": {"odd": _ODD}}, _turns, MAX_NESTED_LISTS // 2),
        ({"$ref": "#/$defs/tree", "$defs": {"tree": {**_TREE, "properties": {
            "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}}}, _tree, MAX_NESTED_LISTS),
        (True, lambda depth: json.loads("[" * depth + "1" + "]" * depth), MAX_NESTED_LISTS + 1),
    ],
)  # fmt: skip
def test_values_inside_their_own_kind_end_at_a_level_where_they_can(schema, value, most):
    grammar = Grammar.json_schema(schema)
    reached = [depth for depth in range(2 * MAX_ITEMS) if grammar.allows(json.dumps(value(depth)))]
    assert reached
    assert reached == [*range(len(reached))]  # nothing less deep is left out
    assert most <= reached[-1] <= most + 1
    assert RECURSION in (grammar.notes)
    assert Grammar.json_schema(schema, max_items=None).allows(json.dumps(value(2 * MAX_ITEMS)))


@pytest.mark.parametrize("schema", [_TREE, _CHAIN, _TERM, {**_EVEN, "$defs": {"odd": _ODD}}, True])
def test_an_answer_that_goes_as_deep_as_it_may_can_always_be_completed(schema):
    """Brackets are opened wherever the grammar allows it, and from some byte on closed wherever it does."""
    letters = string.ascii_lowercase.encode()
    for turn in (40, 400, 4000):
        constraint = Grammar.json_schema(schema).start(_Bytes())
        read = bytearray()
        while not constraint.finished and len(read) < turn + 5000:
            order = b'[{":, ' + letters + b"0]}" if len(read) < turn else b']}":, ' + letters + b"0[{"
            in_string = read.count(b'"') % 2 == 1
            read.append(next(byte for byte in (b'"' if in_string else b"") + order if constraint.allows(byte)))
            constraint.accept(read[-1])
        assert constraint.finished
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(read))


class _Bytes:
    grammar_tokenizer = byte_tokenizer()


def test_recursion_inside_a_finite_schema_is_counted_from_where_it_begins():
    schema = _object(name={"type": "string"}, first=_TREE | {"$id": "urn:t"}, second={"type": "null"})
    grammar = Grammar.json_schema(schema)
    fits = {"name": "x", "first": _tree(MAX_NESTED_LISTS, 1), "second": None}
    assert grammar.allows(json.dumps(fits))
    assert not grammar.allows(json.dumps({**fits, "first": _tree(MAX_NESTED_LISTS + 1)}))
    wide = {"children": [_tree(3, 2)] * MAX_ITEMS}  # only the depth is counted
    assert grammar.allows(json.dumps({**fits, "first": wide}))


def test_a_recursion_whose_distinct_items_may_run_out_goes_on():
    schema = {"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}
    assert Grammar.json_schema(schema).allows("[[], [[]], [[], [[]]]]")


@pytest.mark.parametrize(
    "notation",
    [
        Notation("{key}=", between=", ", python=True),
        Notation("<p={key}>", "</p>", strings="text"),
        Notation("{key}:", between=",", strings="quoted", quote="|"),
    ],
)
def test_the_arguments_of_a_call_may_be_recursive(notation):
    tree = _object(children={"type": "array", "items": {"$ref": "#/$defs/tree"}})
    schema = _object(top={"$ref": "#/$defs/tree"}, count={"type": "integer"}) | {"$defs": {"tree": tree}}
    written = argument_grammar(schema, notation, lambda text: json.dumps(text) if text else "")
    combined = compose("start: call", {"call": written})
    for grammar in (written, combined):
        assert grammar.allows(notation.write({"top": _tree(MAX_NESTED_LISTS, 1), "count": 3}))
        assert not grammar.allows(notation.write({"top": _tree(MAX_NESTED_LISTS + 1), "count": 3}))
