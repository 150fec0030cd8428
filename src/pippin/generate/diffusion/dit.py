r"""The diffusion transformer (DiT), with adaLN-Zero, cross-attention to text, and optional mixtures of experts.

Notable here:
- every ``moe_every``-th layer may be a mixture of experts, routed by expert choice (experts select tokens, so that hard
  parts of an image get more compute) or by token choice
- a new network predicts 0: residual branches and head are zero at first (adaLN-Zero)
- cost is counted in multiply-adds for one image, so that networks can be compared at equal cost
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checks import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import ConditionEmbedding, Conditioning, ConditioningSpec
from pippin.nn.attention.axial_rotary import axial_tables, grid_positions
from pippin.nn.feedforward.expert_choice import ExpertChoiceFFN, TokenChoiceFFN
from pippin.nn.images.adaptive_norm import AdaptiveBlock, BidirectionalCache
from pippin.nn.images.patches import patchify, unpatchify
from pippin.nn.images.time_embedding import TimedHead, TimeEmbedding
from pippin.nn.linear import Linear


@checked
@dataclass(frozen=True)
class DiTConfig:
    """Configuration of a diffusion transformer.

    Attributes:
        kind: type of the network, in saved configurations.
        hidden_size: dimension of the hidden states.
        num_hidden_layers: number of transformer blocks.
        num_attention_heads: number of attention heads.
        num_key_value_heads: number of key and value heads; None for as many as attention heads.
        patch_size: height and width of a token in pixels.
        intermediate_size: intermediate dimension of the feed-forward layers (of each expert), for all layers or for
            each; None for four times the hidden size.
        position_embedding: "learned" for a learned vector of each position; "rotary" for axial rotary positions over
            rows and columns, which encode relative positions only; or "both".
        qk_norm: whether queries and keys are normalized.
        feed_forward: "dense", or the routing of the sparse layers: "expert_choice" or "token_choice".
        moe_every: one of how many layers is sparse; 2 for the second, the fourth and so on.
        num_experts: number of experts of a sparse layer.
        capacity_factor: experts per token: on average for expert choice, exactly (a whole number) for token choice.
        gate_scale: factor on the output of expert choice; ``num_experts / capacity_factor`` makes it as large as that
            of a dense layer.
        routing_group: tokens among which an expert chooses: "image" for those of one image, or a number of tokens of
            the whole batch.
        load_balancing_weight: weight of the load-balancing loss of token choice.

    Raises:
        InvalidArgument: numbers out of range.

    Source: Peebles and Xie 2023, arXiv:2212.09748; with experts, Sun et al. 2024, arXiv:2410.02098, section 3.
    """

    kind: Literal["dit"] = "dit"
    hidden_size: PositiveInt = 96
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt | None = None
    patch_size: PositiveInt = 2
    intermediate_size: PositiveInt | tuple[PositiveInt, ...] | None = None
    position_embedding: Literal["both", "learned", "rotary"] = "both"
    qk_norm: bool = True
    feed_forward: Literal["dense", "expert_choice", "token_choice"] = "dense"
    moe_every: PositiveInt = 2
    num_experts: PositiveInt = 4
    capacity_factor: PositiveFloat = 2.0
    gate_scale: float = 1.0
    routing_group: PositiveInt | Literal["image"] = "image"
    load_balancing_weight: NonNegativeFloat = 0.01

    def __post_init__(self) -> None:
        if isinstance(self.intermediate_size, tuple) and len(self.intermediate_size) != self.num_hidden_layers:
            raise InvalidArgument(
                f"{len(self.intermediate_size)} values of intermediate_size for {self.num_hidden_layers} layers; give "
                "one for each, or one number for all"
            )
        if self.feed_forward == "token_choice" and self.capacity_factor != int(self.capacity_factor):
            raise InvalidArgument(
                f"capacity_factor must be a whole number where tokens choose experts, got {self.capacity_factor}"
            )
        if self.feed_forward != "dense" and not any(self.is_moe(layer) for layer in range(self.num_hidden_layers)):
            raise InvalidArgument(
                f"DiTConfig: moe_every={self.moe_every} makes none of {self.num_hidden_layers} layers sparse; lower it"
            )

    def is_moe(self, layer: int) -> bool:
        """Whether a layer (from 0) has experts."""
        return self.feed_forward != "dense" and (layer + 1) % self.moe_every == 0

    def intermediate_size_of(self, layer: int) -> int:
        """Intermediate dimension of the feed-forward layer, or of each of its experts."""
        if isinstance(self.intermediate_size, tuple):
            return self.intermediate_size[layer]
        return self.intermediate_size or 4 * self.hidden_size

    def build(self, shape: tuple[int, ...], condition: ConditioningSpec) -> DiT:
        """The network for samples of ``shape`` (channels, height, width), not yet initialized."""
        return DiT(self, shape, condition)


class DiT(nn.Module):
    """The network of a `DiTConfig`.

    Args:
        config: the configuration.
        shape: shape of a sample: (channels, height, width).
        condition: the conditions that the network reads. A map is concatenated to the image; class, vector and pooled
            text are added to the time embedding; the text's tokens are read by cross-attention.

    Raises:
        InvalidArgument: a shape that the patch size does not divide, or heads that do not divide the hidden size.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: DiTConfig, shape: tuple[int, ...], condition: ConditioningSpec) -> None:
        super().__init__()
        if len(shape) != 3 or shape[1] % config.patch_size or shape[2] % config.patch_size:
            raise InvalidArgument(
                f"samples of shape {shape} are not cut into patches of {config.patch_size}; give (channels, height, "
                "width), the sides multiples of it"
            )
        self.config, self.shape = config, tuple(shape)
        width, area = config.hidden_size, config.patch_size**2
        self.rows, self.columns = shape[1] // config.patch_size, shape[2] // config.patch_size
        self.into = Linear((shape[0] + condition.map_channels) * area, width, bias=True)
        self.time = TimeEmbedding(width)
        self.condition = ConditionEmbedding(condition, width)
        context = width if condition.text_dim else 0
        self.blocks = nn.ModuleList(_block(config, layer, context) for layer in range(config.num_hidden_layers))
        self.head = TimedHead(width, shape[0] * area)
        learned = config.position_embedding != "rotary"
        self.position_embedding = nn.Parameter(torch.zeros(self.rows * self.columns, width)) if learned else None
        if self.position_embedding is not None:
            self.position_embedding.no_decay = True  # type: ignore[attr-defined]  # read by `pippin.train`
        cosines, sines = axial_tables(grid_positions(self.rows, self.columns), width // config.num_attention_heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(
        self, x: Float[Tensor, "n channels height width"], t: Float[Tensor, n], condition: Conditioning | None = None
    ) -> Float[Tensor, "n channels height width"]:
        """Output of the network for noised samples at times 0 to 1; float32.

        Raises:
            InvalidArgument: samples of another shape, or a condition that the network does not read.
        """
        if tuple(x.shape[1:]) != self.shape:
            raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the network reads {self.shape}")
        embedded = self.condition(condition, len(x))
        vector = self.time(t) + embedded.vector
        inputs = x if embedded.map is None else torch.cat([x, embedded.map], 1)
        tokens = self.into(patchify(inputs, self.config.patch_size))  # (n, tokens, width)
        if self.position_embedding is not None:
            tokens = tokens + self.position_embedding
        cos_sin = None if self.config.position_embedding == "learned" else (self.cosines, self.sines)
        for layer, block in enumerate(self.blocks):
            text = {"context": embedded.tokens, "context_mask": embedded.mask}
            tokens = block(tokens, cos_sin, BidirectionalCache(), layer, vector=vector[:, None], **text)
        return unpatchify(self.head(tokens, vector), self.config.patch_size, self.shape[1:])  # type: ignore[arg-type]

    @property
    def mixes_samples(self) -> bool:
        """Whether a sample's output depends on the batch: experts choose among the tokens of several samples."""
        return any(isinstance(layer, ExpertChoiceFFN) and layer.group != "image" for layer in self.modules())

    def auxiliary_loss(self) -> Tensor | None:
        """The weighted load-balancing loss of the last pass in training mode, summed over layers; None without one.

        It is cleared by this call, so that each pass counts once.
        """
        total: Tensor | None = None
        for layer in self.modules():
            if isinstance(layer, TokenChoiceFFN) and layer.balance is not None:
                weighted = self.config.load_balancing_weight * layer.balance
                total = weighted if total is None else total + weighted
                layer.balance = None
        return total

    def multiply_adds(self, text_tokens: int = 0) -> int:
        """Multiply-adds in the matrix products of one pass over one image and a text of ``text_tokens`` tokens."""
        config, tokens, width = self.config, self.rows * self.columns, self.config.hidden_size
        kv_width = width // config.num_attention_heads * (config.num_key_value_heads or config.num_attention_heads)
        attention = tokens * (2 * width * width + 2 * width * kv_width) + 2 * tokens * tokens * width
        cross_attention = 0
        if text_tokens:
            cross_attention = 2 * (tokens + text_tokens) * width * width + 2 * tokens * text_tokens * width
        total = tokens * width * (self.into.inputs + self.head.out.outputs)
        total += self.time.frequencies * width + width * width + 2 * width * width  # time embedding, head modulation
        if text_tokens and self.condition.text is not None:
            total += text_tokens * self.condition.text.inputs * width
        for layer in range(config.num_hidden_layers):
            total += attention + cross_attention + 6 * width * width  # 6 modulation vectors
            rows = tokens
            if config.is_moe(layer):
                capacity = math.ceil(tokens * config.capacity_factor / config.num_experts - 1e-9)
                rows = config.num_experts * capacity
                total += tokens * width * config.num_experts  # router
            total += 2 * rows * width * config.intermediate_size_of(layer)
        return total

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> DiT:
        """Set random weights, with which the network predicts 0."""
        self.into.weight.normal_(0.0, self.into.inputs**-0.5, generator=generator)
        # layer norms remove the scale of a token: without a bias, a bright patch would look like a dim one
        self.into.bias.normal_(0.0, 1.0, generator=generator)  # type: ignore[union-attr]
        self.time.initialize(generator)
        self.condition.initialize(generator)
        for block in self.blocks:
            assert isinstance(block, AdaptiveBlock)
            block.initialize(generator, depth=self.config.num_hidden_layers)
            if isinstance(block.feed_forward, (ExpertChoiceFFN, TokenChoiceFFN)):
                block.feed_forward.initialize(generator)
        self.head.initialize()
        if self.position_embedding is not None:
            self.position_embedding.normal_(0.0, 0.5, generator=generator)
        return self


def _block(config: DiTConfig, layer: int, context: int) -> AdaptiveBlock:
    """A transformer block, with experts if the layer is sparse."""
    width, hidden = config.hidden_size, config.intermediate_size_of(layer)
    feed_forward: nn.Module | None = None
    if config.is_moe(layer) and config.feed_forward == "expert_choice":
        feed_forward = ExpertChoiceFFN(
            width,
            hidden,
            config.num_experts,
            capacity=config.capacity_factor,
            group=config.routing_group,
            gate_scale=config.gate_scale,
        )
    elif config.is_moe(layer):
        feed_forward = TokenChoiceFFN(width, hidden, config.num_experts, active=int(config.capacity_factor))
    return AdaptiveBlock(
        width,
        config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        hidden=hidden,
        vector=width,
        context=context,
        qk_norm=config.qk_norm,
        feed_forward=feed_forward,
    )
