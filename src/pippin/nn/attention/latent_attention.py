r"""Multi-head latent attention: keys and values of all heads come from one small vector per token, which is cached.

Notable here:
- the projections from the latent vector to keys and values are moved to the queries and the outputs, so that attention
  is that of many query heads over one key head of ``kv_rank + rotated_dim`` dimensions: no key or value of a head is
  ever computed, and the cache of a token is as small as its latent vector
- any cache and any attention kernel of one key head serves; values are the keys, of which the first ``kv_rank``
  dimensions are used
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.nn.attention.attention import AttentionSpec, attend, scaled_by_position
from pippin.nn.attention.rotary import apply_rotary
from pippin.nn.context import LayerContext
from pippin.nn.kv_cache import VisibleKeyValues
from pippin.nn.linear import Linear
from pippin.nn.norm import RMSNorm
from pippin.nn.quantization.packed import NativeWeight

_EPS = 1e-6
"""Epsilon of the norms of latent vectors, which no configuration names."""


class HeadProjection(nn.Module):
    """The matrix from latent vectors to the keys, or to the values, of each head, which are never computed.

    It keeps its precision where others are quantized: what is moved to queries and outputs is read by head.

    Args:
        heads: number of heads.
        size: dimensions of a head.
        kv_rank: size of the latent vector.
    """

    def __init__(self, heads: int, size: int, kv_rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads * size, kv_rank))
        self._packed: list[NativeWeight] | None = None

    def by_head(self) -> Float[Tensor, "heads size kv_rank"]:
        """The part of each head."""
        parts: Tensor = self.weight.unflatten(0, (self.heads, -1))
        return parts

    def native_by_head(self, *, transposed: bool) -> list[NativeWeight]:
        """The part of each head for the native kernels; the weight must not change any more.

        Args:
            transposed: (kv_rank, size) in place of (size, kv_rank).
        """
        if self._packed is None:
            parts = self.by_head().mT if transposed else self.by_head()
            self._packed = [NativeWeight.from_dense(part) for part in parts]
        return self._packed


class LatentAttention(nn.Module):
    r"""One layer of latent attention.

    With the latent vector $c$ of a token, a head's key is $[W_k c, r]$ with the rotated part $r$ that all heads share,
    and its value $W_v c$. A score is $q_p \cdot W_k c + q_r \cdot r = (W_k^\top q_p) \cdot c + q_r \cdot r$.

    Args:
        spec: window, position encoding and sizes (``latent``).
        hidden_size: hidden size of the model.
        num_attention_heads: number of heads.
        output_bias: whether the output projection has a bias.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; the order of products is that of its appendix C.
    """

    def __init__(
        self, spec: AttentionSpec, *, hidden_size: int, num_attention_heads: int, output_bias: bool = False
    ) -> None:
        super().__init__()
        assert spec.latent is not None, "latent attention needs its sizes"
        self.spec, self.latent, self.heads = spec, spec.latent, num_attention_heads
        latent = spec.latent
        size = latent.plain_dim + latent.rotated_dim
        self.scale = size**-0.5 * (1.0 if spec.rotary is None else spec.rotary.score_scale)
        if latent.q_rank is None:
            self.q_proj = Linear(hidden_size, num_attention_heads * size)
        else:
            self.q_a_proj = Linear(hidden_size, latent.q_rank, bias=latent.bias)
            self.q_a_layernorm = RMSNorm(latent.q_rank, eps=_EPS)
            self.q_b_proj = Linear(latent.q_rank, num_attention_heads * size)
        self.kv_a_proj_with_mqa = Linear(hidden_size, latent.kv_rank + latent.rotated_dim, bias=latent.bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, eps=_EPS)
        self.k_b_proj = HeadProjection(num_attention_heads, latent.plain_dim, latent.kv_rank)
        self.v_b_proj = HeadProjection(num_attention_heads, latent.value_dim, latent.kv_rank)
        self.o_proj = Linear(num_attention_heads * latent.value_dim, hidden_size, bias=output_bias)

    def forward(
        self, x: Float[Tensor, "batch new width"], context: LayerContext
    ) -> tuple[Float[Tensor, "batch kept width"], VisibleKeyValues]:
        """Apply the layer; arguments and results as of `pippin.nn.attention.attention.Attention`."""
        latent, adapters = self.latent, context.adapters
        if latent.q_rank is None:
            q = self.q_proj(x, adapters)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, adapters)), adapters)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        plain, rotated = q.split([latent.plain_dim, latent.rotated_dim], -1)
        compressed, shared_key = self.kv_a_proj_with_mqa(x, adapters).split([latent.kv_rank, latent.rotated_dim], -1)
        shared_key = shared_key[:, None]
        if context.cos_sin is not None:
            rotated, shared_key = (apply_rotary(part, *context.cos_sin) for part in (rotated, shared_key))
        to_keys, to_values = self.k_b_proj.by_head(), self.v_b_proj.by_head()
        q = torch.cat([plain @ to_keys.to(plain.dtype), rotated], -1)
        if self.spec.position_scale is not None:
            q = scaled_by_position(q, self.spec.position_scale, context)
        keys = torch.cat([self.kv_a_layernorm(compressed)[:, None], shared_key], -1)
        read = context.cache.append(context.layer, keys, keys, self.spec.window)
        if context.selection is not None:
            q, adapters = q.index_select(2, context.selection.rows), context.selection.adapters
            if q.shape[2] == 0:
                return x[:, :0], read
        y = attend(q, read, self.scale).unflatten(-1, (self.heads, -1))[..., : latent.kv_rank]
        y = torch.einsum("bnhr,hvr->bnhv", y, to_values.to(y.dtype)).flatten(2)
        return self.o_proj(y, adapters), read
