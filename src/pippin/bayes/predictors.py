r"""What predicts with an uncertainty: one call for a Laplace posterior, an ensemble, dropout or a plain network.

Notable here:
- a predictor is any callable from inputs to a `Prediction`; what is built on one works on all
- a mixture averages probabilities, never logits, and its covariance holds the spread of the members, too
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.batches import split
from pippin.bayes.predictive import Prediction
from pippin.core.errors import InvalidArgument, InvalidInput

_SUM = 1e-6  # how far weights may be from adding up to 1


@runtime_checkable
class Predictor(Protocol):
    """Inputs in, a `Prediction` for each of them out."""

    def __call__(self, x: Any) -> Prediction:
        """Predict a batch."""


def gather(predictor: Predictor, loader: Iterable[Any]) -> tuple[Prediction, Tensor]:
    """The predictions for all batches of a loader as one, and the targets beside them.

    Raises:
        InvalidArgument: the predictor is none, a plain network say.
        InvalidInput: the loader is empty, a batch is no pair, or targets and predictions differ in number.
    """
    predictions, targets = [], []
    for batch in loader:
        x, y = split(batch)
        prediction = predictor(x)
        if not isinstance(prediction, Prediction):
            raise InvalidArgument(
                f"a predictor returns a Prediction, this one a {type(prediction).__name__}; a network becomes one by "
                "PlainNetwork(model, likelihood)"
            )
        if len(prediction.mean) != len(y):
            raise InvalidInput(f"a batch has {len(y)} targets for {len(prediction.mean)} predictions")
        predictions.append(prediction)
        y = y.detach()
        if prediction.probs is not None and not y.is_floating_point() and y.numel() == len(y):
            y = y.flatten().long()  # classes in a column, or yes and no as booleans
        targets.append(y)
    if not predictions:
        raise InvalidInput("the loader has no batches; an iterator that was used up must be made anew, or use a list")
    return concatenated(predictions), torch.cat(targets)


def predict_all(predictor: Predictor, batches: Iterable[Any]) -> Prediction:
    """The predictions for batches of inputs alone, as one.

    Raises:
        InvalidInput: there are none.
    """
    predictions = [predictor(x) for x in batches]
    if not predictions:
        raise InvalidInput("there are no inputs to predict")
    return concatenated(predictions)


def concatenated(predictions: Sequence[Prediction]) -> Prediction:
    """Several predictions of one predictor, one after the other."""

    def joined(name: str) -> Any:
        parts = [getattr(one, name) for one in predictions]
        return None if parts[0] is None else torch.cat(parts)

    return replace(predictions[0], mean=joined("mean"), covariance=joined("covariance"), probs=joined("probs"))


def check_weights(weights: Sequence[float] | Tensor | None, count: int) -> Float[Tensor, " members"]:
    """Weights of a mixture in float64; uniform where there are none.

    Raises:
        InvalidArgument: another number of them, one that is negative or not finite, or a sum other than 1.
    """
    if weights is None:
        return torch.full((count,), 1.0 / count, dtype=torch.float64)
    given = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    if given.shape != (count,):
        raise InvalidArgument(f"{count} members need {count} weights, got {given.tolist()}")
    total = float(given.sum())
    if not bool((given >= 0).all()) or not math.isfinite(total) or abs(total - 1) > _SUM:
        raise InvalidArgument(f"weights must be 0 or above and add up to 1, got {given.tolist()} (sum {total:g})")
    return given / total


def check_alike(predictions: Sequence[Prediction]) -> None:
    """Whether predictions of the same inputs can be averaged.

    Raises:
        InvalidArgument: some classify and some do not, or they have different numbers of outputs.
    """
    shapes = {tuple(one.mean.shape) for one in predictions}
    if len(shapes) > 1:
        raise InvalidArgument(f"members must have the same outputs, got the shapes {sorted(shapes)}")
    if len({one.probs is None for one in predictions}) > 1:
        raise InvalidArgument("some members classify and some do not; give all of them the same likelihood")


def mix(predictions: Sequence[Prediction], weights: Sequence[float] | Tensor | None = None) -> Prediction:
    r"""The prediction of a mixture: probabilities averaged, moments by the law of total variance.

    $m = \sum_k \pi_k f_k$, $S = \sum_k \pi_k (S_k + (f_k - m)(f_k - m)^\top)$, $p = \sum_k \pi_k p_k$, and the noise
    is $\sum_k \pi_k \sigma_k^2$. A member without a covariance counts as certain of its own outputs.

    Args:
        predictions: one of each member, for the same inputs.
        weights: of the members, adding up to 1; None for equal ones.

    Raises:
        InvalidArgument: no members, weights that are none, outputs that do not match.

    >>> one, two = (Prediction(torch.tensor([[f]]), torch.tensor([[[0.5]]])) for f in (0.0, 2.0))
    >>> float(mix([one, two]).covariance)
    1.5
    """
    if not predictions:
        raise InvalidArgument("a mixture needs at least one member, got none")
    check_alike(predictions)
    shares = check_weights(weights, len(predictions))
    means = torch.stack([one.mean for one in predictions])
    pi = shares.to(means)
    mean = torch.einsum("k,knc->nc", pi, means)
    apart = means - mean
    if any(one.covariance is not None and one.covariance.ndim == 2 for one in predictions):  # joint over the batch
        covariance = torch.einsum("k,ki,kj->ij", pi, apart.flatten(1), apart.flatten(1))
    else:
        covariance = torch.einsum("k,kni,knj->nij", pi, apart, apart)
    for share, one in zip(pi, predictions, strict=True):
        if one.covariance is not None:
            covariance = covariance + share * one.covariance
    probs = None
    if predictions[0].probs is not None:
        probs = sum(share * one.probs for share, one in zip(pi, predictions, strict=True))
    noise = sum(float(share) * one.noise for share, one in zip(shares, predictions, strict=True))
    return replace(predictions[0], mean=mean, covariance=covariance, probs=probs, noise=noise)


def log_likelihood(predictions: Sequence[Prediction], weights: Tensor, y: Tensor) -> Float[Tensor, " n"]:
    r"""Log-probability, or log-density, of targets under a mixture, one for each row.

    Classification: $\log \sum_k \pi_k p_k(y)$. Regression: $\log \sum_k \pi_k N(y; f_k, S_k + \sigma_k^2 I)$, which is
    not the density of one normal with the mixture's moments.

    Raises:
        InvalidInput: another number of targets than of rows, or a regression without any variance.
    """
    n, outputs = predictions[0].mean.shape
    if len(y) != n:
        raise InvalidInput(f"{len(y)} targets for {n} predictions")
    logs = []
    for one in predictions:
        if one.probs is not None:
            chances = one.probs.double().gather(1, y.long().view(n, 1))[:, 0]
            logs.append(chances.clamp(min=1e-300).log())
            continue
        covariance = one.noise * torch.eye(outputs, dtype=torch.float64, device=y.device).expand(n, -1, -1)
        if one.covariance is not None:
            covariance = covariance + one.covariance.double()
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if bool(failed.any()):
            raise InvalidInput("a member's prediction has no variance, so no density; give it a noise above 0")
        residual = (y.double().view(n, outputs) - one.mean.double()).unsqueeze(-1)
        white = torch.linalg.solve_triangular(factor, residual, upper=False)[..., 0]
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        logs.append(-0.5 * (white.square().sum(-1) + log_det + outputs * math.log(2 * math.pi)))
    return torch.logsumexp(torch.stack(logs) + weights.to(y.device).log()[:, None], 0)
