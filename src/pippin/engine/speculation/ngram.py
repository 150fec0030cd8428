"""Prompt lookup decoding: drafts that continue an earlier occurrence of the newest tokens.

Notable here:
- it needs no draft model, only one dictionary entry per token and n-gram length

Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, arXiv:2304.04487.
"""

from __future__ import annotations

from collections.abc import Sequence

from pippin.engine.decoding.sampling import Sampler
from pippin.engine.grammar.constraint import Constraint
from pippin.engine.speculation.drafts import CachePosition, Draft

NGRAM_LENGTHS = (4, 3, 2)
"""Lengths of the n-grams that are looked up; the longest one that occurred before is continued."""


class NGramDrafter:
    """Drafts the continuation of an earlier occurrence of the last tokens (prompt look-up).

    Args:
        ends: tokens that end an answer; they are never drafted.

    >>> ids = [5, 6, 7, 8, 9, 5, 6]
    >>> NGramDrafter([]).follow(ids, 3)
    [7, 8, 9]
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = frozenset(ends)
        self._seen: dict[tuple[int, ...], int] = {}
        self._known = 0  # tokens whose predecessors are in the dictionary

    def draft(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        constraint: Constraint | None,
        position: CachePosition | None,
    ) -> Draft | None:
        """Draft at most ``max_tokens`` tokens after ``token_ids``, as far as the constraint allows."""
        tokens = self.follow(token_ids, max_tokens)
        if constraint is not None and tokens:
            tokens = tokens[: constraint.reach(tokens)]
        return Draft(tokens) if tokens else None

    def follow(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The continuation of the last earlier occurrence of the newest tokens; it may extend into its own draft.

        Args:
            token_ids: all tokens so far; from one call to the next, tokens are only appended.
            max_tokens: maximum number of tokens.
        """
        for at in range(self._known, len(token_ids)):
            for size in NGRAM_LENGTHS:
                if at >= size:
                    self._seen[tuple(token_ids[at - size : at])] = at
        self._known = len(token_ids)
        positions = (self._seen.get(tuple(token_ids[-size:])) for size in NGRAM_LENGTHS if size <= len(token_ids))
        found = next((position for position in positions if position is not None), None)
        if found is None:
            return []
        tokens: list[int] = []
        for at in range(found, found + max_tokens):
            token = token_ids[at] if at < len(token_ids) else tokens[at - len(token_ids)]
            if token in self._ends or token < 0:  # an embedding is no token
                break
            tokens.append(token)
        return tokens
