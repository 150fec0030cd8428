r"""Mixtures of Laplace approximations: a deep ensemble with a Gaussian around each member's mode.

Notable here:
- probabilities are averaged after the link, and moments follow the law of total variance
- samples, log-densities and mutual information come from the same list of components
- a mixture of one component is bit-identical to it; with zero covariances it is a deep ensemble

Source: Eschenhagen, Daxberger, Hennig, Kristiadi 2021, arXiv:2111.03577 (uniform weights; here any).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.bayes.batches import check_data, inputs_and_targets
from pippin.bayes.laplace.io import LaplaceConfig, describe, restore
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.prediction import Prediction
from pippin.bayes.predictors.predictor import (
    check_compatible,
    check_weights,
    concatenated,
    mix_predictions,
    mixture_log_likelihood,
)
from pippin.bayes.predictors.temperature_scaling import apply_correction, fit_correction
from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, NotFitted
from pippin.core.formats import checkpoint
from pippin.metrics import entropy

_MAX_ITERATIONS = 200  # of expectation maximization, which stops earlier when the weights no longer change


@dataclass(frozen=True)
class LaplaceMixtureConfig:
    """The config of a saved mixture.

    Attributes:
        components: config of each component.
        weights: weight of each component.
        temperature: temperature of the mixture.
    """

    components: tuple[LaplaceConfig, ...]
    weights: tuple[float, ...]
    temperature: PositiveFloat


class LaplaceMixture:
    r"""Several fitted posteriors as one: $p(\theta | D) \approx \sum_k \pi_k N(\theta_k, \Sigma_k)$.

    Args:
        components: fitted `Laplace` approximations of networks with the same outputs.
        weights: $\pi_k$, 0 or above, which sum to 1; None for equal weights.

    Attributes:
        components: the components.
        weights: the weights as a float64 tensor.
        temperature: divides the mixture's log-probabilities (multiplies variances); 1 unless `fit_temperature` set it.

    Raises:
        InvalidArgument: no components, a component that is not a `Laplace`, different likelihoods, or weights that are
            negative or do not sum to 1.
        NotFitted: a component is not fitted.
    """

    model_type: ClassVar[str] = "pippin_laplace_mixture"

    def __init__(self, components: Sequence[Laplace], weights: Sequence[float] | Tensor | None = None) -> None:
        self.components = tuple(components)
        if not self.components:
            raise InvalidArgument("a mixture needs at least one component, got none")
        for number, one in enumerate(self.components):
            if not isinstance(one, Laplace):
                raise InvalidArgument(f"component {number} is a {type(one).__name__}; give fitted Laplace objects")
            if one.mean is None:
                raise NotFitted(f"component {number} is not fitted; call its fit(loader) first")
        kinds = sorted({one.likelihood.name for one in self.components})
        if len(kinds) > 1:
            raise InvalidArgument(f"components must share one likelihood, got {', '.join(kinds)}")
        self.weights = check_weights(weights, len(self.components))
        self.temperature = 1.0

    @classmethod
    def from_models(
        cls,
        models: Sequence[nn.Module],
        loader: Iterable[Any],
        likelihood: Any = "classification",
        *,
        weights: Sequence[float] | Tensor | None = None,
        tune: bool = True,
        **laplace: Any,
    ) -> LaplaceMixture:
        """Make a mixture from trained networks: fit each on the loader, and tune its prior by its evidence.

        Args:
            models: networks trained from different seeds on the same data; labels in the same order.
            loader: the training data; read once for each network.
            likelihood: see `Laplace`.
            weights: weights of the networks; None for equal weights.
            tune: whether to tune each prior precision by the marginal likelihood of its component.
            laplace: further arguments of `Laplace`.

        Raises:
            InvalidArgument: no models, or arguments that `Laplace` refuses.
            InvalidInput: a loader without batches.
        """
        if not models:
            raise InvalidArgument("a mixture needs at least one model, got none")
        check_weights(weights, len(models))
        check_data(loader)  # a generator would be used up by the first network
        fits = [Laplace(model, likelihood, **laplace).fit(loader) for model in models]
        return cls([one.tune() for one in fits] if tune else fits, weights)

    def component_predictions(self, x: Any, **options: Any) -> list[Prediction]:
        """The prediction of each component; keyword arguments are those of `Laplace.__call__`.

        Raises:
            InvalidArgument: the networks have different numbers of outputs.
        """
        predictions = [one(x, **options) for one in self.components]
        check_compatible(predictions)
        return predictions

    def __call__(self, x: Any, **options: Any) -> Prediction:
        """The mixture's prediction.

        Args:
            x: a batch of inputs.
            options: keyword arguments of `Laplace.__call__`.
        """
        return self._tempered(mix_predictions(self.component_predictions(x, **options), self.weights))

    def mutual_information(self, x: Any, **options: Any) -> Float[Tensor, " n"]:
        r"""Disagreement of the components in nats, $H[\sum_k \pi_k p_k] - \sum_k \pi_k H[p_k]$; 0 for one component.

        Raises:
            InvalidArgument: a regression; there the mixture's covariance shows the disagreement.
        """
        predictions = self.component_predictions(x, **options)
        probs = [one.probs for one in predictions if one.probs is not None]
        if len(probs) < len(predictions):
            raise InvalidArgument("disagreement is between probabilities; of a regression see the covariance")
        stacked = torch.stack(probs)
        pi = self.weights.to(stacked)
        mean = torch.einsum("k,knc->nc", pi, stacked)
        return (entropy(mean) - torch.einsum("k,kn->n", pi, entropy(stacked))).clamp(min=0.0)

    def log_likelihood(self, x: Any, y: Tensor, **options: Any) -> Float[Tensor, " n"]:
        """Log-probability of labels, or log-density of targets, under the mixture, in nats for each example.

        For a regression this is the log of the mixture density, not that of a Gaussian with its moments.

        Raises:
            InvalidInput: another number of targets than of inputs.
        """
        predictions = self.component_predictions(x, **options)
        if predictions[0].probs is not None:
            return mixture_log_likelihood(
                [self._tempered(mix_predictions(predictions, self.weights))], torch.ones(1).double(), y
            )
        return mixture_log_likelihood([self._tempered(one) for one in predictions], self.weights, y)

    @checked
    def sample(
        self, n: PositiveInt, generator: torch.Generator | None = None
    ) -> tuple[Int[Tensor, " n"], list[Tensor]]:
        """Sample weights: the component of each sample, and its weight vector.

        The vectors are in a list, as the components' subsets of weights may have different sizes.
        """
        which = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        samples: list[Tensor] = [torch.empty(0)] * n
        for number, one in enumerate(self.components):
            indices = (which == number).nonzero()[:, 0].tolist()
            if indices:
                for index, vector in zip(indices, one.sample(len(indices), generator), strict=True):
                    samples[index] = vector
        return which, samples

    def tune_on_validation(self, validation: Iterable[Any]) -> LaplaceMixture:
        """Set each component's prior precision to the one with the highest log-likelihood on held-out batches.

        Args:
            validation: held-out batches (inputs, targets).

        Raises:
            InvalidInput: no batches.
        """
        batches = _batches(validation)
        for one in self.components:
            one.tune_on_validation(batches)
        return self

    def fit_weights(self, validation: Iterable[Any]) -> LaplaceMixture:
        """Set the mixture weights that maximize the likelihood on held-out batches, by expectation maximization.

        Args:
            validation: held-out batches (inputs, targets).

        Raises:
            InvalidInput: no batches.
        """
        predictions, targets = self._predicted(_batches(validation))
        each = torch.stack([mixture_log_likelihood([one], torch.ones(1).double(), targets) for one in predictions])
        self.weights = _likeliest_weights(each.double(), self.weights)
        return self

    def fit_temperature(self, validation: Iterable[Any]) -> LaplaceMixture:
        """Fit the temperature of the mixture on held-out batches.

        Args:
            validation: held-out batches (inputs, targets).

        Raises:
            InvalidInput: no batches.
        """
        predictions, targets = self._predicted(_batches(validation))
        self.temperature = fit_correction(mix_predictions(predictions, self.weights), targets)
        return self

    def save(self, path: str | Path) -> None:
        """Write the posteriors, but not the networks, to a folder that `load` reads.

        Raises:
            InvalidArgument: a component with a user-defined likelihood, structure or curvature.
            DiskFull: nothing was written.
        """
        configs: list[LaplaceConfig] = []
        tensors: dict[str, Tensor] = {}
        for number, one in enumerate(self.components):
            config, own = describe(one)
            configs.append(config)
            tensors |= {f"components.{number}.{name}": value for name, value in own.items()}
        mixture = LaplaceMixtureConfig(tuple(configs), tuple(self.weights.tolist()), self.temperature)
        checkpoint.save(tensors, path, model_type=self.model_type, config=mixture)

    @classmethod
    def load(cls, path: str | Path, models: Sequence[nn.Module]) -> LaplaceMixture:
        """Read what `save` wrote, around the same trained networks in the same order.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            InvalidArgument: another number of networks.
            CheckpointError: a network's weights are not those of its fit.
            CorruptedFile: the files are damaged.
        """
        saved = checkpoint.open_model(path, model_type=cls.model_type, config_type=LaplaceMixtureConfig)
        config, stored = saved.config, saved.checkpoint
        if len(models) != len(config.components):
            raise InvalidArgument(
                f"the mixture has {len(config.components)} components; {len(models)} models were given"
            )
        fits = [
            restore(Laplace, one, stored.tensors(f"components.{number}."), model, path)
            for number, (one, model) in enumerate(zip(config.components, models, strict=True))
        ]
        try:
            mixture = cls(fits, config.weights)
        except InvalidArgument as error:
            raise CorruptedFile(f"the mixture in {path} contradicts itself: {error}") from error
        mixture.temperature = config.temperature
        return mixture

    def _tempered(self, prediction: Prediction) -> Prediction:
        return prediction if self.temperature == 1.0 else apply_correction(prediction, self.temperature)

    def _predicted(self, batches: Sequence[Any]) -> tuple[list[Prediction], Tensor]:
        pairs = [inputs_and_targets(batch) for batch in batches]
        rows = [self.component_predictions(x) for x, _ in pairs]
        return [concatenated(column) for column in zip(*rows, strict=True)], torch.cat([y for _, y in pairs])


def _batches(validation: Iterable[Any]) -> list[Any]:
    batches = list(validation)
    if not batches:
        raise InvalidInput("the validation data has no batches")
    return batches


def _likeliest_weights(logs: Float[Tensor, "members n"], start: Float[Tensor, " members"]) -> Float[Tensor, " members"]:
    """The mixture weights of maximum likelihood, given log-likelihoods of each member for each example.

    The likelihood is concave in the weights, so expectation maximization finds the maximum; all weights start above 0,
    as a zero weight stays zero.
    """
    weights = 0.99 * start + 0.01 / len(start)
    for _ in range(_MAX_ITERATIONS):
        updated = torch.softmax(weights.log()[:, None] + logs.to(weights), 0).mean(1)
        moved = float((updated - weights).abs().max())
        weights = updated
        if moved < 1e-9:
            break
    return weights / weights.sum()
