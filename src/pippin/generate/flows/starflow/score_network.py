r"""The score network of STARFlow-V: it learns the score of the flow's density, and denoises samples.

Notable here:
- a flow is trained on noisy samples, so its samples are noisy; the score of its density points to the clean ones
- the exact score needs a backward pass through the flow and has its artifacts; the network is smooth, is not
  autoregressive, and costs one forward pass
- frames attend to earlier frames and to one frame ahead, at any depth, so a stream is delayed by one frame
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.generate.conditions import ConditionEmbedding, Conditioning, ConditioningSpec
from pippin.nn.attention.axial_rotary import axial_tables, grid_positions
from pippin.nn.images.adaptive_norm import AdaptiveBlock
from pippin.nn.kv_cache import MaskedCache
from pippin.nn.linear import Linear


@checked
@dataclass(frozen=True)
class ScoreConfig:
    """Configuration of a `ScoreNetwork`.

    Attributes:
        num_hidden_layers: number of transformer layers.
        hidden_size: dimension of the hidden states.
        num_attention_heads: number of attention heads.
        window: number of frames that a frame attends to in each layer, including itself.

    Raises:
        InvalidArgument: a number below 1.
    """

    num_hidden_layers: PositiveInt = 2
    hidden_size: PositiveInt = 64
    num_attention_heads: PositiveInt = 4
    window: PositiveInt = 4

    @property
    def past(self) -> int:
        """Number of earlier frames that the score of a frame depends on: window - 1 for each layer."""
        return self.num_hidden_layers * (self.window - 1)


class ScoreNetwork(nn.Module):
    r"""$s_\phi(\tilde x) \approx \sigma \nabla_{\tilde x}(-\log p(\tilde x))$, the noise in $\tilde x$ over σ.

    Args:
        config: the configuration.
        inner: number of elements of a token.
        size: rows and columns of tokens of a frame.
        condition: the conditions that the network reads.
    """

    def __init__(self, config: ScoreConfig, inner: int, size: tuple[int, int], condition: ConditioningSpec) -> None:
        super().__init__()
        self.config, self.size = config, size
        self.embedding = ConditionEmbedding(condition, config.hidden_size)
        self.into = Linear(inner, config.hidden_size, bias=True)
        self.blocks = nn.ModuleList(
            AdaptiveBlock(
                config.hidden_size, config.num_attention_heads, vector=0 if condition.empty else config.hidden_size
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = Linear(config.hidden_size, inner, bias=True)

    def forward(
        self, tokens: Float[Tensor, "n frames positions inner"], condition: Conditioning | None = None
    ) -> Float[Tensor, "n frames positions inner"]:
        r"""$s_\phi$ of every token, float32; None for the null condition."""
        n, frames, positions, inner = tokens.shape
        hidden = self.into(tokens.reshape(n, frames * positions, inner))  # frames are one sequence
        cos_sin = axial_tables(
            grid_positions(frames, *self.size).to(tokens.device),
            self.config.hidden_size // self.config.num_attention_heads,
        )
        embedded = self.embedding(condition, n)
        vector = None if self.embedding.spec.empty else embedded.vector[:, None]
        for number, block in enumerate(self.blocks):
            # only the first layer attends to the next frame, so that the look-ahead does not grow with depth
            mask = frame_mask(frames, positions, self.config.window, ahead=1 if number == 0 else 0)
            hidden = block(hidden, cos_sin, MaskedCache(mask.to(tokens.device)), number, vector=vector)
        out: Tensor = self.head(self.norm(hidden))
        return out.float().view(n, frames, positions, inner)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> ScoreNetwork:
        """Set random weights, with which the scores are zero."""
        self.embedding.initialize(generator)
        self.into.weight.normal_(0.0, self.into.inputs**-0.5, generator=generator)
        for block in self.blocks:
            assert isinstance(block, AdaptiveBlock)
            block.initialize(generator, depth=self.config.num_hidden_layers)
        self.head.weight.zero_()
        return self


def frame_mask(frames: int, positions: int, window: int, *, ahead: int = 0) -> Bool[Tensor, "1 1 tokens tokens"]:
    """Attention mask of tokens to their own frame, to ``window - 1`` frames before it and to ``ahead`` after it.

    >>> frame_mask(3, 1, 2, ahead=1)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    """
    frame = torch.arange(frames).repeat_interleave(positions)  # frame of each token
    distance = frame[:, None] - frame[None, :]
    return ((distance < window) & (distance >= -ahead))[None, None]
