"""Text normalization for rules: one form for characters that look the same, with their offsets in the original.

Notable here:
- NFKC, case folding, no invisible characters, single spaces, look-alike letters of other scripts mapped to Latin: a
  rule is written once
- every step works on one letter with its marks at a time, so text that arrives in pieces gives the same result
- offsets refer to the original: a reported, blocked or replaced span is one of the text that the user sees
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

LONGEST_LETTER: Final = 32  # a letter and its marks; further marks begin a new one

# Trailing letters that compose with the one before although they are not combining marks: Indic vowel signs, Hangul
# vowels and final consonants, the half-width voicing marks of Japanese.
_JOINING: Final = frozenset(
    "\u09be\u09d7\u0b3e\u0b56\u0b57\u0bbe\u0bd7\u0cc2\u0cd5\u0cd6\u0d3e\u0d57\u0dcf\u0ddf\u102e\u1b35\uff9e\uff9f"
    "\U00011127\U0001133e\U00011357\U000114b0\U000114ba\U000114bd\U000115af\U00011930"
) | {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3), *range(0xFFC2, 0xFFDD))}

# Letters that look like a Latin one; both sides after case folding. Cyrillic, Greek, small capitals, some signs.
_LOOK_ALIKE: Final = str.maketrans(
    "авеёкмнорстухіјѕԁԛԝһӏαβεικνορτυχϲıɩɪɡɑᴀʙᴄᴅᴇꜰɢʜᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡʏᴢ",
    "abeekmhopctyxijsdqwhlabeikvoptuxciiigaabcdefghjklmnoprstuvwyz",
)


_SPACES: Final = re.compile(r"[\t-\r\x1c-\x1f]|  ")


@dataclass(frozen=True)
class Normalized:
    """Normalized text with offsets.

    ``starts[i]`` and ``ends[i]`` are the characters of the original that became character i.

    >>> read = normalize("K\\u200bÍLL  ｎｏｗ")
    >>> read.text, read.span(0, 4)
    ('kíll now', (0, 5))
    """

    text: str
    starts: Sequence[int]
    ends: Sequence[int]

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The original characters of the normalized ones from ``start`` to before ``end``."""
        return (self.starts[start], self.ends[end - 1]) if end > start else (0, 0)


class Normalizer:
    """Normalizes a text that arrives in pieces; the last letter stays open, as marks may follow it."""

    def __init__(self) -> None:
        self.text = ""
        self.starts: list[int] = []
        self.ends: list[int] = []
        self._open, self._at, self._after_space = "", 0, False

    def push(self, more: str, *, last: bool = False) -> None:
        """Add text; ``last`` closes the last letter too."""
        text, base = self._open + more, self._at
        end = len(text) if last else _last_letter(text)
        if not end:
            pass
        elif _is_plain(text[:end]) and not (self._after_space and text[0] == " "):
            self.text += text[:end].lower()
            self.starts.extend(range(base, base + end))
            self.ends.extend(range(base + 1, base + end + 1))
        else:
            pieces = []
            for start, stop in _letters(text, end):
                piece = fold(text[start:stop])
                if piece.isspace():
                    piece = "" if self._after_space else " "
                self._after_space = piece == " " or (self._after_space and not piece)
                pieces.append(piece)
                self.starts.extend([base + start] * len(piece))
                self.ends.extend([base + stop] * len(piece))
            self.text += "".join(pieces)
        self._after_space = self.text[-1:] == " "
        self._open, self._at = text[end:], base + end

    def place(self, at: int) -> int:
        """The offset of the normalized character ``at`` in the original; after the last one, that of the open
        letter."""
        return self.starts[at] if at < len(self.starts) else self._at


def normalize(text: str) -> Normalized:
    """A whole text, normalized.

    >>> normalize("Straße, Ｂｏｍｂ, ｶﾞ").text
    'strasse, bomb, ガ'
    """
    if _is_plain(text):
        return Normalized(text.lower(), range(len(text)), range(1, len(text) + 1))
    reader = Normalizer()
    reader.push(text, last=True)
    return Normalized(reader.text, reader.starts, reader.ends)


@lru_cache(maxsize=1 << 15)
def fold(letter: str) -> str:
    """One letter with its marks, normalized; empty if it is invisible.

    >>> fold("É"), fold("\\u0430"), fold("\\u200d"), fold("b\\u0337"), fold("ﬁ")
    ('é', 'a', '', 'b', 'fi')
    """
    seen = "".join(c for c in unicodedata.normalize("NFKC", letter) if unicodedata.category(c) != "Cf")
    folded = unicodedata.normalize("NFKC", seen.casefold()).translate(_LOOK_ALIKE)
    if folded[:1] < "\u0250" or unicodedata.combining(
        folded[0]
    ):  # a mark that composes with no Latin letter: strikethrough
        folded = "".join(c for c in folded if unicodedata.category(c) not in ("Mn", "Me"))
    return "".join(c for c in folded if not "\ufe00" <= c <= "\ufe0f")


def kind(character: str) -> int:
    """The word class of a character: 0 none, 1 letters and digits, 2 Han, 3 hiragana, 4 katakana."""
    if character.isascii():
        return int(character.isalnum())
    if "\u3041" <= character <= "\u3096":
        return 3
    if "\u30a1" <= character <= "\u30fa" or character in "ー・":
        return 4
    if "\u3400" <= character <= "\u9fff" or character in "々〆〇" or "\U00020000" <= character <= "\U0003ffff":
        return 2
    return int(character.isalnum() or unicodedata.category(character)[0] == "M")


def is_boundary(text: str, at: int) -> bool:
    """Whether a word may begin or end between the characters ``at - 1`` and ``at``.

    Words of scripts that are written without spaces end where the script changes, so that a word of two Chinese
    characters is not found inside one of four.

    >>> is_boundary("Scunthorpe", 5), is_boundary("a bomb", 2), is_boundary("爆弾の作り方", 2), is_boundary("爆弾魔", 2)
    (False, True, True, False)
    """
    if at <= 0 or at >= len(text):
        return True
    before, after = kind(text[at - 1]), kind(text[at])
    return before != after or before == 0


def words(text: str) -> list[tuple[int, int]]:
    """Start and end of each word of a normalized text.

    >>> [("kill -9 プロセスを")[a:b] for a, b in words("kill -9 プロセスを")]
    ['kill', '9', 'プロセス', 'を']
    """
    found, start, last = [], 0, 0
    for at, character in enumerate(text):
        now = kind(character)
        if now != last:
            if last:
                found.append((start, at))
            start, last = at, now
    if last:
        found.append((start, len(text)))
    return found


def _is_plain(text: str) -> bool:
    """Whether only the case needs to be lowered."""
    return text.isascii() and _SPACES.search(text) is None


def _joins(character: str) -> bool:
    """Whether a character belongs to the letter before it: marks, invisible characters, letters that compose."""
    return (
        character > "\u00ac"
        and (unicodedata.category(character) in ("Mn", "Me", "Cf") or unicodedata.combining(character) != 0)
    ) or character in _JOINING


def _letters(text: str, end: int) -> list[tuple[int, int]]:
    found, start = [], 0
    while start < end:
        stop = start + 1
        while stop < end and stop - start < LONGEST_LETTER and _joins(text[stop]):
            stop += 1
        found.append((start, stop))
        start = stop
    return found


def _last_letter(text: str) -> int:
    """The start of the last letter, which more text may still change."""
    if not text or text[-1] <= "\u00ac":
        return max(0, len(text) - 1)
    letters = _letters(text, len(text))
    return letters[-1][0]
