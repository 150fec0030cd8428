"""How likely given continuations of a prompt are: the prompt is computed once, each continuation forks from it.

Notable here:
- a continuation shares the blocks of the prompt and gets blocks of its own only for itself
- the probabilities of the tokens are added in a way that does not depend on how a continuation was cut into passes
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
from pippin.engine.request import Token
from pippin.engine.writer import check_ids
from pippin.language.load import LanguageModel

ROWS: Final = 64
"""Tokens of continuations in one pass, at most: each takes memory for a whole vocabulary."""


def check(model: LanguageModel, prompt: Sequence[int], continuations: Sequence[Sequence[int]], size: int) -> None:
    """Raise what cannot be scored by a model that has room for ``size`` tokens.

    Raises:
        InvalidArgument: an empty prompt or continuation, or an id outside the vocabulary.
        ContextOverflow: the prompt and its longest continuation do not fit.
    """
    if not len(prompt):
        raise InvalidArgument("the prompt is empty; give at least one token")
    check_ids(model, prompt)
    for index, ids in enumerate(continuations):
        if not len(ids):
            raise InvalidArgument(f"continuation {index} is empty; give at least one token")
        check_ids(model, ids)
    need = len(prompt) + max(map(len, continuations), default=0)
    if need > size:
        raise ContextOverflow(
            f"the prompt of {len(prompt):,} tokens and its longest continuation need {need:,} tokens, and there "
            f"is room for {size:,}; shorten one of them or take another model",
            context_size=size,
            token_count=need,
        )


class Scores:
    """What is known of each continuation so far.

    Args:
        continuations: token ids of each, at least one.
        top: how many likeliest tokens to report with each token; None for the probabilities alone.

    Attributes:
        todo: continuations that wait for a branch.
        missing: continuations that are not complete.
    """

    def __init__(self, continuations: Sequence[Sequence[int]], top: int | None = None) -> None:
        self.continuations = [list(ids) for ids in continuations]
        self.top = top
        self.todo: deque[int] = deque()
        self.missing = len(self.continuations)
        self.begun = False
        self.tokens: list[list[Token]] = [[] for _ in self.continuations]

    def begin(self, logits: Float[Tensor, vocab]) -> None:
        """Take the logits after the prompt; a second time, after a preemption, changes nothing."""
        if self.begun:
            return
        self.begun = True
        logprobs = logits.log_softmax(-1)
        for index, ids in enumerate(self.continuations):
            self.tokens[index] = self._tokens(logprobs[None], ids[:1])
            if len(ids) > 1:
                self.todo.append(index)
            else:
                self.missing -= 1

    def add(self, index: int, start: int, logits: Float[Tensor, "rows vocab"]) -> None:
        """Take the logits after the continuation's tokens from ``start`` on."""
        if not len(logits):
            return
        following = self.continuations[index][start + 1 : start + 1 + len(logits)]
        del self.tokens[index][start + 1 :]  # what an interrupted branch left
        self.tokens[index] += self._tokens(logits.log_softmax(-1), following)
        if len(self.tokens[index]) == len(self.continuations[index]):
            self.missing -= 1

    @property
    def sums(self) -> list[float]:
        """The sum of the natural logarithms of the probabilities, for each continuation."""
        return [math.fsum(token.logprob or 0.0 for token in tokens) for tokens in self.tokens]

    def _tokens(self, logprobs: Float[Tensor, "rows vocab"], ids: Sequence[int]) -> list[Token]:
        chosen = logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        if not self.top:
            return [Token(id, "", value) for id, value in zip(ids, chosen, strict=True)]
        values, best = logprobs.topk(min(self.top, logprobs.shape[-1]))
        likeliest = [tuple(zip(*row, strict=True)) for row in zip(best.tolist(), values.tolist(), strict=True)]
        return [Token(id, "", value, top) for id, value, top in zip(ids, chosen, likeliest, strict=True)]
