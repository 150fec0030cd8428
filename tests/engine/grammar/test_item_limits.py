"""Lists end after an item that came too often, and only lists do."""

import json

import pytest
from hypothesis import given, strategies as st

from pippin.engine.grammar import Grammar
from pippin.engine.grammar.item_limits import ItemLimits
from pippin.engine.grammar.regex import byte_tokenizer

LIST = 'start: value\nvalue: "[" (value (", " value)*)? "]" | "{" (KEY value (", " KEY value)*)? "}" | TEXT\n'
LIST += 'KEY: /"[ab]": /\nTEXT: /"[a-c,\\[\\]{}]{0,3}"/ | /[0-9]/'


def limited(count, source=LIST):
    return Grammar(source, item_limit=lambda item: count)


@pytest.mark.parametrize(
    ("text", "once", "twice"),
    [
        ("[1, 2, 3]", True, True),
        ("[1, 1]", True, True),  # the repeat is the last one
        ("[1, 1, 2]", False, True),
        ("[1, 1, 1]", False, True),
        ("[1, 1, 1, 2]", False, False),
        ('["a,b", "a", "b"]', True, True),
        ('["a", "a,", "a"]', True, True),
        ('[{"a": 1}, {"a": 1}, 2]', False, True),
        ('{"a": 1, "a": 1, "a": 1}', True, True),  # properties are not items
        ("[[1, 1, 2], 3]", False, True),
        ("[[1], [1]]", True, True),
        ("[[1, 2], [1, 2], 3]", False, True),
    ],
)
def test_lists(text, once, twice):
    assert limited(1).allows(text) == once
    assert limited(2).allows(text) == twice
    assert Grammar(LIST).allows(text)


values = st.recursive(
    st.integers(0, 3) | st.sampled_from(["", "a", "b,", "[", "]{"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=10,
)


def too_often(value, limit):
    """Whether some list goes on after an item that came more often than the limit."""
    if not isinstance(value, list):
        return False
    own = any(value[: index + 1].count(item) > limit for index, item in enumerate(value[:-1]))
    return own or any(too_often(item, limit) for item in value)


@given(st.lists(values, max_size=5), st.integers(1, 3))
def test_any_nested_list_against_a_recursive_definition(value, limit):
    assert limited(limit).allows(json.dumps(value)) == (not too_often(value, limit))


def test_a_list_that_must_go_on_does(tiny):
    grammar = Grammar('start: "[" "1" (", " "1"){4} (", " "1"){0,3} "]"', item_limit=lambda item: 1)
    constraint = grammar.start(tiny.tokenizer)
    written = ""
    while not constraint.finished:
        assert len(written) < 40
        token = (constraint.forced() or [next(t for t in range(257) if constraint.allows(t))])[0]
        constraint.mask()
        constraint.accept(token)
        written += tiny.tokenizer.decode([token])
    assert json.loads(written) == [1] * 5


def test_it_goes_back_and_forks():
    guard = ItemLimits(byte_tokenizer(), lambda item: 1)
    for byte in b"[1, 1":
        assert guard.accept(byte)
    other = guard.fork()
    assert not guard.accept(ord(","))
    guard.rollback(1)
    assert guard.accept(ord("2"))
    assert guard.reach(list(b", 3")) == 3
    assert other.reach(list(b", 3")) == 0
    assert other.accept(ord("]"))
