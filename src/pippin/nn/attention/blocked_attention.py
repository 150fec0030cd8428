"""Causal attention for training on a CPU, as a few large matrix products.

Notable here:
- a block of queries is multiplied with all earlier keys in one product of the fastest library, oneDNN for float32 (see
  `pippin.nn.matmul`) and batched bfloat16 products under autocast, instead of small tiles as in torch's kernel
- only queries, keys and values are saved for the backward pass, which recomputes the softmax of each block
- query heads that share keys are stacked in one matrix, so that no keys are copied
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from pippin.nn.matmul import onednn_product, slow_blas, traced

BLOCK = 128
"""Number of queries per block; keys after the block are not computed."""
MIN_TOKENS = 64
"""Shorter sequences use torch's kernel."""
MIN_ELEMENTS = 90_000
"""In float32 each group of heads is a separate product: smaller groups, and groups of one head, use torch's kernel."""


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether to use this instead of torch's kernel: for gradients on a CPU where it is faster."""
    if q.device.type != "cpu" or not torch.is_grad_enabled() or traced(q, k, v):
        return False
    if not (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    if q.shape[2] != k.shape[2] or q.shape[2] < MIN_TOKENS:
        return False
    dtype = precision(q)
    large = q.shape[1] > k.shape[1] and q[0].numel() // k.shape[1] >= MIN_ELEMENTS
    return (dtype == torch.float32 and large and slow_blas()) or (
        dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def precision(q: Tensor) -> torch.dtype:
    """The dtype of the products."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype


def attend(
    q: Float[Tensor, "batch heads new head_dim"],
    k: Float[Tensor, "batch kv_heads new head_dim"],
    v: Float[Tensor, "batch kv_heads new head_dim"],
    scale: float | None,
) -> Float[Tensor, "batch heads new head_dim"]:
    r"""Causal attention $\mathrm{softmax}(s\, q k^T) v$; differentiable once.

    Args:
        q: queries; ``heads`` is a multiple of ``kv_heads``.
        k: keys.
        v: values.
        scale: factor of the scores; None for ``head_dim ** -0.5``.

    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; recomputation as in Dao et al. 2022, arXiv:2205.14135.
    """
    dtype = precision(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    y: Tensor = _Causal.apply(q.to(dtype), k.to(dtype), v.to(dtype), scale)  # type: ignore[no-untyped-call]
    return y


def _products(a: Float[Tensor, "groups rows inner"], b: Float[Tensor, "groups inner columns"]) -> Tensor:
    """The product of each pair of matrices."""
    if a.dtype != torch.float32:
        return torch.bmm(a, b)
    return torch.stack([onednn_product(x, y.t()) for x, y in zip(a, b, strict=True)])


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        batch, heads, new, width = q.shape
        keys, values = k.reshape(-1, new, width), v.reshape(-1, new, width)
        y = q.new_empty(batch, new, heads, width).transpose(1, 2)  # heads contiguous, as the next layer needs them
        for start in range(0, new, BLOCK):
            end = min(start + BLOCK, new)
            weights = _weights(_block(q, start, end, len(keys)), keys, scale, start, end)
            y[:, :, start:end] = _products(weights, values[:, :end]).view(batch, heads, end - start, width)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        scale: float = ctx.scale
        batch, heads, new, width = q.shape
        keys, values = k.reshape(-1, new, width), v.reshape(-1, new, width)
        of_q = q.new_empty(batch, new, heads, width).transpose(1, 2)
        of_k, of_v = (torch.zeros_like(keys, dtype=torch.float32) for _ in range(2))
        for start in range(0, new, BLOCK):
            end = min(start + BLOCK, new)
            queries, above = (_block(x, start, end, len(keys)) for x in (q, change))
            weights = _weights(queries, keys, scale, start, end)
            of_v[:, :end] += _products(weights.transpose(1, 2), above)
            of_weights = _products(above, values[:, :end].transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype).mul_(scale)
            of_q[:, :, start:end] = _products(of_scores, keys[:, :end]).view(batch, heads, end - start, width)
            of_k[:, :end] += _products(of_scores.transpose(1, 2), queries)
        return of_q, of_k.to(k.dtype).view_as(k), of_v.to(v.dtype).view_as(v), None


def _block(x: Tensor, start: int, end: int, groups: int) -> Float[Tensor, "groups rows width"]:
    """A block of tokens of all heads; heads that share keys are stacked along the rows."""
    return x[:, :, start:end].reshape(groups, -1, x.shape[-1]).contiguous()


def _weights(queries: Tensor, keys: Tensor, scale: float, start: int, end: int) -> Float[Tensor, "groups rows end"]:
    """Attention weights of a block of queries over the keys up to the end of the block."""
    scores = _products(queries * scale, keys[:, :end].transpose(1, 2))
    later = torch.full((end - start, end - start), -torch.inf, dtype=scores.dtype).triu_(1)
    scores.view(len(keys), -1, end - start, end)[..., start:] += later
    return torch.softmax(scores, -1)
