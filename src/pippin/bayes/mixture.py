r"""Mixtures of Laplace approximations: an ensemble whose every member knows the width of its own mode.

Notable here:
- probabilities are averaged after the link, moments by the law of total variance: each exact given its component
- samples, log-densities and what the members disagree about come from the same list of components
- one component is that component, to the last bit; covariances of zero are a plain deep ensemble

Source: Eschenhagen, Daxberger, Hennig, Kristiadi 2021, arXiv:2111.03577 (uniform weights; here any).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.bayes.batches import check_data, split
from pippin.bayes.laplace import Laplace
from pippin.bayes.metrics import entropy
from pippin.bayes.predictive import Prediction
from pippin.bayes.predictors import check_alike, check_weights, concatenated, log_likelihood, mix
from pippin.bayes.temperature import fitted, tempered
from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, NotFitted
from pippin.core.files import atomic_write, make_folder

_FILE = "mixture.json"
_STEPS = 200  # of the weights' fit; each multiplies weights by responsibilities, and stops when they stand still


class LaplaceMixture:
    r"""Several fitted posteriors as one: $p(\theta | D) \approx \sum_k \pi_k N(\theta_k, \Sigma_k)$.

    Args:
        components: fitted `Laplace` approximations of networks with the same outputs.
        weights: $\pi_k$, 0 or above, adding up to 1; None for equal ones.

    Attributes:
        components, weights: as given, the weights as a tensor.
        temperature: divides the mixture's log-probabilities (multiplies variances); 1 unless `tune` fitted it.

    Raises:
        InvalidArgument: no components, something that is no `Laplace`, likelihoods that differ, or weights that are
            negative or do not add up to 1.
        NotFitted: a component is not fitted.
    """

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
        tune: Literal["evidence", "off"] = "evidence",
        **laplace: Any,
    ) -> LaplaceMixture:
        """A mixture around trained networks: each is fitted on the loader, and its prior tuned by its own evidence.

        Args:
            models: networks trained from different seeds on the same data; labels in the same order.
            loader: the training data; read once for each network.
            likelihood: as for `Laplace`.
            weights: of the networks; None for equal ones.
            tune: "off" leaves every prior precision at what the keywords say.
            laplace: further arguments of `Laplace`.

        Raises:
            InvalidArgument: no models, or arguments that `Laplace` refuses. InvalidInput: a loader without batches.
        """
        if not models:
            raise InvalidArgument("a mixture needs at least one model, got none")
        check_weights(weights, len(models))
        if tune not in ("evidence", "off"):
            raise InvalidArgument(f"tune must be evidence or off, got {tune!r}")
        check_data(loader)  # a generator would be used up by the first network
        fits = [Laplace(model, likelihood, **laplace).fit(loader) for model in models]
        return cls([one.tune() for one in fits] if tune == "evidence" else fits, weights)

    def components_at(self, x: Any, **how: Any) -> list[Prediction]:
        """The prediction of each component; keywords as for `Laplace`'s call.

        Raises:
            InvalidArgument: the networks have different numbers of outputs.
        """
        predictions = [one(x, **how) for one in self.components]
        check_alike(predictions)
        return predictions

    def __call__(self, x: Any, **how: Any) -> Prediction:
        """The mixture's prediction.

        Args:
            x: a batch of inputs.
            how: keywords of `Laplace`'s call: ``predictive``, ``link``, ``samples``, ``generator``...
        """
        return self._tempered(mix(self.components_at(x, **how), self.weights))

    def disagreement(self, x: Any, **how: Any) -> Float[Tensor, " n"]:
        r"""What the components disagree about, in nats: $H[\sum_k \pi_k p_k] - \sum_k \pi_k H[p_k]$; 0 for one.

        Raises:
            InvalidArgument: a regression, whose disagreement is in the mixture's covariance.
        """
        predictions = self.components_at(x, **how)
        probs = [one.probs for one in predictions if one.probs is not None]
        if len(probs) < len(predictions):
            raise InvalidArgument("disagreement is between probabilities; of a regression see the covariance")
        stacked = torch.stack(probs)
        pi = self.weights.to(stacked)
        mean = torch.einsum("k,knc->nc", pi, stacked)
        return (entropy(mean) - torch.einsum("k,kn->n", pi, entropy(stacked))).clamp(min=0.0)

    def log_prob(self, x: Any, y: Tensor, **how: Any) -> Float[Tensor, " n"]:
        """Log-probability of labels, or log-density of targets, under the mixture, in nats for each example.

        A regression's is the log of the mixed densities, which has a peak for each component; classification uses the
        temperature.

        Raises:
            InvalidInput: another number of targets than of inputs.
        """
        predictions = self.components_at(x, **how)
        if predictions[0].probs is not None:
            return log_likelihood([self._tempered(mix(predictions, self.weights))], torch.ones(1).double(), y)
        return log_likelihood([self._tempered(one) for one in predictions], self.weights, y)

    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple[Int[Tensor, " n"], list[Tensor]]:
        """Weights drawn from the posterior: which component each comes from, and its vector of weights.

        Vectors are lists because components may have subsets of different sizes.

        Raises:
            InvalidArgument: fewer than one sample.
        """
        if n < 1:
            raise InvalidArgument(f"n is the number of samples, at least 1, got {n}")
        which = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        drawn: list[Tensor] = [torch.empty(0)] * n
        for number, one in enumerate(self.components):
            places = (which == number).nonzero()[:, 0].tolist()
            if places:
                for place, vector in zip(places, one.sample(len(places), generator), strict=True):
                    drawn[place] = vector
        return which, drawn

    def tune(self, validation: Iterable[Any], what: Literal["prior", "weights", "temperature"]) -> LaplaceMixture:
        """Fit one thing on batches (inputs, targets) that training did not see.

        Args:
            validation: held-out batches.
            what: "prior" gives every component the precision that is best for it on the batches; "weights" are those of
                the highest likelihood, by expectation maximisation; "temperature" corrects the confidence of the whole.

        Raises:
            InvalidArgument: another word. InvalidInput: no batches.
        """
        if what not in ("prior", "weights", "temperature"):
            raise InvalidArgument(f"what must be prior, weights or temperature, got {what!r}")
        batches = list(validation)
        if not batches:
            raise InvalidInput("the validation data has no batches")
        if what == "prior":
            for one in self.components:
                one.tune("grid", validation=batches)
            return self
        predictions, targets = self._gathered(batches)
        if what == "weights":
            each = torch.stack([log_likelihood([one], torch.ones(1).double(), targets) for one in predictions])
            self.weights = _likeliest_weights(each.double(), self.weights)
        else:
            self.temperature = fitted(mix(predictions, self.weights), targets)
        return self

    def save(self, folder: Path) -> None:
        """Write every component and the mixture's own numbers into a folder, which is made.

        Raises:
            DiskFull: the disk filled up. InvalidInput: the place is a file, or closed to writing.
        """
        folder = make_folder(folder)
        for number, one in enumerate(self.components):
            one.save(folder / f"component-{number}")
        numbers = {"weights": self.weights.tolist(), "temperature": self.temperature}
        with atomic_write(folder / _FILE, mode="w") as file:
            json.dump(numbers, file)

    @classmethod
    def load(cls, folder: Path, models: Sequence[nn.Module]) -> LaplaceMixture:
        """Read what `save` wrote, around the same trained networks in the same order.

        Raises:
            CorruptedFile: the folder holds no mixture. InvalidArgument: another number of networks.
        """
        path = Path(folder) / _FILE
        try:
            numbers = json.loads(path.read_text("utf-8"))
            weights, temperature = [float(one) for one in numbers["weights"]], float(numbers["temperature"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CorruptedFile(f"{str(folder)!r} holds no saved mixture: {error}") from error
        if len(models) != len(weights):
            raise InvalidArgument(f"the mixture has {len(weights)} components; {len(models)} models were given")
        loaded = [Laplace.load(Path(folder) / f"component-{number}", model) for number, model in enumerate(models)]
        mixture = cls(loaded, weights)
        mixture.temperature = temperature
        return mixture

    def _tempered(self, prediction: Prediction) -> Prediction:
        return prediction if self.temperature == 1.0 else tempered(prediction, self.temperature)

    def _gathered(self, batches: Sequence[Any]) -> tuple[list[Prediction], Tensor]:
        pairs = [split(batch) for batch in batches]
        rows = [self.components_at(x) for x, _ in pairs]
        return [concatenated(column) for column in zip(*rows, strict=True)], torch.cat([y for _, y in pairs])


def _likeliest_weights(logs: Float[Tensor, "members n"], start: Float[Tensor, " members"]) -> Float[Tensor, " members"]:
    """Weights on the simplex of the highest likelihood, given log-likelihoods of each member for each example.

    Expectation maximisation climbs a concave function here, so it ends at the best weights; it starts with a little
    weight on everyone, as what is zero stays zero.
    """
    weights = 0.99 * start + 0.01 / len(start)
    for _ in range(_STEPS):
        updated = torch.softmax(weights.log()[:, None] + logs.to(weights), 0).mean(1)
        moved = float((updated - weights).abs().max())
        weights = updated
        if moved < 1e-9:
            break
    return weights / weights.sum()
