r"""Laplace while a network trains: priors learnt by the evidence as it goes, and tasks learnt one after the other.

Notable here:
- both are the one `Trainer` with an objective whose penalty is a Gaussian over the weights; between two stretches of it
  the curvature is fitted and the Gaussian moves
- the weight decay is in the objective, weighted by the share of the data that a batch is, so that its minimum is the
  mode that the posterior is an expansion of
- a continual learner keeps sums of curvatures and one mode, so memory does not grow with the tasks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes import batches
from pippin.bayes.laplace import Laplace
from pippin.bayes.likelihood import Likelihood
from pippin.bayes.structure import Structure
from pippin.bayes.subset import Selection, Subset
from pippin.core.errors import InvalidArgument, NotFitted
from pippin.train.objective import Loss
from pippin.train.optimisers import AdamW
from pippin.train.schedules import Constant, Cosine, Schedule
from pippin.train.trainer import Trainer

_CONSTANT = Constant()
_DECAY = Cosine(final=0.01)


@dataclass(frozen=True)
class EvidenceTraining:
    """What came of training by the evidence.

    Attributes:
        laplace: the posterior around the weights of the best evidence, which the model now has.
        evidence: log marginal likelihood after each fit, in nats.
        epochs: the epochs after which these were.
        losses: mean objective of each epoch.
    """

    laplace: Laplace
    evidence: list[float]
    epochs: list[int]
    losses: list[float]


def train_by_evidence(
    model: nn.Module,
    likelihood: str | Likelihood,
    data: Iterable[Any],
    *,
    epochs: int,
    structure: str | Structure = "kron",
    subset: str | Subset = "all",
    curvature: str = "ggn",
    per: str = "layer",
    prior_precision: float = 1.0,
    lr: float = 1e-3,
    schedule: Schedule = _CONSTANT,
    burn_in: int = 0,
    every: int = 1,
    seed: int = 0,
    show: bool = False,
) -> EvidenceTraining:
    r"""Train a network and its prior together, on the training data alone.

    Each epoch minimises $s \sum_n l_n + \frac12 (\theta - \mu)^\top \Lambda (\theta - \mu)$; after the burn-in, every
    few epochs, the curvature is fitted and $\Lambda$ (and the noise of a regression) set to the maximum of the
    evidence.

    Args:
        model: is trained in place; it ends in evaluation mode with the weights of the best evidence.
        likelihood: as in `Laplace`.
        data: batches, iterable once for each epoch; a shuffled loader gives each epoch its own order.
        epochs: in all.
        structure: of the curvature.
        subset: which weights have a prior that is learnt; the others have none.
        curvature: its kind.
        per: as in `Laplace.tune`.
        prior_precision: at the start.
        lr: of AdamW, without its own weight decay.
        schedule: factor of the learning rate over the run.
        burn_in: epochs before the first fit.
        every: epochs between fits.
        seed: of the training.
        show: whether the trainer draws a bar.

    Raises:
        InvalidArgument: numbers out of range; as `Laplace`.
        InvalidInput: no batches; as `Laplace.fit`.

    Source: Immer et al. 2021, arXiv:2104.04975, algorithm 1.
    """
    if epochs < 1 or every < 1 or not 0 <= burn_in < epochs:
        raise InvalidArgument(
            f"{epochs} epochs with a burn-in of {burn_in} and a fit every {every}: at least one epoch must follow the "
            "burn-in"
        )
    batches.check_data(data)
    model.eval()
    laplace = Laplace(model, likelihood, subset, structure, curvature, prior_precision)
    length, examples = _measure(data, laplace.model)
    penalty = _Penalised(laplace, examples)
    trainer = _trainer(laplace.model, penalty, data, length, epochs, lr, schedule, seed, show)
    result = EvidenceTraining(laplace, [], [], [])
    best: dict[str, Any] = {}
    for epoch in range(1, epochs + 1):
        losses = trainer.advance(length)
        result.losses.append(sum(losses) / len(losses))
        if epoch > burn_in and (epoch == epochs or (epoch - burn_in) % every == 0):
            laplace.fit(data)
            laplace.tune("evidence", per)
            penalty.update()
            value = float(laplace.log_marginal_likelihood().detach())
            result.evidence.append(value)
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


@dataclass
class ContinualLaplace:
    """Learn tasks one after the other: the posterior of those before is the prior of the next.

    Args:
        model: is trained in place; in evaluation mode between tasks.
        likelihood: as in `Laplace`.
        structure: of the curvature; its sums over tasks are kept.
        subset: which weights have a posterior; the others stay free, so take "all" or freeze them.
        prior_precision: before the first task.
        strength: factor of the penalty; 1 is Bayes' rule, above 1 forgets less.
        lr: of AdamW, without its own weight decay; it falls by a cosine over each task.
        seed: of the training; task i adds i.

    >>> learner = ContinualLaplace(nn.Linear(2, 2), "classification", structure="full")
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> learner.learn([(x, torch.tensor([0, 1]))], epochs=20).tasks
    1
    """

    model: nn.Module
    likelihood: str | Likelihood
    structure: str | Structure = "kron"
    subset: str | Subset = "all"
    prior_precision: float = 1e-3
    strength: float = 1.0
    lr: float = 1e-3
    seed: int = 0
    tasks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not self.strength > 0:
            raise InvalidArgument(f"strength is {self.strength}; give a factor above 0")
        self.model.eval()
        self._laplace = Laplace(
            self.model, self.likelihood, self.subset, self.structure, prior_precision=self.prior_precision
        )

    @property
    def laplace(self) -> Laplace:
        """The posterior after the tasks so far.

        Raises:
            NotFitted: before the first.
        """
        if not self.tasks:
            raise NotFitted("no task was learnt yet; call learn(data, epochs=...) first")
        return self._laplace

    def learn(self, data: Iterable[Any], *, epochs: int, show: bool = False) -> ContinualLaplace:
        """Learn a task.

        Args:
            data: its batches, iterable once for each epoch.
            epochs: over them.
            show: whether the trainer draws a bar.

        Raises:
            InvalidArgument: no epochs; as `Laplace.fit`.
            InvalidInput: as `Laplace.fit`.
        """
        if epochs < 1:
            raise InvalidArgument(f"epochs is {epochs}; give 1 or more")
        batches.check_data(data)
        laplace = self._laplace
        length, examples = _measure(data, laplace.model)
        penalty = _Penalised(laplace, examples, self.strength)
        if self.tasks:
            gaussian, mean = laplace.posterior, laplace.mean
            assert mean is not None
            penalty.quadratic = lambda vector: gaussian.quadratic((vector - mean)[None])[0]
        seed = self.seed + self.tasks
        _trainer(laplace.model, penalty, data, length, epochs, self.lr, _DECAY, seed, show).advance(length * epochs)
        laplace.fit(data, accumulate=True)
        self.tasks += 1
        return self


class _Penalised:
    """The summed loss at the likelihood's scale, and half the quadratic form of a Gaussian over the weights."""

    unit = "examples"

    def __init__(self, laplace: Laplace, examples: int, strength: float = 1.0) -> None:
        self.laplace, self.examples, self.strength = laplace, examples, strength
        self.quadratic: Callable[[Tensor], Tensor]
        self.update()

    def update(self) -> None:
        """Take the prior and the noise that the posterior has now."""
        laplace = self.laplace
        prior = laplace._expand(laplace.prior_precision).to(laplace._like.dtype)
        self.scale = laplace.sigma_noise**-2 / laplace.temperature
        self.quadratic = lambda vector: (prior * (vector - laplace.prior_mean).square()).sum()

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        """The loss of a batch, with its share of the penalty."""
        inputs, targets = batches.split(batch)
        f = batches.call(model, inputs)
        y = self.laplace.likelihood.check(f.detach(), targets)
        penalty = self.quadratic(_live(self.laplace.selection, model))
        share = self.strength * len(f) / self.examples
        total = self.scale * self.laplace.likelihood.loss(f, y) + 0.5 * share * penalty.to(f.dtype)
        return Loss(total, float(len(f)))


def _live(selection: Selection, model: nn.Module) -> Float[Tensor, " p"]:
    """The chosen weights, with gradients."""
    flat = torch.cat([parameter.flatten() for parameter in selection.parameters(model).values()])
    return flat if selection.indices is None else flat[selection.indices.to(flat.device)]


class _Again:
    """Data, over and over."""

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.data


def _measure(data: Iterable[Any], model: nn.Module) -> tuple[int, int]:
    """How many batches and examples the data has; its values are checked on the way."""
    lengths = [len(targets) for _, targets in batches.read(data, model)]
    return len(lengths), sum(lengths)


def _trainer(
    model: nn.Module,
    penalty: _Penalised,
    data: Iterable[Any],
    length: int,
    epochs: int,
    lr: float,
    schedule: Schedule,
    seed: int,
    show: bool,
) -> Trainer:
    if not lr > 0:
        raise InvalidArgument(f"lr is {lr}; give a learning rate above 0")
    optimiser = AdamW(lr=lr, weight_decay=0.0)
    return Trainer(
        model,
        penalty,
        _Again(data),
        steps=length * epochs,
        optimiser=optimiser,
        schedule=schedule,
        clip=None,
        seed=seed,
        show=show,
    )
