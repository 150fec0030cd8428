"""Grouped-query attention with rotary positions, read from and written to a cache.

Notable here:
- one class for every decoder family: biases, norms on queries and keys, window, and no position at all are arguments
- a layer may have no keys and values of its own and read those of an earlier layer
- a single new token treats the heads that share keys as a sequence, so that no key is ever copied
- sequences that lie end to end share every matrix product and are told apart only where they look at their keys
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.nn import trained_attention
from pippin.nn.cache import Cut, EndToEnd, KVCache, Seen
from pippin.nn.linear import Linear
from pippin.nn.lora import Shares
from pippin.nn.norm import RMSNorm
from pippin.nn.rotary import Rotary, rotate


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer sees.

    Args:
        window: a token sees itself and the ``window - 1`` tokens before it; None sees all.
        rotary: how positions are encoded; None for no position signal (NoPE).
        source: the earlier layer whose keys and values this one reads; None for its own.
    """

    window: int | None = None
    rotary: Rotary | None = Rotary()
    source: int | None = None


class Attention(nn.Module):
    """One attention layer.

    Args:
        spec: what it sees.
        width: model width.
        heads: query heads; a multiple of ``kv_heads``.
        kv_heads: key and value heads.
        head_dim: width of a head, even.
        bias: biases on the query, key and value projections.
        output_bias: bias on the output projection.
        qk_norm: RMS norms over each query and key head, before the rotation.
        scale: multiplier on the scores; None for ``head_dim ** -0.5``.
        eps: of the norms.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        scale: float | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.heads, self.kv_heads, self.head_dim, self.scale = heads, kv_heads, head_dim, scale
        self.q_proj = Linear(width, heads * head_dim, bias=bias)
        self.o_proj = Linear(heads * head_dim, width, bias=output_bias)
        self.q_norm = RMSNorm(head_dim, eps=eps) if qk_norm else None
        self.k_norm: RMSNorm | None = None
        self.qkv_proj: Linear | None = None  # the three projections as one, where packing fused them
        if spec.source is None:
            self.k_proj = Linear(width, kv_heads * head_dim, bias=bias)
            self.v_proj = Linear(width, kv_heads * head_dim, bias=bias)
            self.k_norm = RMSNorm(head_dim, eps=eps) if qk_norm else None

    def forward(
        self,
        x: Float[Tensor, "batch new width"],
        turn: tuple[Tensor, Tensor] | None,
        cache: KVCache,
        layer: int,
        shared: Seen | None = None,
        adapters: Shares | None = None,
        cut: Cut | None = None,
    ) -> tuple[Float[Tensor, "batch kept width"], Seen]:
        """Attend; return the output and the keys, values and mask that were read.

        Args:
            x: normalised hidden states.
            turn: cosine and sine of the new positions, or None.
            cache: where keys and values go.
            layer: index of this layer in the cache.
            shared: keys, values and mask of the source layer, if this layer has none of its own.
            adapters: low-rank changes of the projections, each for its tokens.
            cut: if given, which of the tokens ask; the cache must have been narrowed to them.
        """
        q, k, v = self._project(x, adapters)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if k is not None and self.k_norm is not None:
            k = self.k_norm(k)
        if turn is not None:
            q = rotate(q, *turn)
            k = None if k is None else rotate(k, *turn)
        if k is not None and v is not None:
            shared = cache.append(layer, k, v, self.spec.window)
        assert shared is not None, f"layer {layer} reads layer {self.spec.source}, which was not given"
        if cut is not None:
            q, adapters = q.index_select(2, cut.rows), cut.adapters
            if q.shape[2] == 0:
                return x[:, :0], shared
        if isinstance(shared, EndToEnd):
            parts = q.split(shared.counts, dim=2)
            y = torch.cat([self._attend(part, *read) for part, read in zip(parts, shared.reads, strict=True)], 1)
        elif isinstance(shared, tuple):
            y = self._attend(q, *shared)
        else:
            y = shared.attend(q, self.scale)
        return self.o_proj(y, adapters), shared

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """What the queries (batch, heads, new, head_dim) read, as (batch, new, heads * head_dim)."""
        batch, _, new, _ = q.shape
        if new == 1:
            groups = q.reshape(batch, self.kv_heads, -1, self.head_dim)
            y = F.scaled_dot_product_attention(groups, keys, values, attn_mask=mask, scale=self.scale)
            return y.reshape(batch, 1, -1)
        if mask is None and trained_attention.supports(q, keys, values):
            y = trained_attention.attend(q, keys, values, self.scale)
        else:
            y = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
        return y.transpose(1, 2).reshape(batch, new, -1)

    def _project(self, x: Tensor, adapters: Shares | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, and the keys and values of a layer that has its own: each (batch, heads, new, head_dim)."""
        batch, new, _ = x.shape
        if self.qkv_proj is not None:
            heads = self.qkv_proj(x, adapters).view(batch, new, -1, self.head_dim).transpose(1, 2)
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            return q, k, v
        q, *kv = (
            projection(x, adapters).view(batch, new, -1, self.head_dim).transpose(1, 2)
            for projection in (
                [self.q_proj] if self.spec.source is not None else [self.q_proj, self.k_proj, self.v_proj]
            )
        )
        return q, *(kv or (None, None))

    def pack(self) -> None:
        """Pack the weights for inference; fuse the input projections where that is quicker."""
        if self.spec.source is None and not self.q_proj.fusible:
            for projection in (self.q_proj, self.k_proj, self.v_proj):
                projection.pack()
        elif self.spec.source is None:
            self.qkv_proj = Linear.fused([self.q_proj, self.k_proj, self.v_proj]).pack()
            del self.q_proj, self.k_proj, self.v_proj
        else:
            self.q_proj.pack()
        self.o_proj.pack()
