r"""What a posterior must beat: the plain network, a deep ensemble and dropout kept on, all with the same call.

Notable here:
- each maps inputs to a `Prediction`, so scores, temperature scaling and reports treat it as they treat a Laplace
- an ensemble is a mixture of networks that are each certain of themselves
- dropout is on inside the call alone, and the passes are drawn from the caller's generator
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pippin.bayes.batches import call, check_mode
from pippin.bayes.likelihood import Classification, Likelihood, MultiLabel, Regression, likelihood as likelihood_of
from pippin.bayes.predictive import Prediction
from pippin.bayes.predictors import check_weights, mix
from pippin.core.errors import InvalidArgument, UnsupportedLayer

Plain = Classification | MultiLabel | Regression
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class PlainNetwork:
    """A trained network as it is: its softmax, or its output with the noise of the observations.

    Args:
        model: in evaluation mode.
        likelihood: "classification", "multi_label", "regression", or an object, such as `Regression(sigma_noise=0.3)`.

    Raises:
        InvalidArgument: another likelihood, or a model in training mode.
    """

    def __init__(self, model: nn.Module, likelihood: str | Likelihood = "classification") -> None:
        self.model, self.likelihood = model, plain_likelihood(likelihood)
        check_mode(model)

    def __call__(self, x: Any) -> Prediction:
        """Predict a batch, without gradients."""
        with torch.no_grad():
            return certain(call(self.model, x), self.likelihood)


class DeepEnsemble:
    """Networks trained from different seeds, averaged.

    Args:
        models: in evaluation mode, with the same outputs in the same order.
        likelihood: as for `PlainNetwork`.
        weights: of the networks, adding up to 1; None for equal ones.

    Raises:
        InvalidArgument: no models, weights that are none, another likelihood, a model in training mode.

    Source: Lakshminarayanan, Pritzel, Blundell 2017, arXiv:1612.01474.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        likelihood: str | Likelihood = "classification",
        weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        if not models:
            raise InvalidArgument("an ensemble needs at least one model, got none")
        self.members = [PlainNetwork(model, likelihood) for model in models]
        self.likelihood = self.members[0].likelihood
        self.weights = check_weights(weights, len(models))

    def __call__(self, x: Any) -> Prediction:
        """Predict a batch; the covariance is how far the networks lie apart.

        Raises:
            InvalidArgument: the networks have different numbers of outputs.
        """
        return mix([member(x) for member in self.members], self.weights)


class MCDropout:
    """A network trained with dropout, averaged over passes with dropout on.

    Args:
        model: in evaluation mode, with at least one dropout layer of a rate above 0; its other layers stay in that
            mode.
        likelihood: as for `PlainNetwork`.
        samples: passes.
        seed: of the masks where a call brings no generator; the same masks for every call.

    Raises:
        UnsupportedLayer: the model has no dropout layer, or all have rate 0.
        InvalidArgument: fewer than one sample, another likelihood, a model in training mode.

    Source: Gal and Ghahramani 2016, arXiv:1506.02142.
    """

    def __init__(
        self, model: nn.Module, likelihood: str | Likelihood = "classification", *, samples: int = 50, seed: int = 0
    ) -> None:
        if samples < 1:
            raise InvalidArgument(f"samples is the number of passes, at least 1, got {samples}")
        self.likelihood = plain_likelihood(likelihood)
        check_mode(model)
        self.layers = [layer for layer in model.modules() if isinstance(layer, _DROPOUT) and layer.p > 0]
        if not self.layers:
            raise UnsupportedLayer(
                f"{type(model).__name__} has no dropout layer with a rate above 0, so every pass would be the same; "
                "train it with nn.Dropout, or use Laplace or DeepEnsemble"
            )
        self.model, self.samples, self.seed = model, samples, seed

    def __call__(self, x: Any, generator: torch.Generator | None = None) -> Prediction:
        """Predict a batch.

        Args:
            x: inputs.
            generator: of the masks; None takes those of ``seed``.
        """
        with torch.no_grad(), self._dropping(generator):
            passes = [certain(call(self.model, x), self.likelihood) for _ in range(self.samples)]
        return mix(passes)

    @contextmanager
    def _dropping(self, generator: torch.Generator | None) -> Iterator[None]:
        """Dropout on, and torch's own generator, which dropout reads, seeded; both as before at the end."""
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


def certain(outputs: Tensor, likelihood: Plain) -> Prediction:
    """The prediction of a network that is certain of its outputs; halves become float32, to add up to 1."""
    outputs = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
    if isinstance(likelihood, Classification):
        if outputs.shape[1] < 2:
            raise InvalidArgument("a classifier needs an output for each of at least two classes, got 1")
        return Prediction(outputs, None, outputs.softmax(-1))
    if isinstance(likelihood, MultiLabel):
        return Prediction(outputs, None, outputs.sigmoid())
    return Prediction(outputs, None, None, noise=float(likelihood.sigma_noise) ** 2)


def plain_likelihood(likelihood: str | Likelihood) -> Plain:
    """The likelihood of a word; only those that a plain average is made for.

    Raises:
        InvalidArgument: another one.
    """
    found = likelihood_of(likelihood)
    if type(found) is Classification or isinstance(found, (Regression, MultiLabel)):
        return found
    raise InvalidArgument(f"likelihood must be classification, multi_label or regression here, got {found.name!r}")
