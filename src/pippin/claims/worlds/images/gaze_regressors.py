"""Small networks that regress gaze or classify real images: one recipe for every arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pippin.claims.worlds.images.eyes import Eyes


def network(x: Tensor, targets: Tensor, seed: int, steps: int, rate: float) -> nn.Module:
    """Train a network of about 30,000 parameters to predict ``wanted`` from the images."""
    from torch import nn

    from pippin.claims.worlds.training import fit
    from pippin.data.streams import Shuffled
    from pippin.generate.methods.simgan.model import initialize
    from pippin.train import Loss

    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 48), nn.ReLU(), nn.Linear(48, targets.shape[1])),
    )
    initialize(network, 5000 + seed)

    def squares(model: nn.Module, batch: Any, generator: Any) -> Loss:
        return Loss((model(x[batch]) - targets[batch]).square().mean(1).sum(), len(batch))

    data: Any = Shuffled(range(len(x)), 64, seed=seed)
    fit(network, squares, data, steps=max(1, steps), seed=seed, lr=rate, weight_decay=0.01, device="cpu")
    return network.requires_grad_(False)


def best(x: Tensor, targets: Tensor, seed: int, steps: int, rates: Sequence[float]) -> nn.Module:
    """Train `network` at the learning rate that is best on the last quarter of images after a third of the steps."""
    from pippin.claims.worlds.training import best_rate

    n = 3 * len(x) // 4

    def loss_at(rate: float) -> float:
        predicted = network(x[:n], targets[:n], seed, steps // 3, rate)(x[n:])
        return float((predicted - targets[n:]).square().mean())

    return network(x, targets, seed, steps, best_rate(rates, loss_at))


def gaze_error(x: Tensor, gaze: Tensor, test: Eyes, seed: int, steps: int, rates: Sequence[float]) -> float:
    """Mean error in pixels on real test images of a regressor that is trained on ``x``."""
    return away(best(x, gaze, seed, steps, rates)(test.x), test.gaze)


def away(found: Tensor, gaze: Tensor) -> float:
    """Mean error of predicted gazes in pixels."""
    return float((found - gaze).norm(dim=1).mean())


def discriminability(x: Tensor, real: Tensor, seed: int, steps: int, rates: Sequence[float]) -> float:
    """Held-out accuracy of a fresh classifier of these images against real ones."""
    import torch

    n = min(len(x), len(real)) * 3 // 4
    order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(seed))
    sign = torch.cat([torch.ones(n, 1), -torch.ones(n, 1)])[order]
    network = best(torch.cat([x[:n], real[:n]])[order], sign, 100 + seed, steps, rates)
    right = torch.cat([network(x[n:]) > 0, network(real[n:]) <= 0])
    return float(right.float().mean())
