"""Text that a user gives: files and streams, checked to be text without NUL bytes and of bounded size.

Notable here:
- UTF-8 is what is expected; UTF-16 and UTF-32 are known by their byte-order mark, UTF-16 without one by its NUL bytes,
  and Western text in Latin-1 by what it is not. Whatever was not UTF-8 is said in a warning
- UTF-8 with damaged bytes is refused, since as Latin-1 all its letters would be wrong
- a file of any length is detected and read in blocks (`detect_blocks`, `open_text`)
- a byte-order mark is dropped, and line ends become newlines
- what cannot be used is an `InvalidInput` that names the file, the byte or the character
"""

from __future__ import annotations

import codecs
import io
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

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
_UNDEFINED = b"\x81\x8d\x8f\x90\x9d"  # bytes without a meaning in windows-1252
_HIGH = bytes(range(128, 256))
_INVALID = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of bytes that are not UTF-8
_BLOCK = 1 << 18
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
    with _reading(path, what), path.open("rb") as stream:
        return decode(stream.read(MAX_BYTES + 1), str(path))


@contextmanager
def open_text(path: str | Path, what: str = "file") -> Iterator[Any]:
    """Open a text file of any length in its own encoding, after its byte-order mark, with its line ends.

    Args:
        path: the file.
        what: the kind of file, for error messages.

    Yields:
        The open file (`io.TextIOBase`).

    Warns:
        GuessedEncoding: it is not UTF-8, but another encoding fits.

    Raises:
        InvalidInput: it is missing, a folder, unreadable, or not text.
    """
    path = Path(path)
    if not path.is_file():  # a pipe, which can be read once; or an error
        yield io.StringIO(read_text(path, what))
        return
    with _reading(path, what):
        with path.open("rb") as file:
            encoding = detect_blocks(iter(lambda: file.read(_BLOCK), b""), str(path))
        warn_if_guessed(encoding, str(path))
        with path.open(encoding=encoding, newline="") as text:
            if text.read(1) != "\ufeff":
                text.seek(0)
            yield text


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Turn what the system says of a file that cannot be read into InvalidInput."""
    try:
        yield
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
    warn_if_guessed(encoding, what)
    return check_text(data.decode(encoding).removeprefix("\ufeff"), what).replace("\r\n", "\n")


def warn_if_guessed(encoding: str, what: str) -> None:
    """Say that a text was not UTF-8.

    Warns:
        GuessedEncoding: it is in another encoding.
    """
    if encoding != "utf-8":
        warnings.warn(
            f"{what} is not UTF-8; it was read as {encoding}. If letters look wrong, convert it first: "
            "iconv -f ENCODING -t UTF-8",
            GuessedEncoding,
            stacklevel=3,
        )


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
    return detect_blocks([data], what)


def detect_blocks(blocks: Iterable[bytes], what: str) -> str:
    """`detect_encoding` of bytes that come in blocks, as many as there are."""
    blocks = iter(blocks)
    first = next(blocks, b"")
    encoding = next((name for mark, name in _MARKS.items() if first.startswith(mark)), None)
    encoding = encoding or _utf16_without_mark(first)
    if encoding is None:
        return _utf8_or_western([first], blocks, what)
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        decoder.decode(first)
        for block in blocks:
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} begins as {encoding} text and is none: {error.reason}") from None
    return encoding


def _utf8_or_western(begun: list[bytes], blocks: Iterator[bytes], what: str) -> str:
    """Whether text without a byte-order mark is UTF-8, or Western text in windows-1252.

    Western text has no control characters, few bytes over 127, all of them with a meaning, and they rarely form
    characters of UTF-8 by chance.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    place, size, high, valid, invalid = "", 0, 0, 0, 0
    odd, controls = False, False
    line, begin = 1, 0
    for block in chain(begun, blocks, [b""]):
        text = decoder.decode(block, final=not block)
        size += len(block)
        if not text.isascii():
            wrong = _INVALID.findall(text)
            if wrong and not place:
                before = text[: text.index(wrong[0])]
                at = begin + len(before.encode())
                place = f"byte {ord(wrong[0]) - 0xDC00:#04x} at {at}, line {line + before.count(chr(10))}"
            invalid += len(wrong)
            valid += len(text) - len(text.encode("ascii", "ignore")) - len(wrong)
        begin += len(text.encode("utf-8", "surrogateescape"))
        line += text.count("\n")
        high += len(block) - len(block.translate(None, _HIGH))
        odd = odd or len(block.translate(None, _UNDEFINED)) < len(block)
        controls = controls or len(block.translate(None, _CONTROL)) < len(block)
    if not invalid:
        return "utf-8"
    if not odd and not controls and invalid > valid and high <= MAX_HIGH_BYTES * size:
        return "windows-1252"
    if controls:
        raise InvalidInput(f"{what} is not UTF-8 text ({place})")
    if valid >= invalid:
        raise InvalidInput(
            f"{what} is UTF-8 text with {invalid:,} damaged bytes ({place}); drop them: iconv -c -f UTF-8 -t UTF-8"
        )
    raise InvalidInput(f"{what} is not UTF-8 text ({place}); convert it first: iconv -f ENCODING -t UTF-8")


def _utf16_without_mark(data: bytes) -> str | None:
    """The byte order of UTF-16 without a mark: characters below 256 leave a NUL in every other byte."""
    if len(data) < 4 or len(data) % 2:
        return None
    even, odd = (data[offset::2].count(0) / (len(data) // 2) for offset in (0, 1))
    if max(even, odd) < 0.5 or min(even, odd) > 0.01:
        return None
    return "utf-16-be" if even > odd else "utf-16-le"


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
