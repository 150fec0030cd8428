r"""Gromov-Wasserstein couplings, and the Gromov-Monge gap that asks a map to keep geometry as far as it can be kept.

Notable here:
- two sets of points are compared by their own cost matrices, so they may lie in spaces of different dimension
- the entropic plan is polished: assignments that solve the linearized problem until they stop moving. The identity is
  among the starts, so a gap is never negative; without the polish it can be, by far more than what is measured
- a gradient goes through the costs at a fixed plan (the envelope theorem), never through the iterations
- costs of few dimensions stay in factors, which makes a product with a plan quadratic in the points

Source: entropic solver Peyre, Cuturi and Solomon, "Gromov-Wasserstein averaging of kernel and distance matrices",
ICML 2016; the gap arXiv:2407.07829, definition of the Gromov-Monge gap; the polish is ours.
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

_NORM = 1e-6
"""Shortest length that a vector is divided by."""


@checked
def cost_matrix(points: Float[Tensor, "n ..."], cost: CostName | CostFunction = "l2") -> Float[Tensor, "n n"]:
    """How far each point is from each other one; differentiable.

    Args:
        points: flattened where they have several dimensions.
        cost: "l2" squared distance, "scl2" the same divided by its mean over all pairs, "cos" the cosine of the angle
            seen from the origin (a likeness; the gap does not mind), or a function of the points.

    >>> cost_matrix(torch.tensor([[0.0, 3.0], [4.0, 0.0]]), "l2").tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    if callable(cost):
        found: Tensor = cost(points)
        return found
    x = points.flatten(1)
    if cost == "cos":
        unit: Tensor = x / x.norm(dim=1, keepdim=True).clamp_min(_NORM)
        return unit @ unit.T
    x = x - x.mean(0)  # distances stay, and nothing large cancels below
    square = x.square().sum(1)
    distances = (square[:, None] + square[None, :] - 2 * x @ x.T).clamp_min(0)
    distances = distances * (1 - torch.eye(len(x), dtype=x.dtype, device=x.device))
    if cost == "l2":
        return distances
    return distances / distances.mean().clamp_min(torch.finfo(x.dtype).tiny)


@checked
def cost_factors(points: Float[Tensor, "n ..."], cost: CostName = "l2") -> Factored:
    """The matrix of `cost_matrix` in factors of rank features + 2 (squared distances) or features (cosine).

    >>> x = torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    >>> cost_factors(x, "l2").matrix.tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    x = points.flatten(1)
    if cost == "cos":
        unit = x / x.norm(dim=1, keepdim=True).clamp_min(_NORM)
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

    It also punishes what no map between the two sets could avoid; `gromov_monge_gap` does not.

    Args:
        x: points.
        y: their images; any dimension.
        cost: for both sides; or a function for each.

    Raises:
        InvalidArgument: an unknown cost.
        InvalidInput: fewer than 2 points, sets of different length, or numbers that are not finite.

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
    r"""How much more a map distorts than the best way to carry the points to the same images: `distortion` minus GW.

    Zero where no rearrangement of the images would distort less; it is weakly convex in the map, so plain gradient
    descent may be used. As both plans have the same marginals, the squares cancel and what is left is
    $\langle A P B, P \rangle - \tfrac1{n^2} \langle A, B \rangle$ with P held fixed.

    Args:
        x: points.
        y: their images, row by row; the gradient goes through both.
        cost: "cos" (angles), "scl2" (distances up to scale), "l2", or a function for each side. With pixels on one
            side take one of the first two: squared distances of pixels dwarf those of codes.
        solver: how the plan is found. A ``value`` of "polished" is never negative; "plain" is biased down and can be
            far below zero; "entropic" is biased up, by eps times log n at most where the plan is the best one.

    Returns:
        A scalar with its graph, in the dtype of ``y`` (float32 where that is shorter).

    Raises:
        InvalidArgument: an unknown cost.
        InvalidInput: fewer than 2 points, sets of different length, or numbers that are not finite.
        NotConverged: no finite plan at this regularization.
        MissingDependency: scipy is not installed and the value is "polished".

    Warns:
        InferenceAtRisk: the solver had not converged ("plain", "entropic"), or a "plain" gap is below -0.001.

    Source: arXiv:2407.07829, definition of the Gromov-Monge gap and its sample version.

    >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 3.0], [7.0, 2.0]])
    >>> float(gromov_monge_gap(x, 2 * x, "l2"))  # larger everywhere: unavoidable, as the images lie so far apart
    0.0
    """
    a, b = _costs(x, y, cost)
    best = solve(*_sides(x, y, a, b, cost), solver)
    if best.permutation is not None:
        order = best.permutation.to(b.device)
        # the same products in the same order as the subtrahend: at the identity the difference is zero, and so is its
        # gradient
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

    The problem is not convex, and the polished value is an upper bound of the minimum that is close to it. For squared
    distances and cosines on both sides Q is concave over plans, so some permutation is optimal.

    Args:
        a: symmetric costs between the points of one side; in factors where these are thin.
        b: the same of the other; as many points.
        solver: how the plan is found, and which value of it is given.

    Returns:
        The plan and its value. No gradient: see `gromov_monge_gap`.

    Raises:
        InvalidInput: matrices that are not square, of one size, symmetric and finite, or of fewer than 2 points.
        NotConverged: costs so large against ``eps0`` that no finite scalings exist.
        MissingDependency: scipy is not installed and the value is "polished".

    Source: Peyre, Cuturi and Solomon 2016, section 3, with the loss halved.

    >>> x = torch.tensor([[0.0], [1.0], [5.0]])
    >>> turned = x[[2, 0, 1]]
    >>> best = gromov_wasserstein(cost_matrix(x), cost_matrix(turned))
    >>> best.value, (3 * best.plan).round().argmax(1).tolist()
    (0.0, [1, 2, 0])
    """
    one, other = (Side(side.matrix, side) if isinstance(side, Factored) else Side(side) for side in (a, b))
    _check_matrices(one.matrix, other.matrix)
    return solve(one, other, solver)


def _costs(x: Tensor, y: Tensor, cost: Cost) -> tuple[Tensor, Tensor]:
    """Both cost matrices with their graph, after the checks."""
    _check_points(x, y)
    ours, theirs = (cost, cost) if isinstance(cost, str) else cost
    return cost_matrix(_wide(x), ours), cost_matrix(_wide(y), theirs)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _sides(x: Tensor, y: Tensor, a: Tensor, b: Tensor, cost: Cost) -> tuple[Side, Side]:
    if not isinstance(cost, str):
        return Side(a.detach()), Side(b.detach())
    return (
        Side(a.detach(), cost_factors(x.detach(), cost) if 2 * x[0].numel() < len(x) else None),
        Side(b.detach(), cost_factors(y.detach(), cost) if 2 * y[0].numel() < len(y) else None),
    )


def _warn(best: Coupling, gap: float, solver: GromovSolver) -> None:
    """Say what is wrong with a gap at an entropic plan."""
    if not best.converged:
        message = (
            f"the Gromov-Wasserstein plan still moved after {best.iterations} steps; give a larger eps0 than "
            f"{solver.eps0}, more steps or scalings than {solver.max_iterations} and {solver.max_sinkhorn_iterations}, "
            "or value='polished'"
        )
        warnings.warn(message, InferenceAtRisk, stacklevel=3)
    if solver.value == "plain" and gap < -1e-3:
        message = (
            f"the gap is {gap:.3g}: the entropic plan costs more than the map itself; take value='polished', or a "
            f"smaller eps0 than {solver.eps0}"
        )
        warnings.warn(message, InferenceAtRisk, stacklevel=3)


def _check_points(x: Tensor, y: Tensor) -> None:
    if len(x) != len(y):
        raise InvalidInput(f"{len(x)} points but {len(y)} images; row i of one is the image of row i of the other")
    if len(x) < 2:
        raise InvalidInput(f"geometry needs at least 2 points, got {len(x)}")
    for name, points in (("the points", x), ("the images", y)):
        if points.ndim < 2:
            raise InvalidInput(
                f"{name} have the shape {tuple(points.shape)}; give rows, [n, features]: points[:, None]"
            )
        if not points[0].numel():
            raise InvalidInput(f"{name} have no features: their shape is {tuple(points.shape)}")
        if not bool(points.detach().isfinite().all()):
            row = int((~points.detach().flatten(1).isfinite()).any(1).nonzero()[0])
            raise InvalidInput(f"{name} hold NaN or infinity in row {row}")


def _check_matrices(a: Tensor, b: Tensor) -> None:
    for name, matrix in (("a", a), ("b", b)):
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
            raise InvalidInput(f"{name} must be a square matrix of at least 2 points, got shape {tuple(matrix.shape)}")
        if not bool(matrix.isfinite().all()):
            raise InvalidInput(f"{name} holds NaN or infinity")
        apart = float((matrix - matrix.T).abs().max())
        if apart > 1e-4 * float(matrix.abs().max()):
            raise InvalidInput(f"{name} is not symmetric: entries differ from their mirror by up to {apart:.3g}")
    if len(a) != len(b):
        raise InvalidInput(f"a is over {len(a)} points and b over {len(b)}; give as many")
