"""Fact check by rules: numbers and names of a text that another text does not contain.

Notable here:
- a number counts by its value: "3,000" is 3000 and "twelve" is 12; a name counts by its words, in any case
- that a number or a name occurs in the source does not make a sentence true; that it does not makes it suspicious
- the language of a text is detected by its script and its function words; unknown is None
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pippin.kits.text.english_words import FUNCTION_WORDS
from pippin.kits.text.spans import sentences

_NUMBER = re.compile(r"\d+(?:[.,:/'’]\d+)*")
_NAME = re.compile(r"[^\W\d_][\w’'-]*")
_NUMBER_WORDS = {
    word: str(value)
    for value, word in enumerate(
        [
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
            "thirteen",
            "fourteen",
            "fifteen",
            "sixteen",
            "seventeen",
            "eighteen",
            "nineteen",
            "twenty",
        ]
    )
} | {"thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "seventy": "70", "eighty": "80", "ninety": "90"}


def unverified(text: str, source: str, *, is_word: Callable[[str], bool] | None = None) -> tuple[str, ...]:
    """The numbers and names of ``text`` that do not occur in ``source``, as they are written, each once.

    Args:
        text: the generated text.
        source: its source.
        is_word: whether a word in lower case is an ordinary one; distinguishes "Nobody" from "Ngozi" at the beginning
            of a sentence. Without it only names of two words are checked there.

    >>> unverified("Ann Lee paid 3,000 euros to Bob.", "Ann Lee paid 3000 euros.")
    ('Bob',)
    """
    there = set(_values(source))
    words = {_plain(word) for word in _NAME.findall(source)}
    found = [written for value, written in _numbers(text) if value not in there]
    found += [name for name in _names(text, is_word) if _plain(name) not in words]
    return tuple(dict.fromkeys(found))


def _plain(word: str) -> str:
    return re.sub(r"['’]s?$", "", word).casefold()


def _values(text: str) -> Iterator[str]:
    for value, _ in _numbers(text):
        yield value
    for part in re.findall(r"\d+", text):  # "10:00" may be written as "10", "2026-04-11" as "11 April"
        yield part.lstrip("0") or "0"


def _numbers(text: str) -> Iterator[tuple[str, str]]:
    """Values in one spelling, with the spelling of the text."""
    for match in _NUMBER.finditer(text):
        digits = re.sub(r"[.,'’](?=\d{3}(?!\d))", "", match[0])
        yield digits.replace(",", ".").lstrip("0") or "0", match[0]
    for word in re.findall(r"[A-Za-z]+", text):
        if word.lower() in _NUMBER_WORDS and word.lower() != "one":
            yield _NUMBER_WORDS[word.lower()], word


def _names(text: str, is_word: Callable[[str], bool] | None) -> Iterator[str]:
    for sentence in sentences(text):
        words = list(_NAME.finditer(text, sentence.start, sentence.end))
        for index, match in enumerate(words):
            word = match[0]
            if not word[0].isupper() or word.lower() in FUNCTION_WORDS or word.lower() in _NUMBER_WORDS:
                continue
            opens = not text[sentence.start : match.start()].strip(" \t\n\"'“‘«„([-*•")
            followed = index + 1 < len(words) and words[index + 1][0][0].isupper()
            if not opens or followed or (is_word is not None and not is_word(_plain(word))):
                yield word
