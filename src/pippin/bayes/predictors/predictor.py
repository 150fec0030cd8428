r"""The interface of predictors (Laplace posteriors, ensembles, dropout, MAP networks), and mixtures of predictions.

Notable here:
- a predictor is any callable from inputs to a `Prediction`
- a mixture averages probabilities, not logits, and its covariance includes the variance between members
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.batches import inputs_and_targets
from pippin.bayes.prediction import Prediction
from pippin.core.errors import InvalidArgument, InvalidInput

_SUM_TOLERANCE = 1e-6  # of the sum of weights


@runtime_checkable
class Predictor(Protocol):
    """A callable from a batch of inputs to a `Prediction`."""

    def __call__(self, x: Any) -> Prediction:
        """Predict a batch."""


def predict_with_targets(predictor: Predictor, loader: Iterable[Any]) -> tuple[Prediction, Tensor]:
    """Predict all batches (inputs, targets) of a loader.

    Returns:
        The concatenated predictions, and the concatenated targets.

    Raises:
        InvalidArgument: the predictor does not return a `Prediction`, such as a plain network.
        InvalidInput: the loader is empty, a batch is not a pair, or the numbers of targets and predictions differ.
    """
    predictions, targets = [], []
    for batch in loader:
        x, y = inputs_and_targets(batch)
        prediction = predictor(x)
        if not isinstance(prediction, Prediction):
            raise InvalidArgument(
                f"a predictor returns a Prediction, this one a {type(prediction).__name__}; a network becomes one by "
                "MAPNetwork(model, likelihood)"
            )
        if len(prediction.mean) != len(y):
            raise InvalidInput(f"a batch has {len(y)} targets for {len(prediction.mean)} predictions")
        predictions.append(prediction)
        y = y.detach()
        if prediction.probs is not None and not y.is_floating_point() and y.numel() == len(y):
            y = y.flatten().long()  # classes in a column, or boolean labels
        targets.append(y)
    if not predictions:
        raise InvalidInput("the loader has no batches; an exhausted iterator must be created again, or use a list")
    return concatenated(predictions), torch.cat(targets)


def predict_all(predictor: Predictor, batches: Iterable[Any]) -> Prediction:
    """Predict batches of inputs without targets, and concatenate the predictions.

    Raises:
        InvalidInput: there are no batches.
    """
    predictions = [predictor(x) for x in batches]
    if not predictions:
        raise InvalidInput("there are no inputs to predict")
    return concatenated(predictions)


def concatenated(predictions: Sequence[Prediction]) -> Prediction:
    """Concatenate several predictions of one predictor."""

    def cat(name: str) -> Any:
        parts = [getattr(prediction, name) for prediction in predictions]
        return None if parts[0] is None else torch.cat(parts)

    return replace(predictions[0], mean=cat("mean"), covariance=cat("covariance"), probs=cat("probs"))


def check_weights(weights: Sequence[float] | Tensor | None, count: int) -> Float[Tensor, " members"]:
    """Check the weights of a mixture and convert them to float64; None gives uniform weights.

    Raises:
        InvalidArgument: another number of weights than ``count``, a negative or non-finite one, or a sum other than 1.
    """
    if weights is None:
        return torch.full((count,), 1.0 / count, dtype=torch.float64)
    pi = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    if pi.shape != (count,):
        raise InvalidArgument(f"{count} members need {count} weights, got {pi.tolist()}")
    total = float(pi.sum())
    if not bool((pi >= 0).all()) or not math.isfinite(total) or abs(total - 1) > _SUM_TOLERANCE:
        raise InvalidArgument(f"weights must be 0 or above and add up to 1, got {pi.tolist()} (sum {total:g})")
    return pi / total


def check_compatible(predictions: Sequence[Prediction]) -> None:
    """Check that predictions of the same inputs can be averaged.

    Raises:
        InvalidArgument: only some have probabilities, or they have different numbers of outputs.
    """
    shapes = {tuple(prediction.mean.shape) for prediction in predictions}
    if len(shapes) > 1:
        raise InvalidArgument(f"members must have the same outputs, got the shapes {sorted(shapes)}")
    if len({prediction.probs is None for prediction in predictions}) > 1:
        raise InvalidArgument("some members classify and some do not; give all of them the same likelihood")


def mix_predictions(predictions: Sequence[Prediction], weights: Sequence[float] | Tensor | None = None) -> Prediction:
    r"""The prediction of a mixture: probabilities averaged, moments by the law of total variance.

    $m = \sum_k \pi_k f_k$, $S = \sum_k \pi_k (S_k + (f_k - m)(f_k - m)^\top)$, $p = \sum_k \pi_k p_k$, and the noise
    is $\sum_k \pi_k \sigma_k^2$. A member without a covariance has $S_k = 0$.

    Args:
        predictions: the prediction of each member, for the same inputs.
        weights: weights of the members, which sum to 1; None for equal weights.

    Raises:
        InvalidArgument: no members, invalid weights, or different outputs.

    >>> one, two = (Prediction(torch.tensor([[f]]), torch.tensor([[[0.5]]])) for f in (0.0, 2.0))
    >>> float(mix_predictions([one, two]).covariance)
    1.5
    """
    if not predictions:
        raise InvalidArgument("a mixture needs at least one member, got none")
    check_compatible(predictions)
    weights = check_weights(weights, len(predictions))
    means = torch.stack([member.mean for member in predictions])  # (k, n, outputs)
    pi = weights.to(means)
    mean = torch.einsum("k,knc->nc", pi, means)
    centered = means - mean
    if any(member.covariance is not None and member.covariance.ndim == 2 for member in predictions):
        covariance = torch.einsum("k,ki,kj->ij", pi, centered.flatten(1), centered.flatten(1))  # joint over the batch
    else:
        covariance = torch.einsum("k,kni,knj->nij", pi, centered, centered)
    for weight, member in zip(pi, predictions, strict=True):
        if member.covariance is not None:
            covariance = covariance + weight * member.covariance
    probs = None
    if predictions[0].probs is not None:
        probs = sum(weight * member.probs for weight, member in zip(pi, predictions, strict=True))
    noise = sum(float(weight) * member.noise for weight, member in zip(weights, predictions, strict=True))
    return replace(predictions[0], mean=mean, covariance=covariance, probs=probs, noise=noise)


def mixture_log_likelihood(predictions: Sequence[Prediction], weights: Tensor, y: Tensor) -> Float[Tensor, " n"]:
    r"""Log probability, or log density, of each target under a mixture, in nats.

    Classification: $\log \sum_k \pi_k p_k(y)$. Regression: $\log \sum_k \pi_k N(y; f_k, S_k + \sigma_k^2 I)$, which is
    not the density of a Gaussian with the mixture's moments.

    Args:
        predictions: the prediction of each member, for the same inputs.
        weights: weights of the members.
        y: targets.

    Raises:
        InvalidInput: another number of targets than of predictions, or a regression without any variance.
    """
    n, outputs = predictions[0].mean.shape
    if len(y) != n:
        raise InvalidInput(f"{len(y)} targets for {n} predictions")
    logs = []
    for member in predictions:
        if member.probs is not None:
            probs = member.probs.double().gather(1, y.long().view(n, 1))[:, 0]
            logs.append(probs.clamp(min=1e-300).log())
            continue
        covariance = member.noise * torch.eye(outputs, dtype=torch.float64, device=y.device).expand(n, -1, -1)
        if member.covariance is not None:
            covariance = covariance + member.covariance.double()
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if bool(failed.any()):
            raise InvalidInput("a member's prediction has no variance, so no density; give it a noise above 0")
        residual = (y.double().view(n, outputs) - member.mean.double()).unsqueeze(-1)
        white = torch.linalg.solve_triangular(factor, residual, upper=False)[..., 0]  # whitened, (n, outputs)
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        logs.append(-0.5 * (white.square().sum(-1) + log_det + outputs * math.log(2 * math.pi)))
    return torch.logsumexp(torch.stack(logs) + weights.to(y.device).log()[:, None], 0)  # over members
