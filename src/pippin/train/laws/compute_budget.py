r"""Compute-optimal training: the model size and amount of data for a compute budget, and the hull of measured losses.

Notable here:
- the optimum has a closed form for $C = 6 N D$; for any other cost that grows with N and D it is searched along the
  curve of equal cost, for all bootstrap resamples of a law at once
- the convex hull of the runs needs no law: it is the lowest loss reached at each compute

Source: Shukor et al., arXiv:2504.07951, section A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pippin.core.errors import InvalidArgument
from pippin.train.laws import fitting
from pippin.train.laws.fitting import Array

Flops = Callable[[Array, Array], Array]
"""Floating-point operations of a run as a function of N and D, increasing in both."""


@dataclass(frozen=True)
class ScalingExponents:
    r"""Exponents of compute-optimal model size and data: $N^* \sim C^a$, $D^* \sim C^b$, $d = b / a$."""

    a: float
    b: float

    @property
    def d(self) -> float:
        """Exponent of the optimal data as a function of model size: D ~ N^d."""
        return self.b / self.a


@dataclass(frozen=True)
class ComputeOptimum:
    """The compute-optimal model size and data.

    Attributes:
        compute: the budget.
        N: number of parameters.
        D: number of tokens.
        loss: the predicted loss.
        intervals: for "N", "D" and "loss", the 2.5 % and 97.5 % quantiles of the resamples; NaN without resamples.
    """

    compute: float
    N: float
    D: float
    loss: float
    intervals: Mapping[str, tuple[float, float]]


def late_fusion_flops(vision: Callable[[Array], Array], share: float = 0.544) -> Flops:
    r"""The cost of a late-fusion model, with a separate image encoder: $6 (N_v D_v + N_t D)$ with $N = N_v + N_t$.

    Args:
        vision: the encoder's number of parameters as a function of the total.
        share: fraction of all tokens that pass through the encoder; 0.544 in a mixture of 45 % captions, 45 %
            interleaved documents and 10 % text.

    Source: arXiv:2504.07951, section 2.2.

    >>> float(late_fusion_flops(lambda N: 0.0 * N)(np.array(10.0), np.array(2.0)))
    120.0
    """

    def flops(N: Array, D: Array) -> Array:
        encoder = vision(N)
        return np.asarray(6 * (encoder * share * D + (N - encoder) * D))

    return flops


@dataclass(frozen=True)
class LossHull:
    """A power law through the lowest losses of all runs by compute: L = scale * C^exponent.

    Attributes:
        exponent: negative where more compute lowers the loss.
        scale: the loss at a compute of 1.
        compute: the compute at the vertices of the hull.
        loss: the loss at the vertices.
    """

    exponent: float
    scale: float
    compute: tuple[float, ...]
    loss: tuple[float, ...]


def loss_hull(N: ArrayLike, compute: ArrayLike, loss: ArrayLike, *, above: float = 0.0, points: int = 50) -> LossHull:
    """Fit a power law to the lower convex hull of the runs' losses over their compute.

    The runs of each size are first interpolated linearly in the logarithms, on a common grid of the compute.

    Args:
        N: model size of each run.
        compute: compute of each run.
        loss: final loss of each run.
        above: vertices of the hull up to this compute are ignored.
        points: number of grid points.

    Raises:
        InvalidArgument: a value that is not positive, or a hull with fewer than two vertices.

    Source: arXiv:2504.07951, section A.
    """
    runs = fitting.columns(N=N, compute=compute, loss=loss)
    fitting.check_positive(**runs)
    x, y = np.log(runs["compute"]), np.log(runs["loss"])
    grid = np.linspace(x.min(), x.max(), points)
    curves: list[tuple[float, float]] = []
    for size in np.unique(runs["N"]):
        rows = np.flatnonzero(runs["N"] == size)
        rows = rows[np.argsort(x[rows], kind="stable")]
        between = grid[(grid > x[rows[0]]) & (grid < x[rows[-1]])]
        curves += zip([*x[rows], *between], [*y[rows], *np.interp(between, x[rows], y[rows])], strict=True)
    vertices: list[tuple[float, float]] = []
    for point in sorted(curves):
        while len(vertices) > 1 and _is_above_line(vertices[-2], vertices[-1], point):
            vertices.pop()
        vertices.append(point)
    lowest = min(range(len(vertices)), key=lambda index: vertices[index][1])
    used = [(c, loss) for c, loss in vertices[: lowest + 1] if above <= 0 or c > math.log(above)]
    if len(used) < 2:
        raise InvalidArgument(f"the hull has {len(used)} vertices above a compute of {above:g}; lower `above`")
    slope, intercept = np.polyfit([c for c, _ in used], [value for _, value in used], 1)
    return LossHull(
        float(slope),
        math.exp(intercept),
        tuple(math.exp(c) for c, _ in used),
        tuple(math.exp(value) for _, value in used),
    )


def _is_above_line(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether the middle point lies on or above the line between the others."""
    (x0, y0), (x1, y1), (x2, y2) = first, middle, last
    return (x1 - x0) * (y2 - y0) <= (y1 - y0) * (x2 - x0)


def optimum_in_closed_form(compute: float, coefficients: Mapping[str, Any]) -> tuple[Any, Any]:
    """The optimal N and D for the cost 6 N D."""
    alpha, beta = coefficients["alpha"], coefficients["beta"]
    scale = (alpha * coefficients["A"] / (beta * coefficients["B"])) ** (1 / (alpha + beta))
    N = scale * (compute / 6) ** (beta / (alpha + beta))
    return N, compute / 6 / N


def optimum_by_search(
    flops: Flops, middle: float, losses: Callable[[Mapping[str, Any], Array, Array], Array]
) -> Callable[[float, Mapping[str, Any]], tuple[Any, Any]]:
    """A function that searches the lowest loss among all N and D of a given cost, over 8 decades of D.

    Args:
        flops: the cost of a run.
        middle: center of the range of D.
        losses: the loss from coefficients, N and D.
    """

    def search(compute: float, coefficients: Mapping[str, Any]) -> tuple[Any, Any]:
        D = middle * np.logspace(-4, 4, 4001)
        N = _size_of(flops, compute, D)
        D, N = D[np.isfinite(N)], N[np.isfinite(N)]
        if not len(D):
            raise InvalidArgument(f"no model size costs {compute:g}; the cost of a run must grow with N and D")
        values = np.atleast_2d(losses(coefficients, N, D))  # [resamples, grid]
        best = np.clip(values.argmin(1), 1, len(D) - 2)[:, None]
        # minimum of the parabola through the best grid point and its neighbors, in log D
        rows = np.arange(len(values))[:, None]
        left, center, right = (values[rows, best + step] for step in (-1, 0, 1))
        curvature = left - 2 * center + right
        step = np.where(curvature > 0, 0.5 * (left - right) / np.where(curvature > 0, curvature, 1), 0).clip(-1, 1)
        data = D[best] * (D[1] / D[0]) ** step
        size = _size_of(flops, compute, np.ravel(data)).reshape(data.shape)
        return (size, data) if np.ndim(coefficients["E"]) else (size[0, 0], data[0, 0])

    return search


def _size_of(flops: Flops, compute: float, D: Array) -> Array:
    """The N for which each D costs ``compute``, by bisection; NaN where there is none."""
    low, high = np.full(D.shape, -50.0), np.full(D.shape, 100.0)
    for _ in range(80):
        middle = (low + high) / 2
        above = flops(np.exp(middle), D) > compute
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    N = np.exp((low + high) / 2)
    return np.where(np.abs(flops(N, D) / compute - 1) < 1e-6, N, math.nan)
