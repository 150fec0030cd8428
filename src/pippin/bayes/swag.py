"""SWAG: a Gaussian over weights from the snapshots of a constant-rate SGD run that starts at a trained network.

Notable here:
- mean, diagonal variance and the last deviations are kept as running sums, so memory is (rank + 3) vectors of weights
- the run goes through the `Trainer` on a copy: the network that was given, its statistics and its mode stay as they are
- batch norm keeps the statistics of the trained network all along, so every sample is a network that can be called at
  once, and variances belong to the function whose Jacobian a subnetwork posterior uses
- the variances by themselves are the score by which a subnetwork is chosen
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.batches import call, check_data, read, size, split
from pippin.bayes.likelihood import Classification, Likelihood, MultiLabel, likelihood as chosen
from pippin.bayes.predictive import Prediction
from pippin.bayes.subset import All
from pippin.core.errors import InvalidArgument, InvalidInput, NotFitted
from pippin.train import Constant, Loss, Trainer

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, as an optimiser for the `Trainer`.

    Attributes:
        lr: the rate.
        momentum: in [0, 1).
        weight_decay: added to the gradient as this multiple of the weight.
    """

    lr: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InvalidArgument(f"a rate of {self.lr}; give a positive number")
        if not 0 <= self.momentum < 1:
            raise InvalidArgument(f"a momentum of {self.momentum}; give a number in [0, 1)")
        if not 0 <= self.weight_decay < math.inf:
            raise InvalidArgument(f"a weight decay of {self.weight_decay}; give 0 or more")

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """One torch.optim.SGD over everything that wants a gradient.

        Raises:
            InvalidArgument: nothing does.
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise InvalidArgument("no parameter of the model wants a gradient; there is nothing to move")
        group = {"params": trained, "base_lr": self.lr}
        return [torch.optim.SGD([group], lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)]


@dataclass(frozen=True)
class SWAGConfig:
    """How the snapshots are taken.

    Attributes:
        snapshots: how many; 40 is a usual number, 256 was published for choosing subnetworks.
        every: steps between two of them; None is one pass over the loader.
        lr: the constant rate; published 1e-2.
        momentum: of the descent.
        weight_decay: added to the mean gradient of an example as this multiple of the weight.
        rank: deviations kept for the low-rank part of samples; 0 makes them diagonal.
    """

    snapshots: int = 40
    every: int | None = None
    lr: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 3e-4
    rank: int = 20

    def __post_init__(self) -> None:
        if self.snapshots < 2:
            raise InvalidArgument(f"{self.snapshots} snapshots have no variance; take 2 or more")
        if self.every is not None and self.every < 1:
            raise InvalidArgument(f"a snapshot every {self.every} steps; give 1 or more")
        if self.rank < 0 or self.rank == 1:
            raise InvalidArgument(f"a rank of {self.rank}; give 0 for diagonal samples, or 2 or more deviations")
        self.optimiser()

    def optimiser(self) -> SGD:
        """The descent that makes the snapshots."""
        return SGD(self.lr, self.momentum, self.weight_decay)


class SWAG:
    """The Gaussian of the weights that a constant-rate descent visits.

    Args:
        model: trained; its weights are where the descent starts. It is left as it is.
        likelihood: what the outputs mean, as an object or a word: gives the loss, and how samples are averaged.
        config: how snapshots are taken.

    Attributes:
        mean: [P], the average weights, in the order of ``model.named_parameters()``.
        variance: [P], at least 1e-30 where the parameter was trained; 0 where it wants no gradient.
        deviations: [rank, P], the last snapshots less the average at their time.

    Raises:
        InvalidArgument: no parameter wants a gradient, or an unknown likelihood.

    Source: Maddox et al., arXiv:1902.02476, algorithm 1 and eq. (1); variances as scores: arXiv:2010.14689, section 4.
    """

    def __init__(self, model: nn.Module, likelihood: str | Likelihood, config: SWAGConfig = SWAGConfig()) -> None:
        if not any(p.requires_grad for p in model.parameters()):
            raise InvalidArgument("no parameter of the model wants a gradient; there is nothing to move")
        self.model, self.likelihood, self.config = model, chosen(likelihood), config
        self.mean: Tensor | None = None
        self.variance: Tensor | None = None
        self.deviations: Tensor | None = None

    def fit(self, loader: Iterable[Any], *, seed: int = 0) -> SWAG:
        """Descend from the trained weights and take the snapshots.

        Args:
            loader: batches (inputs, targets) that can be iterated again and again.
            seed: of what is random in the model, dropout say.

        Returns:
            This object.

        Raises:
            InvalidArgument: the loader can be read once only.
            InvalidInput: the loader is empty, it holds NaN, or its targets do not fit the outputs.
            NonFiniteLoss: the descent diverged; take a smaller rate.
        """
        check_data(loader)
        for _ in read(loader, self.model):
            pass  # checked as a whole before the first step
        config = self.config
        every = config.every or _length(loader)
        model = copy.deepcopy(self.model)
        objective = _Objective(self.likelihood)
        trainer = Trainer(
            model,
            objective,
            _Again(loader),
            steps=every * config.snapshots,
            optimiser=config.optimiser(),
            schedule=Constant(),
            clip=None,
            seed=seed,
            show=False,
        )
        start = _vector(model)
        # moments of the distance from the start: squares of the weights themselves would cancel in float32
        first, second = torch.zeros_like(start), torch.zeros_like(start)
        kept: list[Tensor] = []
        for count in range(1, config.snapshots + 1):
            if len(trainer.advance(every)) < every:
                raise InvalidInput(
                    f"the data ended before snapshot {count} of {config.snapshots}; give a list or a loader"
                )
            moved = _vector(model) - start
            first += (moved - first) / count
            second += (moved.square() - second) / count
            if config.rank:
                kept = [*kept[-(config.rank - 1) :], moved - first]
        trained = torch.cat([torch.full((p.numel(),), float(p.requires_grad)) for p in self.model.parameters()])
        self.mean = start + first
        self.variance = (second - first.square()).clamp(min=1e-30) * trained.to(start)
        self.deviations = torch.stack(kept) if kept else start.new_zeros(0, len(start))
        return self

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n weights"]:
        r"""Weights $\bar w + \tfrac{1}{\sqrt 2} \sigma \odot z_1 + \tfrac{1}{\sqrt{2 (K - 1)}} D^T z_2$.

        Args:
            n: how many.
            generator: where the randomness comes from; None is a new one with seed 0.

        Raises:
            NotFitted: before `fit`.
            InvalidArgument: ``n`` is below 1.
        """
        mean, variance, deviations = self._fitted()
        if n < 1:
            raise InvalidArgument(f"{n} samples; give 1 or more")
        draw = _normal(generator, mean)
        if len(deviations) < 2:
            return mean + variance.sqrt() * draw(n, len(mean))
        diagonal = (variance / 2).sqrt() * draw(n, len(mean))
        return mean + diagonal + draw(n, len(deviations)) @ deviations / math.sqrt(2 * (len(deviations) - 1))

    @torch.no_grad()
    def __call__(self, x: Any, *, samples: int = 30, generator: torch.Generator | None = None) -> Prediction:
        """The average over sampled networks.

        Args:
            x: inputs of the model.
            samples: networks that are averaged.
            generator: where the randomness comes from; None is a new one with seed 0.

        Returns:
            Mean and covariance of the outputs over the networks, and average probabilities where there are classes.

        Raises:
            NotFitted: before `fit`.
            InvalidArgument: fewer than 2 samples.
        """
        if samples < 2:
            raise InvalidArgument(f"{samples} samples have no covariance; give 2 or more")
        selection, drawn = All().resolve(self.model), []
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            for weights in self.sample(samples, generator):
                with selection.at(self.model, weights) as model:
                    drawn.append(call(model, x))
        finally:
            for module, mode in modes:
                module.training = mode
        outputs = torch.stack(drawn)
        mean = outputs.mean(0)
        centred = outputs - mean
        covariance = torch.einsum("snc,snd->ncd", centred, centred) / (samples - 1)
        noise = self.likelihood.sigma_noise**2 if self.likelihood.name == "regression" else 0.0
        return Prediction(mean, covariance, _probabilities(self.likelihood, outputs), noise)

    def _fitted(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.mean is None or self.variance is None or self.deviations is None:
            raise NotFitted("there are no snapshots yet; call fit(loader) first")
        return self.mean, self.variance, self.deviations


class _Objective:
    """The likelihood's loss, with batch norm held at the statistics of the trained network."""

    unit = "examples"

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        """Sum over the examples of a batch."""
        for module in model.modules():
            if isinstance(module, NORMS):
                module.eval()
        inputs, y = split(batch)
        outputs = call(model, inputs)
        return Loss(self.likelihood.loss(outputs, self.likelihood.check(outputs, y)), size(inputs))


class _Again:
    """A loader, over and over."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch = None
            for batch in self.loader:
                yield batch
            if batch is None:
                return


def _probabilities(likelihood: Likelihood, outputs: Tensor) -> Tensor | None:
    """The average over networks [s, n, C], where the outputs are logits."""
    if not isinstance(likelihood, (Classification, MultiLabel)):
        return None
    probs: Tensor = outputs.sigmoid() if isinstance(likelihood, MultiLabel) else outputs.softmax(-1)
    return probs.mean(0)


def _length(loader: Iterable[Any]) -> int:
    length = len(loader) if isinstance(loader, Sized) else sum(1 for _ in loader)
    if length == 0:
        raise InvalidInput("the loader holds no batch; there is nothing to descend on")
    return length


def _vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _normal(generator: torch.Generator | None, like: Tensor) -> Callable[..., Tensor]:
    """A drawer of normal numbers that leaves the global generators alone."""
    source = generator or torch.Generator(like.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, device=source.device, dtype=like.dtype).to(like.device)

    return draw
