r"""A strictly local score network: each output pixel depends on a small window of the noisy image and condition map.

Notable here:
- a score that depends, at each pixel, on few pixels and few conditions generalizes to more objects: locally, a longer
  scene looks like training scenes; this network can only learn such scores
- only 3 by 3 convolutions mix pixels: there is no attention and no downsampling, and layer norms are over the channels
  of each pixel, since a norm over space would make every output depend on the whole image
- the radius of the receptive field is exact and independent of depth: convolutions beyond it are 1 by 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import ConditionEmbedding, Conditioning, ConditioningSpec
from pippin.nn.images.time_embedding import TimeEmbedding
from pippin.nn.linear import Linear


@checked
@dataclass(frozen=True)
class LocalNetConfig:
    """Configuration of a `LocalNet`.

    Attributes:
        channels: channels of the hidden layers.
        num_blocks: number of residual blocks of two convolutions each.
        radius: radius of the receptive field in pixels: 1 to ``1 + 2 * num_blocks``; None for the largest. It should
            cover an object, and be below half of the distance at which objects are to be independent.
        padding: padding of the convolutions: "zeros" lets the network detect the image's border, "reflect" does not.
        kind: type of the network, in saved configurations.

    Raises:
        InvalidArgument: a value outside its range.

    >>> LocalNetConfig(num_blocks=3).reach, LocalNetConfig(num_blocks=3, radius=4).reach
    (7, 4)
    """

    channels: PositiveInt = 48
    num_blocks: PositiveInt = 2
    radius: PositiveInt | None = None
    padding: Literal["zeros", "reflect"] = "zeros"
    kind: Literal["local"] = "local"

    def __post_init__(self) -> None:
        largest = 1 + 2 * self.num_blocks
        if self.radius is not None and self.radius > largest:
            raise InvalidArgument(
                f"radius must be at most {largest} with num_blocks={self.num_blocks}, got {self.radius}"
            )

    @property
    def reach(self) -> int:
        """The radius of the receptive field, with the default resolved."""
        return 1 + 2 * self.num_blocks if self.radius is None else self.radius

    def build(self, shape: tuple[int, ...], condition: ConditioningSpec) -> LocalNet:
        """The network for images of this shape (channels, height, width), with uninitialized weights."""
        return LocalNet(self, shape, condition)


class LocalNet(nn.Module):
    r"""The network of a `LocalNetConfig`.

    A map is concatenated to the image, so that the output is local in it, too. Class, text and vector modulate all
    pixels, like the time (FiLM): with them the network is local in pixels, but not in conditions.

    Args:
        config: the configuration.
        shape: (channels, height, width) of an image.
        condition: the conditions that the network reads.

    Raises:
        InvalidArgument: a shape of other than three dimensions, or a receptive field that covers the image.

    Source: Bradley 2025, arXiv:2509.16447 (local conditional scores); the architecture is our own.
    """

    def __init__(self, config: LocalNetConfig, shape: tuple[int, ...], condition: ConditioningSpec) -> None:
        super().__init__()
        if len(shape) != 3:
            raise InvalidArgument(f"a local network is for images (channels, height, width), not for shape {shape}")
        if config.reach >= max(shape[1:]):
            raise InvalidArgument(
                f"a radius of {config.reach} pixels sees all of an image of {shape[1]} by {shape[2]}; lower radius"
            )
        self.config, self.shape, self.spec = config, tuple(shape), condition
        width = config.channels
        self.time = TimeEmbedding(width)
        self.embedding = ConditionEmbedding(condition, width)
        remaining = config.reach  # each 3 by 3 convolution adds 1 to the radius
        self.stem = _conv(shape[0] + condition.map_channels, width, config.padding)
        remaining -= 1
        blocks = []
        for _ in range(config.num_blocks):
            kernels = (3 if remaining >= 1 else 1, 3 if remaining >= 2 else 1)
            remaining -= sum(kernel == 3 for kernel in kernels)
            blocks.append(_Block(width, kernels, config.padding))
        self.blocks = nn.ModuleList(blocks)
        self.out = _conv(width, shape[0], config.padding, 1)

    def forward(
        self, x: Float[Tensor, "n channels height width"], t: Float[Tensor, n], condition: Conditioning | None = None
    ) -> Float[Tensor, "n channels height width"]:
        """Output of the network for noisy images at times 0 to 1; float32. ``condition`` None is the null condition."""
        if condition is None and not self.spec.empty:
            condition = self.spec.null_condition(len(x), (x.shape[-2], x.shape[-1]), x.device)
        embedded = self.embedding(condition, len(x))
        vector = F.silu(self.time(t) + embedded.vector)
        h = self.stem(x if embedded.map is None else torch.cat([x, embedded.map.to(x.dtype)], 1))
        for block in self.blocks:
            h = block(h, vector)
        out: Tensor = self.out(F.silu(_norm(h)))
        return out.float()

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> LocalNet:
        """Set random weights that preserve the variance of activations; the output is zero at first."""
        self.time.initialize(generator)
        self.embedding.initialize(generator)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan = module.in_channels * module.kernel_size[0] * module.kernel_size[1]
                module.weight.normal_(0.0, fan**-0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        for block in self.blocks:
            assert isinstance(block, _Block)
            block.initialize(generator)
        self.out.weight.zero_()
        return self


def _conv(inputs: int, outputs: int, padding: str, kernel: int = 3) -> nn.Conv2d:
    """A convolution that preserves height and width, uninitialized: the global random generator is not used."""
    convolution = nn.utils.skip_init(nn.Conv2d, inputs, outputs, kernel, padding=kernel // 2, padding_mode=padding)
    assert isinstance(convolution, nn.Conv2d)
    return convolution


class _Block(nn.Module):
    """Residual block of two convolutions, with shift and scale by time and condition before the first."""

    def __init__(self, width: int, kernels: tuple[int, int], padding: Literal["zeros", "reflect"]) -> None:
        super().__init__()
        self.adapt = Linear(width, 2 * width, bias=True)
        self.first = _conv(width, width, padding, kernels[0])
        self.second = _conv(width, width, padding, kernels[1])

    def forward(self, h: Tensor, vector: Tensor) -> Tensor:
        shift, scale = self.adapt(vector)[:, :, None, None].chunk(2, 1)  # each (n, width, 1, 1)
        y = self.first(F.silu(_norm(h) * (1 + scale) + shift))
        y = self.second(F.silu(_norm(y)))
        return h + y  # type: ignore[no-any-return]

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Set small random modulation weights; the residual is zero at first."""
        assert self.adapt.bias is not None
        self.adapt.weight.normal_(0.0, 0.1 * self.adapt.inputs**-0.5, generator=generator)
        self.adapt.bias.zero_()
        self.second.weight.zero_()


def _norm(h: Tensor) -> Tensor:
    """Layer norm over the channels of each pixel, without parameters."""
    h = h - h.mean(1, keepdim=True)
    normalized: Tensor = h * (h.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    return normalized
