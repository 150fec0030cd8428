"""Numbers in a text, with whatever separators, and in words.

Notable here:
- 1.234 is read as the numbers of the text show that can be read in one way only (1.234,50; 1.234.567, unless more
  numbers are like 12.50), else as the language writes them, else as the weaker hints do (12,50), else as ambiguous
- a number within an identifier, a date or an address is a candidate too, as an integer that is marked as `inner`
- words are read by `text2num`, digits by one pass of a regular expression whose parts cannot be divided in two ways

Source: separators from Unicode CLDR, by `babel`.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from decimal import Context, Decimal
from typing import Final, NamedTuple

from babel.numbers import get_decimal_symbol, get_group_symbol, list_currencies

from pippin.data.text.language import language_of
from pippin.session.extraction.values_base import (
    Candidate,
    ascii_digits,
    locale_of,
    split_tag,
    without_overlaps,
)
from pippin.session.extraction.values_dates import find_dates
from pippin.session.extraction.values_number_words import SCALE, scale_of, words
from pippin.session.extraction.values_times import find_clear_times

MAX_DIGITS: Final = 100  # longer runs of digits are keys, not numbers
_BLANK: Final = "\u00a0\u2007\u2009\u202f "
_RUN: Final = re.compile(rf"\d+(?:(?:[.,'’٫٬]|[{_BLANK}](?=\d\d\d(?!\d)))\d+)*")
_CURRENCY: Final = r"(?:[A-Z]{0,3}[$¢£¤¥฿₠-⃀¢£¥₩]|[A-Z]{3}|R[ps]\.?|kr\.?|Fr\.|zł|Kč|лв\.?|руб\.?)"
_MINUS: Final = r"\-−–﹣"
_SIGN_LEFT: Final = re.compile(rf"(?:^|(?<=[^\w)\]}}.%°-]))([+{_MINUS}])(?:{_CURRENCY}[{_BLANK}]?)?$")
_CURRENCY_LEFT: Final = re.compile(rf"(?<![^\W\d_])({_CURRENCY})[{_BLANK}]?$")
_CURRENCY_RIGHT: Final = re.compile(rf"[{_BLANK}]?{_CURRENCY}(?!\w)")
_OPEN: Final = re.compile(rf"\((?:{_CURRENCY}[{_BLANK}]?)?$")
_CLOSE: Final = re.compile(rf"(?:[{_BLANK}]?{_CURRENCY})?\)")
_ATTACHED_LEFT: Final = re.compile(r"(?<!\w)(?:([A-Z]{3})|US|CA|AU|R|Rs|Rp|kr|Fr|CHF|x|X)$")
_ORDINAL: Final = re.compile(
    r"(?:st|nd|rd|th|er|ère|re|[eè]me|ième|e|de|nde|ste|\.?[ºª]|ᵉʳ|ᵗʰ|ⁿᵈ|ʳᵈ|ˢᵗ|ᵉ)(?!\w)", re.IGNORECASE
)
_EXPONENT: Final = re.compile(
    r"[eE]([+-]?\d{1,2})(?![\w.])|[ \u00a0]?[×x·][ \u00a0]?10(\^[-−]?\d{1,2}|[⁻⁰¹²³⁴-⁹]+)(?!\w)"
)
_SUPERSCRIPT: Final = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")
_UNIT: Final = re.compile(r"[^\W\d_]{1,7}[²³]?(?![\w]|[-/]\d)")
_CHAIN_LEFT: Final = re.compile(r"(?:\w[-–/@_’']|\d[.:]|[@_\\])$")
_CHAIN_RIGHT: Final = re.compile(r"[-–/:]\d|[-–][A-Z]|[_@\\]|\.[^\W\d_]{2}")
_RANGE_LEFT: Final = re.compile(rf"(?:^|(?<=[^\w.,:/+{_MINUS}]))(\d[\d.,]{{0,9}})[%€]?[-–—]$")
_RANGE_RIGHT: Final = re.compile(r"%?[-–—](\d[\d.,]{0,9})(?![\w:/]|[-–—]\d)")
_IDENTIFIERS: Final = (
    re.compile(r"\b(?:https?://|ftp://|www\.)[^\s<>\"]+"),
    re.compile(r"[\w.+-]{1,64}@[\w-]{1,64}\.[\w.-]{1,190}"),
    re.compile(r"\b[A-Z]{2}\d\d(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"),  # IBAN
    re.compile(r"(?<![\w+])\+\d{1,3}(?:[ ./-]?\(?\d{1,5}\)?){2,6}(?!\w)"),  # international telephone
    re.compile(r"(?<!\d)\(0\d{1,5}\)[ /-]?\d{2,8}(?:[ -]\d{2,6}){0,3}"),
    re.compile(r"(?<![\d.,])0\d{1,5}[ /-]{1,3}\d{2,8}(?:[ -]\d{2,6}){0,3}(?![\d.,])"),
)


class _Number(NamedTuple):
    """How a run of digits and separators can be read: as one number, or as either of two."""

    value: str
    other: str = ""  # the reading of its separator as one of thousands, where `value` reads it as that of decimals
    decimal: str = ""  # the decimal separator that it shows
    strong: bool = False  # and no other


def find_numbers(text: str, *, language: str | None = None, region: str | None = None) -> list[Candidate]:
    """All numbers in ``text``, in its order; see `pippin.session.extraction.values`."""
    language, region = split_tag(language, region)
    plain = ascii_digits(text)
    runs = list(_runs(plain, _blanks_group(language, region), _Spans(plain, language, region)))
    marks = _marks(runs, language, region)
    found = [each for run in runs for each in _candidates(plain, run, marks)]
    return without_overlaps([*found, *words(text, language or language_of(text))])


# --- what a run of digits is ------------------------------------------------------------------------------------------


class _Run(NamedTuple):
    start: int
    end: int
    number: _Number | None  # None: not one number, but integers with something between them
    inner: bool


class _Spans:
    """Where dates, times, addresses and the like are."""

    def __init__(self, plain: str, language: str | None, region: str | None) -> None:
        values = [*find_dates(plain, language=language, region=region), *find_clear_times(plain, language)]
        spans = [(each.start, each.end) for each in values]
        spans += [match.span() for pattern in _IDENTIFIERS for match in pattern.finditer(plain)]
        self.ends: list[int] = []
        self.starts: list[int] = []
        for start, end in sorted(spans):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(end, self.ends[-1])
            else:
                self.starts.append(start)
                self.ends.append(end)

    def touch(self, start: int, end: int) -> bool:
        place = bisect_right(self.ends, start)
        return place < len(self.starts) and self.starts[place] < end


def _blanks_group(language: str | None, region: str | None) -> bool:
    locale = locale_of(language, None) or locale_of(None, region)
    return locale is not None and get_group_symbol(locale) in _BLANK


def _runs(plain: str, blanks_group: bool, spans: _Spans) -> Iterator[_Run]:
    for match in _RUN.finditer(plain):
        for start, end in _split_lists(match, blanks_group):
            number = _parse(plain[start:end])
            # a list (1,2,3) is written like a chain, but its parts stand for themselves
            chained = number is None and re.search(r"[.٫٬]", plain[start:end]) is not None
            inner = chained or spans.touch(start, end) or _is_chained(plain, start, end)
            yield _Run(start, end, number, inner)


def _split_lists(match: re.Match[str], blanks_group: bool) -> Iterator[tuple[int, int]]:
    """The whole run, or its parts between blanks where these do not group one number."""
    run, start = match[0], match.start()
    parts = run.split(" ")
    listed = len(parts) > 1 and not blanks_group and len(parts[0]) == 3 and parts[-1].isdigit()
    if len(parts) == 1 or (not listed and _parse(run) is not None):
        yield match.span()
        return
    for part in parts:
        yield start, start + len(part)
        start += len(part) + 1


def _parse(run: str) -> _Number | None:
    if len(run) > 2 * MAX_DIGITS:
        return None
    groups, marks = re.split(r"\D", run), re.findall(r"\D", re.sub(rf"[{_BLANK}]", " ", run).replace("’", "'"))
    if sum(map(len, groups)) > MAX_DIGITS:
        return None
    whole, last = "".join(groups[:-1]), groups[-1]
    kinds, mark = set(marks), marks[-1] if marks else ""
    if not marks:
        return _Number(_plain(last))
    if len(kinds) == 2 and mark in ".,٫" and marks.count(mark) == 1 and _grouped(groups[:-1], marks[0]):
        return _Number(_plain(whole, last), decimal=mark, strong=True)
    if len(kinds) != 1:
        return None
    if len(marks) == 1 and mark in ".,٫":
        number = _Number(_plain(whole, last), decimal=mark)
        # ٫ is the decimal separator of Arabic and nothing else
        return number._replace(other=_plain(whole + last)) if mark != "٫" and _grouped(groups, mark) else number
    if not _grouped(groups, mark):
        return None
    return _Number(_plain(whole + last), decimal={".": ",", ",": "."}.get(mark, ""), strong=True)


def _grouped(groups: list[str], mark: str) -> bool:
    """Whether digits stand in groups of three, or with commas as in India: 12,34,567."""
    first, *middle, last = groups if len(groups) > 1 else [*groups, ""]
    if not last or first.startswith("0") or len(last) != 3:
        return False
    by_three = len(first) <= 3 and all(len(group) == 3 for group in middle)
    return by_three or (mark == "," and len(first) <= 2 and bool(middle) and all(len(group) == 2 for group in middle))


def _plain(whole: str, fraction: str = "") -> str:
    whole = whole.lstrip("0") or "0"
    return f"{whole}.{fraction}" if fraction else whole


# --- what surrounds it ------------------------------------------------------------------------------------------------


@functools.cache
def _currencies() -> frozenset[str]:
    return frozenset(list_currencies())


def _is_chained(plain: str, start: int, end: int) -> bool:
    """Whether digits are part of something longer that is not a number with its unit."""
    left, right = plain[max(0, start - 14) : start], plain[end : end + 14]
    if left[-1:].isalpha():
        code = _ATTACHED_LEFT.search(left)
        if code is None or (code[1] and code[1] not in _currencies()):
            return True
    if right[:1].isalpha() and not (_UNIT.match(right) or _EXPONENT.match(right) or _ORDINAL.match(right)):
        return True
    if _CHAIN_LEFT.search(left):
        before = _RANGE_LEFT.search(left)
        if before is None or not _ascending(before[1], plain[start:end]) or re.match(r"[-–/:.]\w", right):
            return True
    if _CHAIN_RIGHT.match(right):
        after = _RANGE_RIGHT.match(right)
        return after is None or not _ascending(plain[start:end], after[1])
    return False


def _ascending(low: str, high: str) -> bool:
    """Whether two numbers are a range, not parts of a telephone number: 5-10, 1.5–2, but not 555-0123."""
    values = [
        float(number.rstrip(".,").replace(",", ".")) if _DECIMAL.fullmatch(number) else -1 for number in (low, high)
    ]
    return 0 <= values[0] < values[1]


_DECIMAL: Final = re.compile(r"(?:0|[1-9]\d{0,8})(?:[.,]\d{1,6})?[.,]?")


class _Marks(NamedTuple):
    """Decimal separator that a text uses, as far as is known."""

    decimal: str | None
    group: str | None
    certain: bool


def _marks(runs: list[_Run], language: str | None, region: str | None) -> _Marks:
    both: Counter[str] = Counter()  # 1.234,50
    grouped: Counter[str] = Counter()  # 1.234.567, which may also be the number of a document
    weak: Counter[str] = Counter()  # 12,50
    for run in runs:
        number = run.number
        if number and number.decimal in (".", ",") and not number.other and not run.inner:
            (weak if not number.strong else both if "." in number.value else grouped)[number.decimal] += 1
    strong = both or Counter({mark: n for mark, n in grouped.items() if n >= weak["," if mark == "." else "."]})
    if len(strong) == 1:
        return _Marks(next(iter(strong)), None, True)
    locale = locale_of(language, region) if language else locale_of(None, region)
    if language and region and (locale is None or locale.language != language):
        locale = locale_of(language, None)
    if locale is not None:
        decimal, group = get_decimal_symbol(locale), get_group_symbol(locale)
        return _Marks(decimal, group, not strong and not set(weak) - {decimal})
    return _Marks(next(iter(weak)), None, True) if len(weak) == 1 and not strong else _Marks(None, None, False)


def _candidates(plain: str, run: _Run, marks: _Marks) -> Iterator[Candidate]:
    start, end, number, inner = run
    if inner or number is None:
        for digits in re.finditer(r"\d+", plain[start:end]):
            if len(digits[0]) <= MAX_DIGITS:
                yield Candidate(start + digits.start(), start + digits.end(), _plain(digits[0]), False, inner)
        return
    left, right = plain[max(0, start - 14) : start], plain[end : end + 24]
    exponent = _EXPONENT.match(right)
    if _ORDINAL.match(right) and not exponent:
        return
    money = _CURRENCY_LEFT.search(left) or _CURRENCY_RIGHT.match(right)
    value, ambiguous = _read(number, marks, money is not None)
    if exponent:
        power = (exponent[1] or exponent[2].lstrip("^")).translate(_SUPERSCRIPT)
        if re.fullmatch(r"-?\d{1,2}|\+\d{1,2}", power):
            value, end = _times_ten(value, int(power)), end + exponent.end()
    elif scale := SCALE.match(right):
        power_of_ten, unsure = scale_of(scale, money is not None)
        if power_of_ten:
            value, end, ambiguous = _times_ten(value, power_of_ten), end + scale.end(), ambiguous or unsure
    opened, closed = _OPEN.search(left), _CLOSE.match(plain[end : end + 14])
    if opened and closed and (money or "," in plain[start:end] or re.search(r"\.\d\d$", plain[start:end])):
        yield Candidate(
            start - len(left) + opened.start(), end + closed.end(), _negative(value), ambiguous or not money
        )
    elif sign := _SIGN_LEFT.search(left):
        signed = value if sign[1] == "+" else _negative(value)
        yield Candidate(start - len(left) + sign.start(1), end, signed, ambiguous)
    else:
        yield Candidate(start, end, value, ambiguous)


def _read(number: _Number, marks: _Marks, money: bool) -> tuple[str, bool]:
    """The likeliest value, and whether it could be another."""
    if not number.other:
        return number.value, False
    if marks.decimal is None:
        # 1,234 is rarely a decimal, nor are amounts of money with three places
        return (number.other if money or number.decimal == "," else number.value), True
    decimal = number.decimal == marks.decimal
    known = decimal or marks.group is None or marks.group == number.decimal
    return (number.value if decimal else number.other), not (marks.certain and known)


def _negative(value: str) -> str:
    return f"-{value}" if value.strip("0.") else value


def _times_ten(value: str, power: int) -> str:
    scaled = Decimal(value).scaleb(power, Context(prec=2 * MAX_DIGITS + 100))
    # an integer of Python: `quantize` refuses more digits than the context of the caller has
    return str(int(scaled)) if power > 0 and scaled == scaled.to_integral_value() else format(scaled, "f")
