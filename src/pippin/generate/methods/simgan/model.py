"""SimGAN: a refiner that makes synthetic images look real and preserves their annotations, and its local discriminator.

Notable here:
- the refiner adds to its input and its last layer is zero at first: it starts as the identity, so the paper's first
  phase, training on self-regularization alone, is not needed
- the discriminator classifies patches, so that changes stay local
- a history of refined images keeps the discriminator from forgetting artifacts of earlier refiners
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.formats import checkpoint

Regularizer = Literal["identity", "gradient", "channel_mean"] | Callable[[Tensor], Tensor]
"""What of an image the refiner is to keep: its pixels, their differences (so that brightness may change), the mean
over its channels (so that color may change), or any function of a batch."""
_ROWS: Final = 256


@checked
@dataclass(frozen=True)
class RefinerConfig:
    """Configuration of a refiner and its discriminator; the defaults are the paper's for eye images of 35 by 55 pixels.

    Attributes:
        shape: (channels, height, width) of the images.
        channels: of the refiner's hidden layers.
        num_blocks: residual blocks of two convolutions each.
        discriminator_channels: channels of the discriminator's convolutions.
        discriminator_strides: their strides; more means larger patches.
        discriminator_pool: whether a maximum over 3 by 3 stands before its last 3 by 3 convolution.

    Raises:
        InvalidArgument: numbers out of range.
    """

    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    channels: PositiveInt = 64
    num_blocks: NonNegativeInt = 4
    discriminator_channels: tuple[PositiveInt, ...] = (96, 64, 32)
    discriminator_strides: tuple[PositiveInt, ...] = (2, 2, 1)
    discriminator_pool: bool = True

    def __post_init__(self) -> None:
        if len(self.discriminator_channels) != len(self.discriminator_strides) or not self.discriminator_channels:
            raise InvalidArgument(
                f"discriminator_channels={self.discriminator_channels} and "
                f"discriminator_strides={self.discriminator_strides}: give one stride for each convolution"
            )


class SimRefiner(nn.Module):
    """The refiner R: images of a simulator to images of the same shape that look real.

    Args:
        config: the configuration.
        seed: of the first weights.

    Attributes:
        config: the configuration.
        metadata: what is to be known beside it, as JSON values; saved with it.

    Source: "Learning from Simulated and Unsupervised Images through Adversarial Training" (arXiv:1612.07828), 2.1.

    >>> refiner = SimRefiner(RefinerConfig((1, 8, 8), channels=4, num_blocks=1))
    >>> x = torch.rand(2, 1, 8, 8)
    >>> torch.equal(refiner(x), x)
    True
    """

    model_type: ClassVar[str] = "pippin_refiner"

    def __init__(self, config: RefinerConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.metadata: dict[str, Any] = {}
        channels, width = config.shape[0], config.channels
        with torch.random.fork_rng([]):  # layers draw their first weights from the global generator
            self.first = nn.Conv2d(channels, width, 3, padding=1)
            self.blocks = nn.Sequential(*(_Block(width) for _ in range(config.num_blocks)))
            self.last = nn.Conv2d(width, channels, 1)
        initialize(self, seed)
        with torch.no_grad():
            self.last.weight.zero_()

    def forward(self, x: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n channels height width"]:
        """Refined images, about from -1 to 1."""
        return x + torch.as_tensor(self.last(self.blocks(F.relu(self.first(x)))))

    @torch.no_grad()
    def refine(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Refine images from -1 to 1, in parts, without gradients; the result is clipped to that range.

        Raises:
            InvalidArgument: images of another shape.
            InvalidInput: pixels that are not finite, or outside -1 to 1.
        """
        check_images(x, self.config.shape, "images")
        place = self.first.weight.device
        parts = [self(part.to(place, torch.float32)).clamp(-1, 1).to(x.device) for part in x.split(_ROWS)]
        return torch.cat(parts)

    def refine_dataset(self, images: Float[Tensor, "n ..."], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Refined images with the labels that they came with: what a model for the real world is trained on.

        Raises:
            InvalidInput: labels of another number of images; and as `refine`.
        """
        if len(labels) != len(images):
            raise InvalidInput(f"{len(labels)} labels for {len(images)} images")
        return self.refine(images), labels

    def save(self, path: str | Path) -> None:
        """Write a folder that `load` reads; one already there is replaced, whole or not at all.

        Raises:
            DiskFull: nothing was written.
        """
        checkpoint.save(self, path, model_type=self.model_type, config=self.config, metadata=self.metadata)

    @classmethod
    def load(cls, path: str | Path, *, device: str | None = None) -> SimRefiner:
        """Read what `save` wrote, in evaluation mode.

        Args:
            path: the folder.
            device: as `pippin.load` takes it; None chooses.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            CorruptedFile: a file is damaged.
        """

        def build(saved: checkpoint.SavedModel[RefinerConfig]) -> SimRefiner:
            refiner = cls(saved.config)
            refiner.metadata = saved.metadata
            return refiner

        refiner = checkpoint.load(path, build, model_type=cls.model_type, config_type=RefinerConfig, device=device)
        return refiner.requires_grad_(False)


class _Block(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1)
        self.two = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + torch.as_tensor(self.two(F.relu(self.one(x)))))


class PatchDiscriminator(nn.Module):
    """The discriminator D: for each patch the log-odds that it was refined (the difference of the paper's two logits).

    Args:
        config: the configuration.
        seed: of the first weights.

    Source: arXiv:1612.07828, section 2.2.
    """

    def __init__(self, config: RefinerConfig, *, seed: int = 1) -> None:
        super().__init__()
        self.config = config
        widths = (config.shape[0], *config.discriminator_channels)
        pairs = list(zip(widths, widths[1:], config.discriminator_strides, strict=False))
        with torch.random.fork_rng([]):
            self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, stride, 1) for a, b, stride in pairs)
            self.mix = nn.Conv2d(widths[-1], widths[-1], 1)
            self.last = nn.Conv2d(widths[-1], 1, 1)
        initialize(self, seed)

    @property
    def patch(self) -> int:
        """Side of the receptive field of one output, in pixels."""
        side, step = 1, 1
        for index, stride in enumerate(self.config.discriminator_strides):
            if self.config.discriminator_pool and index == len(self.layers) - 1:
                side += 2 * step
            side += 2 * step
            step *= stride
        return side

    def forward(self, x: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n rows columns"]:
        """The log-odds of each patch."""
        for index, layer in enumerate(self.layers):
            if self.config.discriminator_pool and index == len(self.layers) - 1:
                x = F.max_pool2d(x, 3, 1, 1)
            x = F.relu(layer(x))
        return torch.as_tensor(self.last(F.relu(self.mix(x))))[:, 0]


class HistoryBuffer:
    """Refined images of earlier steps, some of which the discriminator sees again.

    Args:
        capacity: maximum number of stored images.
        seed: seed of the sampled and replaced images.

    Source: arXiv:1612.07828, section 2.3.
    """

    @checked
    def __init__(self, capacity: Annotated[int, Ge(2)], *, seed: int = 0) -> None:
        self.capacity = capacity
        self.pictures: Tensor | None = None
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return 0 if self.pictures is None else len(self.pictures)

    def mix(self, current: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Half of the current images and as many earlier ones; then half of the current replace earlier ones.

        Before the buffer is full, the current ones go into it and are given back as they are.

        Raises:
            InvalidArgument: an odd number of images, or more than twice the capacity.
        """
        if len(current) % 2 or len(current) // 2 > self.capacity:
            raise InvalidArgument(f"{len(current)} images cannot be halved into a history of {self.capacity}")
        current = current.detach()
        if len(self) < self.capacity:
            known = [] if self.pictures is None else [self.pictures]
            self.pictures = torch.cat([*known, current])[: self.capacity]
            return current
        assert self.pictures is not None
        half = len(current) // 2

        def sample(of: int) -> Tensor:
            return torch.randperm(of, generator=self._generator)[:half].to(current.device)

        mixed = torch.cat([current[:half], self.pictures[sample(self.capacity)]])
        self.pictures[sample(self.capacity)] = current[sample(len(current))]
        return mixed


def regularized_features(x: Float[Tensor, "n channels height width"], what: Regularizer) -> Float[Tensor, "n ..."]:
    """The features of images that self-regularization preserves (the paper's feature map).

    Raises:
        InvalidArgument: an unknown name.
    """
    if callable(what):
        return what(x)
    if what == "identity":
        return x
    if what == "channel_mean":
        return x.mean(1, keepdim=True)
    if what == "gradient":
        down, right = x.diff(dim=2), x.diff(dim=3)
        return torch.cat([down.flatten(1), right.flatten(1)], 1)
    raise InvalidArgument(f"regularizer {what!r}: choose identity, gradient, channel_mean, or give a function")


def check_images(x: Tensor, shape: tuple[int, int, int], name: str) -> None:
    """Refuse images of another shape, none at all, or outside -1 to 1.

    Raises:
        InvalidArgument: another shape.
        InvalidInput: no images, another type, or values that are not finite or outside of the range.
    """
    if tuple(x.shape[1:]) != shape:
        raise InvalidArgument(f"{name} of shape {tuple(x.shape[1:])}; the refiner's are {shape}")
    if not len(x):
        raise InvalidInput(f"there are no {name}")
    if not x.is_floating_point() or not bool(x.isfinite().all()):
        raise InvalidInput(f"{name} of type {x.dtype} with or without NaN; give finite floating point from -1 to 1")
    low, high = float(x.min()), float(x.max())
    if low < -1.001 or high > 1.001:
        raise InvalidInput(f"{name} reach from {low:.3g} to {high:.3g}; scale them to -1 to 1 (levels / 127.5 - 1)")


def initialize(model: nn.Module, seed: int) -> None:
    """Random weights for layers with ReLU between them, and no biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.zero_()
            else:
                parameter.normal_(0.0, (2 / parameter[0].numel()) ** 0.5, generator=generator)
