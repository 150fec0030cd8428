"""Literals of Python beside Python's own reader, and in calls of tools."""

import ast
import json

import pytest
from hypothesis import given, strategies as st

from pippin.engine.grammar.arguments import ArgumentReader, Notation
from pippin.engine.grammar.python_literal import read_literal

PYTHON = Notation("{key}=", between=", ", python=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=12)


@given(VALUES)
def test_what_python_writes_is_read_as_python_reads_it(value):
    assert read_literal(repr(value)) == ast.literal_eval(repr(value)) == value


@given(VALUES)
def test_json_is_read_too(value):
    assert read_literal(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        r"""'it\'s'""", r"""'\x41\u00e4\U0001F600\101\n\\'""", "( 1,)", "(1, 'a')", "(3)", "[1, 2,]", "{'a': [{}],}",
        "-.5", "5.", "1_000", "1e-3", "'a\\\nb'",
    ],
)  # fmt: skip
def test_forms_of_literals(text):
    expected = ast.literal_eval(text)
    assert read_literal(text) == (list(expected) if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "f('x')",
        "[1",
        "[1 2]",
        "{1: 2}",
        "{'a'}",
        "{'a' 1}",
        "1 + 2",
        "1e999",
        "'a",
        "nan",
        "]",
        r"'\ud83d'",
        "1 2",
    ],
)
def test_what_is_no_literal_is_refused(text):
    with pytest.raises(ValueError, match=r"\S"):
        read_literal(text)


def test_an_escape_that_python_does_not_know_stays_as_it_is():
    assert read_literal(r"'\d+'") == r"\d+"


def test_nesting_without_end_is_refused():
    with pytest.raises(RecursionError):
        read_literal("[" * 100_000)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_call_with_single_quotes_is_read_however_it_is_cut(size):
    text = """where='O\\'Hara (2), x', when={'day': 'Mon, 3', 'at': [1, "a'b"]}, sure=True, old=false, none=null)"""
    reader = ArgumentReader({"type": "object"}, PYTHON, ")")
    at, end = 0, None
    for stop in range(size, len(text) + size, size):
        end = reader.read(text[:stop], at)
        at = reader.at
    assert end == len(text) - 1
    assert reader.values == {
        "where": "O'Hara (2), x",
        "when": {"day": "Mon, 3", "at": [1, "a'b"]},
        "sure": True,
        "old": False,
        "none": None,
    }
