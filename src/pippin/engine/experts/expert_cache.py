"""The cache of experts: what is in fast memory, what has to be fetched, and what leaves for it.

Notable here:
- the simulator and the runtime use this one class; only the loader differs, so that both count the same
- the experts of a layer come in waves: those that are there, then as many of the others as fit beside them. While one
  wave is computed the next one is fetched, and room for one expert is enough for any prompt
- a miss is told apart by its cause: never seen before, not foreseen, or evicted between its prefetch and its use

Source: Hoang et al. 2026, arXiv:2602.03921. The classes of misses are theirs; waves are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument, NotEnoughMemory
from pippin.engine.experts.eviction import CachedExperts, Clock, EvictionPolicy

_NOWHERE: Final = -1
Counts = Int64[np.ndarray, "layers"]


@runtime_checkable
class ExpertLoader(Protocol):
    """Brings experts into fast memory. Rows are numbers below `ExpertCache.rows`, each of one expert at a time."""

    def fetch(self, layer: int, expert: int, row: int, *, ahead: bool) -> None:
        """Begin to bring an expert; ``ahead`` if it is not needed yet."""
        ...

    def drop(self, layer: int, expert: int, row: int) -> None:
        """Free the memory of an expert."""
        ...

    def wait(self, layer: int, experts: Sequence[int]) -> None:
        """Return when experts that were fetched are there."""
        ...


class NoLoader:
    """Brings nothing: for counting alone."""

    def fetch(self, layer: int, expert: int, row: int, *, ahead: bool) -> None:
        """Do nothing."""

    def drop(self, layer: int, expert: int, row: int) -> None:
        """Do nothing."""

    def wait(self, layer: int, experts: Sequence[int]) -> None:
        """Do nothing."""


@dataclass
class CacheStats:
    """Counts for each layer.

    Attributes:
        demands: experts that were needed; those of one pass count once for a layer.
        hits: of these, the ones that were there, or on their way.
        first: misses of experts that were never fetched before.
        unpredicted: misses of experts that were known, but not predicted in this pass.
        collisions: misses of experts that were fetched ahead or kept for a predicted use in this pass, and evicted.
        prefetches: experts fetched before they were needed.
        wasted: of these, the ones evicted, or still unused when their pass ended.
        bytes_read: bytes of all that was fetched.
        bytes_ahead: bytes of what was fetched before it was needed.
        peak: the most bytes that were there at a time, all layers together.
    """

    demands: Counts
    hits: Counts
    first: Counts
    unpredicted: Counts
    collisions: Counts
    prefetches: Counts
    wasted: Counts
    bytes_read: Counts
    bytes_ahead: Counts
    peak: int = 0

    @classmethod
    def of(cls, layers: int) -> CacheStats:
        """Nothing counted yet."""

        def none() -> Counts:
            return np.zeros(layers, dtype=np.int64)

        return cls(none(), none(), none(), none(), none(), none(), none(), none(), none())

    @property
    def misses(self) -> Counts:
        """Demands of experts that were not there."""
        misses: Counts = self.first + self.unpredicted + self.collisions
        return misses

    @property
    def hit_rate(self) -> float:
        """Share of the demands that were hits, over all layers; 1 where nothing was needed."""
        return float(self.hits.sum() / max(1, self.demands.sum())) if self.demands.any() else 1.0

    def totals(self) -> dict[str, int]:
        """The counts over all layers."""
        names = [name for name in self.__dataclass_fields__ if name != "peak"]
        return {**{name: int(getattr(self, name).sum()) for name in names}, "peak": self.peak}


class ExpertCache:
    """Which experts are in fast memory.

    Args:
        sizes: bytes of each expert, [layers, experts].
        capacity: bytes for experts.
        policy: which one leaves first.
        loader: brings them.

    Raises:
        NotEnoughMemory: the capacity is less than the largest expert.

    >>> from pippin.engine.experts.eviction import LRU
    >>> cache = ExpertCache(np.full((2, 4), 10), 30, LRU())
    >>> cache.begin_pass()
    >>> list(cache.waves(0, [0, 1])), list(cache.waves(1, [2, 3]))
    ([([0, 1], True)], [([2, 3], True)])
    >>> cache.stats.totals()["bytes_read"], cache.cached()
    (40, [(0, 1), (1, 2), (1, 3)])
    """

    @checked
    def __init__(
        self,
        sizes: Int64[np.ndarray, "layers experts"],
        capacity: PositiveInt,
        policy: EvictionPolicy,
        *,
        loader: ExpertLoader | None = None,
    ) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        if capacity < self.sizes.max():
            raise NotEnoughMemory(
                f"{capacity:,} bytes for experts hold none of {int(self.sizes.max()):,} bytes, the largest; that is "
                "the least that works"
            )
        self.capacity = self._most = capacity
        self.policy, self.loader = policy, loader or NoLoader()
        self.num_layers, self.num_experts = self.sizes.shape
        self.rows = min(self.sizes.size, int(capacity // self.sizes.min()))
        self.used = 0
        self.stats = CacheStats.of(self.num_layers)
        self._entries = CachedExperts(*(np.full(self.rows, _NOWHERE, dtype=np.int64) for _ in range(6)))
        self._row = np.full(self.sizes.shape, _NOWHERE, dtype=np.int64)
        self._free = list(range(self.rows))[::-1]
        self._pinned = np.zeros(self.rows, dtype=bool)
        self._unused = np.zeros(self.rows, dtype=bool)  # fetched ahead and not used yet
        self._seen = np.zeros(self.sizes.shape, dtype=bool)
        self._evicted = np.full(self.sizes.shape, _NOWHERE, dtype=np.int64)  # last pass that touched and evicted it
        self._uses = np.zeros(self.sizes.shape, dtype=np.int64)
        self._pass = _NOWHERE
        self._count = 0

    def cached(self) -> list[tuple[int, int]]:
        """Layer and index of what is there, in order."""
        return [(int(layer), int(expert)) for layer, expert in np.argwhere(self._row != _NOWHERE)]

    def row(self, layer: int, expert: int) -> int:
        """The row of an expert; -1 where it is not there."""
        return int(self._row[layer, expert])

    def begin_pass(self) -> None:
        """Begin with the first layer again; what was fetched ahead and not used counts as wasted."""
        self._pass += 1
        self._count_waste(np.flatnonzero(self._unused))
        self._unused[:] = False
        self._pinned[:] = False

    def resize(self, capacity: int) -> None:
        """Change the capacity between two passes; what does not fit any more leaves.

        Args:
            capacity: bytes for experts; no more than at the start are used.

        Raises:
            NotEnoughMemory: it holds none of the largest expert.
        """
        if capacity < self.sizes.max():
            raise NotEnoughMemory(f"{capacity:,} bytes for experts hold none of {int(self.sizes.max()):,} bytes")
        self._pinned[:] = False
        self.capacity = min(capacity, self._most)
        self._make_room(0, Clock(max(self._pass, 0), self.num_layers - 1, self.num_layers))

    def waves(self, layer: int, needed: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
        """The needed experts of a layer in waves, each of which is there when it is yielded.

        Args:
            layer: number of the layer, from 0.
            needed: the experts, each once.

        Returns:
            The experts of each wave, and whether it is the last one: the time for `prefetch`.

        Raises:
            InvalidArgument: an expert that there is not, or no pass has begun.
        """
        now = self._now(layer)
        wrong = [expert for expert in needed if not 0 <= expert < self.num_experts]
        if wrong:
            raise InvalidArgument(f"expert {wrong[0]} is none of the {self.num_experts} of layer {layer}")
        wave = [expert for expert in needed if self._row[layer, expert] != _NOWHERE]
        coming = [expert for expert in needed if self._row[layer, expert] == _NOWHERE]
        self._count_demand(layer, wave, coming)
        for expert in wave:
            self._touch(layer, expert, used=True)
        while wave or coming:
            following = self._admit(layer, coming, now)
            coming = coming[len(following) :]
            if wave:
                self.loader.wait(layer, wave)
                yield wave, not (following or coming)
                self._pinned[self._row[layer, wave]] = False
            wave = following

    def prefetch(self, layer: int, ahead: int, ranked: Sequence[int], most_bytes: NonNegativeInt) -> int:
        """Fetch experts of a later layer that are not there, the likeliest first; return the bytes of them.

        Those that are there are kept: they count as touched in this pass.

        Args:
            layer: the layer that is being computed.
            ahead: how many layers later they are needed, from 1.
            ranked: the predicted experts, the likeliest first.
            most_bytes: most bytes to fetch.
        """
        now, target, fetched = self._now(layer), layer + ahead, 0
        for expert in ranked:
            size = int(self.sizes[target, expert])
            if self._row[target, expert] != _NOWHERE:
                self._touch(target, expert, used=False)
            elif fetched + size <= most_bytes and self._make_room(size, now):
                self._bring(target, expert, ahead=True)
                fetched += size
        return fetched

    def tighten(self, capacity: int) -> None:
        """Bring the capacity down in a pass; nothing leaves before something comes.

        Args:
            capacity: bytes for experts, at least the largest.
        """
        self.capacity = min(self.capacity, max(capacity, int(self.sizes.max())))

    def warm(self, experts: Iterable[tuple[int, int]]) -> None:
        """Fetch experts before the first layer, as far as there is room.

        Args:
            experts: layer and index, the most useful first.
        """
        for layer, expert in experts:
            fits = self.used + int(self.sizes[layer, expert]) <= self.capacity
            if fits and self._row[layer, expert] == _NOWHERE:
                self._bring(layer, expert, ahead=True)

    def most_used(self) -> list[tuple[int, int]]:
        """Layer and index of all experts that were needed or predicted, the most used first."""
        order = np.argsort(-self._uses, axis=None, kind="stable")
        layers, experts = np.unravel_index(order[: int((self._uses > 0).sum())], self._uses.shape)
        return list(zip(layers.tolist(), experts.tolist(), strict=True))

    def _now(self, layer: int) -> Clock:
        if self._pass == _NOWHERE:
            raise InvalidArgument("no pass has begun: call begin_pass first")
        return Clock(self._pass, layer, self.num_layers)

    def _count_demand(self, layer: int, hits: Sequence[int], misses: Sequence[int]) -> None:
        stats = self.stats
        stats.demands[layer] += len(hits) + len(misses)
        stats.hits[layer] += len(hits)
        for expert in misses:
            if self._evicted[layer, expert] == self._pass:
                stats.collisions[layer] += 1
            elif self._seen[layer, expert]:
                stats.unpredicted[layer] += 1
            else:
                stats.first[layer] += 1

    def _admit(self, layer: int, coming: Sequence[int], now: Clock) -> list[int]:
        """Fetch the first of the missing experts: all if they fit beside what is pinned, else at most half of it."""
        room = self.capacity - int(self._sizes_of(np.flatnonzero(self._pinned)).sum())
        total = int(self.sizes[layer, coming].sum()) if coming else 0
        limit, taken = room if total <= room else room // 2, 0
        admitted: list[int] = []
        for expert in coming:
            size = int(self.sizes[layer, expert])
            if (admitted and taken + size > limit) or not self._make_room(size, now):
                break
            self._bring(layer, expert, ahead=False)
            taken += size
            admitted.append(expert)
        return admitted

    def _make_room(self, size: int, now: Clock) -> bool:
        """Evict what ranks lowest until an expert fits; False, and nothing is evicted, where it cannot."""
        missing = self.used + size - self.capacity
        if missing <= 0:
            return True
        rows = np.flatnonzero((self._entries.layer != _NOWHERE) & ~self._pinned)
        sizes = self._sizes_of(rows)
        if sizes.sum() < missing:
            return False
        cached = CachedExperts(*(array[rows] for array in self._entries))
        order = np.lexsort((cached.fetched, self.policy.rank(cached, now)))
        leaving = order[: int(np.searchsorted(np.cumsum(sizes[order]), missing)) + 1]
        for row in rows[leaving].tolist():
            self._evict(row)
        return True

    def _sizes_of(self, rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.sizes[self._entries.layer[rows], self._entries.expert[rows]]
        return found

    def _evict(self, row: int) -> None:
        entries = self._entries
        layer, expert = int(entries.layer[row]), int(entries.expert[row])
        if self._unused[row]:
            self._count_waste(np.array([row]))
            self._unused[row] = False
        if entries.last_pass[row] == self._pass:
            self._evicted[layer, expert] = self._pass
        self._row[layer, expert] = entries.layer[row] = _NOWHERE
        self._free.append(row)
        self.used -= int(self.sizes[layer, expert])
        self.loader.drop(layer, expert, row)

    def _bring(self, layer: int, expert: int, *, ahead: bool) -> None:
        row, size = self._free.pop(), int(self.sizes[layer, expert])
        entries, stats = self._entries, self.stats
        entries.layer[row], entries.expert[row], entries.uses[row] = layer, expert, self._uses[layer, expert]
        self._row[layer, expert] = row
        self._count += 1
        entries.fetched[row] = self._count
        self._seen[layer, expert] = True
        self._unused[row] = ahead
        self.used += size
        stats.peak = max(stats.peak, self.used)
        stats.bytes_read[layer] += size
        if ahead:
            stats.prefetches[layer] += 1
            stats.bytes_ahead[layer] += size
        self._touch(layer, expert, used=not ahead)
        self.loader.fetch(layer, expert, row, ahead=ahead)

    def _touch(self, layer: int, expert: int, *, used: bool) -> None:
        row, entries = self._row[layer, expert], self._entries
        entries.last_pass[row] = self._pass
        self._uses[layer, expert] += 1
        entries.uses[row] = self._uses[layer, expert]
        if used:
            self._unused[row] = False
            self._pinned[row] = True
        self._count += 1
        entries.last_use[row] = self._count

    def _count_waste(self, rows: np.ndarray) -> None:
        np.add.at(self.stats.wasted, self._entries.layer[rows], 1)
