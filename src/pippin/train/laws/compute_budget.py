r"""What a budget of compute should buy: the best division by a law, and the least loss that runs have reached.

Notable here:
- $C = 6 N D$ has a closed form; any other cost that grows with N and D is searched along the line where it equals the
  budget, all resamples of a law at once
- the hull of the runs needs no law: it is what the best of them came to at each compute

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
"""Floating-point operations of a run, from N and D; grows with both."""


@dataclass(frozen=True)
class ScalingExponents:
    r"""How the best size and data grow with compute: $N^* \sim C^a$, $D^* \sim C^b$, $d = b / a$."""

    a: float
    b: float

    @property
    def d(self) -> float:
        """How data grows with size: D ~ N^d."""
        return self.b / self.a


@dataclass(frozen=True)
class ComputeOptimum:
    """What a budget should buy.

    Attributes:
        compute: the budget.
        N: parameters.
        D: tokens.
        loss: that the law predicts for them.
        intervals: for "N", "D" and "loss", from 2.5 % to 97.5 % of the resamples; NaN without any.
    """

    compute: float
    N: float
    D: float
    loss: float
    intervals: Mapping[str, tuple[float, float]]


def late_fusion_flops(vision: Callable[[Array], Array], share: float = 0.544) -> Flops:
    r"""The cost of a model with an encoder of its own for pictures: $6 (N_v D_v + N_t D)$ with $N = N_v + N_t$.

    Args:
        vision: parameters of the encoder, from those of the whole.
        share: of all tokens that the encoder sees; 0.544 in a mixture of 45 % captions, 45 % interleaved pages and
            10 % text.

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
    """The least loss that any of the runs reached with so much compute: L = scale * C^exponent.

    Attributes:
        exponent: c, below 0 where compute helps.
        scale: at a compute of 1.
        compute: of the corners of the hull.
        loss: there.
    """

    exponent: float
    scale: float
    compute: tuple[float, ...]
    loss: tuple[float, ...]


def loss_hull(N: ArrayLike, compute: ArrayLike, loss: ArrayLike, *, above: float = 0.0, points: int = 50) -> LossHull:
    """Fit a power law to the lower convex hull of the runs' losses over their compute.

    The runs of each size are joined by straight lines of the logarithms first, with so many points over all compute.

    Args:
        N: size of each run.
        compute: of each.
        loss: that each came to.
        above: compute up to which the hull is left out.
        points: into which the range of the compute is divided.

    Raises:
        InvalidArgument: a number that is not positive, or a hull of fewer than two corners.

    Source: arXiv:2504.07951, section A.
    """
    runs = fitting.columns(N=N, compute=compute, loss=loss)
    fitting.check_positive(**runs)
    x, y = np.log(runs["compute"]), np.log(runs["loss"])
    grid = np.linspace(x.min(), x.max(), points)
    found: list[tuple[float, float]] = []
    for size in np.unique(runs["N"]):
        of = np.flatnonzero(runs["N"] == size)
        of = of[np.argsort(x[of], kind="stable")]
        inside = grid[(grid > x[of[0]]) & (grid < x[of[-1]])]
        found += zip([*x[of], *inside], [*y[of], *np.interp(inside, x[of], y[of])], strict=True)
    corners: list[tuple[float, float]] = []
    for point in sorted(found):
        while len(corners) > 1 and _turns_down(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    lowest = min(range(len(corners)), key=lambda index: corners[index][1])
    used = [(c, loss) for c, loss in corners[: lowest + 1] if above <= 0 or c > math.log(above)]
    if len(used) < 2:
        raise InvalidArgument(f"above a compute of {above:g} the hull has {len(used)} corners; lower it")
    slope, start = np.polyfit([c for c, _ in used], [value for _, value in used], 1)
    return LossHull(
        float(slope),
        math.exp(start),
        tuple(math.exp(c) for c, _ in used),
        tuple(math.exp(value) for _, value in used),
    )


def _turns_down(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether the middle point lies on or above the line between the others."""
    (x0, y0), (x1, y1), (x2, y2) = first, middle, last
    return (x1 - x0) * (y2 - y0) <= (y1 - y0) * (x2 - x0)


def optimum_in_closed_form(compute: float, known: Mapping[str, Any]) -> tuple[Any, Any]:
    """The best division of 6 N D."""
    alpha, beta = known["alpha"], known["beta"]
    scale = (alpha * known["A"] / (beta * known["B"])) ** (1 / (alpha + beta))
    N = scale * (compute / 6) ** (beta / (alpha + beta))
    return N, compute / 6 / N


def optimum_by_search(
    flops: Flops, middle: float, losses: Callable[[Mapping[str, Any], Array, Array], Array]
) -> Callable[[float, Mapping[str, Any]], tuple[Any, Any]]:
    """A search for the least loss among all N and D of a given cost, over eight decades of D around ``middle``."""

    def search(compute: float, known: Mapping[str, Any]) -> tuple[Any, Any]:
        D = middle * np.logspace(-4, 4, 4001)
        N = _size_of(flops, compute, D)
        D, N = D[np.isfinite(N)], N[np.isfinite(N)]
        if not len(D):
            raise InvalidArgument(f"no size costs {compute:g}; the cost of a run must grow with N and D")
        found = np.atleast_2d(losses(known, N, D))
        best = np.clip(found.argmin(1), 1, len(D) - 2)[:, None]
        # the lowest point of the parabola through the best and its neighbors, over the logarithm of D
        rows = np.arange(len(found))[:, None]
        low, here, high = (found[rows, best + step] for step in (-1, 0, 1))
        bend = low - 2 * here + high
        step = np.where(bend > 0, 0.5 * (low - high) / np.where(bend > 0, bend, 1), 0).clip(-1, 1)
        data = D[best] * (D[1] / D[0]) ** step
        size = _size_of(flops, compute, np.ravel(data)).reshape(data.shape)
        return (size, data) if np.ndim(known["E"]) else (size[0, 0], data[0, 0])

    return search


def _size_of(flops: Flops, compute: float, D: Array) -> Array:
    """The N for which each D costs so much, by halving; NaN where there is none."""
    low, high = np.full(D.shape, -50.0), np.full(D.shape, 100.0)
    for _ in range(80):
        middle = (low + high) / 2
        above = flops(np.exp(middle), D) > compute
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    found = np.exp((low + high) / 2)
    return np.where(np.abs(flops(found, D) / compute - 1) < 1e-6, found, math.nan)
