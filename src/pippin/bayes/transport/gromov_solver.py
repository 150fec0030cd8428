r"""The Gromov-Wasserstein solver: entropic plans, then the descent over permutations that polishes them.

Notable here:
- Sinkhorn runs on scalings of a kernel that begins in the log domain and goes back there where they grow large: as safe
  as logarithms throughout, and several times faster; the potentials of one outer step are where the next one begins
- several starts are solved at once
- the polish is assignments to the linearized cost until they stop moving, then exchanges of two images while one helps
- everything is in double precision: at these sizes that costs little, and a difference of costs is what is sought

Source: Peyre, Cuturi and Solomon, ICML 2016, section 3 (entropic plans); the polish is ours.
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

_OUTER, _INNER = 1e-6, 1e-6
"""Where the outer iteration stops: change of the plan in total variation; the inner: error of the marginals."""
_ASSIGNMENTS, _WORTH = 100, 1e-6
"""Most assignments of a polish, and the share of the cost that one must save for there to be another."""
_BLOCK = 10
"""Scalings between two looks at the marginals."""
_LARGEST = 1e100
"""A scaling beyond this is not taken; the potentials are renewed instead."""
_ON_CPU = 512
"""Up to so many points the solver leaves the accelerator: launching its small products there would cost more."""


@checked
@dataclass(frozen=True)
class GromovSolver:
    """How a Gromov-Wasserstein plan is looked for.

    Attributes:
        eps0: entropic regularization, above 0.
        relative: whether that is a share of the mean absolute gradient of the cost, set anew in each outer step.
        max_iterations: outer steps, each with a new linearization.
        max_sinkhorn_iterations: scalings in each.
        init: "product" begins where nothing is coupled in particular, "identity" with each point at its own number;
            "best" takes both and keeps the better end.
        value: "polished" moves on from the entropic plans, and from the identity, to permutations, and gives the
            smallest cost; "plain" is the cost of the entropic plan; "entropic" that less eps times the plan's entropy.
        num_restarts: so many permutations at random are among the starts of the polish, and so many more of them than
            the best one are improved to the end; a dozen makes small problems all but exact.
        seed: of those.
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
"""For one comparison of two sets."""
QUICK = GromovSolver(eps0=0.1, max_iterations=3, max_sinkhorn_iterations=10, init="product")
"""For a training step: the plan is about as good after the polish, in a twentieth of the time. Not for other values."""


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
        value: as it was asked for: the cost of the plan, or that less the entropy times the regularization.
        plan: sums to 1/n over each row and column.
        permutation: where the plan is a permutation, the column that goes with each row; else None.
        converged: whether the iteration that gave the plan had stopped moving.
        iterations: outer steps of the entropic solver.
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
    inner: int = 200,
    tolerance: float = _INNER,
    potential: Float[Tensor, "problems m"] | None = None,
) -> tuple[Float[Tensor, "problems n m"], Float[Tensor, "problems m"]]:
    """Entropic plans with uniform marginals for several costs at once.

    Args:
        cost: any finite numbers.
        eps: regularization of each problem.
        inner: most scalings.
        tolerance: stops where the largest sum of errors of the row marginals is below.
        potential: of the columns, to start from, in units of the cost.

    Returns:
        The plans, exact in their columns, and the potentials of the columns to go on from.

    Source: Cuturi, NeurIPS 2013; renewal of potentials after Schmitzer, SIAM J. Sci. Comput. 2019.
    """
    n = cost.shape[1]
    scaled = cost / eps[:, None, None]
    g = torch.zeros_like(scaled[:, 0]) if potential is None else potential / eps[:, None]
    kernel, g = _renewed(scaled, g)
    plain, (u, v), done = _plain(kernel), _ones(kernel), 1
    while done < inner and float(abs(u * (plain @ v) - 1 / n).sum(1).max()) > tolerance:
        steps = min(_BLOCK, inner - done)
        done += steps
        scalings = _scalings(plain, v, steps)
        if scalings is None:
            kernel, g = _renewed(scaled, g + torch.as_tensor(v)[..., 0].log())
            plain, (u, v) = _plain(kernel), _ones(kernel)
        else:
            u, v = scalings
    left, right = torch.as_tensor(u), torch.as_tensor(v)
    return left * kernel * right.transpose(1, 2), (g + right[..., 0].log()) * eps[:, None]


def _plain(kernel: Tensor) -> Any:
    """The kernel as numpy has it, if it is on the CPU: calls for small products cost a fifth there of torch's."""
    return kernel.numpy() if kernel.device.type == "cpu" else kernel


def _ones(kernel: Tensor) -> tuple[Any, Any]:
    """Scalings that change nothing."""
    return _plain(torch.ones_like(kernel[:, :, :1])), _plain(torch.ones_like(kernel[:, :1]).transpose(1, 2))


def _renewed(scaled: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One step in the log domain: the plan, exact in its columns, and their potentials. Scalings of it stay near 1."""
    n, m = scaled.shape[1:]
    f = -math.log(n) - (g[:, None, :] - scaled).logsumexp(2)
    g = -math.log(m) - (f[:, :, None] - scaled).logsumexp(1)
    return (f[:, :, None] + g[:, None, :] - scaled).exp(), g


def _scalings(kernel: Any, v: Any, steps: int) -> tuple[Any, Any] | None:
    """Some alternating scalings of the kernel; None where they leave the range that is safe."""
    n, m = kernel.shape[1:]
    turned = kernel.swapaxes(1, 2)
    for _ in range(steps):
        u = (1 / n) / (kernel @ v)
        v = (1 / m) / (turned @ u)
    safe = max(float(u.max()), float(v.max())) < _LARGEST and float(v.min()) > 1 / _LARGEST
    return (u, v) if safe else None


class Side:
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


def solve(a: Side, b: Side, solver: GromovSolver) -> Coupling:
    """The plan between two sides."""
    n = len(a.matrix)
    identity = torch.eye(n, dtype=torch.float64, device=a.device) / n
    starts = {"product": torch.full_like(identity, 1 / n**2), "identity": identity}
    chosen = torch.stack(
        [starts[name] for name in (("product", "identity") if solver.init == "best" else (solver.init,))]
    )
    plans, eps, moved, steps = _entropic(a, b, chosen, solver)
    plans = _rounded(plans)
    if solver.value == "polished":
        cost, order, settled = _polished(a, b, plans, solver)
        return Coupling(cost, identity[order.to(a.device)], order, settled, steps, float(eps.max()))
    # rows and columns are exact, so the squares do not depend on the plan
    squares = 0.5 * (a.matrix.square().mean() + b.matrix.square().mean())
    costs = (squares - (plans * b.after(a.before(plans))).sum((1, 2))).clamp_min(0)
    objective = costs - eps * -torch.special.xlogy(plans, plans).sum((1, 2))
    best = int(objective.argmin())
    found = objective if solver.value == "entropic" else costs
    return Coupling(float(found[best]), plans[best], None, bool(moved[best] <= _OUTER), steps, float(eps[best]))


def _entropic(a: Side, b: Side, plans: Tensor, solver: GromovSolver) -> tuple[Tensor, Tensor, Tensor, int]:
    """Plans from several starts, the regularization of each, how far each still moved, and the steps made."""
    constant = a.matrix.square().mean(1)[:, None] + b.matrix.square().mean(1)[None, :]
    moved = torch.full((len(plans),), torch.inf, dtype=plans.dtype, device=plans.device)
    potential, eps, step = None, torch.ones_like(moved), 0
    for step in range(1, solver.max_iterations + 1):
        gradient = constant - 2 * b.after(a.before(plans))
        eps = solver.eps0 * (gradient.abs().mean((1, 2)) if solver.relative else torch.ones_like(moved))
        eps = eps.clamp_min(torch.finfo(eps.dtype).tiny)
        new, potential = sinkhorn_plans(gradient, eps, inner=solver.max_sinkhorn_iterations, potential=potential)
        if not bool(new.isfinite().all()):
            highest = float(gradient.max())
            message = f"no finite plan at eps0={solver.eps0}, where costs reach {highest:.3g}; give a larger one"
            raise NotConverged(message, iterations=step, residual=math.inf)
        moved = (new - plans).abs().sum((1, 2))
        plans = new
        if float(moved.max()) <= _OUTER:
            break
    return plans, eps, moved, step


class Polish:
    """Descent over permutations on the CPU: assignments to the linearized cost, then the best exchange of two."""

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
            if order is not None and not cost < lowest * (1 - _WORTH):
                return (new if cost < lowest else order), True
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


def _polished(a: Side, b: Side, plans: Tensor, solver: GromovSolver) -> tuple[float, Tensor, bool]:
    """Cost and images of the best permutation found from the plans and from the identity; whether that settled."""
    polish = Polish(a.matrix.cpu(), b.matrix.cpu())
    here = np.arange(len(a.matrix))
    random = np.random.default_rng(solver.seed)
    ends = [polish.assigned(product.cpu().numpy()) for product in b.after(a.before(plans))]
    ends.append(polish.assigned(polish.a @ polish.b / len(here)))
    ends += [(random.permutation(len(here)), True) for _ in range(solver.num_restarts)]
    # the identity first and by itself: where nothing is better, it is the plan, and the gap and its gradient are zero
    best, lowest, settled = here, polish.cost(here), True
    for order, stopped in sorted([(here, True), *ends], key=lambda end: polish.cost(end[0]))[: 1 + solver.num_restarts]:
        better = polish.exchanged(order)
        if polish.cost(better) < lowest * (1 - 1e-12):
            best, lowest, settled = better, polish.cost(better), stopped
    return lowest, torch.from_numpy(best), settled


def _assignment() -> Callable[[NumPy], tuple[NumPy, NumPy]]:
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise MissingDependency("polished plans need scipy: pip install 'pippin[bayes]'") from error
    found: Callable[[NumPy], tuple[NumPy, NumPy]] = linear_sum_assignment
    return found


def _rounded(plans: Tensor) -> Tensor:
    """The nearest plans whose marginals are uniform to rounding, so that squares cancel in a gap.

    Source: Altschuler, Weed and Rigollet, NeurIPS 2017, algorithm 2.
    """
    n = plans.shape[1]
    plans = plans * (1 / n / plans.sum(2, keepdim=True)).clamp_max(1)
    plans = plans * (1 / n / plans.sum(1, keepdim=True)).clamp_max(1)
    rows, columns = (1 / n - plans.sum(2)).clamp_min(0), (1 / n - plans.sum(1)).clamp_min(0)
    left = rows.sum(1)[:, None, None].clamp_min(torch.finfo(plans.dtype).tiny)
    return plans + rows[:, :, None] * columns[:, None, :] / left
