"""Return memory to the operating system: heap memory that was freed, and pages of mapped files.

Notable here:
- all calls are hints (`malloc_trim`, `madvise`): on a system without them nothing happens, and no data is ever lost
- code pages of torch that only its initialization needs are a third of the resident memory with a small model
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")


def trim() -> None:
    """Return freed heap memory and the pages of library code to the system; code is paged in again when it runs."""
    release = getattr(_c(), "malloc_trim", None)
    if release is not None:
        release(0)
    for start, size in _clean_code():
        forget(start, size)


def forget(address: int, size: int) -> None:
    """Drop the pages of a mapped file from this process's memory; they are read from the file again when accessed.

    Args:
        address: the start of the mapping.
        size: its size in bytes. It must not have been written to, since the private copy of a page would be lost.
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
