"""What the finders of values share: a candidate, digits of all scripts, languages and regions.

Notable here:
- digits of other scripts are replaced one by one, so that offsets stay those of the text
- a region decides by itself (a German text from the US has American dates); a language by the usual region of it
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from babel import Locale, UnknownLocaleError

from pippin.core.errors import InvalidArgument

WORD: Final = re.compile(r"[^\W\d_](?:[^\W\d_]|[\u0300-\u036f])*")
SPACE: Final = "[ \t\u00a0\u2009\u200e\u200f\u202f]"


@dataclass(frozen=True)
class Candidate:
    """A part of a text that can be read as a value.

    Attributes:
        start: offset of its first character.
        end: offset after its last character; ``text[start:end]`` is the span.
        value: an ISO 8601 date, time, date-time or duration, or a number in plain decimal notation.
        ambiguous: another reading is possible, as of 03/04/2024 or 1.234; this is the likeliest.
        inner: a number that stands within something longer: an identifier, a date, an address.
    """

    start: int
    end: int
    value: str
    ambiguous: bool = False
    inner: bool = False


@functools.cache
def _ascii_table() -> dict[int, str]:
    table = {code: chr(code - 0xFEE0) for code in map(ord, "，．／：－＋（）")}
    for code in range(128, sys.maxunicode + 1):
        if (char := chr(code)).isdecimal():
            table[code] = str(unicodedata.decimal(char))
    return table


def ascii_digits(text: str) -> str:
    """``text`` with the decimal digits of every script as 0 to 9, and full-width signs as plain ones; equally long."""
    return text if text.isascii() else text.translate(_ascii_table())


def split_tag(language: str | None, region: str | None) -> tuple[str | None, str | None]:
    """Language and region in their usual case; "pt-BR" as a language names both.

    Raises:
        InvalidArgument: ``language`` is no language tag or ``region`` no code of a country.
    """
    if language is not None:
        if not re.fullmatch(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*", language):
            raise InvalidArgument(f"language is a tag such as 'de' or 'pt-BR', got {language!r}")
        language, *rest = re.split("[-_]", language)
        language = {"no": "nb", "iw": "he", "in": "id"}.get(language.lower(), language.lower())
        region = region or next((part for part in rest if re.fullmatch("[A-Za-z]{2}", part)), None)
    if region is not None and not re.fullmatch("[A-Za-z]{2}", region):
        raise InvalidArgument(f"region is the code of a country such as 'US', got {region!r}")
    return language, region.upper() if region else None


@functools.lru_cache(maxsize=256)
def locale_of(language: str | None, region: str | None) -> Locale | None:
    """What is known of the conventions of a language in a region; None where neither says anything."""
    for tag in (f"{language}_{region}" if language and region else "", f"und_{region}" if region else "", language):
        try:
            if tag:
                return Locale.parse(tag)
        except (UnknownLocaleError, ValueError):
            continue
    return None


def without_overlaps(candidates: Iterable[Candidate]) -> list[Candidate]:
    """In the order of the text; of those that share characters the longer, of equally long ones the first."""
    kept: list[Candidate] = []
    for each in sorted(candidates, key=lambda found: found.start):
        if not kept or each.start >= kept[-1].end:
            kept.append(each)
        elif each.end - each.start > kept[-1].end - kept[-1].start:
            kept[-1] = each
    return kept
