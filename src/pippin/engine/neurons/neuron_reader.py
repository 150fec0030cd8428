"""Reads bundles of neurons from their file, around the page cache, with several threads.

Notable here:
- reads consist of whole blocks; neurons whose blocks touch, or lie no further apart than a gap, are one read
- a caller waits for its reads, so that none is on its way when the files are closed
- a block is compared with its checksum when it is read for the first time

Source: Alizadeh et al. 2024, arXiv:2312.11514, section 3 and appendix (direct reads on 32 threads).
"""

from __future__ import annotations

import mmap
import threading
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.direct_file import BLOCK, DirectFile, room_for
from pippin.core.errors import CorruptedFile, InvalidArgument
from pippin.language.stored_neurons import StoredNeurons

THREADS: Final = 8
"""Threads that read, where nobody said how many."""
ROOM: Final = 2_000_000
"""Bytes of memory for blocks that were read and whose neurons were not copied yet."""
_WORDS: Final = {2: np.uint16, 4: np.uint32}


class Runs(NamedTuple):
    """Blocks that are read in a row.

    Attributes:
        begin: the first block of each read.
        end: the block after its last one.
        of: the read that brings each neuron.
    """

    begin: Int64[np.ndarray, runs]
    end: Int64[np.ndarray, runs]
    of: Int64[np.ndarray, neurons]


def merge(begin: Int64[np.ndarray, neurons], end: Int64[np.ndarray, neurons], gap: int) -> Runs:
    """The reads that bring the blocks of some neurons, in their order.

    Args:
        begin: the first block of each neuron, ascending.
        end: the block after its last one.
        gap: blocks that may lie between two neurons of one read.

    >>> runs = merge(np.array([0, 0, 1, 5]), np.array([1, 2, 2, 6]), 0)
    >>> runs.begin.tolist(), runs.end.tolist(), runs.of.tolist()
    ([0, 5], [2, 6], [0, 0, 0, 1])
    """
    new = np.concatenate([[True], begin[1:] > end[:-1] + gap])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(begin)) - 1
    return Runs(begin[first], end[last], np.cumsum(new) - 1)


class NeuronReader:
    """Reads neurons of a file; for one caller at a time.

    Args:
        stored: the file.
        threads: that read at the same time.
        gap: blocks that may lie between two neurons for both to come with one read.

    Attributes:
        reads: how many reads there were in each layer.
        bytes_read: bytes read in each layer, in whole blocks.
        seconds: for which the caller waited.

    Raises:
        ModelNotFound: the file is gone.
    """

    @checked
    def __init__(self, stored: StoredNeurons, *, threads: PositiveInt = THREADS, gap: NonNegativeInt = 0) -> None:
        self.stored, self.threads, self.gap = stored, threads, gap
        self.reads = np.zeros(len(stored.layers), dtype=np.int64)
        self.bytes_read = np.zeros(len(stored.layers), dtype=np.int64)
        self.seconds = 0.0
        largest = max(stored.bundle_bytes(layer) for layer in range(len(stored.layers)))
        self._room = mmap.mmap(-1, max(ROOM, room_for(largest)))
        self._sound = np.zeros(len(stored.checksums), dtype=bool)
        self._files = [DirectFile(stored.path) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, "pippin-neurons") if threads > 1 else None
        self._lock = threading.Lock()
        # which must not wait for threads: garbage may be collected on one of them
        self._end = weakref.finalize(self, _end, self._pool, self._files)

    @property
    def direct(self) -> bool:
        """Whether all reads go around the page cache of the system."""
        return all(file.direct for file in self._files)

    @property
    def closed(self) -> bool:
        """Whether the files are closed."""
        return not self._end.alive

    def close(self) -> None:
        """Close the files, after a read that is under way."""
        with self._lock:
            self._end()

    def read(self, layer: int, neurons: Int64[np.ndarray, neurons], out: np.ndarray) -> None:
        """Read the bundles of neurons of a layer.

        Args:
            layer: its index in the file.
            neurons: ascending, each once.
            out: (neurons, elements of a bundle), words of the size of an element; overwritten, also by a
                read that fails.

        Raises:
            CorruptedFile: a block is damaged, or the file ends before.
            InvalidArgument: the reader is closed.
        """
        size, began = self.stored.bundle_bytes(layer), perf_counter()
        at_once = max(1, len(self._room) // (room_for(size) + self.gap * BLOCK))
        with self._lock:
            if self.closed:
                raise InvalidArgument("the store of neurons is closed")
            for begin in range(0, len(neurons), at_once):
                self._read_some(layer, size, neurons[begin : begin + at_once], out[begin : begin + at_once])
        self.seconds += perf_counter() - began

    def _read_some(self, layer: int, size: int, neurons: np.ndarray, out: np.ndarray) -> None:
        """As many neurons as there is room for."""
        starts = self.stored.layers[layer].offset + neurons * size
        runs = merge(starts // BLOCK, (starts + size - 1) // BLOCK + 1, self.gap)
        lengths = runs.end - runs.begin
        places = np.cumsum(lengths) - lengths  # of the reads in the room, in blocks
        self._read_runs(runs, places, lengths)
        self.reads[layer] += len(lengths)
        self.bytes_read[layer] += int(lengths.sum()) * BLOCK
        self._compare(runs, places, lengths)
        words = np.frombuffer(self._room, dtype=_WORDS[out.itemsize])
        within = (starts - runs.begin[runs.of] * BLOCK + places[runs.of] * BLOCK) // out.itemsize
        out[:] = np.lib.stride_tricks.sliding_window_view(words, out.shape[1])[within]

    def _read_runs(self, runs: Runs, places: np.ndarray, lengths: np.ndarray) -> None:
        """Read all runs to their places, divided among the threads by bytes."""
        jobs = list(zip(runs.begin.tolist(), places.tolist(), lengths.tolist(), strict=True))
        view = memoryview(self._room)

        def read(file: DirectFile, part: list[tuple[int, int, int]]) -> None:
            for begin, place, length in part:
                file.read(begin * BLOCK, length * BLOCK, view[place * BLOCK : (place + length) * BLOCK])

        if self._pool is None or len(jobs) == 1:
            read(self._files[0], jobs)
            return
        parts = min(len(jobs), self.threads)
        shares = np.searchsorted(places, np.arange(1, parts) * (places[-1] + lengths[-1]) / parts)
        bounds = [0, *shares.tolist(), len(jobs)]
        waiting: list[Future[None]] = [
            self._pool.submit(read, file, jobs[a:b])
            for file, a, b in zip(self._files, bounds[:-1], bounds[1:], strict=False)
            if a < b
        ]
        try:
            wait(waiting)
        except BaseException:  # an interrupt: the room belongs to the threads until they are done
            wait(waiting)
            raise
        for each in waiting:
            each.result()

    def _compare(self, runs: Runs, places: np.ndarray, lengths: np.ndarray) -> None:
        """Compare blocks that were never read before with their checksums."""
        within = np.arange(int(lengths.sum()))
        blocks = within + np.repeat(runs.begin - places, lengths)
        new = np.flatnonzero(~self._sound[blocks])
        view = memoryview(self._room)
        for place, block in zip(within[new].tolist(), blocks[new].tolist(), strict=True):
            found, expected = zlib.crc32(view[place * BLOCK : (place + 1) * BLOCK]), int(self.stored.checksums[block])
            if found != expected:
                path = self.stored.path
                raise CorruptedFile(
                    f"{path} is damaged at byte {block * BLOCK:,}: the checksum is {found:08x}, not {expected:08x}; "
                    f"delete {path.parent}, and it is written anew"
                )
        self._sound[blocks] = True


def _end(pool: ThreadPoolExecutor | None, files: list[DirectFile]) -> None:
    """Let the threads end and close the files, which nobody reads any more."""
    if pool is not None:
        pool.shutdown(wait=False)
    for file in files:
        file.close()
