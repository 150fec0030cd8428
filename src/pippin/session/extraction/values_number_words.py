"""Numbers in words, and words that multiply the digits before them.

Notable here:
- `text2num` knows the grammar of eight languages and reads a text in one pass; its ordinals are left out
- words for one are articles in most languages: they are marked as ambiguous, as are words of an unknown language that
  mean something else in another (once, due, six)

Source: https://github.com/allo-media/text2num.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import text_to_num

from pippin.session.extraction.values_base import Candidate, without_overlaps

LANGUAGES: Final = ("en", "de", "fr", "es", "it", "pt", "nl", "da")
_UNKNOWN: Final = ("en", "de", "fr", "es", "it")
_TOKEN: Final = re.compile(r"[^\W\d_](?:[^\W\d_]|[\u0300-\u036f])*|\d+|\s+|.", re.DOTALL)
_ELSEWHERE: Final = frozenset(("once", "due", "elf", "sei", "cent", "sept", "dix", "six", "mil", "mille", "acht"))
# Powers of ten; with a capital letter billions are German and larger.
_SCALES: Final = (
    (3, "thousand tausend mille mila mil duizend tys тыс tusen"),
    (5, "lakh lakhs"),
    (6, "million millions millionen millón millon millones milione milioni milhão milhões miljoen mio mill mln млн"),
    (6, "miljoner millioner miljonia milion miliony milionów milionu"),
    (7, "crore crores"),
    (9, "milliard milliards milliarde milliarden miliardo miliardi miliard miliardy miliardów miljard mrd mld млрд"),
    (9, "miljarder milliarder miljardia bilhão bilhões billion billions bn"),
    (12, "trillion trillions billionen billón billones"),
)
_POWER: Final = {name: power for power, names in _SCALES for name in names.split()}
_AFTER_MONEY: Final = {"k": 3, "K": 3, "m": 6, "M": 6, "mn": 6, "b": 9, "B": 9, "bn": 9}
_BY_LENGTH: Final = sorted({*_POWER, *_AFTER_MONEY}, key=len, reverse=True)
SCALE: Final = re.compile(
    rf"[ \u00a0\u202f]?-?(?:(?:{'|'.join(map(re.escape, _BY_LENGTH))})(?!\w)(?:(?<=[mldo])\.(?=\s?[€$£\w]))?)",
    re.IGNORECASE,
)


def scale_of(match: re.Match[str], money: bool) -> tuple[int, bool]:
    """The power of ten of a match of ``SCALE`` (0: none), and whether it could be another."""
    name = match[0].strip(" \u00a0\u202f-.")
    if name in _AFTER_MONEY and name != "bn":
        return (_AFTER_MONEY[name], False) if money and not match[0][0].isspace() else (0, False)
    power = _POWER.get(name.lower(), 0)
    return power, name.lower() in ("billion", "billions", "trillion", "trillions")


@dataclass(frozen=True, slots=True)
class _Token:
    """What `text2num` asks of a part of a text."""

    form: str

    def text(self) -> str:
        return self.form

    def nt_separated(self, previous: _Token) -> bool:
        return False

    def not_a_number_part(self) -> bool:
        return self.form[0].isdigit()


def words(text: str, language: str | None) -> list[Candidate]:
    """Numbers in words in the given language, or in five languages where it is None."""
    matches = list(_TOKEN.finditer(text))
    tokens = [_Token(_form(match[0])) for match in matches]
    if language is not None:
        return list(_in_language(matches, tokens, language)) if language in LANGUAGES else []
    found = [each for name in _UNKNOWN for each in _in_language(matches, tokens, name)]
    return without_overlaps(
        replace(each, ambiguous=True) if text[each.start : each.end].lower() in _ELSEWHERE else each for each in found
    )


def _form(token: str) -> str:
    if token.isspace():
        return " " if token.count("\n") < 2 else ";"  # a number does not go on in another paragraph
    return token if token.isascii() else unicodedata.normalize("NFC", token)


def _in_language(matches: list[re.Match[str]], tokens: list[_Token], language: str) -> Iterator[Candidate]:
    for each in text_to_num.find_numbers(tokens, language, 0.0):
        if each.is_ordinal or abs(each.value) >= 1e15:
            continue
        value = str(int(each.value)) if each.value == int(each.value) else repr(each.value)
        start, end = matches[each.start].start(), matches[each.end - 1].end()
        yield Candidate(start, end, value, value == "1")
