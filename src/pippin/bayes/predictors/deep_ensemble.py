"""The deep ensemble: networks that are trained from different seeds, as a mixture of their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pippin.bayes.likelihood import Likelihood, LikelihoodName
from pippin.bayes.prediction import Prediction
from pippin.bayes.predictors.map_network import MAPNetwork
from pippin.bayes.predictors.predictor import check_weights, mix_predictions
from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument


class DeepEnsemble:
    """A mixture of networks that are trained from different seeds; probabilities are averaged.

    Args:
        models: networks in evaluation mode, with the same outputs in the same order.
        likelihood: see `MAPNetwork`.
        weights: weights of the networks, which sum to 1; None for equal weights.

    Raises:
        InvalidArgument: no models, invalid weights, another likelihood, or a model in training mode.

    Source: Lakshminarayanan, Pritzel, Blundell 2017, arXiv:1612.01474.
    """

    @checked
    def __init__(
        self,
        models: Sequence[nn.Module],
        likelihood: LikelihoodName | Likelihood = "classification",
        weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        if not models:
            raise InvalidArgument("an ensemble needs at least one model, got none")
        self.members = [MAPNetwork(model, likelihood) for model in models]
        self.likelihood = self.members[0].likelihood
        self.weights = check_weights(weights, len(models))

    def __call__(self, x: Any) -> Prediction:
        """Predict a batch; the covariance is that of the outputs between networks.

        Raises:
            InvalidArgument: the networks have different numbers of outputs.
        """
        return mix_predictions([member(x) for member in self.members], self.weights)
