"""Differentiable matrix products by the faster of two libraries, the BLAS or oneDNN.

Notable here:
- torch's BLAS is often Intel's MKL, which uses slow kernels on other processors: oneDNN, which torch also includes, is
  2.2 times faster on an AMD Zen 5, forward and for both gradients
- the choice depends on the processor's name and the sizes, never on a measurement, so that runs are bit-identical
- oneDNN accepts transposed matrices, so gradients need no copies
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pippin.core.device import cpu_name

MIN_MULTIPLICATIONS = 2**22
"""Products with fewer multiplications use the BLAS, as the overhead of the call exceeds the gain."""


def product(
    x: Float[Tensor, "*batch inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None = None
) -> Float[Tensor, "*batch outputs"]:
    """``x @ weight.T + bias``; differentiable any number of times.

    Args:
        x: vectors.
        weight: the matrix.
        bias: bias of the outputs; None for none.

    >>> product(torch.ones(2, 3), torch.ones(1, 3))
    tensor([[3.],
            [3.]])
    """
    if not _use_onednn(x, weight):
        return F.linear(x, weight, bias)
    rows: Tensor = _OneDNN.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
    y = rows.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether to use oneDNN: for gradients of large, plain float32 matrices where the BLAS is slow."""
    return (
        torch.is_grad_enabled()
        and (x.requires_grad or weight.requires_grad)
        and x.dtype == weight.dtype == torch.float32
        and weight.device.type == x.device.type == "cpu"
        and slow_blas()
        and not torch.is_autocast_enabled("cpu")
        and not traced(x, weight)
        and x.numel() * weight.shape[0] >= MIN_MULTIPLICATIONS
    )


def traced(*tensors: Tensor) -> bool:
    """Whether tensors are not ordinary ones: under a function transform, a trace or compilation, or a subclass."""
    return (
        any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors)
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or bool(torch._C._are_functorch_transforms_active())
    )


@cache
def slow_blas() -> bool:
    """Whether torch's BLAS is slow on this processor and oneDNN is not."""
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and "AMD" in cpu_name()


def onednn_product(a: Float[Tensor, "rows inner"], b: Float[Tensor, "columns inner"]) -> Tensor:
    """``a @ b.T`` by oneDNN, without gradients."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), None, "none", [], "")
    return y


def _dense(matrix: Tensor) -> Tensor:
    """The matrix in row-major or column-major layout, as other layouts are slow in oneDNN."""
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
