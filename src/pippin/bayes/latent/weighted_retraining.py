r"""Optimization in the latent space of a generative model that is retrained on weighted data as the search proceeds.

Notable here:
- weights depend only on the ranks of the scores (`pippin.bayes.latent.sample_weights`), so retraining is invariant to
  monotone transformations of the objective
- examples are sampled by their weights with replacement, or the losses are weighted, with large weights split in copies
- retraining is fine-tuning: it continues from the weights of the previous round, with a new optimizer
- `ask` and `tell` serve objectives that are evaluated elsewhere; after `save` and `resume` the queries are the same as
  without interruption

Source: Tripp, Daxberger and Hernández-Lobato, "Sample-Efficient Optimization in the Latent Space of Deep Generative
Models via Weighted Retraining", arXiv:2006.09191, eq. 3 (weights), algorithm 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from annotated_types import Gt
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.latent.acquisition import ExpectedImprovement, Search, Trust
from pippin.bayes.latent.sample_weights import check_scores, check_weights, rank_weights, replicate
from pippin.bayes.latent.vae import VAE, Elbo
from pippin.core.checks import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput, ResumeMismatch
from pippin.core.formats import checkpoint
from pippin.data.streams import Shuffled
from pippin.train import AdamW, ConstantSchedule, Trainer

_TYPE = "weighted-retraining"


@runtime_checkable
class LatentModel(Protocol):
    """A generative model with a latent space that can be fine-tuned on weighted examples."""

    def fit(self, x: Tensor, sample_weight: Tensor, epochs: float, seed: int) -> LatentModel:
        """Continue training on weighted examples (weights of mean 1) and return itself; an epoch is len(x) examples."""

    def encode(self, x: Tensor) -> Tensor:
        """Mean codes [n, latent] of examples [n, ...]."""

    def decode(self, z: Tensor) -> Tensor:
        """Examples [n, ...] of codes [n, latent]; deterministic."""


class LatentVAE:
    """A `VAE` as a `LatentModel`; it decodes to the mode of the likelihood.

    That is the rounded mean of a Bernoulli, the most probable category, or the mean of a Gaussian.

    Args:
        vae: the model, trained or not; it is changed in place.
        lr: learning rate of Adam, which starts anew in each fit.
        batch_size: examples per step.
        route: "sampling" samples examples by their weights; "loss" weights their losses, split by `replicate`.
        beta: weight of the KL term.
    """

    @checked
    def __init__(
        self,
        vae: VAE,
        *,
        lr: PositiveFloat = 1e-3,
        batch_size: PositiveInt = 64,
        route: Literal["sampling", "loss"] = "sampling",
        beta: NonNegativeFloat = 1.0,
    ) -> None:
        self.vae, self.batch, self.route = vae, batch_size, route
        self._adam, self._objective = AdamW(lr=lr, weight_decay=0.0), Elbo(beta, weighted=route == "loss")

    @checked
    def fit(self, x: Tensor, sample_weight: Tensor, epochs: NonNegativeFloat, seed: int = 0) -> LatentVAE:
        """Fine-tune on weighted examples; the number of updates is the same on both routes.

        Args:
            x: examples [n, ...].
            sample_weight: weights [n], 0 or more.
            epochs: number of epochs; may be a fraction.
            seed: seed of the batches and of the latent samples.

        Returns:
            The model itself.

        Raises:
            InvalidArgument: a negative weight, one that is not finite, or all weights 0.
            InvalidInput: examples that do not fit the model; see `VAE.check`.
        """
        self.vae.check(x)
        check_weights(sample_weight)
        steps = round(epochs * math.ceil(len(x) / self.batch))
        if not steps:
            return self
        data: Any = _WeightedBatches(x, sample_weight, self.batch, seed)
        if self.route == "loss":
            rows, factors = replicate(sample_weight)
            data = Shuffled(range(len(rows)), self.batch, seed=seed, collate=_pairs(x, rows, factors.to(x.dtype)))
        Trainer(
            self.vae,
            self._objective,
            data,
            steps=steps,
            optimizer=self._adam,
            schedule=ConstantSchedule(),
            seed=seed,
            show_progress=False,
        ).fit()
        return self

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Means of q(z | x), [n, latent], on the CPU."""
        device = next(self.vae.parameters()).device
        return torch.cat([self.vae.encode(part.to(device))[0].cpu() for part in x.split(4096)])

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        """The mode of p(x | z) for each code, [n, ...], on the CPU."""
        device = next(self.vae.parameters()).device
        out = torch.cat([self.vae.decode(part.to(device)).cpu() for part in z.split(4096)])
        if self.vae.config.likelihood == "bernoulli":
            return out.round()
        if self.vae.config.likelihood == "categorical":
            return nn.functional.one_hot(out.argmax(-1), out.shape[-1]).to(out.dtype)
        return out

    def state_dict(self) -> dict[str, Tensor]:
        """The weights of the VAE."""
        return dict(self.vae.state_dict())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the weights of the VAE."""
        self.vae.load_state_dict(state)


@dataclass(frozen=True)
class OptimizationResult:
    """The result of an optimization.

    Attributes:
        best_x: the best of all queried examples; None if all were invalid.
        best_y: its score; NaN if all were invalid.
        history: the score of every query in order; NaN for invalid examples.
        num_invalid: number of invalid queries.
        best_so_far: the best score among the queries so far, after each query; NaN before the first valid one.
    """

    best_x: Tensor | None
    best_y: float
    history: tuple[float, ...]
    num_invalid: int
    best_so_far: tuple[float, ...]


class WeightedRetraining:
    """The optimization loop: retrain on weighted data, search in the latent space, evaluate, add the results, repeat.

    Args:
        model: a model trained on ``x``; it is changed in place.
        x: examples with known scores.
        scores: finite scores of the examples.
        k: ``k`` of `rank_weights`; infinity retrains with uniform weights.
        retrain_every: number of queries between two retrainings.
        init_epochs: epochs of retraining before the first query.
        retrain_epochs: epochs of every further retraining; 0 does not retrain.
        search: proposes codes; None takes `ExpectedImprovement()`.
        maximize: whether larger scores are better.
        invalid_score: score assigned to examples whose score is NaN; None takes the worst of ``scores``.
        weighting: maps scores, larger being better, to weights of mean 1, in place of `rank_weights`: for example
            `dbas_weights`, `cem_pi_weights` or `rwr_weights`.
        trust: maps codes to margins, of which 0 and above is trusted, such as a latent score of a `BayesianVAE` less a
            bound.
        allow_repeats: whether known examples may be proposed again.
        seed: seed of all randomness.

    Attributes:
        x: all examples: the given ones, then the queried ones.
        scores: their scores.
        queries: number of queries with a score.

    Raises:
        InvalidArgument: a model without `fit`, `encode` and `decode`.
        InvalidInput: no data, different lengths, or scores that are not finite; the message names the rows.
    """

    @checked
    def __init__(
        self,
        model: LatentModel,
        x: Float[Tensor, "n ..."],
        scores: Float[Tensor, " n"],
        *,
        k: Annotated[float, Gt(0)] = 1e-3,
        retrain_every: PositiveInt = 50,
        init_epochs: NonNegativeFloat = 1.0,
        retrain_epochs: NonNegativeFloat = 0.1,
        search: Search | None = None,
        maximize: bool = True,
        invalid_score: float | None = None,
        weighting: Callable[[Tensor], Tensor] | None = None,
        trust: Trust | None = None,
        allow_repeats: bool = False,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, LatentModel):
            raise InvalidArgument(f"{type(model).__name__} has not fit, encode and decode; wrap a VAE in LatentVAE")
        if len(x) != len(scores):
            raise InvalidInput(f"{len(x)} examples with {len(scores)} scores; give one for each")
        check_scores(scores)
        self.model, self.x, self.scores = model, x, scores.double()
        self.k, self.retrain_every, self.maximize = k, retrain_every, maximize
        self.init_epochs, self.retrain_epochs = init_epochs, retrain_epochs
        self.search: Search = search or ExpectedImprovement()
        self.weighting, self.trust, self.allow_repeats, self.seed = weighting, trust, allow_repeats, seed
        worst = scores.min() if maximize else scores.max()
        self.invalid_score = float(worst) if invalid_score is None else invalid_score
        self.queries = 0
        self._history: list[float] = []
        self._retrained_at: int | None = None  # number of queries at the last retraining

    @checked
    def ask(self, count: PositiveInt = 1) -> Float[Tensor, "n ..."]:
        """Propose examples to evaluate next; retrains the model first when that is due.

        Args:
            count: the largest number of examples; the search may find fewer.

        Returns:
            Examples [at most count, ...].

        Raises:
            InvalidInput: every example of the last round was invalid.
        """
        if self._retrained_at is None or self.queries - self._retrained_at >= self.retrain_every:
            self._retrain()
        trust = self.trust if self.allow_repeats else self._without_repeats()
        codes = self.search.propose(self.model.decode, count, self._seeded(), trust)
        return self.model.decode(codes)

    def _without_repeats(self) -> Trust:
        """The trust region, less the codes that decode to known examples."""
        known = {row.numpy().tobytes() for row in self.x}

        def margins(z: Tensor) -> Tensor:
            inside = torch.zeros(len(z)) if self.trust is None else self.trust(z)
            repeated = torch.tensor([row.numpy().tobytes() in known for row in self.model.decode(z).to(self.x.dtype)])
            return torch.where(repeated, -math.inf, inside)

        return margins

    def tell(self, x: Float[Tensor, "n ..."], scores: Float[Tensor, " n"]) -> None:
        """Report the scores of evaluated examples.

        Args:
            x: the examples.
            scores: their scores; NaN for an invalid example, which also counts as a query.

        Raises:
            InvalidInput: different lengths, examples of another shape, or infinite scores.
        """
        if scores.ndim != 1:
            raise InvalidInput(f"scores of shape {tuple(scores.shape)} for {len(x)} examples; give one number for each")
        if len(x) != len(scores) or x.shape[1:] != self.x.shape[1:]:
            raise InvalidInput(f"{tuple(x.shape)} examples with {len(scores)} scores; known are {tuple(self.x.shape)}")
        if scores.isinf().any():
            raise InvalidInput(
                f"score {int(scores.isinf().nonzero()[0, 0])} is infinite; give NaN for an invalid example"
            )
        known = scores.double().nan_to_num(nan=self.invalid_score)
        self.x, self.scores = torch.cat([self.x, x.to(self.x.dtype)]), torch.cat([self.scores, known])
        self._history += scores.double().tolist()
        self.queries += len(x)
        if self._retrained_at is not None:
            self.search.update(self.model.encode(x), known if self.maximize else -known)

    @checked
    def run(self, objective: Callable[[Tensor], Any], budget: PositiveInt) -> OptimizationResult:
        """Propose and evaluate examples until the budget is used up.

        Args:
            objective: maps examples [n, ...] to scores [n], NaN for invalid examples.
            budget: total number of queries, including earlier ones.

        Raises:
            InvalidInput: scores that are not one number for each example, a round of invalid examples only, or a search
                that has nothing left to propose.

        Warns:
            InferenceAtRisk: the budget ends before the model is retrained on new examples.
        """
        if self.retrain_every > budget:
            warnings.warn(
                f"retrain_every is {self.retrain_every} and the budget {budget}: the model is "
                "never retrained on what the search finds",
                InferenceAtRisk,
                stacklevel=2,
            )
        while self.queries < budget:
            since = 0 if self._retrained_at is None else self.queries - self._retrained_at
            count = min(budget - self.queries, self.retrain_every - since % self.retrain_every)
            x = self.ask(min(count, self.search.batch_size or count))
            if not len(x):
                raise InvalidInput("the search has no example left to propose; widen it, or relax the trust")
            found = objective(x)
            try:
                scores = torch.as_tensor(found).double()
            except (TypeError, ValueError, RuntimeError) as error:
                raise InvalidInput(
                    f"the objective gave a {type(found).__name__} for {len(x)} examples; return one number for each"
                ) from error
            self.tell(x, scores)
        return self.result

    @property
    def result(self) -> OptimizationResult:
        """The result of all queries so far."""
        found = torch.tensor(self._history, dtype=torch.float64)
        signed = (found if self.maximize else -found).nan_to_num(nan=-math.inf)
        running = signed.cummax(0).values if len(signed) else signed
        running = torch.where(running == -math.inf, math.nan, running if self.maximize else -running)
        invalid = int(found.isnan().sum())
        if invalid == len(found):
            return OptimizationResult(None, math.nan, tuple(self._history), invalid, tuple(running.tolist()))
        best = int(signed.argmax())
        x = self.x[len(self.x) - self.queries + best]
        return OptimizationResult(x, float(found[best]), tuple(self._history), invalid, tuple(running.tolist()))

    def weights(self) -> Float[Tensor, " n"]:
        """The weights [n] of all examples in the next retraining."""
        if self.weighting is not None:
            return self.weighting(self.scores if self.maximize else -self.scores)
        return rank_weights(self.scores, self.k, maximize=self.maximize)

    def _retrain(self) -> None:
        recent = self._history[self._retrained_at or 0 :]
        if recent and all(map(math.isnan, recent)):
            raise InvalidInput(
                f"all of the last {len(recent)} examples were invalid; train the model longer, or keep the search "
                "nearer to the data with trust="
            )
        epochs = self.init_epochs if self._retrained_at is None else self.retrain_epochs
        if epochs:
            self.model.fit(self.x, self.weights().to(self.x.dtype), epochs, self._seeded())
        self._retrained_at = self.queries
        self._fit_search(len(self.x))

    def _fit_search(self, count: int) -> None:
        y = self.scores if self.maximize else -self.scores
        self.search.fit(self.model.encode(self.x[:count]), y[:count], self._seeded(self._retrained_at))

    def _seeded(self, queries: int | None = None) -> int:
        """A seed that depends on the number of queries only, so that a resumed run continues identically."""
        return (self.seed * 1_000_003 + (self.queries if queries is None else queries)) % (1 << 31)

    def _settings(self) -> dict[str, Any]:
        return {
            "k": repr(float(self.k)),
            "retrain_every": self.retrain_every,
            "init_epochs": self.init_epochs,
            "retrain_epochs": self.retrain_epochs,
            "maximize": self.maximize,
            "allow_repeats": self.allow_repeats,
            "seed": self.seed,
        }

    def save(self, path: str | Path) -> None:
        """Write examples, scores and the model's weights to a folder.

        Raises:
            InvalidArgument: the model has no state_dict.
            DiskFull: nothing was written.
        """
        if not hasattr(self.model, "state_dict"):
            raise InvalidArgument(f"{type(self.model).__name__} has no state_dict, so that it cannot be saved")
        config = {
            "model_type": _TYPE,
            "retrained_at": self._retrained_at,
            "queries": self.queries,
            "settings": self._settings(),
        }
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {"x": self.x, "scores": self.scores, "history": torch.tensor(self._history, dtype=torch.float64)}
        checkpoint.save_folder(path, config, tensors)

    def resume(self, path: str | Path) -> WeightedRetraining:
        """Continue from a folder that `save` wrote, with the same queries as without interruption.

        Returns:
            The search itself.

        Raises:
            ModelNotFound: there is no such folder.
            ResumeMismatch: the folder was written with other settings, which the message names, or by something else.
        """
        opened = checkpoint.open_folder(path)
        config, mine = opened.config, self._settings()
        theirs = config.get("settings", {})
        apart = [
            f"{name}: {theirs.get(name)} there, {value} here"
            for name, value in mine.items()
            if theirs.get(name) != value
        ]
        if config.get("model_type") != _TYPE or apart:
            raise ResumeMismatch(
                f"{path} was written by another search: {'; '.join(apart) or config.get('model_type')}"
            )
        tensors = {name: opened.tensor(name).clone() for name in opened.names()}
        state = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(state)  # type: ignore[attr-defined]
        self.x, self.scores = tensors["x"], tensors["scores"]
        self._history, self.queries = tensors["history"].tolist(), config["queries"]
        self._retrained_at = config["retrained_at"]
        if self._retrained_at is not None:
            count = len(self.x) - self.queries + self._retrained_at
            self._fit_search(count)
            y = self.scores if self.maximize else -self.scores
            if len(self.x) > count:
                self.search.update(self.model.encode(self.x[count:]), y[count:])
        return self


class _WeightedBatches:
    """Endless batches, sampled by weight with replacement."""

    def __init__(self, x: Tensor, weights: Tensor, batch: int, seed: int) -> None:
        self.x, self.weights, self.batch, self.seed = x, weights, batch, seed

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield self.x[torch.multinomial(self.weights, self.batch, replacement=True, generator=generator)]


def _pairs(x: Tensor, rows: Tensor, factors: Tensor) -> Callable[[list[int]], tuple[Tensor, Tensor]]:
    def collate(chosen: list[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(chosen)
        return x[rows[index]], factors[index]

    return collate
