"""What a schema leaves open ends by itself: digits, lists, free names; an explicit bound is obeyed instead."""

import json

import pytest

from pippin.core.errors import InvalidArgument
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.json_grammar import MAX_ITEMS
from pippin.engine.grammar.numbers import DIGITS


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
            f"an object without maxProperties has at most {MAX_ITEMS} free names"
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
