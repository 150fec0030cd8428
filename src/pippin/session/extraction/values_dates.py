"""Dates in a text, in the spellings of many languages.

Notable here:
- whether 03/04/2024 is in March or in April is decided by another date of the text that can be read in one way only,
  else by a weekday beside it, by region, by language
- English alone does not decide it, since only Americans write the month first; nor does nothing at all
- names of months are looked up, not matched: a table of all languages costs as little as one of one language

Source: names and orders from Unicode CLDR, by `babel`.
"""

from __future__ import annotations

import datetime
import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Final

from babel import Locale

from pippin.data.text.language import language_of
from pippin.session.extraction.values_base import (
    SPACE,
    WORD,
    Candidate,
    ascii_digits,
    locale_of,
    split_tag,
    without_overlaps,
)

# Whose names of months are known; where two disagree (listopad), the earlier one is likelier.
LANGUAGES: Final = (
    "en", "de", "fr", "es", "it", "pt", "nl", "pl", "sv", "da", "nb", "fi", "cs", "sk", "ru", "uk", "tr",
    "el", "ro", "hu", "bg", "hr", "sl", "sr", "lt", "lv", "et", "ca", "gl", "eu", "is", "cy", "af", "sq",
    "mk", "be", "az", "id", "ms", "sw", "fil", "he", "ar", "fa",
)  # fmt: skip
_MORE_NAMES: Final = {"sept": 9, "mrz": 3, "maerz": 3, "jänner": 1, "feber": 2, "setiembre": 9, "okt": 10, "dez": 12}
_NUMERIC: Final = re.compile(
    rf"(?<![A-Za-z_\d])(\d{{1,2}}|\d{{4}}){SPACE}?([./-]){SPACE}?(\d{{1,2}}){SPACE}?\2{SPACE}?"
    r"(\d{4}|\d{1,2})(?=T\d|(?![A-Za-z_\d]|\2\d))"
)
_COMPACT: Final = re.compile(r"(?<![\w.,/-])(\d{4})(\d\d)(\d\d)(?=T\d|(?!\w|[.,/-]\d))")
_WEEK: Final = re.compile(r"(?<![\w-])\d{4}-W\d\d-\d(?![\w-])")
_EAST_ASIAN: Final = re.compile(
    rf"(?:(\d{{4}})|(令和|平成|昭和){SPACE}?(\d{{1,2}}|元)){SPACE}?[年년]{SPACE}?(\d{{1,2}}){SPACE}?[月월]{SPACE}?"
    rf"(\d{{1,2}})(?!\d){SPACE}?[日일号]?"
)
_ERAS: Final = {"令和": 2018, "平成": 1988, "昭和": 1925}
_VIETNAMESE: Final = re.compile(r"(?<!\d)(\d{1,2}) tháng (\d{1,2})(?:, | năm |, năm | )(\d{4})(?!\d)", re.IGNORECASE)
_ROMAN_MONTH: Final = re.compile(rf"(?<![\w.])(\d{{1,2}})\.?{SPACE}?([IVX]{{1,4}})\.?{SPACE}?(\d{{4}})(?!\w)")
_ROMANS: Final = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")
_ROMAN: Final = {name: n for n, name in enumerate(_ROMANS, 1)}

# Around the name of a month, within a window of a few characters.
_WINDOW: Final = 32
_LINK: Final = (
    r"(?:[ \t\n\u00a0\u2009\u202f]|[.,/\-–׳]|\b(?:de|del|di|of|den|do|da|г|gada|gads|m|ng|ta['’])\b|\bd['’]"
    r"|\(e\)ko|\bko\b){0,6}"
)
_ORDINAL: Final = r"(?:st|nd|rd|th|er|re|ste|de|e|[oº]|[aª]|°|-a|-е|-го|إ)?"
_DAY_LEFT: Final = re.compile(rf"(?<!\d)(?<!\d[.,/:])(\d{{1,2}}){SPACE}?{_ORDINAL}(?!\w){_LINK}$", re.IGNORECASE)
_YEAR_DAY_LEFT: Final = re.compile(rf"(?<![\d/_-])(\d{{4}}){_LINK}(?<!\d)(\d{{1,2}}){_LINK}$", re.IGNORECASE)
_YEAR_LEFT: Final = re.compile(rf"(?<!\d)(\d{{4}}){_LINK}$", re.IGNORECASE)
_YEAR_RIGHT: Final = re.compile(rf"{_LINK}(\d{{4}})(?!\d|[.,]\d)", re.IGNORECASE)
_SHORT_YEAR_RIGHT: Final = re.compile(r"(?:[-/.]|\.? ?['’]|\.? )(\d\d)(?![\w:%€$£]|[.,/-]\d)")
_DAY_YEAR_RIGHT: Final = re.compile(
    rf"{_LINK}(?<!\d)(\d{{1,2}}){_ORDINAL}(?:{SPACE}?[-–]{SPACE}?(\d{{1,2}}){_ORDINAL})?(?!\w)"
    r"(?:[ \u00a0\u202f,/-]|\b(?:of|de)\b){1,4}(?:['’](\d\d)|(\d{4}))(?!\d|[.,]\d)",
    re.IGNORECASE,
)
_DAY_RIGHT: Final = re.compile(rf"{_LINK}(?<!\d)(\d{{1,2}})(?![\d:]|[.,]\d|\w)(?:\(a\))?", re.IGNORECASE)
_LAST_YEAR: Final = 2049  # that two digits stand for
_RANGE_LEFT: Final = re.compile(
    rf"(?<!\d)(?<!\d[.,/:-])(\d{{1,2}}){_ORDINAL}\.?{SPACE}?(?:[-–—&]|\b(?:to|and|bis|und|au|et|al|y|e)\b){SPACE}?$",
    re.IGNORECASE,
)


def find_dates(text: str, *, language: str | None = None, region: str | None = None) -> list[Candidate]:
    """All dates with a year in ``text``, in its order; see `pippin.session.extraction.values`."""
    language, region = split_tag(language, region)
    plain = ascii_digits(text)
    found = [*_named(plain, language or language_of(plain))]
    month_first = sum(not plain[each.start].isdigit() for each in found)
    found += _numeric(plain, language, region, month_first > len(found) - month_first)
    found += _others(plain)
    return without_overlaps(found)


def iso_date(year: int, month: int, day: int) -> str | None:
    """A date of the years 1000 to 9999, or None where the calendar does not have it."""
    try:
        return datetime.date(year, month, day).isoformat() if year >= 1000 else None
    except ValueError:
        return None


def _full_year(digits: str) -> int:
    """Two digits are a year of the hundred years up to `_LAST_YEAR`."""
    if len(digits) == 4:
        return int(digits)
    year = _LAST_YEAR - _LAST_YEAR % 100 + int(digits)
    return year if year <= _LAST_YEAR else year - 100


# --- digits only ------------------------------------------------------------------------------------------------------


def _readings(match: re.Match[str], usual: str | None) -> dict[str, str]:
    """The dates that digits can be, by the order of their parts."""
    first, middle, last = match[1], match[3], match[4]
    if len(first) == 4:
        orders = ["YMD"] if len(last) <= 2 else []
    else:
        orders = ["DMY", "MDY"] if len(last) in (2, 4) else []
        orders += ["YMD"] if len(first) == 2 and (len(last) == 2 or (len(last) == 1 and usual == "YMD")) else []
    parts = {}
    for order in orders:
        by_letter = dict(zip(order, (first, middle, last), strict=True))
        value = iso_date(_full_year(by_letter["Y"]), int(by_letter["M"]), int(by_letter["D"]))
        if value:
            parts[order] = value
    return parts


def _usual_order(language: str | None, region: str | None) -> str | None:
    if (locale := locale_of(language, region)) is None or (language in (None, "en") and region is None):
        return None
    pattern = re.sub("'[^']*'", "", locale.date_formats["short"].pattern).replace("L", "M").upper()
    return "".join(sorted("DMY", key=pattern.find))


def _numeric(plain: str, language: str | None, region: str | None, month_first: bool) -> Iterator[Candidate]:
    matches = []
    shown: dict[str, Counter[str]] = {separator: Counter() for separator in "./-"}
    usual = _usual_order(language, region)
    for match in _NUMERIC.finditer(plain):
        before = plain[max(0, match.start() - 2) : match.start()]
        if len(before) == 2 and before[0].isdigit() and before[1] == match[2]:
            continue  # the end of a longer chain, as of a version
        readings = _readings(match, usual)
        if len(readings) > 1:
            readings = _of_weekday(plain, match, readings, language or language_of(plain))
        if readings:
            matches.append((match, readings))
        if len(readings) == 1 and len(match[1]) < 4:
            shown[match[2]].update([*readings])
    pooled = sum(shown.values(), Counter[str]())
    for match, readings in matches:
        evidence = shown[match[2]] or pooled
        likely = next(iter(evidence)) if len(evidence) == 1 else usual
        order = likely or ("MDY" if month_first or (language == "en" and match[2] != ".") else "DMY")
        value = readings.get(order) or next(iter(readings.values()))
        several = len({date for other, date in readings.items() if other != "YMD" or order == "YMD"}) > 1
        # dots are European, unless the text is English
        certain = likely is not None or (match[2] == "." and language is None)
        yield Candidate(match.start(), match.end(), value, several and not certain)


def _of_weekday(plain: str, match: re.Match[str], readings: dict[str, str], language: str | None) -> dict[str, str]:
    """The readings that fall on the weekday that stands beside a date; all of them where there is none.

    Short names count in their own language only: "al" is Monday in Basque, but "to the" in Italian.
    """
    before = WORD.findall(plain[max(0, match.start() - 16) : match.start()])[-1:]
    after = WORD.findall(plain[match.end() : match.end() + 16])[:1]
    days = {day for word in before + after for day in _weekdays(language).get(_key(word), ())}
    fitting = {order: date for order, date in readings.items() if datetime.date.fromisoformat(date).weekday() in days}
    return fitting or readings


def _others(plain: str) -> Iterator[Candidate]:
    for match in _COMPACT.finditer(plain):
        value = iso_date(int(match[1]), int(match[2]), int(match[3]))
        if value and "1900" <= match[1] <= "2100":
            yield Candidate(*match.span(), value)
    for match in _WEEK.finditer(plain):
        try:
            yield Candidate(*match.span(), datetime.date.fromisoformat(match[0]).isoformat())
        except ValueError:
            continue
    for match in _EAST_ASIAN.finditer(plain):
        year = int(match[1]) if match[1] else _ERAS[match[2]] + (1 if match[3] == "元" else int(match[3]))
        if value := iso_date(year, int(match[4]), int(match[5])):
            yield Candidate(*match.span(), value)
    for match in _VIETNAMESE.finditer(plain):
        if value := iso_date(int(match[3]), int(match[2]), int(match[1])):
            yield Candidate(*match.span(), value)
    for match in _ROMAN_MONTH.finditer(plain):
        if value := iso_date(int(match[3]), _ROMAN.get(match[2], 0), int(match[1])):
            yield Candidate(*match.span(), value)


# --- names of months --------------------------------------------------------------------------------------------------


def _key(name: str) -> str:
    """Lower case without accents: "Août" and "aout" are one name."""
    if name.isascii():
        return name.lower()
    spread = unicodedata.normalize("NFKD", name.casefold())
    return "".join(char for char in spread if not unicodedata.combining(char))


def _names(locale: Locale, kind: str) -> Iterator[tuple[int, str]]:
    for context in ("format", "stand-alone"):
        for width in ("wide", "abbreviated"):
            for number, name in getattr(locale, kind)[context][width].items():
                last = re.split(r"[\s’']", name.strip(". "))[-1].strip(".׳")
                if WORD.fullmatch(last) and len(last) >= 2:
                    yield number, _key(last)
                    if locale.language == "he":
                        yield number, "ב" + last
                    if locale.language == "eu":
                        yield number, last + "ren"


@functools.cache
def month_names() -> dict[str, dict[str, int]]:
    """Names of months, full and short, with the month by language."""
    table: dict[str, dict[str, int]] = {}
    for language in LANGUAGES:
        for month, name in _names(Locale.parse(language), "months"):
            table.setdefault(name, {})[language] = month
    for name, month in _MORE_NAMES.items():
        table.setdefault(_key(name), {}).setdefault("", month)
    return table


@functools.cache
def _weekdays(language: str | None) -> dict[str, frozenset[int]]:
    table: dict[str, set[int]] = {}
    for each in LANGUAGES:
        for day, name in _names(Locale.parse(each), "days"):
            if language in (None, each) or len(name) > 3:
                table.setdefault(name, set()).add(day)
    return {name: frozenset(days) for name, days in table.items()}


def _named(plain: str, language: str | None) -> Iterator[Candidate]:
    table = month_names()
    for match in WORD.finditer(plain):
        by_language = table.get(_key(match[0]))
        if by_language is None:
            continue
        if len(match[0]) <= 3 and language and not by_language.keys() & {language, "en", ""}:
            continue  # a small word of this language, such as the French "dès"
        month = by_language.get(language or "") or next(iter(by_language.values()))
        several = language not in by_language and len(set(by_language.values())) > 1
        yield from _around(plain, match, month, several)


def _around(plain: str, name: re.Match[str], month: int, several: bool) -> Iterator[Candidate]:
    """The date that the name of a month is part of, and the first day of a range of days."""
    start, end = name.span()
    left, right = plain[max(0, start - _WINDOW) : start], plain[end : end + _WINDOW]
    offset = start - len(left)
    day, year = _DAY_LEFT.search(left), _YEAR_RIGHT.match(right)
    year_day = _YEAR_DAY_LEFT.search(left)
    day_year = _DAY_YEAR_RIGHT.match(right)
    if day and year and (value := iso_date(int(year[1]), month, int(day[1]))):
        yield Candidate(offset + day.start(1), end + year.end(1), value, several)
        first = _RANGE_LEFT.search(left[: day.start(1)])
        if first and int(first[1]) < int(day[1]):
            opened = iso_date(int(year[1]), month, int(first[1])) or ""
            yield Candidate(offset + first.start(1), offset + first.end(1), opened, several)
    elif day_year:
        full = _full_year(day_year[3] or day_year[4])
        values = [iso_date(full, month, int(day_year[group])) for group in (1, 2) if day_year[group]]
        if len(values) == 2 and values[0] and values[1]:
            yield Candidate(start, end + day_year.end(1), values[0], several)
            yield Candidate(end + day_year.start(2), end + day_year.end(), values[1], several)
        elif len(values) == 1 and values[0]:
            yield Candidate(start, end + day_year.end(), values[0], several)
    elif year_day and (value := iso_date(int(year_day[1]), month, int(year_day[2]))):
        yield Candidate(offset + year_day.start(1), end, value, several)
    elif (before := _YEAR_LEFT.search(left)) and (after := _DAY_RIGHT.match(right)):
        if value := iso_date(int(before[1]), month, int(after[1])):
            yield Candidate(offset + before.start(1), end + after.end(), value, several)
    elif (
        day
        and (short := _SHORT_YEAR_RIGHT.match(right))
        and (value := iso_date(_full_year(short[1]), month, int(day[1])))
    ):
        # "12 March 24" may go on with 24 of something
        spaced = short[0].strip(" .") == short[1] and " " in short[0]
        yield Candidate(offset + day.start(1), end + short.end(), value, several or spaced)


def is_weekday(word: str) -> bool:
    """Whether a word is the name of a day of the week, full or short."""
    return _key(word) in _weekdays(None)
