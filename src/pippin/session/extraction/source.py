"""A text that values are read from: which of its parts can be written, and where a written part stands.

Notable here:
- a part is a run of whole words, numbers and marks, so that no name or number is cut; of scripts without spaces each
  character is a word
- line breaks within a paragraph are written as one blank, so that an address over several lines is one value; a blank
  line, and the end of the text, is never crossed
- the texts are those of JSON strings: a grammar of parts is a grammar of JSON
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from functools import cached_property
from typing import Final

from pippin.core.errors import InvalidInput
from pippin.data.text.language import language_of
from pippin.session.extraction.values import (
    Candidate,
    find_dates,
    find_datetimes,
    find_durations,
    find_numbers,
    find_times,
)

# Han, Kana, Hangul jamo, Thai, Lao, Khmer, Burmese: no blanks between words
_UNSPACED: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_PIECE: Final = re.compile(rf"\s+|\d+|[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+|.", re.DOTALL)
_BREAK: Final = "\n\n"  # a piece that no grammar of JSON strings can write
_FINDERS: Final = {
    "date": find_dates,
    "time": find_times,
    "date-time": find_datetimes,
    "number": find_numbers,
    "duration": find_durations,
}


class SourceText:
    """A text to read values from.

    Args:
        text: the text.
        language: tag of its language, which decides how ambiguous dates and numbers are read; None detects it.
        region: a country such as "US", for the same.

    Raises:
        InvalidInput: the text is empty or holds half a character.

    >>> source = SourceText("Dear Ms Roe,\\nyour order 4711 was sent on 3 May 2024.")
    >>> source.find("order 4711")
    [(18, 28)]
    >>> source.find("rder 4711")
    []
    """

    def __init__(self, text: str, *, language: str | None = None, region: str | None = None) -> None:
        if not isinstance(text, str) or not text.strip():
            raise InvalidInput("the text to read from is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(f"the text holds half a character at {error.start}: {error}") from error
        self.text, self.region = text, region
        self.language = language_of(text) if language is None else language
        self._starts: list[int] = []
        self.pieces: list[str] = []
        for found in _PIECE.finditer(text):
            piece = found[0]
            if piece.isspace():
                piece = _BREAK if len(re.findall(r"\r\n|[\n\r\u2028\u2029]", piece)) > 1 else " "
            elif not piece.isprintable() and len(piece) == 1:
                piece = " "
            self._starts.append(found.start())
            self.pieces.append(piece)

    @cached_property
    def grammar(self) -> str:
        """A regular expression of llguidance for the inside of a JSON string: any part of the text."""
        pieces = [each if each == _BREAK else json.dumps(each, ensure_ascii=False)[1:-1] for each in self.pieces]
        return "%regex " + json.dumps({"substring_chunks": pieces}, ensure_ascii=False)

    @cached_property
    def _plain(self) -> tuple[str, list[int]]:
        """The text as it is written, and where each piece begins in it."""
        starts, length = [], 0
        for piece in self.pieces:
            starts.append(length)
            length += len(piece)
        return "".join(self.pieces), starts

    def written(self, start: int, end: int) -> str:
        """How the part between two offsets is written: without blanks around it, line breaks as blanks."""
        first, last = self._piece_at(start), bisect_left(self._starts, end)
        return "".join(self.pieces[first:last]).strip()

    def find(self, written: str) -> list[tuple[int, int]]:
        """Where a written part stands in the text: offsets of all its occurrences between whole words."""
        if not written:
            return []
        plain, starts = self._plain
        found, at = [], plain.find(written)
        while at >= 0:
            first, last = bisect_left(starts, at), bisect_left(starts, at + len(written))
            begins = first < len(starts) and starts[first] == at
            ends = last == len(starts) or starts[last] == at + len(written)
            if begins and ends:
                found.append((self._starts[first], self._starts[last] if last < len(starts) else len(self.text)))
            at = plain.find(written, at + 1)
        return found

    def candidates(self, kind: str) -> list[Candidate]:
        """The values of a kind ("date", "time", "date-time", "number", "duration") in the text."""
        if kind not in self._candidates:
            self._candidates[kind] = _FINDERS[kind](self.text, language=self.language, region=self.region)
        return self._candidates[kind]

    @cached_property
    def _candidates(self) -> dict[str, list[Candidate]]:
        return {}

    def _piece_at(self, offset: int) -> int:
        return max(bisect_right(self._starts, offset) - 1, 0)
