"""Download archives from package indexes through the user's own clients (pip, npm, apt), which know the mirrors.

Notable here:
- the client reports URL and hash of an archive, and `download` fetches it, with resuming and progress
- where the server refuses that (credentials that only the client has), the client downloads; that cannot be resumed
- a source archive is only located and read: pip would run its build code, so pip never downloads one
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pippin.core import files
from pippin.core.errors import DownloadFailed, HashMismatch
from pippin.core.store import download
from pippin.core.store.catalog import Source


def fetch_archive(source: Source, folder: Path, *, advance: Callable[[int], None] = lambda n: None) -> Path:
    """Download the archive of a package source, verified against the catalog and the index.

    Args:
        source: any kind but "hub".
        folder: where it is downloaded, possibly resuming an earlier attempt. An index that is a local folder is read
            in place.
        advance: called with the number of bytes that arrive.

    Raises:
        DownloadFailed: the client is missing or does not find the package, or the server cannot be reached.
        HashMismatch: the archive in the index has another hash than in the catalog.
        DiskFull: the disk filled up while writing.
    """
    target = archive_path(source, folder)
    if source.sha256 and download.Digest("sha256", source.sha256).matches(target):
        return target
    try:
        address = locate(source)
        if address.url.startswith("file:"):
            path = Path(urllib.request.url2pathname(urllib.parse.urlparse(address.url).path))
            if address.digest and (found := address.digest.of(path)) != address.digest.value:
                raise HashMismatch(f"{path} has {address.digest.algorithm} {found}, expected {address.digest.value}")
            return path
        download.download(address, target, advance=advance)
    except download.DownloadRefused as refusal:
        _download_with_client(source, target, refusal)
    return target


def archive_path(source: Source, path: Path) -> Path:
    """The file that `fetch_archive` downloads to."""
    return path / urllib.parse.quote(f"{source.kind}-{source.package}-{source.version}", safe="")


def locate(source: Source) -> download.Address:
    """Ask the user's client for the URL and hash of an archive.

    Raises:
        DownloadRefused: the client is too old to report them; it may still be able to download.
        DownloadFailed: the client is missing, or does not find the package.
        HashMismatch: the index lists another SHA-256 than the catalog.
    """
    locators = {"wheel": _locate_wheel, "sdist": _locate_sdist, "npm": _locate_npm, "deb": _locate_deb}
    address = locators[source.kind](source)
    pinned = download.Digest("sha256", source.sha256) if source.sha256 and source.version else None
    if pinned and address.digest and address.digest.algorithm == "sha256" and address.digest != pinned:
        raise HashMismatch(
            f"the index lists {source} with SHA-256 {address.digest.value}, but the catalog names {source.sha256}"
        )
    return replace(address, digest=pinned or address.digest)


_WHEEL_ONLY = ("--no-deps", "--only-binary", ":all:", "--ignore-requires-python", "--no-input", "--quiet")


def _locate_wheel(source: Source) -> download.Address:
    command = [*_pip(), "install", "--dry-run", "--ignore-installed", *_WHEEL_ONLY, "--report", "-"]
    done = _run([*command, f"{source.package}=={source.version}"])
    if done.returncode:
        if "No matching distribution" in done.stderr or "No module named pip" in done.stderr:
            raise DownloadFailed(f"pip does not find {source}: {_error_of(done)}")
        raise download.DownloadRefused(f"pip cannot say where {source} is: {_error_of(done)}")
    info = json.loads(done.stdout)["install"][0]["download_info"]
    hashes = info.get("archive_info", {}).get("hashes", {})
    return download.Address.at(info["url"], download.Digest("sha256", hashes["sha256"]) if "sha256" in hashes else None)


def _locate_sdist(source: Source) -> download.Address:
    # the only way to see an sdist's address without pip running its build code: pip's own verbose listing
    done = _run([*_pip(), "index", "versions", "-vv", "--no-input", "--ignore-requires-python", source.package])
    name = "[-_.]+".join(re.escape(word) for word in re.split("[-_.]+", source.package))
    stem = rf"[^\s#]*/{name}-{re.escape(source.version)}\.(?:tar\.gz|zip)"
    match = re.search(rf"Found link ({stem})(?:#sha256=([0-9a-f]{{64}}))?", done.stdout + done.stderr, re.IGNORECASE)
    if not match:
        raise DownloadFailed(f"pip does not find {source}: {_error_of(done)}")
    return download.Address.at(match[1], download.Digest("sha256", match[2]) if match[2] else None)


def _locate_npm(source: Source) -> download.Address:
    done = _run([_client("npm"), "view", f"{source.package}@{source.version}", "dist", "--json"])
    if done.returncode or not done.stdout.strip():
        raise DownloadFailed(f"npm does not find {source}: {_error_of(done)}")
    dist = json.loads(done.stdout)
    return download.Address.at(dist["tarball"], download.Digest.from_integrity(dist["integrity"]))


def _locate_deb(source: Source) -> download.Address:
    package = f"{source.package}={source.version}" if source.version else source.package
    with tempfile.TemporaryDirectory() as empty:  # apt-get prints no URL for a file in the current folder
        done = _run([_client("apt-get"), "download", "--print-uris", package], folder=Path(empty))
    match = re.search(r"'([^']+)' \S+ \d+ SHA256:([0-9a-f]{64})", done.stdout)
    if not match:
        raise DownloadFailed(f"apt-get does not find {source}: {_error_of(done)}")
    return download.Address.at(match[1], download.Digest("sha256", match[2]))


def _download_with_client(source: Source, target: Path, refusal: download.DownloadRefused) -> None:
    """Download with the client itself, which may have credentials for the server."""
    folder = target.with_name("client")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    commands = {
        "wheel": lambda: [*_pip(), "download", *_WHEEL_ONLY, "--dest", ".", f"{source.package}=={source.version}"],
        "npm": lambda: [_client("npm"), "pack", "--ignore-scripts", f"{source.package}@{source.version}"],
        "deb": lambda: [_client("apt-get"), "download", source.package],
    }
    if source.kind not in commands:
        raise refusal
    done = _run(commands[source.kind](), folder=folder)
    arrived = next(folder.iterdir(), None)
    if done.returncode or arrived is None:
        raise DownloadFailed(f"{refusal}; and the package client cannot download it either: {_error_of(done)}")
    if source.version and source.sha256 and (found := files.sha256_of(arrived)) != source.sha256:
        raise HashMismatch(f"{source} has SHA-256 {found}, but the catalog names {source.sha256}")
    arrived.replace(target)


def _pip() -> list[str]:
    """The command of the user's pip: in this environment, else on the PATH, else through uv."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip", "pip3"):
        if path := shutil.which(name):
            return [path]
    if path := shutil.which("uvx"):
        return [path, "pip"]
    raise DownloadFailed("there is no pip on this machine to ask for the package; install pip, or use --from FILE")


def _client(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise DownloadFailed(f"{name} is not installed on this machine")
    return path


def _run(command: list[str], *, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def _error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The line of a client's output that says why it failed."""
    if "after connection broken" in done.stderr:  # pip's message for an unreachable index
        return "its package index cannot be reached"
    lines = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1]).strip()
