"""Proofreading: what may be proposed, what is never touched, and how much the real model finds."""

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from pippin.kits.text.edits import apply_edits
from pippin.kits.text.lexicon import Lexicon
from pippin.kits.text.proofread import Margins, Proofreader
from pippin.kits.text.spans import is_touched, protected_spans
from pippin.kits.text.tasks import TextTasks

LEXICON = Lexicon(["received", "letter", "your", "yesterday", "London", "lot", "separate", "house"])

WRONG = [
    ("I recieved your letter yesterday.", "I received your letter yesterday."),
    ("We saw teh house from the street.", "We saw the house from the street."),
    ("It was to hot to sleep.", "It was too hot to sleep."),
    ("This is an beautiful house.", "This is a beautiful house."),
    ("I have alot of work to do on monday.", "I have a lot of work to do on Monday."),
    ("The the cat sat on the mat.", "The cat sat on the mat."),
    ("You should of told me earlier.", "You should have told me earlier."),
    ("My freind lives in london.", "My friend lives in London."),
    ("She has went home already.", "She has gone home already."),
]
RIGHT = [
    "The last person to do so was Inga Torvald, who took over from her uncle in 1987.",
    "It uses about as much current as a telephone charger, and its makers say that it will need no attention.",
    "We finished the work last Friday, and I am glad to say that all four volumes came through the winter.",
    "They should stand upright, a hand's breadth away from an outside wall, and never in a closed cupboard.",
    "My father gave his customers that promise, and I see no reason to give a smaller one.",
]


def eager(before, options):
    """A model that likes every change: the last option most."""
    return list(range(len(options)))


def stubborn(before, options):
    """A model that likes no change."""
    return [-10.0 * bool(index) for index in range(len(options))]


TEXTS = st.lists(
    st.sampled_from(
        ["i", "recieved", "alot", "the", "the", "to", "an", "house", ",", " ", ".", "\n\n", "`teh x`", "“a teh b”",
         "a@b.org",
         "https://x.org/teh",
         "> teh", "dont", "monday", "```\nteh\n```\n", "Teh", "24", "é", "👍"]
    ),
    max_size=25,
).map(" ".join)  # fmt: skip


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_even_an_eager_model_cannot_touch_what_is_protected(text):
    protected = protected_spans(text)
    edits = list(Proofreader(LEXICON, eager).edits(text, protected))
    assert not any(is_touched(protected, edit.span.start, edit.span.end) for edit in edits)
    revised, at = apply_edits(text, edits), 0
    for one in protected:
        at = revised.index(one.of(text), at) + len(one.of(text))


@given(TEXTS)
@settings(deadline=None)
def test_edits_are_in_order_and_change_something(text):
    edits = list(Proofreader(LEXICON, eager).edits(text))
    assert all(edit.original == edit.span.of(text) != edit.replacement for edit in edits)
    assert all(one.span.end <= other.span.start for one, other in pairwise(edits))


def test_a_stubborn_model_leaves_only_the_rules():
    edits = Proofreader(LEXICON, stubborn).edits("i recieved it ,on monday.")
    assert [(edit.original, edit.replacement) for edit in edits] == [("i", "I"), (" ,", ", ")]


def test_the_margin_decides():
    def even(before, options):
        return [-5.0] + [-2.0] * (len(options) - 1)  # every change is likelier by 3

    text = "I recieved it."
    assert list(Proofreader(LEXICON, even, Margins(unknown=2.9)).edits(text))
    assert not list(Proofreader(LEXICON, even, Margins(unknown=3.1)).edits(text))


def test_the_model_reads_the_corrected_text_before_a_change():
    seen = []

    def watching(before, options):
        seen.append(before)
        return eager(before, options)

    list(Proofreader(LEXICON, watching).edits("I recieved your lettre."))
    assert seen[-1].startswith("I received your")


def test_words_with_accents_are_not_taken_for_misspelled_ones():
    lexicon = Lexicon(["the", "name", "cafe", "there", "resume"])
    text = "The naïve résumé, the café."
    assert not list(Proofreader(lexicon, eager).edits(text))
    assert "name" in lexicon.nearest("naïve")


@pytest.fixture(scope="module")
def tasks(model):
    return TextTasks(model)


@pytest.mark.parametrize(("wrong", "right"), WRONG)
def test_the_default_model_chooses_the_right_correction(tasks, wrong, right):
    assert tasks.proofread(wrong).text == right


def test_the_default_model_leaves_a_clean_text_alone(tasks):
    assert [tasks.proofread(text).edits for text in RIGHT] == [()] * len(RIGHT)
