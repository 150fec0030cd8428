r"""Semi-balanced entropic optimal transport by Sinkhorn: hard row marginals, relaxed column marginals.

Notable here:
- tau interpolates from balanced (tau = 1) to free columns (tau near 0); the last update is always that of the rows
- log-domain stabilization by absorption: an iteration is two matrix-vector products, and exponentials are only computed
  again when a scaling grows too large, so it is as fast as plain Sinkhorn, and stable at any gamma
- with relaxed columns, potentials are shifted by the optimal constant at each update, to which plain Sinkhorn converges
  only at the rate tau
- column updates use Anderson acceleration, which needs a fifth of the plain iterations or fewer where those are many;
  it is restarted when the residual grows
- the residual is the total error of the column marginals against those that the optimum requires, for every tau
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt, Le
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.batches import refuse_rows
from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidInput, NotConverged


@dataclass(frozen=True)
class TransportPlan:
    """A transport plan between n rows and m columns of mass 1/n and 1/m.

    Attributes:
        plan: mass from each row to each column [n, m]; rows sum to 1/n.
        rows: potentials f of the rows [n], in units of the cost.
        columns: potentials g of the columns [m], in units of the cost.
        iterations: number of updates of both potentials.
        residual: total error of the column marginals, between 0 and 2.
    """

    plan: Float[Tensor, "n m"]
    rows: Float[Tensor, " n"]
    columns: Float[Tensor, " m"]
    iterations: int
    residual: float


@checked
def semibalanced_sinkhorn(
    cost: Float[Tensor, "n m"],
    gamma: PositiveFloat,
    tau: Annotated[float, Gt(0), Le(1)] = 1.0,
    *,
    tolerance: PositiveFloat = 1e-6,
    max_iterations: PositiveInt = 10_000,
) -> TransportPlan:
    r"""The minimizer of $\langle P, C \rangle + \gamma \langle P, \log P \rangle + \rho\,\mathrm{KL}(P^T 1 | 1/m)$.

    Row marginals are hard, $P 1 = 1/n$; those of columns are relaxed with $\rho = \gamma \tau / (1 - \tau)$, which is
    infinite at tau = 1.
    With log-sum-exp LSE, the updates are
    $f_i = \gamma (\log \tfrac1n - \mathrm{LSE}_j (g_j - C_{ij}) / \gamma)$ and
    $g_j = \tau \gamma (\log \tfrac1m - \mathrm{LSE}_i (f_i - C_{ij}) / \gamma)$, and
    $P_{ij} = e^{(f_i + g_j - C_{ij}) / \gamma}$.

    Args:
        cost: cost of moving row i to column j, finite; the plan is computed in its precision.
        gamma: weight of the entropy, in units of the cost, above 0.
        tau: above 0, and at most 1 for balanced columns; with a smaller tau, columns with high costs lose mass.
        tolerance: largest residual of the result.
        max_iterations: maximum number of updates.

    Raises:
        InvalidInput: an empty cost, or one with values that are not finite (the rows are named).
        NotConverged: the residual is above the tolerance; a larger gamma or a smaller tau converges faster.

    Source: Wehenkel et al. 2024, arXiv:2405.08719, section 3; Séjourné et al. 2019, arXiv:1910.12958, for the update
    with tau; Schmitzer 2016, arXiv:1610.06519, for absorption; Séjourné et al. 2022, arXiv:2201.00730, for the shift;
    Walker & Ni 2011, SIAM J. Numer. Anal. 49, for Anderson acceleration.

    >>> semibalanced_sinkhorn(torch.zeros(2, 4), gamma=1.0).plan.tolist()
    [[0.125, 0.125, 0.125, 0.125], [0.125, 0.125, 0.125, 0.125]]
    """
    if cost.ndim != 2 or not cost.numel():
        raise InvalidInput(f"cost must be a matrix with at least one row and one column, got {list(cost.shape)}")
    refuse_rows(~cost.isfinite().all(-1), "cost is not finite")
    n, m = cost.shape
    log_a, log_b, max_log = -math.log(n), -math.log(m), math.log(torch.finfo(cost.dtype).max) / 4
    scaled, g = cost / gamma, cost.new_zeros(m)
    f, kernel = _absorb(scaled, g, log_a)
    u, v = cost.new_ones(n), cost.new_ones(m)  # scalings since absorption: the potentials are f + log u and g + log v
    slack, residual, acceleration = (1 - tau) / tau, math.inf, _AndersonAcceleration()
    for iteration in range(max_iterations):
        # the column marginals under exact rows give both the residual and the update of the columns
        marginal, potential = v * (kernel.mT @ u), g + v.log()
        residual = float((marginal - (log_b - slack * potential).exp()).abs().sum())
        if residual <= tolerance:
            plan = u[:, None] * kernel * v
            return TransportPlan(plan, gamma * (f + u.log()), gamma * potential, iteration, residual)
        update = _shifted(tau * (log_b - marginal.log() + potential), slack, log_b)
        log_v = acceleration(potential, update, residual) - g
        next_v = log_v.exp()
        next_u = 1 / (n * (kernel @ next_v))
        if max(float(log_v.abs().max()), float(next_u.log().abs().max())) < max_log:
            u, v = next_u, next_v
            continue
        # the scalings grow too large: one update in the log domain, and a new kernel from its potentials
        g = _shifted(tau * (log_b - (f[:, None] + u.log()[:, None] - scaled).logsumexp(0)), slack, log_b)
        f, kernel = _absorb(scaled, g, log_a)
        u, v, acceleration = torch.ones_like(u), torch.ones_like(v), _AndersonAcceleration()
    raise _not_converged(cost, gamma, tau, max_iterations, residual)


def row_weights(cost: Float[Tensor, "n m"], columns: Float[Tensor, " m"], gamma: float) -> Float[Tensor, "n m"]:
    r"""Log weights of the columns for new rows, given the column potentials of a plan; weights of a row sum to 1.

    $\log \alpha_{ij} = (g_j - C_{ij}) / \gamma$ up to a constant: the row update of `semibalanced_sinkhorn`. For a row
    of the plan's problem, these are the row of the plan times n.
    """
    return ((columns - cost) / gamma).log_softmax(-1)


class _AndersonAcceleration:
    """Anderson acceleration of a fixed-point iteration, from the last ``depth`` steps.

    It is restarted with a plain step when the residual exceeds twice the smallest one so far.
    """

    def __init__(self, depth: int = 6) -> None:
        self.depth, self.best_residual = depth, math.inf
        self.points: list[Tensor] = []
        self.steps: list[Tensor] = []

    def __call__(self, point: Tensor, image: Tensor, residual: float) -> Tensor:
        """The next point, given the last one and its image under a plain step."""
        if not residual <= 2 * self.best_residual or not image.isfinite().all():
            self.points, self.steps = [], []
        self.best_residual = min(self.best_residual, residual)
        self.points, self.steps = [*self.points[-self.depth :], point], [*self.steps[-self.depth :], image - point]
        if len(self.points) == 1:
            return image
        points, steps = (torch.stack(history).double().diff(dim=0) for history in (self.points, self.steps))
        gram = steps @ steps.mT  # least squares: the combination of steps that is closest to the last one
        gram.diagonal().add_(1e-10 * gram.diagonal().sum()).clamp_min_(torch.finfo(gram.dtype).tiny)
        weights = torch.linalg.solve(gram, steps @ self.steps[-1].double())
        mixed = image - (weights @ (points + steps)).to(image)
        return mixed if mixed.isfinite().all() else image


def _absorb(scaled: Tensor, g: Tensor, log_a: float) -> tuple[Tensor, Tensor]:
    """The row potentials for column potentials g, and the plan of both (n, m), whose row marginals are exact."""
    # one pass of exponentials: the log-sum-exp of a row is its largest entry minus the log of that entry's softmax
    entries = g - scaled
    largest = entries.max(1, keepdim=True)
    weights = entries.softmax(1)
    f = log_a - (largest.values - weights.gather(1, largest.indices).log())[:, 0]
    return f, weights.mul_(math.exp(log_a))


def _shifted(g: Tensor, slack: float, log_b: float) -> Tensor:
    """Column potentials shifted by the optimal constant, so that the marginals they require sum to 1.

    Plain updates converge to it by a factor of tau each.
    """
    return g if slack == 0 else g + (log_b - slack * g).logsumexp(0) / slack


def _not_converged(cost: Tensor, gamma: float, tau: float, iterations: int, residual: float) -> NotConverged:
    """The error for a residual above the tolerance."""
    return NotConverged(
        f"the residual is still {residual:.1e} after {iterations} iterations; raise gamma ({gamma:g}; the mean "
        f"cost is {float(cost.mean()):.3g}), lower tau ({tau:g}), or allow a larger tolerance or more iterations",
        iterations=iterations,
        residual=residual,
    )
