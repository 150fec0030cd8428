"""SWAG: a Gaussian over weights from snapshots of SGD with a constant learning rate, started at a trained network.

Notable here:
- mean and variance are running averages, so memory is (rank + 3) weight vectors
- training runs on a copy: the given network, its batch-norm statistics and its mode do not change
- batch norm keeps the statistics of the trained network, so samples need no further pass over the data, and the
  variances are those of the function whose Jacobian a subnetwork posterior uses
- the variances are also the published score for selecting a subnetwork
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.batches import Repeated, call_model, check_data, inputs_and_targets, iterate_batches, num_examples
from pippin.bayes.likelihood import Classification, Likelihood, LikelihoodName, MultiLabel, to_likelihood
from pippin.bayes.prediction import Prediction
from pippin.bayes.weight_subset import All
from pippin.core.checks import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput, NotFitted
from pippin.train import ConstantSchedule, Loss, Trainer

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@checked
@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, as an optimizer for the `Trainer`.

    Attributes:
        lr: learning rate.
        momentum: in [0, 1).
        weight_decay: multiple of the weight that is added to the gradient.
    """

    lr: PositiveFloat = 1e-2
    momentum: Fraction = 0.9
    weight_decay: NonNegativeFloat = 0.0

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """One torch.optim.SGD over all parameters that require gradients.

        Raises:
            InvalidArgument: no parameter requires gradients.
        """
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise InvalidArgument("no parameter of the model requires gradients; there is nothing to train")
        group = {"params": trainable, "base_lr": self.lr}
        return [torch.optim.SGD([group], lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)]


@checked
@dataclass(frozen=True)
class SWAGConfig:
    """The settings of the SGD run and its snapshots.

    Attributes:
        num_snapshots: number of snapshots; 40 is common, the subnetwork paper used 256.
        snapshot_every: steps between snapshots; None is one pass over the loader.
        lr: constant learning rate; 1e-2 in the paper.
        momentum: momentum of SGD.
        weight_decay: multiple of the weight that is added to the mean gradient.
        rank: number of deviations for the low-rank part of the covariance; 0 gives diagonal samples.
    """

    num_snapshots: Annotated[int, Ge(2)] = 40
    snapshot_every: PositiveInt | None = None
    lr: PositiveFloat = 1e-2
    momentum: Fraction = 0.9
    weight_decay: NonNegativeFloat = 3e-4
    rank: NonNegativeInt = 20

    def __post_init__(self) -> None:
        if self.rank == 1:
            raise InvalidArgument(
                "rank is 1, and one deviation has no variance; give 0 for diagonal samples, or 2 or more"
            )

    def optimizer(self) -> SGD:
        """The optimizer of the run."""
        return SGD(self.lr, self.momentum, self.weight_decay)


class SWAG:
    """A Gaussian over weights, fitted to the iterates of SGD with a constant learning rate.

    Args:
        model: a trained network; it is not changed.
        likelihood: name or object; gives the loss, and how predictions of samples are averaged.
        config: settings of the run.

    Attributes:
        mean: [P], the average weights, in the order of ``model.named_parameters()``.
        variance: [P], at least 1e-30 for trained parameters; 0 for those that require no gradients.
        deviations: [rank, P], the last snapshots minus the running average at their time.

    Raises:
        InvalidArgument: no parameter requires gradients, or an unknown likelihood.

    Source: Maddox et al., arXiv:1902.02476, algorithm 1 and eq. (1); variances as scores: arXiv:2010.14689, section 4.
    """

    @checked
    def __init__(
        self, model: nn.Module, likelihood: LikelihoodName | Likelihood, config: SWAGConfig = SWAGConfig()
    ) -> None:
        if not any(p.requires_grad for p in model.parameters()):
            raise InvalidArgument("no parameter of the model requires gradients; there is nothing to train")
        self.model, self.likelihood, self.config = model, to_likelihood(likelihood), config
        self.mean: Tensor | None = None
        self.variance: Tensor | None = None
        self.deviations: Tensor | None = None

    def fit(self, loader: Iterable[Any], *, seed: int = 0) -> SWAG:
        """Run SGD from the trained weights and take the snapshots.

        Args:
            loader: batches (inputs, targets) that can be iterated repeatedly.
            seed: seed of randomness in the model, such as dropout.

        Returns:
            This object.

        Raises:
            InvalidArgument: a loader that can be read only once.
            InvalidInput: a loader that is empty or holds NaN, or targets that do not fit the outputs.
            NonFiniteLoss: training diverged; use a smaller learning rate.
        """
        check_data(loader)
        for _ in iterate_batches(loader, self.model):
            pass  # check all data before the first step
        config = self.config
        every = config.snapshot_every or _length(loader)
        model = copy.deepcopy(self.model)
        objective = _Objective(self.likelihood)
        trainer = Trainer(
            model,
            objective,
            Repeated(loader),
            steps=every * config.num_snapshots,
            optimizer=config.optimizer(),
            schedule=ConstantSchedule(),
            max_grad_norm=None,
            seed=seed,
            show_progress=False,
        )
        start = _vector(model)
        # moments of the difference from the start, as those of the weights themselves would cancel in float32
        first, second = torch.zeros_like(start), torch.zeros_like(start)
        deviations: list[Tensor] = []
        for count in range(1, config.num_snapshots + 1):
            if len(trainer.advance(every)) < every:
                raise InvalidInput(
                    f"the data ended before snapshot {count} of {config.num_snapshots}; give a list or a loader"
                )
            difference = _vector(model) - start
            first += (difference - first) / count
            second += (difference.square() - second) / count
            if config.rank:
                deviations = [*deviations[-(config.rank - 1) :], difference - first]
        trainable = torch.cat([torch.full((p.numel(),), float(p.requires_grad)) for p in self.model.parameters()])
        self.mean = start + first
        self.variance = (second - first.square()).clamp(min=1e-30) * trainable.to(start)
        self.deviations = torch.stack(deviations) if deviations else start.new_zeros(0, len(start))
        return self

    @checked
    def sample(self, n: PositiveInt, generator: torch.Generator | None = None) -> Float[Tensor, "n weights"]:
        r"""Sample weights $\bar w + \tfrac{1}{\sqrt 2} \sigma \odot z_1 + \tfrac{1}{\sqrt{2 (K - 1)}} D^T z_2$.

        Args:
            n: number of samples.
            generator: source of randomness; None takes one with seed 0.

        Raises:
            NotFitted: before `fit`.
        """
        mean, variance, deviations = self._fitted()
        normal = _normal_sampler(generator, mean)
        if len(deviations) < 2:
            return mean + variance.sqrt() * normal(n, len(mean))
        diagonal = (variance / 2).sqrt() * normal(n, len(mean))
        return mean + diagonal + normal(n, len(deviations)) @ deviations / math.sqrt(2 * (len(deviations) - 1))

    @torch.no_grad()
    @checked
    def __call__(
        self, x: Any, *, num_samples: Annotated[int, Ge(2)] = 30, generator: torch.Generator | None = None
    ) -> Prediction:
        """The average prediction of sampled networks.

        Args:
            x: inputs of the model.
            num_samples: number of sampled networks.
            generator: source of randomness; None takes one with seed 0.

        Returns:
            Mean and covariance of the outputs over the networks, and average probabilities for classes or labels.

        Raises:
            NotFitted: before `fit`.
        """
        selection, samples = All().resolve(self.model), []
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            for weights in self.sample(num_samples, generator):
                with selection.at(self.model, weights) as model:
                    samples.append(call_model(model, x))
        finally:
            for module, mode in modes:
                module.training = mode
        outputs = torch.stack(samples)  # (samples, n, outputs)
        mean = outputs.mean(0)
        centered = outputs - mean
        covariance = torch.einsum("snc,snd->ncd", centered, centered) / (num_samples - 1)
        noise = self.likelihood.sigma_noise**2 if self.likelihood.name == "regression" else 0.0
        return Prediction(mean, covariance, _probabilities(self.likelihood, outputs), noise)

    def _fitted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and deviations, if `fit` was called."""
        if self.mean is None or self.variance is None or self.deviations is None:
            raise NotFitted("there are no snapshots yet; call fit(loader) first")
        return self.mean, self.variance, self.deviations


class _Objective:
    """The likelihood's loss, with batch norm in evaluation mode."""

    unit = "examples"

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        """The loss summed over the examples of a batch."""
        for module in model.modules():
            if isinstance(module, NORMS):
                module.eval()
        inputs, y = inputs_and_targets(batch)
        outputs = call_model(model, inputs)
        return Loss(self.likelihood.loss(outputs, self.likelihood.check(outputs, y)), num_examples(inputs))


def _probabilities(likelihood: Likelihood, outputs: Tensor) -> Tensor | None:
    """Probabilities averaged over networks, from logits [s, n, C]; None for a regression."""
    if not isinstance(likelihood, (Classification, MultiLabel)):
        return None
    probs: Tensor = outputs.sigmoid() if isinstance(likelihood, MultiLabel) else outputs.softmax(-1)
    return probs.mean(0)


def _length(loader: Iterable[Any]) -> int:
    """Number of batches of a loader, at least 1."""
    length = len(loader) if isinstance(loader, Sized) else sum(1 for _ in loader)
    if length == 0:
        raise InvalidInput("the loader holds no batch; there is nothing to train on")
    return length


def _vector(model: nn.Module) -> Tensor:
    """All parameters as one vector, detached."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _normal_sampler(generator: torch.Generator | None, like: Tensor) -> Callable[..., Tensor]:
    """A function that samples standard normal noise of a shape; None uses a generator with seed 0."""
    source = generator or torch.Generator(like.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, device=source.device, dtype=like.dtype).to(like.device)

    return normal
