"""Monte Carlo dropout: the average of forward passes with dropout on.

Notable here:
- dropout is active only during the call, with masks from the caller's generator; torch's global generator is restored
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pippin.bayes.batches import call_model, check_mode
from pippin.bayes.likelihood import Likelihood, LikelihoodName
from pippin.bayes.prediction import Prediction
from pippin.bayes.predictors.map_network import deterministic_prediction, predictive_likelihood
from pippin.bayes.predictors.predictor import mix_predictions
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import UnsupportedLayer

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class MCDropout:
    """A network trained with dropout, averaged over forward passes with dropout on.

    Args:
        model: the network, in evaluation mode, with at least one dropout layer of a rate above 0; all other layers
            stay in evaluation mode.
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
        self.likelihood = predictive_likelihood(likelihood)
        check_mode(model)
        self.layers = [layer for layer in model.modules() if isinstance(layer, _DROPOUT) and layer.p > 0]
        if not self.layers:
            raise UnsupportedLayer(
                f"{type(model).__name__} has no dropout layer with a rate above 0, so every pass would be the same; "
                "train it with nn.Dropout, or use Laplace or DeepEnsemble"
            )
        self.model, self.num_samples, self.seed = model, num_samples, seed

    def __call__(self, x: Any, generator: torch.Generator | None = None) -> Prediction:
        """Predict a batch.

        Args:
            x: inputs of the model.
            generator: source of randomness for the masks; None uses ``seed``.
        """
        with torch.no_grad(), self._dropout_enabled(generator):
            passes = [
                deterministic_prediction(call_model(self.model, x), self.likelihood) for _ in range(self.num_samples)
            ]
        return mix_predictions(passes)

    @contextmanager
    def _dropout_enabled(self, generator: torch.Generator | None) -> Iterator[None]:
        """Turn dropout on and seed torch's global generator; both are restored on exit."""
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
