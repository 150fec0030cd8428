"""Made pictures of one sprite each, of which every factor of variation is known: shape, scale, rotation and place.

Notable here:
- the three shapes have no rotation that maps them to themselves, so each combination of factors is another picture
- edges are soft: each pixel is the mean over a grid of points within it
- a picture follows from its number alone, so a set of any size is drawn when it is needed

Source: after dSprites (Matthey, Higgins, Hassabis and Lerchner 2017), with shapes of our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.core.errors import InvalidArgument, InvalidInput

FACTORS: Final = ("shape", "scale", "rotation", "x", "y")
"""What varies, in the order of the columns of factors."""
SHAPES: Final = ("wedge", "heart", "half disc")
_POINTS = 3
"""Points within a pixel, along each side."""
_CHUNK = 512


@dataclass(frozen=True)
class SpriteSpec:
    """Which sprites there are: every combination of so many values of each factor.

    Attributes:
        size: height and width of a picture in pixels.
        shapes: how many of `SHAPES`.
        scales: sizes, evenly from 0.6 to 1 of the largest, whose radius is a fifth of the picture.
        rotations: angles, evenly around the circle.
        xs: places from left to right.
        ys: places from top to bottom.

    Raises:
        InvalidArgument: numbers out of range.

    >>> SpriteSpec().combinations
    6144
    """

    size: int = 32
    shapes: int = 3
    scales: int = 4
    rotations: int = 8
    xs: int = 8
    ys: int = 8

    def __post_init__(self) -> None:
        if self.size < 8:
            raise InvalidArgument(f"size is {self.size}; sprites need at least 8 pixels")
        if not 1 <= self.shapes <= len(SHAPES):
            raise InvalidArgument(f"shapes is {self.shapes}; there are {len(SHAPES)}: {', '.join(SHAPES)}")
        if min(self.counts) < 1:
            raise InvalidArgument(f"every factor needs at least one value, got {self.counts} of {FACTORS}")

    @property
    def counts(self) -> tuple[int, ...]:
        """Values of each factor."""
        return self.shapes, self.scales, self.rotations, self.xs, self.ys

    @property
    def combinations(self) -> int:
        """How many pictures there are."""
        return math.prod(self.counts)


class Sprites:
    """All pictures of a specification, by number.

    Args:
        spec: which.

    >>> sprites = Sprites(SpriteSpec(size=16))
    >>> sprites.factors(torch.tensor([0, 1, 8, 6143])).tolist()
    [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [2, 3, 7, 7, 7]]
    >>> sprites.images(torch.tensor([5, 6])).shape
    torch.Size([2, 1, 16, 16])
    """

    def __init__(self, spec: SpriteSpec) -> None:
        self.spec = spec

    def __len__(self) -> int:
        return self.spec.combinations

    def factors(self, numbers: Int[Tensor, " n"]) -> Int[Tensor, "n 5"]:
        """The value of each of `FACTORS` in these pictures, from 0; the last factor changes first.

        Raises:
            InvalidInput: a number that no picture has.
        """
        if len(numbers) and not bool(((numbers >= 0) & (numbers < len(self))).all()):
            wrong = int(numbers[(numbers < 0) | (numbers >= len(self))][0])
            raise InvalidInput(f"there is no sprite {wrong}; numbers go from 0 to {len(self) - 1}")
        columns, rest = [], numbers
        for count in reversed(self.spec.counts):
            columns.append(rest % count)
            rest = rest // count
        return torch.stack(columns[::-1], 1)

    def images(self, numbers: Int[Tensor, " n"]) -> Float[Tensor, "n 1 size size"]:
        """These pictures: 0 is the ground, 1 the sprite, shares of pixels at its edge.

        Raises:
            InvalidInput: a number that no picture has.
        """
        parts = [self._drawn(self.factors(part)) for part in numbers.split(_CHUNK)]
        return torch.cat(parts) if parts else torch.zeros(0, 1, self.spec.size, self.spec.size)

    def draw(self, n: int, generator: torch.Generator) -> tuple[Float[Tensor, "n 1 size size"], Int[Tensor, "n 5"]]:
        """Pictures at random, each combination as likely, and their factors."""
        numbers = torch.randint(len(self), (n,), generator=generator)
        return self.images(numbers), self.factors(numbers)

    def _drawn(self, factors: Tensor) -> Tensor:
        spec = self.spec
        shape, scale, rotation, column, row = factors.T
        fine = spec.size * _POINTS
        grid = (torch.arange(fine) + 0.5) / fine  # the picture is the unit square, y down
        radius = 0.2 * _spaced(scale, spec.scales, 0.6, 1.0)[:, None, None]
        x = (grid[None, None, :] - _spaced(column, spec.xs, 0.25, 0.75)[:, None, None]) / radius
        y = (grid[None, :, None] - _spaced(row, spec.ys, 0.25, 0.75)[:, None, None]) / radius
        angle = (2 * math.pi / spec.rotations * rotation)[:, None, None]
        u, v = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
        inside = torch.zeros(len(factors), fine, fine, dtype=torch.bool)
        for kind in range(spec.shapes):
            these = shape == kind
            inside[these] = _inside(kind, u[these], v[these])
        pixels = inside.view(-1, spec.size, _POINTS, spec.size, _POINTS)
        return pixels.float().mean((2, 4))[:, None]


def _spaced(value: Tensor, count: int, low: float, high: float) -> Tensor:
    """The number that a value stands for, evenly from low to high; their middle where there is one value only."""
    if count == 1:
        return torch.full(value.shape, (low + high) / 2)
    return low + (high - low) * value / (count - 1)


def _inside(kind: int, u: Tensor, v: Tensor) -> Bool[Tensor, "n points points"]:
    """Whether points lie in a sprite of about radius 1 around the origin."""
    if kind == 0:  # long and thin, its tip to the right
        return (u > -0.7) & (v.abs() < 0.45 * (1 - u) / 1.7)
    if kind == 1:  # the well-known sextic, its tip down
        w = 1.15 * u.square() + 1.15 * (v - 0.1).square() - 0.75
        return w**3 + 1.5 * u.square() * (v - 0.1) ** 3 < 0
    return (u.square() + (v - 0.4).square() < 1) & (v < 0.4)
