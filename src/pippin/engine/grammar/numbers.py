r"""Numbers between bounds, as regular expressions over their decimal notation.

Notable here:
- exact at any size: bounds are decimals, compared digit by digit, never through a 64-bit integer
- a number has one sign and no padding (`-5`, not `-05`), so two one-sided languages intersect to a range
- the text is parsed as a float later: bounds are moved inward to the nearest float, so that rounding cannot turn
  `0.0999…` into `exclusiveMaximum: 0.1`
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Final

DIGITS: Final = 18
"""Maximum digits of a number before and after its point where its bounds need no more.

So a model cannot write digits forever, and every such integer fits a signed 64-bit integer.
"""

FRACTIONAL: Final = r"-?(?:0|[1-9][0-9]{0,9})\x{2E}[0-9]{0,4}[1-9]"
"""Numbers that are no integers, with so few digits that none becomes one when it is read as a float."""

SHORTEST: Final = r"(?:0|-?(?:0\x{2E}[0-9]*[1-9]|[1-9][0-9]*(?:\x{2E}[0-9]*[1-9])?))"
"""One spelling for each number: no exponent, no zeros at the end, and no -0."""

FEW_DIGITS: Final = r"-?(?:[0-9]\x{2E}?){1,15}"
"""Numbers of which no two are the same float."""

MAX_DIGITS = 400
"""Most digits of a bound before or after its point; those of floats have fewer."""


def notation(before: int, after: int, *, integer: bool, scientific: bool = False) -> str:
    """Notations with at most ``before`` digits before the point and ``after`` behind it; all are finite floats.

    >>> notation(3, 2, integer=True)
    '(?:0|-?[1-9][0-9]{0,2})'
    """
    if integer:
        return rf"(?:0|-?[1-9][0-9]{{0,{before - 1}}})"
    decimal = rf"-?(?:0|[1-9][0-9]{{0,{before - 1}}})(?:\x{{2E}}[0-9]{{1,{after}}})?"
    exponential = rf"-?[0-9](?:\x{{2E}}[0-9]{{1,{after}}})?[eE][+-]?[0-9]{{1,2}}"
    return f"(?:{decimal}|{exponential})" if scientific else decimal


def digits_needed(bound: Fraction) -> tuple[int, int]:
    """The digits before and after its point that a number near ``bound`` needs, at least `DIGITS`.

    >>> digits_needed(Fraction(5)), digits_needed(Fraction("1e-30"))
    ((18, 18), (18, 32))
    """
    after = next((k for k in range(400) if 10**k % bound.denominator == 0), 0)
    return max(DIGITS, len(str(abs(int(bound)))) + 1), max(DIGITS, after + 2)


def at_least(bound: Decimal) -> str:
    """Decimal notations of the numbers >= ``bound``.

    >>> at_least(Decimal(7))
    '(?:(?:[8-9]|[1-9][0-9]{1,})(?:\\\\x{2E}[0-9]+)?|7(?:\\\\x{2E}[0-9]+)?)'
    """
    if bound <= 0:
        return f"(?:-{_at_most(-bound)}|{_ANY})"
    return _at_least(bound)


def at_most(bound: Decimal) -> str:
    """Decimal notations of the numbers <= ``bound``."""
    if bound >= 0:
        return f"(?:-{_ANY}|{_at_most(bound)})"
    return f"-{_at_least(-bound)}"


def inner_float(bound: Fraction, *, below: bool, exclusive: bool) -> Decimal:
    """The float nearest to ``bound`` on its inner side, as a decimal that bounds the notations which round to it.

    Args:
        bound: the declared bound, exactly.
        below: whether the numbers lie below it (it is a maximum).
        exclusive: whether the bound itself is out.

    >>> inner_float(Fraction(Decimal("0.1")), below=True, exclusive=True)
    Decimal('0.09999999999999999')
    """
    step = -math.inf if below else math.inf
    try:
        value = float(bound)
    except OverflowError:
        value = math.inf if bound > 0 else -math.inf
    if math.isinf(value):
        value = math.nextafter(value, 0.0)

    def outside(value: float) -> bool:
        exact = Fraction(repr(value)) if abs(value) < 2**53 else Fraction(value)
        return (exact > bound if below else exact < bound) or (exclusive and exact == bound)

    while math.isfinite(value) and outside(value):
        value = math.nextafter(value, step)
    return Decimal(repr(value)) if abs(value) < 2**53 or math.isinf(value) else Decimal(value)


def inner_integer(bound: Fraction, *, below: bool, exclusive: bool) -> int:
    """The integer nearest to ``bound`` on its inner side.

    >>> inner_integer(Fraction(5), below=True, exclusive=True)
    4
    """
    nearest = math.floor(bound) if below else math.ceil(bound)
    return nearest + (0 if not exclusive or nearest != bound else -1 if below else 1)


def inner(bound: Fraction, *, below: bool, exclusive: bool, integer: bool) -> Decimal | None:
    """The bound for the notation, from `inner_integer` or `inner_float`; None if no float is within it."""
    if integer:
        return Decimal(inner_integer(bound, below=below, exclusive=exclusive))
    value = inner_float(bound, below=below, exclusive=exclusive)
    return value if value.is_finite() else None


def multiples(step: Fraction, *, integer: bool) -> str | None:
    """Decimal notations of the multiples of ``step``, with padding; None if the last digits do not determine them.

    >>> multiples(Fraction(5), integer=True), multiples(Fraction(3), integer=True)
    ('-?(?:(?:[0-9]*(?:0|5)))', None)
    """
    if integer:
        step = Fraction(step.numerator)  # an integer is a multiple of a/b, in lowest terms, iff it is one of a
    places = next((k for k in range(13) if 10**k % step.denominator == 0), None)
    if places is None or next((k for k in range(5) if 10**k % step.numerator == 0), None) is None:
        return None
    forms = []
    for digits in range(places + 1):
        # the number without its point is a multiple of `unit`, which its last `width` digits determine
        unit = Fraction(step * 10**digits).numerator
        width = next(k for k in range(20) if 10**k % unit == 0)
        forms.append(_ending(unit, width, digits) + ("0*" if 0 < digits == places else ""))
    return "-?(?:" + "|".join(forms) + ")"


def _ending(unit: int, width: int, digits: int) -> str:
    """Digits with a point before the last ``digits``, a multiple of ``unit``, which divides 10^width."""
    if width <= digits:
        ends = "|".join(str(value).zfill(width) for value in range(0, 10**width, unit)) if width else ""
        before = rf"[0-9]+\x{{2E}}[0-9]{{{digits - width}}}" if digits else "[0-9]+"
        return f"(?:{before}(?:{ends}))" if ends else f"(?:{before})"

    def point(text: str) -> str:
        return rf"{text[:-digits]}\x{{2E}}{text[-digits:]}" if digits else text

    values = range(0, 10**width, unit)
    long = "[0-9]*(?:" + "|".join(point(str(value).zfill(width)) for value in values) + ")"
    short = [point(text) for value in values if len(text := str(value).zfill(digits + 1)) < width]
    return "(?:" + "|".join([long, *short]) + ")"


_ANY: Final = r"(?:0|[1-9][0-9]*)(?:\x{2E}[0-9]+)?"


def _split(bound: Decimal) -> tuple[str, str]:
    """The digits before and after the point, without padding."""
    whole, _, fraction = f"{abs(bound):f}".partition(".")
    return whole, fraction.rstrip("0")


def _at_least(bound: Decimal) -> str:
    """Unsigned notations of the numbers >= bound >= 0."""
    whole, fraction = _split(bound)
    above = _integers_from(int(whole) + 1)
    same = rf"{whole}\x{{2E}}{_fraction_from(fraction)}" if fraction else rf"{whole}(?:\x{{2E}}[0-9]+)?"
    return rf"(?:{above}(?:\x{{2E}}[0-9]+)?|{same})"


def _at_most(bound: Decimal) -> str:
    """Unsigned notations of the numbers <= bound, bound >= 0."""
    whole, fraction = _split(bound)
    same = rf"{whole}(?:\x{{2E}}{_fraction_to(fraction)})?"
    return same if whole == "0" else rf"(?:{_integers_to(int(whole) - 1)}(?:\x{{2E}}[0-9]+)?|{same})"


def _integers_from(low: int) -> str:
    text = str(low)
    if low == 0:
        return "(?:0|[1-9][0-9]*)"
    return f"(?:{_digits_from(text)}|[1-9][0-9]{{{len(text)},}})"


def _integers_to(high: int) -> str:
    text = str(high)
    shorter = [] if len(text) == 1 else ["0", f"[1-9][0-9]{{0,{len(text) - 2}}}"]
    return "(?:" + "|".join([*shorter, _digits_to(text, first=0 if len(text) == 1 else 1)]) + ")"


def _digits_from(text: str) -> str:
    """Digit strings of the same length that are >= text."""
    first, rest = int(text[0]), text[1:]
    if not rest:
        return f"[{first}-9]"
    above = [f"[{first + 1}-9][0-9]{{{len(rest)}}}"] if first < 9 else []
    return "(?:" + "|".join([*above, f"{first}{_digits_from(rest)}"]) + ")"


def _digits_to(text: str, first: int = 0) -> str:
    """Digit strings of the same length, with a first digit >= first, that are <= text."""
    digit, rest = int(text[0]), text[1:]
    if not rest:
        return f"[{first}-{digit}]"
    below = [f"[{first}-{digit - 1}][0-9]{{{len(rest)}}}"] if digit > first else []
    return "(?:" + "|".join([*below, f"{digit}{_digits_to(rest)}"]) + ")"


def _fraction_from(text: str) -> str:
    """Digits d with 0.d >= 0.text."""
    zeros = len(text) - len(text.lstrip("0"))
    digit, rest = int(text[zeros]), text[zeros + 1 :]
    above = [f"0{{0,{zeros - 1}}}[1-9][0-9]*"] if zeros else []
    above += [f"0{{{zeros}}}[{digit + 1}-9][0-9]*"] if digit < 9 else []
    return "(?:" + "|".join([*above, f"0{{{zeros}}}{digit}" + (_fraction_from(rest) if rest else "[0-9]*")]) + ")"


def _fraction_to(text: str) -> str:
    """Digits d, at least one, with 0.d <= 0.text."""
    if not text:
        return "0+"
    zeros = len(text) - len(text.lstrip("0"))
    digit, rest = int(text[zeros]), text[zeros + 1 :]
    same = f"0{{{zeros}}}{digit}" + (f"(?:{_fraction_to(rest)})?" if rest else "0*")
    return "(?:" + "|".join(["0+", f"0{{{zeros}}}[0-{digit - 1}][0-9]*", same]) + ")"
