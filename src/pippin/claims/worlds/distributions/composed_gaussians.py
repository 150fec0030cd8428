"""Compositions of two-dimensional Gaussians with exact scores, of features that are separate or mixed by a shear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.generate.composition.compose import ComponentModel

STEP_SIZE, CORRECTED_AT = 2e-4, 1e-3
"""Of Langevin steps, and the time at which they are made."""


def part(shear: float, mean: tuple[float, float], variances: tuple[float, float]) -> ComponentModel:
    """Independent features z, seen as x = A^-1 z with A = [[1, shear], [0, 1]]."""
    import torch

    from pippin.generate.composition.compose import ComponentModel
    from pippin.generate.diffusion.gaussian_mixture import GaussianMixture, exact_denoiser
    from pippin.generate.diffusion.schedules import NoiseSchedule

    back = torch.tensor([[1.0, -shear], [0.0, 1.0]], dtype=torch.float64)
    covariance = back @ torch.diag(torch.tensor(variances, dtype=torch.float64)) @ back.T
    mixture = GaussianMixture([1.0], (back @ torch.tensor(mean, dtype=torch.float64))[None], covariance[None])
    schedule = NoiseSchedule.vp_cosine()
    return ComponentModel(exact_denoiser(mixture, schedule), schedule, (2,))


def feature_means(
    shears: Sequence[float], n: int, steps: tuple[int, int], langevin: int, seed: int
) -> dict[str, float]:
    """Means of both features of samples from the composition; 1 where it is right.

    Args:
        shears: shears to measure, beside no shear, "separate".
        n: number of samples.
        steps: DDIM steps, few and many; many for the first shear only.
        langevin: corrector steps, for each shear.
        seed: seed of the noise.
    """
    import torch

    from pippin.generate.composition.compose import compose
    from pippin.generate.diffusion.prediction import Estimate
    from pippin.generate.diffusion.samplers import Langevin, integrate
    from pippin.generate.noise import Noise

    corrector = Langevin(langevin, STEP_SIZE, CORRECTED_AT)
    found = {}
    for shear in (0.0, *shears):
        parts = [part(shear, (1.0, 0.0), (0.01, 0.04)), part(shear, (0.0, 1.0), (0.04, 0.01))]
        composed = compose(parts, part(shear, (0.0, 0.0), (0.04, 0.04)))

        def row(x: Tensor, t: float, of: Any = composed) -> Estimate:
            """All samples form one row, so that they share one generator."""
            made = of(x[0], t)
            return Estimate(made.x0[None], made.eps[None])

        ways: dict[str, tuple[int, Langevin | None]] = {"few steps": (steps[0], None)}
        if shear in (0.0, shears[0]):
            ways["many steps"] = (steps[1], None)
        if shear:
            ways["corrected"] = (steps[0], corrector)
        for way, (count, options) in ways.items():
            noise, grid = Noise(1, seed=seed), composed.schedule.grid(count)
            start = composed.schedule.s(grid[0]) * noise.normal((n, 2)).double()
            x = integrate(row, composed.schedule, start, grid, method="ddim", noise=noise, corrector=options)
            features = x[0] @ torch.tensor([[1.0, shear], [0.0, 1.0]], dtype=torch.float64).T
            found[f"{f'shear {shear}' if shear else 'separate'}, {way}"] = float(features.mean())
    return found
