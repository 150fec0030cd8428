r"""Training a soup of experts: mixtures of domains at random, batches drawn by them, and the loss over both.

Notable here:
- the weights of each batch are drawn first, then the domain of each of its rows; micro-batches of a step and processes
  that train together each have weights of their own
- mixtures are sparse, as specialists want them, and now and then the whole corpus, so that the generalist is not lost
- an objective is any other one, of the model for the mixture of its batch

Source: arXiv:2502.01804; the distribution over mixtures is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.batches import TokenBatch
from pippin.data.ordering import Stream
from pippin.language.domains import Domains
from pippin.language.objectives import held_out
from pippin.train.objective import Loss, Objective

if TYPE_CHECKING:
    from pippin.language.soup import SoupOfExperts

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class MetaSampler:
    """Draws weights of domains: mostly sparse ones, as specialists have, sometimes those of the whole corpus.

    Attributes:
        domains: how many there are.
        support: numbers of domains in a mixture, each as likely; the weights on them are uniform over the simplex.
        generic: the whole corpus's weights; a domain of weight 0 has no data and is never drawn. None: all alike.
        p_generic: how often those are given.

    Raises:
        InvalidArgument: a support that cannot be filled, a probability outside [0, 1], or wrong generic weights.

    >>> weights = MetaSampler(5, support=(2,), p_generic=0.0).sample(torch.Generator().manual_seed(0))
    >>> int((weights > 0).sum()), round(float(weights.sum()), 6)
    (2, 1.0)
    """

    domains: int
    support: tuple[int, ...] = (1, 2, 4, 8)
    generic: Sequence[float] | None = None
    p_generic: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 <= self.p_generic <= 1.0:
            raise InvalidArgument(f"p_generic is a probability, got {self.p_generic}")
        filled = int((self.whole > 0).sum())
        if not self.support or min(self.support) < 1 or max(self.support) > filled:
            raise InvalidArgument(f"support is {self.support}; give numbers from 1 to {filled}, the domains with data")

    @cached_property
    def whole(self) -> Float[Tensor, domains]:
        """The generic weights."""
        weights = [1.0 / self.domains] * self.domains if self.generic is None else self.generic
        return Domains(tuple(map(str, range(self.domains)))).checked(weights)

    def sample(self, generator: torch.Generator) -> Float[Tensor, domains]:
        """Weights that are not negative and sum to 1."""
        whole = self.whole
        if float(torch.rand((), generator=generator)) < self.p_generic:
            return whole
        size = self.support[int(torch.randint(len(self.support), (), generator=generator))]
        chosen = torch.multinomial((whole > 0).float(), size, generator=generator)
        parts = torch.empty(size).exponential_(generator=generator)
        return torch.zeros(self.domains).index_copy_(0, chosen, parts / parts.sum())


class DomainBatches(Generic[T, S]):
    """Weights and a batch drawn by them, without end: a resumable stream for `pippin.train.Trainer`.

    Args:
        streams: one for each domain, without end; None for a domain without data.
        weights: what draws the weights of each batch, or weights that stay as they are.
        size: items of a batch.
        collate: makes the batch of a list of items.
        seed: of the weights, and of the domain of each item.

    Raises:
        InvalidArgument: numbers out of range, wrong weights, or a domain without data that would be drawn.
    """

    def __init__(
        self,
        streams: Sequence[Stream[T] | None],
        weights: MetaSampler | Tensor | Sequence[float],
        size: int,
        *,
        collate: Callable[[list[T]], S],
        seed: int = 0,
    ) -> None:
        if size < 1:
            raise InvalidArgument(f"a batch has at least 1 item, got {size}")
        self.streams, self.size, self.collate, self.seed = list(streams), size, collate, seed
        names = Domains(tuple(str(index) for index in range(len(self.streams))))
        self.weights = weights if isinstance(weights, MetaSampler) else names.checked(weights)
        whole = names.checked(self.weights.whole if isinstance(self.weights, MetaSampler) else self.weights)
        for index, stream in enumerate(self.streams):
            if stream is None and whole[index] > 0:
                raise InvalidArgument(f"domain {index} has no data but the weight {whole[index]:.4g}; make that 0")
        self._drawn = 0

    def __iter__(self) -> Iterator[tuple[Float[Tensor, domains], S]]:
        """Weights and batches from the cursor on."""
        drawn, open_ = self._drawn, dict[int, Iterator[T]]()
        while True:
            generator = torch.Generator().manual_seed((self.seed << 32) + drawn)
            weights = self.weights.sample(generator) if isinstance(self.weights, MetaSampler) else self.weights
            items = []
            for index in torch.multinomial(weights, self.size, replacement=True, generator=generator).tolist():
                stream = self.streams[index]
                assert stream is not None
                if index not in open_:
                    open_[index] = iter(stream)
                items.append(next(open_[index], None))
            if any(item is None for item in items):
                raise InvalidInput("the data of a domain has ended; give streams without end")
            drawn += 1
            self._drawn = drawn
            yield weights, self.collate([item for item in items if item is not None])

    def state_dict(self) -> dict[str, Any]:
        """Batches given, and the cursor of each domain."""
        cursors = [None if stream is None else stream.state_dict() for stream in self.streams]
        return {"drawn": self._drawn, "domains": cursors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor.

        Raises:
            InvalidArgument: the cursor of a stream over other domains.
        """
        if [cursor is None for cursor in state["domains"]] != [stream is None for stream in self.streams]:
            raise InvalidArgument(f"the cursor is one over {len(state['domains'])} domains, not of these")
        self._drawn = int(state["drawn"])
        for stream, cursor in zip(self.streams, state["domains"], strict=True):
            if stream is not None:
                stream.load_state_dict(cursor)


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """One batch of the rows of several, all of one length.

    >>> one = TokenBatch(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]), documents=(1, 1))
    >>> joined([one, TokenBatch(one.ids, one.targets)]).documents
    (1, 1, 2)
    """
    counts: list[int] = []
    for batch in batches:
        counts += batch.documents or (batch.ids.shape[1],) * len(batch.ids)
    ids, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("ids", "targets"))
    whole = all(batch.documents is None for batch in batches)
    return TokenBatch(ids, targets, None if whole else tuple(counts))


class OverMixtures:
    """An objective over a soup, of batches with their mixture: another objective, of the model for that mixture.

    Beside the metrics of the other, "coefficients" is the 2-norm of the coefficients: with `SoupOfExperts.expert_norms`
    it shows whether weight decay shrinks the experts or the router.

    Args:
        objective: of the model, such as `NextToken`.

    Source: arXiv:2502.01804, eq. of the loss over the meta-distribution.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.unit = getattr(objective, "unit", "units")
        self._soup: SoupOfExperts | None = None
        self._resumed: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module, batch: tuple[Any, Any], generator: torch.Generator) -> Loss:
        """The loss of a batch; ``batch`` is its mixture and what the objective learns from."""
        soup: Any = model
        if self._resumed:
            soup.load_state_dict(self._resumed, strict=False)
            self._resumed = {}
        self._soup = soup
        weights, inner = batch
        soup.saw(weights)
        loss: Loss = soup.applied(weights, lambda module: self.objective(module, inner, generator))
        norm = soup.coefficients(weights).detach().norm() * loss.count
        return Loss(loss.total, loss.count, {**loss.metrics, "coefficients": norm})

    def state_dict(self) -> dict[str, Tensor]:
        """Which mixtures were seen."""
        return {} if self._soup is None else {name: getattr(self._soup, name).clone() for name in _SEEN}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there; the soup has it with the next batch."""
        self._resumed = dict(state)


_SEEN: Final = ("seen_support", "seen_entropy", "seen_domains")


def specialised(
    batches: Sequence[Sequence[TokenBatch]], generic: Sequence[float]
) -> Callable[[nn.Module], Mapping[str, float]]:
    """A measure for `pippin.train.Evaluation` on a soup of a decoder.

    "loss" is the mean over held-out tokens, each read by the specialist of its domain; "generic" the same by the one
    model for the weights of the whole corpus.

    Args:
        batches: held-out batches of each domain; may be empty for some.
        generic: the weights of the whole corpus.
    """

    def measure(model: nn.Module) -> Mapping[str, float]:
        soup: Any = model
        totals, count = {"loss": 0.0, "generic": 0.0}, 0
        for index, part in enumerate(batches):
            if not part:
                continue
            own = [float(index == other) for other in range(len(batches))]
            learnt = sum(batch.learnt for batch in part)
            for name, weights in (("loss", own), ("generic", generic)):
                totals[name] += learnt * soup.applied(weights, held_out(part))["loss"]
            count += learnt
        if not count:
            raise InvalidArgument("the held-out batches hold no token that a loss is taken of")
        return {name: total / count for name, total in totals.items()}

    return measure
