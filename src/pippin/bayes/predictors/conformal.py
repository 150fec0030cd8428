r"""Split conformal prediction: intervals for a regression that cover new targets as often as they promise.

Notable here:
- the guarantee is for finite samples, any distribution and any model: if calibration and new examples are exchangeable,
  an interval of level $\ell$ has the target with probability $\lceil (n + 1) \ell \rceil / (n + 1)$ or more
- normalized scores give wide intervals where the model's own variance is large; absolute scores give one width
- it is an average over inputs, not a promise for each

Source: Lei et al. 2018, arXiv:1604.04173 (split conformal, normalized scores).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from pippin.bayes.prediction import Prediction, check_level
from pippin.bayes.predictors.predictor import Predictor, predict_with_targets
from pippin.core.checks import checked
from pippin.core.errors import InvalidInput, NotFitted


class ConformalPredictor:
    """Intervals around a regression's predictions, calibrated on examples that nothing else was fitted to.

    Args:
        predictor: maps inputs to a `Prediction`.
        score: "normalized" divides residuals by the predicted standard deviation; "absolute" takes them as they are,
            for predictors without a variance.
    """

    @checked
    def __init__(self, predictor: Predictor, *, score: Literal["normalized", "absolute"] = "normalized") -> None:
        self.predictor, self.score = predictor, score
        self._scores: Float[Tensor, "n outputs"] | None = None  # in ascending order

    def fit(self, calibration: Iterable[Any]) -> ConformalPredictor:
        """Compute the scores of calibration batches (inputs, targets).

        Returns:
            The predictor itself.

        Raises:
            InvalidInput: no batches, a classification, values that are not finite, or normalized scores of predictions
                without variance.
        """
        prediction, targets = predict_with_targets(self.predictor, calibration)
        if prediction.probs is not None:
            raise InvalidInput("these are probabilities of classes; conformal intervals are for regressions")
        residuals = (targets.view_as(prediction.mean).to(prediction.mean) - prediction.mean).abs()
        scores = residuals / self._width(prediction)
        if not bool(scores.isfinite().all()):
            raise InvalidInput(
                "a calibration target or prediction is not finite, or has no variance (score='absolute')"
            )
        self._scores = scores.sort(0).values
        return self

    def interval(self, x: Any, level: float = 0.95) -> tuple[Float[Tensor, "n outputs"], Float[Tensor, "n outputs"]]:
        """The interval of each output for a batch of inputs.

        Args:
            x: inputs, as the predictor takes them.
            level: the promised coverage, above 0 and below 1.

        Returns:
            The lower and the upper ends.

        Raises:
            NotFitted: before `fit`.
            InvalidArgument: a level outside (0, 1).
            InvalidInput: too few calibration examples for the level: no finite interval would keep the promise.
        """
        check_level(level)
        if self._scores is None:
            raise NotFitted("conformal intervals need calibration; call fit(calibration) with examples that are new")
        n = len(self._scores)
        rank = math.ceil((n + 1) * level - 1e-9)  # 0.9 * 20 is a little above 18 in floating point
        if rank > n:
            needed = math.ceil(level / (1 - level) - 1e-9)
            raise InvalidInput(f"an interval of level {level:g} needs {needed} calibration examples, got {n}")
        prediction = self.predictor(x)
        half = self._scores[rank - 1] * self._width(prediction)
        return prediction.mean - half, prediction.mean + half

    def _width(self, prediction: Prediction) -> Tensor | float:
        """What a score is multiplied by."""
        return 1.0 if self.score == "absolute" else prediction.variance.sqrt()
