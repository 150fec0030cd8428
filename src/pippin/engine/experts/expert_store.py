"""Experts that stay in the file of their model and come into bounded memory when a pass needs them.

Notable here:
- bytes are read from where they lie in the file, around the page cache, and reordered for the kernels on their way
- a thread of its own reads: what is needed first, then what is predicted; what was not begun when it left the cache is
  not read at all
- memory for an expert is reused by the next one of the same size and given back to the system otherwise

Source: Alizadeh et al. 2024, arXiv:2312.11514 (weights read from storage when they are needed).
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from pippin.core import native
from pippin.core.direct_file import DirectFile, room_for
from pippin.core.errors import InvalidArgument
from pippin.engine.experts.eviction import EvictionPolicy
from pippin.engine.experts.expert_cache import CacheStats, ExpertCache
from pippin.engine.experts.simulator import NO_PREFETCH, Prefetch
from pippin.nn.quantization.packed import packed_size

PARTS: Final = ("gate", "up", "down")
_ALIGNMENT: Final = 64


@dataclass(frozen=True)
class FileMatrix:
    """A matrix in a file, in a form that the kernels pack.

    Attributes:
        path: the file.
        offset: where it begins.
        nbytes: its size there.
        kind: ggml's name of its type; "F32" and "BF16" for matrices that are not in blocks.
        rows: number of outputs.
        columns: number of inputs.
    """

    path: Path
    offset: int
    nbytes: int
    kind: str
    rows: int
    columns: int

    @property
    def packed_bytes(self) -> int:
        """Bytes in memory, rounded up to where the next matrix may begin."""
        size = packed_size(native.GGML_FORMATS[self.kind], self.rows, self.columns)
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def described(self, address: int | None) -> native.NativeMatrix:
        """The matrix for the library, at an address or nowhere."""
        form = native.GGML_FORMATS[self.kind]
        return native.NativeMatrix(form, 0, self.rows, self.columns, 0.0, 0, address)

    def pack(self, stored: memoryview, address: int) -> None:
        """Pack the bytes of the file to an address."""
        found, form = native.library(), native.GGML_FORMATS[self.kind]
        assert found is not None
        source = np.frombuffer(stored, dtype=np.uint8).ctypes.data
        if self.kind in ("F32", "BF16"):
            found.pack_dense(form, source, self.columns, self.rows, self.columns, address)
        else:
            found.pack_ggml(form, source, self.rows, self.columns, address)


StoredExpert = dict[str, FileMatrix]
"""The matrices of an expert by `PARTS`; without a gate where it has none."""
Place = Callable[[int, int, native.Expert | None], None]
"""Tells the kernels where an expert of a mixture lies, or that it lies nowhere."""


@dataclass(eq=False)
class _Job:
    """An expert that is to be read, and what became of it."""

    layer: int
    expert: int
    memory: Tensor
    done: threading.Event
    begun: bool = False
    error: BaseException | None = None


class ExpertStore:
    """Brings the experts of a model; a `pippin.engine.runners.native_experts.ExpertSource`.

    Args:
        experts: of each mixture all experts.
        capacity: bytes of memory for them.
        policy: which one leaves first.
        place: tells the kernels where they lie.
        prefetch: what is read before it is needed.

    Raises:
        NotEnoughMemory: the capacity is less than the largest expert.
        ModelNotFound: a file is gone.
    """

    def __init__(
        self,
        experts: Sequence[Sequence[StoredExpert]],
        capacity: int,
        policy: EvictionPolicy,
        place: Place,
        *,
        prefetch: Prefetch = NO_PREFETCH,
    ) -> None:
        if prefetch.depth and prefetch.most_bytes is None:
            raise InvalidArgument("prefetch needs most_bytes: how much may be read while a layer is computed")
        self.experts, self.prefetch, self._place = experts, prefetch, place
        sizes = [[sum(part.packed_bytes for part in expert.values()) for expert in layer] for layer in experts]
        self.cache = ExpertCache(np.array(sizes, dtype=np.int64), capacity, policy, loader=self)
        paths = {part.path for layer in experts for expert in layer for part in expert.values()}
        self._files = {path: DirectFile(path) for path in sorted(paths)}
        most = max(part.nbytes for layer in experts for expert in layer for part in expert.values())
        self._room = mmap.mmap(-1, room_for(most))
        self._jobs: dict[int, _Job] = {}
        self._placed: set[int] = set()
        self._free: dict[int, list[Tensor]] = {}
        self._queues: tuple[deque[_Job], deque[_Job]] = (deque(), deque())  # needed, predicted
        self._wake = threading.Condition()
        self._closed = False
        self._reader = threading.Thread(target=self._read_jobs, name="pippin-experts", daemon=True)
        self._reader.start()

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
        return sum(file.bytes_read for file in self._files.values())

    @property
    def direct(self) -> bool:
        """Whether all reads go around the page cache of the system."""
        return all(file.direct for file in self._files.values())

    def begin_pass(self, tokens: int) -> None:
        """See `ExpertSource`. What could not be read in the last pass is read once more.

        Raises:
            InvalidArgument: the store is closed.
        """
        if self._closed:
            raise InvalidArgument("the store of experts is closed")
        for job in self._jobs.values():
            if job.done.is_set() and job.error is not None:
                self._again(job)
        self.cache.begin_pass()

    def waves(
        self, layer: int, needed: list[int], predicted: Float32[np.ndarray, "depth experts"] | None
    ) -> Iterator[Sequence[int]]:
        """See `ExpertSource`."""
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
        job = _Job(layer, expert, free.pop() if free else self._allocate(size), threading.Event())
        self._jobs[row] = job
        with self._wake:
            self._queues[ahead].append(job)
            self._wake.notify()

    def drop(self, layer: int, expert: int, row: int) -> None:
        """See `pippin.engine.experts.ExpertLoader`."""
        job = self._jobs.pop(row)
        with self._wake:
            if not job.begun:
                job.begun = True  # the reader passes it over
                job.done.set()
        job.done.wait()
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
            with self._wake:
                if not job.begun and job in self._queues[True]:  # predicted, and needed before it was its turn
                    self._queues[True].remove(job)
                    self._queues[False].append(job)
            job.done.wait()
            if job.error is not None:
                raise job.error
            self._placed.add(row)
            self._place(layer, expert, self._described(layer, expert, job.memory))

    def close(self) -> None:
        """End the reader and close the files."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._reader.join()
        for file in self._files.values():
            file.close()

    def _again(self, job: _Job) -> None:
        """Put a job that failed into the queue again."""
        with self._wake:
            job.error, job.begun = None, False
            job.done.clear()
            self._queues[False].append(job)
            self._wake.notify()

    def _allocate(self, size: int) -> Tensor:
        """New memory in place of what is free in other sizes; a mapping, which goes back to the system when freed."""
        self._free.clear()
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)

    def _described(self, layer: int, expert: int, memory: Tensor) -> native.Expert:
        made, address = native.Expert(), memory.data_ptr()
        for name, part in self.experts[layer][expert].items():
            setattr(made, name, part.described(address))
            address += part.packed_bytes
        return made

    def _read_jobs(self) -> None:
        while True:
            with self._wake:
                while not self._closed and not any(self._queues):
                    self._wake.wait()
                if self._closed:
                    return
                job = next(queue for queue in self._queues if queue).popleft()
                if job.begun:
                    continue
                job.begun = True
            try:
                self._read(job)
            except BaseException as error:  # raised where the expert is waited for
                job.error = error
            job.done.set()

    def _read(self, job: _Job) -> None:
        address = job.memory.data_ptr()
        for part in self.experts[job.layer][job.expert].values():
            part.pack(self._files[part.path].read(part.offset, part.nbytes, self._room), address)
            address += part.packed_bytes


def stored_in(tensor: Tensor, mapped: Sequence[tuple[Path, Tensor]]) -> tuple[Path, int] | None:
    """Where a tensor lies in a mapped file: the file and the offset; None for a copy or rows with gaps.

    Args:
        tensor: perhaps a view of one of the files.
        mapped: files and their bytes.
    """
    if not tensor.is_contiguous():
        return None
    for path, data in mapped:
        offset = tensor.data_ptr() - data.data_ptr()
        if 0 <= offset <= data.nbytes - tensor.nbytes:
            return path, offset
    return None
