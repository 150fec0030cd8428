"""Replay a trace through the cache of experts: what each policy would have cost, without a model.

Notable here:
- the cache is the one of the runtime, so hits, misses and bytes are those that the runtime has for the same passes
- time is that of one serial link beside a computation of known length: a layer waits for what it needs, and what is
  prefetched uses the link while the layer is computed

Source: Hoang et al. 2026, arXiv:2602.03921.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Lt
from jaxtyping import Float

from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.engine.experts.eviction import EvictionPolicy, policy
from pippin.engine.experts.expert_cache import CacheStats, ExpertCache
from pippin.engine.experts.expert_trace import ExpertTrace


@checked
@dataclass(frozen=True)
class Prefetch:
    """What is fetched before it is needed.

    Attributes:
        depth: layers to look ahead; 0 for none.
        count: most experts of a layer; None for as many as the bytes allow.
        quantile: only experts whose predicted scores are above this quantile of the layer's; 0 for all.
        most_bytes: most bytes while one layer is computed; None for no bound but that of the link.
    """

    depth: NonNegativeInt = 0
    count: PositiveInt | None = None
    quantile: Annotated[float, Ge(0), Lt(1)] = 0.0
    most_bytes: NonNegativeInt | None = None

    def ranked(self, scores: Float[np.ndarray, experts]) -> list[int]:
        """The experts to fetch, the likeliest first; none where there is no prediction.

        >>> Prefetch(1, count=2).ranked(np.array([0.1, 0.5, 0.4, np.nan]))
        [1, 2]
        """
        known = np.flatnonzero(~np.isnan(scores))
        if not len(known):
            return []
        if self.quantile:
            known = known[scores[known] > np.quantile(scores[known], self.quantile)]
        order = known[np.argsort(-scores[known], kind="stable")]
        return [int(expert) for expert in order[: self.count]]


NO_PREFETCH = Prefetch()


@dataclass(frozen=True)
class Simulation:
    """What a trace cost.

    Attributes:
        policy: name of the policy.
        capacity: bytes for experts.
        prefetch: what was fetched ahead.
        stats: counts for each layer.
        first_seconds: time of the first pass, which is that to the first token if the trace begins with a prompt.
        later_seconds: mean time of the others; NaN where there are none.
        stalled: seconds for which layers waited for experts, over all passes.
    """

    policy: str
    capacity: int
    prefetch: Prefetch
    stats: CacheStats
    first_seconds: float
    later_seconds: float
    stalled: float


class _Link:
    """A serial link with a clock, as a loader. Without a bandwidth everything is there at once."""

    def __init__(self, cache_sizes: np.ndarray, bandwidth: float | None) -> None:
        self.sizes, self.bandwidth = cache_sizes, bandwidth
        self.now = self.free_at = self.stalled = 0.0
        self._ready: dict[tuple[int, int], float] = {}

    def fetch(self, layer: int, expert: int, row: int, *, ahead: bool) -> None:
        if self.bandwidth is not None:
            self.free_at = max(self.free_at, self.now) + float(self.sizes[layer, expert]) / self.bandwidth
            self._ready[layer, expert] = self.free_at

    def drop(self, layer: int, expert: int, row: int) -> None:
        self._ready.pop((layer, expert), None)

    def wait(self, layer: int, experts: Sequence[int]) -> None:
        ready = max((self._ready.pop((layer, expert), 0.0) for expert in experts), default=0.0)
        self.stalled += max(0.0, ready - self.now)
        self.now = max(self.now, ready)

    def window(self, seconds: float, most: int | None) -> int:
        """Bytes that can still be fetched within some seconds."""
        bounds = [float("inf") if most is None else float(most)]
        if self.bandwidth is not None:
            bounds.append(max(0.0, self.now + seconds - max(self.free_at, self.now)) * self.bandwidth)
        return int(min(min(bounds), float(self.sizes.sum())))


@checked
def simulate(
    trace: ExpertTrace,
    *,
    capacity: PositiveInt,
    eviction: EvictionPolicy | str,
    prefetch: Prefetch = NO_PREFETCH,
    bandwidth: PositiveFloat | None = None,
    layer_seconds: NonNegativeFloat = 0.0,
) -> Simulation:
    """Replay a trace.

    Args:
        trace: the trace.
        capacity: bytes for experts.
        eviction: the policy, or its name.
        prefetch: what is fetched ahead; the trace must have predictions of that depth.
        bandwidth: bytes per second of the link; None for one that costs no time.
        layer_seconds: time that one layer computes.

    Raises:
        NotEnoughMemory: the capacity is less than the largest expert.
        InvalidArgument: a policy that there is not, or predictions that the trace lacks.

    >>> trace = ExpertTrace.of([[[0, 1], [2, 3]]] * 3, np.full((2, 4), 10))
    >>> simulate(trace, capacity=40, eviction="lru").stats.hit_rate
    0.6666666666666666
    """
    name = eviction if isinstance(eviction, str) else type(eviction).__name__
    chosen = policy(eviction, trace) if isinstance(eviction, str) else eviction
    depth = 0 if trace.predicted is None else trace.predicted.shape[1]
    if prefetch.depth > depth:
        raise InvalidArgument(f"the trace has predictions of depth {depth}, not {prefetch.depth}")
    link = _Link(trace.sizes, bandwidth)
    cache = ExpertCache(trace.sizes, capacity, chosen, loader=link)
    ends = []
    for number in range(trace.num_passes):
        cache.begin_pass()
        for layer in range(trace.num_layers):
            waves = cache.waves(layer, trace.needed(number, layer).tolist())
            for _, last in waves:
                if last:
                    for ahead, ranked in _predictions(trace, prefetch, number, layer):
                        cache.prefetch(layer, ahead, ranked, link.window(layer_seconds, prefetch.most_bytes))
            link.now += layer_seconds
        ends.append(link.now)
    later = np.diff(ends)
    return Simulation(
        name, capacity, prefetch, cache.stats, ends[0] if ends else 0.0,
        float(later.mean()) if len(later) else float("nan"), link.stalled,
    )  # fmt: skip


def _predictions(trace: ExpertTrace, prefetch: Prefetch, number: int, layer: int) -> Iterator[tuple[int, list[int]]]:
    """The layers to look ahead to, and their experts, the likeliest first."""
    for ahead in range(1, min(prefetch.depth, trace.num_layers - 1 - layer) + 1):
        assert trace.predicted is not None
        yield ahead, prefetch.ranked(trace.predicted[number, ahead - 1, layer + ahead].astype(np.float64))


def compare(
    trace: ExpertTrace,
    policies: Iterable[str],
    capacities: Iterable[int],
    prefetches: Iterable[Prefetch] = (NO_PREFETCH,),
    *,
    bandwidth: float | None = None,
    layer_seconds: float = 0.0,
) -> list[Simulation]:
    """Replay a trace under every policy, with every capacity and every way to prefetch."""
    return [
        simulate(
            trace, capacity=capacity, eviction=name, prefetch=prefetch, bandwidth=bandwidth, layer_seconds=layer_seconds
        )
        for prefetch in prefetches
        for capacity in capacities
        for name in policies
    ]
