"""The fitter of scaling laws: known laws recovered, intervals that hold the truth, and a real grid of small models.

Notable here:
- the known law has the published coefficients for early fusion, so the exponents of its optimum are the published ones
- how often the intervals hold the truth is counted over fits of newly drawn noise
- the real grid is of byte decoders trained on source code, each with a schedule of its own length; the largest size is
  foretold by a law that never saw it
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, NamedTuple

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from pippin.train.fitting import Array

SEEDS = {"smoke": (0,), "laptop": (0,), "gpu": (0, 1, 2)}


class Size(NamedTuple):
    """Repeats of the known law and their resamples; widths, layers and steps of the grid, and bytes that measure it."""

    repeats: int
    resamples: int
    widths: tuple[int, ...]
    layers: int
    steps: tuple[int, ...]
    held_out: int


SIZES = {
    "smoke": Size(1, 10, (8, 16, 24, 32), 1, (2, 4, 8), 2048),
    "laptop": Size(100, 100, (16, 32, 48, 64, 96), 2, (96, 192, 384, 768), 65_536),
    "gpu": Size(200, 200, (32, 64, 128, 256, 512), 4, (400, 800, 1600, 3200, 6400), 262_144),
}
TRUTH = {"E": 1.904, "A": math.exp(5.5), "B": math.exp(6.2), "alpha": 0.301, "beta": 0.335}
NOISE = 0.002
ROWS, LENGTH = 8, 128
RATE = 6e-3
"""For width 64; it falls with the root of the width."""


@claim(
    id="native-multimodal-scaling-fit",
    source="arXiv:2504.07951",
    paper="L = E + A / N^alpha + B / D^beta fits runs with R2 0.981 and an error of 0.86 %, and larger ones, held out, "
    "with 0.968 and 0.55 %; the best N grows with C^0.526 for early fusion",
    setting="the published law on 6 sizes and 12 budgets, exact and 100 times with 0.2 % noise (100 resamples each); "
    "a grid of 5 byte decoders (6 K to 221 K parameters in 2 layers) and 4 budgets (98 K to 786 K bytes of Python's "
    "standard library), held-out nats per byte; the fitter alone, no pictures",
    accept="exact: every coefficient within 1e-4 of the truth, and a by search along budgets within 1e-3 of the closed "
    "form; covered: the 95 % intervals of E, alpha, beta and a hold the truth in 88 to 100 of 100 repeats each, and "
    "in 90 % or more on average; fits: one law of the whole grid has an error of at most 3 %; foretold: fitted without "
    "the largest size, it foretells that size within 3 % on average",
)
def run(scale: Scale) -> Evidence:
    """The known law, then the grid."""
    evidence, size = Evidence(), SIZES[scale.name]
    exact = _known(evidence)
    covered = _coverage(evidence, size)
    for seed in SEEDS[scale.name]:
        _grid(evidence, size, seed)
    return evidence.accept(
        exact=exact,
        covered=min(covered) >= 0.88 and sum(covered) / len(covered) >= 0.90,
        fits=evidence.mean("error of the law of the grid") <= 3.0,
        foretold=evidence.mean("error for the largest size, not fitted") <= 3.0,
    )


def _runs() -> tuple[Array, Array, Array]:
    """Sizes, budgets and exact losses of the known law."""
    import numpy as np

    N, D = (x.ravel() for x in np.meshgrid(np.geomspace(2.75e8, 3.35e9, 6), np.geomspace(2.5e9, 6e11, 12)))
    return N, D, TRUTH["E"] + TRUTH["A"] * N ** -TRUTH["alpha"] + TRUTH["B"] * D ** -TRUTH["beta"]


def _known(evidence: Evidence) -> bool:
    """Recover the law from exact losses, and its exponent from a search."""
    import numpy as np

    from pippin.train.laws import ScalingLaw

    law = ScalingLaw().fit(*_runs(), bootstrap=0)
    off = [abs(law.coefficients[name] / truth - 1) for name, truth in TRUTH.items()]
    evidence.add("largest relative error of a coefficient, exact losses", max(off))
    searched = law.growth(np.geomspace(1e20, 1e22, 5), flops=lambda N, D: 6 * N * D).a
    evidence.add("a, by search", searched)
    evidence.add("a, closed form", law.exponents.a)
    return max(off) <= 1e-4 and abs(searched - TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"])) <= 1e-3


def _coverage(evidence: Evidence, size: Size) -> list[float]:
    """How often intervals of fits to noisy losses hold the truth, for each coefficient."""
    import numpy as np

    from pippin.core.errors import Extrapolation
    from pippin.train.laws import ScalingLaw

    N, D, loss = _runs()
    wanted = {"E": TRUTH["E"], "alpha": TRUTH["alpha"], "beta": TRUTH["beta"]}
    wanted["a"] = TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"])
    hits, found = dict.fromkeys(wanted, 0), []
    for repeat in range(size.repeats):
        noise = np.random.default_rng((7, repeat)).standard_normal(len(loss))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Extrapolation)
            law = ScalingLaw().fit(N, D, loss * np.exp(NOISE * noise), bootstrap=size.resamples, seed=repeat)
        intervals = {**law.intervals, "a": law.exponents_interval}
        for name, truth in wanted.items():
            low, high = intervals[name]
            hits[name] += low <= truth <= high
        found.append(law.exponents.a)
    for name, count in hits.items():
        evidence.add(f"intervals of {name} that hold the truth", 100 * count / size.repeats, unit="%")
    evidence.add("a, standard deviation over the repeats", float(np.std(found)))
    return [count / size.repeats for count in hits.values()]


def _grid(evidence: Evidence, size: Size, seed: int) -> None:
    """Train the grid, fit all of it, and foretell its largest size."""
    import numpy as np

    from pippin.core.errors import Extrapolation
    from pippin.train.laws import ScalingLaw

    N, D, loss = [], [], []
    for width in size.widths:
        for steps in size.steps:
            parameters, nats = _train(width, steps, size, seed)
            N.append(float(parameters))
            D.append(float(steps * ROWS * LENGTH))
            loss.append(nats)
            evidence.add(f"held-out loss, {parameters} parameters, {steps} steps", nats, seed=seed, unit="nats/byte")
    sizes, budgets, losses = np.array(N), np.array(D), np.array(loss)
    small = sizes < sizes.max()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Extrapolation)
        law = ScalingLaw().fit(sizes, budgets, losses, bootstrap=size.resamples, seed=seed)
        part = ScalingLaw().fit(sizes[small], budgets[small], losses[small], bootstrap=0)
    evidence.add("error of the law of the grid", 100 * law.mae, seed=seed, unit="%")
    evidence.add("R2 of the law of the grid", law.r2, seed=seed)
    held = part.score(sizes[~small], budgets[~small], losses[~small])
    evidence.add("error for the largest size, not fitted", 100 * held.mae, seed=seed, unit="%")
    for name, value in law.coefficients.items():
        evidence.add(f"{name} of the grid", value, seed=seed)
    alpha, beta = law.coefficients["alpha"], law.coefficients["beta"]
    if alpha > 0 and beta > 0:
        evidence.add("a of the grid", law.exponents.a, seed=seed)
        for end, bound in zip(("low", "high"), law.exponents_interval, strict=True):
            evidence.add(f"a of the grid, {end} end of its interval", bound, seed=seed)


def _train(width: int, steps: int, size: Size, seed: int) -> tuple[int, float]:
    """A decoder of bytes from nothing: parameters of its layers, and its held-out loss."""
    from pippin.claims import _byte_text as small

    module = small.byte_decoder(small.byte_config(layers=size.layers, width=width), seed=seed)
    parameters = sum(value.numel() for name, value in module.named_parameters() if name.startswith("layers."))
    rate = RATE * math.sqrt(64 / width)
    small.train_bytes(module, steps=steps, seed=seed, rows=ROWS, length=LENGTH, lr=rate)
    return parameters, small.held_out_nats(module, limit=size.held_out)
