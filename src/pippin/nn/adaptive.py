"""A transformer block for pictures: attention, reading of a text, and feed-forward, each adapted by a vector or not.

Notable here:
- one block serves diffusion (no order), flows (causal, with a cache) and denoisers that go step by step: who sees whom
  is the cache's matter, where tokens stand is the rotation's
- adapted branches begin closed (adaLN-Zero): at first a deep stack passes its input on, and every depth trains
- the vector is that of the whole sample, or one for each token
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.nn.attention import Attention, AttentionSpec
from pippin.nn.cache import KVCache
from pippin.nn.feedforward import Activation, FeedForward, FeedForwardSpec
from pippin.nn.linear import Linear


class CrossAttention(nn.Module):
    """Attention of tokens to a text.

    Args:
        width: of the tokens.
        heads: of the attention.
        context: width of the text's tokens.
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
        """What each token reads of its text; a text of no words gives zeros."""
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
    r"""$x + g_1 \odot \mathrm{attend}(n(x))$, then the text, then $x + g_2 \odot \mathrm{feed}(n(x))$.

    With a vector, $n(x) = (1 + \gamma) \odot \mathrm{norm}(x) + \beta$, and $\gamma, \beta, g$ are linear in the
    vector, zero at first; without, the norms have weights of their own and $g = 1$.

    Args:
        width: of the tokens.
        heads: of the attention; ``kv_heads`` of them, if given, have keys.
        kv_heads: heads with keys of their own; None for all.
        spec: window of the attention; positions are given with each pass (`turn`).
        hidden: inner width of the feed-forward layer; None for four times the width.
        gated: SwiGLU in place of GELU.
        vector: width of the adapting vector; 0 for none.
        context: width of the text's tokens; 0 for no text.
        qk_norm: norms of queries and keys.
        feed_forward: a layer to take in place of the dense one, from (n, tokens, width) to the same; one that
            says it ``looks_ahead`` is applied without order only.

    Raises:
        InvalidArgument: heads that do not divide the width; in a pass, a layer that looks ahead in causal order.

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
            width=width,
            heads=heads,
            kv_heads=kv_heads or heads,
            head_dim=width // heads,
            bias=bias,
            output_bias=bias,
            qk_norm=qk_norm,
        )
        inner = FeedForwardSpec(hidden or 4 * width, "silu" if gated else activation, gated=gated)
        self.feed_forward = feed_forward or FeedForward(inner, width, bias=not gated)
        self.looks_ahead = bool(getattr(self.feed_forward, "looks_ahead", False))
        self.adapt = Linear(vector, 6 * width, bias=True) if vector else None
        self.attention_norm = nn.LayerNorm(width, elementwise_affine=not vector)
        self.feed_norm = nn.LayerNorm(width, elementwise_affine=not vector)
        self.cross = CrossAttention(width, heads, context) if context else None
        self.cross_norm = nn.LayerNorm(width) if context else None

    def forward(
        self,
        x: Float[Tensor, "n tokens width"],
        turn: tuple[Tensor, Tensor] | None,
        cache: KVCache,
        layer: int,
        *,
        vector: Float[Tensor, "n once_or_tokens inner"] | None = None,
        context: Float[Tensor, "n words context"] | None = None,
        context_mask: Bool[Tensor, "n words"] | None = None,
    ) -> Float[Tensor, "n tokens width"]:
        """Apply the block.

        Args:
            x: the tokens.
            turn: cosine and sine of their places (`pippin.nn.axial`), or None.
            cache: who sees whom: `Everything` without order, `NoCache` for causal order, `DenseCache` to go on.
            layer: number of this block in the cache.
            vector: what adapts the block, for each sample (1 token) or each token.
            context: the text's tokens.
            context_mask: which of them are there.
        """
        if self.looks_ahead and not isinstance(cache, Everything):
            raise InvalidArgument(
                f"{type(self.feed_forward).__name__} chooses among all tokens, so earlier ones would depend on later "
                "ones; a causal model takes a dense layer, or one where tokens choose"
            )
        shift, scale, gate, shift2, scale2, gate2 = self._adapted(vector)
        y, _ = self.attention(_moved(self.attention_norm(x), shift, scale), turn, cache, layer)
        x = x + (y if gate is None else gate * y)
        if self.cross is not None and self.cross_norm is not None and context is not None and context_mask is not None:
            x = x + self.cross(self.cross_norm(x), context, context_mask)
        y = self.feed_forward(_moved(self.feed_norm(x), shift2, scale2))
        out: Tensor = x + (y if gate2 is None else gate2 * y)
        return out

    def _adapted(self, vector: Tensor | None) -> tuple[Tensor | None, ...]:
        if (self.adapt is None) != (vector is None):
            raise InvalidArgument("a block with an adapting vector is called with one, and no other block is")
        if self.adapt is None or vector is None:
            return (None,) * 6
        return tuple(self.adapt(F.silu(vector)).chunk(6, -1))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, *, depth: int = 1) -> AdaptiveBlock:
        """Random weights for a stack of ``depth`` blocks; what adapts and what reads the text begins at zero."""
        zero = [self.adapt, None if self.cross is None else self.cross.o_proj]
        quiet = [self.attention.o_proj, getattr(self.feed_forward, "down_proj", None)]
        for module in self.modules():
            if not isinstance(module, Linear) or module.weight is None:
                continue
            size = 1 / math.sqrt(module.inputs)
            if any(module is other for other in quiet) and self.adapt is None:
                size /= math.sqrt(2 * depth)
            if any(module is other for other in zero):
                module.weight.zero_()
            else:
                module.weight.normal_(0.0, size, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        return self


class Everything:
    """Every token sees every other; nothing is kept."""

    length = 0
    positions = None

    def append(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> _All:
        """All keys and values."""
        return _All(k, v)

    def advance(self, new: int) -> None:
        """Nothing is kept."""


class _All:
    """Keys and values of which none is hidden."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def attend(self, q: Tensor, scale: float | None) -> Tensor:
        y = F.scaled_dot_product_attention(q, self.keys, self.values, scale=scale, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def _moved(x: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    return x if shift is None or scale is None else torch.addcmul(shift, x, 1 + scale)
