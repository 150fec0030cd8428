"""Ranges and choices in annotations: what passes, what is refused, and what the message says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from pippin.core.checks import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Probability, checked
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from nowhere import Thing


@checked
def run(
    steps: PositiveInt = 1,
    *,
    share: Fraction = 0.0,
    rate: PositiveFloat | None = None,
    angle: Annotated[float, Gt(-180), Lt(180)] = 0.0,
    most: Annotated[int, Le(3)] = 0,
    kind: Literal["mean", "max", "sum"] = "mean",
    size: PositiveInt | Literal["auto"] = "auto",
    sizes: tuple[PositiveInt, ...] = (),
    weights: Sequence[Probability] = (),
    block: tuple[Literal["block"], PositiveInt] | None = None,
    other: "Thing | None" = None,
) -> int:
    return steps


@checked
@dataclass(frozen=True)
class Config:
    width: PositiveInt
    decay: NonNegativeFloat = 0.1
    mode: Literal["a", "b"] | None = None

    def __post_init__(self) -> None:
        assert self.width > 0, "checks come first"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"share": 1.0}, "share must be from 0 to below 1, got 1.0"),
        ({"share": -0.1}, "share must be from 0 to below 1, got -0.1"),
        ({"rate": 0.0}, "rate must be above 0 and finite, got 0.0"),
        ({"rate": math.inf}, "rate must be above 0 and finite, got inf"),
        ({"rate": math.nan}, "rate must be above 0 and finite, got nan"),
        ({"rate": 0}, "rate must be above 0 and finite, got 0"),
        ({"angle": 180}, "angle must be above -180 and below 180, got 180"),
        ({"most": 4}, "most must be at most 3, got 4"),
        ({"kind": "median"}, "kind must be 'mean', 'max' or 'sum', got 'median'"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"size": "large"}, "size must be 'auto', got 'large'"),
        ({"sizes": (2, 0)}, "sizes[1] must be at least 1, got 0"),
        ({"weights": [0.5, 1.5]}, "weights[1] must be from 0 to 1, got 1.5"),
        ({"block": ("row", 2)}, "block[0] must be 'block', got 'row'"),
        ({"block": ("block", 0)}, "block[1] must be at least 1, got 0"),
        ({"steps": 1.5}, "steps must be an integer, at least 1, got 1.5"),
        ({"steps": True}, "steps must be an integer, at least 1, got True"),
        ({"share": "half"}, "share must be a number, from 0 to below 1, got 'half'"),
        ({"share": None}, "share must be a number, from 0 to below 1, got None"),
        ({"rate": "1"}, "rate must be a number, above 0 and finite, got '1'"),
        ({"size": None}, "size must be an integer, at least 1, got None"),
    ],
)
def test_what_is_outside_is_named(given, message):
    with pytest.raises(InvalidArgument) as caught:
        run(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "given",
    [
        {"steps": 1, "share": 0.0, "rate": None, "angle": -179.9, "most": 3},
        {
            "rate": 1,
            "kind": "sum",
            "size": 7,
            "sizes": (1, 2),
            "block": ("block", 3),
            "weights": [0.0, 1.0],
            "other": object(),
        },
    ],
)
def test_what_is_inside_passes(given):
    assert run(**given) == 1


def test_a_range_written_out_is_read():
    @checked
    def half(x: Annotated[float, Ge(0), Le(1)]) -> float:
        return x / 2

    assert half(1.0) == 0.5
    with pytest.raises(InvalidArgument, match="x must be from 0 to 1, got 2"):
        half(2)


def test_fields_are_checked_before_anything_else_of_the_dataclass():
    assert Config(1, mode="b") == Config(width=1, mode="b")
    with pytest.raises(InvalidArgument, match="width must be at least 1, got 0"):
        Config(0)
    with pytest.raises(InvalidArgument, match="decay must be at least 0 and finite, got -1"):
        Config(1, decay=-1.0)
    with pytest.raises(InvalidArgument, match="mode must be 'a' or 'b', got 'c'"):
        Config(1, mode="c")


def test_an_inherited_field_is_read_where_it_was_written():
    child = dataclass(frozen=True)(type("Child", (Config,), {"__annotations__": {}, "__module__": "string"}))
    assert checked(child)(2).width == 2
    with pytest.raises(InvalidArgument, match="decay must be at least 0 and finite, got -1"):
        child(1, decay=-1.0)


def test_a_wrong_call_is_left_to_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'stops'"):
        run(stops=0)


def test_a_check_that_cannot_be_read_is_not_lost():
    @checked
    def broken(x: "Annotated[Thing, Ge(0)]") -> None: ...

    with pytest.raises(NameError):
        broken(1)


def test_a_plain_class_is_refused():
    with pytest.raises(TypeError, match="is not a dataclass"):
        checked(type("Plain", (), {}))
