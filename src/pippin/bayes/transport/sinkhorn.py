r"""Entropic optimal transport whose rows are exact and whose columns may give way: semi-balanced Sinkhorn.

Notable here:
- one problem from balanced (tau = 1) to free columns (tau near 0); the last update is always that of the rows
- log-domain potentials with an absorbed kernel: an iteration is two matrix-vector products, and the exponentials are
  only taken again when a scaling has drifted too far, so it is as fast as plain scaling and safe at any gamma
- where columns give way, the potentials are shifted by the best constant at each update, which plain scaling finds
  only at the rate tau
- updates of the columns are mixed (Anderson's acceleration), which takes a fifth of the plain iterations or fewer where
  those are many; the solution is the same, as every mixture is checked by its residual
- the residual is the total error of the columns against what the optimum demands of them, for every tau
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
        columns: potentials g of the columns [m].
        iterations: updates of both potentials that were made.
        residual: total error of the columns, between 0 and 2.
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
    r"""The plan of least $\langle P, C \rangle + \gamma \langle P, \log P \rangle + \rho\,\mathrm{KL}(P^T 1 | 1/m)$.

    Rows are hard, $P 1 = 1/n$; columns give way with $\rho = \gamma \tau / (1 - \tau)$, which is infinite at tau = 1.
    With log-sum-exp LSE, the updates are
    $f_i = \gamma (\log \tfrac1n - \mathrm{LSE}_j (g_j - C_{ij}) / \gamma)$ and
    $g_j = \tau \gamma (\log \tfrac1m - \mathrm{LSE}_i (f_i - C_{ij}) / \gamma)$, and
    $P_{ij} = e^{(f_i + g_j - C_{ij}) / \gamma}$.

    Args:
        cost: of moving row i to column j, finite; the plan is computed in its precision.
        gamma: weight of the entropy, in units of the cost, above 0.
        tau: 1 for balanced columns; smaller lets columns that fit badly lose mass; above 0.
        tolerance: of the residual.
        max_iterations: before giving up.

    Raises:
        InvalidInput: an empty cost, or one with values that are not finite (the rows are named).
        NotConverged: the residual is still above the tolerance; a larger gamma or a smaller tau converges faster.

    Source: Wehenkel et al. 2024, arXiv:2405.08719, section 3; Séjourné et al. 2019, arXiv:1910.12958, for the update
    with tau; Schmitzer 2016, arXiv:1610.06519, for absorption; Séjourné et al. 2022, arXiv:2201.00730, for the shift;
    Walker & Ni 2011, SIAM J. Numer. Anal. 49, for the mixing.

    >>> flat = semibalanced_sinkhorn(torch.zeros(2, 4), gamma=1.0)
    >>> flat.plan.tolist()
    [[0.125, 0.125, 0.125, 0.125], [0.125, 0.125, 0.125, 0.125]]
    """
    if cost.ndim != 2 or not cost.numel():
        raise InvalidInput(f"cost must be a matrix with at least one row and one column, got {list(cost.shape)}")
    refuse_rows(~cost.isfinite().all(-1), "cost is not finite")
    n, m = cost.shape
    log_a, log_b, far = -math.log(n), -math.log(m), math.log(torch.finfo(cost.dtype).max) / 4
    scaled, g = cost / gamma, cost.new_zeros(m)
    f, kernel = _absorbed(scaled, g, log_a)
    u, v = cost.new_ones(n), cost.new_ones(m)  # what has been gained since: the potentials are f + log u and g + log v
    slack, residual, mixing = (1 - tau) / tau, math.inf, _Mixing()
    for iteration in range(max_iterations):
        # the mass of the columns under exact rows tells both how far off they are and what their update is
        mass, now = v * (kernel.mT @ u), g + v.log()
        residual = float((mass - (log_b - slack * now).exp()).abs().sum())
        if residual <= tolerance:
            plan = u[:, None] * kernel * v
            return TransportPlan(plan, gamma * (f + u.log()), gamma * now, iteration, residual)
        log_v = mixing(now, _centered(tau * (log_b - mass.log() + now), slack, log_b), residual) - g
        next_v = log_v.exp()
        next_u = 1 / (n * (kernel @ next_v))
        if max(float(log_v.abs().max()), float(next_u.log().abs().max())) < far:
            u, v = next_u, next_v
            continue
        g = _centered(tau * (log_b - (f[:, None] + u.log()[:, None] - scaled).logsumexp(0)), slack, log_b)
        f, kernel = _absorbed(scaled, g, log_a)
        u, v, mixing = torch.ones_like(u), torch.ones_like(v), _Mixing()
    raise _not_converged(cost, gamma, tau, max_iterations, residual)


def row_weights(cost: Float[Tensor, "n m"], columns: Float[Tensor, " m"], gamma: float) -> Float[Tensor, "n m"]:
    r"""Log shares of the columns for new rows, given the potentials of a solved problem; each row sums to 1.

    $\log \alpha_{ij} = (g_j - C_{ij}) / \gamma$ up to a constant: the row update of `semibalanced_sinkhorn`. For a row
    of the solved problem it is that row of its plan.
    """
    return ((columns - cost) / gamma).log_softmax(-1)


class _Mixing:
    """Anderson's mixing of fixed-point steps: the combination of the last ones whose changes would cancel best.

    Where the residual grows to more than twice the least so far, what was remembered is dropped and a plain step taken.
    """

    def __init__(self, depth: int = 6) -> None:
        self.depth, self.least = depth, math.inf
        self.points: list[Tensor] = []
        self.changes: list[Tensor] = []

    def __call__(self, point: Tensor, image: Tensor, residual: float) -> Tensor:
        """The next point, given the last one and what a plain step makes of it."""
        if not residual <= 2 * self.least or not image.isfinite().all():
            self.points, self.changes = [], []
        self.least = min(self.least, residual)
        self.points, self.changes = [*self.points[-self.depth :], point], [*self.changes[-self.depth :], image - point]
        if len(self.points) == 1:
            return image
        points, changes = (torch.stack(kept).double().diff(dim=0) for kept in (self.points, self.changes))
        gram = changes @ changes.mT
        gram.diagonal().add_(1e-10 * gram.diagonal().sum()).clamp_min_(torch.finfo(gram.dtype).tiny)
        weights = torch.linalg.solve(gram, changes @ self.changes[-1].double())
        mixed = image - (weights @ (points + changes)).to(image)
        return mixed if mixed.isfinite().all() else image


def _absorbed(scaled: Tensor, g: Tensor, log_a: float) -> tuple[Tensor, Tensor]:
    """The row potentials that fit those of the columns, and the plan of both, whose rows are exact."""
    # one pass of exponentials; the log-sum-exp of a row follows from its largest entry and the share of that
    entries = g - scaled
    most = entries.max(1, keepdim=True)
    shares = entries.softmax(1)
    f = log_a - (most.values - shares.gather(1, most.indices).log())[:, 0]
    return f, shares.mul_(math.exp(log_a))


def _centered(g: Tensor, slack: float, log_b: float) -> Tensor:
    """Column potentials shifted by the constant that is best, so that the mass they ask for is 1.

    A constant moves from the rows to the columns only by a share of 1 - tau in an update; this does it at once.
    """
    return g if slack == 0 else g + (log_b - slack * g).logsumexp(0) / slack


def _not_converged(cost: Tensor, gamma: float, tau: float, iterations: int, residual: float) -> NotConverged:
    return NotConverged(
        f"the columns are still off by {residual:.1e} after {iterations} iterations; raise gamma ({gamma:g}; the mean "
        f"cost is {float(cost.mean()):.3g}), lower tau ({tau:g}), or allow a larger tolerance or more iterations",
        iterations=iterations,
        residual=residual,
    )
