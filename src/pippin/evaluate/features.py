"""Features of pictures: the numbers between which sets of pictures are compared.

Notable here:
- distances in features mean something within one extractor only, so every extractor has a name, and reports carry it
- the small extractor is trained where it is used, within seconds: to tell what pictures show (or, without labels, how
  they are turned), and how blurred and how noisy they were made, so that it sees shape and texture
- features are scaled to mean 0 and variance 1 on the pictures that they were learnt from
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.scenes import SceneSpec, scenes
from pippin.train import AdamW, Cosine, Loss, Trainer

_ROWS: Final = 512
"""Pictures that pass a network at once."""
_NOISE: Final = 0.3
"""Standard deviation of the strongest noise that the small extractor learns to tell."""


@runtime_checkable
class Features(Protocol):
    """What turns pictures into numbers.

    Attributes:
        name: says what it is and what it learnt from; figures of different names cannot be compared.
        dim: numbers for each picture.
    """

    name: str
    dim: int

    def __call__(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n dim"]:
        """The features of pictures from -1 to 1, without gradients."""


class Pixels:
    """The pixels themselves as features: for small pictures, and to see what learnt features add.

    Args:
        shape: (channels, height, width) of the pictures.

    >>> Pixels((1, 2, 2))(torch.tensor([[[[0.0, 1.0], [-1.0, 0.5]]]])).tolist()
    [[0.0, 1.0, -1.0, 0.5]]
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        self.name = "pixels"
        self.dim = shape[0] * shape[1] * shape[2]

    def __call__(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n dim"]:
        """The pixels of each picture, in a row.

        Raises:
            InvalidArgument: pictures of another shape.
            InvalidInput: pixels that are not finite.
        """
        _check(x, self.shape)
        return x.detach().float().flatten(1)


class LearntFeatures:
    """The last layer of a small convolutional network, averaged over the picture and scaled; made by `learn_features`.

    Attributes:
        name: see `Features`.
        dim: features of each picture.
        shape: (channels, height, width) of the pictures.
        network: pictures to features, and to what was learnt.
    """

    def __init__(self, network: _Network, pictures: Float[Tensor, "n ..."], name: str) -> None:
        self.network, self.name = network.eval().requires_grad_(False), name
        self.shape, self.dim = network.shape, network.dim
        self._mean, self._scale = torch.zeros(self.dim), torch.ones(self.dim)
        raw = self(pictures)
        # a feature that says the same of all pictures stays at zero
        self._mean, self._scale = raw.mean(0), raw.std(0).clamp_min(1e-3)

    @torch.no_grad()
    def __call__(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n dim"]:
        """The features of pictures from -1 to 1; on the CPU.

        Raises:
            InvalidArgument: pictures of another shape.
            InvalidInput: pixels that are not finite.
        """
        _check(x, self.shape)
        place = self.network.head.weight.device
        parts = [self.network.features(part.to(place, torch.float32)).cpu() for part in x.split(_ROWS)]
        return (torch.cat(parts) - self._mean) / self._scale

    @torch.no_grad()
    def told(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n outputs"]:
        """What the network says of pictures: its labels (logits, or numbers), then their blur and noise, 0 to 1."""
        _check(x, self.shape)
        place = self.network.head.weight.device
        return torch.cat([self.network(part.to(place, torch.float32)).cpu() for part in x.split(_ROWS)])


def learn_features(
    pictures: Float[Tensor, "n ..."],
    labels: Int[Tensor, n] | Float[Tensor, "n numbers"] | None = None,
    *,
    name: str = "small classifier",
    dim: int = 48,
    steps: int = 250,
    batch: int = 64,
    seed: int = 0,
) -> LearntFeatures:
    """Train a small extractor on pictures: seconds on one core for 16 by 16 pixels.

    Args:
        pictures: from -1 to 1, (channels, height, width) with at least 8 by 8 pixels.
        labels: a class of each, or numbers that tell what is on it; without, it learns how pictures were turned (which
            square pictures can be).
        name: how reports call it.
        dim: features.
        steps: of training.
        batch: pictures of a step.
        seed: of weights and batches.

    Raises:
        InvalidArgument: numbers out of range, pictures too small, or not square where no labels are given.
        InvalidInput: pixels that are not finite, or labels of another number of pictures.
    """
    _check(pictures, None)
    if min(dim, steps, batch) < 1 or seed < 0:
        raise InvalidArgument(
            f"dim={dim}, steps={steps}, batch={batch}, seed={seed}: give 1 or more, and seed 0 or more"
        )
    if pictures.ndim != 4 or min(pictures.shape[2:]) < 8:
        raise InvalidArgument(f"pictures of shape {tuple(pictures.shape[1:])}; give channels and 8 by 8 pixels or more")
    if labels is None and pictures.shape[2] != pictures.shape[3]:
        raise InvalidArgument(f"pictures of {tuple(pictures.shape[2:])} pixels cannot be turned; give labels")
    if labels is not None and len(labels) != len(pictures):
        raise InvalidInput(f"{len(labels)} labels for {len(pictures)} pictures")
    outputs = 4 if labels is None else labels.shape[1] if labels.is_floating_point() else int(labels.max()) + 1
    channels, height, width = pictures.shape[1:]
    network = _Network((channels, height, width), outputs + 2, dim, seed)
    Trainer(
        network,
        _told,
        _Batches(pictures.float(), labels, batch, seed),
        steps=steps,
        optimiser=AdamW(lr=3e-3, weight_decay=0.01),
        schedule=Cosine(warmup=0.05),
        seed=seed,
        show=False,
    ).fit()
    return LearntFeatures(network, pictures[: 4 * _ROWS], name)


@lru_cache(maxsize=8)
def scene_features(spec: SceneSpec, seed: int = 0, *, steps: int = 250) -> LearntFeatures:
    """The small extractor, trained to count the objects of each kind and colour in made scenes; kept for the process.

    Args:
        spec: what the scenes are like.
        seed: of weights and scenes; claims use one extractor for all of their seeds.
        steps: of training.

    Raises:
        InvalidArgument: as `learn_features`.
    """
    made = scenes(spec, 2000, seed=900_000 + seed)
    slots = [(kind, colour) for kind in spec.kinds for colour in spec.colours]
    numbers = torch.zeros(len(made), len(slots))
    for index, things in enumerate(made.things):
        for thing in things:
            numbers[index, slots.index((thing.kind, thing.colour))] += 1
    name = f"small classifier of scenes of {spec.size} pixels, seed {seed}"
    return learn_features(made.x, numbers, name=name, steps=steps, seed=seed)


class _Network(nn.Module):
    """Four convolutions, their mean over the picture, and a linear layer."""

    def __init__(self, shape: tuple[int, int, int], outputs: int, dim: int, seed: int) -> None:
        super().__init__()
        self.shape, self.dim = shape, dim
        with torch.random.fork_rng([]):  # layers draw their first weights from the global generator
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
        """Before scaling, with gradients."""
        for layer in self.layers:
            x = F.silu(layer(x))
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """What it learns to tell; the last two are blur and noise."""
        return torch.as_tensor(self.head(self.features(x)))


class _Batches:
    """Pictures drawn again and again, blurred and made noisy by amounts that are told; turned where nothing else is."""

    def __init__(self, pictures: Tensor, labels: Tensor | None, batch: int, seed: int) -> None:
        self.pictures, self.labels, self.batch, self.seed = pictures, labels, batch, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Pictures, what they show, and how they were spoilt."""
        generator = torch.Generator().manual_seed(self.seed)
        n = self.batch
        while True:
            index = torch.randint(len(self.pictures), (n,), generator=generator)
            x = self.pictures[index]
            if self.labels is None:
                shown = torch.randint(4, (n,), generator=generator)
                x = torch.stack([part.rot90(int(turn), (1, 2)) for part, turn in zip(x, shown, strict=True)])
            else:
                shown = self.labels[index]
            # about a third of the pictures has no blur, and a third no noise
            amount = (1.5 * torch.rand(n, 2, generator=generator) - 0.5).clamp_min(0)
            blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
            x = x.lerp(blurred, amount[:, 0].view(-1, 1, 1, 1))
            noise = torch.randn(x.shape, generator=generator)
            yield x + _NOISE * amount[:, 1].view(-1, 1, 1, 1) * noise, shown, amount


def _told(model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
    x, shown, amount = batch
    said = model(x)
    labels, spoilt = said[:, :-2], said[:, -2:]
    if shown.is_floating_point():
        loss = F.mse_loss(labels, shown, reduction="sum")
    else:
        loss = F.cross_entropy(labels, shown, reduction="sum")
    return Loss(loss + 4 * F.mse_loss(spoilt, amount, reduction="sum"), len(x))


def _check(x: Tensor, shape: tuple[int, int, int] | None) -> None:
    if shape is not None and tuple(x.shape[1:]) != shape:
        raise InvalidArgument(f"pictures of shape {tuple(x.shape[1:])}; the features are of {shape}")
    if not len(x):
        raise InvalidInput("there is no picture to take features of")
    if not x.is_floating_point():
        raise InvalidInput(f"pictures of type {x.dtype}; give floating point from -1 to 1 (levels / 127.5 - 1)")
    if not bool(x.isfinite().all()):
        raise InvalidInput("pictures hold NaN or infinite values")
