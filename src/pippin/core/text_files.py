"""Text that a user gives: files and streams, checked to be UTF-8 without NUL bytes and of bounded size.

Notable here:
- a byte-order mark is dropped, and line ends become newlines
- what cannot be used is an `InvalidInput` that names the file, the byte or the character
"""

from __future__ import annotations

from pathlib import Path

from pippin.core.errors import InvalidInput

MAX_BYTES = 64_000_000


def read_text(path: str | Path, what: str = "file") -> str:
    """The text of a file.

    Args:
        path: of the file.
        what: how an error calls it.

    Raises:
        InvalidInput: it is missing, a folder, unreadable, too large, or not text.
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

    Raises:
        InvalidInput: they are more than `MAX_BYTES`, not UTF-8, or hold NUL.
    """
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"{what} is larger than {MAX_BYTES // 1_000_000} MB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} is not UTF-8 text (byte {data[error.start]:#04x} at {error.start})") from None
    return check_text(text, what).replace("\r\n", "\n")


def check_text(text: str, what: str) -> str:
    """The text itself, if it is one.

    Raises:
        InvalidInput: it holds bytes that are not UTF-8 (Python marks them as surrogates), or NUL.
    """
    if "\0" in text:
        raise InvalidInput(f"{what} is not text: it holds a NUL byte at character {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} is not UTF-8 text (at character {error.start})") from None
    return text
