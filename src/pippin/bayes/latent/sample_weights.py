"""Weights of scored examples: by rank, for weighted retraining, and those of DbAS, CEM-PI and RWR.

Notable here:
- the rank is the number of strictly better scores, so equal scores have equal weight
- all weights have mean 1, so that the scale of a weighted loss does not change
- large weights are split into copies of weight 1 and a remainder, which lowers the variance of a weighted loss
- the rules of the sampling-based methods serve as ``weighting`` of `WeightedRetraining`, with `PriorSampling` as search

Source: Tripp, Daxberger and Hernández-Lobato, arXiv:2006.09191, eq. 3; each other rule cites its own.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Gt
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.checks import OpenFraction, PositiveFloat, checked
from pippin.core.errors import InvalidArgument, InvalidInput


@checked
def rank_weights(
    scores: Float[Tensor, " n"], k: Annotated[float, Gt(0)] = 1e-3, *, maximize: bool = True
) -> Float[Tensor, " n"]:
    r"""Rank-based weights $w_i \propto 1 / (k N + r_i)$ of mean 1, with $r_i$ the number of strictly better scores.

    Args:
        scores: finite scores of N examples.
        k: above 0; infinity gives uniform weights, and towards 0 all weight goes to the best.
        maximize: whether larger scores are better.

    Raises:
        InvalidInput: no scores, or scores that are not finite; the message names the first rows.

    >>> rank_weights(torch.tensor([1.0, 3.0, 3.0, 2.0]), k=0.25).round(decimals=2).tolist()
    [0.38..., 1.54..., 1.54..., 0.51...]
    """
    check_scores(scores)
    if math.isinf(k):
        return torch.ones_like(scores)
    ordered = scores if maximize else -scores
    rank = len(scores) - torch.searchsorted(ordered.sort().values, ordered, right=True)  # strictly better scores
    weights = 1 / (k * len(scores) + rank.to(scores.dtype))
    return weights / weights.mean()


@checked
def dbas_weights(
    scores: Float[Tensor, " n"], *, quantile: OpenFraction = 0.95, noise: PositiveFloat = 0.1
) -> Float[Tensor, " n"]:
    r"""DbAS weights of mean 1: the probability $\Phi((y - q) / \sigma)$ that a noisy score reaches the quantile q.

    Args:
        scores: finite scores; larger is better.
        quantile: level of the quantile q of the scores, between 0 and 1.
        noise: standard deviation $\sigma$ of the noise, in units of the scores.

    Raises:
        InvalidInput: see `rank_weights`.

    Source: Brookes and Listgarten, arXiv:1810.03714.
    """
    check_scores(scores)
    weights: Tensor = torch.special.ndtr((scores - scores.quantile(quantile)) / noise)
    return weights / weights.mean()


@checked
def cem_pi_weights(scores: Float[Tensor, " n"], *, quantile: OpenFraction = 0.95) -> Float[Tensor, " n"]:
    """CEM-PI weights of mean 1: equal for the scores that reach the quantile, 0 for all others.

    Args:
        scores: finite scores; larger is better.
        quantile: level of the quantile of the scores, between 0 and 1.

    Raises:
        InvalidInput: see `rank_weights`.

    Source: Brookes and Listgarten, arXiv:1810.03714.
    """
    check_scores(scores)
    weights = (scores >= scores.quantile(quantile)).to(scores.dtype)
    return weights / weights.mean()


@checked
def rwr_weights(scores: Float[Tensor, " n"], *, alpha: PositiveFloat = 1.0) -> Float[Tensor, " n"]:
    r"""Weights of reward-weighted regression (RWR), of mean 1: $w \propto e^{\alpha y}$.

    Args:
        scores: finite scores; larger is better.
        alpha: inverse temperature, per unit of the scores.

    Raises:
        InvalidInput: see `rank_weights`.

    Source: Peters and Schaal, ICML 2007.
    """
    check_scores(scores)
    weights = (alpha * (scores - scores.max())).exp()
    return weights / weights.mean()


def replicate(weights: Float[Tensor, " n"]) -> tuple[Int[Tensor, " m"], Float[Tensor, " m"]]:
    """Split weights into copies with loss factors of at most 1: floor(w) copies of factor 1, and one of the remainder.

    Returns:
        The row of each copy, and its factor.

    Raises:
        InvalidArgument: a weight that is negative or not finite, or all of them 0.

    >>> rows, factors = replicate(torch.tensor([2.5, 0.25, 0.0]))
    >>> rows.tolist(), factors.tolist()
    ([0, 0, 0, 1], [1.0, 1.0, 0.5, 0.25])
    """
    check_weights(weights)
    whole = weights.floor()
    rest = weights - whole
    counts = whole.long() + (rest > 0)
    rows = torch.arange(len(weights)).repeat_interleave(counts)
    factors = torch.ones(len(rows), dtype=weights.dtype)
    last = counts.cumsum(0)[rest > 0] - 1
    factors[last] = rest[rest > 0]
    return rows, factors


def check_scores(scores: Tensor) -> None:
    """Check that there are scores and that all of them are finite.

    Raises:
        InvalidInput: there are none, or some are not finite; the message names the first rows.
    """
    if not len(scores):
        raise InvalidInput("there are no scores; give some evaluated examples to begin with")
    wrong = (~scores.isfinite()).nonzero()[:, 0].tolist()
    if wrong:
        raise InvalidInput(f"scores of rows {wrong[:5]} are not finite ({len(wrong)} in all); leave them out")


def check_weights(weights: Tensor) -> None:
    """Check that weights are usable for sampling.

    Raises:
        InvalidArgument: a weight is negative or not finite, or all are 0.
    """
    if not weights.isfinite().all() or (weights < 0).any():
        raise InvalidArgument("weights must be finite and 0 or more")
    if not weights.sum() > 0:
        raise InvalidArgument("all weights are 0; no example is left to train on")
