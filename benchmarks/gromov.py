"""Gromov-Wasserstein against POT: entropic plans at equal plan, then the exact problem at its best value.

    python benchmarks/gromov.py [--quick] [--json]

Squared distances of 64 to 256 points in 6 dimensions against their images in 8, in float64, one thread. "Entropic" rows
solve the same problem (absolute regularization, product start, as many outer steps) with each side at the loosest
tolerance of Sinkhorn with which its plan is within 1e-4 of a row's mass of the plan that both agree on. "Permutation"
rows compare the polished plan with POT's conditional gradient; the note gives the cost of both plans, lower is better.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from _rows import Row, Watch, compared, in_turn, main, say

from pippin.bayes.transport.gromov import QUICK, GromovSolver, cost_factors, gromov_wasserstein

EQUAL = 1e-4
"""Largest difference from the agreed plan, in units of a row's mass."""
STEPS = 15
"""Outer steps of the entropic solvers."""
POT_TOLERANCES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
OUR_SCALINGS = (20, 50, 100, 200, 500, 1000, 5000)


def points(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and their images under a map that bends, each side's distances about 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    y = torch.tanh(x @ torch.randn(6, 8, generator=generator, dtype=torch.float64))
    y = y[torch.randperm(n, generator=generator)]
    return x / torch.cdist(x, x).square().mean().sqrt(), y / torch.cdist(y, y).square().mean().sqrt()


def timed(solve: Callable[[], object]) -> float:
    """Milliseconds of this process for a call, which do not count what else the machine does."""
    began = time.process_time()
    solve()
    return 1e3 * (time.process_time() - began)


def entropic(n: int, repeats: int) -> Row:
    """One row at equal plan."""
    import ot

    a, b = (cost_factors(side) for side in points(n))
    one, other, uniform = a.matrix.numpy(), b.matrix.numpy(), np.full(n, 1 / n)
    eps = 0.05

    def ours(scalings: int) -> np.ndarray:
        solver = GromovSolver(
            eps0=eps,
            relative=False,
            max_iterations=STEPS, max_sinkhorn_iterations=scalings, init="product", value="plain"
        )  # fmt: skip
        return gromov_wasserstein(a, b, solver).plan.numpy()

    def theirs(tolerance: float) -> np.ndarray:
        # POT's loss is not halved, so its regularization is twice ours
        how = {"max_iter": STEPS, "tol": 0.0, "numItermax": 20_000, "stopThr": tolerance, "warn": False}
        return np.asarray(
            ot.gromov.entropic_gromov_wasserstein(one, other, uniform, uniform, epsilon=2 * eps, **how)
        )  # fmt: skip

    agreed = theirs(1e-11)

    def enough(plan: np.ndarray) -> bool:
        return bool(np.abs(plan - agreed).max() * n <= EQUAL)

    scalings = next((count for count in OUR_SCALINGS if enough(ours(count))), None)
    tolerance = next((value for value in POT_TOLERANCES if enough(theirs(value))), None)
    say(f"{n} points: {scalings} scalings, tolerance {tolerance}")
    if scalings is None or tolerance is None:
        raise SystemExit(f"{n} points: the sides disagree about the plan; nothing was measured")
    calls = {"ours": lambda: timed(lambda: ours(scalings)), "POT": lambda: timed(lambda: theirs(tolerance))}
    with Watch() as watch:
        found = in_turn(calls, repeats, f"entropic, {n}")
    return compared(f"entropic, {n} points", "ms", found["ours"], "POT entropic_gromov_wasserstein", found["POT"], 1.0,
                    higher_is_better=False, note=watch)  # fmt: skip


def permutation(n: int, repeats: int) -> Row:
    """One row at the value that each side finds."""
    import ot

    a, b = (cost_factors(side) for side in points(n))
    one, other, uniform = a.matrix.numpy(), b.matrix.numpy(), np.full(n, 1 / n)
    ours = gromov_wasserstein(a, b, QUICK).value
    theirs = float(ot.gromov.gromov_wasserstein2(one, other, uniform, uniform)) / 2
    calls = {
        "ours": lambda: timed(lambda: gromov_wasserstein(a, b, QUICK)),
        "POT": lambda: timed(lambda: ot.gromov.gromov_wasserstein2(one, other, uniform, uniform)),
    }
    with Watch() as watch:
        found = in_turn(calls, repeats, f"permutation, {n}")
    note = f"cost {ours:.4g}, POT's {theirs:.4g}; {watch}"
    return compared(f"permutation, {n} points", "ms", found["ours"], "POT gromov_wasserstein2", found["POT"], 1.0,
                    higher_is_better=False, note=note)  # fmt: skip


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    torch.set_num_threads(1)
    sizes, repeats = ((64,), 2) if quick else ((64, 128, 256), 5)
    return [row(n, repeats) for row in (entropic, permutation) for n in sizes]


if __name__ == "__main__":
    main(measure, __doc__)
