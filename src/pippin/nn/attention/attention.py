"""Grouped-query attention with rotary positions and a key-value cache.

Notable here:
- one class for every decoder family: biases, query and key norms, windows and NoPE are arguments
- a layer may have no keys and values of its own and use those of an earlier layer (KV sharing)
- for a single new token the query heads that share keys are treated as a sequence, so that no keys are copied
- packed sequences share every matrix product and are separated only in the attention itself
- scores that no fused kernel computes (bounded, or with sinks) are computed for some queries at a time
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.nn.attention import blocked_attention
from pippin.nn.attention.rotary import Rotary, apply_rotary
from pippin.nn.context import LayerContext
from pippin.nn.kv_cache import PackedKeyValues, VisibleKeyValues
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.norm import RMSNorm

QKNorm = Literal["head", "full", "rotated head"]
_MAX_SCORES: Final = 1 << 25
"""Most scores that are in memory at once where no fused kernel computes them: 128 MiB in float32."""


@dataclass(frozen=True)
class LatentSpec:
    """The sizes of latent attention (`pippin.nn.attention.latent_attention`).

    Args:
        kv_rank: size of the latent vector that keys and values are computed from.
        rotated_dim: dimensions of a head that are rotated, even; all heads share those of the keys.
        plain_dim: dimensions of a head that are not rotated.
        value_dim: size of a head's values.
        q_rank: size of the latent vector of queries; None to compute them from the hidden states.
        bias: whether the projections to the latent vectors have biases.
    """

    kv_rank: int
    rotated_dim: int
    plain_dim: int
    value_dim: int
    q_rank: int | None = None
    bias: bool = False


@dataclass(frozen=True)
class PositionScale:
    r"""A factor of queries that grows with their position p: $1 + \beta \ln(1 + \lfloor p / \mathrm{length} \rfloor)$.

    Args:
        beta: strength; 0 for none.
        length: the trained context, within which the factor is 1.

    Source: Llama 4's attention temperature, also that of Ministral 3; Nakanishi 2025, arXiv:2501.19399, is its idea.
    """

    beta: float
    length: int

    def at(self, positions: Int[Tensor, "*batch new"]) -> Float[Tensor, "*batch new"]:
        """The factor at each position, float32."""
        return 1 + self.beta * torch.log1p((positions // self.length).float())


@dataclass(frozen=True)
class AttentionSpec:
    """Window, position encoding and KV sharing of one attention layer.

    Args:
        window: a token attends to itself and the ``window - 1`` tokens before it; None for all earlier tokens.
        rotary: rotary position encoding; None for none (NoPE).
        kv_source: index of the earlier layer whose keys and values this layer uses; None for its own.
        softcap: bound of the scores, which become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv:2408.00118);
            None for no bound.
        sinks: whether each head has a learned score that takes part in the softmax and has no value (gpt-oss).
        latent: sizes of latent attention; None for keys and values of each head.
        position_scale: factor of the queries by position; None for none.
        num_key_value_heads: key and value heads, where they are not the decoder's (Gemma 4's global layers).
        head_dim: size of a head, likewise.
        keys_are_values: whether the key projection, before norm and rotation, gives the values, too.
        value_norm: whether values are normalized to unit root mean square.
    """

    window: int | None = None
    rotary: Rotary | None = Rotary()
    kv_source: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: LatentSpec | None = None
    position_scale: PositionScale | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    keys_are_values: bool = False
    value_norm: bool = False


class Attention(nn.Module):
    """One attention layer.

    Args:
        spec: window, position encoding and KV sharing.
        hidden_size: hidden size of the model.
        num_attention_heads: number of query heads; a multiple of ``num_key_value_heads``.
        num_key_value_heads: number of key and value heads that the cache stores, and of the layer's own where its spec
            gives none.
        head_dim: size of a head, likewise; even.
        bias: whether the query, key and value projections have biases.
        output_bias: whether the output projection has a bias.
        gate: whether outputs are multiplied by a sigmoid of the input before they are projected (Qiu et al. 2025,
            arXiv:2505.06708).
        qk_norm: RMS norms of queries and keys: "head" for each head, "full" for all heads together, both before the
            rotation; "rotated head" for each head after it. None for none.
        scale: factor of the attention scores; None for ``head_dim ** -0.5``.
        eps: epsilon of the norms.
        norm_weight: whether the norms have weights.
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
        gate: bool = False,
        qk_norm: QKNorm | None = None,
        scale: float | None = None,
        eps: float = 1e-6,
        norm_weight: bool = True,
    ) -> None:
        super().__init__()
        self.spec, self.eps = spec, eps
        self.stored = (num_key_value_heads, head_dim)
        num_key_value_heads, head_dim = spec.num_key_value_heads or num_key_value_heads, spec.head_dim or head_dim
        self.heads, self.kv_heads, self.head_dim, self.scale = num_attention_heads, num_key_value_heads, head_dim, scale
        self.q_proj = Linear(hidden_size, num_attention_heads * head_dim, bias=bias)
        self.o_proj = Linear(num_attention_heads * head_dim, hidden_size, bias=output_bias)
        self.gate_proj = Linear(hidden_size, num_attention_heads * head_dim, bias=bias) if gate else None
        self.qk_norm = qk_norm
        self.sinks = nn.Parameter(torch.zeros(num_attention_heads)) if spec.sinks else None

        def norm(heads: int) -> nn.Module | None:
            width = heads * head_dim if qk_norm == "full" else head_dim
            if qk_norm is None:
                return None
            return RMSNorm(width, eps=eps) if norm_weight else nn.RMSNorm(width, eps, elementwise_affine=False)

        self.q_norm = norm(num_attention_heads)
        self.k_norm: nn.Module | None = None
        self.qkv_proj: Linear | None = None  # the three projections as one, where packing fused them
        if spec.kv_source is None:
            self.k_proj = Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
            self.v_proj: Linear | None = None
            if not spec.keys_are_values:
                self.v_proj = Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
            self.k_norm = norm(num_key_value_heads)

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
        if v is not None and self.spec.value_norm:
            v = F.rms_norm(v, v.shape[-1:], eps=self.eps)
        if self.qk_norm != "rotated head":
            q, k = self._normalize(self.q_norm, q), None if k is None else self._normalize(self.k_norm, k)
        if context.cos_sin is not None:
            q = apply_rotary(q, *context.cos_sin)
            k = None if k is None else apply_rotary(k, *context.cos_sin)
        if self.qk_norm == "rotated head":
            q, k = self._normalize(self.q_norm, q), None if k is None else self._normalize(self.k_norm, k)
        if self.spec.position_scale is not None:
            q = scaled_by_position(q, self.spec.position_scale, context)
        if k is not None and v is not None:
            shared = context.cache.append(context.layer, self._to_stored(k), self._to_stored(v), self.spec.window)
        assert shared is not None, f"layer {context.layer} reads layer {self.spec.kv_source}, which was not given"
        if selection is not None:
            q, adapters = q.index_select(2, selection.rows), selection.adapters
            if q.shape[2] == 0:
                return x[:, :0], shared
            x = x.index_select(1, selection.rows)
        y = attend(q, self._of_stored(shared), self.scale, softcap=self.spec.softcap, sinks=self.sinks)
        if self.gate_proj is not None:
            y = y * self.gate_proj(x, adapters).sigmoid()
        return self.o_proj(y, adapters), shared

    def _to_stored(self, x: Tensor) -> Tensor:
        """Keys or values as a cache of another number of heads or size stores them: split, and filled up with zeros."""
        heads, dim = self.stored
        if (heads, dim) == (self.kv_heads, self.head_dim):
            return x
        split = x.unflatten(-1, (-1, dim)).transpose(2, 3).flatten(1, 2)  # (batch, own heads * parts, new, dim)
        return F.pad(split, (0, 0, 0, 0, 0, heads - split.shape[1]))

    def _of_stored(self, read: VisibleKeyValues) -> VisibleKeyValues:
        """The layer's own heads of what a cache returned; the inverse of `_to_stored`."""
        dim = self.stored[1]
        if self.stored == (self.kv_heads, self.head_dim):
            return read
        parts = self.head_dim // dim

        def own(x: Tensor) -> Tensor:
            heads: Tensor = x[:, : self.kv_heads * parts].unflatten(1, (-1, parts))
            return heads.transpose(2, 3).flatten(3) if parts > 1 else heads.squeeze(2)

        if isinstance(read, PackedKeyValues):
            return read._replace(reads=[(own(keys), own(values), mask) for keys, values, mask in read.reads])
        assert isinstance(read, tuple), "a cache that attends by itself stores heads as they are"
        keys, values, mask = read
        return own(keys), own(values), mask

    def _normalize(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        """Normalize queries or keys, (batch, heads, new, head_dim)."""
        if norm is None:
            return x
        if self.qk_norm != "full":
            normalized: Tensor = norm(x)
            return normalized
        together = norm(x.transpose(1, 2).flatten(2))  # all heads of a token are one vector
        heads: Tensor = together.unflatten(2, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def _project(self, x: Tensor, adapters: AdapterSlices | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, and keys and values if the layer has its own: each (batch, heads, new, head_dim)."""
        batch, new, _ = x.shape
        if self.qkv_proj is not None:
            heads = self.qkv_proj(x, adapters).view(batch, new, -1, self.head_dim).transpose(1, 2)
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            return q, k, v
        names = ["q_proj"] if self.spec.kv_source is not None else ["q_proj", "k_proj", "v_proj"]
        q, *kv = (
            projection(x, adapters).view(batch, new, -1, self.head_dim).transpose(1, 2)
            for projection in (getattr(self, name) for name in names)
            if projection is not None
        )
        if self.spec.keys_are_values and kv:
            kv = [*kv, *kv]
        return q, *(kv or (None, None))


def scaled_by_position(q: Tensor, scale: PositionScale, context: LayerContext) -> Tensor:
    """Queries, (batch, heads, new, head_dim), times the factor of their position."""
    assert context.positions is not None, "the queries are scaled by position, and the context has none"
    factor = scale.at(context.positions).to(q.dtype)[..., None]
    return q * (factor if factor.ndim == 2 else factor[:, None])


def attend(
    q: Float[Tensor, "batch heads new head_dim"],
    read: VisibleKeyValues,
    scale: float | None,
    *,
    softcap: float | None = None,
    sinks: Float[Tensor, heads] | None = None,
) -> Float[Tensor, "batch new all_heads"]:
    """Attention over what a cache returned, the heads concatenated.

    Args:
        q: queries.
        read: keys, values and mask; of several sequences, or of a cache that attends by itself.
        scale: factor of the scores; None for ``head_dim ** -0.5``.
        softcap: bound of the scores; None for none.
        sinks: a score of each head that takes part in the softmax and has no value; None for none.
    """
    if isinstance(read, PackedKeyValues):
        parts = q.split(read.counts, dim=2)
        for part, (keys, _, mask), observe in zip(parts, read.reads, read.observers or (), strict=False):
            if observe is not None:
                factor = q.shape[-1] ** -0.5 if scale is None else scale
                observe(part, keys, mask, scale=factor, softcap=softcap)
        rows = [_attend(part, *one, scale, softcap, sinks) for part, one in zip(parts, read.reads, strict=True)]
        return torch.cat(rows, 1)
    if isinstance(read, tuple):
        return _attend(q, *read, scale, softcap, sinks)
    assert softcap is None, "a cache that attends by itself knows no bounds"
    assert sinks is None, "a cache that attends by itself knows no sinks"
    return read.attend(q, scale)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of queries (batch, heads, new, head_dim), as (batch, new, heads * head_dim)."""
    batch, _, new, head_dim = q.shape
    if softcap is not None or sinks is not None:
        scale = head_dim**-0.5 if scale is None else scale
        return _attend_unfused(q * scale, keys, values, mask, softcap, sinks)
    if new == 1:
        groups = q.reshape(batch, keys.shape[1], -1, head_dim)
        y = F.scaled_dot_product_attention(groups, keys, values, attn_mask=mask, scale=scale)
        return y.reshape(batch, 1, -1)
    if mask is None and blocked_attention.supports(q, keys, values):
        y = blocked_attention.attend(q, keys, values, scale)
    else:
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:  # one for each key head
            mask = mask.repeat_interleave(q.shape[1] // mask.shape[1], 1)
        y = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    return y.transpose(1, 2).reshape(batch, new, -1)


def _is_causal_bias(mask: Tensor | None) -> bool:
    """Whether a mask is torch's `CausalBias`, whose module imports torch's compiler: 70 MB and a second.

    So it is only asked for where a cache on a GPU has imported it.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _attend_unfused(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`_attend` of scaled queries with bounded scores or sinks, which no fused kernel computes."""
    batch, heads, new, _ = q.shape
    seen = keys.shape[2]
    if _is_causal_bias(mask) or (mask is None and new > 1):  # causal order
        mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
    groups = q.unflatten(1, (keys.shape[1], -1))  # (batch, kv_heads, heads per key head, new, head_dim)
    transposed = keys[:, :, None].transpose(-1, -2)
    outputs = []
    for part in torch.arange(new).split(max(1, _MAX_SCORES // (batch * heads * seen))):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        scores = groups[..., rows, :] @ transposed
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            visible = mask[..., rows, :] if mask.shape[-2] > 1 else mask
            scores = scores.masked_fill(~visible.unsqueeze(-3), -torch.inf)
        if sinks is not None:
            sink = sinks.to(scores.dtype).view(1, keys.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))[..., :seen].to(q.dtype)
        outputs.append(weights @ values[:, :, None])
    return torch.cat(outputs, -2).flatten(1, 2).transpose(1, 2).reshape(batch, new, -1)
