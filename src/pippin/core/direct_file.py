"""Files that are read around the page cache of the system, so that memory holds what was asked for and nothing else.

Notable here:
- direct reads begin and end at multiples of a block and go to memory that begins at a page
- a file system without direct reads is read as usual, and what was read is dropped from its cache; `direct` says so
- the bytes are counted as they are read, in whole blocks, which is what the system counts as well
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Final

from pippin.core.errors import CorruptedFile, ModelNotFound

BLOCK: Final = 4096
"""Bytes of which reads are multiples."""


def room_for(nbytes: int) -> int:
    """Bytes of memory that reading any ``nbytes`` in a row may take.

    >>> room_for(1), room_for(4096)
    (4096, 8192)
    """
    return (nbytes + 2 * (BLOCK - 1)) // BLOCK * BLOCK


class DirectFile:
    """A file that is open for direct reads. Used by one thread at a time.

    Args:
        path: the file.

    Attributes:
        direct: whether reads go around the page cache.
        bytes_read: bytes read so far, in whole blocks.

    Raises:
        ModelNotFound: there is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.bytes_read = Path(path), 0
        self.direct = hasattr(os, "O_DIRECT")
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except FileNotFoundError as error:
            raise ModelNotFound(f"no file {str(path)!r}") from error
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor = -1
            self._read_as_usual()

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._descriptor < 0

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, offset: int, nbytes: int, room: mmap.mmap | memoryview) -> memoryview:
        """Read some bytes.

        Args:
            offset: where they begin in the file.
            nbytes: how many.
            room: at least `room_for` as many, from the beginning of a page; overwritten.

        Returns:
            The bytes, a part of ``room``.

        Raises:
            CorruptedFile: the file ends before.
        """
        begin = offset // BLOCK * BLOCK
        whole = -(-(offset + nbytes) // BLOCK) * BLOCK - begin
        view, done = memoryview(room), 0
        while done < offset + nbytes - begin:
            count = self._read_once(view[done:whole], begin + done)
            done += count
            if count == 0 or done % BLOCK:  # the end of the file, where a direct read cannot go on
                break
        self.bytes_read += -(-done // BLOCK) * BLOCK
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, begin, whole, os.POSIX_FADV_DONTNEED)
        if done < offset + nbytes - begin:
            raise CorruptedFile(
                f"{self.path} ends at byte {begin + done:,}, {offset + nbytes:,} are needed; download it again"
            )
        return view[offset - begin : offset - begin + nbytes]

    def _read_once(self, view: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._descriptor, [view], offset)
        except OSError as error:
            if not self.direct or error.errno != errno.EINVAL:
                raise
        self._read_as_usual()
        return os.preadv(self._descriptor, [view], offset)

    def _read_as_usual(self) -> None:
        self.close()
        self._descriptor, self.direct = os.open(self.path, os.O_RDONLY), False
