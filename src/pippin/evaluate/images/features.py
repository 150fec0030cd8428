"""Features of images: the vectors by which sets of images are compared.

Notable here:
- distances of different extractors are not comparable, so every extractor has a name, which reports show
- the small extractor is trained within seconds where it is used: it predicts labels (or rotations, without labels)
  and the amount of blur and noise that was added, so that it is sensitive to shape and to texture
- features are standardized to mean 0 and variance 1 on the training images
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.random_batches import RandomBatches, resampled
from pippin.data.synthetic.scenes import SceneSpec, sample_scenes
from pippin.train import AdamW, CosineSchedule, Loss, Trainer

_BATCH_SIZE: Final = 512
"""Batch size of inference."""
_NOISE: Final = 0.3
"""Standard deviation of the strongest noise that the small extractor is trained on."""


@runtime_checkable
class Features(Protocol):
    """An extractor of features.

    Attributes:
        name: the architecture and the training data; distances under different names cannot be compared.
        dim: number of features of each image.
    """

    name: str
    dim: int

    def __call__(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n dim"]:
        """The features of images with values from -1 to 1, without gradients."""


class Pixels:
    """The pixels themselves as features: for small images, and to see what learned features add.

    Args:
        shape: (channels, height, width) of the images.

    >>> Pixels((1, 2, 2))(torch.tensor([[[[0.0, 1.0], [-1.0, 0.5]]]])).tolist()
    [[0.0, 1.0, -1.0, 0.5]]
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        self.name = "pixels"
        self.dim = shape[0] * shape[1] * shape[2]

    def __call__(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n dim"]:
        """The pixels of each image as a flat vector.

        Raises:
            InvalidArgument: images of another shape.
            InvalidInput: pixels that are not finite.
        """
        _check(x, self.shape)
        return x.detach().float().flatten(1)


class TrainedFeatures:
    """The last hidden layer of a small convolutional network, averaged over the image and standardized.

    `train_features` makes one.

    Attributes:
        name: see `Features`.
        dim: number of features of each image.
        shape: (channels, height, width) of the images.
        network: the trained network.
    """

    def __init__(self, network: _Network, images: Float[Tensor, "n ..."], name: str) -> None:
        self.network, self.name = network.eval().requires_grad_(False), name
        self.shape, self.dim = network.shape, network.dim
        self._mean, self._scale = torch.zeros(self.dim), torch.ones(self.dim)
        raw = self(images)
        # the lower bound keeps a constant feature at zero instead of dividing by zero
        self._mean, self._scale = raw.mean(0), raw.std(0).clamp_min(1e-3)

    @torch.no_grad()
    def __call__(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n dim"]:
        """The features of images with values from -1 to 1, as a tensor on the CPU.

        Raises:
            InvalidArgument: images of another shape.
            InvalidInput: pixels that are not finite.
        """
        _check(x, self.shape)
        device = self.network.head.weight.device
        parts = [self.network.features(part.to(device, torch.float32)).cpu() for part in x.split(_BATCH_SIZE)]
        return (torch.cat(parts) - self._mean) / self._scale

    @torch.no_grad()
    def outputs(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n outputs"]:
        """Outputs of the network: logits or regression values of the labels, then blur and noise from 0 to 1."""
        _check(x, self.shape)
        device = self.network.head.weight.device
        return torch.cat([self.network(part.to(device, torch.float32)).cpu() for part in x.split(_BATCH_SIZE)])


@checked
def train_features(
    images: Float[Tensor, "n ..."],
    labels: Int[Tensor, n] | Float[Tensor, "n targets"] | None = None,
    *,
    name: str = "small classifier",
    dim: PositiveInt = 48,
    steps: PositiveInt = 250,
    batch_size: PositiveInt = 64,
    seed: NonNegativeInt = 0,
) -> TrainedFeatures:
    """Train a small extractor on images: seconds on one core for 16 by 16 pixels.

    Args:
        images: (channels, height, width) with values from -1 to 1, at least 8 by 8 pixels.
        labels: the class of each image, or regression targets; None trains on predicting rotations of square images.
        name: the extractor's name in reports.
        dim: number of features.
        steps: number of training steps.
        batch_size: images per step.
        seed: seed of weights and batches.

    Raises:
        InvalidArgument: arguments out of range, images too small, or not square where no labels are given.
        InvalidInput: pixels that are not finite, or labels of another number of images.
    """
    _check(images, None)
    if images.ndim != 4 or min(images.shape[2:]) < 8:
        raise InvalidArgument(f"images of shape {tuple(images.shape[1:])}; give channels and 8 by 8 pixels or more")
    if labels is None and images.shape[2] != images.shape[3]:
        raise InvalidArgument(f"images of {tuple(images.shape[2:])} pixels cannot be rotated; give labels")
    if labels is not None and len(labels) != len(images):
        raise InvalidInput(f"{len(labels)} labels for {len(images)} images")
    outputs = 4 if labels is None else labels.shape[1] if labels.is_floating_point() else int(labels.max()) + 1
    channels, height, width = images.shape[1:]
    network = _Network((channels, height, width), outputs + 2, dim, seed)
    Trainer(
        network,
        _loss,
        _augmented(images.float(), labels, batch_size, seed),
        steps=steps,
        optimizer=AdamW(lr=3e-3, weight_decay=0.01),
        schedule=CosineSchedule(warmup_steps=0.05),
        seed=seed,
        show_progress=False,
    ).fit()
    return TrainedFeatures(network, images[: 4 * _BATCH_SIZE], name)


@lru_cache(maxsize=8)
def scene_features(spec: SceneSpec, seed: int = 0, *, steps: int = 250) -> TrainedFeatures:
    """The small extractor, trained to count the objects of each kind and color in synthetic scenes; cached.

    Args:
        spec: the distribution of scenes.
        seed: seed of weights and scenes; claims use one extractor for all of their seeds.
        steps: number of training steps.

    Raises:
        InvalidArgument: see `train_features`.
    """
    scenes = sample_scenes(spec, 2000, seed=900_000 + seed)
    columns = [(kind, color) for kind in spec.kinds for color in spec.colors]
    counts = torch.zeros(len(scenes), len(columns))
    for index, things in enumerate(scenes.things):
        for thing in things:
            counts[index, columns.index((thing.kind, thing.color))] += 1
    name = f"small classifier of scenes of {spec.size} pixels, seed {seed}"
    return train_features(scenes.x, counts, name=name, steps=steps, seed=seed)


class _Network(nn.Module):
    """Four convolutions, a mean over the image, and a linear layer."""

    def __init__(self, shape: tuple[int, int, int], outputs: int, dim: int, seed: int) -> None:
        super().__init__()
        self.shape, self.dim = shape, dim
        with torch.random.fork_rng([]):  # constructors initialize from the global generator, which must not change
            self.layers = nn.ModuleList(
                nn.Conv2d(a, b, 3, stride, 1)
                for a, b, stride in ((shape[0], 24, 1), (24, 32, 2), (32, 48, 2), (48, dim, 1))
            )
            self.head = nn.Linear(dim, outputs)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 1:
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, (2 / parameter[0].numel()) ** 0.5, generator=generator)

    def features(self, x: Tensor) -> Tensor:
        """Features [n, dim] before standardization, with gradients."""
        for layer in self.layers:
            x = F.silu(layer(x))
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [n, labels + 2]; the last two are blur and noise."""
        return torch.as_tensor(self.head(self.features(x)))


def _augmented(
    images: Tensor, labels: Tensor | None, batch_size: int, seed: int
) -> RandomBatches[tuple[Tensor, Tensor, Tensor]]:
    """Endless batches of blurred and noisy images, their labels or rotations, and the amounts of blur and noise."""

    def make(index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        x, n = images[index], batch_size
        if labels is None:
            target = torch.randint(4, (n,), generator=generator)  # quarter turns
            x = torch.stack([part.rot90(int(turns), (1, 2)) for part, turns in zip(x, target, strict=True)])
        else:
            target = labels[index]
        # a third of the images has no blur, and a third no noise
        amount = (1.5 * torch.rand(n, 2, generator=generator) - 0.5).clamp_min(0)
        blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
        x = x.lerp(blurred, amount[:, 0].view(-1, 1, 1, 1))
        noise = torch.randn(x.shape, generator=generator)
        return x + _NOISE * amount[:, 1].view(-1, 1, 1, 1) * noise, target, amount

    return resampled(len(images), batch_size, make, seed=seed)


def _loss(model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
    x, target, amount = batch
    outputs = model(x)
    labels, degradation = outputs[:, :-2], outputs[:, -2:]
    if target.is_floating_point():
        loss = F.mse_loss(labels, target, reduction="sum")
    else:
        loss = F.cross_entropy(labels, target, reduction="sum")
    return Loss(loss + 4 * F.mse_loss(degradation, amount, reduction="sum"), len(x))


def _check(x: Tensor, shape: tuple[int, int, int] | None) -> None:
    if shape is not None and tuple(x.shape[1:]) != shape:
        raise InvalidArgument(f"images of shape {tuple(x.shape[1:])}; the extractor takes {shape}")
    if not len(x):
        raise InvalidInput("there are no images to compute features of")
    if not x.is_floating_point():
        raise InvalidInput(f"images of type {x.dtype}; give floating point from -1 to 1 (levels / 127.5 - 1)")
    if not bool(x.isfinite().all()):
        raise InvalidInput("images hold NaN or infinite values")
