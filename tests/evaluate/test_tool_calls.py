"""Scores of tool calls: the tool, its arguments, and whether one was needed."""

import math

import pytest

from pippin.evaluate.tool_calls import ToolCallScore, score

MAIL = ("mail", {"to": "Ann Roe", "copies": 2, "tags": ["a", "b"]})


@pytest.mark.parametrize(
    ("calls", "called", "right"),
    [
        ([MAIL], 1, 1),
        ([("mail", {"to": " ann  roe", "copies": 2.0, "tags": ["A", "b"]})], 1, 1),
        ([("mail", {"to": "Ann", "copies": 2, "tags": ["a", "b"]})], 1, 0),
        ([("mail", {"to": "Ann Roe", "copies": 2})], 1, 0),
        ([("mail", {**MAIL[1], "more": 1})], 1, 0),
        ([("mail", {**MAIL[1], "tags": ["b", "a"]})], 1, 0),
        ([("post", MAIL[1])], 0, 0),
        ([MAIL, MAIL], 0, 0),
        ([], 0, 0),
    ],
)
def test_a_call_that_is_wanted(calls, called, right):
    assert score(MAIL, calls) == ToolCallScore(wanted=1, called=called, right=right)


def test_no_call_is_wanted():
    total = score(None, []) + score(None, [MAIL]) + score(MAIL, [MAIL])
    assert (total.unwanted, total.answered, total.wanted, total.right) == (2, 1, 1, 1)
    assert total.accuracy == pytest.approx(2 / 3)
    assert math.isnan(ToolCallScore().accuracy)
