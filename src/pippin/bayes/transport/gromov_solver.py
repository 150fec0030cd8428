r"""The Gromov-Wasserstein solver: entropic plans, then a local search over permutations that polishes them.

Notable here:
- Sinkhorn scales a kernel that is computed in the log domain, and computed again when the scalings grow large: as
  stable as log-domain Sinkhorn, and several times faster; each outer step starts from the potentials of the one before
- several starts are solved as one batch
- the polish solves assignment problems of the linearized cost until the permutation stops changing, then exchanges
  pairs of images while that lowers the cost
- everything is in double precision: at these sizes it costs little, and the result is a difference of costs

Source: Peyre, Cuturi and Solomon, ICML 2016, section 3 (entropic plans); the polish is our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.checks import NonNegativeInt, PositiveFloat, PositiveInt, checked
from pippin.core.errors import MissingDependency, NotConverged

NumPy: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Value: TypeAlias = Literal["polished", "plain", "entropic"]

_OUTER_TOLERANCE, _SINKHORN_TOLERANCE = 1e-6, 1e-6
"""Tolerances of the outer iteration (total change of the plan) and of Sinkhorn (total error of the marginals)."""
_MAX_ASSIGNMENTS, _MIN_DECREASE = 100, 1e-6
"""Maximum number of assignment problems of a polish, and the relative decrease of the cost below which it stops."""
_CHECK_EVERY = 10
"""Sinkhorn iterations between two checks of the marginals."""
_MAX_SCALING = 1e100
"""With a larger scaling, the kernel is computed again in the log domain."""
_MAX_CPU_POINTS = 512
"""Up to this number of points the solver runs on the CPU: kernel launches would dominate on an accelerator."""


@checked
@dataclass(frozen=True)
class GromovSolver:
    """Options of the Gromov-Wasserstein solver.

    Attributes:
        eps0: entropic regularization, above 0.
        relative: whether ``eps0`` is relative to the mean absolute gradient of the cost, in each outer step.
        max_iterations: maximum number of outer steps, each with a new linearization.
        max_sinkhorn_iterations: maximum number of Sinkhorn iterations in each.
        init: initial plan: "product" of the marginals, "identity", or "best", which tries both.
        value: "polished" for the smallest cost of permutations found from the entropic plans and the identity; "plain"
            for the cost of the entropic plan; "entropic" for that cost minus eps times the plan's entropy.
        num_restarts: number of random permutations among the starts of the polish, and of further candidates that are
            improved by exchanges; with about 12, small problems are nearly always solved exactly.
        seed: seed of the random permutations.
    """

    eps0: PositiveFloat = 0.02
    relative: bool = True
    max_iterations: PositiveInt = 20
    max_sinkhorn_iterations: PositiveInt = 200
    init: Literal["best", "product", "identity"] = "best"
    value: Value = "polished"
    num_restarts: NonNegativeInt = 0
    seed: int = 0


CAREFUL = GromovSolver()
"""Options for a single comparison of two sets."""
QUICK = GromovSolver(eps0=0.1, max_iterations=3, max_sinkhorn_iterations=10, init="product")
"""Options for training steps: about the same polished value in a twentieth of the time. Use only with "polished"."""


@dataclass(frozen=True)
class Factored:
    """A symmetric low-rank cost matrix ``left @ right.T``, whose product with a plan is quadratic in n.

    Attributes:
        left: left factor.
        right: right factor.
    """

    left: Float[Tensor, "n rank"]
    right: Float[Tensor, "n rank"]

    @property
    def matrix(self) -> Float[Tensor, "n n"]:
        """The matrix (n, n)."""
        return self.left @ self.right.T


@dataclass(frozen=True)
class Coupling:
    """A plan between two sets of n points, and its cost.

    Attributes:
        value: the value that `GromovSolver.value` selects.
        plan: the plan; rows and columns sum to 1/n.
        permutation: the column of each row, if the plan is a permutation; else None.
        converged: whether the iteration that gave the plan converged.
        iterations: number of outer steps of the entropic solver.
        eps: the regularization of its last step, in units of the cost.
    """

    value: float
    plan: Float[Tensor, "n n"]
    permutation: Int[Tensor, " n"] | None
    converged: bool
    iterations: int
    eps: float


def sinkhorn_plans(
    cost: Float[Tensor, "problems n m"],
    eps: Float[Tensor, problems],
    *,
    max_iterations: int = 200,
    tolerance: float = _SINKHORN_TOLERANCE,
    potential: Float[Tensor, "problems m"] | None = None,
) -> tuple[Float[Tensor, "problems n m"], Float[Tensor, "problems m"]]:
    """Entropic plans with uniform marginals for a batch of costs.

    Args:
        cost: finite costs.
        eps: regularization of each problem.
        max_iterations: maximum number of Sinkhorn iterations.
        tolerance: largest total error of row marginals at which the iteration stops.
        potential: initial potentials of the columns, in units of the cost.

    Returns:
        The plans, whose column marginals are exact, and the potentials of the columns, for a warm start.

    Source: Cuturi, NeurIPS 2013; absorption into the kernel after Schmitzer, SIAM J. Sci. Comput. 2019.
    """
    n = cost.shape[1]
    scaled = cost / eps[:, None, None]
    g = torch.zeros_like(scaled[:, 0]) if potential is None else potential / eps[:, None]
    kernel, g = _log_domain_step(scaled, g)
    array, (u, v), done = _as_array(kernel), _ones(kernel), 1
    while done < max_iterations and float(abs(u * (array @ v) - 1 / n).sum(1).max()) > tolerance:
        steps = min(_CHECK_EVERY, max_iterations - done)
        done += steps
        scalings = _scalings(array, v, steps)
        if scalings is None:
            kernel, g = _log_domain_step(scaled, g + torch.as_tensor(v)[..., 0].log())
            array, (u, v) = _as_array(kernel), _ones(kernel)
        else:
            u, v = scalings
    left, right = torch.as_tensor(u), torch.as_tensor(v)  # (problems, n, 1), (problems, m, 1)
    return left * kernel * right.transpose(1, 2), (g + right[..., 0].log()) * eps[:, None]


def _as_array(kernel: Tensor) -> Any:
    """A CPU tensor as a NumPy array, whose calls for small products cost a fifth of torch's; others unchanged."""
    return kernel.numpy() if kernel.device.type == "cpu" else kernel


def _ones(kernel: Tensor) -> tuple[Any, Any]:
    """Scalings of 1: (problems, n, 1) and (problems, m, 1)."""
    return _as_array(torch.ones_like(kernel[:, :, :1])), _as_array(torch.ones_like(kernel[:, :1]).transpose(1, 2))


def _log_domain_step(scaled: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One Sinkhorn iteration in the log domain: the plan, with exact column marginals, and the column potentials."""
    n, m = scaled.shape[1:]
    f = -math.log(n) - (g[:, None, :] - scaled).logsumexp(2)
    g = -math.log(m) - (f[:, :, None] - scaled).logsumexp(1)
    return (f[:, :, None] + g[:, None, :] - scaled).exp(), g


def _scalings(kernel: Any, v: Any, steps: int) -> tuple[Any, Any] | None:
    """Scalings after ``steps`` Sinkhorn iterations; None if they exceed the range that is stable."""
    n, m = kernel.shape[1:]
    transposed = kernel.swapaxes(1, 2)
    for _ in range(steps):
        u = (1 / n) / (kernel @ v)
        v = (1 / m) / (transposed @ u)
    stable = max(float(u.max()), float(v.max())) < _MAX_SCALING and float(v.min()) > 1 / _MAX_SCALING
    return (u, v) if stable else None


class Side:
    """The costs of one side in double precision, on the solver's device, and their products with plans."""

    def __init__(self, matrix: Tensor, factors: Factored | None = None) -> None:
        small = len(matrix) <= _MAX_CPU_POINTS or matrix.device.type == "mps"
        self.device = torch.device("cpu") if small else matrix.device
        self.matrix = matrix.detach().to(self.device, torch.float64)
        self.factors: Factored | None = None
        if factors is not None and 2 * factors.left.shape[1] < len(matrix):
            left, right = (factor.detach().to(self.device, torch.float64) for factor in (factors.left, factors.right))
            self.factors = Factored(left, right)

    def matmul(self, plans: Tensor) -> Tensor:
        """Matrix times plans."""
        if self.factors is None:
            return self.matrix @ plans
        return self.factors.left @ (self.factors.right.T @ plans)

    def rmatmul(self, plans: Tensor) -> Tensor:
        """Plans times matrix."""
        if self.factors is None:
            return plans @ self.matrix
        return plans @ self.factors.left @ self.factors.right.T


def solve(a: Side, b: Side, solver: GromovSolver) -> Coupling:
    """Compute the plan between two sides."""
    n = len(a.matrix)
    identity = torch.eye(n, dtype=torch.float64, device=a.device) / n
    starts = {"product": torch.full_like(identity, 1 / n**2), "identity": identity}
    names = ("product", "identity") if solver.init == "best" else (solver.init,)
    plans, eps, changes, steps = _entropic(a, b, torch.stack([starts[name] for name in names]), solver)
    plans = _round_to_marginals(plans)
    if solver.value == "polished":
        cost, order, converged = _polish(a, b, plans, solver)
        return Coupling(cost, identity[order.to(a.device)], order, converged, steps, float(eps.max()))
    # marginals are exact, so the squares do not depend on the plan
    squares = 0.5 * (a.matrix.square().mean() + b.matrix.square().mean())
    costs = (squares - (plans * b.rmatmul(a.matmul(plans))).sum((1, 2))).clamp_min(0)
    objective = costs - eps * -torch.special.xlogy(plans, plans).sum((1, 2))
    best = int(objective.argmin())
    values = objective if solver.value == "entropic" else costs
    converged = bool(changes[best] <= _OUTER_TOLERANCE)
    return Coupling(float(values[best]), plans[best], None, converged, steps, float(eps[best]))


def _entropic(a: Side, b: Side, plans: Tensor, solver: GromovSolver) -> tuple[Tensor, Tensor, Tensor, int]:
    """Entropic plans from several starts, the regularization and last change of each, and the number of steps."""
    constant = a.matrix.square().mean(1)[:, None] + b.matrix.square().mean(1)[None, :]
    changes = torch.full((len(plans),), torch.inf, dtype=plans.dtype, device=plans.device)
    potential, eps, step = None, torch.ones_like(changes), 0
    for step in range(1, solver.max_iterations + 1):
        gradient = constant - 2 * b.rmatmul(a.matmul(plans))  # (starts, n, n): linearization of Q at the plans
        eps = solver.eps0 * (gradient.abs().mean((1, 2)) if solver.relative else torch.ones_like(changes))
        eps = eps.clamp_min(torch.finfo(eps.dtype).tiny)
        new, potential = sinkhorn_plans(
            gradient, eps, max_iterations=solver.max_sinkhorn_iterations, potential=potential
        )
        if not bool(new.isfinite().all()):
            highest = float(gradient.max())
            message = f"no finite plan at eps0={solver.eps0}, where costs reach {highest:.3g}; raise eps0"
            raise NotConverged(message, iterations=step, residual=math.inf)
        changes = (new - plans).abs().sum((1, 2))
        plans = new
        if float(changes.max()) <= _OUTER_TOLERANCE:
            break
    return plans, eps, changes, step


class PermutationSearch:
    """Local search over permutations on the CPU: assignments of the linearized cost, then exchanges of two images."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a.numpy(), b.numpy()
        self.constant = (self.a**2).mean(1)[:, None] + (self.b**2).mean(1)[None, :]

    def assignment(self, product: NumPy) -> tuple[NumPy, bool]:
        """The permutation at which assignments converge, from A P B of a plan, and whether they converged."""
        assign = _assignment()
        order, lowest = None, np.inf
        for _ in range(_MAX_ASSIGNMENTS):
            new = assign(self.constant - 2 * product)[1]
            if order is not None and (new == order).all():
                return order, True
            cost = self.cost(new)
            if order is not None and not cost < lowest * (1 - _MIN_DECREASE):
                return (new if cost < lowest else order), True
            order, lowest = new, cost
            product = self.a @ self.b[new] / len(new)
        assert order is not None
        return order, False

    def exchange(self, order: NumPy) -> NumPy:
        """Exchange the best pair of images repeatedly while that lowers the cost."""
        a, order = self.a, order.copy()
        scale = float(np.abs(self.a).max() * np.abs(self.b).max()) * len(order)
        for _ in range(len(order) ** 2):
            b = self.b[np.ix_(order, order)]
            g = a @ b
            # gain (n, n) of exchanging each pair; entries of the pair itself are corrected for
            pair = (a.diagonal()[:, None] - a) * (b - b.diagonal()[:, None])
            gain = g + g.T - g.diagonal()[:, None] - g.diagonal()[None, :] - pair - pair.T
            gain = 2 * gain + (a.diagonal()[:, None] - a.diagonal()) * (b.diagonal() - b.diagonal()[:, None])
            first, second = divmod(int(gain.argmax()), len(order))
            if not gain[first, second] > 1e-12 * scale:
                break
            order[[first, second]] = order[[second, first]]
        return order

    def cost(self, order: NumPy) -> float:
        """Q of the permutation."""
        return 0.5 * float(((self.a - self.b[np.ix_(order, order)]) ** 2).mean())


def _polish(a: Side, b: Side, plans: Tensor, solver: GromovSolver) -> tuple[float, Tensor, bool]:
    """Cost and images of the best permutation found from the plans and the identity, and whether it converged."""
    search = PermutationSearch(a.matrix.cpu(), b.matrix.cpu())
    identity = np.arange(len(a.matrix))
    random = np.random.default_rng(solver.seed)
    candidates = [search.assignment(product.cpu().numpy()) for product in b.rmatmul(a.matmul(plans))]
    candidates.append(search.assignment(search.a @ search.b / len(identity)))
    candidates += [(random.permutation(len(identity)), True) for _ in range(solver.num_restarts)]
    # the identity is the plan unless another is better, so that the gap and its gradient are then exactly zero
    best, lowest, converged = identity, search.cost(identity), True
    ranked = sorted([(identity, True), *candidates], key=lambda candidate: search.cost(candidate[0]))
    for order, candidate_converged in ranked[: 1 + solver.num_restarts]:
        improved = search.exchange(order)
        if search.cost(improved) < lowest * (1 - 1e-12):
            best, lowest, converged = improved, search.cost(improved), candidate_converged
    return lowest, torch.from_numpy(best), converged


def _assignment() -> Callable[[NumPy], tuple[NumPy, NumPy]]:
    """SciPy's solver of linear assignment problems."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise MissingDependency("polished plans need scipy: pip install 'pippin[bayes]'") from error
    solver: Callable[[NumPy], tuple[NumPy, NumPy]] = linear_sum_assignment
    return solver


def _round_to_marginals(plans: Tensor) -> Tensor:
    """Nearby plans whose marginals are uniform up to floating-point rounding, so that squares cancel in a gap.

    Source: Altschuler, Weed and Rigollet, NeurIPS 2017, algorithm 2.
    """
    n = plans.shape[1]
    plans = plans * (1 / n / plans.sum(2, keepdim=True)).clamp_max(1)
    plans = plans * (1 / n / plans.sum(1, keepdim=True)).clamp_max(1)
    # the missing mass of rows and columns is added as a product
    rows, columns = (1 / n - plans.sum(2)).clamp_min(0), (1 / n - plans.sum(1)).clamp_min(0)
    missing = rows.sum(1)[:, None, None].clamp_min(torch.finfo(plans.dtype).tiny)
    return plans + rows[:, :, None] * columns[:, None, :] / missing
