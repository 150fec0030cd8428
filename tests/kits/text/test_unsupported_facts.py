"""Numbers, names and languages, by cases whose answer a reader knows."""

import pytest
from hypothesis import given, strategies as st

from pippin.kits.text.unsupported_facts import unverified

COMMON = {"nobody", "people", "yesterday", "the"}


@pytest.mark.parametrize(
    ("written", "source", "expected"),
    [
        ("It cost 3,000 euros.", "It cost 3000 euros.", ()),
        ("It cost 3000 euros.", "It cost 3,000 euros.", ()),
        ("It cost 30 euros.", "It cost 3,000 euros.", ("30",)),
        ("There are twelve.", "There are 12.", ()),
        ("There are 12.", "There are twelve.", ()),
        ("There are thirteen.", "There are 12.", ("thirteen",)),
        ("On 11 April", "Due 2026-04-11 in April.", ()),
        ("It is 11.2 high.", "It is 11.3 high.", ("11.2",)),
        ("Then Anna left.", "Anna left.", ()),
        ("Then Anna's mother left.", "Anna left with her mother.", ()),
        ("Then Anne left.", "Anna left.", ("Anne",)),
        ("Then Mary Ann Lee left.", "Ann Lee left.", ("Mary",)),
        ("Nobody came. Ngozi left.", "He left.", ("Ngozi",)),
        ("Nobody Smith came.", "He came.", ("Nobody", "Smith")),
        ("I said that I saw it.", "He saw it.", ()),
        ("Paris, Paris and Paris.", "London", ("Paris",)),
    ],
)
def test_what_the_source_does_not_hold(written, source, expected):
    assert unverified(written, source, is_word=COMMON.__contains__) == expected


@given(st.text(alphabet=st.sampled_from("aB c1.2,3 Élan\n!'’"), max_size=60))
def test_a_text_verifies_itself(text):
    assert unverified(text, text, is_word=lambda word: False) == ()
