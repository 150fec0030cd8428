"""SimGAN: a network that makes simulated pictures look real and leaves what their labels say, and its local judge.

Notable here:
- the refiner adds to its input and its last layer begins at zero: it starts as the identity, so the training on
  self-regularisation alone that comes first in the paper has nothing left to do
- the judge sees patches, and says of each whether it was refined: no global trick satisfies it
- a history of refined pictures keeps the judge from forgetting what it once saw through
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checkpoint import open_folder, save_folder
from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, UnsupportedModel

if TYPE_CHECKING:
    from pippin.generate.refiner_training import Refinement, Refining

Regulariser = Literal["identity", "gradient", "channel_mean"] | Callable[[Tensor], Tensor]
"""What of a picture the refiner is to keep: its pixels, their differences (so that brightness may change), the mean
over its channels (so that colour may change), or any function of a batch."""
_KIND: Final = "pippin_refiner"
_ROWS: Final = 256


@dataclass(frozen=True)
class RefinerConfig:
    """A refiner and its judge; the defaults are the paper's for gazes of 35 by 55 pixels.

    Attributes:
        shape: (channels, height, width) of the pictures.
        width: channels inside of the refiner.
        blocks: residual blocks of two convolutions each.
        judge_widths: channels of the judge's convolutions.
        judge_strides: their strides; more means larger patches.
        judge_pool: whether a maximum over 3 by 3 stands before its last 3 by 3 convolution.

    Raises:
        InvalidArgument: numbers out of range.
    """

    shape: tuple[int, int, int]
    width: int = 64
    blocks: int = 4
    judge_widths: tuple[int, ...] = (96, 64, 32)
    judge_strides: tuple[int, ...] = (2, 2, 1)
    judge_pool: bool = True

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1 or self.width < 1 or self.blocks < 0:
            raise InvalidArgument(f"a refiner of shape {self.shape}, width {self.width}, {self.blocks} blocks")
        if len(self.judge_widths) != len(self.judge_strides) or not self.judge_widths:
            raise InvalidArgument(
                f"judge_widths={self.judge_widths} and judge_strides={self.judge_strides}: give one stride for each"
            )
        if min(*self.judge_widths, *self.judge_strides, 1) < 1:
            raise InvalidArgument(f"judge_widths={self.judge_widths}, judge_strides={self.judge_strides}: 1 or more")


class SimRefiner(nn.Module):
    """The refiner R: pictures of a simulator to pictures of the same shape that look real.

    Args:
        config: its form.
        seed: of the first weights.

    Attributes:
        config: its form.
        facts: what is to be known beside it, as JSON values; saved with it.

    Source: "Learning from Simulated and Unsupervised Images through Adversarial Training" (arXiv:1612.07828), 2.1.

    >>> refiner = SimRefiner(RefinerConfig((1, 8, 8), width=4, blocks=1))
    >>> x = torch.rand(2, 1, 8, 8)
    >>> torch.equal(refiner(x), x)
    True
    """

    def __init__(self, config: RefinerConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.facts: dict[str, Any] = {}
        channels, width = config.shape[0], config.width
        with torch.random.fork_rng([]):  # layers draw their first weights from the global generator
            self.first = nn.Conv2d(channels, width, 3, padding=1)
            self.blocks = nn.Sequential(*(_Block(width) for _ in range(config.blocks)))
            self.last = nn.Conv2d(width, channels, 1)
        initialise(self, seed)
        with torch.no_grad():
            self.last.weight.zero_()

    def forward(self, x: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n channels height width"]:
        """Refined pictures, about from -1 to 1."""
        return x + torch.as_tensor(self.last(self.blocks(F.relu(self.first(x)))))

    @torch.no_grad()
    def refine(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Refine pictures from -1 to 1, in parts, without gradients; the result is clipped to that range.

        Raises:
            InvalidArgument: pictures of another shape.
            InvalidInput: pixels that are not finite, or outside -1 to 1.
        """
        check_pictures(x, self.config.shape, "pictures")
        place = self.first.weight.device
        parts = [self(part.to(place, torch.float32)).clamp(-1, 1).to(x.device) for part in x.split(_ROWS)]
        return torch.cat(parts)

    def refine_dataset(self, pictures: Float[Tensor, "n ..."], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Refined pictures with the labels that they came with: what a model for the real world is trained on.

        Raises:
            InvalidInput: labels of another number of pictures; and as `refine`.
        """
        if len(labels) != len(pictures):
            raise InvalidInput(f"{len(labels)} labels for {len(pictures)} pictures")
        return self.refine(pictures), labels

    def fit(
        self,
        synthetic: Float[Tensor, "n ..."],
        real: Float[Tensor, "m ..."],
        rounds: int,
        *,
        labels: Tensor | None = None,
        how: Refining | None = None,
        seed: int = 0,
        show: bool = True,
    ) -> Refinement:
        """Train on simulated pictures and on real ones without labels; see `pippin.generate.refiner_training.fit`."""
        from pippin.generate.refiner_training import Refining, fit

        return fit(self, synthetic, real, rounds, labels=labels, how=how or Refining(), seed=seed, show=show)

    def save(self, folder: str | Path) -> None:
        """Write a folder that `load` reads; one already there is replaced, whole or not at all.

        Raises:
            DiskFull: nothing was written.
        """
        from pydantic import TypeAdapter

        config = TypeAdapter(RefinerConfig).dump_python(self.config, mode="json")
        values = {"model_type": _KIND, "architectures": [], "config": config, "facts": dict(self.facts)}
        save_folder(Path(folder), config=values, tensors=self.state_dict())

    @classmethod
    def load(cls, folder: str | Path) -> SimRefiner:
        """Read what `save` wrote, in evaluation mode.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            CorruptedFile: a file is damaged.
        """
        from pydantic import TypeAdapter, ValidationError

        checkpoint = open_folder(folder)
        if checkpoint.config.get("model_type") != _KIND:
            raise UnsupportedModel(f"{folder} holds a {checkpoint.config.get('model_type')!r}, and no refiner")
        try:
            refiner = cls(TypeAdapter(RefinerConfig).validate_python(checkpoint.config.get("config")))
            refiner.load_state_dict({name: checkpoint.tensor(name).clone() for name in checkpoint.names()})
            refiner.facts = dict(checkpoint.config.get("facts") or {})
        except (ValidationError, RuntimeError, ValueError, TypeError) as error:
            raise CorruptedFile(f"{folder}: the configuration or the weights do not fit: {error}") from error
        return refiner.requires_grad_(False).eval()


class _Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1)
        self.two = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + torch.as_tensor(self.two(F.relu(self.one(x)))))


class PatchDiscriminator(nn.Module):
    """The judge D: for each patch the log-odds that it was refined (the difference of the paper's two logits).

    Args:
        config: its form.
        seed: of the first weights.

    Source: arXiv:1612.07828, section 2.2.
    """

    def __init__(self, config: RefinerConfig, *, seed: int = 1) -> None:
        super().__init__()
        self.config = config
        widths = (config.shape[0], *config.judge_widths)
        pairs = list(zip(widths, widths[1:], config.judge_strides, strict=False))
        with torch.random.fork_rng([]):
            self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, stride, 1) for a, b, stride in pairs)
            self.mix = nn.Conv2d(widths[-1], widths[-1], 1)
            self.last = nn.Conv2d(widths[-1], 1, 1)
        initialise(self, seed)

    @property
    def patch(self) -> int:
        """Pixels along the side of what one answer sees."""
        side, step = 1, 1
        for index, stride in enumerate(self.config.judge_strides):
            if self.config.judge_pool and index == len(self.layers) - 1:
                side += 2 * step
            side += 2 * step
            step *= stride
        return side

    def forward(self, x: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n rows columns"]:
        """The log-odds of each patch."""
        for index, layer in enumerate(self.layers):
            if self.config.judge_pool and index == len(self.layers) - 1:
                x = F.max_pool2d(x, 3, 1, 1)
            x = F.relu(layer(x))
        return torch.as_tensor(self.last(F.relu(self.mix(x))))[:, 0]


class HistoryBuffer:
    """Refined pictures of earlier rounds, some of which the judge sees again.

    Args:
        capacity: pictures kept.
        seed: of what is drawn and what is replaced.

    Raises:
        InvalidArgument: a capacity below 2.

    Source: arXiv:1612.07828, section 2.3.
    """

    def __init__(self, capacity: int, *, seed: int = 0) -> None:
        if capacity < 2:
            raise InvalidArgument(f"a history of {capacity} pictures; give 2 or more")
        self.capacity = capacity
        self.pictures: Tensor | None = None
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return 0 if self.pictures is None else len(self.pictures)

    def mix(self, current: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Half of the current pictures and as many earlier ones; then half of the current replace earlier ones.

        Before the buffer is full, the current ones go into it and are given back as they are.

        Raises:
            InvalidArgument: an odd number of pictures, or more than twice the capacity.
        """
        if len(current) % 2 or len(current) // 2 > self.capacity:
            raise InvalidArgument(f"{len(current)} pictures cannot be halved into a history of {self.capacity}")
        current = current.detach()
        if len(self) < self.capacity:
            known = [] if self.pictures is None else [self.pictures]
            self.pictures = torch.cat([*known, current])[: self.capacity]
            return current
        assert self.pictures is not None
        half = len(current) // 2

        def drawn(of: int) -> Tensor:
            return torch.randperm(of, generator=self._generator)[:half].to(current.device)

        mixed = torch.cat([current[:half], self.pictures[drawn(self.capacity)]])
        self.pictures[drawn(self.capacity)] = current[drawn(len(current))]
        return mixed


def kept(x: Float[Tensor, "n channels height width"], what: Regulariser) -> Float[Tensor, "n ..."]:
    """What of pictures a refiner is to keep (the paper's feature map).

    Raises:
        InvalidArgument: an unknown word.
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
    raise InvalidArgument(f"regulariser {what!r}: choose identity, gradient, channel_mean, or give a function")


def check_pictures(x: Tensor, shape: tuple[int, int, int], name: str) -> None:
    """Refuse pictures of another shape, none at all, or outside -1 to 1.

    Raises:
        InvalidArgument: another shape.
        InvalidInput: no pictures, another type, or values that are not finite or outside of the range.
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


def initialise(model: nn.Module, seed: int) -> None:
    """Random weights for layers with ReLU between them, and no biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.zero_()
            else:
                parameter.normal_(0.0, (2 / parameter[0].numel()) ** 0.5, generator=generator)
