"""A mixture in one dimension, and small denoisers that are trained on it by plain regression.

Notable here:
- in one dimension an exact flow takes quantiles to quantiles, so distances need no random samples
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from pippin.generate.diffusion.gaussian_mixture import GaussianMixture
    from pippin.generate.diffusion.prediction import Estimate
    from pippin.generate.diffusion.schedules import NoiseSchedule

POINTS = 4000


def mixture() -> GaussianMixture:
    """0.35 N(-1.2, 0.15²) + 0.65 N(0.8, 0.3²), of standard deviation 1."""
    from pippin.generate.diffusion.gaussian_mixture import GaussianMixture

    return GaussianMixture([0.35, 0.65], [[-1.2], [0.8]], [0.15**2, 0.3**2])


def quantiles() -> tuple[Tensor, Tensor]:
    """Quantiles of the normal density and of the mixture, (1, n) each; the latter by bisection."""
    import torch

    of = mixture()
    shares = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    low, high = torch.full_like(shares, -5.0), torch.full_like(shares, 5.0)
    spread = of.covariances[:, 0, 0].sqrt()
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.special.ndtr((middle[:, None] - of.means[:, 0]) / spread) @ of.weights < shares
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return torch.special.ndtri(shares)[None].float(), low[None].float()


def _features(x: Tensor, t: Tensor) -> Tensor:
    import torch

    waves = torch.arange(1, 9) * t[:, None] * torch.pi
    return torch.cat([x, waves.cos(), waves.sin()], 1)


def perceptron(kind: Any, schedule: NoiseSchedule, steps: int, rate: float, seed: int) -> tuple[Any, float]:
    """Train a denoiser of one-dimensional samples by plain regression; also its error on fresh samples."""
    import torch
    from torch import nn

    from pippin.claims.worlds.training import fit
    from pippin.generate.diffusion.prediction import add_noise, estimate, target
    from pippin.train import Loss

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(17, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def batches() -> Iterator[Tensor]:
        index = 0
        while True:
            yield mixture().sample(512, seed=1_000_000 * seed + index)
            index += 1

    def squares(model: nn.Module, batch: Tensor, generator: torch.Generator) -> Loss:
        x0 = batch
        t = schedule.max_time * torch.rand(len(x0), generator=generator)
        eps = torch.randn(x0.shape, generator=generator)
        output = model(_features(add_noise(x0, eps, t, schedule), t))
        return Loss((output - target(x0, eps, t, kind, schedule)).square().sum(), len(x0))

    fit(network, squares, batches(), steps=max(1, steps), seed=seed, lr=rate, weight_decay=0.0, device="cpu")
    network.requires_grad_(False)

    def denoiser(x: Tensor, t: float) -> Estimate:
        """All samples form one row, so that they share one generator."""
        output = network(_features(x.view(-1, 1), torch.full((x.numel(),), t))).view(x.shape)
        return estimate(output, x, t, kind, schedule)

    with torch.no_grad():
        loss = squares(network, mixture().sample(20_000, seed=77), torch.Generator().manual_seed(77))
    return denoiser, float(loss.total) / 20_000
