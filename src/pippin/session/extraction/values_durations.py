"""Durations in a text: 90 minutes, 1h30, two weeks, PT1H30M.

Notable here:
- units stay as they are written (90 minutes are PT90M), but for fractions, which ISO 8601 allows only in seconds here
- a unit counts with the number before it, so numbers in words and with separators need nothing of their own

Source: names of units from Unicode CLDR, by `babel`; ISO 8601-1:2019, 5.5.2.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Final, Literal, NamedTuple

from babel.units import format_unit

from pippin.data.text.language import language_of
from pippin.session.extraction.values_base import Candidate, ascii_digits, split_tag, without_overlaps
from pippin.session.extraction.values_dates import LANGUAGES
from pippin.session.extraction.values_numbers import find_numbers

_UNITS: Final = {"year": "Y", "month": "M", "week": "W", "day": "D", "hour": "h", "minute": "m", "second": "s"}
_PLURALS: Final = (1, 2, 3, 5, 1.5)  # one of each form that a language may have
_WIDTHS: Final[tuple[Literal["long", "short"], ...]] = ("long", "short")
_ORDER: Final = "YMWDhms"
# CLDR's short names that are also common words are left out, so the usual ones of a few letters are listed.
_SHORT: Final = {
    "h": "h", "hr": "h", "hrs": "h", "std": "h", "min": "m", "mins": "m", "s": "s", "sec": "s", "secs": "s", "sek": "s",
    "d": "D", "yr": "Y", "yrs": "Y", "mo": "M", "mos": "M", "wk": "W", "wks": "W", "an": "Y", "ans": "Y", "m": "m",
    "monaten": "M", "jahren": "Y", "tagen": "D", "giorno": "D",
}  # fmt: skip
_ISO: Final = re.compile(
    r"(?<!\w)P(?=\d|T\d)(?:\d{1,9}Y)?(?:\d{1,9}M)?(?:\d{1,9}W)?(?:\d{1,9}D)?"
    r"(?:T(?=\d)(?:\d{1,9}H)?(?:\d{1,9}M)?(?:\d{1,9}(?:[.,]\d{1,9})?S)?)?(?!\w)"
)
_CLOCK: Final = re.compile(
    r"(?<![\w:.,])(\d{1,3}):([0-5]\d)(?::([0-5]\d))?[ \u00a0]?"
    r"(?:h|hrs?\.?|hours?|Std\.?|Stunden|heures|horas|ore)(?!\w)",
    re.IGNORECASE,
)
_PHRASES: Final = tuple(
    (re.compile(rf"(?<!\w)(?:{pattern})(?!\w)", re.IGNORECASE), value)
    for pattern, value in (
        (
            r"half an hour|half[- ]hour|(?:eine[r]? )?halbe[n]? Stunde|(?:une )?demi-heure|media hora|mezz['’ ]?ora",
            "PT30M",
        ),
        (r"(?:a )?quarter of an hour|(?:eine )?Viertelstunde|(?:un )?quart d['’]heure|(?:un )?cuarto de hora", "PT15M"),
        (r"(?:un )?quarto d['’]ora", "PT15M"),
        (
            r"three[- ]quarters of an hour|(?:eine )?Dreiviertelstunde|trois quarts d['’]heure|tres cuartos de hora",
            "PT45M",
        ),
        (r"an hour and a half|anderthalb Stunden|(?:eine )?eineinhalb Stunden|une heure et demie", "PT1H30M"),
        (r"(?:una )?hora y media|un['’]ora e mezz[ao]", "PT1H30M"),
        (r"half a year|(?:ein )?halbes Jahr|medio año|mezzo anno|six-month", "P6M"),
        (r"a year and a half|anderthalb Jahre|un an et demi|año y medio|un anno e mezzo", "P18M"),
    )
)
_HALF_MORE: Final = re.compile(r" (?:and a half|et demie?|y medi[oa]|e mezz[oa])(?!\w)", re.IGNORECASE)
_TO_UNIT: Final = re.compile(r"[ \u00a0\u202f-]?")
_BARE_MINUTES: Final = re.compile(r"[ \u00a0]?([0-5]\d)(?![\w:]|[.,]\d)")
_BETWEEN: Final = re.compile(r"[ \u00a0\u202f,]{0,2}(?:(?:and|und|et|y|e|en|i|a|och|og|&)[ \u00a0])?", re.IGNORECASE)
_ARTICLE: Final = re.compile(r"(?<!\w)an? (?=[a-z])", re.IGNORECASE)


class _Part(NamedTuple):
    start: int
    end: int
    amount: Decimal
    unit: str
    ambiguous: bool


def find_durations(text: str, *, language: str | None = None, region: str | None = None) -> list[Candidate]:
    """All durations in ``text``, in its order; see `pippin.session.extraction.values`."""
    language, region = split_tag(language, region)
    plain = ascii_digits(text)
    found = [Candidate(*match.span(), match[0].replace(",", ".")) for match in _ISO.finditer(plain)]
    for match in _CLOCK.finditer(plain):
        value = _iso({"h": Decimal(match[1]), "m": Decimal(match[2]), "s": Decimal(match[3] or 0)})
        found += [Candidate(*match.span(), value or "PT0S")]
    for pattern, value in _PHRASES:
        found += [Candidate(*match.span(), value) for match in pattern.finditer(plain)]
    units, longest = unit_names(language or language_of(plain))
    numbers = [*find_numbers(text, language=language, region=region), *_articles(plain)]
    parts = list(_parts(plain, sorted(numbers, key=lambda each: each.start), units, longest))
    return without_overlaps([*found, *_chains(plain, parts)])


@functools.lru_cache(maxsize=64)
def unit_names(language: str | None) -> tuple[dict[str, str], int]:
    """Names of units in a language and in English, or in all where it is None, and how long the longest is."""
    names: dict[str, str] = {}
    for each in dict.fromkeys(["en", language] if language in LANGUAGES and language else LANGUAGES[:8]):
        for unit, letter in _UNITS.items():
            for amount, width in itertools.product(_PLURALS, _WIDTHS):
                form = format_unit(amount, f"duration-{unit}", width, locale=each)
                name = re.sub(r"[\d.,]+", "", form).strip(" .\u00a0\u202f").lower()
                if len(name) >= 3 and name.isalpha():
                    names.setdefault(name, letter)
    names |= _SHORT
    return names, max(map(len, names))


def _articles(plain: str) -> Iterator[Candidate]:
    for match in _ARTICLE.finditer(plain):
        yield Candidate(match.start(), match.end() - 1, "1", True)


def _parts(plain: str, numbers: list[Candidate], units: dict[str, str], longest: int) -> Iterator[_Part]:
    """The numbers that a unit follows."""
    for place, number in enumerate(numbers):
        if number.value.startswith("-"):
            continue
        start, end, amount = number.start, number.end, Decimal(number.value)
        if plain[start - 1 : start] == "(" and plain[end : end + 1] == ")":  # thirty (30) days
            end += 1
            before = numbers[place - 1] if place else None
            again = before is not None and plain[before.end : start] == " (" and before.value == number.value
            start = before.start if before is not None and again else start - 1
        if more := _HALF_MORE.match(plain, end):
            amount, end = amount + Decimal("0.5"), more.end()
        gap = _TO_UNIT.match(plain, end)
        end = gap.end() if gap else end
        word = re.match(r"[^\W\d_]+", plain[end : end + longest + 1])
        unit = units.get(word[0].lower()) if word else None
        if word and unit:
            dotted = len(word[0]) <= 4 and re.match(
                r"\.(?=\s?[\d,)])", plain[end + len(word[0]) : end + len(word[0]) + 3]
            )
            # a single letter is often something else: 5 m, 10 s, 3 d
            unsure = number.ambiguous and amount != 1
            yield _Part(start, end + len(word[0]) + bool(dotted), amount, "mm" if word[0] == "m" else unit, unsure)


def _chains(plain: str, parts: list[_Part]) -> Iterator[Candidate]:
    """Parts that follow each other from large to small are one duration."""
    place = 0
    while place < len(parts):
        chain = [parts[place]]
        place += 1
        while place < len(parts) and _continues(plain, chain[-1], parts[place]):
            chain.append(parts[place])
            place += 1
        if chain[0].unit == "mm":
            continue  # 5 m are meters
        end, ambiguous = chain[-1].end, any(part.ambiguous for part in chain)
        amounts = {part.unit[0]: part.amount for part in chain}
        minutes = _BARE_MINUTES.match(plain, end) if chain[-1].unit == "h" and plain[end - 1] in "hH" else None
        if minutes:  # 1h30 may be a time of day
            amounts["m"], end, ambiguous = Decimal(minutes[1]), minutes.end(), True
        if value := _iso(amounts):
            yield Candidate(chain[0].start, end, value, ambiguous)


def _continues(plain: str, before: _Part, after: _Part) -> bool:
    if after.start < before.end or _ORDER.index(before.unit[0]) >= _ORDER.index(after.unit[0]):
        return False
    return len(plain[before.end : after.start]) <= 8 and _BETWEEN.fullmatch(plain, before.end, after.start) is not None


def _iso(amounts: dict[str, Decimal]) -> str | None:
    """ISO 8601 of amounts by unit; None where it needs a fraction of a month or is out of all proportion."""
    if any(amount > 10**9 for amount in amounts.values()):
        return None
    left = dict.fromkeys(_ORDER, Decimal(0)) | amounts
    for unit, smaller, ratio in (("Y", "M", 12), ("W", "D", 7), ("D", "h", 24), ("h", "m", 60), ("m", "s", 60)):
        fraction = left[unit] % 1
        left[unit] -= fraction
        left[smaller] += fraction * ratio
    if left["M"] % 1:
        return None
    if left["W"] and not any(left[unit] for unit in "YMDhms"):
        return f"P{_digits(left['W'])}W"
    left["D"] += 7 * left["W"]
    date = "".join(f"{_digits(left[unit])}{unit}" for unit in "YMD" if left[unit])
    time = "".join(f"{_digits(left[unit])}{unit.upper()}" for unit in "hms" if left[unit])
    return f"P{date}T{time}" if time else f"P{date}" if date else "PT0S"


def _digits(amount: Decimal) -> str:
    return format(amount.normalize() if amount % 1 else amount.to_integral_value(), "f")
