r"""Laplace's approximation: a Gaussian over the weights of a trained network, after the fact.

Notable here:
- likelihood, subset, structure and curvature are four objects that are combined freely; this file knows none of them
- one pass over the data, sums only: what is kept does not grow with the data, and no Jacobian outlives its batch
- the marginal likelihood is differentiable in prior and noise, and tuning on it is sums over eigenvalues
- a call before `fit`, weights that moved since, an evidence that is not finite: each is an error, never a number
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes import batches, predictive
from pippin.bayes.curvature import GGN, Curvature, Hessian, curvature as to_curvature
from pippin.bayes.hessian import products
from pippin.bayes.likelihood import Likelihood, RewardModel, check_sigma, likelihood as to_likelihood
from pippin.bayes.pairs import Pairs
from pippin.bayes.predictive import Prediction
from pippin.bayes.rows import Rows
from pippin.bayes.structure import Gaussian, State, Structure, blocks, structure as to_structure
from pippin.bayes.subset import LastLayer, Subset, check_last, subset as to_subset
from pippin.bayes.weight_prior import expand, group_ids
from pippin.core.errors import InvalidArgument, InvalidInput, NonFiniteEvidence, NotFitted

_NUMBERS = 2**25
"""Numbers that the Jacobian of a chunk of a prediction may have, or what comes back to its layers."""


class Laplace:
    r"""A posterior $N(\theta^*, P^{-1})$ with $P = s H + \mathrm{diag}(\lambda)$ around the weights of a trained model.

    H is the curvature of the summed loss, $s = 1 / (\sigma^2 T)$. The model is not copied and not changed; it must
    be in evaluation mode. Its weights should be a minimum of the loss with a weight decay of $\lambda$ over all data.

    Args:
        model: from inputs to (batch, outputs); see `pippin.bayes.batches` for what inputs may be.
        likelihood: "classification", "regression", "multi_label", "reward_model", or an object of
            `pippin.bayes.likelihood`.
        subset: "last_layer", "all", or an object of `pippin.bayes.subset`.
        structure: "kron", "full", "diag", "lowrank", "functional", or an object.
        curvature: "ggn", "mc" (one sampled target), "ef", "hessian", or an object of `pippin.bayes.curvature`.
        prior_precision: of the weights, one over the variance; one number, one for each layer (a module's weight and
            bias together, in the order of `layers`), or one for each weight.
        temperature: T of the likelihood; below 1 narrows the posterior.
        prior_mean: of the weights.

    Attributes:
        mean: the weights of the fit [P]; None before.
        examples: how many were fitted.
        loss: their summed loss.

    Raises:
        InvalidArgument: an unknown word, a number outside its range, a prior of another length, or the Hessian with a
            structure that cannot hold it.

    Source: Daxberger et al. 2021, arXiv:2106.14806.

    >>> model = nn.Linear(1, 1).double()
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> posterior = Laplace(model, "regression", subset="all", structure="full").fit([(x, 2 * x)])
    >>> posterior(torch.tensor([[0.0], [10.0]], dtype=torch.float64)).function_variance.round(decimals=2).tolist()
    [[0.05], [12.0]]
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        subset: str | Subset = "last_layer",
        structure: str | Structure = "kron",
        curvature: str | Curvature = "ggn",
        prior_precision: float | Sequence[float] | Tensor = 1.0,
        temperature: float = 1.0,
        prior_mean: float | Tensor = 0.0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidArgument(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.likelihood = to_likelihood(likelihood)
        self.structure, self.curvature = to_structure(structure), to_curvature(curvature)
        if isinstance(self.curvature, Hessian) and not self.structure.hessian:
            raise InvalidArgument(f"the Hessian cannot be kept as {self.structure.name}; use full or lowrank, or ggn")
        if not 0 < temperature < math.inf:
            raise InvalidArgument(f"temperature is {temperature}; give a number above 0")
        self.model: nn.Module = Pairs(model) if isinstance(self.likelihood, RewardModel) else model
        chosen = to_subset(subset)
        self.selection, self._guessed = chosen.resolve(self.model), chosen == LastLayer()
        self.rows = Rows(self.model, self.selection)
        self.temperature = temperature
        self.layers, ids = group_ids(self.model, self.selection)
        self._like = next(iter(self.selection.parameters(self.model).values())).detach().reshape(-1)[:0]
        self.layer_of_weight = ids.to(self._like.device)
        self._gaussian: Gaussian | None = None
        self._state: State | None = None
        self.mean: Tensor | None = None
        self.examples, self.outputs, self.loss = 0, 0, 0.0
        self._step = 8  # examples that are predicted at once; a first few say how many can be
        self._sigma = float(self.likelihood.sigma_noise)
        self._prior_mean = prior_mean
        self._squares: Tensor | None = None
        self._sizes = torch.bincount(self.layer_of_weight, minlength=len(self.layers)).double()
        self.prior_precision = prior_precision

    def __repr__(self) -> str:
        data = f"fitted to {self.examples} examples" if self.mean is not None else "not fitted"
        chosen = f"{self.likelihood.name}, {self.structure.name} {self.curvature.name}"
        return f"<Laplace: {chosen}, {self.selection.size} weights, {data}>"

    # --- prior and noise ----------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> Float[Tensor, " groups"]:
        """Of one group, of each layer, or of each weight; float64."""
        return self._prior

    @prior_precision.setter
    def prior_precision(self, value: float | Sequence[float] | Tensor) -> None:
        prior = torch.as_tensor(value, dtype=torch.float64, device=self._like.device).detach().reshape(-1)
        self._expand(prior)
        self._prior, self._gaussian = prior, None

    @property
    def prior_mean(self) -> float | Tensor:
        """Of the weights."""
        return self._prior_mean

    @property
    def sigma_noise(self) -> float:
        """Standard deviation of a regression's noise, in units of the targets; 1 for anything else."""
        return self._sigma

    @sigma_noise.setter
    def sigma_noise(self, value: float) -> None:
        check_sigma(value)
        if self.likelihood.name != "regression" and value != 1:
            raise InvalidArgument(f"a likelihood of {self.likelihood.name} has no noise; sigma_noise must stay 1")
        self._sigma, self._gaussian = float(value), None

    def _expand(self, prior: Tensor) -> Float[Tensor, " p"]:
        return expand(prior, self.layer_of_weight, len(self.layers))

    def _scale(self, sigma: Tensor) -> Float[Tensor, ""]:
        return sigma**-self.curvature.noise_power / self.temperature

    # --- fitting ------------------------------------------------------------------------------------------------------

    def fit(self, data: Iterable[Any], accumulate: bool = False) -> Laplace:
        """Sum the curvature over the data, at the model's weights as they are now.

        Args:
            data: batches (inputs, targets) or mappings; iterable more than once.
            accumulate: add to what earlier fits found, as in continual learning; else it is forgotten.

        Raises:
            InvalidArgument: the model is in training mode where that matters (batch norm, dropout), or the data can be
                read only once.
            InvalidInput: no batches, an empty one, NaN, targets that do not fit the likelihood, or a single class.
            SingularPosterior: the curvature is not finite.
            NotEnoughMemory: the structure does not fit; the message has the bytes and what to use instead.
            UnsupportedLayer: the structure has no rule for a layer; it is named.
        """
        batches.check_mode(self.model)
        batches.check_data(data)
        keep = accumulate and self._state is not None
        # a copy, so that data that cannot be used leaves the posterior as it was
        state = deepcopy(self._state) if keep and self._state else self.structure.start(self.selection, self._like)
        loss, examples, outputs = 0.0, 0, self.outputs
        for number in range(getattr(self.structure, "passes", 1)):
            if isinstance(self.curvature, GGN):
                self.curvature.restart()
            loss, examples, classes = 0.0, 0, torch.zeros(0, dtype=torch.long)
            for inputs, targets in batches.read(data, self.model):
                if self._guessed and not examples:
                    check_last(self.model, self.selection, inputs)
                batch_loss, y, outputs = self._add(state, inputs, targets)
                loss, examples = loss + batch_loss, examples + len(y)
                if self.likelihood.name == "classification":
                    classes = torch.cat([classes, y.cpu()]).unique()
            if number == 0 and len(classes) == 1 and not keep:
                raise InvalidInput(f"all {examples} targets are class {int(classes[0])}; give examples of two classes")
            state.finish()
        self.loss, self.examples = (self.loss * keep + loss), self.examples * keep + examples
        self.outputs, self._state, self._gaussian = outputs, state, None
        self.mean, self._squares = self.selection.vector(self.model), None
        return self

    def _add(self, state: Any, inputs: Any, targets: Tensor) -> tuple[float, Tensor, int]:
        """Add a batch to a state: its loss, its targets as checked, its number of outputs."""
        if isinstance(self.curvature, Hessian):
            with torch.no_grad():
                f = batches.call(self.model, inputs)
            y = self._checked(f, targets)
            state.add_product(products(self.model, self.selection, self.likelihood, inputs, y))
        else:
            with self.rows.forward(inputs) as batch:
                f = batch.outputs.detach()
                y = self._checked(f, targets)
                state.add(batch, self.curvature.root(self.likelihood, f, y))
        return float(self.likelihood.loss(f.double(), y)), y, f.shape[1]

    def _checked(self, f: Tensor, targets: Tensor) -> Tensor:
        if not f.isfinite().all():
            raise InvalidInput("the model's outputs are infinite or NaN for finite inputs; look at its weights")
        return self.likelihood.check(f, targets)

    def _fitted(self) -> State:
        if self._state is None or self.mean is None:
            raise NotFitted("the posterior has no data yet; call fit(data) first")
        if not torch.equal(self.selection.vector(self.model), self.mean):
            raise NotFitted("the model's weights changed since the fit; call fit(data) again")
        return self._state

    # --- evidence -----------------------------------------------------------------------------------------------------

    @property
    def posterior(self) -> Gaussian:
        """The Gaussian around the mean, at the prior and noise as they are.

        Raises:
            NotFitted: before `fit`, or the weights moved since.
            SingularPosterior: its precision is not positive definite.
        """
        state = self._fitted()
        if self._gaussian is None:
            scale = self._scale(torch.tensor(self._sigma, dtype=torch.float64, device=self._like.device))
            self._gaussian = state.posterior(self._expand(self._prior), scale)
        return self._gaussian

    def log_marginal_likelihood(
        self, prior_precision: Tensor | float | None = None, sigma_noise: Tensor | float | None = None
    ) -> Float[Tensor, ""]:
        r"""Laplace's estimate of the log-probability of the data, in nats; differentiable in both arguments.

        $\log p(D | \theta^*) - \frac12 (\log|P| - \log|\Lambda| + (\theta^* - \mu)^\top \Lambda (\theta^* - \mu))$

        Args:
            prior_precision: as in the constructor; None takes the posterior's own.
            sigma_noise: of a regression; None takes the posterior's own.

        Raises:
            NotFitted: before `fit`, or the weights moved since.
            InvalidArgument: numbers that are not positive, or a prior of another length.
            SingularPosterior: the precision is not positive definite.
            NonFiniteEvidence: the result is infinite or NaN; the term is named.
        """
        self._fitted()
        return self.evidence_at(prior_precision, sigma_noise)

    def evidence_at(
        self, prior_precision: Tensor | float | None, sigma_noise: Tensor | float | None
    ) -> Float[Tensor, ""]:
        """The marginal likelihood without a look at the model: for callers that ask many times in a row."""
        state = self._state
        assert state is not None
        like: dict[str, Any] = {"dtype": torch.float64, "device": self._like.device}
        prior = self._prior if prior_precision is None else torch.as_tensor(prior_precision, **like).reshape(-1)
        sigma = torch.as_tensor(self._sigma if sigma_noise is None else sigma_noise, **like)
        check_sigma(float(sigma.detach()))
        if self.likelihood.name != "regression" and float(sigma.detach()) != 1:
            raise InvalidArgument(f"a likelihood of {self.likelihood.name} has no noise; leave sigma_noise out")
        full = self._expand(prior)
        likelihood = self.likelihood.normaliser(self.examples, self.outputs, sigma)
        likelihood = likelihood - self.loss / (sigma**2 * self.temperature)
        log_det = state.posterior(full, self._scale(sigma)).log_det
        log_prior, scatter = self._prior_terms(prior)
        terms = {
            "the log-likelihood": likelihood,
            "the log-determinant of the posterior": log_det,
            "the log-determinant of the prior": log_prior,
            "the distance of the weights from the prior mean": scatter,
        }
        for name, value in terms.items():
            if not value.isfinite():
                raise NonFiniteEvidence(f"{name} is {value.item():g}; look at the weights, the targets and the prior")
        return likelihood - 0.5 * (log_det.to(likelihood) - log_prior + scatter)

    def _prior_terms(self, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Log-determinant of the prior and the weights' squared distance in it, from sums over layers where it can."""
        assert self.mean is not None
        if len(prior) == self.selection.size > 1 and len(prior) != len(self.layers):
            return prior.log().sum(), (prior * (self.mean.double() - self.prior_mean).square()).sum()
        if self._squares is None:
            squares = (self.mean.double() - self.prior_mean).square()
            self._squares = torch.zeros_like(self._sizes).index_add_(0, self.layer_of_weight, squares)
        return (self._sizes * prior.log()).sum(), (self._squares * prior).sum()

    def tune(
        self,
        method: str = "evidence",
        per: str = "all",
        validation: Iterable[Any] | None = None,
        *,
        noise: bool = True,
        folds: int = 5,
        grid: Sequence[float] | Tensor | None = None,
        link: str = "probit",
    ) -> Laplace:
        """Choose the prior precision, and with the evidence a regression's noise too; see `pippin.bayes.tuning`.

        Args:
            method: "evidence" maximises the marginal likelihood and needs no data; "grid" takes the best of ``grid`` by
                the log-likelihood of ``validation``; "cross_validation" does the same by folds of it, moving the
                weights of the linear model by a Newton step away from each fold, so that it may be the training data.
            per: one precision, one for each layer, or one for each weight; the latter two with the evidence only.
            validation: batches for the other two methods.
            noise: whether the evidence tunes the noise of a regression, too.
            folds: of the cross-validation; batch i belongs to fold i modulo folds.
            grid: precisions to try; None takes 21 from 1e-4 to 1e4.
            link: how classes are predicted.

        Raises:
            InvalidArgument: an unknown word, data missing, or a combination that does not exist.
            As `log_marginal_likelihood` and `fit`.
        """
        from pippin.bayes import tuning

        self._fitted()
        tuning.tune(self, method, per, validation, noise=noise, folds=folds, grid=grid, link=link)
        return self

    # --- prediction ---------------------------------------------------------------------------------------------------

    def __call__(
        self,
        x: Any,
        predictive: str = "glm",
        link: str = "probit",
        joint: bool = False,
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predict a batch of inputs.

        Args:
            x: inputs, as the model takes them.
            predictive: "glm" linearises the model in its weights, which is what the curvature assumes; "mc" draws
                weights and runs the model with each, which is known to underfit with this posterior.
            link: from outputs to probabilities, with "glm"; see `pippin.bayes.predictive.link`.
            joint: the covariance over all outputs of the batch together, [n C, n C].
            samples: of "mc" of either kind.
            generator: of these; None draws the same ones every time.

        Raises:
            NotFitted: before `fit`, or the weights moved since.
            InvalidArgument: an unknown word.
            InvalidInput: inputs that are infinite or NaN.
        """
        self._check_call(x, predictive, link, samples, joint)
        if predictive == "mc":
            return self._sampled(x, samples, generator)
        mean, covariance = self.outputs_at(x, joint)
        probs = None
        if self._chooses(mean):
            single = blocks(covariance, *mean.shape) if joint else covariance
            probs = _link(self.likelihood, mean, single, link, samples=samples, generator=generator)
        return Prediction(mean, covariance, probs, self._noise())

    def outputs_at(self, x: Any, joint: bool = False) -> tuple[Float[Tensor, "n c"], Float[Tensor, ...]]:
        """Mean and covariance of the outputs of the linearised model; arguments as in the call."""
        gaussian = self.posterior
        batches.check_mode(self.model)
        x = batches.to_model(x, self.model)
        means, covariances = [], []
        count, first = batches.size(x), 0
        while first < count:
            last = count if joint else min(count, first + self._step)
            with self.rows.forward(batches.part(x, first, last)) as batch:
                means.append(batch.outputs.detach())
                covariances.append(gaussian.covariance(batch, joint).detach().to(means[-1].dtype))
                first, self._step = last, self._affordable(batch.width)
        return torch.cat(means), torch.cat(covariances)

    def functional_samples(
        self, x: Any, n: int, generator: torch.Generator | None = None, joint: bool = False
    ) -> Float[Tensor, "samples n c"]:
        """Draws of the outputs of the linearised model; with ``joint`` they are of functions over the whole batch."""
        self._check_call(x, "glm", "probit", n, joint)
        mean, covariance = self.outputs_at(x, joint)
        return predictive.draws(mean, covariance, n, generator)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Draws of the weights.

        Args:
            n: how many.
            generator: on the model's device; None takes one with seed 0.

        Raises:
            InvalidArgument: fewer than one.
            NotFitted: before `fit`, or the weights moved since.
        """
        if n < 1:
            raise InvalidArgument(f"n is {n}; draw 1 sample or more")
        gaussian = self.posterior
        assert self.mean is not None
        generator = torch.Generator(self._like.device).manual_seed(0) if generator is None else generator
        return self.mean + gaussian.sample(n, generator).to(self.mean)

    def log_prob(self, vector: Float[Tensor, "*n p"]) -> Float[Tensor, "*n"]:
        """Log-density of weights under the posterior, in nats.

        Raises:
            InvalidArgument: vectors of another length than the subset has weights.
            NotFitted: before `fit`, or the weights moved since.
        """
        gaussian = self.posterior
        assert self.mean is not None
        size = self.selection.size
        if vector.shape[-1] != size:
            raise InvalidArgument(f"vectors of {vector.shape[-1]} weights for a posterior over {size}")
        away = gaussian.quadratic((vector - self.mean).reshape(-1, size)).reshape(vector.shape[:-1])
        return (0.5 * (gaussian.log_det - size * math.log(2 * math.pi) - away)).detach()

    def _check_call(self, x: Any, predictive: str, link: str, samples: int, joint: bool) -> None:
        self._fitted()
        if predictive not in ("glm", "mc"):
            raise InvalidArgument(f"predictive is {predictive!r}; choose glm or mc")
        if joint and predictive == "mc":
            raise InvalidArgument("a joint covariance is of the linearised model; use predictive='glm'")
        if self.likelihood.name == "regression":
            link = "probit"
        _check_link(self.likelihood, link, samples)
        batches.check_inputs(x)

    def _affordable(self, width: int) -> int:
        """How many examples to predict at once, where so many numbers come back to the layers of one for an output."""
        width = max(width, self.selection.size if getattr(self.posterior, "dense", False) else 1)
        return max(1, min(128, _NUMBERS // (width * max(self.outputs, 1))))

    def _sampled(self, x: Any, samples: int, generator: torch.Generator | None) -> Prediction:
        """The network run with drawn weights."""
        batches.check_mode(self.model)
        x = batches.to_model(x, self.model)
        generator = torch.Generator(self._like.device).manual_seed(0) if generator is None else generator
        outputs: list[Tensor] = []
        while len(outputs) < samples:
            for vector in self.sample(min(samples - len(outputs), max(1, _NUMBERS // self.selection.size)), generator):
                with torch.no_grad(), self.selection.at(self.model, vector):
                    outputs.append(batches.call(self.model, x))
        f = torch.stack(outputs)
        mean, apart = f.mean(0), f - f.mean(0)
        covariance = torch.einsum("snc,snd->ncd", apart, apart) / samples
        probs = None
        if self.likelihood.name == "multi_label":
            probs = f.sigmoid().mean(0)
        elif self._chooses(mean):
            probs = f.softmax(-1).mean(0)
        return Prediction(mean, covariance, probs, self._noise())

    def _chooses(self, mean: Tensor) -> bool:
        """Whether the outputs have probabilities: neither a regression nor the reward of a single input."""
        return self.likelihood.name != "regression" and not (
            self.likelihood.name == "reward_model" and mean.shape[1] == 1
        )

    def _noise(self) -> float:
        return self._sigma**2 if self.likelihood.name == "regression" else 0.0

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the posterior, but not the model, as ``laplace.safetensors`` and ``laplace.json``.

        Raises:
            NotFitted: before `fit`, or the weights moved since.
            InvalidArgument: a likelihood, structure or curvature that is not Pippin's own.
        """
        from pippin.bayes import posterior_files

        self._fitted()
        posterior_files.save_posterior(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module) -> Laplace:
        """The posterior in a folder, around the model that it was fitted to.

        Raises:
            CheckpointError: no posterior there, or the model's weights are not those of the fit.
            CorruptedFile: the files are damaged.
        """
        from pippin.bayes import posterior_files

        return posterior_files.load_posterior(cls, Path(folder), model)


# the argument `predictive` of the call hides the module of that name there
_link, _check_link = predictive.link, predictive.check_link
