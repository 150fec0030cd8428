r"""The score network of STARFlow-V: trained on the score of the flow's density, and used to denoise samples.

Notable here:
- a flow is trained on noisy samples, so its samples are noisy; the score of its density points to the clean ones
- the exact score needs a backward pass through the flow, and is as rough as the flow; the network is smooth, has no
  order of tokens, and costs one forward pass
- frames attend to frames before them and to one frame ahead, whatever the depth, so a stream is one frame late
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.generate.conditions import ConditionEmbedding, Conditioning, ConditioningSpec
from pippin.nn.adaptive_norm import AdaptiveBlock
from pippin.nn.axial_rotary import axial_tables, grid_positions
from pippin.nn.kv_cache import MaskedCache
from pippin.nn.linear import Linear


@checked
@dataclass(frozen=True)
class ScoreConfig:
    """Configuration of a `ScoreNetwork`.

    Attributes:
        num_hidden_layers: number of transformer layers.
        hidden_size: of its tokens.
        num_attention_heads: of its attention.
        window: number of frames that a layer attends to, its own among them.

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
    r"""$s_\phi(\tilde x)$, about $\sigma \nabla_{\tilde x}(-\log p(\tilde x))$: near the noise that was added, over σ.

    Args:
        config: its size.
        inner: elements of a token.
        size: rows and columns of tokens of a frame.
        condition: the conditions that it reads.
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
        """The score of every token, times σ."""
        n, frames, positions, inner = tokens.shape
        hidden = self.into(tokens.reshape(n, frames * positions, inner))
        cos_sin = axial_tables(
            grid_positions(frames, *self.size).to(tokens.device),
            self.config.hidden_size // self.config.num_attention_heads,
        )
        embedded = self.embedding(condition, n)
        vector = None if self.embedding.spec.empty else embedded.vector[:, None]
        for number, block in enumerate(self.blocks):
            seen = frame_mask(frames, positions, self.config.window, ahead=1 if number == 0 else 0)
            hidden = block(hidden, cos_sin, MaskedCache(seen.to(tokens.device)), number, vector=vector)
        out: Tensor = self.head(self.norm(hidden))
        return out.float().view(n, frames, positions, inner)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> ScoreNetwork:
        """Random weights, and scores of zero."""
        self.embedding.initialize(generator)
        self.into.weight.normal_(0.0, self.into.inputs**-0.5, generator=generator)
        for block in self.blocks:
            assert isinstance(block, AdaptiveBlock)
            block.initialize(generator, depth=self.config.num_hidden_layers)
        self.head.weight.zero_()
        return self


def frame_mask(frames: int, positions: int, window: int, *, ahead: int = 0) -> Bool[Tensor, "1 1 tokens tokens"]:
    """Who sees whom: tokens of one frame see each other, ``window - 1`` frames before theirs and ``ahead`` behind it.

    >>> frame_mask(3, 1, 2, ahead=1)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    """
    number = torch.arange(frames).repeat_interleave(positions)
    back = number[:, None] - number[None, :]
    return ((back < window) & (back >= -ahead))[None, None]
