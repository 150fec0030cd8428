"""Resident memory: a budget for it, and its return to the operating system where it is not needed.

Notable here:
- a budget counts what a process holds beyond what it held when the budget was made: weights, caches, libraries that
  were imported since, whatever the system says is resident
- all calls are hints (`malloc_trim`, `madvise`): on a system without them nothing happens
- code pages of torch that only its initialization needs are a third of the resident memory with a small model
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil

from pippin.core import device as devices
from pippin.core.errors import InvalidArgument
from pippin.core.options import parse_memory

_SHARE: Final = 0.8  # of the free memory, for a budget that finds itself
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")


@dataclass(frozen=True)
class MemoryBudget:
    """The most resident memory that a model may add to its process, with its caches and all that computes with it.

    Args:
        nbytes: the most.
        automatic: whether it was found here, so that a model which fits needs no budget.
        base: resident memory without the model.
    """

    nbytes: int
    automatic: bool = False
    base: int = field(default_factory=lambda: resident())

    @classmethod
    def of(cls, size: int | str | MemoryBudget) -> MemoryBudget:
        """A budget from now on.

        Args:
            size: bytes, or a size such as "400MB"; "auto" for 80 % of what is free.

        Raises:
            InvalidArgument: no size, or none above zero.

        >>> MemoryBudget.of("400MB").nbytes
        400000000
        """
        if isinstance(size, MemoryBudget):
            return size
        nbytes = parse_memory(size) if isinstance(size, str) else size
        if nbytes == "auto":
            return cls(automatic(), automatic=True)
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
            raise InvalidArgument(f"memory must be a size above zero, such as 400MB, or 'auto', got {size!r}")
        return cls(nbytes)

    @property
    def left(self) -> int:
        """Bytes that may still be added; negative beyond the budget."""
        return self.nbytes - (resident() - self.base)


def automatic() -> int:
    """Bytes of a budget that finds itself: 80 % of what is free."""
    return int(_SHARE * devices.memory().available)


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(_process().memory_info().rss)


@cache
def _process() -> psutil.Process:
    return psutil.Process()


def trim() -> None:
    """Return freed heap memory and the pages of library code to the system; code is paged in again when it runs."""
    release = getattr(_c(), "malloc_trim", None)
    if release is not None:
        release(0)
    for start, size in _clean_code():
        forget(start, size)


def forget(address: int, size: int) -> None:
    """Drop whole pages from this process's memory; those of a mapped file are read again when they are accessed.

    Args:
        address: where they begin.
        size: bytes. What was written there is lost: of a file the private copies of pages, elsewhere everything.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = getattr(_c(), "madvise", None)
    if advise is not None and length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        advise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _clean_code(table: Path = Path("/proc/self/smaps")) -> Iterator[tuple[int, int]]:
    """Address and size of the mappings of shared libraries without private pages (relocated or patched); Linux only."""
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    start = size = 0
    for line in lines:
        if (found := _MAPPING.match(line)) is not None:
            start, end, rights, name = int(found[1], 16), int(found[2], 16), found[3], found[4]
            code = "w" not in rights and name.startswith("/") and ".so" in name
            size = end - start if code else 0
        elif size and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield start, size


@cache
def _c() -> Any:
    """The C library of this process."""
    return ctypes.CDLL(None)
