"""Search for a canary in bytes, in files and compressed data inside them, and in the memory of a process.

Notable here:
- all canaries of an audit share one random anchor, so that a search is for about a dozen patterns, not thousands
- each pattern is the anchor in another encoding; compressed data is unpacked at whichever offset it begins
- a deleted file that a process still has open is read through `/proc`
"""

from __future__ import annotations

import base64
import contextlib
import io
import mmap
import os
import re
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAX_DEPTH = 3  # levels of nested compression
_MAX_UNPACKED = 64 * 2**20  # bytes of decompressed data that are searched
_BLOCK = 16 * 2**20
_GZIP = b"\x1f\x8b\x08"
_ZLIB = re.compile(rb"\x78[\x01\x5e\x9c\xda]")
_ZIP = b"PK\x03\x04"


def patterns(anchor: str) -> dict[str, tuple[bytes, ...]]:
    """The byte patterns of the anchor, by encoding.

    >>> patterns("ab")["hex"]
    (b'6162',)
    """
    plain = anchor.encode()
    digits = plain.hex()
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in anchor)
    percent = "".join(f"%{byte:02x}" for byte in plain)
    return {
        "utf-8": (plain,),
        "utf-16": (anchor.encode("utf-16-le"), anchor.encode("utf-16-be")),
        "utf-32": (anchor.encode("utf-32-le"), anchor.encode("utf-32-be")),
        "base64": tuple(_base64(plain, shift) for shift in range(3)),
        "hex": tuple(dict.fromkeys((digits.encode(), digits.upper().encode()))),
        "json escapes": (escaped.encode(), escaped.upper().replace("\\U", "\\u").encode()),
        "percent": tuple(dict.fromkeys((percent.encode(), percent.upper().encode()))),
    }


def _base64(plain: bytes, shift: int) -> bytes:
    """The base64 characters that depend on these bytes alone when ``shift`` others precede them in a group of three."""
    text = base64.b64encode(bytes(shift) + plain)
    end = len(plain) + shift
    return text[(shift * 8 + 5) // 6 : end * 8 // 6]


def count(data: bytes | mmap.mmap, anchor: str) -> Counter[str]:
    """Count occurrences of the anchor in these bytes, by encoding, without decompressing anything."""
    found: Counter[str] = Counter()
    for name, texts in patterns(anchor).items():
        number = sum(1 for text in texts for _ in _all(data, text))
        if number:
            found[name] = number
    return found


def search(data: bytes | mmap.mmap, anchor: str, *, depth: int = _MAX_DEPTH) -> Counter[str]:
    """Count occurrences of the anchor in these bytes and in compressed data inside them.

    Args:
        data: the bytes.
        anchor: the text to search for.
        depth: levels of nested compression to unpack.

    Returns:
        Counts by encoding; the name begins with the compression formats, such as "gzip, utf-8".

    >>> import gzip
    >>> search(b"head" + gzip.compress(b"my anchor1234"), "anchor1234")
    Counter({'gzip, utf-8': 1})
    """
    found = count(data, anchor)
    if depth:
        for kind, inner in _unpacked(data):
            for name, number in search(inner, anchor, depth=depth - 1).items():
                found[f"{kind}, {name}"] += number
    return found


def _unpacked(data: bytes | mmap.mmap) -> Iterator[tuple[str, bytes]]:
    for at in _all(data, _GZIP):
        if inner := _inflate(data, at, 31):
            yield "gzip", inner
    for match in _ZLIB.finditer(data):
        if inner := _inflate(data, match.start(), 15):
            yield "zlib", inner
    if data[:4] == _ZIP:
        broken = contextlib.suppress(zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError)
        with broken, zipfile.ZipFile(io.BytesIO(data[:])) as archive:
            for member in archive.infolist():
                if member.file_size <= _MAX_UNPACKED and member.compress_type != zipfile.ZIP_STORED:
                    yield "zip", archive.read(member)


def _inflate(data: bytes | mmap.mmap, at: int, wbits: int) -> bytes:
    """Decompress from an offset as far as possible; empty if there is no valid compressed data."""
    decompressor, found = zlib.decompressobj(wbits), b""
    with contextlib.suppress(zlib.error):
        while at < len(data) and not decompressor.eof and len(found) < _MAX_UNPACKED:
            found += decompressor.decompress(data[at : at + 4096], _MAX_UNPACKED)
            at += 4096
    return found


def _all(data: bytes | mmap.mmap, text: bytes) -> Iterator[int]:
    at = data.find(text)
    while at >= 0:
        yield at
        at = data.find(text, at + 1)


# --- files ------------------------------------------------------------------------------------------------------------


def search_file(path: Path, anchor: str) -> Counter[str]:
    """Count occurrences of the anchor in a file and in its name; empty for a missing or irregular file."""
    found: Counter[str] = Counter()
    if anchor in path.name:
        found["file name"] += 1
    try:
        if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size == 0:
            return found
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return found + search(data, anchor)
    except (OSError, ValueError):
        return found


def changed(folders: Iterable[Path], since: float) -> Iterator[Path]:
    """The files under these folders that were created or modified at or after a time (seconds since 1970)."""
    for folder in folders:
        for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and max(status.st_mtime, status.st_ctime) >= since:
                    yield path


def deleted_but_open(pid: int) -> list[Path]:
    """The `/proc` paths of deleted files that a process still has open."""
    found = []
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(handle.readlink())
                if target.endswith("(deleted)") and not target.startswith("/memfd:"):
                    found.append(handle)
    return found


# --- memory -----------------------------------------------------------------------------------------------------------


def search_memory(pid: int, anchor: str) -> Counter[str] | None:
    """Count occurrences of the anchor in the writable memory of a process; None where it may not be read."""
    found: Counter[str] = Counter()
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in maps:
                span, rights = line.split()[:2]
                if rights.startswith("rw"):
                    start, end = (int(number, 16) for number in span.split("-"))
                    found += _search_region(memory, start, end, anchor)
    except (OSError, ValueError):
        return None
    return found


def _search_region(memory: io.FileIO, start: int, end: int, anchor: str) -> Counter[str]:
    found: Counter[str] = Counter()
    overlap = max(len(text) for texts in patterns(anchor).values() for text in texts) - 1
    tail = b""
    for at in range(start, end, _BLOCK):
        try:
            memory.seek(at)
            block = tail + memory.read(min(_BLOCK, end - at))
        except OSError:  # an unmapped page, or a device's memory
            tail = b""
            continue
        found += count(block, anchor) - count(tail, anchor)
        tail = block[-overlap:]
    return found
