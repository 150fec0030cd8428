"""The thread that reads experts from files: what is needed first, then what is predicted.

Notable here:
- bytes are read from where they lie in the file, around the page cache, and reordered for the kernels on their way
- what left the cache before its turn is not read at all
- an expert with a checksum is compared with it when it is read for the first time
- the reader knows nothing of the store that it reads for, and ends with it
"""

from __future__ import annotations

import mmap
import threading
import zlib
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from pippin.core.direct_file import DirectFile, room_for
from pippin.core.errors import CorruptedFile
from pippin.language.stored_experts import FileExperts


@dataclass(eq=False)
class ReadJob:
    """An expert that is to be read, and what became of it.

    Attributes:
        layer: its mixture.
        expert: its index there.
        memory: where it comes.
        done: set when it is there, or will not come.
        begun: whether the reader took it up, or passes it over.
        error: why it did not come.
    """

    layer: int
    expert: int
    memory: Tensor
    done: threading.Event = field(default_factory=threading.Event)
    begun: bool = False
    error: BaseException | None = None


class ExpertReader:
    """Reads experts on a thread of its own.

    Args:
        experts: of each mixture all experts.

    Raises:
        ModelNotFound: a file is gone.
    """

    def __init__(self, experts: FileExperts) -> None:
        self.experts = experts
        parts = [part for layer in experts for expert in layer for part in expert.parts.values()]
        self.files = {path: DirectFile(path) for path in sorted({part.path for part in parts})}
        self.closed = False
        self._room = mmap.mmap(-1, room_for(max(part.nbytes for part in parts)))
        self._sound: set[tuple[int, int]] = set()  # whose checksums were compared
        self._queues: tuple[deque[ReadJob], deque[ReadJob]] = (deque(), deque())  # needed, predicted
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="pippin-experts", daemon=True)
        self._thread.start()

    def submit(self, job: ReadJob, *, ahead: bool) -> None:
        """Read an expert, also one that was read without success; ``ahead`` if it is not needed yet."""
        with self._wake:
            job.error, job.begun = None, False
            job.done.clear()
            self._queues[ahead].append(job)
            self._wake.notify()

    def hurry(self, job: ReadJob) -> None:
        """Read an expert that was predicted before all that is not needed yet."""
        with self._wake:
            if not job.begun and job in self._queues[True]:
                self._queues[True].remove(job)
                self._queues[False].append(job)

    def cancel(self, job: ReadJob) -> None:
        """Return when an expert will not be written to its memory any more."""
        with self._wake:
            if not job.begun:
                job.begun = True
                job.done.set()
        job.done.wait()

    def close(self) -> None:
        """End the thread, which closes the files; returns when it has ended, on any other thread."""
        with self._wake:
            self.closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:  # garbage may be collected on it
            self._thread.join()

    def _run(self) -> None:
        try:
            self._read_all()
        finally:
            for file in self.files.values():
                file.close()

    def _read_all(self) -> None:
        while True:
            with self._wake:
                while not self.closed and not any(self._queues):
                    self._wake.wait()
                if self.closed:
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

    def _read(self, job: ReadJob) -> None:
        address, expert = job.memory.data_ptr(), self.experts[job.layer][job.expert]
        compare = expert.checksum is not None and (job.layer, job.expert) not in self._sound
        checksum = 0
        for part in expert.parts.values():
            stored = self.files[part.path].read(part.offset, part.nbytes, self._room)
            checksum = zlib.crc32(stored, checksum) if compare else 0
            part.pack(stored, address)
            address += part.packed_bytes
        if compare and checksum != expert.checksum:
            raise CorruptedFile(
                f"{part.path}: expert {job.expert} of mixture {job.layer} is damaged: its checksum is {checksum:08x}, "
                f"not {expert.checksum:08x}; delete {part.path.parent}, and it is written anew"
            )
        self._sound.add((job.layer, job.expert))
