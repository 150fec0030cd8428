"""Scores of extractions: leaf by leaf, with what is invented and what is rightly empty."""

import math

import pytest

from pippin.evaluate.extraction import ExtractionScore, choices_of, score

SOURCE = "Dear Ann Roe, on 12 March 2024 at 2 pm you paid 3,50 EUR for two  apples."


@pytest.mark.parametrize(
    ("expected", "found", "right", "fields"),
    [
        ({"a": "Ann Roe"}, {"a": "ann  roe,"}, 1, 1),
        ({"a": "Ann Roe"}, {"a": "Ann"}, 0, 1),
        ({"a": 3.5}, {"a": 3.5000000001}, 1, 1),
        ({"a": 3.5}, {"a": "3.5"}, 0, 1),
        ({"a": True}, {"a": True}, 1, 1),
        ({"a": True}, {"a": 1}, 0, 1),
        ({"a": [1, 2]}, {"a": [1, 2]}, 2, 2),
        ({"a": [1, 2]}, {"a": [2, 1]}, 1, 3),  # one is in the right order, one is missing and one too many
        ({"a": [1, 2, 3]}, {"a": [2, 3]}, 2, 3),  # those after a missing one are right
        ({"a": [{"b": 1, "c": 4}, {"b": 2, "c": 5}]}, {"a": [{"b": 2, "c": 5}]}, 2, 4),
        ({"a": [1]}, {"a": [1, 2]}, 1, 2),  # one item too many
        ({"a": [{"b": 1, "c": None}]}, {"a": [{"b": 1, "c": 5}]}, 1, 1),
        ({"a": "Ann Roe"}, None, 0, 1),
    ],
)
def test_fields(expected, found, right, fields):
    result = score(expected, found, SOURCE)
    assert (result.right, result.fields) == (right, fields)


def test_what_the_source_does_not_have_is_invented():
    found = {"a": "Ann Roe", "b": "Bob", "c": "2024-03-12", "d": "2025-03-12", "e": "14:00:00", "f": True, "g": None}
    result = score({}, found, SOURCE)
    assert (result.written, result.invented) == (5, 2)
    assert result.invented_share == 0.4


@pytest.mark.parametrize(("number", "invented"), [(3.5, 0), (2024, 0), (2023, 1), (35, 0), (36, 1), (2, 0), (-3.5, 0)])
def test_a_number_needs_its_digits(number, invented):
    assert score({}, {"a": number}, "in 2024, -3.50 or 3 5").invented == invented


def test_values_of_enumerations_are_not_invented():
    schema = {"properties": {"a": {"anyOf": [{"enum": ["open", 1]}, {"const": "x"}]}, "b": {"type": "string"}}}
    assert choices_of(schema) == {"open", "x"}
    assert score({}, {"a": "open", "b": "shut"}, "none", choices=choices_of(schema)).invented == 1


def test_nulls_and_whole_extractions():
    expected = {"a": None, "b": None, "c": 1}
    result = score(expected, {"a": None, "b": 3, "c": 1}, SOURCE) + score(expected, {"a": None, "c": 1}, SOURCE)
    assert (result.nulls, result.nulls_right, result.null_accuracy) == (4, 3, 0.75)
    assert (result.whole, result.whole_right, result.accuracy) == (2, 1, 1.0)
    assert math.isnan(ExtractionScore().accuracy)
    assert math.isnan(ExtractionScore().null_accuracy)
