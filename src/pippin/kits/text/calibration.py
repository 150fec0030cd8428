"""Calibration of a classifier's probabilities.

Notable here:
- contextual calibration needs no labeled data: the model's probabilities for texts without content are its bias
- temperature and biases are fitted on labeled examples by Newton's method on a convex loss, in a few steps

Sources: Zhao et al., "Calibrate before use", ICML 2021, arXiv:2102.09690 (content-free inputs); Guo et al., "On
calibration of modern neural networks", ICML 2017, arXiv:1706.04599 (temperature, expected calibration error); Platt,
"Probabilistic outputs for support vector machines", 1999.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Float, Int

from pippin.core.checks import NonNegativeFloat, PositiveFloat, checked
from pippin.core.errors import CorruptedFile, InvalidArgument

Matrix = Float[np.ndarray, "texts labels"]

MAX_ITERATIONS = 100


@checked
@dataclass(frozen=True)
class LabelCalibration:
    """From log-probabilities of labels to probabilities: softmax((scores - offset) / temperature + bias).

    Args:
        labels: in the order of the other fields.
        offset: log-probability of each label for texts without content; zeros for none.
        temperature: above 1 makes the probabilities less confident; greater than 0.
        bias: added to each label's score.

    >>> plain = LabelCalibration(("no", "yes"))
    >>> plain.probabilities(np.log(np.array([[0.1, 0.3]]))).round(3).tolist()
    [[0.25, 0.75]]
    """

    labels: tuple[str, ...]
    offset: tuple[float, ...] = ()
    temperature: PositiveFloat = 1.0
    bias: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.labels)
        for name in ("offset", "bias"):
            values = tuple(float(value) for value in getattr(self, name)) or (0.0,) * count
            if len(values) != count or not all(map(math.isfinite, values)):
                raise InvalidArgument(f"{name} must be {count} finite numbers, one for each label, got {values}")
            object.__setattr__(self, name, values)
        object.__setattr__(self, "temperature", float(self.temperature))

    def probabilities(self, scores: Matrix) -> Matrix:
        """Calibrated probabilities; each row adds up to 1."""
        logits = (scores - np.array(self.offset)) / self.temperature + np.array(self.bias)
        chances: Matrix = np.exp(logits - _logsumexp(logits))
        return chances

    @checked
    def fit(
        self, scores: Matrix, targets: Int[np.ndarray, " texts"], *, bias: bool = True, ridge: NonNegativeFloat = 1.0
    ) -> LabelCalibration:
        """This calibration with the temperature, and the biases, of maximum likelihood.

        Minimizes the mean negative log-likelihood plus ``ridge`` / (2 · texts) · (|bias|² + (1/temperature - 1)²),
        which is convex in 1/temperature and the biases, by Newton's method.

        Args:
            scores: raw log-probabilities of the labels for each text.
            targets: index of the right label of each text.
            bias: fit a bias for each label, too; without it the ranking of the labels does not change.
            ridge: regularization for few examples, 0 or above; equivalent to that many examples for "no change".

        Raises:
            InvalidArgument: no examples, scores that are not finite, or an unknown label.
        """
        count = len(self.labels)
        if scores.ndim != 2 or scores.shape[1] != count or len(scores) != len(targets) or not len(scores):
            raise InvalidArgument(f"calibration needs scores of {count} labels and a target for each text")
        if not np.isfinite(scores).all() or targets.min() < 0 or targets.max() >= count:
            raise InvalidArgument("scores must be finite, and targets indices of labels")
        centered = scores - np.array(self.offset)
        centered = centered - centered.mean(1, keepdims=True)
        parameters = _newton(centered, np.eye(count)[targets], bias, max(ridge, 1e-6))
        return LabelCalibration(self.labels, self.offset, 1.0 / parameters[0], tuple(parameters[1:]))

    def to_json(self) -> str:
        """The calibration as JSON text."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> LabelCalibration:
        """Read what `to_json` wrote.

        Raises:
            CorruptedFile: the text is not a calibration.
        """
        try:
            fields = json.loads(text)
            return cls(tuple(fields["labels"]), tuple(fields["offset"]), fields["temperature"], tuple(fields["bias"]))
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptedFile(f"not a calibration: {error}") from error


def _newton(centered: Matrix, wanted: Matrix, bias: bool, ridge: float) -> Float[np.ndarray, " parameters"]:
    """1/temperature and biases at the minimum of the penalized loss, by damped Newton steps."""
    texts, count = centered.shape
    start = np.zeros(count + 1)
    start[0] = 1.0
    free = np.ones(count + 1, bool) if bias else np.arange(count + 1) == 0
    # the derivative of every logit by every parameter: the score for 1/temperature, 1 for its own bias
    slopes = np.concatenate([centered[:, :, None], np.broadcast_to(np.eye(count), (texts, count, count))], 2)
    slopes = slopes[:, :, free]

    def loss(parameters: Float[np.ndarray, " parameters"]) -> float:
        logits = parameters[0] * centered + parameters[1:]
        likelihood = float(((logits - _logsumexp(logits)) * wanted).sum())
        return float((0.5 * ridge * ((parameters - start) ** 2).sum() - likelihood) / texts)

    parameters = start.copy()
    for _ in range(MAX_ITERATIONS):
        logits = parameters[0] * centered + parameters[1:]
        chances = np.exp(logits - _logsumexp(logits))
        gradient = np.einsum("tl,tlp->p", chances - wanted, slopes) + ridge * (parameters - start)[free]
        weighted = chances[:, :, None] * slopes
        mean = weighted.sum(1)
        hessian = np.einsum("tlp,tlq->pq", weighted, slopes) - mean.T @ mean + ridge * np.eye(free.sum())
        step = np.zeros(count + 1)
        step[free] = np.linalg.solve(hessian, gradient)
        size, before = 1.0, loss(parameters)
        while size > 1e-6 and (parameters[0] - size * step[0] <= 0 or loss(parameters - size * step) > before):
            size /= 2
        parameters = parameters - size * step if parameters[0] - size * step[0] > 0 else parameters
        if np.abs(size * step).max() < 1e-10 or size <= 1e-6:
            break
    return parameters


def _logsumexp(logits: Matrix) -> Float[np.ndarray, "texts 1"]:
    top = logits.max(1, keepdims=True)
    total: Matrix = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
    return total
