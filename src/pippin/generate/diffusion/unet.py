"""The U-Net: a convolutional network over several resolutions, for diffusion on pixels.

Notable here:
- time and condition scale and shift the activations of every block; a map is concatenated to the image
- patches become channels first (pixel unshuffle), which makes the network several times faster on a CPU
- the last layer of each block and the output layer are zero at first: a new network predicts 0
"""

from __future__ import annotations

import math
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

HEAD = 32
"""Channels of an attention head."""


@checked
@dataclass(frozen=True)
class UNetConfig:
    """Architecture of a `UNet`.

    Attributes:
        base_channels: channels at the first level; the second has twice, all further ones four times as many; a
            multiple of 8, for the group norms.
        num_levels: number of levels, each at half the resolution of the one before.
        blocks_per_level: residual blocks of each level in the encoder, and as many in the decoder.
        attention: whether there is self-attention at the lowest resolution.
        pool: whether levels halve the resolution; if not, all levels have that of the image.
        patch_size: height and width of the patch that is one position of the first level.
        kind: type of the network, in saved configurations.

    Raises:
        InvalidArgument: a number out of range, or base_channels that 8 does not divide.
    """

    base_channels: PositiveInt = 24
    num_levels: PositiveInt = 2
    blocks_per_level: PositiveInt = 1
    attention: bool = True
    pool: bool = True
    patch_size: PositiveInt = 1
    kind: Literal["unet"] = "unet"

    def __post_init__(self) -> None:
        if self.base_channels % 8:
            raise InvalidArgument(f"base_channels must be a multiple of 8, got {self.base_channels}")

    def channels(self, level: int) -> int:
        """Channels of a level, counted from 0."""
        return self.base_channels * min(4, 1 << level)

    def build(self, shape: tuple[int, ...], condition: ConditioningSpec) -> UNet:
        """The network for samples of this shape (channels, height, width), with uninitialized weights."""
        return UNet(self, shape, condition)


class UNet(nn.Module):
    """The network of a `UNetConfig`.

    Args:
        config: the architecture.
        shape: (channels, height, width) of a sample.
        condition: the conditions that the network reads.

    Raises:
        InvalidArgument: a shape of other than three dimensions, or sides that patch size and levels do not divide.

    Source: Ronneberger et al. 2015, arXiv:1505.04597; with time, Ho et al. 2020, arXiv:2006.11239, appendix B; scale
    and shift, Dhariwal and Nichol 2021, arXiv:2105.05233, section 3.
    """

    def __init__(self, config: UNetConfig, shape: tuple[int, ...], condition: ConditioningSpec) -> None:
        super().__init__()
        if len(shape) != 3:
            raise InvalidArgument(f"a U-Net is for images (channels, height, width), not for samples of shape {shape}")
        self.config, self.shape, self.spec = config, tuple(shape), condition
        self._check(shape[1], shape[2])
        width = 4 * config.base_channels  # of the embeddings
        pixels = config.patch_size**2
        self.time = TimeEmbedding(width)
        self.condition = ConditionEmbedding(condition, width)
        self.entry = _conv((shape[0] + condition.map_channels) * pixels, config.base_channels)
        level_channels = [config.channels(level) for level in range(config.num_levels)]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        current, skips = config.base_channels, []
        for channels in level_channels:
            for _ in range(config.blocks_per_level):
                self.down.append(_Block(current, channels, width))
                skips.append(channels)
                current = channels
        self.middle = nn.ModuleList([_Block(current, current, width), _Block(current, current, width)])
        self.attention = _Attention(current) if config.attention else None
        for channels in reversed(level_channels):
            for _ in range(config.blocks_per_level):
                self.up.append(_Block(current + skips.pop(), channels, width))
                current = channels
        self.norm = nn.GroupNorm(8, current)
        self.exit = _conv(current, shape[0] * pixels)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> UNet:
        """Set random weights; the output and the residual of each block are 0 at first."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan = module.in_channels * module.kernel_size[0] * module.kernel_size[1]
                module.weight.normal_(0.0, fan**-0.5, generator=generator)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
            elif isinstance(module, Linear) and module.weight is not None:
                module.weight.normal_(0.0, module.inputs**-0.5, generator=generator)
        self.time.initialize(generator)
        self.condition.initialize(generator, size=1.0)
        for module in self.modules():
            if isinstance(module, _Block):
                module.zero()
        for part in (self.exit, *([self.attention.out] if self.attention is not None else [])):
            for parameter in part.parameters():
                parameter.zero_()
        return self

    def forward(
        self, x: Float[Tensor, "n channels height width"], t: Float[Tensor, n], condition: Conditioning | None = None
    ) -> Float[Tensor, "n channels height width"]:
        """Output of the network for noised samples; float32.

        Args:
            x: noised samples, of any height and width that patch size and levels divide.
            t: times from 0 to 1.
            condition: condition of each sample; None for the null condition.

        Raises:
            InvalidArgument: sides that patch size and levels do not divide, or a condition that the network does not
                read.
        """
        self._check(x.shape[-2], x.shape[-1])
        if condition is None and not self.spec.empty:
            condition = self.spec.null_condition(len(x), (x.shape[-2], x.shape[-1]), x.device)
        embedded = self.condition(condition, len(x))
        vector = F.silu(self.time(t) + embedded.vector)
        if embedded.map is not None:
            x = torch.cat([x, embedded.map.to(x)], 1)
        config, pool = self.config, self.config.pool
        h = self.entry(F.pixel_unshuffle(x, config.patch_size) if config.patch_size > 1 else x)
        skips = []
        for index, block in enumerate(self.down):
            if pool and index and index % config.blocks_per_level == 0:
                h = F.avg_pool2d(h, 2)
            h = block(h, vector)
            skips.append(h)
        h = self.middle[0](h, vector)
        if self.attention is not None:
            h = self.attention(h)
        h = self.middle[1](h, vector)
        for index, block in enumerate(self.up):
            if pool and index and index % config.blocks_per_level == 0:
                h = F.interpolate(h, scale_factor=2.0)
            h = block(torch.cat([h, skips.pop()], 1), vector)  # skip connection, by channels
        y: Tensor = self.exit(F.silu(self.norm(h)))
        return (F.pixel_shuffle(y, config.patch_size) if config.patch_size > 1 else y).float()

    def _check(self, height: int, width: int) -> None:
        """Refuse sides that patch size and levels do not divide."""
        unit = self.config.patch_size * 2 ** ((self.config.num_levels - 1) * self.config.pool)
        if height % unit or width % unit:
            raise InvalidArgument(
                f"an image of {height} by {width} pixels; patch_size={self.config.patch_size} and "
                f"num_levels={self.config.num_levels} need sides that {unit} divides"
            )


class _Block(nn.Module):
    """Residual block of two convolutions; time and condition scale and shift the activations between them."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(8, inputs), _conv(inputs, outputs)
        self.adapt = Linear(width, 2 * outputs, bias=True)
        self.second_norm, self.second = nn.GroupNorm(8, outputs, affine=False), _conv(outputs, outputs)
        self.skip = _conv(inputs, outputs, kernel=1) if inputs != outputs else None

    def zero(self) -> None:
        """Set the residual and the modulation to zero."""
        for part in (self.second, self.adapt):
            for parameter in part.parameters():
                parameter.zero_()

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        h = self.first(F.silu(self.norm(x)))
        scale, shift = self.adapt(vector)[:, :, None, None].chunk(2, 1)  # each (n, outputs, 1, 1)
        h = self.second(F.silu(torch.addcmul(shift, self.second_norm(h), 1 + scale)))
        y: Tensor = h + (x if self.skip is None else self.skip(x))
        return y


class _Attention(nn.Module):
    """Self-attention over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = max(1, channels // HEAD)
        while channels % self.heads:
            self.heads -= 1
        self.norm = nn.GroupNorm(8, channels)
        self.into, self.out = Linear(channels, 3 * channels, bias=True), Linear(channels, channels, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)  # (n, positions, channels)
        qkv = self.into(tokens).view(n, height * width, 3, self.heads, channels // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (n, heads, positions, channels / heads)
        attended = F.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(channels // self.heads))
        y: Tensor = self.out(attended.transpose(1, 2).reshape(n, height * width, channels))
        return x + y.transpose(1, 2).reshape(x.shape)


def _conv(inputs: int, outputs: int, *, kernel: int = 3) -> nn.Conv2d:
    """A convolution that preserves height and width, uninitialized: the global random generator is not used."""
    convolution = nn.utils.skip_init(nn.Conv2d, inputs, outputs, kernel, padding=kernel // 2)
    assert isinstance(convolution, nn.Conv2d)
    return convolution
