r"""A diffusion transformer: patches of a noisy picture without order, adapted by time and class, reading a text.

Notable here:
- every ``sparse_every``-th layer may have several feed-forward layers: experts that choose their tokens, so that hard
  parts of a picture get more of them, or tokens that choose their experts
- a network begins by saying 0 everywhere: branches and head are closed at first (adaLN-Zero)
- work is counted in multiply-adds of one picture, so that networks can be compared at equal cost
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.generate.condition import Condition, ConditionEmbedding, ConditionSpec
from pippin.nn.adaptive import AdaptiveBlock, Everything
from pippin.nn.axial import axial_tables, grid
from pippin.nn.expert_choice import ExpertChoiceFFN, TokenChoiceFFN
from pippin.nn.linear import Linear
from pippin.nn.patches import patchify, unpatchify
from pippin.nn.time_embedding import TimedHead, TimeEmbedding


@dataclass(frozen=True)
class DiTConfig:
    """The form of a diffusion transformer.

    Attributes:
        kind: tells configurations of networks apart.
        width: of the tokens.
        layers: blocks.
        heads: of the attention.
        kv_heads: heads with keys of their own; None for all.
        patch: height and width of a token in pixels.
        hidden: inner width of the feed-forward layers (of each expert), for all layers or for each; None for four
            times the width.
        positions: each token has a vector of its own that is learnt ("learned"); rows and columns turn the heads
            ("rotary"), which tells how tokens lie to each other but not where in the picture; or both.
        qk_norm: norms of queries and keys.
        feed_forward: "dense"; or what the sparse layers have: experts that choose ("expert_choice") or tokens that
            choose ("token_choice").
        sparse_every: every how many layers one is sparse; 2 for the second, the fourth and so on.
        experts: of a sparse layer.
        capacity: experts per token: on average where experts choose, exactly (a whole number) where tokens do.
        gate_scale: factor on what expert choice adds; ``experts / capacity`` makes it as strong as a dense layer.
        group: tokens among which experts choose: those of one picture ("image"), or so many of the whole batch.
        balance: weight of the loss that spreads the load, where tokens choose.

    Raises:
        InvalidArgument: numbers out of range.

    Source: Peebles and Xie 2023, arXiv:2212.09748; with experts, Sun et al. 2024, arXiv:2410.02098, section 3.
    """

    kind: Literal["dit"] = "dit"
    width: int = 96
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    patch: int = 2
    hidden: int | tuple[int, ...] | None = None
    positions: Literal["both", "learned", "rotary"] = "both"
    qk_norm: bool = True
    feed_forward: Literal["dense", "expert_choice", "token_choice"] = "dense"
    sparse_every: int = 2
    experts: int = 4
    capacity: float = 2.0
    gate_scale: float = 1.0
    group: int | Literal["image"] = "image"
    balance: float = 0.01

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "patch", "sparse_every", "experts"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"DiTConfig: {name} is {getattr(self, name)}; give 1 or more")
        if isinstance(self.hidden, tuple) and len(self.hidden) != self.layers:
            raise InvalidArgument(f"DiTConfig: {len(self.hidden)} inner widths for {self.layers} layers")
        if self.feed_forward == "token_choice" and self.capacity != int(self.capacity):
            raise InvalidArgument(f"DiTConfig: where tokens choose, capacity={self.capacity} must be a whole number")
        if not 0 <= self.balance < math.inf:
            raise InvalidArgument(f"DiTConfig: balance is {self.balance}; give 0 or more")
        if self.feed_forward != "dense" and not any(self.sparse(layer) for layer in range(self.layers)):
            raise InvalidArgument(
                f"DiTConfig: sparse_every={self.sparse_every} makes none of {self.layers} layers sparse; lower it"
            )

    def sparse(self, layer: int) -> bool:
        """Whether a layer (from 0) has experts."""
        return self.feed_forward != "dense" and (layer + 1) % self.sparse_every == 0

    def hidden_of(self, layer: int) -> int:
        """Inner width of a layer's feed-forward, or of each of its experts."""
        if isinstance(self.hidden, tuple):
            return self.hidden[layer]
        return self.hidden or 4 * self.width

    def build(self, shape: tuple[int, ...], condition: ConditionSpec) -> DiT:
        """The network for samples of ``shape`` (channels, height, width), not yet initialised."""
        return DiT(self, shape, condition)


class DiT(nn.Module):
    """A diffusion transformer: called with a noisy picture, its time and its condition.

    Args:
        config: its form.
        shape: of a sample: (channels, height, width).
        condition: what it reads: maps beside the picture, class, vector and pooled text with the time, the text's
            tokens by cross-attention.

    Raises:
        InvalidArgument: a shape that patches do not divide, or sizes that do not fit each other.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: DiTConfig, shape: tuple[int, ...], condition: ConditionSpec) -> None:
        super().__init__()
        if len(shape) != 3 or shape[1] % config.patch or shape[2] % config.patch:
            raise InvalidArgument(
                f"samples of shape {shape} are not cut into patches of {config.patch}; give (channels, height, width)"
            )
        self.config, self.shape = config, tuple(shape)
        width, area = config.width, config.patch**2
        self.rows, self.columns = shape[1] // config.patch, shape[2] // config.patch
        self.into = Linear((shape[0] + condition.map) * area, width, bias=True)
        self.time = TimeEmbedding(width)
        self.condition = ConditionEmbedding(condition, width)
        context = width if condition.text else 0
        self.blocks = nn.ModuleList(_block(config, layer, context) for layer in range(config.layers))
        self.head = TimedHead(width, shape[0] * area)
        placed = config.positions != "rotary"
        self.places = nn.Parameter(torch.zeros(self.rows * self.columns, width)) if placed else None
        if self.places is not None:
            self.places.no_decay = True  # type: ignore[attr-defined]  # which `pippin.train` looks for
        cosines, sines = axial_tables(grid(self.rows, self.columns), width // config.heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(
        self, x: Float[Tensor, "n channels height width"], t: Float[Tensor, n], condition: Condition | None = None
    ) -> Float[Tensor, "n channels height width"]:
        """What the network says of noisy samples at these times; float32.

        Raises:
            InvalidArgument: samples of another shape, or a condition that the network does not read.
        """
        if tuple(x.shape[1:]) != self.shape:
            raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the network reads {self.shape}")
        embedded = self.condition(condition, len(x))
        vector = self.time(t) + embedded.vector
        seen = x if embedded.map is None else torch.cat([x, embedded.map], 1)
        tokens = self.into(patchify(seen, self.config.patch))
        if self.places is not None:
            tokens = tokens + self.places
        turn = None if self.config.positions == "learned" else (self.cosines, self.sines)
        for layer, block in enumerate(self.blocks):
            text = {"context": embedded.tokens, "context_mask": embedded.mask}
            tokens = block(tokens, turn, Everything(), layer, vector=vector[:, None], **text)
        return unpatchify(self.head(tokens, vector), self.config.patch, self.shape[1:])  # type: ignore[arg-type]

    @property
    def mixes_samples(self) -> bool:
        """Whether a sample depends on its batch: experts choose among the tokens of several pictures."""
        return any(isinstance(layer, ExpertChoiceFFN) and layer.group != "image" for layer in self.modules())

    def auxiliary_loss(self) -> Tensor | None:
        """The weighted balance loss of the last pass in training mode, added over layers; taken once. None without."""
        total: Tensor | None = None
        for layer in self.modules():
            if isinstance(layer, TokenChoiceFFN) and layer.balance is not None:
                here = self.config.balance * layer.balance
                total = here if total is None else total + here
                layer.balance = None
        return total

    def multiply_adds(self, words: int = 0) -> int:
        """Multiplications of one pass over one picture that reads a text of so many tokens, in matrix products."""
        config, tokens, width = self.config, self.rows * self.columns, self.config.width
        kv_width = width // config.heads * (config.kv_heads or config.heads)
        attention = tokens * (2 * width * width + 2 * width * kv_width) + 2 * tokens * tokens * width
        reading = 2 * (tokens + words) * width * width + 2 * tokens * words * width if words else 0
        total = tokens * width * (self.into.inputs + self.head.out.outputs)
        total += self.time.frequencies * width + width * width + 2 * width * width  # the time, and the head's
        if words and self.condition.text is not None:
            total += words * self.condition.text.inputs * width
        for layer in range(config.layers):
            total += attention + reading + 6 * width * width
            rows = tokens
            if config.sparse(layer):
                each = math.ceil(tokens * config.capacity / config.experts - 1e-9)
                rows = config.experts * each
                total += tokens * width * config.experts
            total += 2 * rows * width * config.hidden_of(layer)
        return total

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> DiT:
        """Random weights; the network says 0 everywhere until it is trained."""
        self.into.weight.normal_(0.0, self.into.inputs**-0.5, generator=generator)  # type: ignore[union-attr]
        # norms see directions only: without something to compare with, a bright patch would look like a dim one
        self.into.bias.normal_(0.0, 1.0, generator=generator)  # type: ignore[union-attr]
        self.time.initialise(generator)
        self.condition.initialise(generator)
        for block in self.blocks:
            assert isinstance(block, AdaptiveBlock)
            block.initialise(generator, depth=self.config.layers)
            if isinstance(block.feed_forward, (ExpertChoiceFFN, TokenChoiceFFN)):
                block.feed_forward.initialise(generator)
        self.head.initialise()
        if self.places is not None:
            self.places.normal_(0.0, 0.5, generator=generator)
        return self


def _block(config: DiTConfig, layer: int, context: int) -> AdaptiveBlock:
    """One block, with experts where the layer is sparse."""
    width, hidden = config.width, config.hidden_of(layer)
    feed_forward: nn.Module | None = None
    if config.sparse(layer) and config.feed_forward == "expert_choice":
        feed_forward = ExpertChoiceFFN(
            width,
            hidden,
            config.experts,
            capacity=config.capacity,
            group=config.group,
            gate_scale=config.gate_scale,
        )
    elif config.sparse(layer):
        feed_forward = TokenChoiceFFN(width, hidden, config.experts, active=int(config.capacity))
    return AdaptiveBlock(
        width,
        config.heads,
        kv_heads=config.kv_heads,
        hidden=hidden,
        vector=width,
        context=context,
        qk_norm=config.qk_norm,
        feed_forward=feed_forward,
    )
