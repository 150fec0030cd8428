"""Synthetic images of one sprite each, with known factors of variation: shape, scale, rotation, position.

Notable here:
- none of the three shapes has a rotational symmetry, so each combination of factors is another image
- edges are antialiased: each pixel is the mean over a grid of points within it
- an image follows from its index alone, so nothing has to be stored

Source: after dSprites (Matthey, Higgins, Hassabis and Lerchner 2017), with shapes of our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Final

import torch
from annotated_types import Ge, Le
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidInput

FACTORS: Final = ("shape", "scale", "rotation", "x", "y")
"""The factors of variation, in the order of the columns of factors."""
SHAPES: Final = ("wedge", "heart", "half disc")
_POINTS = 3
"""Antialiasing points along each side of a pixel."""
_CHUNK = 512


@checked
@dataclass(frozen=True)
class SpriteSpec:
    """The set of sprites: every combination of the values of the factors.

    Attributes:
        size: height and width of an image in pixels.
        shapes: number of `SHAPES` used.
        scales: number of sizes, evenly from 0.6 to 1 of the largest, whose radius is a fifth of the image.
        rotations: number of angles, evenly around the circle.
        xs: number of positions from left to right.
        ys: number of positions from top to bottom.

    Raises:
        InvalidArgument: numbers out of range.

    >>> SpriteSpec().combinations
    6144
    """

    size: Annotated[int, Ge(8)] = 32
    shapes: Annotated[int, Ge(1), Le(len(SHAPES))] = 3
    scales: PositiveInt = 4
    rotations: PositiveInt = 8
    xs: PositiveInt = 8
    ys: PositiveInt = 8

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of values of each factor."""
        return self.shapes, self.scales, self.rotations, self.xs, self.ys

    @property
    def combinations(self) -> int:
        """Number of images."""
        return math.prod(self.counts)


class Sprites:
    """All images of a specification, by index.

    Args:
        spec: the set of sprites.

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

    def factors(self, indices: Int[Tensor, " n"]) -> Int[Tensor, "n 5"]:
        """The value of each of `FACTORS` in these images, from 0; the last factor varies fastest.

        Raises:
            InvalidInput: an index out of range.
        """
        if len(indices) and not bool(((indices >= 0) & (indices < len(self))).all()):
            wrong = int(indices[(indices < 0) | (indices >= len(self))][0])
            raise InvalidInput(f"there is no sprite {wrong}; indices are from 0 to {len(self) - 1}")
        columns, rest = [], indices
        for count in reversed(self.spec.counts):
            columns.append(rest % count)
            rest = rest // count
        return torch.stack(columns[::-1], 1)

    def images(self, indices: Int[Tensor, " n"]) -> Float[Tensor, "n 1 size size"]:
        """The images with these indices: 0 is the background, 1 the sprite, with values in between at its edge.

        Raises:
            InvalidInput: an index out of range.
        """
        parts = [self._rendered(self.factors(part)) for part in indices.split(_CHUNK)]
        return torch.cat(parts) if parts else torch.zeros(0, 1, self.spec.size, self.spec.size)

    def sample(self, n: int, generator: torch.Generator) -> tuple[Float[Tensor, "n 1 size size"], Int[Tensor, "n 5"]]:
        """Random images, with all combinations equally likely, and their factors."""
        indices = torch.randint(len(self), (n,), generator=generator)
        return self.images(indices), self.factors(indices)

    def _rendered(self, factors: Tensor) -> Tensor:
        spec = self.spec
        shape, scale, rotation, column, row = factors.T
        fine = spec.size * _POINTS
        grid = (torch.arange(fine) + 0.5) / fine  # the image is the unit square, y down
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
    """Evenly spaced values from low to high; the middle if there is one value only."""
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
