"""Guesses at what comes next: what a draft is, who makes it, and how long it may be.

Notable here:
- a draft is a pure bet: whoever checks it makes the answer's law right, however bad the guess
- whether a position is guessed at all may depend on what came before it, never on what was guessed there; that is
  what exact acceptance rests on
- looking up what followed the same few tokens before costs no model at all, and one dictionary entry per token
- drafts that do not pay get shorter, then rarer, both within bounds, and come back when they pay
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from pippin.engine.constraint import Constraint
from pippin.engine.runner import Runner
from pippin.engine.sampling import Sampler, pick
from pippin.nn.lora import Adapter

NGRAMS = (4, 3, 2)
"""Lengths of the token sequences that are looked up; the longest that occurred before is followed."""
LONGEST_PAUSE = 16
"""Passes without a draft, at most, while drafts do not pay."""


@dataclass
class Draft:
    """Tokens that may come next.

    Args:
        tokens: the guess, at least one.
        probabilities: with which each token was drawn; None where nothing was drawn (a look-up, a greedy guess).
        resume: the first layer that is not computed yet for the tokens of this pass; 0 for all.
        residual: what enters that layer, for the pending tokens (those that the target's cache does not hold) and
            those of the draft; None where ``resume`` is 0.
    """

    tokens: list[int]
    probabilities: Float64[Tensor, "drafted vocab"] | None = None
    resume: int = 0
    residual: Float[Tensor, "tokens width"] | None = None


@dataclass(frozen=True)
class Place:
    """Where a sequence lies in the cache of the model that answers.

    Args:
        runner: what computes that model.
        table: the blocks of the sequence.
        held: tokens in them.
        adapter: what the sequence is computed with.
    """

    runner: Runner
    table: Sequence[int]
    held: int
    adapter: Adapter | None = None


@runtime_checkable
class Drafter(Protocol):
    """Guesses for one request."""

    def draft(
        self, ids: Sequence[int], room: int, sampler: Sampler, constraint: Constraint | None, place: Place | None
    ) -> Draft | None:
        """Guess at most ``room`` tokens after ``ids``; sampler and constraint are left as they were."""


class NGramDrafter:
    """Guesses that what followed the same tokens before follows again (prompt look-up).

    Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, arXiv:2304.04487.

    Args:
        ends: tokens that end an answer; they are never guessed.

    >>> ids = [5, 6, 7, 8, 9, 5, 6]
    >>> NGramDrafter([]).follow(ids, 3)
    [7, 8, 9]
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = frozenset(ends)
        self._seen: dict[tuple[int, ...], int] = {}
        self._known = 0  # tokens whose predecessors are in the dictionary

    def draft(
        self, ids: Sequence[int], room: int, sampler: Sampler, constraint: Constraint | None, place: Place | None
    ) -> Draft | None:
        """Guess at most ``room`` tokens after ``ids``, as far as the constraint allows."""
        tokens = self.follow(ids, room)
        if constraint is not None and tokens:
            tokens = tokens[: constraint.reach(tokens)]
        return Draft(tokens) if tokens else None

    def follow(self, ids: Sequence[int], room: int) -> list[int]:
        """What came after the last occurrence of the newest tokens; it may run on into its own guess.

        Args:
            ids: all tokens so far; from one call to the next it only grows.
            room: at most so many.
        """
        for at in range(self._known, len(ids)):
            for size in NGRAMS:
                if at >= size:
                    self._seen[tuple(ids[at - size : at])] = at
        self._known = len(ids)
        places = (self._seen.get(tuple(ids[-size:])) for size in NGRAMS if size <= len(ids))
        found = next((place for place in places if place is not None), None)
        if found is None:
            return []
        tokens: list[int] = []
        for at in range(found, found + room):
            token = ids[at] if at < len(ids) else tokens[at - len(ids)]
            if token in self._ends:
                break
            tokens.append(token)
        return tokens


class Length:
    """How many tokens to guess, learnt from what became of the guesses.

    A draft that holds completely doubles the next one, up to ``most``; one that holds in part is followed by one token
    more than held; one that fails at once is followed by one of half the length. Where single guesses fail too, the
    next 1, 2, 4, ... passes go without (`LONGEST_PAUSE` at most), so that hopeless drafts cost little and never stop
    being tried.

    >>> length = Length(4)
    >>> for held in (0, 0, 0):
    ...     length.learn(length.next(), held)
    >>> [length.next() for _ in range(3)]
    [0, 1, 1]
    """

    def __init__(self, most: int) -> None:
        self.most = self._now = most
        self._pause = self._left = 0

    def next(self) -> int:
        """Tokens to guess in this pass; 0 for none."""
        if self._left:
            self._left -= 1
            return 0
        return self._now

    def learn(self, drafted: int, held: int) -> None:
        """Take in how many tokens of a draft became part of the answer."""
        if held:
            self._now = min(self.most, 2 * max(self._now, 1) if held == drafted else held + 1)
            self._pause = self._left = 0
        elif drafted > 1 or self._now > 1:
            self._now = max(1, self._now // 2)
        else:
            self._pause = self._left = min(LONGEST_PAUSE, 2 * self._pause or 1)


def continue_freely(
    logits: Float[Tensor, vocab],
    step: Callable[[Sequence[int]], Float[Tensor, vocab]],
    room: int,
    sampler: Sampler,
    constraint: Constraint | None,
    *,
    generator: torch.Generator,
    ends: Sequence[int],
    skip_forced: bool,
) -> Draft:
    """A draft written one token after another, under the options and the constraint of the request.

    Args:
        logits: of the first token; changed in place.
        step: the logits after more tokens.
        room: longest draft, in tokens.
        sampler: of the request; left as it is.
        constraint: of the request; moved, and moved back.
        generator: random numbers of the draft.
        ends: tokens that end an answer, and with it a draft.
        skip_forced: write what the constraint forces without drawing, as the request will.
    """
    sampler, greedy = sampler.fork(generator), sampler.options.temperature == 0
    tokens: list[int] = []
    laws: list[Tensor] = []
    while True:
        done = len(tokens)
        sampler.penalise(logits)
        if constraint is not None:
            constraint.apply(logits)
        law = None if greedy else sampler.law(logits)
        tokens.append(sampler.choose(logits) if law is None else pick(law, generator))
        if law is not None:
            laws.append(law)
            sampler.note(tokens[-1])
        if tokens[-1] in ends:
            break
        if constraint is not None:
            constraint.accept(tokens[-1])
            forced = constraint.forced()[: room - len(tokens)] if skip_forced else []
            for token in takewhile(lambda token: token not in ends, forced):
                constraint.accept(token)
                sampler.note(token)
                tokens.append(token)
                laws.append(torch.zeros_like(logits, dtype=torch.float64).index_fill_(0, torch.tensor(token), 1.0))
            if constraint.finished:
                break
        if len(tokens) >= room:
            break
        logits = step(tokens[done:])
    if constraint is not None:
        constraint.rollback(len(tokens) - (tokens[-1] in ends))
    return Draft(tokens, None if greedy else torch.stack(laws))
