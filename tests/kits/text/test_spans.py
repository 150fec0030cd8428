"""Ranges, sentences and chunks: partitions of any text, and rules against texts whose answer is known."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.kits.text.spans import TextSpan, check_text, chunks, is_touched, pieces, protected_spans, sentences

TEXTS = st.text(alphabet=st.sampled_from("ab Z.!?…\n\t\"'`“”>-*1,:;()é。👍@/_#"), max_size=80)


@given(TEXTS)
def test_sentences_and_pieces_are_partitions(text):
    for parts in (sentences(text), pieces(text)):
        assert "".join(part.of(text) for part in parts) == text
        assert all(part.start < part.end for part in parts)


@given(TEXTS, st.integers(1, 30))
def test_chunks_are_a_partition_and_fit(text, size):
    parts = chunks(text, lambda part: len(part) <= size)
    assert "".join(part.of(text) for part in parts) == text
    assert all(len(part.of(text)) <= size for part in parts)


@given(TEXTS)
def test_protected_ranges_are_ordered_and_disjoint(text):
    ranges = protected_spans(text, ["code", "quotes", "links", "emails", "placeholders", "numbers"])
    assert all(0 <= one.start < one.end <= len(text) for one in ranges)
    assert all(one.end <= other.start for one, other in pairwise(ranges))


@given(TEXTS, st.integers(0, 80), st.integers(0, 80))
def test_touching_is_what_a_look_at_every_range_says(text, one, other):
    ranges, (start, end) = protected_spans(text), sorted((one, other))
    assert is_touched(ranges, start, end) == any(range_.touches(start, end) for range_ in ranges)


def test_an_insertion_at_the_border_of_a_range_does_not_touch_it():
    assert not TextSpan(2, 5).touches(2, 2)
    assert not TextSpan(2, 5).touches(5, 5)
    assert TextSpan(2, 5).touches(3, 3)
    assert not TextSpan(2, 5).touches(5, 7)
    assert TextSpan(2, 5).touches(4, 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Mr. Hale came. He left.", ["Mr. Hale came. ", "He left."]),
        ("It costs 3.50 e.g. here. Fine", ["It costs 3.50 e.g. here. ", "Fine"]),
        ("J. R. Hart wrote it. So?", ["J. R. Hart wrote it. ", "So?"]),
        ("A title\n\nA text.", ["A title\n\n", "A text."]),
        ("Buy:\n- milk\n- bread", ["Buy:\n", "- milk\n", "- bread"]),
        ('She said "Go!" Then he went.', ['She said "Go!" ', "Then he went."]),
        ("これは本です。いいですか？はい。", ["これは本です。", "いいですか？", "はい。"]),
    ],
)
def test_where_sentences_end(text, expected):
    assert [one.of(text) for one in sentences(text)] == expected


def test_a_sentence_does_not_end_inside_a_protected_range():
    text = "Run `a. B. c` now. Then stop."
    assert [s.of(text) for s in sentences(text, protected_spans(text))] == ["Run `a. B. c` now. ", "Then stop."]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("code", "a `b c` d ``e ` f``", ["`b c`", "``e ` f``"]),
        ("code", "x\n```py\na = 1\n\nb\n```\ny", ["```py\na = 1\n\nb\n```"]),
        ("code", "x\n~~~\nnever closed", ["~~~\nnever closed"]),
        ("quotes", "He said “no way” and „nein“ and «non».", ["“no way”", "„nein“", "«non»"]),
        ("quotes", 'a "b c" d', ['"b c"']),
        ("quotes", "it's the dogs' bone", []),
        ("quotes", "fine\n> as you wrote\nyes", ["> as you wrote"]),
        ("links", "see https://x.org/a?b=c&d, or www.y.de.", ["https://x.org/a?b=c&d", "www.y.de"]),
        ("links", "a [text](http://x.org/y) b", ["[text](http://x.org/y)"]),
        ("emails", "to a.b+c@d-e.co.uk!", ["a.b+c@d-e.co.uk"]),
        (
            "placeholders",
            "Hi {name}, ${x} %s %(n)d <b>{{y}}</b>",
            ["{name}", "${x}", "%s", "%(n)d", "<b>", "{{y}}", "</b>"],
        ),
        ("numbers", "€3.50, 12% of 1,000 on 2026-01-02.", ["€3.50", "12%", "1,000", "2026-01-02"]),
    ],
)
def test_what_is_protected(kind, text, expected):
    assert [one.of(text) for one in protected_spans(text, [kind])] == expected


def test_overlapping_ranges_are_one():
    text = 'see "the `a` at https://x.org/y" now'
    assert [one.of(text) for one in protected_spans(text)] == ['"the `a` at https://x.org/y"']


def test_only_known_kinds_can_be_protected():
    kinds = "'code', 'quotes', 'links', 'emails', 'placeholders' or 'numbers', got 'code '"
    with pytest.raises(InvalidArgument, match=kinds):
        protected_spans("a", ["code "])


@pytest.mark.parametrize("text", ["", " \n", None, b"abc", 3, "a\ud800b"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(InvalidInput, match=r"the text (is empty|must be a str|holds half a character)"):
        check_text(text)
