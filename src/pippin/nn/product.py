"""Matrix products that are trained through, by the quicker of two libraries.

Notable here:
- torch asks its BLAS for float32 products. Where that is Intel's and the processor is not, it takes slow kernels:
  oneDNN, which torch carries too, is 2.2 times faster on an AMD Zen 5, forward and for both gradients
- the choice follows from the processor's name and the sizes, never from a measurement, so that a run repeats bit by bit
- oneDNN reads a transposed matrix where it lies, so gradients need no copies
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pippin.core.device import cpu_name

SMALLEST = 2**22
"""Multiplications below which a call costs more than a quicker kernel gains."""


def product(
    x: Float[Tensor, "*batch inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None = None
) -> Float[Tensor, "*batch outputs"]:
    """``x @ weight.T + bias``; differentiable as often as wanted.

    Args:
        x: any number of vectors.
        weight: the matrix.
        bias: added to each result.

    >>> product(torch.ones(2, 3), torch.ones(1, 3))
    tensor([[3.],
            [3.]])
    """
    if not _quicker(x, weight):
        return F.linear(x, weight, bias)
    rows: Tensor = _OneDNN.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
    y = rows.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def _quicker(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is to be asked: gradients are wanted, of large plain float32 matrices, where the BLAS is slow."""
    return (
        torch.is_grad_enabled()
        and (x.requires_grad or weight.requires_grad)
        and x.dtype == weight.dtype == torch.float32
        and weight.device.type == x.device.type == "cpu"
        and slow_blas()
        and not torch.is_autocast_enabled("cpu")
        and not traced(x, weight)
        and x.numel() * weight.shape[0] >= SMALLEST
    )


def traced(*tensors: Tensor) -> bool:
    """Whether something stands in for ordinary tensors: a transform, a trace, a tensor spread over processes."""
    return (
        any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors)
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or bool(torch._C._are_functorch_transforms_active())
    )


@cache
def slow_blas() -> bool:
    """Whether torch's BLAS does not know this processor well while oneDNN does."""
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and "AMD" in cpu_name()


def onednn_product(a: Float[Tensor, "rows inner"], b: Float[Tensor, "columns inner"]) -> Tensor:
    """``a @ b.T`` by oneDNN, without gradients."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), None, "none", [], "")
    return y


def _dense(matrix: Tensor) -> Tensor:
    """The matrix without gaps, by rows or by columns: for other layouts oneDNN has only its slowest code."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


class _OneDNN(torch.autograd.Function):
    """``a @ b.T`` of two matrices, whose gradients are products of the same kind."""

    @staticmethod
    def forward(ctx: Any, a: Float[Tensor, "rows inner"], b: Float[Tensor, "columns inner"]) -> Tensor:
        ctx.save_for_backward(a, b)
        return onednn_product(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (y,), (a, b) = gradients, ctx.saved_tensors
        of_a = _OneDNN.apply(y, b.t()) if ctx.needs_input_grad[0] else None  # type: ignore[no-untyped-call]
        of_b = _OneDNN.apply(y.t(), a.t()) if ctx.needs_input_grad[1] else None  # type: ignore[no-untyped-call]
        return of_a, of_b
