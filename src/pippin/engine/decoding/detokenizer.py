"""Incremental detokenization: text in whole characters only, and no part of a stop string.

Notable here:
- a token may end in the middle of a character; its bytes are buffered until the character is complete
- text that may be the beginning of a stop string is buffered until it is known not to be
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Detokenizer:
    """Turns the bytes of tokens into text that may be shown.

    Attributes:
        stopped: whether a stop string was found.
        text: all text that could be shown so far.
        pending: text that is withheld, since it may begin a stop string.
        rest: the text behind the stop string.

    >>> stream = Detokenizer(stop=["END"])
    >>> [stream.push(part) for part in (b"caf\\xc3", b"\\xa9 E", b"N", b"x EN", b"D!")]
    ['caf', 'é ', '', 'ENx ', '']
    >>> stream.stopped
    True
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stop = tuple(stop)
        self.stopped = False
        self.text = self.pending = self.rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """Add the bytes of one token; return the text that can be shown now."""
        return "" if self.stopped else self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """Return the buffered text; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        rest = self._release(self._decoder.decode(b"", final=True))
        pending, self.pending = self.pending, ""
        self.text += pending
        return rest + pending

    def _release(self, new: str) -> str:
        text = self.pending + new
        cuts = [(at, len(stop)) for stop in self.stop if (at := text.find(stop)) >= 0]
        if cuts:
            at, length = min(cuts)
            self.stopped = True
            ready, self.pending, self.rest = text[:at], "", text[at + length :]
        else:
            keep = max((_overlap(text, stop) for stop in self.stop), default=0)
            ready, self.pending = text[: len(text) - keep], text[len(text) - keep :]
        self.text += ready
        return ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
