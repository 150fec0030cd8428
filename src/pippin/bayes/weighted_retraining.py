r"""Search in the latent space of a generative model that is retrained on what the search finds, the best counting most.

Notable here:
- a weight depends on the rank of a score alone (`pippin.bayes.rank_weights`), so retraining is the same for any
  monotone change of the objective
- weights enter by drawing with replacement, or as factors of the loss with the large ones cut into copies
- retraining is fine-tuning: it goes on from the weights of the round before, with a fresh optimiser
- `ask` and `tell` serve objectives that run elsewhere; `save` and `resume` go on after a restart with the same queries

Source: Tripp, Daxberger and Hernández-Lobato, "Sample-Efficient Optimization in the Latent Space of Deep Generative
Models via Weighted Retraining", arXiv:2006.09191, eq. 3 (weights), algorithm 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.acquisition import ExpectedImprovement, Search, Trust
from pippin.bayes.rank_weights import check_k, check_scores, check_weights, rank_weights, replicated
from pippin.bayes.vae import VAE, Elbo
from pippin.core import checkpoint
from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput, ResumeMismatch
from pippin.data.ordering import Shuffled
from pippin.train import AdamW, Constant, Trainer

_TYPE = "weighted-retraining"


@runtime_checkable
class LatentModel(Protocol):
    """A generative model that can be fine-tuned and searched in."""

    def fit(self, x: Tensor, sample_weight: Tensor, epochs: float, seed: int) -> None:
        """Go on training with these weights (mean 1); an epoch is as many examples as there are."""

    def encode(self, x: Tensor) -> Tensor:
        """Mean codes [n, latent]."""

    def decode(self, z: Tensor) -> Tensor:
        """Examples [n, ...]; the same ones each time."""


class LatentVAE:
    """A `VAE` as a `LatentModel`: what it decodes is rounded, or the likeliest choice, or the mean of a Gaussian.

    Args:
        vae: trained before, or not.
        lr: of the Adam that each fit begins anew.
        batch: examples of a step.
        route: "sampling" draws examples by their weights; "loss" multiplies their losses, with `replicated` copies.
        beta: of the bound.

    Raises:
        InvalidArgument: an unknown route, or a number out of range.
    """

    def __init__(
        self,
        vae: VAE,
        *,
        lr: float = 1e-3,
        batch: int = 64,
        route: Literal["sampling", "loss"] = "sampling",
        beta: float = 1.0,
    ) -> None:
        if route not in ("sampling", "loss"):
            raise InvalidArgument(f"route is {route!r}; choose sampling or loss")
        if batch < 1:
            raise InvalidArgument(f"batch is {batch}; give 1 or more")
        self.vae, self.batch, self.route = vae, batch, route
        self._adam, self._objective = AdamW(lr=lr, weight_decay=0.0), Elbo(beta, weighted=route == "loss")

    def fit(self, x: Tensor, sample_weight: Tensor, epochs: float, seed: int = 0) -> None:
        """Fine-tune for so many epochs, a fraction being fine; the number of updates is the same on either route.

        Raises:
            InvalidArgument: negative epochs, or weights as `replicated`.
            InvalidInput: examples that the model cannot have made.
        """
        if not 0 <= epochs < math.inf:
            raise InvalidArgument(f"epochs is {epochs}; give 0 or more")
        self.vae.check(x)
        check_weights(sample_weight)
        steps = round(epochs * math.ceil(len(x) / self.batch))
        if not steps:
            return
        data: Any = _Drawn(x, sample_weight, self.batch, seed)
        if self.route == "loss":
            rows, factors = replicated(sample_weight)
            data = Shuffled(range(len(rows)), self.batch, seed=seed, collate=_pairs(x, rows, factors.to(x.dtype)))
        how: dict[str, Any] = {"optimiser": self._adam, "schedule": Constant(), "seed": seed, "show": False}
        Trainer(self.vae, self._objective, data, steps=steps, **how).fit()

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Means of q(z | x)."""
        device = next(self.vae.parameters()).device
        return torch.cat([self.vae.encode(part.to(device))[0].cpu() for part in x.split(4096)])

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        """The likeliest x, up to rounding."""
        device = next(self.vae.parameters()).device
        out = torch.cat([self.vae.decode(part.to(device)).cpu() for part in z.split(4096)])
        if self.vae.config.likelihood == "bernoulli":
            return out.round()
        if self.vae.config.likelihood == "categorical":
            return nn.functional.one_hot(out.argmax(-1), out.shape[-1]).to(out.dtype)
        return out

    def state_dict(self) -> dict[str, Tensor]:
        """The weights."""
        return dict(self.vae.state_dict())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""
        self.vae.load_state_dict(state)


@dataclass(frozen=True)
class OptimisationResult:
    """What a search found.

    Attributes:
        best_x: the best example of all that were queried; None where all were invalid.
        best_y: its score.
        history: the score of every query in order; NaN where it was invalid.
        invalid: how many were.
        best_so_far: the best score after each query, of queries alone; NaN before the first valid one.
    """

    best_x: Tensor | None
    best_y: float
    history: tuple[float, ...]
    invalid: int
    best_so_far: tuple[float, ...]


class WeightedRetraining:
    """The loop: retrain with weights, search in the codes, evaluate, add what was evaluated, again.

    Args:
        model: trained on ``x`` before; it is changed in place.
        x: examples with known scores.
        scores: of each, finite.
        k: of `rank_weights`; infinity retrains without weights.
        retrain_every: queries between two retrainings.
        init_epochs: of retraining before the first query.
        retrain_epochs: of every further one; 0 leaves the model as it is.
        search: what proposes codes; None is `ExpectedImprovement()`.
        maximize: whether larger scores are better.
        invalid_score: what an example counts as whose score is NaN; None takes the worst of ``scores``.
        weighting: weights of mean 1 from scores of which larger is better, in place of `rank_weights`.
        trust: margins of codes, 0 and above being trusted, such as a latent score of a `BayesianVAE` less a bound.
        repeat: whether an example may be asked for that is known already.
        seed: of everything random.

    Attributes:
        x: all examples, those that were asked for last.
        scores: theirs.
        queries: how many were told.

    Raises:
        InvalidArgument: a number outside its range.
        InvalidInput: no data, lengths that differ, or scores that are not finite; the rows are named.
    """

    def __init__(
        self,
        model: LatentModel,
        x: Float[Tensor, "n ..."],
        scores: Float[Tensor, " n"],
        *,
        k: float = 1e-3,
        retrain_every: int = 50,
        init_epochs: float = 1.0,
        retrain_epochs: float = 0.1,
        search: Search | None = None,
        maximize: bool = True,
        invalid_score: float | None = None,
        weighting: Callable[[Tensor], Tensor] | None = None,
        trust: Trust | None = None,
        repeat: bool = False,
        seed: int = 0,
    ) -> None:
        check_k(k)
        if retrain_every < 1:
            raise InvalidArgument(f"retrain_every is {retrain_every}; give 1 query or more")
        if not (0 <= init_epochs < math.inf and 0 <= retrain_epochs < math.inf):
            raise InvalidArgument(f"init_epochs {init_epochs} and retrain_epochs {retrain_epochs} are 0 or more")
        if not isinstance(model, LatentModel):
            raise InvalidArgument(f"{type(model).__name__} has not fit, encode and decode; wrap a VAE in LatentVAE")
        if len(x) != len(scores):
            raise InvalidInput(f"{len(x)} examples with {len(scores)} scores; give one for each")
        check_scores(scores)
        self.model, self.x, self.scores = model, x, scores.double()
        self.k, self.retrain_every, self.maximize = k, retrain_every, maximize
        self.init_epochs, self.retrain_epochs = init_epochs, retrain_epochs
        self.search: Search = search or ExpectedImprovement()
        self.weighting, self.trust, self.repeat, self.seed = weighting, trust, repeat, seed
        worst = scores.min() if maximize else scores.max()
        self.invalid_score = float(worst) if invalid_score is None else invalid_score
        self.queries = 0
        self._history: list[float] = []
        self._began: int | None = None  # queries at the last retraining

    def ask(self, count: int = 1) -> Float[Tensor, "n ..."]:
        """Examples to evaluate next; retrains first where that is due.

        Args:
            count: how many at most; a search may know of fewer.

        Raises:
            InvalidArgument: a count below 1.
            InvalidInput: every example of the last round was invalid.
        """
        if count < 1:
            raise InvalidArgument(f"count is {count}; ask for 1 or more")
        if self._began is None or self.queries - self._began >= self.retrain_every:
            self._retrain()
        code = self.search.propose(
            self.model.decode, count, self._seeded(), self.trust if self.repeat else self._fresh()
        )
        return self.model.decode(code)

    def _fresh(self) -> Trust:
        """Margins of trust, and minus infinity where a code decodes to what is known."""
        known = {row.numpy().tobytes() for row in self.x}

        def margins(z: Tensor) -> Tensor:
            inside = torch.zeros(len(z)) if self.trust is None else self.trust(z)
            old = torch.tensor([row.numpy().tobytes() in known for row in self.model.decode(z).to(self.x.dtype)])
            return torch.where(old, -math.inf, inside)

        return margins

    def tell(self, x: Float[Tensor, "n ..."], scores: Float[Tensor, " n"]) -> None:
        """What came out: NaN for an example that is invalid; it still counts as a query.

        Raises:
            InvalidInput: lengths that differ, examples of another shape, or infinite scores.
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
        if self._began is not None:
            self.search.told(self.model.encode(x), known if self.maximize else -known)

    def run(self, objective: Callable[[Tensor], Any], budget: int) -> OptimisationResult:
        """Ask and tell until so many examples were evaluated.

        Args:
            objective: scores [n] of examples [n, ...], NaN where one is invalid.
            budget: queries in all, those before included.

        Raises:
            InvalidArgument: a budget below 1.
            InvalidInput: scores that are no list of numbers, every example of a round was invalid, or the search has
                nothing left to propose.

        Warns:
            InferenceAtRisk: the budget ends before the first retraining that new examples take part in.
        """
        if budget < 1:
            raise InvalidArgument(f"budget is {budget}; give 1 query or more")
        if self.retrain_every > budget:
            warnings.warn(
                f"retrain_every is {self.retrain_every} and the budget {budget}: no found example is ever learnt from",
                InferenceAtRisk,
                stacklevel=2,
            )
        while self.queries < budget:
            before = 0 if self._began is None else self.queries - self._began
            room = min(budget - self.queries, self.retrain_every - before % self.retrain_every)
            x = self.ask(min(room, self.search.batch or room))
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
    def result(self) -> OptimisationResult:
        """What was found so far."""
        found = torch.tensor(self._history, dtype=torch.float64)
        signed = (found if self.maximize else -found).nan_to_num(nan=-math.inf)
        running = signed.cummax(0).values if len(signed) else signed
        running = torch.where(running == -math.inf, math.nan, running if self.maximize else -running)
        invalid = int(found.isnan().sum())
        if invalid == len(found):
            return OptimisationResult(None, math.nan, tuple(self._history), invalid, tuple(running.tolist()))
        best = int(signed.argmax())
        x = self.x[len(self.x) - self.queries + best]
        return OptimisationResult(x, float(found[best]), tuple(self._history), invalid, tuple(running.tolist()))

    def weights(self) -> Float[Tensor, " n"]:
        """Those of the next retraining."""
        if self.weighting is not None:
            return self.weighting(self.scores if self.maximize else -self.scores)
        return rank_weights(self.scores, self.k, maximize=self.maximize)

    def _retrain(self) -> None:
        recent = self._history[self._began or 0 :]
        if recent and all(map(math.isnan, recent)):
            raise InvalidInput(
                f"all of the last {len(recent)} examples were invalid; train the model longer, or keep the search "
                "nearer to the data with trust="
            )
        epochs = self.init_epochs if self._began is None else self.retrain_epochs
        if epochs:
            self.model.fit(self.x, self.weights().to(self.x.dtype), epochs, self._seeded())
        self._began = self.queries
        self._begin_search(len(self.x))

    def _begin_search(self, count: int) -> None:
        y = self.scores if self.maximize else -self.scores
        self.search.begin(self.model.encode(self.x[:count]), y[:count], self._seeded(self._began))

    def _seeded(self, queries: int | None = None) -> int:
        """A seed for what follows so many queries; what was drawn before has no part in it."""
        return (self.seed * 1_000_003 + (self.queries if queries is None else queries)) % (1 << 31)

    def _settings(self) -> dict[str, Any]:
        return {
            "k": repr(float(self.k)),
            "retrain_every": self.retrain_every,
            "init_epochs": self.init_epochs,
            "retrain_epochs": self.retrain_epochs,
            "maximize": self.maximize,
            "repeat": self.repeat,
            "seed": self.seed,
        }

    def save(self, folder: str | Path) -> None:
        """Write examples, scores and the model's weights.

        Raises:
            InvalidArgument: the model has no state_dict.
            DiskFull: as `pippin.core.checkpoint.save_folder`.
        """
        if not hasattr(self.model, "state_dict"):
            raise InvalidArgument(f"{type(self.model).__name__} has no state_dict, so that it cannot be saved")
        config = {"model_type": _TYPE, "began": self._began, "queries": self.queries, "settings": self._settings()}
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {"x": self.x, "scores": self.scores, "history": torch.tensor(self._history, dtype=torch.float64)}
        checkpoint.save_folder(folder, config, tensors)

    def resume(self, folder: str | Path) -> WeightedRetraining:
        """Go on from what `save` wrote, with the queries that would have followed.

        Raises:
            ModelNotFound: no such folder.
            ResumeMismatch: it was written by a search with other settings or of something else; they are named.
        """
        opened = checkpoint.open_folder(folder)
        config, mine = opened.config, self._settings()
        theirs = config.get("settings", {})
        apart = [
            f"{name}: {theirs.get(name)} there, {value} here"
            for name, value in mine.items()
            if theirs.get(name) != value
        ]
        if config.get("model_type") != _TYPE or apart:
            raise ResumeMismatch(
                f"{folder} was written by another search: {'; '.join(apart) or config.get('model_type')}"
            )
        tensors = {name: opened.tensor(name).clone() for name in opened.names()}
        state = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(state)  # type: ignore[attr-defined]
        self.x, self.scores = tensors["x"], tensors["scores"]
        self._history, self.queries, self._began = tensors["history"].tolist(), config["queries"], config["began"]
        if self._began is not None:
            count = len(self.x) - self.queries + self._began
            self._begin_search(count)
            y = self.scores if self.maximize else -self.scores
            if len(self.x) > count:
                self.search.told(self.model.encode(self.x[count:]), y[count:])
        return self


class _Drawn:
    """Batches drawn by weight, with replacement, without end."""

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
