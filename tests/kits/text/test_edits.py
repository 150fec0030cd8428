"""Edits: a comparison applied gives the other text, kinds follow the rules, distances agree with brute force."""

from functools import cache

import pytest
from hypothesis import given, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.kits.text.edits import Edit, Revision, apply_edits, compare, edit_distance, explain
from pippin.kits.text.spans import TextSpan, is_touched, protected_spans

WORDS = st.sampled_from(
    ["the", "teh", "A", "don't", "cat", "`x y`", "“q r”", "me@x.org", "\n", ",", ".", "é", "👍", "  "]
)
TEXTS = st.lists(WORDS, max_size=14).map(" ".join)


@given(TEXTS, TEXTS)
def test_applying_the_comparison_gives_the_other_text(original, revised):
    edits = compare(original, revised)
    assert apply_edits(original, edits) == revised
    assert Revision(original, tuple(edits)).text == revised
    assert all(edit.span.of(original) == edit.original != edit.replacement for edit in edits)


@given(TEXTS, TEXTS)
def test_no_edit_touches_what_is_protected(original, revised):
    protected = protected_spans(original)
    edits = compare(original, revised, protected=protected)
    assert not any(is_touched(protected, edit.span.start, edit.span.end) for edit in edits)
    made = apply_edits(original, edits)
    at = 0
    for one in protected:  # in order, byte for byte
        at = made.index(one.of(original), at) + len(one.of(original))


@given(TEXTS, TEXTS, st.data())
def test_any_selection_of_edits_can_be_made(original, revised, data):
    edits = compare(original, revised)
    chosen = [edit for edit in edits if data.draw(st.booleans())]
    grown = sum(len(edit.replacement) - len(edit.original) for edit in chosen)
    assert len(apply_edits(original, reversed(chosen))) == len(original) + grown


def test_an_offset_moves_the_ranges():
    (edit,) = compare("teh cat", "the cat", offset=10)
    assert (edit.span.start, edit.span.end) == (10, 13)


def test_edits_that_do_not_fit_are_refused():
    edit = Edit(TextSpan(0, 3), "teh", "the", "spelling", "")
    with pytest.raises(InvalidArgument, match="reads 'the' at 0, but the edit replaces 'teh'"):
        apply_edits("the cat", [edit])
    with pytest.raises(InvalidArgument, match="two edits change the same characters, at 1"):
        apply_edits("teh cat", [edit, Edit(TextSpan(1, 3), "eh", "he", "spelling", "")])


@pytest.mark.parametrize(
    ("original", "replacement", "kind"),
    [
        ("recieve", "receive", "spelling"),
        ("alot", "a lot", "spelling"),
        ("monday", "Monday", "capitalization"),
        ("i", "I", "capitalization"),
        ("dont", "don't", "punctuation"),
        ("", ",", "punctuation"),
        (";", "", "punctuation"),
        ("  ", " ", "spacing"),
        ("was", "were", "grammar"),
        ("a", "an", "grammar"),
        ("", "the", "grammar"),
        ("its", "it's", "word choice"),
        ("their", "there", "word choice"),
        ("the the", "the", "repetition"),
        ("house", "building", "wording"),
    ],
)
def test_kinds(original, replacement, kind):
    found, reason = explain(original, replacement)
    assert found == kind
    assert replacement in reason or "not needed" in reason or "wrong here" in reason


def test_a_word_taken_out_behind_itself_is_a_repetition():
    assert explain("the", "", "on the ")[0] == "repetition"


@cache
def slow_distance(one: str, other: str) -> int:
    """Optimal string alignment by its recurrence."""
    if not one or not other:
        return len(one) + len(other)
    best = min(
        slow_distance(one[:-1], other) + 1,
        slow_distance(one, other[:-1]) + 1,
        slow_distance(one[:-1], other[:-1]) + (one[-1] != other[-1]),
    )
    if len(one) > 1 and len(other) > 1 and one[-2:] == other[:-3:-1]:
        best = min(best, slow_distance(one[:-2], other[:-2]) + 1)
    return best


@given(st.text("abc", max_size=7), st.text("abc", max_size=7), st.integers(0, 7))
def test_distance_is_that_of_the_recurrence(one, other, most):
    expected = slow_distance(one, other)
    assert edit_distance(one, other) == expected
    assert edit_distance(one, other, max_distance=most) == min(expected, most + 1)
