"""Budgets of layers by their sensitivity: a layer whose keys change most when tokens are given up keeps more of them.

Source: Kim et al. 2025, EpiCache, arXiv:2509.17396, section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import Fraction, NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.engine.kv_eviction.policies import StreamingLLM

if TYPE_CHECKING:
    from pippin.engine.kv_eviction.bounded_cache import BoundedCache
    from pippin.engine.kv_eviction.policy import CachePolicy, HeadView


@runtime_checkable
class PrefillingEngine(Protocol):
    """What measuring needs of an engine."""

    def bounded_cache(self, policy: CachePolicy) -> BoundedCache:
        """A cache within a budget."""

    def prefill(self, prompt: Sequence[int], *, cache: BoundedCache) -> int:
        """Compute a prompt."""


@dataclass(frozen=True, kw_only=True)
class _Recorder(StreamingLLM):
    """Keeps the first and the newest tokens, and notes all keys before any is given up."""

    keys: dict[int, dict[int, list[Tensor]]] = field(default_factory=dict)

    def keep(self, heads: Sequence[HeadView], layer: int) -> list[Tensor]:
        """Note the keys that came since the last time."""
        for number, head in enumerate(heads):
            found = self.keys.setdefault(layer, {}).setdefault(number, [])
            known = sum(map(len, found))
            found.append(head.read()[0][head.positions >= known].clone())
        return super().keep(heads, layer)

    def matrix(self, layer: int) -> Float[Tensor, "kv_heads tokens head_dim"]:
        """The keys of a layer."""
        return torch.stack([torch.cat(parts) for parts in self.keys[layer].values()])


@checked
def measure_layer_sensitivity(
    engine: PrefillingEngine,
    token_ids: Sequence[int],
    *,
    block_size: PositiveInt = 1024,
    sink_tokens: PositiveInt = 128,
    overlap: Fraction = 0.5,
) -> list[float]:
    """How much the keys of each layer change when a long text is computed block by block with little of its past.

    The text, as far as it is whole blocks, is computed twice: with all of it in the cache, and with its first tokens
    and the end of the last block. The sensitivity is 1 minus the cosine between both keys, averaged over tokens and
    heads. One text is enough.

    Args:
        engine: has room for the whole text.
        token_ids: the text, longer than a block and what stays of the last one.
        block_size: tokens between two evictions.
        sink_tokens: first tokens, which stay.
        overlap: share of the last block that stays.

    Returns the sensitivity of each layer with keys of its own, 0 to 2.

    Raises:
        InvalidArgument: a text that is too short.
        UnsupportedModel, NotEnoughMemory: see `pippin.engine.engine.Engine.bounded_cache`.
    """
    recent = max(1, round(overlap * block_size))
    budget = sink_tokens + recent + 1
    if len(token_ids) <= (least := budget + block_size):
        raise InvalidArgument(f"a text of {len(token_ids):,} tokens loses nothing; give more than {least:,}")
    whole = token_ids[: budget + (len(token_ids) - budget) // block_size * block_size]
    found = []
    for kept, block in ((len(whole) - 1, 1), (budget, block_size)):  # the last eviction is behind the last token
        recorder = _Recorder(budget=kept, block_size=block, sink_tokens=sink_tokens, recent_tokens=recent)
        cache = engine.bounded_cache(recorder)
        engine.prefill(whole, cache=cache)
        found.append([recorder.matrix(layer) for layer in range(len(cache.lengths))])
    pairs = zip(*found, strict=True)
    return [float(1 - F.cosine_similarity(full, part, dim=-1).mean()) for full, part in pairs]


@checked
def allocate_budgets(
    sensitivity: Sequence[float], budget: PositiveInt, *, alpha: NonNegativeFloat = 2.0, floor: Fraction = 0.25
) -> tuple[int, ...]:
    """Budgets of layers, proportional to a power of their sensitivity, ``budget`` on average.

    Args:
        sensitivity: of each layer, not negative; see `measure_layer_sensitivity`.
        budget: tokens for each head, on average over the layers.
        alpha: the power; 0 for the same budget for all. The paper's best are 2 and 4.
        floor: least budget of a layer, as a share of ``budget``.

    Returns one budget for each layer, for `CachePolicy`. Their sum is that of ``budget`` for every layer.

    Raises:
        InvalidArgument: no layer, or a sensitivity that is negative or not finite.

    >>> allocate_budgets([0.1, 0.2, 0.0], 100)
    (55, 220, 25)
    """
    if not sensitivity:
        raise InvalidArgument("there is no layer; give the sensitivity of each")
    weights = torch.tensor(sensitivity, dtype=torch.float64)
    if not (weights.isfinite().all() and (weights >= 0).all()):
        raise InvalidArgument(f"sensitivities must be finite and not negative, got {list(sensitivity)!r:.80}")
    total, least = budget * len(weights), int(floor * budget)
    weights = (weights / weights.max().clamp(min=1e-300)) ** alpha
    if not weights.sum():  # no layer loses anything
        weights = torch.ones_like(weights)
    given = torch.full_like(weights, float(least))
    open_ = weights > 0
    while open_.any():  # those that would have less than the floor get it, and the others share the rest
        share = (total - least * int((~open_).sum())) * weights / weights[open_].sum()
        below = open_ & (share < least)
        if not below.any():
            given[open_] = share[open_]
            break
        open_ &= ~below
    whole = given.floor().long()
    rest = total - int(whole.sum())
    whole[(given - whole).argsort(descending=True, stable=True)[:rest]] += 1
    return tuple(whole.tolist())
