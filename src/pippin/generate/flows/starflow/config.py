"""Configuration of STARFlow: shapes of samples, latents and tokens, and the sizes of the blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import ConditioningSpec
from pippin.generate.flows.decoding import RotaryTables
from pippin.generate.flows.starflow.score_network import ScoreConfig
from pippin.nn.attention.axial_rotary import axial_tables, grid_positions


@checked
@dataclass(frozen=True)
class StarFlowConfig:
    """Configuration of a `StarFlow`.

    Attributes:
        shape: (channels, height, width) of an image, (frames, channels, height, width) of a video.
        patch_size: height and width of the patch of latents that is one token.
        haar_levels: levels of the Haar transform from frames to latents, each of which halves height and width.
        hidden_size: dimension of the hidden states.
        num_attention_heads: number of attention heads.
        layers_per_block: transformer layers of each block, from the data to the noise; the last is the deep block.
        noise_std: standard deviation of the training noise, in the units of the samples.
        condition: the conditions that the deep block reads: classes, text, a vector.
        score: configuration of the score network, which denoises samples; None for no score network.
        source: number of source frames (video to video): first frames of a video that are always given.
        within_frames: whether shallow blocks see one frame each; with False they see the whole video, which is not
            causal, for ablations.

    Raises:
        InvalidArgument: sizes that do not divide, numbers out of range, or a map as condition.
    """

    shape: tuple[PositiveInt, ...] = (1, 16, 16)
    patch_size: PositiveInt = 2
    haar_levels: NonNegativeInt = 1
    hidden_size: PositiveInt = 64
    num_attention_heads: PositiveInt = 4
    layers_per_block: tuple[PositiveInt, ...] = (1, 1, 1, 4)
    noise_std: NonNegativeFloat = 0.3
    condition: ConditioningSpec = field(default_factory=ConditioningSpec)
    score: ScoreConfig | None = field(default_factory=ScoreConfig)
    source: NonNegativeInt = 0
    within_frames: bool = True

    def __post_init__(self) -> None:
        if len(self.shape) not in (3, 4):
            raise InvalidArgument(
                f"shape is {self.shape}; give (channels, height, width), for videos (frames, channels, height, width)"
            )
        side = self.patch_size * 2**self.haar_levels
        if self.shape[-1] % side or self.shape[-2] % side:
            raise InvalidArgument(
                f"{self.shape[-2]} by {self.shape[-1]} pixels cannot be halved {self.haar_levels} times and cut into "
                f"patches of {self.patch_size}; height and width must be multiples of {side}"
            )
        if not self.layers_per_block:
            raise InvalidArgument("layers_per_block is empty; give the layers of at least one block")
        if self.hidden_size % (2 * self.num_attention_heads) or self.hidden_size // self.num_attention_heads < 6:
            raise InvalidArgument(
                f"hidden_size={self.hidden_size} with num_attention_heads={self.num_attention_heads}; the size of a "
                "head must be even, and at least 6"
            )
        if self.condition.map_channels:
            raise InvalidArgument("a StarFlow reads no map; give the condition as classes, text or vector")
        if self.source >= self.frames:
            raise InvalidArgument(f"source is {self.source} of {self.frames} frames; leave at least one to be sampled")

    @property
    def frames(self) -> int:
        """Number of frames of a video; 1 for an image."""
        return self.shape[0] if len(self.shape) == 4 else 1

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of tokens in a frame."""
        side = self.patch_size * 2**self.haar_levels
        return self.shape[-2] // side, self.shape[-1] // side

    @property
    def tokens_per_frame(self) -> int:
        """Number of tokens of a frame."""
        return self.size[0] * self.size[1]

    @property
    def token_dim(self) -> int:
        """Number of elements of a token."""
        side: int = self.patch_size * 2**self.haar_levels
        return self.shape[-3] * side * side

    def rotary_tables(self, frames: int | None, device: torch.device) -> RotaryTables:
        """Rotary tables over (frame, row, column) of the tokens of ``frames`` frames; over (row, column) for None."""
        positions = grid_positions(*self.size) if frames is None else grid_positions(frames, *self.size)
        return axial_tables(positions.to(device), self.hidden_size // self.num_attention_heads)
