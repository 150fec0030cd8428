"""Download one file over HTTP: resumed after interruptions, verified, and never visible incomplete.

Notable here:
- bytes go to TARGET.partial; after a broken connection or a killed process the next attempt continues from there
- if the server ignores `Range`, the file is downloaded again from the start
- TARGET appears only after its hash was checked; a resumed file with a wrong hash is downloaded once more in full
- a redirect may not leave https, and credentials are sent to the first host only
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pippin.core import files
from pippin.core.errors import DownloadFailed, HashMismatch

BLOCK = 1 << 17  # bytes per read; small enough for a smooth progress bar on a slow connection
TIMEOUT = 30.0  # seconds without a byte
MAX_ATTEMPTS = 4  # consecutive attempts without progress
BACKOFF = 0.5  # seconds before the first retry, doubled each time
_RETRYABLE = {408, 425, 429, 500, 502, 503, 504}  # HTTP status codes of temporary failures


class DownloadRefused(DownloadFailed):
    """The server answered but refused the file; another client or a login may get it."""


@dataclass(frozen=True)
class Digest:
    """A hash as an index states it: its algorithm (`hashlib`'s name, or "git" for a git blob) and its hex digits."""

    algorithm: str
    value: str

    def of(self, path: Path) -> str:
        """Hash a file with the same algorithm."""
        if self.algorithm == "sha256":
            return files.sha256_of(path)
        state = hashlib.sha1(f"blob {path.stat().st_size}\0".encode()) if self.algorithm == "git" else None
        state = state or hashlib.new(self.algorithm)
        with path.open("rb") as file:
            while block := file.read(files.BLOCK):
                state.update(block)
        return state.hexdigest()

    def matches(self, path: Path) -> bool:
        """Whether a file exists and has this hash."""
        return path.exists() and self.of(path) == self.value

    @classmethod
    def from_integrity(cls, text: str) -> Digest:
        """Parse npm's format, `ALGORITHM-BASE64`.

        >>> Digest.from_integrity("sha1-" + base64.b64encode(bytes(20)).decode()).value == "0" * 40
        True
        """
        algorithm, _, value = text.partition("-")
        return cls(algorithm, base64.b64decode(value).hex())


@dataclass(frozen=True)
class Address:
    """The URL of a file, with its expected hash and the request headers."""

    url: str
    digest: Digest | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent to the first host only, not to the target of a redirect."""

    @classmethod
    def at(cls, url: str, digest: Digest | None = None) -> Address:
        """An address from a URL; credentials in the URL are moved to a header, so that messages do not show them.

        >>> address = Address.at("https://me:word@127.0.0.1:8000/simple/a.whl")
        >>> address.url, address.headers["Authorization"] == "Basic " + base64.b64encode(b"me:word").decode()
        ('https://127.0.0.1:8000/simple/a.whl', True)
        """
        parts = urllib.parse.urlsplit(url)
        login, found, host = parts.netloc.rpartition("@")
        if not found:
            return cls(url, digest)
        basic = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
        return cls(parts._replace(netloc=host).geturl(), digest, {"Authorization": f"Basic {basic}"})


def partial_path(target: Path) -> Path:
    """The file that holds an incomplete download of ``target``."""
    return target.with_name(target.name + ".partial")


def size_of(path: Path) -> int:
    """Size of a file in bytes; 0 where it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def download(address: Address, target: Path, *, advance: Callable[[int], None] = lambda n: None) -> None:
    """Download a file to ``target``, resuming from the partial file of an earlier attempt.

    Args:
        address: the file. Without a digest, only its length is checked.
        target: created when the file is complete and verified; its folder must exist. Callers must hold a lock against
            other processes.
        advance: called with the size of every block that arrives, and with a negative size for discarded bytes.

    Raises:
        DownloadRefused: the server refuses the request, or its certificate is not trusted; retrying would not help.
        DownloadFailed: several attempts in a row made no progress; the partial file is kept.
        HashMismatch: the complete file has another hash than the address; it is deleted.
        DiskFull: the disk filled up while writing; the partial file is kept.
    """
    partial = partial_path(target)
    resumed = size_of(partial) > 0  # then a wrong hash may be due to an outdated partial file
    while True:
        _receive(address, partial, advance)
        digest = address.digest.of(partial) if address.digest else ""
        if address.digest is None or digest == address.digest.value:
            os.replace(partial, target)
            return
        advance(-size_of(partial))
        partial.unlink()
        if not resumed:
            raise HashMismatch(
                f"{address.url} has {address.digest.algorithm} {digest}, expected {address.digest.value}; "
                "it was deleted. Possible causes: a mirror that alters files, or a file that was replaced"
            )
        resumed = False


def _receive(address: Address, partial: Path, advance: Callable[[int], None]) -> None:
    """Retry until the partial file is complete or `MAX_ATTEMPTS` attempts in a row made no progress."""
    failures = 0
    while True:
        before = size_of(partial)
        try:
            return _transfer(address, partial, advance)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            failures = 0 if size_of(partial) > before else failures + 1
            if failures == MAX_ATTEMPTS:
                raise DownloadFailed(
                    f"{address.url} could not be downloaded: {_reason(error)}. "
                    f"{files.format_bytes(before)} are kept, and the next attempt resumes from there"
                ) from error
            time.sleep(BACKOFF * 2**failures)


def _transfer(address: Address, partial: Path, advance: Callable[[int], None]) -> None:
    """Send one request and append its response to the partial file; `_receive` catches the errors worth a retry."""
    have = size_of(partial)
    try:
        response = _open(address, have)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:
            if error.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
                return  # the partial file was already complete
            advance(-have)
            partial.unlink()
            raise ConnectionError("the server's file differs from the partial download") from error
        if error.code in _RETRYABLE:
            raise
        raise DownloadRefused(f"{address.url} answers {error.code} {error.reason}") from error
    with response:
        if have and not (response.status == 206 and _starts_at(response, have)):
            advance(-have)
            have = 0
        length = response.headers.get("Content-Length")
        with files.disk_errors(partial), partial.open("ab" if have else "wb") as file:
            _copy(response, file, advance)
            received = file.tell() - have
    if length is not None and received != int(length):
        raise ConnectionError(f"the connection ended after {received} of {length} bytes")


def _open(address: Address, have: int) -> Any:
    """Request the file from byte ``have`` on."""
    if not address.url.startswith(("https://", "http://")):
        raise DownloadRefused(f"{address.url} is neither an http nor an https URL")
    try:
        request = urllib.request.Request(address.url, headers={"User-Agent": "pippin", "Accept-Encoding": "identity"})
        for name, value in address.headers.items():
            request.add_unredirected_header(name, value)
        if have:
            request.add_header("Range", f"bytes={have}-")
        return urllib.request.build_opener(_NoDowngrade).open(request, timeout=TIMEOUT)
    except (http.client.InvalidURL, ValueError) as error:
        raise DownloadRefused(f"{address.url} is not a valid URL: {error}") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise DownloadRefused(f"the certificate of {address.url} is not trusted: {error.reason}") from error
        raise


def _starts_at(response: Any, have: int) -> bool:
    """Whether a partial response starts at the requested byte."""
    return str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-")


def _copy(response: Any, file: IO[bytes], advance: Callable[[int], None]) -> None:
    while block := response.read1(BLOCK):
        file.write(block)
        advance(len(block))
    file.flush()
    os.fsync(file.fileno())


def _reason(error: BaseException) -> str:
    return str(getattr(error, "reason", None) or error or type(error).__name__)


class _NoDowngrade(urllib.request.HTTPRedirectHandler):
    """Follow redirects, but never from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise DownloadRefused(f"{req.full_url} redirects to {newurl}, which is not encrypted; refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
