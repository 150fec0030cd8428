"""Regression problems of one input with a gap between the training points, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NOISE = 0.1
"""Standard deviation around the wave."""


def two_sides(seed: int, points: int = 80) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training points left and right of a gap; test points over the whole range."""
    import torch

    generator = torch.Generator().manual_seed(4_000 + seed)

    def wave(x: Tensor) -> Tensor:
        return torch.sin(3 * x) + NOISE * torch.randn(x.shape, generator=generator, dtype=torch.float64)

    sides = torch.rand(2, points // 2, 1, generator=generator, dtype=torch.float64)
    x = torch.cat([1.4 * sides[0] - 2, 1.4 * sides[1] + 0.6])
    test = torch.linspace(-2, 2, 161, dtype=torch.float64)[:, None]
    return x, wave(x), test, wave(test)


def two_clusters(seed: int, edge: float, half: float, points: int = 35) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs between an inner edge and 2 and their mirror image, in a random order, targets, and inputs in the gap.

    Args:
        seed: seed of inputs and noise.
        edge: inner edge of the clusters.
        half: half the width of the gap.
        points: number of points in each cluster.
    """
    import torch

    generator = torch.Generator().manual_seed(3_000 + seed)
    left, right = (torch.rand(points, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.cat([(2 - edge) * left - 2, (2 - edge) * right + edge])
    y = torch.sin(2 * x) + NOISE * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    order = torch.randperm(len(x), generator=generator)
    return x[order], y[order], torch.linspace(-half, half, 29, dtype=torch.float64)[:, None]
