"""Semi-balanced Sinkhorn against POT: the same cost, the same plan, from distances to the plan.

    python benchmarks/sinkhorn.py [--quick] [--json]

Distances between two clouds of 2,000 points in 10 dimensions (mean about 3.5, as between the features of a posterior
network) in float64, one thread. Rows are hard; columns are hard (tau 1) or give way (tau 0.9, which POT knows as
reg_m = (inf, gamma tau / (1 - tau))). Each side gets the loosest tolerance, out of powers of ten, with which its plan
is within 1e-6 of a row's mass of the one that both agree on; where a side never gets there, the row says so and has no
ratio. POT's solver for unbalanced problems scales the kernel itself, which overflows where gamma is small; its solver
in the log domain, safe as ours is, stands beside it where columns are hard and gamma is not small (it takes minutes
elsewhere).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from _rows import Row, Watch, compared, in_turn, main, say

from pippin.bayes.transport.sinkhorn import semibalanced_sinkhorn

EQUAL = 1e-6
"""Largest difference from the agreed plan, in units of a row's mass."""
TOLERANCES = [10.0**-k for k in range(2, 13)]
MOST = 20_000
Solver = Callable[[float], np.ndarray]


def costs(n: int) -> torch.Tensor:
    """Distances between two clouds, the second one moved and stretched."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(n, 10, generator=generator, dtype=torch.float64) for _ in range(2))
    return torch.cdist(0.8 * first, 0.8 * second + 0.1)


def solvers(cost: torch.Tensor, gamma: float, tau: float) -> dict[str, Solver]:
    """Each side as a function of its tolerance."""
    import ot

    n, m = cost.shape
    a, b, c = np.full(n, 1 / n), np.full(m, 1 / m), cost.numpy()
    rho = math.inf if tau == 1 else gamma * tau / (1 - tau)

    def ours(tolerance: float) -> np.ndarray:
        return semibalanced_sinkhorn(cost, gamma, tau, tolerance=tolerance, max_iterations=MOST).plan.numpy()

    def scaled(tolerance: float) -> np.ndarray:
        how = {"reg_m": (math.inf, rho), "stopThr": tolerance, "numItermax": MOST}
        return np.asarray(ot.unbalanced.sinkhorn_unbalanced(a, b, c, gamma, **how))

    found = {"ours": ours, "POT sinkhorn_unbalanced": scaled}
    if (gamma, tau) == (0.5, 1.0):  # at smaller gamma it takes minutes

        def logarithms(tolerance: float) -> np.ndarray:
            return np.asarray(ot.bregman.sinkhorn_log(a, b, c, gamma, stopThr=tolerance, numItermax=MOST))

        found["POT sinkhorn_log"] = logarithms
    return found


def loosest(solve: Solver, agreed: np.ndarray) -> float | None:
    """The loosest tolerance that is enough; None where none is."""
    for tolerance in TOLERANCES:
        if np.abs(solve(tolerance) - agreed).max() * len(agreed) <= EQUAL:
            return tolerance
    return None


def timed(solve: Solver, tolerance: float) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    solve(tolerance)
    return time.perf_counter() - began


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    import warnings

    warnings.simplefilter("ignore")  # POT warns wherever a tolerance that is tried is not met
    torch.set_num_threads(1)
    n = 300 if quick else 2000
    cost, rows = costs(n), []
    for gamma, tau in ((0.5, 1.0), (0.5, 0.9), (0.2, 1.0), (0.1, 0.9), (0.05, 0.9)):
        sides = solvers(cost, gamma, tau)
        agreed = sides["ours"](1e-11)
        enough = {name: loosest(solve, agreed) for name, solve in sides.items()}
        say(f"gamma {gamma:g}, tau {tau:g}: tolerances {enough}")
        if enough["ours"] is None or all(enough[name] is None for name in sides if name != "ours"):
            raise SystemExit(f"gamma {gamma:g}, tau {tau:g}: the sides disagree about the plan; nothing was measured")
        with Watch() as watch:
            ready = {name: tolerance for name, tolerance in enough.items() if tolerance is not None}
            calls = {name: lambda s=sides[name], t=tolerance: timed(s, t) for name, tolerance in ready.items()}
            found = in_turn(calls, 2 if quick else 3, f"gamma {gamma:g}, tau {tau:g}")
        for name in sides:
            if name != "ours":
                what = f"{n} x {n}, gamma {gamma:g}, tau {tau:g}"
                theirs = found.get(name)
                note = watch if theirs else f"{name} never came within {EQUAL:g} of the plan"
                rows.append(compared(what, "s", found["ours"], name, theirs, 1.0, higher_is_better=False, note=note))
    return rows


if __name__ == "__main__":
    main(measure, __doc__)
