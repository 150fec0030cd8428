r"""The Laplace approximation: a Gaussian posterior over the weights of a trained network.

Notable here:
- likelihood, subset, structure and curvature are four independent objects that can be combined freely
- one pass over the data accumulates sums, so memory does not grow with the data, and no Jacobian is stored
- the marginal likelihood is differentiable in prior and noise; tuning on it needs only sums over eigenvalues
- a call before `fit`, changed weights and an evidence that is not finite raise errors
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.bayes import batches
from pippin.bayes.laplace.curvature import GGN, Curvature, CurvatureName, Hessian, to_curvature
from pippin.bayes.laplace.io import LaplaceConfig, describe, restore
from pippin.bayes.laplace.jacobians.backend import JacobianBackend
from pippin.bayes.laplace.jacobians.hessian_products import products
from pippin.bayes.laplace.structure import (
    CurvatureState,
    Structure,
    StructureName,
    WeightGaussian,
    blocks,
    to_structure,
)
from pippin.bayes.likelihood import Likelihood, LikelihoodName, PairwiseReward, RewardModel, check_sigma, to_likelihood
from pippin.bayes.prediction import Link, Prediction, apply_link, check_link, sample_outputs
from pippin.bayes.weight_subset import LastLayer, Selection, Subset, SubsetName, check_last, to_subset
from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput, NonFiniteEvidence, NotFitted
from pippin.core.formats import checkpoint

_MAX_ELEMENTS = 2**25
"""The largest number of elements in the Jacobian of a chunk of a prediction, or in the gradients at its layers."""


class Laplace:
    r"""A posterior $N(\theta^*, P^{-1})$ with $P = s H + \mathrm{diag}(\lambda)$ around the weights of a trained model.

    H is the curvature of the summed loss, $s = 1 / (\sigma^2 T)$. The model is not copied and not changed; it must
    be in evaluation mode. Its weights should be a minimum of the loss with a weight decay of $\lambda$ over all data.

    Args:
        model: maps inputs to (batch, outputs); see `pippin.bayes.batches` for the forms of inputs.
        likelihood: "classification", "regression", "multi_label", "reward_model", or an object of
            `pippin.bayes.likelihood`.
        subset_of_weights: "last_layer", "all", or an object of `pippin.bayes.weight_subset`.
        hessian_structure: "kron", "full", "diag", "lowrank", "functional", or an object.
        curvature: "ggn", "mc" (one sampled target), "ef", "hessian", or an object of `pippin.bayes.laplace.curvature`.
        prior_precision: prior precision (inverse variance) of the weights: one for all, one for each layer (a module's
            weight and bias together, in the order of `layers`), or one for each weight.
        temperature: temperature T of the likelihood; below 1 narrows the posterior.
        prior_mean: prior mean of the weights.

    Attributes:
        mean: the model's weights at the fit, [P]; None before `fit`.
        examples: number of fitted examples.
        loss: summed loss of the fitted examples.

    Raises:
        InvalidArgument: an unknown name, an argument out of range, a prior of another length, or the Hessian with a
            structure that cannot represent it.

    Source: Daxberger et al. 2021, arXiv:2106.14806.

    >>> model = nn.Linear(1, 1).double()
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> posterior = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full").fit([(x, 2 * x)])
    >>> posterior(torch.tensor([[0.0], [10.0]], dtype=torch.float64)).function_variance.round(decimals=2).tolist()
    [[0.05], [12.0]]
    """

    model_type: ClassVar[str] = "pippin_laplace"

    @checked
    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodName | Likelihood,
        subset_of_weights: SubsetName | Subset = "last_layer",
        hessian_structure: StructureName | Structure = "kron",
        curvature: CurvatureName | Curvature = "ggn",
        prior_precision: float | Sequence[float] | Tensor = 1.0,
        temperature: PositiveFloat = 1.0,
        prior_mean: float | Tensor = 0.0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidArgument(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.likelihood = to_likelihood(likelihood)
        self.structure, self.curvature = to_structure(hessian_structure), to_curvature(curvature)
        if isinstance(self.curvature, Hessian) and not self.structure.hessian:
            raise InvalidArgument(
                f"the Hessian cannot be represented as {self.structure.name}; use full or lowrank, or ggn"
            )
        self.model: nn.Module = PairwiseReward(model) if isinstance(self.likelihood, RewardModel) else model
        chosen = to_subset(subset_of_weights)
        self.selection, self._guessed = chosen.resolve(self.model), chosen == LastLayer()
        self.rows = JacobianBackend(self.model, self.selection)
        self.temperature = temperature
        self.layers, ids = _group_ids(self.model, self.selection)
        self._like = next(iter(self.selection.parameters(self.model).values())).detach().reshape(-1)[:0]
        self.layer_of_weight = ids.to(self._like.device)
        self._gaussian: WeightGaussian | None = None
        self._state: CurvatureState | None = None
        self.mean: Tensor | None = None
        self.examples, self.outputs, self.loss = 0, 0, 0.0
        self._batch_size = 8  # examples that are predicted together; the first batch says how many fit
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
        """The prior precision of all weights, of each layer, or of each weight; float64."""
        return self._prior

    @prior_precision.setter
    def prior_precision(self, value: float | Sequence[float] | Tensor) -> None:
        prior = torch.as_tensor(value, dtype=torch.float64, device=self._like.device).detach().reshape(-1)
        self._expand(prior)
        self._prior, self._gaussian = prior, None

    @property
    def prior_mean(self) -> float | Tensor:
        """The prior mean of the weights."""
        return self._prior_mean

    @property
    def sigma_noise(self) -> float:
        """Standard deviation of a regression's noise, in units of the targets; 1 for other likelihoods."""
        return self._sigma

    @sigma_noise.setter
    def sigma_noise(self, value: float) -> None:
        check_sigma(value)
        if self.likelihood.name != "regression" and value != 1:
            raise InvalidArgument(f"a likelihood of {self.likelihood.name} has no noise; sigma_noise must stay 1")
        self._sigma, self._gaussian = float(value), None

    def _expand(self, prior: Tensor) -> Float[Tensor, " p"]:
        return _expand_prior(prior, self.layer_of_weight, len(self.layers))

    def _scale(self, sigma: Tensor) -> Float[Tensor, ""]:
        return sigma**-self.curvature.noise_power / self.temperature

    # --- fitting ------------------------------------------------------------------------------------------------------

    def fit(self, data: Iterable[Any], accumulate: bool = False) -> Laplace:
        """Sum the curvature over the data at the model's current weights.

        Args:
            data: batches (inputs, targets) or mappings; iterable more than once.
            accumulate: whether to add to the curvature of earlier fits, as in continual learning, or to replace it.

        Returns:
            The posterior itself.

        Raises:
            InvalidArgument: batch norm or dropout in training mode, or data that can be read only once.
            InvalidInput: no batches, an empty batch, NaN, targets that do not fit the likelihood, or a single class.
            SingularPosterior: the curvature is not finite.
            NotEnoughMemory: the structure does not fit; the message has the size and alternatives.
            UnsupportedLayer: the structure does not support a layer; the message names it.
        """
        batches.check_mode(self.model)
        batches.check_data(data)
        keep = accumulate and self._state is not None
        # a copy, so that an error leaves the posterior unchanged
        state = deepcopy(self._state) if keep and self._state else self.structure.start(self.selection, self._like)
        loss, examples, outputs = 0.0, 0, self.outputs
        for number in range(getattr(self.structure, "passes", 1)):
            if isinstance(self.curvature, GGN):
                self.curvature.restart()
            loss, examples, classes = 0.0, 0, torch.zeros(0, dtype=torch.long)
            for inputs, targets in batches.iterate_batches(data, self.model):
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
        """Add a batch to a state; returns its loss, its checked targets and the number of outputs."""
        if isinstance(self.curvature, Hessian):
            with torch.no_grad():
                f = batches.call_model(self.model, inputs)
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

    def _fitted(self) -> CurvatureState:
        if self._state is None or self.mean is None:
            raise NotFitted("the posterior has no data yet; call fit(data) first")
        if not torch.equal(self.selection.vector(self.model), self.mean):
            raise NotFitted("the model's weights changed since the fit; call fit(data) again")
        return self._state

    # --- evidence -----------------------------------------------------------------------------------------------------

    @property
    def posterior(self) -> WeightGaussian:
        """The Gaussian over deviations from the mean, for the current prior and noise.

        Raises:
            NotFitted: before `fit`, or the weights changed since.
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
        r"""The Laplace estimate of the log marginal likelihood in nats; differentiable in both arguments.

        $\log p(D | \theta^*) - \frac12 (\log|P| - \log|\Lambda| + (\theta^* - \mu)^\top \Lambda (\theta^* - \mu))$

        Args:
            prior_precision: see the constructor; None takes the posterior's current one.
            sigma_noise: standard deviation of a regression's noise; None takes the posterior's current one.

        Raises:
            NotFitted: before `fit`, or the weights changed since.
            InvalidArgument: values that are not positive, or a prior of another length.
            SingularPosterior: the precision is not positive definite.
            NonFiniteEvidence: the result is infinite or NaN; the message names the term.
        """
        self._fitted()
        return self.evidence_at(prior_precision, sigma_noise)

    def evidence_at(
        self, prior_precision: Tensor | float | None, sigma_noise: Tensor | float | None
    ) -> Float[Tensor, ""]:
        """`log_marginal_likelihood` without the check that the model's weights are unchanged, for repeated calls."""
        state = self._state
        assert state is not None
        like: dict[str, Any] = {"dtype": torch.float64, "device": self._like.device}
        prior = self._prior if prior_precision is None else torch.as_tensor(prior_precision, **like).reshape(-1)
        sigma = torch.as_tensor(self._sigma if sigma_noise is None else sigma_noise, **like)
        check_sigma(float(sigma.detach()))
        if self.likelihood.name != "regression" and float(sigma.detach()) != 1:
            raise InvalidArgument(f"a likelihood of {self.likelihood.name} has no noise; leave sigma_noise out")
        full = self._expand(prior)
        likelihood = self.likelihood.normalizer(self.examples, self.outputs, sigma)
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
        """Log-determinant of the prior precision and the weights' squared Mahalanobis distance from the prior mean.

        For precisions by layer both come from cached sums over layers.
        """
        assert self.mean is not None
        if len(prior) == self.selection.size > 1 and len(prior) != len(self.layers):
            return prior.log().sum(), (prior * (self.mean.double() - self.prior_mean).square()).sum()
        if self._squares is None:
            squares = (self.mean.double() - self.prior_mean).square()
            self._squares = torch.zeros_like(self._sizes).index_add_(0, self.layer_of_weight, squares)
        return (self._sizes * prior.log()).sum(), (self._squares * prior).sum()

    @checked
    def tune(
        self, prior_structure: Literal["scalar", "layerwise", "diag"] = "scalar", *, noise: bool = True
    ) -> Laplace:
        """Set the prior precision, and the noise of a regression, by maximizing the marginal likelihood.

        Args:
            prior_structure: one precision for all weights, one for each layer, or one for each weight.
            noise: whether to tune the noise of a regression too.

        Returns:
            The posterior itself.

        Raises:
            NotFitted: before `fit`, or the weights changed since.
            SingularPosterior: the precision is not positive definite.
            NonFiniteEvidence: no precision gives a finite evidence.
        """
        from pippin.bayes.laplace import tuning

        self._fitted()
        tuning.maximize_evidence(self, prior_structure, noise=noise)
        return self

    @checked
    def tune_on_validation(
        self,
        validation: Iterable[Any],
        *,
        grid: Sequence[PositiveFloat] | Tensor | None = None,
        link_approx: Link = "probit",
    ) -> Laplace:
        """Set the prior precision to the one with the highest log-likelihood on held-out data.

        Args:
            validation: batches (inputs, targets) that the model was not trained on.
            grid: precisions to try; None takes 21 from 1e-4 to 1e4.
            link_approx: see `__call__`.

        Returns:
            The posterior itself.

        Raises:
            InvalidInput: see `fit`.
            NonFiniteEvidence: no precision gives a finite likelihood.
        """
        from pippin.bayes.laplace import tuning

        self._fitted()
        tuning.search_grid(self, validation, grid, link_approx, folds=None)
        return self

    @checked
    def tune_by_cross_validation(
        self,
        data: Iterable[Any],
        *,
        folds: Annotated[int, Ge(2)] = 5,
        grid: Sequence[PositiveFloat] | Tensor | None = None,
        link_approx: Link = "probit",
    ) -> Laplace:
        """Set the prior precision by cross-validation without retraining; the training data may be used.

        For each fold the curvature is summed over the other folds, and a Newton step moves the weights of the linear
        model to their optimum without the fold.

        Args:
            data: at least as many batches (inputs, targets) as folds; batch i belongs to fold i modulo ``folds``.
            folds: number of folds.
            grid: precisions to try; None takes 21 from 1e-4 to 1e4.
            link_approx: see `__call__`.

        Returns:
            The posterior itself.

        Raises:
            InvalidArgument: the curvature is the Hessian.
            InvalidInput: fewer batches than folds; see also `fit`.
            NonFiniteEvidence: no precision gives a finite likelihood.
        """
        from pippin.bayes.laplace import tuning

        self._fitted()
        tuning.search_grid(self, data, grid, link_approx, folds=folds)
        return self

    # --- prediction ---------------------------------------------------------------------------------------------------

    @checked
    def __call__(
        self,
        x: Any,
        pred_type: Literal["glm", "mc"] = "glm",
        link_approx: Link = "probit",
        joint: bool = False,
        num_samples: PositiveInt = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predict a batch of inputs.

        Args:
            x: inputs of the model.
            pred_type: "glm" linearizes the model in its weights, as the curvature assumes; "mc" runs the network with
                sampled weights, which is known to underfit with this posterior.
            link_approx: approximation of class probabilities for "glm"; see `pippin.bayes.prediction.apply_link`.
            joint: whether to compute the joint covariance over the batch, [n C, n C].
            num_samples: number of samples, for ``pred_type`` or ``link_approx`` "mc".
            generator: source of randomness for these; None takes one with seed 0.

        Raises:
            NotFitted: before `fit`, or the weights changed since.
            InvalidArgument: a link that does not exist for the likelihood, or a joint covariance with "mc".
            InvalidInput: inputs that are infinite or NaN.
        """
        self._check_call(x, link_approx)
        if pred_type == "mc":
            if joint:
                raise InvalidArgument("a joint covariance needs the linearized model; use pred_type='glm'")
            return self._sampled(x, num_samples, generator)
        mean, covariance = self.outputs_at(x, joint)
        probs = None
        if self._has_probs(mean):
            single = blocks(covariance, *mean.shape) if joint else covariance
            probs = apply_link(self.likelihood, mean, single, link_approx, num_samples=num_samples, generator=generator)
        return Prediction(mean, covariance, probs, self._noise())

    def outputs_at(self, x: Any, joint: bool = False) -> tuple[Float[Tensor, "n c"], Float[Tensor, ...]]:
        """Mean and covariance of the outputs of the linearized model, see `__call__`."""
        gaussian = self.posterior
        batches.check_mode(self.model)
        x = batches.to_model(x, self.model)
        means, covariances = [], []
        count, first = batches.num_examples(x), 0
        while first < count:
            last = count if joint else min(count, first + self._batch_size)
            with self.rows.forward(batches.slice_inputs(x, first, last)) as batch:
                means.append(batch.outputs.detach())
                covariances.append(gaussian.covariance(batch, joint).detach().to(means[-1].dtype))
                first, self._batch_size = last, self._affordable(batch.width)
        return torch.cat(means), torch.cat(covariances)

    @checked
    def functional_samples(
        self, x: Any, n: PositiveInt, generator: torch.Generator | None = None, joint: bool = False
    ) -> Float[Tensor, "samples n c"]:
        """Sample outputs of the linearized model.

        Args:
            x: inputs of the model.
            n: number of samples.
            generator: source of randomness; None takes one with seed 0.
            joint: whether each sample is one function over the whole batch; otherwise examples are independent.

        Raises:
            NotFitted: before `fit`, or the weights changed since.
            InvalidInput: inputs that are infinite or NaN.
        """
        self._check_call(x, "probit")
        mean, covariance = self.outputs_at(x, joint)
        return sample_outputs(mean, covariance, n, generator)

    @checked
    def sample(self, n: PositiveInt, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Sample weights from the posterior.

        Args:
            n: number of samples.
            generator: source of randomness on the model's device; None takes one with seed 0.

        Raises:
            NotFitted: before `fit`, or the weights changed since.
        """
        gaussian = self.posterior
        assert self.mean is not None
        generator = torch.Generator(self._like.device).manual_seed(0) if generator is None else generator
        return self.mean + gaussian.sample(n, generator).to(self.mean)

    def log_prob(self, vector: Float[Tensor, "*n p"]) -> Float[Tensor, "*n"]:
        """Log-density of weights under the posterior, in nats.

        Raises:
            InvalidArgument: vectors of another length than the subset has weights.
            NotFitted: before `fit`, or the weights changed since.
        """
        gaussian = self.posterior
        assert self.mean is not None
        size = self.selection.size
        if vector.shape[-1] != size:
            raise InvalidArgument(f"vectors of {vector.shape[-1]} weights for a posterior over {size}")
        away = gaussian.quadratic((vector - self.mean).reshape(-1, size)).reshape(vector.shape[:-1])
        return (0.5 * (gaussian.log_det - size * math.log(2 * math.pi) - away)).detach()

    def _check_call(self, x: Any, link_approx: str) -> None:
        self._fitted()
        if self.likelihood.name != "regression":
            check_link(self.likelihood, link_approx)
        batches.check_inputs(x)

    def _affordable(self, width: int) -> int:
        """The number of examples to predict at once, given the gradient elements of one example for each output."""
        width = max(width, self.selection.size if getattr(self.posterior, "dense", False) else 1)
        return max(1, min(128, _MAX_ELEMENTS // (width * max(self.outputs, 1))))

    def _sampled(self, x: Any, samples: int, generator: torch.Generator | None) -> Prediction:
        """The average prediction of the network over sampled weights."""
        batches.check_mode(self.model)
        x = batches.to_model(x, self.model)
        generator = torch.Generator(self._like.device).manual_seed(0) if generator is None else generator
        outputs: list[Tensor] = []
        while len(outputs) < samples:
            for vector in self.sample(
                min(samples - len(outputs), max(1, _MAX_ELEMENTS // self.selection.size)), generator
            ):
                with torch.no_grad(), self.selection.at(self.model, vector):
                    outputs.append(batches.call_model(self.model, x))
        f = torch.stack(outputs)
        mean, centered = f.mean(0), f - f.mean(0)
        covariance = torch.einsum("snc,snd->ncd", centered, centered) / samples
        probs = None
        if self.likelihood.name == "multi_label":
            probs = f.sigmoid().mean(0)
        elif self._has_probs(mean):
            probs = f.softmax(-1).mean(0)
        return Prediction(mean, covariance, probs, self._noise())

    def _has_probs(self, mean: Tensor) -> bool:
        """Whether predictions have probabilities: not for a regression, nor for the reward of a single input."""
        return self.likelihood.name != "regression" and not (
            self.likelihood.name == "reward_model" and mean.shape[1] == 1
        )

    def _noise(self) -> float:
        return self._sigma**2 if self.likelihood.name == "regression" else 0.0

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the posterior, but not the model, to a folder that `load` reads.

        Raises:
            NotFitted: before `fit`, or the weights changed since.
            InvalidArgument: a user-defined likelihood, structure or curvature.
            DiskFull: nothing was written.
        """
        config, tensors = describe(self)
        checkpoint.save(tensors, path, model_type=self.model_type, config=config)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> Laplace:
        """Load the posterior in a folder, around the model that it was fitted to.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            CheckpointError: the model's weights are not those of the fit.
            CorruptedFile: the files are damaged.
        """
        saved = checkpoint.open_model(path, model_type=cls.model_type, config_type=LaplaceConfig)
        return restore(cls, saved.config, saved.checkpoint.tensors(), model, path)


def _group_ids(model: nn.Module, selection: Selection) -> tuple[tuple[str, ...], Int[Tensor, " p"]]:
    """The names of the layers with selected weights, and the index of its layer for each weight.

    A layer is a module with all of its own parameters: a weight and its bias share a precision, as a normalization
    after them is invariant to their common scale only.
    """
    owners = [name.rpartition(".")[0] for name in selection.names]
    layers = tuple(dict.fromkeys(owners))
    ids = torch.zeros(selection.size, dtype=torch.long)
    for name, owner in zip(selection.names, owners, strict=True):
        ids[selection.of(name)] = layers.index(owner)
    return layers, ids


def _expand_prior(
    prior: Float[Tensor, " groups"], layer_of_weight: Int[Tensor, " p"], layers: int
) -> Float[Tensor, " p"]:
    """Expand 1, ``layers`` or P prior precisions to one for each weight; differentiable.

    Raises:
        InvalidArgument: another number of precisions, or one that is not positive and finite.
    """
    size = len(layer_of_weight)
    if len(prior) not in (1, layers, size):
        raise InvalidArgument(
            f"prior_precision has {len(prior)} elements; give 1, one for each of {layers} layers, or one for each of "
            f"{size} weights"
        )
    bad = prior[~((prior > 0) & prior.isfinite())]
    if len(bad):
        raise InvalidArgument(f"prior_precision holds {bad[0].item():g}; precisions are above 0 and finite")
    if len(prior) == 1:
        return prior.expand(size)
    return prior[layer_of_weight] if len(prior) == layers else prior
