"""Classification with shifted, out-of-distribution and far-away inputs, for the claims about uncertainty.

Notable here:
- scikit-learn digits, Fashion-MNIST, and CIFAR-10 by the features of a pretrained ResNet-56
- nothing is ever fitted to the shifted, out-of-distribution and far inputs
- two controls that need no posterior: uniform predictions, and the highest temperature at equal loss on held-out data
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Scale

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pippin.bayes.predictors.predictor import Predictor
    from pippin.claims import Evidence


@dataclass(frozen=True)
class ClassifierSize:
    """Sizes of data and training.

    Attributes:
        seeds: seeds of data and networks.
        members: networks of an ensemble.
        epochs: epochs on digits.
        images, image_epochs, image_test: training images, epochs and test images of Fashion-MNIST; left out where 0.
    """

    seeds: tuple[int, ...]
    members: int
    epochs: int
    images: int
    image_epochs: int
    image_test: int


SIZES = Scale.choose(
    smoke=ClassifierSize((0,), 2, 4, 0, 0, 0),
    laptop=ClassifierSize((0, 1, 2), 5, 60, 6_000, 12, 2_000),
    gpu=ClassifierSize((0, 1, 2, 3, 4), 5, 60, 50_000, 30, 10_000),
)


@dataclass(frozen=True)
class World:
    """A classification task: training, tuning and test examples, shifted ones, and OOD inputs.

    Attributes:
        train, tune, test, shifted: inputs and labels; ``shifted`` are rotated by 60 degrees, or noisy.
        ood: inputs of classes that are not in training.
        far: standard normal inputs times 100.
        outputs: number of classes.
    """

    train: tuple[Tensor, Tensor]
    tune: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    shifted: tuple[Tensor, Tensor]
    ood: Tensor
    far: Tensor
    outputs: int

    def on(self, device: str) -> World:
        """The same task on a device."""

        def moved(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair[0].to(device), pair[1].to(device)

        parts = (moved(self.train), moved(self.tune), moved(self.test), moved(self.shifted))
        return World(*parts, self.ood.to(device), self.far.to(device), self.outputs)


def worlds(size: ClassifierSize, scale: Scale) -> Iterator[tuple[str, int, World]]:
    """Digits and, where the size asks for it and it is available, Fashion-MNIST, for each seed."""
    from pippin.claims.worlds import small_networks as small, training

    warm = digits(0)  # the first training loads and compiles what later ones find ready
    small.train(small.perceptron((64, 8, 5), 0), *warm.train, epochs=1, seed=0)
    images = size.images and small.available("fashion-mnist", "mnist")
    for seed in size.seeds:
        yield "digits", seed, digits(seed)
        if images:
            world = fashion_mnist(seed, size.images, size.image_test)
            yield "Fashion-MNIST", seed, world.on(training.device_for(scale.name))


def trained(
    name: str, world: World, seed: int, size: ClassifierSize, *, dropout: float = 0.0, precision: float = 1.0
) -> tuple[nn.Module, float]:
    """Train a network on the world of that name; also its processor time in seconds."""
    from pippin.claims.worlds import small_networks as small

    if name == "digits":
        model = small.perceptron((64, 64, 64, 5), seed, dropout)
        return model, small.train(model, *world.train, epochs=size.epochs, seed=seed, precision=precision)
    model = small.convolutional(seed, dropout=dropout)
    epochs = size.image_epochs
    return model, small.train(model, *world.train, epochs=epochs, seed=seed, batch=64, precision=1.0)


def rotated(images: Tensor, degrees: float = 60.0) -> Tensor:
    """Images (n, c, h, w) rotated about their middle, zero outside."""
    import math

    import torch
    from torch.nn import functional

    angle = math.radians(degrees)
    matrix = [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    grid = functional.affine_grid(torch.tensor([matrix]).expand(len(images), -1, -1), list(images.shape), False)
    return functional.grid_sample(images, grid, align_corners=False)


def digits(seed: int) -> World:
    """Scikit-learn's 8 by 8 digits: 300 of 0 to 4 to train on, 150 to tune, 5 to 9 OOD."""
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
    shifted = rotated(test_x.view(-1, 1, 8, 8)).flatten(1)
    far = 100 * torch.randn(500, 64, generator=generator)
    return World(train, tune, test, (shifted, test_y), x[~known], far, 5)


def fashion_mnist(seed: int, train: int, test: int) -> World:
    """A part of Fashion-MNIST, with MNIST as OOD inputs; both must be in the store."""
    import torch

    from pippin.data import images

    generator = torch.Generator().manual_seed(2_000 + seed)
    known, held_out = images.load("fashion-mnist", split="train"), images.load("fashion-mnist", split="test")
    outside = images.load("mnist", split="test")
    assert known.labels is not None
    assert held_out.labels is not None
    first = torch.randperm(len(known), generator=generator)[: train + test]
    last = torch.randperm(len(held_out), generator=generator)[:test]
    x, y = known.images[first].float() / 255, known.labels[first]
    test_x, test_y = held_out.images[last].float() / 255, held_out.labels[last]
    other = outside.images[torch.randperm(len(outside), generator=generator)[:test]].float() / 255
    return World(
        (x[:train], y[:train]),
        (x[train:], y[train:]),
        (test_x, test_y),
        (rotated(test_x), test_y),
        other,
        100 * torch.randn(test, 1, 28, 28, generator=generator),
        10,
    )


def cifar10_worlds(seeds: tuple[int, ...], limit: int) -> Iterator[tuple[int, World, nn.Module]]:
    """CIFAR-10 features of a pretrained ResNet-56, and its last layer; the seed splits the test images in half.

    OOD inputs are from Fashion-MNIST; the shift is noise of 0.08.
    """
    import torch
    from torch import nn

    from pippin.claims.worlds.images.cifar_classifiers import resnet56
    from pippin.data import images

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = resnet56().to(device)

    def features(x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = network.linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].cpu()))
        with torch.inference_mode():
            for part in x.split(250):
                network(part.to(device))
        hook.remove()
        return torch.cat(seen).clone()

    def normal(seed: int, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    own = images.load("cifar-10", split="train", limit=limit)
    held_out = images.load("cifar-10", split="test", limit=limit)
    other = images.load("fashion-mnist", split="test", limit=limit // 2, size=32, channels=3)
    assert own.labels is not None
    assert held_out.labels is not None
    train, labels = (features(own.images.float() / 255), own.labels), held_out.labels
    levels = held_out.images.float() / 255
    x, shifted = features(levels), features((levels + 0.08 * normal(0, *levels.shape)).clamp(0, 1))
    ood, far = features(other.images.float() / 255), features(100 * normal(1, 200, 3, 32, 32))
    head = nn.Linear(64, 10)
    head.load_state_dict(network.linear.state_dict())
    for seed in seeds:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        tune, half = order[: limit // 2], order[limit // 2 :]
        pairs = [(data[at], labels[at]) for data, at in ((x, tune), (x, half), (shifted, half))]
        yield seed, World(train, pairs[0], pairs[1], pairs[2], ood, far, 10), head.eval()


def uniform(outputs: int) -> Predictor:
    """The same probability for every class, whatever the input."""
    from torch import nn

    from pippin.bayes.predictors.map_network import MAPNetwork

    class Uniform(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.new_zeros(len(x), outputs)

    return MAPNetwork(Uniform().eval())


def at_equal_loss(predictor: Predictor, other: Predictor, world: World) -> Predictor:
    """A predictor at the highest temperature of a grid whose held-out loss is at most that of another."""
    from dataclasses import replace

    from pippin import metrics
    from pippin.bayes.prediction import Prediction

    x, y = world.tune

    def hotter(temperature: float) -> Predictor:
        def predict(x: Any) -> Prediction:
            found = predictor(x)
            assert found.probs is not None
            tiny = 1e-30  # of probabilities that a float no longer holds
            return replace(found, probs=(found.probs.clamp_min(tiny).log() / temperature).softmax(-1))

        return predict

    limit, best = metrics.log_loss(probabilities(other, x), y), predictor
    for step in range(1, 41):
        one = hotter(1 + step / 4)
        best = one if metrics.log_loss(probabilities(one, x), y) <= limit else best
    return best


def measure(evidence: Evidence, name: str, arm: str, predictor: Predictor, world: World, seed: int) -> None:
    """Record a classifier on test, shifted, OOD and far inputs; the OOD score is the largest probability."""
    from pippin import metrics

    test, shifted = (probabilities(predictor, x) for x in (world.test[0], world.shifted[0]))
    own, ood = test.max(-1).values, probabilities(predictor, world.ood).max(-1).values
    for what, value, unit in (
        ("accuracy", metrics.accuracy(test, world.test[1]), ""),
        ("loss", metrics.log_loss(test, world.test[1]), "nats"),
        ("ECE", metrics.expected_calibration_error(test, world.test[1]), ""),
        ("loss under shift", metrics.log_loss(shifted, world.shifted[1]), "nats"),
        ("ECE under shift", metrics.expected_calibration_error(shifted, world.shifted[1]), ""),
        ("AUROC of OOD inputs", metrics.roc_auc(own, ood), ""),
        ("confidence far away", float(probabilities(predictor, world.far).max(-1).values.mean()), ""),
    ):
        evidence.add(f"{what}, {name}", value, arm=arm, seed=seed, unit=unit)


def probabilities(predictor: Predictor, x: Tensor) -> Tensor:
    """Predicted probabilities, computed in batches."""
    import torch

    found = []
    for part in x.split(256):
        probs = predictor(part).probs
        assert probs is not None
        found.append(probs)
    return torch.cat(found)
