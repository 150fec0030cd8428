"""Giving memory back: what was freed but kept by the C library, and pages of files that are done with.

Notable here:
- all are hints to the system: where it does not know them nothing happens, and nothing is ever lost by them
- the code of torch that only its start needed is a third of what a process with a small model holds
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
    """Give memory that was freed back to the system, and code that is not running; it is read again when it is."""
    release = getattr(_c(), "malloc_trim", None)
    if release is not None:
        release(0)
    for start, size in _clean_code():
        forget(start, size)


def forget(address: int, size: int) -> None:
    """Take the pages of a mapped file out of this process's memory; whoever reads them again gets them from the file.

    Args:
        address: where the mapping begins.
        size: its bytes. Nothing may have been written there, since a private copy of a page would be lost.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = getattr(_c(), "madvise", None)
    if advise is not None and length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        advise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _clean_code(table: Path = Path("/proc/self/smaps")) -> Iterator[tuple[int, int]]:
    """Where shared libraries lie of which this process has no page of its own (by relocation or patching); Linux."""
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
    """The functions of the C library of this process."""
    return ctypes.CDLL(None)
