"""Dates, times and durations in a text, in the spellings of many languages.

Notable here:
- whether 03/04/2024 is in March or in April is decided by another date of the text where one shows it (13/04/2024),
  else by region and language; it is marked as ambiguous
- a date has a year: a day without one is not a value

Source: names of months from Unicode CLDR, by `babel`.
"""

from __future__ import annotations

import datetime
import functools
import re
import unicodedata
from typing import Final

from babel import Locale

from pippin.session.extraction.candidates import Candidate

_LANGUAGES: Final = (
    "en", "de", "fr", "es", "it", "pt", "nl", "pl", "sv", "da", "nb", "fi", "cs", "sk", "ru", "uk", "tr", "el", "ro",
    "hu", "ca",
)  # fmt: skip
_MONTH_FIRST: Final = frozenset(("US", "PH", "FM", "MH", "PW"))
_MORE: Final = {"sept": 9, "okt": 10, "dez": 12, "mrz": 3, "märz": 3, "maerz": 3, "jän": 1, "jänner": 1, "set": 9}
_ORDINAL: Final = r"(?:st|nd|rd|th|er|re|º|ª|°|\.)?"
_LINK: Final = r"(?:\s*(?:de|del|of|di|d['’])\s*|\s*[-/.,]?\s*)"
_YEAR: Final = r"(\d{4}|['’]?\d{2})(?![\d:]|[.,]\d)"
_NUMERIC: Final = re.compile(r"(?<![\d./-])(\d{1,2})([./-])\s?(\d{1,2})\2\s?(\d{4}|\d{2})(?![\d]|[./-]\d)")
_YEAR_FIRST: Final = re.compile(r"(?<![\d./-])(\d{4})([-./])\s?(\d{1,2})\2\s?(\d{1,2})(?!\d|[./-]\d)")
_EAST_ASIAN: Final = re.compile(r"(\d{4})\s?[年년]\s?(\d{1,2})\s?[月월]\s?(\d{1,2})\s?[日일]")
_COMPACT: Final = re.compile(r"(?<![\w.,-])((?:19|20)\d\d)(0[1-9]|1[0-2])([0-2]\d|3[01])(?![\w])")
_TIME: Final = re.compile(
    r"(?<![\d:.,])([01]?\d|2[0-3])(?:\s?([:hH.])\s?([0-5]\d)(?::([0-5]\d))?)?"
    r"(?:[ \u00a0\u202f]?([ap]\.m\.|(?:[ap]m|uhr|h|heures?|horas?|ore)\b))?(?![\d:])",
    re.IGNORECASE,
)
_ZONE: Final = re.compile(r"\s?(Z|UTC|GMT|[+-](?:0\d|1[0-4]):?[0-5]\d)(?!\w)")
_BETWEEN: Final = re.compile(
    r"[\s,;T|·-]*(?:um|at|à|a las|a la|alle ore|alle|ore|as|às|om|kl\.?|von|from|de|dalle)?[\s:]*", re.I
)
_UNITS: Final = {
    "Y": "years? yrs? jahre? jahren ans? années? años? anni anno",
    "M": "months? monate? monaten mois meses mes mesi mese",
    "W": "weeks? wochen? semaines? semanas? settimane settimana",
    "D": "days? tagen? tage? jours? días? dias? giorni giorno",
    "H": "hours? hrs? h stunden? std heures? horas? ore ora",
    "m": "minutes? mins? minuten? minutos? minuti minuto",
    "S": "seconds? secs? sekunden? sek secondes? segundos? secondi secondo",
}


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name).lower().strip(". ")


@functools.cache
def _months() -> tuple[dict[str, int], str]:
    """Months by their names and abbreviations, and an expression for any of them."""
    names = dict(_MORE)
    for language in _LANGUAGES:
        months = Locale(language).months
        for context in ("format", "stand-alone"):
            for width in ("wide", "abbreviated"):
                for number, name in months[context][width].items():
                    if len(_plain(name)) > 2:
                        names.setdefault(_plain(name), number)
    listed = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return names, rf"(?<![^\W\d_])({listed})(?![^\W\d_])\.?"


@functools.cache
def _named() -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Dates with the name of a month: day first, month first, year first."""
    month = _months()[1]
    day = rf"(?<![\d.,/])(\d{{1,2}}){_ORDINAL}"
    return (
        re.compile(rf"{day}{_LINK}{month}{_LINK}{_YEAR}", re.I),
        re.compile(rf"{month}\s*(\d{{1,2}}){_ORDINAL}\s*,?\s*(\d{{4}})(?!\d)", re.I),
        re.compile(rf"(?<!\d)(\d{{4}})[ ,.-]{{0,2}}{month}[ ,.-]{{0,2}}(\d{{1,2}}){_ORDINAL}(?!\d)", re.I),
    )


def find_dates(text: str, *, language: str | None = None, region: str | None = None) -> list[Candidate]:
    """The dates in a text, in its order, none within another.

    Args:
        text: the text.
        language: its language, where the text does not show what comes first in 03/04/2024.
        region: a country such as "US", for the same.

    >>> [each.value for each in find_dates("From 12. März 2024 to 3 Apr '24, 04/13/2024 or 03/04/2024")]
    ['2024-03-12', '2024-04-03', '2024-04-13', '2024-03-04']
    """
    months = _months()[0]
    day_first, month_first, year_first = _named()
    found: list[Candidate] = []

    def add(match: re.Match[str], year: str, month: int, day: int, *, ambiguous: bool = False) -> None:
        try:
            value = datetime.date(_full_year(year), month, day)
        except ValueError:
            return
        found.append(Candidate(match.start(), match.end(), value.isoformat(), ambiguous))

    for match in day_first.finditer(text):
        add(match, match[3], months[_plain(match[2])], int(match[1]))
    for match in month_first.finditer(text):
        add(match, match[3], months[_plain(match[1])], int(match[2]))
    for match in year_first.finditer(text):
        add(match, match[1], months[_plain(match[2])], int(match[3]))
    for match in (*_EAST_ASIAN.finditer(text), *_COMPACT.finditer(text)):
        add(match, match[1], int(match[2]), int(match[3]))
    for match in _YEAR_FIRST.finditer(text):
        add(match, match[1], int(match[3]), int(match[4]))
    numeric = list(_NUMERIC.finditer(text))
    is_day_first, is_shown = _order([(int(m[1]), int(m[3])) for m in numeric], language, region)
    for match in numeric:
        first, second = int(match[1]), int(match[3])
        dotted = match[2] == "."
        either = not dotted and not is_shown and first <= 12 and second <= 12 and first != second
        swap = not (is_day_first or dotted) if first <= 12 and second <= 12 else second > 12
        day, month = (second, first) if swap else (first, second)
        add(match, match[4], month, day, ambiguous=either)
    return _longest(found)


def _order(pairs: list[tuple[int, int]], language: str | None, region: str | None) -> tuple[bool, bool]:
    """Whether the day comes first in numeric dates, and whether one of them shows it."""
    votes = sum((first > 12) - (second > 12) for first, second in pairs)
    if votes:
        return votes > 0, True
    if region is not None:
        return region.upper() not in _MONTH_FIRST, False
    return (language or "en").partition("-")[0] != "en", False


def _full_year(year: str) -> int:
    digits = int(year.strip("'’"))
    return digits if digits > 99 else digits + (2000 if digits < 69 else 1900)


def _longest(found: list[Candidate]) -> list[Candidate]:
    """In the order of the text, without those that overlap a longer one."""
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda c: (c.start - c.end, c.start)):
        if all(each.end <= other.start or each.start >= other.end for other in kept):
            kept.append(each)
    return sorted(kept, key=lambda c: c.start)


def find_times(text: str, *, language: str | None = None, region: str | None = None) -> list[Candidate]:
    """The times of day in a text; arguments as `find_dates`.

    >>> [each.value for each in find_times("Open 9 am - 5.30 pm, in Köln 14 Uhr, à 18h15", language="en")]
    ['09:00:00', '17:30:00', '14:00:00', '18:15:00']
    """
    dates = find_dates(text, language=language, region=region)
    found = []
    for match in _TIME.finditer(text):
        hour, mark, minute, second, suffix = match.groups()
        said = (suffix or "").lower().replace(".", "")
        if (minute is None and not said) or (mark == "." and len(hour) < 2 and not said):
            continue
        if minute is None and said == "h" and language in ("en", None):
            continue  # a number of hours
        if any(date.start <= match.start() < date.end for date in dates) or (said in ("am", "pm") and int(hour) > 12):
            continue
        number = int(hour) % 12 + 12 * (said == "pm") if said in ("am", "pm") else int(hour)
        found.append(Candidate(match.start(), match.end(), f"{number:02}:{minute or '00'}:{second or '00'}"))
    return found


def find_datetimes(text: str, *, language: str | None = None, region: str | None = None) -> list[Candidate]:
    """Dates with a time beside them, and dates alone, as midnight; arguments as `find_dates`.

    >>> [each.value for each in find_datetimes("On 12 March 2024 at 14:30, or 2024-03-13T09:00:00+01:00")]
    ['2024-03-12T14:30:00', '2024-03-13T09:00:00+01:00']
    """
    dates = find_dates(text, language=language, region=region)
    times = find_times(text, language=language, region=region)
    found = []
    for date in dates:
        after = next((time for time in times if time.start >= date.end), None)
        if after is not None and _BETWEEN.fullmatch(text, date.end, after.start):
            zone = _ZONE.match(text, after.end)
            end = zone.end() if zone else after.end
            found.append(Candidate(date.start, end, f"{date.value}T{after.value}{_offset(zone)}", date.ambiguous))
            continue
        found.append(Candidate(date.start, date.end, f"{date.value}T00:00:00", date.ambiguous))
    return found


def _offset(zone: re.Match[str] | None) -> str:
    if zone is None:
        return ""
    name = zone[1]
    return "Z" if name[0] in "ZUG" else f"{name[:3]}:{name[-2:]}"


@functools.cache
def _amounts() -> re.Pattern[str]:
    units = "|".join(f"(?P<{code}>(?:{'|'.join(names.split())})(?![^\\W\\d_]))" for code, names in _UNITS.items())
    return re.compile(rf"(?<![\w.,])(\d{{1,6}}(?:[.,]\d{{1,3}})?)[\s-]?(?:{units})(?!\d)\.?", re.IGNORECASE)


def find_durations(text: str, *, language: str | None = None, region: str | None = None) -> list[Candidate]:
    """The durations in a text; arguments as `find_dates`.

    >>> [each.value for each in find_durations("Takes 1 hour 30 minutes; 2.5 Stunden; 14 days")]
    ['PT1H30M', 'PT2H30M', 'P14D']
    """
    found: list[Candidate] = []
    parts: list[tuple[re.Match[str], str]] = []
    for match in _amounts().finditer(text):
        code = str(match.lastgroup)
        near = parts and re.fullmatch(r"\s*(?:,|and|und|et|y|e)?\s*", text[parts[-1][0].end() : match.start()])
        if parts and not (near and list(_UNITS).index(code) > list(_UNITS).index(parts[-1][1])):
            found += _duration(parts)
            parts = []
        parts.append((match, code))
    return found + (_duration(parts) if parts else [])


def _duration(parts: list[tuple[re.Match[str], str]]) -> list[Candidate]:
    days = seconds = 0.0
    whole = []
    for match, code in parts:
        amount = float(match[1].replace(",", "."))
        if code in "YM":
            if amount != int(amount):
                return []
            whole.append(f"{int(amount)}{code}")
        elif code in "WD":
            days += amount * (7 if code == "W" else 1)
        else:
            seconds += amount * {"H": 3600, "m": 60, "S": 1}[code]
    seconds += (days - int(days)) * 86400
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    clock = "".join(f"{n}{unit}" for n, unit in ((hours, "H"), (minutes, "M"), (left, "S")) if n)
    dated = "".join([*whole, *([f"{int(days)}D"] if int(days) else [])])
    if not dated and not clock:
        dated = "0D"
    return [Candidate(parts[0][0].start(), parts[-1][0].end(), f"P{dated}{'T' if clock else ''}{clock}")]
