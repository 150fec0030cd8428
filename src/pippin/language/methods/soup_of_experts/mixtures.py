r"""Mixtures of domains for training: sampled domain weights, and batches sampled by them.

Notable here:
- the domain weights of each batch are sampled first, then the domain of each of its items; each micro-batch of a step
  and each process of a distributed run has different weights
- mixtures are sparse, like those of specialists, and sometimes the whole corpus, so that the generic model is trained

Source: arXiv:2502.01804; the distribution over mixtures is Pippin's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import PositiveInt, Probability, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.streams import DataStream
from pippin.data.token_batches import TokenBatch
from pippin.language.methods.soup_of_experts.domains import Domains

T = TypeVar("T")
S = TypeVar("S")


@checked
@dataclass(frozen=True)
class MetaSampler:
    """The meta-distribution: mostly sparse domain weights, sometimes those of the whole corpus.

    Args:
        num_domains: number of domains.
        support: numbers of domains in a mixture, equally likely; the weights on them are uniform over the simplex.
        generic: the weights of the whole corpus; a domain of weight 0 has no data and is never sampled. None for equal
            weights.
        p_generic: probability of the generic weights.

    Raises:
        InvalidArgument: a support that cannot be filled, or wrong generic weights.

    >>> weights = MetaSampler(5, support=(2,), p_generic=0.0).sample(torch.Generator().manual_seed(0))
    >>> int((weights > 0).sum()), round(float(weights.sum()), 6)
    (2, 1.0)
    """

    num_domains: PositiveInt
    support: tuple[int, ...] = (1, 2, 4, 8)
    generic: Sequence[float] | None = None
    p_generic: Probability = 0.1

    def __post_init__(self) -> None:
        filled = int((self.generic_weights > 0).sum())
        if not self.support or min(self.support) < 1 or max(self.support) > filled:
            raise InvalidArgument(f"support is {self.support}; give numbers from 1 to {filled}, the domains with data")

    @cached_property
    def generic_weights(self) -> Float[Tensor, num_domains]:
        """The weights of the whole corpus."""
        weights = [1.0 / self.num_domains] * self.num_domains if self.generic is None else self.generic
        return Domains(tuple(map(str, range(self.num_domains)))).check_weights(weights)

    def sample(self, generator: torch.Generator) -> Float[Tensor, num_domains]:
        """Domain weights, non-negative and summing to 1."""
        whole = self.generic_weights
        if float(torch.rand((), generator=generator)) < self.p_generic:
            return whole
        size = self.support[int(torch.randint(len(self.support), (), generator=generator))]
        chosen = torch.multinomial((whole > 0).float(), size, generator=generator)
        parts = torch.empty(size).exponential_(generator=generator)
        return torch.zeros(self.num_domains).index_copy_(0, chosen, parts / parts.sum())


class DomainBatches(Generic[T, S]):
    """Domain weights and a batch sampled by them, endless: a resumable stream for `pippin.train.Trainer`.

    Args:
        streams: an endless one for each domain; None for a domain without data.
        weights: the sampler of each batch's weights, or constant weights.
        batch_size: items of a batch.
        collate: makes the batch of a list of items.
        seed: of the weights, and of the domain of each item.

    Raises:
        InvalidArgument: numbers out of range, wrong weights, or a domain without data but with a positive weight.
    """

    @checked
    def __init__(
        self,
        streams: Sequence[DataStream[T] | None],
        weights: MetaSampler | Tensor | Sequence[float],
        batch_size: PositiveInt,
        *,
        collate: Callable[[list[T]], S],
        seed: int = 0,
    ) -> None:
        self.streams, self.size, self.collate, self.seed = list(streams), batch_size, collate, seed
        names = Domains(tuple(str(index) for index in range(len(self.streams))))
        self.weights = weights if isinstance(weights, MetaSampler) else names.check_weights(weights)
        whole = names.check_weights(
            self.weights.generic_weights if isinstance(self.weights, MetaSampler) else self.weights
        )
        for index, stream in enumerate(self.streams):
            if stream is None and whole[index] > 0:
                raise InvalidArgument(f"domain {index} has no data but the weight {whole[index]:.4g}; make that 0")
        self._num_batches = 0

    def __iter__(self) -> Iterator[tuple[Float[Tensor, domains], S]]:
        """Weights and batches from the cursor on."""
        num_batches, open_ = self._num_batches, dict[int, Iterator[T]]()
        while True:
            generator = torch.Generator().manual_seed((self.seed << 32) + num_batches)
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
            num_batches += 1
            self._num_batches = num_batches
            yield weights, self.collate([item for item in items if item is not None])

    def state_dict(self) -> dict[str, Any]:
        """Number of batches so far, and the cursor of each domain."""
        cursors = [None if stream is None else stream.state_dict() for stream in self.streams]
        return {"num_batches": self._num_batches, "domains": cursors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor.

        Raises:
            InvalidArgument: the cursor of a stream over other domains.
        """
        if [cursor is None for cursor in state["domains"]] != [stream is None for stream in self.streams]:
            raise InvalidArgument(f"the cursor is one over {len(state['domains'])} domains, not of these")
        self._num_batches = int(state["num_batches"])
        for stream, cursor in zip(self.streams, state["domains"], strict=True):
            if stream is not None:
                stream.load_state_dict(cursor)


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    """One batch of the rows of several, all of one length.

    >>> one = TokenBatch(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]), documents=(1, 1))
    >>> concatenate([one, TokenBatch(one.ids, one.targets)]).documents
    (1, 1, 2)
    """
    counts: list[int] = []
    for batch in batches:
        counts += batch.documents or (batch.ids.shape[1],) * len(batch.ids)
    ids, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("ids", "targets"))
    whole = all(batch.documents is None for batch in batches)
    return TokenBatch(ids, targets, None if whole else tuple(counts))
