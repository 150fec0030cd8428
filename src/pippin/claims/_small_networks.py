"""Small networks and real data for the claims about uncertainty: digits, clothes and tables, trained in seconds.

Notable here:
- the prior of training is the prior of the posterior: a Gaussian of the precision that is given, its share in every
  batch, so that the trained weights are the mode
- a network of dropout is the same network with one more layer
- what is foreign, shifted or far is made here once, and nothing is ever fitted to it
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from pippin.bayes.predictors import Predictor


@dataclass(frozen=True)
class World:
    """A classification: examples to train, to tune and to test on, shifted ones, and inputs of other kinds.

    Attributes:
        train, tune, test, shifted: inputs and labels; ``shifted`` are the test inputs turned by 60 degrees.
        foreign: inputs of classes that training never saw.
        far: normal numbers times 100.
        outputs: number of classes.
    """

    train: tuple[Tensor, Tensor]
    tune: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    shifted: tuple[Tensor, Tensor]
    foreign: Tensor
    far: Tensor
    outputs: int

    def on(self, device: str) -> World:
        """The same world on a device."""

        def moved(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair[0].to(device), pair[1].to(device)

        parts = (moved(self.train), moved(self.tune), moved(self.test), moved(self.shifted))
        return World(*parts, self.foreign.to(device), self.far.to(device), self.outputs)


def device_for(scale: str) -> str:
    """The GPU at the scale that is made for it, where there is one; else the processor."""
    import torch

    return "cuda" if scale == "gpu" and torch.cuda.is_available() else "cpu"


def available(*names: str) -> bool:
    """Whether sets of the catalogue are here or can be fetched; where not, a line says what is left out."""
    import sys

    from pippin.core import store
    from pippin.core.errors import AssetError

    for name in names:
        try:
            store.pull(name, show_progress=False)
        except AssetError as error:
            print(f"left out, as {name!r} cannot be had: {error}", file=sys.stderr)
            return False
    return True


def turned(pictures: Tensor, degrees: float = 60.0) -> Tensor:
    """Pictures (n, c, h, w) turned about their middle, zero outside."""
    import math

    import torch
    from torch.nn import functional

    angle = math.radians(degrees)
    turn = [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    grid = functional.affine_grid(torch.tensor([turn]).expand(len(pictures), -1, -1), list(pictures.shape), False)
    return functional.grid_sample(pictures, grid, align_corners=False)


def digits(seed: int) -> World:
    """Scikit-learn's 8 by 8 digits: 300 of 0 to 4 to train on, 150 to tune, 5 to 9 foreign."""
    import torch
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    known, generator = y < 5, torch.Generator().manual_seed(1_000 + seed)
    own, labels = x[known], y[known]
    order = torch.randperm(len(own), generator=generator)
    train, tune, test = ((own[at], labels[at]) for at in (order[:300], order[300:450], order[450:]))
    test_x, test_y = test
    shifted = turned(test_x.view(-1, 1, 8, 8)).flatten(1)
    far = 100 * torch.randn(500, 64, generator=generator)
    return World(train, tune, test, (shifted, test_y), x[~known], far, 5)


def clothes(seed: int, train: int, test: int) -> World:
    """Fashion-MNIST, some of it, with MNIST's digits as what is foreign; both must be in the store."""
    import torch

    from pippin.data import images

    generator = torch.Generator().manual_seed(2_000 + seed)
    known, rest = images.load("fashion-mnist", split="train"), images.load("fashion-mnist", split="test")
    foreign = images.load("mnist", split="test")
    assert known.labels is not None
    assert rest.labels is not None
    first = torch.randperm(len(known), generator=generator)[: train + test]
    last = torch.randperm(len(rest), generator=generator)[:test]
    x, y = known.images[first].float() / 255, known.labels[first]
    test_x, test_y = rest.images[last].float() / 255, rest.labels[last]
    other = foreign.images[torch.randperm(len(foreign), generator=generator)[:test]].float() / 255
    return World(
        (x[:train], y[:train]),
        (x[train:], y[train:]),
        (test_x, test_y),
        (turned(test_x), test_y),
        other,
        100 * torch.randn(test, 1, 28, 28, generator=generator),
        10,
    )


def seeded(seed: int, make: Any) -> nn.Module:
    """A network made under a seed, torch's own generator left alone."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: nn.Module = make()
    return made


def perceptron(sizes: tuple[int, ...], seed: int, dropout: float = 0.0) -> nn.Module:
    """Linear layers with ReLU between them, dropout before the last one where a rate is given."""
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
    """Two convolutions and two linear layers over pictures of 28 by 28: 28,000 weights."""
    from torch import nn

    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2, padding=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])),
            nn.Linear(32, outputs),
        )

    return seeded(seed, make)


def batches(x: Tensor, y: Tensor, size: int = 256) -> list[tuple[Tensor, Tensor]]:
    """The examples in order, in batches."""
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
    """Train a classifier or, where targets are real, a regressor with unit noise; in place, left in evaluation mode.

    Args:
        model: the network.
        x, y: all examples.
        epochs: passes over them.
        seed: of their order.
        lr: of Adam, falling to 0.
        batch: examples of a step.
        precision: of the Gaussian prior of the weights; 0 for none.

    Returns:
        Seconds of processor time.
    """
    import torch
    from torch.nn import functional

    from pippin.data.ordering import Shuffled
    from pippin.train import AdamW, Cosine, Loss, Trainer

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
    optimiser = AdamW(lr=lr, weight_decay=0.0)
    model.to(x.device).train()
    Trainer(model, objective, data, steps=steps, optimiser=optimiser, schedule=Cosine(), seed=seed, show=False).fit()
    model.eval()
    return time.process_time() - began


def scores(predictor: Predictor, world: World) -> dict[str, float]:
    """Figures of a classifier on test, turned, foreign and far inputs; foreign ones by the largest probability."""
    import torch

    from pippin.bayes import metrics

    def probs(x: Tensor) -> Tensor:
        return torch.cat([chances(predictor, part) for part in x.split(256)])

    test, turned_probs = probs(world.test[0]), probs(world.shifted[0])
    own, foreign = test.max(-1).values, probs(world.foreign).max(-1).values
    return {
        "accuracy": metrics.accuracy(test, world.test[1]),
        "loss": metrics.nll(test, world.test[1]),
        "Brier score": metrics.brier(test, world.test[1]),
        "calibration error": metrics.ece(test, world.test[1]),
        "loss turned": metrics.nll(turned_probs, world.shifted[1]),
        "calibration error turned": metrics.ece(turned_probs, world.shifted[1]),
        "confidence on foreign": float(foreign.mean()),
        "AUROC of foreign": metrics.auroc(own, foreign),
        "confidence far away": float(probs(world.far).max(-1).values.mean()),
    }


def chances(predictor: Predictor, x: Tensor) -> Tensor:
    """The probabilities that a classifier gives."""
    probs = predictor(x).probs
    assert probs is not None
    return probs
