r"""Differentiable top-k selection: weights in [0, 1] that sum to exactly k.

Notable here:
- the weights solve $\max_\lambda\ z \cdot \lambda + \epsilon H(\lambda)$ with $\sum_i \lambda_i = k$ by one sort,
  without iterations or a tolerance, and accurately where the alternating scheme is not (small $\epsilon$)
- the gradient is that of the solution (implicit differentiation), and costs one sum
- the hard selection breaks ties by index, so that exactly k are selected for any scores

Source: CoDA, Lei et al. 2023, arXiv:2304.04947, section 3.2 (the problem and its alternating solution).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument


def soft_top_k(scores: Float[Tensor, "*batch n"], k: int, eps: float = 1.0) -> Float[Tensor, "*batch n"]:
    r"""Weights that sum to k over the last dimension: $\lambda_i = \min(1, e^{(z_i + a) / \epsilon})$.

    With the scores in descending order and s weights at 1, $a_s = \epsilon(\ln(k - s) - \mathrm{logsumexp}_{i > s}
    (z_i / \epsilon))$; the right s is the smallest with $z_{(s+1)} + a_s \le 0$. On the weights below 1 (their set U),
    $\partial\lambda_i / \partial z_j = \lambda_i / \epsilon\,(\delta_{ij} - \lambda_j / \sum_U \lambda)$; on the others
    it is 0.

    Args:
        scores: finite scores.
        k: the sum of the weights, from 1 to n.
        eps: temperature above 0; small values approach a hard selection, large ones give weights k / n.

    Returns:
        Weights in [0, 1] in the dtype of the scores; solved in float64 (in float32 on Apple's GPUs).

    Raises:
        InvalidArgument: k or eps out of range, or scores that are not finite.

    Source: arXiv:2501.02086, section 3 (soft top-k mask); the problem is that of arXiv:2304.04947.

    >>> soft_top_k(torch.tensor([9.0, 1.0, 1.0, 1.0]), 2).tolist()
    [1.0, 0.3333333432674408, 0.3333333432674408, 0.3333333432674408]
    """
    check_top_k(scores, k, eps)
    weights: Tensor = _SoftTopK.apply(scores, k, eps)  # type: ignore[no-untyped-call]
    return weights


def top_k_indices(scores: Float[Tensor, "*batch n"], k: int) -> Int[Tensor, "*batch k"]:
    """The indices of the k largest scores, in ascending order; of equal scores the first ones.

    Raises:
        InvalidArgument: k out of range, or scores that are not finite.

    >>> top_k_indices(torch.tensor([0.0, 2.0, 1.0, 1.0]), 2).tolist()
    [1, 2]
    """
    check_top_k(scores, k, 1.0)
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :k].sort(-1).values


def top_k_mask(scores: Float[Tensor, "*batch n"], k: int, eps: float = 1.0) -> Float[Tensor, "*batch n"]:
    """The soft weights of the k largest scores, and 0 for all others.

    As the weights stay soft, gradients reach the scores of all selected elements and, through the constraint on the
    sum, those of the others. Arguments and errors are those of `soft_top_k`.

    Source: arXiv:2501.02086, section 3: m = lambda * 1[lambda among its k largest].

    >>> top_k_mask(torch.zeros(4), 2).tolist()
    [0.5, 0.5, 0.0, 0.0]
    """
    weights = soft_top_k(scores, k, eps)
    chosen = torch.zeros_like(weights).scatter_(-1, top_k_indices(scores.detach(), k), 1.0)
    return weights * chosen


@checked
def check_top_k(scores: Float[Tensor, "*batch n"], k: PositiveInt, eps: PositiveFloat) -> None:
    """Check the arguments of `soft_top_k`.

    Raises:
        InvalidArgument: k or eps out of range, or scores that are not finite.
    """
    if k > scores.shape[-1]:
        raise InvalidArgument(f"k must be at most {scores.shape[-1]}, the number of scores, got {k}")
    if not bool(scores.isfinite().all()):
        bad = int((~scores.isfinite()).sum())
        raise InvalidArgument(f"{bad} of {scores.numel()} scores are not finite, so nothing can be selected by them")


class _SoftTopK(torch.autograd.Function):
    """The weights, with implicit differentiation."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: int, eps: float) -> Tensor:
        precision = torch.float32 if scores.device.type == "mps" else torch.float64
        z = scores.detach().to(precision) / eps
        ordered = z.sort(dim=-1, descending=True).values
        # logsumexp from each index on; the first weight below 1 has one of the first k indices
        rest = ordered.flip(-1).logcumsumexp(-1).flip(-1)[..., :k]
        left = torch.arange(k, 0, -1, device=z.device, dtype=precision)
        shift = left.log() - rest
        fits = ordered[..., :k] + shift <= 0
        fits[..., -1] = True  # true in exact arithmetic: the k-th term is at most the sum of itself and the rest
        first = fits.to(torch.uint8).argmax(-1, keepdim=True)
        exponent = z + shift.gather(-1, first)
        weights = exponent.clamp(max=0.0).exp()
        ctx.save_for_backward(torch.where(exponent > 0, 0.0, weights))
        ctx.eps = eps
        return weights.to(scores.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (free,) = ctx.saved_tensors
        upstream = slope.to(free.dtype)
        mean = (upstream * free).sum(-1, keepdim=True) / free.sum(-1, keepdim=True)
        return (free * (upstream - mean) / ctx.eps).to(slope.dtype), None, None
