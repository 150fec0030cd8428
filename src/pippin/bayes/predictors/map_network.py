"""The MAP network: a trained network without a posterior, the deterministic baseline of predictive uncertainty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pippin.bayes.batches import call_model, check_mode
from pippin.bayes.likelihood import (
    Classification,
    Likelihood,
    LikelihoodName,
    MultiLabel,
    Regression,
    to_likelihood,
)
from pippin.bayes.prediction import Prediction
from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument

PredictiveLikelihood = Classification | MultiLabel | Regression


class MAPNetwork:
    """A trained network as a predictor: its probabilities, or for a regression its output with observation noise.

    Args:
        model: the network, in evaluation mode.
        likelihood: "classification", "multi_label", "regression", or an object, such as `Regression(sigma_noise=0.3)`.

    Raises:
        InvalidArgument: another likelihood, or a model in training mode.
    """

    @checked
    def __init__(self, model: nn.Module, likelihood: LikelihoodName | Likelihood = "classification") -> None:
        self.model, self.likelihood = model, predictive_likelihood(likelihood)
        check_mode(model)

    def __call__(self, x: Any) -> Prediction:
        """Predict a batch, without gradients."""
        with torch.no_grad():
            return deterministic_prediction(call_model(self.model, x), self.likelihood)


def deterministic_prediction(outputs: Tensor, likelihood: PredictiveLikelihood) -> Prediction:
    """The prediction from a network's outputs (n, outputs), in at least float32, so that probabilities sum to 1.

    Raises:
        InvalidArgument: a classifier with fewer than two outputs.
    """
    outputs = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
    if isinstance(likelihood, Classification):
        if outputs.shape[1] < 2:
            raise InvalidArgument(
                "a classifier needs an output for each of at least two classes, got 1; say likelihood='regression', or "
                "'multi_label' for a single logit"
            )
        return Prediction(outputs, None, outputs.softmax(-1))
    if isinstance(likelihood, MultiLabel):
        return Prediction(outputs, None, outputs.sigmoid())
    return Prediction(outputs, None, None, noise=float(likelihood.sigma_noise) ** 2)


@checked
def predictive_likelihood(likelihood: LikelihoodName | Likelihood) -> PredictiveLikelihood:
    """Resolve a likelihood whose predictions can be averaged.

    Raises:
        InvalidArgument: another likelihood.
    """
    resolved = to_likelihood(likelihood)
    if type(resolved) is Classification or isinstance(resolved, (Regression, MultiLabel)):
        return resolved
    raise InvalidArgument(f"likelihood must be classification, multi_label or regression here, got {resolved.name!r}")
