r"""Baselines for posteriors: the MAP network, a deep ensemble, and Monte Carlo dropout.

Notable here:
- each maps inputs to a `Prediction`, so that scores, temperature scaling and reports work as for a Laplace posterior
- an ensemble is a mixture of deterministic networks
- dropout is active only during the call, with masks from the caller's generator
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from pippin.bayes.predictors.predictor import check_weights, mix_predictions
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, UnsupportedLayer

Plain = Classification | MultiLabel | Regression
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class MAPNetwork:
    """A trained network without a posterior: its probabilities, or for a regression its output with observation noise.

    Args:
        model: in evaluation mode.
        likelihood: "classification", "multi_label", "regression", or an object, such as `Regression(sigma_noise=0.3)`.

    Raises:
        InvalidArgument: another likelihood, or a model in training mode.
    """

    @checked
    def __init__(self, model: nn.Module, likelihood: LikelihoodName | Likelihood = "classification") -> None:
        self.model, self.likelihood = model, plain_likelihood(likelihood)
        check_mode(model)

    def __call__(self, x: Any) -> Prediction:
        """Predict a batch, without gradients."""
        with torch.no_grad():
            return deterministic_prediction(call_model(self.model, x), self.likelihood)


class DeepEnsemble:
    """Networks trained from different seeds, averaged.

    Args:
        models: in evaluation mode, with the same outputs in the same order.
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


class MCDropout:
    """A network trained with dropout, averaged over forward passes with dropout on.

    Args:
        model: in evaluation mode, with at least one dropout layer of a rate above 0; the other layers stay in
            evaluation mode.
        likelihood: see `MAPNetwork`.
        num_samples: number of forward passes.
        seed: seed of the masks of calls without a generator; every such call has the same masks.

    Raises:
        UnsupportedLayer: the model has no dropout layer, or all have rate 0.
        InvalidArgument: another likelihood, or a model in training mode.

    Source: Gal and Ghahramani 2016, arXiv:1506.02142.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodName | Likelihood = "classification",
        *,
        num_samples: PositiveInt = 50,
        seed: int = 0,
    ) -> None:
        self.likelihood = plain_likelihood(likelihood)
        check_mode(model)
        self.layers = [layer for layer in model.modules() if isinstance(layer, _DROPOUT) and layer.p > 0]
        if not self.layers:
            raise UnsupportedLayer(
                f"{type(model).__name__} has no dropout layer with a rate above 0, so every pass would be the same; "
                "train it with nn.Dropout, or use Laplace or DeepEnsemble"
            )
        self.model, self.samples, self.seed = model, num_samples, seed

    def __call__(self, x: Any, generator: torch.Generator | None = None) -> Prediction:
        """Predict a batch.

        Args:
            x: inputs of the model.
            generator: source of randomness for the masks; None uses ``seed``.
        """
        with torch.no_grad(), self._dropping(generator):
            passes = [deterministic_prediction(call_model(self.model, x), self.likelihood) for _ in range(self.samples)]
        return mix_predictions(passes)

    @contextmanager
    def _dropping(self, generator: torch.Generator | None) -> Iterator[None]:
        """A context with dropout on and torch's global generator seeded; both are restored on exit."""
        seed = self.seed
        if generator is not None:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        try:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                for layer in self.layers:
                    layer.train()
                yield
        finally:
            for layer in self.layers:
                layer.eval()


def deterministic_prediction(outputs: Tensor, likelihood: Plain) -> Prediction:
    """The prediction of a deterministic network, in float32 at least, so that probabilities sum to 1."""
    outputs = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
    if isinstance(likelihood, Classification):
        if outputs.shape[1] < 2:
            raise InvalidArgument("a classifier needs an output for each of at least two classes, got 1")
        return Prediction(outputs, None, outputs.softmax(-1))
    if isinstance(likelihood, MultiLabel):
        return Prediction(outputs, None, outputs.sigmoid())
    return Prediction(outputs, None, None, noise=float(likelihood.sigma_noise) ** 2)


@checked
def plain_likelihood(likelihood: LikelihoodName | Likelihood) -> Plain:
    """`to_likelihood`, restricted to the likelihoods whose predictions can be averaged.

    Raises:
        InvalidArgument: another likelihood.
    """
    found = to_likelihood(likelihood)
    if type(found) is Classification or isinstance(found, (Regression, MultiLabel)):
        return found
    raise InvalidArgument(f"likelihood must be classification, multi_label or regression here, got {found.name!r}")
