"""Eviction policies: which expert leaves the cache when another must come in.

Notable here:
- a policy is one expression over arrays with a row for each cached expert: the one with the lowest rank leaves first
- the experts of a pass are needed layer by layer, again and again, so that a layer that was just computed is the
  furthest from its next use: Least-Stale ranks by that, where recency and frequency see the opposite

Source: Hoang et al. 2026, arXiv:2602.03921, section on Least-Stale eviction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from pippin.core.errors import InvalidArgument
from pippin.engine.experts.expert_trace import ExpertTrace

Ranks = Int64[np.ndarray, "rows"]


@dataclass(frozen=True)
class Clock:
    """Where a pass is.

    Attributes:
        pass_index: number of the pass, from 0.
        layer: number of the layer with experts, from 0.
        layers: how many of them there are.
    """

    pass_index: int
    layer: int
    layers: int

    @property
    def step(self) -> int:
        """Number of layers computed before this one, over all passes."""
        return self.pass_index * self.layers + self.layer


class CachedExperts(NamedTuple):
    """What is known of each cached expert; integer arrays with a row each.

    Attributes:
        layer: its layer.
        expert: its index in the layer.
        last_pass: the last pass in which it was used, or fetched or kept for a predicted use.
        last_use: running number of its last use or fetch; larger is later.
        uses: how often it was used, fetched or kept for a predicted use so far, also before it was evicted.
        fetched: running number of its fetch.
    """

    layer: Ranks
    expert: Ranks
    last_pass: Ranks
    last_use: Ranks
    uses: Ranks
    fetched: Ranks


@runtime_checkable
class EvictionPolicy(Protocol):
    """Which cached expert leaves first."""

    def rank(self, cached: CachedExperts, now: Clock) -> Ranks:
        """A number for each row; the lowest leaves first, of equals the one that was fetched first."""
        ...


class LRU:
    """The one whose last use or fetch is longest ago."""

    def rank(self, cached: CachedExperts, now: Clock) -> Ranks:
        """See `EvictionPolicy`."""
        return cached.last_use


class LFU:
    """The one that was used or fetched least often, also before it was evicted; of equals, that of the earlier use."""

    def rank(self, cached: CachedExperts, now: Clock) -> Ranks:
        """See `EvictionPolicy`."""
        ranks: Ranks = (cached.uses << 32) + cached.last_use
        return ranks


class FIFO:
    """The one that was fetched first."""

    def rank(self, cached: CachedExperts, now: Clock) -> Ranks:
        """See `EvictionPolicy`."""
        return cached.fetched


class LeastStale:
    """One that this pass has not touched, before all others; among both, one of the layer that is reached last.

    An expert is current if it was used in this pass, or fetched or kept for a predicted use in it, else stale.
    """

    def rank(self, cached: CachedExperts, now: Clock) -> Ranks:
        """See `EvictionPolicy`."""
        current = cached.last_pass == now.pass_index
        layers_ahead = (cached.layer - now.layer - 1) % now.layers
        ranks: Ranks = np.where(current, now.layers, 0) - layers_ahead
        return ranks


class KeepCurrent:
    """Another policy, among the experts that this pass has not touched as long as there are any.

    Args:
        policy: the other one.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy

    def rank(self, cached: CachedExperts, now: Clock) -> Ranks:
        """See `EvictionPolicy`."""
        order = self.policy.rank(cached, now).argsort(kind="stable").argsort()
        ranks: Ranks = np.where(cached.last_pass == now.pass_index, len(order), 0) + order
        return ranks


class Belady:
    """The one whose next use is furthest away, from a trace: the optimum where nothing is prefetched, an oracle.

    Args:
        trace: the trace that is about to be replayed.

    Source: Belady 1966, doi:10.1147/sj.52.0078.
    """

    def __init__(self, trace: ExpertTrace) -> None:
        layers = trace.num_layers
        self._never = (trace.num_passes + 1) * layers
        steps: dict[tuple[int, int], list[int]] = {}
        for number in range(trace.num_passes):
            for layer in range(layers):
                for expert in trace.needed(number, layer).tolist():
                    steps.setdefault((layer, expert), []).append(number * layers + layer)
        self._uses = {key: np.array(found) for key, found in steps.items()}

    def rank(self, cached: CachedExperts, now: Clock) -> Ranks:
        """See `EvictionPolicy`."""
        return -np.array(
            [self._next(*key, now.step) for key in zip(cached.layer.tolist(), cached.expert.tolist(), strict=True)]
        )

    def _next(self, layer: int, expert: int, step: int) -> int:
        uses = self._uses.get((layer, expert))
        if uses is None:
            return self._never
        place = int(np.searchsorted(uses, step, side="right"))
        return int(uses[place]) if place < len(uses) else self._never


_BY_NAME: Final[dict[str, Callable[[], EvictionPolicy]]] = {
    "lru": LRU,
    "lfu": LFU,
    "lfu-keep-current": lambda: KeepCurrent(LFU()),
    "fifo": FIFO,
    "least-stale": LeastStale,
}
POLICIES: Final = (*_BY_NAME, "belady")


def policy(name: str, trace: ExpertTrace | None = None) -> EvictionPolicy:
    """A policy by its name, one of `POLICIES`.

    Raises:
        InvalidArgument: there is none of that name, or "belady" without a trace.

    >>> policy("least-stale")  # doctest: +ELLIPSIS
    <pippin.engine.experts.eviction.LeastStale object at ...>
    """
    if name in _BY_NAME:
        return _BY_NAME[name]()
    if name != "belady":
        raise InvalidArgument(f"policy {name!r} is none of {', '.join(POLICIES)}")
    if trace is None:
        raise InvalidArgument("policy 'belady' needs the trace that it looks ahead in: it is an oracle for simulations")
    return Belady(trace)
