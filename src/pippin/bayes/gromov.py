r"""Gromov-Wasserstein couplings, and the Gromov-Monge gap that asks a map to keep geometry as far as it can be kept.

Notable here:
- two sets of points are compared by their own cost matrices, so they may lie in spaces of different dimension
- the entropic plan is polished: assignments that solve the linearised problem until they stop moving. The identity is
  among the starts, so a gap is never negative; without the polish it can be, by far more than what is measured
- Sinkhorn runs on scalings of a kernel whose potentials are renewed in the log domain: as safe, and several times faster
- a gradient goes through the costs at a fixed plan (the envelope theorem), never through the iterations
- costs of few dimensions stay in factors, which makes a product with a plan quadratic in the points

Source: entropic solver Peyre, Cuturi and Solomon, "Gromov-Wasserstein averaging of kernel and distance matrices",
ICML 2016; the gap arXiv:2407.07829, definition of the Gromov-Monge gap; the polish is ours.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput, MissingDependency, NotConverged

CostName: TypeAlias = Literal["l2", "scl2", "cos"]
CostFunction: TypeAlias = Callable[[Tensor], Tensor]
Cost: TypeAlias = CostName | tuple[CostFunction, CostFunction]
Value: TypeAlias = Literal["polished", "plain", "entropic"]
NumPy: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_NORM = 1e-6
"""Shortest length that a vector is divided by."""
_OUTER, _INNER = 1e-6, 1e-6
"""Where the outer iteration stops: change of the plan in total variation; the inner: error of the marginals."""
_ASSIGNMENTS = 100
"""Most assignments of a polish."""
_BLOCK = 10
"""Scalings between two renewals of the potentials."""
_LARGEST = 1e100
"""A scaling beyond this is taken into the potentials at once."""
_ON_CPU = 512
"""Up to so many points the solver leaves the accelerator: launching its small products there would cost more."""


@dataclass(frozen=True)
class Factored:
    """A symmetric cost matrix ``left @ right.T`` of low rank, so that a product with a plan is quadratic in n.

    Attributes:
        left: n rows.
        right: as many.
    """

    left: Float[Tensor, "n rank"]
    right: Float[Tensor, "n rank"]

    @property
    def matrix(self) -> Float[Tensor, "n n"]:
        """All of it."""
        return self.left @ self.right.T


@dataclass(frozen=True)
class Coupling:
    """A plan between two sets of n points and what it costs.

    Attributes:
        value: as it was asked for: the cost of the plan, or that less the entropy times the regularisation.
        plan: sums to 1/n over each row and column.
        order: where the plan is a permutation, the column that goes with each row; else None.
        converged: whether the iteration that gave the plan had stopped moving.
        iterations: outer steps of the entropic solver.
        eps: the regularisation of its last step, in units of the cost.
    """

    value: float
    plan: Float[Tensor, "n n"]
    order: Int[Tensor, " n"] | None
    converged: bool
    iterations: int
    eps: float


def cost_matrix(points: Float[Tensor, "n *features"], cost: CostName | CostFunction = "l2") -> Float[Tensor, "n n"]:
    """How far each point is from each other one; differentiable.

    Args:
        points: flattened where they have several dimensions.
        cost: "l2" squared distance, "scl2" the same divided by its mean over all pairs, "cos" the cosine of the angle
            seen from the origin (a likeness; the gap does not mind), or a function of the points.

    Raises:
        InvalidArgument: another name.

    >>> cost_matrix(torch.tensor([[0.0, 3.0], [4.0, 0.0]]), "l2").tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    if callable(cost):
        return cost(points)
    x = points.flatten(1)
    if cost == "cos":
        unit = x / x.norm(dim=1, keepdim=True).clamp_min(_NORM)
        return unit @ unit.T
    _check_name(cost)
    x = x - x.mean(0)  # distances stay, and nothing large cancels below
    square = x.square().sum(1)
    distances = (square[:, None] + square[None, :] - 2 * x @ x.T).clamp_min(0)
    distances = distances * (1 - torch.eye(len(x), dtype=x.dtype, device=x.device))
    if cost == "l2":
        return distances
    return distances / distances.mean().clamp_min(torch.finfo(x.dtype).tiny)


def cost_factors(points: Float[Tensor, "n *features"], cost: CostName = "l2") -> Factored:
    """The matrix of `cost_matrix` in factors of rank features + 2 (squared distances) or features (cosine).

    Raises:
        InvalidArgument: another name.

    >>> x = torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    >>> cost_factors(x, "l2").matrix.tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    x = points.flatten(1)
    if cost == "cos":
        unit = x / x.norm(dim=1, keepdim=True).clamp_min(_NORM)
        return Factored(unit, unit)
    _check_name(cost)
    x = x - x.mean(0)
    square = x.square().sum(1, keepdim=True)
    ones = torch.ones_like(square)
    left, right = torch.cat([square, ones, -2 * x], 1), torch.cat([ones, square, x], 1)
    if cost == "scl2":
        mean = 2 * square.mean()  # the points are centred
        left = left / mean.clamp_min(torch.finfo(x.dtype).tiny)
    return Factored(left, right)


def distortion(x: Float[Tensor, "n *features"], y: Float[Tensor, "n *more"], cost: Cost = "cos") -> Float[Tensor, ""]:
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
    x: Float[Tensor, "n *features"],
    y: Float[Tensor, "n *more"],
    cost: Cost = "cos",
    *,
    eps0: float = 0.02,
    value: Value = "polished",
    max_iter: int = 20,
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
        eps0: regularisation as a share of the mean absolute gradient of the cost.
        value: "polished" is never negative; "plain" is biased down and can be far below zero; "entropic" is biased up
            by at most eps times log n where the plan is the best one.
        max_iter: outer steps of the solver.

    Returns:
        A scalar with its graph, in the dtype of ``y`` (float32 where that is shorter).

    Raises:
        InvalidArgument: an unknown cost or value, ``eps0`` or ``max_iter`` not above 0.
        InvalidInput: fewer than 2 points, sets of different length, or numbers that are not finite.
        MissingDependency: scipy is not installed and ``value`` is "polished".

    Warns:
        InferenceAtRisk: the solver had not converged ("plain", "entropic"), or a "plain" gap is below -0.001.

    Source: arXiv:2407.07829, definition of the Gromov-Monge gap and its sample version.

    >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 3.0], [7.0, 2.0]])
    >>> float(gromov_monge_gap(x, 2 * x, "l2"))  # larger everywhere: unavoidable, as the images lie so far apart
    0.0
    """
    _check_settings(eps0, max_iter, 1, "best", value)
    a, b = _costs(x, y, cost)
    best = _solve(*_sides(x, y, a, b, cost), eps0=eps0, value=value, max_iter=max_iter)
    if best.order is not None:
        order = best.order.to(b.device)
        # the same products in the same order as the subtrahend: at the identity the difference is zero, and so is its
        # gradient
        return (a * b[order][:, order]).mean() - (a * b).mean()
    plan = best.plan.to(a)
    gap = (plan * (a @ plan @ b)).sum() - (a * b).mean()
    if value == "entropic":
        gap = gap + best.eps * float(-torch.special.xlogy(best.plan, best.plan).sum())
    _warn(best, float(gap.detach()), eps0, max_iter, value)
    return gap


def gromov_wasserstein(
    a: Float[Tensor, "n n"] | Factored,
    b: Float[Tensor, "m m"] | Factored,
    *,
    eps0: float = 0.02,
    relative: bool = True,
    init: Literal["best", "product", "identity"] = "best",
    value: Value = "polished",
    max_iter: int = 20,
    inner: int = 200,
) -> Coupling:
    r"""The plan P with uniform marginals that minimises $Q(P) = \sum \tfrac12 (A_{ik} - B_{jl})^2 P_{ij} P_{kl}$.

    The problem is not convex, and the polished value is an upper bound of the minimum that is close to it. For squared
    distances and cosines on both sides Q is concave over plans, so some permutation is optimal.

    Args:
        a: symmetric costs between the points of one side; in factors where these are thin.
        b: the same of the other; as many points.
        eps0: entropic regularisation, above 0.
        relative: whether ``eps0`` is a share of the mean absolute gradient, set anew in each outer step.
        init: "product" begins where nothing is coupled in particular, "identity" with each point at its own number;
            "best" takes both and keeps the better end.
        value: "polished" moves on from the entropic plans, and from the identity, to permutations, and gives the
            smallest cost; "plain" the cost of the entropic plan; "entropic" that less eps times the plan's entropy.
        max_iter: outer steps, each with a new linearisation.
        inner: scalings in each.

    Returns:
        The plan and its value. No gradient: see `gromov_monge_gap`.

    Raises:
        InvalidArgument: a number that is not above 0, or an unknown word.
        InvalidInput: matrices that are not square, of one size, symmetric and finite, or of fewer than 2 points.
        NotConverged: costs so large against ``eps0`` that no finite scalings exist.
        MissingDependency: scipy is not installed and ``value`` is "polished".

    Source: Peyre, Cuturi and Solomon 2016, section 3, with the loss halved.

    >>> x = torch.tensor([[0.0], [1.0], [5.0]])
    >>> turned = x[[2, 0, 1]]
    >>> best = gromov_wasserstein(cost_matrix(x), cost_matrix(turned))
    >>> best.value, (3 * best.plan).round().argmax(1).tolist()
    (0.0, [1, 2, 0])
    """
    _check_settings(eps0, max_iter, inner, init, value)
    one, other = (_Side(side.matrix, side) if isinstance(side, Factored) else _Side(side) for side in (a, b))
    _check_matrices(one.matrix, other.matrix)
    settings: dict[str, Any] = {"relative": relative, "init": init, "value": value, "inner": inner}
    return _solve(one, other, eps0=eps0, max_iter=max_iter, **settings)


def sinkhorn_plans(
    cost: Float[Tensor, "problems n m"],
    eps: Float[Tensor, problems],
    *,
    inner: int = 200,
    tolerance: float = _INNER,
    potential: Float[Tensor, "problems m"] | None = None,
) -> tuple[Float[Tensor, "problems n m"], Float[Tensor, "problems m"]]:
    """Entropic plans with uniform marginals for several costs at once.

    Args:
        cost: any finite numbers.
        eps: regularisation of each problem.
        inner: most scalings.
        tolerance: stops where the largest sum of errors of the row marginals is below.
        potential: of the columns, to start from, in units of the cost.

    Returns:
        The plans, exact in their columns, and the potentials of the columns to go on from.

    Source: Cuturi, NeurIPS 2013; renewal of potentials after Schmitzer, SIAM J. Sci. Comput. 2019.
    """
    n, m = cost.shape[1:]
    scaled = cost / eps[:, None, None]
    g = torch.zeros_like(scaled[:, 0]) if potential is None else potential / eps[:, None]
    done = 0
    while True:
        # One step in the log domain fits the potentials; the scalings that follow stay near 1.
        f = -math.log(n) - (g[:, None, :] - scaled).logsumexp(2)
        g = -math.log(m) - (f[:, :, None] - scaled).logsumexp(1)
        kernel = (f[:, :, None] + g[:, None, :] - scaled).exp()
        done += 1
        if done >= inner or float((kernel.sum(2) - 1 / n).abs().sum(1).max()) <= tolerance:
            return kernel, g * eps[:, None]
        u, v, made = _scalings(kernel, min(_BLOCK, inner - done))
        done += made
        f, g = f + u.log(), g + v.log()


def _scalings(kernel: Tensor, steps: int) -> tuple[Tensor, Tensor, int]:
    """Some alternating scalings of the kernel, fewer where they grow large."""
    n, m = kernel.shape[1:]
    v = torch.ones_like(kernel[:, 0, :, None])
    u = torch.ones_like(kernel[:, :, 0, None])
    turned = kernel.transpose(1, 2)
    for made in range(steps):
        new_u = (1 / n) / (kernel @ v)
        new_v = (1 / m) / (turned @ new_u)
        if not float(torch.maximum(new_u.max(), new_v.max())) < _LARGEST:
            return u[..., 0], v[..., 0], made
        u, v = new_u, new_v
    return u[..., 0], v[..., 0], steps


class _Side:
    """One side's costs in double precision, where the solver works, and their products with plans.

    At these sizes double precision costs little, and what is sought is a difference of costs.
    """

    def __init__(self, matrix: Tensor, factors: Factored | None = None) -> None:
        small = len(matrix) <= _ON_CPU or matrix.device.type == "mps"
        self.device = torch.device("cpu") if small else matrix.device
        self.matrix = matrix.detach().to(self.device, torch.float64)
        self.factors: Factored | None = None
        if factors is not None and 2 * factors.left.shape[1] < len(matrix):
            left, right = (part.detach().to(self.device, torch.float64) for part in (factors.left, factors.right))
            self.factors = Factored(left, right)

    def before(self, plans: Tensor) -> Tensor:
        """Matrix times plans."""
        if self.factors is None:
            return self.matrix @ plans
        return self.factors.left @ (self.factors.right.T @ plans)

    def after(self, plans: Tensor) -> Tensor:
        """Plans times matrix."""
        if self.factors is None:
            return plans @ self.matrix
        return plans @ self.factors.left @ self.factors.right.T


def _solve(
    a: _Side,
    b: _Side,
    *,
    eps0: float,
    value: Value,
    max_iter: int,
    relative: bool = True,
    init: str = "best",
    inner: int = 200,
) -> Coupling:
    n = len(a.matrix)
    identity = torch.eye(n, dtype=torch.float64, device=a.device) / n
    starts = {"product": torch.full_like(identity, 1 / n**2), "identity": identity}
    chosen = torch.stack([starts[name] for name in (("product", "identity") if init == "best" else (init,))])
    plans, eps, moved, steps = _entropic(a, b, chosen, eps0, relative, max_iter, inner)
    plans = _rounded(plans)
    if value == "polished":
        cost, order, settled = _polished(a, b, plans)
        return Coupling(cost, identity[order.to(a.device)], order, settled, steps, float(eps.max()))
    # rows and columns are exact, so the squares do not depend on the plan
    squares = 0.5 * (a.matrix.square().mean() + b.matrix.square().mean())
    costs = (squares - (plans * b.after(a.before(plans))).sum((1, 2))).clamp_min(0)
    objective = costs - eps * -torch.special.xlogy(plans, plans).sum((1, 2))
    best = int(objective.argmin())
    found = objective if value == "entropic" else costs
    return Coupling(float(found[best]), plans[best], None, bool(moved[best] <= _OUTER), steps, float(eps[best]))


def _entropic(
    a: _Side, b: _Side, plans: Tensor, eps0: float, relative: bool, max_iter: int, inner: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Plans from several starts, the regularisation of each, how far each still moved, and the steps made."""
    constant = a.matrix.square().mean(1)[:, None] + b.matrix.square().mean(1)[None, :]
    moved = torch.full((len(plans),), torch.inf, dtype=plans.dtype, device=plans.device)
    potential, eps, step = None, torch.ones_like(moved), 0
    for step in range(1, max_iter + 1):
        gradient = constant - 2 * b.after(a.before(plans))
        eps = eps0 * (gradient.abs().mean((1, 2)) if relative else torch.ones_like(moved))
        eps = eps.clamp_min(torch.finfo(eps.dtype).tiny)
        new, potential = sinkhorn_plans(gradient, eps, inner=inner, potential=potential)
        if not bool(new.isfinite().all()):
            message = f"no finite plan at eps0={eps0}, where costs reach {float(gradient.max()):.3g}; give a larger one"
            raise NotConverged(message, iterations=step, residual=math.inf)
        moved = (new - plans).abs().sum((1, 2))
        plans = new
        if float(moved.max()) <= _OUTER:
            break
    return plans, eps, moved, step


class _Polish:
    """Descent over permutations on the CPU: assignments to the linearised cost, then the best exchange of two."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a.numpy(), b.numpy()
        self.constant = (self.a**2).mean(1)[:, None] + (self.b**2).mean(1)[None, :]

    def assigned(self, product: NumPy) -> tuple[NumPy, bool]:
        """The permutation that assignments end at, from A P B of a plan; and whether they stopped by themselves."""
        assign = _assignment()
        order, lowest = None, np.inf
        for _ in range(_ASSIGNMENTS):
            new = assign(self.constant - 2 * product)[1]
            if order is not None and (new == order).all():
                return order, True
            cost = self.cost(new)
            if not cost < lowest:
                assert order is not None
                return order, True
            order, lowest = new, cost
            product = self.a @ self.b[new] / len(new)
        assert order is not None
        return order, False

    def exchanged(self, order: NumPy) -> NumPy:
        """The permutation after the best exchange of two images, again and again while that lowers the cost."""
        a, order = self.a, order.copy()
        scale = float(np.abs(self.a).max() * np.abs(self.b).max()) * len(order)
        for _ in range(len(order) ** 2):
            b = self.b[np.ix_(order, order)]
            g = a @ b
            inside = (a.diagonal()[:, None] - a) * (b - b.diagonal()[:, None])
            gain = g + g.T - g.diagonal()[:, None] - g.diagonal()[None, :] - inside - inside.T
            gain = 2 * gain + (a.diagonal()[:, None] - a.diagonal()) * (b.diagonal() - b.diagonal()[:, None])
            first, second = divmod(int(gain.argmax()), len(order))
            if not gain[first, second] > 1e-12 * scale:
                break
            order[[first, second]] = order[[second, first]]
        return order

    def cost(self, order: NumPy) -> float:
        """Q of the permutation."""
        return 0.5 * float(((self.a - self.b[np.ix_(order, order)]) ** 2).mean())


def _polished(a: _Side, b: _Side, plans: Tensor) -> tuple[float, Tensor, bool]:
    """Cost and images of the best permutation found from the plans and from the identity; whether that settled."""
    polish = _Polish(a.matrix.cpu(), b.matrix.cpu())
    here = np.arange(len(a.matrix))
    ends = [polish.assigned(product.cpu().numpy()) for product in b.after(a.before(plans))]
    # the identity first and by itself: where nothing is better, it is the plan, and the gap and its gradient are zero
    best, settled = here, True
    for order, stopped in [*ends, polish.assigned(polish.a @ polish.b / len(here))]:
        if polish.cost(order) < polish.cost(best) * (1 - 1e-12):
            best, settled = order, stopped
    exchanged = polish.exchanged(best)
    if polish.cost(exchanged) < polish.cost(best) * (1 - 1e-12):
        best = exchanged
    return polish.cost(best), torch.from_numpy(best), settled


def _assignment() -> Callable[[NumPy], tuple[NumPy, NumPy]]:
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise MissingDependency("polished plans need scipy: pip install 'pippin[bayes]'") from error
    return linear_sum_assignment  # type: ignore[no-any-return]


def _rounded(plans: Tensor) -> Tensor:
    """The nearest plans whose marginals are uniform to rounding, so that squares cancel in a gap.

    Source: Altschuler, Weed and Rigollet, NeurIPS 2017, algorithm 2.
    """
    n = plans.shape[1]
    plans = plans * (1 / n / plans.sum(2, keepdim=True)).clamp_max(1)
    plans = plans * (1 / n / plans.sum(1, keepdim=True)).clamp_max(1)
    rows, columns = 1 / n - plans.sum(2), 1 / n - plans.sum(1)
    left = rows.sum(1)[:, None, None].clamp_min(torch.finfo(plans.dtype).tiny)
    return plans + rows[:, :, None] * columns[:, None, :] / left


def _costs(x: Tensor, y: Tensor, cost: Cost) -> tuple[Tensor, Tensor]:
    """Both cost matrices with their graph, after the checks."""
    _check_points(x, y)
    ours, theirs = (cost, cost) if isinstance(cost, str) else cost
    return cost_matrix(_wide(x), ours), cost_matrix(_wide(y), theirs)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _sides(x: Tensor, y: Tensor, a: Tensor, b: Tensor, cost: Cost) -> tuple[_Side, _Side]:
    if not isinstance(cost, str):
        return _Side(a.detach()), _Side(b.detach())
    return (
        _Side(a.detach(), cost_factors(x.detach(), cost) if 2 * x[0].numel() < len(x) else None),
        _Side(b.detach(), cost_factors(y.detach(), cost) if 2 * y[0].numel() < len(y) else None),
    )


def _warn(best: Coupling, gap: float, eps0: float, max_iter: int, value: Value) -> None:
    """Say what is wrong with a gap at an entropic plan."""
    if not best.converged:
        message = (
            f"the Gromov-Wasserstein plan still moved after {best.iterations} steps; give a larger eps0 than {eps0} "
            f"or max_iter than {max_iter}, or value='polished'"
        )
        warnings.warn(message, InferenceAtRisk, stacklevel=3)
    if value == "plain" and gap < -1e-3:
        message = (
            f"the gap is {gap:.3g}: the entropic plan costs more than the map itself; take value='polished', or a "
            f"smaller eps0 than {eps0}"
        )
        warnings.warn(message, InferenceAtRisk, stacklevel=3)


def _check_name(cost: object) -> None:
    if cost not in ("l2", "scl2", "cos"):
        raise InvalidArgument(f"cost {cost!r} is none of 'l2', 'scl2', 'cos'; or give two functions of the points")


def _check_points(x: Tensor, y: Tensor) -> None:
    if len(x) != len(y):
        raise InvalidInput(f"{len(x)} points but {len(y)} images; row i of one is the image of row i of the other")
    if len(x) < 2:
        raise InvalidInput(f"geometry needs at least 2 points, got {len(x)}")
    for name, points in (("the points", x), ("the images", y)):
        if not points[0].numel():
            raise InvalidInput(f"{name} have no features: their shape is {tuple(points.shape)}")
        if not bool(points.detach().isfinite().all()):
            row = int((~points.detach().flatten(1).isfinite()).any(1).nonzero()[0])
            raise InvalidInput(f"{name} hold NaN or infinity in row {row}")


def _check_settings(eps0: float, max_iter: int, inner: int, init: str, value: str) -> None:
    if not 0.0 < eps0 < math.inf:
        raise InvalidArgument(f"eps0 must be above 0 and finite, got {eps0}; 0.02 is usual")
    if max_iter < 1 or inner < 1:
        raise InvalidArgument(f"max_iter ({max_iter}) and inner ({inner}) must be at least 1")
    if init not in ("best", "product", "identity"):
        raise InvalidArgument(f"init {init!r} is none of 'best', 'product', 'identity'")
    if value not in ("polished", "plain", "entropic"):
        raise InvalidArgument(f"value {value!r} is none of 'polished', 'plain', 'entropic'")


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
