"""A transformer block for images: self-attention, cross-attention and feed-forward, with adaptive layer norm.

Notable here:
- the same block is used for diffusion (bidirectional), flows (causal, with a cache) and autoregressive denoisers: the
  cache determines which tokens attend to which, the rotary tables determine positions
- adaptive branches are initialized to zero (adaLN-Zero), so that a deep stack starts as the identity
- the conditioning vector is one for the whole sample, or one for each token
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.nn.attention.attention import Attention, AttentionSpec
from pippin.nn.context import LayerContext
from pippin.nn.feedforward.feedforward import Activation, FeedForward, FeedForwardSpec
from pippin.nn.kv_cache import KVCache
from pippin.nn.linear import Linear


class CrossAttention(nn.Module):
    """Cross-attention of image tokens to the tokens of a text.

    Args:
        width: hidden size of the image tokens.
        heads: number of attention heads.
        context: hidden size of the text tokens.
    """

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = Linear(width, width)
        self.k_proj = Linear(context, width)
        self.v_proj = Linear(context, width)
        self.o_proj = Linear(width, width)

    def forward(
        self,
        x: Float[Tensor, "n tokens width"],
        context: Float[Tensor, "n words context"],
        mask: Bool[Tensor, "n words"],
    ) -> Float[Tensor, "n tokens width"]:
        """Attend from each image token to the text tokens that are not masked; zeros if all are masked."""
        n, _, width = x.shape
        q, k, v = (
            y.view(n, -1, self.heads, width // self.heads).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(context), self.v_proj(context))
        )
        some = mask.any(1)
        seen = (mask | ~some[:, None])[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(n, -1, width)
        out: Tensor = self.o_proj(y * some[:, None, None])
        return out


class AdaptiveBlock(nn.Module):
    r"""$x + g_1 \odot \mathrm{attend}(n(x))$, then cross-attention, then $x + g_2 \odot \mathrm{feed}(n(x))$.

    With a conditioning vector, $n(x) = (1 + \gamma) \odot \mathrm{norm}(x) + \beta$, where $\gamma, \beta, g$ are
    linear in the vector and initialized to zero; without one, the norms have learned weights and $g = 1$.

    Args:
        width: hidden size.
        heads: number of query heads.
        kv_heads: number of key and value heads; None for as many as query heads.
        spec: window of the attention; positions are passed to `forward` (``cos_sin``).
        hidden: inner size of the feed-forward layer; None for four times the hidden size.
        gated: whether the feed-forward layer is SwiGLU instead of ungated.
        vector: size of the conditioning vector; 0 for none.
        context: hidden size of the text tokens; 0 for no cross-attention.
        qk_norm: whether to normalize queries and keys.
        bias: whether the attention projections have biases.
        activation: activation of an ungated feed-forward layer.
        feed_forward: a layer that replaces the dense one, from (n, tokens, width) to the same shape; if it has the
            attribute ``looks_ahead``, it can only be used with bidirectional attention.

    Raises:
        InvalidArgument: heads that do not divide the hidden size; in `forward`, causal attention with a feed-forward
            layer that looks ahead.

    Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.2.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        spec: AttentionSpec = AttentionSpec(rotary=None),
        hidden: int | None = None,
        gated: bool = False,
        vector: int = 0,
        context: int = 0,
        qk_norm: bool = False,
        bias: bool = False,
        activation: Activation = "gelu_tanh",
        feed_forward: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads or (width // heads) % 2:
            raise InvalidArgument(f"{heads} heads do not divide a width of {width} into even parts")
        self.width = width
        self.attention = Attention(
            spec,
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads or heads,
            head_dim=width // heads,
            bias=bias,
            output_bias=bias,
            qk_norm="head" if qk_norm else None,
        )
        inner = FeedForwardSpec(hidden or 4 * width, "silu" if gated else activation, gated=gated)
        self.feed_forward = feed_forward or FeedForward(replace(inner, bias=not gated), width)
        self.looks_ahead = bool(getattr(self.feed_forward, "looks_ahead", False))
        self.adapt = Linear(vector, 6 * width, bias=True) if vector else None
        self.attention_norm = nn.LayerNorm(width, elementwise_affine=not vector)
        self.feed_norm = nn.LayerNorm(width, elementwise_affine=not vector)
        self.cross = CrossAttention(width, heads, context) if context else None
        self.cross_norm = nn.LayerNorm(width) if context else None

    def forward(
        self,
        x: Float[Tensor, "n tokens width"],
        cos_sin: tuple[Tensor, Tensor] | None,
        cache: KVCache,
        layer: int,
        *,
        vector: Float[Tensor, "n once_or_tokens inner"] | None = None,
        context: Float[Tensor, "n words context"] | None = None,
        context_mask: Bool[Tensor, "n words"] | None = None,
    ) -> Float[Tensor, "n tokens width"]:
        """Apply the block.

        Args:
            x: hidden states.
            cos_sin: rotary tables of their positions (`pippin.nn.attention.axial_rotary`); None for none.
            cache: `BidirectionalCache` for bidirectional attention, `NoCache` or another cache for causal attention.
            layer: index of this block in the cache.
            vector: conditioning vector of each sample (second dimension 1) or of each token.
            context: the text tokens.
            context_mask: true for text tokens that are not padding.
        """
        if self.looks_ahead and not isinstance(cache, BidirectionalCache):
            raise InvalidArgument(
                f"{type(self.feed_forward).__name__} chooses among all tokens, so earlier ones would depend on later "
                "ones; a causal model takes a dense layer, or one where tokens choose"
            )
        shift, scale, gate, shift2, scale2, gate2 = self._adapted(vector)
        y, _ = self.attention(_modulated(self.attention_norm(x), shift, scale), LayerContext(cache, layer, cos_sin))
        x = x + (y if gate is None else gate * y)
        if self.cross is not None and self.cross_norm is not None and context is not None and context_mask is not None:
            x = x + self.cross(self.cross_norm(x), context, context_mask)
        y = self.feed_forward(_modulated(self.feed_norm(x), shift2, scale2))
        out: Tensor = x + (y if gate2 is None else gate2 * y)
        return out

    def _adapted(self, vector: Tensor | None) -> tuple[Tensor | None, ...]:
        if (self.adapt is None) != (vector is None):
            raise InvalidArgument("a conditioning vector must be given if, and only if, the block was made with one")
        if self.adapt is None or vector is None:
            return (None,) * 6
        return tuple(self.adapt(F.silu(vector)).chunk(6, -1))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator, *, depth: int = 1) -> AdaptiveBlock:
        """Initialize weights for a stack of ``depth`` blocks; adaptive layers and cross-attention start at zero."""
        zero = [self.adapt, None if self.cross is None else self.cross.o_proj]
        outputs = [self.attention.o_proj, getattr(self.feed_forward, "down_proj", None)]
        for module in self.modules():
            if not isinstance(module, Linear) or module.weight is None:
                continue
            size = 1 / math.sqrt(module.inputs)
            if any(module is other for other in outputs) and self.adapt is None:
                size /= math.sqrt(2 * depth)
            if any(module is other for other in zero):
                module.weight.zero_()
            else:
                module.weight.normal_(0.0, size, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        return self


class BidirectionalCache:
    """A cache that stores nothing, for attention without a mask: every token attends to every other."""

    length = 0
    positions = None

    def append(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> _All:
        """The new keys and values, all visible."""
        return _All(k, v)

    def advance(self, new: int) -> None:
        """Do nothing, as nothing is cached."""


class _All:
    """Keys and values without a mask."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def attend(self, q: Tensor, scale: float | None) -> Tensor:
        y = F.scaled_dot_product_attention(q, self.keys, self.values, scale=scale, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def _modulated(x: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    return x if shift is None or scale is None else torch.addcmul(shift, x, 1 + scale)
