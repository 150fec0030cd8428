"""Normalizing against the Unicode database, in pieces and whole, and the way back to the original."""

import itertools
import re
import sys
import unicodedata

from hypothesis import example, given, strategies as st

from pippin.session.guardrails.normalization import (
    _JOINING,
    _LOOK_ALIKE,
    Normalizer,
    fold,
    is_boundary,
    normalize,
    words,
)

TEXTS = st.text(st.characters(codec="utf-8"), max_size=60) | st.text(
    "aé\u0301\u0337ｶﾞ한ㅏ\u1161\u200b\u0430ß .", max_size=30
)


def plain_oracle(text: str) -> str:
    """NFKC and case folding of the whole, by the standard library, without what is special here."""
    read = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return re.sub(r"\s+", " ", read)


LETTERS = [
    *"abcXYZ \n\t\u3000äöüßéèñçœÆ 0189ｗｉｄｅﬁ②日本語한국",
    "e\u0301",
    "o\u0308",
    "ｶﾞ",
    "ﾊﾟ",
    "か\u3099",
    "\u1112\u1161\u11ab",
]


@given(st.lists(st.sampled_from(LETTERS), max_size=40).map("".join))
def test_it_is_nfkc_and_case_folding(text):
    assert normalize(text).text == plain_oracle(text)


@given(TEXTS, st.lists(st.integers(0, 60)))
def test_pieces_give_what_the_whole_gives(text, cuts):
    reader = Normalizer()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(places):
        reader.push(text[start:end])
    reader.push("", last=True)
    whole = normalize(text)
    assert (reader.text, list(reader.starts), list(reader.ends)) == (whole.text, list(whole.starts), list(whole.ends))


@given(TEXTS)
def test_what_was_read_is_not_changed_by_what_follows(text):
    reader, before = Normalizer(), ""
    for character in text:
        reader.push(character)
        assert reader.text.startswith(before)
        before = reader.text


@given(TEXTS)
@example("\r\xad")  # white space, and what nobody sees after it
def test_every_character_leads_back_to_its_letter(text):
    read = normalize(text)
    assert len(read.starts) == len(read.ends) == len(read.text)
    for at in range(len(read.text)):
        start, end = read.span(at, at + 1)
        assert read.text[at] in fold(text[start:end]) or (read.text[at] == " " and fold(text[start:end]).isspace())
    assert list(read.starts) == sorted(read.starts)


def test_every_letter_that_composes_with_the_one_before_is_kept_with_it():
    seconds = set()
    for code in range(sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            second = chr(int(parts[1], 16))
            if unicodedata.normalize("NFC", chr(int(parts[0], 16)) + second) == chr(code):
                seconds.add(second)
    starters = {c for c in seconds if unicodedata.combining(c) == 0 and unicodedata.category(c) not in ("Mn", "Me")}
    assert starters <= _JOINING


def test_look_alikes_become_letters_and_stay_where_they_are():
    assert {chr(code).casefold() for code in _LOOK_ALIKE} == {chr(code) for code in _LOOK_ALIKE}
    disguised = "k\u200bi\u200bll y\u043eurs\u0435lf, \uff22\uff4f\uff4d\uff42, b\u0337o\u0337mb"
    assert normalize(disguised).text == "kill yourself, bomb, bomb"
    start, end = normalize(disguised).span(0, 4)
    assert disguised[start:end] == "k\u200bi\u200bll"


def test_words_end_where_scripts_change_and_only_there():
    text = "Linuxでプロセスを止める方法"
    assert [text[a:b] for a, b in words(text)] == ["Linux", "で", "プロセス", "を", "止", "める", "方法"]
    assert [at for at in range(len("assess")) if is_boundary("assess", at)] == [0]


def test_marks_without_end_leave_one_letter():
    assert normalize("e" + "\u0301" * 100_000).text == "é"


def test_many_spaces_and_line_breaks_are_one_space():
    assert normalize("kill \t\n\u00a0 yourself\u3000now").text == "kill yourself now"
    read = normalize("a\n\n b")
    assert (read.text, read.span(0, 3)) == ("a b", (0, 5))
