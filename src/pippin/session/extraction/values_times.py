"""Times of day, and dates with a time.

Notable here:
- an offset belongs to a time only directly behind it; names of zones are the few that have one meaning
- a number alone (14) is a time only with a word that says so: 2 pm, 14 Uhr, kl. 14
- 18.30 without such a word is an ambiguous time, in languages that write times with a point, and a number as well

Source: offsets of American zones from RFC 2822, section 4.3.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from pippin.data.text.language import language_of
from pippin.session.extraction.values_base import (
    WORD,
    Candidate,
    ascii_digits,
    split_tag,
    without_overlaps,
)
from pippin.session.extraction.values_dates import find_dates, is_weekday

_GAP: Final = "[ \u00a0\u202f]"
_HALF: Final = rf"(?:{_GAP}?(?P<half>[ap])(?:\.{_GAP}?m\.?|m)(?!\w))"
_OFFSET: Final = r"(?:0\d|1[0-4])(?::?[0-5]\d)?"
_ZONE: Final = re.compile(
    rf"{_GAP}?(Z|CES?T|[ECMP][SD]T|(?:UTC|GMT)(?:[+\-−](?:{_OFFSET}|\d))?|[+\-−]{_OFFSET})(?![\w:])"
)
_ZONES: Final = {
    "EST": "-05:00", "EDT": "-04:00", "CST": "-06:00", "CDT": "-05:00", "MST": "-07:00", "MDT": "-06:00",
    "PST": "-08:00", "PDT": "-07:00", "CET": "+01:00", "CEST": "+02:00",
}  # fmt: skip
_HOUR: Final = r"(?P<hour>[01]?\d|2[0-4])"
_MINUTE: Final = r"(?P<minute>[0-5]\d)"
_FREE: Final = r"(?<![\w:.,])(?<!\d[-/])"
_O_CLOCK: Final = "o['’]clock|Uhr|heures?|horas?|hrs?|uur|godz"
_DAYPARTS: Final = {"午前": "a", "午後": "p", "上午": "a", "下午": "p", "晚上": "p", "오전": "a", "오후": "p"}
_DAYPART: Final = rf"(?P<part>{'|'.join(_DAYPARTS)}){_GAP}?"
_PATTERNS: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # 14:30, 14:30:05.5, 2:30 p.m., T14:30Z
        rf"(?:(?<![\w:.,])|(?<=\dT)|(?<=[12]\d\d\d:)|{_DAYPART}){_HOUR}:{_MINUTE}"
        rf"(?::(?P<second>[0-5]\d|60)(?:[.,](?P<fraction>\d{{1,9}}))?)?(?![\d:]|[.,]\d)(?:{_GAP}Uhr)?{_HALF}?",
        rf"(?<=\dT){_HOUR}{_MINUTE}(?P<second>[0-5]\d)?(?=Z|(?!\w))",  # the basic format: 20240312T143000Z
        rf"{_FREE}{_HOUR}(?:\.{_MINUTE})?{_HALF}",  # 2 pm
        rf"{_FREE}{_HOUR}(?:\.{_MINUTE})?{_GAP}?(?:{_O_CLOCK})(?!\w)(?:{_GAP}(?P<more>[0-5]\d))?(?!\w)",
        rf"{_FREE}{_HOUR}{_GAP}?h(?:{_GAP}?{_MINUTE})?(?:{_GAP}?(?:min|m))?(?!\w)",  # 14h30
        rf"(?<!\w)(?:kl\.?|klo|ore|alle|om|o godz\.){_GAP}{_HOUR}(?:[.:]{_MINUTE})?(?![\w:]|[.,]\d)",  # kl. 14.30
        rf"(?:{_DAYPART})?(?<!\d){_HOUR}{_GAP}?[时時点點시](?:{_GAP}?(?P<minute>[0-5]?\d)[分분]|(?P<thirty>半|반))?"
        rf"(?:{_GAP}?(?P<second>[0-5]?\d)[秒초])?",
    )
)
_NAMED: Final = {
    12: "noon midday mittag mittags midi mediodía mezzogiorno meio-dia",
    0: "midnight mitternacht minuit medianoche mezzanotte meia-noite",
}
_WORDS: Final = {word: hour for hour, words in _NAMED.items() for word in words.split()}
_WORD: Final = re.compile(rf"(?<![\w-])(?:{'|'.join(_WORDS)})(?![\w-])", re.IGNORECASE)

_DOTTED_LANGUAGES: Final = frozenset(["da", "de", "fi", "id", "it", "nb", "nl", "nn", "sv"])
_DOTTED: Final = re.compile(
    rf"(?:(?<![\w.,:/$€£¥+\-−–])|(?<=\d[-−–])){_HOUR}\.{_MINUTE}(?![\w:/%$€£¥]|[.,]\d)"
    rf"(?!{_GAP}?(?:[$€£¥%°]|(?:[A-Z]{{3}}|[cmk]?m[²³]?|[mk]?g|[mcd]?l|kr|Euro)(?!\w)))"
    r"(?<!\.0[1-9](?=\.))(?<!\.1[0-2](?=\.))"  # 18.03. is a date
)

_TO_TIME: Final = re.compile(
    r"[T:]|[\s,;|·()–-]{0,4}"
    r"(?:(?:at|um|à|às|a las?|alle(?: ore)?|ore|om|kl\.?|klo|o(?: godz\.)?|в|ab|from|von|de)\s)?\s?",
    re.IGNORECASE,
)
_TO_DATE: Final = re.compile(
    r"[\s,;|·()–-]{0,4}(?:(?:on|am|den|le|el|il|em|op|of|du|del|de|dne|dnia)\s)?\s?", re.IGNORECASE
)


def find_times(text: str, *, language: str | None = None, region: str | None = None) -> list[Candidate]:
    """All times of day in ``text``, in its order; see `pippin.session.extraction.values`."""
    plain = ascii_digits(text)
    language = split_tag(language, region)[0] or language_of(plain)
    found = find_clear_times(plain, language)
    if language in _DOTTED_LANGUAGES:
        found += (replace(each, ambiguous=True) for each in _matches(_DOTTED, plain, False))
    return without_overlaps(found)


def find_clear_times(plain: str, language: str | None) -> list[Candidate]:
    """Times in a text with ASCII digits that cannot be numbers."""
    english = (language or language_of(plain)) == "en"
    found = [each for pattern in _PATTERNS for each in _matches(pattern, plain, english)]
    found += [Candidate(*match.span(), f"{_WORDS[match[0].lower()]:02}:00:00") for match in _WORD.finditer(plain)]
    return without_overlaps(found)


def _matches(pattern: re.Pattern[str], plain: str, english: bool) -> Iterator[Candidate]:
    for match in pattern.finditer(plain):
        group = match.groupdict()
        half = group.get("half") or _DAYPARTS.get(group.get("part") or "")
        hour, minute = int(group["hour"]), int(group.get("minute") or group.get("more") or 0)
        if half:
            if not 1 <= hour <= 12 and not (hour == 0 and group.get("part")):
                continue
            hour = hour % 12 + (12 if half.lower() == "p" else 0)
        minute = 30 if group.get("thirty") else minute
        if hour == 24 and minute:
            continue
        zone, end = _offset(match)
        # 24:00 is the end of a day; Python's times have none
        value = datetime.time(hour % 24, minute, min(59, int(group.get("second") or 0)), _microseconds(group))
        start = match.start("part") if group.get("part") else match.start("hour")
        unsure = english and not half and 1 <= hour <= 11 and not match["hour"].startswith("0")
        yield Candidate(start, end, value.isoformat() + zone, unsure or plain[end - 1] in "hH")


def _microseconds(group: dict[str, str | None]) -> int:
    return int(((group.get("fraction") or "") + "000000")[:6])


def _offset(match: re.Match[str]) -> tuple[str, int]:
    """The offset that is written behind a time, as +01:00, and where it ends; "" where there is none."""
    end = match.end()
    behind = _ZONE.match(match.string, end)
    if behind is None:
        return "", end
    zone = behind[1].removeprefix("UTC").removeprefix("GMT").replace("−", "-").replace(":", "")
    if zone in ("", "Z"):
        return "+00:00", behind.end()
    if zone in _ZONES:
        return _ZONES[zone], behind.end()
    exact = match.groupdict().get("second") or match.string[match.start() - 1 : match.start()] == "T"
    if behind[1][0] in "-−" and not exact:
        return "", end  # from one time to another: 08:00-12:00
    return f"{zone[0]}{zone[1:3]:0>2}:{zone[3:] or '00'}", behind.end()


def find_datetimes(text: str, *, language: str | None = None, region: str | None = None) -> list[Candidate]:
    """All dates with a time in ``text``, in its order; see `pippin.session.extraction.values`."""
    dates = find_dates(text, language=language, region=region)
    times = find_times(text, language=language, region=region)
    parts = sorted(
        [(each.start, True, each) for each in dates] + [(each.start, False, each) for each in times], key=_place
    )
    found: list[Candidate] = []
    place = 0
    while place + 1 < len(parts):
        (_, dated, first), (_, next_dated, second) = parts[place : place + 2]
        if dated != next_dated and _joined(text[first.end : second.start], dated):
            date, time = (first, second) if dated else (second, first)
            found.append(
                Candidate(first.start, second.end, _together(date, time, text), date.ambiguous or time.ambiguous)
            )
            place += 1
        place += 1
    return found


def _place(part: tuple[int, bool, Candidate]) -> tuple[int, bool]:
    return part[0], part[1]


def _joined(between: str, date_first: bool) -> bool:
    """Whether what stands between a date and a time only joins them; it may name the weekday."""
    if len(between) > 32:
        return False
    weekdays = [word[0] for word in WORD.finditer(between) if is_weekday(word[0])]
    if weekdays:
        between = re.sub(r"[\s.,]+", " ", between.replace(weekdays[0], "", 1))
    return (_TO_TIME if date_first else _TO_DATE).fullmatch(between) is not None


def _together(date: Candidate, time: Candidate, text: str) -> str:
    day = datetime.date.fromisoformat(date.value)
    if ascii_digits(text[time.start : time.end]).startswith("24") and day < datetime.date.max:
        day += datetime.timedelta(days=1)
    return f"{day.isoformat()}T{time.value}"
