r"""Metrics of simulation-based inference: sharpness and calibration of posteriors, and simulator misspecification.

Notable here:
- sharpness (`lpp`) and calibration (`acauc`) must be read together: the prior is calibrated, but not sharp
- under a correct posterior the ranks of true parameters are exactly uniform, which `simulation_based_calibration` tests
- misspecification is tested by a two-sample test between features of real observations and of simulations, with an
  exact permutation p-value for any number of observations
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.batches import refuse_rows
from pippin.bayes.simulation.npe import NPE, Simulator
from pippin.core.checks import OpenFraction, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput, MissingDependency, Misspecified


def lpp(log_probs: Float[Tensor, " n"]) -> float:
    """Log posterior probability: the mean log density of the true parameters, in nats; higher is better.

    Densities are in the units of theta. A density of 0 for any observation gives minus infinity.

    Raises:
        InvalidInput: no values, or NaN or plus infinity among them.

    >>> lpp(torch.tensor([-1.0, -3.0]))
    -2.0
    """
    if not len(log_probs):
        raise InvalidInput("there are no log densities to average")
    refuse_rows(log_probs.isnan() | (log_probs == math.inf), "a log density is NaN or infinite")
    return float(log_probs.double().mean())


def posterior_ranks(samples: Float[Tensor, "samples n k"], theta: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """The fraction of posterior samples below each true parameter.

    Raises:
        InvalidInput: no samples, other shapes, or values that are not finite.
    """
    if not samples.numel() or samples.shape[1:] != theta.shape:
        raise InvalidInput(
            f"samples of shape {list(samples.shape)}, theta of shape {list(theta.shape)}; give [samples, n, k] and "
            "[n, k]"
        )
    if not (samples.isfinite().all() and theta.isfinite().all()):
        raise InvalidInput("samples or parameters are not finite; remove them, or fit the posterior again")
    return (samples < theta).float().mean(0)


def acauc(ranks: Float[Tensor, "n k"]) -> float:
    r"""Area between the calibration curve and the diagonal: 0 calibrated, above 0 overconfident, below underconfident.

    With equal-tailed intervals, the smallest that covers a parameter of rank r has the level $u = 2 |r - 1/2|$, and
    $\int_0^1 (a - 1[u \le a])\, da = u - 1/2$; the mean over observations and parameters is returned. It measures the
    marginal posteriors, not the dependence between parameters.

    Args:
        ranks: posterior mass below each true parameter, 0 to 1: from `posterior_ranks` or `MixturePosterior.ranks`.

    Returns:
        -0.5 to 0.5.

    Raises:
        InvalidInput: no values, or values outside 0 to 1.

    Source: Wehenkel et al. 2024, arXiv:2405.08719, section 4 (ACAUC).

    >>> acauc(torch.tensor([[0.0], [1.0]])), acauc(torch.tensor([[0.5], [0.5]])), acauc(torch.tensor([[0.25], [0.75]]))
    (0.5, -0.5, 0.0)
    """
    if not ranks.numel() or not ((ranks >= 0) & (ranks <= 1)).all():
        raise InvalidInput(f"ranks of shape {list(ranks.shape)} must be between 0 and 1, at least one")
    return float((2 * (ranks.double() - 0.5).abs() - 0.5).mean())


@checked
def c2st(
    first: Float[Tensor, "n k"],
    second: Float[Tensor, "m k"],
    *,
    folds: Annotated[int, Ge(2)] = 5,
    seed: int = 0,
    max_samples: PositiveInt = 2000,
) -> float:
    """Classifier two-sample test: accuracy of a classifier between two samples, 0.5 for equal distributions.

    The classifier is an MLP with two hidden layers of 10 k units on standardized values, with early stopping on a tenth
    of its training data, scored by cross-validation. With few rows small differences are not detected, so compare only
    scores with equal ``max_samples``.

    Args:
        first: one sample.
        second: the other sample.
        folds: number of cross-validation folds.
        seed: seed of the folds, of the classifier and of the choice of rows.
        max_samples: largest number of rows used from each sample; equally many are used from both.

    Raises:
        InvalidInput: samples with different numbers of columns, values that are not finite, or fewer rows than folds.
        MissingDependency: scikit-learn is not installed.

    Source: Lueckmann et al. 2021, arXiv:2101.04653, section 4 and appendix; Lopez-Paz & Oquab 2017, arXiv:1610.06545.
    """
    try:
        from sklearn.model_selection import KFold, cross_val_score
        from sklearn.neural_network import MLPClassifier
    except ImportError as error:
        raise MissingDependency("c2st needs scikit-learn: pip install 'pippin[bayes]'") from error
    count = min(len(first), len(second), max_samples)
    if first.shape[1] != second.shape[1] or count < folds:
        raise InvalidInput(
            f"samples of shapes {list(first.shape)} and {list(second.shape)} in {folds} folds; give equal numbers of "
            "columns, and at least one row for each fold"
        )
    for name, sample in (("first", first), ("second", second)):
        refuse_rows(~sample.isfinite().all(-1), f"the {name} sample is not finite")
    generator = torch.Generator().manual_seed(seed)
    subsets = [sample[torch.randperm(len(sample), generator=generator)[:count]].double() for sample in (first, second)]
    mean, sd = subsets[0].mean(0), subsets[0].std(0).clamp_min(1e-12)
    data = ((torch.cat(subsets) - mean) / sd).numpy()
    labels = torch.arange(2).repeat_interleave(count).numpy()
    width = 10 * first.shape[1]
    classifier = MLPClassifier(
        (width, width), max_iter=300, early_stopping=True, n_iter_no_change=20, random_state=seed
    )
    splits = KFold(folds, shuffle=True, random_state=seed)
    return float(cross_val_score(classifier, data, labels, cv=splits, scoring="accuracy").mean())


@dataclass(frozen=True)
class SBCResult:
    """Result of `simulation_based_calibration`.

    Attributes:
        ranks: ranks of the true parameters among posterior samples, from 0 to 1, [n, k].
        p_values: for each parameter, the p-value of a Kolmogorov-Smirnov test that its ranks are uniform.
        acauc: overconfidence (above 0) or underconfidence (below 0), see `acauc`.
    """

    ranks: Float[Tensor, "n k"]
    p_values: tuple[float, ...]
    acauc: float


def simulation_based_calibration(
    theta: Float[Tensor, "n k"], samples: Float[Tensor, "samples n k"], *, seed: int = 0
) -> SBCResult:
    """Simulation-based calibration: test whether the ranks of true parameters are uniform.

    Args:
        theta: samples of the prior.
        samples: posterior samples for a simulated observation of each theta, such as
            ``npe.sample(99, simulator(theta))``.
        seed: seed of the randomization within discrete ranks, which makes their null distribution exactly uniform.

    Raises:
        InvalidInput: fewer than 20 observations; see also `posterior_ranks`.

    Source: Talts et al. 2018, arXiv:1804.06788, with the test of Kolmogorov and Smirnov.
    """
    ranks = posterior_ranks(samples, theta)
    if len(theta) < 20:
        raise InvalidInput(f"{len(theta)} observations are too few to judge calibration; give 20 or more, best 200")
    n = len(samples)
    u = torch.rand(ranks.shape, generator=torch.Generator().manual_seed(seed))
    uniform_ranks = ((ranks.cpu() * n + u) / (n + 1)).double()
    p_values = tuple(ks_uniform(uniform_ranks[:, index]) for index in range(uniform_ranks.shape[1]))
    return SBCResult(ranks, p_values, acauc(ranks))


def ks_uniform(values: Float[Tensor, " n"]) -> float:
    r"""P-value of the Kolmogorov-Smirnov test that values in 0 to 1 are uniform.

    The asymptotic series $2 \sum_j (-1)^{j-1} e^{-2 j^2 \lambda^2}$ with Stephens' correction
    $\lambda = (\sqrt n + 0.12 + 0.11 / \sqrt n) D$.
    """
    n = len(values)
    ordered = values.double().sort().values
    steps = torch.arange(n, dtype=torch.float64)
    d = float(torch.maximum((steps + 1) / n - ordered, ordered - steps / n).max())
    lambda_ = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * d
    if lambda_ < 0.2:  # the series converges too slowly; the probability is 1 to ten digits
        return 1.0
    terms = (2 * (-1) ** (j - 1) * math.exp(-2 * j * j * lambda_ * lambda_) for j in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))


@dataclass(frozen=True)
class MMDResult:
    """Result of a two-sample test.

    Attributes:
        mmd: maximum mean discrepancy (MMD), the square root of its biased estimate; 0 for equal samples.
        null: mean MMD over permutations, its expected value for equal distributions.
        p_value: fraction of permutations, including the identity, with at least this MMD.
    """

    mmd: float
    null: float
    p_value: float


@checked
def mmd_test(
    first: Float[Tensor, "n l"],
    second: Float[Tensor, "m l"],
    *,
    permutations: Annotated[int, Ge(20)] = 500,
    seed: int = 0,
) -> MMDResult:
    r"""Permutation test of whether two samples come from the same distribution, by the maximum mean discrepancy.

    $\mathrm{MMD}^2 = w^T K w$ with w = 1/n on the first and -1/m on the second sample, and a Gaussian kernel whose
    width is the median distance of the pooled sample. The p-value is exact for any sample size.

    Args:
        first: one sample.
        second: the other sample.
        permutations: number of random permutations.
        seed: seed of the permutations.

    Raises:
        InvalidInput: an empty sample, different numbers of columns, or values that are not finite.

    Source: Gretton et al. 2012, JMLR 13, section 2 and 5 (the biased estimate).
    """
    if not len(first) or not len(second) or first.shape[1] != second.shape[1]:
        raise InvalidInput(
            f"samples of shapes {list(first.shape)} and {list(second.shape)}; give equal numbers of columns, and at "
            "least one row in each"
        )
    for name, sample in (("first", first), ("second", second)):
        refuse_rows(~sample.isfinite().all(-1), f"the {name} sample is not finite")
    n, m = len(first), len(second)
    pooled = torch.cat([first, second]).double().cpu()
    squared = torch.cdist(pooled, pooled).square()
    off_diagonal = squared[~torch.eye(n + m, dtype=torch.bool)]
    kernel = (-squared / (2 * off_diagonal.median().clamp_min(1e-12))).exp()
    generator = torch.Generator().manual_seed(seed)
    weights = torch.cat([torch.full((k,), weight, dtype=torch.float64) for k, weight in ((n, 1 / n), (m, -1 / m))])
    orders = torch.stack([torch.randperm(n + m, generator=generator) for _ in range(permutations)])
    permuted = weights[torch.cat([torch.arange(n + m)[None], orders])]  # (1 + permutations, n + m), the identity first
    mmd_squared = (permuted @ kernel * permuted).sum(-1).clamp_min(0)
    p_value = float((mmd_squared[1:] >= mmd_squared[0] * (1 - 1e-9)).sum() + 1) / (permutations + 1)
    return MMDResult(math.sqrt(mmd_squared[0]), float(mmd_squared[1:].sqrt().mean()), p_value)


@checked
def detect_misspecification(
    npe: NPE,
    x: Float[Tensor, "n ..."],
    *,
    simulator: Simulator | None = None,
    simulations: Annotated[int, Ge(20)] = 500,
    level: OpenFraction = 0.01,
    permutations: Annotated[int, Ge(20)] = 500,
    seed: int = 0,
) -> MMDResult:
    """Test whether the encoder's features of real observations are distributed like those of simulations.

    Args:
        npe: a fitted posterior.
        x: real observations, at least one.
        simulator: None for that of `NPE.fit`, or for its stored simulations.
        simulations: number of simulations to compare with.
        level: p-value below which a warning is given.
        permutations: number of permutations; the p-value is at least 1 / (permutations + 1).
        seed: seed of simulations and permutations.

    Raises:
        InvalidArgument: no simulator, and no stored simulations.
        InvalidInput: observations of another shape, or not finite.
        NotFitted: before `NPE.fit`.

    Warns:
        Misspecified: the p-value is below ``level``; the message has the discrepancy.

    Source: Schmitt et al. 2021, arXiv:2112.08866, for the discrepancy of embeddings.
    """
    generator = torch.Generator().manual_seed(seed)
    simulator = simulator or npe.simulator
    with torch.no_grad():
        real = npe.encode(x)
        if simulator is not None:
            simulated = npe.encode(npe.simulate(simulations, simulator, generator)[1])
        elif npe.stored is not None:
            stored = npe.stored[1]
            simulated = npe.encode(stored[torch.randperm(len(stored), generator=generator)[:simulations]])
        else:
            raise InvalidArgument("there is nothing to simulate with; give a simulator")
    result = mmd_test(real, simulated, permutations=permutations, seed=seed)
    if result.p_value < level:
        warnings.warn(
            f"{len(real)} observations differ from simulations: MMD {result.mmd:.3g}, {result.null:.3g} by chance "
            f"(p = {result.p_value:.3g}); posteriors of this network may be wrong and overconfident; use "
            "RobustPosteriorEstimation",
            Misspecified,
            stacklevel=2,
        )
    return result
