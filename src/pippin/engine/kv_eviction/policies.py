"""Cache policies: the first and newest tokens, the most attended ones, and those whose keys are unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.engine.kv_eviction.policy import ALWAYS, CachePolicy, HeadView


@checked
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(CachePolicy):
    """Keeps the first tokens and the newest ones.

    Source: Xiao et al. 2024, arXiv:2309.17453. Positions stay those of the sequence.

    >>> import torch
    >>> head = HeadView(torch.arange(8), torch.zeros(8), lambda: ())
    >>> StreamingLLM(budget=5, sink_tokens=2, recent_tokens=1).keep([head], layer=0)
    [tensor([0, 1, 5, 6, 7])]
    """

    def scores(self, head: HeadView) -> Float[Tensor, tokens]:
        """The position: newer ones are worth more."""
        return head.positions.float()


@checked
@dataclass(frozen=True, kw_only=True)
class H2O(CachePolicy):
    """Keeps the heavy hitters: tokens that received the most attention since they came.

    Source: Zhang et al. 2023, arXiv:2306.14048, algorithm 1.
    """

    observed_tokens: ClassVar[int] = ALWAYS

    def scores(self, head: HeadView) -> Float[Tensor, tokens]:
        """The sum of all attention received."""
        return head.received


@checked
@dataclass(frozen=True, kw_only=True)
class SnapKV(CachePolicy):
    """Keeps what the newest tokens attend to, with its neighbors.

    Source: Li et al. 2024, arXiv:2404.14469.

    Args:
        kernel_size: tokens around one that count for it, an odd number.
    """

    recent_tokens: int = 64
    kernel_size: PositiveInt = 7

    observed_tokens: ClassVar[int] = 64

    def scores(self, head: HeadView) -> Float[Tensor, tokens]:
        """Attention received from the last 64 tokens, averaged over neighbors."""
        half = self.kernel_size // 2
        smooth = F.avg_pool1d(head.received[None, None], 2 * half + 1, 1, half, count_include_pad=False)
        return smooth[0, 0]


@checked
@dataclass(frozen=True, kw_only=True)
class KeyDiff(CachePolicy):
    """Keeps tokens whose keys are unlike the others.

    Source: Park et al. 2025, arXiv:2504.15364.
    """

    def scores(self, head: HeadView) -> Float[Tensor, tokens]:
        """Minus the cosine between a key and the mean of all normalized keys."""
        keys, _ = head.read()
        return -F.cosine_similarity(keys, F.normalize(keys, dim=-1).mean(0, keepdim=True), dim=-1)
