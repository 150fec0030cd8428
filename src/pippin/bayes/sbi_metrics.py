r"""Scores of simulation-based inference: is a posterior sharp, is it calibrated, and does the simulator fit reality?

Notable here:
- sharpness (`lpp`) and calibration (`acauc`) belong together: the prior is calibrated, a point is sharp
- rank-based calibration with the exact null: under a correct posterior ranks are uniform, whatever the model
- misspecification is a two-sample test between what the network reads off reality and off simulations, with an exact
  permutation p-value, so it holds for one observation and for thousands
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.npe import NPE, Simulator
from pippin.bayes.priors import refuse_rows
from pippin.core.errors import InvalidArgument, InvalidInput, MissingDependency, Misspecified


def lpp(log_probs: Float[Tensor, " n"]) -> float:
    """Mean log density of the true parameters, in nats and in the units of theta; higher is better.

    A density of 0 anywhere makes it minus infinity: the posterior excluded the truth.

    Raises:
        InvalidInput: no values, or NaN or plus infinity among them.

    >>> lpp(torch.tensor([-1.0, -3.0]))
    -2.0
    """
    if not len(log_probs):
        raise InvalidInput("there are no log densities to average")
    refuse_rows(log_probs.isnan() | (log_probs == math.inf), "a log density is NaN or infinite")
    return float(log_probs.double().mean())


def ranks(samples: Float[Tensor, "draws n k"], theta: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Share of the posterior draws below each true parameter.

    Raises:
        InvalidInput: no draws, other shapes, or values that are not finite.
    """
    if not samples.numel() or samples.shape[1:] != theta.shape:
        raise InvalidInput(
            f"draws of shape {list(samples.shape)}, theta of shape {list(theta.shape)}; give [draws, n, k] and [n, k]"
        )
    if not (samples.isfinite().all() and theta.isfinite().all()):
        raise InvalidInput("draws or parameters are not finite; a posterior that diverged cannot be ranked")
    return (samples < theta).float().mean(0)


def acauc(ranks: Float[Tensor, "n k"]) -> float:
    r"""Area between the calibration curve and the diagonal: 0 calibrated, above over-confident, below under-confident.

    With equal-tailed intervals, the smallest that covers a parameter of rank r has the level $u = 2 |r - 1/2|$, and
    $\int_0^1 (a - 1[u \le a])\, da = u - 1/2$; the mean over observations and parameters is returned. It sees each
    parameter by itself, not how they depend on each other.

    Args:
        ranks: posterior mass below each true parameter, 0 to 1: from `ranks` or `MixturePosterior.ranks`.

    Returns:
        -0.5 to 0.5.

    Raises:
        InvalidInput: no values, or values outside of 0 to 1.

    Source: Wehenkel et al. 2024, arXiv:2405.08719, section 4 (ACAUC).

    >>> acauc(torch.tensor([[0.0], [1.0]])), acauc(torch.tensor([[0.5], [0.5]])), acauc(torch.tensor([[0.25], [0.75]]))
    (0.5, -0.5, 0.0)
    """
    if not ranks.numel() or not ((ranks >= 0) & (ranks <= 1)).all():
        raise InvalidInput(f"ranks of shape {list(ranks.shape)} must be shares between 0 and 1, at least one")
    return float((2 * (ranks.double() - 0.5).abs() - 0.5).mean())


def c2st(
    first: Float[Tensor, "n k"], second: Float[Tensor, "m k"], *, folds: int = 5, seed: int = 0, most: int = 2000
) -> float:
    """Accuracy of a classifier that tells two samples apart: 0.5 where it cannot, 1 where they have nothing in common.

    A multi-layer perceptron of two layers of 10 k units on standardised values, stopped early on a tenth of what it
    learns from, scored by cross-validation. Few rows hide small differences: compare scores of equal ``most`` only.

    Args:
        first: one sample.
        second: the other.
        folds: of the cross-validation.
        seed: of the folds, of the classifier and of what is left out.
        most: rows of each that are used, the same number of both.

    Raises:
        InvalidInput: samples of different widths, values that are not finite, fewer rows than folds.
        InvalidArgument: fewer than 2 folds.
        MissingDependency: scikit-learn is not installed.

    Source: Lueckmann et al. 2021, arXiv:2101.04653, section 4 and appendix; Lopez-Paz & Oquab 2017, arXiv:1610.06545.
    """
    try:
        from sklearn.model_selection import KFold, cross_val_score
        from sklearn.neural_network import MLPClassifier
    except ImportError as error:
        raise MissingDependency("c2st needs scikit-learn: pip install 'pippin[bayes]'") from error
    if folds < 2:
        raise InvalidArgument(f"{folds} folds; cross-validation needs 2 or more")
    count = min(len(first), len(second), most)
    if first.shape[1] != second.shape[1] or count < folds:
        raise InvalidInput(f"samples of shapes {list(first.shape)} and {list(second.shape)} in {folds} folds")
    for name, sample in (("first", first), ("second", second)):
        refuse_rows(~sample.isfinite().all(-1), f"the {name} sample is not finite")
    generator = torch.Generator().manual_seed(seed)
    rows = [sample[torch.randperm(len(sample), generator=generator)[:count]].double() for sample in (first, second)]
    mean, sd = rows[0].mean(0), rows[0].std(0).clamp_min(1e-12)
    data = ((torch.cat(rows) - mean) / sd).numpy()
    labels = torch.arange(2).repeat_interleave(count).numpy()
    width = 10 * first.shape[1]
    network = MLPClassifier((width, width), max_iter=300, early_stopping=True, n_iter_no_change=20, random_state=seed)
    split = KFold(folds, shuffle=True, random_state=seed)
    return float(cross_val_score(network, data, labels, cv=split, scoring="accuracy").mean())


@dataclass(frozen=True)
class SBC:
    """Result of `simulation_based_calibration`.

    Attributes:
        ranks: of the true parameters among posterior draws, 0 to 1 [n, k].
        p_values: probability of ranks at least so far from uniform under a correct posterior, for each parameter.
        acauc: over- (above 0) or under-confidence (below 0).
    """

    ranks: Float[Tensor, "n k"]
    p_values: tuple[float, ...]
    acauc: float


def simulation_based_calibration(
    theta: Float[Tensor, "n k"], samples: Float[Tensor, "draws n k"], *, seed: int = 0
) -> SBC:
    """Whether posteriors of simulated observations have the coverage they claim.

    Args:
        theta: draws of the prior.
        samples: posterior draws for a simulated observation of each, such as ``npe.sample(99, simulator(theta))``.
        seed: of where within its step a rank falls, which makes its null distribution exactly uniform.

    Raises:
        InvalidInput: as `ranks`, or fewer than 20 observations.

    Source: Talts et al. 2018, arXiv:1804.06788; the test is Kolmogorov and Smirnov's.
    """
    found = ranks(samples, theta)
    if len(theta) < 20:
        raise InvalidInput(f"{len(theta)} observations are too few to judge calibration; give 20 or more, best 200")
    draws = len(samples)
    within = torch.rand(found.shape, generator=torch.Generator().manual_seed(seed))
    smooth = ((found.cpu() * draws + within) / (draws + 1)).double()
    return SBC(found, tuple(ks_uniform(smooth[:, index]) for index in range(smooth.shape[1])), acauc(found))


def ks_uniform(values: Float[Tensor, " n"]) -> float:
    r"""P-value of the Kolmogorov-Smirnov test that values in 0 to 1 are uniform.

    The asymptotic series $2 \sum_j (-1)^{j-1} e^{-2 j^2 \lambda^2}$ with Stephens' correction
    $\lambda = (\sqrt n + 0.12 + 0.11 / \sqrt n) D$.
    """
    n = len(values)
    ordered = values.double().sort().values
    steps = torch.arange(n, dtype=torch.float64)
    gap = float(torch.maximum((steps + 1) / n - ordered, ordered - steps / n).max())
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * gap
    if scaled < 0.2:  # the series alternates without end; the probability is 1 to ten digits
        return 1.0
    terms = (2 * (-1) ** (j - 1) * math.exp(-2 * j * j * scaled * scaled) for j in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))


@dataclass(frozen=True)
class Misfit:
    """Result of a two-sample test.

    Attributes:
        mmd: maximum mean discrepancy, the root of its squared estimate; 0 for equal samples.
        null: its mean under permutations: what equal distributions show by chance.
        p_value: share of permutations, the given one among them, that are at least as far apart.
    """

    mmd: float
    null: float
    p_value: float


def mmd_test(
    first: Float[Tensor, "n l"], second: Float[Tensor, "m l"], *, permutations: int = 500, seed: int = 0
) -> Misfit:
    r"""Whether two samples may come from one distribution.

    $\mathrm{MMD}^2 = w^T K w$ with w = 1/n on the one and -1/m on the other sample, and a Gaussian kernel whose width
    is the median distance of the pooled sample. The p-value of a permutation test is exact at any size.

    Raises:
        InvalidArgument: fewer than 20 permutations.
        InvalidInput: an empty sample, other widths, or values that are not finite.

    Source: Gretton et al. 2012, JMLR 13, section 2 and 5 (the biased estimate).
    """
    if permutations < 20:
        raise InvalidArgument(f"{permutations} permutations cannot tell a p-value; give 20 or more")
    if not len(first) or not len(second) or first.shape[1] != second.shape[1]:
        raise InvalidInput(f"samples of shapes {list(first.shape)} and {list(second.shape)}; same width, no empty one")
    for name, sample in (("first", first), ("second", second)):
        refuse_rows(~sample.isfinite().all(-1), f"the {name} sample is not finite")
    n, m = len(first), len(second)
    pooled = torch.cat([first, second]).double().cpu()
    squared = torch.cdist(pooled, pooled).square()
    apart = squared[~torch.eye(n + m, dtype=torch.bool)]
    kernel = (-squared / (2 * apart.median().clamp_min(1e-12))).exp()
    generator = torch.Generator().manual_seed(seed)
    weights = torch.cat([torch.full((k,), share, dtype=torch.float64) for k, share in ((n, 1 / n), (m, -1 / m))])
    orders = torch.stack([torch.randperm(n + m, generator=generator) for _ in range(permutations)])
    shuffled = weights[torch.cat([torch.arange(n + m)[None], orders])]
    found = (shuffled @ kernel * shuffled).sum(-1).clamp_min(0)
    p_value = float((found[1:] >= found[0] * (1 - 1e-9)).sum() + 1) / (permutations + 1)
    return Misfit(math.sqrt(found[0]), float(found[1:].sqrt().mean()), p_value)


def misspecification(
    npe: NPE,
    x: Float[Tensor, "n ..."],
    *,
    simulator: Simulator | None = None,
    simulations: int = 500,
    level: float = 0.01,
    permutations: int = 500,
    seed: int = 0,
) -> Misfit:
    """Whether real observations look, to the encoder, like what the simulator makes.

    Args:
        npe: fitted.
        x: real observations; even one will do.
        simulator: None takes the one that `NPE.fit` was given, or its stored simulations.
        simulations: how many to compare with.
        level: below this p-value a warning is given.
        permutations: of the test; the p-value is at least 1 / (permutations + 1).
        seed: of simulations and permutations.

    Raises:
        InvalidArgument: there is nothing to simulate with, or numbers out of range.
        InvalidInput: observations of another shape, or not finite.
        NotFitted: before `NPE.fit`.

    Warns:
        Misspecified: the p-value is below ``level``; the message says how far apart they are.

    Source: Schmitt et al. 2021, arXiv:2112.08866, for the discrepancy of embeddings.
    """
    if not 0 < level < 1 or simulations < 20:
        raise InvalidArgument(f"level {level} must lie between 0 and 1, simulations ({simulations}) be at least 20")
    generator = torch.Generator().manual_seed(seed)
    simulator = simulator or npe.simulator
    with torch.no_grad():
        real = npe.encode(x)
        if simulator is not None:
            made = npe.encode(npe.simulate(simulations, simulator, generator)[1])
        elif npe.stored is not None:
            stored = npe.stored[1]
            made = npe.encode(stored[torch.randperm(len(stored), generator=generator)[:simulations]])
        else:
            raise InvalidArgument("there is nothing to simulate with; give a simulator")
    found = mmd_test(real, made, permutations=permutations, seed=seed)
    if found.p_value < level:
        warnings.warn(
            f"{len(real)} observations differ from simulations: {found.mmd:.3g} apart, {found.null:.3g} by chance "
            f"(p = {found.p_value:.3g}); posteriors of this network may be wrong and over-confident, "
            "RobustPosteriorEstimation is made for this",
            Misspecified,
            stacklevel=2,
        )
    return found
