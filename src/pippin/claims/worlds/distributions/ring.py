"""A two-dimensional flow trained on points of a ring: the mass of its density, and whether it has the hole."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pippin.claims.worlds.images.flow_images import trained
from pippin.generate.conditions import Samples
from pippin.generate.flows.tarflow import TarFlowConfig

GRID = 121
"""Points on each axis."""
RADIUS = 0.7


class _Ring:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Samples]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            angle = 2 * torch.pi * torch.rand(256, generator=generator)
            yield Samples(RADIUS * torch.stack([angle.cos(), angle.sin()], 1).view(-1, 1, 2, 1))


def ring_density(steps: int, seed: int) -> tuple[float, float]:
    """Train the flow; the mass on the grid, and the density at the center relative to that on the ring."""
    config = TarFlowConfig(
        (1, 2, 1), patch_size=1, layers_per_block=(1, 1, 1, 1), hidden_size=32, num_attention_heads=1, noise_std=0.15
    )
    flow = trained(config, _Ring(seed), steps, seed)
    at = torch.linspace(-3, 3, GRID)
    grid = torch.cartesian_prod(at, at).view(-1, 1, 2, 1)
    points = RADIUS * torch.tensor([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1]]).view(-1, 1, 2, 1)
    with torch.no_grad():
        density = torch.cat([flow.log_prob(part).double().exp() for part in grid.split(8192)])
        some = flow.log_prob(points).exp()
    return float(density.sum() * (at[1] - at[0]) ** 2), float(some[0] / some[1:].mean())
