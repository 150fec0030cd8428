r"""Gromov-Wasserstein couplings, and the Gromov-Monge gap, a regularizer for maps that preserve geometry.

Notable here:
- each set of points has its own cost matrix, so the two may be in spaces of different dimension
- the entropic plan is polished by local search over permutations. The identity is among its starts, so a gap is never
  negative; without the polish it can be, by much more than the gap itself
- gradients go through the costs at a fixed plan (the envelope theorem), not through the iterations
- low-rank costs stay factored, so that a product with a plan is quadratic in the number of points

Source: entropic solver: Peyre, Cuturi and Solomon, "Gromov-Wasserstein averaging of kernel and distance matrices",
ICML 2016; the gap: arXiv:2407.07829, definition of the Gromov-Monge gap; the polish is our own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.transport.gromov_solver import CAREFUL, QUICK, Coupling, Factored, GromovSolver, Side, solve
from pippin.core.checks import checked
from pippin.core.errors import InferenceAtRisk, InvalidInput

CostName: TypeAlias = Literal["l2", "scl2", "cos"]
CostFunction: TypeAlias = Callable[[Tensor], Tensor]
Cost: TypeAlias = CostName | tuple[CostFunction, CostFunction]

_MIN_NORM = 1e-6
"""Vectors are normalized by at least this norm."""


@checked
def cost_matrix(points: Float[Tensor, "n ..."], cost: CostName | CostFunction = "l2") -> Float[Tensor, "n n"]:
    """Pairwise costs of points; differentiable.

    Args:
        points: points; further dimensions are flattened.
        cost: "l2" for squared distances, "scl2" for squared distances over their mean over all pairs, "cos" for cosine
            similarities (the gap does not depend on the sign), or a function of the points.

    >>> cost_matrix(torch.tensor([[0.0, 3.0], [4.0, 0.0]]), "l2").tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    if callable(cost):
        costs: Tensor = cost(points)
        return costs
    x = points.flatten(1)
    if cost == "cos":
        unit: Tensor = x / x.norm(dim=1, keepdim=True).clamp_min(_MIN_NORM)
        return unit @ unit.T
    x = x - x.mean(0)  # distances do not change, and cancellation below is small
    square = x.square().sum(1)
    distances = (square[:, None] + square[None, :] - 2 * x @ x.T).clamp_min(0)
    distances = distances * (1 - torch.eye(len(x), dtype=x.dtype, device=x.device))
    if cost == "l2":
        return distances
    return distances / distances.mean().clamp_min(torch.finfo(x.dtype).tiny)


@checked
def cost_factors(points: Float[Tensor, "n ..."], cost: CostName = "l2") -> Factored:
    """The factored matrix of `cost_matrix`, of rank features + 2 (squared distances) or features (cosine).

    >>> x = torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    >>> cost_factors(x, "l2").matrix.tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    x = points.flatten(1)
    if cost == "cos":
        unit = x / x.norm(dim=1, keepdim=True).clamp_min(_MIN_NORM)
        return Factored(unit, unit)
    x = x - x.mean(0)
    square = x.square().sum(1, keepdim=True)
    ones = torch.ones_like(square)
    left, right = torch.cat([square, ones, -2 * x], 1), torch.cat([ones, square, x], 1)
    if cost == "scl2":
        mean = 2 * square.mean()  # the points are centered
        left = left / mean.clamp_min(torch.finfo(x.dtype).tiny)
    return Factored(left, right)


def distortion(x: Float[Tensor, "n ..."], y: Float[Tensor, "n ..."], cost: Cost = "cos") -> Float[Tensor, ""]:
    r"""Mean of $\tfrac12 (A_{ij} - B_{ij})^2$ over all pairs, where row i of ``y`` is the image of row i of ``x``.

    It includes the distortion that no map between the two sets can avoid; `gromov_monge_gap` does not.

    Args:
        x: points.
        y: their images, of any dimension.
        cost: cost of both sides, or a function for each.

    Raises:
        InvalidArgument: an unknown cost.
        InvalidInput: fewer than 2 points, sets of different length, or values that are not finite.

    Source: arXiv:2407.07829, definition of the distortion.

    >>> x = torch.tensor([[0.0], [1.0], [3.0]])
    >>> float(distortion(x, -x, "l2")), float(distortion(x, 2 * x, "scl2"))
    (0.0, 0.0)
    """
    a, b = _costs(x, y, cost)
    return 0.5 * (a - b).square().mean()


def gromov_monge_gap(
    x: Float[Tensor, "n ..."],
    y: Float[Tensor, "n ..."],
    cost: Cost = "cos",
    solver: GromovSolver = QUICK,
) -> Float[Tensor, ""]:
    r"""The distortion of a map minus the minimal distortion between the same points and images (Gromov-Wasserstein).

    It is zero if no permutation of the images has less distortion; it is weakly convex in the map. As both plans have
    the same marginals, squares cancel, and it is $\langle A P B, P \rangle - \tfrac1{n^2} \langle A, B \rangle$ with P
    fixed.

    Args:
        x: points.
        y: their images, row by row; gradients go through both.
        cost: "cos" (angles), "scl2" (distances up to scale), "l2", or a function for each side. If one side is pixels,
            use one of the first two, since squared distances of pixels are much larger than those of codes.
        solver: options of the solver. A ``value`` of "polished" is never negative; "plain" is biased down and can be
            far below zero; "entropic" is biased up, by at most eps times log n if the plan is optimal.

    Returns:
        A differentiable scalar, in the dtype of ``y``, or float32 for half precision.

    Raises:
        InvalidArgument: an unknown cost.
        InvalidInput: fewer than 2 points, sets of different length, or values that are not finite.
        NotConverged: no finite plan at this regularization.
        MissingDependency: scipy is not installed and the value is "polished".

    Warns:
        InferenceAtRisk: the solver did not converge ("plain", "entropic"), or a "plain" gap is below -0.001.

    Source: arXiv:2407.07829, definition of the Gromov-Monge gap and its sample version.

    >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 3.0], [7.0, 2.0]])
    >>> float(gromov_monge_gap(x, 2 * x, "l2"))  # no permutation of the images has less distortion
    0.0
    """
    a, b = _costs(x, y, cost)
    best = solve(*_sides(x, y, a, b, cost), solver)
    if best.permutation is not None:
        order = best.permutation.to(b.device)
        # both means are computed in the same way, so that at the identity the gap and its gradient are exactly zero
        return (a * b[order][:, order]).mean() - (a * b).mean()
    plan = best.plan.to(a)
    gap = (plan * (a @ plan @ b)).sum() - (a * b).mean()
    if solver.value == "entropic":
        gap = gap + best.eps * float(-torch.special.xlogy(best.plan, best.plan).sum())
    _warn(best, float(gap.detach()), solver)
    return gap


def gromov_wasserstein(
    a: Float[Tensor, "n n"] | Factored,
    b: Float[Tensor, "m m"] | Factored,
    solver: GromovSolver = CAREFUL,
) -> Coupling:
    r"""The plan P with uniform marginals that minimizes $Q(P) = \sum \tfrac12 (A_{ik} - B_{jl})^2 P_{ij} P_{kl}$.

    The problem is not convex: the polished value is an upper bound of the minimum, and close to it. For squared
    distances and cosines on both sides Q is concave over plans, so some permutation is optimal.

    Args:
        a: symmetric costs between the points of one side, possibly factored.
        b: costs of the other side, for the same number of points.
        solver: options of the solver, and which value is returned.

    Returns:
        The plan and its value, without gradients; see `gromov_monge_gap` for these.

    Raises:
        InvalidInput: matrices that are not square, symmetric, finite and of equal size, or of fewer than 2 points.
        NotConverged: costs so large compared to ``eps0`` that no plan is finite.
        MissingDependency: scipy is not installed and the value is "polished".

    Source: Peyre, Cuturi and Solomon 2016, section 3, with the loss halved.

    >>> x = torch.tensor([[0.0], [1.0], [5.0]])
    >>> permuted = x[[2, 0, 1]]
    >>> best = gromov_wasserstein(cost_matrix(x), cost_matrix(permuted))
    >>> best.value, (3 * best.plan).round().argmax(1).tolist()
    (0.0, [1, 2, 0])
    """
    first, second = (Side(side.matrix, side) if isinstance(side, Factored) else Side(side) for side in (a, b))
    _check_matrices(first.matrix, second.matrix)
    return solve(first, second, solver)


def _costs(x: Tensor, y: Tensor, cost: Cost) -> tuple[Tensor, Tensor]:
    """Check the points, and compute both cost matrices, differentiably."""
    _check_points(x, y)
    x_cost, y_cost = (cost, cost) if isinstance(cost, str) else cost
    return cost_matrix(_at_least_float32(x), x_cost), cost_matrix(_at_least_float32(y), y_cost)


def _at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision and integers to float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _sides(x: Tensor, y: Tensor, a: Tensor, b: Tensor, cost: Cost) -> tuple[Side, Side]:
    """Both sides for the solver, with factored costs where their rank is at most about half of the points."""
    if not isinstance(cost, str):
        return Side(a.detach()), Side(b.detach())
    return (
        Side(a.detach(), cost_factors(x.detach(), cost) if 2 * x[0].numel() < len(x) else None),
        Side(b.detach(), cost_factors(y.detach(), cost) if 2 * y[0].numel() < len(y) else None),
    )


def _warn(best: Coupling, gap: float, solver: GromovSolver) -> None:
    """Warn about the gap of an entropic plan that did not converge, or that is negative."""
    if not best.converged:
        message = (
            f"the Gromov-Wasserstein plan had not converged after {best.iterations} steps; raise eps0={solver.eps0}, "
            f"max_iterations={solver.max_iterations} or max_sinkhorn_iterations={solver.max_sinkhorn_iterations}, or "
            "use value='polished'"
        )
        warnings.warn(message, InferenceAtRisk, stacklevel=3)
    if solver.value == "plain" and gap < -1e-3:
        message = (
            f"the gap is {gap:.3g}: the entropic plan costs more than the map itself; use value='polished', or lower "
            f"eps0={solver.eps0}"
        )
        warnings.warn(message, InferenceAtRisk, stacklevel=3)


def _check_points(x: Tensor, y: Tensor) -> None:
    """Refuse points and images that `distortion` cannot compare."""
    if len(x) != len(y):
        raise InvalidInput(f"{len(x)} points but {len(y)} images; row i of one is the image of row i of the other")
    if len(x) < 2:
        raise InvalidInput(f"geometry needs at least 2 points, got {len(x)}")
    for name, points in (("the points", x), ("the images", y)):
        if points.ndim < 2:
            raise InvalidInput(
                f"{name} have the shape {tuple(points.shape)}; give [n, features], such as points[:, None]"
            )
        if not points[0].numel():
            raise InvalidInput(f"{name} have no features: their shape is {tuple(points.shape)}")
        if not bool(points.detach().isfinite().all()):
            row = int((~points.detach().flatten(1).isfinite()).any(1).nonzero()[0])
            raise InvalidInput(f"{name} hold NaN or infinity in row {row}")


def _check_matrices(a: Tensor, b: Tensor) -> None:
    """Refuse cost matrices that are not square, finite, symmetric and of equal size."""
    for name, matrix in (("a", a), ("b", b)):
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
            raise InvalidInput(f"{name} must be a square matrix of at least 2 points, got shape {tuple(matrix.shape)}")
        if not bool(matrix.isfinite().all()):
            raise InvalidInput(f"{name} holds NaN or infinity")
        asymmetry = float((matrix - matrix.T).abs().max())
        if asymmetry > 1e-4 * float(matrix.abs().max()):
            raise InvalidInput(f"{name} is not symmetric: it differs from its transpose by up to {asymmetry:.3g}")
    if len(a) != len(b):
        raise InvalidInput(f"a is over {len(a)} points and b over {len(b)}; give equal numbers of points")
