r"""Laplace during training: marginal-likelihood training of the prior, and continual learning of tasks.

Notable here:
- both use the `Trainer` with an objective that has a Gaussian penalty on the weights; between stretches of training the
  curvature is fitted and the Gaussian updated
- the penalty is part of the objective, scaled by the batch's share of the data, so that the minimum of the objective is
  the mode of the posterior
- continual learning stores the sum of curvatures and one mode, so memory does not grow with the number of tasks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes import batches
from pippin.bayes.laplace.curvature import CurvatureName
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.laplace.structure import Structure, StructureName
from pippin.bayes.likelihood import Likelihood, LikelihoodName
from pippin.bayes.weight_subset import Selection, Subset, SubsetName
from pippin.core.checks import NonNegativeInt, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, NotFitted
from pippin.train.objective import Loss
from pippin.train.optimizers import AdamW
from pippin.train.schedules import ConstantSchedule, CosineSchedule, Schedule
from pippin.train.trainer import Trainer

_CONSTANT = ConstantSchedule()
_DECAY = CosineSchedule(min_lr_ratio=0.01)


@dataclass(frozen=True)
class MarglikTrainingResult:
    """The result of `marglik_training`.

    Attributes:
        laplace: the posterior around the weights with the highest evidence, which the model now has.
        log_marginal_likelihoods: log marginal likelihood after each fit, in nats.
        epochs: the epochs of these fits.
        losses: mean objective of each epoch.
    """

    laplace: Laplace
    log_marginal_likelihoods: list[float]
    epochs: list[int]
    losses: list[float]


@checked
def marglik_training(
    model: nn.Module,
    likelihood: LikelihoodName | Likelihood,
    data: Iterable[Any],
    *,
    epochs: PositiveInt,
    hessian_structure: StructureName | Structure = "kron",
    subset_of_weights: SubsetName | Subset = "all",
    curvature: CurvatureName = "ggn",
    prior_structure: Literal["scalar", "layerwise", "diag"] = "layerwise",
    prior_precision: float = 1.0,
    lr: PositiveFloat = 1e-3,
    schedule: Schedule = _CONSTANT,
    burn_in: NonNegativeInt = 0,
    fit_every: PositiveInt = 1,
    seed: int = 0,
    show_progress: bool = False,
) -> MarglikTrainingResult:
    r"""Train a network and its prior together, on the training data alone.

    Each epoch minimizes $s \sum_n l_n + \frac12 (\theta - \mu)^\top \Lambda (\theta - \mu)$; after the burn-in, every
    few epochs, the curvature is fitted and $\Lambda$ (and the noise of a regression) set to the maximum of the
    evidence.

    Args:
        model: trained in place; it ends in evaluation mode with the weights of the highest evidence.
        likelihood: see `Laplace`.
        data: batches, iterable once for each epoch; a shuffled loader gives each epoch its own order.
        epochs: number of epochs.
        hessian_structure: see `Laplace`.
        subset_of_weights: the weights whose prior is tuned; the others have no prior.
        curvature: see `Laplace`.
        prior_structure: see `Laplace.tune`.
        prior_precision: initial prior precision.
        lr: learning rate of AdamW, which has no weight decay.
        schedule: factor of the learning rate over the run.
        burn_in: epochs before the first fit.
        fit_every: epochs between fits.
        seed: seed of the training.
        show_progress: whether to show a progress bar.

    Raises:
        InvalidArgument: arguments out of range; see also `Laplace`.
        InvalidInput: no batches; see also `Laplace.fit`.

    Source: Immer et al. 2021, arXiv:2104.04975, algorithm 1.
    """
    if burn_in >= epochs:
        raise InvalidArgument(f"burn_in is {burn_in} of {epochs} epochs; at least one epoch must follow it")
    batches.check_data(data)
    model.eval()
    laplace = Laplace(model, likelihood, subset_of_weights, hessian_structure, curvature, prior_precision)
    length, examples = _measure(data, laplace.model)
    penalty = _Penalized(laplace, examples)
    trainer = _trainer(laplace.model, penalty, data, length, epochs, lr, schedule, seed, show_progress)
    result = MarglikTrainingResult(laplace, [], [], [])
    best: dict[str, Any] = {}
    for epoch in range(1, epochs + 1):
        losses = trainer.advance(length)
        result.losses.append(sum(losses) / len(losses))
        if epoch > burn_in and (epoch == epochs or (epoch - burn_in) % fit_every == 0):
            laplace.fit(data)
            laplace.tune(prior_structure)
            penalty.update()
            value = float(laplace.log_marginal_likelihood().detach())
            result.log_marginal_likelihoods.append(value)
            result.epochs.append(epoch)
            if not best or value > best["value"]:
                best = {"value": value, "prior": laplace.prior_precision, "sigma": laplace.sigma_noise}
                best["state"] = {name: tensor.clone() for name, tensor in laplace.model.state_dict().items()}
    laplace.model.load_state_dict(best["state"])
    laplace.prior_precision = best["prior"]
    if laplace.likelihood.name == "regression":
        laplace.sigma_noise = best["sigma"]
    laplace.fit(data)
    return result


@checked
@dataclass
class ContinualLaplace:
    """Continual learning: the posterior after each task is the prior of the next.

    Args:
        model: trained in place; in evaluation mode between tasks.
        likelihood: see `Laplace`.
        hessian_structure: see `Laplace`; curvatures are summed over tasks.
        subset_of_weights: the weights with a posterior; the others are not regularized, so use "all" or freeze them.
        prior_precision: prior precision before the first task.
        strength: factor of the penalty; 1 is Bayes' rule, above 1 forgets less.
        lr: peak learning rate of AdamW, which has no weight decay; it decays along a cosine in each task.
        seed: seed of the training; task i uses seed + i.

    >>> learner = ContinualLaplace(nn.Linear(2, 2), "classification", hessian_structure="full")
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> learner.fit([(x, torch.tensor([0, 1]))], epochs=20).num_tasks
    1
    """

    model: nn.Module
    likelihood: LikelihoodName | Likelihood
    hessian_structure: StructureName | Structure = "kron"
    subset_of_weights: SubsetName | Subset = "all"
    prior_precision: float = 1e-3
    strength: PositiveFloat = 1.0
    lr: PositiveFloat = 1e-3
    seed: int = 0
    num_tasks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.model.eval()
        self._laplace = Laplace(
            self.model,
            self.likelihood,
            self.subset_of_weights,
            self.hessian_structure,
            prior_precision=self.prior_precision,
        )

    @property
    def laplace(self) -> Laplace:
        """The posterior after the tasks so far.

        Raises:
            NotFitted: before the first.
        """
        if not self.num_tasks:
            raise NotFitted("no task was trained on yet; call fit(data, epochs=...) first")
        return self._laplace

    @checked
    def fit(self, data: Iterable[Any], *, epochs: PositiveInt, show_progress: bool = False) -> ContinualLaplace:
        """Train on one more task.

        Args:
            data: batches of the task, iterable once for each epoch.
            epochs: number of epochs.
            show_progress: whether to show a progress bar.

        Returns:
            The learner itself.

        Raises:
            InvalidArgument: see `Laplace.fit`.
            InvalidInput: see `Laplace.fit`.
        """
        batches.check_data(data)
        laplace = self._laplace
        length, examples = _measure(data, laplace.model)
        penalty = _Penalized(laplace, examples, self.strength)
        if self.num_tasks:
            gaussian, mean = laplace.posterior, laplace.mean
            assert mean is not None
            penalty.quadratic = lambda vector: gaussian.quadratic((vector - mean)[None])[0]
        seed = self.seed + self.num_tasks
        _trainer(laplace.model, penalty, data, length, epochs, self.lr, _DECAY, seed, show_progress).advance(
            length * epochs
        )
        laplace.fit(data, accumulate=True)
        self.num_tasks += 1
        return self


class _Penalized:
    """The scaled loss plus half the quadratic form of a Gaussian over the weights, as an objective."""

    unit = "examples"

    def __init__(self, laplace: Laplace, examples: int, strength: float = 1.0) -> None:
        self.laplace, self.examples, self.strength = laplace, examples, strength
        self.quadratic: Callable[[Tensor], Tensor]
        self.update()

    def update(self) -> None:
        """Use the posterior's current prior and noise."""
        laplace = self.laplace
        prior = laplace._expand(laplace.prior_precision).to(laplace._like.dtype)
        self.scale = laplace.sigma_noise**-2 / laplace.temperature
        self.quadratic = lambda vector: (prior * (vector - laplace.prior_mean).square()).sum()

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        """The loss of a batch, with its share of the penalty."""
        inputs, targets = batches.inputs_and_targets(batch)
        f = batches.call_model(model, inputs)
        y = self.laplace.likelihood.check(f.detach(), targets)
        penalty = self.quadratic(_live(self.laplace.selection, model))
        share = self.strength * len(f) / self.examples
        total = self.scale * self.laplace.likelihood.loss(f, y) + 0.5 * share * penalty.to(f.dtype)
        return Loss(total, float(len(f)))


def _live(selection: Selection, model: nn.Module) -> Float[Tensor, " p"]:
    """The selected weights, with gradients."""
    flat = torch.cat([parameter.flatten() for parameter in selection.parameters(model).values()])
    return flat if selection.indices is None else flat[selection.indices.to(flat.device)]


def _measure(data: Iterable[Any], model: nn.Module) -> tuple[int, int]:
    """Check the data; returns its numbers of batches and examples."""
    lengths = [len(targets) for _, targets in batches.iterate_batches(data, model)]
    return len(lengths), sum(lengths)


def _trainer(
    model: nn.Module,
    penalty: _Penalized,
    data: Iterable[Any],
    length: int,
    epochs: int,
    lr: float,
    schedule: Schedule,
    seed: int,
    show: bool,
) -> Trainer:
    optimizer = AdamW(lr=lr, weight_decay=0.0)
    return Trainer(
        model,
        penalty,
        batches.Repeated(data),
        steps=length * epochs,
        optimizer=optimizer,
        schedule=schedule,
        max_grad_norm=None,
        seed=seed,
        show_progress=show,
    )
