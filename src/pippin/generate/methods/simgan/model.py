"""SimGAN: a refiner that makes synthetic images look real and preserves their annotations, and its local discriminator.

Notable here:
- the refiner adds a residual to its input and its last layer is zero at first: it starts as the identity, so the
  paper's first phase, training on self-regularization alone, is not needed
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
"""Feature map of self-regularization, whose change is penalized: the pixels, their differences (so that brightness may
change), the mean over channels (so that color may change), or any function of a batch of images."""
_BATCH_SIZE: Final = 256
"""Batch size of `SimRefiner.refine`."""


@checked
@dataclass(frozen=True)
class RefinerConfig:
    """Configuration of a refiner and its discriminator; the defaults are the paper's for eye images of 35 by 55 pixels.

    Attributes:
        shape: (channels, height, width) of the images.
        channels: channels of the refiner's hidden layers.
        num_blocks: number of residual blocks of two convolutions each.
        discriminator_channels: channels of each convolution of the discriminator.
        discriminator_strides: their strides; larger strides mean larger patches.
        discriminator_pool: whether 3 by 3 max pooling precedes the last of these convolutions.

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
    """The refiner R: maps images of a simulator to images of the same shape that look real.

    Args:
        config: the configuration.
        seed: seed of the initial weights.

    Attributes:
        config: the configuration.
        metadata: JSON values that are saved with the model.

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
        with torch.random.fork_rng([]):  # layers sample their initial weights from the global generator
            self.first = nn.Conv2d(channels, width, 3, padding=1)
            self.blocks = nn.Sequential(*(_Block(width) for _ in range(config.num_blocks)))
            self.last = nn.Conv2d(width, channels, 1)
        initialize(self, seed)
        with torch.no_grad():
            self.last.weight.zero_()

    def forward(self, x: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n channels height width"]:
        """Refined images, from about -1 to 1."""
        return x + torch.as_tensor(self.last(self.blocks(F.relu(self.first(x)))))

    @torch.no_grad()
    def refine(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Refine images from -1 to 1, in batches, without gradients; the result is clipped to that range.

        Raises:
            InvalidArgument: images of another shape.
            InvalidInput: pixels that are not finite, or outside -1 to 1.
        """
        check_images(x, self.config.shape, "images")
        device = self.first.weight.device
        batches = [self(batch.to(device, torch.float32)).clamp(-1, 1).to(x.device) for batch in x.split(_BATCH_SIZE)]
        return torch.cat(batches)

    def refine_dataset(self, images: Float[Tensor, "n ..."], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Refined images with their labels, to train a model for real images on.

        Raises:
            InvalidInput: another number of labels than of images; and as `refine`.
        """
        if len(labels) != len(images):
            raise InvalidInput(f"{len(labels)} labels for {len(images)} images; give one for each")
        return self.refine(images), labels

    def save(self, path: str | Path) -> None:
        """Write the model to a folder that `load` reads; an existing model there is replaced atomically.

        Raises:
            DiskFull: the disk is full; nothing was written.
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
            UnsupportedModel: the folder holds another kind of model.
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
    """The discriminator D: the logit of each patch being refined (the difference of the paper's two logits).

    Args:
        config: the configuration.
        seed: seed of the initial weights.

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
        side, step = 1, 1  # a layer over 3 by 3 adds 2 steps, a step being the product of the strides before
        for index, stride in enumerate(self.config.discriminator_strides):
            if self.config.discriminator_pool and index == len(self.layers) - 1:
                side += 2 * step
            side += 2 * step
            step *= stride
        return side

    def forward(self, x: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n rows columns"]:
        """The logit of each patch; positive for refined."""
        for index, layer in enumerate(self.layers):
            if self.config.discriminator_pool and index == len(self.layers) - 1:
                x = F.max_pool2d(x, 3, 1, 1)
            x = F.relu(layer(x))
        return torch.as_tensor(self.last(F.relu(self.mix(x))))[:, 0]


class HistoryBuffer:
    """A buffer of refined images of earlier steps, of which the discriminator's batches are partly made.

    Args:
        capacity: maximum number of stored images.
        seed: seed of the sampled and replaced images.

    Attributes:
        images: the stored images; None before the first `mix`.

    Source: arXiv:1612.07828, section 2.3.
    """

    @checked
    def __init__(self, capacity: Annotated[int, Ge(2)], *, seed: int = 0) -> None:
        self.capacity = capacity
        self.images: Tensor | None = None
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return 0 if self.images is None else len(self.images)

    def mix(self, current: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """A batch of half of the current images and as many stored ones; half of the current ones replace stored ones.

        Until the buffer is full, the current images are stored, and returned unchanged.

        Raises:
            InvalidArgument: an odd number of images, or more than twice the capacity.
        """
        if len(current) % 2 or len(current) // 2 > self.capacity:
            raise InvalidArgument(
                f"{len(current)} images cannot be halved into a history of {self.capacity}; give an even number of at "
                f"most {2 * self.capacity}"
            )
        current = current.detach()
        if len(self) < self.capacity:
            stored = [] if self.images is None else [self.images]
            self.images = torch.cat([*stored, current])[: self.capacity]
            return current
        assert self.images is not None
        half = len(current) // 2

        def sample(count: int) -> Tensor:
            """Indices of half a batch among ``count`` images, without replacement."""
            return torch.randperm(count, generator=self._generator)[:half].to(current.device)

        mixed = torch.cat([current[:half], self.images[sample(self.capacity)]])
        self.images[sample(self.capacity)] = current[sample(len(current))]
        return mixed


def regularized_features(
    x: Float[Tensor, "n channels height width"], regularizer: Regularizer
) -> Float[Tensor, "n ..."]:
    """The features of images that self-regularization preserves (the paper's feature map psi).

    Raises:
        InvalidArgument: an unknown name.
    """
    if callable(regularizer):
        return regularizer(x)
    if regularizer == "identity":
        return x
    if regularizer == "channel_mean":
        return x.mean(1, keepdim=True)
    if regularizer == "gradient":
        down, right = x.diff(dim=2), x.diff(dim=3)
        return torch.cat([down.flatten(1), right.flatten(1)], 1)
    raise InvalidArgument(f"regularizer {regularizer!r}: choose identity, gradient, channel_mean, or give a function")


def check_images(x: Tensor, shape: tuple[int, int, int], name: str) -> None:
    """Refuse images that a refiner of images of ``shape`` cannot read; ``name`` says in errors which images these are.

    Raises:
        InvalidArgument: images of another shape.
        InvalidInput: no images, integers, or values that are not finite or outside -1 to 1.
    """
    if tuple(x.shape[1:]) != shape:
        raise InvalidArgument(f"{name} of shape {tuple(x.shape[1:])}; the refiner's are {shape}")
    if not len(x):
        raise InvalidInput(f"there are no {name}; give at least one")
    if not x.is_floating_point() or not bool(x.isfinite().all()):
        raise InvalidInput(f"{name} are of type {x.dtype} or hold NaN; give finite floating point from -1 to 1")
    low, high = float(x.min()), float(x.max())
    if low < -1.001 or high > 1.001:
        raise InvalidInput(f"{name} range from {low:.3g} to {high:.3g}; scale them to -1 to 1 (levels / 127.5 - 1)")


def initialize(model: nn.Module, seed: int) -> None:
    """Initialize weights for ReLU (He et al. 2015, arXiv:1502.01852), and biases to zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.zero_()
            else:
                parameter.normal_(0.0, (2 / parameter[0].numel()) ** 0.5, generator=generator)
