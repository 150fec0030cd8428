"""Small networks, trained in seconds, for the claims about uncertainty.

Notable here:
- training has the prior of the posterior, a Gaussian of the given precision scaled to each batch, so that the trained
  weights are the mode
- a network with dropout is the same network with one more layer
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from pippin.bayes.prediction import Prediction


def available(*names: str) -> bool:
    """Whether these datasets are in the store or can be downloaded; if not, prints what is left out."""
    import sys

    from pippin.core.errors import AssetError
    from pippin.core.store import store

    for name in names:
        try:
            store.pull(name, show_progress=False)
        except AssetError as error:
            print(f"left out, as {name!r} cannot be had: {error}", file=sys.stderr)
            return False
    return True


def seeded(seed: int, make: Any) -> nn.Module:
    """Make a network under a seed, without changing torch's global generator."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: nn.Module = make()
    return made


def perceptron(sizes: tuple[int, ...], seed: int, dropout: float = 0.0) -> nn.Module:
    """An MLP with ReLU, and with dropout before the last layer where a rate is given."""
    from torch import nn

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(pairwise(sizes)):
            if dropout and i == len(sizes) - 2:
                layers.append(nn.Dropout(dropout))
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return seeded(seed, make)


def convolutional(seed: int, outputs: int = 10, dropout: float = 0.0) -> nn.Module:
    """A CNN with two convolutions and two linear layers for images of 28 by 28: 28,000 weights."""
    from torch import nn

    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2, padding=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])),
            nn.Linear(32, outputs),
        )

    return seeded(seed, make)


def tanh(sizes: tuple[int, ...], seed: int, norm: Callable[[], nn.Module] | None = None) -> nn.Module:
    """An MLP with tanh in float64, optionally with a norm before the last tanh."""
    from torch import nn

    def make() -> nn.Module:
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())][:-1]
        return nn.Sequential(*layers[:-2], *([] if norm is None else [norm()]), *layers[-2:]).double()

    return seeded(seed, make)


def residual(seed: int) -> nn.Module:
    """A small residual network with batch norms for images of 28 by 28."""
    from torch import nn

    class Block(nn.Module):
        """Two convolutions and a shortcut."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
            )

        def forward(self, x: Tensor) -> Tensor:
            """Residual sum with ReLU."""
            summed: Tensor = (x + self.body(x)).relu()
            return summed

    def down(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    def make() -> nn.Module:
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
        return nn.Sequential(*down(1, 16), Block(16), *down(16, 32), Block(32), *head)

    return seeded(seed, make)


def batches(x: Tensor, y: Tensor, size: int = 256) -> list[tuple[Tensor, Tensor]]:
    """Batches of the examples in order."""
    return list(zip(x.split(size), y.split(size), strict=True))


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    seed: int,
    lr: float = 1e-3,
    batch: int = 32,
    precision: float = 0.0,
) -> float:
    """Train in place a classifier or, for real targets, a regressor with unit noise; leaves evaluation mode.

    Args:
        model: the network.
        x, y: all examples.
        epochs: passes over them.
        seed: seed of their order.
        lr: learning rate of Adam, decayed to 0.
        batch: batch size.
        precision: precision of the Gaussian prior of the weights; 0 for none.

    Returns:
        Processor time in seconds.
    """
    import torch
    from torch.nn import functional

    from pippin.data.streams import Shuffled
    from pippin.train import AdamW, CosineSchedule, Loss, Trainer

    def objective(model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        at = torch.tensor(batch, device=x.device)
        outputs, targets = model(x[at]), y[at]
        if targets.is_floating_point():
            total = 0.5 * (outputs - targets.view_as(outputs)).square().sum()
        else:
            total = functional.cross_entropy(outputs, targets, reduction="sum")
        if precision:
            squares = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
            total = total + 0.5 * precision * len(at) / len(x) * squares
        return Loss(total, len(at))

    steps = epochs * -(-len(x) // batch)
    began = time.process_time()
    data: Any = Shuffled(range(len(x)), batch, seed=seed)
    optimizer = AdamW(lr=lr, weight_decay=0.0)
    model.to(x.device).train()
    Trainer(
        model,
        objective,
        data,
        steps=steps,
        optimizer=optimizer,
        schedule=CosineSchedule(),
        seed=seed,
        show_progress=False,
    ).fit()
    model.eval()
    return time.process_time() - began


def log_density(prediction: Prediction, y: Tensor) -> float:
    """Mean log-density of targets [n, 1] under Gaussian predictions, in nats."""
    from pippin import metrics

    return -float(metrics.gaussian_nll(prediction.mean[:, 0], prediction.variance[:, 0], y[:, 0]))
