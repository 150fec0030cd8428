"""Oracle: exact arithmetic with `Decimal` and `Fraction` over written numbers."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given, strategies as st

from pippin.engine.grammar import numbers
from pippin.engine.grammar.regex import matches

NUMBERS = (
    st.decimals(-2000, 2000, places=3) | st.decimals(-3, 3, places=1) | st.integers(-(10**20), 10**20).map(Decimal)
)
SHAPE = numbers.notation(25, 25, integer=False)


def written(number: Decimal) -> str:
    return f"{number:f}"


@given(NUMBERS, NUMBERS)
@example(Decimal("0.1"), Decimal("0.1"))
@example(Decimal(0), Decimal("0.000"))
def test_a_bound_holds_exactly_the_numbers_on_its_side(bound, number):
    text = written(number)
    assert matches(f"/{SHAPE}/ & /{numbers.at_least(bound)}/", text) == (number >= bound) or text.startswith("-0.000")
    assert matches(f"/{SHAPE}/ & /{numbers.at_most(bound)}/", text) == (number <= bound) or text.startswith("-0.000")


@pytest.mark.parametrize(
    "step", ["1", "2", "5", "10", "4", "8", "25", "100", "0.1", "0.01", "0.5", "2.5", "0.125", "0.0001"]
)
@given(factor=st.integers(-3000, 3000), number=NUMBERS)
def test_multiples_are_told_by_their_last_digits(step, factor, number):
    exact = Fraction(step)
    terminal = f"/{SHAPE}/ & /{numbers.multiples(exact, integer=False)}/"
    for value in (Decimal(step) * factor, number.normalize() if number else Decimal(0)):
        text = written(value)
        whole = "." not in text or exact.denominator > 1
        assert matches(terminal, text) == ((Fraction(value) / exact).denominator == 1) or not whole or text == "-0"


def test_no_ending_tells_a_multiple_of_three():
    assert numbers.multiples(Fraction(3), integer=True) is None
    assert numbers.multiples(Fraction("0.3"), integer=False) is None


@given(st.floats(-1e300, 1e300), st.booleans())
def test_what_is_written_within_an_exclusive_bound_stays_there_as_a_float(bound, below):
    exact = Fraction(bound) if abs(bound) >= 2**53 else Fraction(repr(bound))
    inner = numbers.inner_float(exact, below=below, exclusive=True)
    assert float(inner) < bound if below else float(inner) > bound


def test_bounds_beyond_floats():
    assert numbers.inner_float(Fraction(2**53 + 1), below=True, exclusive=False) == 2**53
    assert numbers.inner_float(Fraction(10**400), below=True, exclusive=False).is_finite()
    assert numbers.inner(Fraction(10**400), below=False, exclusive=False, integer=False) is None
    assert numbers.inner_integer(Fraction(10**400), below=True, exclusive=True) == 10**400 - 1


def test_a_free_number_is_finite_and_does_not_go_on_for_ever():
    free = f"/{numbers.notation(25, 25, integer=False, scientific=True)}/"
    for text in ("0", "-1.5", "1e22", "-9.99E-99", "1" * 25):
        assert matches(free, text)
    for text in ("01", "+1", "1.", ".5", "1e999", "1" * 26, "0." + "3" * 26, "NaN", "-"):
        assert not matches(free, text)
