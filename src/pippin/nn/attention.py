"""Grouped-query attention with rotary positions and a key-value cache.

Notable here:
- one class for every decoder family: biases, query and key norms, windows and NoPE are arguments
- a layer may have no keys and values of its own and use those of an earlier layer (KV sharing)
- for a single new token the query heads that share keys are treated as a sequence, so that no keys are copied
- packed sequences share every matrix product and are separated only in the attention itself
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.nn import blocked_attention
from pippin.nn.context import LayerContext
from pippin.nn.kv_cache import PackedKeyValues, VisibleKeyValues
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.norm import RMSNorm
from pippin.nn.rotary import Rotary, apply_rotary

QKNorm = Literal["head", "full", "rotated head"]


@dataclass(frozen=True)
class AttentionSpec:
    """Window, position encoding and KV sharing of one attention layer.

    Args:
        window: a token attends to itself and the ``window - 1`` tokens before it; None for all earlier tokens.
        rotary: rotary position encoding; None for none (NoPE).
        kv_source: index of the earlier layer whose keys and values this layer uses; None for its own.
        softcap: bound of the scores, which become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv:2408.00118);
            None for no bound.
    """

    window: int | None = None
    rotary: Rotary | None = Rotary()
    kv_source: int | None = None
    softcap: float | None = None


class Attention(nn.Module):
    """One attention layer.

    Args:
        spec: window, position encoding and KV sharing.
        hidden_size: hidden size of the model.
        num_attention_heads: number of query heads; a multiple of ``num_key_value_heads``.
        num_key_value_heads: number of key and value heads.
        head_dim: size of a head, even.
        bias: whether the query, key and value projections have biases.
        output_bias: whether the output projection has a bias.
        qk_norm: RMS norms of queries and keys: "head" for each head, "full" for all heads together, both before the
            rotation; "rotated head" for each head after it. None for none.
        scale: factor of the attention scores; None for ``head_dim ** -0.5``.
        eps: epsilon of the norms.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: QKNorm | None = None,
        scale: float | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.heads, self.kv_heads, self.head_dim, self.scale = num_attention_heads, num_key_value_heads, head_dim, scale
        self.q_proj = Linear(hidden_size, num_attention_heads * head_dim, bias=bias)
        self.o_proj = Linear(num_attention_heads * head_dim, hidden_size, bias=output_bias)
        self.qk_norm = qk_norm
        full = qk_norm == "full"
        self.q_norm = RMSNorm(num_attention_heads * head_dim if full else head_dim, eps=eps) if qk_norm else None
        self.k_norm: RMSNorm | None = None
        self.qkv_proj: Linear | None = None  # the three projections as one, where packing fused them
        if spec.kv_source is None:
            self.k_proj = Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
            self.v_proj = Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
            self.k_norm = RMSNorm(num_key_value_heads * head_dim if full else head_dim, eps=eps) if qk_norm else None

    def forward(
        self,
        x: Float[Tensor, "batch new width"],
        context: LayerContext,
    ) -> tuple[Float[Tensor, "batch kept width"], VisibleKeyValues]:
        """Apply the layer.

        Args:
            x: normalized hidden states.
            context: cache, rotary tables, shared keys and adapters; with a selection, only its tokens are queries.

        Returns:
            The output, and the keys, values and mask that were attended to.
        """
        adapters, selection, shared = context.adapters, context.selection, context.shared
        q, k, v = self._project(x, adapters)
        if self.qk_norm != "rotated head":
            q, k = self._normalize(self.q_norm, q), None if k is None else self._normalize(self.k_norm, k)
        if context.cos_sin is not None:
            q = apply_rotary(q, *context.cos_sin)
            k = None if k is None else apply_rotary(k, *context.cos_sin)
        if self.qk_norm == "rotated head":
            q, k = self._normalize(self.q_norm, q), None if k is None else self._normalize(self.k_norm, k)
        if k is not None and v is not None:
            shared = context.cache.append(context.layer, k, v, self.spec.window)
        assert shared is not None, f"layer {context.layer} reads layer {self.spec.kv_source}, which was not given"
        if selection is not None:
            q, adapters = q.index_select(2, selection.rows), selection.adapters
            if q.shape[2] == 0:
                return x[:, :0], shared
        if isinstance(shared, PackedKeyValues):
            parts = q.split(shared.counts, dim=2)
            y = torch.cat([self._attend(part, *read) for part, read in zip(parts, shared.reads, strict=True)], 1)
        elif isinstance(shared, tuple):
            y = self._attend(q, *shared)
        else:
            y = shared.attend(q, self.scale)
        return self.o_proj(y, adapters), shared

    def _normalize(self, norm: RMSNorm | None, x: Tensor) -> Tensor:
        """Normalize queries or keys, (batch, heads, new, head_dim)."""
        if norm is None:
            return x
        if self.qk_norm != "full":
            normalized: Tensor = norm(x)
            return normalized
        together = norm(x.transpose(1, 2).flatten(2))  # all heads of a token are one vector
        heads: Tensor = together.unflatten(2, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of queries (batch, heads, new, head_dim), as (batch, new, heads * head_dim)."""
        batch, _, new, _ = q.shape
        if self.spec.softcap is not None:
            return self._attend_softcapped(q, keys, values, mask)
        if new == 1:
            groups = q.reshape(batch, self.kv_heads, -1, self.head_dim)
            y = F.scaled_dot_product_attention(groups, keys, values, attn_mask=mask, scale=self.scale)
            return y.reshape(batch, 1, -1)
        if mask is None and blocked_attention.supports(q, keys, values):
            y = blocked_attention.attend(q, keys, values, self.scale)
        else:
            y = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
        return y.transpose(1, 2).reshape(batch, new, -1)

    def _attend_softcapped(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """`_attend` with bounded scores, which no fused kernel computes."""
        assert self.spec.softcap is not None
        batch, _, new, _ = q.shape
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        groups = q.unflatten(1, (self.kv_heads, -1)) * scale  # (batch, kv_heads, heads per key head, new, head_dim)
        scores = groups @ keys[:, :, None].transpose(-1, -2)
        scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
        if mask is None and new > 1:  # causal order
            mask = torch.ones(new, keys.shape[2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask.view(*mask.shape[:-2], 1, *mask.shape[-2:]), -torch.inf)
        y = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ values[:, :, None]
        return y.flatten(1, 2).transpose(1, 2).reshape(batch, new, -1)

    def _project(self, x: Tensor, adapters: AdapterSlices | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, and keys and values if the layer has its own: each (batch, heads, new, head_dim)."""
        batch, new, _ = x.shape
        if self.qkv_proj is not None:
            heads = self.qkv_proj(x, adapters).view(batch, new, -1, self.head_dim).transpose(1, 2)
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            return q, k, v
        q, *kv = (
            projection(x, adapters).view(batch, new, -1, self.head_dim).transpose(1, 2)
            for projection in (
                [self.q_proj] if self.spec.kv_source is not None else [self.q_proj, self.k_proj, self.v_proj]
            )
        )
        return q, *(kv or (None, None))
