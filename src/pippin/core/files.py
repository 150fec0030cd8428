"""Files that are either whole or absent, and hashes and free space told as typed errors.

Notable here:
- a file is written beside its place under a temporary name, synced and renamed, so a reader never sees half of it
- a full disk is always `DiskFull`, whether it is seen before the write or during it
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, Protocol, runtime_checkable

from pippin.core.errors import CorruptedFile, DiskFull, InvalidInput

BLOCK = 1 << 20  # bytes read at once: large enough that Python's overhead vanishes, small enough for a smooth bar
_ENCODING = {"wb": None, "w": "utf-8"}


@runtime_checkable
class Readable(Protocol):
    """Anything with a binary `read`: an open file, a member of an archive, an answer of a server."""

    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes; none at the end."""


@contextmanager
def atomic_write(path: Path, *, mode: Literal["wb", "w"] = "wb") -> Iterator[IO[Any]]:
    """Open a file for writing that appears under ``path`` only when the block ends without an error.

    Args:
        path: where the file shall stand; its folder must exist. An older file there is replaced in one step.
        mode: "wb" for bytes, "w" for UTF-8 text.

    Raises:
        DiskFull: the disk filled up while writing. The older file, if any, is untouched.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a.txt", mode="w") as file:
    ...     _ = file.write("whole")
    >>> (folder / "a.txt").read_text(), len(list(folder.iterdir()))
    ('whole', 1)
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with disk_errors(path), temporary.open("xb" if mode == "wb" else "x", encoding=_ENCODING[mode]) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: str | Path) -> Path:
    """The folder, made with those above it where it is not there yet.

    Raises:
        InvalidInput: it, or one above it, is a file or closed to writing.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InvalidInput(f"{str(path)!r} cannot be a folder: {error.strerror}; name another place") from None
    return path


def check_folder(path: str | Path) -> None:
    """Refuse a folder that could not be made or written in, before anything is computed; nothing is made.

    Raises:
        InvalidInput: it, or what it would lie in, is a file or closed to writing.
    """
    nearest = next(place for place in (Path(path), *Path(path).absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InvalidInput(f"{str(path)!r} cannot be written: {str(nearest)!r} is no folder that can be written in")


def require_free_space(path: Path, nbytes: int) -> None:
    """Refuse a write that cannot fit.

    Args:
        path: where the bytes shall go; it need not exist yet.
        nbytes: how many bytes will be written.

    Raises:
        DiskFull: fewer than ``nbytes`` are free; the message names both numbers.
    """
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise DiskFull(
            f"{path} has {format_bytes(free)} free, and {format_bytes(nbytes)} are needed; "
            f"free {format_bytes(nbytes - free)}, or use a larger disk (for downloads: PIPPIN_HOME)"
        )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space left" of any write inside the block into `DiskFull`; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the disk filled up while writing {path} ({error.strerror}); "
                "free some space, or use a larger disk (for downloads: PIPPIN_HOME), and try again"
            ) from error
        raise


def sha256_of(path: Path, *, advance: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file as 64 hexadecimal digits; ``advance`` is told of every block read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if advance:
                advance(len(block))
    return digest.hexdigest()


def copy_hashed(source: Readable, target: Path, *, advance: Callable[[int], None] | None = None) -> str:
    """Copy a stream into a new file, synced to disk, and return the SHA-256 of what was written.

    Raises:
        DiskFull: the disk filled up; ``target`` is then incomplete and is the caller's to remove.
    """
    digest = hashlib.sha256()
    with disk_errors(target), target.open("wb") as file:
        while block := source.read(BLOCK):
            file.write(block)
            digest.update(block)
            if advance:
                advance(len(block))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def inner_path(text: str, origin: object) -> str:
    """A path that someone else gave for a file inside a folder of ours, in its plain form.

    Args:
        text: the path, with forward slashes.
        origin: who gave it, for the message.

    Raises:
        CorruptedFile: on this or another system it would lead out of the folder.

    >>> inner_path("a/./b//c", "an archive")
    'a/b/c'
    """
    path = PurePosixPath(text)
    if not path.parts or path.is_absolute() or ".." in path.parts or not text.isprintable() or set(text) & set("\\:"):
        raise CorruptedFile(f"{origin} holds a file that would land outside its folder: {text!r}")
    return str(path)


def sync_folder(path: Path) -> None:
    """Make a rename inside ``path`` survive a power cut, where the system can."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def format_bytes(nbytes: int) -> str:
    """A size for people, in powers of 1000 as disks and downloads count.

    >>> format_bytes(98_362_432), format_bytes(512)
    ('98.4 MB', '512 B')
    """
    size, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
