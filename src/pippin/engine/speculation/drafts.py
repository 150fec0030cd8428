"""Drafts of speculative decoding: the interface of a drafter, sampling of a draft, and the length of drafts.

Notable here:
- verification preserves the distribution of the answer for any draft
- whether a position is drafted may depend on the tokens before it, but not on the draft token itself; exact acceptance
  relies on that
- when draft tokens are rejected, drafts get shorter, then rarer, both within bounds, and longer again once accepted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from pippin.engine.decoding.sampling import Sampler, sample_index
from pippin.engine.grammar.constraint import Constraint
from pippin.engine.model_runner import Runner
from pippin.nn.lora import Adapter

MAX_PAUSE = 16
"""Maximum number of passes without a draft, after rejected drafts."""


@dataclass
class Draft:
    """Draft tokens that may come next.

    Args:
        tokens: the draft tokens, at least one.
        probabilities: the distribution that each token was sampled from; None where nothing was sampled (a look-up, a
            greedy draft).
        resume: the first layer that is not computed yet for the tokens of this pass; 0 if none is.
        residual: input of that layer, for the pending tokens (those that are not in the target's cache) and those of
            the draft; None if ``resume`` is 0.
    """

    tokens: list[int]
    probabilities: Float64[Tensor, "drafted vocab"] | None = None
    resume: int = 0
    residual: Float[Tensor, "tokens width"] | None = None


@dataclass(frozen=True)
class CachePosition:
    """The position of a sequence in the cache of the target model.

    Args:
        runner: runner of the target model.
        block_table: the blocks of the sequence.
        num_computed_tokens: tokens in them.
        adapter: the adapter of the sequence; None for the base model.
        other_tables: the blocks of the other groups of layers.
    """

    runner: Runner
    block_table: Sequence[int]
    num_computed_tokens: int
    adapter: Adapter | None = None
    other_tables: Sequence[Sequence[int]] = ()


@runtime_checkable
class Drafter(Protocol):
    """Drafts for one request."""

    def draft(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        constraint: Constraint | None,
        position: CachePosition | None,
    ) -> Draft | None:
        """Draft at most ``max_tokens`` tokens after ``token_ids``; sampler and constraint end in their first state."""


class DraftLength:
    """Number of tokens to draft, adapted to how many were accepted.

    After a draft that is accepted completely the length doubles, up to ``max_tokens``; after one that is accepted in
    part it is the number of accepted tokens plus one; after one that is rejected at its first token it is halved. When
    drafts of one token are rejected, the next 1, 2, 4, ... passes (at most `MAX_PAUSE`) have no draft.

    >>> length = DraftLength(4)
    >>> for accepted in (0, 0, 0):
    ...     length.update(length.next(), accepted)
    >>> [length.next() for _ in range(3)]
    [0, 1, 1]
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = self._now = max_tokens
        self._pause = self._left = 0

    def next(self) -> int:
        """Tokens to draft in this pass; 0 for none."""
        if self._left:
            self._left -= 1
            return 0
        return self._now

    def update(self, drafted: int, accepted: int) -> None:
        """Record how many tokens of a draft were accepted."""
        if accepted:
            self._now = min(self.max_tokens, 2 * max(self._now, 1) if accepted == drafted else accepted + 1)
            self._pause = self._left = 0
        elif drafted > 1 or self._now > 1:
            self._now = max(1, self._now // 2)
        else:
            self._pause = self._left = min(MAX_PAUSE, 2 * self._pause or 1)


def sample_draft(
    logits: Float[Tensor, vocab],
    step: Callable[[Sequence[int]], Float[Tensor, vocab]],
    max_tokens: int,
    sampler: Sampler,
    constraint: Constraint | None,
    *,
    generator: torch.Generator,
    ends: Sequence[int],
    skip_forced: bool,
) -> Draft:
    """A draft sampled token by token, under the options and the constraint of the request.

    Args:
        logits: logits of the first token; changed in place.
        step: returns the logits after further tokens.
        max_tokens: longest draft, in tokens.
        sampler: sampler of the request; it does not change.
        constraint: constraint of the request; it is advanced, and rolled back.
        generator: random generator of the draft.
        ends: tokens that end an answer, and with it a draft.
        skip_forced: append tokens that the constraint forces without sampling, as the request will.
    """
    sampler, greedy = sampler.fork(generator), sampler.temperature == 0
    tokens: list[int] = []
    distributions: list[Tensor] = []
    while True:
        done = len(tokens)
        sampler.penalize(logits)
        if constraint is not None:
            constraint.apply(logits)
        distribution = None if greedy else sampler.probabilities(logits)
        tokens.append(sampler.sample(logits) if distribution is None else sample_index(distribution, generator))
        if distribution is not None:
            distributions.append(distribution)
            sampler.observe(tokens[-1])
        if tokens[-1] in ends:
            break
        if constraint is not None:
            constraint.accept(tokens[-1])
            forced = constraint.forced()[: max_tokens - len(tokens)] if skip_forced else []
            for token in takewhile(lambda token: token not in ends, forced):
                constraint.accept(token)
                sampler.observe(token)
                tokens.append(token)
                distributions.append(
                    torch.zeros_like(logits, dtype=torch.float64).index_fill_(0, torch.tensor(token), 1.0)
                )
            if constraint.finished:
                break
        if len(tokens) >= max_tokens:
            break
        logits = step(tokens[done:])
    if constraint is not None:
        constraint.rollback(len(tokens) - (tokens[-1] in ends))
    return Draft(tokens, None if greedy else torch.stack(distributions))
