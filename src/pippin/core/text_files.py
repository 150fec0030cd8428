"""Text that a user gives: files and streams, checked to be text without NUL bytes and of bounded size.

Notable here:
- UTF-8 is what is expected; UTF-16 and UTF-32 are known by their byte-order mark, UTF-16 without one by its NUL bytes,
  and Western text in Latin-1 by what it is not. Whatever was not UTF-8 is said in a warning
- a byte-order mark is dropped, and line ends become newlines
- what cannot be used is an `InvalidInput` that names the file, the byte or the character
"""

from __future__ import annotations

import codecs
import warnings
from pathlib import Path

from pippin.core.errors import GuessedEncoding, InvalidInput

MAX_BYTES = 64_000_000

# UTF-32 first: its little-endian mark begins with that of UTF-16
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r")) + b"\x7f"  # bytes that stand in no text
MAX_HIGH_BYTES = 0.3  # share of bytes over 127 in Western text; other alphabets have more, French has 4 %


def read_text(path: str | Path, what: str = "file") -> str:
    """Read a text file.

    Args:
        path: the file.
        what: the kind of file, for error messages.

    Raises:
        InvalidInput: it is missing, a folder, unreadable, larger than `MAX_BYTES`, or not text.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            return decode(stream.read(MAX_BYTES + 1), str(path))
    except FileNotFoundError:
        raise InvalidInput(f"there is no {what} {str(path)!r}") from None
    except IsADirectoryError:
        raise InvalidInput(f"{str(path)!r} is a folder; give a {what}") from None
    except OSError as error:
        raise InvalidInput(f"{what} {str(path)!r} cannot be read: {error.strerror}") from None


def decode(data: bytes, what: str) -> str:
    """Bytes as text, with the byte-order mark dropped and line ends made newlines.

    Warns:
        GuessedEncoding: they are not UTF-8, but another encoding fits.

    Raises:
        InvalidInput: they are more than `MAX_BYTES`, no text in an encoding that is known here, or hold NUL.
    """
    encoding = detect_encoding(data, what)
    if encoding != "utf-8":
        warnings.warn(
            f"{what} is not UTF-8; it was read as {encoding}. If letters look wrong, convert it first: "
            "iconv -f ENCODING -t UTF-8",
            GuessedEncoding,
            stacklevel=2,
        )
    return check_text(data.decode(encoding).removeprefix("\ufeff"), what).replace("\r\n", "\n")


def detect_encoding(data: bytes, what: str) -> str:
    """The encoding that the bytes are in, by the name that Python has for it.

    Returns:
        "utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be" (these leave the byte-order mark as a character), or
        "windows-1252", which is Latin-1 with quotes and dashes in the place of control characters.

    Raises:
        InvalidInput: more than `MAX_BYTES`, or no text in one of these.

    >>> detect_encoding("café".encode("latin-1"), "a letter")
    'windows-1252'
    """
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"{what} is larger than {MAX_BYTES // 1_000_000} MB")
    marked = next((encoding for mark, encoding in _MARKS.items() if data.startswith(mark)), None)
    unmarked = _utf16_without_mark(data) if marked is None else None
    if encoding := marked or unmarked:
        try:
            data.decode(encoding)
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{what} begins as {encoding} text and is none: {error.reason}") from None
        return encoding
    try:
        data.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError as error:
        reason = f"{what} is not UTF-8 text (byte {data[error.start]:#04x} at {error.start})"
    if _is_western(data):
        return "windows-1252"
    hint = "" if data.translate(None, _CONTROL) != data else "; convert it first: iconv -f ENCODING -t UTF-8"
    raise InvalidInput(f"{reason}{hint}")


def _utf16_without_mark(data: bytes) -> str | None:
    """The byte order of UTF-16 without a mark: characters below 256 leave a NUL in every other byte."""
    if len(data) < 4 or len(data) % 2:
        return None
    even, odd = (data[offset::2].count(0) / (len(data) // 2) for offset in (0, 1))
    if max(even, odd) < 0.5 or min(even, odd) > 0.01:
        return None
    return "utf-16-be" if even > odd else "utf-16-le"


def _is_western(data: bytes) -> bool:
    """Whether bytes that are not UTF-8 look like Western text: no controls, few bytes over 127, all with a meaning."""
    if data.translate(None, _CONTROL) != data or sum(byte > 127 for byte in data) > MAX_HIGH_BYTES * len(data):
        return False
    try:
        data.decode("windows-1252")
    except UnicodeDecodeError:
        return False
    return True


def check_text(text: str, what: str) -> str:
    """Return the text unchanged if it can be encoded as UTF-8.

    Raises:
        InvalidInput: it contains surrogates (Python's marks for bytes that are not UTF-8) or NUL.
    """
    if "\0" in text:
        raise InvalidInput(f"{what} is not text: it contains a NUL byte at character {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} is not UTF-8 text (at character {error.start})") from None
    return text
