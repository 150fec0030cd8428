"""Log-probabilities of given continuations of a prompt: the prompt is computed once, each continuation forks from it.

Notable here:
- a continuation shares the blocks of the prompt and gets new blocks only for its own tokens
- the log-probabilities of tokens are summed exactly, so that the sum does not depend on how passes split a continuation
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import ContextOverflow, InvalidArgument
from pippin.engine.decoding.token_ids import check_token_ids
from pippin.engine.request import Token
from pippin.language.language_model import LanguageModel

MAX_ROWS: Final = 64
"""Maximum tokens of continuations in one pass: each needs one row of logits."""


def check(
    model: LanguageModel, prompt: Sequence[int], continuations: Sequence[Sequence[int]], context_size: int
) -> None:
    """Check that a prompt and its continuations can be scored with ``context_size`` tokens.

    Raises:
        InvalidArgument: an empty prompt or continuation, or an id outside the vocabulary.
        ContextOverflow: the prompt and its longest continuation do not fit.
    """
    if not len(prompt):
        raise InvalidArgument("the prompt is empty; give at least one token")
    check_token_ids(model, prompt)
    for index, ids in enumerate(continuations):
        if not len(ids):
            raise InvalidArgument(f"continuation {index} is empty; give at least one token")
        check_token_ids(model, ids)
    need = len(prompt) + max(map(len, continuations), default=0)
    if need > context_size:
        raise ContextOverflow(
            f"the prompt of {len(prompt):,} tokens and its longest continuation need {need:,} tokens, and there "
            f"is room for {context_size:,}; shorten one of them or take another model",
            context_size=context_size,
            token_count=need,
        )


class Scores:
    """The scores of continuations so far.

    Args:
        continuations: token ids of each, at least one.
        num_logprobs: number of likeliest tokens to report with each token; None for the log-probabilities alone.

    Attributes:
        waiting: indices of continuations that are not being computed yet.
        num_incomplete: continuations that are not complete.
    """

    def __init__(self, continuations: Sequence[Sequence[int]], num_logprobs: int | None = None) -> None:
        self.continuations = [list(ids) for ids in continuations]
        self.num_logprobs = num_logprobs
        self.waiting: deque[int] = deque()
        self.num_incomplete = len(self.continuations)
        self.has_prompt_logits = False
        self.tokens: list[list[Token]] = [[] for _ in self.continuations]

    def add_prompt_logits(self, logits: Float[Tensor, vocab]) -> None:
        """Add the logits after the prompt; a second call, after a preemption, has no effect."""
        if self.has_prompt_logits:
            return
        self.has_prompt_logits = True
        logprobs = logits.log_softmax(-1)
        for index, ids in enumerate(self.continuations):
            self.tokens[index] = self._tokens(logprobs[None], ids[:1])
            if len(ids) > 1:
                self.waiting.append(index)
            else:
                self.num_incomplete -= 1

    def add_logits(self, index: int, start: int, logits: Float[Tensor, "rows vocab"]) -> None:
        """Add the logits after the continuation's tokens from ``start`` on."""
        if not len(logits):
            return
        following = self.continuations[index][start + 1 : start + 1 + len(logits)]
        del self.tokens[index][start + 1 :]  # scores of a branch that was interrupted
        self.tokens[index] += self._tokens(logits.log_softmax(-1), following)
        if len(self.tokens[index]) == len(self.continuations[index]):
            self.num_incomplete -= 1

    @property
    def sums(self) -> list[float]:
        """The log-probability of each continuation (natural logarithm)."""
        return [math.fsum(token.logprob or 0.0 for token in tokens) for tokens in self.tokens]

    def _tokens(self, logprobs: Float[Tensor, "rows vocab"], ids: Sequence[int]) -> list[Token]:
        chosen = logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        if not self.num_logprobs:
            return [Token(id, "", value) for id, value in zip(ids, chosen, strict=True)]
        values, best = logprobs.topk(min(self.num_logprobs, logprobs.shape[-1]))
        likeliest = [tuple(zip(*row, strict=True)) for row in zip(best.tolist(), values.tolist(), strict=True)]
        return [Token(id, "", value, top) for id, value, top in zip(ids, chosen, likeliest, strict=True)]
