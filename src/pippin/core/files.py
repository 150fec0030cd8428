"""Atomic writes, hashes and free space of files, with typed errors.

Notable here:
- a file is written under a temporary name in the same folder, synced and renamed, so a reader never sees half of it
- a full disk always raises `DiskFull`, whether it is noticed before the write or during it
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
    """Anything with a binary `read`: an open file, a member of an archive, an HTTP response."""

    def read(self, size: int, /) -> bytes:
        """Read up to ``size`` bytes; empty at the end."""


@contextmanager
def atomic_write(path: Path, *, mode: Literal["wb", "w"] = "wb") -> Iterator[IO[Any]]:
    """Open a file for writing that appears under ``path`` only when the block ends without an error.

    Args:
        path: the file; its folder must exist. An existing file is replaced in one step.
        mode: "wb" for bytes, "w" for UTF-8 text.

    Raises:
        DiskFull: the disk filled up while writing. An existing file is left unchanged.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a.txt", mode="w") as file:
    ...     _ = file.write("complete")
    >>> (folder / "a.txt").read_text(), len(list(folder.iterdir()))
    ('complete', 1)
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
    """Create a folder and its parents where they do not exist.

    Raises:
        InvalidInput: it, or a parent, is a file or not writable.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InvalidInput(f"folder {str(path)!r} cannot be created: {error.strerror}; choose another path") from None
    return path


def check_folder(path: str | Path) -> None:
    """Check that a folder can be created and written to, without creating it; for use before a long computation.

    Raises:
        InvalidInput: it, or its nearest existing parent, is a file or not writable.
    """
    existing = next(each for each in (Path(path), *Path(path).absolute().parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidInput(f"{str(path)!r} cannot be written: {str(existing)!r} is not a writable folder")


def require_free_space(path: Path, nbytes: int) -> None:
    """Check that the disk has room for a write.

    Args:
        path: the file or folder to be written; it need not exist yet.
        nbytes: the number of bytes to be written.

    Raises:
        DiskFull: fewer than ``nbytes`` are free; the message names both numbers.
    """
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise DiskFull(
            f"{path} has {format_bytes(free)} free, and {format_bytes(nbytes)} are needed; "
            f"free {format_bytes(nbytes - free)}, or use a larger disk (for downloads: PIPPIN_HOME)"
        )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise `DiskFull` for "no space left" errors inside the block; other errors pass unchanged."""
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
    """SHA-256 of a file as 64 hexadecimal digits; ``advance`` is called with the size of each block read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if advance:
                advance(len(block))
    return digest.hexdigest()


def copy_hashed(source: Readable, target: Path, *, advance: Callable[[int], None] | None = None) -> str:
    """Copy a stream into a new file, sync it to disk, and return the SHA-256 of its content.

    Raises:
        DiskFull: the disk filled up; the caller must remove the incomplete ``target``.
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
    """Normalize an untrusted relative path, such as that of an archive member.

    Args:
        text: the path, with forward slashes.
        origin: where the path comes from, for the message.

    Raises:
        CorruptedFile: on this or another operating system the path would lead out of the folder.

    >>> inner_path("a/./b//c", "an archive")
    'a/b/c'
    """
    path = PurePosixPath(text)
    if not path.parts or path.is_absolute() or ".." in path.parts or not text.isprintable() or set(text) & set("\\:"):
        raise CorruptedFile(f"{origin} holds a file that would land outside its folder: {text!r}")
    return str(path)


def sync_folder(path: Path) -> None:
    """Sync a folder's entries to disk so that a rename in it survives a power cut; does nothing on Windows."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def format_bytes(nbytes: int) -> str:
    """A size in readable units, in powers of 1000.

    >>> format_bytes(98_362_432), format_bytes(512)
    ('98.4 MB', '512 B')
    """
    size, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
