"""Weights of scored examples: by rank, as weighted retraining has them, and those of search by sampling.

Notable here:
- a rank counts the strictly better scores, so equal scores have equal weight; a sort would give the first of them more
- every rule gives weights of mean 1, so that a loss keeps its size
- large weights are cut into copies of weight 1 and a remainder, which lowers the variance of a weighted loss

Source: Tripp, Daxberger and Hernández-Lobato, arXiv:2006.09191, eq. 3; the sampling rules are cited where they stand.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.errors import InvalidArgument, InvalidInput


def rank_weights(scores: Float[Tensor, " n"], k: float = 1e-3, *, maximize: bool = True) -> Float[Tensor, " n"]:
    r"""$w_i \propto 1 / (k N + r_i)$, with $r_i$ the number of strictly better scores; the mean is 1.

    Args:
        scores: finite.
        k: above 0; infinity weighs all alike, towards 0 all weight is on the best.
        maximize: whether larger is better.

    Raises:
        InvalidArgument: k of 0 or below, or NaN.
        InvalidInput: no scores, or some that are not finite; the first is named.

    >>> rank_weights(torch.tensor([1.0, 3.0, 3.0, 2.0]), k=0.25).round(decimals=2).tolist()
    [0.38..., 1.54..., 1.54..., 0.51...]
    """
    check_k(k)
    check_scores(scores)
    if math.isinf(k):
        return torch.ones_like(scores)
    ordered = scores if maximize else -scores
    rank = len(scores) - torch.searchsorted(ordered.sort().values, ordered, right=True)
    weights = 1 / (k * len(scores) + rank.to(scores.dtype))
    return weights / weights.mean()


def search_weights(
    scores: Float[Tensor, " n"],
    rule: Literal["dbas", "cem-pi", "rwr"],
    *,
    quantile: float = 0.95,
    noise: float = 0.1,
    alpha: float = 1.0,
) -> Float[Tensor, " n"]:
    r"""Weights of sampling-based search, higher scores being better; the mean is 1.

    "dbas" is the probability that a noisy score reaches the quantile q, $\Phi((y - q) / \sigma)$; "cem-pi" is 1 where
    it does without noise and 0 elsewhere; "rwr" is $e^{\alpha (y - \max y)}$.

    Args:
        scores: finite.
        rule: one of the three.
        quantile: in (0, 1).
        noise: $\sigma$, in units of the scores.
        alpha: per unit of the scores.

    Raises:
        InvalidArgument: an unknown rule, or a number out of range.
        InvalidInput: as `rank_weights`.

    Source: Brookes and Listgarten, arXiv:1810.03714 (DbAS, CEM-PI); Peters and Schaal 2007 (RWR).
    """
    if rule not in ("dbas", "cem-pi", "rwr"):
        raise InvalidArgument(f"rule is {rule!r}; choose dbas, cem-pi or rwr")
    if not (0 < quantile < 1 and noise > 0 and alpha > 0):
        raise InvalidArgument(f"quantile {quantile} lies in (0, 1), noise {noise} and alpha {alpha} are above 0")
    check_scores(scores)
    if rule == "rwr":
        weights = (alpha * (scores - scores.max())).exp()
    else:
        reach = scores.quantile(quantile)
        inside = (scores >= reach).to(scores.dtype)
        weights = inside if rule == "cem-pi" else torch.special.ndtr((scores - reach) / noise)
    return weights / weights.mean()


def feedback_weights(scores: Float[Tensor, " n"], initial: int, quantile: float = 0.95) -> Float[Tensor, " n"]:
    """FB-VAE: each new point that reaches the quantile of the first ``initial`` takes the place of the oldest one left.

    Args:
        scores: in the order in which the points came.
        initial: how many were there at the beginning.
        quantile: in (0, 1).

    Returns:
        Weights of mean 1; 0 for what was replaced and for new points that do not reach it.

    Raises:
        InvalidArgument: ``initial`` or ``quantile`` out of range.
        InvalidInput: as `rank_weights`.

    Source: Gupta and Zou, "Feedback GAN", 2019, as arXiv:2006.09191 uses it.
    """
    if not (1 <= initial <= len(scores) and 0 < quantile < 1):
        raise InvalidArgument(f"initial is {initial} of {len(scores)} points, quantile {quantile}")
    check_scores(scores)
    good = scores[initial:] >= scores[:initial].quantile(quantile)
    weights = torch.cat([torch.ones_like(scores[:initial]), good.to(scores.dtype)])
    weights[weights.nonzero()[:, 0][: int(good.sum())]] = 0.0
    return weights / weights.mean()


def replicated(weights: Float[Tensor, " n"]) -> tuple[Int[Tensor, " m"], Float[Tensor, " m"]]:
    """Rows to train on and the factors of their losses, none above 1: floor(w) copies, and one with the remainder.

    Raises:
        InvalidArgument: a weight that is negative or not finite, or all of them 0.

    >>> rows, factors = replicated(torch.tensor([2.5, 0.25, 0.0]))
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


def check_k(k: float) -> None:
    """Refuse a k of 0 or below, or NaN.

    Raises:
        InvalidArgument: it is.
    """
    if not k > 0:
        raise InvalidArgument(f"k is {k}; it must be above 0, infinity for equal weights")


def check_scores(scores: Tensor) -> None:
    """Refuse no scores, or scores that are not finite.

    Raises:
        InvalidInput: they are; the first rows are named.
    """
    if not len(scores):
        raise InvalidInput("there are no scores; give some evaluated examples to begin with")
    wrong = (~scores.isfinite()).nonzero()[:, 0].tolist()
    if wrong:
        raise InvalidInput(f"scores of rows {wrong[:5]} are not finite ({len(wrong)} in all); leave them out")


def check_weights(weights: Tensor) -> None:
    """Refuse weights that nothing can be drawn by.

    Raises:
        InvalidArgument: one is negative or not finite, or all are 0.
    """
    if not weights.isfinite().all() or (weights < 0).any():
        raise InvalidArgument("weights must be finite and 0 or more")
    if not weights.sum() > 0:
        raise InvalidArgument("all weights are 0; no example is left to train on")
