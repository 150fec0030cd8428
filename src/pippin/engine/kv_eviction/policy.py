"""The interface of cache policies: which keys and values of a sequence stay when its cache is full.

Notable here:
- a policy says how much a token of one head is worth; how many stay, and what always does, is decided here
- heads of a layer share what the layer may keep, so that a head that looks at few tokens leaves room to others
- a policy may ask the model: tokens that are computed behind a block, observed, and not kept
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument

ALWAYS: Final = 1 << 40
"""As `CachePolicy.observed_tokens`: all attention counts, also that before earlier evictions."""


@dataclass(frozen=True, eq=False)
class HeadView:
    """What one head has when it is ranked.

    Attributes:
        positions: of its tokens in the sequence, ascending.
        received: attention that they received, as far as the policy asked for it; else zeros.
        read: gives keys and values, (tokens, head_dim) each, float32.
    """

    positions: Int[Tensor, tokens]
    received: Float[Tensor, tokens]
    read: Callable[[], tuple[Tensor, Tensor]]


@checked
@dataclass(frozen=True, kw_only=True)
class CachePolicy(ABC):
    """Keeps a sequence's cache within a budget.

    Tokens are computed in blocks; behind each block what is worth least is given up, so that there are never more than
    ``budget + block_size`` tokens for a head, on average over the heads of a layer.

    Args:
        budget: tokens that stay for each head, on average over the heads of a layer.
        block_size: tokens between two evictions.
        sink_tokens: first tokens of the sequence, which stay (Xiao et al. 2024, arXiv:2309.17453).
        recent_tokens: last tokens, which stay.
        share_heads: whether the heads of a layer share its budget; otherwise each keeps as many tokens.
        layer_budgets: the budget of each layer with keys of its own (`allocate_budgets`), no more than ``budget`` on
            average; None for the same for all. Layers with sliding windows keep what they can see instead.

    Raises:
        InvalidArgument: a budget is not above what always stays, or those of layers exceed the whole.
    """

    budget: PositiveInt
    block_size: PositiveInt = 256
    sink_tokens: NonNegativeInt = 4
    recent_tokens: NonNegativeInt = 16
    share_heads: bool = True
    layer_budgets: tuple[int, ...] | None = None

    observed_tokens: ClassVar[int] = 0
    """Tokens before an eviction whose attention counts, or `ALWAYS`."""

    def __post_init__(self) -> None:
        layers = (self.budget,) if self.layer_budgets is None else self.layer_budgets
        if min(layers) <= (least := self.sink_tokens + self.recent_tokens):
            raise InvalidArgument(
                f"a budget of {min(layers)} tokens holds no more than the {least} that always stay; take a larger one, "
                "or fewer sink_tokens and recent_tokens"
            )
        if sum(layers) > self.budget * len(layers):
            raise InvalidArgument(
                f"layer_budgets have {sum(layers) / len(layers):.1f} tokens on average, more than the budget of "
                f"{self.budget}; allocate_budgets gives some that fit"
            )

    @property
    def most_tokens(self) -> int:
        """Tokens for each head that a conversation may have at any time."""
        return self.budget + self.block_size + len(self.probe())

    @abstractmethod
    def scores(self, head: HeadView) -> Float[Tensor, tokens]:
        """How much each token of a head is worth, larger for more; finite."""

    def probe(self) -> Sequence[int]:
        """Tokens that are computed behind each block and are not kept.

        The attention that they give to what is kept, the largest of all queries and heads that share a key, is what
        the policy then ranks by.
        """
        return ()

    def keep(self, heads: Sequence[HeadView], layer: int) -> list[Int[Tensor, kept]]:
        """Of each head of a layer the tokens that stay, as ascending indices.

        Args:
            heads: all heads of the layer.
            layer: which one of the layers with keys of their own.
        """
        budget = self.budget if self.layer_budgets is None else self.layer_budgets[layer]
        room, ranked = budget * len(heads), []
        if sum(len(head.positions) for head in heads) <= room:
            return [torch.arange(len(head.positions)) for head in heads]
        for head in heads:
            scores = self.scores(head).double()
            newest = int(head.positions[-1])
            stays = (head.positions < self.sink_tokens) | (head.positions > newest - self.recent_tokens)
            ranked.append(scores.masked_fill(stays, torch.inf))
        if not self.share_heads:
            return [_best(scores, budget) for scores in ranked]
        chosen = _best(torch.cat(ranked), room)
        bounds = [0, *accumulate(map(len, ranked))]
        return [chosen[(chosen >= start) & (chosen < end)] - start for start, end in pairwise(bounds)]


def _best(scores: Float[Tensor, tokens], count: int) -> Int[Tensor, kept]:
    """Indices of the largest scores, ascending; of equal ones the first."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values
