"""Downloading one file over HTTP so that it survives anything: resumed, verified, never half there.

Notable here:
- bytes go to TARGET.partial; a broken connection or a killed process leaves a prefix that the next try continues
- a server that ignores `Range` is noticed and the file starts again from nothing
- TARGET appears only after its hash was checked; a resumed file with a wrong hash is fetched once more from nothing
- a redirect may not leave https, and credentials go to the first host only
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

BLOCK = 1 << 17  # small enough that the bar moves on a slow line
TIMEOUT = 30.0  # seconds without a byte
TRIES = 4  # in a row that bring nothing
PAUSE = 0.5  # seconds before the first new try, doubled each time
_BUSY = {408, 425, 429, 500, 502, 503, 504}  # answers that a later try may not get again


class DownloadRefused(DownloadFailed):
    """The server answers but won't give the file to us; another client, or a login, may get it."""


@dataclass(frozen=True)
class Digest:
    """A hash as an index states it: its algorithm (`hashlib`'s name, or "git" for a git blob) and its hex digits."""

    algorithm: str
    value: str

    def of(self, path: Path) -> str:
        """The same kind of hash of a file."""
        if self.algorithm == "sha256":
            return files.sha256_of(path)
        state = hashlib.sha1(f"blob {path.stat().st_size}\0".encode()) if self.algorithm == "git" else None
        state = state or hashlib.new(self.algorithm)
        with path.open("rb") as file:
            while block := file.read(files.BLOCK):
                state.update(block)
        return state.hexdigest()

    def fits(self, path: Path) -> bool:
        """Whether a file is there and has this hash."""
        return path.exists() and self.of(path) == self.value

    @classmethod
    def from_integrity(cls, text: str) -> Digest:
        """Read npm's form, `ALGORITHM-BASE64`.

        >>> Digest.from_integrity("sha1-" + base64.b64encode(bytes(20)).decode()).value == "0" * 40
        True
        """
        algorithm, _, value = text.partition("-")
        return cls(algorithm, base64.b64decode(value).hex())


@dataclass(frozen=True)
class Address:
    """Where a file can be had, and how it is known to be the right one."""

    url: str
    digest: Digest | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent to the first host only; a redirect to another does not see them."""

    @classmethod
    def at(cls, url: str, digest: Digest | None = None) -> Address:
        """An address as a client states it; a login inside it becomes a header, out of sight of messages.

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
    """Where the bytes of a download stand until it is complete."""
    return target.with_name(target.name + ".partial")


def size_of(path: Path) -> int:
    """Bytes in a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def download(address: Address, target: Path, *, advance: Callable[[int], None] = lambda n: None) -> None:
    """Fetch a file into ``target``, going on from what an earlier try left.

    Args:
        address: what to fetch. Without a digest, only the length is checked.
        target: appears when all is well; its folder must exist. Not for two processes at once: hold a lock.
        advance: told of every block of bytes that arrives, and of bytes thrown away as a negative number.

    Raises:
        Refused: the server or its certificate won't have us; a new try would not help.
        DownloadFailed: the connection broke several times without bringing anything; the partial file stays.
        HashMismatch: the complete file is not the one that the address names; nothing stays.
        DiskFull: while writing; the partial file stays.
    """
    partial = partial_path(target)
    resumed = size_of(partial) > 0  # then a wrong hash may come from a stale beginning
    while True:
        _receive(address, partial, advance)
        found = address.digest.of(partial) if address.digest else ""
        if address.digest is None or found == address.digest.value:
            os.replace(partial, target)
            return
        advance(-size_of(partial))
        partial.unlink()
        if not resumed:
            raise HashMismatch(
                f"{address.url} has {address.digest.algorithm} {found}, expected {address.digest.value}; "
                "it was thrown away. A mirror that alters files, or a file that was replaced, looks like this"
            )
        resumed = False


def _receive(address: Address, partial: Path, advance: Callable[[int], None]) -> None:
    """Try until the partial file has its full length."""
    fruitless = 0
    while True:
        before = size_of(partial)
        try:
            return _transfer(address, partial, advance)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            fruitless = 0 if size_of(partial) > before else fruitless + 1
            if fruitless == TRIES:
                raise DownloadFailed(
                    f"{address.url} could not be fetched: {_reason(error)}. "
                    f"{files.format_bytes(before)} are kept and the next try goes on from there"
                ) from error
            time.sleep(PAUSE * 2**fruitless)


def _transfer(address: Address, partial: Path, advance: Callable[[int], None]) -> None:
    """One request, one answer; raises what `_receive` may try again."""
    have = size_of(partial)
    try:
        response = _open(address, have)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:
            if error.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
                return  # nothing was missing
            advance(-have)
            partial.unlink()
            raise ConnectionError("the server has another file than the one begun") from error
        if error.code in _BUSY:
            raise
        raise DownloadRefused(f"{address.url} answers {error.code} {error.reason}") from error
    with response:
        if have and not (response.status == 206 and _starts_at(response, have)):
            advance(-have)
            have = 0
        length = response.headers.get("Content-Length")
        with files.disk_errors(partial), partial.open("ab" if have else "wb") as file:
            _pour(response, file, advance)
            received = file.tell() - have
    if length is not None and received != int(length):
        raise ConnectionError(f"the connection ended after {received} of {length} bytes")


def _open(address: Address, have: int) -> Any:
    """Send the request for everything after the first ``have`` bytes."""
    if not address.url.startswith(("https://", "http://")):
        raise DownloadRefused(f"{address.url} is neither an http nor an https address")
    try:
        request = urllib.request.Request(address.url, headers={"User-Agent": "pippin", "Accept-Encoding": "identity"})
        for name, value in address.headers.items():
            request.add_unredirected_header(name, value)
        if have:
            request.add_header("Range", f"bytes={have}-")
        return urllib.request.build_opener(_HttpsStaysHttps).open(request, timeout=TIMEOUT)
    except (http.client.InvalidURL, ValueError) as error:
        raise DownloadRefused(f"{address.url} is not an address that can be fetched: {error}") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise DownloadRefused(f"the certificate of {address.url} is not trusted: {error.reason}") from error
        raise


def _starts_at(response: Any, have: int) -> bool:
    """Whether a partial answer begins where we asked."""
    return str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-")


def _pour(response: Any, file: IO[bytes], advance: Callable[[int], None]) -> None:
    while block := response.read1(BLOCK):
        file.write(block)
        advance(len(block))
    file.flush()
    os.fsync(file.fileno())


def _reason(error: BaseException) -> str:
    return str(getattr(error, "reason", None) or error or type(error).__name__)


class _HttpsStaysHttps(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise DownloadRefused(f"{req.full_url} redirects to {newurl}, which is not encrypted; refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
