r"""Temperature scaling: calibration of a predictor by one parameter, fitted on held-out examples.

Notable here:
- the loss is convex in 1/T, so bisection on its slope finds the temperature to machine precision
- it acts on log probabilities, so it calibrates a MAP network, an ensemble or a Laplace posterior in the same way
- for regression the counterpart is a common factor on all variances, in closed form
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.bayes.prediction import Prediction
from pippin.bayes.predictors.predictor import Predictor, predict_with_targets
from pippin.core.errors import InferenceAtRisk, InvalidInput, NotFitted

BOUNDS = (0.01, 100.0)
"""The smallest and the largest temperature that a fit returns."""
_BISECTIONS = 60  # on log T, whose interval of 9.2 is then below float64's precision


def fit_temperature(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    r"""The temperature T for which softmax(logits / T) gives the labels the highest probability.

    The mean negative log-likelihood is convex in $\beta = 1/T$ with the slope
    $\tfrac1n \sum_i (\mathbb{E}_{p_\beta}[z_i] - z_{i, y_i})$, whose sign tells on which side the minimum lies.

    Args:
        logits: logits or log probabilities, up to a constant for each row.
        labels: class index of each row.

    Returns:
        T within `BOUNDS`; above 1 for an overconfident model. If the label is always (never) the most probable class,
        the lower (upper) bound is returned.

    Raises:
        InvalidInput: no rows, one class only, values that are not finite, labels of another length or out of range.

    Source: Guo et al. 2017, arXiv:1706.04599, section 4.2.

    >>> logits = torch.tensor([[2.0, 0.0]] * 10)
    >>> labels = torch.tensor([0] * 7 + [1] * 3)  # right 7 times out of 10, with confidence 0.88
    >>> round(fit_temperature(logits, labels), 4) == round(2 / math.log(7 / 3), 4)
    True
    """
    check_scores(logits, labels)
    z = logits.detach().double()
    z = z - z.amax(1, keepdim=True)  # so that no product with 1/T overflows
    label_logits = z.gather(1, labels[:, None].long())[:, 0]
    low, high = (math.log(bound) for bound in BOUNDS)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        probs = (z / math.exp(middle)).softmax(1)
        slope = float(((probs * z).sum(1) - label_logits).mean())
        low, high = (middle, high) if slope > 0 else (low, middle)  # a positive slope in 1/T: T must increase
    return math.exp((low + high) / 2)


def fit_variance_scale(
    mean: Float[Tensor, "n outputs"], variance: Float[Tensor, "n outputs"], y: Float[Tensor, "n outputs"]
) -> float:
    r"""The factor c for which Gaussians of variance c v give the targets the highest likelihood.

    It is the mean squared standardized residual, $c = \tfrac1{nC} \sum (y - m)^2 / v$.

    Args:
        mean: predicted means.
        variance: predicted variances of the observations including noise, above 0.
        y: observed targets.

    Raises:
        InvalidInput: no rows, shapes that differ, values that are not finite, a variance that is not above 0, or
            residuals that are all zero.

    >>> fit_variance_scale(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([[2.0], [-2.0]]))
    4.0
    """
    if not mean.numel() or mean.shape != variance.shape or mean.shape != y.shape:
        shapes = ", ".join(str(tuple(part.shape)) for part in (mean, variance, y))
        raise InvalidInput(f"mean, variance and targets must have one shape and at least one row, got {shapes}")
    if not (mean.isfinite().all() and variance.isfinite().all() and y.isfinite().all()):
        raise InvalidInput("means, variances and targets must be finite; remove the rows that hold NaN or infinity")
    if not (variance > 0).all():
        raise InvalidInput(f"a variance is {float(variance.min()):g}; variances must be above 0")
    scale = float(((y.double() - mean.double()).square() / variance.double()).mean())
    if scale == 0:
        raise InvalidInput("every residual is 0, so no variance fits; give targets that training did not see")
    return scale


class TemperatureScaling:
    """A predictor that is calibrated by one parameter, fitted on held-out examples.

    Classification divides log-probabilities by a temperature and normalizes them, which does not change the order of
    the classes. Regression multiplies the variance of the observations by a factor.

    Args:
        predictor: maps inputs to a `Prediction`, such as a fitted `Laplace`, `LaplaceMixture`, `MAPNetwork` or
            `DeepEnsemble`.

    Attributes:
        value: the temperature, or for regression the factor of the variance; None before `fit`.

    Source: Guo et al. 2017, arXiv:1706.04599; for regression Levi et al. 2019, arXiv:1905.11659.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.value: float | None = None

    def fit(self, validation: Iterable[Any]) -> TemperatureScaling:
        """Fit the temperature or the variance factor on held-out batches (inputs, targets).

        Where every label is the most probable class (or none is), no temperature is best: any would be made more
        extreme by the fit, up to predictions of no doubt at all. It stays 1 then.

        Returns:
            The predictor itself.

        Warns:
            InferenceAtRisk: every label was predicted right, or none; the temperature is 1.

        Raises:
            InvalidInput: no batches, values that are not finite, labels out of range, one class only, or a regression
                whose predictions have no variance.
        """
        prediction, targets = predict_with_targets(self.predictor, validation)
        self.value = fit_correction(prediction, targets)
        if prediction.probs is not None and not BOUNDS[0] * 1.01 < self.value < BOUNDS[1] / 1.01:
            warnings.warn(
                "every held-out label was predicted right (or none), so no temperature is best and it stays 1; if the "
                "model was trained on this data, calibrate on examples that are new to it",
                InferenceAtRisk,
                stacklevel=2,
            )
            self.value = 1.0
        return self

    def __call__(self, x: Any) -> Prediction:
        """The calibrated prediction; for classification, ``mean`` and ``covariance`` are those of the predictor.

        Raises:
            NotFitted: before `fit`.
        """
        if self.value is None:
            raise NotFitted("the temperature is not fitted; call fit(validation) with examples held out of training")
        return apply_correction(self.predictor(x), self.value)


def fit_correction(prediction: Prediction, targets: Tensor) -> float:
    """The temperature, or for regression the variance factor, that fits predictions to targets best."""
    if prediction.probs is not None:
        _check_classes(prediction.probs)
        return fit_temperature(log_probs(prediction.probs), targets)
    return fit_variance_scale(prediction.mean, prediction.variance, targets.view_as(prediction.mean))


def apply_correction(prediction: Prediction, value: float) -> Prediction:
    """Apply a temperature, or for regression a variance factor, to a prediction."""
    if prediction.probs is not None:
        return replace(prediction, probs=(log_probs(prediction.probs) / value).softmax(-1))
    covariance = None if prediction.covariance is None else value * prediction.covariance
    return replace(prediction, covariance=covariance, noise=value * prediction.noise)


def log_probs(probs: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
    """Finite log probabilities: probabilities are clamped to the smallest normal floating-point number."""
    return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()


def _check_classes(probs: Tensor) -> None:
    """Refuse probabilities of independent labels, which do not add up to 1."""
    if not bool(((probs.sum(-1) - 1).abs() < 1e-3).all()):
        raise InvalidInput(
            "a temperature is for classes, whose probabilities add up to 1; these are independent labels"
        )


def check_scores(logits: Tensor, labels: Tensor) -> None:
    """Check scores and labels before a temperature is fitted.

    Raises:
        InvalidInput: see `fit_temperature`.
    """
    if logits.ndim != 2 or not len(logits) or labels.shape != logits.shape[:1]:
        raise InvalidInput(
            f"a temperature needs scores (n, classes) and n labels, got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if logits.shape[1] < 2:
        raise InvalidInput("scores of one class hold no uncertainty; give the model an output for each of two classes")
    if not bool(logits.isfinite().all()):
        raise InvalidInput(f"scores of row {int((~logits.isfinite()).any(1).nonzero()[0])} are not finite")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise InvalidInput(f"labels are indices of classes, whole numbers, got {labels.dtype}")
    if int(labels.min()) < 0 or int(labels.max()) >= logits.shape[1]:
        raise InvalidInput(
            f"labels from {int(labels.min())} to {int(labels.max())} for {logits.shape[1]} classes; count them from 0"
        )
    if int(labels.min()) == int(labels.max()):
        raise InvalidInput(f"every label is {int(labels[0])}; a temperature needs examples of at least two classes")
