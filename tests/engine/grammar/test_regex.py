"""Oracles: Python's `re` for what a pattern finds, `json` for the spelling of characters, brute force for emptiness."""

import json
import re

import pytest
from hypothesis import given, strategies as st

from pippin.core.errors import EmptySchema, SchemaError, UnsupportedGuide
from pippin.engine.grammar import regex, string_formats
from pippin.engine.grammar.constraint import Grammar

PATTERNS = [
    "^a$", "a|^b", "^a|b$", r"[^\s]+", r"^\W+$", r"\d{2,3}", r'^["\\/\n]*$', r"[\x00-\x1f]", r"^\S+$", "^(?:a|bc)*d?$",
    "^.$", "^[^a]$", r"^[^\w]$", r"^[^\n]{2}$", "^$", "", "^(a|^b)$", r"^é+\x41?$", r"\t", r"^[\s\S]*$", r"^\D$",
    r"[^\D]", r"^[^\S]$", "a+?b", "^[a-c]{2}$", r"^[\"\\]$", "^(?P<x>a)$", r"^\u00e9$",
]  # fmt: skip
TEXTS = st.text(st.sampled_from('aabbcd 1_-.@\n\t"\\/éA²٣\x00\x1c\x1f\x7f\x85\u2028\xa0\ufeff😀'), max_size=4)


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=TEXTS)
def test_what_a_pattern_lets_through_python_finds_too(pattern, text):
    spelled = json.dumps(text, ensure_ascii=False)
    found = re.search(pattern, text) is not None
    if regex.matches(f"/{regex.search(pattern)}/", spelled):
        assert found
    elif found:  # what is left out is only where dialects part: `$` before a last newline, `.`, classes beyond ASCII
        assert not text.isascii() or text.endswith("\n") or "\x1c" in text or "\x1f" in text


@pytest.mark.parametrize("pattern", ["^a.b$", r"^\d\w[x-z]+$", "q"])
@given(text=st.text(st.sampled_from("aqbxyz019"), max_size=4))
def test_on_plain_text_a_pattern_means_what_python_means(pattern, text):
    expected = re.search(pattern, text) is not None
    assert regex.matches(f"/{regex.search(pattern)}/", json.dumps(text)) is expected
    assert regex.matches(f"/{regex.whole(pattern)}/", text) is (re.fullmatch(pattern, text) is not None)


@given(st.text(max_size=8).filter(lambda text: not any(0xD800 <= ord(c) <= 0xDFFF for c in text)))
def test_every_text_has_one_spelling_which_is_that_of_json_dumps(text):
    spelled = json.dumps(text, ensure_ascii=False)
    assert regex.matches(f"/{regex.of_length(len(text), len(text))}/", spelled)
    assert regex.matches(f'/"{regex.quoted(text)}"/', spelled)
    assert not regex.matches(f"/{regex.of_length(0, len(text) - 1)}/", spelled) if text else True


@pytest.mark.parametrize(
    "spelling", [r'"\u0061"', r'"\/"', r'"\u00e9"', r'"\u001F"', '"\n"', r'"\x"', '"a', r'"\ud83d"']
)
def test_other_spellings_are_not_written(spelling):
    assert not regex.matches(f"/{regex.of_length(0, None)}/", spelling)


def test_ecma_is_wider_than_what_all_engines_agree_on():
    for character, pattern in [("é", r"^\W$"), ("٣", r"^\D$"), ("\xa0", r"^\s$")]:
        spelled = json.dumps(character, ensure_ascii=False)
        assert regex.matches(f"/{regex.search(pattern, narrow=False)}/", spelled)
        assert not regex.matches(f"/{regex.search(pattern)}/", spelled)


@pytest.mark.parametrize(
    "pattern",
    ["^(?!ab)[abc]+$", "^(?=.*a)(?=.*b)[abc]*$", "^(?!a$|b)c?a", "^(?!.*bb)", "^(?=a{2}$)", "^(?!a)(?!b)(?=.c)"],
)
@given(text=st.text(st.sampled_from("abc"), max_size=5))
def test_look_ahead_at_the_beginning_means_what_python_means(pattern, text):
    include, exclude = regex.conditions(pattern)
    spelled = json.dumps(text)
    found = all(regex.matches(f"/{each}/", spelled) for each in include)
    assert (found and not any(regex.matches(f"/{each}/", spelled) for each in exclude)) is (
        re.search(pattern, text) is not None
    )


@pytest.mark.parametrize("pattern", ["(?=a)b", "^a(?!b)", "^(?<=a)b", "^(?!a(?=b))c", "^((?!a)b)$"])
def test_look_around_elsewhere_is_refused(pattern):
    with pytest.raises(UnsupportedGuide, match="not a regular operation"):
        regex.conditions(pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "assert is not a regular"),
        (r"\bfoo", "not a regular"),
        (r"(a)\1", "groupref"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        (r"\p{L}", "bad escape"),
        (r"\Z", "different engines"),
        ("[]a]", "different engines"),
        ("a{,3}", "different engines"),
        ("[a&&b]", "different engines"),
        ("a(^b)", "two ends"),
    ],
)
def test_what_is_not_regular_or_ambiguous_is_refused(pattern, reason):
    with pytest.raises(UnsupportedGuide, match=reason) as caught:
        regex.search(pattern)
    assert caught.value.guide == "pattern"


@pytest.mark.parametrize("pattern", ["(", "[", "*", "a**"])
def test_what_is_no_expression_says_so(pattern):
    with pytest.raises(SchemaError, match="not a regular expression"):
        regex.search(pattern)


def test_half_a_surrogate_pair_cannot_be_spelled():
    with pytest.raises(UnsupportedGuide, match="surrogate"):
        regex.quoted("\ud83d")


def test_emptiness_is_decided_across_intersections():
    assert regex.is_empty("/(aa)*/ & /(aa)*a/")
    assert regex.is_empty("/a{3,}/ & /.{0,2}/")
    assert not regex.is_empty("/a{3,}/ & /.{0,3}/")


def test_too_large_an_expression_is_refused_not_guessed():
    with pytest.raises(UnsupportedGuide, match="engine"):
        regex.is_empty("/(?:a|b)*a(?:a|b){2000}/ & /(?:a|b)*b(?:a|b){1900}/ & ~/[ab]*bab[ab]*/")


def test_membership_that_the_engine_cannot_decide_is_no_answer():
    def words(count):
        return f"/{regex.of_length(0, 10 * count)}/ & (/{regex.search(f'^([^ ]+ +){{0,{count}}}[^ ]+$')}/)"

    assert regex.matches(words(49), json.dumps("ab " * 49 + "x"))
    assert not regex.matches(words(49), json.dumps("ab " * 50 + "x"))
    with pytest.raises(UnsupportedGuide, match="cannot decide"):
        regex.matches(words(499), json.dumps("ab " * 400 + "x"))


@pytest.mark.parametrize(
    ("pattern", "length"),
    [(r"^(?:\S+\s+){0,499}\S+$", 5000), (r"^(([a-z]{1,40}){1,40}){1,40}$", 4000)],
)
def test_what_cannot_be_written_within_the_limits_is_refused(pattern, length):
    terminal = f"/{regex.of_length(0, length)}/ & (/{regex.search(pattern)}/)"
    with pytest.raises(UnsupportedGuide, match="shorten maxLength") as caught:
        regex.check_cost(terminal)
    assert caught.value.guide == "pattern"


@pytest.mark.parametrize("name", string_formats.STANDARD)
def test_every_format_can_be_written(name):
    regex.check_cost(string_formats.terminal(name))


@pytest.mark.parametrize(
    ("pattern", "nodes"),
    [
        ("a", "[(LITERAL, 97)]"),
        ("[^a]", "[(NOT_LITERAL, 97)]"),
        (".", "[(ANY, None)]"),
        (r"[a-c\d]", "[(IN, [(RANGE, (97, 99)), (CATEGORY, CATEGORY_DIGIT)])]"),
        ("a|bc", "[(BRANCH, (None, [[(LITERAL, 97)], [(LITERAL, 98), (LITERAL, 99)]]))]"),
        ("(a)", "[(SUBPATTERN, (1, 0, 0, [(LITERAL, 97)]))]"),
        ("a{2,}", "[(MAX_REPEAT, (2, MAXREPEAT, [(LITERAL, 97)]))]"),
        ("a*?", "[(MIN_REPEAT, (0, MAXREPEAT, [(LITERAL, 97)]))]"),
        ("^a$", "[(AT, AT_BEGINNING), (LITERAL, 97), (AT, AT_END)]"),
    ],
)
def test_the_parser_of_this_python_gives_the_nodes_that_are_read(pattern, nodes):
    assert str(regex._parser.parse(pattern)) == nodes


@given(st.text(st.sampled_from("ab/\né.^$\\"), max_size=4))
def test_a_pattern_of_one_text_is_known(text):
    pattern = f"^{re.escape(text)}$"
    assert regex.constant(pattern) == text
    terminal = f"/{regex.search(pattern)}/"
    assert regex.matches(terminal, json.dumps(text, ensure_ascii=False))
    assert regex.count_texts(terminal, 2) == 1


@pytest.mark.parametrize(
    "pattern", ["a", "^a", "a$", "^a?$", "^(a)$", "^[ab]$", "^.$", "^(?!a)b$", "^a|b$", "(?i)^a$", "("]
)
def test_other_patterns_may_have_several_texts(pattern):
    assert regex.constant(pattern) is None


@pytest.mark.parametrize("more", [{"minLength": 3}, {"maxLength": 1}, {"enum": ["abc"]}, {"format": "date"}])
def test_a_pattern_of_one_text_is_held_beside_other_keywords(more):
    schema = {"type": "string", "pattern": "^ab$"}
    with pytest.raises(EmptySchema):
        Grammar.json_schema(schema | more)
    either = {"oneOf": [schema | more, {"type": "string", "minLength": 2, "maxLength": 2}]}
    assert Grammar.json_schema(either).allows('"ab"') is ("format" not in more)  # which others may read differently
    outside = Grammar.json_schema({"type": ["string", "null"], "not": {"pattern": "^ab$"}})
    assert [text for text in ('"ab"', '"abc"', '""', "null") if outside.allows(text)] == ['"abc"', '""']
    assert Grammar.json_schema(schema | {"minLength": 2, "maxLength": 2}).allows('"ab"')


HEADS = [
    "^ab",
    "^ab?",
    "^a{2}",
    "^a{1,2}b",
    "^a|^b",
    "^(ab|ac)",
    "^a-b",
    "^a/",
    r"^\\n",
    r"^\n",
    "b",
    "^[ab]c",
    "^",
    "^é",
    "^aé",
]


@pytest.mark.parametrize("one", HEADS)
def test_what_begins_differently_has_no_text_in_common(one):
    for other in HEADS:
        terminals = [f"(/{regex.search(each)}/)" for each in (one, other)]
        if regex.begin_differently(terminals):
            assert regex.is_empty(" & ".join(terminals)), other
        both = f"({terminals[0]}) | ({terminals[1]})"
        assert not regex.begin_differently([both, terminals[0]])


def test_fixed_beginnings_are_told_apart():
    assert regex.begin_differently([f"(/{regex.search(each)}/)" for each in ("^ab", "^a-b", "c")])


def test_a_pattern_answers_one_question_after_the_other():
    terminal = f"/{regex.search('^(?:a|b)*c$')}/"
    for _ in range(3):
        for text in ("abc", "abab", "c", "x"):
            assert regex.matches.__wrapped__(terminal, json.dumps(text)) is (re.search("^(?:a|b)*c$", text) is not None)
