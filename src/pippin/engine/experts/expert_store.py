"""Experts that stay in the file of their model and come into bounded memory when a pass needs them.

Notable here:
- a thread of its own reads them (`ExpertReader`), while passes go on
- what experts may take can change before each pass
- memory for an expert is reused by the next one of the same size and given back to the system otherwise

Source: Alizadeh et al. 2024, arXiv:2312.11514 (weights read from storage when they are needed).
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from pippin.core import native
from pippin.core.errors import InvalidArgument
from pippin.engine.experts.eviction import EvictionPolicy
from pippin.engine.experts.expert_cache import CacheStats, ExpertCache
from pippin.engine.experts.expert_reader import ExpertReader, ReadJob
from pippin.engine.experts.simulator import NO_PREFETCH, Prefetch
from pippin.language.stored_experts import FileExperts

Place = Callable[[int, int, native.Expert | None], None]
"""Tells the kernels where an expert of a mixture lies, or that it lies nowhere."""


class ExpertStore:
    """Brings the experts of a model; a `pippin.engine.runners.native_experts.ExpertSource`.

    Args:
        experts: of each mixture all experts.
        capacity: most bytes of memory for them.
        policy: which one leaves first.
        place: tells the kernels where they lie.
        prefetch: what is read before it is needed.
        share: from the tokens of a pass, and the bytes that experts take now, to those that they may take in it; before
            each layer it is asked again with 0 tokens. None for all of the capacity.

    Raises:
        NotEnoughMemory: the capacity is less than the largest expert.
        ModelNotFound: a file is gone.
    """

    def __init__(
        self,
        experts: FileExperts,
        capacity: int,
        policy: EvictionPolicy,
        place: Place,
        *,
        prefetch: Prefetch = NO_PREFETCH,
        share: Callable[[int, int], int] | None = None,
    ) -> None:
        if prefetch.depth and prefetch.most_bytes is None:
            raise InvalidArgument("prefetch needs most_bytes: how much may be read while a layer is computed")
        self.experts, self.prefetch, self._place, self._share = experts, prefetch, place, share
        sizes = [[expert.packed_bytes for expert in layer] for layer in experts]
        self.cache = ExpertCache(np.array(sizes, dtype=np.int64), capacity, policy, loader=self)
        self._reader = ExpertReader(experts)
        weakref.finalize(self, self._reader.close)
        self._jobs: dict[int, ReadJob] = {}
        self._placed: set[int] = set()
        self._free: dict[int, list[Tensor]] = {}
        self._warm: Sequence[tuple[int, int]] = ()

    @property
    def depth(self) -> int:
        """Layers to look ahead."""
        return self.prefetch.depth

    @property
    def stats(self) -> CacheStats:
        """What the cache counted."""
        return self.cache.stats

    @property
    def bytes_read(self) -> int:
        """Bytes read from files, in whole blocks."""
        return sum(file.bytes_read for file in self._reader.files.values())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that experts take now."""
        return self.cache.used + sum(size * len(free) for size, free in self._free.items())

    @property
    def direct(self) -> bool:
        """Whether all reads go around the page cache of the system."""
        return all(file.direct for file in self._reader.files.values())

    def begin_pass(self, tokens: int) -> None:
        """See `ExpertSource`. What could not be read in the last pass is read once more.

        Raises:
            InvalidArgument: the store is closed.
        """
        if self._reader.closed:
            raise InvalidArgument("the store of experts is closed")
        for job in self._jobs.values():
            if job.done.is_set() and job.error is not None:
                self._reader.submit(job, ahead=False)
        if self._share is not None:
            self.cache.resize(self._share(tokens, self.nbytes))
            self._free.clear()
        self.cache.begin_pass()
        warm, self._warm = self._warm, ()
        self.cache.warm(warm)

    def warm(self, experts: Sequence[tuple[int, int]]) -> None:
        """Begin the first pass with experts, as far as there is room: layer and index, the most useful first."""
        self._warm = experts

    def waves(
        self, layer: int, needed: list[int], predicted: Float32[np.ndarray, "depth experts"] | None
    ) -> Iterator[Sequence[int]]:
        """See `ExpertSource`."""
        if self._share is not None:
            self.cache.tighten(self._share(0, self.nbytes))
        for wave, last in self.cache.waves(layer, needed):
            if last and predicted is not None:
                for ahead, scores in enumerate(predicted, 1):
                    if layer + ahead < len(self.experts) and scores[0] >= 0:
                        most = self.prefetch.most_bytes or 0
                        ranked = self.prefetch.ranked(scores.astype(np.float16).astype(np.float64))  # as in a trace
                        self.cache.prefetch(layer, ahead, ranked, most)
            yield wave

    def fetch(self, layer: int, expert: int, row: int, *, ahead: bool) -> None:
        """See `pippin.engine.experts.ExpertLoader`."""
        size = int(self.cache.sizes[layer, expert])
        free = self._free.get(size)
        job = self._jobs[row] = ReadJob(layer, expert, free.pop() if free else self._allocate(size))
        self._reader.submit(job, ahead=ahead)

    def drop(self, layer: int, expert: int, row: int) -> None:
        """See `pippin.engine.experts.ExpertLoader`."""
        job = self._jobs.pop(row)
        self._reader.cancel(job)
        if row in self._placed:
            self._placed.discard(row)
            self._place(layer, expert, None)
        self._free.setdefault(job.memory.nbytes, []).append(job.memory)

    def wait(self, layer: int, experts: Sequence[int]) -> None:
        """See `pippin.engine.experts.ExpertLoader`."""
        for expert in experts:
            row = self.cache.row(layer, expert)
            job = self._jobs[row]
            if row in self._placed:
                continue
            self._reader.hurry(job)
            job.done.wait()
            if job.error is not None:
                raise job.error
            self._placed.add(row)
            self._place(layer, expert, self._described(layer, expert, job.memory))

    def close(self) -> None:
        """End the reader and close the files."""
        self._reader.close()

    def _allocate(self, size: int) -> Tensor:
        """New memory in place of what is free in other sizes; a mapping, which goes back to the system when freed."""
        self._free.clear()
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)

    def _described(self, layer: int, expert: int, memory: Tensor) -> native.Expert:
        made, address = native.Expert(), memory.data_ptr()
        for name, part in self.experts[layer][expert].parts.items():
            setattr(made, name, part.described(address))
            address += part.packed_bytes
        return made
